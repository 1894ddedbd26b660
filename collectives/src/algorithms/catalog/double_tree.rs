//! Double binary tree: two trees over all participants, each for half of the piece, so that an
//! inner node of one is a leaf of the other (Sanders, Speck & Träff, 2009; NCCL 2.4).
//!
//! No participant has more than three peers per tree or sends more than twice the piece, and the
//! chain has at most 4⌈log2 M⌉ messages. Blocks follow each other down and up the trees as in a
//! pipeline, in rounds in which each participant sends and receives at most once
//! ([`colours`](crate::algorithms::parts::colours)).
//!
//! For a broadcast or a reduction to one participant both trees span all participants but the root,
//! and hang below it.

use super::prelude::*;
use crate::algorithms::parts::colours::ColouredTrees;

pub(super) struct DoubleTree;

impl Definition for DoubleTree {
    fn about(&self) -> About {
        About {
            idea: "two binary trees carry half of the data each; a leaf of one is an inner node of \
                   the other",
            cost: "≤ 4⌈log₂ M⌉α + 2S·β",
            when: "many nodes, middle sizes, few connections",
            source: "Sanders, Speck & Träff, \"Two-tree algorithms for full bandwidth broadcast, \
                     reduction and scan\", 2009",
        }
    }

    fn parameters(&self) -> &'static [Parameter] {
        &[SEGMENTS]
    }

    fn allreduce(&self, spec: &Spec, topology: &Topology, me: u32, count: u64) -> Schedule {
        let order = topology.order();
        let nodes = order.len() as u32;
        let at = build::position(&order, me);
        let trees = ColouredTrees::new(parents(nodes));
        let blocks = split(count, blocks_for(spec.segments(), count));
        build::reduce_and_return(nodes, me, blocks, |block| {
            trees.place(block, at, |p| order[p as usize])
        })
    }

    /// At most 4hα + 2S·β, h = ⌈log2 M⌉.
    fn allreduce_cost(&self, _: &Spec, _: &Topology, cluster: &Cluster) -> Shape {
        let height = cluster.nodes.log2().ceil();
        let several = cluster.nodes > 2.0;
        Shape {
            line: if several { 2.0 } else { 1.0 },
            uplink: cluster.uplink(2.0),
            reduced: 1.0,
            messages: if several { 8.0 } else { 4.0 },
            blocks: 16.0,
            ..cluster.hops(2.0 * height, 2.0 * cluster.racks.log2().ceil())
        }
    }

    fn rooted(&self, spec: &Spec, topology: &Topology, root: u32, me: u32, count: u64) -> Rooted {
        let order = build::order_from(topology, root);
        let nodes = order.len() as u32;
        let at = build::position(&order, me);
        let trees = below_root(nodes);
        Rooted::new(split(count, blocks_for(spec.segments(), count)), move |block| {
            trees.place(block, at, |p| order[p as usize])
        })
    }

    /// Half of the cost of an allreduce.
    fn broadcast_cost(&self, _: &Spec, _: &Topology, _root: u32, cluster: &Cluster) -> Shape {
        Shape {
            line: 1.0,
            uplink: cluster.uplink(2.0),
            messages: 4.0,
            blocks: 16.0,
            ..cluster.hops(cluster.others().log2().ceil() + 1.0, cluster.racks.log2().ceil())
        }
    }

    fn reduce_cost(&self, spec: &Spec, topology: &Topology, root: u32, cluster: &Cluster) -> Shape {
        let line = match cluster {
            _ if cluster.nodes <= 2.0 => 1.0,
            // A leaf of one tree is an inner node of the other; between racks it queues longer.
            _ if cluster.racks > 1.0 => 2.2,
            _ => 1.5,
        };
        Shape { line, streamed: 1.0, ..self.broadcast_cost(spec, topology, root, cluster) }
    }

    fn in_segments(&self, _: Kind, segments: f64, cost: Shape) -> Shape {
        // Each tree has this many.
        let messages = cost.messages * (segments / 2.0).max(1.0);
        cost.in_blocks(cost.blocks.max(2.0 * segments), messages)
    }
}

