//! The options of each collective.

use gradwire_proto::{DType, ReduceOp, Shape, TypeError};
use gradwire_shm::control::Origin;

use crate::{process_set::ProcessSet, sizes};

/// The common options of all collectives.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Common {
    pub(crate) name: Option<String>,
    pub(crate) priority: i32,
    pub(crate) process_set: Option<ProcessSet>,
    /// The call that it is a part of.
    pub(crate) origin: Origin,
    /// The kind under which it is counted if it has no name; by default the collective's name.
    pub(crate) kind: Option<&'static str>,
}

/// The kinds of object exchanges. The unnamed exchanges of each kind are counted separately.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, strum::EnumString, strum::IntoStaticStr, strum::VariantNames,
)]
pub enum ObjectKind {
    /// Every rank gets the root's object.
    #[strum(serialize = "broadcast-object")]
    Broadcast,
    /// Every rank gets all ranks' objects.
    #[strum(serialize = "allgather-object")]
    Allgather,
}

impl ObjectKind {
    /// The names of all kinds.
    pub const NAMES: &[&str] = <Self as strum::VariantNames>::VARIANTS;

    /// The name for people.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// The operation and the factors of a reduction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Reduction {
    pub(crate) op: ReduceOp,
    pub(crate) prescale: f64,
    pub(crate) postscale: f64,
}

impl Default for Reduction {
    fn default() -> Self {
        Self { op: ReduceOp::Average, prescale: 1.0, postscale: 1.0 }
    }
}

/// A shape from the caller. An invalid shape is reported when it is used.
pub(crate) type GivenShape = Option<Result<Shape, TypeError>>;

macro_rules! common {
    (named $options:ty) => {
        impl $options {
            /// The default options, with a name.
            ///
            /// The name pairs the operation with those of the other ranks. Operations without a
            /// name are paired by their order: the third unnamed allreduce of a process set with
            /// the third one of every other rank. So several threads need names, because their
            /// calls have no order that all ranks share. While an unnamed operation of one thread
            /// is in flight, an unnamed one of the same kind from another thread is an error.
            pub fn named(name: impl Into<String>) -> Self {
                Self::default().name(name)
            }
        }

        common!(name $options);
    };
    (name $options:ty) => {
        impl $options {
            /// The operation's name. It must be the same on all ranks, and may be in flight only
            /// once at a time.
            pub fn name(mut self, name: impl Into<String>) -> Self {
                self.common.name = Some(name.into());
                self
            }
        }

        common!($options);
    };
    ($options:ty) => {
        impl $options {
            /// The priority. Waiting operations with larger values go first. The default is 0.
            pub fn priority(mut self, priority: i32) -> Self {
                self.common.priority = priority;
                self
            }

            /// The ranks that take part. The default is all ranks of the job.
            pub fn process_set(mut self, set: &ProcessSet) -> Self {
                self.common.process_set = Some(set.clone());
                self
            }
        }
    };
}

macro_rules! reduction {
    ($options:ty) => {
        impl $options {
            /// The reduction. The default is the average.
            pub fn op(mut self, op: ReduceOp) -> Self {
                self.reduction.op = op;
                self
            }

            /// A factor for each rank's tensor before the reduction. Integers are multiplied in f64
            /// and truncated. Booleans and bitwise operations accept no factor.
            pub fn prescale(mut self, factor: f64) -> Self {
                self.reduction.prescale = factor;
                self
            }

            /// A factor for the result, with the rules of [`Self::prescale`].
            pub fn postscale(mut self, factor: f64) -> Self {
                self.reduction.postscale = factor;
                self
            }
        }
    };
}

macro_rules! rooted {
    ($options:ty, $constructor:ident, $doc:literal) => {
        impl $options {
            #[doc = $doc]
            pub fn $constructor(root: u32) -> Self {
                Self { root, ..Self::default() }
            }
        }
    };
}

macro_rules! tagged {
    ($options:ty) => {
        impl $options {
            /// Distinguishes this message from others between the two ranks. The default is 0.
            pub fn tag(mut self, tag: u32) -> Self {
                self.tag = tag;
                self
            }
        }
    };
}

macro_rules! result_type {
    ($options:ty) => {
        impl $options {
            /// The element type, if this rank gives no tensor and the result is a
            /// [`crate::Buffer`].
            pub fn dtype(mut self, dtype: DType) -> Self {
                self.dtype = Some(dtype);
                self
            }

            /// The shape of this rank's result, if it is known. It saves a round trip to the
            /// daemon. A wrong shape does no harm.
            pub fn expecting(mut self, dims: &[usize]) -> Self {
                self.expecting = Some(sizes::shape(dims));
                self
            }
        }
    };
}

/// Options of an allreduce; by default the average.
#[derive(Debug, Clone, PartialEq, Default)]
#[must_use]
pub struct AllreduceOptions {
    pub(crate) common: Common,
    pub(crate) reduction: Reduction,
}
common!(named AllreduceOptions);
reduction!(AllreduceOptions);

/// Options of a reduce to one rank; by default the average, to rank 0.
#[derive(Debug, Clone, PartialEq, Default)]
#[must_use]
pub struct ReduceOptions {
    pub(crate) common: Common,
    pub(crate) reduction: Reduction,
    pub(crate) root: u32,
}
common!(name ReduceOptions);
reduction!(ReduceOptions);

rooted!(ReduceOptions, to_rank, "Rank `root` gets the result.");

