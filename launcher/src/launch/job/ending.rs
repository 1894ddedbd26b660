//! Why a job ends, and the order to end it: gathers the causes that the launcher sees itself and
//! those that the daemons report, and stops all hosts once the first cause is known.

use std::time::Duration;

use gradwire_proto::{Failure, FailureKind};
use gradwire_services::launch::{Notice, Order, ProcessEnd, Role};
use rustix::process::Signal;

use super::{Job, Phase, Process, REPORTING, SLACK, STOPPED, StoppedDaemon, events::Command};
use crate::launch::report::{self, Cause, TOGETHER};

impl Job {
    /// Keeps a cause; the first one ends the job.
    pub(super) fn fail(&mut self, cause: Cause, now: Duration) {
        if self.is_stopping() {
            if self.is_last_word(&cause) {
                self.causes.push(cause);
            }
            return;
        }
        let is_loss =
            matches!(cause, Cause::Ended { .. } | Cause::Lost { .. } | Cause::Asked { .. });
        if self.causes.is_empty() {
            let others_run = self.plan.members().any(|member| !self.has_ended(member));
            self.others_ran = self.ranks_ran && self.plan.size() > 1 && others_run;
        }
        self.causes.push(cause);
        match self.phase {
            Phase::Gathering => {}
            // The epoch ends already.
            Phase::Ending if is_loss => self.hasten(now),
            Phase::Assembling if is_loss => {}
            Phase::Finishing if is_loss && self.have_all_left() => {}
            phase => {
                // The daemons of an epoch that still forms do not report a failure.
                self.patient |= self.ranks_ran && matches!(phase, Phase::First | Phase::Daemons);
                self.phase = Phase::Gathering;
                self.deadline = Some(now + self.limits.gather);
            }
        }
    }

    /// Whether a rank that has said that it is ending has now ended by itself. It took longer than
    /// the launcher waits, but its exit code is still that of the job (TELL).
    fn is_last_word(&self, cause: &Cause) -> bool {
        let Some(failure) = self.known_failure().filter(|failure| failure.details.gave_up) else {
            return false;
        };
        let Cause::Ended { role, host, end: ProcessEnd::Code(_), .. } = cause else { return false };
        matches!(role, Role::Rank(_)) && report::blames(failure, *role, host)
    }

    /// The failure that the daemons have reported. The daemons of a further job belong to the
    /// ranks, and report nothing here: then it is the failure that ended a rank. Elastic jobs form
    /// no further jobs, and a failure that their ranks receive has the numbers of its epoch.
    fn known_failure(&self) -> Option<&Failure> {
        let of_a_rank = self.causes.iter().find_map(|cause| match cause {
            Cause::Ended { received: Some(failure), .. } => Some(&**failure),
            _ => None,
        });
        self.failure().or(of_a_rank.filter(|_| self.epochs.is_none()))
    }

    /// Whether the daemons blame this process.
    pub(super) fn blames(&self, node: usize, role: Role) -> bool {
        self.known_failure().is_some_and(|failure| report::blames(failure, role, self.host(node)))
    }

    /// Whether the process that the daemons blame still runs.
    pub(super) fn blamed_runs(&self) -> bool {
        let mut running = self.processes.iter().filter(|(_, process)| process.ended.is_none());
        running.any(|((node, role), _)| self.blames(*node, *role))
    }

    /// Until when the ranks may report the failure; `None` if none runs any more.
    pub(super) fn reports_until(&self) -> Option<Duration> {
        self.notified.filter(|_| self.ranks_run()).map(|since| since + REPORTING)
    }

    /// The ranks that have not ended.
    fn running_ranks(&self) -> impl Iterator<Item = (usize, Role)> {
        let running = self.processes.iter().filter(|((node, role), process)| {
            let is_rank = matches!(role, Role::Rank(_));
            is_rank && process.ended.is_none() && !self.hosts[*node].stopped
        });
        running.map(|(process, _)| *process)
    }

    /// Whether a rank has not ended.
    pub(super) fn ranks_run(&self) -> bool {
        self.running_ranks().next().is_some()
    }

    /// Whether a running daemon may yet report why the job failed.
    pub(super) fn report_may_come(&self) -> bool {
        self.ranks_ran && self.failure.is_none() && self.daemon_runs()
    }

    /// Tells the other daemons that the one of this host has ended, so that they do not wait for
    /// its connections. Once the cause is known, all of them end anyway.
    fn announce_end(&mut self, agent: usize, why: String) {
        let is_over = matches!(
            self.phase,
            Phase::Ending | Phase::Assembling | Phase::Finishing | Phase::Stopping | Phase::Done
        );
        let Some(node) = self.plan.nodes.iter().position(|node| node.agent == agent) else {
            return;
        };
        if is_over || self.failure.is_some() {
            return;
        }
        let others = self.plan.nodes.iter().map(|node| node.agent).filter(|other| *other != agent);
        let others: Vec<_> = others.filter(|other| !self.hosts[*other].stopped).collect();
        for other in others {
            let notice = Notice::DaemonEnded { node: node as u32, why: why.clone() };
            self.order(other, Order::Notify { notice });
        }
    }

