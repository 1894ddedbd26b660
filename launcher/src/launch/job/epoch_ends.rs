//! How an epoch of an elastic job ends: after a loss by force, after a change by itself.
//!
//! A loss ends the epoch and not the job as long as the limits allow another one. Whoever is at
//! fault is ended first, then the daemons, and a host that doesn't end its processes is given up.
//! A host that other hosts don't reach, or whose daemon can't start, is left out for some time, as
//! it would end every epoch.

use std::time::Duration;

use gradwire_proto::{Failure, FailureKind};
use gradwire_services::launch::{Order, ProcessEnd, Role};

use super::{
    Job, Phase, SLACK,
    epoch_state::{Epochs, Force, UsedUp},
};
use crate::launch::{
    membership::Change,
    plan::{Node, count},
    report::{self, Cause},
};

/// How long a process that the daemons blame may take to end by itself: how it ends is the cause.
const BLAMED: Duration = Duration::from_millis(500);

/// The same for a rank that has said that it is ending: it may have much to clean up.
const GAVE_UP: Duration = Duration::from_secs(5);

/// How long the daemons of a failed epoch may take to end by themselves.
const DAEMONS: Duration = Duration::from_secs(2);

/// How long a daemon may run after all its ranks have left it.
const STUCK: Duration = Duration::from_secs(5);

/// An epoch that has run for this long is a success, and the next loss is a new one.
const LASTING: Duration = Duration::from_secs(5);

/// The same for an epoch that did not reach the same host as the one before.
const REACHED: Duration = Duration::from_secs(60);

/// How many epochs in a row may fail because the daemon of one host does not start: a port that an
/// earlier daemon had may be taken for a moment.
const STARTS: u32 = 4;

impl Job {
    /// The running processes that are at fault, or give no sign of life. A rank that has left is
    /// not at fault.
    pub(super) fn blamed(&self) -> Vec<(usize, Role)> {
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
            // If the daemon is known to be stopped, that is the better cause.
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

    /// Whether the daemons have ended because all ranks had left the job, and only losses followed.
    /// A rank may go on working after that, and needs no epoch.
    pub(super) fn have_all_left(&self) -> bool {
        let Some(epochs) = self.epochs.as_ref().filter(|_| self.ranks_ran) else { return false };
        let is_loss = |cause: &Cause| {
            matches!(cause, Cause::Ended { .. } | Cause::Lost { .. } | Cause::Asked { .. })
        };
        let has_ended_well = |node: &Node| {
            let daemon = self.processes.get(&(node.agent, Role::Daemon));
            daemon.and_then(|daemon| daemon.ended).is_some_and(ProcessEnd::is_well)
        };
        !epochs.announced.is_some()
            && !epochs.goes_on
            && self.failure.is_none()
            && self.causes.iter().all(is_loss)
            && self.plan.nodes.iter().all(has_ended_well)
    }

    /// A rank was lost after all had left the job. Nothing can replace what it would have done, so
    /// the job fails, but not before the others have done their last work.
    pub(super) fn finish_without(&mut self) {
        self.others_ran = false;
        (self.phase, self.deadline) = (Phase::Finishing, None);
        if self.ranks_run() {
            let what = report::summary(&self.causes, None).unwrap_or_default();
            self.say(format!(
                "{what}; all ranks had left the job before, so the others end by themselves"
            ));
        }
        self.advance(self.now);
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
        let only_daemons = self.only_daemons_lost();
        let without_daemon = self.without_daemon();
        let unusable = without_daemon.or_else(|| self.unreached());
        // Not all ranks have joined it in time.
        let is_incomplete = self
            .failure()
            .is_some_and(|failure| failure.kind == FailureKind::Timeout && failure.rank.is_some());
        let gave_up = self.failure().is_some_and(|failure| failure.details.gave_up);
        let size = self.plan.size();
        let Some(epochs) = &mut self.epochs else { return };
        epochs.restarts += u32::from(only_daemons);
        (epochs.why, epochs.ended, epochs.is_change) = (format!("after {why}"), at, false);
        epochs.force = Force::None;
        // A host that others don't reach is given up only after a while.
        let is_known = |agent| epochs.unusable == unusable || epochs.members.was_left_out(agent);
        let is_unusable_again = unusable.is_some_and(is_known);
        let lasting = if is_unusable_again { REACHED } else { LASTING };
        let lasted = !is_incomplete && now.saturating_sub(epochs.began) >= lasting;
        let short = epochs.count_short(lasted, now);
        // The others have waited for one rank, which is ended now. They get the whole time to go on
        // without it, but not again and again.
        let others_suffice = size.saturating_sub(1) >= epochs.members.rules().min;
        if is_incomplete && others_suffice && short < size {
            epochs.trouble = Some((now, short));
        }
        epochs.unusable = unusable;
        self.phase = Phase::Ending;
        self.deadline = Some(now + if gave_up { GAVE_UP } else { BLAMED });
        let is_enough = without_daemon.is_none() || short >= STARTS;
        if let Some(agent) = unusable.filter(|_| is_unusable_again && !lasted && is_enough) {
            self.leave_out(agent, now);
        }
    }

    /// The host whose daemon has ended by itself before it served: an address of the host is gone,
    /// or the system refuses the daemon something.
    fn without_daemon(&self) -> Option<usize> {
        let mut ended = self.processes.iter().filter(|((agent, role), process)| {
            let by_itself = matches!(process.ended, Some(ProcessEnd::Code(1..)));
            let has_served = self.hosts[*agent].metrics.is_some();
            *role == Role::Daemon && by_itself && !has_served && !process.dismissed
        });
        match (ended.next(), ended.next()) {
            (Some(((agent, _), _)), None) => Some(*agent),
            _ => None,
        }
    }

    /// The host that the daemons of others don't reach, although the launcher does: the network
    /// between them is cut. If the failure names the first host, then the host that reports it.
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
        let why = match self.without_daemon() {
            Some(_) => "its daemon can't start",
            None => {
                "the launcher reaches it, but it and the daemons of other hosts don't reach each \
                 other"
            }
        };
        self.say(format!("host {host} is left out for {} s: {why}", time.as_secs()));
        let grace_ms = u64::try_from(self.limits.grace.as_millis()).unwrap_or(u64::MAX);
        let why = "the host can't take part in the job".to_owned();
        self.order(agent, Order::Stop { grace_ms, why });
        self.hosts[agent].stopped = true;
        self.agent_lost(agent, now);
    }

    /// Ends an epoch whose daemons leave because all their ranks have. If nobody has ordered that,
    /// it counts as one that has failed: a program may do it in each step.
    pub(super) fn end_for_change(&mut self, now: Duration) {
        let Some(epochs) = &mut self.epochs else { return };
        let is_ordered = epochs.announced.is_some();
        let why = match epochs.announced {
            Change { added: true, removed: true } => "after ranks came and others left",
            Change { added: true, .. } => "after ranks came",
            Change { removed: true, .. } => "after ranks left",
            _ => "after all ranks left",
        };
        (epochs.why, epochs.ended, epochs.is_change) = (why.to_owned(), now, true);
        epochs.force = Force::None;
        if is_ordered {
            (epochs.trouble, epochs.pause) = (Some((now, 0)), now);
        } else {
            epochs.count_short(now.saturating_sub(epochs.began) >= LASTING, now);
        }
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

    pub(super) fn running_daemons(&self) -> Vec<(usize, Role)> {
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
}
