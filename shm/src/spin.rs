//! How long a thread spins before it sleeps, learned from earlier waits.
//!
//! Waking a thread costs several microseconds, on a virtual machine tens of them. So a thread that
//! will be needed again sooner had better spin. The budget grows while spinning ends waits and
//! shrinks while it does not: spinning costs little in a slow step, and saves the wake-up in a fast
//! one.

use std::{
    hint,
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

/// The share of the allowed time that a thread spins.
#[derive(Debug, Default)]
pub struct SpinBudget {
    /// How many sixteenths of the allowed time are not used: 0 to 15.
    lost: AtomicU32,
}

/// A wait that spins, from [`SpinBudget::begin`].
#[derive(Debug)]
pub struct Spin<'a> {
    budget: &'a SpinBudget,
    start: Instant,
    limit: Duration,
}

impl SpinBudget {
    const WHOLE: u32 = 16;
    /// The highest cost of a wake-up on a virtual machine. Spinning for longer is a loss even if it
    /// ends the wait: others could have used the core, perhaps the thread that is waited for.
    const WAKE_UP: Duration = Duration::from_micros(60);

    /// Begins to spin for at most `allowed`; `None` if that is useless: if the time is zero, or on
    /// a single core, where nothing else can run meanwhile.
    pub fn begin(&self, allowed: Duration) -> Option<Spin<'_>> {
        if allowed.is_zero() || cores() < 2 {
            return None;
        }
        let limit = allowed / Self::WHOLE * self.share();
        Some(Spin { budget: self, start: Instant::now(), limit })
    }

    /// Spins until `done` or for at most `allowed`; true if it is done.
    pub fn spin(&self, allowed: Duration, done: impl Fn() -> bool) -> bool {
        let Some(spin) = self.begin(allowed) else { return false };
        loop {
            if let Some(came) = spin.look(&done) {
                return came;
            }
        }
    }

    /// Learns from a wait that had to sleep and ended after `waited`: if it was short, spinning may
    /// save the wake-up the next time.
    pub fn slept(&self, allowed: Duration, waited: Duration) {
        if waited <= allowed + Self::WAKE_UP {
            self.learn(true);
        }
    }

    fn share(&self) -> u32 {
        Self::WHOLE - self.lost.load(Relaxed).min(Self::WHOLE - 1)
    }

    fn learn(&self, worth_it: bool) {
        let share = self.share();
        let share = if worth_it { (share * 2).min(Self::WHOLE) } else { share.div_ceil(2) };
        self.lost.store(Self::WHOLE - share, Relaxed);
    }
}

impl Spin<'_> {
    /// Looks several times, for about a microsecond. Some(true): it is done; Some(false): the time
    /// is up. Both end the spin. `None`: look again.
    pub fn look(&self, done: impl Fn() -> bool) -> Option<bool> {
        // Reading the clock costs more than the check.
        let look = |_| {
            hint::spin_loop();
            done()
        };
        let came = (0..64).any(look);
        let spun = self.start.elapsed();
        if !came && spun < self.limit {
            return None;
        }
        self.budget.learn(came && spun <= SpinBudget::WAKE_UP);
        Some(came)
    }
}

fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| thread::available_parallelism().map_or(1, usize::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_budget_shrinks_and_grows_back() {
        let budget = SpinBudget::default();
        let shares = |worth_it| {
            [(); 5].map(|()| {
                budget.learn(worth_it);
                budget.share()
            })
        };
        assert_eq!(shares(false), [8, 4, 2, 1, 1]);
        assert_eq!(shares(true), [2, 4, 8, 16, 16]);
    }

    #[test]
    fn a_spin_ends_when_done_or_at_its_limit() {
        let budget = SpinBudget::default();
        assert!(budget.begin(Duration::ZERO).is_none());
        if cores() < 2 {
            println!("skipped: a single core never spins");
            return;
        }
        assert!(budget.spin(Duration::from_secs(60), || true));
        assert!(!budget.spin(Duration::from_micros(200), || false));
        assert_eq!(budget.share(), 8, "spinning did not help");
        let allowed = Duration::from_micros(50);
        budget.slept(allowed, Duration::from_millis(1));
        assert_eq!(budget.share(), 8, "nor would it have helped");
        budget.slept(allowed, Duration::from_micros(90));
        assert_eq!(budget.share(), 16, "the sleep was short");
    }
}
