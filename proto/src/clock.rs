//! Round trips and clock offsets, from heartbeats.
//!
//! A node and the coordinator echo each other's heartbeats. An echo travels with the next heartbeat
//! of the other side, which also says how long it has held the echo:
//!
//! ```text
//!  node         sent ─┐                                ┌─► arrived
//!                     └────►┐                    ┌─────┘
//!  coordinator              └─ held for a while ─┘ answered
//! ```
//!
//! The round trip is the time measured at the node minus the time at the coordinator. Within it,
//! the coordinator's clock was read at an unknown moment. If this is assumed to be the middle, the
//! offset of the clocks is wrong by at most half of the round trip, however unequal the two
//! directions are.

use std::{
    collections::VecDeque,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// The number of exchanges that an [`Estimate`] compares.
const KEPT: usize = 16;

/// How fast two clocks may diverge, in parts per million. A quartz in a warm rack stays below 50.
const DRIFT_PPM: u32 = 100;

/// A clock that never jumps. It starts at the system's time, in nanoseconds since 1970, and then
/// follows the monotonic clock. Only the offset between two such clocks is meaningful.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    begin: Instant,
    began_ns: u64,
}

impl Default for Clock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock {
    /// A clock that starts at the system's time.
    pub fn new() -> Self {
        let begin = Instant::now();
        // If the system's clock is before 1970, the offset is just large.
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { begin, began_ns: nanoseconds(since) }
    }

    /// Nanoseconds since 1970; more than 0.
    pub fn now_ns(&self) -> u64 {
        self.began_ns.saturating_add(nanoseconds(self.begin.elapsed())).max(1)
    }
}

/// A duration in nanoseconds, as in messages.
pub fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// A heartbeat of this side and its echo from the other side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exchange {
    /// This side's clock when it sent its heartbeat.
    pub sent_ns: u64,
    /// How long the other side held the echo.
    pub held_ns: u64,
    /// The other side's clock when it sent the echo.
    pub answered_ns: u64,
    /// This side's clock when the echo arrived.
    pub arrived_ns: u64,
}

/// The result of an exchange of heartbeats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Measured {
    /// The time in transit, there and back.
    pub round_trip: Duration,
    /// How far this side's clock is ahead of the other side's, in nanoseconds.
    pub offset_ns: i64,
    /// The largest possible error of the offset.
    pub error: Duration,
}

impl Exchange {
    /// The result. `None` if the other side claims to have held the echo for longer than the
    /// exchange took, or the times are out of range (TRUST).
    pub fn measure(&self) -> Option<Measured> {
        let away_ns = self.arrived_ns.checked_sub(self.sent_ns)?;
        let round_trip_ns = away_ns.checked_sub(self.held_ns)?;
        let half_ns = round_trip_ns.div_ceil(2);
        let other_ns = i128::from(self.answered_ns) + i128::from(half_ns);
        let offset_ns = i64::try_from(i128::from(self.arrived_ns) - other_ns).ok()?;
        let round_trip = Duration::from_nanos(round_trip_ns);
        Some(Measured { round_trip, offset_ns, error: Duration::from_nanos(half_ns) })
    }
}

/// The offset of two clocks, from the best of the latest exchanges.
#[derive(Debug, Default)]
pub struct Estimate {
    /// Each with this side's time when it was added.
    latest: VecDeque<(Instant, Measured)>,
}

impl Estimate {
    /// Adds a measurement of `now`. Returns the one with the smallest error; errors grow with age
    /// because clocks drift.
    pub fn add(&mut self, measured: Measured, now: Instant) -> Measured {
        if self.latest.len() == KEPT {
            self.latest.pop_front();
        }
        self.latest.push_back((now, measured));
        let aged = |(at, measured): &(Instant, Measured)| {
            let drift = now.saturating_duration_since(*at) * DRIFT_PPM / 1_000_000;
            Measured { error: measured.error + drift, ..*measured }
        };
        let best = self.latest.iter().map(aged).min_by_key(|measured| measured.error);
        best.unwrap_or(measured)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// For any times in transit, and however long the echo is held.
        #[test]
        fn the_offset_is_within_its_error(
            start in 1_u64 << 40..1 << 60,
            offset in -(1_i64 << 39)..1 << 39,
            there in 0_u64..1 << 32,
            held_ns in 0_u64..1 << 36,
            back in 0_u64..1 << 32,
        ) {
            let answered_ns = (start + there + held_ns).checked_add_signed(-offset).unwrap();
            let arrived_ns = start + there + held_ns + back;
            let exchange = Exchange { sent_ns: start, held_ns, answered_ns, arrived_ns };
            let measured = exchange.measure().unwrap();
            prop_assert_eq!(measured.round_trip, Duration::from_nanos(there + back));
            let wrong = Duration::from_nanos(measured.offset_ns.abs_diff(offset));
            prop_assert!(wrong <= measured.error, "{:?}: {:?} off", measured, wrong);
        }
    }

    #[test]
    fn an_impossible_echo_is_ignored() {
        let good = Exchange { sent_ns: 100, held_ns: 50, answered_ns: 7, arrived_ns: 160 };
        assert_eq!(good.measure().unwrap().round_trip, Duration::from_nanos(10));
        for bad in [
            Exchange { sent_ns: 161, ..good },
            Exchange { held_ns: 61, ..good },
            Exchange { held_ns: u64::MAX, ..good },
            Exchange { answered_ns: u64::MAX, ..good },
        ] {
            assert_eq!(bad.measure(), None, "TRUST: {bad:?}");
        }
    }

    #[test]
    fn the_smallest_error_wins_until_it_is_old() {
        let (mut estimate, begin) = (Estimate::default(), Instant::now());
        let after = |milliseconds| begin + Duration::from_millis(milliseconds);
        let measured = |micros, offset_ns| Measured {
            round_trip: Duration::from_micros(2 * micros),
            offset_ns,
            error: Duration::from_micros(micros),
        };
        assert_eq!(estimate.add(measured(90, 1), begin), measured(90, 1));
        assert_eq!(estimate.add(measured(30, 2), after(100)), measured(30, 2));
        // 30 µs, and 100 ppm of 0.4 s.
        let best = estimate.add(measured(80, 3), after(500));
        assert_eq!((best.offset_ns, best.error), (2, Duration::from_micros(70)));
        // 110 µs by now, so a later exchange is better.
        let best = estimate.add(measured(100, 4), after(900));
        assert_eq!((best.offset_ns, best.error), (4, Duration::from_micros(100)));
        // BOUND: only the latest ones are kept.
        for _ in 0..3 * KEPT {
            estimate.add(measured(200, 5), after(900));
        }
        assert_eq!(estimate.add(measured(200, 6), after(900)).offset_ns, 5);
        assert_eq!(estimate.latest.len(), KEPT);
    }

    #[test]
    fn a_clock_starts_at_the_systems_time() {
        let clock = Clock::new();
        let first = clock.now_ns();
        let system = nanoseconds(SystemTime::now().duration_since(UNIX_EPOCH).unwrap());
        assert!(first > 0 && clock.now_ns() >= first);
        assert!(first <= system + 1_000_000_000, "{first}, and the system has {system}");
    }
}
