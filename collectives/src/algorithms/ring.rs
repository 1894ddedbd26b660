//! Ring: each block travels once around to its owner, being reduced on the way, and the result
//! travels back (Patarasuk & Yuan, 2009; Baidu and Horovod made it popular).
//!
//! Every participant sends 2(M−1)/M of the piece, the least there is, and talks to its two
//! neighbours only. The price is a chain of 2(M−1) messages. In the paper the result goes on in
//! the same direction; here it goes back the way it came: the same bytes and the same chain, but
//! each connection is used both ways and carries half of it. The order around the ring keeps racks
//! together, so with r racks only r links cross. To or from one participant it is a chain in that
//! order, with the root at its end.

use super::build::{self, Link, Place, Rooted};
use crate::{
    schedule::{Schedule, split},
    topology::Topology,
};

/// Blocks are made about this many elements, so that a large share can use several streams.
const BLOCK: u64 = 1 << 17;
const MAX_BLOCKS: u64 = 256;

/// The place of position `at` on the path 0 – 1 – … – `nodes`-1, rooted at its end.
fn on_path(at: u32, nodes: u32, delay: u32, name: impl Fn(u32) -> u32) -> Place {
    // The link between positions `below` and `below + 1`, seen from the one that isn't `peer`.
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

pub(super) fn allreduce(topology: &Topology, me: u32, count: u64) -> Schedule {
    let order = topology.order();
    let nodes = order.len() as u32;
    let at = build::position(&order, me);
    let share = count / u64::from(nodes);
    let per_share = share.div_ceil(BLOCK).clamp(1, (MAX_BLOCKS / u64::from(nodes)).max(1));
    let blocks = split(count, u64::from(nodes) * per_share);
    build::reduce_and_return(nodes, me, blocks, |block| {
        // Block b sets out from position b and ends at the one before it, its owner.
        let start = block % nodes;
        let along = (at + nodes - start) % nodes;
        on_path(along, nodes, 0, |p| order[((p + start) % nodes) as usize])
    })
}

pub(super) fn rooted(topology: &Topology, root: u32, me: u32, count: u64) -> Rooted {
    let order = build::order_from(topology, root);
    let nodes = order.len() as u32;
    // The root is the end of the path.
    let at = nodes - 1 - build::position(&order, me);
    let blocks = split(count, count.div_ceil(BLOCK).clamp(1, MAX_BLOCKS));
    Rooted::new(blocks, move |block| on_path(at, nodes, block, |p| order[(nodes - 1 - p) as usize]))
}
