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
//! A user who interrupts a running job (`Asked`) gives its ranks the grace period, in which they
//! may write a checkpoint together. So their daemons are stopped after them.
//!
//! The launcher does not act on a failure at once. For a moment (`Gathering`) it gathers others, so
//! that the earliest failure decides and not the one reported first. It also waits for a daemon's
//! report of the cause, which may be late on a busy machine, and for the end of the process at
//! fault. Then the other ranks, which get the cause from their daemons, get time to report it.
//!
//! In an elastic job, most failures end only an epoch: `epochs` shows the phases after them.
//!
//! - [`events`]: what comes in and what goes out
//! - `starting`: starting processes
//! - `epochs`: from one epoch of an elastic job to the next
//! - `epoch_ends`: how such an epoch ends
//! - `epoch_state`: what is known about the epochs
//! - `changes`: hosts and processes that come and leave meanwhile
//! - `ending`: why the job ends, and stopping it

mod changes;
mod ending;
mod epoch_ends;
mod epoch_state;
mod epochs;
pub mod events;
mod starting;

use std::{collections::BTreeMap, net::IpAddr, net::SocketAddr, time::Duration};

use gradwire_proto::{Failure, FailureKind};
use gradwire_services::launch::{Order, ProcessEnd, Role, ServiceReport, from_line, signal_name};
use rustix::process::Signal;

use self::{
    epoch_state::Epochs,
    events::{Command, Event, Limits, Request},
};
use super::{
    plan::Plan,
    report::{Cause, JobReport},
};
use crate::signals::passed;

/// How long services may take to end by themselves once all ranks have succeeded.
const LEAVE: Duration = Duration::from_millis(300);

/// How long ranks may take to report a failure before they are asked to end.
const REPORTING: Duration = Duration::from_secs(1);

/// How long an agent's report that its daemon is stopped counts. It is repeated every second.
const STOPPED: Duration = Duration::from_secs(4);

/// How much longer than the grace period an agent may take to report that all has ended.
const SLACK: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Reaching,
    /// The daemon of the first node, which hosts the coordinator.
    First,
    Daemons,
    Running,
    Leaving,
    Gathering,
    /// The daemons of an epoch end.
    Ending,
    /// The members of the next epoch are looked for.
    Assembling,
    /// A rank has succeeded between two epochs, and the others are to end, too.
    Finishing,
    /// The user ends the job: all ranks have been asked to end.
    Asked,
    Stopping,
    Done,
}

#[derive(Debug, Default)]
struct Host {
    /// As the user gave it.
    name: String,
    address: Option<IpAddr>,
    port: u16,
    answered: bool,
    metrics: Option<SocketAddr>,
    stopped: bool,
    /// Its daemon is stopped by a signal.
    daemon_stopped: Option<StoppedDaemon>,
}

/// What an agent reports about its daemon as long as the daemon is stopped.
#[derive(Debug, Clone, Copy)]
struct StoppedDaemon {
    pid: u32,
    /// Since when.
    at: Duration,
    /// When it was reported last.
    said: Duration,
}

#[derive(Debug, Default)]
struct Process {
    started: Option<Duration>,
    /// It should have ended, and was killed because it did not.
    killed: bool,
    /// A daemon: it was killed because no further epoch forms. Its end may be seen after that of
    /// the job.
    dismissed: bool,
    /// A rank: the failure, which another process has caused, because of which it ends.
    received: Option<Failure>,
    /// A rank: how many more jobs it has formed, or begun to form, with all ranks.
    formed: u32,
    ended: Option<ProcessEnd>,
}

