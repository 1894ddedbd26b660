//! How a session ends: the first cause is kept, the memory of operations in flight is taken back,
//! and all waiters are woken (TELL).

use std::{
    io::Write as _,
    net::Shutdown,
    sync::atomic::Ordering::Relaxed,
    time::{Duration, Instant},
};

use gradwire_proto::{
    Ending, Failure, FailureKind,
    pb::{self, worker_message::Message},
};

use super::Shared;
use crate::{
    error::{GradwireError, Result},
    memory::Keep,
};

/// How long the daemon may take to answer when this rank leaves.
pub(crate) const FAREWELL: Duration = Duration::from_secs(5);

/// The message of a rank that has failed. `cause`: the failure because of which it ends.
pub(crate) fn gives_up(reason: String, cause: Option<&Failure>) -> pb::GiveUp {
    pb::GiveUp { reason, cause: cause.cloned().map(Into::into) }
}

impl Shared {
    /// Ends the session; only the first cause counts (TELL). Takes the memory of all operations in
    /// flight back from the daemon, and wakes all waiters.
    pub(crate) fn finish(&self, end: Ending) {
        self.finish_once(end, |lent| {
            if let Err(error) = Keep::take_back(lent.iter().flatten()) {
                // The program would use the memory again while the daemon could still write to it,
                // and wrong data is the worst error. A panic could go unnoticed in this thread.
                let _ = writeln!(
                    std::io::stderr(),
                    "gradwire: memory can't be taken back from the daemon: {error}"
                );
                std::process::abort();
            }
        });
    }

    /// Like [`Shared::finish`], but takes no memory back: the daemon has reported that its data
    /// threads have stopped.
    pub(crate) fn finish_stopped(&self, end: Ending) {
        self.finish_once(end, |_| {});
    }

    fn finish_once(&self, end: Ending, take_back: impl FnOnce(&[Vec<Keep>])) {
        // The end is visible only once the memory is back, and a second cause waits for the first.
        let mut freed = Vec::new();
        self.end.get_or_init(|| {
            // Operations that have succeeded by now keep their results. None can succeed later: the
            // daemon's results don't reach memory that was taken back.
            let _ = self.take_completed();
            let lent = self.tickets.lock().close();
            take_back(&lent);
            freed = lent;
            // If this process gave up by itself, its own reason is the first cause.
            let end = self.giving_up.get().cloned().map_or(end, Ending::Failed);
            if let Some(recorder) = self.recorder.get() {
                let tickets = self.tickets.lock();
                recorder.end(tickets.opened(), tickets.all_in_flight(), &end);
            }
            end
        });
        // Only now: releasing adopted memory checks whether the session has ended.
        drop(freed);
        self.segments.wake();
        self.control.wake_all();
    }

    /// How the session ended, if it has.
    pub(crate) fn ended(&self) -> Option<&Ending> {
        self.end.get()
    }

    /// An error once the session has ended.
    pub(crate) fn check(&self) -> Result<()> {
        if self.ended().is_none() && !self.watched.load(Relaxed) {
            // Normally the watcher reports the reason before it ends.
            let what = "the thread for the daemon's messages has ended";
            self.finish(Ending::Failed(Failure::new(FailureKind::Internal, what)));
        }
        self.ended().map_or(Ok(()), |end| Err(self.error_of(end)))
    }

    /// The error of calls after the session has ended.
    pub(super) fn error_of(&self, end: &Ending) -> GradwireError {
        match end {
            Ending::Finished => GradwireError::Closed,
            Ending::Failed(failure) => self.failed(failure.clone()),
        }
    }

    /// The error that reports a failure.
    pub(super) fn failed(&self, failure: Failure) -> GradwireError {
        if self.is_elastic && failure.is_recoverable() {
            GradwireError::Recoverable(failure)
        } else {
            GradwireError::Failed(failure)
        }
    }

    /// Notes the failure that calls get if the session ends now, because this rank wants it to.
    pub(crate) fn will_end(&self, failure: Failure) {
        let _ = self.giving_up.set(failure);
    }

    /// Gives up: reports the reason to the daemon, waits for its reaction, and ends the session
    /// with the reason.
    pub(crate) fn give_up(&self, failure: Failure) {
        self.give_up_after(failure, None);
    }

    /// As [`Shared::give_up`], because of a failure that this rank has received.
    pub(crate) fn give_up_after(&self, failure: Failure, cause: Option<&Failure>) {
        self.will_end(failure.clone());
        let _ = self.send(Message::GiveUp(gives_up(failure.text(), cause)), None);
        // To the daemon the half-closed connection means that this process has ended. It closes its
        // half, and then the watcher ends the session.
        let _ = self.stream.shutdown(Shutdown::Write);
        self.wait_for_end(FAREWELL);
        self.finish(Ending::Failed(failure));
    }

    /// Ends the connection, if it has not ended yet.
    pub(crate) fn hang_up(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    pub(super) fn wait_for_end(&self, within: Duration) {
        let deadline = Instant::now() + within;
        while self.ended().is_none() && Instant::now() < deadline {
            let seen = self.control.epoch();
            if self.ended().is_none() {
                self.control.wait(seen, Duration::from_millis(20), Duration::ZERO);
            }
        }
    }
}

/// Reports the end of a thread for the daemon's messages, even if it panics.
pub(crate) struct Unwatched<'a>(pub(crate) &'a Shared);

impl Drop for Unwatched<'_> {
    fn drop(&mut self) {
        self.0.watched.store(false, Relaxed);
        self.0.control.wake_all();
    }
}