    pub(super) fn exited(
        &mut self,
        node: usize,
        role: Role,
        (pid, mut end, at): (u32, ProcessEnd, Duration),
        tail: Vec<String>,
        now: Duration,
    ) {
        let host = self.host(node).to_owned();
        let process = self.processes.entry((node, role)).or_default();
        if process.killed && end == ProcessEnd::Signal(Signal::KILL.as_raw()) {
            end = ProcessEnd::Unresponsive;
        }
        process.ended = Some(end);
        let (dismissed, received) = (process.dismissed, process.received.clone().map(Box::new));
        let ran = at.saturating_sub(process.started.unwrap_or(at));
        self.note(format!("{role} on host {host} (pid {pid}) {end}"));
        if role == Role::Daemon && !end.is_well() {
            self.announce_end(node, format!("its process {end}"));
        }
        let is_failure = match role {
            Role::Rank(worker) => self.worker_ended(node, worker, end, now),
            Role::Daemon => {
                if end.is_well() {
                    self.daemon_left(now);
                }
                // No further epoch forms, so its daemons were killed.
                !dismissed && self.phase != Phase::Finishing
            }
        };
        if end.is_well() && matches!(role, Role::Rank(_)) {
            self.find_absent(now);
        }
        // A service may end once all ranks have left, even before they end. While the job starts,
        // any end of a service is a failure.
        if !matches!(role, Role::Rank(_)) && self.is_starting() {
            let why = tail.last().map(|line| format!(": {line}")).unwrap_or_default();
            let what = format!("{role} on host {host} (pid {pid}) {end} before the job began{why}");
            let hint = "run again with --verbose to see all its output".to_owned();
            self.fail(Cause::NotStarted { what, hint }, now);
        } else if !end.is_well() && is_failure {
            let cause = Cause::Ended { role, host, pid, end, at, ran, received, tail };
            self.fail(cause, now);
        }
        if self.phase == Phase::Gathering {
            let all_reported = self.reporting && self.reports_until().is_none();
            if self.awaited && self.blames(node, role) || all_reported {
                self.deadline = Some(now);
                self.tick(now);
            } else if self.epochs.is_some() && !self.daemon_runs() {
                // Nothing more can be reported, and the next epoch need not wait.
                self.deadline = self.deadline.min(Some(now + TOGETHER));
            } else if self.patient && !self.awaited && !self.report_may_come() {
                // The last daemon has ended. The ends of other processes follow at once.
                self.deadline = self.deadline.min(Some(now + self.limits.gather));
            }
        }
    }

    /// Fails if a rank has ended well while another one forms a further job with all ranks. Without
    /// this, the other rank would wait until its start time limit, and name itself (TELL).
    pub(super) fn find_absent(&mut self, now: Duration) {
        if self.phase != Phase::Running || self.epochs.is_some() {
            return;
        }
        let ranks = self.processes.iter().filter(|((_, role), _)| matches!(role, Role::Rank(_)));
        let ended = ranks.clone().filter(|(_, rank)| rank.ended.is_some());
        let Some(((node, role), absent)) = ended.min_by_key(|(_, rank)| rank.formed) else {
            return;
        };
        let waits = |rank: &Process| rank.ended.is_none() && rank.formed > absent.formed;
        let waiting: Vec<Role> =
            ranks.filter(|(_, rank)| waits(rank)).map(|((_, role), _)| *role).collect();
        if waiting.is_empty() {
            return;
        }
        let host = self.host(*node).to_owned();
        let cause = Cause::Absent { role: *role, host, waiting, at: now };
        self.fail(cause, now);
    }

    /// An agent reports that a signal has stopped its daemon; `rank_failed`: and that a rank there
    /// has failed. In an elastic job, ranks wait for the next epoch, and the daemon is killed.
    pub(super) fn daemon_stopped(
        &mut self,
        node: usize,
        (pid, at): (u32, Duration),
        rank_failed: bool,
        now: Duration,
    ) {
        let known = self.hosts[node].daemon_stopped;
        let known = known.filter(|known| known.pid == pid && now <= known.said + STOPPED);
        let at = known.map_or(at, |known| known.at);
        self.hosts[node].daemon_stopped = Some(StoppedDaemon { pid, at, said: now });
        // On one host, nobody misses the daemon while all ranks are idle.
        let is_long = self.phase == Phase::Running && now >= at + self.limits.silence;
        if is_long || rank_failed && self.epochs.is_none() {
            self.blame_daemon(node, now);
        } else {
            self.blame_missed_daemon(now);
        }
    }

