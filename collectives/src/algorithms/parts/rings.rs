//! Rings: each block travels once around to its owner and is reduced on the way; then the result
//! travels to all others.
//!
//! Every participant sends 2(M−1)/M of the piece, the minimum, and has only two peers, its
//! neighbours. The price is a chain of 2(M−1) messages. The order around a ring keeps racks
//! together, so with r racks only r links cross.
//!
//! Several rings have a part of the blocks each. They visit the racks in the same order, and the
//! members of a rack with different strides.

use super::{
    build::{self, Link, Place},
    shape::{Cluster, Shape},
};
use crate::{
    schedule::{Block, Schedule, split},
    topology::{Topology, greatest_common_divisor},
};

/// Blocks have about this many elements, so that a large share can use several streams.
pub(crate) const BLOCK: u64 = 1 << 17;
pub(crate) const MAX_BLOCKS: u64 = 256;

/// The place of position `at` on the path 0 – 1 – … – `nodes`-1, rooted at its end.
pub(crate) fn on_path(at: u32, nodes: u32, delay: u32, name: impl Fn(u32) -> u32) -> Place {
    // The link between positions `below` and `below + 1`, seen from the end that isn't `peer`.
    let link = |peer, below| Link {
        peer: name(peer),
        up: delay + below,
        down: delay + 2 * nodes - 3 - below,
    };
    Place {
        parent: (at + 1 < nodes).then(|| link(at + 1, at)),
        children: at.checked_sub(1).map(|child| link(child, child)).into_iter().collect(),
    }
}

/// The same number of blocks for each participant, several for a large share, and at least
/// `segments`.
pub(crate) fn blocks(nodes: u32, segments: u32, count: u64) -> Vec<Block> {
    let share = count / u64::from(nodes);
    let most = (MAX_BLOCKS / u64::from(nodes)).max(1);
    let per_share = share.div_ceil(BLOCK).max(segments.into()).clamp(1, most);
    split(count, u64::from(nodes) * per_share)
}

/// An order around the ring: the participant at each place, and how far a block has come when it is
/// at `me`. Block b starts at place b and ends at the place before it, its owner.
pub(crate) struct Round<'a> {
    order: &'a [u32],
    at: u32,
}

impl<'a> Round<'a> {
    pub(crate) fn new(order: &'a [u32], me: u32) -> Self {
        Self { order, at: build::position(order, me) }
    }

    pub(crate) fn nodes(&self) -> u32 {
        self.order.len() as u32
    }

    pub(crate) fn along(&self, block: u32) -> u32 {
        (self.at + self.nodes() - block % self.nodes()) % self.nodes()
    }

    pub(crate) fn name(&self, block: u32, along: u32) -> u32 {
        self.order[((along + block) % self.nodes()) as usize]
    }
}

/// The most blocks of several rings together, unless one ring has more (BOUND).
const MOST_BLOCKS: u32 = 4096;

/// The schedule of `me` for an allreduce over several rings with equal numbers of blocks; fewer
/// rings if there would be too many blocks. The result goes back the way it came.
pub(crate) fn several(
    topology: &Topology,
    rings: u32,
    segments: u32,
    me: u32,
    count: u64,
) -> Schedule {
    let nodes = topology.participants();
    let rings = rings.min(MOST_BLOCKS / nodes).max(1);
    let racks = topology.members();
    let orders: Vec<Vec<u32>> = (0..rings)
        .map(|ring| racks.iter().flat_map(|rack| with_stride(rack, ring)).collect())
        .collect();
    let rounds: Vec<Round<'_>> = orders.iter().map(|order| Round::new(order, me)).collect();
    let each = blocks(nodes, segments, count / u64::from(rings)).len() as u64;
    // A whole number of blocks for each participant of each ring.
    let most = u64::from(MOST_BLOCKS / (nodes * rings)).max(1) * u64::from(nodes);
    let blocks = split(count, each.min(most) * u64::from(rings));
    build::reduce_and_return(nodes, me, blocks, |block| {
        let (ring, number) = (&rounds[(block % rings) as usize], block / rings);
        on_path(ring.along(number), nodes, 0, |p| ring.name(number, p))
    })
}

/// The members of a rack with the `ring`-th stride that visits all of them.
fn with_stride(rack: &[u32], ring: u32) -> Vec<u32> {
    let size = rack.len() as u32;
    let coprime: Vec<u32> =
        (1..size.max(2)).filter(|stride| greatest_common_divisor(*stride, size) == 1).collect();
    let stride = coprime[ring as usize % coprime.len()];
    (0..size).map(|at| rack[(at * stride % size) as usize]).collect()
}

/// The cost of an allreduce over several rings: 2(M−1)(α + S/M·β) + (M−1)/M·S·γ.
pub(crate) fn cost(cluster: &Cluster, rings: u32) -> Shape {
    let share = cluster.share();
    Shape {
        line: 2.0 * share,
        uplink: cluster.uplink(2.0 * share),
        reduced: share,
        messages: 2.0 * cluster.others() * f64::from(rings),
        blocks: cluster.nodes * f64::from(rings),
        // Two links of each ring leave a rack.
        crossing: if cluster.racks > 1.0 { 2.0 * f64::from(rings) } else { 0.0 },
        // Uplinks are busy from the beginning, too.
        ..cluster.hops(2.0 * cluster.others(), 2.0 * (cluster.racks - 1.0)).at_once(0.0)
    }
}
