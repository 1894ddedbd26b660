//! The session of one worker over the Unix socket, from its first message to its end. Messages are
//! rare, so each session has a thread (`gw-worker`).
//!
//! A worker whose connection ends without a `Detach` has died, and the job ends with it (TELL). The
//! kernel closes the socket within a millisecond of a SIGKILL.
//!
//! In an elastic job only the workers of the daemon's epoch can attach. Others are asked to come
//! again later, as are all workers if the epoch ends by a loss before they have attached.

use std::{
    collections::BTreeMap,
    io,
    net::Shutdown,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use gradwire_proto::{
    Ending, Failure, FailureKind, Rank,
    pb::{self, daemon_message::Message as Reply, worker_message::Message as Request},
};
use gradwire_shm::{
    control::{ControlError, DaemonControl},
    handover::{self, Frame},
    segment::Segment,
};
use gradwire_telemetry::Rate;
use parking_lot::Mutex;
use prost::Message;
use rustix::{
    event::{EventfdFlags, eventfd},
    io::Errno,
};
use tokio::{net::UnixListener, runtime::Handle, sync::mpsc::UnboundedSender};
use tokio_util::sync::CancellationToken;

use super::{
    greeting::{AttachError, Greeting, Peer, ReceiveError, no_descriptor, receive, refusal},
    reader::Source,
    submit,
};
use crate::{
    config::DaemonConfig,
    control::{explain, node::Node},
    metrics::{self, Rejection},
    model::{job::Phase, memory::WorkerMemory, world::World},
    workers::{
        activity::RankActivity,
        call_sites::CallSites,
        outbox::Outbox,
        pause::Pause,
        process_state::{descends_from, has_program},
        recorded::Recorded,
        slots::{ClaimError, Slot},
        worker::{Worker, brief, send},
    },
};

/// The limit of a worker's reason for giving up, in characters (BOUND).
const MAX_REASON_CHARS: usize = 4096;

/// How long a message to a worker that is not yet attached may wait for the socket.
const WRITE_TIMEOUT: Duration = Duration::from_millis(500);

/// How long a leaving worker may take to read its last messages.
const DETACH_TIMEOUT: Duration = Duration::from_secs(3);

/// The limit of connections with unknown workers (BOUND).
const MAX_UNIDENTIFIED: usize = 64;

/// The connections with unknown workers, by number. If there are too many, the oldest one is
/// closed, so silent connections keep no worker out.
#[derive(Debug, Default)]
struct Unidentified(Mutex<BTreeMap<u64, UnixStream>>);

impl Unidentified {
    fn admit(&self, number: u64, stream: UnixStream) {
        let mut unidentified = self.0.lock();
        unidentified.insert(number, stream);
        if unidentified.len() > MAX_UNIDENTIFIED
            && let Some((_, silent)) = unidentified.pop_first()
        {
            // Its thread notices the end of the connection.
            let _ = silent.shutdown(Shutdown::Both);
        }
    }

    /// The worker of a connection is now known, or the connection has ended. Returns the
    /// connection; `None` if it has already been closed.
    fn dismiss(&self, number: u64) -> Option<UnixStream> {
        self.0.lock().remove(&number)
    }
}

/// Limits the log lines about connections that failed, by reason.
static REFUSALS: Rate = Rate::new();
static BROKEN: Rate = Rate::new();

pub(crate) async fn serve(
    node: Arc<Node>,
    intake: UnboundedSender<Source>,
    listener: UnixListener,
    cancel: CancellationToken,
) {
    let unidentified = Arc::<Unidentified>::default();
    let accept = async {
        for number in 0.. {
            let accepted = listener.accept().await.and_then(|(stream, _)| prepare(stream));
            let (stream, second) = match accepted {
                Ok(both) => both,
                Err(error) => {
                    let failure = no_descriptor(error);
                    tracing::warn!(%failure, "a worker's connection could not be accepted");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            unidentified.admit(number, second);
            let session = Session {
                node: node.clone(),
                intake: intake.clone(),
                runtime: Handle::current(),
                stream,
            };
            let waiting = unidentified.clone();
            let session = move || session.run(&waiting, number);
            let name = "gw-worker".to_owned();
            if let Err(error) = std::thread::Builder::new().name(name).spawn(session) {
                let failure = no_thread(&error).host(node.config.host.clone());
                if let Some(stream) = unidentified.dismiss(number) {
                    let _ = send(&stream, Reply::Refused(failure.clone().into()));
                }
                // The job can't begin without one of its ranks (TELL).
                match node.job.world() {
                    Some(_) => node.job.report(failure),
                    None => node.job.end(Ending::Failed(failure)),
                }
            }
        }
    };
    cancel.run_until_cancelled(accept).await;
}

/// Returns the connection, and a second descriptor that can close it.
fn prepare(stream: tokio::net::UnixStream) -> io::Result<(UnixStream, UnixStream)> {
    let stream = stream.into_std()?;
    stream.set_nonblocking(false)?;
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    let second = stream.try_clone().inspect_err(|error| {
        let _ = send(&stream, Reply::Refused(no_descriptor(error).into()));
    })?;
    Ok((stream, second))
}

/// The failure of the job if the system refuses the thread for a worker.
fn no_thread(error: &io::Error) -> Failure {
    let what = format!("gradwired can't start a thread for a worker: {error}");
    Failure::new(FailureKind::Resource, what)
        .hint("raise gradwired's limits of memory and processes (ulimit -v -u)")
}

/// The failure of a worker whose control page can't be used.
fn no_control_page(error: ControlError) -> Failure {
    match error {
        ControlError::Segment(error) if error.is_shortage() => {
            let what = format!("gradwired can't use the control page of a worker: {error}");
            Failure::new(FailureKind::Resource, what)
        }
        error => refusal(format!("its control page is not usable: {error}")),
    }
}

struct Session {
    node: Arc<Node>,
    intake: UnboundedSender<Source>,
    runtime: Handle,
    stream: UnixStream,
}

/// The failure of a worker that comes when the job is over.
fn ending() -> Failure {
    Failure::new(FailureKind::NodeLost, "the daemon of this node is ending")
}

impl Session {
    fn run(self, unidentified: &Unidentified, number: u64) {
        let identified = self.identify(unidentified, number);
        unidentified.dismiss(number);
        let introduced = match identified {
            Ok(Peer::Viewer { stacks }) => return self.show(stacks),
            Ok(Peer::Worker(worker)) => self.claim(worker),
            Err(error) => Err(error),
        };
        let claimed = introduced.as_ref().ok().map(|(local_rank, ..)| *local_rank);
        match introduced.and_then(|(local_rank, frame, pid)| self.attach(local_rank, frame, pid)) {
            Ok(worker) => return self.serve_attached(&worker),
            Err(AttachError::Later) => {
                tracing::debug!("a worker does not belong to this epoch");
                let _ = send(&self.stream, Reply::Later(pb::Later {}));
            }
            Err(AttachError::Refused(failure)) => {
                metrics::rejected_connection(Rejection::WorkerRefused);
                if let Some(left_out) = REFUSALS.admits() {
                    // The worker reports this itself.
                    tracing::info!(%failure, left_out, "a worker was refused");
                }
                let _ = send(&self.stream, Reply::Refused(failure.into()));
            }
            Err(AttachError::Broken(why)) => {
                metrics::rejected_connection(Rejection::WorkerBroken);
                if let Some(left_out) = BROKEN.admits() {
                    let what = "a worker's connection ended before it was attached";
                    tracing::warn!(why, left_out, "{what}");
                }
                // TELL: a worker that is still there gets the reason. The text contains no secret.
                let what = format!("the connection to the daemon of this node failed: {why}");
                let _ = send(&self.stream, Reply::Refused(refusal(what).into()));
            }
        }
        // Only now: the daemon must not end before the reason has been sent to the worker.
        if let Some(local_rank) = claimed {
            let over = self.node.job.ending().is_some();
            self.node.workers.set(local_rank, if over { Slot::Left } else { Slot::Free });
            self.node.freed(local_rank);
        }
    }

    /// Checks who is at the other end.
    fn identify(&self, unidentified: &Unidentified, number: u64) -> Result<Peer, AttachError> {
        let peer = Peer::receive(&self.stream, &self.node.config)?;
        if unidentified.dismiss(number).is_none() {
            return Err(AttachError::Broken(
                "it was silent for too long while others connected".into(),
            ));
        }
        Ok(peer)
    }

    /// Tells a viewer what the ranks of this node do.
    fn show(&self, stacks: bool) {
        let explained = explain::to_viewer(&self.node, stacks);
        // The viewer may be gone.
        let _ = send(&self.stream, Reply::Explanation(explained));
    }

    /// Claims the slot of a worker. Returns its local rank, what came with its first message, and
    /// its process.
    fn claim(&self, worker: Greeting) -> Result<(u32, Frame, u32), AttachError> {
        let local_rank = match &self.node.config.elastic {
            Some(elastic) => elastic.local_rank(worker.number).ok_or(AttachError::Later)?,
            None => worker.number,
        };
        let claimed = self.node.workers.claim(local_rank, worker.pid);
        claimed.map_err(|error| self.not_claimed(error, worker.pid))?;
        Ok((local_rank, worker.frame, worker.pid))
    }

    /// Why a worker can't have its slot.
    fn not_claimed(&self, error: ClaimError, pid: u32) -> AttachError {
        let refused = |error: ClaimError, hint| refusal(error.to_string()).hint(hint).into();
        if let ClaimError::Taken { pid: earlier, .. } = error
            && descends_from(pid, earlier)
        {
            let hint = "that process has started this one, which is not a rank; to run alone, it \
                        must not have the variables GRADWIRE_JOB and GRADWIRE_SOCKET";
            return refused(error, hint);
        }
        if self.node.config.elastic.is_none() {
            if let ClaimError::Taken { local_rank, pid: earlier } = error
                && earlier == pid
            {
                let what = format!("process {pid} has attached as local rank {local_rank} already");
                let hint = "a process attaches once; it must shut down before it attaches again, \
                            also if it replaces itself (exec)";
                return refusal(what).hint(hint).into();
            }
            let hint = "is it started twice, as by a launcher inside of another one? \
                        GRADWIRE_LOCAL_RANK is its number";
            return refused(error, hint);
        }
        match error {
            // The worker comes again before the next epoch has begun.
            ClaimError::Left { .. } => self.not_now(match self.node.job.ending() {
                Some(Ending::Failed(failure)) => failure,
                _ => ending(),
            }),
            // This daemon has not noticed yet that its first connection has ended.
            ClaimError::Taken { pid: earlier, .. } if earlier == pid => AttachError::Later,
            error => refused(error, "see GRADWIRE_WORKER"),
        }
    }

    /// The job has ended before a worker could attach. An elastic job may go on in another epoch.
    fn not_now(&self, failure: Failure) -> AttachError {
        match self.node.config.elastic {
            Some(_) if failure.is_recoverable() => AttachError::Later,
            _ => AttachError::Refused(failure),
        }
    }

    /// Attaches the worker once the world has formed.
    fn attach(&self, local_rank: u32, frame: Frame, pid: u32) -> Result<Arc<Worker>, AttachError> {
        let fd = <[OwnedFd; 1]>::try_from(frame.fds)
            .map_err(|fds| refusal(format!("Attach came with {} descriptors, not 1", fds.len())))?;
        let [fd] = fd;
        let DaemonControl { submissions: reader, completions, heartbeats, activity, trace } =
            DaemonControl::open(fd, self.node.config.max_in_flight).map_err(no_control_page)?;
        let world = self.world().map_err(|failure| self.not_now(failure))?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let doorbell = eventfd(0, flags).map_err(no_descriptor)?;
        let rank = Rank(world.me().first_rank.0 + local_rank);
        if let Err(error) = trace.sample(self.node.config.sample_steps) {
            tracing::warn!(%rank, %error, "the steps of this rank are not sampled");
        }
        let worker = Arc::new(Worker {
            local_rank,
            rank,
            pid,
            memory: WorkerMemory::default(),
            completions,
            activity: RankActivity::new(rank, activity),
            recorded: Recorded::begin(self.node.recording.clone(), local_rank, pid),
            sites: CallSites::default(),
            pause: Pause::default(),
            trace,
            outbox: Outbox::new(self.stream.try_clone().map_err(no_descriptor)?),
            is_visible: has_program(pid),
            has_left: AtomicBool::new(false),
        });
        // WAIT: a worker notices the daemon's silence from the first heartbeat on. So the first one
        // is sent before the worker is attached.
        heartbeats.beat();
        let reply =
            pb::DaemonMessage { message: Some(attached(&world, local_rank, &self.node.config)) };
        handover::send(&self.stream, &reply.encode_to_vec(), &[doorbell.as_fd()])?;
        self.stream.set_read_timeout(None)?;
        self.node.workers.set(local_rank, Slot::Attached(worker.clone()));
        if self.node.process_ends.end(local_rank).is_some() {
            // It has ended meanwhile, but another process may hold the other end.
            worker.outbox.hang_up();
        }
        self.node.liveness.begin();
        let source = Source { worker: worker.clone(), reader, heartbeats, doorbell };
        // The intake ends only with the daemon.
        let _ = self.intake.send(source);
        self.node.count_workers();
        tracing::info!(rank = %worker.rank, pid, "worker attached");
        let wanted = *self.node.wanted.lock();
        if let Some(changed) = wanted {
            self.node.ensure_sent(&worker, worker.outbox.send(Reply::Changed(changed)));
        }
        // The job may have ended since the world formed, before this worker could be notified.
        if let Phase::Over(Ending::Failed(failure)) = &*self.node.job.watch().borrow() {
            worker.abort(failure);
        }
        Ok(worker)
    }

    fn world(&self) -> Result<Arc<World>, Failure> {
        let mut phase = self.node.job.watch();
        let formed = phase.wait_for(|phase| !matches!(phase, Phase::Forming));
        match self.runtime.block_on(formed).as_deref() {
            Ok(Phase::Running(world)) => Ok(world.clone()),
            Ok(Phase::Over(Ending::Failed(failure))) => Err(failure.clone()),
            _ => Err(ending()),
        }
    }

    /// Serves an attached worker until it leaves or dies.
    fn serve_attached(&self, worker: &Arc<Worker>) {
        let _panics = self.node.report_panic("the thread of a worker");
        let mut noticed;
        let end = loop {
            let received = receive(&self.stream);
            // How a process has ended is known a moment later.
            noticed = Instant::now();
            match received {
                Ok(Some((Request::AddSegment(add), frame))) => {
                    match self.add(worker, &add, frame) {
                        Ok(reply) => self.node.ensure_sent(worker, worker.outbox.send(reply)),
                        Err(why) => break Some(worker.sent_nonsense(&why)),
                    }
                }
                Ok(Some((Request::DropSegment(gone), _))) => {
                    if !worker.memory.remove(gone.segment) {
                        let why =
                            format!("it dropped segment {}, which does not exist", gone.segment);
                        break Some(worker.sent_nonsense(&why));
                    }
                    self.node.count_workers();
                }
                Ok(Some((Request::Allocated(allocated), _))) => {
                    if let Err(why) = submit::allocated(&self.node, worker, &allocated) {
                        break Some(worker.sent_nonsense(&why));
                    }
                }
                Ok(Some((Request::Observed(observed), _))) => {
                    self.node.observations.answered(worker.local_rank, observed);
                }
                Ok(Some((Request::Paused(pb::Paused { what }), _))) => {
                    worker.pause.set(&what, Instant::now());
                }
                Ok(Some((Request::Detach(_), _))) => {
                    if let Some(why) = self.node.needed_for(worker.local_rank) {
                        break Some(worker.left_early(&why));
                    }
                    worker.has_left.store(true, Relaxed);
                    tracing::info!(rank = %worker.rank, "worker leaves");
                    self.node.sending.flush();
                    self.node.leaves(worker.rank, false);
                    let detached = Reply::Detached(pb::Detached {});
                    self.node.ensure_sent(worker, worker.outbox.send(detached));
                    // The connection ends with this thread, so the outbox must be empty first.
                    let deadline = Instant::now() + DETACH_TIMEOUT;
                    while !worker.outbox.flush() && Instant::now() < deadline {
                        thread::sleep(Duration::from_millis(5));
                    }
                    break None;
                }
                Ok(Some((Request::GiveUp(give_up), _))) => {
                    let cause = give_up.cause.map(|cause| brief(cause.into()));
                    if let Some(cause) = cause.filter(|cause| cause.is_beyond(worker.rank)) {
                        self.node.worker_follows(cause);
                        break None;
                    }
                    let reason: String = give_up.reason.chars().take(MAX_REASON_CHARS).collect();
                    break Some(worker.gave_up(&reason));
                }
                Ok(Some((Request::Attach(_), _))) => {
                    break Some(worker.sent_nonsense("it attached a second time"));
                }
                Ok(Some((Request::Look(_), _))) => {
                    break Some(worker.sent_nonsense("only a viewer may ask to look"));
                }
                Ok(None) => {
                    let interesting = || self.node.job.ending().is_none();
                    match self.node.process_ends.of(worker.local_rank, interesting) {
                        Ok(end) => {
                            if end.is_none() {
                                self.node.unnoticed_end(worker);
                            }
                            break Some(self.node.died(worker, end));
                        }
                        // The worker was asked to end, like this daemon.
                        Err(why) => self.node.stopped(&why),
                    }
                    break None;
                }
                Err(ReceiveError::NoDescriptor) => break Some(no_descriptor(Errno::MFILE)),
                Err(ReceiveError::Nonsense(why)) => break Some(worker.sent_nonsense(&why)),
            }
        };
        if let Some(failure) = end {
            let is_there = matches!(
                failure.kind,
                FailureKind::Protocol | FailureKind::RankLeft | FailureKind::Resource
            );
            self.node.worker_failed_at(worker, failure, noticed);
            if is_there {
                // The connection stays open until the worker closes it, so that this worker also
                // receives the cause (TELL).
                let _ = io::copy(&mut &self.stream, &mut io::sink());
            } else {
                // A worker that gives up waits for the end of its connection. Operations in flight
                // would keep it open until ranks that come late have been notified, too.
                worker.outbox.hang_up();
            }
        }
        worker.recorded.gone();
        self.node.workers.set(worker.local_rank, Slot::Left);
        self.node.count_workers();
    }

    fn add(&self, worker: &Worker, add: &pb::AddSegment, frame: Frame) -> Result<Reply, String> {
        let [fd] = <[OwnedFd; 1]>::try_from(frame.fds)
            .map_err(|fds| format!("AddSegment came with {} descriptors, not 1", fds.len()))?;
        let max = self.node.config.max_segments;
        if add.segment >= max || worker.memory.has(add.segment) {
            return Err(format!(
                "it handed over segment {}, which exists already or is not below {max}",
                add.segment
            ));
        }
        let segment = match Segment::open(fd, u64::MAX) {
            Ok(segment) => segment,
            // This daemon lacks something, and the worker can go on without the segment.
            Err(error) if error.is_shortage() => {
                let number = add.segment;
                tracing::warn!(rank = %worker.rank, number, %error, "a memory segment is refused");
                let reason = error.to_string();
                return Ok(Reply::SegmentRefused(pb::SegmentRefused { segment: number, reason }));
            }
            Err(error) => return Err(error.to_string()),
        };
        worker.memory.add(add.segment, segment);
        self.node.count_workers();
        Ok(Reply::SegmentAdded(pb::SegmentAdded { segment: add.segment }))
    }
}

/// The message that tells a worker the world and its position in it.
fn attached(world: &World, local_rank: u32, config: &DaemonConfig) -> Reply {
    let me = world.me();
    let has_it = |n: &&crate::model::world::NodeInfo| n.slots > local_rank;
    let before = &world.nodes[..world.node.0 as usize];
    Reply::Attached(pb::Attached {
        rank: me.first_rank.0 + local_rank,
        size: world.size(),
        local_rank,
        local_size: me.slots,
        cross_rank: before.iter().filter(has_it).count() as u32,
        cross_size: world.nodes.iter().filter(has_it).count() as u32,
        epoch: world.epoch.0,
        compression: world.compression.to_wire(),
        coordinator: config.coordinator.to_string(),
        recorder: config
            .recorder_directory
            .as_ref()
            .map(|folder| folder.display().to_string())
            .unwrap_or_default(),
        nodes: world
            .nodes
            .iter()
            .filter(|n| n.slots > 0)
            .map(|n| pb::Node {
                host: n.host.clone(),
                data_address: n.addresses.to_string(),
                first_rank: n.first_rank.0,
                slots: n.slots,
                rack: n.rack.clone(),
                line_mbit: n.line_mbit,
            })
            .collect(),
    })
}
