//! The nodes of the job, and its phase: forming, running, failing, over.
//!
//! - `members`: the nodes of the complete world, when each last sent something, and which ranks
//!   have left
//! - `absence`: how long a node has been without a stream
//! - `forming`: which nodes may join, while the world is not complete
//! - `streams`: streams that end, and others that continue
//! - `causes`: the first cause of a failure
//!
//! [`Membership`] owns the phase. It decides which nodes join, and why the job ends.

pub(crate) mod members;

mod absence;
mod causes;
mod forming;
mod streams;

use std::{sync::Arc, time::Duration};

use gradwire_proto::{Ending, Failure, FailureKind, NodeId, Rank, beat::Silence, pb};

use self::{
    causes::Causes,
    forming::{Forming, Refusal, check_join},
    members::{Member, Members},
};
use crate::model::{
    Command, ConnectionId, EngineConfig, Output, Phase,
    command::{RefusalKind, Severity, World},
    event::Noticed,
    status::{milliseconds, numbers},
    text,
    violation::Violation,
};

/// How often to report which nodes have not joined.
const WAITING_REPORT: Duration = Duration::from_secs(5);

#[derive(Debug)]
enum JobState {
    Forming { next_report: Duration },
    Running,
    Failing(Causes),
    Over(Ending),
}

/// The nodes, and the phase of the job.
#[derive(Debug)]
pub(crate) struct Membership {
    config: Arc<EngineConfig>,
    state: JobState,
    /// The reason for the state.
    why: String,
    forming: Forming,
    members: Members,
}

impl Membership {
    /// Waits for the nodes of `config`; time starts at zero.
    pub(crate) fn new(config: Arc<EngineConfig>) -> Self {
        Self {
            state: JobState::Forming { next_report: WAITING_REPORT },
            why: Forming::default().missing(&config),
            forming: Forming::default(),
            members: Members::default(),
            config,
        }
    }

    /// The nodes of the complete world; empty before it is.
    pub(crate) fn members(&self) -> &Members {
        &self.members
    }

    /// The phase of the job.
    pub(crate) fn phase(&self) -> Phase {
        match &self.state {
            JobState::Forming { .. } => Phase::Forming,
            JobState::Running => Phase::Running,
            JobState::Failing(_) => Phase::Failing,
            JobState::Over(Ending::Failed(_)) => Phase::Failed,
            JobState::Over(Ending::Finished) => Phase::Finished,
        }
    }

    /// The reason for the phase.
    pub(crate) fn why(&self) -> String {
        match &self.state {
            JobState::Forming { .. } => self.forming.missing(&self.config),
            _ => self.why.clone(),
        }
    }

    /// The failure of a job that is failing or has failed.
    pub(crate) fn failure(&self) -> Option<&Failure> {
        match &self.state {
            JobState::Failing(causes) => Some(causes.cause()),
            JobState::Over(Ending::Failed(failure)) => Some(failure),
            JobState::Forming { .. } | JobState::Running | JobState::Over(Ending::Finished) => None,
        }
    }

    /// How many nodes have joined.
    pub(crate) fn nodes(&self) -> usize {
        self.members.len().max(self.forming.len())
    }

    /// The nodes of the complete world, for the status.
    pub(crate) fn status(&self, now: Duration) -> Vec<pb::NodeStatus> {
        let status = self.members.iter().map(|(_, member)| {
            let Member { node, last_received, left, absence, .. } = member;
            pb::NodeStatus {
                host: node.host.clone(),
                first_rank: node.first_rank.0,
                slots: node.slots,
                rack: node.rack.clone(),
                line_mbit: node.line_mbit,
                silent_ms: milliseconds(now.saturating_sub(last_received.last())),
                left_ranks: numbers(left.keys()),
                reconnections: absence.returns,
                report: None,
            }
        });
        status.collect()
    }

