//! What all threads of the daemon share, and the two seams where its parts meet: what the
//! coordinator orders ([`Conduct`]) and what the lanes find out ([`LaneEvents`]).

use std::{
    sync::{Arc, OnceLock, Weak},
    time::{Duration, Instant},
};

use gradwire_proto::{Failure, FailureKind, JobId, NodeId, Rank, Secret, TensorName};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::{
    RankEnd,
    config::DaemonConfig,
    executor::{
        lane::{Lane, LaneConfig, LaneEvents},
        piece::Piece,
    },
    intake::{Worker, WorkerEnd, Workers, submissions::Intake},
    job::Job,
    metrics,
    negotiate::{Instruction, Outgoing, World, client::Conduct},
    ops::OperationManager,
    queue::{Removed, Stalled, TensorKey, TensorQueue, Ticket},
    transport::{
        handshake::Identity,
        mesh::{Mesh, MeshConfig},
    },
};

/// Names in a failure's text.
const NAMES: usize = 3;

/// Which job this is, and its secret.
#[derive(Debug, Clone)]
pub(crate) struct JobIdentity {
    pub(crate) job: JobId,
    pub(crate) secret: Secret,
}

/// What exists only once the world has formed.
#[derive(Debug)]
struct Running {
    world: Arc<World>,
    queue: Arc<TensorQueue>,
    operations: OperationManager,
    lanes: Arc<[Lane]>,
}

/// The daemon's shared state.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) config: DaemonConfig,
    pub(crate) job: Job,
    pub(crate) workers: Workers,
    pub(crate) intake: Intake,
    running: OnceLock<Running>,
}

impl Node {
    pub(crate) fn new(config: DaemonConfig, job: Job) -> std::io::Result<Arc<Self>> {
        let workers = Workers::new(config.slots);
        let intake = Intake::new()?;
        Ok(Arc::new(Self { config, job, workers, intake, running: OnceLock::new() }))
    }

    /// The tensor queue, once the world has formed.
    pub(crate) fn queue(&self) -> Option<&TensorQueue> {
        self.running.get().map(|running| &*running.queue)
    }

    /// Brings the gauges up to date.
    pub(crate) fn count_workers(&self) {
        let workers = self.workers.all();
        metrics::workers(workers.len(), workers.iter().map(|w| w.memory.bytes()).sum());
    }

    /// A worker has died or sent nonsense: the job can't go on without it.
    pub(crate) fn worker_failed(&self, worker: &Worker, end: &WorkerEnd) {
        if self.job.ending().is_some() {
            // It goes because the job is over.
            return;
        }
        let kind = end.kind();
        let (what, hint) = end.text(worker.pid);
        let names = self.queue().map(|q| q.names_of(worker.local_rank, NAMES)).unwrap_or_default();
        let failure = Failure::new(kind, what)
            .rank(worker.rank)
            .host(self.config.host.clone())
            .tensor(names.join(", "))
            .hint(hint);
        metrics::failure(kind);
        self.job.report(failure);
    }

    /// The launcher says that a rank's process has ended. One that never attached can't take part
    /// any more, and nobody is to wait for it; if it failed, that is why the job does (TELL).
    pub(crate) fn ended(&self, end: RankEnd) {
        let Some(running) = self.running.get() else { return };
        let RankEnd { rank, failed } = end;
        let first = running.world.me().first_rank;
        let local = rank.0.checked_sub(first.0).filter(|local| self.workers.ended(*local));
        match (local, failed) {
            (None, _) => {}
            (Some(_), _) if self.job.ending().is_some() => {}
            (Some(_), None) => {
                tracing::info!(%rank, "a rank ended without ever attaching");
                self.left(rank);
            }
            (Some(_), Some(how)) => {
                let what = format!("its process {how} before it had joined the job");
                let failure = Failure::new(FailureKind::WorkerLost, what)
                    .rank(rank)
                    .host(self.config.host.clone())
                    .hint("see its output");
                metrics::failure(failure.kind);
                self.job.report(failure);
            }
        }
    }

    /// Tells of tensors that wait long for ranks of this node (WAIT).
    pub(crate) fn tell_stalls(&self, now: Instant) {
        let stalled = self.queue().map(|queue| queue.stalled(now, self.config.stall_warning));
        for Stalled { missing, waited, names } in stalled.unwrap_or_default() {
            let missing: Vec<String> = missing.iter().map(ToString::to_string).collect();
            let more = names.len().saturating_sub(NAMES);
            let names: Vec<String> = names.iter().take(NAMES).map(|n| format!("'{n}'")).collect();
            let (seconds, host) = (waited.as_secs_f64(), &self.config.host);
            let (names, missing) = (names.join(", "), missing.join(", "));
            let and_more = if more > 0 { format!(" and {more} more") } else { String::new() };
            tracing::warn!(
                "tensor {names}{and_more} waited {seconds:.1} s for rank {missing} on host {host}"
            );
        }
    }

