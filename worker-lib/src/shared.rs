//! The state that the threads of a session share: submitting, waiting, and the first cause of its
//! end.
//!
//! - TELL: the first cause of a failure is kept, and every waiting and every later call gets it.
//! - WAIT: every wait ends with an outcome, the session's end, or a deadline. A waiting thread
//!   wakes up at least once a second and checks that the threads for the daemon's messages run.
//! - BOUND: at most `worker.max_in_flight` operations are in flight; further ones are refused.
//!
//! While an operation is in flight, its memory is lent to the daemon. A session that ends for a
//! local reason, or without a message of the daemon, can't know whether the daemon has stopped: it
//! may be in the middle of a write, or continue one later when its process is resumed. So the
//! memory of all operations in flight is taken back before the waiters are notified (`end`).

use std::{
    collections::HashMap,
    io::Write as _,
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use gradwire_proto::{
    Ending, Failure, FailureKind, ProcessSetId, Request, pb::worker_message::Message,
};
use gradwire_shm::{
    control::{Doorbell, Submission, SubmitError, WorkerControl},
    ring::Nonsense,
};
use gradwire_trace::Kind;
use parking_lot::Mutex;

use crate::{
    call_site::{CallSite, Learned},
    elastic::Change,
    error::{GradwireError, Result},
    flight::DaemonRecording,
    inspection::Inspection,
    link,
    memory::{Keep, Output},
    record::session::Recorder,
    segments::Segments,
    stats::Counts,
    tickets::{self, Key, NoTicket, Remains, Tickets},
    waiters::{LOOK_AROUND, Waiters},
    wakers::Wakers,
};

pub(crate) mod end;

/// The table of operations.
type Table = Tickets<Vec<Keep>, Vec<Output>>;

/// An operation that has succeeded.
pub(crate) type Done = tickets::Done<Vec<Output>>;

/// An operation that has its ticket but was not submitted yet.
#[derive(Debug)]
pub(crate) struct Prepared {
    submission: Submission,
    /// When the call began, if the job is traced.
    began: Option<u64>,
    /// What is looked at before the daemon gets it.
    pub(crate) inspection: Option<Inspection>,
}

impl Prepared {
    pub(crate) fn ticket(&self) -> u64 {
        self.submission.ticket
    }
}

/// The state that the threads of a session share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) control: WorkerControl,
    /// For sending; only the watcher receives.
    pub(crate) stream: UnixStream,
    pub(crate) sending: Mutex<()>,
    doorbell: OwnedFd,
    pub(crate) spin: Duration,
    /// Memory that an entry frees is dropped without this lock, because it goes back to the arena.
    tickets: Mutex<Table>,
    end: OnceLock<Ending>,
    /// Why this process gives up, if it does.
    giving_up: OnceLock<Failure>,
    /// The last error that the program received: the likely reason if the program ends.
    last_error: Mutex<Option<LastError>>,
    pub(crate) segments: Segments,
    /// The call sites that the daemon knows.
    pub(crate) learned: Learned,
    pub(crate) wakers: Wakers,
    /// Whether the threads for the daemon's messages still run.
    pub(crate) watched: AtomicBool,
    pub(crate) counts: Arc<Counts>,
    /// Whether a contribution that is not finite was reported.
    has_warned: AtomicBool,
    /// Whether the job goes on after a loss.
    is_elastic: bool,
    /// What the launcher wants to change.
    pub(crate) change: Mutex<Option<Change>>,
    /// Operations of several parts that are in flight, and their kinds.
    pub(crate) tasks: Mutex<HashMap<Key, &'static str>>,
    /// The threads that are in a wait without a limit.
    pub(crate) waiters: Waiters,
    /// The flight recording of the daemon, if this process is to save it.
    pub(crate) recording: Option<DaemonRecording>,
    /// Records what this rank receives, if that is wanted.
    pub(crate) recorder: OnceLock<Recorder>,
}

/// An error that the program received: its text, and the failure that it reports, if any.
#[derive(Debug, Clone)]
pub(crate) struct LastError {
    pub(crate) text: String,
    pub(crate) cause: Option<Failure>,
}

impl Shared {
    /// Remembers an error on its way to the program.
    pub(crate) fn noted<T>(&self, result: Result<T, GradwireError>) -> Result<T, GradwireError> {
        result.inspect_err(|error| {
            let cause = error.failure().cloned();
            *self.last_error.lock() = Some(LastError { text: error.to_string(), cause });
        })
    }

