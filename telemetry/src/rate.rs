//! A limit for log lines that strangers can cause: a port scan must not fill a disk.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The most lines in a [`PERIOD`].
const BURST: u32 = 5;

const PERIOD: Duration = Duration::from_secs(10);

/// How often something may be logged: five times in ten seconds.
#[derive(Debug)]
pub struct Rate(Mutex<RateState>);

#[derive(Debug)]
struct RateState {
    began: Option<Instant>,
    lines: u32,
    left_out: u64,
}

impl Rate {
    /// A limit that has admitted no line yet.
    #[expect(clippy::new_without_default, reason = "it is created in statics")]
    pub const fn new() -> Self {
        Self(Mutex::new(RateState { began: None, lines: 0, left_out: 0 }))
    }

    /// If a line may be logged now, the number of lines that were left out before it.
    pub fn admits(&self) -> Option<u64> {
        self.admits_at(Instant::now())
    }

    fn admits_at(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock();
        if state.began.is_none_or(|began| now.duration_since(began) >= PERIOD) {
            (state.began, state.lines) = (Some(now), 0);
        }
        if state.lines == BURST {
            state.left_out += 1;
            return None;
        }
        state.lines += 1;
        Some(std::mem::take(&mut state.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_counted() {
        let (rate, start) = (Rate::new(), Instant::now());
        let admitted = (0..150).filter(|_| rate.admits_at(start).is_some()).count();
        assert_eq!(admitted, 5);
        assert_eq!(rate.admits_at(start + PERIOD), Some(145));
        assert_eq!(rate.admits_at(start + PERIOD), Some(0));
    }
}
