//! The daemon's answers about memory segments that were handed over.
//!
//! WAIT: a wait for an answer ends with the answer, with the session, or at a deadline. After a
//! deadline the daemon may still take the segment, so its number is not used again, and the segment
//! is dropped as soon as the answer comes.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use gradwire_shm::arena::RegisterError;
use parking_lot::{Condvar, Mutex};

use crate::{
    error::{GradwireError, Result},
    waiters::LOOK_AROUND,
};

/// What is known about a segment that was handed over.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    /// A thread waits for the answer.
    Awaited,
    Taken,
    Refused(String),
    /// Nobody waits for the answer any more.
    GivenUp,
}

/// The segments that were handed over, by number.
#[derive(Debug, Default)]
pub(crate) struct Segments {
    answers: Mutex<BTreeMap<u32, Answer>>,
    changed: Condvar,
}

impl Segments {
    /// A segment is about to be handed over.
    pub(crate) fn expect(&self, segment: u32) {
        self.answers.lock().insert(segment, Answer::Awaited);
    }

    /// Forgets a segment that was given back.
    pub(crate) fn forget(&self, segment: u32) {
        self.answers.lock().remove(&segment);
    }

    /// Notes that the daemon has received a segment. Returns true if nobody wants it any more.
    pub(crate) fn taken(&self, segment: u32) -> bool {
        let mut answers = self.answers.lock();
        // TRUST: an answer that nobody has asked for is ignored.
        let given_up = match answers.get_mut(&segment) {
            Some(answer @ Answer::Awaited) => {
                *answer = Answer::Taken;
                false
            }
            Some(Answer::GivenUp) => true,
            _ => false,
        };
        self.changed.notify_all();
        given_up
    }

    /// Notes that the daemon can't use a segment.
    pub(crate) fn refused(&self, segment: u32, reason: String) {
        if let Some(answer @ Answer::Awaited) = self.answers.lock().get_mut(&segment) {
            *answer = Answer::Refused(reason);
        }
        self.changed.notify_all();
    }

    /// Wakes all waiting threads, because the session has ended. A thread that is about to wait
    /// sees the end, so no caller may hold the lock.
    pub(crate) fn wake(&self) {
        drop(self.answers.lock());
        self.changed.notify_all();
    }

    /// Waits for an answer. `check` is an error once the session has ended; it is called without
    /// the lock, which ending the session takes.
    pub(crate) fn wait(
        &self,
        segment: u32,
        within: Duration,
        check: impl Fn() -> Result<()>,
    ) -> Result<(), RegisterError> {
        let deadline = Instant::now() + within;
        loop {
            let ended = check();
            let mut answers = self.answers.lock();
            match answers.get(&segment) {
                Some(Answer::Taken) => return Ok(()),
                Some(Answer::Refused(reason)) => {
                    let text =
                        format!("the daemon of this node (gradwired) can't use it: {reason}");
                    answers.remove(&segment);
                    return Err(RegisterError::Refused(text.into()));
                }
                Some(Answer::Awaited | Answer::GivenUp) | None => {}
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let given_up = match ended {
                Err(error) => error,
                Ok(()) if left.is_zero() => {
                    let what = format!("the daemon's receipt of memory segment {segment}");
                    GradwireError::Timeout { what, after: within }
                }
                Ok(()) => {
                    self.changed.wait_for(&mut answers, left.min(LOOK_AROUND));
                    continue;
                }
            };
            answers.insert(segment, Answer::GivenUp);
            return Err(RegisterError::Unanswered(given_up.into()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(20);

    fn handed_over(segment: u32) -> Segments {
        let segments = Segments::default();
        segments.answers.lock().insert(segment, Answer::Awaited);
        segments
    }

    #[test]
    fn a_refusal_has_the_daemons_reason() {
        let segments = handed_over(3);
        segments.refused(3, "it has no address space".to_owned());
        let refused = segments.wait(3, SOON, || Ok(()));
        let Err(RegisterError::Refused(reason)) = refused else { panic!("{refused:?}") };
        assert!(reason.to_string().ends_with("it has no address space"), "{reason}");
        assert!(segments.answers.lock().is_empty());
    }

    #[test]
    fn a_late_answer_drops_the_segment() {
        let segments = handed_over(3);
        let late = segments.wait(3, SOON, || Ok(()));
        assert!(matches!(late, Err(RegisterError::Unanswered(_))), "{late:?}");
        assert!(segments.taken(3), "to be dropped");
        segments.answers.lock().insert(4, Answer::Awaited);
        assert!(!segments.taken(4));
        assert!(segments.wait(4, SOON, || Ok(())).is_ok());
    }

    #[test]
    fn the_end_of_the_session_ends_a_wait() {
        let segments = handed_over(3);
        let ended = segments.wait(3, Duration::from_secs(60), || Err(GradwireError::Closed));
        let Err(RegisterError::Unanswered(reason)) = ended else { panic!("{ended:?}") };
        assert_eq!(reason.to_string(), GradwireError::Closed.to_string());
    }

    #[test]
    fn answers_that_nobody_asked_for_are_ignored() {
        let segments = Segments::default();
        assert!(!segments.taken(9));
        segments.refused(9, "no".to_owned());
        assert!(segments.answers.lock().is_empty(), "TRUST");
    }
}
