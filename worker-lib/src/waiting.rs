//! Waiting for the outcome of an operation.
//!
//! WAIT: every wait ends with an outcome, the session's end, or a deadline.

use std::time::{Duration, Instant};

use gradwire_trace::Kind;

use crate::{
    error::Result,
    shared::{Done, Shared},
    stuck::{Endless, Others},
    waiters::{LOOK_AROUND, On},
};

/// A thread that has waited for this long looks whether the whole process is stuck.
const SETTLED: Duration = Duration::from_millis(200);

impl Shared {
    /// Waits for an operation's outcome; `None` if the deadline passed first.
    pub(crate) fn wait(&self, ticket: u64, deadline: Option<Instant>) -> Option<Result<Done>> {
        let began = self.control.traced();
        let outcome = self.wait_until(ticket, deadline);
        self.record(Kind::Wait, began, ticket);
        outcome
    }

    fn wait_until(&self, ticket: u64, deadline: Option<Instant>) -> Option<Result<Done>> {
        let mut blocked = None;
        let mut endless = None;
        loop {
            let seen = self.control.epoch();
            self.collect();
            let outcome = self.take_outcome(ticket);
            if let Some(outcome) = outcome {
                return Some(outcome);
            }
            if let Err(error) = self.check() {
                return Some(Err(error));
            }
            let left = match deadline {
                None if blocked.is_none() => SETTLED,
                None => LOOK_AROUND,
                Some(deadline) => deadline.saturating_duration_since(Instant::now()),
            };
            if left.is_zero() {
                return None;
            }
            if deadline.is_none() && blocked.is_some() {
                endless.get_or_insert_with(|| Endless::new(self, On::Ticket(ticket)));
                self.say_stuck(self.control.epoch(), Others::Unknown);
            }
            blocked.get_or_insert_with(|| self.control.block());
            self.control.wait_for(ticket, seen, left.min(LOOK_AROUND), self.spin);
        }
    }
}
