//! How a job begins and ends: forming, running, failing, over.

use std::{sync::Arc, time::Duration};

use gradwire_proto::{Ending, Failure, FailureKind, NodeId, ProcessSetId, Rank, beat::Silence};

use super::{
    Causes, Chooser, Command, ConnectionId, Engine, Output, Phase, ReadyTable, State,
    WAITING_REPORT,
    command::{RefusalKind, Severity, World},
    event::Join,
    text,
    world::{Refusal, check_join},
};

/// How many tensors a failure names.
const NAMED_TENSORS: usize = 3;

impl Engine {
    /// Where the job is in its life.
    pub fn phase(&self) -> Phase {
        match &self.state {
            State::Forming { .. } => Phase::Forming,
            State::Running => Phase::Running,
            State::Failing(_) => Phase::Failing,
            State::Over(Ending::Failed(_)) => Phase::Failed,
            State::Over(Ending::Finished) => Phase::Finished,
        }
    }

    /// Why the phase is what it is.
    pub fn why(&self) -> String {
        match &self.state {
            State::Forming { .. } => self.forming.missing(&self.config),
            _ => self.why.clone(),
        }
    }

    pub(super) fn failure(&self) -> Option<&Failure> {
        match &self.state {
            State::Failing(causes) => Some(causes.cause()),
            State::Over(Ending::Failed(failure)) => Some(failure),
            State::Forming { .. } | State::Running | State::Over(Ending::Finished) => None,
        }
    }

    pub(super) fn joined(
        &mut self,
        connection: ConnectionId,
        join: Join,
        now: Duration,
        out: &mut Output,
    ) {
        let described = format!("node {} (host {})", join.order, text::excerpt(&join.host, 80));
        let admitted = check_join(&self.config, &join).and_then(|()| match &self.state {
            State::Forming { .. } => self.forming.admit(connection, join),
            State::Running => Err(Refusal {
                kind: RefusalKind::Taken,
                text: format!("{described} comes too late: {}", self.why),
            }),
            State::Failing(_) | State::Over(_) => Err(Refusal {
                kind: RefusalKind::Over,
                text: format!("{described} comes too late: the job is over: {}", self.why),
            }),
        });
        match admitted {
            Err(Refusal { kind, text }) => {
                out.reason = format!("{described} is refused: {text}");
                out.commands.push(Command::Refuse { connection, kind, text });
            }
            Ok(()) if self.forming.len() < self.config.nodes as usize => {
                out.reason = format!("{described} joined: {}", self.forming.missing(&self.config));
            }
            Ok(()) => self.form(now, out),
        }
    }

    /// Everybody has come.
    fn form(&mut self, now: Duration, out: &mut Output) {
        self.members = self.forming.close(now);
        let ranks = self.members.ranks();
        if let Some(expected) = self.config.ranks.filter(|&expected| expected != ranks) {
            let slots: Vec<String> = self
                .members
                .iter()
                .map(|(_, m)| format!("{} has {}", m.node.host, m.node.slots))
                .collect();
            let what = format!(
                "the nodes have {ranks} slots together, the job has {expected} ranks: {}",
                slots.join(", ")
            );
            let hint = "GRADWIRE_SLOTS of every node must be the number of ranks that run there";
            return self.abort(Failure::new(FailureKind::Invalid, what).hint(hint), out);
        }
        if ranks > Rank::MOST {
            let what = format!(
                "the nodes have {ranks} slots together, a job has at most {} ranks",
                Rank::MOST
            );
            let hint = "start fewer processes; GRADWIRE_SLOTS says how many a node has";
            return self.abort(Failure::new(FailureKind::Invalid, what).hint(hint), out);
        }
        let config = &self.config;
        let nodes = self.members.len();
        let all = self.members.set((0..ranks).map(Rank).collect());
        self.sets.insert(ProcessSetId::GLOBAL, all);
        self.table =
            ReadyTable::new(nodes, config.max_tensors as usize, config.max_pending as usize);
        self.chooser = Chooser::new(&self.members, config);
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
        self.state = State::Running;
        self.why = format!(
            "the world is complete: {}, {}, epoch {}",
            text::count(nodes, "node"),
            text::count(ranks as usize, "rank"),
            self.config.epoch
        );
        out.reason.clone_from(&self.why);
    }

    /// A stream has ended.
    pub(super) fn lost(
        &mut self,
        connection: ConnectionId,
        why: &str,
        now: Duration,
        out: &mut Output,
    ) {
        if let State::Forming { .. } = self.state {
            if let Some((order, host)) = self.forming.forget(connection) {
                let missing = self.forming.missing(&self.config);
                out.reason = format!("node {order} (host {host}) has gone ({why}): {missing}");
                let text = out.reason.clone();
                out.commands.push(Command::Report { severity: Severity::Warning, text });
            }
            return;
        }
        let Some(node) = self.members.id(connection) else { return };
        let busy = self.flight.iter().any(|(_, flying)| flying.nodes.contains(node));
        if let Some(member) = self.members.get_mut(node)
            && member.has_left()
            && !busy
        {
            member.gone = true;
            let who = self.members.describe(node);
            out.reason = format!("{who} closed its stream after it had left");
            return;
        }
        let failure = self.node_lost(node, why);
        self.fail(failure, now, out);
    }

