//! Torus: rings along the rows of a [grid](crate::algorithms::parts::grid), then along its columns,
//! and back (Mikami et al., "Massively Distributed SGD", 2018, arXiv:1811.05233).

use super::prelude::*;

pub(super) struct Torus;

fn grid(spec: &Spec, topology: &Topology) -> Grid {
    Grid::new(spec, 2, Along::Ring, topology)
}

impl Definition for Torus {
    fn about(&self) -> About {
        About {
            idea: "rings along the rows of a grid, then along its columns, and back",
            cost: "2(A+B−2)α + 2(M−1)/M·S·β",
            when: "nodes in a grid",
            source: "Mikami et al., \"Massively Distributed SGD\", 2018 (arXiv:1811.05233)",
        }
    }

    fn parameters(&self) -> &'static [Parameter] {
        &[TWO]
    }

    fn allreduce(&self, spec: &Spec, topology: &Topology, me: u32, count: u64) -> Schedule {
        grid(spec, topology).allreduce(topology, me, count)
    }

    fn allreduce_cost(&self, spec: &Spec, topology: &Topology, cluster: &Cluster) -> Shape {
        grid(spec, topology).cost(cluster)
    }
}
