//! The control page: how a worker asks and how the daemon answers, without a system call unless
//! somebody sleeps.
//!
//! # Layout, version 3
//!
//! One sealed memfd, little endian. Words that different sides write are on cache lines of their
//! own, in pairs of 64 bytes because processors fetch two.
//!
//! ```text
//!  offset  size     written by   what
//!  0       8        worker       magic "GRADWIRE"
//!  8       4        worker       layout version, written last
//!  12      4        worker       process id, for people; never trusted
//!  16      4        worker       words of the submission ring
//!  20      4        worker       entries of the completion ring
//!  128     8        worker       submission tail: words published
//!  256     8        daemon       submission head: words consumed
//!  264     4        both         1 while the daemon sleeps; whoever wakes it writes 0
//!  384     8        daemon       completion tail: entries published
//!  392     4        both         completion epoch: moves with every entry; futex
//!  512     8        worker       completion head: entries consumed
//!  520     4        worker       how many threads wait on the epoch
//!  528     8        worker       the ticket that they wait for; 0: whichever comes
//!  640     4        worker       heartbeats of the worker
//!  768     4        daemon       heartbeats of the daemon
//!  4096    1 MiB    worker       submission ring: records (see below)
//!  +1 MiB  96 KiB   daemon       completion ring: ticket u64, 0 u64, aux u64
//! ```
//!
//! A submission is a record of 8-byte words, at most [`MAX_RECORD_WORDS`] of them: 176 for the
//! longest name and one tensor of the most dimensions, and [`Request::MAX_EXTRA_WORDS`] for lists
//! and the further tensors of a group.
//!
//! ```text
//!  word 0      how many words, this one included
//!  word 1      ticket
//!  word 2      process set u32, priority i32
//!  word 3      collective u8, reduce operation u8, origin u8, 0 u8, root u32
//!  word 4, 5   prescale f64, postscale f64
//!  word 6      bytes of the name u32, entries of the list u32
//!  word 7      tensors u32, at least 1; 0 u32
//!  then        entries of the list u64 each
//!  then        for each tensor:
//!              element type u8, dimensions u8, 0 u48
//!              segment of the input u32, of the output u32
//!              offset of the input u64
//!              offset of the output u64
//!              dimensions u64 each, outermost first
//!  then        the name, filled up with zeros
//! ```
//!
//! At most [`MAX_IN_FLIGHT`] tickets are unanswered at a time, as many as the completion ring has
//! entries: so an answer always has room, and a full ring means that the worker has cheated
//! (BOUND).

mod daemon;
mod page;
mod record;
mod worker;

pub use daemon::{CompletionWriter, DaemonControl, Heartbeats, SubmissionReader};
use gradwire_proto::{Request, TensorName, WireError};
pub use page::{CONTROL_BYTES, LAYOUT_VERSION, SUBMISSION_RING_BYTES};
pub use worker::WorkerControl;

#[cfg(doc)]
use crate::ring::MAX_RECORD_WORDS;
use crate::{ring::Nonsense, segment::SegmentError};

/// The most tickets that a worker may have unanswered at a time (BOUND).
pub const MAX_IN_FLIGHT: u32 = 4096;

/// Where a tensor's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The segment's number.
    pub segment: u32,
    /// The first byte there. The daemon checks it against the segment and the tensor's bytes.
    pub offset: u64,
}

/// Which call of the worker's library an operation is a part of. For metrics: nothing is done
/// differently because of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
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
    /// What ranks tell each other before one of these: sizes, shapes, numbers of rows.
    Count = 5,
}

impl Origin {
    /// Every value, in the order of their numbers.
    pub const ALL: &[Self] = &[
        Self::Plain,
        Self::SparseRows,
        Self::SparseDense,
        Self::Object,
        Self::Adasum,
        Self::Count,
    ];

    /// The value with this number, if there is one.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// The name that people read.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::SparseRows => "sparse-rows",
            Self::SparseDense => "sparse-dense",
            Self::Object => "object",
            Self::Adasum => "adasum",
            Self::Count => "count",
        }
    }
}

/// What a worker asks for.
#[derive(Debug, Clone, PartialEq)]
pub struct Submission {
    /// What the worker calls this operation; the answer carries it.
    pub ticket: u64,
    /// The process set, by number.
    pub process_set: u32,
    /// The tensor's name.
    pub name: TensorName,
    /// What to do.
    pub request: Request,
    /// Larger goes first.
    pub priority: i32,
    /// The rank's contributions, one for each tensor of the request, [`Request::bytes_of`] long.
    /// Of a scatter and a send and receive only the root's or sender's is looked at.
    pub inputs: Vec<Place>,
    /// Where the results go, one for each tensor of the request, as long as
    /// [`Request::expected`] says; where that has no shape it is not looked at. The same as the
    /// input for in place.
    pub outputs: Vec<Place>,
    /// What it is a part of.
    pub origin: Origin,
}

