//! The messages in the control page: submissions and completions.

use std::sync::Arc;

use gradwire_proto::{Request, TensorName};

/// Where a tensor's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The segment's number.
    pub segment: u32,
    /// The offset in the segment. The daemon checks it against the sizes of segment and tensor.
    pub offset: u64,
}

/// Which call of the worker's library an operation belongs to. Only metrics use it.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Default,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[strum(serialize_all = "kebab-case")]
#[repr(u8)]
pub enum Origin {
    /// The collective itself.
    #[default]
    Plain = 0,
    /// A sparse allreduce that moved rows.
    SparseRows = 1,
    /// A sparse allreduce that moved the dense tensor, because that was smaller.
    SparseDense = 2,
    /// The broadcast or gathering of objects.
    Object = 3,
    /// An allreduce by Adasum.
    Adasum = 4,
    /// What ranks exchange before one of these: sizes, shapes, row counts.
    Count = 5,
}

impl Origin {
    /// Every value, in the order of their numbers.
    pub const ALL: &[Self] = <Self as strum::VariantArray>::VARIANTS;

    /// The value with this number, if there is one.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// The name in metrics.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// The most call sites of a worker (BOUND), and the most bytes of the text of one.
pub const MAX_CALL_SITES: u32 = 4096;
/// See [`MAX_CALL_SITES`].
pub const MAX_CALL_SITE_BYTES: usize = 256;

/// The line of the program that has made a call.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CallSite {
    /// The worker's number for it, below [`MAX_CALL_SITES`]; 0 if it is not known.
    pub number: u32,
    /// Its text, such as `train.py:12 in step`, until the daemon has learned it; then empty.
    pub text: Arc<str>,
}

/// An operation that a worker submits.
#[derive(Debug, Clone, PartialEq)]
pub struct Submission {
    /// The number of this submission; the answer carries the same number.
    pub ticket: u64,
    /// The process set, by number.
    pub process_set: u32,
    /// The tensor's name.
    pub name: TensorName,
    /// What to do.
    pub request: Request,
    /// Larger goes first.
    pub priority: i32,
    /// The rank's contributions, one for each tensor of the request, [`Request::bytes_of`] long. A
    /// scatter uses only the root's, a send and receive only the sender's.
    pub inputs: Vec<Place>,
    /// Where the results go, one for each tensor of the request, with the size of
    /// [`Request::expected`]; if that has no shape, the place is ignored. In place, it is the same
    /// as the input.
    pub outputs: Vec<Place>,
    /// The call that it belongs to.
    pub origin: Origin,
    /// Whether the rank has copied its contributions from ordinary memory. Only metrics use it.
    pub copied: bool,
    /// Where the program has called it. Only reports use it.
    pub site: CallSite,
}

/// The operation of this ticket has succeeded and its output is written. Failures are sent over the
/// socket, because they contain text. For each failed ticket the daemon calls
/// [`CompletionWriter::answered`](super::CompletionWriter::answered) and the worker
/// [`WorkerControl::answered`](super::WorkerControl::answered), so that both counts stay right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The submission's ticket.
    pub ticket: u64,
    /// The number of a new process set; for a join the rank that joined last; otherwise 0.
    pub aux: u64,
}

/// Whether the daemon must be woken after a submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a sleeping daemon sees nothing until its doorbell rings"]
pub enum Doorbell {
    /// The daemon sleeps: write to its eventfd.
    Ring,
    /// The daemon is awake, or somebody else rings.
    Quiet,
}
