//! Executes the orders of the coordinator.

use std::sync::{Arc, atomic::Ordering};

use gradwire_proto::{
    Collective, Endpoints, Failure, FailureKind, NodeId, ProcessSetId, Rank, Request, WireError, pb,
};
use gradwire_telemetry::on_scrape;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::{
    mesh::Mesh,
    node::{Node, Running},
    recording, trace,
};
use crate::{
    data::{
        feedback::Feedback,
        lane::Lane,
        order::{LaneConfig, LaneEvents},
        pool::{Pool, Processors, Threads},
    },
    metrics::{self, PeerTraffic},
    model::{
        members::Members,
        operation::Instruction,
        tensor::{AllocationRequest, TensorKey, join_of},
        world::{World, invalid},
    },
    ops::OperationManager,
    queue::TensorQueue,
    transport::{handshake::Identity, line::Line, paths::Paths},
};

#[derive(Debug)]
pub(crate) struct Dispatcher {
    pub(crate) node: Arc<Node>,
    /// The data plane's listeners, until the world has formed.
    pub(crate) listeners: Option<Vec<TcpListener>>,
    pub(crate) cancel: CancellationToken,
}

impl Dispatcher {
    pub(super) fn formed(&mut self, world: Arc<World>) -> Result<(), Failure> {
        let node = &self.node;
        let Some(listeners) = self.listeners.take() else {
            return Err(protocol("the coordinator formed the world twice"));
        };
        let config = &node.config;
        if world.me().slots != config.slots {
            let what = format!(
                "the coordinator gave this node {} slots, but it has {}",
                world.me().slots,
                config.slots
            );
            return Err(protocol(what));
        }
        let formed = (world.nodes.len() as u32, world.size());
        if let Some((nodes, ranks)) = config.expected.filter(|expected| *expected != formed) {
            let what = format!(
                "the daemon of this host was started for a job of {ranks} ranks on {nodes} hosts, \
                 and the coordinator for one of {} ranks on {} hosts",
                formed.1, formed.0
            );
            let hint = "start all hosts of a job with the same variables";
            return Err(Failure::new(FailureKind::Invalid, what)
                .host(config.host.clone())
                .hint(hint));
        }
        let resource = |error: std::io::Error| {
            let what = format!("the data plane can't be started: {error}");
            Failure::new(FailureKind::Resource, what)
                .host(config.host.clone())
                .hint("raise gradwired's limits of open files and processes (ulimit -n -u)")
        };
        let hosts: Arc<[String]> = world.nodes.iter().map(|n| n.host.clone()).collect();
        let line = Line::of(&world.me().addresses, config.line_rate);
        let paths = Arc::new(Paths::new(hosts.clone(), line));
        on_scrape(&paths);
        let events: Arc<dyn LaneEvents> = Arc::new(Arc::downgrade(node));
        let threads = Threads { lanes: world.lanes, set: config.threads, ranks: world.me().slots };
        let pool = Arc::new(Pool::start(threads, Processors::look).map_err(resource)?);
        let lanes = (0..world.lanes)
            .map(|index| {
                let lane = LaneConfig {
                    index,
                    me: world.node,
                    hosts: hosts.clone(),
                    paths: paths.clone(),
                    epoch: world.epoch.0 as u32,
                    chunk: config.chunk_bytes,
                    limit: config.progress_timeout,
                    recovery: config.recovery,
                    streaming_bytes: config.streaming_bytes,
                    pool: pool.clone(),
                    tracer: node.tracer.clone(),
                };
                Lane::start(lane, events.clone())
            })
            .collect::<std::io::Result<Vec<_>>>()
            .map_err(resource)?;
        let lanes: Arc<[Lane]> = lanes.into();
        let identity = Identity {
            job: config.identity.job.clone(),
            secret: config.identity.secret.clone(),
            epoch: world.epoch,
            node: world.node,
            nodes: world.nodes.len() as u32,
            lanes: world.lanes,
        };
        let mesh = Mesh::new(
            config.clone(),
            identity,
            world.clone(),
            lanes.clone(),
            node.job.clone(),
            self.cancel.clone(),
        );
        listeners.into_iter().for_each(|listener| self.serve(&mesh, listener));
        let everybody = Arc::new(Members::everybody(&world));
        let queue = Arc::new(TensorQueue::new(world.me().first_rank, everybody));
        metrics::process_sets(queue.process_sets());
        let connector = Arc::new(mesh.clone());
        let feedback = Feedback::new(config.feedback_max_bytes);
        let operations = OperationManager::new(
            &world,
            queue.clone(),
            lanes.clone(),
            connector,
            events,
            feedback,
            node.recorder.clone(),
        );
        let hosts = world.nodes.iter().map(|node| node.host.as_str());
        let me = world.node;
        let traffic = hosts.enumerate().map(|(at, host)| match at == me.index() {
            true => PeerTraffic::own(),
            false => PeerTraffic::new(at, host),
        });
        let traffic = traffic.collect();
        recording::formed(node, &world);
        let running = Running { world, queue, operations, lanes, mesh, paths, traffic };
        let _ = node.running.set(running);
        Ok(())
    }

    /// Where the data plane listens. If this host has other addresses now, listens on them first.
    /// `None` before the world has formed.
    pub(super) fn data_addresses(&self) -> Option<Endpoints> {
        let mesh = &self.node.running.get()?.mesh;
        if let Some(now) = mesh.addresses_now() {
            match mesh.listen_again(&now) {
                Ok(listeners) => listeners.into_iter().for_each(|one| self.serve(mesh, one)),
                Err(error) => tracing::warn!(%error, "can't listen on this host's new address"),
            }
        }
        Some(mesh.own_addresses())
    }

