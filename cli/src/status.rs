//! `gradwire status`: shows the state of a running job, for people and for programs.

use std::{
    fmt::Write as _,
    io::{self, ErrorKind, IsTerminal, Write as _},
    time::Duration,
};

use clap::Args;

use gradwire_launcher::error::CommandError;
use gradwire_proto::{
    Failure,
    pb::{NodeReport, StatusRequest, StatusResponse},
};
use gradwire_services::inspect_client::InspectClient;
use gradwire_viewer::{
    json,
    view::{self, Lags, Shares},
};
use tokio::time::timeout;
use tonic::{
    Code, Response, Status, Streaming,
    transport::{Channel, Endpoint},
};

use crate::{cluster::printable, explain};

/// How long the coordinator may take to answer (WAIT).
pub(crate) const ANSWER: Duration = Duration::from_secs(5);

/// How long it may take to explain: it asks the daemons, which may save their recordings (WAIT).
pub(crate) const EXPLANATION: Duration = Duration::from_secs(10);

/// How long a watched coordinator may be silent (WAIT).
const SILENCE: Duration = Duration::from_secs(10);

/// The largest snapshot, in bytes: enough for some thousand nodes (BOUND).
const MAX_SNAPSHOT: usize = 64 << 20;

/// The hint how to find the address.
const WHERE: &str = "gradwire run --verbose shows the coordinator's address";

/// The hint if something accepts a connection to the coordinator and does not answer.
const SILENT: &str = "its daemon is stopped or the network is down, and under gradwire run the \
                      job soon ends with the cause; or it is not the address of a coordinator";

/// Moves the cursor home and clears the screen.
const CLEAR: &str = "\x1b[H\x1b[J";

/// The job, and how to show it.
#[derive(Debug, Args)]
pub struct Options {
    /// The job [default: your job on this host].
    ///
    /// Its id if you started it on this host.
    ///
    /// Otherwise the address of its coordinator or status page.
    #[arg(value_name = "JOB")]
    pub address: Option<String>,
    /// Print JSON.
    ///
    /// docs/status.schema.json describes it. --watch prints lines of JSON.
    #[arg(long)]
    pub json: bool,
    /// Repeat twice per second, until the job ends.
    #[arg(long)]
    pub watch: bool,
}

/// Connects to the coordinator at `address` (`ip:port`).
async fn connect(address: &str) -> Result<InspectClient<Channel>, CommandError> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|_| CommandError::usage(format!("invalid address '{address}': expected IP:PORT")))?
        .connect_timeout(ANSWER)
        .http2_keep_alive_interval(ANSWER)
        .keep_alive_timeout(ANSWER);
    let channel = endpoint.connect().await.map_err(|error| {
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        let cause = cause.unwrap_or_else(|| error.to_string());
        CommandError::failed(format!("no coordinator answers at {address}: {cause}")).hint(WHERE)
    })?;
    Ok(InspectClient::new(channel).max_decoding_message_size(MAX_SNAPSHOT))
}

/// Connects to the coordinator at `address` (`ip:port`) and makes one call.
///
/// # Errors
/// [`CommandError`] if it can't be reached or does not answer in time.
pub(crate) async fn open<T>(
    address: &str,
    call: impl AsyncFnOnce(&mut InspectClient<Channel>) -> Result<Response<T>, Status>,
) -> Result<T, CommandError> {
    open_within(ANSWER, address, call).await
}

/// As [`open`], for a coordinator that answers within this time.
pub(crate) async fn open_within<T>(
    limit: Duration,
    address: &str,
    call: impl AsyncFnOnce(&mut InspectClient<Channel>) -> Result<Response<T>, Status>,
) -> Result<T, CommandError> {
    // The limit of an endpoint would apply to a whole stream.
    let answer = async {
        let answer = call(&mut connect(address).await?).await;
        answer.map(Response::into_inner).map_err(|status| refused(address, &status))
    };
    timeout(limit, answer).await.unwrap_or_else(|_| {
        let what = format!("no coordinator answers at {address} within {limit:?}");
        Err(CommandError::failed(what).hint(SILENT))
    })
}