    /// A local rank has left in good order: nobody waits for it any more.
    pub(crate) fn left(&self, rank: Rank) {
        self.job.tell(Outgoing::Left(vec![rank]));
        let Some(running) = self.running.get() else { return };
        let local_rank = rank.0 - running.world.me().first_rank.0;
        for (key, removed) in running.queue.leave(local_rank) {
            let failure = self.rank_left(rank, &key.name);
            self.fail_tickets(&removed.tickets, &failure);
            self.fail_tickets(&removed.duplicates, &failure);
        }
    }

    /// What is told of a tensor that needs a rank of this node that has left.
    pub(crate) fn rank_left(&self, gone: Rank, name: &TensorName) -> Failure {
        Failure::new(FailureKind::RankLeft, "it has left the job and can't take part any more")
            .rank(gone)
            .host(self.config.host.clone())
            .tensor(name.as_str())
            .hint("all ranks must submit the same tensors before any of them leaves")
    }

    /// The data threads touch nothing any more when this returns.
    pub(crate) fn stop_lanes(&self) {
        for lane in self.running.get().iter().flat_map(|running| running.lanes.iter()) {
            lane.stop();
        }
        if let Some(queue) = self.queue() {
            queue.clear();
        }
    }

    /// Tells every worker that the job is over (TELL).
    pub(crate) fn abort_workers(&self, failure: &Failure) {
        metrics::failure(failure.kind);
        for worker in self.workers.all() {
            worker.abort(failure);
        }
    }

    fn by_worker(tickets: &[Ticket]) -> Vec<(u32, Vec<u64>)> {
        let mut sorted: Vec<(u32, Vec<u64>)> = Vec::new();
        for ticket in tickets {
            match sorted.iter_mut().find(|(local, _)| *local == ticket.local_rank) {
                Some((_, list)) => list.push(ticket.ticket),
                None => sorted.push((ticket.local_rank, vec![ticket.ticket])),
            }
        }
        sorted
    }

    fn fail_tickets(&self, tickets: &[Ticket], failure: &Failure) {
        for (local_rank, tickets) in Self::by_worker(tickets) {
            if let Some(worker) = self.workers.get(local_rank) {
                worker.fail(tickets, failure);
            }
        }
    }

    /// Tells the ranks of a tensor that it is done.
    fn complete(&self, key: &TensorKey, removed: &Removed) {
        for ticket in &removed.tickets {
            let Some(worker) = self.workers.get(ticket.local_rank) else { continue };
            if let Err(error) = worker.complete(ticket.ticket) {
                self.worker_failed(&worker, &WorkerEnd::Nonsense(error.to_string()));
            }
        }
        if removed.duplicates.is_empty() {
            return;
        }
        let first = self.running.get().map_or(Rank(0), |r| r.world.me().first_rank);
        for ticket in &removed.duplicates {
            let rank = Rank(first.0 + ticket.local_rank);
            let what = "it was submitted a second time while the first submission was in flight; \
                        the first one succeeded, this is the second";
            let failure = Failure::new(FailureKind::Disagreement, what)
                .rank(rank)
                .host(self.config.host.clone())
                .tensor(key.name.as_str())
                .hint("wait for a tensor before submitting its name again, or use another name");
            self.fail_tickets(&[*ticket], &failure);
        }
    }
}

impl LaneEvents for Node {
    fn finished(&self, piece: &Piece) {
        let Some(running) = self.running.get() else { return };
        for segment in &piece.segments {
            if segment.tensor.published(segment.bytes) {
                // Out of the queue before anybody is told: a rank may submit the name again the
                // moment it knows.
                let removed = running.queue.remove(&segment.tensor.key);
                self.complete(&segment.tensor.key, &removed);
            }
        }
        self.job.tell(Outgoing::Done(piece.sequence));
        metrics::operation(piece.bytes, piece.ordered.elapsed());
        metrics::queued(running.queue.len());
    }

    fn failed(&self, failure: Failure) {
        metrics::failure(failure.kind);
        self.job.report(failure);
    }

    fn moved(&self, peer: NodeId, sent: u64, received: u64) {
        let Some(running) = self.running.get() else { return };
        let host = &running.world.nodes[peer.0 as usize].host;
        metrics::moved(host, sent, received);
    }
}

/// Carries out what the coordinator says.
#[derive(Debug)]
pub(crate) struct Conductor {
    pub(crate) node: Arc<Node>,
    /// The data plane's listener, until the world has formed.
    pub(crate) listener: Option<TcpListener>,
    pub(crate) cancel: CancellationToken,
}

