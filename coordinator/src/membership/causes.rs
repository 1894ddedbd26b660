//! Finds the first cause. When something fails, several nodes notice it in different ways at about
//! the same time. All nodes should receive the report that is nearest to the root cause (TELL).
//!
//! The kinds of failures decide first: a rank that was killed before one that gave up, and both
//! before a lost connection. Among failures of equal kinds, the cause is the failure that was
//! noticed first by the coordinator's clock, as far as that is known.

use std::time::Duration;

use gradwire_proto::{Failure, FailureKind};

use crate::model::event::Noticed;

/// How long to wait for a report of an earlier cause, besides the time that it is under way. A
/// daemon needs a moment to learn how a process has ended.
const EARLIER: Duration = Duration::from_millis(100);

/// The reports that arrive within a window after the first one.
#[derive(Debug)]
pub(crate) struct Causes {
    /// When the window closes.
    pub(crate) until: Duration,
    best: Failure,
    noticed: Noticed,
    reports: usize,
}

impl Causes {
    /// Opens a window of this length `now`, with its first report.
    pub(crate) fn new(failure: Failure, noticed: Noticed, window: Duration, now: Duration) -> Self {
        let mut causes = Self { until: now + window, best: failure, noticed, reports: 1 };
        causes.limit(noticed, now);
        causes
    }

    /// Adds a report.
    pub(crate) fn report(&mut self, failure: Failure, noticed: Noticed, now: Duration) {
        self.reports += 1;
        let (new, best) = (rootness(&failure), rootness(&self.best));
        if new > best || new == best && noticed.is_before(&self.noticed) {
            (self.best, self.noticed) = (failure, noticed);
            self.limit(noticed, now);
        }
    }

    /// Once no other kind could be nearer to the root, only an earlier report could change the
    /// cause.
    fn limit(&mut self, noticed: Noticed, now: Duration) {
        if self.best.kind.rootness() >= FailureKind::WorkerLost.rootness() {
            // Without a time, nothing is known to be earlier.
            let wait = noticed.at.map_or(Duration::ZERO, |_| noticed.trip + EARLIER);
            self.until = self.until.min(now + wait);
        }
    }

    /// The best-known cause.
    pub(crate) fn cause(&self) -> &Failure {
        &self.best
    }

    /// The number of reports.
    pub(crate) fn reports(&self) -> usize {
        self.reports
    }
}

/// How near to the root cause a failure is. Others may give up because a rank was killed, but not
/// the other way round.
fn rootness(failure: &Failure) -> (u8, bool) {
    (failure.kind.rootness(), failure.details.killed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn failure(kind: FailureKind, what: &str) -> Failure {
        Failure::new(kind, what)
    }

    fn at(at: u32) -> Noticed {
        Noticed { at: Some(MS * at), trip: MS * 50 }
    }

    #[test]
    fn the_earliest_report_of_the_root_wins() {
        use FailureKind::{ConnectionLost, NodeLost, WorkerLost};
        let unknown = Noticed::UNKNOWN;
        let now = MS * 1000;
        let mut causes = Causes::new(failure(ConnectionLost, "first"), unknown, MS * 200, now);
        causes.report(failure(ConnectionLost, "second"), unknown, now);
        assert_eq!(causes.cause().what, "first");
        assert_eq!(causes.until, MS * 1200);
        causes.report(failure(NodeLost, "third"), unknown, now);
        assert_eq!(causes.cause().what, "third");
        causes.report(failure(WorkerLost, "fourth"), unknown, now);
        causes.report(failure(WorkerLost, "fifth"), unknown, now);
        assert_eq!(causes.cause().what, "fourth");
        assert_eq!(causes.until, now, "no report could change the cause");
        assert_eq!(causes.reports(), 5);
    }

    #[test]
    fn a_cause_that_was_noticed_before_wins() {
        let kind = FailureKind::WorkerLost;
        let mut causes = Causes::new(failure(kind, "late"), at(100), MS * 300, MS * 110);
        assert_eq!(causes.until, MS * 260, "a report may be under way for 50 ms");
        causes.report(failure(kind, "later"), at(103), MS * 120);
        assert_eq!(causes.cause().what, "late", "it was noticed later");
        causes.report(failure(kind, "unknown"), Noticed::UNKNOWN, MS * 130);
        causes.report(failure(kind, "earlier"), at(60), MS * 140);
        assert_eq!(causes.cause().what, "earlier");
        assert_eq!(causes.until, MS * 260, "the window does not move");
    }

    /// It may notice that by a connection of its own, before the daemon of the killed rank does.
    #[test]
    fn a_killed_rank_explains_one_that_gives_up() {
        let lost = |what| failure(FailureKind::WorkerLost, what);
        let mut causes = Causes::new(lost("gave up"), at(10), MS * 200, MS * 20);
        causes.report(lost("killed").killed(), at(13), MS * 30);
        causes.report(lost("also gave up"), at(5), MS * 40);
        assert_eq!(causes.cause().what, "killed");
    }

    /// The time does not matter for kinds: a broken connection is noticed before its cause.
    #[test]
    fn kinds_matter_more_than_times() {
        let lost = failure(FailureKind::ConnectionLost, "connection");
        let mut causes = Causes::new(lost.clone(), at(10), MS * 200, MS * 20);
        causes.report(failure(FailureKind::WorkerLost, "worker"), at(30), MS * 40);
        causes.report(lost, at(5), MS * 50);
        assert_eq!(causes.cause().what, "worker");
    }
}