    fn node_lost(&self, node: NodeId, why: &str) -> Failure {
        let host = self.members.host(node);
        let mut what = format!("the daemon of {} is lost: {why}", self.members.describe(node));
        let flying = self.flight.iter().filter(|(_, flying)| flying.nodes.contains(node));
        let slots: std::collections::BTreeSet<_> =
            flying.flat_map(|(_, flying)| flying.slots.iter().copied()).collect();
        let in_flight = slots.iter().filter_map(|slot| self.table.get(*slot));
        let waiting = self.table.pending().map(|(_, _, tensor)| tensor);
        let names: Vec<&str> = in_flight.chain(waiting).map(|t| t.name.as_str()).collect();
        let first = names.first().copied().unwrap_or_default().to_owned();
        if !names.is_empty() {
            let names = text::some_names(names, NAMED_TENSORS);
            what = format!("{what}; in progress: {names}");
        }
        Failure::new(FailureKind::NodeLost, what)
            .hint(format!("look whether host {host} is up, and at the last lines of its gradwired"))
            .host(host)
            .tensor(first)
    }

    /// A node says that it can't go on.
    pub(super) fn reported(
        &mut self,
        connection: ConnectionId,
        mut failure: Failure,
        now: Duration,
        out: &mut Output,
    ) {
        let host = match self.members.id(connection).and_then(|node| self.members.get(node)) {
            Some(member) => Some(member.node.host.as_str()),
            None => self.forming.host(connection),
        };
        let Some(host) = host else { return };
        if failure.host.is_empty() {
            host.clone_into(&mut failure.host);
        }
        self.fail(failure, now, out);
    }

    /// A node that has joined sent something before there was a world.
    pub(super) fn too_early(&mut self, connection: ConnectionId, out: &mut Output) {
        if self.forming.forget(connection).is_none() {
            return;
        }
        let text = "a node may send nothing but heartbeats between Join and World".to_owned();
        out.reason.clone_from(&text);
        out.commands.push(Command::Refuse { connection, kind: RefusalKind::Invalid, text });
    }

    /// Takes a report of a failure and waits a moment for a better one.
    pub(super) fn fail(&mut self, failure: Failure, now: Duration, out: &mut Output) {
        match &mut self.state {
            State::Over(_) => return,
            State::Failing(causes) => causes.report(failure),
            State::Forming { .. } | State::Running => {
                self.state = State::Failing(Causes::new(failure, now + self.config.cause_window));
            }
        }
        let State::Failing(causes) = &self.state else { return };
        self.why = causes.cause().to_string();
        out.reason = format!("failing: {}", self.why);
        if causes.is_certain() {
            let cause = causes.cause().clone();
            self.abort(cause, out);
        }
    }

    /// Ends the job for everybody (TELL).
    fn abort(&mut self, failure: Failure, out: &mut Output) {
        self.why = failure.to_string();
        self.state = State::Over(Ending::Failed(failure.clone()));
        out.reason.clone_from(&self.why);
        out.commands.push(Command::Abort(failure.clone()));
        out.commands.push(Command::Finish(Ending::Failed(failure)));
    }

    pub(super) fn cancel(&mut self, why: String, out: &mut Output) {
        let failure = match &self.state {
            State::Over(_) => return,
            State::Failing(causes) => causes.cause().clone(),
            State::Forming { .. } | State::Running => Failure::new(FailureKind::Cancelled, why),
        };
        self.abort(failure, out);
    }

    pub(super) fn tick(&mut self, now: Duration, out: &mut Output) {
        let due = self.next_deadline().unwrap_or(now);
        match &self.state {
            State::Forming { .. } if now >= self.config.start_timeout => {
                let missing = self.forming.missing(&self.config);
                let waited = text::seconds(self.config.start_timeout);
                let what = format!("the world is not complete after {waited}: {missing}");
                let hint = "look at the output of the nodes that are missing, and whether they \
                            can reach the coordinator; a slow start may need a longer start timeout";
                self.abort(Failure::new(FailureKind::Timeout, what).hint(hint), out);
            }
            State::Forming { next_report } if now >= *next_report => {
                self.state = State::Forming { next_report: now + WAITING_REPORT };
                out.reason = self.forming.missing(&self.config);
                let text = out.reason.clone();
                out.commands.push(Command::Report { severity: Severity::Info, text });
            }
            State::Running => self.watch_over(now, due, out),
            State::Failing(causes) if now >= causes.until => {
                let (cause, reports) = (causes.cause().clone(), causes.reports());
                self.abort(cause, out);
                out.reason = format!("{} (of {})", self.why, text::count(reports, "report"));
            }
            State::Forming { .. } | State::Failing(_) | State::Over(_) => {}
        }
    }

    /// Silent nodes are lost, stalled tensors are told of (WAIT).
    fn watch_over(&mut self, now: Duration, due: Duration, out: &mut Output) {
        let timeout = self.config.heartbeat_timeout;
        if now > due + timeout / 2 {
            // The coordinator itself was stopped: whoever spoke meanwhile was not heard.
            self.members.hear_all(now);
            let late = text::seconds(now - due);
            let text =
                format!("the coordinator woke up {late} late; nobody is blamed for that time");
            out.commands.push(Command::Report { severity: Severity::Warning, text });
        }
        let limits = self.config.silence();
        if let Some((node, _)) = self.members.first_due(&limits)
            && let Some(silence) =
                self.members.get(node).and_then(|member| member.heard.silence(&limits, now))
        {
            let why = match silence {
                Silence::All(time) => {
                    format!("nothing was heard of it for {}", text::seconds(time))
                }
                Silence::Stream(time) => format!(
                    "nothing has come on its stream for {}, although it is there: something \
                     between holds up what goes over TCP to or from the coordinator's port",
                    text::seconds(time)
                ),
            };
            let failure = self.node_lost(node, &why);
            return self.fail(failure, now, out);
        }
        let lines = self.stall.look(now, &self.table, &self.flight, &self.members, &self.sets);
        out.reason = lines.join("; ");
        out.commands.extend(
            lines.into_iter().map(|text| Command::Report { severity: Severity::Warning, text }),
        );
    }
}
