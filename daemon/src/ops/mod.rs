//! The operation manager: turns operations into pieces that lanes can run.
//!
//! It finds the tensors in the queue, finds or generates the schedule, and hands the piece to its
//! lane. Decisions on which all nodes must agree are made by the coordinator (SAME).
//!
//! - `build`: builds the piece of an operation
//! - `plans`: finds the schedule of a piece
//! - `probe`: builds the piece of a probe
//! - `pending`: allocations that ranks must make, and the pieces that wait for them

mod build;
mod pending;
mod plans;
mod probe;

use std::{sync::Arc, time::Instant};

use gradwire_collectives::{Links, Topology};
use gradwire_kernels::Store;
use gradwire_proto::{Failure, NodeId, Sequence};
use gradwire_trace::{Event, Kind, Recorder};

pub(crate) use self::pending::OverdueAllocation;
use self::{build::Builder, pending::PendingAllocations, plans::Plans};
use crate::{
    data::{
        feedback::Feedback,
        lane::Lane,
        order::{LaneEvents, Order},
        piece::Piece,
    },
    model::{
        memory::Span,
        operation::{Operation, Probe, QUICK_BYTES},
        tensor::{AllocationRequest, Ticket},
        world::World,
    },
    queue::TensorQueue,
    transport::connections::Demand,
};

/// Makes the connections with other nodes.
pub(crate) trait Connector: std::fmt::Debug + Send + Sync {
    /// Connects to a peer, if this node is the dialler.
    fn connect(&self, peer: NodeId, demand: Demand);
}

#[derive(Debug)]
pub(crate) struct OperationManager {
    me: NodeId,
    builder: Builder,
    lanes: Arc<[Lane]>,
    connector: Arc<dyn Connector>,
    /// Hears of orders, and of the pieces that are done without a lane.
    events: Arc<dyn LaneEvents>,
    pub(crate) pending: PendingAllocations,
    recorder: Recorder,
}

impl OperationManager {
    pub(crate) fn new(
        world: &World,
        queue: Arc<TensorQueue>,
        lanes: Arc<[Lane]>,
        connector: Arc<dyn Connector>,
        events: Arc<dyn LaneEvents>,
        feedback: Feedback,
        recorder: Recorder,
    ) -> Self {
        let plans = Plans::new(world);
        let builder = Builder { queue, plans, compression: world.compression, feedback };
        let me = world.node;
        let pending = PendingAllocations::default();
        Self { me, builder, lanes, connector, events, pending, recorder }
    }

    /// Starts an operation, or runs it immediately if that is faster than handing it over. Returns
    /// the allocations to request from ranks.
    ///
    /// # Errors
    /// A [`Failure`] if the order does not fit the announcements.
    pub(crate) fn start(&self, operation: Operation) -> Result<Vec<AllocationRequest>, Failure> {
        let sequence = operation.sequence;
        let (piece, wanted) = self.builder.build(operation)?;
        self.events.ordered(&piece);
        self.record(&piece);
        let is_quick = piece.nodes.len() <= 1 && piece.bytes <= QUICK_BYTES;
        if is_quick && wanted.is_empty() && piece.is_allocated() {
            let began = Instant::now();
            self.events.begun(&piece);
            piece.run_alone(0..piece.end(), Store::Cached);
            if self.recorder.is_on() {
                let (now, sequence) = (Instant::now(), piece.sequence.0);
                let event = self.recorder.between(Kind::Reduce, began, now, sequence);
                self.recorder.record(Event { bytes: piece.bytes, ..event });
            }
            self.events.finished(&piece, None);
            return Ok(wanted);
        }
        for &peer in &piece.plan.peers {
            self.connector.connect(piece.nodes[peer as usize], Demand::Schedule);
        }
        self.pending.admit(piece, &wanted, |order| self.send(sequence, order));
        Ok(wanted)
    }

    /// From now on, distributes load by these rates.
    pub(crate) fn set_links(&self, links: Links) {
        self.builder.plans.set_links(links);
    }

    /// From now on, makes schedules for these racks and this order of nodes.
    pub(crate) fn arrange(&self, topology: Topology) {
        self.builder.plans.arrange(topology);
    }

    /// Starts probes; those that can't run are left out. All of them begin at the same instant, so
    /// the longest of their times is the time of all together.
    pub(crate) fn probe(&self, probes: &[Probe]) {
        let now = Instant::now();
        probes.iter().for_each(|probe| self.probe_one(probe, now));
    }

    fn probe_one(&self, probe: &Probe, now: Instant) {
        let Some(piece) = probe::piece(self.me, probe, now) else { return };
        let sequence = piece.sequence;
        if piece.nodes.len() == 1 {
            self.send(sequence, Order::Measure { sequence, pattern: probe.pattern });
            return;
        }
        for &peer in &piece.plan.peers {
            self.connector.connect(piece.nodes[peer as usize], Demand::Probe);
        }
        self.send(sequence, Order::Start(piece));
    }

    /// Records which submissions are in a piece, if the job is traced.
    fn record(&self, piece: &Piece) {
        if !self.recorder.is_on() {
            return;
        }
        let (sequence, ordered) = (piece.sequence.0, piece.ordered);
        for (tensor, _) in &piece.tensors {
            let name = self.recorder.tracer().names().number(tensor.key.name.as_str());
            let event = self.recorder.between(Kind::Order, tensor.announced, ordered, sequence);
            for (rank, ticket) in tensor.submissions() {
                self.recorder.record(Event { name, other: rank.0, bytes: ticket, ..event });
            }
        }
    }

    fn send(&self, sequence: Sequence, order: Order) {
        let lane = sequence.0 % self.lanes.len() as u64;
        self.lanes[lane as usize].send(order);
    }

    /// A rank has made the requested allocation. Pieces that wait for no other rank are started.
    pub(crate) fn allocated(&self, answer: Ticket, spans: Vec<Span>) {
        self.pending.resolve(answer, spans, |sequence, order| self.send(sequence, order));
        for lane in self.lanes.iter() {
            lane.send(Order::Allocated);
        }
    }
}

#[cfg(test)]
mod tests;
