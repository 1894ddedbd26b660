//! `gradwire status`: what a running coordinator knows, for people.

use std::{fmt::Write, time::Duration};

use gradwire_launcher::error::CommandError;
use gradwire_proto::{
    Failure,
    pb::{StatusRequest, StatusResponse, inspect_client::InspectClient},
};
use tonic::{Code, transport::Endpoint};

use crate::cluster::printable;

/// How long the coordinator may take to answer (WAIT).
const ANSWER: Duration = Duration::from_secs(5);

/// Where its address is found.
const WHERE: &str = "gradwire run --verbose tells the coordinator's address";

/// Asks the coordinator at `address` (`ip:port`).
///
/// # Errors
/// [`CommandError`] if it can't be reached or does not answer in time.
pub async fn ask(address: &str) -> Result<StatusResponse, CommandError> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|_| CommandError::usage(format!("'{address}' is not an address ip:port")))?
        .connect_timeout(ANSWER)
        .timeout(ANSWER);
    let channel = endpoint.connect().await.map_err(|error| {
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        let cause = cause.unwrap_or_else(|| error.to_string());
        CommandError::failed(format!("no coordinator answers at {address}: {cause}")).hint(WHERE)
    })?;
    let mut client = InspectClient::new(channel);
    let answer = client.status(StatusRequest {}).await;
    Ok(answer
        .map_err(|status| {
            let cause = status.message();
            match status.code() {
                // The job is over, or it is slow.
                Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled => {
                    CommandError::failed(format!("{address}: {cause}"))
                }
                _ => {
                    let what = format!("what answers at {address} is no coordinator: {cause}");
                    CommandError::failed(what).hint(WHERE)
                }
            }
        })?
        .into_inner())
}

/// The answer as text.
pub fn show(status: &StatusResponse) -> String {
    let mut text = String::new();
    // Writing to a string can't fail.
    let mut line = |line: String| {
        let _ = writeln!(text, "{}", printable(&line));
    };
    line(format!(
        "job {} ({}), epoch {}, {}: {}",
        status.job, status.version, status.epoch, status.phase, status.reason
    ));
    line(format!(
        "operations: {} started, {} done",
        status.operations_started, status.operations_done
    ));
    if let Some(network) = &status.network {
        let (links, seconds) = (network.links.len(), network.took_seconds);
        let cut = if network.complete { "" } else { ", as far as there was time" };
        line(format!("network: links measured: {links}, in {seconds:.3} s{cut}"));
    }
    if let Some(failure) = &status.failure {
        line(format!("failure: {}", Failure::from(failure.clone())));
    }
    for node in &status.nodes {
        let ranks = match u64::from(node.slots).checked_sub(1) {
            Some(others) => {
                format!("ranks {}-{}", node.first_rank, u64::from(node.first_rank) + others)
            }
            None => "server".to_owned(),
        };
        let rack =
            if node.rack.is_empty() { String::new() } else { format!(", rack {}", node.rack) };
        let left = match node.left_ranks.as_slice() {
            [] => String::new(),
            left => format!(", left: {}", list(left)),
        };
        line(format!("host {}: {ranks}{rack}, silent for {} ms{left}", node.host, node.silent_ms));
    }
    for set in &status.process_sets {
        let joined = match set.joined_ranks.as_slice() {
            [] => String::new(),
            joined => format!(", joined: {}", list(joined)),
        };
        match set.process_set {
            // The hosts are in its ranks.
            0 if joined.is_empty() => {}
            0 => line(format!("all ranks{joined}")),
            id => line(format!("process set {id}: ranks {}{joined}", list(&set.ranks))),
        }
    }
    let more = status.process_set_count.saturating_sub(status.process_sets.len() as u64);
    if more > 0 {
        line(format!("… and {more} more process sets"));
    }
    for tensor in &status.pending {
        let missing = match tensor.missing_ranks.as_slice() {
            [] => "nobody".to_owned(),
            missing => format!("ranks {}", list(missing)),
        };
        let seconds = Duration::from_millis(tensor.waiting_ms).as_secs_f64();
        let set = match tensor.process_set {
            0 => String::new(),
            id => format!(" of process set {id}"),
        };
        line(format!("tensor '{}'{set} waits since {seconds:.1} s for {missing}", tensor.name));
    }
    let more = status.pending_count.saturating_sub(status.pending.len() as u64);
    if more > 0 {
        line(format!("… and {more} more tensors"));
    }
    text
}

fn list(ranks: &[u32]) -> String {
    let shown: Vec<_> = ranks.iter().take(16).map(ToString::to_string).collect();
    let more = if ranks.len() > 16 { ", …" } else { "" };
    format!("{}{more}", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use gradwire_proto::pb::{Link, Network, NodeStatus, PendingTensor, ProcessSetStatus};

    use super::*;

    #[test]
    fn who_is_missing_is_reported_by_name() {
        let status = StatusResponse {
            job: "j1".into(),
            version: "0.1.0".into(),
            phase: "running".into(),
            reason: "2 of 2 nodes".into(),
            epoch: 1,
            nodes: vec![NodeStatus {
                host: "n\u{1b}1".into(),
                first_rank: 2,
                slots: 2,
                rack: "r1".into(),
                silent_ms: 12,
                left_ranks: vec![3],
            }],
            pending: vec![
                PendingTensor {
                    process_set: 0,
                    name: "fc.weight".into(),
                    waiting_ms: 1500,
                    missing_ranks: vec![1, 2],
                },
                PendingTensor {
                    process_set: 4,
                    name: "x".into(),
                    waiting_ms: 200,
                    missing_ranks: Vec::new(),
                },
            ],
            pending_count: 8,
            process_sets: vec![
                ProcessSetStatus { process_set: 0, ranks: vec![0, 1, 2, 3], joined_ranks: vec![3] },
                ProcessSetStatus { process_set: 4, ranks: vec![0, 2], joined_ranks: Vec::new() },
            ],
            process_set_count: 5,
            choices: Vec::new(),
            operations_started: 5,
            operations_done: 4,
            failure: None,
            network: Some(Network {
                took_seconds: 0.25,
                complete: false,
                links: vec![Link::default()],
                costs: None,
            }),
            costs: None,
        };
        assert_eq!(
            show(&status),
            "job j1 (0.1.0), epoch 1, running: 2 of 2 nodes\n\
             operations: 5 started, 4 done\n\
             network: links measured: 1, in 0.250 s, as far as there was time\n\
             host n1: ranks 2-3, rack r1, silent for 12 ms, left: 3\n\
             all ranks, joined: 3\n\
             process set 4: ranks 0, 2\n\
             … and 3 more process sets\n\
             tensor 'fc.weight' waits since 1.5 s for ranks 1, 2\n\
             tensor 'x' of process set 4 waits since 0.2 s for nobody\n\
             … and 6 more tensors\n"
        );
    }

    #[tokio::test]
    async fn a_coordinator_that_is_not_there_is_named() {
        let error = ask("127.0.0.1:1").await.unwrap_err();
        assert!(error.what.starts_with("no coordinator answers at 127.0.0.1:1: "), "{error}");
        let error = ask("not an address").await.unwrap_err();
        assert_eq!(error.what, "'not an address' is not an address ip:port");
    }
}
