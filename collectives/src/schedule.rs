//! The language in which every collective is written: blocks of a piece, and for each
//! participant the steps that it takes with them.
//!
//! A *participant* is a node (one daemon), numbered from 0; a *block* is a range of the piece's
//! elements; `work[block]` is the participant's scratch for it. Every participant's schedule is
//! made from the same arguments, so all know the same blocks. A step covers one block or many: a
//! list of ranges of blocks ([`Step::ranges`]). What it sends or receives is one message, the bytes
//! of its blocks in the order of that list.
//!
//! # What a dependency means
//!
//! [`Step::after`] names earlier steps of the same participant.
//!
//! - A dependency on a step that **shares blocks** with this one may be followed byte by byte: of
//!   the blocks that both cover, the later step may use every byte that the earlier step is done
//!   with. A `Send` after a `RecvReduce` forwards what has been reduced while more comes in; a
//!   `RecvCopy` after a `Send` overwrites what has been handed to the network already. It says
//!   nothing of the blocks that only one of them covers.
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
//! `Send` of A to B is what the n-th receive at B of A takes, and both name the same ranges. A send
//! is over once its bytes are handed to the network; it doesn't wait for the receiver to read, so
//! the network has to buffer at least one chunk of each message under way (recursive doubling
//! sends both ways at once and reads after it has sent).

use std::ops::Range;

/// A range of the piece. Blocks tile the piece in order; [`Schedule::blocks`] holds no empty block
/// but the one block of an empty piece.
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
        /// To whom.
        peer: u32,
        /// The number of this send to this peer.
        message: u32,
    },
    /// `work[block]` := the received block combined with `work[block]`.
    RecvReduce {
        /// From whom.
        peer: u32,
        /// The number of this receive from this peer.
        message: u32,
        /// Whether the received block is the left operand. All that compute the same sum have to
        /// agree on that: which of two NaN stays depends on it (SAME).
        theirs_first: bool,
    },
    /// `work[block]` := the received block.
    RecvCopy {
        /// From whom.
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

/// One step and what must come before it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Step {
    /// What to do.
    pub action: Action,
    /// With which blocks: ranges of indices of [`Schedule::blocks`], none empty, no block twice.
    /// A message holds them in this order.
    pub ranges: Vec<Range<u32>>,
    /// Indices of earlier steps of the same participant; see the module's text for what a
    /// dependency means.
    pub after: Vec<u32>,
}

impl Step {
    /// The blocks that the step covers, in order.
    pub fn blocks(&self) -> impl Iterator<Item = u32> + '_ {
        self.ranges.iter().cloned().flatten()
    }

    /// Whether the step covers this block.
    pub fn covers(&self, block: u32) -> bool {
        self.ranges.iter().any(|range| range.contains(&block))
    }

    /// Whether both steps cover some block.
    pub fn shares_blocks(&self, other: &Self) -> bool {
        let meets = |a: &Range<u32>, b: &Range<u32>| a.start < b.end && b.start < a.end;
        self.ranges.iter().any(|a| other.ranges.iter().any(|b| meets(a, b)))
    }
}

/// What one participant does for one piece.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Schedule {
    /// How many participants there are.
    pub participants: u32,
    /// How many of them are servers, the last ones: they contribute nothing and get no result.
    pub servers: u32,
    /// Whose schedule this is.
    pub me: u32,
    /// The blocks, the same for everybody.
    pub blocks: Vec<Block>,
    /// The steps, dependencies before dependents. None for a participant that has no part in it,
    /// like all others in a move from one to another.
    pub steps: Vec<Step>,
}

impl Schedule {
    /// Whether a participant is a server.
    pub fn is_server(&self, participant: u32) -> bool {
        participant >= self.participants - self.servers
    }

    /// How many elements a step covers.
    pub fn elements(&self, step: &Step) -> u64 {
        step.blocks().map(|block| self.blocks[block as usize].count).sum()
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
