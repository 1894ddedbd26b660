//! What an algorithm costs: seconds for a piece, by itself or as one of many, from the α-β-γ model
//! with a few terms for what that model leaves out.
//!
//! - α: latency of a message, per link class (in the rack, between racks)
//! - β: seconds per byte. In the rack it is a node's line, sending and receiving at once; between
//!   racks a node's *fair share* of its rack's uplink, so a rack with w nodes moves w bytes in that
//!   time, whoever of them sends.
//! - γ: seconds per byte reduced
//! - a cost per message for the processor, which direct exchange has many of
//! - the rate of one data thread, which is the limit of a piece that is alone
//! - a loss of goodput when several send to one at once (incast): their bursts meet in the last
//!   queue before it. Without it the model would never choose a ring, which wins by not doing that.
//!   If they are more than the queue holds, it takes the time until they are sent again.
//! - between racks with several paths, the collisions of connections on one of them (ECMP)
//! - where lines have different rates, the slowest one: most algorithms give all the same to do
//!
//! What all algorithms have in common is counted, too, so that predicted times can be compared with
//! measured ones: the order of the coordinator, and the result's way to the ranks.
//!
//! Pieces of a large tensor follow each other, as many of them under way as there is credit, and
//! hide each other's latency. What counts then is how long a piece keeps the busiest line or
//! processor, and by Little's law no more than all that are under way can pass in the time that one
//! takes ([`price_in_pipeline`]). So long chains, which are cheap on lines, are for many pieces,
//! and short ones for few.
//!
//! A message is streamed: the next hop begins when the first chunk is there. The bytes are paid
//! once, on the busiest line (§1.0 of the algorithms' errata: of the ring 2(M−1)/M·S, of the double
//! tree 2S, of recursive doubling S·⌈log2 M⌉). What h hops add to that depends on what the line
//! does meanwhile. In a chain or a tree it waits until a chunk has come in, h·(α + chunk·β). In a
//! ring or an exchange, where all have something to send from the beginning, it is busy and the
//! chunks are among its bytes: h·α (the pipeline fill of an algorithm's shape).
//! The closed forms cost microseconds for any number of nodes. They are tested against the
//! simulator, which runs the schedules themselves.

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
    /// How many of them are under way at a time.
    pub in_flight: u32,
}

impl Pipeline {
    /// One piece and no other.
    pub const ALONE: Self = Self { pieces: 1, in_flight: 1 };
}

/// What a piece costs.
#[derive(Debug, Clone, Copy)]
struct Cost {
    /// From beginning to end, if it is the only one.
    alone: f64,
    /// How long the busiest line, uplink or processor is busy with it.
    busy: f64,
}

/// Seconds that a piece of `bytes` takes, from the moment that all participants have it.
/// Deterministic; for one participant the time of the local copy.
///
/// # Panics
/// If `kind` is a move of a participant that isn't one of the topology's ([`Kind::fits`]).
pub fn price(
    model: &CostModel,
    topology: &Topology,
    kind: Kind,
    spec: impl Into<Spec>,
    bytes: u64,
) -> f64 {
    cost(model, topology, kind, spec.into(), bytes).alone
}

/// Seconds for which a piece keeps the busiest line, uplink or processor busy.
///
/// # Panics
/// As [`price`].
pub fn busy(
    model: &CostModel,
    topology: &Topology,
    kind: Kind,
    spec: impl Into<Spec>,
    bytes: u64,
) -> f64 {
    cost(model, topology, kind, spec.into(), bytes).busy
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
    // One after the other on the busiest line, and the last one's way to its end is hidden by none.
    let passed = busy + (alone - busy) / pieces;
    passed.max(alone / in_flight)
}

fn cost(model: &CostModel, topology: &Topology, kind: Kind, spec: Spec, bytes: u64) -> Cost {
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
    // The least that is in a hop: what the pipeline has to fill with.
    let fits = if shape.least_block > 0.0 { size / shape.least_block } else { shape.blocks };
    let blocks = shape.blocks.min(fits.max(1.0));
    // Of a chunk that is larger than that the next hop does not wait for all.
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
