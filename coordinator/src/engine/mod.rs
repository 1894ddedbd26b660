//! Decides everything and does nothing: events and the time go in, commands and the reason come
//! out. No tokio, no clock, no I/O, and ordered maps only, so that the same events give the same
//! commands every time.
//!
//! - [`event`], [`command`]: the two ends
//! - [`config`]: what is fixed before the start
//! - `world`: who is in the world, and who may come in
//! - `process_set`: groups of ranks; `sets`: how they come and go, and who has joined
//! - `ready_table`: which node has announced which `tensor`, once `check` lets it; `ids`: their
//!   short names; `evicted`: those that were taken away again
//! - `settle`: what comes of it when everybody has; `agreement`: the table of who asked for what
//!   when ranks disagree
//! - `plan`: what goes between which nodes; `pack`: what of it goes out next, fused and cut;
//!   `credit`: how much at a time
//! - `algorithm`: how a piece is reduced or moved
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
mod check;
mod credit;
mod evicted;
mod failure;
mod ids;
mod life;
mod node_set;
mod pack;
mod plan;
mod process_set;
mod ready_table;
mod sets;
mod settle;
mod stall;
mod tensor;
mod text;
mod world;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use gradwire_proto::{
    Ending, Failure, FailureKind, NodeId, ProcessSetId, Rank, Sequence, convert::TensorRef,
};

pub use algorithm::Algorithm;
pub use command::{Command, Output};
pub use config::EngineConfig;
pub use event::{ConnectionId, Event};
pub use status::{Phase, Status};

#[cfg(test)]
pub(crate) use {pack::MAX_SEGMENTS, plan::MAX_FLOWS};

use algorithm::Chooser;
use command::{Execute, Operation, Segment};
use credit::Flight;
use event::Announcement;
use failure::Causes;
use node_set::NodeSet;
use pack::{Piece, Queue};
use process_set::ProcessSet;
use ready_table::{Announced, ReadyTable, Settled, Slot, Violation};
use stall::Stall;
use world::{Forming, Members};

/// How often it is told who has not joined.
const WAITING_REPORT: Duration = Duration::from_secs(5);

