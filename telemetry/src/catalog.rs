//! Every metric of Gradwire, declared once: name, type, unit, meaning and labels. `docs/metrics.md`
//! is generated from this (`make metrics-docs`).
//!
//! The rules, which the tests check: names begin with `gradwire_` and the service, or with
//! `process_` for metrics that every program has, and end in the base unit; counters end in
//! `_total`. Labels have few values, and tensor names are not labels (BOUND). A histogram is 28
//! series, so its only labels are `phase` and `collective`.

use std::sync::LazyLock;

use metrics::{Counter, Gauge, Unit};

use crate::{
    declare::{Declared, Family, metrics},
    histogram::{Histogram, TimeCounter},
    metric::{Label, Metric},
};

/// The job, on every series.
pub const JOB: Label = Label { name: "gradwire_job", values: "the id of the job" };

/// The host, on every series.
pub const HOST: Label = Label {
    name: "host",
    values: "the host of the service that shows the series, as the job names it",
};

/// A collective.
pub const COLLECTIVE: Label =
    Label { name: "collective", values: "`allreduce`, `broadcast` and the like" };

/// The memory of a submitted tensor.
pub const MEMORY: Label = Label {
    name: "memory",
    values: "`shared` if the tensor was in shared memory, `ordinary` if the rank had to copy \
             it there",
};

/// An algorithm.
pub const ALGORITHM: Label = Label {
    name: "algorithm",
    values: "`ring`, `circulant` and the like, without parameters (docs/algorithms.md); `none` for \
             operations of one node alone",
};

/// Whether bytes move between nodes.
pub const SCOPE: Label = Label {
    name: "scope",
    values: "`intra_node` for operations of one node alone, `inter_node` for all others",
};

/// The call that a submission belongs to.
pub const ORIGIN: Label = Label {
    name: "origin",
    values: "`plain` for a direct call of the collective; otherwise the call that it is a part of: \
             `sparse-rows`, `sparse-dense`, `object`, `adasum`, or `count` for the numbers that \
             ranks exchange before one of these",
};

/// A kind of failure.
pub const KIND: Label = Label {
    name: "kind",
    values: "`worker_lost`, `disagreement` and the like, as in failure reports",
};

/// Why a connection was rejected.
pub const REASON: Label = Label {
    name: "reason",
    values: "from another host: `not_gradwire` for another protocol or release, `wrong_job`, \
             `secret` for a wrong proof of the job's secret, `superseded` for an attempt that \
             arrived after a later one, `broken`, `silent`, `too_many` for too many at a time; \
             from a process of this host: `worker_refused`, `worker_broken`",
};

/// A data thread of a daemon.
pub const LANE: Label = Label { name: "lane", values: "the number of a lane" };

/// The activity of a lane.
pub const ACTIVITY: Label = Label {
    name: "activity",
    values: "`reduce`, `send`, `receive` and `publish`; `idle` for waiting and looking for work",
};

/// The use of memory in a daemon.
pub const BUFFER: Label = Label {
    name: "buffer",
    values: "`staging` for the results of pieces; `frames` for early frames and memory reserved \
             for further ones; `feedback` for the rounding errors of int8 and fp8",
};

/// A phase of an operation.
pub const PHASE: Label = Label {
    name: "phase",
    values: "in this order: `gather` until all local ranks have submitted a tensor, `negotiate` \
             until all ranks agree on it, `credit` until its first operation starts, `transfer` \
             until the result of an operation is complete on a node, `publish` until the local \
             ranks have the result",
};

/// Another node.
pub const PEER_HOST: Label = Label {
    name: "peer_host",
    values: "the host of another node; `other` for all nodes from the 65th on",
};

/// A node of the job.
pub const NODE_HOST: Label = Label {
    name: "node_host",
    values: "the host of a node of the job; `other` for all nodes from the 65th on",
};

/// A rank.
pub const RANK: Label =
    Label { name: "rank", values: "the number of a rank; `other` for all ranks from 1024 on" };

/// A thread.
pub const THREAD: Label = Label {
    name: "thread",
    values: "`gw-control`, `gw-lane-0` and the like (ARCHITECTURE.md lists them); `other` for \
             threads with other names",
};

/// The label value shared by everything that has no series of its own.
pub const OTHER: &str = "other";

/// The number of nodes with their own series; all others share one (BOUND).
const NODES: usize = 64;

/// The number of ranks with their own series; all others share one (BOUND).
const RANKS: u32 = 1024;

/// The value of [`PEER_HOST`] or [`NODE_HOST`] for a node.
pub fn host_label(node: usize, host: &str) -> &str {
    if node < NODES { host } else { OTHER }
}

/// The value of [`RANK`] for a rank.
pub fn rank_label(rank: u32) -> String {
    if rank < RANKS { rank.to_string() } else { OTHER.to_owned() }
}

