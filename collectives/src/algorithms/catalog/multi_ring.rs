//! Multi-ring: several rings of different orders, each for a part of the blocks (Patarasuk & Yuan,
//! 2009; NVIDIA's NCCL has rings of this kind).
//!
//! More pairs of nodes share the work than in a [`ring`](super::ring), over more streams and more
//! paths of the network. To or from one participant it is a [`chain`].

use super::{chain, prelude::*};

const RINGS: Parameter = Parameter {
    name: "rings",
    about: "how many rings share the piece",
    values: Values::Number { least: 1, most: 16, usual: 2 },
};

pub(super) struct MultiRing;

impl Definition for MultiRing {
    fn about(&self) -> About {
        About {
            idea: "several rings of different orders, each for a part of the blocks",
            cost: "as ring",
            when: "many paths in the network",
            source: "Patarasuk & Yuan, 2009; NVIDIA's NCCL has rings of this kind",
        }
    }

    fn parameters(&self) -> &'static [Parameter] {
        &[RINGS, SEGMENTS]
    }

    fn allreduce(&self, spec: &Spec, topology: &Topology, me: u32, count: u64) -> Schedule {
        rings::several(topology, spec.number("rings"), spec.segments(), me, count)
    }

    fn allreduce_cost(&self, spec: &Spec, _: &Topology, cluster: &Cluster) -> Shape {
        rings::cost(cluster, spec.number("rings"))
    }

    fn like(&self) -> Option<&'static dyn Definition> {
        Some(&chain::Chain)
    }
}
