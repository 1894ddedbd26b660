//! The language in which every collective is written: blocks of a piece, and for each
//! participant the steps that it takes with them.
//!
//! A *participant* is a node (one daemon), numbered from 0; a *block* is a range of the piece's
//! elements; `work[block]` is the participant's scratch for it. Every participant's schedule is
//! made from the same arguments, so all know the same blocks.
//!
//! # What a dependency means
//!
//! [`Step::after`] names earlier steps of the same participant.
//!
//! - A dependency on a step of the **same block** may be followed at byte granularity: the later
//!   step may use every prefix of the block that the earlier step is done with. A `Send` after a
//!   `RecvReduce` forwards what has been reduced while more comes in; a `RecvCopy` after a `Send`
//!   overwrites what has been handed to the network already.
//! - A dependency on a step of **another block** means: wait for its end.
//!
//! Steps without a path of dependencies between them may run in any order and at the same time.
//! Two of them never touch the same block unless both only read it; [`verify`](mod@crate::verify)
//! proves that, so a block can be proven as if it were a single byte. The order of the list is a
//! sensible order to issue steps in (what others wait for comes first), not a promise.
//!
//! # Messages
//!
//! `message` counts the sends from one participant to another, from 0, in list order: the n-th
//! `Send` of A to B is what the n-th receive at B of A takes, and both name the same block. A send
//! is over once its bytes are handed to the network; it doesn't wait for the receiver to read, so
//! the network has to buffer at least one chunk of each message under way (recursive doubling
//! sends both ways at once and reads after it has sent).

/// A range of the piece. Blocks tile the piece in order; [`Schedule::blocks`] holds no empty block
/// but the one block of an empty piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Block {
    /// The first element.
    pub offset: u64,
    /// How many elements.
    pub count: u64,
}

/// What one step does. Peers are participant numbers, blocks index [`Schedule::blocks`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// `work[block]` := the reduction of the local contributors, in rank order (SAME).
    ReduceLocal {
        /// What is reduced.
        block: u32,
    },
    /// Sends `work[block]` to a peer.
    Send {
        /// To whom.
        peer: u32,
        /// What.
        block: u32,
        /// The number of this send to this peer.
        message: u32,
    },
    /// `work[block]` := the received block combined with `work[block]`. The left operand is that of
    /// the participant with the lower number, so that both sides of an exchange compute the same
    /// bits (SAME).
    RecvReduce {
        /// From whom.
        peer: u32,
        /// What.
        block: u32,
        /// The number of this receive from this peer.
        message: u32,
    },
    /// `work[block]` := the received block.
    RecvCopy {
        /// From whom.
        peer: u32,
        /// What.
        block: u32,
        /// The number of this receive from this peer.
        message: u32,
    },
    /// Hands `work[block]`, finished (averaged, scaled), to the local ranks.
    Publish {
        /// What is published.
        block: u32,
    },
}

impl Action {
    /// The block that the step touches.
    pub fn block(&self) -> u32 {
        match *self {
            Self::ReduceLocal { block }
            | Self::Send { block, .. }
            | Self::RecvReduce { block, .. }
            | Self::RecvCopy { block, .. }
            | Self::Publish { block } => block,
        }
    }

    /// Whether the step changes `work[block]`.
    pub fn writes(&self) -> bool {
        matches!(self, Self::ReduceLocal { .. } | Self::RecvReduce { .. } | Self::RecvCopy { .. })
    }

    /// For a send: peer and message number.
    pub fn sends_to(&self) -> Option<(u32, u32)> {
        match *self {
            Self::Send { peer, message, .. } => Some((peer, message)),
            _ => None,
        }
    }

    /// For a receive: peer and message number.
    pub fn receives_from(&self) -> Option<(u32, u32)> {
        match *self {
            Self::RecvReduce { peer, message, .. } | Self::RecvCopy { peer, message, .. } => {
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
    /// Indices of earlier steps of the same participant; see the module's text for what a
    /// dependency means.
    pub after: Vec<u32>,
}

/// What one participant does for one piece.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Schedule {
    /// How many participants there are.
    pub participants: u32,
    /// Whose schedule this is.
    pub me: u32,
    /// The blocks, the same for everybody.
    pub blocks: Vec<Block>,
    /// The steps, dependencies before dependents. None for a participant that has no part in it,
    /// like all others in a move from one to another.
    pub steps: Vec<Step>,
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
