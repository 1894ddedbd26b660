//! Checks the first message of a worker or viewer, which says who it is (TRUST).

use std::{fmt::Display, io, os::unix::net::UnixStream, time::Duration};

use gradwire_proto::{
    Failure, FailureKind, PROTOCOL, VERSION,
    auth::{self, Claim},
    pb::{self, daemon_message::Message as Reply, worker_message::Message as Request},
};
use gradwire_shm::handover::{self, Frame, HandoverError};
use prost::Message;
use rustix::io::Errno;

use crate::{config::DaemonConfig, workers::worker::send};

/// How long a worker may take for its first message, and for each read of it.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(3);

/// Why a session ended before the worker was attached.
pub(super) enum AttachError {
    Refused(Failure),
    /// It belongs to another epoch.
    Later,
    /// The other side closed the connection, or did not send valid frames.
    Broken(String),
}

impl From<Failure> for AttachError {
    fn from(failure: Failure) -> Self {
        Self::Refused(failure)
    }
}

/// Why a message of a worker can't be read.
pub(super) enum ReceiveError {
    /// This daemon may not open the descriptor that came with it.
    NoDescriptor,
    /// The worker is at fault, for this reason.
    Nonsense(String),
}

impl From<ReceiveError> for AttachError {
    fn from(error: ReceiveError) -> Self {
        match error {
            ReceiveError::NoDescriptor => Self::Refused(no_descriptor(Errno::MFILE)),
            ReceiveError::Nonsense(why) => Self::Broken(why),
        }
    }
}

impl From<io::Error> for AttachError {
    fn from(error: io::Error) -> Self {
        Self::Broken(error.to_string())
    }
}

/// The failure of a worker if the system refuses a descriptor for its connection.
pub(super) fn no_descriptor(error: impl Display) -> Failure {
    let what = format!("gradwired can't open a descriptor for a worker: {error}");
    Failure::new(FailureKind::Resource, what).hint("raise its limit of open files (ulimit -n)")
}

pub(super) fn refusal(what: impl Into<String>) -> Failure {
    Failure::new(FailureKind::Invalid, what)
}

/// A worker of this job.
pub(super) struct Greeting {
    /// Its local rank, or in an elastic job its number in the job.
    pub(super) number: u32,
    /// Its process.
    pub(super) pid: u32,
    /// What came with its first message.
    pub(super) frame: Frame,
}

/// The process at the other end of a connection.
pub(super) enum Peer {
    Worker(Greeting),
    /// It asks what the ranks of this node do.
    Viewer {
        /// Whether the text has whole stacks.
        stacks: bool,
    },
}

impl Peer {
    /// Checks the user, protocol, job and secret of the process at the other end.
    ///
    /// # Errors
    /// Why it is refused.
    pub(super) fn receive(stream: &UnixStream, config: &DaemonConfig) -> Result<Self, AttachError> {
        let peer = handover::peer(stream)?;
        let me = rustix::process::getuid().as_raw();
        if peer.uid != me {
            let what = format!("it runs as user {}, but this job's daemon as user {me}", peer.uid);
            return Err(refusal(what).hint("start both as the same user").into());
        }
        stream.set_read_timeout(Some(HANDSHAKE_TIMEOUT))?;
        let nonce = auth::nonce();
        send(
            stream,
            Reply::Challenge(pb::Challenge {
                nonce: nonce.to_vec(),
                protocol: PROTOCOL,
                version: VERSION.into(),
                epoch: config.named_epoch(),
            }),
        )?;
        let (message, frame) = receive(stream)?.ok_or_else(|| match &config.elastic {
            // A worker that looks for a later epoch has read that this is not one.
            Some(_) => AttachError::Later,
            None => AttachError::Broken("it sent nothing".into()),
        })?;
        match message {
            Request::Attach(attach) => {
                let number = check(&attach, &nonce, config)?;
                Ok(Self::Worker(Greeting { number, pid: peer.pid, frame }))
            }
            Request::Look(pb::Look { stacks, proof }) => {
                let job = config.identity.job.as_str();
                let claim = Claim::View { challenge: &nonce, job };
                if !config.identity.secret.verify(&claim, &proof) {
                    return Err(refusal("the viewer's secret is not that of this job").into());
                }
                Ok(Self::Viewer { stacks })
            }
            _ => Err(refusal("the first message must be Attach or Look").into()),
        }
    }
}

/// Checks an `Attach`; returns the number of the worker.
fn check(attach: &pb::Attach, nonce: &[u8], config: &DaemonConfig) -> Result<u32, Failure> {
    let identity = &config.identity;
    if attach.protocol != PROTOCOL {
        let what = format!(
            "the worker is Gradwire {} (protocol {}), but this daemon is {VERSION} \
             (protocol {PROTOCOL})",
            attach.version, attach.protocol
        );
        let hint = "install the same release for the training program and on the node";
        return Err(refusal(what).hint(hint));
    }
    if attach.job != identity.job.as_str() {
        let what = format!("this daemon serves job {}, not {:?}", identity.job, attach.job);
        return Err(refusal(what).hint("see GRADWIRE_JOB and GRADWIRE_SOCKET"));
    }
    let number = match (&config.elastic, attach.worker) {
        (None, None) => attach.local_rank,
        (Some(_), Some(worker)) => worker,
        (Some(_), None) => {
            let what = "this job is elastic, but the worker has no number in it";
            return Err(refusal(what).hint("see GRADWIRE_ELASTIC and GRADWIRE_WORKER"));
        }
        (None, Some(worker)) => {
            let what = format!("it is worker {worker} of an elastic job, but this one is not");
            return Err(refusal(what).hint("see GRADWIRE_ELASTIC and GRADWIRE_SOCKET"));
        }
    };
    let claim = Claim::Attach { challenge: nonce, job: &attach.job, local_rank: number };
    if !identity.secret.verify(&claim, &attach.proof) {
        return Err(refusal("the worker's secret is not that of this job")
            .hint("see GRADWIRE_SECRET; the launcher sets it for every process of a job"));
    }
    Ok(number)
}

/// The next message of a worker; `None` once it has closed the connection.
///
/// # Errors
/// [`ReceiveError`] if it is not a message, or this daemon can't receive it.
pub(super) fn receive(stream: &UnixStream) -> Result<Option<(Request, Frame)>, ReceiveError> {
    let mut frame = match handover::receive(stream) {
        Ok(Some(frame)) => frame,
        Ok(None) => return Ok(None),
        // The connection of a killed process ends like this if it has not read everything.
        Err(HandoverError::Io(error)) if error.kind() == io::ErrorKind::ConnectionReset => {
            return Ok(None);
        }
        Err(HandoverError::NoDescriptor) => return Err(ReceiveError::NoDescriptor),
        Err(error) => return Err(ReceiveError::Nonsense(error.to_string())),
    };
    let nonsense = |why: &dyn Display| ReceiveError::Nonsense(why.to_string());
    let bytes = std::mem::take(&mut frame.bytes);
    let message = pb::WorkerMessage::decode(&bytes[..]).map_err(|e| nonsense(&e))?.message;
    let message = message.ok_or_else(|| nonsense(&"it sent a message of an unknown kind"))?;
    Ok(Some((message, frame)))
}
