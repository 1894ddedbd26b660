//! The groups of participants in all tiers, and trees that go from tier to tier.
//!
//! Participants are given by their *position* in [`Topology::order`], so each group is one range
//! of positions. *Levels* count from the participants: level 0 is each of them by itself, level t
//! the groups of tier t, and the last level all participants together. A group of a level has
//! *parts*: the groups of the level before it that are in it.
//!
//! In a tree each group has an aggregator, which is that of one of its parts. The aggregators of
//! the other parts send to it. So the tree leaves each group once, except those of the root, which
//! is the minimum at every tier. RAT does the same (Wan et al., APNet 2020).

use std::{iter, ops::Range};

use crate::topology::Topology;

#[derive(Debug)]
struct Level {
    /// The first position of each group, and the end.
    starts: Vec<u32>,
    /// The group of each position.
    of: Vec<u32>,
    /// The most parts of a group.
    most: u32,
}

/// The groups of all tiers.
#[derive(Debug)]
pub(crate) struct Tiers {
    /// The participant at each position.
    pub(crate) order: Vec<u32>,
    levels: Vec<Level>,
}

/// A tree: its root, and the numbers that choose its other aggregators.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Root {
    /// The position of the root.
    pub(crate) at: u32,
    /// Chooses the members of racks that are aggregators.
    pub(crate) number: u32,
    /// Chooses their racks.
    pub(crate) home: u32,
}

/// One message of a tree, from a part of a group to the group's aggregator.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hop {
    /// The position at the other end.
    pub(crate) peer: u32,
    /// The level of the group.
    pub(crate) level: usize,
    /// The places of the sending part and of the aggregator's among the parts, and their number.
    from: u32,
    to: u32,
    parts: u32,
}

impl Hop {
    /// How far the aggregator is from the part, around a circle. As the time of a message it makes
    /// no peer the first for all, neither on the way up nor on the way down.
    pub(crate) fn distance(&self) -> u32 {
        (self.to + self.parts - self.from) % self.parts
    }
}

impl Tiers {
    pub(crate) fn new(topology: &Topology) -> Self {
        let order = topology.order();
        let nodes = order.len() as u32;
        let every =
            |size: u32| Level { starts: vec![0, size], of: vec![0; size as usize], most: 0 };
        let each = Level { starts: (0..=nodes).collect(), of: (0..nodes).collect(), most: 1 };
        let tiers = (1..=topology.tiers().len()).map(|tier| {
            let mut level = Level { starts: Vec::new(), of: Vec::new(), most: 0 };
            for (at, &participant) in (0..).zip(&order) {
                let is_same = |&before: &u32| topology.same_group(tier, before, participant);
                if !level.of.len().checked_sub(1).is_some_and(|last| is_same(&order[last])) {
                    level.starts.push(at);
                }
                level.of.push(level.starts.len() as u32 - 1);
            }
            level.starts.push(nodes);
            level
        });
        let levels = iter::once(each).chain(tiers).chain([every(nodes)]).collect();
        let mut tiers = Self { order, levels };
        for level in 1..tiers.levels.len() {
            let groups = 0..tiers.count(level);
            let most = groups.map(|group| tiers.parts(level, group).len()).max().unwrap_or(1);
            tiers.levels[level].most = most as u32;
        }
        tiers
    }

    /// The last level, which has one group.
    pub(crate) fn top(&self) -> usize {
        self.levels.len() - 1
    }

    /// How many groups a level has.
    pub(crate) fn count(&self, level: usize) -> u32 {
        self.levels[level].starts.len() as u32 - 1
    }

    /// The most parts of a group of a level.
    pub(crate) fn most(&self, level: usize) -> u32 {
        self.levels[level].most
    }

    /// The positions of a group.
    pub(crate) fn positions(&self, level: usize, group: u32) -> Range<u32> {
        let starts = &self.levels[level].starts;
        starts[group as usize]..starts[group as usize + 1]
    }

    /// The group of a position.
    pub(crate) fn group(&self, level: usize, at: u32) -> u32 {
        self.levels[level].of[at as usize]
    }

    /// The parts of a group: groups of the level before.
    pub(crate) fn parts(&self, level: usize, group: u32) -> Range<u32> {
        let Range { start, end } = self.positions(level, group);
        self.group(level - 1, start)..self.group(level - 1, end - 1) + 1
    }

    /// The tree of a member of a rack.
    pub(crate) fn root(&self, rack: u32, number: u32) -> Root {
        let members = self.positions(1, rack);
        Root { at: members.start + number % members.len() as u32, number, home: rack }
    }

    /// The aggregator of a group. In racks the members take turns, in larger groups the parts, so
    /// that over all roots the work is shared about equally.
    pub(crate) fn aggregator(&self, mut level: usize, mut group: u32, root: Root) -> u32 {
        let members = self.most(1);
        while level > 0 {
            if self.group(level, root.at) == group {
                return root.at;
            }
            let parts = self.parts(level, group);
            let turn = if level == 1 {
                root.number
            } else {
                // Mixed digits: each combination of parts and members has its turn.
                let stride =
                    (2..level).fold(1u32, |all, below| all.saturating_mul(self.most(below)));
                (root.home + root.number / members) / stride + root.number % members
            };
            group = parts.start + turn % parts.len() as u32;
            level -= 1;
        }
        group
    }

    fn hop(&self, level: usize, (from, to): (u32, u32), peer: u32) -> Hop {
        let parts = self.parts(level, self.group(level, to));
        let place = |at| self.group(level - 1, at) - parts.start;
        Hop { peer, level, from: place(from), to: place(to), parts: parts.len() as u32 }
    }

    /// The next hop from a position to the root; none from the root.
    pub(crate) fn parent(&self, at: u32, root: Root) -> Option<Hop> {
        let hop = |level| {
            let aggregator = self.aggregator(level, self.group(level, at), root);
            (aggregator != at).then(|| self.hop(level, (at, aggregator), aggregator))
        };
        (1..=self.top()).find_map(hop)
    }

    /// The hops that lead to a position.
    pub(crate) fn children(&self, at: u32, root: Root) -> Vec<Hop> {
        let mut children = Vec::new();
        for level in 1..=self.top() {
            let group = self.group(level, at);
            if self.aggregator(level, group, root) != at {
                break;
            }
            let own = self.group(level - 1, at);
            let others = self.parts(level, group).filter(|&part| part != own);
            children.extend(others.map(|part| {
                let child = self.aggregator(level - 1, part, root);
                self.hop(level, (child, at), child)
            }));
        }
        children
    }

    /// When the messages of a level begin if those of the levels before it go first.
    pub(crate) fn before(&self, level: usize) -> u32 {
        (1..level).map(|below| self.most(below)).sum()
    }

    /// The same if those of the levels after it go first.
    pub(crate) fn after(&self, level: usize) -> u32 {
        (level + 1..=self.top()).map(|above| self.most(above)).sum()
    }

    /// The numbers of parts of regular groups, the smallest first; their product is the number of
    /// participants. Tiers whose groups are not all of one size are left out.
    pub(crate) fn regular(&self) -> Vec<u32> {
        let mut sizes = vec![1];
        for level in 1..=self.top() {
            let size = self.positions(level, 0).len() as u32;
            let is_even = (0..self.count(level))
                .all(|group| self.positions(level, group).len() as u32 == size);
            sizes.extend(is_even.then_some(size));
        }
        sizes.windows(2).map(|two| two[1] / two[0]).filter(|&parts| parts > 1).collect()
    }
}
