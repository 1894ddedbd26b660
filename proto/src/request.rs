//! What a rank requests for a tensor.

use crate::types::{Collective, DType, Rank, ReduceOp, Shape};

/// One tensor of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Element type.
    pub dtype: DType,
    /// Dimensions, outermost first.
    pub shape: Shape,
}

/// One rank's request. Scale factors are compared by their bits, so that NaN equals itself.
/// [`Request::common`] is the part on which ranks must agree.
#[derive(Debug, Clone)]
pub struct Request {
    /// The collective.
    pub collective: Collective,
    /// Element type. `U8` without elements.
    pub dtype: DType,
    /// Dimensions, outermost first; `[0]` without elements. Scatter: of the root's tensor; the
    /// others give the shape of the result that they have allocated, or `[0]`. Send and receive: of
    /// the sender's tensor; the receiver gives the shape that it has allocated, or `[0]`.
    pub shape: Shape,
    /// How to reduce; [`ReduceOp::Sum`] if nothing is reduced.
    pub reduce_op: ReduceOp,
    /// Broadcast, reduce, gather, scatter: the root. Send and receive: the sender. Otherwise 0. A
    /// global rank.
    pub root: Rank,
    /// The factor for each contribution; 1 except in reductions.
    pub prescale: f64,
    /// The factor for the result; 1 except in reductions.
    pub postscale: f64,
    /// Alltoall: the number of rows for each member of the process set, in rank order; empty for an
    /// even split. Scatter: the same, at the root. Send and receive: the receiver. Adding a process
    /// set: its ranks, ascending. Removing one: its number, then [`Request::GIVE_UP`] if operations
    /// that wait in it are given up. Allreduce: the number of elements of the whole tensor, if this
    /// is the first of several requests that reduce it. Otherwise empty.
    pub list: Vec<u64>,
    /// The further tensors of a group. All tensors of a group succeed, or none.
    pub more: Vec<Part>,
}

impl Request {
    /// The longest [`Request::list`]: the most ranks of a job (BOUND).
    pub const MAX_LIST: usize = Rank::MAX as usize;

    /// The name of every join, which no other tensor may have.
    pub const JOIN: &str = "join";

    /// The name of the barrier in which ranks wait for each other when they start.
    pub const INIT: &str = "init";

    /// Removes a process set although ranks wait in it for operations that not all ranks have
    /// submitted. The waiting ranks receive a failure (TELL).
    pub const GIVE_UP: u64 = 1;

    /// The most tensors of a group (BOUND).
    pub const MAX_PARTS: usize = 1024;

    /// The most bytes of all tensors of a request, so that no sum overflows (BOUND).
    pub const MAX_BYTES: u64 = 1 << 58;

