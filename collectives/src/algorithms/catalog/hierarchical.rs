//! Hierarchical: direct exchange tier by tier, first in the racks, then between the racks of a
//! group, and so on, as in RAT (Wan et al., APNet 2020).
//!
//! In each rack every member owns some of the blocks and gets them from all others there. In each
//! group of racks, the owners of a block send it to one of them, and so on from tier to tier, up to
//! the owner in the block's home rack. Then everything goes back
//! ([`tiers`](crate::algorithms::parts::tiers)).
//!
//! All blocks that take a link at the same time are one message. With racks alone the chain has 4
//! messages for any size, and each further tier adds two. No participant sends more than about
//! 2(M−1)/M of the piece, and 2(n−1) times the piece crosses between the n groups of each tier, the
//! minimum. Groups may have any sizes; one rack is plain direct exchange, and so is a rack for each
//! node. Each node rounds each block at most once
//! ([`Algorithm::ROUNDS_ONCE`](crate::Algorithm::ROUNDS_ONCE)).
//!
//! In a broadcast each block enters each rack and each group once, through a member that depends on
//! the block and passes it on. In a reduction to one participant that member reduces the block
//! there and sends it out once.

use super::prelude::*;
use crate::algorithms::{
    parts::tiers::{Hop, Root, Tiers},
    symmetry::regular,
};

pub(super) struct Hierarchical;

impl Definition for Hierarchical {
    fn about(&self) -> About {
        About {
            idea: "each node owns a block; it is reduced inside racks first, then between them, \
                   tier by tier",
            cost: "2(l+1)α + 2(M−1)/M·S·β; 2α in one rack",
            when: "racks behind slow links; few nodes",
            source: "Wan et al., \"RAT – Resilient Allreduce Tree for Distributed Machine \
                     Learning\", APNet 2020",
        }
    }

    fn allreduce(&self, _: &Spec, topology: &Topology, me: u32, count: u64) -> Schedule {
        let tiers = Tiers::new(topology);
        let at = build::position(&tiers.order, me);
        let racks = tiers.count(1);
        // A phase for each tier up, and then down.
        let turn = tiers.before(tiers.top() + 1);
        let link = |hop: Hop| Link {
            peer: tiers.order[hop.peer as usize],
            up: tiers.before(hop.level) + hop.distance(),
            down: turn + tiers.after(hop.level) + hop.distance(),
        };
        let blocks = blocks(tiers.most(1), racks, BLOCK, count);
        let order = |time, block: u32| {
            let (round, home) = (block / racks, block % racks);
            round * racks + (home + racks - first_home(&tiers, at, turn, time)) % racks
        };
        build::reduce_and_return_together(topology.participants(), me, blocks, order, |block| {
            let root = tiers.root(block % racks, block / racks);
            Place {
                parent: tiers.parent(at, root).map(link),
                children: tiers.children(at, root).into_iter().map(link).collect(),
            }
        })
    }

    fn allreduce_cost(&self, _: &Spec, _: &Topology, cluster: &Cluster) -> Shape {
        cost(cluster)
    }

    fn rooted(&self, _: &Spec, topology: &Topology, root: u32, me: u32, count: u64) -> Rooted {
        let tiers = Tiers::new(topology);
        let (root, at) = (build::position(&tiers.order, root), build::position(&tiers.order, me));
        let trees = OneRoot::new(tiers, root);
        let blocks = blocks(trees.largest(), 1, ROOTED_BLOCK, count);
        Rooted::new(blocks, move |number| trees.place(at, number))
    }

    /// The cost of a broadcast: (l+1)α + r·S·β in r racks and no tier above them.
    fn broadcast_cost(&self, _: &Spec, _: &Topology, _root: u32, cluster: &Cluster) -> Shape {
        let &Cluster { racks, largest, .. } = cluster;
        let entries = entries(cluster);
        let passing_on = largest > 2.0 || (racks > 1.0 && largest > 1.0);
        let across = cluster.above.len().max(1) as f64;
        Shape {
            // The last block is passed on after all others.
            line: entries + 0.25,
            uplink: cluster.uplink(entries - 1.0),
            messages: entries * largest,
            // Blocks are small.
            blocks: 4.0 * largest,
            // Without other members in a rack nothing is passed on.
            ..cluster.hops(across + f64::from(u8::from(passing_on)), across)
        }
    }