    /// The last error that the program received.
    pub(crate) fn last_error(&self) -> Option<LastError> {
        self.last_error.lock().clone()
    }

    pub(crate) fn new(
        control: WorkerControl,
        stream: UnixStream,
        doorbell: OwnedFd,
        spin: Duration,
        counts: Arc<Counts>,
        is_elastic: bool,
    ) -> Self {
        Self {
            control,
            stream,
            sending: Mutex::default(),
            doorbell,
            spin,
            tickets: Mutex::default(),
            end: OnceLock::new(),
            giving_up: OnceLock::new(),
            last_error: Mutex::new(None),
            segments: Segments::default(),
            learned: Learned::default(),
            wakers: Wakers::default(),
            watched: AtomicBool::new(true),
            counts,
            has_warned: AtomicBool::new(false),
            is_elastic,
            change: Mutex::new(None),
            tasks: Mutex::default(),
            waiters: Waiters::default(),
            recording: None,
            recorder: OnceLock::new(),
        }
    }

    /// Sends a message to the daemon.
    pub(crate) fn send(&self, message: Message, fd: Option<&OwnedFd>) -> Result<()> {
        use std::os::fd::AsFd;
        let _sending = self.sending.lock();
        let Err(error) = link::send(&self.stream, message, fd.map(AsFd::as_fd)) else {
            return Ok(());
        };
        // The watcher is about to see the same end, and may know the reason (TELL).
        self.wait_for_end(LOOK_AROUND);
        let failure = link::daemon_lost(&self.stream, &format!("or accepts no messages ({error})"));
        self.finish(Ending::Failed(failure));
        self.check()
    }

    /// Notes what the launcher wants to change, in addition to what it wanted before.
    pub(crate) fn wants(&self, wanted: Change) {
        let mut change = self.change.lock();
        let Change { added, removed } = change.unwrap_or(wanted);
        *change = Some(Change { added: added | wanted.added, removed: removed | wanted.removed });
    }

    /// Gives an operation its ticket, for [`Shared::submit`]. `memory` is that of its places; it
    /// must not be accessed until the operation has ended. `movable`: its results may go to other
    /// memory, because they are not in place, so the daemon can ask for memory of the right size.
    pub(crate) fn prepare(
        &self,
        mut submission: Submission,
        memory: Vec<Keep>,
        movable: bool,
    ) -> Result<Prepared> {
        self.check()?;
        let began = self.control.traced();
        // The name of an operation that has ended is free, even before its outcome is fetched.
        self.collect();
        let Submission { process_set, name, request, .. } = &submission;
        let key = (ProcessSetId(*process_set), name.clone());
        let site = CallSite::of(&submission);
        let opened = self.tickets.lock().open(key, request, site, movable, memory);
        let ticket = opened.map_err(|refused| match refused {
            NoTicket::InFlight { number, request: first, site } => {
                GradwireError::Invalid(tickets::twice(name, number, &first, site, request))
            }
            // The end is visible once the memory is taken back.
            NoTicket::Closed => self.error_of(self.end.wait()),
        })?;
        submission.ticket = ticket;
        if let Some(recorder) = self.recorder.get() {
            recorder.begin(ticket);
        }
        Ok(Prepared { submission, began, inspection: None })
    }

    /// Reports a contribution that is not finite: the first one on standard error, or to all ranks.
    fn inspect(&self, inspection: &Inspection, name: &str) -> Result<()> {
        let is_told = !inspection.fails && self.has_warned.load(Relaxed);
        let Some(problem) = (!is_told).then(|| inspection.problem(name)).flatten() else {
            return Ok(());
        };
        if inspection.fails {
            let what = format!("{problem} (checks.finite=fail)");
            self.give_up_after(Failure::new(FailureKind::Cancelled, what), None);
            return self.check();
        }
        if !self.has_warned.swap(true, Relaxed) {
            let _ = writeln!(
                std::io::stderr(),
                "gradwire: {problem}; later ones are not reported (checks.finite=warn)"
            );
        }
        Ok(())
    }

