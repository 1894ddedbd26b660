//! A simulated worker that sends and writes what a real worker never would.
//!
//! A [`Stranger`] is only a connection to a daemon's socket. A [`RawWorker`] has attached as a
//! rank, with a real control page. From then on it does only what the test says: it does not even
//! send heartbeats.

use std::{
    fs::{self, File},
    io::{ErrorKind, IoSlice, Read, Write},
    mem::MaybeUninit,
    net::Shutdown,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        linux::net::SocketAddrExt,
        unix::{
            fs::FileExt,
            net::{SocketAddr, UnixStream},
        },
    },
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use gradwire_proto::{
    JobId, PROTOCOL, Request, Secret, TensorName, VERSION,
    auth::Claim,
    pb::{self, daemon_message::Message as Reply, worker_message::Message as ToDaemon},
};
use gradwire_shm::{
    control::{
        CONTROL_BYTES, CallSite, Completion, Doorbell, Origin, Place, Submission, WorkerControl,
    },
    handover,
    segment::{HugePages, Segment},
};
use prost::Message;
use rustix::{
    fs::{OFlags, fcntl_setfl},
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};

use crate::cluster::{Cluster, PATIENCE};

/// A connection to a daemon's socket.
#[derive(Debug)]
pub struct Stranger(UnixStream);