    /// The cost of a reduction to one participant: that of a broadcast, and what is reduced before.
    fn reduce_cost(&self, spec: &Spec, topology: &Topology, root: u32, cluster: &Cluster) -> Shape {
        let &Cluster { racks, largest, .. } = cluster;
        let wide = if racks > 1.0 { largest } else { largest - 1.0 };
        // With several tiers, what is near arrives while what is far is reduced.
        let first = if cluster.above.len() > 1 { 0.0 } else { (wide - 1.0) / wide };
        Shape {
            line: entries(cluster) + first,
            streamed: 1.0,
            ..self.broadcast_cost(spec, topology, root, cluster)
        }
    }

    fn exchange(&self, _: &Spec, topology: &Topology) -> Trees {
        Trees::Racks(Tiers::new(topology))
    }

    fn exchange_cost(&self, _: &Spec, cluster: &Cluster) -> Shape {
        cost(cluster)
    }

    fn symmetries(&self, _: &Spec, topology: &Topology) -> Vec<Symmetry> {
        match regular(topology) {
            Some(sizes) if sizes.len() <= 1 => vec![Symmetry::around(topology.order())],
            _ => {
                let all = Symmetry::of_all_tiers(topology).into_iter();
                all.chain(Symmetry::in_racks(topology)).collect()
            }
        }
    }
}

/// Large pieces are cut into blocks of about this many elements, so that the phases of different
/// blocks overlap and unequal racks share nearly evenly.
pub(super) const BLOCK: u64 = 1 << 15;
/// To or from one participant they are smaller: the last block from the root still has to be passed
/// on in a rack, and the first block to the root has to be reduced in one before.
const ROOTED_BLOCK: u64 = 1 << 13;
/// Small pieces aren't cut below this: each owner gets a message from almost every participant, and
/// fewer small messages save more than sharing the work does.
const MIN_BLOCK: u64 = 512;
const MAX_BLOCKS: u64 = 256;

/// The blocks of a piece, of about `block` elements: a multiple of `largest` · `homes`, so that the
/// largest rack shares those of each home evenly.
pub(super) fn blocks(largest: u32, homes: u32, block: u64, count: u64) -> Vec<Block> {
    let round = u64::from(largest) * u64::from(homes);
    let rounds = (count / (round * block)).clamp(1, (MAX_BLOCKS / round).max(1));
    split(count, (round * rounds).min(count.div_ceil(MIN_BLOCK)))
}

/// The cost of an allreduce: 2(l+1)α + 2(M−1)/M·S·β over l tiers with groups of one size.
fn cost(cluster: &Cluster) -> Shape {
    let &Cluster { nodes, largest, .. } = cluster;
    let levels = f64::from(u8::from(largest > 1.0));
    let across = cluster.above.len() as f64;
    // In racks of w: (w−1)/w of the piece to the owners, the same back; between the n parts of a
    // group a share of it from each node of a part, all but its own n-th.
    let above = cluster.above.iter().map(|above| (above.parts - 1.0) / above.parts / above.nodes);
    let direct = (largest - 1.0) / largest + above.sum::<f64>();
    let hops = 2.0 * (levels + across);
    let others: f64 = cluster.above.iter().map(|above| above.parts - 1.0).sum();
    let widest = cluster.above.iter().fold(largest, |most, above| most.max(above.parts));
    Shape {
        line: 2.0 * direct,
        senders: (widest - 1.0) as u32,
        burst: direct.min((widest - 1.0) / widest),
        crossing: cluster.largest * (cluster.racks - 1.0),
        uplink: cluster.least_uplink(),
        reduced: direct,
        messages: 2.0 * (largest - 1.0 + others),
        blocks: nodes,
        // What crosses has been reduced in a rack before, and is passed on in one afterwards.
        ..cluster.hops(hops, 2.0 * across).at_once(hops)
    }
}

/// The rack whose blocks come first in the messages of a time. On the way up the blocks that go the
/// farthest come first, on the way down those from nearby. Each group begins with another rack, so
/// that no rack is the first for all.
fn first_home(tiers: &Tiers, at: u32, turn: u32, time: u32) -> u32 {
    let levels = 1..=tiers.top();
    let is_up = time < turn;
    let level = if is_up {
        levels.rev().find(|&level| tiers.before(level) <= time)
    } else {
        levels.into_iter().find(|&level| turn + tiers.after(level) <= time)
    };
    let level = level.unwrap_or(1);
    let group = tiers.positions(level, tiers.group(level, at));
    let first = if is_up { group.end % tiers.order.len() as u32 } else { group.start };
    tiers.group(1, first)
}

