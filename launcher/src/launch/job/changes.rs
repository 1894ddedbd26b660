//! Hosts and processes that come to an elastic job and leave it while it runs.

use std::time::Duration;

use gradwire_services::launch::{Notice, Order, ProcessEnd, Role};

use super::{
    Host, Job, Phase,
    events::{Answer, Command},
};
use crate::launch::{
    hosts,
    membership::{Change, Request},
};

impl Job {
    /// Starts processes, gives up hosts that do not answer, and announces changes.
    pub(super) fn tend(&mut self, now: Duration) {
        if !self.may_change() {
            return;
        }
        let Some(epochs) = &mut self.epochs else { return };
        for (agent, host) in epochs.members.silent(now) {
            self.hosts[agent].stopped = true;
            self.say(format!("host {host} does not answer; it is tried again later"));
            self.order(agent, Order::Stop { grace_ms: 0, why: "it answered too late".to_owned() });
        }
        self.end_overdue(now);
        let next_agent = self.hosts.len();
        let requests = self.epochs.as_mut().map(|it| it.members.fill(next_agent, now));
        for request in requests.unwrap_or_default() {
            match request {
                Request::Reach { agent, host } => {
                    self.hosts.push(Host { name: host.name.clone(), ..Default::default() });
                    self.commands.push(Command::Reach { agent, host: host.name });
                }
                Request::Start { agent, worker } => {
                    let host = self.host(agent).to_owned();
                    let environment = self.plan.newcomer_variables(agent, &host, worker);
                    self.start(agent, Role::Rank(worker), environment);
                }
            }
        }
        self.announce(now);
    }

    /// Ends newcomers that hang before they join.
    fn end_overdue(&mut self, now: Duration) {
        let Some(epochs) = &self.epochs else { return };
        let limit = epochs.members.rules().timeout.as_secs_f64();
        let mut overdue = epochs.members.overdue(now);
        overdue.retain(|one| self.process_of(*one).is_none_or(|process| !process.killed));
        for (agent, worker) in overdue {
            let host = self.host(agent);
            self.say(format!(
                "rank {worker} on host {host} has not called init() within {limit:.0} s \
                 (--elastic-timeout), and is ended"
            ));
            self.kill((agent, Role::Rank(worker)));
        }
    }

    /// Tells the daemons of a running epoch of a change. Their ranks leave at their next commit.
    fn announce(&mut self, now: Duration) {
        let Some(epochs) = &mut self.epochs else { return };
        let Change { added, removed } = epochs.members.pending(now);
        let is_news = (added && !epochs.announced.added) || (removed && !epochs.announced.removed);
        if self.phase != Phase::Running || !is_news {
            return;
        }
        epochs.announced = Change { added, removed };
        let agents: Vec<_> = self.plan.nodes.iter().map(|node| node.agent).collect();
        for agent in agents {
            self.order(agent, Order::Notify { notice: Notice::Changed { added, removed } });
        }
    }

    /// An agent has answered. Returns whether its host is used.
    pub(super) fn agent_answered(&mut self, agent: usize, now: Duration) -> bool {
        self.epochs.as_mut().is_none_or(|epochs| epochs.members.answered(agent, now))
    }

    /// A host that was to join the job can't be used. Returns false if the job is still starting.
    pub(super) fn host_refused(&mut self, agent: usize, what: &str, now: Duration) -> bool {
        let Some(epochs) = self.epochs.as_mut().filter(|_| self.ranks_ran) else { return false };
        let again = epochs.members.agent_ended(agent, now);
        self.say(format!("{what}{}", later("it", again)));
        true
    }

    /// A training process can't be started. Returns false if the job is still starting.
    pub(super) fn not_started(&mut self, worker: u32, what: &str, now: Duration) -> bool {
        let Some(epochs) = self.epochs.as_mut().filter(|_| self.ranks_ran) else { return false };
        if epochs.members.is_survivor(worker) {
            return false;
        }
        let again = epochs.members.ended(worker, true, now);
        self.say(format!("{what}{}", later("its slot", again)));
        true
    }

