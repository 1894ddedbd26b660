//! What is sent out next, how much at a time, and with which algorithm.
//!
//! - `queue`: agreed tensors, fused and cut into pieces in order of priority
//! - `credit`: the operations in flight, and whether more may start
//! - `algorithm`: how a piece is reduced or moved
//! - `decision`: which algorithm that is, for one class of pieces
//! - `observed`: how long that has taken
//! - `rates`: the rates of links, for algorithms that distribute load by them
//!
//! [`Dispatch`] owns all tensors that ranks have agreed on and that are not done.

pub(crate) mod credit;

mod algorithm;
mod decision;
mod observed;
mod queue;
mod rates;

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use fixedbitset::FixedBitSet;
use gradwire_collectives::{Algorithm, CostModel, Links, Topology};
use gradwire_proto::{Compression, NodeId, ProcessSetId, Sequence, convert::TensorRef};

use self::{
    algorithm::{Chooser, Chosen, Work},
    credit::{Completed, Flight},
    queue::{Cut, Piece, Queue},
};
use crate::model::{
    EngineConfig,
    command::{KnownSpec, Operation, Segment},
    learned::Learned,
    network::Network,
    process_set::ProcessSet,
    round::{Progress, Round, Slot},
    status::ChoiceStatus,
    violation::Violation,
};

/// One operation to send out.
#[derive(Debug)]
pub(crate) struct Sent {
    pub(crate) operation: Operation,
    /// The cuts that it consists of, segment by segment.
    pub(crate) cuts: Vec<Cut>,
    /// The reason for its algorithm, if that was decided for it.
    pub(crate) choice: Option<String>,
}

/// The tensors to send out, and the operations in flight.
#[derive(Debug)]
pub(crate) struct Dispatch {
    queue: Queue,
    flight: Flight,
    chooser: Chooser,
    /// The reasons of choices that measured times have changed, for the next answer.
    corrections: Vec<String>,
    nodes: usize,
    /// The rate of each node's line in Mbit/s, 0 if it is not known, until links are sent.
    lines: Option<Vec<u32>>,
    lanes: u32,
    max_piece_bytes: u64,
    compression: Compression,
}

impl Dispatch {
    /// The dispatch for these nodes, the servers last, and the rates of their lines in Mbit/s.
    pub(crate) fn new(nodes: Topology, lines: Vec<u32>, config: &EngineConfig) -> Self {
        let links_matter = config.rules.names(Algorithm::Blink);
        Self {
            queue: Queue::default(),
            flight: Flight::new(config.credit_pieces as usize),
            nodes: nodes.participants() as usize,
            chooser: Chooser::new(nodes, config),
            corrections: Vec::new(),
            lines: Some(lines).filter(|_| links_matter),
            lanes: config.lanes,
            max_piece_bytes: config.piece_bytes,
            compression: config.compression,
        }
    }

    /// How many tensors wait for credit.
    pub(crate) fn queued(&self) -> usize {
        self.queue.len()
    }

    /// The operations in flight.
    pub(crate) fn flight(&self) -> &Flight {
        &self.flight
    }

    /// The next number of the one order, for a probe.
    pub(crate) fn number(&mut self) -> Sequence {
        self.flight.number()
    }

    /// Chooses by these costs from now on.
    pub(crate) fn set_cost(&mut self, cost: CostModel) {
        self.chooser.set_cost(cost);
    }

    /// The costs by which algorithms are chosen.
    pub(crate) fn cost(&self) -> &CostModel {
        self.chooser.cost()
    }

    /// Whether a node takes part in an operation that it has not done.
    pub(crate) fn is_busy(&self, node: NodeId) -> bool {
        self.flight.iter().any(|(_, flying)| flying.has(node))
    }

    /// The tensors in operations that a node has not done.
    pub(crate) fn in_flight_on(&self, node: NodeId) -> BTreeSet<Slot> {
        let flying = self.flight.iter().filter(|(_, flying)| flying.has(node));
        flying.flat_map(|(_, flying)| flying.slots.iter().copied()).collect()
    }

    /// How far a node is with the tensor of a set.
    pub(crate) fn progress(&self, slot: Slot, node: NodeId, set: &ProcessSet) -> Progress {
        if self.queue.holds(slot, node, set) {
            Progress::Queued
        } else if self.flight.holds(slot, node) {
            Progress::InFlight
        } else {
            Progress::Done
        }
    }

    /// Adds a tensor.
    pub(crate) fn push(&mut self, round: &Arc<Round>) {
        self.queue.push(round);
    }