    /// Another node has moved.
    pub(super) fn moved(&self, moved: &pb::Moved) -> Result<(), WireError> {
        let addresses = moved.data_address.parse();
        let addresses = addresses.map_err(|_| invalid("data_address", &*moved.data_address))?;
        if let Some(running) = self.node.running.get() {
            running.mesh.moved(NodeId(moved.node), addresses);
        }
        Ok(())
    }

    fn serve(&self, mesh: &Arc<Mesh>, listener: TcpListener) {
        self.node.spawn("the listener of the data plane", mesh.clone().serve(listener));
    }

    /// The daemon knows the job now: ranks may have ended before.
    pub(super) fn handle_ends(&self) {
        self.node.handle_ends();
    }

    pub(super) fn trace(&self, is_wanted: bool) {
        trace::follow(&self.node, is_wanted);
    }

    /// Whether the job is traced.
    pub(super) fn is_traced(&self) -> bool {
        self.node.recorder.is_on()
    }

    pub(super) fn execute(&self, instruction: Instruction) -> Result<(), Failure> {
        let Some(Running { queue, operations, paths, .. }) = self.node.running.get() else {
            return Err(protocol("the coordinator ordered operations before it formed the world"));
        };
        match instruction {
            Instruction::CreateSet { set, members, tensor } => {
                let ranks = members.ranks.iter().map(|rank| u64::from(rank.0)).collect();
                recording::add_set(&self.node, set.0, &members);
                let made = queue.create_set(set, members);
                metrics::process_sets(queue.process_sets());
                let done = self.done(queue, &tensor, Collective::AddProcessSet, ranks, set);
                if !made {
                    return Err(protocol(format!("process set {set} was created twice")));
                }
                done?;
            }
            Instruction::Arrange(topology) => operations.arrange(topology),
            Instruction::Probe(probes) => {
                self.node.retransmits.store(paths.retransmits(), Ordering::Relaxed);
                operations.probe(&probes);
            }
            Instruction::Links(links) => operations.set_links(links),
            Instruction::Start(operation) => {
                self.request_allocations(operations.start(operation)?);
            }
            Instruction::Fail { tensor, failure } => {
                metrics::failure(failure.kind);
                self.node.fail(&tensor, queue.remove(&tensor), &failure);
                if tensor == join_of(tensor.set) {
                    self.node.fail_tickets(&queue.unjoin(tensor.set), &failure);
                }
            }
            Instruction::Resume { set, last } => {
                let joined = queue.resume(set).ok_or_else(|| {
                    let what = format!("all ranks of process set {set} have joined");
                    protocol(format!(
                        "the coordinator said that {what}, but some local ranks have not"
                    ))
                })?;
                self.node.complete_tickets(&joined, last.0.into());
            }
            Instruction::RemoveSet { set, tensor } => {
                let doomed = queue.remove_set(set).unwrap_or_default();
                metrics::process_sets(queue.process_sets());
                for (key, removed) in doomed {
                    let missing: Vec<String> =
                        removed.missing.iter().map(Rank::to_string).collect();
                    let before = match missing.join(", ") {
                        none if none.is_empty() => "this could be done".to_owned(),
                        ranks => format!("rank {ranks} had submitted it"),
                    };
                    let what = format!("process set {set} was removed before {before}");
                    let failure = Failure::new(FailureKind::Cancelled, what)
                        .host(self.node.config.host.clone())
                        .tensor(key.name.as_str())
                        .hint(
                            "make the same calls on all of its ranks, and wait for them before you \
                             remove a process set",
                        );
                    self.node.fail(&key, removed, &failure);
                }
                let number = vec![u64::from(set.0)];
                let none = ProcessSetId::GLOBAL;
                self.done(queue, &tensor, Collective::RemoveProcessSet, number, none)?;
            }
        }
        Ok(())
    }

    fn request_allocations(&self, wanted: Vec<AllocationRequest>) {
        for AllocationRequest { answer, outputs, name } in wanted {
            let Some(worker) = self.node.workers.get(answer.local_rank) else {
                self.node.left_before_allocating(answer.local_rank, &name);
                continue;
            };
            metrics::allocation_request();
            self.node.ensure_sent(&worker, worker.allocate(answer.ticket, &outputs));
        }
    }

    /// A process set was added or removed: completes the request, if the local ranks made it.
    fn done(
        &self,
        queue: &TensorQueue,
        tensor: &TensorKey,
        collective: Collective,
        list: Vec<u64>,
        made: ProcessSetId,
    ) -> Result<(), Failure> {
        if self.node.config.slots == 0 {
            // A server has no ranks that could have made the request.
            return Ok(());
        }
        let asked = queue.announced(tensor).is_some_and(|asked| {
            // A removal also has a flag that says whether waiting tensors are removed, too.
            let is_it = |request: &Request| {
                let removal = collective == Collective::RemoveProcessSet;
                let named = if removal { request.list.get(..1) } else { Some(&request.list[..]) };
                request.collective == collective && named == Some(&list)
            };
            asked.locals().iter().all(|local| is_it(&local.request))
        });
        if !asked {
            let what = format!("the coordinator did not do what '{}' requested here", tensor.name);
            return Err(protocol(what));
        }
        self.node.complete(tensor, queue.remove(tensor), made.0.into());
        Ok(())
    }
}

fn protocol(what: impl Into<String>) -> Failure {
    Failure::new(FailureKind::Protocol, what)
}
