//! The worker's side of the control page.

use std::{
    os::fd::OwnedFd,
    sync::atomic::{
        AtomicU32,
        Ordering::{Acquire, Relaxed, Release},
    },
    time::{Duration, Instant},
};

use gradwire_trace::{Kind, time::now_ns};
use parking_lot::Mutex;

use super::{
    activity::Blocked,
    error::{ControlError, SubmitError},
    page::{Page, SUBMISSION_RING_BYTES},
    record, stuck,
    submission::{Completion, Doorbell, Submission},
    trace,
};
use crate::{
    ring::{ANY, Nonsense, PushError},
    segment::SegmentError,
    spin::SpinBudget,
};

/// The worker's side: submits, waits, sends heartbeats. Any number of threads may use it at once.
#[derive(Debug)]
pub struct WorkerControl {
    page: Page,
    /// Words published so far.
    submitted: Mutex<u64>,
    /// Completions consumed so far.
    completed: Mutex<u64>,
    /// Tickets without an answer.
    in_flight: AtomicU32,
    /// The most of them (BOUND).
    max_in_flight: u32,
    spin_budget: SpinBudget,
    /// Held by a thread that is about to sleep while it registers itself.
    registering: Mutex<()>,
}

impl WorkerControl {
    /// Creates a control page; `name` appears in `/proc/PID/maps` and should contain the job's id
    /// (CLEAN). The descriptor is for the daemon. At most `max_in_flight` tickets may be
    /// unanswered; the daemon has a limit of its own.
    ///
    /// # Errors
    /// [`SegmentError`] if memory for it is missing.
    pub fn create(name: &str, max_in_flight: u32) -> Result<(Self, OwnedFd), SegmentError> {
        let (segment, fd) = Page::make(name)?;
        let bytes = segment.bytes();
        let page = Page::format(segment).map_err(|error| match error {
            ControlError::Segment(error) => error,
            _ => SegmentError::Size { bytes },
        })?;
        let control = Self {
            page,
            submitted: Mutex::default(),
            completed: Mutex::default(),
            in_flight: AtomicU32::new(0),
            max_in_flight,
            spin_budget: SpinBudget::default(),
            registering: Mutex::default(),
        };
        Ok((control, fd))
    }

    /// Submits an operation to the daemon. The tensor's memory belongs to the daemon until the
    /// answer.
    ///
    /// # Errors
    /// [`SubmitError`]; nothing has been submitted.
    pub fn submit(&self, submission: &Submission) -> Result<Doorbell, SubmitError> {
        submission.request.validate()?;
        let (tensors, inputs, outputs) =
            (submission.request.parts(), submission.inputs.len(), submission.outputs.len());
        if (inputs, outputs) != (tensors, tensors) {
            return Err(SubmitError::Places { tensors, inputs, outputs });
        }
        let record = record::encode(submission);
        let mut submitted = self.submitted.lock();
        // Only submitters add, and they hold the lock, so two of them cannot exceed the limit
        // together.
        if self.in_flight.load(Acquire) >= self.max_in_flight {
            return Err(SubmitError::TooMany { limit: self.max_in_flight });
        }
        let ring = self.page.submissions();
        self.in_flight.fetch_add(1, Relaxed);
        match ring.push(&mut submitted, &record) {
            Ok(true) => Ok(Doorbell::Ring),
            Ok(false) => Ok(Doorbell::Quiet),
            Err(error) => {
                self.answered();
                Err(match error {
                    PushError::Full => SubmitError::Full { capacity_bytes: SUBMISSION_RING_BYTES },
                    PushError::Nonsense(nonsense) => SubmitError::Damaged(nonsense),
                })
            }
        }
    }

    /// Takes the next answer, if there is one.
    ///
    /// # Errors
    /// [`Nonsense`] if the page has been overwritten: no further answers will come.
    pub fn pop_completion(&self) -> Result<Option<Completion>, Nonsense> {
        let mut completed = self.completed.lock();
        let popped = self.page.completions().pop(&mut completed)?;
        Ok(popped.map(|[ticket, _, aux]| {
            self.answered();
            Completion { ticket, aux }
        }))
    }

