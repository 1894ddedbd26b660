//! Late: direct exchange in which one participant may be late. It owns no block, and its
//! contribution to each block is added last: all others have reduced theirs when it arrives, and
//! one message to each owner and one back are left (the idea of Devraj et al., "Efficient AllReduce
//! with Stragglers", 2025, arXiv:2505.23523, on top of direct exchange).
//!
//! No spec leads to it, because it is not known in advance which participant will be late. It tests
//! the executor with a schedule in which one participant has a role of its own.

use super::Roles;
use super::parts::build::{self, Link, Place};
use crate::{
    schedule::{Schedule, split},
    topology::Topology,
};

/// The schedule of participant `me` for an allreduce in which participant `late` is late.
///
/// # Panics
/// If `me` or `late` isn't one of the topology's participants.
pub fn generate(topology: &Topology, late: u32, me: u32, count: u64) -> Schedule {
    let nodes = topology.participants();
    assert!(me.max(late) < nodes, "{me} or {late} is not one of {nodes}");
    if nodes == 1 || count == 0 {
        return build::alone(nodes, me, count, Roles::default());
    }
    let blocks = split(count, u64::from(nodes - 1));
    build::reduce_and_return(nodes, me, blocks, |block| {
        let owner = if block < late { block } else { block + 1 };
        // At any time each participant sends to another owner. The late one has times of its own.
        let link = |peer: u32, other: u32| {
            let distance = (owner + nodes - other) % nodes;
            let up = if other == late { nodes + distance } else { distance };
            Link { peer, up, down: 2 * nodes + distance }
        };
        if me != owner {
            return Place { parent: Some(link(owner, me)), children: Vec::new() };
        }
        let others = (0..nodes).filter(|&other| other != owner);
        Place { parent: None, children: others.map(|other| link(other, other)).collect() }
    })
}
