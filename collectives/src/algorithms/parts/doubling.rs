//! Halving and doubling between pairs: in each round a participant sends half of the blocks that it
//! still adds to, to a partner that continues with them, and adds what the partner sends to the
//! other half. Then the same goes back. log2 M rounds and (M−1)/M of the piece each way
//! (Rabenseifner, 2004; Thakur, Rabenseifner & Gropp, 2005).
//!
//! Algorithms differ in the choice of partners (`Pairs`).
//!
//! Where M is not a power of two, the first 2(M − 2^⌊log2 M⌋) positions fold in pairs, of which one
//! takes part (`Fold`). The other one gets the result at the end. The [circle](super::circle)
//! needs no folding.

use std::ops::Range;

use super::{
    build::{self, Builder},
    shape::{Cluster, Shape},
};
use crate::{
    schedule::{Action, Schedule, split},
    topology::Topology,
};

/// The partners among 2^`rounds` numbers, and the block that each number owns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pairs {
    /// The partner of a number in a round.
    pub(crate) partner: fn(number: u32, round: u32, rounds: u32) -> u32,
    /// The block that a number owns.
    pub(crate) owned: fn(number: u32, rounds: u32) -> u32,
    /// Whether the pairs of the first rounds are in one rack each, if racks have one size that is
    /// a power of two.
    pub(crate) fits_racks: bool,
}

/// Numbers of the positions that take part among any number of positions: the first 2(M −
/// 2^⌊log2 M⌋) positions fold in pairs, and the first one of each pair takes part.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Folding {
    /// Numbers are less than 2^`rounds`.
    pub(crate) rounds: u32,
    pairs: u32,
}

impl Folding {
    pub(crate) fn new(nodes: u32) -> Self {
        let rounds = nodes.ilog2();
        Self { rounds, pairs: nodes - (1 << rounds) }
    }

    /// Whether a position belongs to a pair.
    pub(crate) fn is_paired(self, at: u32) -> bool {
        at < 2 * self.pairs
    }

    /// The number of a position or of its pair.
    pub(crate) fn number(self, at: u32) -> u32 {
        if self.is_paired(at) { at / 2 } else { at - self.pairs }
    }

    /// The position with a number that takes part.
    pub(crate) fn position(self, number: u32) -> u32 {
        if number < self.pairs { 2 * number } else { number + self.pairs }
    }
}

/// How a folded pair divides its reductions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fold {
    /// The member that takes part does all of them, and gets the whole piece from the other one.
    Whole,
    /// Each member does a half, and the one taking part gets the other half back: two messages of
    /// half the size one after the other, but half the reductions.
    Halves,
}

impl Pairs {
    /// The partner in round t is at distance 2^t, the nearest first. So only the last rounds cross
    /// between racks, with the few blocks that are left: if racks have one size that is a power of
    /// two, 2(r−1) times the piece, the minimum. The blocks are in the order of the owners' numbers
    /// with reversed bits, so each message is one range.
    pub(crate) const DOUBLING: Self = Self {
        partner: |number, round, _| number ^ (1 << round),
        owned: |number, rounds| match rounds {
            0 => number,
            rounds => number.reverse_bits() >> (32 - rounds),
        },
        fits_racks: true,
    };

    /// The blocks that a number still adds to before a round: its own, and those that it will have
    /// sent to its partners and that they will have sent on.
    fn blocks(&self, number: u32, round: u32, rounds: u32) -> Vec<Range<u32>> {
        let mut numbers = vec![number];
        for later in (round..rounds).rev() {
            let partners: Vec<u32> =
                numbers.iter().map(|&number| (self.partner)(number, later, rounds)).collect();
            numbers.extend(partners);
        }
        let owned = numbers.into_iter().map(|number| (self.owned)(number, rounds));
        build::joined(owned.map(|block| block..block + 1).collect())
    }
}

