//! What an algorithm costs: seconds for a piece, by itself or as one of many, from the α-β-γ model
//! with a few terms for what that model leaves out.
//!
//! - α: latency of a message, per link class (in the rack, between racks)
//! - β: seconds per byte. In the rack it is a node's line, sending and receiving at once; between
//!   racks a node's *fair share* of its rack's uplink, so a rack with w nodes moves w bytes in that
//!   time, whoever of them sends.
//! - γ: seconds per byte reduced
//! - a cost per message for the processor, which direct exchange has many of
//! - a loss of goodput when several send to one at once (incast): their bursts meet in the last
//!   queue before it. Without it the model would never choose a ring, which wins by not doing that.
//!
//! Pieces of a large tensor follow each other, as many of them under way as there is credit, and
//! hide each other's latency. What counts then is how long a piece keeps the busiest line or
//! processor, and by Little's law no more than all that are under way can pass in the time that one
//! takes ([`price_in_pipeline`]). So long chains, which are cheap on lines, are for many pieces,
//! and short ones for few.
//!
//! A message is streamed: the next hop begins when the first chunk is there. So a chain of h hops
//! costs h·(α + chunk·β), and the bytes are paid once, on the busiest line (§1.0 of the algorithms'
//! errata: of the ring 2(M−1)/M·S, of the double tree 2S, of recursive doubling S·⌈log2 M⌉).
//! [`critical_path`] computes the same from the schedules themselves, step by step; the closed
//! forms of [`price`] are tested against it and cost microseconds for any number of nodes.

mod critical_path;
mod model;

use crate::{
    algorithms::{Algorithm, Kind},
    topology::Topology,
};

pub use critical_path::critical_path;
pub use model::{CostModel, LinkCost};

/// What the closed forms need to know of an algorithm's schedule.
#[derive(Debug, Clone, Copy, Default)]
struct Shape {
    /// Messages one after the other inside racks and between them.
    hops_in: f64,
    hops_across: f64,
    /// Sent or received by the busiest participant, in units of the piece.
    line: f64,
    /// Of these, received when everybody sends at once.
    senders: u32,
    /// What leaves or enters a rack, divided by its nodes; the largest, in units of the piece.
    uplink: f64,
    /// Reduced by the busiest participant, in units of the piece.
    reduced: f64,
    /// Reduced of a chunk at each hop, where that is all that isn't hidden behind the line.
    streamed: f64,
    /// Messages that the busiest participant sends.
    messages: f64,
    /// The piece is in this many blocks.
    blocks: f64,
}

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
    algorithm: Algorithm,
    bytes: u64,
) -> f64 {
    cost(model, topology, kind, algorithm, bytes).alone
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
    algorithm: Algorithm,
    bytes: u64,
    pipeline: Pipeline,
) -> f64 {
    let Cost { alone, busy } = cost(model, topology, kind, algorithm, bytes);
    let pieces = f64::from(pipeline.pieces.max(1));
    let in_flight = f64::from(pipeline.in_flight.max(1)).min(pieces);
    // One after the other on the busiest line, and the last one's way to its end is hidden by none.
    let passed = busy + (alone - busy) / pieces;
    passed.max(alone / in_flight)
}

fn cost(
    model: &CostModel,
    topology: &Topology,
    kind: Kind,
    algorithm: Algorithm,
    bytes: u64,
) -> Cost {
    let size = bytes as f64;
    let here = size * model.reduce_per_byte;
    let here = Cost { alone: here, busy: here };
    if topology.participants() <= 1 {
        return here;
    }
    let cluster = Cluster::new(topology);
    let shape = match kind {
        Kind::Allreduce => cluster.allreduce(algorithm),
        Kind::Broadcast { .. } => cluster.broadcast(algorithm),
        Kind::Reduce { .. } => cluster.reduce(algorithm),
        Kind::Move { from, to } if from == to => return here,
        Kind::Move { from, to } => cluster.moved(topology, from, to),
    };
    let (inside, across) = (model.in_rack, model.cross_rack);
    // The least that is in a hop: what the pipeline has to fill with.
    let fill = (size / shape.blocks).min(model.chunk as f64);
    let chunk = fill * (inside.per_byte + shape.streamed * model.reduce_per_byte);
    let hops =
        shape.hops_in * (inside.latency + chunk) + shape.hops_across * (across.latency + chunk);
    let line = size * shape.line * inside.per_byte * model.incast(shape.senders);
    let uplink = size * shape.uplink * across.per_byte;
    let messages = shape.messages + shape.hops_in + shape.hops_across;
    let processor = size * shape.reduced * model.reduce_per_byte + messages * model.per_message;
    let alone = hops + line.max(uplink) + processor;
    Cost { alone, busy: line.max(uplink).max(processor) }
}

