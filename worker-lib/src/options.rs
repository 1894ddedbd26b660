//! The options of each collective.

use gradwire_proto::{DType, ReduceOp, Shape, TypeError};
use gradwire_shm::control::Origin;

use crate::process_set::ProcessSet;

/// The options that all collectives have.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Common {
    pub(crate) name: Option<String>,
    pub(crate) priority: i32,
    pub(crate) process_set: Option<ProcessSet>,
    /// What it is a part of; not a caller's affair.
    pub(crate) origin: Origin,
    /// As what it is counted where it has no name; the collective's own where this is not set.
    pub(crate) kind: Option<&'static str>,
}

/// The exchanges of objects, by which those without a name are counted.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, strum::EnumString, strum::IntoStaticStr, strum::VariantNames,
)]
pub enum ObjectKind {
    /// The root's object for every rank.
    #[strum(serialize = "broadcast-object")]
    Broadcast,
    /// All ranks' objects for every rank.
    #[strum(serialize = "allgather-object")]
    Allgather,
}

impl ObjectKind {
    /// The names of all of them.
    pub const NAMES: &[&str] = <Self as strum::VariantNames>::VARIANTS;

    /// The name that people read.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// How a reduction reduces.
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

/// A shape as a caller gives it; an impossible one is reported where it is used.
pub(crate) type GivenShape = Option<Result<Shape, TypeError>>;

fn shape(dims: &[usize]) -> GivenShape {
    Some(Shape::new(&dims.iter().map(|&dim| dim as u64).collect::<Vec<_>>()))
}

macro_rules! common {
    (named $options:ty) => {
        impl $options {
            /// The default under a name.
            pub fn named(name: impl Into<String>) -> Self {
                Self::default().name(name)
            }
        }

        common!(name $options);
    };
    (name $options:ty) => {
        impl $options {
            /// A name of its own, the same on all ranks; in flight once at a time.
            pub fn name(mut self, name: impl Into<String>) -> Self {
                self.common.name = Some(name.into());
                self
            }
        }

        common!($options);
    };
    ($options:ty) => {
        impl $options {
            /// What has waited goes in the order of priorities, larger ones first. 0 where not set.
            pub fn priority(mut self, priority: i32) -> Self {
                self.common.priority = priority;
                self
            }

            /// The ranks that take part; all of the job where not set.
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
            /// How the ranks' tensors become one. The average where not set.
            pub fn op(mut self, op: ReduceOp) -> Self {
                self.reduction.op = op;
                self
            }

            /// A factor for each rank's tensor before it is reduced. What it makes of an integer is
            /// computed in f64 and truncated. Truth values and bitwise operations take none.
            pub fn prescale(mut self, factor: f64) -> Self {
                self.reduction.prescale = factor;
                self
            }

            /// A factor for the result; as for [`Self::prescale`].
            pub fn postscale(mut self, factor: f64) -> Self {
                self.reduction.postscale = factor;
                self
            }
        }
    };
}

/// How an allreduce reduces: the average by default.
#[derive(Debug, Clone, PartialEq, Default)]
#[must_use]
pub struct AllreduceOptions {
    pub(crate) common: Common,
    pub(crate) reduction: Reduction,
}
common!(named AllreduceOptions);
reduction!(AllreduceOptions);

/// How a reduction to one rank reduces: the average by default.
#[derive(Debug, Clone, PartialEq, Default)]
#[must_use]
pub struct ReduceOptions {
    pub(crate) common: Common,
    pub(crate) reduction: Reduction,
    pub(crate) root: u32,
}
common!(name ReduceOptions);
reduction!(ReduceOptions);

impl ReduceOptions {
    /// Rank `root` gets the result.
    pub fn to_rank(root: u32) -> Self {
        Self { root, ..Self::default() }
    }
}

/// How a reducescatter reduces: the average by default.
#[derive(Debug, Clone, PartialEq, Default)]
#[must_use]
pub struct ReduceScatterOptions {
    pub(crate) common: Common,
    pub(crate) reduction: Reduction,
}
common!(named ReduceScatterOptions);
reduction!(ReduceScatterOptions);

/// Whose tensor, or whose object, a broadcast gives to all ranks: rank 0's by
/// default.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use]
pub struct BroadcastOptions {
    pub(crate) common: Common,
    pub(crate) root: u32,
}
common!(name BroadcastOptions);

impl BroadcastOptions {
    /// Rank `root`'s tensor.
    pub fn from_rank(root: u32) -> Self {
        Self { root, ..Self::default() }
    }
}

/// Name, priority and process set of an allgather.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use]
pub struct AllgatherOptions {
    pub(crate) common: Common,
}
common!(named AllgatherOptions);

impl AllgatherOptions {
    /// The rows are bytes of objects that the program packs itself. They are counted with others of
    /// their kind where they have no name, and shown as objects in the metrics.
    pub fn objects(mut self, kind: ObjectKind) -> Self {
        self.common.origin = Origin::Object;
        self.common.kind = Some(kind.name());
        self
    }
}

/// Who gathers: rank 0 by default.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use]
pub struct GatherOptions {
    pub(crate) common: Common,
    pub(crate) root: u32,
}
common!(name GatherOptions);

impl GatherOptions {
    /// Rank `root` gets all rows.
    pub fn to_rank(root: u32) -> Self {
        Self { root, ..Self::default() }
    }
}

/// Whose rows are given out: rank 0's by default.
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

impl ScatterOptions {
    /// Rank `root`'s rows are given out.
    pub fn from_rank(root: u32) -> Self {
        Self { root, ..Self::default() }
    }

