//! Bine, binomial negabinary: partners and trees whose distances are about two thirds of those of
//! butterflies and binomial trees, so more messages stay near their sender in any network (De Sensi
//! et al., "Bine Trees: Enhancing Collective Operations by Optimizing Communication Locality", SC
//! 2025).
//!
//! A number in base −2 (negabinary) has bits of weight 1, −2, 4, −8, …: its neighbours on both
//! sides differ from it in low bits. Flipping the lowest t + 1 bits, which are all 0 or all 1,
//! moves it by the distance (1 − (−2)^(t+1)) / 3 to one side or the other: 1, 1, 3, 5, 11, 21, …
//!
//! - The allreduce is an exchange in pairs ([`doubling`]) with partners at these distances, the
//!   nearest first: they are [Swing](swing)'s. Here the blocks lie in the order in which they are
//!   halved, so each message is one range (`owned`).
//! - To or from one participant it is a tree: in round t each participant with the block sends it
//!   to the number that differs in all bits but the highest t, the farthest first. Numbers count
//!   from the root in the order of the racks, to both sides.
//!
//! Where M is not a power of two, the first 2(M − 2^⌊log2 M⌋) positions fold in pairs.

use super::{prelude::*, swing};
use crate::algorithms::parts::doubling::Folding;

const PAIRS: Pairs = Pairs { partner: swing::partner, owned, fits_racks: false };

pub(super) struct Bine;

impl Definition for Bine {
    fn about(&self) -> About {
        About {
            idea: "halving and doubling, or a tree, at distances 1, 1, 3, 5, 11, … to either side",
            cost: "as halving-doubling",
            when: "unknown racks",
            source: "De Sensi et al., \"Bine Trees: Enhancing Collective Operations by Optimizing \
                     Communication Locality\", SC 2025",
        }
    }

    fn allreduce(&self, _: &Spec, topology: &Topology, me: u32, count: u64) -> Schedule {
        doubling::allreduce(topology, &PAIRS, Fold::Whole, me, count)
    }

    fn allreduce_cost(&self, _: &Spec, _: &Topology, cluster: &Cluster) -> Shape {
        doubling::cost(cluster, &PAIRS, Fold::Whole)
    }

    fn rooted(&self, _: &Spec, topology: &Topology, root: u32, me: u32, count: u64) -> Rooted {
        let mut order = topology.order();
        let first = build::position(&order, root);
        order.rotate_left(first as usize);
        let at = build::position(&order, me);
        let tree = BineTree::new(order.len() as u32);
        Rooted::new(split(count, trees::blocks_for(count)), move |block| {
            let link = |(peer, round): (u32, u32)| Link {
                peer: order[peer as usize],
                up: block + tree.0.rounds - round,
                down: block + tree.0.rounds + round,
            };
            Place {
                parent: tree.parent(at).map(link),
                children: tree.children(at).into_iter().map(link).collect(),
            }
        })
    }

    /// The cost of a broadcast: ⌈log2 M⌉(α + S·β).
    fn broadcast_cost(&self, _: &Spec, _: &Topology, _root: u32, cluster: &Cluster) -> Shape {
        let rounds = cluster.nodes.log2().ceil();
        let across = cluster.racks.log2().ceil();
        Shape {
            line: rounds,
            uplink: cluster.uplink(across + 1.0),
            messages: rounds,
            // A pair is rarely at the end of the longest path.
            ..cluster.hops(cluster.nodes.log2().floor(), across + 1.0)
        }
    }
}

/// The bits with a negative weight.
const NEGATIVE: u32 = 0xaaaa_aaaa;

/// A number modulo 2^`bits` in base −2.
fn negabinary(number: u32, bits: u32) -> u32 {
    (number.wrapping_add(NEGATIVE) ^ NEGATIVE) & ((1 << bits) - 1)
}

/// The number modulo 2^`bits` with these bits in base −2.
fn number(negabinary: u32, bits: u32) -> u32 {
    (negabinary ^ NEGATIVE).wrapping_sub(NEGATIVE) & ((1 << bits) - 1)
}

/// The block that a number owns, of 2^`rounds`. Blocks that are sent together are contiguous. In
/// round t a pair differs in bit t of the Gray code of the negabinary number, where even numbers
/// are negated. The bits are reversed, because the first round halves all blocks.
fn owned(number: u32, rounds: u32) -> u32 {
    if rounds == 0 {
        return 0;
    }
    let number = if number.is_multiple_of(2) { number.wrapping_neg() } else { number };
    let bits = negabinary(number, rounds);
    (bits ^ (bits >> 1)).reverse_bits() >> (32 - rounds)
}

/// A tree over positions, of which 0 is the root.
#[derive(Debug, Clone, Copy)]
struct BineTree(Folding);

impl BineTree {
    fn new(nodes: u32) -> Self {
        Self(Folding::new(nodes))
    }

    /// Whether a position is the other member of a pair, one round farther down.
    fn is_folded(self, at: u32) -> bool {
        self.0.is_paired(at) && !at.is_multiple_of(2)
    }