/// The state of the job of the coordinator at `address` (`ip:port`).
///
/// # Errors
/// [`CommandError`] if it can't be reached or does not answer in time.
pub async fn ask(address: &str) -> Result<StatusResponse, CommandError> {
    open(address, async |client| client.status(StatusRequest {}).await).await
}

pub(crate) fn refused(address: &str, status: &Status) -> CommandError {
    let cause = status.message();
    match status.code() {
        // The job is over, it is slow, or there are too many viewers.
        Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::ResourceExhausted => {
            CommandError::failed(format!("{address}: {cause}"))
        }
        Code::Unauthenticated => {
            let hint = "GRADWIRE_SECRET must be that of this job";
            CommandError::failed(format!("{address}: {cause}")).hint(hint)
        }
        _ => {
            let what = format!("the service at {address} is not a coordinator: {cause}");
            CommandError::failed(what)
                .hint(format!("if it is a status page, give http://{address}/; {WHERE}"))
        }
    }
}

/// The snapshots that a coordinator sends twice per second.
#[derive(Debug)]
pub struct Watch {
    address: String,
    snapshots: Streaming<StatusResponse>,
    /// Why the job has failed, once it is known.
    failure: Option<Failure>,
}

impl Watch {
    /// Starts to watch the job of the coordinator at `address`.
    ///
    /// # Errors
    /// [`CommandError`] if it can't be reached, or if it has too many viewers.
    pub async fn start(address: &str) -> Result<Self, CommandError> {
        let snapshots = open(address, async |client| client.watch(StatusRequest {}).await).await?;
        Ok(Self { address: address.to_owned(), snapshots, failure: None })
    }

    /// The next snapshot.
    ///
    /// # Errors
    /// [`CommandError`] if there are no more: the job is over, or the coordinator is lost.
    pub async fn next(&mut self) -> Result<StatusResponse, CommandError> {
        let address = &self.address;
        let what = match timeout(SILENCE, self.snapshots.message()).await {
            Ok(Ok(Some(snapshot))) => {
                self.failure = snapshot.failure.clone().map(Failure::from);
                return Ok(snapshot);
            }
            Ok(_) if let Some(failure) = &self.failure => {
                return Err(CommandError::failed(format!("{address}: the job failed: {failure}")));
            }
            Ok(Ok(None)) => format!("{address}: the job is over"),
            Ok(Err(status))
                if matches!(status.code(), Code::Unavailable | Code::ResourceExhausted) =>
            {
                format!("{address}: {}", status.message())
            }
            Ok(Err(status)) => {
                format!("lost the coordinator at {address}: {}", status.message())
            }
            Err(_) => format!("the coordinator at {address} has been silent for {SILENCE:?}"),
        };
        Err(CommandError::failed(what).hint("the output of gradwire run shows how the job ended"))
    }
}

/// Shows the state of a job, once or until it ends.
///
/// # Errors
/// [`CommandError`] if the coordinator can't be reached, or if a watched job ends.
pub async fn run(address: &str, json: bool, watch: bool) -> Result<(), CommandError> {
    let mut lags = Lags::default();
    if !watch {
        let status = ask(address).await?;
        let shares = lags.add(&status);
        let text = if json { pretty(&status, &shares) } else { show(&status, &shares) };
        return write(&text).map(drop);
    }
    let mut snapshots = Watch::start(address).await?;
    let is_terminal = io::stdout().is_terminal();
    loop {
        let status = snapshots.next().await?;
        let shares = lags.add(&status);
        let text = if json {
            format!("{}\n", json::of(&status, &shares))
        } else if is_terminal {
            format!("{CLEAR}{}", show(&status, &shares))
        } else {
            format!("{}\n", show(&status, &shares))
        };
        if !write(&text)? {
            return Ok(());
        }
    }
}

fn pretty(status: &StatusResponse, shares: &Shares) -> String {
    format!("{:#}\n", json::of(status, shares))
}

/// Writes to standard output. Returns false if the reader has closed it.
pub(crate) fn write(text: &str) -> Result<bool, CommandError> {
    let mut out = io::stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(CommandError::failed(format!("standard output: {error}"))),
    }
}

