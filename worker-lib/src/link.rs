//! The socket to the daemon, with the messages of `worker.proto`, and attaching.

use std::{
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixStream},
    },
    time::{Duration, Instant},
};

use gradwire_proto::{
    Compression, Epoch, Failure, FailureKind, PROTOCOL, VERSION, auth::Claim, pb,
    pb::daemon_message, pb::worker_message,
};
use gradwire_shm::handover::{self, HandoverError};
use prost::Message;
use rustix::event::{self, Timespec};

use crate::{
    error::{GradwireError, Result},
    launch::{Launch, Place},
};

/// How long the daemon may take to greet, or to accept a message. Normally it does both at once.
const GREETING: Duration = Duration::from_secs(5);

/// A node of the job.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Node {
    /// Its name.
    pub host: String,
    /// Its first rank; the others follow without gaps.
    pub first_rank: u32,
    /// The number of its ranks.
    pub slots: u32,
}

/// The place of this rank in the job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct World {
    pub(crate) rank: u32,
    pub(crate) size: u32,
    pub(crate) local_rank: u32,
    pub(crate) local_size: u32,
    pub(crate) cross_rank: u32,
    pub(crate) cross_size: u32,
    pub(crate) epoch: Epoch,
    pub(crate) nodes: Vec<Node>,
    pub(crate) compression: Compression,
    pub(crate) coordinator: std::net::SocketAddr,
    /// Where the daemon's flight recording is saved if it vanishes; empty: nowhere.
    pub(crate) recorder: String,
}

impl World {
    /// Checks the daemon's message (TRUST).
    fn check(wire: pb::Attached, place: Place) -> Result<Self> {
        let is_asked = match place {
            Place::LocalRank(asked) => wire.local_rank == asked,
            // The daemon chooses its local rank.
            Place::Worker(_) => true,
        };
        let orderly = wire.rank < wire.size
            && is_asked
            && wire.local_rank < wire.local_size
            && wire.local_size <= wire.size
            && wire.cross_rank < wire.cross_size
            && wire.cross_size <= wire.size;
        if !orderly {
            let text = format!("it gave this process an impossible place in the world: {wire:?}");
            return Err(GradwireError::Protocol(text));
        }
        let compression = Compression::from_wire(wire.compression).ok_or_else(|| {
            GradwireError::Protocol(format!("unknown compression {}", wire.compression))
        })?;
        let coordinator = wire.coordinator.parse().map_err(|_| {
            let given = &wire.coordinator;
            let text = format!("invalid address {given:?} of the coordinator: expected IP:PORT");
            GradwireError::Protocol(text)
        })?;
        Ok(Self {
            rank: wire.rank,
            size: wire.size,
            local_rank: wire.local_rank,
            local_size: wire.local_size,
            cross_rank: wire.cross_rank,
            cross_size: wire.cross_size,
            epoch: Epoch(wire.epoch),
            nodes: wire
                .nodes
                .into_iter()
                .map(|n| Node { host: n.host, first_rank: n.first_rank, slots: n.slots })
                .collect(),
            compression,
            coordinator,
            recorder: wire.recorder,
        })
    }

    /// The daemon's message that [`World::check`] accepts.
    pub(crate) fn to_wire(&self) -> pb::Attached {
        let node = |node: &Node| pb::Node {
            host: node.host.clone(),
            first_rank: node.first_rank,
            slots: node.slots,
            ..Default::default()
        };
        pb::Attached {
            rank: self.rank,
            size: self.size,
            local_rank: self.local_rank,
            local_size: self.local_size,
            cross_rank: self.cross_rank,
            cross_size: self.cross_size,
            epoch: self.epoch.0,
            nodes: self.nodes.iter().map(node).collect(),
            compression: self.compression.to_wire(),
            coordinator: self.coordinator.to_string(),
            recorder: self.recorder.clone(),
        }
    }

    /// The name of this rank's node; empty if unknown.
    pub(crate) fn host(&self) -> &str {
        self.nodes
            .iter()
            .find(|n| self.rank.checked_sub(n.first_rank).is_some_and(|index| index < n.slots))
            .map_or("", |n| n.host.as_str())
    }
}

/// Sends a message, with at most one descriptor.
pub(crate) fn send(
    stream: &UnixStream,
    message: worker_message::Message,
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let frame = pb::WorkerMessage { message: Some(message) }.encode_to_vec();
    handover::send(stream, &frame, fd.as_slice())
}

/// A message of the daemon and its descriptors.
pub(crate) type Received = (daemon_message::Message, Vec<OwnedFd>);

