//! Ring: each block travels once around to its owner, being reduced on the way, and the result
//! travels to all others (Patarasuk & Yuan, 2009; Baidu and Horovod made it popular).
//!
//! In the paper the result goes on in the same direction (`way=around`); usually it goes back the
//! way it came (`way=back`): the same bytes and the same chain of messages, but each connection is
//! used both ways and carries half of it. To or from one participant it is a [`chain`].

use super::{chain, prelude::*};

const WAY: Parameter = Parameter {
    name: "way",
    about: "whether the result goes back the way it came, or on around",
    values: Values::Word(&["back", "around"]),
};

pub(super) struct Ring;

impl Definition for Ring {
    fn about(&self) -> About {
        About {
            idea: "each block travels once around and is reduced on the way; its result \
                   travels back",
            cost: "2(M−1)(α + S/M·β)",
            when: "large pieces that follow each other, few nodes",
            source: "Patarasuk & Yuan, \"Bandwidth optimal all-reduce algorithms for clusters of \
                     workstations\", 2009",
        }
    }

    fn parameters(&self) -> &'static [Parameter] {
        &[WAY, SEGMENTS]
    }

    fn allreduce(&self, spec: &Spec, topology: &Topology, me: u32, count: u64) -> Schedule {
        match spec.number("way") {
            0 => rings::several(topology, 1, spec.segments(), me, count),
            _ => around(topology, spec.segments(), me, count),
        }
    }

    fn allreduce_cost(&self, _: &Spec, _: &Topology, cluster: &Cluster) -> Shape {
        rings::cost(cluster, 1)
    }

    fn like(&self) -> Option<&'static dyn Definition> {
        Some(&chain::Chain)
    }

    fn symmetries(&self, _: &Spec, topology: &Topology) -> Vec<Symmetry> {
        let around = Symmetry::around(topology.order());
        [around].into_iter().chain(Symmetry::of_outermost(topology)).collect()
    }
}

/// The schedule in which the result goes on around the ring.
fn around(topology: &Topology, segments: u32, me: u32, count: u64) -> Schedule {
    let order = topology.order();
    let ring = rings::Round::new(&order, me);
    let nodes = ring.nodes();
    let blocks = rings::blocks(nodes, segments, count);
    let mut builder = Builder::new(blocks.len());
    for block in 0..blocks.len() as u32 {
        let along = ring.along(block);
        let next = ring.name(block, (along + 1) % nodes);
        let before = ring.name(block, (along + nodes - 1) % nodes);
        builder.add(along.saturating_sub(1), Action::ReduceLocal, block);
        if along > 0 {
            builder.add(along - 1, Action::reduce(before, before < me), block);
        }
        // The owner finishes the block at the end of the first round, and the others get it in the
        // second.
        let mut now = nodes - 2;
        if along < nodes - 1 {
            builder.add(along, Action::send(next), block);
            now = nodes - 1 + along;
            builder.add(now, Action::copy(before), block);
        }
        let second = (along + 1) % nodes;
        if second < nodes - 1 {
            now = nodes - 1 + second;
            builder.add(now, Action::send(next), block);
        }
        builder.add(now, Action::Publish, block);
    }
    builder.finish(nodes, me, blocks)
}
