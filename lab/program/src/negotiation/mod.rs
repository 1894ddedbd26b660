//! `gradwire bench negotiation`: the cost of agreeing on a step, for many nodes.
//!
//! The coordinator is a real one, in its own process. The nodes are streams of this process. They
//! send all messages that daemons send, but move no data, so the time of a step contains only
//! negotiation. A step begins with the first message of any node, and ends when the last node has
//! received its last operation. All nodes announce at the same time, which is the highest load for
//! a coordinator.
//!
//! - [`args`]: the options
//! - [`service`]: the coordinator
//! - [`node`]: a node; [`step`]: what it announces and must receive in return (pure)
//! - [`meter`], [`figures`]: the counters and the report

pub mod args;
pub mod figures;
pub mod meter;
pub mod node;
pub mod service;
pub mod step;

use std::{
    collections::HashMap, net::Ipv4Addr, process::ExitCode, sync::Arc, thread, time::Duration,
};

use gradwire_launcher::{error::CommandError, launch::plan};
use gradwire_services::launch::ITSELF;
use gradwire_settings::Loaded;
use tokio::{runtime::Builder, sync::Barrier, task::JoinSet};
use tokio_util::task::AbortOnDropHandle;

use self::{
    args::Negotiation,
    figures::{Head, Row, Steps},
    node::{Counts, Job, Node, Span},
    service::Service,
    step::Tensors,
};
use crate::process::Usage;

/// The most threads for simulated nodes: more than the coordinator could keep busy.
const MAX_THREADS: usize = 8;

/// Default timeouts for simulated nodes. The nodes share a few threads, which may not run for
/// seconds on a busy machine; no node counts as lost then.
const PATIENCE: [(&str, &str); 2] =
    [("GRADWIRE_HEARTBEAT__TIMEOUT_MS", "60000"), ("GRADWIRE_JOB__TIMEOUT_MS", "120000")];

/// Measures each number of nodes.
///
/// # Errors
/// [`CommandError`] if the options can't be satisfied, or if something fails.
pub fn run(
    options: &Negotiation,
    settings: &Loaded,
    environment: &HashMap<String, String>,
) -> Result<ExitCode, CommandError> {
    if environment.contains_key("GRADWIRE_JOB") {
        let what = "bench negotiation can't run as a rank of a job: it simulates all ranks";
        return Err(CommandError::usage(what).hint("start it without gradwire run"));
    }
    let tensors = Tensors::new(&options.tensors()?)?;
    let most = options.nodes.iter().copied().max().unwrap_or_default();
    service::allow(most)?;
    // One core is left for the coordinator.
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let threads = cores.saturating_sub(1).clamp(1, MAX_THREADS);
    let mut builder = Builder::new_multi_thread();
    let runtime =
        builder.worker_threads(threads).enable_all().build().map_err(CommandError::failed)?;
    let mut table = Head::new(options, &tensors, threads, settings).begin(options)?;
    for nodes in &options.nodes {
        // On the main thread, because the coordinator ends when the thread that started it ends.
        table.row(runtime.block_on(measure(options, settings, *nodes, &tensors))?)?;
    }
    table.finish()?;
    runtime.shutdown_background();
    Ok(ExitCode::SUCCESS)
}

async fn measure(
    options: &Negotiation,
    settings: &Loaded,
    count: u32,
    tensors: &Arc<Tensors>,
) -> Result<Row, CommandError> {
    let node = |order| plan::Node {
        host: format!("node{order}"),
        agent: order as usize,
        first_rank: order,
        workers: vec![order],
        survivors: 0,
        rack: String::new(),
        line_mbit: None,
        interface: None,
    };
    let nodes = (0..count).map(node).collect();
    let plan = plan::Plan::new(nodes, ITSELF, [""; 0], settings)?;
    let mut variables = plan.daemon_variables(0, Ipv4Addr::LOCALHOST.into(), None);
    if !PATIENCE.iter().any(|(name, _)| variables.contains_key(*name)) {
        variables.extend(PATIENCE.map(|(name, value)| (name.to_owned(), value.to_owned())));
    }
    let service = Service::start(&variables).await?;
    let job = Arc::new(Job {
        id: plan.job,
        secret: plan.secret,
        coordinator: service.address,
        tensors: Arc::clone(tensors),
        ready: options.ready,
        done_each: options.done_each,
    });
    let mut nodes = Vec::new();
    for order in 0..count {
        nodes.push(Node::join(Arc::clone(&job), order).await?);
    }
    let mut every = Duration::MAX;
    for node in &mut nodes {
        every = node.welcome().await?;
    }
    let senders = nodes.iter().map(Node::sender).collect();
    let heart = AbortOnDropHandle::new(tokio::spawn(node::beat(senders, every)));

    let (nodes, first) = steps(nodes, &service, 1).await?;
    let (nodes, _) = steps(nodes, &service, options.warmup).await?;
    let (nodes, counted) = steps(nodes, &service, options.iters).await?;
    let row = Row::new(count, tensors.count(), &first, &counted);

    let mut leaving = JoinSet::new();
    for node in nodes {
        leaving.spawn(node.leave());
    }
    while let Some(left) = leaving.join_next().await {
        left.map_err(CommandError::failed)??;
    }
    // The heartbeat task holds clones of the senders. The last streams end with it.
    drop(heart);
    service.end().await?;
    Ok(row)
}

/// Runs some steps of all nodes, each node in a task.
async fn steps(
    mut nodes: Vec<Node>,
    service: &Service,
    count: u32,
) -> Result<(Vec<Node>, Steps), CommandError> {
    let own = std::process::id();
    let together = Arc::new(Barrier::new(nodes.len()));
    for node in &mut nodes {
        let _before = node.counted();
    }
    let before = (service.usage()?, Usage::of(own)?);
    let mut tasks = JoinSet::new();
    for node in nodes {
        tasks.spawn(node.steps(count, Arc::clone(&together)));
    }
    let (mut nodes, mut seen) = (Vec::new(), Vec::new());
    while let Some(done) = tasks.join_next().await {
        // The first error ends all nodes: the others would wait for this one.
        let (node, spans) = done.map_err(CommandError::failed)??;
        nodes.push(node);
        seen.push(spans);
    }
    let after = (service.usage()?, Usage::of(own)?);
    let mut counts = Counts::default();
    for node in &mut nodes {
        let Counts { sent, received, operations } = node.counted();
        counts.sent += sent;
        counts.received += received;
        counts.operations += operations;
    }
    let steps = Steps {
        times: times(&seen),
        counts,
        coordinator: [before.0, after.0],
        simulator: [before.1, after.1],
    };
    Ok((nodes, steps))
}

/// The seconds of each step, from the first node's beginning to the last node's end.
fn times(nodes: &[Vec<Span>]) -> Vec<f64> {
    let count = nodes.iter().map(Vec::len).min().unwrap_or_default();
    let step = |i: usize| {
        let begin = nodes.iter().map(|spans| spans[i].begin).min();
        let end = nodes.iter().map(|spans| spans[i].end).max();
        begin.zip(end).map_or(0.0, |(begin, end)| (end - begin).as_secs_f64())
    };
    (0..count).map(step).collect()
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[test]
    fn a_step_lasts_from_first_begin_to_last_end() {
        let zero = Instant::now();
        let span = |begin, end| Span {
            begin: zero + Duration::from_millis(begin),
            end: zero + Duration::from_millis(end),
        };
        let nodes = [vec![span(2, 5), span(10, 11)], vec![span(1, 4), span(10, 14)]];
        assert_eq!(times(&nodes), [0.004, 0.004]);
        assert!(times(&[]).is_empty());
    }
}
