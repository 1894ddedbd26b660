//! Makes all decisions and executes none of them: events and the time go in, commands and the
//! reason come out. It uses no tokio, no clock, no I/O, and only ordered maps, so the same events
//! always give the same commands.
//!
//! An [`Engine`] handles one [`Event`] at a time and passes it to the responsible handler:
//! `membership`, `agreement` or `dispatch`. Each owns its state, and knows the others' only as far
//! as it is passed to it here. `stall` and `deadlock` observe all three. Operations are sent out
//! with [`Event::Drained`], so tensors that become ready together are answered together.

mod deadlock;
mod explain;
mod stall;

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
    time::Duration,
};

use gradwire_collectives::Topology;
use gradwire_proto::{Failure, FailureKind, NodeId, ProcessSetId, Rank, Sequence, VERSION, pb};
use gradwire_settings::OnDeadlock;

use self::{deadlock::Deadlock, stall::Stall};
use crate::{
    agreement::{Agreement, Last},
    dispatch::{Dispatch, advice::advice, credit::Flying},
    membership::{Membership, members::Members},
    model::{
        Command, ConnectionId, EngineConfig, Event, Output, Phase,
        command::{Execute, Negotiated, Severity},
        event::{Announcement, Latest},
        learned::Memory,
        network::Network,
        round::Round,
        status::{Counts, MAX_NAMES, MAX_OPERATIONS, costs, milliseconds},
        text,
        violation::Violation,
    },
    probe::{Done, May, Probing},
};

/// The most tensors that a failure names.
const NAMED_TENSORS: usize = 3;

/// The negotiation of one job, from the first node to the last.
#[derive(Debug)]
pub struct Engine {
    config: Arc<EngineConfig>,
    membership: Membership,
    agreement: Agreement,
    dispatch: Dispatch,
    probing: Probing,
    /// The result of the probe, once it is complete.
    network: Option<Network>,
    stall: Stall,
    deadlock: Deadlock,
    /// The number of the last answer.
    answers: u64,
}

impl Engine {
    /// An engine that waits for the nodes of `config`; time starts at zero.
    pub fn new(config: EngineConfig) -> Self {
        let config = Arc::new(config);
        Self {
            membership: Membership::new(Arc::clone(&config)),
            agreement: Agreement::new(&Members::default(), &config),
            dispatch: Dispatch::new(Topology::flat(0), Vec::new(), &config),
            probing: Probing::none(),
            network: None,
            stall: Stall::new(config.stall_warning, config.stall_shutdown),
            deadlock: Deadlock::default(),
            answers: 0,
            config,
        }
    }

    /// Handles one event at a time `now` since the start. Returns what to do and why.
    pub fn step(&mut self, event: Event, now: Duration) -> Output {
        let mut out = Output::default();
        if let Some(connection) = event.connection()
            && !matches!(event, Event::Lost { .. })
        {
            self.membership.received(connection, now);
        }
        match event {
            Event::Joined { connection, join, proven } => {
                if self.membership.joined(connection, join, proven, now, &mut out) {
                    self.begin();
                }
            }
            Event::Lost { connection, why, may_return } => {
                let dispatch = &self.dispatch;
                let is_busy = |node| dispatch.is_busy(node);
                let how = (&*why, may_return);
                if let Some(node) = self.membership.lost(connection, how, is_busy, now, &mut out) {
                    self.lose(node, (&why, false), now, &mut out);
                }
            }
            Event::Failed { connection, failure, noticed } => {
                self.membership.reported(connection, failure, noticed, now, &mut out);
            }
            Event::Cancel { why } => self.membership.cancel(why, &mut out),
            Event::Paused => self.stall.pause(now),
            Event::StandsStill { what } => self.stands_still(what, now, &mut out),
            Event::StaysAway { failure } if self.phase() == Phase::Running => {
                self.membership.fail(failure, now, &mut out);
            }
            Event::StaysAway { .. } => {}
            Event::Recalled(learned) => self.dispatch.remember(&learned),
            Event::Suspended { time } => self.membership.suspended(time, now, &mut out),
            Event::Tick => self.tick(now, &mut out),
            Event::Drained => self.drained(now, &mut out),
            Event::MessageReceived { .. } => {}
            Event::DatagramReceived { node } => self.membership.received_datagram(node, now),
            Event::Nonsense { connection, .. }
            | Event::Ready { connection, .. }
            | Event::Done { connection, .. }
            | Event::Probed { connection, .. }
            | Event::Forgotten { connection, .. }
            | Event::Left { connection, .. }
            | Event::Stuck { connection, .. } => {
                if let Some(node) = self.membership.member(connection, &mut out)
                    && let Err(violation) = self.of_member(node, event, now, &mut out)
                {
                    self.membership.violated(node, violation, now, &mut out);
                }
            }
        }
        if self.agreement.table.waiting() > 0 || self.dispatch.flight.len() > 0 {
            self.stall.watch(now);
        }
        out
    }