    /// Counts a failed ticket as answered; its failure came over the socket. Called once per failed
    /// ticket.
    pub fn answered(&self) {
        // Release: a thread that submits because of this also makes the completion's free place
        // visible. Checked: an excess answer must not make the count wrap around.
        let _ = self.in_flight.fetch_update(Release, Relaxed, |count| count.checked_sub(1));
    }

    /// Tickets without an answer.
    pub fn in_flight(&self) -> u32 {
        self.in_flight.load(Relaxed)
    }

    /// The epoch of the completion ring. Read it, look for answers, and if there are none pass it
    /// to [`WorkerControl::wait`], which returns at once if an answer has arrived meanwhile.
    pub fn epoch(&self) -> u32 {
        self.page.completions().epoch.load(Acquire)
    }

    /// Waits until the epoch is no longer `seen`, for at most `timeout` (WAIT); true if it moved.
    /// Spins for up to `spin` first, because waking up costs more than a short wait, and for less
    /// if spinning has not helped lately.
    pub fn wait(&self, seen: u32, timeout: Duration, spin: Duration) -> bool {
        self.wait_for(ANY, seen, timeout, spin)
    }

    /// Like [`WorkerControl::wait`], for one ticket only. Answers to other tickets move the epoch
    /// but do not wake the caller, unless another thread sleeps, too.
    pub fn wait_for(&self, ticket: u64, seen: u32, timeout: Duration, spin: Duration) -> bool {
        let ring = self.page.completions();
        let moved = || ring.epoch.load(Acquire) != seen;
        if moved() {
            return true;
        }
        let start = Instant::now();
        if self.spin_budget.spin(spin.min(timeout), moved) {
            return true;
        }
        {
            let _alone = self.registering.lock();
            ring.register_waiter(ticket);
        }
        let moved = ring.sleep(seen, timeout.saturating_sub(start.elapsed()));
        if moved {
            self.spin_budget.slept(spin, start.elapsed());
        }
        moved
    }

    /// Moves the epoch and wakes all waiters, for a message that came over the socket.
    pub fn wake_all(&self) {
        self.page.completions().signal();
    }

    /// Notes that the program has finished a step, for the metrics.
    pub fn mark_step(&self) {
        let now = now_ns();
        self.page.step_at().store(now, Relaxed);
        let number = self.page.steps().fetch_add(1, Release).wrapping_add(1);
        trace::step(&self.page, now, number);
    }

    /// The current time, if the job is traced. Pass it to [`WorkerControl::record`] at the end.
    pub fn traced(&self) -> Option<u64> {
        trace::begin(&self.page)
    }

    /// Records for a trace an event that began at `at_ns` and ends now. `subject` is a ticket.
    pub fn record(&self, kind: Kind, at_ns: u64, subject: u64) {
        trace::end(&self.page, kind, at_ns, subject);
    }

    /// Counts the calling thread as blocked until the result is dropped, for the metrics.
    pub fn block(&self) -> Blocked<'_> {
        Blocked::new(&self.page)
    }

    /// Tells the daemon that this process can do nothing until one of its operations ends; `ticket`
    /// is one that it waits for. `epoch` is that of [`WorkerControl::epoch`], read before the
    /// caller made sure that no awaited operation had ended. Valid until the epoch moves, something
    /// is submitted, or [`WorkerControl::take_back_stuck`] is called.
    pub fn say_stuck(&self, epoch: u32, ticket: u64) {
        stuck::say(&self.page, epoch, self.in_flight(), ticket);
    }

    /// Tells the daemon that this process may go on by itself.
    pub fn take_back_stuck(&self) {
        stuck::take_back(&self.page);
    }

    /// Sends a heartbeat to the daemon.
    pub fn beat(&self) {
        self.page.worker_beats().fetch_add(1, Relaxed);
    }

    /// The daemon's heartbeats so far.
    pub fn daemon_beats(&self) -> u32 {
        self.page.daemon_beats().load(Relaxed)
    }
}