/// The numbers of a topology that costs depend on.
struct Cluster {
    nodes: f64,
    racks: f64,
    largest: f64,
    smallest: f64,
}

impl Cluster {
    fn new(topology: &Topology) -> Self {
        let sizes: Vec<usize> = topology.members().iter().map(Vec::len).collect();
        let largest = sizes.iter().copied().max().unwrap_or(1) as f64;
        let smallest = sizes.iter().copied().min().unwrap_or(1) as f64;
        Self {
            nodes: sizes.iter().sum::<usize>() as f64,
            racks: sizes.len() as f64,
            largest,
            smallest,
        }
    }

    /// `hops` in all, as many as possible of them inside racks but for `across`.
    fn hops(&self, hops: f64, across: f64) -> Shape {
        let across = if self.racks > 1.0 { across.min(hops) } else { 0.0 };
        Shape { hops_in: hops - across, hops_across: across, blocks: 1.0, ..Shape::default() }
    }

    /// Traffic out of a rack per node, for `pieces` out of the smallest.
    fn uplink(&self, pieces: f64) -> f64 {
        if self.racks > 1.0 { pieces / self.smallest } else { 0.0 }
    }

    fn allreduce(&self, algorithm: Algorithm) -> Shape {
        let &Self { nodes, racks, largest, .. } = self;
        let others = nodes - 1.0;
        let share = others / nodes;
        match algorithm {
            Algorithm::Ring => Shape {
                line: 2.0 * share,
                uplink: self.uplink(2.0 * share),
                reduced: share,
                messages: 2.0 * others,
                blocks: nodes,
                ..self.hops(2.0 * others, 2.0 * (racks - 1.0))
            },
            Algorithm::RecursiveDoubling => {
                let rounds = nodes.log2().floor();
                let fold = if nodes.log2() > rounds { 1.0 } else { 0.0 };
                let crossing = racks.log2().ceil();
                Shape {
                    // A fold is before and after the rounds, and carries everything too.
                    line: rounds + 2.0 * fold,
                    // All nodes of a rack cross in the same rounds.
                    uplink: self.uplink(crossing * largest),
                    reduced: rounds + fold,
                    messages: rounds + fold,
                    ..self.hops(rounds + 2.0 * fold, crossing)
                }
            }
            Algorithm::DoubleTree => {
                let height = nodes.log2().ceil();
                Shape {
                    line: if nodes > 2.0 { 2.0 } else { 1.0 },
                    uplink: self.uplink(2.0),
                    reduced: 1.0,
                    messages: if nodes > 2.0 { 8.0 } else { 4.0 },
                    blocks: 16.0,
                    ..self.hops(2.0 * height, 2.0 * racks.log2().ceil())
                }
            }
            Algorithm::Hierarchical => {
                let levels = f64::from(u8::from(largest > 1.0));
                let across = f64::from(u8::from(racks > 1.0));
                // In racks of w: (w−1)/w of the piece to the owners, the same back; between
                // racks a w-th part of it from each, all but its own r-th.
                let direct = (largest - 1.0) / largest + (racks - 1.0) / racks / self.smallest;
                Shape {
                    line: 2.0 * direct,
                    senders: (largest.max(racks) - 1.0) as u32,
                    uplink: self.uplink(2.0 * (racks - 1.0) / racks),
                    reduced: direct,
                    messages: 2.0 * (racks * (largest - 1.0) + racks - 1.0),
                    blocks: nodes,
                    ..self.hops(2.0 * (levels + across), 2.0 * across)
                }
            }
            Algorithm::Circulant => {
                let even = largest == self.smallest;
                let crossing = racks.log2().ceil();
                let inside = largest.log2().ceil();
                // Between three, no message waits for another one.
                let all = match (even, nodes > 3.0) {
                    (true, true) => inside + crossing,
                    (false, true) => nodes.log2().ceil(),
                    (_, false) => 1.0,
                };
                Shape {
                    line: 2.0 * share,
                    // In racks of different sizes every message may cross.
                    uplink: match racks > 1.0 {
                        true if even => self.uplink(2.0 * (racks - 1.0) / racks),
                        true => 2.0 * share,
                        false => 0.0,
                    },
                    reduced: share,
                    messages: 2.0 * all,
                    blocks: 2.0,
                    ..self.hops(2.0 * all, 2.0 * if even { crossing } else { all })
                }
            }
        }
    }