/// The operation of this ticket has succeeded and its output is written. Failures come over the
/// socket, because they have a text; for each of their tickets the daemon calls
/// [`CompletionWriter::answered`] and the worker [`WorkerControl::answered`], so that both go on
/// counting right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The submission's ticket.
    pub ticket: u64,
    /// The number of a new process set; of a join the rank that joined last; otherwise 0.
    pub aux: u64,
}

/// Whether the daemon has to be woken after a submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a sleeping daemon sees nothing until its doorbell rings"]
pub enum Doorbell {
    /// The daemon sleeps: write to its eventfd.
    Ring,
    /// The daemon is awake, or somebody else rings.
    Quiet,
}

/// Why a submission was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The ring has no room now: the daemon has not yet read what is in it.
    #[error(
        "the submission ring of {capacity_bytes} bytes is full; try again when the daemon has read on"
    )]
    Full {
        /// Size of the ring, in bytes.
        capacity_bytes: u64,
    },
    /// Too many operations are unanswered.
    #[error("{limit} operations are unanswered, which is the limit; wait for some of them first")]
    TooMany {
        /// The limit, [`MAX_IN_FLIGHT`].
        limit: u32,
    },
    /// The request contradicts itself; the daemon would refuse it.
    #[error(transparent)]
    Invalid(#[from] WireError),
    /// There is not one place for each tensor.
    #[error("{tensors} tensors need as many inputs and outputs, {inputs} and {outputs} were given")]
    Places {
        /// Tensors of the request.
        tensors: usize,
        /// Inputs that were given.
        inputs: usize,
        /// Outputs that were given.
        outputs: usize,
    },
    /// The control page holds nonsense: something in this process has written over it.
    #[error("the control page is damaged: {0}; look for writes past the end of a tensor")]
    Damaged(Nonsense),
}

/// What a worker wrote that can't be. The daemon gives the worker up: either something in it
/// writes where it must not, or it is hostile (TRUST).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// A counter or a length of the submission ring.
    #[error("submissions: {0}")]
    Submissions(Nonsense),
    /// A counter of the completion ring.
    #[error("completions: {0}")]
    Completions(Nonsense),
    /// The record's length does not fit what it says it holds.
    #[error(
        "a submission of {words} words says that it has {tensors} tensors, a list of {list} and a \
         name of {name} bytes: that does not fit"
    )]
    Size {
        /// Words of the record.
        words: u64,
        /// Tensors.
        tensors: u32,
        /// Entries of the list.
        list: u32,
        /// Bytes of the name.
        name: u32,
    },
    /// The name is not text.
    #[error("the name of submission {ticket} is not UTF-8 from byte {valid} on")]
    Name {
        /// The submission's ticket.
        ticket: u64,
        /// How many bytes of it are text.
        valid: usize,
    },
    /// The request is not one.
    #[error("submission {ticket}: {source}")]
    Request {
        /// The submission's ticket.
        ticket: u64,
        /// Which field, and what is wrong with it.
        source: WireError,
    },
    /// More submissions are unanswered than allowed.
    #[error("more than {limit} operations are unanswered")]
    TooMany {
        /// The limit, [`MAX_IN_FLIGHT`].
        limit: u32,
    },
    /// The completion ring is full, which can't be while the limit is kept.
    #[error("the completion ring is full: the worker takes no answers but goes on asking")]
    CompletionsFull,
}

/// Why a control page could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The memory itself is not usable.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// It has not the size of a control page.
    #[error("a control page has {expected} bytes, this one has {bytes}")]
    Size {
        /// The size it has.
        bytes: u64,
        /// The size it must have, [`CONTROL_BYTES`].
        expected: u64,
    },
    /// It does not begin like a control page.
    #[error("this is not a control page: it begins with {magic:#018x}")]
    Magic {
        /// The first eight bytes.
        magic: u64,
    },
    /// It was laid out by another version.
    #[error(
        "the control page has layout version {found} and this daemon needs {expected}; install the \
         same release of Gradwire in the training environment and on the node"
    )]
    Version {
        /// The version that was found; 0 if it was never finished.
        found: u32,
        /// The version of this crate, [`LAYOUT_VERSION`].
        expected: u32,
    },
    /// Its rings have other sizes than this version's.
    #[error(
        "the control page's rings have {submission_words} words and {completions} entries, which \
         are not those of layout version {version}",
        version = LAYOUT_VERSION
    )]
    Rings {
        /// Words of the submission ring.
        submission_words: u32,
        /// Entries of the completion ring.
        completions: u32,
    },
}
