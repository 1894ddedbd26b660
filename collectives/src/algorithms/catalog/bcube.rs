//! BCube: the [`circulant`](super::circulant) without regard to racks, as in Gloo's algorithm of
//! that name (Träff, 2024; Bruck et al., 1997). Every message may cross between racks.

use super::prelude::*;

pub(super) struct Bcube;

fn circle(spec: &Spec, topology: &Topology) -> Circle {
    Circle::plain(topology, spec.number("radix"))
}

impl Definition for Bcube {
    fn about(&self) -> About {
        About {
            idea: "the circulant's rounds without regard to racks",
            cost: "2⌈log_k M⌉α + 2(M−1)/M·S·β",
            when: "comparison",
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
        circle::plain_cost(cluster, spec.number("radix"))
    }

    fn exchange(&self, spec: &Spec, topology: &Topology) -> Trees {
        Trees::Circulant(circle(spec, topology))
    }

    fn exchange_cost(&self, spec: &Spec, cluster: &Cluster) -> Shape {
        circle::plain_cost(cluster, spec.number("radix"))
    }

    fn symmetries(&self, _: &Spec, topology: &Topology) -> Vec<Symmetry> {
        let around = Symmetry::around(topology.order());
        [around].into_iter().chain(Symmetry::of_outermost(topology)).collect()
    }
}
