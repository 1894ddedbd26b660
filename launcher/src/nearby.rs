//! The daemons of this host, and what they say about their ranks: for commands that can't ask the
//! coordinator of a job.
//!
//! A daemon has its addresses and the secret in its environment. The system shows the environment
//! of a process only to its user.

use std::{
    ffi::OsStr,
    io,
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixStream},
    },
    time::Duration,
};

use gradwire_proto::{
    Failure, Secret,
    auth::Claim,
    pb::{self, Explanation, daemon_message::Message as Reply, worker_message::Message},
};
use gradwire_shm::handover::{self, HandoverError};
use procfs::process::{Process, all_processes};
use prost::Message as _;

/// The variables of a daemon. Ranks have some of them.
const JOB: &str = "GRADWIRE_JOB";
const COORDINATOR: &str = "GRADWIRE_COORDINATOR";
const SOCKET: &str = "GRADWIRE_SOCKET";
pub(crate) const SECRET: &str = "GRADWIRE_SECRET";

/// How long a daemon may take for its challenge (WAIT): one that is stopped never sends it.
const PROMPT: Duration = Duration::from_millis(500);

/// How long it may take for its answer (WAIT): its ranks have 1.2 s, and it may be busy.
const ANSWER: Duration = Duration::from_secs(4);

/// A daemon of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DaemonHere {
    /// Its job.
    pub job: String,
    /// The address of its coordinator, unless it hosts the coordinator.
    pub coordinator: String,
    /// Its socket; `@` stands for the abstract namespace.
    pub socket: String,
    /// The secret of the job.
    pub secret: Secret,
}

/// The daemons that this user runs on this host.
pub fn daemons() -> Vec<DaemonHere> {
    let processes = all_processes().into_iter().flatten().flatten();
    processes.filter_map(|process| of_process(&process)).collect()
}

/// The daemon that a process is, if it is one.
fn of_process(process: &Process) -> Option<DaemonHere> {
    let variables = process.environ().ok()?;
    let get = |name: &str| Some(variables.get(OsStr::new(name))?.to_str()?.to_owned());
    Some(DaemonHere {
        job: get(JOB)?,
        coordinator: get(COORDINATOR)?,
        socket: get(SOCKET)?,
        secret: Secret::from_hex(&get(SECRET)?).ok()?,
    })
}

/// Why a daemon has not said what its ranks do.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// Nothing listens at its socket.
    #[error("it does not run any more")]
    Gone(#[source] io::Error),
    /// It does not answer, or not as a daemon.
    #[error("it does not answer: {0}")]
    Silent(String),
    /// It refuses the request.
    #[error("{0}")]
    Refused(Failure),
}

impl From<HandoverError> for AskError {
    fn from(error: HandoverError) -> Self {
        Self::Silent(error.to_string())
    }
}

impl From<io::Error> for AskError {
    fn from(error: io::Error) -> Self {
        Self::Silent(error.to_string())
    }
}

impl DaemonHere {
    /// What the ranks of this host do. `stacks`: the text has the whole stacks of all threads.
    /// Blocks for a few seconds at most.
    ///
    /// # Errors
    /// [`AskError`] if it does not answer in time.
    pub fn ask(&self, stacks: bool) -> Result<Explanation, AskError> {
        let address = match self.socket.strip_prefix('@') {
            Some(name) => SocketAddr::from_abstract_name(name),
            None => SocketAddr::from_pathname(&self.socket),
        };
        let stream =
            address.and_then(|it| UnixStream::connect_addr(&it)).map_err(AskError::Gone)?;
        stream.set_read_timeout(Some(PROMPT))?;
        stream.set_write_timeout(Some(ANSWER))?;
        let Reply::Challenge(challenge) = receive(&stream)? else { return Err(unexpected()) };
        let claim = Claim::View { challenge: &challenge.nonce, job: &self.job };
        let look = pb::Look { stacks, proof: self.secret.prove(&claim).to_vec() };
        let message = pb::WorkerMessage { message: Some(Message::Look(look)) };
        handover::send(&stream, &message.encode_to_vec(), &[])?;
        stream.set_read_timeout(Some(ANSWER))?;
        match receive(&stream)? {
            Reply::Explanation(explanation) => Ok(explanation),
            Reply::Refused(failure) => Err(AskError::Refused(failure.into())),
            _ => Err(unexpected()),
        }
    }
}

fn unexpected() -> AskError {
    AskError::Silent("it sent an unexpected message".to_owned())
}

fn receive(stream: &UnixStream) -> Result<Reply, AskError> {
    let ended = || AskError::Silent("it closed the connection".to_owned());
    let frame = handover::receive(stream)?.ok_or_else(ended)?;
    let message = pb::DaemonMessage::decode(&frame.bytes[..]);
    message.ok().and_then(|it| it.message).ok_or_else(unexpected)
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        process::{Command, Stdio},
        thread,
    };

    use super::*;

    #[test]
    fn a_daemon_is_known_by_its_environment() {
        let secret = Secret::generate();
        let mut child = Command::new("cat")
            .envs([(JOB, "nearby-test"), (COORDINATOR, "here")])
            .envs([(SOCKET, "@nearby-test"), (SECRET, &*secret.to_hex())])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // The kernel shows an empty environment until the new program is loaded, which may be
        // after `spawn` has returned. A program that answers is loaded.
        child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let found = daemons();
        child.kill().unwrap();
        child.wait().unwrap();
        let [job, coordinator, socket] = ["nearby-test", "here", "@nearby-test"].map(String::from);
        let daemon = DaemonHere { job, coordinator, socket, secret };
        assert!(found.contains(&daemon), "{found:?}");
        assert!(matches!(daemon.ask(false), Err(AskError::Gone(_))));
    }

    #[test]
    fn a_daemon_that_ends_while_asked_is_silent() {
        let socket = format!("@nearby-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&socket[1..]).unwrap();
        let listener = std::os::unix::net::UnixListener::bind_addr(&address).unwrap();
        thread::spawn(move || drop(listener.accept()));
        let (job, coordinator) = ("j".to_owned(), "here".to_owned());
        let daemon = DaemonHere { job, coordinator, socket, secret: Secret::generate() };
        assert!(matches!(daemon.ask(false), Err(AskError::Silent(_))));
    }
}
