//! Times in which the program makes no training steps, on purpose: an evaluation, a checkpoint.
//!
//! The daemon learns of them, so that a job that stands still meanwhile is not reported. Reports
//! show the innermost pause.

use gradwire_proto::pb::{self, worker_message::Message};

use crate::session::Session;

/// The program makes no steps until this is dropped.
#[derive(Debug)]
#[must_use = "the pause ends when this is dropped"]
pub struct Paused {
    session: Session,
    number: u64,
}

impl Session {
    /// Says that the program makes no training steps for a while, because of `what`, such as
    /// `evaluation`. Until the result is dropped, a job that stands still is not reported, and no
    /// wait ends it (`watchdog.*`, `negotiation.stall_shutdown_ms`). Reports show the pause.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), gradwire_worker::GradwireError> {
    /// # let session = gradwire_worker::Session::from_env()?;
    /// let paused = session.paused("evaluation");
    /// // … evaluate …
    /// drop(paused);
    /// # Ok(())
    /// # }
    /// ```
    pub fn paused(&self, what: &str) -> Paused {
        let what = if what.is_empty() { "no reason given" } else { what };
        let number = self.pauses().begin(what);
        self.tell_pause();
        Paused { session: self.clone(), number }
    }

    /// Tells the daemon what the program does now.
    pub(crate) fn tell_pause(&self) {
        let pauses = self.pauses();
        let shared = self.shared();
        if self.check_process().is_ok() && shared.ended().is_none() {
            // If it can't be sent, the watcher notices that.
            let what = pauses.what().to_owned();
            let _ = shared.send(Message::Paused(pb::Paused { what }), None);
        }
    }

    /// A new daemon knows of no pause.
    pub(crate) fn tell_pause_again(&self) {
        if !self.pauses().what().is_empty() {
            self.tell_pause();
        }
    }
}

impl Drop for Paused {
    fn drop(&mut self) {
        self.session.pauses().end(self.number);
        self.session.tell_pause();
    }
}
