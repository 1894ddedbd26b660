//! The control page: a worker submits operations and the daemon answers, without a system call
//! unless one side sleeps.
//!
//! # Layout, version 9
//!
//! One sealed memfd, little endian. Words of different writers are 128 bytes apart, because
//! processors fetch cache lines of 64 bytes in pairs.
//!
//! ```text
//!  offset  size     written by   what
//!  0       8        worker       magic "GRADWIRE"
//!  8       4        worker       layout version, written last
//!  12      4        worker       process id, for messages; never trusted
//!  16      4        worker       words of the submission ring
//!  20      4        worker       entries of the completion ring
//!  128     8        worker       submission tail: words published
//!  256     8        daemon       submission head: words consumed
//!  264     4        both         1 while the daemon sleeps; the thread that wakes it writes 0
//!  384     8        daemon       completion tail: entries published
//!  392     4        both         completion epoch: moves with every entry; futex
//!  512     8        worker       completion head: entries consumed
//!  520     4        worker       how many threads wait on the epoch
//!  528     8        worker       the ticket that they wait for; 0: any
//!  640     4        worker       heartbeats of the worker
//!  648     8        worker       steps of the program
//!  656     8        worker       when the last step was, in ns of the monotonic clock
//!  664     8        worker       time blocked in waits, in ns (see `activity`)
//!  672     4        worker       how many threads are blocked in waits
//!  680     8        worker       the rank can do nothing until an operation ends (see `stuck`):
//!                                the epoch u32 and the submissions without an answer u32 at that
//!                                time; 0: it can go on
//!  688     8        worker       a ticket that it waits for then
//!  768     4        daemon       heartbeats of the daemon
//!  776     4        both         bit 0: the daemon asks the worker to record events; bit 1: the
//!                                worker records because the current step is sampled
//!  784     8        daemon       every step with a multiple of this number is recorded; 0: none
//!  896     8        worker       trace records written so far
//!  4096    1 MiB    worker       submission ring: records (see below)
//!  +1 MiB  96 KiB   daemon       completion ring: ticket u64, 0 u64, aux u64
//!  +96 KiB 4 MiB    worker       trace ring (see `gradwire_trace::ring`); exists once the daemon
//!                                has filled it, before it asks for the first record
//! ```
//!
//! A submission is a record of 8-byte words, at most [`MAX_RECORD_WORDS`] of them: 208 for the
//! longest name, the longest call site and one tensor of the most dimensions, and
//! [`Request::MAX_EXTRA_WORDS`] for lists and the further tensors of a group.
//!
//! ```text
//!  word 0      how many words, this one included
//!  word 1      ticket
//!  word 2      process set u32, priority i32
//!  word 3      collective u8, reduce operation u8, origin u8, 0 u8, root u32
//!  word 4, 5   prescale f64, postscale f64
//!  word 6      bytes of the name u16, of the text of the call site u16, entries of the list u32
//!  word 7      tensors u32, at least 1; number of the call site u32, 0 if it is not known
//!  then        entries of the list u64 each
//!  then        for each tensor:
//!              element type u8, dimensions u8, 0 u48
//!              segment of the input u32, of the output u32
//!              offset of the input u64
//!              offset of the output u64
//!              dimensions u64 each, outermost first
//!  then        the name, padded with zeros
//!  then        the text of the call site, padded with zeros; empty if the daemon knows it
//! ```
//!
//! The number of unanswered tickets is limited (BOUND); each side has the limit as a setting. Ranks
//! may submit in different orders, and then no operation may end before all are submitted. So no
//! submission waits for room, and the limit is far above what programs need. The completion ring
//! has [`COMPLETIONS`] entries: a worker that submits for long without reading answers fills it,
//! and then gets further answers over the socket. So the daemon never waits for a worker.
//!
//! # Soundness
//!
//! Safe code can't cause undefined behaviour here. Both sides use the page only through atomics,
//! and check each value before they rely on it (TRUST): a process that writes nonsense gets an
//! error, or spoils its own results. The places in a [`Submission`] are numbers, which the daemon
//! checks before it uses the memory.

mod activity;
mod daemon;
mod error;
mod page;
mod record;
mod stuck;
mod submission;
mod trace;
mod worker;

pub use activity::{Activity, Blocked, Progress};
pub use daemon::{CompletionWriter, DaemonControl, Heartbeats, SubmissionReader};
pub use error::{ControlError, LAYOUT_VERSION, RingError, SubmitError};
pub use page::{COMPLETIONS, CONTROL_BYTES, SUBMISSION_RING_BYTES};
pub use submission::{
    CallSite, Completion, Doorbell, MAX_CALL_SITE_BYTES, MAX_CALL_SITES, Origin, Place, Submission,
};
pub use trace::RankTrace;
pub use worker::WorkerControl;

#[cfg(doc)]
use gradwire_proto::Request;

#[cfg(doc)]
use crate::ring::MAX_RECORD_WORDS;
