//! The messages between launcher, agent and daemon, each a line of JSON.
//!
//! ```text
//! launcher ── Order: Begin, Clock, Start…, Signal…, Notify…, Stop ──► agent  (standard input;
//!          │   elastic jobs: End…, Kill…                                      its end means Stop)
//!          ◄─ Report: Ready | Refused, Clock, Started, Output…, Waiting…, Exited…, Stopped ──
//! agent    ── Notice: Started…, Ended…, Changed…, DaemonEnded…, Ending, Stopping ──► daemon
//!          │                                                              (standard input)
//! launcher ◄─ ServiceReport: Serving, Failed ── daemon       (standard output, in Report::Output)
//! ```
//!
//! The messages are the same for an agent on this machine and for one behind ssh. Orders carry the
//! job's secret and the environment of the ranks. These are never on a command line, where every
//! user of a machine could read them (TRUST).

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fmt,
    net::{IpAddr, SocketAddr},
    os::unix::ffi::{OsStrExt, OsStringExt},
    process::ExitStatus,
};

use gradwire_proto::{Failure, Rank, SEE_OUTPUT};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Set for a daemon whose launcher reads its reports. The launcher then prints the final message,
/// not the daemon.
pub const REPORTS_ARE_READ: &str = "GRADWIRE_LAUNCHED";

/// The variable that names the pipe which is a rank's standard error under an agent: its device and
/// inode, and the descriptor of a copy, `DEVICE:INODE:NUMBER`. A process that inherits the variable
/// may have its standard error elsewhere, and then uses the copy if it has inherited that.
pub const STDERR: &str = "GRADWIRE_STDERR";

/// The line that a rank writes to that pipe before it reports an error that ends it. The agent
/// takes it out, and the launcher shows reports that several ranks write alike once. It begins with
/// a control character, so that no text contains it by chance.
pub const LAST_WORDS: &str = "\u{1e}gradwire: last words";

/// The line that follows the report of an error.
pub const LAST_WORDS_END: &str = "\u{1e}gradwire: end of last words";

/// The beginning of the line that a rank writes to that pipe before it reports an error that
/// another process has caused. The failure that it has received follows, as JSON.
pub const CONSEQUENCE: &str = "\u{1e}gradwire: a consequence of ";

/// The line that a rank writes to that pipe when it has left the job and begins to form another one
/// with all ranks: when it calls `init()` again.
pub const FORMS: &str = "\u{1e}gradwire: forms another job";

/// The line that a training process of an elastic job writes to that pipe when it waits for an
/// epoch that includes it. The agent takes it out, as it does with [`LAST_WORDS`].
pub const WAITS: &str = "\u{1e}gradwire: waits";

/// The line that a training process of an elastic job writes to that pipe when SIGTERM asks it to
/// leave the job.
pub const LEAVES: &str = "\u{1e}gradwire: leaves";

/// The name of a program that stands for `gradwire` itself, wherever it is on each host.
pub const ITSELF: &str = "";

/// The value of `GRADWIRE_COORDINATOR` with which a daemon hosts the coordinator itself.
pub const HERE: &str = "here";

/// The role of a process in the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// A host's daemon; the first host's hosts the coordinator.
    Daemon,
    /// A training process, by its worker id: a number that the launcher gives once in a job. In a
    /// job of fixed membership it is the rank.
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
pub enum ProcessEnd {
    /// With this exit code.
    Code(i32),
    /// Killed by this signal.
    Signal(i32),
    /// Killed by the kernel, because a machine or a control group had no memory left.
    OutOfMemory,
    /// Killed by the launcher, because it should have ended and did not.
    Unresponsive,
}

impl ProcessEnd {
    /// Whether it ended without an error.
    pub fn is_well(self) -> bool {
        self == Self::Code(0)
    }

    /// What to do about it.
    pub fn hint(self) -> &'static str {
        match self {
            Self::OutOfMemory => {
                "use less memory (smaller batches, fewer ranks, fewer processes that load data), \
                 or raise the limit of the machine, container or job"
            }
            _ => SEE_OUTPUT,
        }
    }

    /// The code as a shell returns it: the code itself, or 128 plus the signal.
    pub fn exit_code(self) -> u8 {
        let code = match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
            Self::OutOfMemory => 128 + 9,
            Self::Unresponsive => 1,
        };
        u8::try_from(code).unwrap_or(1)
    }
}