    /// A training process of an elastic job has ended. If it did not end well, true means that this
    /// is a failure of the epoch.
    pub(super) fn worker_ended(
        &mut self,
        agent: usize,
        worker: u32,
        end: ProcessEnd,
        now: Duration,
    ) -> bool {
        let host = self.host(agent).to_owned();
        let is_member = self.plan.members().any(|(_, member)| member == worker);
        let in_epoch = matches!(self.phase, Phase::Running | Phase::Gathering);
        let is_over = self.is_stopping() || self.phase == Phase::Leaving;
        let Some(epochs) = &mut self.epochs else { return true };
        let leaves = epochs.members.is_leaving(worker);
        // If its host left before, the worker was counted then.
        let is_news = epochs.members.has(worker);
        let again = epochs.members.ended(worker, !end.is_well() || !is_member, now);
        if !is_member {
            if is_news && !leaves && !is_over {
                self.say(format!(
                    "rank {worker} on host {host} {end} before it joined the job{}",
                    later("its slot", again)
                ));
            }
            return false;
        }
        if leaves && !in_epoch {
            return false;
        }
        if end.is_well() {
            epochs.finished.get_or_insert(worker);
        }
        epochs.lost += u32::from(is_news && !end.is_well() && !is_over);
        true
    }

    /// Lets the ranks of a host leave at their next commit.
    pub(super) fn drain(&mut self, host: &str) -> Answer {
        let Some(epochs) = self.epochs.as_mut().filter(|_| self.ranks_ran) else {
            return Err("the job is still starting".to_owned());
        };
        epochs.members.drain(host)?;
        let text = format!("the ranks of host {host} leave at their next commit");
        self.say(text.clone());
        Ok(text)
    }

    /// A training process was asked to leave (SIGTERM). A member leaves at the next commit; between
    /// two epochs nobody needs it any more.
    pub(super) fn leaving(&mut self, agent: usize, worker: u32) {
        if self.phase == Phase::Asked {
            // The rank has taken the signal as a request to this rank alone. A second one ends it.
            return self.order(agent, Order::End { role: Role::Rank(worker) });
        }
        if self.is_stopping() {
            return;
        }
        let ends = matches!(self.phase, Phase::Ending | Phase::Assembling | Phase::Finishing);
        let host = self.host(agent).to_owned();
        let Some(epochs) = &mut self.epochs else { return };
        let is_member = epochs.members.is_survivor(worker);
        epochs.members.leave(worker);
        if !is_member || ends {
            self.order(agent, Order::End { role: Role::Rank(worker) });
        }
        if is_member {
            self.say(format!(
                "rank {worker} on host {host} was asked to end (SIGTERM), and leaves at the next \
                 commit"
            ));
        }
    }

    /// Takes a new list of hosts from the discovery script, or the reason why there is none.
    pub(super) fn listed(&mut self, list: Result<Vec<hosts::Host>, String>) {
        let Some(epochs) = &mut self.epochs else { return };
        match list {
            Ok(hosts) => {
                let before = epochs.members.survivors();
                epochs.members.list(&hosts);
                if before > 0 && epochs.members.survivors() == 0 {
                    self.say(
                        "the list of hosts has none of the hosts whose ranks have the state of \
                         the job: they leave at their next commit, and the job ends"
                            .to_owned(),
                    );
                }
            }
            Err(what) => self.say(format!("{what}; the last good list of hosts stays")),
        }
    }
}

/// When something that is quarantined is used again.
fn later(what: &str, again: Option<Duration>) -> String {
    let seconds = again.map(|again| again.as_secs_f64());
    seconds.map(|seconds| format!("; {what} is used again in {seconds:.0} s")).unwrap_or_default()
}