/// The schedule of `me` for an allreduce.
pub(crate) fn allreduce(
    topology: &Topology,
    pairs: &Pairs,
    fold: Fold,
    me: u32,
    count: u64,
) -> Schedule {
    let order = topology.order();
    let nodes = order.len() as u32;
    let at = build::position(&order, me);
    let folding = Folding::new(nodes);
    let rounds = folding.rounds;
    let blocks = split(count, 1 << rounds);
    let all = 0..blocks.len() as u32;
    let half = (blocks.len() as u32).div_ceil(2);
    let (lower, upper) = (0..half, half..all.end);
    let peer = |at: u32| order[at as usize];
    let reduce = |from: u32| Action::reduce(order[from as usize], from < at);
    let mut builder = Builder::new(blocks.len());
    let mut add = |time, action, ranges: Vec<Range<u32>>| {
        builder.add_existing(time, action, ranges);
    };
    // The fold takes times 0 and 1, halving and doubling those from 2 on, and its end the last.
    let last = 2 + 2 * rounds;
    let is_folded = folding.is_paired(at);
    if is_folded && !at.is_multiple_of(2) {
        let with = at - 1;
        match fold {
            Fold::Whole => {
                add(0, Action::ReduceLocal, vec![all.clone()]);
                add(0, Action::send(peer(with)), vec![all.clone()]);
            }
            Fold::Halves => {
                add(0, Action::ReduceLocal, vec![lower.clone()]);
                add(0, Action::ReduceLocal, vec![upper.clone()]);
                add(0, Action::send(peer(with)), vec![lower]);
                add(0, reduce(with), vec![upper.clone()]);
                add(1, Action::send(peer(with)), vec![upper]);
            }
        }
        add(last, Action::copy(peer(with)), vec![all.clone()]);
        add(last, Action::Publish, vec![all]);
        return builder.finish(nodes, me, blocks);
    }
    let number = folding.number(at);
    let owns = |number: u32, round: u32| pairs.blocks(number, round, rounds);
    let with = |round: u32| (pairs.partner)(number, round, rounds);
    if is_folded {
        match fold {
            Fold::Whole => {
                add(0, Action::ReduceLocal, vec![all.clone()]);
                add(0, reduce(at + 1), vec![all.clone()]);
            }
            Fold::Halves => {
                add(0, Action::ReduceLocal, vec![lower.clone()]);
                add(0, Action::ReduceLocal, vec![upper.clone()]);
                add(0, Action::send(peer(at + 1)), vec![upper.clone()]);
                add(0, reduce(at + 1), vec![lower]);
                add(1, Action::copy(peer(at + 1)), vec![upper]);
            }
        }
    } else {
        // What is sent first, and what is added to first.
        for first in (rounds > 0).then(|| [with(0), number]).into_iter().flatten() {
            add(0, Action::ReduceLocal, owns(first, 1));
        }
    }
    for round in 0..rounds {
        let other = folding.position(with(round));
        add(2 + round, Action::send(peer(other)), owns(with(round), round + 1));
        add(2 + round, reduce(other), owns(number, round + 1));
    }
    for round in (0..rounds).rev() {
        let (other, time) = (folding.position(with(round)), last - 1 - round);
        add(time, Action::send(peer(other)), owns(number, round + 1));
        add(time, Action::copy(peer(other)), owns(with(round), round + 1));
    }
    if is_folded {
        add(last, Action::send(peer(at + 1)), vec![all.clone()]);
    }
    add(last, Action::Publish, vec![all]);
    builder.finish(nodes, me, blocks)
}

/// The cost of an allreduce: 2⌊log2 M⌋α + 2(M−1)/M·S·β + (M−1)/M·S·γ, and what a fold takes.
pub(crate) fn cost(cluster: &Cluster, pairs: &Pairs, fold: Fold) -> Shape {
    let rounds = cluster.nodes.log2().floor();
    let share = 1.0 - (-rounds).exp2();
    let is_folded = cluster.nodes.log2() > rounds;
    let (hops, reduced) = match fold {
        _ if !is_folded => (0.0, 0.0),
        Fold::Whole => (2.0, 1.0),
        // Small pieces have no second half.
        Fold::Halves => (2.0, 0.5),
    };
    let line = if is_folded { 2.0 } else { 0.0 };
    let aligned = cluster.is_even() && !is_folded && pairs.fits_racks;
    let across = cluster.racks.log2().ceil();
    Shape {
        line: 2.0 * share + line,
        uplink: match cluster.racks > 1.0 {
            true if aligned => cluster.least_uplink(),
            // Some messages of all rounds cross.
            true => 1.0,
            false => 0.0,
        },
        reduced: share + reduced,
        partners: rounds as u32,
        messages: 2.0 * rounds + hops,
        blocks: 2.0,
        ..cluster
            .hops(2.0 * rounds + hops, 2.0 * if aligned { across } else { across + 1.0 })
            .at_once(1.0)
    }
}
