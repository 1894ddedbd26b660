//! The state that all threads of the daemon share, and the handling of the lanes' events
//! ([`LaneEvents`]).

use std::{
    collections::BTreeMap,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use gradwire_coordinator::SessionAcceptor;
use gradwire_proto::{Failure, FailureKind, NodeId, Rank, Sequence, TensorName, pb};
use gradwire_shm::{control::Completion, flight::FlightMemory};
use gradwire_telemetry::Collect;
use gradwire_trace::{Event, Kind, Recorder, Tracer, Track, flight::Flight, time};
use parking_lot::Mutex;
use tokio::{sync::mpsc::UnboundedSender, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use super::{liveness::Liveness, mesh::Mesh, sending::Sending};
use crate::{
    config::DaemonConfig,
    data::{
        lane::Lane,
        order::{Disconnected, LaneEvents},
        piece::Piece,
    },
    metrics::{self, PeerTraffic, Times},
    model::{
        blocked::Reached,
        job::{Job, Outgoing, ReportPanic},
        operation::AT_ONCE,
        tensor::{LocalTensor, TensorKey, Ticket},
        world::World,
    },
    ops::{OperationManager, OverdueAllocation},
    queue::{Removed, Stalled, TensorQueue},
    transport::paths::Paths,
    workers::{
        last_lines::LastLines, observations::Observations, outbox::OutboxError,
        process_ends::ProcessEnds, slots::Workers, worker::Worker,
    },
};

const NAMES: usize = 3;

/// How often to check whether the data threads have stopped.
const STOPPING: Duration = Duration::from_millis(1);

/// The state that exists once the world has formed.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) world: Arc<World>,
    pub(crate) queue: Arc<TensorQueue>,
    pub(crate) operations: OperationManager,
    pub(crate) lanes: Arc<[Lane]>,
    pub(crate) mesh: Arc<Mesh>,
    pub(crate) paths: Arc<Paths>,
    /// The traffic with each node, by its number.
    pub(crate) traffic: Vec<PeerTraffic>,
}

/// A checked request that is submitted again.
pub(crate) type Resubmitted = (TensorKey, LocalTensor);

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) config: DaemonConfig,
    pub(crate) job: Job,
    pub(crate) workers: Workers,
    /// Requests that had to wait until their name was free. The intake submits them: announcements
    /// and joins must reach the coordinator in the order of the queue.
    resubmit: UnboundedSender<Resubmitted>,
    pub(crate) process_ends: ProcessEnds,
    pub(crate) last_lines: LastLines,
    /// The change of the membership that the launcher wants, for workers that attach later.
    pub(crate) wanted: Mutex<Option<pb::MembershipChanged>>,
    /// Records events while the job is traced.
    pub(crate) tracer: Arc<Tracer>,
    /// The recorder for all threads except lanes.
    pub(crate) recorder: Recorder,
    /// The last operations of the ranks and the last events, also while the job is not traced.
    pub(crate) recording: Arc<FlightMemory>,
    pub(crate) sending: Arc<Sending>,
    pub(crate) observations: Observations,
    pub(crate) liveness: Arc<Liveness>,
    /// The retransmitted packets at the time when the last probes were ordered.
    pub(crate) retransmits: AtomicU64,
    /// The number of the last answer of the coordinator that was carried out.
    pub(crate) last_answer: AtomicU64,
    /// Set once the world has formed.
    pub(crate) running: OnceLock<Running>,
    /// The coordinator, if it is in this process.
    pub(crate) acceptor: Option<SessionAcceptor>,
    /// Cancelled once the process of the coordinator is known to have ended.
    pub(crate) coordinator_ended: CancellationToken,
}

impl Node {
    pub(crate) fn new(
        config: DaemonConfig,
        recording: Arc<FlightMemory>,
        job: Job,
        resubmit: UnboundedSender<Resubmitted>,
        acceptor: Option<SessionAcceptor>,
    ) -> Arc<Self> {
        let workers = Workers::new(config.slots);
        let tracer = Arc::<Tracer>::default();
        Arc::new(Self {
            config,
            job,
            workers,
            resubmit,
            process_ends: ProcessEnds::default(),
            last_lines: LastLines::default(),
            wanted: Mutex::default(),
            recorder: tracer.recorder(Track::Control),
            tracer,
            recording,
            sending: Arc::default(),
            observations: Observations::default(),
            liveness: Arc::new(Liveness::new()),
            retransmits: AtomicU64::new(0),
            last_answer: AtomicU64::new(0),
            running: OnceLock::new(),
            acceptor,
            coordinator_ended: CancellationToken::new(),
        })
    }

