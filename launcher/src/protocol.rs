//! What the launcher and a host's agent say to each other: JSON lines over the agent's standard
//! input and output, the same for this machine and for one behind ssh.
//!
//! Orders carry the job's secret and the ranks' environment. They travel here and nowhere else:
//! never on a command line, where every user of a machine can read them (TRUST).
//!
//! ```text
//! launcher ── Begin, Clock, Start…, Stop ──► agent     (its standard input; its end means Stop)
//!          ◄─ Ready | Refused, Clock, Started, Output…, Exited…, Stopped ──
//! ```

use std::{collections::BTreeMap, fmt, net::IpAddr};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::io::AsyncRead;
use tokio_stream::StreamExt;
use tokio_util::codec::{FramedRead, LinesCodec};

/// The longest message, in bytes (BOUND): an environment fits, a runaway does not.
pub const MAX_MESSAGE: usize = 8 << 20;

/// The name of a program that stands for `gradwire` itself, wherever it lies on each host.
pub const ITSELF: &str = "";

/// What a process is in the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// A host's daemon; the first host's hosts the coordinator.
    Daemon,
    /// A training process.
    Rank(u32),
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Daemon => f.write_str("the daemon"),
            Self::Rank(rank) => write!(f, "rank {rank}"),
        }
    }
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// With this exit code.
    Code(i32),
    /// Killed by this signal.
    Signal(i32),
}

impl Ended {
    /// Whether it ended well.
    pub fn is_well(self) -> bool {
        self == Self::Code(0)
    }

    /// As a shell would give it: the code, or 128 plus the signal.
    pub fn exit_code(self) -> u8 {
        let code = match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
        };
        u8::try_from(code).unwrap_or(1)
    }
}

impl From<std::process::ExitStatus> for Ended {
    fn from(status: std::process::ExitStatus) -> Self {
        use std::os::unix::process::ExitStatusExt;
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, signal) => Self::Signal(signal.unwrap_or_default()),
        }
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "ended with exit code {code}"),
            Self::Signal(signal) => match signal_name(*signal) {
                Some(name) => write!(f, "was killed by {name}"),
                None => write!(f, "was killed by signal {signal}"),
            },
        }
    }
}

/// The name of a signal.
pub fn signal_name(signal: i32) -> Option<&'static str> {
    use rustix::process::Signal;
    const NAMES: [(Signal, &str); 16] = [
        (Signal::HUP, "SIGHUP"),
        (Signal::INT, "SIGINT"),
        (Signal::QUIT, "SIGQUIT"),
        (Signal::ILL, "SIGILL"),
        (Signal::TRAP, "SIGTRAP"),
        (Signal::ABORT, "SIGABRT"),
        (Signal::BUS, "SIGBUS"),
        (Signal::FPE, "SIGFPE"),
        (Signal::KILL, "SIGKILL"),
        (Signal::USR1, "SIGUSR1"),
        (Signal::SEGV, "SIGSEGV"),
        (Signal::USR2, "SIGUSR2"),
        (Signal::PIPE, "SIGPIPE"),
        (Signal::ALARM, "SIGALRM"),
        (Signal::TERM, "SIGTERM"),
        (Signal::XCPU, "SIGXCPU"),
    ];
    NAMES.iter().find(|(known, _)| known.as_raw() == signal).map(|(_, name)| *name)
}

/// One of a process's two outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Bytes that are text most of the time; what is not UTF-8 is kept as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Text {
    /// UTF-8.
    Utf8(String),
    /// Anything else.
    Raw(Vec<u8>),
}

impl Text {
    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Utf8(text) => text.as_bytes(),
            Self::Raw(bytes) => bytes,
        }
    }
}

impl From<&[u8]> for Text {
    fn from(bytes: &[u8]) -> Self {
        match std::str::from_utf8(bytes) {
            Ok(text) => Self::Utf8(text.to_owned()),
            Err(_) => Self::Raw(bytes.to_vec()),
        }
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(self.as_bytes()))
    }
}

/// What came after a stretch of output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LineEnd {
    /// A newline.
    Newline,
    /// A carriage return: a progress bar draws over the line.
    Return,
    /// Nothing yet: the line was cut because it is very long, or the output ended.
    Open,
}

impl LineEnd {
    /// The byte itself.
    pub fn as_bytes(self) -> &'static [u8] {
        match self {
            Self::Newline => b"\n",
            Self::Return => b"\r",
            Self::Open => b"",
        }
    }
}

/// From the launcher to an agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case")]
pub enum Order {
    /// The first order: what this host must have. Answered by Ready or Refused.
    Begin(Begin),
    /// What time is it? Also a sign of life.
    Clock,
    /// Start a process. Answered by Started or Failed.
    Start(Start),
    /// End all processes. Answered by Stopped, and the agent ends.
    Stop {
        /// How long they may take after they were asked.
        grace_ms: u64,
        /// Why, in one line: what ranks read that have to end because of others (TELL).
        why: String,
    },
}

