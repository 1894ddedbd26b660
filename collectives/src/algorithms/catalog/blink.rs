//! Blink: a spanning tree for each block, packed on the rates of lines, uplinks and links (Wang et
//! al., "Blink: Fast and Generic Collectives for Distributed ML", MLSys 2020). [`packing`] finds
//! the trees and how much of the piece each gets.
//!
//! Behind a switch, where only lines are a limit, the trees are stars: each participant reduces a
//! share of the piece for all, as in Blink on NVSwitch, and one with a faster line reduces more.
//! Where racks have slow uplinks, each tree crosses into a rack once. Where the links between
//! participants have rates of their own, as in an overlay or across sites, trees avoid slow links.
//!
//! In a broadcast and in a reduction to one participant all trees have the same root. Where no
//! rates are known both go along a chain, which keeps no line busy for longer than necessary.

use super::{chain, prelude::*, servers};
use crate::{
    algorithms::parts::packing::{self, Packing, Tree},
    links::MAX_LINKED,
};

const TREES: Parameter = Parameter {
    name: "trees",
    about: "how many trees at most share the piece",
    values: Values::Number { least: 1, most: 128, usual: 64 },
};

pub(super) struct Blink;

impl Definition for Blink {
    fn about(&self) -> About {
        About {
            idea: "spanning trees, packed such that no line, uplink or link is busy for longer \
                   than necessary",
            cost: "2hα + T, h links to the farthest and T for the busiest link",
            when: "links of different rates",
            source: "Wang et al., \"Blink: Fast and Generic Collectives for Distributed ML\", \
                     MLSys 2020",
        }
    }

    fn parameters(&self) -> &'static [Parameter] {
        &[TREES]
    }

    fn allreduce(&self, spec: &Spec, topology: &Topology, me: u32, count: u64) -> Schedule {
        if !packs(topology) {
            return servers::allreduce(topology, servers::Wanted::USUAL, me, count);
        }
        let packing = packing::packed(topology, None, spec.number("trees"));
        let (blocks, places) = placed(&packing.trees, me, count);
        let place = |block: u32| places[block as usize].clone();
        build::reduce_and_return(topology.participants(), me, blocks, place)
    }

    /// The cost of an allreduce: 2hα + T, h links to the farthest and T for the busiest line.
    fn allreduce_cost(&self, spec: &Spec, topology: &Topology, cluster: &Cluster) -> Shape {
        let most = spec.number("trees");
        if !packs(topology) {
            return servers::cost(topology, servers::Wanted::USUAL, cluster);
        }
        let one_way = of_packing(topology, cluster, &packing::packed(topology, None, most));
        let hops = 2.0 * (one_way.hops_in + one_way.hops_across);
        Shape { hops_in: 2.0 * one_way.hops_in, hops_across: 2.0 * one_way.hops_across, ..one_way }
            .at_once(hops)
    }

    fn rooted(&self, spec: &Spec, topology: &Topology, root: u32, me: u32, count: u64) -> Rooted {
        if !packs(topology) || topology.links().is_none() {
            return chain::rooted(topology, 1, root, me, count);
        }
        let packing = packing::packed(topology, Some(root), spec.number("trees"));
        let (blocks, places) = placed(&packing.trees, me, count);
        Rooted::new(blocks, move |block| places[block as usize].clone())
    }

    /// The cost of a broadcast: hα + T.
    fn broadcast_cost(
        &self,
        spec: &Spec,
        topology: &Topology,
        root: u32,
        cluster: &Cluster,
    ) -> Shape {
        let most = spec.number("trees");
        if !packs(topology) || topology.links().is_none() {
            return chain::cost(cluster);
        }
        let shape = of_packing(topology, cluster, &packing::packed(topology, Some(root), most));
        Shape { reduced: 0.0, senders: 0, fill: shape.hops_in + shape.hops_across, ..shape }
    }
}

/// Whether there are few enough participants to pack trees (BOUND). Otherwise an allreduce is that
/// of [`servers`], which uses the rates of lines, and other trees are chains.
fn packs(topology: &Topology) -> bool {
    topology.participants() <= MAX_LINKED
}

