//! Mean, spread and median of the times of operations. Only times that the cost model predicts are
//! counted: of a single piece, of a burst, or of a piece in a pipeline that uses up the credit.

use std::time::Duration;

/// How many of the last times are kept, for the median (BOUND).
const RECENT: u64 = 31;

/// The mean and spread of all times, without keeping each (Welford, "Note on a method for
/// calculating corrected sums of squares and products", 1962), and the median of the last ones.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Observed {
    count: u64,
    mean: f64,
    /// The sum of the squared differences from the mean.
    squares: f64,
    /// The last times in seconds; the next one replaces the oldest.
    recent: Vec<f32>,
}

impl Observed {
    /// Adds a time.
    pub(crate) fn add(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        let place = (self.count % RECENT) as usize;
        match self.recent.get_mut(place) {
            Some(oldest) => *oldest = seconds as f32,
            None => self.recent.push(seconds as f32),
        }
        self.count += 1;
        let before = seconds - self.mean;
        self.mean += before / self.count as f64;
        self.squares += before * (seconds - self.mean);
    }

    /// The number of times.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// Their mean, in seconds.
    pub(crate) fn mean(&self) -> f64 {
        self.mean
    }

    /// Their standard deviation, in seconds; 0 for fewer than two.
    pub(crate) fn spread(&self) -> f64 {
        if self.count < 2 { 0.0 } else { (self.squares / (self.count - 1) as f64).sqrt() }
    }

    /// The median of the last times, in seconds; 0 for none. A few outliers do not move it.
    pub(crate) fn median(&self) -> f64 {
        let mut sorted = self.recent.clone();
        sorted.sort_by(f32::total_cmp);
        sorted.get(sorted.len() / 2).map_or(0.0, |&middle| f64::from(middle))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_and_spread_cover_all_times() {
        let mut observed = Observed::default();
        assert_eq!((observed.count(), observed.mean(), observed.spread()), (0, 0.0, 0.0));
        for ms in [2, 4, 4, 4, 5, 5, 7, 9] {
            observed.add(Duration::from_millis(ms));
        }
        assert_eq!(observed.count(), 8);
        assert!((observed.mean() - 5e-3).abs() < 1e-12);
        assert!((observed.spread() - (32e-6f64 / 7.0).sqrt()).abs() < 1e-12);
    }

    #[test]
    fn the_median_covers_the_last_times() {
        let mut observed = Observed::default();
        assert_eq!(observed.median(), 0.0);
        let is = |observed: &Observed, ms: f64| (observed.median() - ms / 1e3).abs() < 1e-8;
        for ms in [1, 900, 2, 3, 800] {
            observed.add(Duration::from_millis(ms));
        }
        assert!(is(&observed, 3.0), "{}", observed.median());
        for _ in 0..RECENT {
            observed.add(Duration::from_millis(7));
        }
        assert!(is(&observed, 7.0), "{}", observed.median());
        assert_eq!((observed.count(), observed.recent.len() as u64), (36, RECENT));
    }
}
