//! What a local rank does with its time, for the metrics. It is read when somebody looks.

use std::sync::OnceLock;

use gradwire_proto::Rank;
use gradwire_shm::control::Activity;
use gradwire_telemetry::Gauge;

use crate::metrics::RankMetrics;

/// What a local rank does with its time.
#[derive(Debug)]
pub(crate) struct RankActivity {
    rank: Rank,
    activity: Activity,
    metrics: RankMetrics,
    /// Shown from the first step on.
    since_step: OnceLock<Gauge>,
}

impl RankActivity {
    pub(crate) fn new(rank: Rank, activity: Activity) -> Self {
        let metrics = RankMetrics::new(rank);
        Self { rank, activity, metrics, since_step: OnceLock::new() }
    }

    /// Shows what was added since the last call.
    pub(crate) fn show(&self) {
        let progress = self.activity.look();
        self.metrics.add(&progress);
        if let Some(since) = progress.since_step {
            let gauge = self.since_step.get_or_init(|| RankMetrics::since_step(self.rank));
            gauge.set(since.as_secs_f64());
        }
    }
}