/// About the best block for pipelining, k* = √(h·S / 2αB) blocks per tree, over the sizes that
/// pieces have. Streaming inside of blocks makes the choice uncritical.
const BLOCK: u64 = 1 << 13;
const MAX_BLOCKS: u64 = 64;

/// The first tree over 0..n: in-order, leaves are the odd positions, 0 is the root (NCCL's btree).
fn parent_in_first(n: u32, at: u32) -> Option<u32> {
    if at == 0 {
        return None;
    }
    let bit = at & at.wrapping_neg();
    let up = (at ^ bit) | (bit << 1);
    Some(if up >= n { at ^ bit } else { up })
}

/// The parents in both trees. The second is the first mirrored (even n) or shifted (odd n), which
/// turns leaves into inner positions.
fn parents(n: u32) -> [Vec<Option<u32>>; 2] {
    let first: Vec<_> = (0..n).map(|at| parent_in_first(n, at)).collect();
    let mut second = vec![None; n as usize];
    for (at, &parent) in (0..n).zip(&first) {
        let moved = |p: u32| if n.is_multiple_of(2) { n - 1 - p } else { (p + 1) % n };
        second[moved(at) as usize] = parent.map(moved);
    }
    [first, second]
}

/// At least `segments` for each tree, and one.
fn blocks_for(segments: u32, count: u64) -> u64 {
    count.div_ceil(BLOCK).clamp(2, MAX_BLOCKS).max(2 * u64::from(segments))
}

/// Both trees with one root, position 0. The trees of the others, moved by one position, hang below
/// it.
fn below_root(nodes: u32) -> ColouredTrees {
    ColouredTrees::new(parents(nodes - 1).map(|below| {
        let below = below.into_iter().map(|parent| Some(parent.map_or(0, |p| p + 1)));
        [None].into_iter().chain(below).collect()
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What makes two trees better than one, for every number of participants.
    #[test]
    fn trees_are_shallow_and_complementary() {
        for n in 2..=2048u32 {
            let both = parents(n);
            let mut inner = [vec![0; n as usize], vec![0; n as usize]];
            for (inner, parents) in inner.iter_mut().zip(&both) {
                assert_eq!(parents.iter().filter(|p| p.is_none()).count(), 1);
                for parent in parents.iter().flatten() {
                    inner[*parent as usize] += 1;
                }
            }
            let trees = ColouredTrees::new(both);
            let height = n.next_power_of_two().ilog2();
            assert_eq!([0, 1].map(|tree| trees.height(tree)), [height; 2], "{n}");
            let children: Vec<u32> = (0..n as usize).map(|p| inner[0][p] + inner[1][p]).collect();
            assert!(children.iter().all(|&c| c <= 2), "{n}: {children:?}");
            let busy = (0..n as usize).filter(|&p| inner[0][p] > 0 && inner[1][p] > 0).count();
            assert!(busy <= (n % 2) as usize, "{n}: {busy} are inside both trees");
        }
    }

    /// If each participant sends and receives one block in a round, k blocks for each tree reach
    /// all in 2h + 2k rounds, from the roots of both trees and from one root above them.
    #[test]
    fn two_colours_are_enough() {
        for n in 2..=2048u32 {
            let height = n.next_power_of_two().ilog2();
            let many = if n <= 130 || n.is_multiple_of(128) { &[1, 2, 7, 64][..] } else { &[1, 3] };
            for &blocks in many {
                let rounds = ColouredTrees::new(parents(n)).broadcast(blocks).unwrap();
                assert!(rounds <= 2 * height + 2 * blocks - 2, "{n} nodes, {blocks}: {rounds}");
                let rounds = below_root(n).broadcast(blocks).unwrap();
                assert!(rounds <= 2 * height + 2 * blocks, "{n} nodes, {blocks}: {rounds}");
            }
        }
    }
}
