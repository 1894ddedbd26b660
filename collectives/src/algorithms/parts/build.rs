//! Builds a schedule from a choice of trees.
//!
//! For each block an algorithm gives the place of this participant in the block's tree (`Place`),
//! and the *time* at which each link is used. Times are logical: small numbers that both ends of a
//! link agree on, and that grow along every path. They order the steps. Both ends order their
//! messages by (time, block), so both number them alike.

use std::{collections::BTreeMap, ops::Range};

use crate::{
    algorithms::kind::Roles,
    schedule::{Action, Block, Schedule, Steps},
    topology::Topology,
};

/// One link of a tree, seen from either end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Link {
    /// The participant at the other end.
    pub(crate) peer: u32,
    /// When the reduction goes up this link.
    pub(crate) up: u32,
    /// When the result comes down this link.
    pub(crate) down: u32,
}

/// The place of a participant in one block's tree.
#[derive(Debug, Clone, Default)]
pub(crate) struct Place {
    /// The link to the parent; none at the root.
    pub(crate) parent: Option<Link>,
    /// The links to the children.
    pub(crate) children: Vec<Link>,
}

/// Trees that all have the same root: the blocks, and the place of a participant in each tree.
pub(crate) struct Rooted {
    pub(crate) blocks: Vec<Block>,
    pub(crate) place: Box<dyn Fn(u32) -> Place>,
}

impl Rooted {
    pub(crate) fn new(blocks: Vec<Block>, place: impl Fn(u32) -> Place + 'static) -> Self {
        Self { blocks, place: Box::new(place) }
    }
}

/// Collects steps and puts them in order at the end. A step is added after those that it depends
/// on, and its dependencies follow from the blocks: a read waits for the last write of the block,
/// and a write waits for the reads since then, or else for the last write.
#[derive(Debug)]
pub(crate) struct Builder {
    drafts: Vec<Draft>,
    /// The ranges and the dependencies of all drafts, one draft after the other.
    ranges: Vec<Range<u32>>,
    after: Vec<u32>,
    touched: Vec<Touched>,
    /// The steps that have read a block since it was written, each with the entry of the one
    /// before.
    readers: Vec<(u32, u32)>,
}

#[derive(Debug)]
struct Draft {
    time: u32,
    action: Action,
    ranges: Range<u32>,
    after: Range<u32>,
}

/// No step, or no entry.
const NONE: u32 = u32::MAX;

/// The steps that the next step with a block may have to wait for.
#[derive(Debug, Clone, Copy)]
struct Touched {
    written_by: u32,
    /// The last entry of the readers since then.
    read_by: u32,
}

impl Builder {
    /// For steps of this many blocks.
    pub(crate) fn new(blocks: usize) -> Self {
        Self {
            drafts: Vec::new(),
            ranges: Vec::new(),
            after: Vec::new(),
            touched: vec![Touched { written_by: NONE, read_by: NONE }; blocks],
            readers: Vec::new(),
        }
    }

    /// Adds a step of one block. `time` must not be smaller than that of any step before it that
    /// touches the block.
    pub(crate) fn add(&mut self, time: u32, action: Action, block: u32) {
        self.add_ranges(time, action, [block..block + 1]);
    }

    /// Adds a step of several blocks; `time` as in [`Builder::add`]. The message number of `action`
    /// is set later.
    pub(crate) fn add_ranges(
        &mut self,
        time: u32,
        action: Action,
        ranges: impl IntoIterator<Item = Range<u32>>,
    ) {
        let added = self.drafts.len() as u32;
        let (first_range, first_after) = (self.ranges.len(), self.after.len());
        self.ranges.extend(ranges);
        for block in self.ranges[first_range..].iter().cloned().flatten() {
            let touched = &mut self.touched[block as usize];
            let Touched { written_by, read_by } = *touched;
            if !action.writes() {
                wait_for(&mut self.after, first_after, written_by);
                touched.read_by = self.readers.len() as u32;
                self.readers.push((added, read_by));
                continue;
            }
            if read_by == NONE {
                wait_for(&mut self.after, first_after, written_by);
            }
            let mut next = read_by;
            while next != NONE {
                let (reader, before) = self.readers[next as usize];
                wait_for(&mut self.after, first_after, reader);
                next = before;
            }
            *touched = Touched { written_by: added, read_by: NONE };
        }
        sort_from(&mut self.after, first_after);
        let ranges = first_range as u32..self.ranges.len() as u32;
        let after = first_after as u32..self.after.len() as u32;
        debug_assert!(
            self.after[first_after..].iter().all(|&a| self.drafts[a as usize].time <= time),
            "time runs backwards"
        );
        self.drafts.push(Draft { time, action, ranges, after });
    }