impl From<ExitStatus> for ProcessEnd {
    fn from(status: ExitStatus) -> Self {
        use std::os::unix::process::ExitStatusExt;
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, signal) => Self::Signal(signal.unwrap_or_default()),
        }
    }
}

impl fmt::Display for ProcessEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "ended with exit code {code}"),
            Self::Signal(signal) => match signal_name(*signal) {
                Some(name) => write!(f, "was killed by {name}"),
                None => write!(f, "was killed by signal {signal}"),
            },
            Self::OutOfMemory => f.write_str("was killed by the kernel's out-of-memory killer"),
            Self::Unresponsive => f.write_str("did not respond and was killed by the launcher"),
        }
    }
}

/// The name of a signal, such as `SIGKILL`.
pub fn signal_name(signal: i32) -> Option<&'static str> {
    Signal::try_from(signal).ok().map(Signal::as_str)
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

/// Bytes that are usually text; bytes that are not UTF-8 are kept unchanged.
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

impl Text {
    /// The same for the system: a name of a file, or an argument.
    pub fn to_os(&self) -> OsString {
        OsString::from_vec(self.as_bytes().to_vec())
    }
}

impl From<OsString> for Text {
    fn from(name: OsString) -> Self {
        Self::from(name.as_bytes())
    }
}

impl From<String> for Text {
    fn from(text: String) -> Self {
        Self::Utf8(text)
    }
}

impl From<&str> for Text {
    fn from(text: &str) -> Self {
        Self::Utf8(text.to_owned())
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

/// What follows a piece of output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LineEnd {
    /// A newline.
    Newline,
    /// A carriage return: a progress bar overwrites the line.
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
    /// The first order: what this host must provide. Answered by Ready or Refused.
    Begin(Begin),
    /// Asks for the time. Also shows that the launcher is alive.
    Clock,
    /// Pieces of output have been passed on to the reader, and as many more may be sent.
    Shown {
        /// The number of these reports: of output, and of the beginning and end of an error.
        pieces: u32,
    },
    /// Start a process. Answered by Started or Failed.
    Start(Start),
    /// Pass a signal on to the ranks.
    Signal {
        /// Its number.
        signal: i32,
    },
    /// Ask one process and its group to end (SIGTERM). Answered by Exited, if it ends.
    End {
        /// The process.
        role: Role,
    },
    /// Kill one process and its group (SIGKILL). Answered by Exited.
    Kill {
        /// The process.
        role: Role,
    },
    /// Pass a notice on to the daemon of the host.
    Notify {
        /// The notice.
        notice: Notice,
    },
    /// Stop all processes. Answered by Stopped, and the agent ends.
    Stop {
        /// How long they may take to end after they were asked.
        grace_ms: u64,
        /// The reason, in one line. Ranks that must end because of others receive it (TELL).
        why: String,
    },
}

/// What a host must provide, and how it cleans up by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begin {
    /// The launcher's release; the agent's must be the same.
    pub version: String,
    /// The host's name for the launcher, for texts.
    pub host: String,
    /// How long processes may take to end when the launcher is gone.
    pub grace_ms: u64,
    /// The agent stops everything if the launcher is silent for longer; 0: never.
    pub silence_ms: u64,
    /// The working directory of the ranks; empty: that of the agent.
    pub directory: Text,
    /// Variables that are added to the agent's own environment, for every process.
    pub environment: BTreeMap<String, String>,
    /// The ranks' program; [`ITSELF`]: the agent's own.
    pub program: Text,
    /// The daemon's program; empty: next to the agent's, else in PATH.
    pub gradwired: String,
    /// Where the agent saves the flight recording of a daemon that was killed; empty: nowhere.
    pub recorder: String,
    /// Files of the launcher on this host. The agent removes them if the launcher was killed.
    /// Launchers of earlier releases don't send it.
    #[serde(default)]
    pub leftovers: Vec<Text>,
}

/// A process to start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// The process. A rank is started once, a daemon once in each epoch.
    pub role: Role,
    /// Arguments.
    pub args: Vec<Text>,
    /// Variables that are added to the environment of Begin.
    pub environment: BTreeMap<String, String>,
}

