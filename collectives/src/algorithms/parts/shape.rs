//! The figures that the cost of a schedule depends on, as closed forms. Each algorithm has them
//! beside its generator; [`cost`](mod@crate::cost) turns them into seconds by the α-β-γ model.

use super::tiers::Tiers;
use crate::{schedule::GRAIN, topology::Topology};

/// The cost of a piece by an algorithm, in units of the piece and in messages.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Shape {
    /// Messages one after the other inside racks and between them.
    pub(crate) hops_in: f64,
    pub(crate) hops_across: f64,
    /// Pipeline fill: the number of hops for which the busiest line or uplink waits for the first
    /// chunk. All hops of a chain or a tree, where each waits for the one before, and none where a
    /// participant has data of its own to send first ([`Self::at_once`]).
    pub(crate) fill: f64,
    /// Sent or received by the busiest participant, in units of the piece; if lines have different
    /// rates, by the participant with the slowest one.
    pub(crate) line: f64,
    /// How many participants send to one at the same time.
    pub(crate) senders: u32,
    /// The same in a pipeline, whose pieces are in different rounds; 0 if it is the same.
    pub(crate) partners: u32,
    /// How much these senders send at the same time, in units of the piece.
    pub(crate) burst: f64,
    /// The traffic out of or into a rack, divided by its nodes; the largest, in units of the piece.
    pub(crate) uplink: f64,
    /// Whether rounds inside racks and between them follow each other, so that the lines wait while
    /// the uplinks are busy. Otherwise chunks overlap.
    pub(crate) in_rounds: bool,
    /// How many pairs of a node in a rack and one outside exchange at the same time.
    pub(crate) crossing: f64,
    /// Reduced by the busiest participant, in units of the piece.
    pub(crate) reduced: f64,
    /// How much of a chunk is reduced at each hop without being hidden by the line.
    pub(crate) streamed: f64,
    /// Messages that the busiest participant sends.
    pub(crate) messages: f64,
    /// The fewest that it sends, however few blocks there are.
    pub(crate) least_messages: f64,
    /// The piece is in this many blocks.
    pub(crate) blocks: f64,
    /// The blocks of small pieces have this many bytes, and there are fewer of them.
    pub(crate) least_block: f64,
    /// How many blocks must arrive before the busiest participant sends; 0 if it has data of its
    /// own to send.
    pub(crate) first: f64,
}

impl Shape {
    /// For an algorithm in which all participants send from the beginning to the end. A hop costs
    /// its latency, but no chunk, because each chunk is among the line's bytes. Uplinks may wait
    /// for reductions inside racks, for `waiting` hops.
    pub(crate) fn at_once(self, waiting: f64) -> Self {
        Self { fill: if self.hops_across > 0.0 { waiting } else { 0.0 }, ..self }
    }

    /// The same in more blocks, with a message each, so that hops are smaller.
    pub(crate) fn in_blocks(self, blocks: f64, messages: f64) -> Self {
        Self { blocks, messages, least_block: 4.0 * GRAIN as f64, ..self }
    }
}

/// The numbers of a topology that costs depend on.
#[derive(Debug, Clone)]
pub(crate) struct Cluster {
    pub(crate) nodes: f64,
    pub(crate) racks: f64,
    pub(crate) largest: f64,
    pub(crate) smallest: f64,
    /// The tiers above the nodes of a rack: the racks of a group, and so on, up to all.
    pub(crate) above: Vec<Above>,
    /// The numbers of parts of regular groups ([`Tiers::regular`]).
    pub(crate) regular: Vec<u32>,
}

/// The groups of one tier, or all participants, by their parts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Above {
    /// The most parts of a group.
    pub(crate) parts: f64,
    /// The nodes of the smallest part.
    pub(crate) nodes: f64,
}

impl Cluster {
    pub(crate) fn new(topology: &Topology) -> Self {
        let tiers = Tiers::new(topology);
        let smallest = |level| {
            let groups = 0..tiers.count(level);
            groups.map(|group| tiers.positions(level, group).len()).min().unwrap_or(1) as f64
        };
        let above = (2..=tiers.top()).filter(|&level| tiers.most(level) > 1);
        let above = above
            .map(|level| Above { parts: tiers.most(level).into(), nodes: smallest(level - 1) });
        Self {
            nodes: topology.participants().into(),
            racks: tiers.count(1).into(),
            largest: tiers.most(1).into(),
            smallest: smallest(1),
            above: above.collect(),
            regular: tiers.regular(),
        }
    }

    /// All nodes but one.
    pub(crate) fn others(&self) -> f64 {
        self.nodes - 1.0
    }

    /// What each participant sends at least in a reduction to all owners.
    pub(crate) fn share(&self) -> f64 {
        self.others() / self.nodes
    }

    /// Whether all racks are of one size.
    pub(crate) fn is_even(&self) -> bool {
        self.largest == self.smallest
    }

    /// `hops` one after the other, of which `across` are between racks.
    pub(crate) fn hops(&self, hops: f64, across: f64) -> Shape {
        let across = if self.racks > 1.0 { across.min(hops) } else { 0.0 };
        Shape {
            hops_in: hops - across,
            hops_across: across,
            // Each node of a rack with one of another rack.
            crossing: if self.racks > 1.0 { self.largest } else { 0.0 },
            fill: hops,
            blocks: 1.0,
            ..Shape::default()
        }
    }

    /// Traffic out of a rack per node, for `pieces` out of the smallest rack.
    pub(crate) fn uplink(&self, pieces: f64) -> f64 {
        if self.racks > 1.0 { pieces / self.smallest } else { 0.0 }
    }

    /// The same for the minimum of crossing traffic.
    pub(crate) fn least_uplink(&self) -> f64 {
        self.uplink(2.0 * (self.racks - 1.0) / self.racks)
    }
}

/// How many rounds it takes to divide by `radix` down to 1, rounded up each time, and how many
/// messages a participant sends in them.
pub(crate) fn rounds(number: f64, radix: u32) -> (f64, f64) {
    let (mut number, mut rounds, mut messages) = (number as u32, 0, 0);
    while number > 1 {
        let part = number.div_ceil(radix);
        messages += number.div_ceil(part) - 1;
        rounds += 1;
        number = part;
    }
    (f64::from(rounds), f64::from(messages))
}

/// An allreduce made of a reduction to one participant and a broadcast from it. Blocks come down
/// while others go up, but the first and the last don't overlap with others.
pub(crate) fn there_and_back(up: Shape, down: Shape) -> Shape {
    Shape {
        hops_in: up.hops_in + down.hops_in,
        hops_across: up.hops_across + down.hops_across,
        fill: up.fill + down.fill,
        line: 0.75 * (up.line + down.line),
        uplink: 0.75 * (up.uplink + down.uplink),
        messages: up.messages + down.messages,
        reduced: up.reduced,
        ..up
    }
}
