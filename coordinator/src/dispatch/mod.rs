//! Decides what is sent out next, how much at a time, and with which algorithm.
//!
//! - `queue`: agreed tensors, fused and cut into pieces in order of priority
//! - `credit`: the operations in flight, and whether more may start
//! - `algorithm`: the algorithms of pieces
//! - `decision`: the choice among the candidates for one class of pieces
//! - `observed`: statistics of measured times
//! - `sizes`: the sizes of pieces and chunks, and how many pieces are in flight
//! - `advice`: recommended settings for the next start
//!
//! [`Dispatch`] owns all agreed tensors that are not done.

pub(crate) mod advice;
pub(crate) mod credit;

mod algorithm;
mod decision;
mod observed;
mod queue;
mod sizes;

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use fixedbitset::FixedBitSet;
use gradwire_collectives::{Algorithm, CostModel, Links, Topology};
use gradwire_proto::{
    Collective, Compression, NodeId, ProcessSetId, Route, Sequence, convert::TensorRef,
};

use self::{
    algorithm::{Chooser, Chosen, Work},
    credit::{Burst, Completed, Flight, Flying},
    queue::{Cut, Piece, Queue},
    sizes::Tuner,
};
use crate::model::{
    EngineConfig,
    command::{Operation, Segment},
    learned::Memory,
    network::Network,
    process_set::ProcessSet,
    round::{Progress, Slot},
    violation::Violation,
};

/// One operation to send out.
#[derive(Debug)]
pub(crate) struct Sent {
    pub(crate) operation: Operation,
    /// Its cuts, one for each segment.
    pub(crate) cuts: Vec<Cut>,
    /// The reason for its algorithm, if this operation caused the decision.
    pub(crate) choice: Option<String>,
}

/// The tensors to send out, and the operations in flight.
#[derive(Debug)]
pub(crate) struct Dispatch {
    pub(crate) queue: Queue,
    pub(crate) flight: Flight,
    pub(crate) chooser: Chooser,
    /// The reasons for choices that measured times have changed, for the next answer.
    pub(crate) corrections: Vec<String>,
    nodes: usize,
    /// Until links are sent: the rate of each node's line in Mbit/s, 0 if unknown.
    lines: Option<Vec<u32>>,
    lanes: u32,
    pub(crate) sizes: Tuner,
    /// The default chunk size of the nodes.
    chunk_bytes: u64,
    compression: Compression,
}

impl Dispatch {
    /// The dispatch for these nodes, the servers last, with the rates of their lines in Mbit/s.
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
            sizes: Tuner::new(config),
            chunk_bytes: config.chunk_bytes,
            compression: config.compression,
        }
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

    /// A node's progress with a tensor of a set.
    pub(crate) fn progress(&self, slot: Slot, node: NodeId, set: &ProcessSet) -> Progress {
        if self.queue.holds(slot, node, set) {
            Progress::Queued
        } else if self.flight.holds(slot, node) {
            Progress::InFlight
        } else {
            Progress::Done
        }
    }

    /// Notes that a node has done operations. Calls `finished` for each segment of operations that
    /// all nodes have done.
    pub(crate) fn done(
        &mut self,
        node: NodeId,
        sequences: &[Sequence],
        now: Duration,
        mut finished: impl FnMut(Slot),
    ) -> Result<(), Violation> {
        for &sequence in sequences {
            let completed = self.flight.done(node, sequence).map_err(|()| {
                let what = format!("reported operation {sequence} as done, but was not running it");
                Violation::Protocol(what)
            })?;
            let Some(completed) = completed else { continue };
            let Completed { operation, in_flight, burst } = completed;
            let Flying { slots, choice, sizes, sample, since, .. } = operation;
            let taken = now.saturating_sub(since);
            // Times with other sizes can't be used to compare algorithms.
            if let Some(choice) = choice.filter(|_| self.sizes.is_chosen(sizes)) {
                let changed = if let Some(Burst { since, count }) = burst {
                    self.chooser.observe_burst(choice, now.saturating_sub(since), count)
                } else {
                    in_flight.and_then(|all| self.chooser.observe(choice, taken, all))
                };
                self.corrections.extend(changed);
            }
            if let (Some(sample), Some(in_flight)) = (sample, in_flight)
                && let Some(reason) = self.sizes.observe(sample, taken, in_flight)
            {
                self.corrections.push(reason);
                self.chooser.set_credit(self.sizes.chosen().credit);
            }
            slots.into_iter().for_each(&mut finished);
        }
        Ok(())
    }

    /// Corrects the choices by the times of earlier jobs.
    pub(crate) fn remember(&mut self, memory: &Memory) {
        self.chooser.remember(&memory.classes);
        if let Some(reason) = self.sizes.remember(&memory.sizes) {
            self.corrections.push(reason);
            self.chooser.set_credit(self.sizes.chosen().credit);
        }
    }

    /// The times of this job and of earlier ones.
    pub(crate) fn learned(&self) -> Memory {
        Memory { classes: self.chooser.learned(), sizes: self.sizes.times() }
    }

    /// The share of each lane in the waiting bytes: the limit for the next pieces.
    pub(crate) fn piece_bytes(&self) -> u64 {
        self.queue.fair_piece(self.lanes, u64::MAX)
    }

    /// The measured rates of links, to be sent to the nodes before the first operation. Returned
    /// only once, and only if an algorithm may need them.
    pub(crate) fn take_links(&mut self, network: Option<&Network>) -> Option<Links> {
        let lines = self.lines.take()?;
        let measured = network.map_or(&[][..], |network| &network.links).iter();
        let measured = measured
            .map(|link| ((link.from.0, link.to.0), link.rate.max(link.lane_rate)))
            .collect();
        let CostModel { in_rack, cross_rack, .. } = self.chooser.cost();
        let (usual, uplink) = (1.0 / in_rack.per_byte, 1.0 / cross_rack.per_byte);
        let links = Links::known(lines, usual, uplink, &measured)?;
        self.chooser.set_links(links.clone());
        Some(links)
    }

    /// The next operation, of at most `piece_bytes`; `None` if nothing waits, or there is no
    /// credit.
    pub(crate) fn next<'a>(
        &mut self,
        piece_bytes: u64,
        now: Duration,
        set: impl Fn(ProcessSetId) -> Option<&'a ProcessSet>,
    ) -> Option<Sent> {
        let (candidate, sizes) = self.sizes.next();
        self.flight.set_credit(sizes.credit as usize);
        if !self.flight.has_credit() {
            return None;
        }
        let piece_bytes = piece_bytes.min(sizes.piece);
        let piece = self.queue.cut(piece_bytes)?;
        // This operation, those in flight, and those waiting.
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
        // Sizes are compared by the time per byte, in the kind of operation with the most bytes.
        let is_common = kind.route == Route::All
            && !kind.quantized
            && kind.collective == Collective::Allreduce
            && participants.len() as u32 == self.chooser.nodes();
        // An algorithm with its own chunk size can't be used to compare chunk sizes.
        let asked = spec.spec.chunk();
        let is_sample = is_common && asked.is_none();
        let sample = if is_sample { self.sizes.sample(bytes) } else { None };
        let chosen = (id, candidate, sample);
        let sequence = self.flight.start(nodes, slots, chosen, now);
        let chooser = &self.chooser;
        self.sizes.started(|| chooser.is_settled());
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
            chunk: asked.or(Some(sizes.chunk)).filter(|&chunk| chunk != self.chunk_bytes),
        };
        Some(Sent { operation, cuts, choice: reason })
    }
}
