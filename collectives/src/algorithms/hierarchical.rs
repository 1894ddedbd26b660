//! Hierarchical: two levels of direct exchange, first in the racks, then between them, as RAT does
//! it (Wan et al., APNet 2020).
//!
//! In each rack every member owns some of the blocks and gets them from all others there; the
//! owners of a block in the different racks send theirs to that of the block's home rack; then all
//! goes back. The chain is 4 messages long whatever the size, nobody sends more than about
//! 2(M−1)/M of the piece, and what crosses between racks is 2(r−1) times the piece, the least
//! there is. Racks may have any sizes; one rack is plain direct exchange, and so is a rack for
//! each node.
//!
//! In the broadcast each block enters each rack once, through a member of the block's own choice,
//! and is handed on from there. In the reduction to one participant it leaves each rack once, from
//! that member, who has reduced it there.

use super::{
    build::{self, Link, Place, Rooted},
    shape::{Cluster, Shape},
};
use crate::{
    schedule::{Block, Schedule, split},
    topology::Topology,
};

/// Large pieces are cut into blocks of about this many elements, so that the phases of different
/// blocks overlap and unequal racks share nearly evenly.
const BLOCK: u64 = 1 << 15;
/// To or from one participant they are smaller: the last block to leave the root is handed on to a
/// whole rack, the first to reach it is reduced there before.
const ROOTED_BLOCK: u64 = 1 << 13;
/// Small ones aren't cut below this: each block is a message for almost everybody.
const MIN_BLOCK: u64 = 512;
const MAX_BLOCKS: u64 = 256;

/// The racks, and where `me` is.
struct Racks {
    members: Vec<Vec<u32>>,
    largest: u32,
    rack: u32,
    index: u32,
}

impl Racks {
    fn new(members: Vec<Vec<u32>>, me: u32) -> Self {
        let find = |members: &[Vec<u32>]| {
            members.iter().enumerate().find_map(|(rack, members)| {
                let index = members.iter().position(|&m| m == me)?;
                Some((rack as u32, index as u32))
            })
        };
        let (rack, index) = find(&members).unwrap_or_default();
        let largest = members.iter().map(|m| m.len() as u32).max().unwrap_or(1);
        Self { members, largest, rack, index }
    }

    fn count(&self) -> u32 {
        self.members.len() as u32
    }

    fn size(&self, rack: u32) -> u32 {
        self.members[rack as usize].len() as u32
    }

    /// Who of `rack` owns the blocks of this number, as an index in the rack.
    fn owner_index(&self, rack: u32, number: u32) -> u32 {
        number % self.size(rack)
    }

    fn owner(&self, rack: u32, number: u32) -> u32 {
        self.members[rack as usize][self.owner_index(rack, number) as usize]
    }

    /// The blocks of a piece, of about `block` elements: a multiple of what the largest rack needs
    /// to share out evenly, `homes` times over.
    fn blocks(&self, homes: u32, block: u64, count: u64) -> Vec<Block> {
        let round = u64::from(self.largest) * u64::from(homes);
        let rounds = (count / (round * block)).clamp(1, (MAX_BLOCKS / round).max(1));
        split(count, (round * rounds).min(count.div_ceil(MIN_BLOCK)))
    }
}

/// How far `to` is from `from`, around a circle of `n`. With it as the time of a message, nobody
/// is everybody's first.
fn around(from: u32, to: u32, n: u32) -> u32 {
    (to + n - from) % n
}

pub(super) fn allreduce(topology: &Topology, me: u32, count: u64) -> Schedule {
    let racks = Racks::new(topology.members(), me);
    let blocks = racks.blocks(racks.count(), BLOCK, count);
    build::reduce_and_return(topology.participants(), me, blocks, |block| {
        let (number, home) = (block / racks.count(), block % racks.count());
        in_two_levels(&racks, number, home)
    })
}

