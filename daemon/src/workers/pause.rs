//! What the program of a rank does instead of training steps, such as evaluation. It says this
//! itself.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The most characters of what it does (BOUND).
const MAX_WHAT: usize = 80;

/// Whether a rank is paused, since when, and why.
#[derive(Debug, Default)]
pub(crate) struct Pause(Mutex<Option<(String, Instant)>>);

impl Pause {
    /// The program makes no steps because of `what`; empty: it goes on.
    pub(crate) fn set(&self, what: &str, now: Instant) {
        let mut pause = self.0.lock();
        let since = pause.as_ref().map_or(now, |(_, since)| *since);
        let what: String = what.chars().filter(|c| !c.is_control()).take(MAX_WHAT).collect();
        *pause = (!what.is_empty()).then_some((what, since));
    }

    /// Whether it is paused.
    pub(crate) fn is_on(&self) -> bool {
        self.0.lock().is_some()
    }

    /// What it does, and for how long; `None` if it is not paused.
    pub(crate) fn look(&self, now: Instant) -> Option<(String, Duration)> {
        let pause = self.0.lock();
        pause.as_ref().map(|(what, since)| (what.clone(), now.saturating_duration_since(*since)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_lasts_until_its_end() {
        let (pause, began) = (Pause::default(), Instant::now());
        let at = |seconds| began + Duration::from_secs(seconds);
        pause.set("evaluation", began);
        pause.set("a\u{1b} checkpoint", at(5));
        assert!(pause.is_on());
        let seen = pause.look(at(12));
        assert_eq!(seen, Some(("a checkpoint".to_owned(), Duration::from_secs(12))), "one inside");
        pause.set("", at(13));
        assert_eq!((pause.look(at(14)), pause.is_on()), (None, false));
    }
}
