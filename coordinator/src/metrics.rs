//! Records the coordinator's metrics, with the handles of [`gradwire_telemetry::catalog`].

use std::{collections::BTreeMap, sync::LazyLock};

use gradwire_telemetry::{
    Counter, Histogram, TimeCounter,
    catalog::{COORDINATOR, host_label, rank_label},
};

use crate::model::{
    command::{Measures, Negotiated, RankWait, Waits},
    status::Counts,
};

/// Registers every metric that needs no label. Call this once the recorder is installed.
pub fn start() {
    LazyLock::force(&COORDINATOR);
    LazyLock::force(&PHASES);
}

/// The phases `negotiate` and `credit`.
static PHASES: LazyLock<[Histogram; 2]> =
    LazyLock::new(|| ["negotiate", "credit"].map(|phase| COORDINATOR.phase.series([phase])));

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

/// The handles of one rank.
#[derive(Debug)]
struct RankMetrics {
    last: Counter,
    lag: TimeCounter,
}

impl RankMetrics {
    fn new(rank: &str) -> Self {
        let (last, lag) = (&COORDINATOR.rank_last, &COORDINATOR.rank_lag);
        Self { last: last.series([rank]), lag: lag.series([rank]) }
    }
}

/// How long tensors waited, by node and by rank. Each handle is created once.
#[derive(Debug, Default)]
pub(crate) struct WaitMetrics {
    nodes: Vec<TimeCounter>,
    /// The ranks for which tensors have waited.
    ranks: BTreeMap<u32, RankMetrics>,
}

impl WaitMetrics {
    /// The handles for the nodes of the world, by number.
    pub(crate) fn new<'a>(hosts: impl Iterator<Item = &'a str>) -> Self {
        let node = |(at, host)| COORDINATOR.node_lag.series([host_label(at, host)]);
        let nodes = hosts.enumerate().map(node);
        Self { nodes: nodes.collect(), ranks: BTreeMap::new() }
    }

    /// Whether the world is not complete yet.
    pub(crate) fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    fn add(&mut self, waits: &Waits) {
        for (node, time) in &waits.nodes {
            if let Some(waited) = self.nodes.get(node.index()) {
                waited.add(*time);
            }
        }
        for (rank, RankWait { time, tensors }) in &waits.ranks {
            let new = || RankMetrics::new(&rank_label(rank.0));
            let metrics = self.ranks.entry(rank.0).or_insert_with(new);
            metrics.last.increment(*tensors);
            metrics.lag.add(*time);
        }
        waits.of_tensors.iter().for_each(|wait| COORDINATOR.rank_wait.record(*wait));
    }
}

/// Records the measurements of one step of the engine.
pub(crate) fn measures(measures: &Measures, waits: &mut WaitMetrics) {
    if measures.disagreements > 0 {
        COORDINATOR.disagreements.increment(measures.disagreements);
    }
    for Negotiated { negotiate, credit } in &measures.negotiated {
        PHASES[0].record(*negotiate);
        PHASES[1].record(*credit);
        COORDINATOR.negotiation.record(*negotiate + *credit);
    }
    waits.add(&measures.waits);
}

/// Counts a report that the job stands still.
pub(crate) fn stands_still() {
    COORDINATOR.standstills.increment(1);
}

/// Counts the bytes of an answer to all nodes.
pub(crate) fn sent(bytes: usize) {
    COORDINATOR.messages.increment(bytes as u64);
}