    /// The flight recording of this node.
    pub(crate) fn flight(&self) -> Flight<'_> {
        self.recording.flight()
    }

    /// Runs a task on the current runtime. A panic in it ends the job.
    pub(crate) fn spawn(
        &self,
        who: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> JoinHandle<()> {
        let report = self.report_panic(who);
        tokio::spawn(async move {
            let _report = report;
            task.await;
        })
    }

    /// The tensor queue, once the world has formed.
    pub(crate) fn queue(&self) -> Option<&TensorQueue> {
        self.running.get().map(|running| &*running.queue)
    }

    pub(super) fn rank(&self, local_rank: u32) -> Rank {
        let first = self.running.get().map_or(0, |running| running.world.me().first_rank.0);
        Rank(first + local_rank)
    }

    /// A guard for a thread or task that others wait for; it reports a panic.
    pub(crate) fn report_panic(&self, who: &'static str) -> ReportPanic {
        ReportPanic { job: self.job.clone(), who, host: self.config.host.clone() }
    }

    pub(crate) fn count_workers(&self) {
        let workers = self.workers.all();
        metrics::workers(workers.len(), workers.iter().map(|w| w.memory.bytes()).sum());
    }

    /// A worker has died or sent invalid data: the job can't continue without it.
    pub(crate) fn worker_failed(&self, worker: &Worker, failure: Failure) {
        self.worker_failed_at(worker, failure, Instant::now());
    }

    /// As [`Node::worker_failed`], for a failure that was `noticed` earlier.
    pub(crate) fn worker_failed_at(&self, worker: &Worker, failure: Failure, noticed: Instant) {
        if self.job.ending().is_some() {
            // The worker ends because the job is over.
            return;
        }
        let names = self.queue().map(|q| q.names_of(worker.local_rank, NAMES)).unwrap_or_default();
        metrics::failure(failure.kind);
        let failure = failure.host(self.config.host.clone()).tensor(names.join(", "));
        self.job.report_noticed(failure, noticed);
    }

    /// A worker ends because of a failure that it has received. That failure is the cause for
    /// everybody (TELL), and not this worker, which only noticed it first.
    pub(crate) fn worker_follows(&self, cause: Failure) {
        if self.job.ending().is_none() {
            metrics::failure(cause.kind);
            self.job.report(cause);
        }
    }

    /// If a message can't reach a worker, neither the worker nor the ranks that wait for it can
    /// continue (TELL).
    pub(crate) fn ensure_sent(&self, worker: &Worker, sent: Result<(), OutboxError>) {
        if let Err(error) = sent {
            self.worker_failed(worker, worker.silent(&error.to_string()));
        }
    }

    /// The operation manager, once the world has formed.
    pub(crate) fn operations(&self) -> Option<&OperationManager> {
        self.running.get().map(|running| &running.operations)
    }

    /// Reports ranks that do not allocate memory for their results in time (WAIT). They have the
    /// time limit of data transfers, plus the time to fill their memory.
    pub(crate) fn report_overdue_allocations(&self, now: Instant) {
        let limit = self.config.progress_timeout;
        let overdue_allocations =
            self.operations().map(|operations| operations.pending.overdue(now, limit));
        for OverdueAllocation { answer, name, waited } in overdue_allocations.unwrap_or_default() {
            let Some(worker) = self.workers.get(answer.local_rank) else {
                self.left_before_allocating(answer.local_rank, &name);
                continue;
            };
            let why = format!(
                "it was asked to allocate the result of tensor '{name}' and has not answered for \
                 {:.1} s",
                waited.as_secs_f64()
            );
            self.worker_failed(&worker, worker.silent(&why));
        }
    }

    /// A rank has left or died before it allocated memory for its result. So the tensor will never
    /// be done, although others wait for it (TELL). The death of a rank has already been reported.
    pub(crate) fn left_before_allocating(&self, local_rank: u32, name: &TensorName) {
        let what = "it has left the job before it received the result of an operation in which \
                    others take part";
        let failure = Failure::new(FailureKind::RankLeft, what)
            .rank(self.rank(local_rank))
            .host(self.config.host.clone())
            .tensor(name.as_str())
            .hint("wait for every handle before leaving");
        self.job.report(failure);
    }

    /// Why a rank may not leave the job now: others need it.
    pub(crate) fn needed_for(&self, local_rank: u32) -> Option<String> {
        if let Some(set) = self.queue()?.joined_by(local_rank) {
            return Some(format!("in the join of process set {set}: wait for the join first"));
        }
        let name = self.operations()?.pending.tensor_of(local_rank)?;
        Some(format!("waiting for its result of tensor '{name}': wait for every handle first"))
    }

    /// Tells the coordinator if a tensor has waited too long for ranks of this node (WAIT): the
    /// coordinator does not know such tensors, and asks all nodes about them.
    pub(crate) fn report_stalls(&self, now: Instant) {
        let limit = self.config.stall_warning;
        metrics::stalled(self.queue().map_or(0, |queue| queue.overdue(now, limit)));
        if self.queue().is_some_and(|queue| queue.must_report(now, limit)) {
            self.job.send(Outgoing::Overdue);
        }
    }

    /// Ends the job if a tensor has waited much too long for ranks of this node (WAIT). The time in
    /// which a rank was paused does not count.
    pub(crate) fn end_stall(&self, now: Instant) {
        let limit = self.config.stall_shutdown;
        if self.workers.all().iter().any(|worker| worker.pause.is_on()) {
            self.liveness.pause(now);
        }
        if self.liveness.unpaused(now).is_some_and(|unpaused| unpaused < limit) {
            return;
        }
        let longest = self.queue().filter(|_| !limit.is_zero()).and_then(|q| q.longest_wait(now));
        let Some(Stalled { missing, waited, name }) = longest.filter(|it| it.waited >= limit)
        else {
            return;
        };
        let missing: Vec<String> = missing.iter().map(ToString::to_string).collect();
        let what = format!(
            "it has waited {:.1} s for rank {}, longer than negotiation.stall_shutdown_ms allows",
            waited.as_secs_f64(),
            missing.join(", ")
        );
        let failure = Failure::new(FailureKind::Timeout, what)
            .host(self.config.host.clone())
            .tensor(name)
            .hint("see what those ranks do; make the same calls on all ranks");
        self.job.report(failure);
    }

    /// A local rank no longer takes part, so nobody waits for it; `absent` if it never took part.
    pub(crate) fn leaves(&self, rank: Rank, absent: bool) {
        self.job.send(Outgoing::Left { ranks: vec![rank], absent });
        let Some(running) = self.running.get() else { return };
        let local_rank = rank.0 - running.world.me().first_rank.0;
        let gone = running.queue.leave(local_rank);
        // In one message, because there may be many. Each worker knows the names of its tensors.
        let tickets: Vec<Ticket> =
            gone.iter().flat_map(|(_, r)| r.tickets.iter().chain(&r.duplicates)).copied().collect();
        self.fail_tickets(&tickets, &self.rank_left(rank));
        for (key, removed) in gone {
            self.submit_again(&key, removed.later);
        }
    }

    /// The failure of tensors that need a rank of this node that has left.
    pub(crate) fn rank_left(&self, gone: Rank) -> Failure {
        let failure = if self.workers.never_came(gone.0.saturating_sub(self.rank(0).0)) {
            Failure::never_came(gone)
        } else {
            Failure::left(gone)
        };
        failure.host(self.config.host.clone())
    }

    /// Stops the data threads; then they access no memory any more. Polls, because the system might
    /// refuse a thread that waits for them.
    pub(crate) async fn stop_lanes(&self) {
        let lanes = self.running.get().map_or(&[][..], |running| &running.lanes[..]);
        while lanes.iter().filter(|lane| !lane.try_stop()).count() > 0 {
            tokio::time::sleep(STOPPING).await;
        }
        if let Some(operations) = self.operations() {
            operations.pending.clear();
        }
        if let Some(queue) = self.queue() {
            queue.clear();
        }
    }

    /// Notifies every worker that the job is over (TELL).
    pub(crate) fn abort_workers(&self, failure: &Failure) {
        metrics::failure(failure.kind);
        for worker in self.workers.all() {
            worker.abort(failure);
        }
    }

    /// Notifies ranks that their submissions have failed (TELL).
    pub(crate) fn fail_tickets(&self, tickets: &[Ticket], failure: &Failure) {
        let mut by_worker: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
        for ticket in tickets {
            by_worker.entry(ticket.local_rank).or_default().push(ticket.ticket);
        }
        for (local_rank, tickets) in by_worker {
            if let Some(worker) = self.workers.get(local_rank) {
                self.ensure_sent(&worker, worker.fail(tickets, failure));
            }
        }
    }

    /// Notifies the ranks of a removed tensor that it has failed (TELL).
    pub(crate) fn fail(&self, key: &TensorKey, removed: Removed, failure: &Failure) {
        self.fail_tickets(&removed.tickets, failure);
        self.fail_tickets(&removed.duplicates, failure);
        self.submit_again(key, removed.later);
    }

    /// Submits requests that had to wait until their name was free.
    fn submit_again(&self, key: &TensorKey, later: Vec<LocalTensor>) {
        for local in later {
            let _ = self.resubmit.send((key.clone(), local));
        }
    }

    /// Notifies ranks that their submissions have succeeded. `aux` is that of a [`Completion`].
    pub(crate) fn complete_tickets(&self, tickets: &[Ticket], aux: u64) {
        for ticket in tickets {
            let Some(worker) = self.workers.get(ticket.local_rank) else { continue };
            if self.recorder.is_on() {
                let event = Event::new(Kind::Complete, time::now_ns(), ticket.ticket);
                self.recorder.record(Event { other: worker.rank.0, ..event });
            }
            let completion = Completion { ticket: ticket.ticket, aux };
            if let Err(why) = worker.complete(completion) {
                self.worker_failed(&worker, worker.sent_nonsense(&why));
            }
        }
    }

    /// Notes when these submissions reached their phases, before their ranks can go on.
    fn note(&self, tickets: &[Ticket], reached: &Reached) {
        for ticket in tickets {
            if let Some(worker) = self.workers.get(ticket.local_rank) {
                worker.activity.ended(reached);
            }
        }
    }

    /// Notifies the ranks of a removed tensor that it has succeeded.
    pub(crate) fn complete(&self, key: &TensorKey, removed: Removed, aux: u64) {
        self.complete_tickets(&removed.tickets, aux);
        for ticket in &removed.duplicates {
            let what = "it was submitted a second time while the first submission was in flight; \
                        the first one succeeded, this is the second";
            let failure = Failure::new(FailureKind::Disagreement, what)
                .rank(self.rank(ticket.local_rank))
                .host(self.config.host.clone())
                .tensor(key.name.as_str())
                .hint("wait for a tensor before submitting its name again, or use another name");
            self.fail_tickets(&[*ticket], &failure);
        }
        self.submit_again(key, removed.later);
    }
}

