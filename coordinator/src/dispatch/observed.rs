//! How long operations have taken, as mean and spread. Only times that the cost model predicts are
//! counted: of a piece that was alone, or of one among as many as the credit allows.

use std::time::Duration;

/// Times, without keeping each of them (Welford, "Note on a method for calculating corrected sums
/// of squares and products", 1962).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Observed {
    count: u64,
    mean: f64,
    /// The sum of the squared differences from the mean.
    squares: f64,
}

impl Observed {
    /// Adds a time.
    pub(crate) fn add(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_and_spread_are_those_of_all_times() {
        let mut observed = Observed::default();
        assert_eq!((observed.count(), observed.mean(), observed.spread()), (0, 0.0, 0.0));
        for ms in [2, 4, 4, 4, 5, 5, 7, 9] {
            observed.add(Duration::from_millis(ms));
        }
        assert_eq!(observed.count(), 8);
        assert!((observed.mean() - 5e-3).abs() < 1e-12);
        assert!((observed.spread() - (32e-6f64 / 7.0).sqrt()).abs() < 1e-12);
    }
}
