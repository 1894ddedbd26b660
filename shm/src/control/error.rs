//! Errors of a control page and of its contents.

use gradwire_proto::WireError;

use crate::{ring::Nonsense, segment::SegmentError};

/// The version of the layout. Two sides with different versions cannot share a page.
pub const LAYOUT_VERSION: u32 = 9;

/// Why a submission was not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The ring has no room: the daemon has not read its contents yet.
    #[error(
        "the submission ring of {capacity_bytes} bytes is full; try again when the daemon has read \
         some of it"
    )]
    Full {
        /// Size of the ring, in bytes.
        capacity_bytes: u64,
    },
    /// Too many operations are unanswered.
    #[error(
        "{limit} operations are in flight, which is the limit; wait for some of them first, or \
         raise worker.max_in_flight (GRADWIRE_WORKER__MAX_IN_FLIGHT)"
    )]
    TooMany {
        /// The limit.
        limit: u32,
    },
    /// The request contradicts itself; the daemon would refuse it.
    #[error(transparent)]
    Invalid(#[from] WireError),
    /// The number of places differs from the number of tensors.
    #[error("{tensors} tensors need as many inputs and outputs, but have {inputs} and {outputs}")]
    Places {
        /// Tensors of the request.
        tensors: usize,
        /// Inputs that were given.
        inputs: usize,
        /// Outputs that were given.
        outputs: usize,
    },
    /// The control page is damaged: code in this process has overwritten it.
    #[error("the control page is damaged: {0}; look for writes past the end of a tensor")]
    Damaged(Nonsense),
}

/// Impossible data from a worker. The daemon gives the worker up: it either has a stray write or is
/// hostile (TRUST).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// A counter or a length of the submission ring.
    #[error("submissions: {0}")]
    Submissions(Nonsense),
    /// A counter of the completion ring.
    #[error("completions: {0}")]
    Completions(Nonsense),
    /// The record's length does not fit its contents.
    #[error(
        "a submission of {words} words claims {tensors} tensors, a list of {list} entries and a \
         name of {name} bytes, which does not match its length"
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
    /// The call site has an impossible number or text.
    #[error("submission {ticket} has a call site with number {number} and {bytes} bytes of text")]
    CallSite {
        /// The submission's ticket.
        ticket: u64,
        /// The number.
        number: u32,
        /// Bytes of the text.
        bytes: usize,
    },
    /// The name is not text.
    #[error("the name of submission {ticket} is not valid UTF-8 from byte {valid} on")]
    Name {
        /// The submission's ticket.
        ticket: u64,
        /// The length of its valid part, in bytes.
        valid: usize,
    },
    /// The request is not valid.
    #[error("submission {ticket}: {source}")]
    Request {
        /// The submission's ticket.
        ticket: u64,
        /// Which field, and what is wrong with it.
        source: WireError,
    },
    /// More submissions are unanswered than allowed.
    #[error(
        "more than {limit} operations are unanswered, which is the limit of this daemon \
         (worker.max_in_flight)"
    )]
    TooMany {
        /// The limit.
        limit: u32,
    },
    /// The completion ring is full: the worker has not read its answers. Nothing is wrong, but the
    /// answer must take another way.
    #[error("the completion ring is full: the worker has not read its answers")]
    CompletionsFull,
}

/// Why a control page could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The memory itself is not usable.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// Its size is not that of a control page.
    #[error(
        "this daemon expects a control page of {expected} bytes, this one has {bytes}; install the \
         same release of Gradwire in the training environment and on the node"
    )]
    Size {
        /// The size it has.
        bytes: u64,
        /// The size it must have, [`CONTROL_BYTES`](super::CONTROL_BYTES).
        expected: u64,
    },
    /// It does not begin with the magic number of a control page.
    #[error("not a control page: it begins with {magic:#018x}")]
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
        /// The version found; 0 if the layout was never finished.
        found: u32,
        /// The version of this crate, [`LAYOUT_VERSION`].
        expected: u32,
    },
    /// Its ring sizes are not those of this version.
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
