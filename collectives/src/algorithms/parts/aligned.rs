//! A reduction to one participant that adds up in the canonical order, for any root.
//!
//! The canonical order is that of
//! [recursive doubling](crate::algorithms::catalog::recursive_doubling). Where the number of
//! participants M is not a power of two, the first 2(M − 2^⌊log2 M⌋) positions are added in pairs
//! (2i, 2i + 1). What is left is added along a binary tree of aligned groups: pairs of numbers,
//! then fours, and so on, the lower group on the left. In a binomial tree ([`trees`]) the order
//! would depend on the root.
//!
//! Here each group has one participant that holds its sum: the root if it is in the group, or else
//! the participant at the same place as the root in its own group. When two groups become one, the
//! holder of one sends to the holder of the other. So with all participants as roots, for a share
//! each, it is the halving of [`doubling`].

use super::{
    build::{self, Builder},
    doubling::{self, Fold, Folding, Pairs},
    shape::{Cluster, Shape},
    trees,
};
use crate::{
    schedule::{Action, Schedule, split},
    topology::Topology,
};

/// The participants of an aligned tree, by position.
pub(crate) struct Groups {
    folding: Folding,
    root: u32,
}

impl Groups {
    /// The groups of `nodes` positions, one of which is the root.
    pub(crate) fn new(nodes: u32, root: u32) -> Self {
        Self { folding: Folding::new(nodes), root }
    }

    /// The position that holds the sum of the group of 2^`round` numbers to which a number belongs.
    fn holder(&self, number: u32, round: u32) -> u32 {
        let root = self.folding.number(self.root);
        let own = number >> round << round | root & ((1 << round) - 1);
        if own == root { self.root } else { self.folding.position(own) }
    }

    /// Where the sum of a position goes, and in which round. The position is not the root.
    pub(crate) fn next(&self, at: u32) -> (u32, u32) {
        let number = self.folding.number(at);
        let holder = |round| (self.holder(number, round), round);
        let others = (0..=self.folding.rounds).map(holder).find(|(holder, _)| *holder != at);
        others.unwrap_or((self.root, self.folding.rounds))
    }

    /// The positions that a position gets sums from, and the rounds, in order.
    fn received(&self, at: u32) -> Vec<(u32, u32)> {
        let number = self.folding.number(at);
        let last = if at == self.root { self.folding.rounds } else { self.next(at).1 };
        let mut received = Vec::new();
        if self.folding.is_paired(at) && self.holder(number, 0) == at {
            received.push((at ^ 1, 0));
        }
        for round in (1..=last).filter(|&round| self.holder(number, round) == at) {
            received.push((self.holder(number ^ (1 << (round - 1)), round - 1), round));
        }
        received
    }
}

pub(crate) fn reduce(topology: &Topology, root: u32, me: u32, count: u64) -> Schedule {
    let order = topology.order();
    let nodes = order.len() as u32;
    let at = build::position(&order, me);
    let groups = Groups::new(nodes, build::position(&order, root));
    let received = groups.received(at);
    let to = (order[at as usize] != root).then(|| groups.next(at));
    let blocks = split(count, trees::blocks_for(count));
    let mut builder = Builder::new(blocks.len());
    for block in 0..blocks.len() as u32 {
        builder.add(0, Action::ReduceLocal, block);
        for &(from, time) in &received {
            builder.add(time, Action::reduce(order[from as usize], from < at), block);
        }
        match to {
            Some((to, time)) => builder.add(time, Action::send(order[to as usize]), block),
            None => builder.add(groups.folding.rounds + 1, Action::Publish, block),
        }
    }
    builder.finish(nodes, me, blocks)
}

/// The cost of a reduction to one participant: ⌈log2 M⌉(α + S·β + S·γ).
pub(crate) fn cost(cluster: &Cluster) -> Shape {
    let rounds = cluster.nodes.log2().ceil();
    let across = cluster.racks.log2().ceil();
    // Groups that don't match the racks cross their borders: up to three times as often, counted
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

/// The cost of halving and doubling, as the two halves of an exchange with all participants as
/// roots. Folded data goes to its owner in the pair, and does not come back.
pub(crate) fn exchange_cost(cluster: &Cluster) -> Shape {
    let all = doubling::cost(cluster, &Pairs::DOUBLING, Fold::Whole);
    let most = cluster.share() + 0.5;
    Shape { line: all.line.min(2.0 * most), reduced: all.reduced.min(most), ..all }
}
