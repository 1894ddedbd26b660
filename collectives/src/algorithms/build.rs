//! From a choice of trees to a schedule.
//!
//! An algorithm says for each block where this participant stands in the block's tree
//! ([`Place`]) and at what *time* each link is used. Times are logical: small numbers on which
//! both ends of a link agree, growing along every path. They order the list of steps, and as both
//! ends order their messages by the same (time, block), both count the same messages.

use super::kind::Kind;
use crate::{
    schedule::{Action, Block, Schedule, Step},
    topology::Topology,
};

/// One link of a tree, seen from either end.
#[derive(Debug, Clone, Copy)]
pub(super) struct Link {
    /// Who is at the other end.
    pub(super) peer: u32,
    /// When the reduction goes up this link.
    pub(super) up: u32,
    /// When the result comes down this link.
    pub(super) down: u32,
}

/// Where a participant stands in one block's tree.
#[derive(Debug, Clone, Default)]
pub(super) struct Place {
    /// The link to the parent; none at the root.
    pub(super) parent: Option<Link>,
    /// The links to the children.
    pub(super) children: Vec<Link>,
}

/// Trees that all have the same root: the blocks, and where a participant stands in each one's
/// tree.
pub(super) struct Rooted {
    pub(super) blocks: Vec<Block>,
    pub(super) place: Box<dyn Fn(u32) -> Place>,
}

impl Rooted {
    pub(super) fn new(blocks: Vec<Block>, place: impl Fn(u32) -> Place + 'static) -> Self {
        Self { blocks, place: Box::new(place) }
    }
}

/// Collects steps in any order that has dependencies first, and puts them in order at the end.
#[derive(Debug, Default)]
pub(super) struct Builder {
    drafts: Vec<Draft>,
}

#[derive(Debug)]
struct Draft {
    time: u32,
    action: Action,
    after: Vec<usize>,
}

/// A step that has been added to a [`Builder`].
pub(super) type Added = usize;

impl Builder {
    /// Adds a step. The message number of `action` is set later; `time` must not be smaller than
    /// that of any step in `after`.
    pub(super) fn add(&mut self, time: u32, action: Action, after: &[Added]) -> Added {
        debug_assert!(after.iter().all(|&a| self.drafts[a].time <= time), "time runs backwards");
        self.drafts.push(Draft { time, action, after: after.to_vec() });
        self.drafts.len() - 1
    }

    /// The schedule: steps by (time, block), messages numbered in that order.
    pub(super) fn finish(mut self, participants: u32, me: u32, blocks: Vec<Block>) -> Schedule {
        let mut order: Vec<usize> = (0..self.drafts.len()).collect();
        // Stable, so steps of one block at one time stay as they were added.
        order.sort_by_key(|&i| (self.drafts[i].time, self.drafts[i].action.block()));
        let mut place = vec![0u32; order.len()];
        for (at, &i) in (0..).zip(&order) {
            place[i] = at;
        }
        let mut sent = vec![0u32; participants as usize];
        let mut received = vec![0u32; participants as usize];
        let steps = order
            .iter()
            .map(|&i| {
                let draft = &mut self.drafts[i];
                match &mut draft.action {
                    Action::Send { peer, message, .. } => next(&mut sent, *peer, message),
                    Action::RecvReduce { peer, message, .. }
                    | Action::RecvCopy { peer, message, .. } => next(&mut received, *peer, message),
                    Action::ReduceLocal { .. } | Action::Publish { .. } => {}
                }
                let after = draft.after.iter().map(|&a| place[a]).collect();
                Step { action: draft.action, after }
            })
            .collect();
        Schedule { participants, me, blocks, steps }
    }
}

fn next(counts: &mut [u32], peer: u32, message: &mut u32) {
    *message = counts[peer as usize];
    counts[peer as usize] += 1;
}

/// Without anybody to talk to, or without anything to say.
///
/// Who gets a result publishes it, even an empty one; who gets none has nothing to do.
pub(super) fn alone(participants: u32, me: u32, count: u64, kind: Kind) -> Schedule {
    let mut builder = Builder::default();
    let reduces = count > 0 && kind.contributes(me);
    let reduced = reduces.then(|| builder.add(0, Action::ReduceLocal { block: 0 }, &[]));
    if kind.publishes(me) {
        builder.add(0, Action::Publish { block: 0 }, reduced.as_slice());
    }
    builder.finish(participants, me, vec![Block { offset: 0, count }])
}

/// An allreduce: each block goes up its tree and comes down again.
pub(super) fn reduce_and_return(
    participants: u32,
    me: u32,
    blocks: Vec<Block>,
    place: impl Fn(u32) -> Place,
) -> Schedule {
    let mut builder = Builder::default();
    for block in 0..blocks.len() as u32 {
        let place = place(block);
        let (mut last, mut now) = gather(&mut builder, block, &place);
        let Place { parent, children } = place;
        if let Some(link) = parent {
            let send = Action::Send { peer: link.peer, block, message: 0 };
            let sent = builder.add(link.up, send, &[last]);
            // The result overwrites what was sent, so it waits for the send.
            let copy = Action::RecvCopy { peer: link.peer, block, message: 0 };
            last = builder.add(link.down, copy, &[sent]);
            now = link.down;
        }
        hand_out(&mut builder, block, last, now, children);
    }
    builder.finish(participants, me, blocks)
}

