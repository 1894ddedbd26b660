//! Decides everything and does nothing: events and the time go in, commands and the reason come
//! out. No tokio, no clock, no I/O, and ordered maps only, so that the same events give the same
//! commands every time.
//!
//! - [`event`], [`command`]: the two ends
//! - [`config`]: what is fixed before the start
//! - `world`: who is in the world, and who may come in
//! - `ready_table`: which node has announced which `tensor`; `ids`: their short names
//! - `agreement`: the table of who asked for what when ranks disagree
//! - `pack`: what goes out next, fused and cut; `credit`: how much at a time
//! - `algorithm`: how a piece is reduced
//! - `failure`: the first cause; `stall`: who is late
//! - [`status`]: what people see
//!
//! An [`Engine`] takes one [`Event`] at a time. What it must answer at once it answers at once;
//! operations go out when it is told [`Event::Drained`], so that what becomes ready together is
//! answered together.

pub mod algorithm;
pub mod command;
pub mod config;
pub mod event;
pub mod status;

mod agreement;
mod credit;
mod failure;
mod ids;
mod life;
mod node_set;
mod pack;
mod ready_table;
mod stall;
mod tensor;
mod text;
mod world;

use std::{collections::BTreeMap, time::Duration};

use gradwire_proto::{Failure, FailureKind, NodeId, ProcessSetId, Rank, Sequence};

pub use algorithm::Algorithm;
pub use command::{Command, Outcome, Output};
pub use config::EngineConfig;
pub use event::{ConnectionId, Event};
pub use status::{Phase, Status};

#[cfg(test)]
pub(crate) use pack::MAX_SEGMENTS;

use algorithm::Chooser;
use command::{Execute, Operation, Segment, TensorFailure};
use credit::Flight;
use event::Announcement;
use failure::Causes;
use node_set::NodeSet;
use pack::{Piece, Queue};
use ready_table::{Announced, ReadyTable, Slot, Violation};
use stall::Stall;
use world::{Forming, Members, ProcessSet};

/// How often it is told who has not joined.
const WAITING_REPORT: Duration = Duration::from_secs(5);

#[derive(Debug)]
enum State {
    Forming { next_report: Duration },
    Running,
    Failing(Causes),
    Over(Outcome),
}

/// One job's negotiation, from the first node to the last.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    state: State,
    /// Why the state is what it is.
    why: String,
    forming: Forming,
    members: Members,
    sets: BTreeMap<ProcessSetId, ProcessSet>,
    table: ReadyTable,
    queue: Queue,
    flight: Flight,
    chooser: Chooser,
    stall: Stall,
    /// Tensors that will never run, for the next answer.
    failures: Vec<TensorFailure>,
    /// How long others waited for a node, for the metrics.
    lags: BTreeMap<NodeId, Duration>,
    departures: u32,
}

impl Engine {
    /// An engine that waits for the nodes of `config`; time counts from here.
    pub fn new(config: EngineConfig) -> Self {
        let members = Members::default();
        Self {
            state: State::Forming { next_report: WAITING_REPORT },
            why: Forming::default().missing(&config),
            forming: Forming::default(),
            sets: BTreeMap::new(),
            table: ReadyTable::new(0, 0, 0),
            queue: Queue::default(),
            flight: Flight::new(config.credit_pieces as usize),
            chooser: Chooser::new(&members, config.algorithm, config.cost),
            stall: Stall::new(config.stall_warning),
            failures: Vec::new(),
            lags: BTreeMap::new(),
            departures: 0,
            members,
            config,
        }
    }

    /// Takes one event at a time `now` since the start, and says what to do and why.
    pub fn step(&mut self, event: Event, now: Duration) -> Output {
        let mut out = Output::default();
        if let Some(node) = event.connection().and_then(|connection| self.members.id(connection))
            && let Some(member) = self.members.get_mut(node)
        {
            member.heard = now;
        }
        match event {
            Event::Joined { connection, join } => self.joined(connection, join, now, &mut out),
            Event::Lost { connection, why } => self.lost(connection, &why, now, &mut out),
            Event::Cancel { why } => self.cancel(why, &mut out),
            Event::Tick => self.tick(now, &mut out),
            Event::Drained => self.drained(now, &mut out),
            Event::Heard { .. } => {}
            Event::Nonsense { connection, what } => {
                let told = Err(Violation::Protocol(format!("sent what is no message: {what}")));
                self.by_member(connection, now, &mut out, |_, _, _| told);
            }
            Event::Ready { connection, announcements } => {
                self.by_member(connection, now, &mut out, |engine, node, out| {
                    engine.ready(node, announcements, now, out)
                });
            }
            Event::Done { connection, sequences } => {
                self.by_member(connection, now, &mut out, |engine, node, _| {
                    engine.done(node, &sequences)
                });
            }
            Event::Left { connection, ranks } => {
                self.by_member(connection, now, &mut out, |engine, node, out| {
                    engine.left(node, &ranks, out)
                });
            }
            Event::Failed { connection, failure } => {
                self.reported(connection, failure, now, &mut out);
            }
        }
        out
    }

