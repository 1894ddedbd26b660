//! Decides about the life of a job: an event and the time go in, orders to hosts come out. Pure.
//!
//! ```text
//! Reaching ─ all hosts ready ─► First daemon ─ it serves ─► Daemons ─ all serve ─► Running
//!     │                              │                          │                     │ all ranks
//!     └────── a failure ─────────────┴──────────────────────────┴─────────┐           │ ended well
//!                                                                         ▼           ▼
//!                                     Done ◄─ all stopped ─ Stopping ◄─ Gathering   Leaving
//! ```
//!
//! The launcher does not act on a failure at once. For a moment (`Gathering`) it gathers others, so
//! that the earliest failure decides and not the one reported first. It also waits for a daemon's
//! report of the cause, which may be late on a busy machine, and for the end of the process at
//! fault.

use std::{collections::BTreeMap, net::IpAddr, net::SocketAddr, time::Duration};

use gradwire_proto::Failure;
use gradwire_services::launch::{
    Order, ProcessEnd, Role, ServiceReport, Start, from_line, signal_name,
};
use rustix::process::Signal;

use super::{
    metrics_file::DaemonMetrics,
    plan::{Places, Plan, Variables},
    report::{self, Cause, JobReport},
};
use crate::signals::passed;

/// How long services may take to end by themselves once all ranks have succeeded.
const LEAVE: Duration = Duration::from_millis(300);

/// How much longer than the grace period an agent may take to report that all has ended.
const SLACK: Duration = Duration::from_secs(5);

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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Reaching,
    /// The daemon of the first host, which hosts the coordinator.
    First,
    Daemons,
    Running,
    Leaving,
    Gathering,
    Stopping,
    Done,
}

#[derive(Debug, Default)]
struct Host {
    address: Option<IpAddr>,
    port: u16,
    answered: bool,
    metrics: Option<SocketAddr>,
    stopped: bool,
}

#[derive(Debug, Default)]
struct Process {
    started: Option<Duration>,
    ended: Option<ProcessEnd>,
}

/// What the launcher knows about one job, and its decisions.
#[derive(Debug)]
pub struct Job {
    plan: Plan,
    limits: Limits,
    phase: Phase,
    deadline: Option<Duration>,
    hosts: Vec<Host>,
    /// Where the coordinator serves, once it does.
    coordinator: Option<SocketAddr>,
    /// The key has the host, because each host has a daemon.
    processes: BTreeMap<(usize, Role), Process>,
    causes: Vec<Cause>,
    /// The host that reported why the job failed, and its report: the host of the coordinator or,
    /// without that, the first host that did. The job has failed, even if all ranks succeed.
    failure: Option<(usize, Failure)>,
    /// The daemons have been given more time to report the cause.
    patient: bool,
    /// The process at fault has been given time to end by itself.
    awaited: bool,
    ranks_ran: bool,
    /// The user wants the job to end now, without waiting for a reader of its output.
    hurried: bool,
    commands: Vec<Command>,
}

impl Job {
    /// A job whose hosts are being reached.
    pub fn new(plan: Plan, limits: Limits) -> Self {
        let hosts = plan.nodes.iter().map(|_| Host::default()).collect();
        Self {
            plan,
            limits,
            phase: Phase::Reaching,
            deadline: Some(limits.start),
            hosts,
            coordinator: None,
            processes: BTreeMap::new(),
            causes: Vec::new(),
            failure: None,
            patient: false,
            awaited: false,
            ranks_ran: false,
            hurried: false,
            commands: Vec::new(),
        }
    }

    /// When [`Event::Tick`] is due.
    pub fn deadline(&self) -> Option<Duration> {
        self.deadline
    }

    /// The report, once all processes of the job have ended.
    pub fn report(&self) -> Option<JobReport> {
        let others = self.ranks_ran && self.plan.size() > 1;
        (self.phase == Phase::Done).then(|| JobReport::new(&self.causes, self.failure(), others))
    }

    fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref().map(|(_, failure)| failure)
    }

    /// Whether the daemons blame this process.
    fn blames(&self, node: usize, role: Role) -> bool {
        self.failure().is_some_and(|failure| report::blames(failure, role, self.host(node)))
    }

    /// Whether the process that the daemons blame still runs.
    fn blamed_runs(&self) -> bool {
        let mut running = self.processes.iter().filter(|(_, process)| process.ended.is_none());
        running.any(|((node, role), _)| self.blames(*node, *role))
    }

    /// Whether a running daemon may yet report why the job failed.
    fn report_may_come(&self) -> bool {
        let daemon_runs = self.processes.iter().any(|((node, role), process)| {
            *role == Role::Daemon && process.ended.is_none() && !self.hosts[*node].stopped
        });
        self.ranks_ran && self.failure.is_none() && daemon_runs
    }

    /// Whether the user wants the job to end now, without waiting for a reader of its output.
    pub fn is_hurried(&self) -> bool {
        self.hurried
    }

    /// Takes an event and decides what to do.
    pub fn step(&mut self, event: Event, now: Duration) -> Vec<Command> {
        match event {
            Event::Ready { node, address, port } => {
                self.note(format!("host {} is ready at {address}", self.host(node)));
                let host = &mut self.hosts[node];
                (host.address, host.port, host.answered) = (Some(address), port, true);
            }
            Event::Refused { node, what, hint } => {
                // Its agent ends by itself.
                (self.hosts[node].answered, self.hosts[node].stopped) = (true, true);
                self.causes.push(Cause::NotStarted { what, hint });
            }
            Event::Started { node, role, pid, at } => {
                self.processes.entry((node, role)).or_default().started = Some(at);
                self.note(format!("{role} runs on host {} (pid {pid})", self.host(node)));
            }
            Event::Failed { role: _, node: _, what } => {
                self.fail(Cause::NotStarted { what, hint: String::new() }, now);
            }
            Event::Said { node, role, line } => self.said(node, role, &line, now),
            Event::Exited { node, role, pid, end, at, tail } => {
                self.exited(node, role, (pid, end, at), tail, now);
            }
            Event::Stopped { node } => self.hosts[node].stopped = true,
            Event::Lost { node, what, at } => self.lost(node, what, at, now),
            Event::Interrupted { signal } => self.interrupted(signal, now),
            Event::Passed { signal } => self.pass_on(signal),
            Event::OutputClosed { why } => self.fail(Cause::Output(why), now),
            // All processes have been asked to end: only their output is waited for.
            Event::Unread if self.phase == Phase::Stopping && !self.hurried => {
                self.deadline = Some(now + SLACK);
            }
            Event::Tick | Event::Unread => self.tick(now),
        }
        self.advance(now);
        std::mem::take(&mut self.commands)
    }

    fn host(&self, node: usize) -> &str {
        &self.plan.nodes[node].host
    }

    fn note(&mut self, text: String) {
        self.commands.push(Command::Note(text));
    }

    fn order(&mut self, node: usize, order: Order) {
        self.commands.push(Command::Order { node, order });
    }

    fn is_starting(&self) -> bool {
        matches!(self.phase, Phase::Reaching | Phase::First | Phase::Daemons)
    }

    /// Keeps a cause; the first one ends the job.
    fn fail(&mut self, cause: Cause, now: Duration) {
        if matches!(self.phase, Phase::Stopping | Phase::Done) {
            return;
        }
        self.causes.push(cause);
        if self.phase != Phase::Gathering {
            self.phase = Phase::Gathering;
            self.deadline = Some(now + self.limits.gather);
        }
    }

    fn said(&mut self, node: usize, role: Role, line: &str, now: Duration) {
        let (metrics, grpc) = match from_line(line) {
            Ok(ServiceReport::Serving { metrics, grpc, .. }) => (metrics, grpc),
            Ok(ServiceReport::Failed { failure }) => {
                // The host of the coordinator knows best, unless it only reports that it is being
                // stopped.
                let knows = match &self.failure {
                    None => true,
                    Some((from, _)) => node == 0 && *from != 0 && self.phase != Phase::Stopping,
                };
                let is_first = self.failure.is_none();
                if knows {
                    self.failure = Some((node, failure));
                }
                match self.phase {
                    Phase::Leaving => self.deadline = Some(now + self.limits.grace),
                    // More reports of it follow at once.
                    Phase::Gathering if self.patient && is_first => {
                        self.deadline = Some(now + self.limits.gather);
                    }
                    _ => {}
                }
                return;
            }
            Err(_) => {
                self.note(format!("{role} on host {}: {line}", self.host(node)));
                return;
            }
        };
        self.note(format!("{role} serves on host {}: {line}", self.host(node)));
        match (role, node, grpc) {
            (Role::Daemon, 0, Some(grpc)) => {
                self.coordinator = Some(grpc);
                self.hosts[node].metrics = Some(metrics);
            }
            (Role::Daemon, 1.., _) => self.hosts[node].metrics = Some(metrics),
            _ => {
                let what = format!("{role} on host {} reported: {line}", self.host(node));
                self.fail(Cause::NotStarted { what, hint: String::new() }, now);
            }
        }
    }

    fn exited(
        &mut self,
        node: usize,
        role: Role,
        (pid, end, at): (u32, ProcessEnd, Duration),
        tail: Vec<String>,
        now: Duration,
    ) {
        let host = self.host(node).to_owned();
        self.note(format!("{role} on host {host} (pid {pid}) {end}"));
        let process = self.processes.entry((node, role)).or_default();
        process.ended = Some(end);
        let ran = at.saturating_sub(process.started.unwrap_or(at));
        // A service may end once all ranks have left, even before they end. While the job starts,
        // any end of a service is a failure.
        if !matches!(role, Role::Rank(_)) && self.is_starting() {
            // Its own hint is better than ours, but is not the reason.
            let hint = tail.iter().rev().find_map(|line| line.strip_prefix("hint: "));
            let why = tail.iter().rev().find(|line| !line.starts_with("hint: "));
            let why = why.map(|line| format!(": {line}")).unwrap_or_default();
            let what = format!("{role} on host {host} (pid {pid}) {end} before the job began{why}");
            let hint = hint.unwrap_or("run again with --verbose to see all its output").into();
            self.fail(Cause::NotStarted { what, hint }, now);
        } else if !end.is_well() {
            self.fail(Cause::Ended { role, host, pid, end, at, ran, tail }, now);
        }
        if self.phase == Phase::Gathering {
            if self.awaited && self.blames(node, role) {
                self.stop(self.limits.grace, now);
            } else if self.patient && !self.awaited && !self.report_may_come() {
                // The last daemon has ended. The ends of other processes follow at once.
                self.deadline = self.deadline.min(Some(now + self.limits.gather));
            }
        }
    }

    fn lost(&mut self, node: usize, what: String, at: Duration, now: Duration) {
        let host = self.host(node).to_owned();
        let stopped = std::mem::replace(&mut self.hosts[node].stopped, true);
        if !self.hosts[node].answered {
            self.hosts[node].answered = true;
            self.causes.push(Cause::NotStarted { what, hint: String::new() });
        } else if !stopped {
            self.fail(Cause::Lost { host, what, at }, now);
        }
    }

    fn interrupted(&mut self, signal: i32, now: Duration) {
        match self.phase {
            Phase::Done => {}
            // The second interrupt ends the grace period.
            Phase::Stopping => {
                self.hurried = true;
                if self.causes.is_empty() {
                    // The job had succeeded, but now some of its output may be lost.
                    self.causes.push(Cause::Interrupted(signal));
                }
                self.stop(Duration::ZERO, now);
            }
            _ => {
                self.hurried = true;
                self.causes.push(Cause::Interrupted(signal));
                self.note("stopping; interrupt again to kill".to_owned());
                self.stop(self.limits.grace, now);
            }
        }
    }

    /// Passes a signal on to the ranks. A job that is being stopped has no use for it.
    fn pass_on(&mut self, signal: i32) {
        if matches!(self.phase, Phase::Stopping | Phase::Done) {
            return;
        }
        let name = signal_name(signal).unwrap_or("a signal");
        self.note(format!("{name} goes to the ranks"));
        for node in 0..self.hosts.len() {
            if self.hosts[node].answered && !self.hosts[node].stopped {
                self.order(node, Order::Signal { signal });
            }
        }
        if passed(signal) == Some(Signal::TSTP) {
            self.commands.push(Command::Suspend);
        }
    }

    fn stop(&mut self, grace: Duration, now: Duration) {
        self.phase = Phase::Stopping;
        self.deadline = Some(now + grace + SLACK);
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        let cause = report::summary(&self.causes, self.failure()).map(|cause| format!(": {cause}"));
        let why = format!("the launcher ends the job{}", cause.unwrap_or_default());
        for node in 0..self.hosts.len() {
            // On a host that has not answered, nothing was started. If its agent starts yet, it
            // finds its standard input closed.
            self.hosts[node].stopped |= !self.hosts[node].answered;
            if !self.hosts[node].stopped {
                self.order(node, Order::Stop { grace_ms, why: why.clone() });
            }
        }
    }

    fn tick(&mut self, now: Duration) {
        if self.deadline.is_none_or(|deadline| now < deadline) {
            return;
        }
        match self.phase {
            Phase::Gathering if !self.patient && self.report_may_come() => {
                self.patient = true;
                self.deadline = Some(now + self.limits.report);
            }
            // The process at fault may still be ending, and how it ends is the cause (TELL).
            Phase::Gathering if !self.awaited && self.blamed_runs() => {
                self.awaited = true;
                self.deadline = Some(now + self.limits.grace);
            }
            Phase::Gathering | Phase::Leaving => self.stop(self.limits.grace, now),
            Phase::Stopping => self.phase = Phase::Done,
            Phase::Done => {}
            Phase::Reaching | Phase::First | Phase::Daemons | Phase::Running => {
                let what = format!(
                    "the job did not start within {:.1} s: {}",
                    self.limits.start.as_secs_f64(),
                    self.missing()
                );
                let hint = "check that these hosts can be reached from here and from each other, \
                            or allow more time with --start-timeout"
                    .to_owned();
                self.causes.push(Cause::NotStarted { what, hint });
                self.stop(self.limits.grace, now);
            }
        }
    }

    /// What has not started (WAIT), by name.
    fn missing(&self) -> String {
        let hosts = |lacks: &dyn Fn(&Host) -> bool| -> String {
            let hosts = self.hosts.iter().zip(&self.plan.nodes);
            let names: Vec<_> =
                hosts.filter(|(host, _)| lacks(host)).map(|(_, node)| node.host.as_str()).collect();
            names.join(", ")
        };
        match self.phase {
            Phase::Reaching => format!("no answer from {}", hosts(&|host| !host.answered)),
            Phase::First => format!("the daemon on host {} does not serve", self.host(0)),
            Phase::Daemons => format!("no daemon serves on {}", hosts(&|h| h.metrics.is_none())),
            _ => {
                let ranks = (0..self.plan.size()).filter(|rank| !self.has_started(*rank));
                let ranks: Vec<_> = ranks.map(|rank| rank.to_string()).collect();
                format!("ranks not started: {}", ranks.join(", "))
            }
        }
    }

    fn process_of(&self, rank: u32) -> Option<&Process> {
        self.processes.get(&(self.plan.node_of(rank)?, Role::Rank(rank)))
    }

    fn has_started(&self, rank: u32) -> bool {
        self.process_of(rank).is_some_and(|p| p.started.is_some() || p.ended.is_some())
    }

    fn has_ended(&self, rank: u32) -> bool {
        self.process_of(rank).is_some_and(|process| process.ended.is_some())
    }

    /// Goes on to the next phase when its conditions are met.
    fn advance(&mut self, now: Duration) {
        match self.phase {
            Phase::Reaching if self.hosts.iter().all(|host| host.answered) => {
                if self.causes.is_empty() {
                    self.start_first();
                } else {
                    self.stop(self.limits.grace, now);
                    self.advance(now);
                }
            }
            Phase::First if self.coordinator.is_some() => {
                self.start_daemons();
                self.advance(now);
            }
            Phase::Daemons if self.hosts.iter().all(|host| host.metrics.is_some()) => {
                self.start_ranks();
            }
            Phase::Running => {
                if (0..self.plan.size()).all(|rank| self.has_started(rank)) {
                    self.deadline = None;
                }
                if (0..self.plan.size()).all(|rank| self.has_ended(rank)) {
                    self.phase = Phase::Leaving;
                    let limit = if self.failure.is_some() { self.limits.grace } else { LEAVE };
                    self.deadline = Some(now + limit);
                    self.advance(now);
                }
            }
            Phase::Leaving if self.processes.values().all(|process| process.ended.is_some()) => {
                self.stop(self.limits.grace, now);
                self.advance(now);
            }
            Phase::Stopping if self.hosts.iter().all(|host| host.stopped) => {
                self.phase = Phase::Done;
            }
            _ => {}
        }
    }

    fn start(&mut self, node: usize, role: Role, environment: Variables) {
        self.processes.insert((node, role), Process::default());
        let args = if let Role::Rank(_) = role { self.plan.args.clone() } else { Vec::new() };
        self.order(node, Order::Start(Start { role, args, environment }));
    }

    /// Starts the daemon of the first host; the others need the address of its coordinator.
    fn start_first(&mut self) {
        let Some(address) = self.hosts[0].address else { return };
        self.phase = Phase::First;
        self.start(0, Role::Daemon, self.plan.daemon_variables(0, address, None));
    }

    fn start_daemons(&mut self) {
        self.phase = Phase::Daemons;
        for node in 1..self.hosts.len() {
            let Some(address) = self.hosts[node].address else { continue };
            let environment = self.plan.daemon_variables(node, address, self.coordinator);
            self.start(node, Role::Daemon, environment);
        }
    }

    fn start_ranks(&mut self) {
        let hosts = &self.hosts;
        let places = Places {
            addresses: hosts.iter().filter_map(|host| host.address).collect(),
            master_port: hosts[0].port,
            daemon_metrics: hosts
                .iter()
                .filter_map(|host| host.metrics.map(|at| at.to_string()))
                .collect(),
        };
        let daemons = self.hosts.iter().enumerate().filter_map(|(node, host)| {
            let (host_address, metrics) = (host.address?, host.metrics?);
            Some(DaemonMetrics { host: self.host(node).to_owned(), host_address, metrics })
        });
        let daemons = daemons.collect();
        // It is known: the daemons of other hosts needed it.
        if let Some(coordinator) = self.coordinator {
            self.commands.push(Command::Serving { coordinator, daemons });
        }
        self.phase = Phase::Running;
        self.ranks_ran = true;
        for node in 0..self.hosts.len() {
            let here = &self.plan.nodes[node];
            for rank in here.first_rank..here.first_rank + here.ranks {
                let environment = self.plan.rank_variables(node, rank, &places);
                self.start(node, Role::Rank(rank), environment);
            }
        }
    }
}

#[cfg(test)]
mod tests;
