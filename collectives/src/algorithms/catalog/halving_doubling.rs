//! Halving-doubling: [exchange in pairs](crate::algorithms::parts::doubling) at doubling distance,
//! the nearest first (Thakur, Rabenseifner & Gropp, 2005).
//!
//! Where M is not a power of two, one member of each folded pair does all reductions of the pair.
//! Additions are in the canonical order ([`Algorithm::CANONICAL`](crate::Algorithm::CANONICAL)).

use super::prelude::*;

pub(super) struct HalvingDoubling;

impl Definition for HalvingDoubling {
    fn about(&self) -> About {
        About {
            idea: "pairs halve what they still add to, the nearest first, and double it on the \
                   way back",
            cost: "2⌊log₂ M⌋α + 2(M−1)/M·S·β; 2(α + S·β) + S·γ more if M is not a power of two",
            when: "powers of two",
            source: THAKUR,
        }
    }

    fn allreduce(&self, _: &Spec, topology: &Topology, me: u32, count: u64) -> Schedule {
        doubling::allreduce(topology, &Pairs::DOUBLING, Fold::Whole, me, count)
    }

    fn allreduce_cost(&self, _: &Spec, _: &Topology, cluster: &Cluster) -> Shape {
        doubling::cost(cluster, &Pairs::DOUBLING, Fold::Whole)
    }
}
