//! A fake daemon with a real socket and real shared memory. A tensor's name tells it what to do:
//!
//! - `hold…`: nothing, until a rank submits `release`
//! - `fail…`: the operation fails on all ranks
//! - `abort…`: the job fails
//! - `freeze…`: the daemon stops, as by SIGSTOP: its sockets stay open
//! - `die…`: the daemon ends without a message
//! - `deaf…`: the daemon stops, and its socket accepts no more messages
//! - anything else: once all members of its process set have submitted it, the operation, by the
//!   same flows as the real daemon; see [`operations`]

mod operations;

use std::{
    collections::BTreeMap,
    fs::File,
    os::{
        fd::{AsFd, OwnedFd},
        linux::net::SocketAddrExt,
        unix::{
            fs::FileExt,
            net::{SocketAddr, UnixListener, UnixStream},
        },
    },
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use gradwire_proto::{
    Failure, FailureKind, JobId, PROTOCOL, Rank, Secret,
    auth::{self, Claim},
    pb::{self, daemon_message::Message, worker_message},
};
use gradwire_shm::{
    control::{Completion, CompletionWriter, DaemonControl, Place},
    handover,
};
use gradwire_worker::{Session, SessionBuilder};
use operations::FakeState;
use prost::Message as _;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// The fake daemon. Ends with its workers' connections, or when dropped.
pub(crate) struct FakeDaemon {
    world: Arc<World>,
    socket: String,
    job: JobId,
    secret: Secret,
    stop: Arc<AtomicBool>,
    acceptor: Option<JoinHandle<()>>,
}

/// One worker's side of the fake.
struct Peer {
    stream: Arc<UnixStream>,
    writer: Arc<CompletionWriter>,
    segments: Arc<Mutex<BTreeMap<u32, File>>>,
}

struct World {
    size: u32,
    /// 0 in a job that is not elastic.
    epoch: u64,
    /// The workers of an elastic job, by rank.
    workers: Vec<u32>,
    peers: Mutex<BTreeMap<u32, Peer>>,
    state: Mutex<FakeState>,
    /// The number of ranks that have attached.
    attached: AtomicU32,
    stop: Arc<AtomicBool>,
    /// Whether a socket accepts no more messages.
    is_deaf: AtomicBool,
    /// Whether it refuses memory segments.
    has_no_memory: AtomicBool,
    /// Why a rank gave up.
    reason: Mutex<String>,
    /// An operation after which the daemon ends, and the ranks that get its result.
    last_answer: Mutex<Option<(String, Vec<u32>)>>,
}

impl FakeDaemon {
    /// A daemon for a job of `size` ranks.
    pub(crate) fn start(size: u32) -> Self {
        Self::serve(&unused_socket(), Secret::generate(), 0, (0..size).collect())
    }

    /// The daemon of the first epoch of an elastic job.
    pub(crate) fn elastic(workers: &[u32]) -> Self {
        Self::serve(&unused_socket(), Secret::generate(), 1, workers.to_vec())
    }

    /// Ends this daemon, if it has not ended, and starts its successor.
    pub(crate) fn succeed(self, workers: &[u32]) -> Self {
        let (socket, secret) = (self.socket.clone(), self.secret.clone());
        let epoch = self.world.epoch + 1;
        drop(self);
        Self::serve(&socket, secret, epoch, workers.to_vec())
    }

    /// Serves at an abstract socket.
    fn serve(socket: &str, secret: Secret, epoch: u64, workers: Vec<u32>) -> Self {
        let address = SocketAddr::from_abstract_name(&socket[1..]).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let job = JobId::new("test").unwrap();
        let size = workers.len() as u32;
        let stop = Arc::new(AtomicBool::new(false));
        let world = Arc::new(World {
            size,
            epoch,
            workers,
            peers: Mutex::default(),
            state: Mutex::new(FakeState::new(size)),
            attached: AtomicU32::new(0),
            stop: stop.clone(),
            is_deaf: AtomicBool::new(false),
            has_no_memory: AtomicBool::new(false),
            reason: Mutex::default(),
            last_answer: Mutex::default(),
        });
        let acceptor = thread::spawn({
            let (stop, secret, world) = (stop.clone(), secret.clone(), world.clone());
            move || {
                let mut threads = Vec::new();
                while !stop.load(SeqCst) {
                    match listener.accept() {
                        Ok((stream, _)) => {
                            let (world, secret) = (world.clone(), secret.clone());
                            threads.push(thread::spawn(move || {
                                serve(&world, &secret, Arc::new(stream));
                            }));
                        }
                        Err(_) => thread::sleep(Duration::from_millis(5)),
                    }
                }
                for thread in threads {
                    thread.join().unwrap();
                }
            }
        });
        Self { world, socket: socket.to_owned(), job, secret, stop, acceptor: Some(acceptor) }
    }

    /// The builder of a rank.
    pub(crate) fn rank(&self, rank: u32) -> SessionBuilder {
        self.rank_with(rank, self.secret.clone())
    }

    /// The builder of a rank with another secret.
    pub(crate) fn rank_with(&self, rank: u32, secret: Secret) -> SessionBuilder {
        Session::builder(self.job.clone(), secret, &self.socket, rank)
            .arena_segment_bytes(1 << 20)
            .start_timeout(Duration::from_secs(20))
    }

    /// The builder of a worker of an elastic job.
    pub(crate) fn worker(&self, worker: u32) -> SessionBuilder {
        self.rank(0).elastic(worker).elastic_timeout(Duration::from_secs(30))
    }

    /// The daemon ends when the next operation of this name has ended. Only these ranks get its
    /// result.
    pub(crate) fn answer_last(&self, name: &str, ranks: &[u32]) {
        *self.world.last_answer.lock().unwrap() = Some((name.to_owned(), ranks.to_vec()));
    }

    /// Waits until that operation has ended.
    pub(crate) fn until_answered(&self) {
        let begin = Instant::now();
        while self.world.last_answer.lock().unwrap().is_some() {
            assert!(begin.elapsed() < Duration::from_secs(20), "the operation has not ended");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Tells all ranks that the launcher wants to change the membership.
    pub(crate) fn wants(&self, added: bool, removed: bool) {
        for peer in self.world.peers.lock().unwrap().values() {
            let changed = pb::MembershipChanged { added, removed };
            say(&peer.stream, Message::Changed(changed), None);
        }
    }

    /// Why a rank gave up; waits for that.
    pub(crate) fn reason(&self) -> String {
        let begin = Instant::now();
        loop {
            let reason = self.world.reason.lock().unwrap().clone();
            if !reason.is_empty() {
                return reason;
            }
            assert!(begin.elapsed() < Duration::from_secs(20), "no rank gave up");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// From now on the daemon has memory for further segments, or not.
    #[allow(dead_code, reason = "only some test files use it")]
    pub(crate) fn has_memory(&self, has: bool) {
        self.world.has_no_memory.store(!has, SeqCst);
    }

    /// Waits until a submission has made the daemon deaf.
    pub(crate) fn until_deaf(&self) {
        let begin = Instant::now();
        while !self.world.is_deaf.load(SeqCst) {
            assert!(begin.elapsed() < Duration::from_secs(20), "nothing made the daemon deaf");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// The memory that a rank has lent by an in-place submission of this name; waits for it.
    pub(crate) fn lent(&self, rank: u32, name: &str) -> Lent {
        let begin = Instant::now();
        loop {
            if let Some(submission) = operations::waiting(&self.world, rank, name) {
                let peers = self.world.peers.lock().unwrap();
                let segments = peers[&rank].segments.lock().unwrap();
                let memory = |(part, place): (usize, &Place)| {
                    let file = segments[&place.segment].try_clone().unwrap();
                    (file, place.offset, submission.request.bytes_of(part) as usize)
                };
                let memory = submission.outputs.iter().enumerate().map(memory).collect();
                return Lent {
                    memory,
                    writer: peers[&rank].writer.clone(),
                    ticket: submission.ticket,
                };
            }
            assert!(begin.elapsed() < Duration::from_secs(20), "'{name}' was not submitted");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// A job of one rank.
    pub(crate) fn alone() -> (Self, Session) {
        let daemon = Self::start(1);
        let session = daemon.rank(0).attach().unwrap();
        (daemon, session)
    }
}

/// An operation that the daemon may continue even if the rank has given it up.
pub(crate) struct Lent {
    memory: Vec<(File, u64, usize)>,
    writer: Arc<CompletionWriter>,
    ticket: u64,
}

impl Lent {
    /// Writes a result and reports its completion, like a daemon that was stopped and resumed.
    pub(crate) fn resume(&self) {
        for (file, offset, bytes) in &self.memory {
            file.write_all_at(&vec![0xEE; *bytes], *offset).unwrap();
        }
        let _ = self.writer.push(Completion { ticket: self.ticket, aux: 0 });
    }
}

impl Drop for FakeDaemon {
    fn drop(&mut self) {
        self.stop.store(true, SeqCst);
        let result = self.acceptor.take().unwrap().join();
        assert!(result.is_ok() || thread::panicking(), "the fake daemon panicked");
    }
}

/// A socket that no other test uses.
fn unused_socket() -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, SeqCst);
    format!("@gradwire-worker-test-{}-{number}", std::process::id())
}

fn say(stream: &UnixStream, message: Message, fd: Option<&OwnedFd>) -> bool {
    let frame = pb::DaemonMessage { message: Some(message) }.encode_to_vec();
    handover::send(stream, &frame, fd.map(AsFd::as_fd).as_slice()).is_ok()
}

fn receive(stream: &UnixStream) -> Option<(worker_message::Message, Vec<OwnedFd>)> {
    let frame = handover::receive(stream).ok()??;
    let message = pb::WorkerMessage::decode(frame.bytes.as_slice()).unwrap().message.unwrap();
    Some((message, frame.fds))
}

fn serve(world: &World, secret: &Secret, stream: Arc<UnixStream>) {
    stream.set_nonblocking(false).unwrap();
    let nonce = auth::nonce().to_vec();
    let challenge = pb::Challenge {
        nonce: nonce.clone(),
        protocol: PROTOCOL,
        version: "test".into(),
        epoch: world.epoch,
    };
    say(&stream, Message::Challenge(challenge), None);
    let Some((worker_message::Message::Attach(attach), mut fds)) = receive(&stream) else { return };
    let number = attach.worker.unwrap_or(attach.local_rank);
    let claim = Claim::Attach { challenge: &nonce, job: &attach.job, local_rank: number };
    if !secret.verify(&claim, &attach.proof) {
        let failure = Failure::new(FailureKind::Invalid, "the secret differs");
        say(&stream, Message::Refused(failure.into()), None);
        return;
    }
    let Some(rank) = world.workers.iter().position(|worker| *worker == number) else {
        say(&stream, Message::Later(pb::Later {}), None);
        return;
    };
    let rank = rank as u32;
    let DaemonControl { submissions: mut reader, completions: writer, heartbeats: beats, .. } =
        DaemonControl::open(fds.remove(0), u32::MAX).unwrap();
    let segments = Arc::new(Mutex::new(BTreeMap::new()));
    let peer =
        Peer { stream: stream.clone(), writer: Arc::new(writer), segments: segments.clone() };
    world.peers.lock().unwrap().insert(rank, peer);
    world.attached.fetch_add(1, SeqCst);
    while world.attached.load(SeqCst) < world.size && !world.stop.load(SeqCst) {
        thread::sleep(Duration::from_millis(1));
    }
    let doorbell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let attached = pb::Attached {
        rank,
        size: world.size,
        local_rank: rank,
        local_size: world.size,
        cross_rank: 0,
        cross_size: 1,
        epoch: world.epoch.max(1),
        compression: 0,
        coordinator: "127.0.0.1:1".into(),
        recorder: String::new(),
        nodes: vec![pb::Node {
            host: "fake".into(),
            first_rank: 0,
            slots: world.size,
            ..Default::default()
        }],
    };
    say(&stream, Message::Attached(attached), Some(&doorbell));
    while !world.stop.load(SeqCst) {
        beats.beat();
        if !operations::read_all(world, rank, &mut reader) {
            let peers = std::mem::take(&mut *world.peers.lock().unwrap());
            for peer in peers.values() {
                let _ = peer.stream.shutdown(std::net::Shutdown::Both);
            }
            return;
        }
        if !reader.prepare_sleep() {
            continue;
        }
        let mut polled =
            [PollFd::new(&*stream, PollFlags::IN), PollFd::new(&doorbell, PollFlags::IN)];
        let tick = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        poll(&mut polled, Some(&tick)).unwrap();
        let news = !polled[0].revents().is_empty();
        reader.awake();
        let _ = rustix::io::read(&doorbell, &mut [0u8; 8]);
        if !news {
            continue;
        }
        match receive(&stream) {
            Some((worker_message::Message::AddSegment(add), mut fds)) => {
                let segment = add.segment;
                let answer = if world.has_no_memory.load(SeqCst) {
                    let reason = "it has no address space".to_owned();
                    Message::SegmentRefused(pb::SegmentRefused { segment, reason })
                } else {
                    let new = segments.lock().unwrap().insert(segment, File::from(fds.remove(0)));
                    assert!(new.is_none(), "segment {segment} is there twice");
                    Message::SegmentAdded(pb::SegmentAdded { segment })
                };
                say(&stream, answer, None);
            }
            Some((worker_message::Message::Detach(_), _)) => {
                say(&stream, Message::Detached(pb::Detached {}), None);
                return;
            }
            Some((worker_message::Message::Allocated(allocated), _)) => {
                operations::allocated(world, rank, allocated);
            }
            Some((worker_message::Message::DropSegment(gone), _)) => {
                let old = segments.lock().unwrap().remove(&gone.segment);
                assert!(old.is_some(), "segment {} is gone", gone.segment);
            }
            Some((worker_message::Message::Paused(_), _)) => {}
            Some((worker_message::Message::Observed(_), _)) => panic!("nobody asked"),
            Some((worker_message::Message::Attach(_), _)) => panic!("attached twice"),
            Some((worker_message::Message::Look(_), _)) => panic!("asked as a viewer"),
            gone @ (Some((worker_message::Message::GiveUp(_), _)) | None) => {
                if let Some((worker_message::Message::GiveUp(give_up), _)) = gone {
                    *world.reason.lock().unwrap() = give_up.reason;
                }
                // TELL, like the real daemon.
                let failure =
                    Failure::new(FailureKind::WorkerLost, "the process ended").rank(Rank(rank));
                let mut peers = world.peers.lock().unwrap();
                peers.remove(&rank);
                for peer in peers.values() {
                    say(&peer.stream, Message::Aborted(failure.clone().into()), None);
                }
                return;
            }
        }
    }
}
