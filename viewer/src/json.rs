//! The state of a job as JSON. `docs/status.schema.json` describes it.

use gradwire_proto::{
    Failure,
    pb::{Choice, Entry, NodeReport, NodeStatus, StatusResponse},
};
use serde_json::{Value, json};

use crate::view::{self, Shares};

fn seconds(milliseconds: u64) -> f64 {
    milliseconds as f64 / 1e3
}

/// The state of a job. `shares` are the shares of the time in which the others wait for each rank.
pub fn of(status: &StatusResponse, shares: &Shares) -> Value {
    let nodes: Vec<Value> = status.nodes.iter().map(|it| node(status, it, shares)).collect();
    let running = status.operations.iter().map(|operation| {
        json!({
            "sequence": operation.sequence,
            "seconds": seconds(operation.running_ms),
            "tensors": operation.tensors,
            "tensor_count": operation.tensor_count,
            "missing_nodes": operation.missing_nodes,
        })
    });
    let pending = status.pending.iter().map(|tensor| {
        json!({
            "process_set": tensor.process_set,
            "name": tensor.name,
            "waiting_seconds": seconds(tensor.waiting_ms),
            "missing_ranks": tensor.missing_ranks,
        })
    });
    let sets = status.process_sets.iter().map(|set| {
        json!({
            "process_set": set.process_set,
            "ranks": set.ranks,
            "joined_ranks": set.joined_ranks,
        })
    });
    let lags = status.lags.iter().map(|lag| {
        let share = shares.get(&lag.rank);
        json!({"rank": lag.rank, "seconds": lag.seconds, "tensors": lag.tensors, "share": share})
    });
    json!({
        "job": status.job,
        "version": status.version,
        "phase": status.phase,
        "reason": status.reason,
        "page": (!status.page.is_empty()).then(|| format!("http://{}/", status.page)),
        "epoch": status.epoch,
        "uptime_seconds": seconds(status.uptime_ms),
        "failure": status.failure.clone().map(|wire| failure(&wire.into())),
        "steps_per_second": view::slowest(view::ranks(status)),
        "straggler": view::straggler(shares).map(|(rank, _)| rank),
        "nodes": nodes,
        "operations": {
            "started": status.operations_started,
            "done": status.operations_done,
            "running": running.collect::<Vec<_>>(),
        },
        "pending_count": status.pending_count,
        "pending": pending.collect::<Vec<_>>(),
        "process_set_count": status.process_set_count,
        "process_sets": sets.collect::<Vec<_>>(),
        "lags": lags.collect::<Vec<_>>(),
        "choices": status.choices.iter().map(choice).collect::<Vec<_>>(),
        "decisions": entries(&status.decisions),
        "events": entries(&status.events),
    })
}

fn failure(failure: &Failure) -> Value {
    json!({
        "kind": failure.kind.name(),
        "what": failure.what,
        "lines": failure.details.lines,
        "site": failure.details.site,
        "hint": failure.details.hint,
        "rank": failure.rank.map(|rank| rank.0),
        "host": failure.host,
        "tensor": failure.tensor,
    })
}

fn choice(choice: &Choice) -> Value {
    // `ring(segments=4)` is a ring.
    let algorithm = choice.spec.split('(').next().unwrap_or_default();
    json!({
        "collective": choice.collective,
        "nodes": choice.nodes,
        "bytes": choice.bytes,
        "pieces": choice.pieces,
        "algorithm": algorithm,
        "spec": choice.spec,
        "predicted_seconds": choice.predicted_seconds,
        "observed_seconds": (choice.observed > 0).then_some(choice.mean_seconds),
        "operations": choice.operations,
        "reason": choice.reason,
    })
}

fn node(status: &StatusResponse, node: &NodeStatus, shares: &Shares) -> Value {
    json!({
        "host": node.host,
        "first_rank": node.first_rank,
        "ranks": node.slots,
        "rack": node.rack,
        "health": view::health(status, node),
        "silent_seconds": seconds(node.silent_ms),
        "left_ranks": node.left_ranks,
        "reconnections": node.reconnections,
        "report": node.report.as_ref().map(|it| report(it, node, shares)),
    })
}

fn report(report: &NodeReport, node: &NodeStatus, shares: &Shares) -> Value {
    let ranks = report.ranks.iter().map(|rank| {
        let parts = view::parts(rank, node, shares);
        json!({
            "rank": rank.rank,
            "steps": rank.steps,
            "step_seconds": rank.step_seconds,
            "exposed": rank.exposed,
            "since_step_seconds": rank.since_step_seconds,
            "time": {
                "compute": parts.compute,
                "ranks": parts.ranks,
                "negotiation": parts.negotiation,
                "transfer": parts.transfer,
                "copies": parts.copies,
            },
        })
    });
    let peers = report.peers.iter().map(|peer| {
        json!({
            "node": peer.node,
            "sent_bytes_per_second": peer.sent_bytes_per_second,
            "received_bytes_per_second": peer.received_bytes_per_second,
        })
    });
    json!({
        "age_seconds": seconds(report.age_ms),
        "ranks": ranks.collect::<Vec<_>>(),
        "peers": peers.collect::<Vec<_>>(),
        "line_bytes_per_second": report.line_bytes_per_second,
        "resident_bytes": report.resident_bytes,
        "shared_bytes": report.shared_bytes,
        "pieces_in_flight": report.pieces_in_flight,
        "queued_tensors": report.queued_tensors,
        "stalled_tensors": report.stalled_tensors,
        "operations_per_second": report.operations_per_second,
    })
}

fn entries(entries: &[Entry]) -> Vec<Value> {
    entries.iter().map(|it| json!({"seconds": seconds(it.at_ms), "text": it.text})).collect()
}