/// A reduction to one participant: each block goes up its tree. The trees of all blocks have the
/// same root, which alone publishes.
pub(super) fn reduce_up(
    participants: u32,
    me: u32,
    blocks: Vec<Block>,
    place: impl Fn(u32) -> Place,
) -> Schedule {
    let mut builder = Builder::default();
    for block in 0..blocks.len() as u32 {
        let place = place(block);
        let (last, now) = gather(&mut builder, block, &place);
        if let Some(link) = place.parent {
            builder.add(link.up, Action::Send { peer: link.peer, block, message: 0 }, &[last]);
        } else {
            builder.add(now, Action::Publish { block }, &[last]);
        }
    }
    builder.finish(participants, me, blocks)
}

/// The own contribution and those of everybody below: the last step, and when it is.
fn gather(builder: &mut Builder, block: u32, place: &Place) -> (Added, u32) {
    let mut children = place.children.clone();
    // One fixed order of reduction, whoever arrives first (SAME).
    children.sort_by_key(|link| (link.up, link.peer));
    let first = children.iter().chain(&place.parent).map(|link| link.up).min().unwrap_or(0);
    let local = builder.add(first, Action::ReduceLocal { block }, &[]);
    children.iter().fold((local, first), |(last, _), link| {
        let action = Action::RecvReduce { peer: link.peer, block, message: 0 };
        (builder.add(link.up, action, &[last]), link.up)
    })
}

/// A broadcast: each block comes down its tree. The trees of all blocks have the same root.
pub(super) fn send_down(
    participants: u32,
    me: u32,
    blocks: Vec<Block>,
    place: impl Fn(u32) -> Place,
) -> Schedule {
    let mut builder = Builder::default();
    for block in 0..blocks.len() as u32 {
        let Place { parent, children } = place(block);
        let (last, now) = if let Some(link) = parent {
            let copy = Action::RecvCopy { peer: link.peer, block, message: 0 };
            (builder.add(link.down, copy, &[]), link.down)
        } else {
            let first = children.iter().map(|link| link.down).min().unwrap_or(0);
            (builder.add(first, Action::ReduceLocal { block }, &[]), first)
        };
        hand_out(&mut builder, block, last, now, children);
    }
    builder.finish(participants, me, blocks)
}

/// `last` has finished the block: everybody below gets it, and the local ranks.
fn hand_out(builder: &mut Builder, block: u32, last: Added, now: u32, mut children: Vec<Link>) {
    children.sort_by_key(|link| (link.down, link.peer));
    for link in &children {
        builder.add(link.down, Action::Send { peer: link.peer, block, message: 0 }, &[last]);
    }
    // Others wait for the sends, only the own ranks for this.
    let time = children.last().map_or(now, |link| link.down);
    builder.add(time, Action::Publish { block }, &[last]);
}

/// A tree given by parents, with the times of its links: up by height, down by depth.
#[derive(Debug)]
pub(super) struct Tree {
    parents: Vec<Option<u32>>,
    children: Vec<Vec<u32>>,
    heights: Vec<u32>,
    depths: Vec<u32>,
}

impl Tree {
    /// A tree over positions 0..n; exactly one has no parent, and following parents leads to it.
    pub(super) fn new(parents: Vec<Option<u32>>) -> Self {
        let n = parents.len();
        let mut children = vec![Vec::new(); n];
        let mut queue = Vec::with_capacity(n);
        for (at, parent) in (0..).zip(&parents) {
            match parent {
                Some(parent) => children[*parent as usize].push(at),
                None => queue.push(at),
            }
        }
        let (mut heights, mut depths) = (vec![0; n], vec![0; n]);
        let mut next = 0;
        while let Some(&at) = queue.get(next) {
            for &child in &children[at as usize] {
                depths[child as usize] = depths[at as usize] + 1;
                queue.push(child);
            }
            next += 1;
        }
        for &at in queue.iter().rev() {
            if let Some(parent) = parents[at as usize] {
                let above: u32 = heights[at as usize] + 1;
                let height = &mut heights[parent as usize];
                *height = above.max(*height);
            }
        }
        Self { parents, children, heights, depths }
    }

    /// How long the longest path from a leaf to the root is.
    pub(super) fn height(&self) -> u32 {
        self.heights.iter().copied().max().unwrap_or(0)
    }

    /// The place of position `at`, its links used `delay` later than those of the first block;
    /// `name` turns positions into participants.
    pub(super) fn place(&self, at: u32, delay: u32, name: impl Fn(u32) -> u32) -> Place {
        let link = |peer: u32, below: u32| Link {
            peer: name(peer),
            up: delay + self.heights[below as usize],
            down: delay + self.height() + self.depths[below as usize] - 1,
        };
        Place {
            parent: self.parents[at as usize].map(|parent| link(parent, at)),
            children: self.children[at as usize].iter().map(|&c| link(c, c)).collect(),
        }
    }
}

/// Where a participant is in an order of them.
pub(super) fn position(order: &[u32], participant: u32) -> u32 {
    (0..).zip(order).find(|&(_, &p)| p == participant).map_or(0, |(at, _)| at)
}

/// All participants, `root` first, racks together: the root's rack, then the others.
pub(super) fn order_from(topology: &Topology, root: u32) -> Vec<u32> {
    let mut order = topology.order();
    order.sort_by_key(|&p| (p != root, !topology.same_rack(p, root)));
    order
}
