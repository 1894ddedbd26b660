//! Turns a snapshot into a message. Pure.

use gradwire_collectives::CostModel;
use gradwire_proto::{Rank, VERSION, pb};

use crate::{
    convert::{milliseconds, numbers},
    history::Entry,
    inbox::Snapshot,
    model::{
        command::{Node, RankWait},
        network::{Arrangement, Network},
        report::Reported,
        status::{CandidateStatus, ChoiceStatus, OperationStatus, SizesStatus},
    },
};

/// The state of a job, for `gradwire status`.
pub(crate) fn snapshot(job: &str, snapshot: Snapshot) -> pb::StatusResponse {
    let Snapshot { status, uptime, mut reports, lags, decisions, events } = snapshot;
    let world = status.nodes.len();
    let nodes = (0..).zip(status.nodes).map(|(number, status)| pb::NodeStatus {
        report: reports.remove(&number).map(|it| report(it, &status.node, world)),
        host: status.node.host,
        first_rank: status.node.first_rank.0,
        slots: status.node.slots,
        rack: status.node.rack,
        line_mbit: status.node.line_mbit,
        silent_ms: milliseconds(status.silent),
        left_ranks: numbers(&status.left),
    });
    let pending = status.pending.into_iter().map(|tensor| pb::PendingTensor {
        process_set: tensor.set.0,
        name: tensor.name.as_str().to_owned(),
        waiting_ms: milliseconds(tensor.waiting),
        missing_ranks: numbers(&tensor.missing),
    });
    let process_sets = status.sets.iter().map(|set| pb::ProcessSetStatus {
        process_set: set.set.0,
        ranks: numbers(&set.ranks),
        joined_ranks: numbers(&set.joined),
    });
    pb::StatusResponse {
        job: job.to_owned(),
        version: VERSION.to_owned(),
        phase: status.phase.name().to_owned(),
        reason: status.reason,
        epoch: status.epoch.0,
        nodes: nodes.collect(),
        pending: pending.collect(),
        pending_count: status.counts.pending as u64,
        operations_started: status.counts.started,
        operations_done: status.counts.done,
        failure: status.failure.map(Into::into),
        process_sets: process_sets.collect(),
        process_set_count: status.counts.sets as u64,
        choices: status.choices.into_iter().map(choice).collect(),
        network: status.network.map(network),
        costs: Some(costs(&status.cost)),
        uptime_ms: milliseconds(uptime),
        operations: status.operations.into_iter().map(operation).collect(),
        lags: lags.into_iter().map(lag).collect(),
        decisions: decisions.into_iter().map(entry).collect(),
        events: events.into_iter().map(entry).collect(),
        page: String::new(),
        sizes: Some(sizes(status.sizes)),
        advice: status.advice,
    }
}

/// Ranks and nodes that do not exist are left out (TRUST).
fn report(reported: Reported, node: &Node, nodes: usize) -> pb::NodeReport {
    let Reported { report, age } = reported;
    let ranks = (0..node.slots).zip(&report.ranks).map(|(local, rank)| pb::RankReport {
        rank: node.first_rank.0 + local,
        steps: rank.steps,
        step_seconds: rank.step_seconds.into(),
        exposed: rank.exposed.into(),
        since_step_seconds: rank.since_step.into(),
    });
    let peers = report.peers.iter().filter(|peer| (peer.node as usize) < nodes);
    let peers = peers.map(|peer| pb::PeerReport {
        node: peer.node,
        sent_bytes_per_second: peer.sent.into(),
        received_bytes_per_second: peer.received.into(),
    });
    pb::NodeReport {
        age_ms: milliseconds(age),
        ranks: ranks.collect(),
        peers: peers.collect(),
        line_bytes_per_second: report.line_rate,
        resident_bytes: report.resident,
        shared_bytes: report.shared,
        pieces_in_flight: report.pieces,
        queued_tensors: report.queued,
        stalled_tensors: report.stalled,
    }
}

fn operation(status: OperationStatus) -> pb::RunningOperation {
    pb::RunningOperation {
        sequence: status.sequence.0,
        running_ms: milliseconds(status.running),
        tensors: status.tensors,
        tensor_count: status.count as u64,
        missing_nodes: status.missing.iter().map(|node| node.0).collect(),
    }
}

fn lag((rank, RankWait { time, tensors }): (Rank, RankWait)) -> pb::RankLag {
    pb::RankLag { rank: rank.0, seconds: time.as_secs_f64(), tensors }
}

fn entry(entry: Entry) -> pb::Entry {
    pb::Entry { at_ms: milliseconds(entry.at), text: entry.text }
}

fn network(network: Network) -> pb::Network {
    let none = Arrangement { racks: Vec::new(), order: Vec::new(), reason: String::new() };
    let arranged = network.arrangement.unwrap_or(none);
    let links = network.links.iter().map(|link| pb::Link {
        from: link.from.0,
        to: link.to.0,
        latency_seconds: link.latency,
        lane_bytes_per_second: link.lane_rate,
        bytes_per_second: link.rate,
    });
    pb::Network {
        took_seconds: network.took.as_secs_f64(),
        complete: network.is_complete,
        links: links.collect(),
        costs: Some(costs(&network.cost)),
        racks: arranged.racks,
        order: arranged.order,
        arrangement: arranged.reason,
    }
}

fn costs(cost: &CostModel) -> pb::Costs {
    pb::Costs {
        latency: cost.in_rack.latency,
        per_byte: cost.in_rack.per_byte,
        rack_latency: cost.cross_rack.latency,
        rack_per_byte: cost.cross_rack.per_byte,
        reduce_per_byte: cost.reduce_per_byte,
        per_message: cost.per_message,
        lane_per_byte: cost.lane_per_byte,
        publish_per_byte: cost.publish_per_byte,
        operation: cost.operation,
        chunk: cost.chunk,
        burst_loss: cost.burst_loss,
        free_fan_in: cost.free_fan_in,
        incast_loss: cost.incast_loss,
        queue: cost.queue,
        overflow: cost.overflow,
        paths: cost.paths,
        connections: cost.connections,
    }
}

fn sizes(status: SizesStatus) -> pb::Sizes {
    pb::Sizes {
        piece_bytes: status.sizes.piece,
        credit_pieces: status.sizes.credit,
        chunk_bytes: status.sizes.chunk,
        reason: status.reason,
        version: status.version,
        observed: status.observed,
        mean_seconds: status.mean,
        spread_seconds: status.spread,
    }
}

fn candidate(status: &CandidateStatus) -> pb::Candidate {
    pb::Candidate {
        spec: status.spec.to_string(),
        predicted_seconds: status.predicted,
        expected_seconds: status.expected,
        tried: status.tried,
    }
}

fn choice(status: ChoiceStatus) -> pb::Choice {
    pb::Choice {
        collective: status.collective.to_owned(),
        nodes: status.nodes,
        bytes: status.bytes,
        pieces: status.pieces,
        rule: status.rule,
        spec: status.spec.to_string(),
        predicted_seconds: status.predicted,
        expected_seconds: status.expected,
        candidates: status.candidates.iter().map(candidate).collect(),
        runner_up: status.runner_up.map(|(spec, _)| spec.to_string()).unwrap_or_default(),
        runner_up_seconds: status.runner_up.map(|(_, seconds)| seconds).unwrap_or_default(),
        reason: status.reason,
        version: status.version,
        operations: status.operations,
        observed: status.observed,
        mean_seconds: status.mean,
        spread_seconds: status.spread,
    }
}
