//! Multi-ring: several rings of different orders, each for a part of the blocks (Patarasuk & Yuan,
//! 2009; NVIDIA's NCCL has rings of this kind).
//!
//! More pairs of nodes share the work than in a [`ring`](super::ring), over more streams and more
//! paths of the network. To or from one participant it is a [`chain`].

use super::chain;
use crate::{
    algorithms::{
        about::About,
        definition::Definition,
        name::{Parameter, SEGMENTS, Values},
        parts::{
            build::Rooted,
            exchange::Trees,
            rings,
            shape::{Cluster, Shape},
        },
        spec::Spec,
    },
    schedule::Schedule,
    topology::Topology,
};

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

    fn rooted(&self, spec: &Spec, topology: &Topology, root: u32, me: u32, count: u64) -> Rooted {
        chain::rooted(topology, spec.segments(), root, me, count)
    }

    fn broadcast_cost(&self, _: &Spec, _: &Topology, _root: u32, cluster: &Cluster) -> Shape {
        chain::cost(cluster)
    }

    fn exchange(&self, _: &Spec, _: &Topology) -> Trees {
        Trees::Ring
    }

    fn exchange_cost(&self, _: &Spec, cluster: &Cluster) -> Shape {
        rings::cost(cluster, 1)
    }
}
