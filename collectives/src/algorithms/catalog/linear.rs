//! Linear: one node gets everything, reduces it, and sends the result to all (Chan et al., 2007).
//!
//! Two messages one after the other, but the root sends and receives M−1 times the piece: it suits
//! few nodes, and serves as a baseline.

use super::direct;
use crate::{
    algorithms::{
        about::{About, CHAN},
        definition::Definition,
        kind::Kind,
        name::{Parameter, SEGMENTS},
        parts::{
            build::Rooted,
            exchange::Trees,
            shape::{Cluster, Shape},
            trees,
        },
        spec::Spec,
    },
    topology::Topology,
};

pub(super) struct Linear;

impl Definition for Linear {
    fn about(&self) -> About {
        About {
            idea: "one node gets everything, reduces it, and sends the result to all",
            cost: "2(M−1)(α + S·β) + (M−1)S·γ, sent by one node",
            when: "small broadcasts and reductions to one; comparison",
            source: CHAN,
        }
    }

    fn parameters(&self) -> &'static [Parameter] {
        &[SEGMENTS]
    }

    fn rooted(&self, spec: &Spec, topology: &Topology, root: u32, me: u32, count: u64) -> Rooted {
        trees::star(topology, spec.segments(), root, me, count)
    }

    fn broadcast_cost(&self, _: &Spec, _: &Topology, _root: u32, cluster: &Cluster) -> Shape {
        trees::star_cost(cluster)
    }

    fn reduce_cost(&self, _: &Spec, _: &Topology, _root: u32, cluster: &Cluster) -> Shape {
        trees::star_cost_up(cluster)
    }

    fn in_segments(&self, kind: Kind, segments: f64, cost: Shape) -> Shape {
        match kind {
            // Each sends its own, at the same time.
            Kind::Reduce { .. } => cost.in_blocks(segments, cost.messages + segments),
            _ => cost.in_blocks(cost.blocks * segments, cost.messages * segments),
        }
    }

    fn exchange(&self, _: &Spec, _: &Topology) -> Trees {
        Trees::Direct
    }

    fn exchange_cost(&self, _: &Spec, cluster: &Cluster) -> Shape {
        direct::cost(cluster)
    }
}