/// The state of a job as text.
pub fn show(status: &StatusResponse, shares: &Shares) -> String {
    let mut text = String::new();
    // Writing to a string can't fail.
    let mut line = |line: String| {
        let _ = writeln!(text, "{}", printable(&line));
    };
    line(format!(
        "job {} ({}), epoch {}, {}: {}",
        status.job, status.version, status.epoch, status.phase, status.reason
    ));
    if !status.page.is_empty() {
        line(format!("page: http://{}/", status.page));
    }
    line(format!(
        "operations: {} started, {} done",
        status.operations_started, status.operations_done
    ));
    if let Some(rate) = view::slowest(view::ranks(status)) {
        line(format!("steps: {rate:.2} per second"));
    }
    if let Some(straggler) = view::straggler_in_words(shares) {
        line(straggler);
    }
    if let Some(network) = &status.network {
        let links = view::count(network.links.len() as u64, "link");
        let cut = if network.complete { "" } else { "; there was no time for more" };
        line(format!("network: {links} measured in {:.3} s{cut}", network.took_seconds));
        if !network.arrangement.is_empty() {
            line(format!("network: {}", network.arrangement));
        }
    }
    for text in explain::sizes_as_text(status).lines().filter(|text| !text.is_empty()) {
        line(text.to_owned());
    }
    if let Some(failure) = &status.failure {
        line(format!("failure: {}", Failure::from(failure.clone())));
    }
    for node in &status.nodes {
        let first = u64::from(node.first_rank);
        let ranks = match u64::from(node.slots).checked_sub(1) {
            Some(0) => format!("rank {first}"),
            Some(others) => format!("ranks {first}-{}", first + others),
            None => "server".to_owned(),
        };
        let rack =
            if node.rack.is_empty() { String::new() } else { format!(", rack {}", node.rack) };
        let left = match node.left_ranks.as_slice() {
            [] => String::new(),
            left => format!(", left: {}", list(left)),
        };
        let again = match node.reconnections {
            0 => String::new(),
            1 => ", connected again once".to_owned(),
            count => format!(", connected again {count} times"),
        };
        let (host, silent) = (&node.host, node.silent_ms);
        line(format!("host {host}: {ranks}{rack}, silent for {silent} ms{again}{left}"));
        if let Some(report) = &node.report {
            line(format!("  {}", does(report)));
        }
    }
    for ((from, to), flow) in view::flows(status) {
        let host = |node: u32| status.nodes.get(node as usize).map_or("?", |node| &node.host);
        let share = flow.share.map(|share| format!(", {} of its line", view::percent(share)));
        let (rate, share) = (view::bytes(flow.rate), share.unwrap_or_default());
        line(format!("host {} sends {rate}/s to {}{share}", host(from), host(to)));
    }
    for set in &status.process_sets {
        let joined = match set.joined_ranks.as_slice() {
            [] => String::new(),
            joined => format!(", joined: {}", list(joined)),
        };
        match set.process_set {
            // The lines of the hosts have its ranks.
            0 if joined.is_empty() => {}
            0 => line(format!("all ranks{joined}")),
            id => line(format!("process set {id}: {}{joined}", ranks(&set.ranks))),
        }
    }
    let more = status.process_set_count.saturating_sub(status.process_sets.len() as u64);
    if more > 0 {
        line(format!("… and {more} more process sets"));
    }
    for operation in &status.operations {
        let names: Vec<String> = operation.tensors.iter().map(|name| format!("'{name}'")).collect();
        let more = operation.tensor_count.saturating_sub(names.len() as u64);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        line(format!(
            "operation {}: {}{more}, running for {} ms, unfinished on {}",
            operation.sequence,
            names.join(", "),
            operation.running_ms,
            view::count(operation.missing_nodes.len() as u64, "node")
        ));
    }
    for tensor in &status.pending {
        let missing = match tensor.missing_ranks.as_slice() {
            [] => "no rank".to_owned(),
            missing => ranks(missing),
        };
        let seconds = Duration::from_millis(tensor.waiting_ms).as_secs_f64();
        let set = match tensor.process_set {
            0 => String::new(),
            id => format!(" of process set {id}"),
        };
        line(format!("tensor '{}'{set} has waited {seconds:.1} s for {missing}", tensor.name));
    }
    let more = status.pending_count.saturating_sub(status.pending.len() as u64);
    if more > 0 {
        line(format!("… and {more} more tensors"));
    }
    text
}

