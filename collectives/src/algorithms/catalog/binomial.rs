//! Binomial: a binomial tree up, and down again (Chan et al., 2007). In each round every
//! participant that has the block sends it to one more.

use super::prelude::*;

pub(super) struct Binomial;

impl Definition for Binomial {
    fn about(&self) -> About {
        About {
            idea: "a binomial tree up, and down again",
            cost: "2⌈log₂ M⌉(α + S·β + S·γ)",
            when: "comparison",
            source: CHAN,
        }
    }

    fn parameters(&self) -> &'static [Parameter] {
        &[SEGMENTS]
    }

    fn rooted(&self, spec: &Spec, topology: &Topology, root: u32, me: u32, count: u64) -> Rooted {
        trees::k_nomial((2, spec.segments()), topology, root, me, count)
    }

    fn broadcast_cost(&self, _: &Spec, _: &Topology, _root: u32, cluster: &Cluster) -> Shape {
        trees::k_nomial_cost(cluster, 2)
    }
}
