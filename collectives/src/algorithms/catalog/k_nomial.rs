//! K-nomial: a tree in which each node sends to k−1 others in a round (Thakur, Rabenseifner &
//! Gropp, 2005; of degree k as in MPICH and Open MPI).

use super::prelude::*;

const DEGREE: Parameter = Parameter {
    name: "radix",
    about: "the degree k: each participant sends to k−1 others in a round",
    values: Values::Number { least: 2, most: 64, usual: 4 },
};

pub(super) struct KNomial;

impl Definition for KNomial {
    fn about(&self) -> About {
        About {
            idea: "a tree in which each node sends to k−1 others in a round",
            cost: "2⌈log_k M⌉(k−1)(α + S·β)",
            when: "small pieces, high latency",
            source: THAKUR,
        }
    }

    fn parameters(&self) -> &'static [Parameter] {
        &[DEGREE, SEGMENTS]
    }

    fn rooted(&self, spec: &Spec, topology: &Topology, root: u32, me: u32, count: u64) -> Rooted {
        trees::k_nomial((spec.number("radix"), spec.segments()), topology, root, me, count)
    }

    fn broadcast_cost(&self, spec: &Spec, _: &Topology, _root: u32, cluster: &Cluster) -> Shape {
        trees::k_nomial_cost(cluster, spec.number("radix"))
    }

    fn exchange(&self, spec: &Spec, topology: &Topology) -> Trees {
        Trees::Circulant(Circle::over_racks(topology, spec.number("radix")))
    }

    fn exchange_cost(&self, spec: &Spec, cluster: &Cluster) -> Shape {
        circle::cost_over_racks(cluster, spec.number("radix"))
    }
}
