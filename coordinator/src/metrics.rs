//! What the coordinator records, with the handles of [`gradwire_telemetry::catalog`].

use std::time::Duration;

use gradwire_telemetry::{TimeCounter, catalog::COORDINATOR};

use crate::model::{command::Measures, status::Counts};

/// Shows every metric that needs no label. Call this once the recorder is installed.
pub fn start() {
    std::sync::LazyLock::force(&COORDINATOR);
}

/// Sets the gauges from the engine's counts.
pub(crate) fn counts(counts: &Counts, epoch: u64) {
    let metrics = &*COORDINATOR;
    metrics.nodes.set(counts.nodes as f64);
    metrics.ranks.set(f64::from(counts.ranks));
    metrics.epoch.set(epoch as f64);
    metrics.pending_tensors.set(counts.pending as f64);
    metrics.queued_tensors.set(counts.queued as f64);
    metrics.stalled_tensors.set(counts.stalled as f64);
    metrics.operations_in_flight.set(counts.in_flight as f64);
    metrics.operations.absolute(counts.started);
}

/// The time for which others waited for each node: one handle per node, created once.
#[derive(Debug, Default)]
pub(crate) struct NodeLags(Vec<TimeCounter>);

impl NodeLags {
    /// For the nodes of the world, by number.
    pub(crate) fn new<'a>(hosts: impl Iterator<Item = &'a str>) -> Self {
        Self(hosts.map(|host| COORDINATOR.node_lag.series([host])).collect())
    }

    /// Whether there is no world yet.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn add(&self, node: u32, lag: Duration) {
        if let Some(waited) = self.0.get(node as usize) {
            waited.add(lag);
        }
    }
}

/// Records what one step measured.
pub(crate) fn measures(measures: &Measures, node_lags: &NodeLags) {
    if measures.disagreements > 0 {
        COORDINATOR.disagreements.increment(measures.disagreements);
    }
    measures.negotiated.iter().for_each(|time| COORDINATOR.negotiation.record(*time));
    measures.lags.iter().for_each(|(node, lag)| node_lags.add(node.0, *lag));
}

/// Counts the bytes of an answer to all nodes.
pub(crate) fn sent(bytes: usize) {
    COORDINATOR.messages.increment(bytes as u64);
}