    /// The time at which a [`Event::Tick`] is due, unless something happens before.
    pub fn next_deadline(&self) -> Option<Duration> {
        match &self.state {
            State::Forming { next_report } => Some(self.config.start_timeout.min(*next_report)),
            State::Running => {
                let silence = self.members.most_silent();
                let silence = silence.map(|(_, heard)| heard + self.config.heartbeat_timeout);
                [silence, self.stall.deadline()].into_iter().flatten().min()
            }
            State::Failing(causes) => Some(causes.until),
            State::Over(_) => None,
        }
    }

    /// Runs what only a node of the world may ask for. Once the job is failing nothing of it
    /// matters any more.
    fn by_member(
        &mut self,
        connection: ConnectionId,
        now: Duration,
        out: &mut Output,
        act: impl FnOnce(&mut Self, NodeId, &mut Output) -> Result<(), Violation>,
    ) {
        match self.state {
            State::Forming { .. } => self.too_early(connection, out),
            State::Running => {
                let Some(node) = self.members.id(connection) else { return };
                if let Err(violation) = act(self, node, out) {
                    let failure = self.violated(node, violation);
                    self.fail(failure, now, out);
                }
            }
            State::Failing(_) | State::Over(_) => {}
        }
    }

    fn violated(&self, node: NodeId, violation: Violation) -> Failure {
        let (kind, what, hint) = match violation {
            Violation::Protocol(what) => (
                FailureKind::Protocol,
                what,
                "this is a defect of that node's gradwired: install the same release everywhere, \
                 and please report it",
            ),
            Violation::Resource(what) => (
                FailureKind::Resource,
                what,
                "give a tensor the same name in every step; names that are made anew each time \
                 pile up",
            ),
        };
        let what = format!("{} {what}", self.members.describe(node));
        Failure::new(kind, what).hint(hint).host(self.members.host(node))
    }

    fn ready(
        &mut self,
        node: NodeId,
        announcements: Vec<Announcement>,
        now: Duration,
        out: &mut Output,
    ) -> Result<(), Violation> {
        for announcement in announcements {
            let id = announcement.set;
            let Some(set) = self.sets.get(&id) else {
                return Err(Violation::Protocol(format!(
                    "announced a tensor of the unknown process set {id}"
                )));
            };
            let flight = &self.flight;
            let on_its_way = |slot| flight.holds(slot, node);
            match self.table.announce(node, announcement, set, now, on_its_way)? {
                Announced::Late => {}
                Announced::Waiting(slot) => {
                    self.stall.watch(now);
                    if self.departures > 0 {
                        self.fail_if_left_behind(slot);
                    }
                }
                Announced::Complete(slot) => self.complete(slot, id, node, now, out),
            }
        }
        Ok(())
    }

    fn complete(
        &mut self,
        slot: Slot,
        id: ProcessSetId,
        last: NodeId,
        now: Duration,
        out: &mut Output,
    ) {
        let Some(set) = self.sets.get(&id) else { return };
        match self.table.settle(slot, set) {
            None => {}
            Some(Ok(agreed)) => {
                let lag = now.saturating_sub(agreed.since);
                let most = self.lags.entry(last).or_default();
                *most = lag.max(*most);
                self.queue.push(slot, id, &agreed.request, agreed.priority, agreed.since);
            }
            Some(Err(failure)) => {
                let disagreement = failure.failure.kind == FailureKind::Disagreement;
                out.measures.disagreements += u64::from(disagreement);
                self.failures.push(failure);
            }
        }
    }

    fn done(&mut self, node: NodeId, sequences: &[Sequence]) -> Result<(), Violation> {
        for &sequence in sequences {
            match self.flight.done(node, sequence) {
                Err(()) => {
                    let what = format!(
                        "says that it has done operation {sequence}, which it was not doing"
                    );
                    return Err(Violation::Protocol(what));
                }
                Ok(None) => {}
                Ok(Some(slots)) => slots.into_iter().for_each(|slot| self.table.finished(slot)),
            }
        }
        Ok(())
    }

