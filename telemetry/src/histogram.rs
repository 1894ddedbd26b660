//! Histograms and counters of durations, as fixed arrays of atomics.
//!
//! Recording is two additions and no search: the bounds double, so the bucket follows from the
//! number of leading zeros. Nothing grows between two reads, so there is no maintenance.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// The upper bound of the first bucket, in nanoseconds.
const FIRST_NS: u64 = 5_000;

/// The number of bounds, which double from 5 µs up to 84 s. One more bucket is for longer times.
pub const BOUNDS: usize = 25;

#[derive(Debug, Default)]
struct Buckets {
    /// The count of each bucket, not cumulative.
    counts: [AtomicU64; BOUNDS + 1],
    sum_ns: AtomicU64,
}

/// A histogram of durations. Clones record into the same buckets.
#[derive(Debug, Clone, Default)]
pub struct Histogram(Arc<Buckets>);

/// The content of a histogram at one moment.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Recorded {
    /// Each bound, in seconds, with the number of durations up to it.
    pub(crate) cumulative: [(f64, u64); BOUNDS],
    pub(crate) count: u64,
    pub(crate) sum: Duration,
}

pub(crate) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The first bucket with a bound of at least `ns`.
fn bucket(ns: u64) -> usize {
    let multiple = ns.saturating_sub(1) / FIRST_NS;
    ((u64::BITS - multiple.leading_zeros()) as usize).min(BOUNDS)
}

impl Histogram {
    /// Records one duration.
    pub fn record(&self, time: Duration) {
        let ns = nanoseconds(time);
        self.0.counts[bucket(ns)].fetch_add(1, Ordering::Relaxed);
        self.0.sum_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// The count is the sum of the buckets, so they agree even while other threads record.
    pub(crate) fn recorded(&self) -> Recorded {
        let sum = Duration::from_nanos(self.0.sum_ns.load(Ordering::Relaxed));
        let mut count = 0;
        let cumulative = std::array::from_fn(|index| {
            count += self.0.counts[index].load(Ordering::Relaxed);
            ((FIRST_NS << index) as f64 / 1e9, count)
        });
        count += self.0.counts[BOUNDS].load(Ordering::Relaxed);
        Recorded { cumulative, count, sum }
    }
}

/// A sum of durations. Clones add to the same sum.
#[derive(Debug, Clone, Default)]
pub struct TimeCounter(Arc<AtomicU64>);

impl TimeCounter {
    /// Adds a duration.
    pub fn add(&self, time: Duration) {
        self.0.fetch_add(nanoseconds(time), Ordering::Relaxed);
    }

    /// Adds a number of seconds.
    pub(crate) fn add_seconds(&self, seconds: f64) {
        self.add(Duration::try_from_secs_f64(seconds).unwrap_or_default());
    }

    /// Sets the sum to one that was counted elsewhere.
    pub(crate) fn set_seconds(&self, seconds: f64) {
        let sum = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        self.0.fetch_max(nanoseconds(sum), Ordering::Relaxed);
    }

    pub(crate) fn sum(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bounds_double_from_5_us_to_more_than_80_s() {
        let bounds = Histogram::default().recorded().cumulative.map(|(bound, _)| bound);
        assert_eq!((bounds[0], bounds[1], bounds[BOUNDS - 1]), (5e-6, 1e-5, 83.88608));
        assert!(bounds.windows(2).all(|two| two[1] == 2.0 * two[0]), "{bounds:?}");
    }

    #[test]
    fn a_duration_is_in_the_first_fitting_bucket() {
        for index in 0..BOUNDS {
            let bound = FIRST_NS << index;
            assert_eq!(bucket(bound), index, "{bound}");
            assert_eq!(bucket(bound + 1), index + 1, "{bound}");
        }
        assert_eq!((bucket(0), bucket(u64::MAX)), (0, BOUNDS));
    }

    #[test]
    fn a_duration_counts_in_every_bound_above_it() {
        let histogram = Histogram::default();
        let threads = [7_u64, 700, 70_000].map(|micros| {
            let histogram = histogram.clone();
            std::thread::spawn(move || {
                (0..1000).for_each(|_| histogram.record(Duration::from_micros(micros)));
            })
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        histogram.record(Duration::from_secs(100));
        let Recorded { cumulative, count, sum } = histogram.recorded();
        for (bound, below) in cumulative {
            let expected = [7e-6, 7e-4, 7e-2].iter().filter(|time| **time <= bound).count();
            assert_eq!(below, 1000 * expected as u64, "{bound}");
        }
        assert_eq!((count, sum), (3001, Duration::from_micros(70_707_000 + 100_000_000)));
    }
}
