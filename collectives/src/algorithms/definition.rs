//! The interface of an algorithm. Each has a file in the [catalog](super::catalog) with the idea
//! and its paper, the parameters, the schedules and their costs.
//!
//! A method that generates a schedule or trees is followed by one for their cost: closed forms of
//! the α-β-γ model, as a [`Shape`]. Most methods have a default, so an algorithm defines only what
//! differs.

use super::{
    about::About,
    kind::Kind,
    name::Parameter,
    parts::{
        build::{self, Rooted},
        circle::{self, Circle},
        exchange::Trees,
        shape::{self, Cluster, Shape},
        trees,
    },
    spec::Spec,
    symmetry::Symmetry,
};
use crate::{schedule::Schedule, topology::Topology};

/// An algorithm. `spec` is always one of this algorithm.
pub(super) trait Definition: Sync {
    /// Its summary.
    fn about(&self) -> About;

    /// Its parameters.
    fn parameters(&self) -> &'static [Parameter] {
        &[]
    }

    /// The schedule of `me` for an allreduce. The default is a reduction to the first participant
    /// and a broadcast from it, along the trees of [`Self::rooted`].
    fn allreduce(&self, spec: &Spec, topology: &Topology, me: u32, count: u64) -> Schedule {
        let first = topology.order()[0];
        let Rooted { blocks, place } = self.rooted(spec, topology, first, me, count);
        build::reduce_and_return(topology.participants(), me, blocks, place)
    }

    /// The cost of an allreduce.
    fn allreduce_cost(&self, spec: &Spec, topology: &Topology, cluster: &Cluster) -> Shape {
        let first = topology.order()[0];
        let down = self.broadcast_cost(spec, topology, first, cluster);
        shape::there_and_back(self.reduce_cost(spec, topology, first, cluster), down)
    }

    /// The algorithm that has the same trees, whose methods are the defaults for everything but
    /// allreduces.
    fn like(&self) -> Option<&'static dyn Definition> {
        None
    }

    /// The trees that all have one root: a broadcast goes down them, and a reduction to one
    /// participant up. The default is a binomial tree.
    fn rooted(&self, spec: &Spec, topology: &Topology, root: u32, me: u32, count: u64) -> Rooted {
        match self.like() {
            Some(like) => like.rooted(spec, topology, root, me, count),
            None => trees::k_nomial((2, 1), topology, root, me, count),
        }
    }

    /// The cost of a broadcast.
    fn broadcast_cost(
        &self,
        spec: &Spec,
        topology: &Topology,
        root: u32,
        cluster: &Cluster,
    ) -> Shape {
        match self.like() {
            Some(like) => like.broadcast_cost(spec, topology, root, cluster),
            None => trees::k_nomial_cost(cluster, 2),
        }
    }

    /// The cost of a reduction to one participant. The default is a broadcast backwards, with a
    /// reduction of every chunk at every hop. A node's own data is ready from the beginning, and
    /// goes before what it passes on.
    fn reduce_cost(&self, spec: &Spec, topology: &Topology, root: u32, cluster: &Cluster) -> Shape {
        match self.like() {
            Some(like) => like.reduce_cost(spec, topology, root, cluster),
            None => Shape { streamed: 1.0, ..self.broadcast_cost(spec, topology, root, cluster) },
        }
    }

    /// The trees of a piece in which each block has its own roles, as in an allgather. The default
    /// is the circulant with radix 2.
    fn exchange(&self, spec: &Spec, topology: &Topology) -> Trees {
        match self.like() {
            Some(like) => like.exchange(spec, topology),
            None => Trees::Circulant(Circle::over_racks(topology, 2)),
        }
    }

    /// The cost of an allreduce along the trees of [`Self::exchange`], of which such a piece takes
    /// a part.
    fn exchange_cost(&self, spec: &Spec, cluster: &Cluster) -> Shape {
        match self.like() {
            Some(like) => like.exchange_cost(spec, cluster),
            None => circle::cost_over_racks(cluster, 2),
        }
    }

    /// The cost of a piece with at least this many segments (the parameter `segments`), from the
    /// cost without them.
    fn in_segments(&self, _: Kind, segments: f64, cost: Shape) -> Shape {
        cost.in_blocks(cost.blocks * segments, cost.messages * segments)
    }

    /// The classes of participants that do the same in an allreduce without servers, the largest
    /// first; none if they are not known.
    fn symmetries(&self, _: &Spec, _: &Topology) -> Vec<Symmetry> {
        Vec::new()
    }

    /// Whether servers take part in its allreduces.
    fn takes_servers(&self) -> bool {
        false
    }
}