#[derive(Debug)]
enum State {
    Forming { next_report: Duration },
    Running,
    Failing(Causes),
    Over(Ending),
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
    /// The number of the process set that was made last; none comes again.
    last_set: u32,
    /// Process sets in which all have joined, while something before that is not done.
    returning: BTreeSet<ProcessSetId>,
    /// Process sets that go, while something in them is not done, and the requests for that.
    removing: BTreeMap<ProcessSetId, TensorRef>,
    /// What is to be said with the next answer, beside operations.
    answer: Execute,
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
            chooser: Chooser::new(&members, &config),
            stall: Stall::new(config.stall_warning),
            last_set: 0,
            returning: BTreeSet::new(),
            removing: BTreeMap::new(),
            answer: Execute::default(),
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
            member.heard.stream = now;
        }
        match event {
            Event::Joined { connection, join } => self.joined(connection, join, now, &mut out),
            Event::Lost { connection, why } => self.lost(connection, &why, now, &mut out),
            Event::Cancel { why } => self.cancel(why, &mut out),
            Event::Tick => self.tick(now, &mut out),
            Event::Drained => self.drained(now, &mut out),
            Event::Heard { .. } => {}
            Event::Felt { node } => {
                if let Some(member) = self.members.get_mut(node) {
                    member.heard.datagram = now;
                }
            }
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
            Event::Forgotten { connection, ids } => {
                self.by_member(connection, now, &mut out, |engine, node, _| {
                    engine.table.forgotten(node, &ids)
                });
            }
            Event::Left { connection, ranks, absent } => {
                self.by_member(connection, now, &mut out, |engine, node, out| {
                    engine.left(node, &ranks, absent, out)
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
                let silence = self.members.first_due(&self.config.silence()).map(|(_, due)| due);
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
            // Whoever let it go, somebody must have asked for it.
            Violation::LeftInJoin(rank) => (
                FailureKind::Invalid,
                format!("says that rank {rank} leaves, which has joined and waits for the others"),
                "wait for the join before the process ends",
            ),
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
        let joins = self.note_joins(node, &announcements);
        for announcement in announcements {
            let id = announcement.set;
            if !self.heeds(&announcement)? {
                continue;
            }
            let Some(set) = self.sets.get(&id) else { continue };
            let (flight, queue) = (&self.flight, &self.queue);
            let waits = |slot| queue.holds(slot, node, set);
            let flies = |slot| flight.holds(slot, node);
            match self.table.announce(node, announcement, set, now, waits, flies)? {
                Announced::Late => {}
                // The rest of the message may be about the same.
                Announced::Complete(_) if joins.contains(&id) => {}
                Announced::Complete(slot) => self.complete(slot, id, node, now, out),
                Announced::Waiting(slot) => {
                    self.stall.watch(now);
                    if self.departures > 0 {
                        self.fail_if_left_behind(slot);
                    }
                }
            }
        }
        for id in joins {
            self.complete_without_joined(id, node, now, out);
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
        let joins = self.table.get(slot).is_some_and(|tensor| tensor.mixture.has_joins());
        match self.table.settle(slot, set) {
            None => {}
            Some(Settled::Runs(round)) => {
                let lag = now.saturating_sub(round.since);
                let most = self.lags.entry(last).or_default();
                *most = lag.max(*most);
                self.queue.push(&round);
            }
            Some(Settled::Asks { request, tensor }) => self.asked(slot, id, &request, tensor),
            Some(Settled::Fails(failed)) => {
                let disagreement = failed.failure.kind == FailureKind::Disagreement;
                out.measures.disagreements += u64::from(disagreement);
                let why = failed.failure.clone();
                self.answer.failures.push(failed);
                if joins {
                    self.unjoin(id, &why);
                }
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

    fn left(
        &mut self,
        node: NodeId,
        ranks: &[Rank],
        absent: bool,
        out: &mut Output,
    ) -> Result<(), Violation> {
        if let Some(member) = self.members.get_mut(node) {
            let own: Vec<Rank> = member.ranks().collect();
            for rank in ranks {
                let twice = member.left.insert(*rank, self.departures).is_some();
                self.departures += 1;
                member.absent.extend(absent.then_some(*rank));
                if twice || own.binary_search(rank).is_err() {
                    return Err(Violation::Protocol(format!(
                        "says that rank {rank} leaves, which is not its own or has left already"
                    )));
                }
                if self.sets.values().any(|set| set.joined().contains(rank)) {
                    return Err(Violation::LeftInJoin(*rank));
                }
            }
        }
        let how = if absent { "ended without having joined" } else { "left in good order" };
        out.reason = format!("{} {how}", text::named_ranks(ranks));
        if self.members.iter().all(|(_, member)| member.has_left()) {
            "every rank has left in good order".clone_into(&mut self.why);
            self.state = State::Over(Ending::Finished);
            out.reason.clone_from(&self.why);
            out.commands.extend([Command::Shutdown, Command::Finish(Ending::Finished)]);
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
        let absent = self.members.get(node).is_some_and(|member| member.absent.contains(&rank));
        let left = || {
            let what = format!("rank {rank} has left the job in good order and will not submit it");
            Failure::new(FailureKind::RankLeft, what)
                .hint("make sure that every rank makes the same calls, the same number of times")
                .rank(rank)
        };
        let failure = if absent { Failure::never_came(rank) } else { left() };
        let failure = failure.host(host).tensor(tensor.name.as_str());
        self.fail_tensor(slot, failure);
    }

    /// Answers what has become ready, as far as there is credit.
    fn drained(&mut self, now: Duration, out: &mut Output) {
        out.measures.lags = std::mem::take(&mut self.lags).into_iter().collect();
        if !matches!(self.state, State::Running) {
            return;
        }
        self.finish_sets();
        let mut execute = std::mem::take(&mut self.answer);
        let mut choices = Vec::new();
        let piece_bytes = self.queue.fair_piece(self.config.lanes, self.config.piece_bytes);
        while self.flight.has_credit()
            && let Some(piece) = self.queue.cut(piece_bytes)
        {
            let row = self.flight.len() as u64 + 1 + self.queue.pieces(piece_bytes);
            self.send(piece, row, now, &mut execute, &mut choices, out);
        }
        execute.evicted = self.table.take_evicted();
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
        let created = execute.sets_created.iter().map(|made| {
            format!("process set {} of {} created", made.set, text::named_ranks(&made.ranks))
        });
        let joined = execute.joined.iter().map(|joined| {
            format!("all of process set {} have joined, rank {} last", joined.set, joined.last)
        });
        let gone =
            execute.sets_removed.iter().map(|gone| format!("process set {} removed", gone.set));
        let evicted = execute.evicted.len();
        let evicted = (evicted > 0).then(|| format!("{} evicted", text::count(evicted, "id")));
        for more in created.chain(joined).chain(gone).chain(evicted).chain(choices) {
            out.reason.push_str("; ");
            out.reason.push_str(&more);
        }
        out.commands.push(Command::Execute(execute));
    }

    /// Sends a piece out, one of `row` that are under way or wait.
    fn send(
        &mut self,
        piece: Piece,
        row: u64,
        now: Duration,
        execute: &mut Execute,
        choices: &mut Vec<String>,
        out: &mut Output,
    ) {
        let Piece { kind, bytes, cuts } = piece;
        let Some(set) = self.sets.get(&kind.set) else { return };
        let participants = kind.participants(set);
        let travelling = kind.travelling(self.config.compression, bytes);
        let (algorithm, chosen) = self.chooser.choose(kind.route, &participants, travelling, row);
        choices.extend(chosen);
        let mut nodes = NodeSet::new(self.members.len());
        for &node in &participants {
            nodes.insert(node);
        }
        let slots = cuts.iter().map(|cut| cut.round.slot).collect();
        let sequence = self.flight.start(nodes, slots, now);
        let mut segments = Vec::with_capacity(cuts.len());
        for cut in cuts {
            let round = &cut.round;
            execute.registrations.extend(self.table.sent(round, cut.last));
            if cut.first {
                out.measures.negotiated.push(now.saturating_sub(round.since));
            }
            let by_name = matches!(round.tensor, TensorRef::Name(_));
            segments.push(Segment {
                tensor: round.tensor.clone(),
                flow: cut.flow,
                offset: cut.offset,
                count: cut.count,
                agreed: (by_name && cut.opens).then(|| Arc::clone(&round.plan.agreed)),
            });
        }
        execute.operations.push(Operation {
            sequence,
            set: kind.set,
            request: kind.request(),
            algorithm,
            segments,
            absent: Arc::clone(&kind.absent),
        });
    }
}