    /// The most words of 8 bytes for the list and the group of a request in a submission: one per
    /// entry of the list, and for each further tensor 5 and its dimensions (BOUND).
    pub const MAX_EXTRA_WORDS: usize = 8192;

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
            list: Vec::new(),
            more: Vec::new(),
        }
    }

    /// A request of any collective, with defaults for all other fields.
    pub fn plain(collective: Collective, dtype: DType, shape: Shape) -> Self {
        Self { collective, ..Self::allreduce(dtype, shape, ReduceOp::Sum) }
    }

    /// A broadcast of `root`'s tensor.
    pub fn broadcast(dtype: DType, shape: Shape, root: Rank) -> Self {
        Self { root, ..Self::plain(Collective::Broadcast, dtype, shape) }
    }

    /// A request without elements: for a barrier, a join, or adding and removing process sets.
    pub fn empty(collective: Collective) -> Self {
        Self::plain(collective, DType::U8, Shape::new(&[0]).unwrap_or_default())
    }

    /// A barrier.
    pub fn barrier() -> Self {
        Self::empty(Collective::Barrier)
    }

    /// The number of its tensors.
    pub fn parts(&self) -> usize {
        1 + self.more.len()
    }

    /// The element type of one of its tensors. Panics if `part` is out of range.
    pub fn dtype_of(&self, part: usize) -> DType {
        if part == 0 { self.dtype } else { self.more[part - 1].dtype }
    }

    /// The dimensions of one of its tensors. Panics if `part` is out of range.
    pub fn shape_of(&self, part: usize) -> &Shape {
        if part == 0 { &self.shape } else { &self.more[part - 1].shape }
    }

    /// The bytes of one of its tensors. Panics if `part` is out of range.
    pub fn bytes_of(&self, part: usize) -> u64 {
        self.shape_of(part).elements() * self.dtype_of(part).size() as u64
    }

    /// The bytes of all its tensors.
    pub fn bytes(&self) -> u64 {
        (0..self.parts()).map(|part| self.bytes_of(part)).sum()
    }

    /// Whether the first dimension may differ between ranks.
    pub fn has_free_rows(&self) -> bool {
        matches!(
            self.collective,
            Collective::Allgather
                | Collective::Gather
                | Collective::Scatter
                | Collective::Alltoall
                | Collective::SendReceive
        )
    }

    /// Whether each of its tensors consists of several flows ([`Agreed`](crate::Agreed)).
    pub fn has_many_flows(&self) -> bool {
        matches!(
            self.collective,
            Collective::Allgather
                | Collective::Gather
                | Collective::Scatter
                | Collective::ReduceScatter
                | Collective::Alltoall
        )
    }

    /// The part of the request that must be the same on all ranks. First dimensions are 0 where
    /// they may differ. The list of an alltoall or scatter is empty. The shape is `[0]` if only one
    /// rank knows it (scatter, send and receive).
    pub fn common(&self) -> Self {
        let free = |shape: &Shape| shape.with_rows(0).unwrap_or_default();
        let mut common = self.clone();
        match self.collective {
            Collective::Allgather | Collective::Gather | Collective::Alltoall => {
                common.shape = free(&self.shape);
                common.more.iter_mut().for_each(|part| part.shape = free(&part.shape));
            }
            Collective::Scatter | Collective::SendReceive => {
                common.shape = free(&Shape::default());
            }
            _ => {}
        }
        if matches!(self.collective, Collective::Alltoall | Collective::Scatter) {
            common.list.clear();
        }
        common
    }

    /// Whether [`Request::common`] is the same for both; copies nothing.
    pub fn agrees_with(&self, other: &Self) -> bool {
        let no_shape = matches!(self.collective, Collective::Scatter | Collective::SendReceive);
        let no_list = matches!(self.collective, Collective::Alltoall | Collective::Scatter);
        let any_rows = matches!(
            self.collective,
            Collective::Allgather | Collective::Gather | Collective::Alltoall
        );
        let alike = |one: &Shape, two: &Shape| {
            one == two || (any_rows && one.dims().iter().skip(1).eq(two.dims().iter().skip(1)))
        };
        self.is_alike(other)
            && self.dtype == other.dtype
            && self.root == other.root
            && (no_shape || alike(&self.shape, &other.shape))
            && (no_list || self.list == other.list)
            && self.more.len() == other.more.len()
            && self
                .more
                .iter()
                .zip(&other.more)
                .all(|(one, two)| one.dtype == two.dtype && alike(&one.shape, &two.shape))
    }

    /// Whether both do the same, for any tensors.
    fn is_alike(&self, other: &Self) -> bool {
        self.collective == other.collective
            && self.reduce_op == other.reduce_op
            && self.prescale.to_bits() == other.prescale.to_bits()
            && self.postscale.to_bits() == other.postscale.to_bits()
    }

    /// Whether this request of a piece fits tensor `part` of `whole`. A piece has no shape.
    pub fn is_piece_of(&self, whole: &Self, part: usize) -> bool {
        part < whole.parts() && self.is_alike(whole) && self.dtype == whole.dtype_of(part)
    }
}

impl PartialEq for Request {
    fn eq(&self, other: &Self) -> bool {
        self.is_alike(other)
            && self.dtype == other.dtype
            && self.shape == other.shape
            && self.root == other.root
            && self.list == other.list
            && self.more == other.more
    }
}

impl Eq for Request {}