    /// A node has done operations. Calls `finished` for each segment of the operations that all
    /// nodes have done.
    pub(crate) fn done(
        &mut self,
        node: NodeId,
        sequences: &[Sequence],
        now: Duration,
        mut finished: impl FnMut(Slot),
    ) -> Result<(), Violation> {
        for &sequence in sequences {
            let completed = self.flight.done(node, sequence).map_err(|()| {
                let what = "which it was not doing";
                Violation::Protocol(format!("says that it has done operation {sequence}, {what}"))
            })?;
            let Some(Completed { slots, choice, since, in_flight }) = completed else { continue };
            if let (Some(choice), Some(in_flight)) = (choice, in_flight) {
                let taken = now.saturating_sub(since);
                self.corrections.extend(self.chooser.observe(choice, taken, in_flight));
            }
            slots.into_iter().for_each(&mut finished);
        }
        Ok(())
    }

    /// What earlier jobs have measured corrects the choices.
    pub(crate) fn remember(&mut self, learned: &[Learned]) {
        self.chooser.remember(learned);
    }

    /// What this job and earlier ones have measured.
    pub(crate) fn learned(&self) -> Vec<Learned> {
        self.chooser.learned()
    }

    /// The choices of algorithms, and the times of their operations.
    pub(crate) fn choices(&self) -> Vec<ChoiceStatus> {
        self.chooser.status()
    }

    /// Why choices have changed since the last call.
    pub(crate) fn take_corrections(&mut self) -> Vec<String> {
        std::mem::take(&mut self.corrections)
    }

    /// The size of the next pieces, so that what waits is divided between all lanes.
    pub(crate) fn piece_bytes(&self) -> u64 {
        self.queue.fair_piece(self.lanes, self.max_piece_bytes)
    }

    /// The rates of links that have to be sent to the nodes before the first operation, by what was
    /// measured of them. Only once, and only if some algorithm may need them.
    pub(crate) fn take_links(&mut self, network: Option<&Network>) -> Option<Links> {
        let lines = self.lines.take()?;
        let links = rates::links(lines, self.chooser.cost(), network)?;
        self.chooser.set_links(links.clone());
        Some(links)
    }

    /// The specs of operations that have to be sent to the nodes first.
    pub(crate) fn take_specs(&mut self) -> Vec<KnownSpec> {
        self.chooser.take_unannounced()
    }

    /// The next operation, of at most `piece_bytes`; `None` if nothing waits, or there is no
    /// credit.
    pub(crate) fn next<'a>(
        &mut self,
        piece_bytes: u64,
        now: Duration,
        set: impl Fn(ProcessSetId) -> Option<&'a ProcessSet>,
    ) -> Option<Sent> {
        if !self.flight.has_credit() {
            return None;
        }
        let piece = self.queue.cut(piece_bytes)?;
        // This operation, those in flight, and those that wait.
        let pipeline = self.flight.len() as u64 + 1 + self.queue.pieces(piece_bytes);
        let participants = piece.kind.participants(set(piece.kind.set)?);
        let Piece { kind, bytes, cuts } = piece;
        let wire_bytes = kind.wire_bytes(self.compression, bytes);
        let work = Work {
            route: kind.route,
            collective: kind.collective,
            bytes: wire_bytes,
            quantized: kind.quantized,
        };
        let Chosen { spec, id, reason, servers } =
            self.chooser.choose(work, &participants, pipeline);
        let mut nodes = FixedBitSet::with_capacity(self.nodes);
        nodes.extend(participants.iter().map(|node| node.index()));
        nodes.extend(servers.map(|node| node as usize));
        let slots = cuts.iter().map(|cut| cut.round.slot).collect();
        let sequence = self.flight.start(nodes, slots, id, now);
        let segment = |cut: &Cut| {
            let by_name = matches!(cut.round.tensor, TensorRef::Name(_));
            Segment {
                tensor: cut.round.tensor.clone(),
                part: cut.part,
                offset: cut.offset,
                count: cut.count,
                agreed: (by_name && cut.opens).then(|| Arc::clone(&cut.round.plan.agreed)),
            }
        };
        let operation = Operation {
            sequence,
            set: kind.set,
            request: kind.request(),
            spec,
            segments: cuts.iter().map(segment).collect(),
            absent: Arc::clone(&kind.absent),
            quantized: kind.quantized,
        };
        Some(Sent { operation, cuts, choice: reason })
    }
}