    /// Whether this was the stream of a node that has none now and may return.
    pub fn awaits(&self, connection: ConnectionId) -> bool {
        self.membership.awaits(connection)
    }

    /// The stream of a node that has joined.
    pub fn connection(&self, node: NodeId) -> Option<ConnectionId> {
        self.membership.connection(node)
    }

    /// The time at which an [`Event::Tick`] is due, unless another event comes before.
    pub fn next_deadline(&self) -> Option<Duration> {
        let stall = self.stall.deadline().filter(|_| self.phase() == Phase::Running);
        let probe = self.probing.deadline().filter(|_| self.phase() == Phase::Running);
        [self.membership.deadline(), stall, probe].into_iter().flatten().min()
    }

    /// The phase of the job.
    pub fn phase(&self) -> Phase {
        self.membership.phase()
    }

    /// The reason for the phase.
    pub fn why(&self) -> String {
        self.membership.why()
    }

    /// Starts the negotiation, once the world is complete.
    fn begin(&mut self) {
        let members = self.membership.members();
        let racks: Vec<&str> = members.iter().map(|(_, m)| m.node.rack.as_str()).collect();
        let lines: Vec<u32> = members.iter().map(|(_, m)| m.node.line_mbit).collect();
        let topology = Topology::from_labels(&racks);
        let nodes = topology.clone().with_servers(self.config.servers).with_lines(&lines);
        self.agreement = Agreement::new(members, &self.config);
        self.dispatch = Dispatch::new(nodes, lines, &self.config);
        if self.config.probe {
            let may_find_racks =
                self.config.may_arrange && racks.iter().all(|rack| rack.is_empty());
            let may = May { find_racks: may_find_racks, order: self.config.may_arrange };
            self.probing = Probing::new(topology, self.config.lanes, may);
        }
    }

