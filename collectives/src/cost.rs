//! The cost of an algorithm: seconds for a piece, alone or in a pipeline, by the α-β-γ model with a
//! few additional terms.
//!
//! - α: latency of a message, per link class (in the rack, between racks)
//! - β: seconds per byte. Inside a rack it is that of a node's line, which sends and receives at
//!   the same time; between racks that of a node's *fair share* of its rack's uplink, so a rack
//!   with w nodes moves w bytes in that time, whichever nodes send.
//! - γ: seconds per byte reduced
//! - processor time per message, which matters most for direct exchange
//! - the rate of one data thread, which limits a single piece
//! - a loss of goodput when several nodes send to one at the same time (incast): their bursts meet
//!   in the last queue before it. Without this term the model would never choose a ring, which
//!   avoids incast. Bursts larger than the queue add the time until the lost data is sent again.
//! - between racks with several paths (ECMP), the collisions of connections on one of them
//! - where lines have different rates, the slowest one: most algorithms give all nodes equal work
//!
//! Costs that all algorithms have in common are included, so that predicted times can be compared
//! with measured ones: the order of the coordinator, and the delivery of the result to the ranks.
//!
//! Pieces of a large tensor follow each other, as many in flight as there is credit, and hide each
//! other's latency. Their rate is limited by how long a piece occupies the busiest line or
//! processor and, by Little's law, by the number in flight divided by the time of one piece
//! ([`price_in_pipeline`]). So long chains, which use lines efficiently, suit many pieces, and
//! short ones few.
//!
//! A message is streamed: the next hop begins when the first chunk has arrived. The bytes count
//! once, on the busiest line (of the ring 2(M−1)/M·S, of the double tree 2S, of recursive doubling
//! S·log2 M for a power of two). What h hops add depends on what the line does meanwhile. In a
//! chain or a tree it waits until a chunk has arrived: h·(α + chunk·β). In a ring or an exchange
//! all participants send from the beginning, so the line is busy: h·α (the pipeline fill of an
//! algorithm's shape). The closed forms take microseconds for any number of nodes. They are tested
//! against the simulator, which runs the schedules themselves.

mod model;

use crate::{
    algorithms::{self, Kind, Spec},
    topology::Topology,
};

pub use model::{CostModel, LinkCost};

/// Pieces of one size that follow each other, several of them in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pipeline {
    /// How many there are.
    pub pieces: u32,
    /// How many are in flight at a time.
    pub in_flight: u32,
}

impl Pipeline {
    /// A single piece.
    pub const ALONE: Self = Self { pieces: 1, in_flight: 1 };
}

/// The cost of a piece, in seconds.
#[derive(Debug, Clone, Copy)]
pub struct Cost {
    /// From the moment that all participants have it to the end, if it is a single piece.
    pub alone: f64,
    /// How long it occupies the busiest line, uplink or processor.
    pub busy: f64,
}

/// Seconds that a single piece of `bytes` takes ([`Cost::alone`]).
///
/// # Panics
/// If `kind` moves data from or to a participant that the topology doesn't have ([`Kind::fits`]).
pub fn price(
    model: &CostModel,
    topology: &Topology,
    kind: Kind,
    spec: impl Into<Spec>,
    bytes: u64,
) -> f64 {
    cost(model, topology, kind, spec.into(), bytes).alone
}

/// Seconds per piece of a pipeline: the time that all pieces take together, divided by their
/// number.
///
/// # Panics
/// As [`price`].
pub fn price_in_pipeline(
    model: &CostModel,
    topology: &Topology,
    kind: Kind,
    spec: impl Into<Spec>,
    bytes: u64,
    pipeline: Pipeline,
) -> f64 {
    let Cost { alone, busy } = cost(model, topology, kind, spec.into(), bytes);
    let pieces = f64::from(pipeline.pieces.max(1));
    let in_flight = f64::from(pipeline.in_flight.max(1)).min(pieces);
    // Pieces pass the busiest line one after the other, and nothing hides the rest of the last one.
    let passed = busy + (alone - busy) / pieces;
    passed.max(alone / in_flight)
}

/// The cost of a piece of `bytes`. Deterministic; for one participant that of the local copy.
///
/// # Panics
/// As [`price`].
pub fn cost(model: &CostModel, topology: &Topology, kind: Kind, spec: Spec, bytes: u64) -> Cost {
    let size = bytes as f64;
    let besides = model.operation + size * model.publish_per_byte;
    let here = size * model.reduce_per_byte;
    let here = Cost { alone: besides + here, busy: here };
    if topology.contributors() <= 1 {
        return here;
    }
    if matches!(kind, Kind::Move { from, to } if from == to) {
        return here;
    }
    let without;
    let topology = if topology.servers() == 0 || algorithms::has_servers(kind, &spec) {
        topology
    } else {
        without = topology.without_servers();
        &without
    };
    let shape = algorithms::shape(kind, &spec, topology);
    let (inside, across) = (model.in_rack, model.cross_rack);
    // The smallest unit of a hop, which fills the pipeline.
    let fits = if shape.least_block > 0.0 { size / shape.least_block } else { shape.blocks };
    let blocks = shape.blocks.min(fits.max(1.0));
    // The next hop does not wait for all of a chunk that is larger than the model's.
    let chunk = spec.chunk().unwrap_or(model.chunk).min(model.chunk);
    let fill = (size / blocks).min(chunk as f64);
    let passes = fill * (inside.per_byte + shape.streamed * model.reduce_per_byte);
    let hops =
        shape.hops_in * inside.latency + shape.hops_across * across.latency + shape.fill * passes;
    let slowest = topology.slowest();
    let line = size * shape.line * slowest * inside.per_byte;
    let in_rows = line
        * model.incast(shape.senders.max(shape.partners))
        * CostModel::unevenness(shape.partners, shape.senders);
    let line = line * model.incast(shape.senders);
    let uplink = size * shape.uplink * across.per_byte * model.collisions(shape.crossing);
    let overflow = model.overflow(size * shape.burst, shape.senders);
    let messages = (shape.messages * blocks / shape.blocks).max(shape.least_messages);
    let messages = messages + shape.hops_in + shape.hops_across;
    let processor = size * shape.reduced * model.reduce_per_byte + messages * model.per_message;
    let lane = size * shape.line * slowest * model.lane_per_byte;
    let first = (shape.first / blocks).min(1.0);
    let transfer = if shape.in_rounds {
        let inside = 1.0 - (shape.uplink / shape.line).min(1.0);
        line.max(lane) * inside + uplink
    } else {
        line.max(uplink).max(lane)
    };
    let alone = besides + hops + transfer * (1.0 + first) + overflow + processor;
    // Lanes share the pieces.
    let lanes = lane / f64::from(model.lanes.max(1));
    Cost { alone, busy: in_rows.max(uplink).max(lanes).max(processor) }
}
