//! Trees that all have one root: contributions go up to it, or its data comes down.
//!
//! - A star: all others are the root's children. Two messages one after the other, but the root
//!   sends and receives M−1 times the piece.
//! - A tree of degree k: in each round every participant with the block sends it to k−1 more, which
//!   is a binomial tree for k = 2. ⌈log_k M⌉ rounds of k−1 messages each way. The farthest go
//!   first, so each rack is entered early and then served from inside.
//!
//! A [chain](crate::algorithms::catalog::chain) and others have files of their own.

use super::{
    build::{self, Link, Place, Rooted},
    shape::{Cluster, Shape},
};
use crate::{schedule::split, topology::Topology};

/// Above this many elements there are several blocks, so that they can use several streams.
const BLOCK: u64 = 1 << 16;
const MAX_BLOCKS: u64 = 16;

/// How many blocks a piece has.
pub(crate) fn blocks_for(count: u64) -> u64 {
    count.div_ceil(BLOCK).clamp(1, MAX_BLOCKS)
}

/// The star.
pub(crate) fn star(topology: &Topology, segments: u32, root: u32, me: u32, count: u64) -> Rooted {
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

/// The cost of a broadcast by a star: α + (M−1)·S·β.
pub(crate) fn star_cost(cluster: &Cluster) -> Shape {
    Shape {
        line: cluster.others(),
        uplink: cluster.uplink(cluster.nodes - cluster.largest),
        messages: cluster.others(),
        ..cluster.hops(1.0, 1.0)
    }
}

/// The cost of a reduction to the root of a star: all send at once.
pub(crate) fn star_cost_up(cluster: &Cluster) -> Shape {
    let (senders, burst) = (cluster.others() as u32, cluster.others());
    Shape { senders, burst, streamed: 1.0, ..star_cost(cluster) }
}

/// The tree of degree `radix`.
pub(crate) fn k_nomial(
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

/// The cost of a broadcast by a tree of degree k: ⌈log_k M⌉(α + (k−1)·S·β).
pub(crate) fn k_nomial_cost(cluster: &Cluster, radix: u32) -> Shape {
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
        // At most as many hops as a position has digits that are not 0.
        ..cluster
            .hops(if radix == 2.0 { cluster.nodes.log2().floor() } else { rounds }, across.ceil())
    }
}
