//! What goes wrong in a run, at random times.

use gradwire_launcher::launch::{
    hosts::Host,
    job::events::{Event as Launched, Request},
};
use gradwire_services::launch::{ProcessEnd, Role};

use crate::{
    agents::AgentIn,
    world::{Dice, Pid, Time, What, World},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    KillWorker,
    WorkerFails,
    KillDaemon,
    /// The daemon of the coordinator.
    KillFirst,
    /// The connection of an agent is cut; it ends its processes when it notices.
    CutAgent,
    /// The same, and then the host can't reach that of the coordinator any more.
    Isolate,
    IsIsolated(usize, usize),
    CrashHost,
    HostReturns(usize),
    FreezeWorker,
    FreezeDaemon,
    FreezeHost,
    /// Data connections break, once or several times.
    BreakData,
    /// The streams of nodes break, once or several times.
    BreakStream,
    Partition,
    /// A host leaves.
    Drain,
    /// The list of hosts changes.
    List,
}

use Fault as F;

const ALL: &[Fault] = &[
    F::KillWorker,
    F::KillWorker,
    F::WorkerFails,
    F::KillDaemon,
    F::KillFirst,
    F::CutAgent,
    F::Isolate,
    F::CrashHost,
    F::FreezeWorker,
    F::FreezeDaemon,
    F::FreezeHost,
    F::BreakData,
    F::BreakData,
    F::BreakData,
    F::BreakStream,
    F::BreakStream,
    F::BreakStream,
    F::Partition,
    F::Partition,
    F::Drain,
    F::List,
];

/// Whether these faults only break connections, which return.
pub(crate) fn only_break(faults: &[(Time, Fault)]) -> bool {
    faults.iter().all(|(_, fault)| matches!(fault, F::BreakData | F::BreakStream))
}

/// The faults of a run, with their times. Some come close together: the next epoch forms then.
pub(crate) fn plan(dice: &mut Dice) -> Vec<(Time, Fault)> {
    let mut faults = Vec::new();
    for _ in 0..dice.below(5) {
        let mut at = dice.time(100, 6000);
        loop {
            faults.extend(dice.pick(ALL).map(|fault| (at, fault)));
            if dice.one_in(2) {
                break;
            }
            at += dice.time(0, 900);
        }
    }
    faults
}

impl World {
    fn one_of(&mut self, which: impl Fn(Role) -> bool) -> Option<Pid> {
        let alive: Vec<Pid> = (0..self.processes.len())
            .filter(|pid| self.processes[*pid].is_alive && which(self.processes[*pid].role))
            .collect();
        self.dice.pick(&alive)
    }

    fn worker(&mut self) -> Option<Pid> {
        self.one_of(|role| matches!(role, Role::Rank(_)))
    }

    fn host(&mut self) -> usize {
        self.dice.below(self.hosts.len() as u64) as usize
    }

