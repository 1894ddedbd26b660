//! HiPS: direct exchange along each dimension of a [grid](crate::algorithms::parts::grid), or a
//! ring (Geng et al., "HiPS: Hierarchical Parameter Synchronization in Large-Scale Distributed
//! Machine Learning", NetAI 2018).

use super::prelude::*;

const ALONG: Parameter = Parameter {
    name: "along",
    about: "how data goes along a dimension",
    values: Values::Word(&["direct", "ring"]),
};

pub(super) struct Hips;

fn grid(spec: &Spec, topology: &Topology) -> Grid {
    let along = if spec.number("along") == 0 { Along::Direct } else { Along::Ring };
    Grid::new(spec, FACTORS, along, topology)
}

impl Definition for Hips {
    fn about(&self) -> About {
        About {
            idea: "direct exchange along each dimension of a grid",
            cost: "2α for each dimension + 2(M−1)/M·S·β",
            when: "nodes in a grid",
            source: "Geng et al., \"HiPS: Hierarchical Parameter Synchronization in Large-Scale \
                     Distributed Machine Learning\", NetAI 2018",
        }
    }

    fn parameters(&self) -> &'static [Parameter] {
        &[ALONG, ANY]
    }

    fn allreduce(&self, spec: &Spec, topology: &Topology, me: u32, count: u64) -> Schedule {
        grid(spec, topology).allreduce(topology, me, count)
    }

    fn allreduce_cost(&self, spec: &Spec, topology: &Topology, cluster: &Cluster) -> Shape {
        grid(spec, topology).cost(cluster)
    }
}
