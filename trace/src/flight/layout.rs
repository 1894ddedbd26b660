//! What is where in the memory of a recording.
//!
//! # Layout, version 1
//!
//! Words of 8 bytes, little endian. One thread writes an operation when it is submitted. Others add
//! to it while it is in flight, and find it by its ticket. A slot has the number of its contents in
//! its first word, which is 0 while the slot is written: so a reader knows a slot that is not
//! whole.
//!
//! ```text
//!  word    words          what
//!  0       1              magic "GRADFLY1"
//!  1       1              ranks of the node
//!  2       1              rank of local rank 0
//!  3       1              number of the node; before the world has formed its place in the order
//!  4       1              nodes of the job; 0 before the world has formed
//!  5       1              ranks of the job
//!  6       1              epoch
//!  7       1              ns to add to a time for the coordinator's clock, signed
//!  8       1              its largest error in ns; all ones if it is not known
//!  9       2              ns since 1970, and the monotonic clock at that time
//!  11      1              process id of the daemon
//!  12      1              events so far
//!  13      1              ns of the monotonic clock when the memory was last saved; 0: never
//!  14      1              when the failure was recorded
//!  16      16             job
//!  32      32             host
//!  64      448            the failure that ended the job, as JSON; empty while there is none
//!  512     3584           process sets: number u32, ranks u32, then the ranks, two in a word
//!  4096    1024 × 64      events: number, ns, level, text
//!  69632   ranks × 65600  a rank: 64 words about it, then 1024 × 64 for operations
//!
//!  a rank:        operations so far, process id, since when it is attached in ns,
//!                 since when it has left or ended in ns
//!  an operation:  0 ticket; ns when it was 1 submitted, 2 announced, 3 ordered, 4 begun, 5 ended;
//!                 6 sequence number + 1, or 0; 7 bytes; 8 collective u8, element type u8, reduce
//!                 operation u8, outcome u8, dimensions u8, 0 u8, tensors u16; 9 process set u32,
//!                 root u32; 10 its number among those of the rank, from 1; 11 the receiver of a
//!                 message; 12 the first 8 dimensions; 20 name; 43 call site
//! ```
//!
//! A text is its length in bytes, and then the bytes. If it is too long, its end is kept; of an
//! event's text, the start.

/// How many operations of a rank, and how many events of a daemon are kept (BOUND).
pub const KEPT: usize = 1024;

/// The most dimensions of a shape that are kept.
pub const MAX_DIMS: usize = 8;

/// Tells a recording from another file, and says its version.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"GRADFLY1");

/// Words of an event or operation.
pub(super) const SLOT: usize = 64;

pub(super) const EVENTS: usize = 4096;
pub(super) const RANKS: usize = EVENTS + KEPT * SLOT;
pub(super) const RANK_WORDS: usize = SLOT + KEPT * SLOT;

/// Words of the header.
pub(super) mod header {
    use std::ops::Range;

    pub(crate) const RANKS: usize = 1;
    pub(crate) const FIRST_RANK: usize = 2;
    pub(crate) const NODE: usize = 3;
    pub(crate) const NODES: usize = 4;
    pub(crate) const SIZE: usize = 5;
    pub(crate) const EPOCH: usize = 6;
    pub(crate) const TO_COMMON: usize = 7;
    pub(crate) const ERROR: usize = 8;
    pub(crate) const UNIX: usize = 9;
    pub(crate) const UNIX_AT: usize = 10;
    pub(crate) const PID: usize = 11;
    pub(crate) const EVENTS: usize = 12;
    pub(crate) const SAVED: usize = 13;
    pub(crate) const FAILED: usize = 14;
    pub(crate) const JOB: Range<usize> = 16..32;
    pub(crate) const HOST: Range<usize> = 32..64;
    pub(crate) const FAILURE: Range<usize> = 64..512;
    pub(crate) const SETS: Range<usize> = 512..super::EVENTS;
}

/// Words of a rank.
pub(super) mod rank {
    pub(crate) const COUNT: usize = 0;
    pub(crate) const PID: usize = 1;
    pub(crate) const ATTACHED: usize = 2;
    pub(crate) const GONE: usize = 3;
}

/// Words of an operation.
pub(super) mod operation {
    use std::ops::Range;

    pub(crate) const TICKET: usize = 0;
    pub(crate) const SUBMITTED: usize = 1;
    pub(crate) const ANNOUNCED: usize = 2;
    pub(crate) const ORDERED: usize = 3;
    pub(crate) const BEGUN: usize = 4;
    pub(crate) const ENDED: usize = 5;
    pub(crate) const SEQUENCE: usize = 6;
    pub(crate) const BYTES: usize = 7;
    pub(crate) const KINDS: usize = 8;
    pub(crate) const SET: usize = 9;
    pub(crate) const NUMBER: usize = 10;
    pub(crate) const PEER: usize = 11;
    pub(crate) const DIMS: usize = 12;
    pub(crate) const NAME: Range<usize> = 20..43;
    pub(crate) const SITE: Range<usize> = 43..super::SLOT;
}

/// Words of an event.
pub(super) mod event {
    use std::ops::Range;

    pub(crate) const AT: usize = 1;
    pub(crate) const LEVEL: usize = 2;
    pub(crate) const TEXT: Range<usize> = 3..super::SLOT;
}

/// How an operation has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Outcome {
    /// It has not.
    InFlight = 0,
    /// Its result was published.
    Done = 1,
    /// It alone has failed.
    Failed = 2,
}

impl Outcome {
    pub(super) fn of(number: u8) -> Self {
        match number {
            1 => Self::Done,
            2 => Self::Failed,
            _ => Self::InFlight,
        }
    }
}

/// How many words the recording of a node with this many ranks takes.
pub const fn words(ranks: usize) -> usize {
    RANKS + ranks * RANK_WORDS
}

/// The most bytes of a failure as JSON.
pub const MAX_FAILURE: usize = room(header::FAILURE.end - header::FAILURE.start);

/// The bytes of a text that `words` words can hold, besides its length.
pub(super) const fn room(words: usize) -> usize {
    (words - 1) * 8
}

/// The end of a text that fits.
pub(super) fn fitting(text: &str, room: usize) -> &str {
    &text[text.ceil_char_boundary(text.len().saturating_sub(room))..]
}
