//! The monotonic clock as a number, which all processes of a machine share.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of the monotonic clock.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // It counts from the start of the machine: it is not negative, and fits for 500 years.
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}

/// Converts instants of this process to nanoseconds of the monotonic clock.
#[derive(Debug, Clone, Copy)]
pub struct Instants {
    at: Instant,
    at_ns: u64,
}

impl Default for Instants {
    fn default() -> Self {
        Self { at: Instant::now(), at_ns: now_ns() }
    }
}

impl Instants {
    /// The same moment in nanoseconds of the monotonic clock.
    pub fn ns(&self, at: Instant) -> u64 {
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        match at.checked_duration_since(self.at) {
            Some(later) => self.at_ns.saturating_add(ns(later)),
            None => self.at_ns.saturating_sub(ns(self.at.duration_since(at))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instant_is_between_two_readings_of_the_clock() {
        let instants = Instants::default();
        let before = now_ns();
        let at = Instant::now();
        let after = now_ns();
        // Both clocks of `Instants` were read one after the other.
        let slack = 1_000_000;
        let ns = instants.ns(at);
        assert!(ns + slack >= before && ns <= after + slack, "{before} {ns} {after}");
        assert!(instants.ns(at - Duration::from_secs(5)) + 4_000_000_000 < before);
    }
}
