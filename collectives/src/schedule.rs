//! The language in which every collective is written: blocks of a piece, and for each
//! participant the steps that it takes with them.
//!
//! A *participant* is a node (one daemon), numbered from 0; a *block* is a range of the piece's
//! elements; `work[block]` is the participant's scratch for it. All schedules are generated from
//! the same arguments, so all participants know the same blocks. A step covers one block or many: a
//! list of ranges of blocks ([`StepView::ranges`]). It sends or receives one message: the bytes of
//! its blocks in the order of that list.
//!
//! # What a dependency means
//!
//! [`StepView::after`] names earlier steps of the same participant.
//!
//! - A dependency on a step that **shares blocks** with this one may be followed byte by byte: of
//!   the blocks that both cover, the later step may use every byte that the earlier step is done
//!   with. A `Send` after a `RecvReduce` forwards what has been reduced while more comes in; a
//!   `RecvCopy` after a `Send` overwrites what has been handed to the network already. Blocks that
//!   only one of them covers are not affected.
//! - A dependency on a step of **other blocks** only means: wait for its end.
//!
//! Steps without a path of dependencies between them may run in any order and at the same time.
//! Two of them never touch the same block unless both only read it; [`verify`](mod@crate::verify)
//! proves that, so a block can be proven as if it were a single byte. The order of the list is a
//! sensible order to issue steps in (what others wait for comes first), not a promise.
//!
//! # Messages
//!
//! `message` counts the sends from one participant to another, from 0, in list order: the n-th
//! receive of B from A takes the n-th `Send` of A to B, and both name the same ranges. A send is
//! over once its bytes are handed to the network; it doesn't wait for the receiver to read, so the
//! network has to buffer at least one chunk of each message in flight (recursive doubling sends
//! both ways at once and reads after it has sent).

use std::{ops::Range, sync::Arc};

/// A range of the piece. Blocks tile the piece in order; [`Schedule::blocks`] holds no empty block
/// except the one block of an empty piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Block {
    /// The first element.
    pub offset: u64,
    /// How many elements.
    pub count: u64,
}

/// What one step does with its blocks. Peers are participant numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// `work[block]` := the reduction of the local contributors, in rank order (SAME).
    ReduceLocal,
    /// Sends `work[block]` to a peer.
    Send {
        /// The receiver.
        peer: u32,
        /// The number of this send to this peer.
        message: u32,
    },
    /// `work[block]` := the received block combined with `work[block]`.
    RecvReduce {
        /// The sender.
        peer: u32,
        /// The number of this receive from this peer.
        message: u32,
        /// Whether the received block is the left operand. All participants that compute the same
        /// sum must agree on it: it decides which of two NaNs remains (SAME).
        theirs_first: bool,
    },
    /// `work[block]` := the received block.
    RecvCopy {
        /// The sender.
        peer: u32,
        /// The number of this receive from this peer.
        message: u32,
    },
    /// Hands `work[block]`, finished (averaged, scaled), to the local ranks.
    Publish,
}

impl Action {
    /// Sends to a peer; the message gets its number when the schedule is finished.
    pub(crate) fn send(peer: u32) -> Self {
        Self::Send { peer, message: 0 }
    }

    /// Receives from a peer and combines.
    pub(crate) fn reduce(peer: u32, theirs_first: bool) -> Self {
        Self::RecvReduce { peer, message: 0, theirs_first }
    }

    /// Receives from a peer and keeps.
    pub(crate) fn copy(peer: u32) -> Self {
        Self::RecvCopy { peer, message: 0 }
    }

    /// Whether the step changes `work[block]`.
    pub fn writes(&self) -> bool {
        matches!(self, Self::ReduceLocal | Self::RecvReduce { .. } | Self::RecvCopy { .. })
    }

    /// For a send: peer and message number.
    pub fn sends_to(&self) -> Option<(u32, u32)> {
        match *self {
            Self::Send { peer, message } => Some((peer, message)),
            _ => None,
        }
    }

    /// For a receive: peer and message number.
    pub fn receives_from(&self) -> Option<(u32, u32)> {
        match *self {
            Self::RecvReduce { peer, message, .. } | Self::RecvCopy { peer, message } => {
                Some((peer, message))
            }
            _ => None,
        }
    }
}

/// One step and what must come before it, as [`Steps`] shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StepView<'a> {
    /// What to do.
    pub action: Action,
    /// With which blocks: ranges of indices of [`Schedule::blocks`], none empty, no block twice.
    /// A message holds them in this order.
    pub ranges: &'a [Range<u32>],
    /// Indices of earlier steps of the same participant; see the module's text for what a
    /// dependency means.
    pub after: &'a [u32],
}

impl<'a> StepView<'a> {
    /// The blocks that the step covers, in order.
    pub fn blocks(&self) -> impl Iterator<Item = u32> + use<'a> {
        self.ranges.iter().cloned().flatten()
    }

    /// Whether the step covers this block.
    pub fn covers(&self, block: u32) -> bool {
        self.ranges.iter().any(|range| range.contains(&block))
    }

    /// Whether both steps cover some block.
    pub fn shares_blocks(&self, other: &StepView<'_>) -> bool {
        let meets = |a: &Range<u32>, b: &Range<u32>| a.start < b.end && b.start < a.end;
        self.ranges.iter().any(|a| other.ranges.iter().any(|b| meets(a, b)))
    }
}

/// A step as it is stored. Its lists are in [`Steps`], after those of the step before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Step {
    action: Action,
    /// The ends of its lists.
    ranges: u32,
    after: u32,
}