/// What the launcher knows about one job, and its decisions.
#[derive(Debug)]
pub struct Job {
    plan: Plan,
    limits: Limits,
    phase: Phase,
    deadline: Option<Duration>,
    /// The time of the last event.
    now: Duration,
    /// By the number of their agents.
    hosts: Vec<Host>,
    /// What changes in an elastic job.
    epochs: Option<Epochs>,
    /// Where the coordinator serves, once it does.
    coordinator: Option<SocketAddr>,
    /// The key has the agent, because each host has a daemon.
    processes: BTreeMap<(usize, Role), Process>,
    causes: Vec<Cause>,
    /// The host that reported why the job failed, and its report: the host of the coordinator or,
    /// without that, the first host that did. The job has failed, even if all ranks succeed.
    failure: Option<(usize, Failure)>,
    /// When the first daemon reported a failure. The daemons notify the ranks at the same time.
    notified: Option<Duration>,
    /// The daemons have been given more time to report the cause.
    patient: bool,
    /// The process at fault has been given time to end by itself.
    awaited: bool,
    /// The ranks have been given time to report the failure.
    reporting: bool,
    ranks_ran: bool,
    /// Whether other ranks ran when the first cause was known, so that they were stopped.
    others_ran: bool,
    /// The user wants the job to end now, without waiting for a reader of its output.
    hurried: bool,
    commands: Vec<Command>,
}

impl Job {
    /// A job whose hosts are being reached.
    pub fn new(plan: Plan, limits: Limits) -> Self {
        let host = |name: &String| Host { name: name.clone(), ..Host::default() };
        let hosts = plan.nodes.iter().map(|node| host(&node.host)).collect();
        let epochs = plan.elastic.clone().map(|elastic| Epochs::new(elastic, &plan.nodes));
        Self {
            plan,
            limits,
            phase: Phase::Reaching,
            deadline: Some(limits.start),
            now: Duration::ZERO,
            hosts,
            epochs,
            coordinator: None,
            processes: BTreeMap::new(),
            causes: Vec::new(),
            failure: None,
            notified: None,
            patient: false,
            awaited: false,
            reporting: false,
            ranks_ran: false,
            others_ran: false,
            hurried: false,
            commands: Vec::new(),
        }
    }

    /// When [`Event::Tick`] is due.
    pub fn deadline(&self) -> Option<Duration> {
        [self.deadline, self.wakeup(), self.stuck_until()].into_iter().flatten().min()
    }

    /// Whether all ranks, or all processes, have been asked to end.
    pub fn is_stopping(&self) -> bool {
        matches!(self.phase, Phase::Asked | Phase::Stopping | Phase::Done)
    }

    /// The report, once all processes of the job have ended.
    pub fn report(&self) -> Option<JobReport> {
        (self.phase == Phase::Done).then(|| {
            let report = JobReport::new(&self.causes, self.failure(), self.others_ran);
            if self.has_no_restart_left() { report.temporary() } else { report }
        })
    }

    fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref().map(|(_, failure)| failure)
    }

    /// Whether the user wants the job to end now, without waiting for a reader of its output.
    pub fn is_hurried(&self) -> bool {
        self.hurried
    }

    /// Takes an event and decides what to do.
    pub fn step(&mut self, event: Event, now: Duration) -> Vec<Command> {
        self.now = now;
        match event {
            Event::Ready { node, address, port } => {
                self.note(format!("host {} is ready at {address}", self.host(node)));
                let host = &mut self.hosts[node];
                (host.address, host.port, host.answered) = (Some(address), port, true);
                if !self.agent_answered(node, now) {
                    let why = "the job no longer needs this host".to_owned();
                    self.order(node, Order::Stop { grace_ms: 0, why });
                }
            }
            Event::Address { node, address } => self.hosts[node].address = Some(address),
            Event::Refused { node, what, hint } => {
                // Its agent ends by itself.
                (self.hosts[node].answered, self.hosts[node].stopped) = (true, true);
                if !self.host_refused(node, &what, now) {
                    self.causes.push(Cause::NotStarted { what, hint });
                }
            }
            Event::Started { node, role, pid, at } => {
                self.processes.entry((node, role)).or_default().started = Some(at);
                self.note(format!("{role} runs on host {} (pid {pid})", self.host(node)));
            }
            Event::Failed { role, node, what } => {
                let failed = self.processes.entry((node, role)).or_default();
                failed.ended = Some(ProcessEnd::Code(1));
                let is_minor = match role {
                    Role::Rank(worker) => self.not_started(worker, &what, now),
                    Role::Daemon => false,
                };
                if !is_minor {
                    self.fail(Cause::NotStarted { what, hint: String::new() }, now);
                }
            }
            Event::Said { node, role, line } => self.said(node, role, &line, now),
            Event::Exited { node, role, pid, end, at, tail } => {
                self.exited(node, role, (pid, end, at), tail, now);
            }
            Event::DaemonStopped { node, pid, at, rank_failed } => {
                self.daemon_stopped(node, (pid, at), rank_failed, now);
            }
            Event::Consequence { node, worker, failure } => {
                let rank = self.processes.entry((node, Role::Rank(worker))).or_default();
                rank.received = Some(failure);
            }
            Event::Forming { node, worker } => {
                self.processes.entry((node, Role::Rank(worker))).or_default().formed += 1;
                self.find_absent(now);
            }
            Event::Waiting { worker, .. } => self.waiting(worker, now),
            Event::Leaving { node, worker } => self.leaving(node, worker),
            Event::Listed(list) => self.listed(list),
            Event::Asked { node, what, at } => self.asked(node, what, at, now),
            Event::Requested(Request::Drain { host }) => {
                let answer = self.drain(&host);
                self.commands.push(Command::Answer(answer));
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
        self.tend(now);
        self.end_stuck(now);
        std::mem::take(&mut self.commands)
    }

    fn host(&self, agent: usize) -> &str {
        &self.hosts[agent].name
    }

    /// The agent beside the daemon that hosts the coordinator.
    fn first(&self) -> usize {
        self.plan.nodes[0].agent
    }

    fn note(&mut self, text: String) {
        self.commands.push(Command::Note(text));
    }

    /// A line that the user sees in any case.
    fn say(&mut self, text: String) {
        self.commands.push(Command::Say(text));
    }

    fn order(&mut self, node: usize, order: Order) {
        self.commands.push(Command::Order { node, order });
    }

    /// Kills a process that should have ended by now.
    fn kill(&mut self, (agent, role): (usize, Role)) {
        self.processes.entry((agent, role)).or_default().killed = true;
        self.order(agent, Order::Kill { role });
    }

    fn is_starting(&self) -> bool {
        !self.ranks_ran && matches!(self.phase, Phase::Reaching | Phase::First | Phase::Daemons)
    }

    fn said(&mut self, node: usize, role: Role, line: &str, now: Duration) {
        let (metrics, grpc) = match from_line(line) {
            Ok(ServiceReport::Serving { metrics, grpc, .. }) => (metrics, grpc),
            Ok(ServiceReport::Failed { failure }) => {
                let failure = if self.epochs.is_some() { self.by_worker(failure) } else { failure };
                let first = self.first();
                // The host of the coordinator knows best, unless it only reports that it is being
                // stopped.
                let stops = self.is_stopping();
                let knows = match &self.failure {
                    // A job that has succeeded can't fail because its daemons are stopped. And a
                    // daemon that only reports our order repeats a cause that is known here.
                    None => !stops || (!self.causes.is_empty() && !is_order(&failure)),
                    Some((from, _)) => node == first && *from != first && !stops,
                };
                let is_first = self.failure.is_none();
                self.notified.get_or_insert(now);
                if knows {
                    self.failure = Some((node, failure));
                }
                match self.phase {
                    // Perhaps no process ends, as a daemon serves ranks that may join late (WAIT).
                    Phase::Running if is_first => {
                        let limit = now + self.limits.grace + self.limits.gather;
                        self.deadline = Some(self.deadline.map_or(limit, |at| at.min(limit)));
                    }
                    Phase::Leaving => self.deadline = Some(now + self.limits.grace),
                    // Other daemons report the failure soon, too.
                    Phase::Gathering if self.patient && is_first => {
                        self.deadline = Some(now + self.limits.gather);
                    }
                    _ => {}
                }
                return self.blame_missed_daemon(now);
            }
            Ok(ServiceReport::Warned { what }) => {
                self.say(what);
                return;
            }
            Err(_) => {
                self.note(format!("{role} on host {}: {line}", self.host(node)));
                return;
            }
        };
        self.note(format!("{role} serves on host {}: {line}", self.host(node)));
        match (role, node == self.first(), grpc) {
            (Role::Daemon, true, Some(grpc)) => {
                self.coordinator = Some(grpc);
                self.hosts[node].metrics = Some(metrics);
            }
            (Role::Daemon, false, _) => self.hosts[node].metrics = Some(metrics),
            _ => {
                let what = format!("{role} on host {} reported: {line}", self.host(node));
                self.fail(Cause::NotStarted { what, hint: String::new() }, now);
            }
        }
    }

    /// Passes a signal on to the ranks. A job that is being stopped has no use for it.
    fn pass_on(&mut self, signal: i32) {
        if self.is_stopping() {
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

    fn tick(&mut self, now: Duration) {
        if self.deadline.is_none_or(|deadline| now < deadline) {
            return;
        }
        let phase = self.phase;
        match phase {
            Phase::Gathering if !self.patient && self.report_may_come() => {
                self.patient = true;
                self.deadline = Some(now + self.limits.report);
            }
            Phase::Gathering if self.have_all_left() => self.finish_without(),
            Phase::Gathering if self.may_continue() => self.end_epoch(now),
            // The process at fault may still be ending, and how it ends is the cause (TELL).
            Phase::Gathering if !self.awaited && self.blamed_runs() => {
                self.awaited = true;
                self.deadline = Some(now + self.limits.grace);
            }
            Phase::Gathering if self.reports_until().is_some_and(|until| now < until) => {
                self.reporting = true;
                self.deadline = self.reports_until();
            }
            Phase::Gathering | Phase::Leaving => self.stop(self.limits.grace, now),
            Phase::Asked => self.stop(Duration::ZERO, now),
            Phase::Running if self.failure.is_some() => {
                self.phase = Phase::Gathering;
                self.tick(now);
            }
            Phase::Stopping => self.phase = Phase::Done,
            Phase::Done => {}
            Phase::Ending => self.force_end(now),
            Phase::Assembling | Phase::Finishing => self.late(now),
            Phase::First | Phase::Daemons if self.ranks_ran => self.late(now),
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

    fn process_of(&self, (agent, worker): (usize, u32)) -> Option<&Process> {
        self.processes.get(&(agent, Role::Rank(worker)))
    }

    fn has_started(&self, member: (usize, u32)) -> bool {
        self.process_of(member).is_some_and(|p| p.started.is_some() || p.ended.is_some())
    }

    fn has_ended(&self, member: (usize, u32)) -> bool {
        self.process_of(member).is_some_and(|process| process.ended.is_some())
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
            Phase::First | Phase::Daemons if self.finishes() => self.finish(now),
            Phase::First if self.coordinator.is_some() => {
                self.start_daemons();
                self.advance(now);
            }
            Phase::Daemons if self.all_serve() => {
                if self.ranks_ran {
                    self.run_again(now);
                } else {
                    self.start_ranks();
                }
            }
            Phase::Running => {
                let all_started = self.plan.members().all(|member| self.has_started(member));
                if all_started && self.failure.is_none() {
                    self.deadline = None;
                }
                if self.plan.members().all(|member| self.has_ended(member)) {
                    self.leave(now);
                }
            }
            Phase::Ending if self.has_epoch_ended() => self.assemble(now),
            Phase::Assembling => {
                // A process that is started now may become a member.
                self.tend(now);
                self.form_if_enough(now);
            }
            Phase::Finishing if self.has_finished() => self.leave(now),
            Phase::Finishing if self.waits_in_vain() => self.late(now),
            Phase::Leaving if self.processes.values().all(|process| process.ended.is_some()) => {
                self.stop(self.limits.grace, now);
                self.advance(now);
            }
            Phase::Asked if !self.ranks_run() => {
                let left = self.deadline.unwrap_or(now).saturating_sub(now);
                self.stop(left, now);
                self.advance(now);
            }
            Phase::Stopping if self.hosts.iter().all(|host| host.stopped) => {
                self.phase = Phase::Done;
            }
            _ => {}
        }
    }

    fn all_serve(&self) -> bool {
        self.plan.nodes.iter().all(|node| self.hosts[node.agent].metrics.is_some())
    }

    /// All ranks have ended: the daemons follow.
    fn leave(&mut self, now: Duration) {
        self.count_lost();
        self.phase = Phase::Leaving;
        let limit = if self.failure.is_some() { self.limits.grace } else { LEAVE };
        self.deadline = Some(now + limit);
        self.advance(now);
    }
}

/// Whether a daemon reports only that it was asked to end, and not what a rank did.
fn is_order(failure: &Failure) -> bool {
    failure.kind == FailureKind::Cancelled && failure.rank.is_none()
}

#[cfg(test)]
mod tests;