    /// The same without the blocks that a small piece doesn't have; nothing if no block is left.
    pub(crate) fn add_existing(
        &mut self,
        time: u32,
        action: Action,
        ranges: impl IntoIterator<Item = Range<u32>>,
    ) {
        let blocks = self.touched.len() as u32;
        let cut = |range: Range<u32>| range.start..range.end.min(blocks);
        let mut there = ranges.into_iter().map(cut).filter(|range| !range.is_empty()).peekable();
        if there.peek().is_some() {
            self.add_ranges(time, action, there);
        }
    }

    /// Merges steps that do the same at the same time with different blocks: one message instead of
    /// one for each block. A block must not be sent and received at the same time. A message has
    /// its blocks in the order of `order(time, block)`.
    ///
    /// Local reductions are merged only if their next steps are the same, too, so that a receiving
    /// step can do them in its own pass.
    fn merged(self, order: impl Fn(u32, u32) -> u32) -> Self {
        struct Merged {
            time: u32,
            action: Action,
            /// Each block with its place in the message.
            blocks: Vec<(u32, u32)>,
            after: Vec<u32>,
        }
        let mut merged: Vec<Merged> = Vec::new();
        let mut found: BTreeMap<(u32, Action, Option<Action>), usize> = BTreeMap::new();
        let mut place = Vec::with_capacity(self.drafts.len());
        for (index, Draft { time, action, ranges, after }) in self.drafts.iter().enumerate() {
            // The steps of a block follow each other.
            let next = self.drafts.get(index + 1).filter(|_| *action == Action::ReduceLocal);
            let next = next.map(|next| next.action);
            let at_time = *time;
            // At one time, first what other steps may need.
            let turn = match action {
                Action::ReduceLocal => 0,
                Action::Send { .. } => 1,
                Action::RecvReduce { .. } | Action::RecvCopy { .. } => 2,
                Action::Publish => 3,
            };
            let time = 4 * time + turn;
            let at = *found.entry((time, *action, next)).or_insert_with(|| {
                let (blocks, after) = (Vec::new(), Vec::new());
                merged.push(Merged { time, action: *action, blocks, after });
                merged.len() - 1
            });
            place.push(at as u32);
            let into = &mut merged[at];
            let blocks = self.ranges[in_pool(ranges)].iter().cloned().flatten();
            into.blocks.extend(blocks.map(|block| (order(at_time, block), block)));
            into.after
                .extend(self.after[in_pool(after)].iter().map(|&after| place[after as usize]));
        }
        let (mut drafts, mut all_ranges, mut all_after) = (Vec::new(), Vec::new(), Vec::new());
        for Merged { time, action, mut blocks, after } in merged {
            let (first_range, first_after) = (all_ranges.len() as u32, all_after.len());
            blocks.sort_unstable();
            let ranges = blocks.into_iter().map(|(_, block)| block..block + 1).collect();
            all_ranges.extend(following(ranges));
            all_after.extend(after);
            sort_from(&mut all_after, first_after);
            let ranges = first_range..all_ranges.len() as u32;
            let after = first_after as u32..all_after.len() as u32;
            drafts.push(Draft { time, action, ranges, after });
        }
        Self { drafts, ranges: all_ranges, after: all_after, ..self }
    }

