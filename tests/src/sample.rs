//! A running job as its coordinator reports it, for the tests of viewers.

use gradwire_proto::pb::{
    Blocked, Choice, Entry, NodeReport, NodeStatus, PeerReport, RankLag, RankReport,
    RunningOperation, StatusResponse,
};

/// Two nodes with two ranks each; the others wait for rank 3 during 80 % of the time.
pub fn status(uptime_ms: u64) -> StatusResponse {
    let rank = |rank, exposed| RankReport {
        rank,
        steps: 100 + rank,
        step_seconds: 0.05,
        exposed,
        since_step_seconds: 0.01,
        paused: false,
        blocked: Some(Blocked { gather: exposed, ..Blocked::default() }),
    };
    let peer = |node, sent, received| PeerReport {
        node,
        sent_bytes_per_second: sent,
        received_bytes_per_second: received,
    };
    let report = |ranks, peers, line| NodeReport {
        age_ms: 400,
        ranks,
        peers,
        line_bytes_per_second: line,
        resident_bytes: 64 << 20,
        shared_bytes: 2 << 20,
        pieces_in_flight: 1,
        queued_tensors: 3,
        operations_per_second: 40.0,
        ..NodeReport::default()
    };
    let node = |host: &str, first_rank, report| NodeStatus {
        host: host.to_owned(),
        first_rank,
        slots: 2,
        rack: String::new(),
        line_mbit: 0,
        silent_ms: 12,
        left_ranks: Vec::new(),
        reconnections: 1,
        report: Some(report),
    };
    let entry = |at_ms, text: &str| Entry { at_ms, text: text.to_owned() };
    StatusResponse {
        job: "j1".into(),
        version: "0.1.0".into(),
        phase: "running".into(),
        reason: "the world is complete".into(),
        epoch: 1,
        nodes: vec![
            node(
                "a",
                0,
                report(
                    vec![rank(0, 0.8), rank(1, 0.6)],
                    vec![peer(1, 5e7, 1e7)],
                    Some(125_000_000),
                ),
            ),
            node("b", 2, report(vec![rank(2, 0.7), rank(3, 0.0)], Vec::new(), None)),
        ],
        operations_started: 10,
        operations_done: 9,
        uptime_ms,
        operations: vec![RunningOperation {
            sequence: 10,
            running_ms: 30,
            tensors: vec!["fc.weight".into()],
            tensor_count: 1,
            missing_nodes: vec![1],
        }],
        lags: vec![
            RankLag { rank: 1, seconds: uptime_ms as f64 * 0.01 / 1e3, tensors: 3 },
            RankLag { rank: 3, seconds: uptime_ms as f64 * 0.8 / 1e3, tensors: 90 },
        ],
        choices: vec![Choice {
            collective: "allreduce".into(),
            nodes: 2,
            bytes: 1024,
            pieces: 1,
            spec: "ring(segments=1)".into(),
            predicted_seconds: 1e-4,
            operations: 9,
            observed: 9,
            mean_seconds: 1.2e-4,
            reason: "ring for up to 1024 bytes: by the model".into(),
            ..Choice::default()
        }],
        decisions: vec![entry(900, "ring for up to 1024 bytes: by the model")],
        events: vec![entry(10, "the world is complete: 2 nodes")],
        ..StatusResponse::default()
    }
}
