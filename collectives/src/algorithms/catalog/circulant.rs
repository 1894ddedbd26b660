//! Circulant: halving and doubling [around a circle](crate::algorithms::parts::circle), over racks
//! (Träff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", 2024,
//! arXiv:2410.14234; of degree k as in Bruck, Ho, Kipnis, Upfal & Weathersby, 1997).
//!
//! The first rounds halve inside racks, and only the last ones, with the few blocks that are left,
//! cross: 2(r−1) times the piece between r racks, the minimum. The same holds at every tier. A tier
//! with groups of different sizes is ignored.

use super::prelude::*;

pub(super) struct Circulant;

fn circle(spec: &Spec, topology: &Topology) -> Circle {
    Circle::over_racks(topology, spec.number("radix"))
}

impl Definition for Circulant {
    fn about(&self) -> About {
        About {
            idea: "reduces to shares in rounds over circular distances, and gathers them backwards",
            cost: "2⌈log_k M⌉α + 2(M−1)/M·S·β",
            when: "many nodes, any number of them",
            source: TRAEFF,
        }
    }

    fn parameters(&self) -> &'static [Parameter] {
        &[RADIX]
    }

    fn allreduce(&self, spec: &Spec, topology: &Topology, me: u32, count: u64) -> Schedule {
        circle::allreduce(&circle(spec, topology), me, count)
    }

    fn allreduce_cost(&self, spec: &Spec, _: &Topology, cluster: &Cluster) -> Shape {
        circle::cost_over_racks(cluster, spec.number("radix"))
    }

    fn exchange(&self, spec: &Spec, topology: &Topology) -> Trees {
        Trees::Circulant(circle(spec, topology))
    }

    fn exchange_cost(&self, spec: &Spec, cluster: &Cluster) -> Shape {
        circle::cost_over_racks(cluster, spec.number("radix"))
    }

    fn symmetries(&self, spec: &Spec, topology: &Topology) -> Vec<Symmetry> {
        vec![Symmetry::around(circle(spec, topology).order)]
    }
}
