//! Statistics of times. Pure.

use serde::Serialize;

/// The times of a measurement, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Stats {
    /// The shortest time.
    pub min_us: f64,
    /// The median; of an even number of times, the mean of the middle two.
    pub median_us: f64,
    /// The 99th percentile; of fewer than 100 times, the longest.
    pub p99_us: f64,
}

/// Microseconds, rounded to the clock's resolution of a nanosecond.
pub fn micros_of(seconds: f64) -> f64 {
    (seconds * 1e9).round() / 1e3
}

impl Stats {
    /// The statistics of times in seconds. All are zero without times.
    pub fn of(times: &[f64]) -> Self {
        let mut sorted: Vec<f64> = times.iter().copied().map(micros_of).collect();
        sorted.sort_by(f64::total_cmp);
        // The rank of the 99th percentile, ceil(0.99 n), in integer arithmetic.
        let rank = (sorted.len() * 99).div_ceil(100);
        let at = |i: usize| sorted.get(i).copied().unwrap_or_default();
        let middle = sorted.len() / 2;
        let median = if sorted.len().is_multiple_of(2) {
            f64::midpoint(at(middle.wrapping_sub(1)), at(middle))
        } else {
            at(middle)
        };
        Self { min_us: at(0), median_us: median, p99_us: at(rank.wrapping_sub(1)) }
    }

    /// The median in seconds.
    pub fn median(&self) -> f64 {
        self.median_us / 1e6
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_and_the_tail_are_right() {
        let of = |micros: &[f64]| {
            let seconds: Vec<_> = micros.iter().map(|us| us / 1e6).collect();
            let stats = Stats::of(&seconds);
            [stats.min_us, stats.median_us, stats.p99_us]
        };
        assert_eq!(of(&[3.0, 1.0, 2.0]), [1.0, 2.0, 3.0]);
        assert_eq!(of(&[4.0, 1.0, 2.0, 3.0]), [1.0, 2.5, 4.0]);
        assert_eq!(of(&[7.0]), [7.0; 3]);
        assert_eq!(of(&[]), [0.0; 3]);
        let hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(of(&hundred), [1.0, 50.5, 99.0]);
        let two_hundred: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!(of(&two_hundred)[2], 198.0);
    }
}