    /// The schedule: steps by (time, block), messages numbered in that order.
    pub(crate) fn finish(self, participants: u32, me: u32, blocks: Vec<Block>) -> Schedule {
        let Self { drafts, ranges, after, .. } = self;
        // Steps of one block at one time stay in the order in which they were added.
        let first = |draft: &Draft| ranges.get(draft.ranges.start as usize).map(|one| one.start);
        let mut order: Vec<_> =
            (0..).zip(&drafts).map(|(i, draft)| (draft.time, first(draft), i)).collect();
        order.sort_unstable();
        let mut place = vec![0u32; order.len()];
        for (at, &(.., i)) in (0..).zip(&order) {
            place[i as usize] = at;
        }
        let mut sent = vec![0u32; participants as usize];
        let mut received = vec![0u32; participants as usize];
        let mut steps = Steps::with_capacity(drafts.len(), ranges.len(), after.len());
        for (.., i) in order {
            let draft = &drafts[i as usize];
            let mut action = draft.action;
            match &mut action {
                Action::Send { peer, message } => next(&mut sent, *peer, message),
                Action::RecvReduce { peer, message, .. } | Action::RecvCopy { peer, message } => {
                    next(&mut received, *peer, message);
                }
                Action::ReduceLocal | Action::Publish => {}
            }
            let its_ranges = ranges[in_pool(&draft.ranges)].iter().cloned();
            let its_after = after[in_pool(&draft.after)].iter().map(|&a| place[a as usize]);
            steps.push(action, its_ranges, its_after);
        }
        Schedule { participants, servers: 0, me, blocks: blocks.into(), steps }
    }
}

fn in_pool(range: &Range<u32>) -> Range<usize> {
    range.start as usize..range.end as usize
}

/// Adds a step to the list that begins at `first`. Neighbouring blocks often wait for the same one.
fn wait_for(after: &mut Vec<u32>, first: usize, step: u32) {
    if step != NONE && after[first..].last() != Some(&step) {
        after.push(step);
    }
}

/// Sorts the list that begins at `first`, and leaves each entry in it once.
fn sort_from(list: &mut Vec<u32>, first: usize) {
    if !list[first..].is_sorted_by(|a, b| a < b) {
        let mut tail = list.split_off(first);
        tail.sort_unstable();
        tail.dedup();
        list.append(&mut tail);
    }
}

/// Sorts ranges, and joins adjacent ones.
pub(crate) fn joined(mut ranges: Vec<Range<u32>>) -> Vec<Range<u32>> {
    ranges.sort_unstable_by_key(|range| range.start);
    following(ranges)
}

/// Joins adjacent ranges.
fn following(mut ranges: Vec<Range<u32>>) -> Vec<Range<u32>> {
    ranges.dedup_by(|next, range| {
        let follows = range.end == next.start;
        if follows {
            range.end = next.end;
        }
        follows
    });
    ranges
}

fn next(counts: &mut [u32], peer: u32, message: &mut u32) {
    *message = counts[peer as usize];
    counts[peer as usize] += 1;
}

/// The schedule of a single participant, or of an empty piece.
///
/// Participants that get the result publish it, even if it is empty.
pub(crate) fn alone(participants: u32, me: u32, count: u64, roles: Roles) -> Schedule {
    let mut builder = Builder::new(1);
    if count > 0 && roles.contributes(me) {
        builder.add(0, Action::ReduceLocal, 0);
    }
    if roles.publishes(me) {
        builder.add(0, Action::Publish, 0);
    }
    builder.finish(participants, me, vec![Block { offset: 0, count }])
}

/// An allreduce: each block goes up its tree and comes down again.
pub(crate) fn reduce_and_return(
    participants: u32,
    me: u32,
    blocks: Vec<Block>,
    place: impl Fn(u32) -> Place,
) -> Schedule {
    up_and_down(me, false, blocks.len(), place).finish(participants, me, blocks)
}

/// The same with one message for all blocks that take a link at the same time, in the order of
/// `order(time, block)`, on which both ends agree.
pub(crate) fn reduce_and_return_together(
    participants: u32,
    me: u32,
    blocks: Vec<Block>,
    order: impl Fn(u32, u32) -> u32,
    place: impl Fn(u32) -> Place,
) -> Schedule {
    up_and_down(me, false, blocks.len(), place).merged(order).finish(participants, me, blocks)
}