/// From an agent to the launcher. `at_us` is the time, in microseconds since the agent started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names of the other fields say what they are")]
pub enum Report {
    /// The host provides what Begin asks for.
    Ready {
        /// The address by which ssh reached this host.
        address: Option<IpAddr>,
        /// A free TCP port.
        port: u16,
    },
    /// The host does not provide what Begin asks for. The agent ends.
    Refused {
        what: String,
        /// May be empty.
        hint: String,
    },
    /// The agent's time.
    Clock { at_us: u64 },
    /// A process was started.
    Started {
        role: Role,
        /// Also its process group id.
        pid: u32,
        at_us: u64,
    },
    /// A process can't be started.
    Failed { role: Role, what: String },
    /// Output of a process, at most a line.
    Output {
        role: Role,
        stream: Stream,
        /// Without the end of the line.
        text: Text,
        end: LineEnd,
    },
    /// A rank is about to report an error on its standard error.
    LastWords { rank: Rank },
    /// The report of an error ends here.
    LastWordsEnd { rank: Rank },
    /// A rank ends because of a failure that another process has caused.
    Consequence { rank: Rank, failure: Failure },
    /// A rank has left the job and forms another one with all ranks.
    Forming { rank: Rank },
    /// A training process waits for an epoch that includes it.
    Waiting { rank: Rank },
    /// A training process was asked to leave the job.
    Leaving { rank: Rank },
    /// A signal asked the agent to end, so it ends all processes.
    Asked { what: String, at_us: u64 },
    /// A process ended.
    Exited { role: Role, pid: u32, end: ProcessEnd, at_us: u64 },
    /// A signal has stopped the daemon. Said each second, and when a rank of its host has failed,
    /// perhaps because of that.
    DaemonStopped { pid: u32, at_us: u64, rank_failed: bool },
    /// All processes that were started here have ended.
    Stopped,
}

/// The most last lines of a rank that its daemon knows (BOUND).
pub const MAX_LAST_LINES: usize = 5;

/// From an agent to the daemon of its host. A daemon that starts while ranks run learns of them
/// first. `rank` is the worker id, as in [`Role::Rank`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "notice", rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names of the fields say what they are")]
pub enum Notice {
    /// The process of a rank was started.
    Started { rank: Rank, pid: u32 },
    /// The process of a rank has ended.
    Ended { rank: Rank, end: ProcessEnd },
    /// The last lines that the process of a rank has written, at most [`MAX_LAST_LINES`].
    Wrote { rank: Rank, lines: Vec<String> },
    /// The launcher is about to change the membership of the job: workers wait to join it, or are
    /// to leave it. It may come several times in an epoch.
    Changed { added: bool, removed: bool },
    /// All ranks of the job are asked to end, and have some time to leave it together.
    Ending { why: String },
    /// The daemon of a node has ended, and the job has not. A connection with it does not return.
    DaemonEnded {
        /// Its number in the job; the coordinator is in number 0.
        node: u32,
        /// How it ended, or that its host is lost.
        why: String,
    },
    /// All processes of this host are about to be stopped.
    Stopping {
        why: String,
        /// Whether only the processes of this host are stopped.
        alone: bool,
    },
}

/// From a daemon or a coordinator to the process that started it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ServiceReport {
    /// It is ready.
    Serving {
        /// The address of its metrics.
        metrics: SocketAddr,
        /// The address of a daemon's data plane.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        data: Option<SocketAddr>,
        /// The address of the coordinator, from the process that hosts it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        grpc: Option<SocketAddr>,
    },
    /// The job has failed.
    Failed {
        /// The cause.
        failure: Failure,
    },
    /// Something else that the user should know.
    Warned {
        /// In one line.
        what: String,
    },
}

/// A line is not a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{given}' is not a Gradwire message: {reason}")]
pub struct NotAMessage {
    /// The beginning of the line.
    pub given: String,
    /// The reason.
    pub reason: String,
}

/// A message as a line, with its newline.
pub fn to_line(message: &impl Serialize) -> String {
    // Can't fail: messages are plain data with text keys.
    let mut line = serde_json::to_string(message).unwrap_or_default();
    line.push('\n');
    line
}

