//! The operation manager: turns operations into pieces that lanes can run.
//!
//! It finds the tensors in the queue, and the schedule among those that it has generated before,
//! and hands the piece to its lane. It makes no decision on which all nodes have to agree: the
//! coordinator does (SAME).
//!
//! - `build`: from an operation to its piece
//! - `plans`: from the route of a piece to its schedule
//! - `probe`: from a probe to its piece
//! - `pending`: allocations that ranks have to make, and the pieces that wait for them

mod build;
mod pending;
mod plans;
mod probe;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use gradwire_collectives::{Links, Topology};
use gradwire_kernels::Store;
use gradwire_proto::{Failure, NodeId, Sequence, TensorName};
use gradwire_trace::{Event, Kind, Recorder};

pub(crate) use self::pending::{Allocation, OverdueAllocation};
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
        operation::{Operation, Probe},
        tensor::{AllocationRequest, Ticket},
        world::World,
    },
    queue::TensorQueue,
};

/// Up to this size in bytes, a piece for a few ranks takes less time than to wake a lane. It is
/// about what one core reduces in ten microseconds.
const QUICK_BYTES: u64 = 32 << 10;

/// Makes the connections with other nodes.
pub(crate) trait Connector: std::fmt::Debug + Send + Sync {
    /// A schedule needs this peer. Connects to it, if this node is the one that connects.
    fn connect(&self, peer: NodeId);

    /// A probe would like to have this peer. The same, but it may stay out of reach.
    fn try_connect(&self, peer: NodeId);
}

/// Starts operations.
#[derive(Debug)]
pub(crate) struct OperationManager {
    me: NodeId,
    builder: Builder,
    lanes: Arc<[Lane]>,
    connector: Arc<dyn Connector>,
    /// Receives the pieces that are done at once.
    events: Arc<dyn LaneEvents>,
    pending: PendingAllocations,
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

    /// Starts an operation, or runs it at once where that is faster than handing it over. Returns
    /// the allocations to ask ranks for.
    ///
    /// # Errors
    /// A [`Failure`] when the order does not fit what was announced.
    pub(crate) fn start(&self, operation: Operation) -> Result<Vec<AllocationRequest>, Failure> {
        let sequence = operation.sequence;
        let (piece, wanted) = self.builder.build(operation)?;
        self.record(&piece);
        let is_quick = piece.nodes.len() <= 1 && piece.bytes <= QUICK_BYTES;
        if is_quick && wanted.is_empty() && piece.is_allocated() {
            let began = Instant::now();
            piece.run_alone(piece.bytes, Store::Cached);
            if self.recorder.is_on() {
                let (now, sequence) = (Instant::now(), piece.sequence.0);
                let event = self.recorder.between(Kind::Reduce, began, now, sequence);
                self.recorder.record(Event { bytes: piece.bytes, ..event });
            }
            self.events.finished(&piece, None);
            return Ok(wanted);
        }
        for &peer in &piece.plan.peers {
            self.connector.connect(piece.nodes[peer as usize]);
        }
        self.pending.admit(piece, &wanted, |order| self.send(sequence, order));
        Ok(wanted)
    }

    /// Distributes load by these rates from now on.
    pub(crate) fn set_links(&self, links: Links) {
        self.builder.plans.set_links(links);
    }

    /// Makes schedules for all nodes in these racks and this order from now on.
    pub(crate) fn arrange(&self, topology: Topology) {
        self.builder.plans.arrange(topology);
    }

    /// Starts to measure. What can't be measured is left out. Probes at the same time begin at the
    /// same instant, so the longest of their times is that of all of them.
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
            self.connector.try_connect(piece.nodes[peer as usize]);
        }
        self.send(sequence, Order::Start(piece));
    }

    /// Records which submissions are in a piece, if somebody traces the job.
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

    /// What a rank was asked to allocate.
    pub(crate) fn asked(&self, answer: Ticket) -> Option<Allocation> {
        self.pending.asked(answer)
    }

    /// A rank has allocated what it was asked for. Pieces that wait for no other rank are started.
    pub(crate) fn allocated(&self, answer: Ticket, spans: Vec<Span>) {
        self.pending.resolve(answer, spans, |sequence, order| self.send(sequence, order));
        for lane in self.lanes.iter() {
            lane.send(Order::Allocated);
        }
    }

    /// A tensor that waits for an allocation of this rank.
    pub(crate) fn pending_allocation_of(&self, local_rank: u32) -> Option<TensorName> {
        self.pending.tensor_of(local_rank)
    }

    /// The ranks that have not allocated within `limit` and the time that their memory may take
    /// (WAIT). Each is returned once.
    pub(crate) fn overdue_allocations(
        &self,
        now: Instant,
        limit: Duration,
    ) -> Vec<OverdueAllocation> {
        self.pending.overdue(now, limit)
    }

    /// Restarts the time of every rank that has to allocate.
    pub(crate) fn restart_allocations(&self, now: Instant) {
        self.pending.restart(now);
    }

    /// Removes everything: the job is over.
    pub(crate) fn clear(&self) {
        self.pending.clear();
    }
}

#[cfg(test)]
mod tests;