    /// A fault happens.
    pub(crate) fn goes_wrong(&mut self, fault: Fault) {
        self.note(|| format!("fault: {fault:?}"));
        let host = self.host();
        match fault {
            F::KillWorker | F::WorkerFails => {
                let is_kill = fault == F::KillWorker;
                let end = if is_kill { ProcessEnd::Signal(9) } else { ProcessEnd::Code(1) };
                if let Some(pid) = self.worker() {
                    self.end(pid, end, false);
                }
            }
            F::KillDaemon => {
                if let Some(pid) = self.one_of(|role| role == Role::Daemon) {
                    self.end(pid, ProcessEnd::Signal(9), false);
                }
            }
            F::KillFirst => {
                let hosts = self.hosts.iter().filter_map(|host| host.grpc).collect::<Vec<_>>();
                if let Some(pid) = self.dice.pick(&hosts) {
                    self.end(pid, ProcessEnd::Signal(9), false);
                }
            }
            F::CutAgent => self.cut_agent(host, (0, 5000), (0, 5000)),
            F::Isolate => {
                let first = self.hosts.iter().position(|host| host.grpc.is_some());
                if let Some(first) = first.filter(|first| *first != host) {
                    self.cut_agent(host, (0, 300), (5000, 8000));
                    let soon = self.dice.time(800, 2000);
                    self.after(soon, What::Fault(F::IsIsolated(host, first)));
                }
            }
            F::IsIsolated(host, first) => self.partition(host, first, Time::from_secs(6)),
            F::CrashHost => {
                self.cut_agent(host, (100, 3000), (0, 1));
                for pid in 0..self.processes.len() {
                    if self.processes[pid].host == host {
                        self.end(pid, ProcessEnd::Signal(9), true);
                    }
                }
                self.hosts[host].is_up = false;
                let back = self.dice.time(500, 8000);
                self.after(back, What::Fault(F::HostReturns(host)));
            }
            F::HostReturns(host) => self.hosts[host].is_up = true,
            F::FreezeWorker => {
                if let Some(pid) = self.worker() {
                    let time = self.dice.time(50, 8000);
                    self.freeze(pid, time);
                }
            }
            F::FreezeDaemon => {
                if let Some(pid) = self.one_of(|role| role == Role::Daemon) {
                    let time = self.dice.time(50, 8000);
                    self.freeze(pid, time);
                }
            }
            F::FreezeHost => {
                let time = self.dice.time(50, 8000);
                for pid in 0..self.processes.len() {
                    if self.processes[pid].host == host {
                        self.freeze(pid, time);
                    }
                }
            }
            F::BreakData => {
                let open: Vec<u64> =
                    self.conns.iter().filter(|(_, conn)| !conn.is_broken).map(|it| *it.0).collect();
                if let Some(conn) = self.dice.pick(&open) {
                    self.break_conn(conn);
                }
                if !self.dice.one_in(6) {
                    let next = self.dice.time(0, 400);
                    self.after(next, What::Fault(F::BreakData));
                }
            }
            F::BreakStream => {
                let is_open = |ends: &[Pid; 2]| {
                    ends[0] != ends[1] && ends.iter().all(|pid| self.is_alive(*pid))
                };
                let open: Vec<u64> =
                    self.streams.iter().filter(|(_, ends)| is_open(ends)).map(|it| *it.0).collect();
                if let Some(stream) = self.dice.pick(&open) {
                    let notices = [[true; 2], [true, false], [false, true], [false; 2]];
                    let notice = self.dice.pick(&notices).unwrap_or_default();
                    self.break_stream(stream, notice);
                }
                if !self.dice.one_in(4) {
                    let next = self.dice.time(0, 900);
                    self.after(next, What::Fault(F::BreakStream));
                }
            }
            F::Partition => {
                let other = self.host();
                let time = self.dice.time(50, 7000);
                if host != other {
                    self.partition(host, other, time);
                }
            }
            F::Drain => {
                self.check.is_relisted = true;
                let name = self.hosts[host].name.clone();
                let event = Launched::Requested(Request::Drain { host: name });
                self.at(self.now, What::Launcher(Box::new(event)));
            }
            F::List => {
                self.check.is_relisted = true;
                let left_out = self.host();
                let listed = self.hosts.iter().enumerate().filter(|(at, _)| *at != left_out);
                let mut list: Vec<Host> = listed.map(|(_, host)| host.listed()).collect();
                if list.is_empty() || self.dice.one_in(3) {
                    list = self.hosts.iter().map(|host| host.listed()).collect();
                }
                self.at(self.now, What::Launcher(Box::new(Launched::Listed(Ok(list)))));
            }
        }
    }

    /// Cuts the connection of the agent of a host. The launcher and the agent notice it after some
    /// milliseconds.
    fn cut_agent(&mut self, host: usize, lost: (u64, u64), orphaned: (u64, u64)) {
        let alive = self.processes.iter().rev().find(|it| it.is_alive && it.host == host);
        let Some(agent) = alive.map(|process| process.agent) else { return };
        if !self.cut.insert(agent) {
            return;
        }
        let what = "its connection ended".to_owned();
        let noticed = self.now + self.dice.time(lost.0, lost.1);
        let event = Launched::Lost { node: agent, what, at: noticed };
        self.at(noticed, What::Launcher(Box::new(event)));
        let orphaned = self.dice.time(orphaned.0, orphaned.1);
        self.after(orphaned, What::Agent(agent, AgentIn::Orphaned));
    }
}

/// When a job must have ended.
pub(crate) const BOUND: Time = Time::from_secs(150);
