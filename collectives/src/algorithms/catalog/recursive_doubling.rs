//! Recursive doubling: in round t each participant exchanges all it has with the participant at
//! distance 2^t, and both reduce (Thakur, Rabenseifner & Gropp, 2005).
//!
//! There are only ⌊log2 M⌋ rounds, the minimum, but every round carries the whole piece: it suits
//! small ones. Where M is not a power of two, the first 2(M − 2^⌊log2 M⌋) positions fold in pairs:
//! the even one gives its contribution to the odd one, stays out, and gets the result at the end.
//!
//! All participants finish each element, not one owner, so bits are identical (SAME) only because
//! all put the lower position on the left.
//!
//! A broadcast uses a binomial tree, and a reduction to one participant an
//! [aligned](crate::algorithms::parts::aligned) one. Additions are in the canonical order
//! ([`Algorithm::CANONICAL`](crate::Algorithm::CANONICAL)).

use super::prelude::*;

pub(super) struct RecursiveDoubling;

impl Definition for RecursiveDoubling {
    fn about(&self) -> About {
        About {
            idea: "pairs at distance 1, 2, 4, … exchange and add all they have",
            cost: "⌊log₂ M⌋(α + S·β + S·γ); 2(α + S·β) + S·γ more if M is not a power of two",
            when: "small pieces",
            source: THAKUR,
        }
    }

    fn allreduce(&self, _: &Spec, topology: &Topology, me: u32, count: u64) -> Schedule {
        let order = topology.order();
        let nodes = order.len() as u32;
        let at = build::position(&order, me);
        let blocks = split(count, trees::blocks_for(count));
        let rounds = nodes.ilog2();
        let folded = nodes - (1 << rounds);
        let mut builder = Builder::new(blocks.len());
        for block in 0..blocks.len() as u32 {
            let send = |at: u32| Action::send(order[at as usize]);
            let reduce = |peer: u32| Action::reduce(order[peer as usize], peer < at);
            builder.add(0, Action::ReduceLocal, block);
            if at < 2 * folded && at.is_multiple_of(2) {
                builder.add(0, send(at + 1), block);
                builder.add(rounds + 1, Action::copy(order[at as usize + 1]), block);
            } else {
                if at < 2 * folded {
                    builder.add(0, reduce(at - 1), block);
                }
                // Numbers of the positions that stay in, and back.
                let number = if at < 2 * folded { at / 2 } else { at - folded };
                let position = |number: u32| {
                    if number < folded { 2 * number + 1 } else { number + folded }
                };
                for round in 0..rounds {
                    let peer = position(number ^ (1 << round));
                    builder.add(1 + round, send(peer), block);
                    builder.add(1 + round, reduce(peer), block);
                }
                if at < 2 * folded {
                    builder.add(rounds + 1, send(at - 1), block);
                }
            }
            builder.add(rounds + 1, Action::Publish, block);
        }
        builder.finish(nodes, me, blocks)
    }

    /// ⌊log2 M⌋(α + S·β + S·γ), and 2(α + S·β) + S·γ for a fold.
    fn allreduce_cost(&self, _: &Spec, _: &Topology, cluster: &Cluster) -> Shape {
        let rounds = cluster.nodes.log2().floor();
        let fold = if cluster.nodes.log2() > rounds { 1.0 } else { 0.0 };
        let crossing = cluster.racks.log2().ceil();
        Shape {
            // A fold is before and after the rounds, and carries the whole piece, too.
            line: rounds + 2.0 * fold,
            // All nodes of a rack cross in the same rounds.
            uplink: cluster.uplink(crossing * cluster.largest),
            reduced: rounds + fold,
            messages: rounds + fold,
            ..cluster.hops(rounds + 2.0 * fold, crossing).at_once(1.0)
        }
    }
}
