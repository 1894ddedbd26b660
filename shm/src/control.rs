//! The control page: how a worker asks and how the daemon answers, without a system call unless
//! somebody sleeps.
//!
//! # Layout, version 1
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
//!  640     4        worker       heartbeats of the worker
//!  768     4        daemon       heartbeats of the daemon
//!  4096    1 MiB    worker       submission ring: records (see below)
//!  +1 MiB  96 KiB   daemon       completion ring: ticket u64, status u32 (0), 0 u32, aux u64 (0)
//! ```
//!
//! A submission is a record of 8-byte words, at most 176 of them:
//!
//! ```text
//!  word 0      how many words, this one included
//!  word 1      ticket
//!  word 2      process set u32, priority i32
//!  word 3      collective u8, element type u8, reduce operation u8, dimensions u8, root u32
//!  word 4, 5   prescale f64, postscale f64
//!  word 6, 7   offset of the input u64, of the output u64
//!  word 8      segment of the input u32, of the output u32
//!  word 9      bytes of the name u32, 0 u32
//!  then        dimensions u64 each, outermost first; then the name, filled up with zeros
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

use crate::{ring::Nonsense, segment::SegmentError};

/// The most tickets that a worker may have unanswered at a time (BOUND).
pub const MAX_IN_FLIGHT: u32 = 4096;

/// Where a tensor's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The segment's number.
    pub segment: u32,
    /// The first byte there. The daemon checks it against the segment and the request's bytes.
    pub offset: u64,
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
    /// The rank's contribution.
    pub input: Place,
    /// Where the result goes; the same as `input` for in place.
    pub output: Place,
}

/// The operation of this ticket has succeeded and its output is written. Failures come over the
/// socket, because they have a text; for each of their tickets the daemon calls
/// [`CompletionWriter::answered`] and the worker [`WorkerControl::answered`], so that both go on
/// counting right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The submission's ticket.
    pub ticket: u64,
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
        "a submission of {words} words says that it has {dims} dimensions and a name of {name} \
         bytes"
    )]
    Size {
        /// Words of the record.
        words: u64,
        /// Dimensions.
        dims: u64,
        /// Bytes of the name.
        name: u64,
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
