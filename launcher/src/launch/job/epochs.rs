//! The epochs of an elastic job. A loss or a wanted change ends the daemons of an epoch, never the
//! processes that train. The next epoch gets new daemons and consists of the processes that live.
//!
//! ```text
//! Running ─ a loss ─► Gathering ─► Ending ─ all daemons have ended ─► Assembling
//!    ▲  └─ all daemons leave ────────▲                                 │      │
//!    │                                             a rank has succeeded │      │ enough ranks
//!    │                                                                  ▼      ▼
//!    │                                            Leaving ◄───── Finishing   First
//!    └──────────────────── all serve ─────────────────────────── Daemons ◄─────┘
//! ```
//!
//! A daemon of the next epoch starts after the agent has reported the end of the one before, so
//! that two coordinators never exist. The processes that train are not asked: they leave a failed
//! epoch by themselves and attach to the daemon that serves next.

use std::time::Duration;

use gradwire_proto::{Failure, FailureKind, Rank};
use gradwire_services::launch::{Order, Role};

use super::{Job, Phase, Process};
use crate::launch::{
    membership::{Change, Surplus},
    plan::{Node, count},
    report::Cause,
};

/// After its daemons have left, a job may have ended or may go on with a change. If no rank says
/// that it waits, because its standard error goes elsewhere, the job has this time to end.
const LINGER: Duration = Duration::from_secs(30);

/// How long ranks may take to end after the first has succeeded in an epoch that then failed.
const FINISH: Duration = Duration::from_secs(10);

impl Job {
    /// When membership has to be looked at again.
    pub(super) fn wakeup(&self) -> Option<Duration> {
        let epochs = self.epochs.as_ref().filter(|_| self.may_change())?;
        let now = self.now;
        let pause = Some(epochs.not_before).filter(|at| *at > now);
        [pause, epochs.members.wakeup(now)].into_iter().flatten().min()
    }

    /// Whether processes may be started and epochs formed.
    pub(super) fn may_change(&self) -> bool {
        let Some(epochs) = &self.epochs else { return false };
        let forms = matches!(self.phase, Phase::Assembling | Phase::First | Phase::Daemons);
        // If all daemons have left, the ranks are about to end.
        let runs = self.phase == Phase::Running && self.daemon_runs();
        self.ranks_ran && epochs.finished.is_none() && (forms || runs) && self.has_resets()
    }

    /// Whether `--reset-limit` allows another epoch.
    fn has_resets(&self) -> bool {
        let most = self.epochs.as_ref().and_then(|epochs| epochs.members.rules().reset_limit);
        most.is_none_or(|most| self.resets() < most)
    }

    /// How many epochs have followed the first.
    pub(super) fn resets(&self) -> u32 {
        u32::try_from(self.plan.epoch - 1).unwrap_or(u32::MAX)
    }

    pub(super) fn daemon_runs(&self) -> bool {
        self.processes.iter().any(|((agent, role), process)| {
            *role == Role::Daemon && process.ended.is_none() && !self.hosts[*agent].stopped
        })
    }

    /// A failure as the launcher names processes: by worker id, like the prefixes of their output.
    pub(super) fn by_worker(&self, mut failure: Failure) -> Failure {
        let member = |rank: Rank| self.plan.members().nth(usize::try_from(rank.0).ok()?);
        failure.rank =
            failure.rank.map(|rank| member(rank).map_or(rank, |(_, worker)| Rank(worker)));
        failure
    }

    /// A training process waits for an epoch that includes it.
    pub(super) fn waiting(&mut self, worker: u32, now: Duration) {
        let daemon_runs = self.daemon_runs();
        let Some(epochs) = &mut self.epochs else { return };
        epochs.members.waits(worker);
        if epochs.members.is_survivor(worker) {
            epochs.goes_on = true;
            if epochs.is_change {
                epochs.not_before = epochs.not_before.min(epochs.pause.max(now));
            }
            let is_wanted = epochs.finished.is_none();
            if self.phase == Phase::Finishing && is_wanted {
                // After a loss, a rank has left the job and joins it again.
                return self.end_epoch(now);
            }
            if self.phase == Phase::Finishing {
                self.deadline.get_or_insert(now + FINISH);
            }
            if self.phase != Phase::Running {
                return;
            }
            epochs.waiting.entry(worker).or_insert(now);
            if !daemon_runs {
                self.end_for_change(now);
            }
        }
    }

    /// Whether the agent's host is part of the epoch.
    pub(super) fn is_node(&self, agent: usize) -> bool {
        self.plan.nodes.iter().any(|node| node.agent == agent)
    }

    /// Looks for the members of the next epoch.
    pub(super) fn assemble(&mut self, now: Duration) {
        let Some(epochs) = &mut self.epochs else { return };
        let since = epochs.trouble.map_or(now, |(since, _)| since);
        let timeout = epochs.members.rules().timeout;
        if epochs.is_change {
            let linger = if epochs.goes_on { now } else { now + LINGER };
            epochs.not_before = epochs.pause.max(linger);
        }
        epochs.has_told = false;
        let surplus = epochs.members.take_surplus();
        self.phase = Phase::Assembling;
        self.deadline = Some(since + timeout);
        for surplus in surplus {
            match surplus {
                Surplus::Host(agent) => {
                    let grace_ms = u64::try_from(self.limits.grace.as_millis()).unwrap_or(u64::MAX);
                    let why = "its host leaves the job".to_owned();
                    self.order(agent, Order::Stop { grace_ms, why });
                }
                Surplus::Worker { agent, worker } => {
                    self.order(agent, Order::End { role: Role::Rank(worker) });
                }
            }
        }
        self.advance(now);
    }