    /// How many of the lowest bits of a number are equal; one more for the root.
    fn same_bits(self, number: u32) -> u32 {
        let bits = negabinary(number, self.0.rounds);
        match bits {
            0 => self.0.rounds + 1,
            _ => bits.trailing_ones().max(bits.trailing_zeros()),
        }
    }

    /// The number that differs in this many of the lowest bits.
    fn flipped(self, of: u32, bits: u32) -> u32 {
        number(negabinary(of, self.0.rounds) ^ ((1 << bits) - 1), self.0.rounds)
    }

    /// The parent of a position, and the round in which it sends.
    fn parent(self, at: u32) -> Option<(u32, u32)> {
        if self.is_folded(at) {
            return Some((at - 1, self.0.rounds));
        }
        let (number, same) = (self.0.number(at), self.same_bits(self.0.number(at)));
        let sender = || self.0.position(self.flipped(number, same));
        (number > 0).then(|| (sender(), self.0.rounds - same))
    }

    /// The children of a position, and the rounds in which it sends to them.
    fn children(self, at: u32) -> Vec<(u32, u32)> {
        if self.is_folded(at) {
            return Vec::new();
        }
        let number = self.0.number(at);
        let smaller = (1..self.same_bits(number)).rev();
        let below =
            smaller.map(|bits| (self.0.position(self.flipped(number, bits)), self.0.rounds - bits));
        let other = self.0.is_paired(at).then_some((at + 1, self.0.rounds));
        below.chain(other).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edges(nodes: u32) -> Vec<(u32, u32)> {
        let tree = BineTree::new(nodes);
        (0..nodes).filter_map(|at| tree.parent(at).map(|(parent, _)| (parent, at))).collect()
    }

    /// Trees as in the paper, for every number of participants: both ends agree on a link and its
    /// round, a participant receives the block before it sends it, and sends once in a round.
    #[test]
    fn trees_are_binomial() {
        for nodes in 1..=1030 {
            let tree = BineTree::new(nodes);
            let found = edges(nodes);
            assert_eq!(found.len() as u32, nodes - 1);
            for &(parent, at) in &found {
                let (_, round) = tree.parent(at).unwrap();
                assert!(tree.children(parent).contains(&(at, round)), "{nodes}: {parent} {at}");
                let earlier = tree.parent(parent).is_none_or(|(_, received)| received < round);
                assert!(earlier && round < nodes.next_power_of_two().ilog2(), "{nodes}: {at}");
            }
            for at in 0..nodes {
                let rounds: Vec<u32> = tree.children(at).iter().map(|(_, round)| *round).collect();
                assert!(rounds.is_sorted_by(|a, b| a < b), "{nodes}: {at}");
            }
        }
    }

    /// The distances of the rounds are 1, 1, 3, 5, 11, 21, …, where a binomial tree has 1, 2, 4, …
    #[test]
    fn distances_are_two_thirds() {
        let nodes = 1 << 10;
        let tree = BineTree::new(nodes);
        let mut distances = [0; 10];
        for (parent, at) in edges(nodes) {
            let (_, round) = tree.parent(at).unwrap();
            let far = parent.abs_diff(at);
            let found = std::mem::replace(&mut distances[round as usize], far.min(nodes - far));
            assert!(found == 0 || found == far.min(nodes - far));
        }
        assert_eq!(distances, [341, 171, 85, 43, 21, 11, 5, 3, 1, 1]);
    }

    /// With racks one after the other, broadcasts cross between them less often than those of a
    /// binomial tree over the same numbers: on average over all roots, and from the worst root.
    #[test]
    fn racks_are_crossed_less_often() {
        let crossings = |edges: &[(u32, u32)], nodes: u32, size: u32| -> Vec<usize> {
            let rack = |at: u32, root: u32| (at + root) % nodes / size;
            let from = |root| {
                let crosses = |(a, b): &&(u32, u32)| rack(*a, root) != rack(*b, root);
                edges.iter().filter(crosses).count()
            };
            (0..nodes).map(from).collect()
        };
        for (size, racks) in
            [(8, 4), (4, 8), (16, 2), (2, 16), (3, 5), (6, 4), (5, 5), (7, 9), (12, 5), (16, 8)]
        {
            let nodes = size * racks;
            let binomial: Vec<_> = (1..nodes).map(|at| (at & (at - 1), at)).collect();
            let bine = crossings(&edges(nodes), nodes, size);
            let binomial = crossings(&binomial, nodes, size);
            let sum = |all: &[usize]| all.iter().sum::<usize>();
            assert!(sum(&bine) < sum(&binomial), "{racks} racks of {size}");
            assert!(bine.iter().max() <= binomial.iter().max(), "{racks} racks of {size}");
        }
        // But a binomial tree from the first node of a rack is aligned with racks of a power of
        // two.
        let binomial: Vec<_> = (1..32).map(|at: u32| (at & (at - 1), at)).collect();
        assert_eq!((crossings(&edges(32), 32, 8)[0], crossings(&binomial, 32, 8)[0]), (7, 3));
    }
}