/// Reads a message from a line (TRUST).
pub fn from_line<T: DeserializeOwned>(line: &str) -> Result<T, NotAMessage> {
    serde_json::from_str(line).map_err(|error| NotAMessage {
        given: line.chars().filter(|c| !c.is_control()).take(80).collect(),
        reason: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use gradwire_proto::FailureKind;

    use super::*;

    fn survives<T: Serialize + DeserializeOwned + PartialEq + fmt::Debug>(message: &T) -> String {
        let line = to_line(message);
        assert_eq!(line.matches('\n').count(), 1, "{line}");
        assert_eq!(&from_line::<T>(&line).unwrap(), message);
        line.trim_end().to_owned()
    }

    #[test]
    fn messages_survive_the_line() {
        survives(&Report::Ready { address: Some("::1".parse().unwrap()), port: 7 });
        survives(&Report::Output {
            role: Role::Rank(3),
            stream: Stream::Stderr,
            text: Text::from(&b"caf\xe9\n\""[..]),
            end: LineEnd::Return,
        });
        survives(&Report::Output {
            role: Role::Daemon,
            stream: Stream::Stdout,
            text: Text::from("line \u{2028} é".as_bytes()),
            end: LineEnd::Newline,
        });
        let end = ProcessEnd::Signal(9);
        survives(&Report::Exited { role: Role::Daemon, pid: 7, end, at_us: 5 });
        survives(&Report::DaemonStopped { pid: 7, at_us: 5, rank_failed: true });
        survives(&Report::Stopped);
        let notice = survives(&Notice::Ended { rank: Rank(4), end });
        assert_eq!(notice, r#"{"notice":"ended","rank":4,"end":{"signal":9}}"#);
        survives(&Notice::Stopping { why: "a\nb".to_owned(), alone: true });
        survives(&Notice::Ending { why: "a".to_owned() });
        let changed = Notice::Changed { added: true, removed: false };
        let order = survives(&Order::Notify { notice: changed });
        let right =
            r#"{"order":"notify","notice":{"notice":"changed","added":true,"removed":false}}"#;
        assert_eq!(order, right);
        survives(&Notice::DaemonEnded { node: 3, why: "its process ended".to_owned() });
        survives(&Order::Kill { role: Role::Rank(7) });
        survives(&Report::Waiting { rank: Rank(7) });
        let failure = Failure::new(FailureKind::WorkerLost, "it is lost").rank(Rank(1));
        survives(&Report::Consequence { rank: Rank(7), failure });
        survives(&Report::Forming { rank: Rank(7) });
        survives(&Report::Leaving { rank: Rank(7) });
        let failure = Failure::new(gradwire_proto::FailureKind::WorkerLost, "a\n  b").rank(Rank(1));
        survives(&ServiceReport::Failed { failure: failure.host("n").tensor("t").hint("h") });
        survives(&ServiceReport::Warned { what: "a".to_owned() });
        let at: SocketAddr = "127.0.0.1:3".parse().unwrap();
        let serving = ServiceReport::Serving { metrics: at, data: None, grpc: Some(at) };
        let line = survives(&serving);
        assert_eq!(line, r#"{"event":"serving","metrics":"127.0.0.1:3","grpc":"127.0.0.1:3"}"#);
    }

    #[test]
    fn other_lines_are_refused_with_their_beginning() {
        for line in ["", "ended 3", r#"{"notice":"zonk"}"#, r#"{"notice":"ended","rank":-1}"#] {
            assert!(from_line::<Notice>(line).is_err(), "{line}");
        }
        let error = from_line::<Report>("Welcome to \u{1b}n1!").unwrap_err().to_string();
        assert!(error.starts_with("'Welcome to n1!' is not a Gradwire message"), "{error}");
    }

    #[test]
    fn the_end_of_a_process_reads_as_in_a_shell() {
        assert_eq!(ProcessEnd::Signal(9).to_string(), "was killed by SIGKILL");
        assert_eq!(ProcessEnd::Signal(63).to_string(), "was killed by signal 63");
        assert_eq!(ProcessEnd::Code(3).to_string(), "ended with exit code 3");
        assert_eq!(ProcessEnd::Signal(11).exit_code(), 139);
        assert_eq!(ProcessEnd::OutOfMemory.exit_code(), ProcessEnd::Signal(9).exit_code());
        assert_eq!(ProcessEnd::Code(300).exit_code(), 1);
    }
}