fn up_and_down(me: u32, is_server: bool, blocks: usize, place: impl Fn(u32) -> Place) -> Builder {
    let mut builder = Builder::new(blocks);
    for block in 0..blocks as u32 {
        let place = place(block);
        let mut now = gather(&mut builder, me, is_server, block, &place);
        let Place { parent, children } = place;
        if let Some(link) = parent {
            builder.add(link.up, Action::send(link.peer), block);
            builder.add(link.down, Action::copy(link.peer), block);
            now = link.down;
        }
        now = send_to_all(&mut builder, block, now, children);
        if !is_server {
            builder.add(now, Action::Publish, block);
        }
    }
    builder
}

/// [`reduce_and_return`] with servers in the trees: they contribute nothing, so they copy the first
/// block that they receive, and they publish nothing.
pub(crate) fn reduce_and_return_over_servers(
    topology: &Topology,
    me: u32,
    blocks: Vec<Block>,
    place: impl Fn(u32) -> Place,
) -> Schedule {
    let (participants, is_server) = (topology.participants(), me >= topology.contributors());
    let builder = up_and_down(me, is_server, blocks.len(), place);
    Schedule { servers: topology.servers(), ..builder.finish(participants, me, blocks) }
}

/// A reduction to one participant: each block goes up its tree. The trees of all blocks have the
/// same root, which alone publishes.
pub(crate) fn reduce_up(
    participants: u32,
    me: u32,
    blocks: Vec<Block>,
    place: impl Fn(u32) -> Place,
) -> Schedule {
    let mut builder = Builder::new(blocks.len());
    for block in 0..blocks.len() as u32 {
        let place = place(block);
        let now = gather(&mut builder, me, false, block, &place);
        match place.parent {
            Some(link) => builder.add(link.up, Action::send(link.peer), block),
            None => builder.add(now, Action::Publish, block),
        }
    }
    builder.finish(participants, me, blocks)
}

/// Reduces the contributions of this participant and of its children; returns the time of the last
/// one.
fn gather(builder: &mut Builder, me: u32, is_server: bool, block: u32, place: &Place) -> u32 {
    let mut children = place.children.clone();
    // A fixed order of reduction, whichever message arrives first (SAME).
    children.sort_by_key(|link| (link.up, link.peer));
    let first = children.iter().chain(&place.parent).map(|link| link.up).min().unwrap_or(0);
    if !is_server {
        builder.add(first, Action::ReduceLocal, block);
    }
    for (at, link) in children.iter().enumerate() {
        let takes = match at {
            0 if is_server => Action::copy(link.peer),
            _ => Action::reduce(link.peer, link.peer < me),
        };
        builder.add(link.up, takes, block);
    }
    children.last().map_or(first, |link| link.up)
}

/// A broadcast: each block comes down its tree. The trees of all blocks have the same root.
pub(crate) fn send_down(
    participants: u32,
    me: u32,
    blocks: Vec<Block>,
    place: impl Fn(u32) -> Place,
) -> Schedule {
    let mut builder = Builder::new(blocks.len());
    for block in 0..blocks.len() as u32 {
        let Place { parent, children } = place(block);
        let now = if let Some(link) = parent {
            builder.add(link.down, Action::copy(link.peer), block);
            link.down
        } else {
            let first = children.iter().map(|link| link.down).min().unwrap_or(0);
            builder.add(first, Action::ReduceLocal, block);
            first
        };
        let now = send_to_all(&mut builder, block, now, children);
        builder.add(now, Action::Publish, block);
    }
    builder.finish(participants, me, blocks)
}

/// Sends the finished block to all children; returns the time of the last send.
fn send_to_all(builder: &mut Builder, block: u32, now: u32, mut children: Vec<Link>) -> u32 {
    children.sort_by_key(|link| (link.down, link.peer));
    for link in &children {
        builder.add(link.down, Action::send(link.peer), block);
    }
    children.last().map_or(now, |link| link.down)
}

/// The position of a participant in an order.
pub(crate) fn position(order: &[u32], participant: u32) -> u32 {
    (0..).zip(order).find(|&(_, &p)| p == participant).map_or(0, |(at, _)| at)
}

/// All participants, `root` first, then those of its rack, those of its group, and so on. Each
/// group of each tier is together.
pub(crate) fn order_from(topology: &Topology, root: u32) -> Vec<u32> {
    let mut order = topology.order();
    order.sort_by_key(|&p| (p != root, topology.distance(p, root)));
    order
}
