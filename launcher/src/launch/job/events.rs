//! What happens to a job, what is to be done about it, and within which limits.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use gradwire_services::launch::{Order, ProcessEnd, Role};

use crate::launch::metrics_file::DaemonMetrics;

/// Something that happened. Times are since the launch began, by the launcher's clock.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are those of the agents' reports")]
pub enum Event {
    /// A host has what the job needs; other hosts reach it by the address.
    Ready { node: usize, address: IpAddr, port: u16 },
    /// A host lacks something, or can't be reached.
    Refused { node: usize, what: String, hint: String },
    /// A process runs.
    Started { node: usize, role: Role, pid: u32, at: Duration },
    /// A process can't be started.
    Failed { node: usize, role: Role, what: String },
    /// A service wrote a line on its standard output.
    Said { node: usize, role: Role, line: String },
    /// A process ended; `tail` is the end of its standard error.
    Exited { node: usize, role: Role, pid: u32, end: ProcessEnd, at: Duration, tail: Vec<String> },
    /// A training process waits for an epoch that includes it.
    Waiting { node: usize, worker: u32 },
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
    /// The deadline has passed, but output of the job waits for a slow reader, and the reports of
    /// hosts wait behind it.
    Unread,
}

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say what the fields are")]
pub enum Command {
    /// Give an order to a host's agent.
    Order { node: usize, order: Order },
    /// A note, shown with `--verbose`.
    Note(String),
    /// Suspend the launcher, soon after the orders before this.
    Suspend,
    /// All daemons serve: tell where.
    Serving { coordinator: SocketAddr, daemons: Vec<DaemonMetrics> },
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
}