impl Conduct for Conductor {
    fn formed(&mut self, world: Arc<World>) -> Result<(), Failure> {
        let node = &self.node;
        let Some(listener) = self.listener.take() else {
            return Err(Failure::new(
                FailureKind::Protocol,
                "the coordinator formed the world twice",
            ));
        };
        let config = &node.config;
        if world.me().slots != config.slots {
            let what = format!(
                "the coordinator gave this node {} slots, it has {}",
                world.me().slots,
                config.slots
            );
            return Err(Failure::new(FailureKind::Protocol, what));
        }
        let resource = |error: std::io::Error| {
            let what = format!("the data plane can't be started: {error}");
            Failure::new(FailureKind::Resource, what)
                .host(config.host.clone())
                .hint("raise gradwired's limits of open files and processes (ulimit -n -u)")
        };
        let hosts: Arc<[String]> = world.nodes.iter().map(|n| n.host.clone()).collect();
        let lanes = (0..world.lanes)
            .map(|index| {
                let lane = LaneConfig {
                    index,
                    hosts: hosts.clone(),
                    epoch: world.epoch.0 as u32,
                    chunk: config.chunk_bytes,
                    patience: config.progress_timeout,
                    streaming_bytes: config.streaming_bytes,
                };
                // A lane must not keep alive what stops it.
                let events: Weak<Node> = Arc::downgrade(node);
                Lane::start(lane, Arc::new(events))
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
        let mesh_config = MeshConfig {
            connect_timeout: config.connect_timeout,
            user_timeout: config.progress_timeout,
            socket_buffer: config.socket_buffer_bytes,
            congestion_control: config.congestion_control.clone(),
        };
        let mesh = Mesh::new(
            mesh_config,
            identity,
            world.clone(),
            lanes.clone(),
            node.job.clone(),
            self.cancel.clone(),
        );
        tokio::spawn(mesh.clone().serve(listener));
        let queue = Arc::new(TensorQueue::new(world.me().first_rank, config.slots));
        let operations = OperationManager::new(world.clone(), queue.clone(), lanes.clone(), mesh);
        let _ = node.running.set(Running { world, queue, operations, lanes });
        node.intake.start(Arc::downgrade(node)).map_err(resource)
    }

    fn carry_out(&mut self, instruction: Instruction) -> Result<(), Failure> {
        let Some(running) = self.node.running.get() else {
            let what = "the coordinator ordered operations before it formed the world";
            return Err(Failure::new(FailureKind::Protocol, what));
        };
        match instruction {
            Instruction::Start(operation) => running.operations.start(operation),
            Instruction::Fail { tensor, failure } => {
                metrics::failure(failure.kind);
                let removed = running.queue.remove(&tensor);
                self.node.fail_tickets(&removed.tickets, &failure);
                self.node.fail_tickets(&removed.duplicates, &failure);
                Ok(())
            }
        }
    }
}

impl LaneEvents for Weak<Node> {
    fn finished(&self, piece: &Piece) {
        if let Some(node) = self.upgrade() {
            node.finished(piece);
        }
    }

    fn failed(&self, failure: Failure) {
        if let Some(node) = self.upgrade() {
            node.failed(failure);
        }
    }

    fn moved(&self, peer: NodeId, sent: u64, received: u64) {
        if let Some(node) = self.upgrade() {
            node.moved(peer, sent, received);
        }
    }
}

/// Sends heartbeats and listens for the coordinator's, on a thread of its own (`gw-heartbeat`):
/// no load on the control runtime may look like death, and a stopped coordinator closes nothing.
pub(crate) fn start_heartbeat(
    node: &Arc<Node>,
    pulse: Arc<crate::negotiate::client::Pulse>,
) -> std::io::Result<()> {
    let node = Arc::downgrade(node);
    let beat = move || {
        loop {
            let Some(node) = node.upgrade() else { return };
            let world = node.job.world();
            if let Some(world) = &world {
                node.job.tell(Outgoing::Heartbeat);
                let silence = pulse.silence();
                if silence > world.heartbeat_timeout {
                    let what = format!(
                        "the coordinator at {} has been silent for {:.1} s",
                        node.config.coordinator,
                        silence.as_secs_f64()
                    );
                    let failure = Failure::new(FailureKind::CoordinatorLost, what)
                        .hint("it is stopped, or the network to the first host is down");
                    node.job.end(crate::job::Ending::Failed(failure));
                }
            }
            drop(node);
            let interval = world.map_or(Duration::from_millis(100), |w| w.heartbeat_interval);
            std::thread::sleep(interval);
        }
    };
    std::thread::Builder::new().name("gw-heartbeat".into()).spawn(beat)?;
    Ok(())
}
