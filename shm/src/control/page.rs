//! The fields of the control page; the parent module shows the layout.

use std::{
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{
            AtomicU32, AtomicU64,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
};

use gradwire_trace::{ring::Ring, tracer::RING_BYTES};

use super::error::{ControlError, LAYOUT_VERSION};
use crate::{
    backing::Shared,
    ring::{COMPLETION_WORDS, CompletionRing, SubmissionRing},
    segment::{HugePages, Segment, SegmentError},
};

/// Bytes of the submission ring.
pub const SUBMISSION_RING_BYTES: u64 = 1 << 20;

/// Entries of the completion ring.
pub const COMPLETIONS: u32 = 4096;

/// Bytes of a control page, a multiple of 4 KiB. Its memory is rounded up to whole pages.
pub const CONTROL_BYTES: u64 = TRACE + TRACE_WORDS as u64 * 8;

const MAGIC: u64 = u64::from_le_bytes(*b"GRADWIRE");

const VERSION_AT: u64 = 8;
const PID_AT: u64 = 12;
const SUBMISSION_WORDS_AT: u64 = 16;
const COMPLETION_ENTRIES_AT: u64 = 20;
const SUBMISSION_TAIL: u64 = 128;
const SUBMISSION_HEAD: u64 = 256;
const SLEEPING: u64 = 264;
const COMPLETION_TAIL: u64 = 384;
const EPOCH: u64 = 392;
const COMPLETION_HEAD: u64 = 512;
const WAITERS: u64 = 520;
const WANTED: u64 = 528;
const WORKER_BEATS: u64 = 640;
const STEPS: u64 = 648;
const STEP_AT: u64 = 656;
const BLOCKED_TIME: u64 = 664;
const BLOCKED_THREADS: u64 = 672;
const STUCK: u64 = 680;
const STUCK_ON: u64 = 688;
const DAEMON_BEATS: u64 = 768;
const TRACING: u64 = 776;
const SAMPLE_STEPS: u64 = 784;
const TRACE_HEAD: u64 = 896;
const SUBMISSIONS: u64 = 4096;
const COMPLETIONS_AT: u64 = SUBMISSIONS + SUBMISSION_RING_BYTES;
const TRACE: u64 = COMPLETIONS_AT + COMPLETION_RING_WORDS as u64 * 8;

const SUBMISSION_RING_WORDS: usize = SUBMISSION_RING_BYTES as usize / 8;
const COMPLETION_RING_WORDS: usize = COMPLETIONS as usize * COMPLETION_WORDS;
/// As many as for a thread of a daemon. Filled when the rank is first asked to record.
const TRACE_WORDS: usize = RING_BYTES / 8;

/// A mapped control page. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Page(Arc<Segment>);

impl Page {
    /// Lays out a new page in memory that is all zeros.
    ///
    /// # Errors
    /// [`ControlError::Size`] if the memory is too small.
    pub(super) fn format(segment: Segment) -> Result<Self, ControlError> {
        let page = Self(Arc::new(segment));
        page.check_size()?;
        page.flag(PID_AT).store(std::process::id(), Relaxed);
        page.flag(SUBMISSION_WORDS_AT).store(SUBMISSION_RING_WORDS as u32, Relaxed);
        page.flag(COMPLETION_ENTRIES_AT).store(COMPLETIONS, Relaxed);
        page.cell(0).store(MAGIC, Relaxed);
        // Last, so that a reader that sees the version sees the rest.
        page.flag(VERSION_AT).store(LAYOUT_VERSION, Release);
        Ok(page)
    }

    fn check(segment: Segment) -> Result<Self, ControlError> {
        let page = Self(Arc::new(segment));
        let has_header = page.0.bytes() >= SUBMISSIONS;
        let version = if has_header { page.flag(VERSION_AT).load(Acquire) } else { 0 };
        let magic = if has_header { page.cell(0).load(Relaxed) } else { 0 };
        // Checked first: another version may have another size, too.
        if magic == MAGIC && version != LAYOUT_VERSION {
            return Err(ControlError::Version { found: version, expected: LAYOUT_VERSION });
        }
        page.check_size()?;
        if magic != MAGIC {
            return Err(ControlError::Magic { magic });
        }
        let submission_words = page.flag(SUBMISSION_WORDS_AT).load(Relaxed);
        let completions = page.flag(COMPLETION_ENTRIES_AT).load(Relaxed);
        if (submission_words, completions) != (SUBMISSION_RING_WORDS as u32, COMPLETIONS) {
            return Err(ControlError::Rings { submission_words, completions });
        }
        Ok(page)
    }

    fn check_size(&self) -> Result<(), ControlError> {
        let (bytes, expected) = (self.0.bytes(), Self::whole_pages());
        if bytes == expected { Ok(()) } else { Err(ControlError::Size { bytes, expected }) }
    }

    /// Creates the memory of a new page.
    ///
    /// # Errors
    /// [`SegmentError`] if the memory cannot be made.
    pub(super) fn make(name: &str) -> Result<(Segment, OwnedFd), SegmentError> {
        Segment::create_partly(name, Self::whole_pages(), TRACE, HugePages::Never)
    }

    /// Opens and checks the page that another process has made (TRUST).
    ///
    /// # Errors
    /// [`ControlError`] says what is wrong.
    pub(super) fn open(fd: OwnedFd) -> Result<Self, ControlError> {
        let expected = Self::whole_pages();
        match Segment::open_partly(fd, expected, TRACE) {
            Err(SegmentError::OutOfRange { bytes, .. }) => {
                Err(ControlError::Size { bytes, expected })
            }
            segment => Self::check(segment?),
        }
    }

    /// Fills the memory of the trace ring. Neither side may use it before.
    ///
    /// # Errors
    /// [`SegmentError`] if there is not enough memory.
    pub(super) fn fill_trace(&self) -> Result<(), SegmentError> {
        self.0.fill(TRACE)
    }

    /// The bytes that a control page takes on this machine.
    fn whole_pages() -> u64 {
        CONTROL_BYTES.next_multiple_of(rustix::param::page_size() as u64)
    }

    fn cells(&self, offset: u64, count: usize) -> &[AtomicU64] {
        self.0.cells(offset, count).expect("`check_size` has checked the size")
    }

    fn cell(&self, offset: u64) -> &AtomicU64 {
        &self.cells(offset, 1)[0]
    }

    fn flag(&self, offset: u64) -> &AtomicU32 {
        self.0.flag(offset).expect("`check_size` has checked the size")
    }

    pub(super) fn submissions(&self) -> SubmissionRing<'_, Shared> {
        SubmissionRing {
            head: self.cell(SUBMISSION_HEAD),
            tail: self.cell(SUBMISSION_TAIL),
            sleeping: self.flag(SLEEPING),
            cells: self.cells(SUBMISSIONS, SUBMISSION_RING_WORDS),
        }
    }

    pub(super) fn completions(&self) -> CompletionRing<'_, Shared> {
        CompletionRing {
            head: self.cell(COMPLETION_HEAD),
            tail: self.cell(COMPLETION_TAIL),
            epoch: self.flag(EPOCH),
            waiters: self.flag(WAITERS),
            wanted: self.cell(WANTED),
            cells: self.cells(COMPLETIONS_AT, COMPLETION_RING_WORDS),
        }
    }

    pub(super) fn worker_beats(&self) -> &AtomicU32 {
        self.flag(WORKER_BEATS)
    }

    pub(super) fn steps(&self) -> &AtomicU64 {
        self.cell(STEPS)
    }

    pub(super) fn step_at(&self) -> &AtomicU64 {
        self.cell(STEP_AT)
    }

    pub(super) fn blocked_time(&self) -> &AtomicU64 {
        self.cell(BLOCKED_TIME)
    }

    pub(super) fn blocked_threads(&self) -> &AtomicU32 {
        self.flag(BLOCKED_THREADS)
    }

    pub(super) fn stuck(&self) -> &AtomicU64 {
        self.cell(STUCK)
    }

    pub(super) fn stuck_on(&self) -> &AtomicU64 {
        self.cell(STUCK_ON)
    }

    pub(super) fn daemon_beats(&self) -> &AtomicU32 {
        self.flag(DAEMON_BEATS)
    }

    /// The reasons why the worker records events, as bits; 0: it does not.
    pub(super) fn tracing(&self) -> &AtomicU32 {
        self.flag(TRACING)
    }

    /// Which steps the worker records by itself.
    pub(super) fn sample_steps(&self) -> &AtomicU64 {
        self.cell(SAMPLE_STEPS)
    }

    /// The worker's trace ring; [`fill_trace`](Self::fill_trace) must have filled its memory.
    pub(super) fn trace(&self) -> Ring<'_> {
        Ring::new(self.cell(TRACE_HEAD), self.cells(TRACE, TRACE_WORDS))
    }

    /// The process id that the worker wrote, for messages.
    pub(super) fn pid(&self) -> u32 {
        self.flag(PID_AT).load(Relaxed)
    }
}

const _: () =
    assert!(CONTROL_BYTES.is_multiple_of(4096) && SUBMISSION_RING_WORDS.is_power_of_two());