    /// How many rows each member gets, in the order of ranks; the same number each where not set.
    /// Looked at on the root only.
    pub fn splits(mut self, rows: &[u64]) -> Self {
        self.splits = rows.to_vec();
        self
    }

    /// The element type, on a rank that gives no tensor and asks for a [`crate::Buffer`].
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// The shape of this rank's result, where it is known: it saves asking. A wrong guess does no
    /// harm.
    pub fn expecting(mut self, dims: &[usize]) -> Self {
        self.expecting = shape(dims);
        self
    }
}

/// How an alltoall splits.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use]
pub struct AlltoallOptions {
    pub(crate) common: Common,
    pub(crate) splits: Vec<u64>,
}
common!(named AlltoallOptions);

impl AlltoallOptions {
    /// How many of this rank's rows each member gets, in the order of ranks; the same number each
    /// where not set.
    pub fn splits(mut self, rows: &[u64]) -> Self {
        self.splits = rows.to_vec();
        self
    }
}

/// Who is sent to.
///
/// Messages between two ranks with the same tag arrive in the order in which they were sent, and up
/// to 64 may be on their way; with different tags they don't wait for each other. A rank may use
/// 65536 different pairs of a peer and a tag.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct SendOptions {
    pub(crate) common: Common,
    pub(crate) peer: u32,
    pub(crate) tag: u32,
}
common!(SendOptions);

impl SendOptions {
    /// Rank `rank` receives.
    pub fn to_rank(rank: u32) -> Self {
        Self { common: Common::default(), peer: rank, tag: 0 }
    }

    /// Distinguishes this message from others between the two; 0 where not set.
    pub fn tag(mut self, tag: u32) -> Self {
        self.tag = tag;
        self
    }
}

/// Who is received from. Of tags: [`SendOptions`].
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

impl ReceiveOptions {
    /// Rank `rank` sends.
    pub fn from_rank(rank: u32) -> Self {
        Self { common: Common::default(), peer: rank, tag: 0, dtype: None, expecting: None }
    }

    /// Distinguishes this message from others between the two; 0 where not set.
    pub fn tag(mut self, tag: u32) -> Self {
        self.tag = tag;
        self
    }

    /// The element type, where a [`crate::Buffer`] is asked for.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// The shape of the message, where it is known: it saves asking. A wrong guess does no harm.
    pub fn expecting(mut self, dims: &[usize]) -> Self {
        self.expecting = shape(dims);
        self
    }
}

/// Name, priority and process set of a barrier.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use]
pub struct BarrierOptions {
    pub(crate) common: Common,
}
common!(named BarrierOptions);

/// Where a rank has no more data.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use]
pub struct JoinOptions {
    pub(crate) common: Common,
}
common!(JoinOptions);

/// How a sparse allreduce reduces: the sum, or by default the average.
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
    /// The sum, or the average over all ranks that take part, whether they have the row or not.
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