/// The blocks of a piece and the tree of each. A small piece has only the trees that carry most.
fn shared(trees: &[Tree], count: u64) -> (Vec<Block>, Vec<&Tree>) {
    let many = (count / GRAIN).clamp(1, trees.len() as u64) as usize;
    let trees = &trees[..many];
    let units: u64 = trees.iter().map(|tree| u64::from(tree.units)).sum();
    let grains = u128::from(count.div_ceil(GRAIN));
    let (mut before, mut offset) = (0, 0);
    let mut shared = (Vec::new(), Vec::new());
    for tree in trees {
        before += u64::from(tree.units);
        let end = ((grains * u128::from(before) / u128::from(units)) as u64 * GRAIN).min(count);
        if end > offset || count == 0 {
            shared.0.push(Block { offset, count: end - offset });
            shared.1.push(tree);
        }
        offset = end;
        if count == 0 {
            break;
        }
    }
    shared
}

/// How many links each participant is away from the root.
fn depths(tree: &Tree) -> Vec<u32> {
    let depth = |mut node: u32| {
        let mut depth = 0;
        while node != tree.root {
            node = tree.parents[node as usize];
            depth += 1;
        }
        depth
    };
    (0..tree.parents.len() as u32).map(depth).collect()
}

/// The blocks, and the place of a participant in the tree of each.
fn placed(trees: &[Tree], me: u32, count: u64) -> (Vec<Block>, Vec<Place>) {
    let (blocks, trees) = shared(trees, count);
    let depths: Vec<Vec<u32>> = trees.iter().map(|tree| depths(tree)).collect();
    let deepest = depths.iter().flatten().copied().max().unwrap_or(0);
    let place = |(tree, depths): (&&Tree, &Vec<u32>)| {
        let nodes = tree.parents.len() as u32;
        // The farthest begin, and no peer is the first for all.
        let link = |parent: u32, child: u32, peer: u32| {
            let turn = (child + nodes - parent) % nodes;
            let depth = depths[child as usize];
            let (up, down) = (deepest - depth, deepest + depth - 1);
            Link { peer, up: up * nodes + turn, down: down * nodes + turn }
        };
        let above = tree.parents[me as usize];
        let below =
            (0..nodes).filter(|&child| child != tree.root && tree.parents[child as usize] == me);
        Place {
            parent: (me != tree.root).then(|| link(above, me, above)),
            children: below.map(|child| link(me, child, child)).collect(),
        }
    };
    (blocks, trees.iter().zip(&depths).map(place).collect())
}

/// The cost of all trees together in one direction.
fn of_packing(topology: &Topology, cluster: &Cluster, packing: &Packing) -> Shape {
    let mut most = Shape::default();
    let nodes = topology.participants() as usize;
    let (mut reduced, mut messages) = (vec![0.0; nodes], vec![0.0; nodes]);
    let units: f64 = packing.trees.iter().map(|tree| f64::from(tree.units)).sum();
    for tree in &packing.trees {
        let mut children = vec![0u32; nodes];
        for node in (0..nodes as u32).filter(|&node| node != tree.root) {
            let (mut inside, mut across, mut at) = (0.0, 0.0, node);
            while at != tree.root {
                let parent = tree.parents[at as usize];
                if topology.same_rack(at, parent) {
                    inside += 1.0
                } else {
                    across += 1.0
                }
                at = parent;
            }
            if inside + across > most.hops_in + most.hops_across {
                (most.hops_in, most.hops_across) = (inside, across);
            }
            children[tree.parents[node as usize] as usize] += 1;
            messages[node as usize] += 1.0;
        }
        for (node, &children) in children.iter().enumerate() {
            reduced[node] += f64::from(children * tree.units) / units;
            messages[node] += f64::from(children);
            most.senders = most.senders.max(children);
        }
    }
    let largest = |all: Vec<f64>| all.into_iter().fold(0.0, f64::max);
    Shape {
        line: packing.busy,
        uplink: if cluster.racks > 1.0 { packing.uplink } else { 0.0 },
        reduced: largest(reduced),
        messages: largest(messages),
        blocks: packing.trees.len() as f64,
        least_block: 4.0 * GRAIN as f64,
        // The root of a single block gets it from its children and sends it to them.
        least_messages: 2.0 * f64::from(most.senders),
        ..most
    }
}