/// members –(rack)→ the rack's owner –(cross)→ the home rack's owner, and back.
fn in_two_levels(racks: &Racks, number: u32, home: u32) -> Place {
    let (wide, many) = (racks.largest, racks.count());
    let owner_index = racks.owner_index(racks.rack, number);
    let owner = racks.owner(racks.rack, number);
    let size = racks.size(racks.rack);
    // Four phases: up in the rack, up across, down across, down in the rack.
    let inside = |peer, member| Link {
        peer,
        up: around(member, owner_index, size),
        down: wide + 2 * many + around(owner_index, member, size),
    };
    let across = |peer, rack| Link {
        peer,
        up: wide + around(rack, home, many),
        down: wide + many + around(home, rack, many),
    };
    if racks.index != owner_index {
        return Place { parent: Some(inside(owner, racks.index)), children: Vec::new() };
    }
    let members = (0..).zip(&racks.members[racks.rack as usize]);
    let mut children: Vec<Link> = members
        .filter(|&(member, _)| member != owner_index)
        .map(|(member, &peer)| inside(peer, member))
        .collect();
    if racks.rack != home {
        let parent = Some(across(racks.owner(home, number), racks.rack));
        return Place { parent, children };
    }
    let others = (0..many).filter(|&rack| rack != home);
    children.extend(others.map(|rack| across(racks.owner(rack, number), rack)));
    Place { parent: None, children }
}

pub(super) fn rooted(topology: &Topology, root: u32, me: u32, count: u64) -> Rooted {
    // Without the root, its own rack is like the others: one message to or from the root.
    let mut members = topology.members();
    for rack in &mut members {
        rack.retain(|&member| member != root);
    }
    members.retain(|rack| !rack.is_empty());
    let racks = Racks::new(members, me);
    Rooted::new(racks.blocks(1, ROOTED_BLOCK, count), move |number| {
        // One message for each rack is the root's share of a block.
        let start = number * racks.count();
        let enter =
            |peer, rack| Link { peer, up: start + racks.largest + rack, down: start + rack };
        if me == root {
            let all = 0..racks.count();
            let children = all.map(|rack| enter(racks.owner(rack, number), rack)).collect();
            return Place { parent: None, children };
        }
        let size = racks.size(racks.rack);
        let owner_index = racks.owner_index(racks.rack, number);
        let inside = |peer, member| Link {
            peer,
            up: start + around(member, owner_index, size),
            down: start + racks.count() + around(owner_index, member, size),
        };
        if racks.index != owner_index {
            let owner = racks.owner(racks.rack, number);
            return Place { parent: Some(inside(owner, racks.index)), children: Vec::new() };
        }
        let members = (0..).zip(&racks.members[racks.rack as usize]);
        let children = members
            .filter(|&(member, _)| member != owner_index)
            .map(|(member, &peer)| inside(peer, member))
            .collect();
        Place { parent: Some(enter(root, racks.rack)), children }
    })
}

/// The cost of an allreduce: 4α + 2(M−1)/M·S·β between racks of one size.
pub(super) fn shape(cluster: &Cluster) -> Shape {
    let &Cluster { nodes, racks, largest, smallest } = cluster;
    let levels = f64::from(u8::from(largest > 1.0));
    let across = f64::from(u8::from(racks > 1.0));
    // In racks of w: (w−1)/w of the piece to the owners, the same back; between racks a w-th part
    // of it from each, all but its own r-th.
    let direct = (largest - 1.0) / largest + (racks - 1.0) / racks / smallest;
    Shape {
        line: 2.0 * direct,
        senders: (largest.max(racks) - 1.0) as u32,
        uplink: cluster.least_uplink(),
        reduced: direct,
        messages: 2.0 * (racks * (largest - 1.0) + racks - 1.0),
        blocks: nodes,
        ..cluster.hops(2.0 * (levels + across), 2.0 * across)
    }
}

/// The cost of a broadcast: 2α + r·S·β.
pub(super) fn down(cluster: &Cluster) -> Shape {
    let &Cluster { racks, largest, .. } = cluster;
    let handing_on = largest > 2.0 || (racks > 1.0 && largest > 1.0);
    Shape {
        // The last block is handed on when all others have been.
        line: racks + 0.25,
        uplink: cluster.uplink(racks - 1.0),
        messages: racks * largest,
        // Blocks are small.
        blocks: 4.0 * largest,
        // With nobody else in the rack there is no handing on.
        ..cluster.hops(if handing_on { 2.0 } else { 1.0 }, 1.0)
    }
}

/// What the busiest participant sends or receives in a reduction to one.
pub(super) fn line_up(cluster: &Cluster) -> f64 {
    let &Cluster { racks, largest, .. } = cluster;
    let wide = if racks > 1.0 { largest } else { largest - 1.0 };
    racks + (wide - 1.0) / wide
}