    /// Submits an operation. Waits while the ring is full. After an error, nothing was started.
    pub(crate) fn submit(&self, prepared: &Prepared) -> Result<()> {
        let Prepared { submission, began, inspection } = prepared;
        if let Some(inspection) = inspection {
            self.inspect(inspection, submission.name.as_str())?;
        }
        self.push(submission)?;
        self.learned.sent(&submission.site);
        let bytes = submission.request.bytes();
        self.counts.operations.fetch_add(1, Relaxed);
        self.counts.bytes.fetch_add(bytes, Relaxed);
        self.counts.copied_bytes.fetch_add(if submission.copied { bytes } else { 0 }, Relaxed);
        self.record(Kind::Submit, *began, submission.ticket);
        Ok(())
    }

    /// Waits while a name is in flight, unless it is held: then the caller may have to open the
    /// gate.
    pub(crate) fn wait_for_name(&self, key: &Key) -> Result<()> {
        loop {
            let seen = self.control.epoch();
            self.collect();
            if !self.tickets.lock().will_be_free(key) {
                return self.check();
            }
            self.control.wait(seen, LOOK_AROUND, self.spin);
            self.check()?;
        }
    }

    /// Whether an operation, of one or several parts, has this name.
    pub(crate) fn is_used(&self, key: &Key) -> bool {
        self.collect();
        self.tickets.lock().is_in_flight(key) || self.tasks.lock().contains_key(key)
    }

    /// Notes whether an operation waits behind a gate.
    pub(crate) fn set_held(&self, ticket: u64, held: bool) {
        self.tickets.lock().set_held(ticket, held);
    }

    /// Takes back the ticket of an operation that was not submitted and has no handle.
    pub(crate) fn withdraw(&self, ticket: u64) {
        if let Some(recorder) = self.recorder.get() {
            recorder.forget(ticket);
        }
        self.tickets.lock().withdraw(ticket);
    }

    /// Ends an operation that was not submitted and has a handle. If the session has ended, its end
    /// is the first cause (TELL), and this does nothing.
    pub(crate) fn refuse(&self, ticket: u64, failure: &Failure) {
        if self.check().is_ok() {
            // A replay fails it by itself, too.
            if let Some(recorder) = self.recorder.get() {
                recorder.forget(ticket);
            }
            self.end_failed(&[ticket], failure);
            self.control.wake_all();
        }
    }

    /// Whether an operation has ended.
    pub(crate) fn is_over(&self, ticket: u64) -> bool {
        self.tickets.lock().has_ended(ticket)
    }

    /// Records an event that began at this time, if the job was traced then.
    pub(crate) fn record(&self, kind: Kind, began: Option<u64>, ticket: u64) {
        if let Some(at_ns) = began {
            self.control.record(kind, at_ns, ticket);
        }
    }

    fn push(&self, submission: &Submission) -> Result<()> {
        loop {
            let seen = self.control.epoch();
            self.collect();
            match self.control.submit(submission) {
                Ok(Doorbell::Quiet) => return Ok(()),
                // The submission is already in the ring, so an error here ends the session.
                Ok(Doorbell::Ring) => {
                    if let Err(error) = link::ring(&self.doorbell) {
                        let what = format!("can't ring the daemon's doorbell: {error}");
                        self.finish(Ending::Failed(Failure::new(FailureKind::Internal, what)));
                    }
                    return Ok(());
                }
                // The daemon does not report that it has read: check again soon, or when an
                // operation ends.
                Err(SubmitError::Full { .. }) => {
                    self.control.wait(seen, Duration::from_millis(1), self.spin);
                }
                // BOUND. It does not wait: the operations in flight may wait for this one.
                Err(error @ SubmitError::TooMany { .. }) => {
                    return Err(GradwireError::Invalid(error.to_string()));
                }
                Err(SubmitError::Invalid(error)) => return Err(error.into()),
                Err(error @ (SubmitError::Damaged(_) | SubmitError::Places { .. })) => {
                    let failure = Failure::new(FailureKind::Internal, error.to_string());
                    self.finish(Ending::Failed(failure));
                }
            }
            self.check()?;
        }
    }

    /// Moves completions from the ring into the table.
    pub(crate) fn collect(&self) {
        if let Err(nonsense) = self.take_completed() {
            // WAIT: there will be no further answers.
            let what = format!("the control page is damaged: {nonsense}");
            let failure = Failure::new(FailureKind::Internal, what)
                .hint("look for writes past the end of a tensor");
            self.finish(Ending::Failed(failure));
        }
    }