/// Trees that all have one root, which sends to the other members of its rack, to the other racks
/// of its group, and so on.
struct OneRoot {
    tiers: Tiers,
    root: u32,
    /// The positions of the others in its rack.
    beside: Vec<u32>,
    /// The first positions of the groups that it sends one message each.
    entered: Vec<u32>,
}

impl OneRoot {
    fn new(tiers: Tiers, root: u32) -> Self {
        let mut entered = Vec::new();
        for level in 2..=tiers.top() {
            let own = tiers.group(level - 1, root);
            let parts = tiers.parts(level, tiers.group(level, root));
            let others = parts.filter(|&part| part != own);
            entered.extend(others.map(|part| tiers.positions(level - 1, part).start));
        }
        let rack = tiers.positions(1, tiers.group(1, root));
        entered.extend((rack.len() > 1).then_some(rack.start));
        entered.sort_unstable();
        let beside = rack.filter(|&at| at != root).collect();
        Self { tiers, root, beside, entered }
    }

    fn entries(&self) -> u32 {
        self.entered.len() as u32
    }

    /// The most members of a rack without the root.
    fn largest(&self) -> u32 {
        let racks = 0..self.tiers.count(1);
        let others = racks.map(|rack| {
            let members = self.tiers.positions(1, rack);
            members.len() as u32 - u32::from(members.contains(&self.root))
        });
        others.max().unwrap_or(1)
    }

    /// The place of a position in the tree of a block.
    fn place(&self, at: u32, number: u32) -> Place {
        let Self { tiers, root, beside, .. } = self;
        let order = |at: u32| tiers.order[at as usize];
        // One message for each entry is the root's share of a block.
        let start = number * self.entries();
        let enter = |peer: u32, entry: u32| Link {
            peer: order(peer),
            up: start + tiers.before(tiers.top()) + entry,
            down: start + entry,
        };
        let below = |level| start + self.entries() + tiers.after(level) - tiers.most(tiers.top());
        let entry = |first: u32| self.entered.partition_point(|&start| start < first) as u32;
        let tree = Root { at: *root, number, home: 0 };
        let rack = tiers.positions(1, tiers.group(1, *root));
        // The member of the root's rack that gets the block first.
        let owner = number.checked_rem(beside.len() as u32).unwrap_or(0);
        if at == *root {
            let near = beside.get(owner as usize).map(|&peer| enter(peer, entry(rack.start)));
            let far = tiers.children(at, tree).into_iter().filter(|hop| hop.level > 1);
            let far = far.map(|hop| {
                let first = tiers.positions(hop.level - 1, tiers.group(hop.level - 1, hop.peer));
                enter(hop.peer, entry(first.start))
            });
            return Place { parent: None, children: far.chain(near).collect() };
        }
        if rack.contains(&at) {
            let size = beside.len() as u32;
            let around = |from: u32, to: u32| (to + size - from) % size;
            let inside = |peer: u32, member: u32| Link {
                peer: order(peer),
                up: start + around(member, owner),
                down: below(1) + around(owner, member),
            };
            let own = build::position(beside, at);
            if own != owner {
                let parent = Some(inside(beside[owner as usize], own));
                return Place { parent, children: Vec::new() };
            }
            let members = (0..).zip(beside).filter(|&(member, _)| member != owner);
            let children = members.map(|(member, &peer)| inside(peer, member)).collect();
            return Place { parent: Some(enter(*root, entry(rack.start))), children };
        }
        let link = |hop: Hop| Link {
            peer: order(hop.peer),
            up: start + tiers.before(hop.level) + hop.distance(),
            down: below(hop.level) + hop.distance(),
        };
        let parent = tiers.parent(at, tree).map(|hop| {
            let first = tiers.positions(hop.level - 1, tiers.group(hop.level - 1, at));
            if hop.peer == *root { enter(*root, entry(first.start)) } else { link(hop) }
        });
        Place { parent, children: tiers.children(at, tree).into_iter().map(link).collect() }
    }
}

/// How many nodes the root of a broadcast sends to: one in each other part of its groups, and one
/// member of its rack.
fn entries(cluster: &Cluster) -> f64 {
    1.0 + cluster.above.iter().map(|above| above.parts - 1.0).sum::<f64>()
}