/// Why receiving a message failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error("it closed the connection")]
    Ended,
    #[error(transparent)]
    Handover(#[from] HandoverError),
    #[error("a message can't be decoded: {0}")]
    Decode(#[from] prost::DecodeError),
    #[error("a message of an unknown kind")]
    Unknown,
}

/// Receives the next message.
pub(crate) fn receive(stream: &UnixStream) -> Result<Received, LinkError> {
    let frame = handover::receive(stream)?.ok_or(LinkError::Ended)?;
    let message = pb::DaemonMessage::decode(frame.bytes.as_slice())?.message;
    Ok((message.ok_or(LinkError::Unknown)?, frame.fds))
}

fn connect(socket: &str) -> Result<UnixStream> {
    let address = match socket.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(socket),
    };
    address
        .and_then(|address| UnixStream::connect_addr(&address))
        .map_err(|source| GradwireError::Connect { socket: socket.to_owned(), source })
}

/// Receives a message within a time limit. Checks `cancelled` meanwhile.
fn receive_by(
    stream: &UnixStream,
    what: &str,
    within: Duration,
    cancelled: &dyn Fn() -> bool,
) -> Result<Received> {
    /// How often `cancelled` is checked.
    const TICK: Duration = Duration::from_millis(100);
    let deadline = Instant::now() + within;
    loop {
        if cancelled() {
            let failure = Failure::new(FailureKind::Cancelled, "attaching was cancelled");
            return Err(failure.into());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let wait = left.min(TICK);
        let wait = Timespec { tv_sec: 0, tv_nsec: i64::from(wait.subsec_nanos()) };
        let mut fds = [event::PollFd::new(stream, event::PollFlags::IN)];
        match event::poll(&mut fds, Some(&wait)) {
            // The answer may have come while this process was suspended, so the time counts last.
            Ok(0) if left.is_zero() => {
                return Err(GradwireError::Timeout { what: what.to_owned(), after: within });
            }
            Ok(0) | Err(rustix::io::Errno::INTR) => continue,
            Ok(_) => {}
            Err(error) => {
                let what = "waiting for the daemon";
                return Err(GradwireError::System { what, source: error.into() });
            }
        }
        return receive(stream).map_err(|error| match error {
            LinkError::Ended => {
                GradwireError::Failed(daemon_lost(stream, "before this rank was attached"))
            }
            LinkError::Handover(HandoverError::Io(error)) => {
                let when = format!("before this rank was attached ({error})");
                GradwireError::Failed(daemon_lost(stream, &when))
            }
            LinkError::Handover(HandoverError::NoDescriptor) => GradwireError::System {
                what: "a descriptor from the daemon; raise the limit of open files (ulimit -n)",
                source: rustix::io::Errno::MFILE.into(),
            },
            error => GradwireError::Protocol(error.to_string()),
        });
    }
}

/// The failure of a worker whose daemon, at the other end of a stream, has ended.
pub(crate) fn daemon_lost(stream: &UnixStream, when: &str) -> Failure {
    // The process that listened, as the system knows it: it may have ended long ago.
    let pid = handover::peer(stream).map_or(String::new(), |peer| format!(", pid {}", peer.pid));
    let what = format!("the daemon of this node (gradwired{pid}) ended {when}");
    Failure::new(FailureKind::NodeLost, what).hint(
        "the launcher's last lines or the output of gradwired say why; if it was killed for lack \
         of memory, the kernel's log does",
    )
}

/// The socket of a stopped daemon stays open, and even accepts connections (WAIT).
pub(crate) fn daemon_silent(silence: Duration) -> Failure {
    let what =
        format!("the daemon of this node (gradwired) has given no sign of life for {silence:?}");
    let hint = "it is stopped, or the machine is overloaded";
    Failure::new(FailureKind::NodeLost, what).hint(hint)
}

/// A daemon that has greeted this process.
#[derive(Debug)]
pub(crate) struct Greeted {
    stream: UnixStream,
    nonce: Vec<u8>,
    /// The epoch for which it was started; 0 in a job that is not elastic.
    pub(crate) epoch: Epoch,
}

/// A daemon to which this process has attached: the connection, the place of this rank in the job,
/// and the daemon's doorbell.
pub(crate) type Attachment = (UnixStream, World, OwnedFd);

/// Connects, and waits for the daemon's greeting.
pub(crate) fn greet(socket: &str, cancelled: &dyn Fn() -> bool) -> Result<Greeted> {
    let stream = connect(socket)?;
    // These timeouts are for the rest of a frame; `receive_by` waits for its beginning.
    for timeout in [UnixStream::set_read_timeout, UnixStream::set_write_timeout] {
        timeout(&stream, Some(GREETING))
            .map_err(|source| GradwireError::System { what: "a socket's timeout", source })?;
    }
    let greeting = receive_by(&stream, "the daemon's greeting", GREETING, cancelled)?;
    let challenge = match greeting.0 {
        daemon_message::Message::Challenge(challenge) => challenge,
        daemon_message::Message::Refused(failure) => return Err(refused(failure)),
        other => return Err(unexpected("a challenge", &other)),
    };
    if challenge.protocol != PROTOCOL {
        let text = format!(
            "it is Gradwire {} with protocol {}, but this process has Gradwire {VERSION} with \
             protocol {PROTOCOL}",
            challenge.version, challenge.protocol
        );
        let hint = "install the same release for both";
        return Err(GradwireError::Refused(Failure::new(FailureKind::Protocol, text).hint(hint)));
    }
    Ok(Greeted { stream, nonce: challenge.nonce, epoch: Epoch(challenge.epoch) })
}

/// Proves the secret, hands over the control page and waits until the world has formed (WAIT).
/// `None`: the epoch does not include this process, or has ended before it began.
pub(crate) fn attach(
    Greeted { stream, nonce, .. }: Greeted,
    launch: &Launch,
    control: BorrowedFd<'_>,
    within: Duration,
    cancelled: &dyn Fn() -> bool,
) -> Result<Option<Attachment>> {
    let job = launch.job.as_str();
    // In an elastic job, the proof covers the number of the worker.
    let local_rank = launch.place.number();
    let claim = Claim::Attach { challenge: &nonce, job, local_rank };
    let attach = pb::Attach {
        protocol: PROTOCOL,
        version: VERSION.to_owned(),
        job: job.to_owned(),
        local_rank,
        pid: std::process::id(),
        worker: launch.place.worker(),
        proof: launch.secret.prove(&claim).to_vec(),
    };
    send(&stream, worker_message::Message::Attach(attach), Some(control))
        .map_err(|source| GradwireError::System { what: "attaching to the daemon", source })?;
    let what = "the start of the job (all ranks attached)";
    let (message, mut fds) = receive_by(&stream, what, within, cancelled)?;
    match message {
        daemon_message::Message::Attached(attached) => {
            let world = World::check(attached, launch.place)?;
            let doorbell = fds.pop().filter(|_| fds.is_empty()).ok_or_else(|| {
                GradwireError::Protocol("its doorbell (one descriptor) is missing".into())
            })?;
            // From here on the watcher waits for messages without a limit. Sending keeps its
            // timeout.
            stream
                .set_read_timeout(None)
                .map_err(|source| GradwireError::System { what: "a socket's timeout", source })?;
            Ok(Some((stream, world, doorbell)))
        }
        daemon_message::Message::Later(_) if launch.place.worker().is_some() => Ok(None),
        daemon_message::Message::Refused(failure) => Err(refused(failure)),
        daemon_message::Message::Aborted(failure) => Err(Failure::from(failure).into()),
        other => Err(unexpected("Attached", &other)),
    }
}

/// Rings the daemon's doorbell, unless it is already ringing.
pub(crate) fn ring(doorbell: &OwnedFd) -> io::Result<()> {
    match rustix::io::retry_on_intr(|| rustix::io::write(doorbell.as_fd(), &1u64.to_ne_bytes())) {
        Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn refused(wire: pb::Failure) -> GradwireError {
    let failure = Failure::from(wire);
    // The job has failed because of another rank.
    if failure.rank.is_some() { failure.into() } else { GradwireError::Refused(failure) }
}

fn unexpected(wanted: &str, got: &daemon_message::Message) -> GradwireError {
    GradwireError::Protocol(format!("expected {wanted}, received {got:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Place = Place::LocalRank(1);

    fn attached() -> pb::Attached {
        pb::Attached {
            rank: 3,
            size: 4,
            local_rank: 1,
            local_size: 2,
            cross_rank: 1,
            cross_size: 2,
            epoch: 1,
            compression: 0,
            coordinator: "127.0.0.1:29400".into(),
            recorder: "/somewhere".into(),
            nodes: vec![
                pb::Node { host: "a".into(), first_rank: 0, slots: 2, ..Default::default() },
                pb::Node { host: "b".into(), first_rank: 2, slots: 2, ..Default::default() },
            ],
        }
    }

    #[test]
    fn a_place_in_the_world_is_checked() {
        assert_eq!(World::check(attached(), ONE).unwrap().host(), "b");
        assert_eq!(World::check(attached(), ONE).unwrap().to_wire(), attached());
        let impossible = [
            pb::Attached { rank: 4, ..attached() },
            pb::Attached { size: 0, ..attached() },
            pb::Attached { local_rank: 0, ..attached() },
            pb::Attached { local_size: 1, ..attached() },
            pb::Attached { local_size: 5, ..attached() },
            pb::Attached { cross_rank: 2, ..attached() },
            pb::Attached { cross_size: u32::MAX, ..attached() },
            pb::Attached { compression: 9, ..attached() },
        ];
        for wire in impossible {
            assert!(matches!(World::check(wire, ONE), Err(GradwireError::Protocol(_))));
        }
        let nowhere = pb::Attached { nodes: Vec::new(), ..attached() };
        assert_eq!(World::check(nowhere, ONE).unwrap().host(), "");
    }
}