    /// When [`Membership::tick`] or [`Membership::silent`] is due next.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        match &self.state {
            JobState::Forming { next_report } => {
                let away = self.forming.first_due(self.away()).map(|(_, until, _)| until);
                let due = self.config.start_timeout.min(*next_report);
                Some(away.map_or(due, |until| until.min(due)))
            }
            JobState::Running => {
                self.members.first_due(&self.config.silence(), self.away()).map(|(_, due)| due)
            }
            JobState::Failing(causes) => Some(causes.until),
            JobState::Over(_) => None,
        }
    }

    /// Notes that something was received on a stream.
    pub(crate) fn received(&mut self, connection: ConnectionId, now: Duration) {
        let node = self.members.id(connection);
        if let Some(member) = node.and_then(|node| self.members.get_mut(node)) {
            member.last_received.stream = now;
            member.absence.received();
        }
    }

    /// Admits or refuses a node. Returns whether the world is complete now.
    pub(crate) fn joined(
        &mut self,
        connection: ConnectionId,
        join: pb::Join,
        proven: bool,
        now: Duration,
        out: &mut Output,
    ) -> bool {
        let described = format!("node {} (host {})", join.order, text::excerpt(&join.host, 80));
        let order = join.order;
        let checked = check_join(&self.config, &join, proven);
        let returned = match checked {
            Ok(()) if join.attempt > 0 && self.config.return_timeout.is_some() => {
                self.returned(connection, &join, now, out)
            }
            checked => checked.map(|()| false),
        };
        if let Ok(true) = returned {
            return false;
        }
        let admitted = returned.and_then(|_| match &self.state {
            JobState::Forming { .. } => self.forming.admit(connection, join),
            JobState::Running => Err(Refusal {
                kind: RefusalKind::Taken,
                text: format!("{described} is too late: {}", self.why),
            }),
            JobState::Failing(_) | JobState::Over(_) => Err(Refusal {
                kind: RefusalKind::Over,
                text: format!("{described} is too late: the job is over: {}", self.why),
            }),
        });
        match admitted {
            Err(Refusal { kind, text }) => {
                self.forming.refuses(order, &described, kind);
                out.reason = format!("{described} is refused: {text}");
                out.commands.push(Command::Refuse { connection, kind, text });
                false
            }
            Ok(()) if self.forming.len() < self.config.nodes as usize => {
                out.reason = format!("{described} joined: {}", self.forming.missing(&self.config));
                false
            }
            Ok(()) => self.form(now, out),
        }
    }

    /// Forms the world once all nodes have joined. Returns false if that is impossible.
    fn form(&mut self, now: Duration, out: &mut Output) -> bool {
        self.members = self.forming.close(now);
        let ranks = self.members.ranks();
        if let Some(expected) = self.config.ranks.filter(|&expected| expected != ranks) {
            let slots: Vec<String> = self
                .members
                .iter()
                .map(|(_, m)| format!("{} has {}", m.node.host, m.node.slots))
                .collect();
            let what = format!(
                "the nodes have {ranks} slots in total, but the job has {expected} ranks: {}",
                slots.join(", ")
            );
            let hint = "set GRADWIRE_SLOTS on every node to the number of its ranks";
            self.abort(Failure::new(FailureKind::Invalid, what).hint(hint), out);
            return false;
        }
        if ranks > Rank::MAX {
            let what = format!(
                "the nodes have {ranks} slots in total, but a job has at most {} ranks",
                Rank::MAX
            );
            let hint = "start fewer processes; GRADWIRE_SLOTS is the number of ranks of a node";
            self.abort(Failure::new(FailureKind::Invalid, what).hint(hint), out);
            return false;
        }
        let config = &self.config;
        let nodes = self.members.len();
        let world = Arc::new(World {
            epoch: config.epoch,
            nodes: self.members.iter().map(|(_, m)| m.node.clone()).collect(),
            lanes: config.lanes,
            compression: config.compression,
            heartbeat_interval: config.heartbeat_interval,
            heartbeat_timeout: config.heartbeat_timeout,
        });
        out.commands.extend(self.members.iter().map(|(node, m)| Command::Welcome {
            connection: m.connection,
            node,
            world: Arc::clone(&world),
        }));
        self.state = JobState::Running;
        self.why = format!(
            "the world is complete: {}, {}, epoch {}",
            text::count(nodes, "node"),
            text::count(ranks as usize, "rank"),
            self.config.epoch
        );
        out.reason.clone_from(&self.why);
        true
    }

    /// Handles a failure that a node has reported.
    pub(crate) fn reported(
        &mut self,
        connection: ConnectionId,
        mut failure: Failure,
        noticed: Noticed,
        now: Duration,
        out: &mut Output,
    ) {
        let host = match self.members.id(connection).and_then(|node| self.members.get(node)) {
            Some(member) => Some(member.node.host.as_str()),
            None => self.forming.host(connection),
        };
        let Some(host) = host else { return };
        // What the ranks disagree on did not happen on the host that noticed it.
        if failure.host.is_empty() && failure.kind != FailureKind::Disagreement {
            host.clone_into(&mut failure.host);
        }
        self.fail_noticed(failure, noticed, now, out);
    }

    /// The node of the world at the other end of a stream, if its messages count: not before the
    /// world is complete, and not once the job is failing.
    pub(crate) fn member(&mut self, connection: ConnectionId, out: &mut Output) -> Option<NodeId> {
        match self.state {
            JobState::Forming { .. } => {
                self.too_early(connection, out);
                None
            }
            JobState::Running => self.members.id(connection),
            JobState::Failing(_) | JobState::Over(_) => None,
        }
    }

    /// Refuses a node that sent something before the world was complete.
    fn too_early(&mut self, connection: ConnectionId, out: &mut Output) {
        if self.forming.forget(connection).is_none() {
            return;
        }
        let text = "a node may send only heartbeats between Join and World".to_owned();
        out.reason.clone_from(&text);
        out.commands.push(Command::Refuse { connection, kind: RefusalKind::Invalid, text });
    }

    /// Adds a failure that the coordinator has found.
    pub(crate) fn fail(&mut self, failure: Failure, now: Duration, out: &mut Output) {
        self.fail_noticed(failure, Noticed::UNKNOWN, now, out);
    }

    /// Adds a failure report, and waits a moment for a better one.
    fn fail_noticed(
        &mut self,
        failure: Failure,
        noticed: Noticed,
        now: Duration,
        out: &mut Output,
    ) {
        match &mut self.state {
            JobState::Over(_) => return,
            JobState::Failing(causes) => causes.report(failure, noticed, now),
            JobState::Forming { .. } | JobState::Running => {
                let window = self.config.cause_window;
                self.state = JobState::Failing(Causes::new(failure, noticed, window, now));
            }
        }
        let JobState::Failing(causes) = &self.state else { return };
        self.why = causes.cause().to_string();
        out.reason = format!("failing: {}", self.why);
        if now >= causes.until {
            let cause = causes.cause().clone();
            self.abort(cause, out);
        }
    }

    /// Ends the job for all nodes (TELL).
    fn abort(&mut self, failure: Failure, out: &mut Output) {
        self.why = failure.to_string();
        self.state = JobState::Over(Ending::Failed(failure.clone()));
        out.reason.clone_from(&self.why);
        out.commands.push(Command::Abort(failure.clone()));
        out.commands.push(Command::Finish(Ending::Failed(failure)));
    }

    /// Ends the job at the user's request.
    pub(crate) fn cancel(&mut self, why: String, out: &mut Output) {
        let failure = match &self.state {
            JobState::Over(_) => return,
            JobState::Failing(causes) => causes.cause().clone(),
            JobState::Forming { .. } | JobState::Running => {
                Failure::new(FailureKind::Cancelled, why)
            }
        };
        self.abort(failure, out);
    }

    /// Reports missing nodes, and ends a job that takes too long to form or to find a cause.
    pub(crate) fn tick(&mut self, now: Duration, out: &mut Output) {
        match &self.state {
            JobState::Forming { .. } if now >= self.config.start_timeout => {
                let missing = self.forming.missing(&self.config);
                let waited = text::seconds(self.config.start_timeout);
                let what = format!("not all nodes joined within {waited}: {missing}");
                let hint = "check the output of the missing nodes, and whether they can reach the \
                            coordinator; if they start slowly, increase launch.start_timeout_ms";
                // An elastic job goes on without them.
                let kind = match self.config.elastic {
                    true => FailureKind::NodeLost,
                    false => FailureKind::Timeout,
                };
                self.abort(Failure::new(kind, what).hint(hint), out);
            }
            JobState::Forming { .. }
                if let Some((connection, until, why)) = self.forming.first_due(self.away())
                    && now >= until =>
            {
                self.leaves_forming(connection, &why, out);
            }
            JobState::Forming { next_report } if now >= *next_report => {
                self.state = JobState::Forming { next_report: now + WAITING_REPORT };
                out.reason = self.forming.missing(&self.config);
                let text = out.reason.clone();
                out.commands.push(Command::Report { severity: Severity::Info, text });
            }
            JobState::Failing(causes) if now >= causes.until => {
                let (cause, reports) = (causes.cause().clone(), causes.reports());
                self.abort(cause, out);
                out.reason = format!("{} (of {})", self.why, text::count(reports, "report"));
            }
            JobState::Forming { .. }
            | JobState::Running
            | JobState::Failing(_)
            | JobState::Over(_) => {}
        }
    }

    /// Ignores the time in which the coordinator was suspended, perhaps together with nodes.
    pub(crate) fn suspended(&mut self, time: Duration, now: Duration, out: &mut Output) {
        self.members.received_from_all(now);
        let time = text::seconds(time);
        let text =
            format!("the coordinator was suspended for {time}; timeouts do not count this time");
        out.commands.push(Command::Report { severity: Severity::Warning, text });
    }

    /// A node that has been silent for too long, a description of its silence (WAIT), and whether
    /// its datagrams still arrive.
    pub(crate) fn silent(&self, now: Duration) -> Option<(NodeId, String, bool)> {
        let limits = self.config.silence();
        let (node, due) = self.members.first_due(&limits, self.away())?;
        let last = self.members.get(node)?.last_received;
        let silence = last.silence(&limits, now);
        let is_up =
            matches!(silence, Some(Silence::Stream(_))) || now < last.datagram + limits.all / 4;
        if let Some(why) = self.members.get(node)?.absence.text(self.away()) {
            return (now >= due).then_some((node, why, is_up));
        }
        let why = match silence? {
            Silence::All(time) => format!("it has been silent for {}", text::seconds(time)),
            Silence::Stream(time) => format!(
                "its stream has been silent for {}, although its datagrams arrive: something on \
                 the network path blocks TCP to or from the coordinator's port",
                text::seconds(time)
            ),
        };
        Some((node, why, is_up))
    }

    /// Notes that ranks leave. Returns whether others remain. `has_joined` returns whether a rank
    /// has joined and waits for the others.
    pub(crate) fn left(
        &mut self,
        node: NodeId,
        ranks: &[Rank],
        absent: bool,
        has_joined: impl Fn(Rank) -> bool,
        out: &mut Output,
    ) -> Result<bool, Violation> {
        if let Some(member) = self.members.get(node) {
            let own: Vec<Rank> = member.ranks().collect();
            for rank in ranks {
                let is_new = self.members.leave(node, *rank, absent);
                if !is_new || own.binary_search(rank).is_err() {
                    return Err(Violation::Protocol(format!(
                        "reported that rank {rank} left, which is not its own or had already left"
                    )));
                }
                if has_joined(*rank) {
                    return Err(Violation::LeftInJoin(*rank));
                }
            }
        }
        let how = if absent { "ended without joining" } else { "left" };
        out.reason = format!("{} {how}", text::named_ranks(ranks));
        let has_ranks = |member: &Member| !member.is_server() && !member.has_left();
        let remain = self.members.iter().any(|(_, member)| has_ranks(member));
        if !remain {
            "every rank has left".clone_into(&mut self.why);
            self.state = JobState::Over(Ending::Finished);
            out.reason.clone_from(&self.why);
            out.commands.extend([Command::Shutdown, Command::Finish(Ending::Finished)]);
        }
        Ok(remain)
    }

    /// Handles a violation by a node.
    pub(crate) fn violated(
        &mut self,
        node: NodeId,
        violation: Violation,
        now: Duration,
        out: &mut Output,
    ) {
        let (kind, what, hint) = match violation {
            // The program caused this, although its daemon should have refused it.
            Violation::LeftInJoin(rank) => (
                FailureKind::Invalid,
                format!("reported that rank {rank} left while it waited in a join"),
                "wait for the join before the process exits",
            ),
            Violation::Protocol(what) => (
                FailureKind::Protocol,
                what,
                "this is a bug in that node's gradwired: install the same release on every node, \
                 and please report it",
            ),
            Violation::Resource(what) => (
                FailureKind::Resource,
                what,
                "use the same tensor names in every step; new names in every step accumulate",
            ),
        };
        let what = format!("{} {what}", self.members.describe(node));
        let failure = Failure::new(kind, what).hint(hint).host(self.members.host(node));
        self.fail(failure, now, out);
    }
}
