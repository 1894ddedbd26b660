//! Direct: every participant sends each owner its block, and every owner sends the result to all
//! (Träff, 2024; Bruck et al., 1997; oneCCL's `nreduce`, and BytePS's servers, one on each node).
//!
//! It is one round [around a circle](crate::algorithms::parts::circle): a chain of two messages,
//! but M−1 of them arrive at once. To or from one participant it is one message. Each node rounds
//! each block at most once ([`Algorithm::ROUNDS_ONCE`](crate::Algorithm::ROUNDS_ONCE)).

use super::prelude::*;

pub(super) struct Direct;

impl Definition for Direct {
    fn about(&self) -> About {
        About {
            idea: "each node sends every other one its block, and gets its result back",
            cost: "2α + 2(M−1)/M·S·β, M−1 senders at once",
            when: "up to about 16 nodes",
            source: TRAEFF,
        }
    }

    fn allreduce(&self, _: &Spec, topology: &Topology, me: u32, count: u64) -> Schedule {
        allreduce(topology, me, count)
    }

    fn allreduce_cost(&self, _: &Spec, _: &Topology, cluster: &Cluster) -> Shape {
        cost(cluster)
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

    fn exchange(&self, _: &Spec, _: &Topology) -> Trees {
        Trees::Direct
    }

    fn exchange_cost(&self, _: &Spec, cluster: &Cluster) -> Shape {
        cost(cluster)
    }

    fn symmetries(&self, _: &Spec, topology: &Topology) -> Vec<Symmetry> {
        let around = Symmetry::around(topology.order());
        [around].into_iter().chain(Symmetry::of_all_tiers(topology)).collect()
    }
}

pub(super) fn allreduce(topology: &Topology, me: u32, count: u64) -> Schedule {
    circle::allreduce(&Circle::plain(topology, topology.participants()), me, count)
}

/// The cost of an allreduce: 2α + 2(M−1)/M·S·β + (M−1)/M·S·γ, with M−1 senders at once.
pub(super) fn cost(cluster: &Cluster) -> Shape {
    let outside = (cluster.nodes - cluster.smallest) / cluster.nodes;
    let uplink = if cluster.racks > 1.0 { 2.0 * outside } else { 0.0 };
    let crossing = cluster.largest * (cluster.nodes - cluster.largest);
    Shape { uplink, crossing, ..circle::plain_cost(cluster, cluster.nodes as u32) }
}