    /// Forms the next epoch if there are enough members.
    pub(super) fn form_if_enough(&mut self, now: Duration) {
        let is_open = self.is_about_to_end();
        let (resets, has_resets) = (self.resets(), self.has_resets());
        let Some(epochs) = &mut self.epochs else { return };
        if epochs.finished.is_some() {
            return self.finish(now);
        }
        if epochs.members.survivors() == 0 {
            let hint = "start the job again; a state with directory= keeps commits on disk, from \
                        which a new job continues";
            return self.give_up("all processes that were in the job have ended", hint, now);
        }
        let nodes = epochs.members.next();
        let (size, rules) = (nodes.iter().map(Node::ranks).sum::<u32>(), epochs.members.rules());
        if size < rules.min {
            if !std::mem::replace(&mut epochs.has_told, true) {
                let rules = epochs.members.rules();
                let text = format!(
                    "the job needs {} (--min-np) and has {size}: it waits up to {:.0} s for {}",
                    count(rules.min, "rank"),
                    rules.timeout.as_secs_f64(),
                    epochs.members.awaited(now)
                );
                self.say(text);
            }
        } else if self.deadline.is_some_and(|deadline| now >= deadline) {
            self.late(now);
        } else if epochs.is_change && epochs.goes_on && !is_open && !has_resets {
            // No change was ordered any more: the program has left the epoch by itself.
            let what = format!(
                "the job has continued {} after losses and changes, and --reset-limit allows no \
                 more",
                count(resets, "time")
            );
            let hint = "see why all ranks have left the epoch, or raise --reset-limit";
            self.give_up(&what, hint, now);
        } else if now >= epochs.not_before && !is_open {
            epochs.announced = Change::default();
            epochs.began = now;
            self.form(nodes, now);
        }
    }

    /// Whether a rank has left the job, as others were told, and its process still runs. It may end
    /// or join again, and that decides whether a further epoch forms.
    fn is_about_to_end(&self) -> bool {
        let Some(epochs) = &self.epochs else { return false };
        let running = self.processes.values().filter(|process| process.ended.is_none());
        let told = running.filter_map(|process| process.received.clone());
        let left = told.filter(|failure| failure.kind == FailureKind::RankLeft);
        let left = left.filter_map(|failure| self.by_worker(failure).rank);
        let mut left = left.filter(|Rank(worker)| !epochs.members.is_waiting(*worker));
        left.any(|Rank(worker)| {
            let mut members = self.plan.members();
            members.any(|member| member.1 == worker && !self.has_ended(member))
        })
    }

    fn form(&mut self, nodes: Vec<Node>, now: Duration) {
        self.plan.epoch += 1;
        self.plan.nodes = nodes;
        self.processes.retain(|_, process: &mut Process| process.ended.is_none());
        self.causes.clear();
        if let Some(epochs) = &mut self.epochs {
            epochs.failure = self.failure.take();
        }
        (self.patient, self.awaited, self.coordinator) = Default::default();
        (self.notified, self.reporting) = Default::default();
        self.hosts.iter_mut().for_each(|host| host.metrics = None);
        let all = self.epochs.as_ref().and_then(|epochs| {
            epochs.trouble.map(|(since, _)| since + epochs.members.rules().timeout)
        });
        let start = now + self.limits.start;
        self.deadline = Some(all.map_or(start, |all| all.min(start)));
        self.start_first();
    }

    /// All daemons of a later epoch serve.
    pub(super) fn run_again(&mut self, now: Duration) {
        // What ended the last epoch explains no later end.
        self.processes.values_mut().for_each(|process| process.received = None);
        self.serving();
        self.phase = Phase::Running;
        self.deadline = None;
        let hosts = self.plan.nodes.len() - self.plan.servers();
        let (ranks, hosts) = (count(self.plan.size(), "rank"), count(hosts, "host"));
        let Some(epochs) = &mut self.epochs else { return };
        (epochs.began, epochs.is_change, epochs.goes_on) = (now, false, false);
        epochs.waiting.clear();
        epochs.members.formed(&self.plan.nodes);
        let seconds = now.saturating_sub(epochs.ended).as_secs_f64();
        let text =
            format!("epoch {}: {ranks} on {hosts}, {seconds:.1} s {}", self.plan.epoch, epochs.why);
        self.say(text);
    }

