//! What happens to a job, what is to be done about it, and within which limits.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use gradwire_proto::Failure;
use gradwire_services::launch::{Order, ProcessEnd, Role};
use serde::{Deserialize, Serialize};

use crate::launch::{hosts::Host, metrics_file::DaemonMetrics};

/// What another command wants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub enum Request {
    /// The ranks of a host are to leave at their next commit.
    Drain {
        /// The host, as the job names it.
        host: String,
    },
}

/// What the launcher does about it, or the reason why it does nothing.
pub type Answer = Result<String, String>;

/// Something that happened. Times are since the launch began, by the launcher's clock. `node` is
/// the number of an agent, which is that of its node as long as no host comes or goes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are those of the agents' reports")]
pub enum Event {
    /// A host has what the job needs; other hosts reach it by the address.
    Ready { node: usize, address: IpAddr, port: u16 },
    /// Other hosts reach a host by another address now.
    Address { node: usize, address: IpAddr },
    /// A host lacks something, or can't be reached.
    Refused { node: usize, what: String, hint: String },
    /// A process runs.
    Started { node: usize, role: Role, pid: u32, at: Duration },
    /// Another command asks for something.
    Requested(Request),
    /// A process can't be started.
    Failed { node: usize, role: Role, what: String },
    /// A service wrote a line on its standard output.
    Said { node: usize, role: Role, line: String },
    /// A process ended; `tail` is the end of its standard error.
    Exited { node: usize, role: Role, pid: u32, end: ProcessEnd, at: Duration, tail: Vec<String> },
    /// A signal has stopped the daemon of a host, and perhaps a rank there has failed.
    DaemonStopped { node: usize, pid: u32, at: Duration, rank_failed: bool },
    /// A signal asked the agent of a host to end, so everything there ends.
    Asked { node: usize, what: String, at: Duration },
    /// A rank ends because of a failure that another process has caused.
    Consequence { node: usize, worker: u32, failure: Failure },
    /// A rank has left the job and forms another one with all ranks.
    Forming { node: usize, worker: u32 },
    /// A training process waits for an epoch that includes it.
    Waiting { node: usize, worker: u32 },
    /// A training process was asked to leave the job.
    Leaving { node: usize, worker: u32 },
    /// The hosts that the discovery script lists, or what is wrong with its output.
    Listed(Result<Vec<Host>, String>),
    /// Everything on a host has ended.
    Stopped { node: usize },
    /// The connection to a host ended before Stopped.
    Lost { node: usize, what: String, at: Duration },
    /// The launcher received a signal.
    Interrupted { signal: i32 },
    /// The launcher received a signal for the ranks.
    Passed { signal: i32 },
    /// Output can't be written.
    OutputClosed { why: String },
    /// The deadline has passed.
    Tick,
    /// The deadline has passed, but output of the job waits for a slow reader. The ends of ranks
    /// that succeeded wait behind it.
    Unread,
}

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say what the fields are")]
pub enum Command {
    /// Give an order to a host's agent.
    Order { node: usize, order: Order },
    /// Reach a host that joins the job; its agent has the next number.
    Reach { agent: usize, host: String },
    /// A note, shown with `--verbose`.
    Note(String),
    /// A line for the user.
    Say(String),
    /// The answer to the last request.
    Answer(Answer),
    /// Suspend the launcher, soon after the orders before this.
    Suspend,
    /// All daemons of an epoch serve: tell where, and how many ranks they have.
    Serving { epoch: u64, coordinator: SocketAddr, daemons: Vec<DaemonMetrics>, ranks: u32 },
}

/// How long things may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Until every rank is started.
    pub start: Duration,
    /// For processes to end after being asked to.
    pub grace: Duration,
    /// For other failures to arrive after the first.
    pub gather: Duration,
    /// For a daemon to report the cause, after that.
    pub report: Duration,
    /// How long a daemon may be stopped, although nobody misses it.
    pub silence: Duration,
}
