//! The daemon's side of the control page. A hostile worker may have written all data that is read
//! here, and may change it at any moment (TRUST).

use std::{
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use parking_lot::Mutex;

use super::{
    activity::{Activity, InFlight},
    error::{ControlError, RingError},
    page::Page,
    record,
    submission::{Completion, Submission},
    trace::RankTrace,
};
use crate::ring::PushError;

/// A worker's control page for the daemon, split into parts for different threads.
#[derive(Debug)]
pub struct DaemonControl {
    /// The worker's submissions.
    pub submissions: SubmissionReader,
    /// The answers.
    pub completions: CompletionWriter,
    /// Heartbeats in both directions.
    pub heartbeats: Heartbeats,
    /// How the rank spends its time.
    pub activity: Activity,
    /// The rank's trace events.
    pub trace: RankTrace,
}

impl DaemonControl {
    /// Maps and checks the control page that a worker handed over. At most `max_in_flight` of its
    /// submissions may be unanswered (BOUND).
    ///
    /// # Errors
    /// [`ControlError`] if it is not a control page of this version.
    pub fn open(fd: OwnedFd, max_in_flight: u32) -> Result<Self, ControlError> {
        let page = Page::open(fd)?;
        let in_flight = Arc::new(InFlight::default());
        let submissions = SubmissionReader {
            page: page.clone(),
            head: 0,
            seen: AtomicU64::new(0),
            in_flight: Arc::clone(&in_flight),
            max_in_flight,
            record: Vec::new(),
        };
        let activity = Activity::new(page.clone(), Arc::clone(&in_flight));
        let completions = CompletionWriter { page: page.clone(), tail: Mutex::new(0), in_flight };
        let trace = RankTrace::new(page.clone());
        Ok(Self { submissions, completions, heartbeats: Heartbeats { page }, activity, trace })
    }
}

/// Reads the worker's submissions.
#[derive(Debug)]
pub struct SubmissionReader {
    page: Page,
    /// Words consumed so far. The shared counter is a copy of this one and is never read.
    head: u64,
    /// The highest tail seen, so that a worker can't keep the daemon awake by moving it back and
    /// forth.
    seen: AtomicU64,
    in_flight: Arc<InFlight>,
    max_in_flight: u32,
    /// The record that is being read, copied out of shared memory.
    record: Vec<u64>,
}

impl SubmissionReader {
    /// The next submission, checked and converted to domain types. The caller must check its places
    /// against the worker's segments. One call reads at most one record, however full the ring is.
    ///
    /// # Errors
    /// [`RingError`] says what is wrong; the daemon must then give the worker up.
    pub fn pop(&mut self) -> Result<Option<Submission>, RingError> {
        let ring = self.page.submissions();
        let popped = ring
            .pop(&mut self.head, self.seen.load(Relaxed), &mut self.record)
            .map_err(RingError::Submissions)?;
        let Some(record) = popped else { return Ok(None) };
        self.seen.fetch_max(self.head, Relaxed);
        if self.in_flight.add() >= self.max_in_flight {
            return Err(RingError::TooMany { limit: self.max_in_flight }); // BOUND
        }
        record::decode(record).map(Some)
    }

    /// Whether nothing has been published since the last record.
    pub fn is_empty(&self) -> bool {
        self.page.submissions().is_empty(self.head)
    }

    /// Announces that the daemon is about to sleep, and checks once more. True: the ring is empty
    /// and the next submission will ring the doorbell. False: a submission has arrived and must be
    /// read first.
    pub fn prepare_sleep(&self) -> bool {
        let Some(tail) = self.page.submissions().prepare_sleep(self.head) else { return true };
        self.seen.store(tail, Relaxed);
        false
    }

    /// Announces that the daemon is awake, so that the worker need not ring the doorbell.
    pub fn awake(&self) {
        self.page.submissions().awake();
    }

    /// The process id that the worker wrote, for messages only: it may be wrong.
    pub fn claimed_pid(&self) -> u32 {
        self.page.pid()
    }
}

/// Answers the worker. Any number of threads may use it at once.
#[derive(Debug)]
pub struct CompletionWriter {
    page: Page,
    /// Entries published so far.
    tail: Mutex<u64>,
    in_flight: Arc<InFlight>,
}

impl CompletionWriter {
    /// Answers one submission and wakes its waiters.
    ///
    /// # Errors
    /// [`RingError::CompletionsFull`] if the ring is full: send the answer over the socket.
    /// Another [`RingError`] if the worker's counters are wrong; the daemon must then give
    /// the worker up. In any case the submission counts as answered.
    pub fn push(&self, completion: Completion) -> Result<(), RingError> {
        // Before it is published: the worker may submit again as soon as it sees the answer.
        self.answered();
        let mut tail = self.tail.lock();
        let entry = [completion.ticket, 0, completion.aux];
        self.page.completions().push(&mut tail, entry).map_err(|e| match e {
            PushError::Full => RingError::CompletionsFull,
            PushError::Nonsense(nonsense) => RingError::Completions(nonsense),
        })
    }

    /// Counts a failed submission as answered; its failure is sent over the socket. Called once per
    /// failed ticket, before the message is sent.
    pub fn answered(&self) {
        self.in_flight.remove();
    }

    /// Submissions without an answer.
    pub fn in_flight(&self) -> u32 {
        self.in_flight.count()
    }
}

/// Heartbeats in both directions. If a process is killed, its socket ends; heartbeats detect a
/// process that exists but hangs.
#[derive(Debug)]
pub struct Heartbeats {
    page: Page,
}

impl Heartbeats {
    /// The worker's heartbeats so far; wraps around.
    pub fn count(&self) -> u32 {
        self.page.worker_beats().load(Relaxed)
    }

    /// Sends a heartbeat to the worker.
    pub fn beat(&self) {
        self.page.daemon_beats().fetch_add(1, Relaxed);
    }
}
