//! What a rank asks for under a tensor's name.

use crate::types::{Collective, DType, Rank, ReduceOp, Shape};

/// One tensor of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Element type.
    pub dtype: DType,
    /// Dimensions, outermost first.
    pub shape: Shape,
}

impl Part {
    /// Bytes of the tensor.
    pub fn bytes(&self) -> u64 {
        self.shape.elements() * self.dtype.size() as u64
    }
}

/// One rank's request. Two are equal when every field is; scale factors are compared by their bits,
/// so that NaN agrees with itself. [`Request::common`] is the part on which ranks have to agree.
#[derive(Debug, Clone)]
pub struct Request {
    /// What to do.
    pub collective: Collective,
    /// Element type. `U8` where there are no elements.
    pub dtype: DType,
    /// Dimensions, outermost first. Scatter: of the root's tensor; others give the shape of the
    /// result that they have allocated, or `[0]`. Send and receive: of the sender's tensor; the
    /// receiver gives the shape that it has allocated, or `[0]`. `[0]` where there are no elements.
    pub shape: Shape,
    /// How to reduce. Requests that reduce nothing carry [`ReduceOp::Sum`].
    pub reduce_op: ReduceOp,
    /// Broadcast, reduce, gather, scatter: the root; send and receive: the sender; a global rank.
    /// Others carry 0.
    pub root: Rank,
    /// Each contribution is multiplied by this first. 1 for none; in reductions only.
    pub prescale: f64,
    /// The result is multiplied by this. 1 for none; in reductions only.
    pub postscale: f64,
    /// Alltoall: how many of the rows each member of the process set gets, in rank order; empty for
    /// the same number each. Scatter: the same, at the root. Send and receive: the receiver. Adding
    /// a process set: its ranks, ascending. Removing one: its number, and after it
    /// [`Request::GIVE_UP`] if the operations that wait in it are given up. Empty otherwise.
    pub list: Vec<u64>,
    /// The further tensors of a group, which is one request: all of it is done, or nothing. Empty
    /// otherwise.
    pub more: Vec<Part>,
}

impl Request {
    /// The longest [`Request::list`]: as many as a job can have ranks (BOUND).
    pub const MAX_LIST: usize = Rank::MAX as usize;

    /// The name of every join. No other tensor has it.
    pub const JOIN: &str = "join";

    /// A process set is removed although ranks wait there for operations that not all have
    /// submitted. Those ranks receive a failure (TELL).
    pub const GIVE_UP: u64 = 1;

    /// The most tensors of a group (BOUND).
    pub const MAX_PARTS: usize = 1024;

    /// The most bytes of all tensors of a request: no sum of them overflows (BOUND).
    pub const MAX_BYTES: u64 = 1 << 58;

    /// The most words that lists and groups of one request may take in a submission, in numbers of
    /// 8 bytes: the entries of the list, and for each further tensor 5 and its dimensions (BOUND).
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

    /// A request of another collective, with nothing but element type and shape.
    pub fn plain(collective: Collective, dtype: DType, shape: Shape) -> Self {
        Self { collective, ..Self::allreduce(dtype, shape, ReduceOp::Sum) }
    }

    /// A broadcast of `root`'s tensor.
    pub fn broadcast(dtype: DType, shape: Shape, root: Rank) -> Self {
        Self { root, ..Self::plain(Collective::Broadcast, dtype, shape) }
    }

    /// A request without elements: a barrier, a join, the making and removing of process sets.
    pub fn empty(collective: Collective) -> Self {
        Self::plain(collective, DType::U8, Shape::new(&[0]).unwrap_or_default())
    }

    /// A barrier: no elements.
    pub fn barrier() -> Self {
        Self::empty(Collective::Barrier)
    }

    /// How many tensors it has.
    pub fn parts(&self) -> usize {
        1 + self.more.len()
    }

    /// The element type of one of its tensors.
    ///
    /// # Panics
    /// If there are not so many tensors.
    pub fn dtype_of(&self, part: usize) -> DType {
        if part == 0 { self.dtype } else { self.more[part - 1].dtype }
    }

    /// The dimensions of one of its tensors.
    ///
    /// # Panics
    /// If there are not so many tensors.
    pub fn shape_of(&self, part: usize) -> &Shape {
        if part == 0 { &self.shape } else { &self.more[part - 1].shape }
    }

    /// The bytes of one of its tensors.
    ///
    /// # Panics
    /// If there are not so many tensors.
    pub fn bytes_of(&self, part: usize) -> u64 {
        self.shape_of(part).elements() * self.dtype_of(part).size() as u64
    }

    /// Bytes of all its tensors.
    pub fn bytes(&self) -> u64 {
        (0..self.parts()).map(|part| self.bytes_of(part)).sum()
    }

    /// Whether ranks' first dimensions may differ.
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
        match self.collective {
            Collective::Allgather
            | Collective::Gather
            | Collective::Scatter
            | Collective::ReduceScatter
            | Collective::Alltoall => true,
            Collective::Allreduce
            | Collective::Reduce
            | Collective::Broadcast
            | Collective::SendReceive
            | Collective::Barrier
            | Collective::Join
            | Collective::AddProcessSet
            | Collective::RemoveProcessSet => false,
        }
    }

    /// The part of the request that must be the same on all ranks. First dimensions are 0 where
    /// they may differ. The list of an alltoall and a scatter is empty. Where only one rank knows
    /// the shape (scatter, send and receive), it is `[0]`.
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

    /// Whether [`Request::common`] of both is the same; copies nothing.
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

    /// Whether everything that a piece carries is the same.
    fn is_alike(&self, other: &Self) -> bool {
        self.collective == other.collective
            && self.dtype == other.dtype
            && self.reduce_op == other.reduce_op
            && self.prescale.to_bits() == other.prescale.to_bits()
            && self.postscale.to_bits() == other.postscale.to_bits()
    }

    /// Whether this request of a piece fits tensor `part` of `whole`. A piece carries no shape.
    pub fn is_piece_of(&self, whole: &Self, part: usize) -> bool {
        part < whole.parts()
            && self.collective == whole.collective
            && self.dtype == whole.dtype_of(part)
            && self.reduce_op == whole.reduce_op
            && self.prescale.to_bits() == whole.prescale.to_bits()
            && self.postscale.to_bits() == whole.postscale.to_bits()
    }
}

impl PartialEq for Request {
    fn eq(&self, other: &Self) -> bool {
        self.is_alike(other)
            && self.shape == other.shape
            && self.root == other.root
            && self.list == other.list
            && self.more == other.more
    }
}

impl Eq for Request {}