/// Options of a reducescatter; by default the average.
#[derive(Debug, Clone, PartialEq, Default)]
#[must_use]
pub struct ReduceScatterOptions {
    pub(crate) common: Common,
    pub(crate) reduction: Reduction,
}
common!(named ReduceScatterOptions);
reduction!(ReduceScatterOptions);

/// Options of a broadcast of a tensor or an object; by default from rank 0.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use]
pub struct BroadcastOptions {
    pub(crate) common: Common,
    pub(crate) root: u32,
}
common!(name BroadcastOptions);

rooted!(BroadcastOptions, from_rank, "Rank `root` gives the tensor or the object.");

/// Name, priority and process set of an allgather.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use]
pub struct AllgatherOptions {
    pub(crate) common: Common,
    /// What the ranks do with the rows afterwards, on which they must agree.
    pub(crate) op: Option<ReduceOp>,
}
common!(named AllgatherOptions);

impl AllgatherOptions {
    /// For rows that are bytes of objects which the program serializes itself. Unnamed, they are
    /// counted with other exchanges of this kind. The metrics show them as objects.
    pub fn objects(mut self, kind: ObjectKind) -> Self {
        self.common.origin = Origin::Object;
        self.common.kind = Some(kind.name());
        self
    }

    /// For rows that the program reduces itself. The call fails if the ranks give other reductions.
    pub fn reduced_by_caller(mut self, op: ReduceOp) -> Self {
        self.op = Some(op);
        self
    }
}

/// Options of a gather; by default to rank 0.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use]
pub struct GatherOptions {
    pub(crate) common: Common,
    pub(crate) root: u32,
}
common!(name GatherOptions);

rooted!(GatherOptions, to_rank, "Rank `root` gets all rows.");

/// Options of a scatter; by default from rank 0.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use]
pub struct ScatterOptions {
    pub(crate) common: Common,
    pub(crate) root: u32,
    pub(crate) splits: Vec<u64>,
    pub(crate) dtype: Option<DType>,
    pub(crate) expecting: GivenShape,
}
common!(name ScatterOptions);

rooted!(ScatterOptions, from_rank, "Rank `root` gives the rows.");
result_type!(ScatterOptions);

impl ScatterOptions {
    /// The number of rows for each member, in rank order; by default an even split. Only the root's
    /// splits are used.
    pub fn splits(mut self, rows: &[usize]) -> Self {
        self.splits = sizes::to_wire(rows).to_vec();
        self
    }
}

/// Options of an alltoall.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use]
pub struct AlltoallOptions {
    pub(crate) common: Common,
    pub(crate) splits: Vec<u64>,
    pub(crate) leaves_rest: bool,
}
common!(named AlltoallOptions);

impl AlltoallOptions {
    /// The number of this rank's rows for each member, in rank order; by default an even split.
    /// Together they are all rows.
    pub fn splits(mut self, rows: &[usize]) -> Self {
        self.splits = sizes::to_wire(rows).to_vec();
        self
    }

    /// The splits may leave rows at the end, which nobody gets.
    pub fn leave_rest(mut self) -> Self {
        self.leaves_rest = true;
        self
    }
}

/// Options of a send: the receiver and a tag.
///
/// Messages between two ranks with the same tag arrive in the order in which they were sent, and up
/// to 64 may be in flight. Messages with different tags don't wait for each other. A rank may use
/// up to 65536 pairs of a peer and a tag.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct SendOptions {
    pub(crate) common: Common,
    pub(crate) peer: u32,
    pub(crate) tag: u32,
}
common!(SendOptions);

tagged!(SendOptions);

impl SendOptions {
    /// Sends to rank `rank`.
    pub fn to_rank(rank: u32) -> Self {
        Self { common: Common::default(), peer: rank, tag: 0 }
    }
}

/// Options of a receive: the sender and a tag. For tags see [`SendOptions`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct ReceiveOptions {
    pub(crate) common: Common,
    pub(crate) peer: u32,
    pub(crate) tag: u32,
    pub(crate) dtype: Option<DType>,
    pub(crate) expecting: GivenShape,
}
common!(ReceiveOptions);

tagged!(ReceiveOptions);
result_type!(ReceiveOptions);

impl ReceiveOptions {
    /// Receives from rank `rank`.
    pub fn from_rank(rank: u32) -> Self {
        Self { common: Common::default(), peer: rank, tag: 0, dtype: None, expecting: None }
    }
}

/// Name, priority and process set of a barrier.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use]
pub struct BarrierOptions {
    pub(crate) common: Common,
}
common!(named BarrierOptions);

/// Priority and process set of a join.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use]
pub struct JoinOptions {
    pub(crate) common: Common,
}
common!(JoinOptions);

/// Options of a sparse allreduce; by default the average.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct SparseOptions {
    pub(crate) common: Common,
    pub(crate) op: ReduceOp,
}
common!(named SparseOptions);

impl Default for SparseOptions {
    fn default() -> Self {
        Self { common: Common::default(), op: ReduceOp::Average }
    }
}

impl SparseOptions {
    /// The sum or the average. The average is over all ranks that take part, with or without the
    /// row.
    pub fn op(mut self, op: ReduceOp) -> Self {
        self.op = op;
        self
    }
}

/// Name, priority and process set of an Adasum.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use]
pub struct AdasumOptions {
    pub(crate) common: Common,
}
common!(named AdasumOptions);
