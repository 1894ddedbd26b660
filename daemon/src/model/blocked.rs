//! What a local rank was blocked by, for reports. Pure, except for a lock.
//!
//! A rank counts how long it is blocked, but not why. When one of its operations ends, the time
//! that it was blocked since the previous end is the last part of that interval, because a rank
//! computes first and waits then. That part is cut where the operation reached its phases:
//!
//! ```text
//!  the rank submits   all ranks here have   the order arrives   result here   published
//!  ├──── gather ──────┼──── negotiate ──────┼───── transfer ────┼── publish ──┤
//!       ├──────────────────────── blocked ────────────────────────────────────┤
//! ```

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// A reading that exceeds the time that has passed by more than this is not believed (TRUST): the
/// rank has written nonsense, or was changing its counter at that moment.
const LATE: Duration = Duration::from_secs(60);

/// What a rank is blocked by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Other ranks of this node have not submitted the tensor.
    Gather,
    /// The order has not arrived.
    Negotiate,
    /// This node does not have the result.
    Transfer,
    /// The rank does not have the result.
    Publish,
}

/// The time for which a rank was blocked in each phase, by [`Phase`].
pub(crate) type Parts = [Duration; 4];

/// When an operation reached its phases.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reached {
    /// When all ranks of this node had submitted the tensor.
    pub(crate) announced: Instant,
    /// When its last order arrived.
    pub(crate) ordered: Instant,
    /// When the result was here; `None` if it was published as it was computed.
    pub(crate) complete: Option<Instant>,
    /// When the ranks got the result.
    pub(crate) published: Instant,
}

#[derive(Debug)]
struct State {
    /// The time blocked at the end of the last operation.
    blocked: Duration,
    at: Instant,
    parts: Parts,
}

/// What one rank was blocked by since it attached.
#[derive(Debug)]
pub(crate) struct BlockedBy(Mutex<State>);

impl BlockedBy {
    /// Not blocked by anything yet, at `now`.
    pub(crate) fn new(now: Instant) -> Self {
        let (blocked, parts) = Default::default();
        Self(Mutex::new(State { blocked, at: now, parts }))
    }

    /// An operation of the rank has ended. By then the rank says that it has been blocked for
    /// `blocked` since it attached.
    pub(crate) fn ended(&self, blocked: Duration, reached: &Reached) {
        let mut state = self.0.lock();
        let passed = reached.published.saturating_duration_since(state.at);
        state.at = reached.published;
        let Some(more) = blocked.checked_sub(state.blocked).filter(|it| *it <= passed + LATE)
        else {
            return;
        };
        state.blocked = blocked;
        let end = reached.published;
        let mut from = end.checked_sub(more.min(passed)).unwrap_or(end);
        let complete = reached.complete.unwrap_or(end);
        let untils = [reached.announced, reached.ordered, complete, end];
        for (part, until) in state.parts.iter_mut().zip(untils) {
            let until = until.clamp(from, end);
            *part += until - from;
            from = until;
        }
    }

    /// The time in each phase, of operations that have ended.
    pub(crate) fn look(&self) -> Parts {
        self.0.lock().parts
    }
}

/// The shares of `passed` in which a rank was blocked in each phase. `blocked` is the time that it
/// was blocked, and `parts` what is known of it. `open` is the phase of the operation that it has
/// waited for longest: the rest of the time belongs to it.
pub(crate) fn shares(
    blocked: Duration,
    parts: &Parts,
    open: Option<Phase>,
    passed: f64,
) -> [f64; 4] {
    let blocked = (blocked.as_secs_f64() / passed).min(1.0);
    let mut shares = parts.map(|part| part.as_secs_f64() / passed);
    let known: f64 = shares.iter().sum();
    if known > blocked {
        // An operation that was begun long ago has ended, and its time was reported before.
        return shares.map(|share| share * blocked / known);
    }
    // Without an operation, the rank is about to notice the result of the last one.
    shares[open.unwrap_or(Phase::Publish) as usize] += blocked - known;
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn blocked_time_is_cut_at_the_phases() {
        let began = Instant::now();
        let blocked_by = BlockedBy::new(began);
        let reached = |announced, ordered, complete, published| Reached {
            announced: began + ms(announced),
            ordered: began + ms(ordered),
            complete: Some(began + ms(complete)),
            published: began + ms(published),
        };
        // The rank computes for 40 ms, and waits for 60 ms.
        blocked_by.ended(ms(60), &reached(50, 70, 95, 100));
        assert_eq!(blocked_by.look(), [10, 20, 25, 5].map(ms));
        // It waits only for the end of the next one.
        blocked_by.ended(ms(68), &reached(110, 120, 195, 200));
        assert_eq!(blocked_by.look(), [10, 20, 28, 10].map(ms));
        // An operation whose result is published as it is computed.
        let at_once = Reached { complete: None, ..reached(290, 290, 0, 300) };
        blocked_by.ended(ms(168), &at_once);
        assert_eq!(blocked_by.look(), [100, 20, 38, 10].map(ms));
    }

    #[test]
    fn impossible_times_are_not_believed() {
        let began = Instant::now();
        let blocked_by = BlockedBy::new(began);
        let at = |at| {
            let now = began + ms(at);
            Reached { announced: now, ordered: now, complete: None, published: now }
        };
        blocked_by.ended(Duration::from_secs(1 << 40), &at(10));
        assert_eq!(blocked_by.look(), Parts::default(), "TRUST");
        blocked_by.ended(ms(500), &at(20));
        assert_eq!(blocked_by.look(), [10, 0, 0, 0].map(ms), "never more than has passed");
        blocked_by.ended(ms(100), &at(40));
        assert_eq!(blocked_by.look(), [10, 0, 0, 0].map(ms), "the time goes back");
    }

    #[test]
    fn the_parts_add_up_to_the_blocked_share() {
        let parts = [100, 0, 300, 0].map(ms);
        let close = |shares: [f64; 4], expected: [f64; 4]| {
            let is_close =
                shares.iter().zip(expected).all(|(one, other)| (one - other).abs() < 1e-9);
            assert!(is_close, "{shares:?}, expected {expected:?}");
        };
        close(shares(ms(400), &parts, None, 1.0), [0.1, 0.0, 0.3, 0.0]);
        close(shares(ms(600), &parts, Some(Phase::Negotiate), 1.0), [0.1, 0.2, 0.3, 0.0]);
        close(shares(ms(200), &parts, Some(Phase::Gather), 1.0), [0.05, 0.0, 0.15, 0.0]);
        close(shares(ms(9000), &Parts::default(), Some(Phase::Gather), 1.0), [1.0, 0.0, 0.0, 0.0]);
    }
}
