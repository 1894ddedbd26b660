//! The task of one sweep over memory, as data.

use gradwire_proto::{DType, ReduceOp};

/// The type and the operation of a combination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Combine {
    /// The type of the elements.
    pub dtype: DType,
    /// The operation; [`ReduceOp::Average`] combines as a sum.
    pub op: ReduceOp,
}

/// What turns the combined value into the result for the ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Finish {
    /// The type of the elements.
    pub dtype: DType,
    /// The operation; only [`ReduceOp::Average`] makes a difference.
    pub op: ReduceOp,
    /// How many ranks contributed; 0 counts as 1.
    pub contributors: u32,
    /// The factor for the result; 1 for none.
    pub postscale: f64,
}

impl Finish {
    /// A finish that does nothing: the combined value is the result.
    pub fn none(dtype: DType) -> Self {
        Self { dtype, op: ReduceOp::Sum, contributors: 1, postscale: 1.0 }
    }

    /// Whether the result is the combined value, bit for bit.
    pub fn is_identity(&self) -> bool {
        self.divisor() == 1 && self.postscale == 1.0
    }

    pub(super) fn divisor(&self) -> u32 {
        if self.op == ReduceOp::Average { self.contributors.max(1) } else { 1 }
    }
}

/// How results are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Store {
    /// Through the caches, for results that are read again soon.
    #[default]
    Cached,
    /// Past the caches (non-temporal), where alignment to 64 bytes allows it: for large results
    /// that other processes read; the old content is not read.
    Streaming,
}

/// One sweep.
#[derive(Clone, Copy)]
pub(crate) struct Job<'a> {
    pub(super) combine: Combine,
    pub(super) prescale: f64,
    pub(super) finish: Finish,
    /// The type of the destinations' elements.
    pub(super) result: DType,
    pub(super) inputs: &'a [*const u8],
    pub(super) dsts: &'a [*mut u8],
    pub(super) count: usize,
    pub(super) store: Store,
}