/// The steps of one participant, in order. There are many of them: a ring of 4,096 has 24,572. So
/// a step is small, and the ranges and dependencies of all are two lists.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Steps {
    list: Vec<Step>,
    ranges: Vec<Range<u32>>,
    after: Vec<u32>,
}

impl Steps {
    /// Reserves room for lists of these lengths.
    pub(crate) fn with_capacity(steps: usize, ranges: usize, after: usize) -> Self {
        Self {
            list: Vec::with_capacity(steps),
            ranges: Vec::with_capacity(ranges),
            after: Vec::with_capacity(after),
        }
    }

    /// Adds a step; see [`StepView`] for what its lists mean.
    ///
    /// # Panics
    /// If all lists together have more than `u32::MAX` entries.
    pub fn push(
        &mut self,
        action: Action,
        ranges: impl IntoIterator<Item = Range<u32>>,
        after: impl IntoIterator<Item = u32>,
    ) {
        self.ranges.extend(ranges);
        self.after.extend(after);
        let end = |len: usize| u32::try_from(len).expect("more entries than a schedule may have");
        let (ranges, after) = (end(self.ranges.len()), end(self.after.len()));
        self.list.push(Step { action, ranges, after });
    }

    /// How many steps there are.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// One of the steps.
    ///
    /// # Panics
    /// If `index` is out of range.
    pub fn at(&self, index: usize) -> StepView<'_> {
        let step = self.list[index];
        let before = index.checked_sub(1).map(|before| self.list[before]);
        let (ranges, after) = before.map_or((0, 0), |before| (before.ranges, before.after));
        StepView {
            action: step.action,
            ranges: &self.ranges[ranges as usize..step.ranges as usize],
            after: &self.after[after as usize..step.after as usize],
        }
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = StepView<'_>> + Clone {
        (0..self.len()).map(|index| self.at(index))
    }
}

/// What one participant does for one piece.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Schedule {
    /// How many participants there are.
    pub participants: u32,
    /// How many of the last participants are servers, which contribute nothing and get no result.
    pub servers: u32,
    /// The participant of this schedule.
    pub me: u32,
    /// The blocks, which are the same for all participants. Schedules may share them.
    pub blocks: Arc<[Block]>,
    /// The steps, dependencies before dependents. Empty for a participant that takes no part, such
    /// as the others in a move.
    pub steps: Steps,
}

impl Schedule {
    /// A schedule without blocks and steps.
    pub fn empty(participants: u32, me: u32) -> Self {
        Self { participants, servers: 0, me, blocks: Arc::default(), steps: Steps::default() }
    }

    /// Shares the blocks of another schedule, if they are the same.
    pub fn share_blocks(&mut self, others: &Arc<[Block]>) {
        if self.blocks == *others {
            self.blocks = others.clone();
        }
    }

    /// Whether a participant is a server.
    pub fn is_server(&self, participant: u32) -> bool {
        participant >= self.participants - self.servers
    }

    /// How many elements a step covers.
    pub fn elements(&self, step: StepView<'_>) -> u64 {
        let counts = |range: &Range<u32>| -> u64 {
            let blocks = &self.blocks[range.start as usize..range.end as usize];
            blocks.iter().map(|block| block.count).sum()
        };
        step.ranges.iter().map(counts).sum()
    }
}

/// Blocks begin at multiples of this many elements: a cache line of the smallest element type.
pub(crate) const GRAIN: u64 = 64;

/// Cuts `count` elements into at most `wanted` blocks of nearly equal size, each but the last a
/// multiple of [`GRAIN`]. Fewer where there are too few elements; one empty block for none.
pub(crate) fn split(count: u64, wanted: u64) -> Vec<Block> {
    let grains = count.div_ceil(GRAIN);
    let blocks = wanted.min(grains).max(1);
    let (each, extra) = (grains / blocks, grains % blocks);
    let mut offset = 0;
    (0..blocks)
        .map(|i| {
            let end = (offset + (each + u64::from(i < extra)) * GRAIN).min(count);
            let block = Block { offset, count: end - offset };
            offset = end;
            block
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Thousands of participants have thousands of steps each.
    #[test]
    fn steps_are_small() {
        assert!(size_of::<Step>() <= 24, "{}", size_of::<Step>());
    }

    #[test]
    fn steps_have_their_own_lists() {
        let mut steps = Steps::default();
        steps.push(Action::ReduceLocal, [3..4, 0..2], []);
        steps.push(Action::send(1), [0..1], [0]);
        steps.push(Action::Publish, [], [0, 1]);
        let lists = steps.iter().map(|step| (step.ranges.to_vec(), step.after.to_vec()));
        let expected = [(vec![3..4, 0..2], vec![]), (vec![0..1], vec![0]), (vec![], vec![0, 1])];
        assert_eq!(lists.collect::<Vec<_>>(), expected);
        assert!(steps.at(0).shares_blocks(&steps.at(1)) && !steps.at(2).covers(0));
    }

    #[test]
    fn blocks_tile_the_piece_and_none_is_empty() {
        for count in [0, 1, 63, 64, 65, 1000, 1 << 20, (1 << 20) + 1] {
            for wanted in [1, 2, 3, 7, 64, 300] {
                let blocks = split(count, wanted);
                let mut at = 0;
                for block in &blocks {
                    assert_eq!(block.offset, at);
                    assert!(block.count > 0 || count == 0);
                    at += block.count;
                }
                assert_eq!(at, count);
                assert!(blocks.len() as u64 <= wanted);
                let largest = blocks.iter().map(|b| b.count).max().unwrap();
                assert!(largest <= count.div_ceil(blocks.len() as u64) + GRAIN);
            }
        }
    }
}