/// A service.
pub const SERVICE: Label = Label { name: "service", values: "`gradwired` or `coordinator`" };

/// A release.
pub const VERSION: Label = Label { name: "version", values: "the release of Gradwire" };

metrics! {
    /// Metrics of every service.
    PROCESS: Process {
        /// Always 1. The labels say what is running.
        build_info: Family<Gauge, 2> = "gradwire_build_info", Count, [SERVICE, VERSION];
        /// Processor time by thread name. The time between the last reading and the end of a thread
        /// is missing.
        thread_seconds: Family<TimeCounter, 1> =
            "gradwire_thread_cpu_seconds_total", Seconds, [THREAD];
        /// Processor time of the process.
        cpu: TimeCounter = "process_cpu_seconds_total", Seconds, [];
        /// Memory of the process that is in RAM, shared memory included.
        resident: Gauge = "process_resident_memory_bytes", Bytes, [];
        /// Open file descriptors.
        open_fds: Gauge = "process_open_fds", Count, [];
        /// The most file descriptors that may be open.
        max_fds: Gauge = "process_max_fds", Count, [];
        /// When the process started, in seconds since 1970.
        start_time: Gauge = "process_start_time_seconds", Seconds, [];
        /// Threads of the process.
        threads: Gauge = "process_threads", Count, [];
    }
    /// Metrics of a daemon.
    DAEMON: Daemon {
        /// Local ranks that are attached.
        workers: Gauge = "gradwire_daemon_workers", Count, [];
        /// Steps of a local rank: of an optimizer, with the last bucket of `ddp_hook`, or by
        /// `mark_step()`.
        rank_steps: Family<Counter, 1> = "gradwire_daemon_rank_steps_total", Count, [RANK];
        /// Time since the last step of a local rank. NaN once it has left.
        rank_since_step: Family<Gauge, 1> =
            "gradwire_daemon_rank_since_step_seconds", Seconds, [RANK];
        /// Time per step of a local rank, over its last steps. NaN once it has left.
        rank_step: Family<Gauge, 1> = "gradwire_daemon_rank_step_seconds", Seconds, [RANK];
        /// Time for which a local rank was blocked waiting for a result: what communication adds to
        /// its steps.
        rank_blocked: Family<TimeCounter, 1> =
            "gradwire_daemon_rank_blocked_seconds_total", Seconds, [RANK];
        /// Time for which a local rank had operations in flight.
        rank_in_flight: Family<TimeCounter, 1> =
            "gradwire_daemon_rank_in_flight_seconds_total", Seconds, [RANK];
        /// Shared memory that local ranks have handed over.
        shared_memory: Gauge = "gradwire_daemon_shared_memory_bytes", Bytes, [];
        /// Process sets, including the set of all ranks.
        process_sets: Gauge = "gradwire_daemon_process_sets", Count, [];
        /// Submissions of local ranks.
        submissions: Family<Counter, 2> =
            "gradwire_daemon_submissions_total", Count, [COLLECTIVE, ORIGIN];
        /// Bytes that local ranks contributed. Tensors in shared memory are not copied.
        submitted: Family<Counter, 1> =
            "gradwire_daemon_submitted_bytes_total", Bytes, [MEMORY];
        /// Tensors that local ranks have submitted and that are not done.
        queued_tensors: Gauge = "gradwire_daemon_queued_tensors", Count, [];
        /// Requests to a local rank to allocate memory for a result of unexpected size.
        allocation_requests: Counter = "gradwire_daemon_allocation_requests_total", Count, [];
        /// Operations (pieces) that are complete on this node.
        operations: Counter = "gradwire_daemon_operations_total", Count, [];
        /// Bytes of these operations.
        published: Counter = "gradwire_daemon_published_bytes_total", Bytes, [];
        /// Time from the coordinator's order to the end of an operation on this node.
        operation: Histogram = "gradwire_daemon_operation_seconds", Seconds, [];
        /// Time of each phase that a daemon observes: `gather` of each tensor, `transfer` and
        /// `publish` of each operation. An operation of one node alone has no phase `publish`.
        phase: Family<Histogram, 1> = "gradwire_daemon_phase_seconds", Seconds, [PHASE];
        /// Tensors of these operations. A tensor in several pieces counts in each.
        operation_tensors: Counter = "gradwire_daemon_operation_tensors_total", Count, [];
        /// Bytes of these operations, by collective and by how they are moved. Their sum is
        /// gradwire_daemon_published_bytes_total.
        moved: Family<Counter, 3> =
            "gradwire_daemon_moved_bytes_total", Bytes, [COLLECTIVE, ALGORITHM, SCOPE];
        /// Pieces that are being exchanged with other nodes, including probes.
        pieces_in_flight: Gauge = "gradwire_daemon_pieces_in_flight", Count, [];
        /// Frames that have arrived and wait for other parts of their piece.
        held_frames: Gauge = "gradwire_daemon_held_frames", Count, [];
        /// The daemon's own memory for data.
        memory: Family<Gauge, 1> = "gradwire_daemon_memory_bytes", Bytes, [BUFFER];
        /// How each lane spent its time.
        lane_seconds: Family<TimeCounter, 2> =
            "gradwire_daemon_lane_seconds_total", Seconds, [LANE, ACTIVITY];
        /// Threads that may work on tensor bytes at once: the lanes and their helpers.
        reducing_threads: Gauge = "gradwire_daemon_reducing_threads", Count, [];
        /// Shares of reductions and publications that helpers did.
        helper_shares: Counter = "gradwire_daemon_helper_shares_total", Count, [];
        /// How often a helper was woken.
        helper_wakes: Counter = "gradwire_daemon_helper_wakes_total", Count, [];
        /// Bytes sent to the data plane of a peer.
        sent: Family<Counter, 1> =
            "gradwire_daemon_network_sent_bytes_total", Bytes, [PEER_HOST];
        /// Bytes received from the data plane of a peer.
        received: Family<Counter, 1> =
            "gradwire_daemon_network_received_bytes_total", Bytes, [PEER_HOST];
        /// Packets sent to a peer on data connections, including those sent again.
        packets: Family<Counter, 1> =
            "gradwire_daemon_network_packets_total", Count, [PEER_HOST];
        /// Packets sent to a peer again, because they were lost or late.
        retransmits: Family<Counter, 1> =
            "gradwire_daemon_network_retransmits_total", Count, [PEER_HOST];
        /// Round trip to a peer, as measured by TCP on the slowest of the data connections.
        peer_round_trip: Family<Gauge, 1> =
            "gradwire_daemon_network_round_trip_seconds", Seconds, [PEER_HOST];
        /// Bytes per second that the line of this host carries in each direction: from
        /// network.rate_mbit if that is set, else from the interface of the data plane. Missing if
        /// unknown.
        line_rate: Family<Gauge, 0> = "gradwire_daemon_line_rate_bytes", Bytes, [];
        /// Connections that failed the handshake.
        rejected_connections: Family<Counter, 1> =
            "gradwire_daemon_rejected_connections_total", Count, [REASON];
        /// Data connections that broke and were made again, as this node has seen them.
        recovered_connections: Counter =
            "gradwire_daemon_connections_recovered_total", Count, [];
        /// How often the connection to the coordinator broke and was made again.
        recovered_streams: Counter =
            "gradwire_daemon_control_connections_recovered_total", Count, [];
        /// Tensors that have waited for ranks of this node for longer than
        /// negotiation.stall_warning_ms. They are not announced to the coordinator yet.
        stalled_tensors: Gauge = "gradwire_daemon_stalled_tensors", Count, [];
        /// Failures that ended tensors or the job.
        failures: Family<Counter, 1> = "gradwire_daemon_failures_total", Count, [KIND];
        /// Round trip of a heartbeat to the coordinator and back, without the time for which the
        /// coordinator held it.
        round_trip: Histogram = "gradwire_daemon_heartbeat_round_trip_seconds", Seconds, [];
        /// How far the clock of this node is ahead of the coordinator's.
        clock_offset: Gauge = "gradwire_daemon_clock_offset_seconds", Seconds, [];
        /// The largest possible error of the clock offset.
        clock_offset_error: Gauge = "gradwire_daemon_clock_offset_error_seconds", Seconds, [];
    }
    /// Metrics of the coordinator.
    COORDINATOR: Coordinator {
        /// Nodes that have joined.
        nodes: Gauge = "gradwire_coordinator_nodes", Count, [];
        /// Ranks of the complete world. 0 before it is complete.
        ranks: Gauge = "gradwire_coordinator_ranks", Count, [];
        /// The epoch: the number of this formation of the world.
        epoch: Gauge = "gradwire_coordinator_epoch", Count, [];
        /// Tensors that some but not all nodes have announced.
        pending_tensors: Gauge = "gradwire_coordinator_pending_tensors", Count, [];
        /// Tensors on which all ranks agree and that wait for credit.
        queued_tensors: Gauge = "gradwire_coordinator_queued_tensors", Count, [];
        /// Tensors that have waited for longer than negotiation.stall_warning_ms.
        stalled_tensors: Gauge = "gradwire_coordinator_stalled_tensors", Count, [];
        /// Reports that the job stands still as a whole (watchdog.factor).
        standstills: Counter = "gradwire_coordinator_standstills_total", Count, [];
        /// Operations that have started and are not complete on all nodes.
        operations_in_flight: Gauge = "gradwire_coordinator_operations_in_flight", Count, [];
        /// Operations that the coordinator has ordered. Repeated small ones inside a node are not.
        operations: Counter = "gradwire_coordinator_operations_total", Count, [];
        /// Tensors on which ranks disagreed.
        disagreements: Counter = "gradwire_coordinator_disagreements_total", Count, [];
        /// Bytes of messages to all nodes together.
        messages: Counter = "gradwire_coordinator_message_bytes_total", Bytes, [];
        /// Time from the first announcement of a tensor to its first operation.
        negotiation: Histogram = "gradwire_coordinator_negotiation_seconds", Seconds, [];
        /// Time of each phase that the coordinator observes: `negotiate` and `credit` of each
        /// tensor. Together they are the negotiation.
        phase: Family<Histogram, 1> = "gradwire_coordinator_phase_seconds", Seconds, [PHASE];
        /// Time during which at least one tensor waited for this node, which was the last to
        /// announce it. Simultaneous waits count once.
        node_lag: Family<TimeCounter, 1> =
            "gradwire_coordinator_node_lag_seconds_total", Seconds, [NODE_HOST];
        /// Tensors that waited for this rank, the last to submit them, for at least a millisecond.
        rank_last: Family<Counter, 1> = "gradwire_coordinator_rank_last_total", Count, [RANK];
        /// Time during which at least one tensor waited for this rank, which was the last to submit
        /// it. Simultaneous waits count once; waits of less than a millisecond do not count.
        rank_lag: Family<TimeCounter, 1> =
            "gradwire_coordinator_rank_lag_seconds_total", Seconds, [RANK];
        /// Time from the first to the last rank's submission of a tensor.
        rank_wait: Histogram = "gradwire_coordinator_rank_wait_seconds", Seconds, [];
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::{histogram::BOUNDS, metric::Kind};

    #[test]
    fn names_and_labels_follow_the_rules() {
        let mut names = BTreeSet::new();
        for metric in GROUPS.iter().flat_map(|(_, metrics)| *metrics) {
            let Metric { name, kind, unit, help, labels } = *metric;
            assert!(names.insert(name), "{name} is declared twice");
            let plain = |c: char| c.is_ascii_lowercase() || c == '_';
            let is_named = ["gradwire_", "process_"].iter().any(|first| name.starts_with(first));
            assert!(is_named && name.chars().all(plain), "{name}");
            assert!(help.ends_with('.') && help.len() > 10, "{name}: {help}");
            let stem = name.strip_suffix("_total");
            assert_eq!(stem.is_some(), kind == Kind::Counter, "{name}");
            let stem = stem.unwrap_or(name);
            for (suffix, of) in [("_seconds", Unit::Seconds), ("_bytes", Unit::Bytes)] {
                assert_eq!(stem.ends_with(suffix), unit == of, "{name}");
            }
            for label in labels {
                assert!(![JOB, HOST].contains(label), "{name}: every series has {}", label.name);
                if kind == Kind::Histogram {
                    assert!(["phase", "collective"].contains(&label.name), "{name}: {label:?}");
                }
            }
        }
        assert!(names.len() >= 29, "{names:?}");
    }

    /// The most values of a label on the first of 9 nodes with 8 ranks each, in a job that uses
    /// everything.
    fn values(label: &str) -> usize {
        match label {
            "activity" => 5,
            "algorithm" => 24,
            "buffer" => 2,
            "collective" => 16,
            "kind" => 12,
            "lane" | "memory" => 2,
            "node_host" | "peer_host" => 9,
            "origin" => 6,
            "phase" => 3,
            "rank" => 9 * 8,
            "reason" => 9,
            // Determined by the algorithm.
            "scope" => 1,
            "service" => 2,
            "thread" => 16,
            "version" => 1,
            other => panic!("unknown label {other}: add the number of its values"),
        }
    }

    #[test]
    fn further_nodes_and_ranks_share_a_series() {
        assert_eq!([63, 64, 65].map(|node| host_label(node, "h")), ["h", OTHER, OTHER], "BOUND");
        assert_eq!([1023, 1024, u32::MAX].map(rank_label), ["1023", OTHER, OTHER], "BOUND");
        assert!(PEER_HOST.values.contains("65th") && NODE_HOST.values.contains("65th"));
        assert!(RANK.values.contains("1024"));
    }

    /// BOUND: a daemon with 8 ranks and 8 peers that hosts the coordinator shows few enough series.
    #[test]
    fn there_are_at_most_1500_series() {
        let mut all = 0;
        for metric in GROUPS.iter().flat_map(|(_, metrics)| *metrics) {
            let combinations: usize = metric.labels.iter().map(|it| values(it.name)).product();
            // One bucket more than bounds, the sum and the count.
            let each = if metric.kind == Kind::Histogram { BOUNDS + 3 } else { 1 };
            all += each * combinations;
        }
        assert!(all <= 1500, "{all} series");
    }
}