    fn left(&mut self, node: NodeId, ranks: &[Rank], out: &mut Output) -> Result<(), Violation> {
        if let Some(member) = self.members.get_mut(node) {
            let own: Vec<Rank> = member.ranks().collect();
            for rank in ranks {
                let twice = member.left.insert(*rank, self.departures).is_some();
                self.departures += 1;
                if twice || own.binary_search(rank).is_err() {
                    return Err(Violation::Protocol(format!(
                        "says that rank {rank} leaves, which is not its own or has left already"
                    )));
                }
            }
        }
        out.reason = format!("{} left in good order", text::named_ranks(ranks));
        if self.members.iter().all(|(_, member)| member.has_left()) {
            "every rank has left in good order".clone_into(&mut self.why);
            self.state = State::Over(Outcome::Finished);
            out.reason.clone_from(&self.why);
            out.commands.extend([Command::Shutdown, Command::Finish(Outcome::Finished)]);
            return Ok(());
        }
        let waiting: Vec<Slot> = self.table.pending().map(|(slot, ..)| slot).collect();
        waiting.into_iter().for_each(|slot| self.fail_if_left_behind(slot));
        Ok(())
    }

    /// Fails a tensor that waits for a rank which has left.
    fn fail_if_left_behind(&mut self, slot: Slot) {
        let Some(tensor) = self.table.get(slot) else { return };
        let Some(set) = self.sets.get(&tensor.set) else { return };
        let Some((node, rank)) = tensor.left_behind(set, &self.members) else { return };
        let host = self.members.host(node);
        let what = format!("rank {rank} has left the job in good order and will not submit it");
        let failure = Failure::new(FailureKind::RankLeft, what)
            .hint("make sure that every rank makes the same calls, the same number of times")
            .rank(rank)
            .host(host)
            .tensor(tensor.name.as_str());
        self.failures.extend(self.table.fail(slot, failure));
    }

    /// Answers what has become ready, as far as there is credit.
    fn drained(&mut self, now: Duration, out: &mut Output) {
        out.measures.lags = std::mem::take(&mut self.lags).into_iter().collect();
        if !matches!(self.state, State::Running) {
            return;
        }
        let mut execute =
            Execute { failures: std::mem::take(&mut self.failures), ..Execute::default() };
        let mut choices = Vec::new();
        while self.flight.has_credit()
            && let Some(piece) = self.queue.cut(self.config.piece_bytes)
        {
            self.send(piece, now, &mut execute, &mut choices, out);
        }
        if execute.is_empty() {
            return;
        }
        if !execute.operations.is_empty() {
            self.stall.watch(now);
        }
        out.reason = format!(
            "{} out, {} of {} in flight, {} waiting for credit, {} failed",
            text::count(execute.operations.len(), "operation"),
            self.flight.len(),
            self.flight.credit(),
            text::count(self.queue.len(), "tensor"),
            text::count(execute.failures.len(), "tensor"),
        );
        for choice in choices {
            out.reason.push_str("; ");
            out.reason.push_str(&choice);
        }
        out.commands.push(Command::Execute(execute));
    }

    fn send(
        &mut self,
        piece: Piece,
        now: Duration,
        execute: &mut Execute,
        choices: &mut Vec<String>,
        out: &mut Output,
    ) {
        let Some(set) = self.sets.get(&piece.set) else { return };
        let (algorithm, chosen) = self.chooser.choose(piece.set, set, &piece.request, piece.bytes);
        choices.extend(chosen);
        let mut nodes = NodeSet::new(self.members.len());
        for &node in &set.participants {
            nodes.insert(node);
        }
        let slots = piece.cuts.iter().map(|cut| cut.slot).collect();
        let sequence = self.flight.start(nodes, slots, now);
        let mut segments = Vec::with_capacity(piece.cuts.len());
        for cut in piece.cuts {
            let Some((tensor, registration)) = self.table.sent(cut.slot, cut.last) else {
                continue;
            };
            execute.registrations.extend(registration);
            segments.push(Segment { tensor, offset: cut.offset, count: cut.count });
            out.measures.negotiated.extend(cut.first_of.map(|since| now.saturating_sub(since)));
        }
        execute.operations.push(Operation {
            sequence,
            set: piece.set,
            request: piece.request,
            algorithm,
            segments,
        });
    }
}
