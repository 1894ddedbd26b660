//! Finds the first cause. When something fails, several nodes notice it in different ways at about
//! the same time. All nodes should receive the report that is nearest to the root cause (TELL).

use std::time::Duration;

use gradwire_proto::{Failure, FailureKind};

/// The reports that arrive within a window after the first one.
#[derive(Debug)]
pub(crate) struct Causes {
    /// When the window closes.
    pub(crate) until: Duration,
    best: Failure,
    reports: usize,
}

impl Causes {
    /// Opens a window with its first report.
    pub(crate) fn new(failure: Failure, until: Duration) -> Self {
        Self { until, best: failure, reports: 1 }
    }

    /// Adds a report. The one nearest to the root cause wins; among equals, the earliest.
    pub(crate) fn report(&mut self, failure: Failure) {
        self.reports += 1;
        if failure.kind.rootness() > self.best.kind.rootness() {
            self.best = failure;
        }
    }

    /// Whether no later report could change the cause.
    pub(crate) fn is_certain(&self) -> bool {
        self.best.kind.rootness() >= FailureKind::WorkerLost.rootness()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_report_of_the_root_wins() {
        let mut causes =
            Causes::new(Failure::new(FailureKind::ConnectionLost, "first"), Duration::ZERO);
        causes.report(Failure::new(FailureKind::ConnectionLost, "second"));
        assert_eq!(causes.cause().what, "first");
        assert!(!causes.is_certain());
        causes.report(Failure::new(FailureKind::NodeLost, "third"));
        assert_eq!(causes.cause().what, "third");
        causes.report(Failure::new(FailureKind::WorkerLost, "fourth"));
        causes.report(Failure::new(FailureKind::WorkerLost, "fifth"));
        assert_eq!(causes.cause().what, "fourth");
        assert!(causes.is_certain());
        assert_eq!(causes.reports(), 5);
    }
}
