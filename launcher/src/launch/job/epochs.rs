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
use gradwire_services::launch::{Order, ProcessEnd, Role};

use super::{
    Job, Phase, Process, SLACK,
    epoch_state::{Epochs, Force, UsedUp},
};
use crate::launch::{
    membership::{Change, Surplus},
    plan::{Node, count},
    report::{self, Cause},
};

/// How long a process that the daemons blame may take to end by itself: how it ends is the cause.
const BLAMED: Duration = Duration::from_millis(500);

/// How long the daemons of a failed epoch may take to end by themselves.
const DAEMONS: Duration = Duration::from_secs(2);

/// How long a daemon may run after all its ranks have left it.
const STUCK: Duration = Duration::from_secs(5);

/// An epoch that has run for this long is a success, and the next loss is a new one.
const LASTING: Duration = Duration::from_secs(5);

/// The same for an epoch that did not reach the same host as the one before.
const REACHED: Duration = Duration::from_secs(60);

/// The first and the longest pause between epochs that do not last.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// After its daemons have left, a job may have ended or may go on with a change. If no rank says
/// that it waits, because its standard error goes elsewhere, it has this time to end.
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
        let has_resets = epochs.members.rules().reset_limit.is_none_or(|most| self.resets() < most);
        self.ranks_ran && epochs.finished.is_none() && (forms || runs) && has_resets
    }

    /// How many epochs have followed the first.
    fn resets(&self) -> u32 {
        u32::try_from(self.plan.epoch - 1).unwrap_or(u32::MAX)
    }

    pub(super) fn daemon_runs(&self) -> bool {
        self.processes.iter().any(|((agent, role), process)| {
            *role == Role::Daemon && process.ended.is_none() && !self.hosts[*agent].stopped
        })
    }

    /// The running processes that are at fault, or give no sign of life. A rank that has left is
    /// not at fault.
    fn blamed(&self) -> Vec<(usize, Role)> {
        let Some(failure) = self.failure() else { return Vec::new() };
        let blamed = self.processes.iter().filter(|((agent, role), process)| {
            let is_blamed = match role {
                Role::Rank(_) => failure.kind != FailureKind::RankLeft,
                Role::Daemon => true,
            };
            let is_at_fault = is_blamed && self.blames(*agent, *role);
            let runs = process.ended.is_none() && !self.hosts[*agent].stopped;
            runs && (is_at_fault || *role == Role::Daemon && self.is_missed(*agent))
        });
        blamed.map(|(process, _)| *process).collect()
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
                epochs.not_before = epochs.not_before.min(now);
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

    /// The daemons that still run although all ranks of their host wait for the next epoch, and
    /// when they are killed. Such a daemon is stopped, and nobody else may notice it (WAIT).
    fn stuck(&self) -> impl Iterator<Item = (usize, Duration)> {
        let epochs = self.epochs.as_ref().filter(|_| self.phase == Phase::Running);
        let waiting = epochs.map(|epochs| &epochs.waiting);
        let nodes = self.plan.nodes.iter().filter(|node| node.ranks() > 0);
        nodes.filter_map(move |node| {
            let daemon = self.processes.get(&(node.agent, Role::Daemon))?;
            let since = node.workers.iter().map(|worker| waiting?.get(worker).copied());
            let last = since.collect::<Option<Vec<_>>>()?.into_iter().max()?;
            daemon.ended.is_none().then_some((node.agent, last + STUCK))
        })
    }

    /// When the next stuck daemon is to be killed.
    pub(super) fn stuck_until(&self) -> Option<Duration> {
        self.stuck().map(|(_, at)| at).min()
    }

    /// Kills stuck daemons. Their ends are losses.
    pub(super) fn end_stuck(&mut self, now: Duration) {
        let stuck: Vec<_> = self.stuck().filter(|(_, at)| *at <= now).collect();
        for (agent, _) in stuck {
            // That it is stopped is the better cause.
            if !self.blame_daemon(agent, now) {
                self.kill((agent, Role::Daemon));
            }
            let own = self.plan.nodes.iter().filter(|node| node.agent == agent);
            let own: Vec<u32> = own.flat_map(|node| node.workers.clone()).collect();
            if let Some(epochs) = &mut self.epochs {
                epochs.waiting.retain(|worker, _| !own.contains(worker));
            }
        }
    }

    /// The daemon of a running epoch has ended well: all its ranks have left it.
    pub(super) fn daemon_left(&mut self, now: Duration) {
        let goes_on = |epochs: &Epochs| epochs.announced.is_some() || epochs.goes_on;
        if self.phase == Phase::Running && self.epochs.as_ref().is_some_and(goes_on) {
            self.end_for_change(now);
        }
    }

    /// The agent of a host is gone, with all its processes.
    pub(super) fn agent_lost(&mut self, agent: usize, now: Duration) {
        let own = self.processes.iter_mut().filter(|((at, _), _)| *at == agent);
        for process in own.map(|(_, process)| process).filter(|process| process.ended.is_none()) {
            process.ended = Some(ProcessEnd::Signal(9));
        }
        self.leaves_with_host(agent, now);
    }

    /// The processes of a host leave the job, though some may still be ending.
    /// Returns whether that ends the epoch, or the job if it is not elastic.
    pub(super) fn leaves_with_host(&mut self, agent: usize, now: Duration) -> bool {
        let Some(epochs) = &mut self.epochs else { return true };
        let own = self.plan.nodes.iter().filter(|node| node.agent == agent);
        let lost = own.flat_map(|node| &node.workers).filter(|worker| epochs.members.has(**worker));
        epochs.lost += u32::try_from(lost.count()).unwrap_or(u32::MAX);
        epochs.members.agent_ended(agent, now);
        self.is_node(agent)
    }

    /// Whether the agent's host is part of the epoch.
    pub(super) fn is_node(&self, agent: usize) -> bool {
        self.plan.nodes.iter().any(|node| node.agent == agent)
    }

    /// Whether the causes end the epoch, and not the job.
    pub(super) fn may_continue(&mut self) -> bool {
        let Some(epochs) = self.epochs.as_ref().filter(|_| self.ranks_ran) else { return false };
        let fatal = |cause: &Cause| matches!(cause, Cause::Interrupted(_) | Cause::Output(_));
        let is_recoverable = !self.causes.iter().any(fatal)
            && self.failure().is_none_or(Failure::is_recoverable)
            && epochs.finished.is_none()
            && epochs.members.survivors() > 0;
        if !is_recoverable {
            return false;
        }
        let rules = epochs.members.rules();
        let (resets, restarts) = (rules.reset_limit, rules.restarts);
        let end = match epochs.end {
            Some(_) => return false,
            None if resets.is_some_and(|most| self.resets() >= most) => UsedUp::Resets,
            None if self.only_daemons_lost() && epochs.restarts >= restarts => UsedUp::Restarts,
            None => return true,
        };
        self.say(match end {
            UsedUp::Resets if self.resets() == 0 => {
                "the job ends at its first loss: --reset-limit is 0".to_owned()
            }
            UsedUp::Resets => format!(
                "the job has continued {} after losses and changes, and --reset-limit allows no \
                 more",
                count(self.resets(), "time")
            ),
            UsedUp::Restarts => format!(
                "the job has continued {} after losses of daemons, and recovery.restarts allows \
                 no more; the same job may succeed if it is started again",
                count(restarts, "time")
            ),
        });
        if let Some(epochs) = &mut self.epochs {
            epochs.end = Some(end);
        }
        false
    }

    /// Whether every rank of a failed epoch lives: only processes of Gradwire itself, or their
    /// connections, were lost.
    fn only_daemons_lost(&self) -> bool {
        let is_daemon = |cause: &Cause| {
            matches!(cause, Cause::Ended { role: Role::Daemon, .. } | Cause::DaemonStopped { .. })
        };
        self.causes.iter().all(is_daemon) && self.failure().is_none_or(|it| it.rank.is_none())
    }

    /// Whether the job has ended because of the limit for losses of daemons.
    pub(super) fn has_no_restart_left(&self) -> bool {
        self.epochs.as_ref().is_some_and(|epochs| epochs.end == Some(UsedUp::Restarts))
    }

    /// Ends an epoch that has failed.
    pub(super) fn end_epoch(&mut self, now: Duration) {
        let (why, at) = report::loss(&self.causes, self.failure(), now);
        let (only_daemons, unreached) = (self.only_daemons_lost(), self.unreached());
        let Some(epochs) = &mut self.epochs else { return };
        epochs.restarts += u32::from(only_daemons);
        (epochs.why, epochs.ended, epochs.is_change) = (format!("after {why}"), at, false);
        epochs.force = Force::None;
        // It takes a while until a host is given up that others don't reach.
        let is_known = |agent| epochs.unreached == unreached || epochs.members.was_left_out(agent);
        let is_unreached_again = unreached.is_some_and(is_known);
        let lasting = if is_unreached_again { REACHED } else { LASTING };
        let lasted = now.saturating_sub(epochs.began) >= lasting;
        let (since, short) = match epochs.trouble {
            Some((since, short)) if !lasted => (since, short + 1),
            _ => (now, 0),
        };
        epochs.trouble = Some((since, short));
        let pause = PAUSES.0.saturating_mul(1 << short.min(16)).min(PAUSES.1);
        epochs.not_before = if short == 0 { now } else { now + pause };
        epochs.unreached = unreached;
        self.phase = Phase::Ending;
        self.deadline = Some(now + BLAMED);
        if let Some(agent) = unreached.filter(|_| is_unreached_again && !lasted) {
            self.leave_out(agent, now);
        }
    }

    /// The host that is out of reach for the daemons of others, although the launcher reaches it:
    /// the network between them is cut. If the first host is one of the two, it is the other one.
    fn unreached(&self) -> Option<usize> {
        let (from, failure) = self.failure.as_ref()?;
        // The daemons end by themselves after such a failure.
        let is_network = |cause: &Cause| match cause {
            Cause::NotStarted { .. } => true,
            Cause::Ended { role, end, .. } => {
                *role == Role::Daemon && matches!(end, ProcessEnd::Code(_))
            }
            _ => false,
        };
        if !self.causes.iter().all(is_network) {
            return None;
        }
        let named = match failure.kind {
            FailureKind::NodeLost | FailureKind::ConnectionLost => (0..self.hosts.len())
                .find(|agent| self.is_node(*agent) && self.host(*agent) == failure.host)?,
            FailureKind::CoordinatorLost => self.first(),
            _ => return None,
        };
        let agent = if named == self.first() { *from } else { named };
        (agent != self.first() && !self.hosts[agent].stopped).then_some(agent)
    }

    /// Goes on without a host that two epochs in a row did not reach, if enough ranks remain.
    fn leave_out(&mut self, agent: usize, now: Duration) {
        let others = self.plan.nodes.iter().filter(|node| node.agent != agent);
        let remaining: u32 = others.map(Node::ranks).sum();
        let min = self.epochs.as_ref().map_or(0, |epochs| epochs.members.rules().min);
        if remaining < min.max(1) {
            return;
        }
        let Some(epochs) = &mut self.epochs else { return };
        let Some(time) = epochs.members.leave_out(agent, now) else { return };
        let host = self.host(agent).to_owned();
        self.say(format!(
            "host {host} is left out for {} s: the launcher reaches it, but it and the daemons of \
             other hosts don't reach each other",
            time.as_secs()
        ));
        let grace_ms = u64::try_from(self.limits.grace.as_millis()).unwrap_or(u64::MAX);
        let why = "the other hosts of the job are out of reach".to_owned();
        self.order(agent, Order::Stop { grace_ms, why });
        self.hosts[agent].stopped = true;
        self.agent_lost(agent, now);
    }

    /// Ends an epoch whose daemons leave because all their ranks have.
    fn end_for_change(&mut self, now: Duration) {
        let Some(epochs) = &mut self.epochs else { return };
        let why = match epochs.announced {
            Change { added: true, removed: true } => "after ranks came and others left",
            Change { added: true, .. } => "after ranks came",
            Change { removed: true, .. } => "after ranks left",
            _ => "after all ranks left",
        };
        (epochs.why, epochs.ended, epochs.is_change) = (why.to_owned(), now, true);
        epochs.force = Force::None;
        epochs.trouble = Some((now, 0));
        self.phase = Phase::Ending;
        self.deadline = Some(now + epochs.members.rules().timeout);
    }

    /// A cause arrives while an epoch ends: nobody leaves it in good order any more.
    pub(super) fn hasten(&mut self, now: Duration) {
        if self.epochs.as_ref().is_some_and(|epochs| epochs.is_change) {
            self.end_epoch(now);
        }
    }

    /// The deadline of an ending epoch has passed.
    pub(super) fn force_end(&mut self, now: Duration) {
        let blamed = self.blamed();
        let Some(epochs) = &mut self.epochs else { return };
        let ended = match epochs.force {
            Force::None if !epochs.is_change => {
                epochs.force = Force::Blamed;
                self.deadline = Some(now + DAEMONS - BLAMED);
                blamed
            }
            Force::None | Force::Blamed => {
                epochs.force = Force::Daemons;
                self.deadline = Some(now + SLACK);
                self.running_daemons()
            }
            // The system does not end them, or the agent does not say so: the host is lost.
            Force::Daemons => {
                let mut agents: Vec<_> = self.running_daemons().into_iter().chain(blamed).collect();
                agents.dedup_by_key(|(agent, _)| *agent);
                for (agent, _) in agents {
                    self.give_up_host(agent, now);
                }
                return;
            }
        };
        for process in ended {
            self.kill(process);
        }
    }

    fn running_daemons(&self) -> Vec<(usize, Role)> {
        let running = self.processes.iter().filter(|((agent, role), process)| {
            *role == Role::Daemon && process.ended.is_none() && !self.hosts[*agent].stopped
        });
        running.map(|(process, _)| *process).collect()
    }

    fn give_up_host(&mut self, agent: usize, now: Duration) {
        let host = self.host(agent).to_owned();
        self.say(format!("host {host} does not end its processes, and is given up"));
        self.order(agent, Order::Stop { grace_ms: 0, why: "the host was given up".to_owned() });
        self.hosts[agent].stopped = true;
        self.agent_lost(agent, now);
    }

    /// Whether all that must end with an epoch has ended.
    pub(super) fn has_epoch_ended(&self) -> bool {
        !self.daemon_runs() && self.blamed().is_empty()
    }

    /// Looks for the members of the next epoch.
    pub(super) fn assemble(&mut self, now: Duration) {
        let Some(epochs) = &mut self.epochs else { return };
        let since = epochs.trouble.map_or(now, |(since, _)| since);
        let timeout = epochs.members.rules().timeout;
        if epochs.is_change {
            epochs.not_before = if epochs.goes_on { now } else { now + LINGER };
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
        let Some(epochs) = &mut self.epochs else { return };
        if epochs.finished.is_some() {
            return self.finish(now);
        }
        if epochs.members.survivors() == 0 {
            return self.give_up("all processes that were in the job have ended", "", now);
        }
        let nodes = epochs.members.next(now);
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
        } else if now >= epochs.not_before {
            epochs.announced = Change::default();
            epochs.began = now;
            self.form(nodes, now);
        }
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
                let what = format!(
                    "no epoch with {} (--min-np) has formed and lasted within {:.0} s \
                     (--elastic-timeout) {}",
                    count(rules.min, "rank"),
                    rules.timeout.as_secs_f64(),
                    epochs.why
                );
                self.give_up(&what, "", now);
            }
            Phase::Finishing => {
                let first = self.epochs.as_ref().and_then(|epochs| epochs.finished);
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

    /// Says how many ranks a job has lost that succeeds nevertheless.
    pub(super) fn count_lost(&mut self) {
        let lost = self.epochs.as_ref().map_or(0, |epochs| epochs.lost);
        if lost > 0 && self.causes.is_empty() {
            let were = if lost == 1 { "was" } else { "were" };
            self.say(format!("the job has succeeded; {} {were} lost", count(lost, "rank")));
        }
    }

    /// Ends the job, because it can't go on after a loss or a change.
    fn give_up(&mut self, what: &str, hint: &str, now: Duration) {
        // Daemons that don't reach each other end, or are ended, because of that.
        if self.epochs.as_ref().is_some_and(|epochs| epochs.unreached.is_some()) {
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
