//! Trees with one root for all blocks: everybody's contributions go up to it, and the result comes
//! down again. Each allreduce is a reduction to the first participant and a broadcast from it.
//!
//! - `linear`: all others are the root's children. Two messages one after the other, but the root
//!   sends and receives M−1 times the piece: for few nodes, and as what others are compared with.
//! - `k-nomial`: in each round everybody who has the block sends it to k−1 more; `binomial` with
//!   k = 2. ⌈log_k M⌉ rounds of k−1 messages each way. The farthest go first, so each rack is
//!   entered early and then served from inside (Thakur, Rabenseifner & Gropp, 2005; of degree k as
//!   in MPICH and Open MPI).
//! - `chain`: each participant has one child. M−1 messages one after the other, but nobody sends
//!   more than once the piece each way, and blocks follow each other closely: for large pieces to
//!   or from one participant. It is the ring's, [`ring::rooted`](super::ring).

use super::{
    build::{self, Link, Place, Rooted},
    shape::{Cluster, Shape},
};
use crate::{
    schedule::{Schedule, split},
    topology::Topology,
};

/// Above this many elements there are several blocks, so that they can use several streams.
const BLOCK: u64 = 1 << 16;
const MAX_BLOCKS: u64 = 16;

pub(super) fn blocks_for(count: u64) -> u64 {
    count.div_ceil(BLOCK).clamp(1, MAX_BLOCKS)
}

/// A reduction to the first participant, and a broadcast from it.
pub(super) fn there_and_back(
    topology: &Topology,
    me: u32,
    trees: impl Fn(u32) -> Rooted,
) -> Schedule {
    let Rooted { blocks, place } = trees(topology.order()[0]);
    build::reduce_and_return(topology.participants(), me, blocks, place)
}

pub(super) fn linear(topology: &Topology, segments: u32, root: u32, me: u32, count: u64) -> Rooted {
    let order = build::order_from(topology, root);
    let nodes = order.len() as u32;
    let at = build::position(&order, me);
    let blocks = split(count, blocks_for(count).max(segments.into()));
    Rooted::new(blocks, move |block| {
        let link = |peer: u32, child: u32| Link {
            peer: order[peer as usize],
            up: block + child - 1,
            down: block + nodes + child,
        };
        match at {
            0 => Place {
                parent: None,
                children: (1..nodes).map(|child| link(child, child)).collect(),
            },
            child => Place { parent: Some(link(0, child)), children: Vec::new() },
        }
    })
}

/// The tree of degree `radix`.
pub(super) fn k_nomial(
    (radix, segments): (u32, u32),
    topology: &Topology,
    root: u32,
    me: u32,
    count: u64,
) -> Rooted {
    let order = build::order_from(topology, root);
    let nodes = order.len() as u32;
    let at = build::position(&order, me);
    // Positions as numbers to base `radix`: powers of it below `nodes`.
    let next = |power: &u32| power.checked_mul(radix);
    let powers: Vec<u32> =
        std::iter::successors(Some(1), next).take_while(|power| *power < nodes).collect();
    let rounds = powers.len() as u32;
    // The lowest digit that is not 0; the root has none.
    let own = powers.iter().take_while(|power| at.is_multiple_of(*power * radix)).count() as u32;
    let own = if at == 0 { rounds } else { own };
    let blocks = split(count, blocks_for(count).max(segments.into()));
    Rooted::new(blocks, move |block| {
        // The parent of a position is that without its lowest digit. A far link (high digit) is
        // early on the way down, and late on the way up.
        let link = |peer: u32, digit: u32, value: u32| Link {
            peer: order[peer as usize],
            up: block + digit * (radix - 1) + value - 1,
            down: block + (2 * rounds - 1 - digit) * (radix - 1) + value - 1,
        };
        let parent = (at > 0).then(|| {
            let power = powers[own as usize];
            let value = at / power % radix;
            link(at - value * power, own, value)
        });
        let below = (0..own).flat_map(|digit| (1..radix).map(move |value| (digit, value)));
        let children = below
            .map(|(digit, value)| (at + value * powers[digit as usize], digit, value))
            .filter(|(child, ..)| *child < nodes)
            .map(|(child, digit, value)| link(child, digit, value))
            .collect();
        Place { parent, children }
    })
}

/// The cost of a broadcast from the root to all: α + (M−1)·S·β.
pub(super) fn linear_down(cluster: &Cluster) -> Shape {
    Shape {
        line: cluster.others(),
        uplink: cluster.uplink(cluster.nodes - cluster.largest),
        messages: cluster.others(),
        ..cluster.hops(1.0, 1.0)
    }
}

/// The cost of a broadcast: ⌈log_k M⌉(α + (k−1)·S·β).
pub(super) fn k_nomial_down(cluster: &Cluster, radix: u32) -> Shape {
    let radix = f64::from(radix);
    // The root has the most children: all positions with one digit.
    let mut children = 0.0;
    let (mut power, mut rounds) = (1.0, 0.0);
    while power < cluster.nodes {
        children += (radix - 1.0).min(((cluster.nodes - 1.0) / power).floor());
        rounds += 1.0;
        power *= radix;
    }
    let across = cluster.racks.ln() / radix.ln();
    Shape {
        line: children,
        uplink: cluster.uplink((radix - 1.0) * across.ceil()),
        messages: children,
        // As many as a position has digits that are not 0, at most.
        ..cluster
            .hops(if radix == 2.0 { cluster.nodes.log2().floor() } else { rounds }, across.ceil())
    }
}
