//! What a local rank does with its time, for metrics and reports. It is read when somebody looks.

use std::sync::OnceLock;

use gradwire_proto::Rank;
use gradwire_shm::control::{Activity, Progress};
use gradwire_telemetry::Gauge;
use parking_lot::Mutex;

use crate::metrics::RankMetrics;

/// What a local rank does with its time.
#[derive(Debug)]
pub(crate) struct RankActivity {
    rank: Rank,
    activity: Activity,
    metrics: RankMetrics,
    /// Shown from the first step on.
    since_step: OnceLock<Gauge>,
    total: Mutex<Progress>,
}

impl RankActivity {
    pub(crate) fn new(rank: Rank, activity: Activity) -> Self {
        let metrics = RankMetrics::new(rank);
        Self { rank, activity, metrics, since_step: OnceLock::new(), total: Mutex::default() }
    }

    /// Adds what is new to the metrics, and returns what there is in total.
    pub(crate) fn look(&self) -> Progress {
        let mut total = self.total.lock();
        let progress = self.activity.look();
        self.metrics.add(&progress);
        if let Some(since) = progress.since_step {
            let gauge = self.since_step.get_or_init(|| RankMetrics::since_step(self.rank));
            gauge.set(since.as_secs_f64());
        }
        let Progress { steps, blocked, in_flight, since_step } = progress;
        *total = Progress {
            steps: total.steps + steps,
            blocked: total.blocked + blocked,
            in_flight: total.in_flight + in_flight,
            since_step,
        };
        *total
    }
}

impl Drop for RankActivity {
    /// The rank has left: its last value would look like one that makes no steps any more.
    fn drop(&mut self) {
        if let Some(gauge) = self.since_step.get() {
            gauge.set(f64::NAN);
        }
    }
}