/// The activity of a node, in one line.
fn does(report: &NodeReport) -> String {
    let steps = view::slowest(report.ranks.iter()).map(|rate| format!("{rate:.2} steps/s"));
    let exposed =
        view::exposed(report).map(|share| format!("blocked {} of the time", view::percent(share)));
    let stalled = (report.stalled_tensors > 0)
        .then(|| format!("{} stalled", view::count(report.stalled_tensors.into(), "tensor")));
    let memory = format!(
        "{} of memory, {} shared with ranks",
        view::bytes(report.resident_bytes as f64),
        view::bytes(report.shared_bytes as f64)
    );
    let now = format!(
        "{} in flight, {} submitted",
        view::count(report.pieces_in_flight.into(), "piece"),
        view::count(report.queued_tensors.into(), "tensor")
    );
    let parts: Vec<String> =
        steps.into_iter().chain(exposed).chain([now]).chain(stalled).chain([memory]).collect();
    parts.join(", ")
}

fn ranks(all: &[u32]) -> String {
    format!("{} {}", if all.len() == 1 { "rank" } else { "ranks" }, list(all))
}

fn list(ranks: &[u32]) -> String {
    let shown: Vec<_> = ranks.iter().take(16).map(ToString::to_string).collect();
    let more = if ranks.len() > 16 { ", …" } else { "" };
    format!("{}{more}", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use gradwire_proto::pb::{Link, Network, NodeStatus, PendingTensor, ProcessSetStatus};
    use gradwire_tests::sample;

    use super::*;

    #[test]
    fn missing_ranks_are_named() {
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
                line_mbit: 0,
                rack: "r1".into(),
                silent_ms: 12,
                left_ranks: vec![3],
                reconnections: 2,
                report: None,
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
                arrangement: "links show 2 racks".into(),
                ..Network::default()
            }),
            costs: None,
            ..StatusResponse::default()
        };
        assert_eq!(
            show(&status, &Shares::new()),
            "job j1 (0.1.0), epoch 1, running: 2 of 2 nodes\n\
             operations: 5 started, 4 done\n\
             network: 1 link measured in 0.250 s; there was no time for more\n\
             network: links show 2 racks\n\
             host n1: ranks 2-3, rack r1, silent for 12 ms, connected again 2 times, left: 3\n\
             all ranks, joined: 3\n\
             process set 4: ranks 0, 2\n\
             … and 3 more process sets\n\
             tensor 'fc.weight' has waited 1.5 s for ranks 1, 2\n\
             tensor 'x' of process set 4 has waited 0.2 s for no rank\n\
             … and 6 more tensors\n"
        );
    }

    #[test]
    fn activity_and_stragglers_are_shown() {
        let status = sample::status(5000);
        let text = show(&status, &Lags::default().add(&status));
        for part in [
            "steps: 20.00 per second\n",
            "straggler: rank 3: the others wait for it 80 % of the time\n",
            "  20.00 steps/s, blocked 70 % of the time, 1 piece in flight, 3 tensors submitted, \
             64.0 MiB of memory, 2.0 MiB shared with ranks\n",
            "host a sends 47.7 MiB/s to b, 40 % of its line\n",
            "host b sends 9.5 MiB/s to a\n",
            "operation 10: 'fc.weight', running for 30 ms, unfinished on 1 node\n",
        ] {
            assert!(text.contains(part), "no {part:?} in {text}");
        }
    }

    #[tokio::test]
    async fn a_missing_coordinator_is_named() {
        let error = ask("127.0.0.1:1").await.unwrap_err();
        assert!(error.what.starts_with("no coordinator answers at 127.0.0.1:1: "), "{error}");
        let error = ask("not an address").await.unwrap_err();
        assert_eq!(error.what, "invalid address 'not an address': expected IP:PORT");
    }
}
