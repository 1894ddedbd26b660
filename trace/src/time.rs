//! The monotonic clock as a number that all processes of a machine share.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of the monotonic clock.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // It counts from the start of the machine, so it is not negative, and fits for 500 years.
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}

/// How close the readings of two clocks should be.
const CLOSE_NS: u64 = 1_000;

/// How often the clocks are read at most.
const TRIES: usize = 64;

/// Reads another clock, and the monotonic one at the same moment. A thread may be stopped between
/// two readings, so the closest ones count.
pub fn beside<T>(read: impl Fn() -> T) -> (T, u64) {
    let once = || {
        let before_ns = now_ns();
        let other = read();
        let took_ns = now_ns().saturating_sub(before_ns);
        (took_ns, other, before_ns + took_ns / 2)
    };
    let mut best = once();
    for _ in 1..TRIES {
        if best.0 <= CLOSE_NS {
            break;
        }
        let next = once();
        if next.0 < best.0 {
            best = next;
        }
    }
    (best.1, best.2)
}

/// Converts instants of this process to nanoseconds of the monotonic clock.
#[derive(Debug, Clone, Copy)]
pub struct Instants {
    at: Instant,
    at_ns: u64,
}

impl Default for Instants {
    fn default() -> Self {
        let (at, at_ns) = beside(Instant::now);
        Self { at, at_ns }
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
    fn clocks_are_read_together_despite_stops() {
        let stops = std::cell::Cell::new(3_u32);
        let (other, own) = beside(|| {
            let ns = now_ns();
            if stops.replace(stops.get().saturating_sub(1)) > 0 {
                std::thread::sleep(Duration::from_millis(20));
            }
            ns
        });
        assert!(own.abs_diff(other) < 10_000_000, "{own} {other}");
    }

    #[test]
    fn instants_are_between_readings() {
        let instants = Instants::default();
        let before = now_ns();
        let at = Instant::now();
        let after = now_ns();
        // Both clocks of `Instants` were read nearly at once.
        let slack = 1_000_000;
        let ns = instants.ns(at);
        assert!(ns + slack >= before && ns <= after + slack, "{before} {ns} {after}");
        assert!(instants.ns(at - Duration::from_secs(5)) + 4_000_000_000 < before);
    }
}
