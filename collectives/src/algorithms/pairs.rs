//! Halving and doubling between pairs: in each round a participant sends half of the blocks that it
//! still adds to, to a partner who goes on with them, and adds what that one sends to the other
//! half. Then the same goes back. log2 M rounds and (M−1)/M of the piece each way (Rabenseifner,
//! 2004; Thakur, Rabenseifner & Gropp, 2005).
//!
//! Who the partners are makes the algorithm:
//!
//! - `halving-doubling`, `rabenseifner`: in round t the participant at distance 2^t, the nearest
//!   first. So the last rounds cross between racks, with the few blocks that are left: in racks of
//!   one size that is a power of two, 2(r−1) times the piece, the least there is. The blocks lie in
//!   the order of the owners' numbers with their bits reversed, so each message is one range.
//! - `swing`: at distances 1, 1, 3, 5, 11, 21, … in turns to either side, so that on a torus the
//!   partners are nearer than at doubling distance (De Sensi, Bonato, Saam & Hoefler, NSDI 2024).
//! - `bine`: with Swing's partners, and blocks in an order in which each message is one range
//!   ([`bine`]).
//!
//! Where M is not a power of two, the first 2(M − 2^⌊log2 M⌋) positions fold in pairs, of which one
//! takes part. The other one gives it the whole piece, and gets the result at the end
//! (`halving-doubling`, `swing`, `bine`). Or both reduce a half, and the one that takes part gets
//! the other half back: two messages of half the size one after the other, but half the reducing
//! (`rabenseifner`). The [circulant](super::circulant) needs no folding.

use std::ops::Range;

use super::{
    bine,
    build::{self, Builder},
    shape::{Cluster, Shape},
};
use crate::{
    schedule::{Action, Schedule, split},
    topology::Topology,
};

/// Who the partners are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Partners {
    /// At doubling distance.
    Near,
    /// At Swing's distances.
    Swing,
    /// The same, of which each message is one range.
    Bine,
}

/// What of a pair that folds is reduced where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fold {
    /// All of it by the one that takes part.
    Whole,
    /// A half by each.
    Halves,
}

impl Partners {
    /// Of a number, in a round, among 2^`rounds`.
    fn of(self, number: u32, round: u32, rounds: u32) -> u32 {
        match self {
            Self::Near => number ^ (1 << round),
            Self::Swing | Self::Bine => {
                // (1 − (−2)^(t+1)) / 3: 1, −1, 3, −5, 11, …
                let distance = (1 - (-2i64).pow(round + 1)) / 3;
                let distance = if number.is_multiple_of(2) { distance } else { -distance };
                (i64::from(number) + distance).rem_euclid(1 << rounds) as u32
            }
        }
    }

    /// Which block a number owns.
    fn owned(self, number: u32, rounds: u32) -> u32 {
        match self {
            Self::Near if rounds > 0 => number.reverse_bits() >> (32 - rounds),
            Self::Near | Self::Swing => number,
            Self::Bine => bine::owned(number, rounds),
        }
    }

    /// The blocks that a number still adds to before a round: its own, and those that it will have
    /// sent to its partners and that they will have sent on.
    fn blocks(self, number: u32, round: u32, rounds: u32) -> Vec<Range<u32>> {
        let mut numbers = vec![number];
        for later in (round..rounds).rev() {
            let partners: Vec<u32> =
                numbers.iter().map(|&number| self.of(number, later, rounds)).collect();
            numbers.extend(partners);
        }
        let owned = numbers.into_iter().map(|number| self.owned(number, rounds));
        build::joined(owned.map(|block| block..block + 1).collect())
    }
}

pub(super) fn allreduce(
    topology: &Topology,
    partners: Partners,
    fold: Fold,
    me: u32,
    count: u64,
) -> Schedule {
    let order = topology.order();
    let nodes = order.len() as u32;
    let at = build::position(&order, me);
    let rounds = nodes.ilog2();
    let folded = nodes - (1 << rounds);
    let blocks = split(count, 1 << rounds);
    let all = 0..blocks.len() as u32;
    let half = (blocks.len() as u32).div_ceil(2);
    let (lower, upper) = (0..half, half..all.end);
    let peer = |at: u32| order[at as usize];
    let reduce = |from: u32| Action::reduce(order[from as usize], from < at);
    let mut builder = Builder::new(blocks.len());
    let mut add = |time, action, ranges: Vec<Range<u32>>| {
        builder.add_those_there(time, action, ranges);
    };
    // The fold takes times 0 and 1, halving and doubling those from 2 on, and its end the last.
    let last = 2 + 2 * rounds;
    let is_folded = at < 2 * folded;
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
    // Numbers of those who take part, and back.
    let number = if is_folded { at / 2 } else { at - folded };
    let position = |number: u32| if number < folded { 2 * number } else { number + folded };
    let owns = |number: u32, round: u32| partners.blocks(number, round, rounds);
    let with = |round: u32| partners.of(number, round, rounds);
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
        let other = position(with(round));
        add(2 + round, Action::send(peer(other)), owns(with(round), round + 1));
        add(2 + round, reduce(other), owns(number, round + 1));
    }
    for round in (0..rounds).rev() {
        let (other, time) = (position(with(round)), last - 1 - round);
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
pub(super) fn shape(cluster: &Cluster, partners: Partners, fold: Fold) -> Shape {
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
    let aligned = cluster.is_even() && !is_folded && partners == Partners::Near;
    let across = cluster.racks.log2().ceil();
    Shape {
        line: 2.0 * share + line,
        uplink: match cluster.racks > 1.0 {
            true if aligned => cluster.least_uplink(),
            // Some of all messages cross.
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
