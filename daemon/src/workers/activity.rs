//! How a local rank spends its time, for metrics and reports. It is read on demand.

use std::{
    sync::OnceLock,
    time::{Duration, Instant},
};

use gradwire_proto::Rank;
use gradwire_shm::control::{Activity, Progress};
use gradwire_telemetry::Gauge;
use parking_lot::Mutex;

use crate::{
    metrics::RankMetrics,
    model::blocked::{BlockedBy, Parts, Reached},
};

/// How a local rank spends its time.
#[derive(Debug)]
pub(crate) struct RankActivity {
    rank: Rank,
    activity: Activity,
    metrics: RankMetrics,
    /// Shown from the first step on, and from the second step on.
    since_step: OnceLock<Gauge>,
    step: OnceLock<Gauge>,
    total: Mutex<Total>,
    blocked_by: BlockedBy,
}

/// The activity of a local rank since it attached.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Total {
    pub(crate) steps: u64,
    /// The time in which a thread was blocked in a wait.
    pub(crate) blocked: Duration,
    /// The parts of that time, as far as the operations that it waited for have ended.
    pub(crate) parts: Parts,
    pub(crate) last_step: Option<Instant>,
    /// The time per step of its last steps; kept until the next step.
    pub(crate) step: Option<Duration>,
    /// The last look.
    pub(crate) looked: Option<Instant>,
}

impl Total {
    /// Adds the progress seen at `now`.
    fn add(&mut self, progress: &Progress, now: Instant) {
        let last_step = progress.since_step.and_then(|since| now.checked_sub(since));
        let made = u32::try_from(progress.steps).unwrap_or(u32::MAX);
        // The first step may take long. If others follow it before the next look, all of them have
        // been made since the one before.
        let before = self.last_step.or(self.looked.filter(|_| made > 1));
        if let (Some(before), Some(last), 1..) = (before, last_step, made) {
            self.step = Some(last.saturating_duration_since(before) / made);
        }
        self.steps += progress.steps;
        self.blocked += progress.blocked;
        (self.last_step, self.looked) = (last_step, Some(now));
    }
}

impl RankActivity {
    pub(crate) fn new(rank: Rank, activity: Activity) -> Self {
        let metrics = RankMetrics::new(rank);
        let (since_step, step) = Default::default();
        let now = Instant::now();
        let total = Mutex::new(Total { looked: Some(now), ..Total::default() });
        Self { rank, activity, metrics, since_step, step, total, blocked_by: BlockedBy::new(now) }
    }

    /// A ticket that the rank waits for, if it can do nothing until an operation ends, and how many
    /// of its submissions have no answer.
    pub(crate) fn stuck(&self) -> Option<(u64, u32)> {
        self.activity.stuck()
    }

    /// An operation of the rank ends, which has reached its phases at these times.
    pub(crate) fn ended(&self, reached: &Reached) {
        self.blocked_by.ended(self.activity.blocked(), reached);
    }

    /// Adds new progress to the metrics, and returns the total.
    pub(crate) fn look(&self) -> Total {
        let mut total = self.total.lock();
        let progress = self.activity.look();
        self.metrics.add(&progress);
        total.add(&progress, Instant::now());
        total.parts = self.blocked_by.look();
        if let Some(since) = progress.since_step {
            let gauge = self.since_step.get_or_init(|| RankMetrics::since_step(self.rank));
            gauge.set(since.as_secs_f64());
        }
        if let Some(step) = total.step {
            let gauge = self.step.get_or_init(|| RankMetrics::step(self.rank));
            gauge.set(step.as_secs_f64());
        }
        *total
    }
}

impl Drop for RankActivity {
    /// The rank has left: its last values would look like those of a rank that makes no more steps.
    fn drop(&mut self) {
        for gauge in [&self.since_step, &self.step].into_iter().filter_map(OnceLock::get) {
            gauge.set(f64::NAN);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_per_step_is_of_the_last_steps() {
        let began = Instant::now();
        let ms = Duration::from_millis;
        let mut total = Total::default();
        // The new steps, the time since the last one, the time of the look, and the time per step.
        for (steps, since, at, step) in [
            (0, None, 0, None),
            (3, Some(100), 1000, Some(300)),
            (4, Some(0), 2000, Some(275)),
            (0, Some(1000), 3000, Some(275)),
            (1, Some(100), 4000, Some(1900)),
        ] {
            let since_step = since.map(ms);
            let progress = Progress { steps, since_step, blocked: ms(10), ..Progress::default() };
            total.add(&progress, began + ms(at));
            assert_eq!(total.step, step.map(ms), "at {at} ms");
        }
        assert_eq!((total.steps, total.blocked), (8, ms(50)));
        // A first step alone says nothing about others.
        let mut slow = Total::default();
        for (steps, since, at) in [(0, None, 0), (1, Some(100), 60_000)] {
            let since_step = since.map(ms);
            slow.add(&Progress { steps, since_step, ..Progress::default() }, began + ms(at));
        }
        assert_eq!(slow.step, None);
    }
}
