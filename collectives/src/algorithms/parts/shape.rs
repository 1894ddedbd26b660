//! What the cost of a schedule depends on, as closed forms. Each algorithm has its own beside its
//! generator; [`cost`](mod@crate::cost) makes seconds of them, by the α-β-γ model.

use super::tiers::Tiers;
use crate::{schedule::GRAIN, topology::Topology};

/// What a piece costs by an algorithm, in units of the piece and in messages.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Shape {
    /// Messages one after the other inside racks and between them.
    pub(crate) hops_in: f64,
    pub(crate) hops_across: f64,
    /// Pipeline fill: for so many hops the busiest line or uplink waits for the first chunk. All
    /// hops of a chain or a tree, where each waits for the one before, and none where what comes in
    /// goes out behind what a participant has of its own ([`Self::at_once`]).
    pub(crate) fill: f64,
    /// Sent or received by the busiest participant, in units of the piece; where lines have
    /// different rates, by that with the slowest one.
    pub(crate) line: f64,
    /// Of these, received when everybody sends at once.
    pub(crate) senders: u32,
    /// Senders to one if pieces follow each other, which are then in different rounds; 0: as above.
    pub(crate) partners: u32,
    /// What comes from these senders at once, in units of the piece.
    pub(crate) burst: f64,
    /// What leaves or enters a rack, divided by its nodes; the largest, in units of the piece.
    pub(crate) uplink: f64,
    /// Whether rounds inside racks and between them follow each other, so that the lines wait while
    /// the uplinks are busy. Otherwise chunks overlap.
    pub(crate) in_rounds: bool,
    /// Pairs of nodes of different racks that exchange at the same time, of those of one rack.
    pub(crate) crossing: f64,
    /// Reduced by the busiest participant, in units of the piece.
    pub(crate) reduced: f64,
    /// Reduced of a chunk at each hop, where that is all that isn't hidden behind the line.
    pub(crate) streamed: f64,
    /// Messages that the busiest participant sends.
    pub(crate) messages: f64,
    /// The fewest that it sends, however few blocks there are.
    pub(crate) least_messages: f64,
    /// The piece is in this many blocks.
    pub(crate) blocks: f64,
    /// The blocks of small pieces have this many bytes, and there are fewer of them.
    pub(crate) least_block: f64,
    /// Until so many blocks have come in, the busiest sends nothing; 0 if it has something of its
    /// own to send.
    pub(crate) first: f64,
}

impl Shape {
    /// Of an algorithm in which all participants send from the beginning until the end. A hop costs
    /// its latency, but no chunk: the time of each chunk is among that of the line's bytes. Between
    /// racks the uplinks may wait for what is reduced inside of them, for `waiting` hops.
    pub(crate) fn at_once(self, waiting: f64) -> Self {
        Self { fill: if self.hops_across > 0.0 { waiting } else { 0.0 }, ..self }
    }

    /// The same in more blocks, which have a message each: what is in a hop is smaller.
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

    /// All but one.
    pub(crate) fn others(&self) -> f64 {
        self.nodes - 1.0
    }

    /// What everybody has to send at least in a reduction to all owners.
    pub(crate) fn share(&self) -> f64 {
        self.others() / self.nodes
    }

    /// Whether all racks are of one size.
    pub(crate) fn is_even(&self) -> bool {
        self.largest == self.smallest
    }

    /// `hops` in all that wait for each other, as many as possible of them inside racks but for
    /// `across`.
    pub(crate) fn hops(&self, hops: f64, across: f64) -> Shape {
        let across = if self.racks > 1.0 { across.min(hops) } else { 0.0 };
        Shape {
            hops_in: hops - across,
            hops_across: across,
            // By all nodes of a rack, each with one of another rack.
            crossing: if self.racks > 1.0 { self.largest } else { 0.0 },
            fill: hops,
            blocks: 1.0,
            ..Shape::default()
        }
    }

    /// Traffic out of a rack per node, for `pieces` out of the smallest.
    pub(crate) fn uplink(&self, pieces: f64) -> f64 {
        if self.racks > 1.0 { pieces / self.smallest } else { 0.0 }
    }

    /// The same where what crosses is the least there is.
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
/// while others go up, but the first and the last have one way to themselves.
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
