//! Chain: one after the other in order of the racks, and back (Chan et al., 2007).
//!
//! Each participant has one child. There are M−1 messages one after the other, but no participant
//! sends more than the piece each way, and blocks follow each other closely: it suits large pieces
//! to or from one participant. An allreduce is a reduction to the first participant and a broadcast
//! from it.

use super::prelude::*;

pub(super) struct Chain;

impl Definition for Chain {
    fn about(&self) -> About {
        About {
            idea: "one after the other, in order of the racks, and back",
            cost: "2(M−1)α + 2S·β",
            when: "large broadcasts",
            source: CHAN,
        }
    }

    fn parameters(&self) -> &'static [Parameter] {
        &[SEGMENTS]
    }

    fn rooted(&self, spec: &Spec, topology: &Topology, root: u32, me: u32, count: u64) -> Rooted {
        rooted(topology, spec.segments(), root, me, count)
    }

    fn broadcast_cost(&self, _: &Spec, _: &Topology, _root: u32, cluster: &Cluster) -> Shape {
        cost(cluster)
    }

    fn exchange(&self, _: &Spec, _: &Topology) -> Trees {
        Trees::Ring
    }

    fn exchange_cost(&self, _: &Spec, cluster: &Cluster) -> Shape {
        rings::cost(cluster, 1)
    }
}

/// The chain, with the root at its end.
pub(super) fn rooted(topology: &Topology, segments: u32, root: u32, me: u32, count: u64) -> Rooted {
    let order = build::order_from(topology, root);
    let nodes = order.len() as u32;
    // The root is the end of the path.
    let at = nodes - 1 - build::position(&order, me);
    let blocks =
        split(count, count.div_ceil(rings::BLOCK).max(segments.into()).clamp(1, rings::MAX_BLOCKS));
    Rooted::new(blocks, move |block| {
        rings::on_path(at, nodes, block, |p| order[(nodes - 1 - p) as usize])
    })
}

/// The cost of a broadcast along the chain: (M−1)α + S·β.
pub(super) fn cost(cluster: &Cluster) -> Shape {
    Shape {
        line: 1.0,
        uplink: cluster.uplink(1.0),
        messages: 1.0,
        ..cluster.hops(cluster.others(), cluster.racks - 1.0)
    }
}