    /// Handles an event that only a node of the world may send.
    fn of_member(
        &mut self,
        node: NodeId,
        event: Event,
        now: Duration,
        out: &mut Output,
    ) -> Result<(), Violation> {
        if !matches!(event, Event::Stuck { .. }) {
            self.deadlock.moved(node);
        }
        match event {
            Event::Stuck { last, ranks, .. } => {
                self.deadlock.say(node, last, ranks, self.membership.members());
                Ok(())
            }
            Event::Nonsense { what, .. } => {
                Err(Violation::Protocol(format!("sent an invalid message: {what}")))
            }
            Event::Ready { announcements, .. } => self.ready(node, announcements, now),
            Event::Done { sequences, .. } => {
                let agreement = &mut self.agreement;
                self.dispatch.done(node, &sequences, now, |slot| agreement.table.finished(slot))
            }
            Event::Probed { sequence, time, retransmits, .. } => {
                self.probing.done(node, sequence, Done { time, retransmits }, now)
            }
            Event::Forgotten { ids, .. } => self.agreement.table.forgotten(node, &ids),
            Event::Left { ranks, absent, .. } => {
                let agreement = &self.agreement;
                let has_joined = |rank| agreement.sets.has_joined(rank);
                if self.membership.left(node, &ranks, absent, has_joined, out)? {
                    self.agreement.fail_left_behind(self.membership.members());
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn ready(
        &mut self,
        node: NodeId,
        announcements: Vec<Announcement>,
        now: Duration,
    ) -> Result<(), Violation> {
        let joins: Vec<ProcessSetId> = self.agreement.sets.note_joins(node, &announcements);
        for announcement in announcements {
            let from = Last { node, rank: self.last_rank(node, announcement.latest)? };
            let dispatch = &self.dispatch;
            let progress = |slot, set: &_| dispatch.progress(slot, node, set);
            let members = self.membership.members();
            let round =
                self.agreement.announce(from, announcement, &joins, now, members, progress)?;
            round.iter().for_each(|round| self.dispatch.queue.push(round));
        }
        for id in joins {
            let rounds = self.agreement.complete_without_joined(id, node, now);
            rounds.iter().for_each(|round| self.dispatch.queue.push(round));
        }
        Ok(())
    }

    /// The last rank of a node to submit a tensor, and how long its first rank had waited (TRUST).
    fn last_rank(
        &self,
        node: NodeId,
        latest: Option<Latest>,
    ) -> Result<Option<(Rank, Duration)>, Violation> {
        let members = self.membership.members();
        let Some(Latest { local_rank, waited }) = latest else {
            return Ok(members.only_rank(node).map(|rank| (rank, Duration::ZERO)));
        };
        let rank = members.rank(node, local_rank).ok_or_else(|| {
            let what = format!("named its local rank {local_rank} as the last to submit a tensor");
            Violation::Protocol(format!("{what}, but has no such rank"))
        })?;
        Ok(Some((rank, waited)))
    }

    /// Ends the job because a node is lost. `why` is the reason; `is_up`: its datagrams still
    /// arrive.
    fn lose(&mut self, node: NodeId, (why, is_up): (&str, bool), now: Duration, out: &mut Output) {
        let members = self.membership.members();
        let host = members.host(node);
        // The launcher takes the parts of this text (`lost_node` in its report.rs).
        let mut what = format!("the daemon of {} is lost: {why}", members.describe(node));
        let slots = self.dispatch.in_flight_on(node);
        let in_flight = slots.iter().filter_map(|slot| self.agreement.name(*slot));
        let mut names: Vec<&str> = in_flight.chain(self.agreement.pending_names()).collect();
        let first = names.first().copied().unwrap_or_default().to_owned();
        // The pieces of a tensor and its next use have one name.
        let mut seen = HashSet::new();
        names.retain(|name| seen.insert(*name));
        if !names.is_empty() {
            let names = text::some_names(names, NAMED_TENSORS);
            what = format!("{what}; in progress: {names}");
        }
        let hint = if is_up {
            format!(
                "let TCP pass between host {host} and the coordinator's port; coordinator.listen \
                 chooses that port"
            )
        } else {
            format!(
                "read the last output of gradwired on host {host}; if there is none, check whether \
                 the host is up"
            )
        };
        let failure = Failure::new(FailureKind::NodeLost, what).hint(hint).host(host).tensor(first);
        self.membership.fail(failure, now, out);
    }

    /// Ends the job because it stands still.
    fn stands_still(&mut self, what: String, now: Duration, out: &mut Output) {
        if self.phase() == Phase::Running {
            let hint = "see what the ranks do; in an evaluation or a checkpoint, say paused(), or \
                        raise watchdog.abort_ms";
            let failure = Failure::new(FailureKind::Timeout, what).hint(hint);
            self.membership.fail(failure, now, out);
        }
    }

    fn tick(&mut self, now: Duration, out: &mut Output) {
        if self.phase() != Phase::Running {
            return self.membership.tick(now, out);
        }
        // Silent nodes are lost, stalled tensors are reported (WAIT).
        if let Some((node, why, is_up)) = self.membership.silent(now) {
            let dispatch = &self.dispatch;
            if !self.membership.stays_away(node, |node| dispatch.is_busy(node), out) {
                self.lose(node, (&why, is_up), now, out);
            }
            return;
        }
        let members = self.membership.members();
        if let Some(failure) = self.stall.too_long(now, &self.agreement, members) {
            return self.membership.fail(failure, now, out);
        }
        let late = self.stall.look(now, &self.agreement, &self.dispatch.flight, members);
        out.reason = [&late.tensors[..], &late.operations].concat().join("; ");
        if !late.tensors.is_empty() {
            out.commands.push(Command::Stalled { texts: late.tensors });
        }
        out.commands.extend(
            late.operations
                .into_iter()
                .map(|text| Command::Report { severity: Severity::Warning, text }),
        );
    }

    /// Sends out what is ready, as far as there is credit.
    fn drained(&mut self, now: Duration, out: &mut Output) {
        out.measures.waits = self.agreement.waiting.take();
        out.measures.disagreements = std::mem::take(&mut self.agreement.disagreements);
        if self.phase() != Phase::Running {
            return;
        }
        let mut execute = self.agreement.take_answer();
        let mut choices = Vec::new();
        let measured = self.probe(&mut execute, now);
        if self.probing.is_over() && self.dispatch.queue.len() > 0 {
            execute.links = self.dispatch.take_links(self.network.as_ref());
        }
        let piece_bytes = self.dispatch.piece_bytes();
        let Self { agreement, dispatch, probing, .. } = self;
        while probing.is_over()
            && let Some(sent) = dispatch.next(piece_bytes, now, |set| agreement.sets.get(set))
        {
            for cut in &sent.cuts {
                execute.registrations.extend(agreement.table.sent(&cut.round, cut.last));
                if cut.first {
                    let Round { since, agreed, .. } = *cut.round;
                    out.measures.negotiated.push(Negotiated {
                        negotiate: agreed.saturating_sub(since),
                        credit: now.saturating_sub(agreed),
                    });
                }
            }
            choices.extend(sent.choice);
            execute.operations.push(sent.operation);
        }
        execute.specs = self.dispatch.chooser.take_unannounced();
        execute.evicted = self.agreement.table.take_evicted();
        if let Some(text) = self.agreement.table.take_warning() {
            out.commands.push(Command::Report { severity: Severity::Warning, text });
        }
        if execute.is_empty() {
            return self.end_deadlock(now, out);
        }
        self.answers += 1;
        execute.number = self.answers;
        choices.append(&mut self.dispatch.corrections);
        // Steps of the probe are only logged. Its result counts as a decision, because algorithms
        // depend on it.
        let is_result = execute.probes.is_empty();
        let (result, step) = if is_result { (measured, None) } else { (None, measured) };
        let decided = Self::decided(&execute, result.into_iter().chain(choices));
        out.reason = self.reason(&execute, step, &decided);
        out.decided = Some(decided);
        out.commands.push(Command::Execute(Box::new(execute)));
    }

    /// Ends the job if no rank can ever go on, or reports that. There is nothing to send out.
    fn end_deadlock(&mut self, now: Duration, out: &mut Output) {
        let is_idle = self.probing.is_over()
            && self.dispatch.queue.len() == 0
            && self.dispatch.flight.len() == 0;
        if self.deadlock.is_reported
            || !is_idle
            || !self.deadlock.is_certain(self.answers, self.membership.members())
        {
            return;
        }
        self.deadlock.is_reported = true;
        let failure = self.deadlock.failure();
        match self.config.deadlock {
            OnDeadlock::Fail => self.membership.fail(failure, now, out),
            OnDeadlock::Warn => {
                out.reason = failure.to_string();
                let text = out.reason.clone();
                out.commands.push(Command::Report { severity: Severity::Warning, text });
            }
        }
    }

    /// Adds the next probes to an answer. Returns a text on the last measurement, and at the end on
    /// the whole probe.
    fn probe(&mut self, execute: &mut Execute, now: Duration) -> Option<String> {
        let Self { probing, dispatch, .. } = self;
        if probing.is_over() {
            return None;
        }
        let last = probing.last();
        execute.probes = probing.next(now, || dispatch.flight.number());
        let Some(network) = probing.finish(now) else {
            return last.filter(|_| !execute.probes.is_empty());
        };
        dispatch.chooser.set_cost(network.cost.replaced_by(self.config.cost));
        let arrangement = network.arrangement.clone();
        execute.arrangement = arrangement.filter(|arranged| dispatch.chooser.arrange(arranged));
        let why = execute.arrangement.iter().map(|arranged| format!("; {}", arranged.reason));
        let why: String = why.collect();
        let took = network.took.as_secs_f64();
        let links = text::count(network.links.len(), "link");
        let cut = if network.is_complete { "" } else { " (incomplete because of the time limit)" };
        self.network = Some(network);
        Some(format!("{links} measured in {took:.3} s{cut}{why}"))
    }

    /// The decisions in an answer, besides sending out what was ready.
    fn decided(execute: &Execute, choices: impl Iterator<Item = String>) -> Vec<String> {
        let created = execute.sets_created.iter().map(|made| {
            format!("process set {} of {} created", made.set, text::named_ranks(&made.ranks))
        });
        let joined = execute.joined.iter().map(|joined| {
            format!("all ranks of process set {} joined, rank {} last", joined.set, joined.last)
        });
        let gone =
            execute.sets_removed.iter().map(|gone| format!("process set {} removed", gone.set));
        created.chain(joined).chain(gone).chain(choices).collect()
    }

    /// The reason for an answer. `step` is the last measurement of the probe.
    fn reason(&self, execute: &Execute, step: Option<String>, decided: &[String]) -> String {
        let flight = &self.dispatch.flight;
        let mut reason = format!(
            "{} started, {} of {} in flight, {} waiting for credit, {} failed",
            text::count(execute.operations.len(), "operation"),
            flight.len(),
            flight.credit(),
            text::count(self.dispatch.queue.len(), "tensor"),
            text::count(execute.failures.len(), "tensor"),
        );
        let evicted = execute.evicted.len();
        let evicted = (evicted > 0).then(|| format!("{} evicted", text::count(evicted, "id")));
        let probes = execute.probes.first().map(|probe| {
            let groups = text::count(probe.groups.len(), "group");
            format!("probe {} of {groups}, {} at a time", probe.pattern, execute.probes.len())
        });
        let others = probes.into_iter().chain(step).chain(evicted);
        for more in others.chain(decided.iter().cloned()) {
            reason.push_str("; ");
            reason.push_str(&more);
        }
        reason
    }

    /// The times of this job and of earlier ones.
    pub fn learned(&self) -> Memory {
        self.dispatch.learned()
    }

    /// Counts for the metrics.
    pub fn counts(&self) -> Counts {
        let flight = &self.dispatch.flight;
        Counts {
            nodes: self.membership.nodes(),
            ranks: self.membership.members().ranks(),
            sets: self.agreement.sets.len(),
            pending: self.agreement.table.waiting(),
            queued: self.dispatch.queue.len(),
            stalled: self.stall.stalled,
            in_flight: flight.len(),
            started: flight.started(),
            done: flight.completed(),
        }
    }

    fn operations(&self, now: Duration) -> Vec<pb::RunningOperation> {
        let status = |(sequence, flying): (Sequence, &Flying)| {
            let names = flying.slots.iter().filter_map(|slot| self.agreement.name(*slot));
            pb::RunningOperation {
                sequence: sequence.0,
                running_ms: milliseconds(now.saturating_sub(flying.since)),
                tensors: names.take(MAX_NAMES).map(ToOwned::to_owned).collect(),
                tensor_count: flying.slots.len() as u64,
                missing_nodes: flying.nodes.ones().map(|node| node as u32).collect(),
            }
        };
        self.dispatch.flight.iter().take(MAX_OPERATIONS).map(status).collect()
    }

    /// The whole state, for viewers, with what the nodes report. The runtime adds its own part.
    pub fn status(
        &self,
        reports: &BTreeMap<u32, pb::NodeReport>,
        now: Duration,
    ) -> pb::StatusResponse {
        let counts = self.counts();
        let (pending, pending_count) = self.pending_status(reports, now);
        let network = self.network.as_ref();
        pb::StatusResponse {
            job: self.config.job.to_string(),
            version: VERSION.to_owned(),
            phase: self.phase().name().to_owned(),
            reason: self.why(),
            epoch: self.config.epoch.0,
            nodes: self.membership.status(now),
            process_sets: self.agreement.set_status(),
            process_set_count: counts.sets as u64,
            pending,
            pending_count,
            operations: self.operations(now),
            operations_started: counts.started,
            operations_done: counts.done,
            choices: self.dispatch.chooser.status(),
            sizes: Some(self.dispatch.sizes.status()),
            advice: network.map_or_else(Vec::new, |it| advice(&self.config, it)),
            network: network.map(Network::status),
            costs: Some(costs(self.dispatch.chooser.cost())),
            failure: self.membership.failure().cloned().map(Into::into),
            ..pb::StatusResponse::default()
        }
    }
}