    /// Blames a stopped daemon whose signs of life others miss: it can't say so itself (TELL).
    pub(super) fn blame_missed_daemon(&mut self, now: Duration) {
        let is_over = !matches!(self.phase, Phase::Running | Phase::Gathering);
        if let Some(node) = (0..self.hosts.len()).find(|node| self.is_missed(*node))
            && !(is_over && self.epochs.is_some())
        {
            self.blame_daemon(node, now);
        }
    }

    /// Makes the daemon of a host the cause, if it was stopped just now. Returns whether it was.
    pub(super) fn blame_daemon(&mut self, node: usize, now: Duration) -> bool {
        let is_known = self.causes.iter().any(|cause| matches!(cause, Cause::DaemonStopped { .. }));
        let stopped = self.hosts[node].daemon_stopped;
        let stopped = stopped.filter(|stopped| !is_known && now <= stopped.said + STOPPED);
        if let Some(StoppedDaemon { pid, at, .. }) = stopped {
            let host = self.host(node).to_owned();
            self.fail(Cause::DaemonStopped { host, pid, at }, now);
            return true;
        }
        false
    }

    /// Whether the daemons miss the signs of life of this host's daemon.
    pub(super) fn is_missed(&self, agent: usize) -> bool {
        self.failure().is_some_and(|failure| match failure.kind {
            FailureKind::NodeLost => self.host(agent) == failure.host,
            FailureKind::CoordinatorLost => agent == self.first(),
            _ => false,
        })
    }

    pub(super) fn lost(&mut self, node: usize, what: String, at: Duration, now: Duration) {
        let host = self.host(node).to_owned();
        let stopped = std::mem::replace(&mut self.hosts[node].stopped, true);
        let is_node = self.is_node(node);
        if !self.hosts[node].answered {
            self.hosts[node].answered = true;
            if !self.host_refused(node, &what, now) {
                self.causes.push(Cause::NotStarted { what, hint: String::new() });
            }
        } else if !stopped {
            self.announce_end(node, format!("the launcher lost the connection to it: {what}"));
            self.agent_lost(node, now);
            let cause = Cause::Lost { host, what, at };
            if is_node || self.epochs.is_none() {
                self.fail(cause, now);
            } else {
                self.say(cause.headline());
            }
        }
    }

    /// The agent of a host was asked to end, so all processes there end. If all ranks have ended,
    /// nothing is lost. While an elastic job starts, the ends of its processes count.
    pub(super) fn asked(&mut self, node: usize, what: String, at: Duration, now: Duration) {
        let cause = Cause::Asked { host: self.host(node).to_owned(), what, at };
        if self.phase == Phase::Leaving || self.epochs.is_some() && !self.ranks_ran {
            return;
        }
        if self.leaves_with_host(node, now) {
            self.fail(cause, now);
        } else {
            self.say(cause.headline());
        }
    }

    pub(super) fn interrupted(&mut self, signal: i32, now: Duration) {
        match self.phase {
            Phase::Done => {}
            // The second interrupt ends the grace period.
            Phase::Asked | Phase::Stopping => {
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
                if self.phase == Phase::Running && self.failure.is_none() {
                    self.ask_ranks(now);
                } else {
                    self.stop(self.limits.grace, now);
                }
            }
        }
    }

    /// Asks all ranks of a running job to end. Their daemons serve them meanwhile.
    fn ask_ranks(&mut self, now: Duration) {
        self.phase = Phase::Asked;
        self.deadline = Some(now + self.limits.grace);
        let why = self.why_it_ends();
        // The daemons know it before they see the effects.
        for (node, host) in self.hosts.iter().enumerate().filter(|(_, host)| !host.stopped) {
            if host.answered {
                let notice = Notice::Ending { why: why.clone() };
                self.commands.push(Command::Order { node, order: Order::Notify { notice } });
            }
        }
        for (node, role) in self.running_ranks().collect::<Vec<_>>() {
            self.order(node, Order::End { role });
        }
    }

    fn why_it_ends(&self) -> String {
        let cause = report::summary(&self.causes, self.failure()).map(|cause| format!(": {cause}"));
        format!("the launcher ends the job{}", cause.unwrap_or_default())
    }

    pub(super) fn stop(&mut self, grace: Duration, now: Duration) {
        self.phase = Phase::Stopping;
        self.deadline = Some(now + grace + SLACK);
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        let why = self.why_it_ends();
        for node in 0..self.hosts.len() {
            // On a host that has not answered, nothing was started. If its agent starts yet, it
            // finds its standard input closed.
            self.hosts[node].stopped |= !self.hosts[node].answered;
            if !self.hosts[node].stopped {
                self.order(node, Order::Stop { grace_ms, why: why.clone() });
            }
        }
    }
}