    /// The way of a broadcast backwards, with a reduction of every chunk at every hop. What a node
    /// has to send of its own is ready from the beginning, and goes before what it passes on.
    fn reduce(&self, algorithm: Algorithm) -> Shape {
        let &Self { nodes, racks, largest, .. } = self;
        let down = self.broadcast(algorithm);
        let line = match algorithm {
            Algorithm::Ring | Algorithm::RecursiveDoubling | Algorithm::Circulant => down.line,
            Algorithm::DoubleTree if nodes <= 2.0 => 1.0,
            // A leaf of one tree is inside the other one; between racks it queues for more.
            Algorithm::DoubleTree if racks > 1.0 => 2.2,
            Algorithm::DoubleTree => 1.5,
            Algorithm::Hierarchical => {
                let wide = if racks > 1.0 { largest } else { largest - 1.0 };
                racks + (wide - 1.0) / wide
            }
        };
        Shape { line, streamed: 1.0, ..down }
    }

    /// One message, at the rate of the line or of what the smaller of the two racks lets out or in.
    fn moved(&self, topology: &Topology, from: u32, to: u32) -> Shape {
        let size = |of| topology.racks.iter().filter(|&&rack| rack == topology.racks[of]).count();
        let smaller = size(from as usize).min(size(to as usize)) as f64;
        let across = if topology.same_rack(from, to) { 0.0 } else { 1.0 };
        Shape {
            line: 1.0,
            uplink: across / smaller,
            messages: 1.0,
            blocks: 1.0,
            hops_in: 1.0 - across,
            hops_across: across,
            ..Shape::default()
        }
    }

    fn broadcast(&self, algorithm: Algorithm) -> Shape {
        let &Self { nodes, racks, largest, .. } = self;
        let others = nodes - 1.0;
        let height = nodes.log2().ceil();
        let handing_on = largest > 2.0 || (racks > 1.0 && largest > 1.0);
        match algorithm {
            Algorithm::Ring => Shape {
                line: 1.0,
                uplink: self.uplink(1.0),
                messages: 1.0,
                ..self.hops(others, racks - 1.0)
            },
            Algorithm::RecursiveDoubling | Algorithm::Circulant => Shape {
                line: height,
                uplink: self.uplink(racks.log2().ceil()),
                messages: height,
                // As many as a position has bits set, at most.
                ..self.hops(nodes.log2().floor(), racks.log2().ceil())
            },
            Algorithm::DoubleTree => Shape {
                line: 1.0,
                uplink: self.uplink(2.0),
                messages: 4.0,
                blocks: 16.0,
                ..self.hops(others.log2().ceil() + 1.0, racks.log2().ceil())
            },
            Algorithm::Hierarchical => Shape {
                // The last block is handed on when all others have been.
                line: racks + 0.25,
                uplink: self.uplink(racks - 1.0),
                messages: racks * largest,
                // Blocks are small.
                blocks: 4.0 * largest,
                // With nobody else in the rack there is no handing on.
                ..self.hops(if handing_on { 2.0 } else { 1.0 }, 1.0)
            },
        }
    }
}
