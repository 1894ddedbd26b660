//! What a rank asks for under a tensor's name.

use crate::types::{Collective, DType, Rank, ReduceOp, Shape};

/// One rank's request. Ranks agree on a tensor when their requests are equal; scale factors are
/// compared by their bits, so that NaN agrees with itself.
#[derive(Debug, Clone)]
pub struct Request {
    /// What to do.
    pub collective: Collective,
    /// Element type.
    pub dtype: DType,
    /// Dimensions, outermost first.
    pub shape: Shape,
    /// Allreduce: how to reduce. Others carry [`ReduceOp::Sum`].
    pub reduce_op: ReduceOp,
    /// Broadcast: whose tensor everybody gets, as a global rank. Others carry 0.
    pub root: Rank,
    /// Each contribution is multiplied by this first. 1 for none; floats only.
    pub prescale: f64,
    /// The result is multiplied by this. 1 for none; floats only.
    pub postscale: f64,
}

impl Request {
    /// An allreduce without scale factors.
    pub fn allreduce(dtype: DType, shape: Shape, reduce_op: ReduceOp) -> Self {
        Self {
            collective: Collective::Allreduce,
            dtype,
            shape,
            reduce_op,
            root: Rank(0),
            prescale: 1.0,
            postscale: 1.0,
        }
    }

    /// A broadcast of `root`'s tensor.
    pub fn broadcast(dtype: DType, shape: Shape, root: Rank) -> Self {
        Self {
            collective: Collective::Broadcast,
            root,
            ..Self::allreduce(dtype, shape, ReduceOp::Sum)
        }
    }

    /// A barrier: no elements.
    pub fn barrier() -> Self {
        Self {
            collective: Collective::Barrier,
            ..Self::allreduce(DType::U8, Shape::new(&[0]).unwrap_or_default(), ReduceOp::Sum)
        }
    }

    /// Bytes of the tensor.
    pub fn bytes(&self) -> u64 {
        self.shape.elements() * self.dtype.size() as u64
    }

    /// Whether tensors of the two requests may share a piece: all but the shape is equal.
    pub fn fuses_with(&self, other: &Self) -> bool {
        self.collective == other.collective
            && self.dtype == other.dtype
            && self.reduce_op == other.reduce_op
            && self.root == other.root
            && self.prescale.to_bits() == other.prescale.to_bits()
            && self.postscale.to_bits() == other.postscale.to_bits()
    }
}

impl PartialEq for Request {
    fn eq(&self, other: &Self) -> bool {
        self.shape == other.shape && self.fuses_with(other)
    }
}

impl Eq for Request {}
