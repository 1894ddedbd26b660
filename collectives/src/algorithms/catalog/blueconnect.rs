//! BlueConnect: rings along each dimension of a [grid](crate::algorithms::parts::grid), the fastest
//! first (Cho, Finkler, Kung & Hunter, "BlueConnect: Decomposing All-Reduce for Deep Learning on
//! Heterogeneous Network Hierarchy", MLSys 2019). It is a [`torus`](super::torus) of any number of
//! dimensions.

use super::prelude::*;

pub(super) struct Blueconnect;

fn grid(spec: &Spec, topology: &Topology) -> Grid {
    Grid::new(spec, FACTORS, Along::Ring, topology)
}

impl Definition for Blueconnect {
    fn about(&self) -> About {
        About {
            idea: "rings along each dimension of a grid, the fastest first",
            cost: "2Σ(p−1)α + 2(M−1)/M·S·β",
            when: "links of several rates",
            source: "Cho et al., \"BlueConnect: Decomposing All-Reduce for Deep Learning on \
                     Heterogeneous Network Hierarchy\", MLSys 2019",
        }
    }

    fn parameters(&self) -> &'static [Parameter] {
        &[ANY]
    }

    fn allreduce(&self, spec: &Spec, topology: &Topology, me: u32, count: u64) -> Schedule {
        grid(spec, topology).allreduce(topology, me, count)
    }

    fn allreduce_cost(&self, spec: &Spec, topology: &Topology, cluster: &Cluster) -> Shape {
        grid(spec, topology).cost(cluster)
    }
}