impl Stranger {
    /// Connects to a socket in the abstract namespace, `@name`.
    ///
    /// # Errors
    /// If nothing listens on it.
    pub fn connect(socket: &str) -> Result<Self> {
        let name = socket.strip_prefix('@').context("the socket must be abstract")?;
        let stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self(stream))
    }

    /// Sends a message, with descriptors.
    ///
    /// # Errors
    /// If the daemon has closed the connection.
    pub fn say(&self, message: ToDaemon, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let message = pb::WorkerMessage { message: Some(message) };
        Ok(handover::send(&self.0, &message.encode_to_vec(), fds)?)
    }

    /// Like [`Stranger::say`], with more descriptors than a frame may have.
    ///
    /// # Errors
    /// If the daemon has closed the connection.
    pub fn say_with_many(&self, message: ToDaemon, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let frame = pb::WorkerMessage { message: Some(message) }.encode_to_vec();
        let bytes = [&(frame.len() as u32).to_le_bytes()[..], &frame].concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        ensure!(control.push(SendAncillaryMessage::ScmRights(fds)), "at most 64 descriptors");
        sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Sends bytes that may not be a frame.
    ///
    /// # Errors
    /// If the daemon has closed the connection.
    pub fn send(&self, bytes: &[u8]) -> Result<()> {
        Ok((&self.0).write_all(bytes)?)
    }

    /// Closes its half of the connection, which looks like the death of a process.
    pub fn hang_up(&self) {
        let _ = self.0.shutdown(Shutdown::Write);
    }

    /// The next message of the daemon; `None` once it has closed the connection.
    ///
    /// # Errors
    /// If nothing arrives in time, or something that is not a message.
    pub fn receive(&self) -> Result<Option<(Reply, Vec<OwnedFd>)>> {
        let frame = match handover::receive(&self.0) {
            Ok(Some(frame)) => frame,
            Ok(None) => return Ok(None),
            Err(handover::HandoverError::Io(e)) if e.kind() == ErrorKind::ConnectionReset => {
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        let reply = pb::DaemonMessage::decode(&frame.bytes[..])?.message;
        Ok(Some((reply.context("a message of an unknown kind")?, frame.fds)))
    }

    /// Waits until the daemon has closed the connection, ignoring earlier messages.
    ///
    /// # Errors
    /// If the daemon does not close it in time.
    pub fn wait_for_end(&self) -> Result<()> {
        let mut rest = [0; 4096];
        loop {
            match (&self.0).read(&mut rest) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(()),
                Err(error) => return Err(error).context("the daemon did not close the connection"),
            }
        }
    }

    /// The daemon's challenge, its first message.
    ///
    /// # Errors
    /// If the daemon sends another message.
    pub fn challenge(&self) -> Result<pb::Challenge> {
        match self.receive()? {
            Some((Reply::Challenge(challenge), _)) => Ok(challenge),
            other => bail!("expected a challenge, got {other:?}"),
        }
    }

    /// The text of the daemon's refusal, after which it closes the connection.
    ///
    /// # Errors
    /// If the daemon sends another message.
    pub fn refusal(&self) -> Result<String> {
        match self.receive()? {
            Some((Reply::Refused(failure), _)) => {
                self.wait_for_end()?;
                Ok(gradwire_proto::Failure::from(failure).to_string())
            }
            other => bail!("expected a refusal, got {other:?}"),
        }
    }
}

/// The message with which a rank attaches. A test can spoil it before the proof is computed.
pub fn attach(
    cluster: &Cluster,
    local_rank: u32,
    challenge: &pb::Challenge,
    spoil: impl FnOnce(&mut pb::Attach),
) -> ToDaemon {
    let spoil = |attach: &mut pb::Attach| {
        attach.local_rank = local_rank;
        spoil(attach);
    };
    attach_to((cluster.job(), cluster.secret()), challenge, spoil)
}

/// Like [`attach`], for any job. `change` sets the local rank or the number of the worker.
pub fn attach_to(
    (job, secret): (&JobId, &Secret),
    challenge: &pb::Challenge,
    change: impl FnOnce(&mut pb::Attach),
) -> ToDaemon {
    let mut attach = pb::Attach {
        protocol: PROTOCOL,
        version: VERSION.into(),
        job: job.to_string(),
        local_rank: 0,
        pid: std::process::id(),
        worker: None,
        proof: Vec::new(),
    };
    change(&mut attach);
    let claim = Claim::Attach {
        challenge: &challenge.nonce,
        job: &attach.job,
        local_rank: attach.worker.unwrap_or(attach.local_rank),
    };
    if attach.proof.is_empty() {
        attach.proof = secret.prove(&claim).to_vec();
    }
    ToDaemon::Attach(attach)
}

/// The start of the first segment.
pub const START: Place = Place { segment: 0, offset: 0 };

/// A submission to the process set of all ranks, with every input and output at [`START`].
///
/// # Panics
/// If the name is invalid.
pub fn submission(ticket: u64, name: &str, request: Request) -> Submission {
    let places = vec![START; request.parts()];
    Submission {
        ticket,
        process_set: 0,
        name: TensorName::new(name).expect("a name"),
        request,
        priority: 0,
        inputs: places.clone(),
        outputs: places,
        origin: Origin::Plain,
        copied: false,
        site: CallSite::default(),
    }
}

/// A rank that has asked to attach and waits for the answer.
#[derive(Debug)]
pub struct Attaching {
    /// The connection to the daemon.
    pub socket: Stranger,
    /// The daemon's challenge.
    pub challenge: pb::Challenge,
    control: WorkerControl,
    page: String,
}

impl Attaching {
    /// Asks the daemon at a socket to attach a rank. `change` is that of [`attach_to`].
    ///
    /// # Errors
    /// If nothing listens on the socket.
    pub fn begin(
        socket: &str,
        job: (&JobId, &Secret),
        change: impl FnOnce(&mut pb::Attach),
    ) -> Result<Self> {
        static PAGES: AtomicU32 = AtomicU32::new(0);
        let number = PAGES.fetch_add(1, Ordering::Relaxed);
        let page = format!("{}-raw-{number}-control", job.0);
        let (control, fd) = WorkerControl::create(&page, u32::MAX)?;
        let socket = Stranger::connect(socket)?;
        let challenge = socket.challenge()?;
        socket.say(attach_to(job, &challenge, change), &[fd.as_fd()])?;
        Ok(Self { socket, challenge, control, page })
    }

    /// Waits until the world has formed. Returns the rank, and its place in the world.
    ///
    /// # Errors
    /// If the daemon gives another answer.
    pub fn finish(self) -> Result<(RawWorker, pb::Attached)> {
        let Self { socket, control, page, .. } = self;
        let (attached, mut fds) = match socket.receive()? {
            Some((Reply::Attached(attached), fds)) => (attached, fds),
            other => bail!("the daemon did not attach a worker: {other:?}"),
        };
        let doorbell = File::from(fds.pop().context("no doorbell received")?);
        Ok((RawWorker { socket, control, doorbell, page, segments: Vec::new() }, attached))
    }
}

/// A rank that does only what the test says.
#[derive(Debug)]
pub struct RawWorker {
    /// The connection to the daemon.
    pub socket: Stranger,
    /// The control page.
    pub control: WorkerControl,
    doorbell: File,
    /// The control page's name in `/proc/self/maps`.
    page: String,
    segments: Vec<Segment>,
}

impl RawWorker {
    /// Attaches as a rank, and returns once the world has formed.
    ///
    /// # Errors
    /// If the daemon refuses it.
    pub fn attach(cluster: &Cluster, rank: u32) -> Result<Self> {
        let (order, local_rank) = cluster.place(rank);
        let job = (cluster.job(), cluster.secret());
        let change = |attach: &mut pb::Attach| attach.local_rank = local_rank;
        let (worker, attached) = Attaching::begin(&cluster.socket(order), job, change)?.finish()?;
        ensure!(attached.rank == rank, "the daemon attached rank {rank} as {}", attached.rank);
        Ok(worker)
    }

    /// The daemon's next message, except for a request to explain what this rank does, which may
    /// come at any time.
    ///
    /// # Errors
    /// If none arrives in time, or it is not valid.
    pub fn receive(&self) -> Result<Option<(Reply, Vec<OwnedFd>)>> {
        loop {
            let received = self.socket.receive()?;
            if !matches!(received, Some((Reply::Explain(_), _))) {
                return Ok(received);
            }
        }
    }

    /// Hands over a memory segment; returns its number.
    ///
    /// # Errors
    /// If memory is missing, or the daemon does not accept it.
    pub fn add_segment(&mut self, bytes: u64) -> Result<u32> {
        let number = self.segments.len() as u32;
        let (segment, fd) = Segment::create("gradwire-test-segment", bytes, HugePages::Never)?;
        let add = pb::AddSegment { segment: number, bytes };
        self.socket.say(ToDaemon::AddSegment(add), &[fd.as_fd()])?;
        match self.receive()? {
            Some((Reply::SegmentAdded(added), _)) if added.segment == number => {}
            other => bail!("the daemon did not accept a segment: {other:?}"),
        }
        self.segments.push(segment);
        Ok(number)
    }

    /// Writes a submission into the ring, even if it is invalid.
    ///
    /// # Errors
    /// If the ring is full.
    pub fn submit(&self, submission: &Submission) -> Result<()> {
        if self.control.submit(submission)? == Doorbell::Ring {
            self.ring()?;
        }
        Ok(())
    }

    /// Wakes the daemon.
    ///
    /// # Errors
    /// If the system refuses it.
    pub fn ring(&self) -> Result<()> {
        Ok((&self.doorbell).write_all(&1u64.to_ne_bytes())?)
    }

    /// Makes reads of an empty doorbell block. The daemon shares the doorbell and thus this mode.
    ///
    /// # Errors
    /// If the system refuses it.
    pub fn make_doorbell_block(&self) -> Result<()> {
        Ok(fcntl_setfl(&self.doorbell, OFlags::RDWR)?)
    }

    /// Writes into the control page, bypassing all code that knows its layout. It writes through
    /// the system, like a debugger, so it needs no unsafe code.
    ///
    /// # Errors
    /// If the page can't be found or written to.
    pub fn scribble(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        ensure!(offset + bytes.len() as u64 <= CONTROL_BYTES, "the range is outside the page");
        let maps = fs::read_to_string("/proc/self/maps")?;
        // Worker and daemon map the same pages: either mapping works.
        let line = maps.lines().find(|line| line.contains(&self.page));
        let start =
            line.and_then(|line| line.split('-').next()).context("the page is not mapped")?;
        let start = u64::from_str_radix(start, 16)?;
        let memory = File::options().write(true).open("/proc/self/mem")?;
        Ok(memory.write_all_at(bytes, start + offset)?)
    }

    /// The next completion.
    ///
    /// # Errors
    /// If none arrives in time.
    pub fn completed(&self) -> Result<Completion> {
        let begin = Instant::now();
        loop {
            if let Some(completion) = self.control.pop_completion()? {
                self.control.answered();
                return Ok(completion);
            }
            ensure!(begin.elapsed() < PATIENCE, "no completion arrived");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// The failure of a submission, which is the daemon's next message.
    ///
    /// # Errors
    /// If the daemon sends another message.
    pub fn failed(&self) -> Result<(Vec<u64>, gradwire_proto::Failure)> {
        match self.receive()? {
            Some((Reply::TensorFailed(pb::TensorFailed { tickets, failure: Some(why) }), _)) => {
                Ok((tickets, why.into()))
            }
            other => bail!("expected the failure of a submission, got {other:?}"),
        }
    }

    /// The failure that ended the job for this worker. Earlier messages are ignored.
    ///
    /// # Errors
    /// If it does not arrive.
    pub fn aborted(&self) -> Result<gradwire_proto::Failure> {
        loop {
            let (message, _) = self.receive()?.context("the daemon closed the connection")?;
            if let Reply::Aborted(failure) = message {
                return Ok(failure.into());
            }
        }
    }
}