    /// The deadline has passed in a phase of a later epoch.
    pub(super) fn late(&mut self, now: Duration) {
        match self.phase {
            Phase::Assembling => {
                let Some(epochs) = &self.epochs else { return };
                let rules = epochs.members.rules();
                let size: u32 = epochs.members.next().iter().map(Node::ranks).sum();
                let hint = if size < rules.min {
                    "lower --min-np, add hosts or slots, or raise --elastic-timeout"
                } else {
                    "see why the epochs above have ended, and mend that in the program; if they \
                     need more time, raise --elastic-timeout"
                };
                let what = format!(
                    "no epoch with {} (--min-np) has formed and lasted within {:.0} s \
                     (--elastic-timeout) {}",
                    count(rules.min, "rank"),
                    rules.timeout.as_secs_f64(),
                    epochs.why
                );
                self.give_up(&what, hint, now);
            }
            Phase::Finishing => {
                let first = self.epochs.as_ref().and_then(|epochs| epochs.finished);
                if let Some(told) = self.told_of_the_end(first) {
                    self.failure = Some(told);
                    return self.stop(self.limits.grace, now);
                }
                let place =
                    self.processes.keys().find(|(_, role)| Some(*role) == first.map(Role::Rank));
                let who = place.map_or_else(
                    || "a rank".to_owned(),
                    |(agent, role)| format!("{role} on host {}", self.host(*agent)),
                );
                let what = format!("{who} has ended without an error, and the other ranks need it");
                let hint = "every rank must make the same calls until the end; with uneven data, \
                            a rank without more calls join()";
                self.give_up(&what, hint, now);
            }
            _ => {
                let what =
                    format!("epoch {} did not form in time: {}", self.plan.epoch, self.missing());
                self.causes.push(Cause::NotStarted { what, hint: String::new() });
                if self.may_continue() {
                    self.end_epoch(now);
                } else {
                    self.stop(self.limits.grace, now);
                }
            }
        }
    }

    /// The failure that a running rank got because `ended` has left: for which call, and where.
    fn told_of_the_end(&self, ended: Option<u32>) -> Option<(usize, Failure)> {
        let running = self.processes.iter().filter(|(_, process)| process.ended.is_none());
        running.into_iter().find_map(|((agent, _), process)| {
            let failure = self.by_worker(process.received.clone()?);
            let is_it = failure.kind == FailureKind::RankLeft && failure.rank == ended.map(Rank);
            is_it.then_some((*agent, failure))
        })
    }

    /// Waits for the ends of the other ranks, as one has ended without an error.
    pub(super) fn finish(&mut self, now: Duration) {
        let Some(epochs) = &mut self.epochs else { return };
        // The others wait for a rank that has ended. The failure says for which call, also if the
        // next epoch began to form before that end was known.
        let failure = self.failure.clone().or(epochs.failure.take());
        let ended = epochs.finished.map(Rank);
        let is_left = |(_, failure): &(usize, Failure)| {
            failure.kind == FailureKind::RankLeft && failure.rank == ended
        };
        if failure.as_ref().is_some_and(is_left) {
            self.failure = failure;
            return self.stop(self.limits.grace, now);
        }
        let Some(epochs) = &self.epochs else { return };
        self.phase = Phase::Finishing;
        // After a change, all leave in their own time, unless one of them waits for more.
        self.deadline = (!epochs.is_change || epochs.goes_on).then_some(now + FINISH);
        for (agent, role) in self.running_daemons() {
            self.processes.entry((agent, role)).or_default().dismissed = true;
            self.order(agent, Order::Kill { role });
        }
        // It may have been the last one, and then no other event comes.
        self.advance(now);
    }

    /// Whether a rank has ended without an error, so that no further epoch forms.
    pub(super) fn finishes(&self) -> bool {
        self.ranks_ran && self.epochs.as_ref().is_some_and(|epochs| epochs.finished.is_some())
    }

    /// Whether every rank that still runs waits for an epoch, and none will form.
    pub(super) fn waits_in_vain(&self) -> bool {
        self.epochs.as_ref().is_some_and(|epochs| epochs.members.all_wait())
    }

    /// Whether every rank of the job has ended.
    pub(super) fn has_finished(&self) -> bool {
        self.epochs.as_ref().is_some_and(|epochs| epochs.members.survivors() == 0)
    }

    /// Says how many ranks were lost, if the job succeeds nevertheless.
    pub(super) fn count_lost(&mut self) {
        let lost = self.epochs.as_ref().map_or(0, |epochs| epochs.lost);
        if lost > 0 && self.causes.is_empty() {
            let were = if lost == 1 { "was" } else { "were" };
            self.say(format!("the job has succeeded; {} {were} lost", count(lost, "rank")));
        }
    }

    /// Ends the job, because it can't go on after a loss or a change.
    fn give_up(&mut self, what: &str, hint: &str, now: Duration) {
        // Daemons that don't reach each other, or can't start, end or are ended because of that.
        if self.epochs.as_ref().is_some_and(|epochs| epochs.unusable.is_some()) {
            self.causes.retain(|cause| !matches!(cause, Cause::Ended { role: Role::Daemon, .. }));
        }
        if self.causes.is_empty() {
            let (what, hint) = (what.to_owned(), hint.to_owned());
            self.causes.push(Cause::NotStarted { what, hint });
        } else {
            self.say(format!("the job ends: {what}"));
        }
        self.stop(self.limits.grace, now);
    }
}
