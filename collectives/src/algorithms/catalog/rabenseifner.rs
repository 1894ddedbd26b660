//! Rabenseifner: [halving-doubling](super::halving_doubling), but where M is not a power of two,
//! both members of a folded pair reduce a half (Rabenseifner, "Optimization of Collective Reduction
//! Operations", 2004).
//!
//! That takes two messages of half the size one after the other, but half the reductions. Additions
//! are in the canonical order ([`Algorithm::CANONICAL`](crate::Algorithm::CANONICAL)).

use super::prelude::*;

pub(super) struct Rabenseifner;

impl Definition for Rabenseifner {
    fn about(&self) -> About {
        About {
            idea: "halving and doubling; both nodes of a folded pair reduce a half",
            cost: "as halving-doubling; 3α + 2S·β + S/2·γ more if M is not a power of two",
            when: "other numbers of nodes, slow reductions",
            source: "Rabenseifner, \"Optimization of Collective Reduction Operations\", 2004",
        }
    }

    fn allreduce(&self, _: &Spec, topology: &Topology, me: u32, count: u64) -> Schedule {
        doubling::allreduce(topology, &Pairs::DOUBLING, Fold::Halves, me, count)
    }

    fn allreduce_cost(&self, _: &Spec, _: &Topology, cluster: &Cluster) -> Shape {
        doubling::cost(cluster, &Pairs::DOUBLING, Fold::Halves)
    }
}
