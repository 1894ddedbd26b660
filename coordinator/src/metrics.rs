//! Every metric of the coordinator, declared once: name, unit and description. Labels are
//! bounded: the only one is the host, of which a job has as many as it has nodes.

use metrics::{
    Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};

use crate::model::{command::Measures, status::Counts};

macro_rules! metrics {
    ($describe:ident: $(
        $(#[doc = $doc:literal])+ $constant:ident = $name:literal, $unit:ident;
    )+) => {
        $($(#[doc = $doc])+ pub const $constant: &str = $name;)+

        fn $describe(
            mut describe: impl FnMut(&'static str, Unit, &'static str),
        ) {
            $(describe($constant, Unit::$unit, concat!($($doc),+).trim_ascii_start());)+
        }
    };
}

metrics! { gauges:
    /// Nodes that have joined.
    NODES = "gradwire_coordinator_nodes", Count;
    /// Ranks of the complete world; 0 before it is complete.
    RANKS = "gradwire_coordinator_ranks", Count;
    /// The formation of the world.
    EPOCH = "gradwire_coordinator_epoch", Count;
    /// Tensors that some nodes have announced and others have not.
    PENDING_TENSORS = "gradwire_coordinator_pending_tensors", Count;
    /// Tensors on which all ranks agree and that wait for credit.
    QUEUED_TENSORS = "gradwire_coordinator_queued_tensors", Count;
    /// Tensors that wait for longer than the stall limit.
    STALLED_TENSORS = "gradwire_coordinator_stalled_tensors", Count;
    /// Operations that have started and are not done by all nodes.
    OPERATIONS_IN_FLIGHT = "gradwire_coordinator_operations_in_flight", Count;
}

metrics! { counters:
    /// Operations that have started.
    OPERATIONS_TOTAL = "gradwire_coordinator_operations_total", Count;
    /// Tensors on which ranks disagreed.
    DISAGREEMENTS_TOTAL = "gradwire_coordinator_disagreements_total", Count;
    /// Bytes of the answers to all nodes together.
    MESSAGE_BYTES_TOTAL = "gradwire_coordinator_message_bytes_total", Bytes;
}

metrics! { histograms:
    /// From the first announcement of a tensor to its first operation.
    NEGOTIATION_SECONDS = "gradwire_coordinator_negotiation_seconds", Seconds;
    /// How long others waited, at most, for tensors that this host was the last to announce.
    NODE_LAG_SECONDS = "gradwire_coordinator_node_lag_seconds", Seconds;
}

/// Describes every metric with its unit and text. Call this once a recorder is installed; without
/// one it does nothing.
pub fn describe() {
    gauges(|name, unit, text| describe_gauge!(name, unit, text));
    counters(|name, unit, text| describe_counter!(name, unit, text));
    histograms(|name, unit, text| describe_histogram!(name, unit, text));
}

/// Sets the gauges from the engine's counts.
pub(crate) fn counts(counts: &Counts, epoch: u64) {
    gauge!(NODES).set(counts.nodes as f64);
    gauge!(RANKS).set(f64::from(counts.ranks));
    gauge!(EPOCH).set(epoch as f64);
    gauge!(PENDING_TENSORS).set(counts.pending as f64);
    gauge!(QUEUED_TENSORS).set(counts.queued as f64);
    gauge!(STALLED_TENSORS).set(counts.stalled as f64);
    gauge!(OPERATIONS_IN_FLIGHT).set(counts.in_flight as f64);
    counter!(OPERATIONS_TOTAL).absolute(counts.started);
}

/// Records what one step measured; `host` returns a node's name.
pub(crate) fn measures(measures: &Measures, host: impl Fn(u32) -> Option<String>) {
    if measures.disagreements > 0 {
        counter!(DISAGREEMENTS_TOTAL).increment(measures.disagreements);
    }
    if !measures.negotiated.is_empty() {
        let negotiation = histogram!(NEGOTIATION_SECONDS);
        measures.negotiated.iter().for_each(|time| negotiation.record(time.as_secs_f64()));
    }
    for (node, lag) in &measures.lags {
        if let Some(host) = host(node.0) {
            histogram!(NODE_LAG_SECONDS, "host" => host).record(lag.as_secs_f64());
        }
    }
}

/// Counts the bytes of an answer to all nodes.
pub(crate) fn sent(bytes: usize) {
    counter!(MESSAGE_BYTES_TOTAL).increment(bytes as u64);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_is_named_and_described_once() {
        let mut all = Vec::new();
        let mut take = |name, _, text: &str| {
            assert!(text.ends_with('.') && text.len() > 10, "{name}: {text}");
            all.push(name);
        };
        gauges(&mut take);
        counters(&mut take);
        histograms(&mut take);
        assert!(all.iter().all(|name: &&str| name.starts_with("gradwire_coordinator_")));
        let number = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!((all.len(), number), (12, 12));
    }
}