/// What a host must have, and how it cleans up by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begin {
    /// The launcher's release; the agent's must be the same.
    pub version: String,
    /// The host as the launcher calls it, for texts.
    pub host: String,
    /// How long processes may take to end when the launcher is gone.
    pub grace_ms: u64,
    /// The agent stops everything if the launcher is silent for longer; 0: never.
    pub silence_ms: u64,
    /// Where the ranks run; empty: where the agent runs.
    pub directory: String,
    /// Laid over the agent's own environment for every process.
    pub environment: BTreeMap<String, String>,
    /// The ranks' program; [`ITSELF`]: the agent's own.
    pub program: String,
    /// The daemon's program; empty: beside the agent's, else in PATH.
    pub gradwired: String,
}

/// A process to start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// Which; each once.
    pub role: Role,
    /// Arguments.
    pub args: Vec<String>,
    /// Laid over the environment of Begin.
    pub environment: BTreeMap<String, String>,
}

/// From an agent to the launcher. Times are microseconds since the agent started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "snake_case")]
pub enum Report {
    /// The host has what Begin asks for.
    Ready {
        /// The address by which ssh came here.
        address: Option<IpAddr>,
        /// A TCP port that nobody listens on.
        port: u16,
    },
    /// It has not. The agent ends.
    Refused {
        /// Why.
        what: String,
        /// What to do; may be empty.
        hint: String,
    },
    /// The time here.
    Clock {
        /// Now.
        at_us: u64,
    },
    /// A process runs.
    Started {
        /// Which.
        role: Role,
        /// Its process id, which is also its group's.
        pid: u32,
        /// When.
        at_us: u64,
    },
    /// A process can't be started.
    Failed {
        /// Which.
        role: Role,
        /// Why.
        what: String,
    },
    /// A stretch of a process's output, at most a line.
    Output {
        /// Whose.
        role: Role,
        /// Which output.
        stream: Stream,
        /// Without its end.
        text: Text,
        /// What came after it.
        end: LineEnd,
    },
    /// A process ended.
    Exited {
        /// Which.
        role: Role,
        /// Its process id.
        pid: u32,
        /// How.
        ended: Ended,
        /// When.
        at_us: u64,
    },
    /// Everything that was started here has ended.
    Stopped,
}

/// Why a message could not be read.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    /// The connection broke, or a message is too long.
    #[error("{0}")]
    Broken(#[from] tokio_util::codec::LinesCodecError),
    /// A line is no message.
    #[error("'{given}' is not a message of gradwire: {reason}")]
    Strange {
        /// The line's beginning.
        given: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// Messages of one side, read line by line.
#[derive(Debug)]
pub struct Reader<R>(FramedRead<R, LinesCodec>);

impl<R: AsyncRead + Unpin> Reader<R> {
    /// Reads from `input`.
    pub fn new(input: R) -> Self {
        Self(FramedRead::new(input, LinesCodec::new_with_max_length(MAX_MESSAGE)))
    }

    /// The next message, or `None` at the end. Cancel-safe.
    ///
    /// # Errors
    /// [`MessageError`] for what is no message (TRUST); the text shows its beginning.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Option<Result<T, MessageError>> {
        let line = match self.0.next().await? {
            Ok(line) => line,
            Err(error) => return Some(Err(error.into())),
        };
        Some(serde_json::from_str(&line).map_err(|error| MessageError::Strange {
            given: line.chars().filter(|c| !c.is_control()).take(80).collect(),
            reason: error.to_string(),
        }))
    }
}

/// Appends one message and its newline.
pub fn encode(bytes: &mut Vec<u8>, message: &impl Serialize) {
    // Our messages are plain data with text keys, which JSON always has a form for.
    if serde_json::to_writer(&mut *bytes, message).is_ok() {
        bytes.push(b'\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn messages_survive_the_line() {
        let reports = [
            Report::Ready { address: Some("::1".parse().unwrap()), port: 7 },
            Report::Output {
                role: Role::Rank(3),
                stream: Stream::Stderr,
                text: Text::from(&b"caf\xe9\n\""[..]),
                end: LineEnd::Return,
            },
            Report::Output {
                role: Role::Daemon,
                stream: Stream::Stdout,
                text: Text::from("line \u{2028} é".as_bytes()),
                end: LineEnd::Newline,
            },
            Report::Exited { role: Role::Daemon, pid: 7, ended: Ended::Signal(9), at_us: 5 },
            Report::Stopped,
        ];
        let mut line = Vec::new();
        for report in &reports {
            encode(&mut line, report);
        }
        line.extend_from_slice(b"Welcome to n1!\n{\"report\":\"zonk\"}\n");
        let mut reader = Reader::new(&line[..]);
        for report in &reports {
            assert_eq!(&reader.next::<Report>().await.unwrap().unwrap(), report);
        }
        let strange = reader.next::<Report>().await.unwrap().unwrap_err().to_string();
        assert!(strange.starts_with("'Welcome to n1!' is not a message of gradwire"), "{strange}");
        assert!(reader.next::<Report>().await.unwrap().is_err());
        assert!(reader.next::<Report>().await.is_none());
    }

    #[test]
    fn an_end_is_told_as_people_and_shells_do() {
        assert_eq!(Ended::Signal(9).to_string(), "was killed by SIGKILL");
        assert_eq!(Ended::Signal(63).to_string(), "was killed by signal 63");
        assert_eq!(Ended::Code(3).to_string(), "ended with exit code 3");
        assert_eq!(Ended::Signal(11).exit_code(), 139);
        assert_eq!(Ended::Code(300).exit_code(), 1);
    }
}
