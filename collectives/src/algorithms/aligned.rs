//! A reduction to one participant that adds up in the canonical order, whoever gets the result.
//!
//! The canonical order is that of [recursive doubling](super::recursive_doubling). Where the number
//! of participants M is not a power of two, the first 2(M − 2^⌊log2 M⌋) positions are added in
//! pairs (2i, 2i + 1). What is left is added along a binary tree of aligned groups: pairs of
//! numbers, then fours, and so on, the lower group on the left. In the tree of [`trees`] the order
//! would depend on the root.
//!
//! Here each group has one participant that holds its sum: the root if it is in the group, or else
//! the lowest. When two groups become one, the holder of one sends to the holder of the other.

use super::{
    build::{self, Builder},
    shape::{Cluster, Shape},
    trees,
};
use crate::{
    schedule::{Action, Schedule, split},
    topology::Topology,
};

/// The participants of an aligned tree, by position.
struct Groups {
    rounds: u32,
    folded: u32,
    root: u32,
}

impl Groups {
    fn new(nodes: u32, root: u32) -> Self {
        let rounds = nodes.ilog2();
        Self { rounds, folded: nodes - (1 << rounds), root }
    }

    /// The number of the pair or single position that a position belongs to.
    fn number(&self, at: u32) -> u32 {
        if at < 2 * self.folded { at / 2 } else { at - self.folded }
    }

    /// The position that holds the sum of the 2^`round` numbers that begin with `first`.
    fn holder(&self, first: u32, round: u32) -> u32 {
        if self.number(self.root) >> round == first >> round {
            self.root
        } else if first < self.folded {
            2 * first
        } else {
            first + self.folded
        }
    }
}

pub(super) fn reduce(topology: &Topology, root: u32, me: u32, count: u64) -> Schedule {
    let order = topology.order();
    let nodes = order.len() as u32;
    let at = build::position(&order, me);
    let groups = Groups::new(nodes, build::position(&order, root));
    // What is received and from where, in order, and to whom the sum goes in the end.
    let (mut received, mut to) = (Vec::new(), None);
    let number = groups.number(at);
    if at < 2 * groups.folded {
        let holder = groups.holder(number, 0);
        if holder == at { received.push((0, at ^ 1)) } else { to = Some((0, holder)) }
    }
    for round in 0..groups.rounds {
        let lower = number >> (round + 1) << (round + 1);
        let holders = [lower, lower + (1 << round)].map(|first| groups.holder(first, round));
        if to.is_some() || !holders.contains(&at) {
            break;
        }
        let other = if holders[0] == at { holders[1] } else { holders[0] };
        if groups.holder(lower, round + 1) == at {
            received.push((1 + round, other));
        } else {
            to = Some((1 + round, other));
        }
    }
    let blocks = split(count, trees::blocks_for(count));
    let mut builder = Builder::new(blocks.len());
    for block in 0..blocks.len() as u32 {
        builder.add(0, Action::ReduceLocal, block);
        for &(time, from) in &received {
            builder.add(time, Action::reduce(order[from as usize], from < at), block);
        }
        match to {
            Some((time, to)) => builder.add(time, Action::send(order[to as usize]), block),
            None => builder.add(groups.rounds + 1, Action::Publish, block),
        }
    }
    builder.finish(nodes, me, blocks)
}

/// The cost: ⌈log2 M⌉(α + S·β + S·γ).
pub(super) fn up(cluster: &Cluster) -> Shape {
    let rounds = cluster.nodes.log2().ceil();
    let across = cluster.racks.log2().ceil();
    // Groups of other sizes than the racks cross their borders: up to three times as often, counted
    // for 2 to 8 racks of up to 8 nodes.
    let is_aligned = cluster.is_even() && (cluster.largest as u32).is_power_of_two();
    Shape {
        line: rounds,
        uplink: cluster.uplink(if is_aligned { across } else { 3.0 * across }),
        messages: 1.0,
        streamed: 1.0,
        ..cluster.hops(rounds, across)
    }
}