impl Collect for Node {
    fn collect(&self) {
        for worker in self.workers.all() {
            worker.activity.look();
        }
    }
}

/// A weak reference, because the node stops the lanes and they must not keep it alive.
impl LaneEvents for Weak<Node> {
    fn ordered(&self, piece: &Piece) {
        let Some(node) = self.upgrade() else { return };
        let (flight, at_ns) = (node.flight(), node.tracer.ns(piece.ordered));
        let sequence = (piece.sequence != AT_ONCE).then_some(piece.sequence.0);
        for local in piece.tensors.iter().flat_map(|(tensor, _)| tensor.locals()) {
            flight.ordered(local.local_rank, local.ticket, at_ns, sequence);
        }
    }

    fn begun(&self, piece: &Piece) {
        let Some(node) = self.upgrade() else { return };
        let (flight, at_ns) = (node.flight(), time::now_ns());
        for local in piece.tensors.iter().flat_map(|(tensor, _)| tensor.locals()) {
            flight.begun(local.local_rank, local.ticket, at_ns);
        }
    }

    fn finished(&self, piece: &Piece, complete: Option<Instant>) {
        let Some(node) = self.upgrade() else { return };
        let Some(running) = node.running.get() else { return };
        // The tensors leave the queue before any rank is notified: a rank may submit the name again
        // at once.
        let ended = piece.tensors.iter().filter(|(tensor, elements)| tensor.published(*elements));
        let ended: Vec<_> =
            ended.map(|(tensor, _)| (tensor, running.queue.remove(&tensor.key))).collect();
        // The coordinator is notified before a rank can react to its own notification.
        if piece.sequence != AT_ONCE {
            node.job.send(Outgoing::Done(piece.sequence));
        }
        for (tensor, removed) in ended {
            let (announced, ordered) = (tensor.announced, piece.ordered);
            let reached = Reached { announced, ordered, complete, published: Instant::now() };
            node.note(&removed.tickets, &reached);
            node.complete(&tensor.key, removed, 0);
        }
        let times = Times { ordered: piece.ordered, complete, published: Instant::now() };
        metrics::operation(piece.tensors.len(), piece.bytes, times);
        if node.recorder.is_on() {
            let Times { ordered, published, .. } = times;
            let sequence = piece.sequence.0;
            let event = node.recorder.between(Kind::Piece, ordered, published, sequence);
            node.recorder.record(Event { bytes: piece.bytes, ..event });
        }
        if let Some(moved) = piece.moved {
            moved.increment(piece.bytes);
        }
    }

    fn measured(&self, sequence: Sequence, time: Duration) {
        let Some(node) = self.upgrade() else { return };
        let retransmits = node.retransmits.load(Ordering::Relaxed);
        node.job.send(Outgoing::Probed { sequence, time, retransmits });
    }

    fn failed(&self, failure: Failure) {
        let Some(node) = self.upgrade() else { return };
        metrics::failure(failure.kind);
        node.job.report(failure);
    }

    fn moved(&self, peer: NodeId, sent: u64, received: u64) {
        let Some(node) = self.upgrade() else { return };
        let Some(running) = node.running.get() else { return };
        running.traffic[peer.0 as usize].moved(sent, received);
    }

    fn disconnected(&self, connection: Disconnected) {
        let Some(node) = self.upgrade().filter(|node| node.job.ending().is_none()) else { return };
        if let Some(running) = node.running.get() {
            running.mesh.disconnected(connection);
        }
    }
}