    /// Pops under the table's lock. So a completion is either in the ring, and advances the epoch
    /// for the waiters, or in the table.
    fn take_completed(&self) -> Result<(), Nonsense> {
        let mut freed = Vec::new();
        let mut tickets = self.tickets.lock();
        while !tickets.is_closed()
            && let Some(completion) = self.control.pop_completion()?
        {
            freed.push(self.end_one(&mut tickets, completion.ticket, Ok(completion.aux)));
        }
        drop(tickets);
        Ok(())
    }

    /// Ends an operation. Its results are recorded before anybody sees that it has ended.
    fn end_one(
        &self,
        tickets: &mut Table,
        ticket: u64,
        outcome: Result<u64, Failure>,
    ) -> Option<Remains<Vec<Keep>, Vec<Output>>> {
        if let Some(recorder) = self.recorder.get()
            && let Some(entry) = tickets.in_flight_one(ticket)
        {
            recorder.ended(ticket, &entry, &outcome);
        }
        tickets.end(ticket, outcome)
    }

    /// The request of an operation, if its results may go to other memory; once.
    pub(crate) fn ask_movable(&self, ticket: u64) -> Option<Request> {
        self.tickets.lock().ask_movable(ticket).cloned()
    }

    /// Ends an operation that has succeeded and is not in the ring.
    pub(crate) fn complete(&self, ticket: u64, aux: u64) {
        let freed = self.end_one(&mut self.tickets.lock(), ticket, Ok(aux));
        if freed.is_some() {
            self.control.answered();
            self.control.wake_all();
        }
    }

    /// Puts the results of an operation into other memory.
    pub(crate) fn move_results(&self, ticket: u64, outputs: Vec<Output>) {
        let left = self.tickets.lock().move_results(ticket, outputs);
        drop(left);
    }

    /// Ends operations that failed; the session continues.
    pub(crate) fn fail(&self, failed: &[u64], failure: &Failure) {
        for _ in 0..self.end_failed(failed, failure) {
            self.control.answered();
        }
        self.control.wake_all();
    }

    /// Ends operations with a failure; returns how many of them were in flight.
    fn end_failed(&self, failed: &[u64], failure: &Failure) -> usize {
        let mut freed = Vec::new();
        let mut tickets = self.tickets.lock();
        for &ticket in failed {
            let mut failure = failure.clone();
            if let Some((name, site)) = tickets.facts(ticket) {
                // One failure may concern many operations.
                if failure.tensor.is_empty() {
                    failure.tensor = name.as_str().to_owned();
                }
                // A table has the lines of all ranks.
                if failure.details.lines.is_empty()
                    && let Some(site) = site.text()
                {
                    failure.details.site = site.to_string();
                }
            }
            freed.extend(self.end_one(&mut tickets, ticket, Err(failure)));
        }
        drop(tickets);
        freed.len()
    }

    /// Takes the outcome of an operation, if it has ended.
    pub(crate) fn take_outcome(&self, ticket: u64) -> Option<Result<Done>> {
        let outcome = self.tickets.lock().take(ticket)?;
        Some(outcome.map_err(|failure| self.failed(failure)))
    }

    /// Whether a wait would return at once.
    pub(crate) fn has_ended(&self, ticket: u64) -> bool {
        self.collect();
        self.tickets.lock().has_ended(ticket) || self.check().is_err()
    }

    /// Notes that the outcome will not be fetched.
    pub(crate) fn abandon(&self, ticket: u64) {
        let left = self.tickets.lock().abandon(ticket);
        drop(left);
    }

    /// Drops the entries of all operations, to break a cycle: the memory's arena refers to this,
    /// and this to the memory. Only allowed after the connection has ended, when no operation can
    /// be started any more.
    pub(crate) fn forget(&self) {
        let forgotten = self.tickets.lock().clear();
        drop(forgotten);
    }

    /// Whether every operation that has a ticket and has not ended was submitted.
    pub(crate) fn is_all_submitted(&self) -> bool {
        self.tickets.lock().in_flight() == self.control.in_flight() as usize
    }

    /// The number of submitted operations, of those in flight, and the bytes of all submitted and
    /// of all copied tensors.
    pub(crate) fn counts(&self) -> (u64, usize, [u64; 2]) {
        self.collect();
        let in_flight = self.tickets.lock().in_flight();
        let Counts { operations, bytes, copied_bytes, .. } = &*self.counts;
        let bytes = [bytes, copied_bytes].map(|count| count.load(Relaxed));
        (operations.load(Relaxed), in_flight, bytes)
    }
}
