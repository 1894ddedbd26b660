//! How a rank spends its time, for the metrics: its steps, how long it is blocked in waits, and how
//! long it has operations in flight. This needs no system calls, and nothing depends on it.
//!
//! The time in a state is the sum of the ends of its periods minus the sum of their beginnings, in
//! nanoseconds of the system's monotonic clock, wrapping around. So each change of the state is one
//! addition to one word, in any order, and the reader adds the current time if a period has not
//! ended.

use std::{
    sync::atomic::{
        AtomicU32, AtomicU64,
        Ordering::{AcqRel, Acquire, Relaxed},
    },
    time::Duration,
};

use gradwire_trace::time::now_ns as now;
use parking_lot::Mutex;

use super::{page::Page, stuck};

/// A period begins.
pub(super) fn begin(time: &AtomicU64) {
    time.fetch_sub(now(), Relaxed);
}

/// A period ends.
pub(super) fn end(time: &AtomicU64) {
    time.fetch_add(now(), Relaxed);
}

/// How many submissions have no answer, and for how long there were any.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    count: AtomicU32,
    time: AtomicU64,
}

impl InFlight {
    /// One more; returns how many there were.
    pub(super) fn add(&self) -> u32 {
        let before = self.count.fetch_add(1, Relaxed);
        if before == 0 {
            begin(&self.time);
        }
        before
    }

    /// One has been answered. An excess answer is ignored.
    pub(super) fn remove(&self) {
        let before = self.count.fetch_update(Relaxed, Relaxed, |count| count.checked_sub(1));
        if before == Ok(1) {
            end(&self.time);
        }
    }

    pub(super) fn count(&self) -> u32 {
        self.count.load(Relaxed)
    }
}

/// While this exists, a thread of the worker counts as blocked.
#[derive(Debug)]
pub struct Blocked<'a> {
    threads: &'a AtomicU32,
    time: &'a AtomicU64,
}

impl<'a> Blocked<'a> {
    pub(super) fn new(page: &'a Page) -> Self {
        let (threads, time) = (page.blocked_threads(), page.blocked_time());
        if threads.fetch_add(1, AcqRel) == 0 {
            begin(time);
        }
        Self { threads, time }
    }
}

impl Drop for Blocked<'_> {
    fn drop(&mut self) {
        if self.threads.fetch_sub(1, AcqRel) == 1 {
            end(self.time);
        }
    }
}

/// The increase since the last call of [`Activity::look`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// Steps of the program.
    pub steps: u64,
    /// Time in which some thread was blocked in a wait.
    pub blocked: Duration,
    /// Time in which operations were in flight.
    pub in_flight: Duration,
    /// How long ago the last step was; `None` before the first one.
    pub since_step: Option<Duration>,
}

/// Reads a rank's activity. The rank may have written anything (TRUST): impossible values are
/// ignored.
#[derive(Debug)]
pub struct Activity {
    page: Page,
    in_flight: std::sync::Arc<InFlight>,
    last: Mutex<Last>,
}

/// The values of the last call.
#[derive(Debug)]
struct Last {
    at: u64,
    steps: u64,
    blocked: u64,
    in_flight: u64,
}

/// More steps than this in a second are not believed.
const MOST_STEPS: u64 = 1_000_000;

impl Activity {
    pub(super) fn new(page: Page, in_flight: std::sync::Arc<InFlight>) -> Self {
        let last = Last { at: now(), steps: 0, blocked: 0, in_flight: 0 };
        Self { page, in_flight, last: Mutex::new(last) }
    }

    /// A ticket that the rank waits for, if it can do nothing until one of its operations ends, and
    /// how many of its submissions have no answer.
    pub fn stuck(&self) -> Option<(u64, u32)> {
        let in_flight = self.in_flight.count();
        stuck::look(&self.page, in_flight).map(|ticket| (ticket, in_flight))
    }

    /// How long the rank has been blocked, as it says itself (TRUST). The time may be far off while
    /// a wait begins or ends. This takes no lock.
    pub fn blocked(&self) -> Duration {
        let threads = || self.page.blocked_threads().load(Acquire);
        Duration::from_nanos(total(self.page.blocked_time(), threads))
    }

    /// The increase since the last call.
    pub fn look(&self) -> Progress {
        let mut last = self.last.lock();
        let last = &mut *last;
        // The clock is read after the state, so it is later than all times in it.
        let blocked = total(self.page.blocked_time(), || self.page.blocked_threads().load(Acquire));
        let in_flight = total(&self.in_flight.time, || self.in_flight.count());
        let (steps, step_at) = (self.page.steps().load(Acquire), self.page.step_at().load(Relaxed));
        let now = now();
        let passed = now.saturating_sub(last.at);
        last.at = now;
        let most_steps = (passed / 1_000_000_000 + 1).saturating_mul(MOST_STEPS);
        let new_steps = steps.saturating_sub(last.steps);
        last.steps = last.steps.max(steps);
        Progress {
            steps: if new_steps <= most_steps { new_steps } else { 0 },
            blocked: added(&mut last.blocked, blocked, passed),
            in_flight: added(&mut last.in_flight, in_flight, passed),
            since_step: (steps > 0 && step_at > 0 && step_at <= now)
                .then(|| Duration::from_nanos(now - step_at)),
        }
    }
}

/// The time in a state up to now; `count` threads or operations are in it.
fn total(time: &AtomicU64, count: impl Fn() -> u32) -> u64 {
    let active = count() > 0;
    let time = time.load(Relaxed);
    if active { time.wrapping_add(now()) } else { time }
}

/// The increase of a total since it was `last`, if that is possible in the time that has passed. A
/// total that is read while a period begins or ends may be far off; the next one is right again.
fn added(last: &mut u64, total: u64, passed: u64) -> Duration {
    // The last call may have missed part of a period.
    const LATE: u64 = 60_000_000_000;
    match total.checked_sub(*last) {
        Some(more) if more <= passed.saturating_add(LATE) => {
            *last = total;
            Duration::from_nanos(more)
        }
        _ => Duration::ZERO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn periods_that_overlap_count_once() {
        let in_flight = InFlight::default();
        let shown = || total(&in_flight.time, || in_flight.count());
        assert_eq!(shown(), 0);
        let began = now();
        assert_eq!((in_flight.add(), in_flight.add()), (0, 1));
        std::thread::sleep(Duration::from_millis(5));
        let during = shown();
        in_flight.remove();
        in_flight.remove();
        let took = now() - began;
        let after = shown();
        assert!((5_000_000..=took).contains(&during), "{during} of {took}");
        assert!((during..=took).contains(&after), "{after} of {took}");
        // One answer too many.
        in_flight.remove();
        assert_eq!((in_flight.count(), shown()), (0, after));
    }

    #[test]
    fn impossible_totals_are_ignored() {
        let mut last = 1000;
        assert_eq!(added(&mut last, 1500, 10_000), Duration::from_nanos(500));
        for nonsense in [0, 1499, u64::MAX, 1 << 63] {
            assert_eq!(added(&mut last, nonsense, 10_000), Duration::ZERO);
        }
        assert_eq!(added(&mut last, 1600, 10_000), Duration::from_nanos(100));
    }
}
