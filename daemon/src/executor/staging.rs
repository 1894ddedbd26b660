//! Where the result of a piece takes shape, in the form in which it travels.
//!
//! Blocks are sent from here and received to here as they are, so what a node publishes is what it has sent
//! or got: where elements travel shortened (bf16 for f32) the result is rounded like what is on its way,
//! on the node that computed it too, and all ranks receive identical bits (SAME).
//!
//! A sum is not rounded before it is sent, though. Where a schedule adds several peers' parts to a block
//! before anything of it goes out, the sum is kept in f32 beside the block meanwhile: one rounding for
//! each hop, whatever the number of parts.

use std::ops::Range;

use super::piece::Piece;
use crate::memory::{self, Short};
use gradwire_collectives::kernels::{Form, Store};

/// Cache lines keep sums and blocks apart.
const LINE: usize = 64;

/// Which of a step's values are sums that are still added to, and so not rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Unrounded {
    /// What a receiving step finds.
    pub(crate) before: bool,
    /// What a step leaves.
    pub(crate) after: bool,
}

fn form(unrounded: bool) -> Form {
    if unrounded { Form::F32 } else { Form::Bf16 }
}

/// A piece's buffer.
#[derive(Debug)]
pub(crate) struct Staging {
    /// The blocks, and behind them the sums that are not rounded, where there are such.
    memory: Vec<u8>,
    /// Where those begin.
    sums: usize,
    short: bool,
}

impl Staging {
    /// For a piece, in memory that was another's.
    pub(crate) fn new(piece: &Piece, mut memory: Vec<u8>) -> Self {
        let blocks = piece.travelling(piece.bytes) as usize;
        let short = piece.is_short;
        let (sums, needed) = if short && piece.plan.keeps_sums() {
            let sums = blocks.next_multiple_of(LINE);
            (sums, sums + piece.bytes as usize)
        } else {
            (blocks, blocks)
        };
        // It only grows: what is beyond the piece is left as it is, and costs nothing.
        if memory.len() < needed {
            memory.resize(needed, 0);
        }
        Self { memory, sums, short }
    }

    /// The buffer, for the next.
    pub(crate) fn into_memory(self) -> Vec<u8> {
        self.memory
    }

    /// Bytes as they travel.
    pub(crate) fn block(&self, range: Range<usize>) -> &[u8] {
        &self.memory[range]
    }

    /// Bytes as they travel, to be received.
    pub(crate) fn block_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        &mut self.memory[range]
    }

    /// The range of sums that belongs to a range of blocks.
    fn sums_of(&self, range: &Range<usize>) -> Range<usize> {
        let wide = |at: usize| self.sums + at / Form::Bf16.size() * Form::F32.size();
        wide(range.start)..wide(range.end)
    }

    /// Reduces the local ranks' inputs, and what was received of the same elements.
    pub(crate) fn reduce(
        &mut self,
        piece: &Piece,
        range: Range<usize>,
        received: Option<&[u8]>,
        unrounded: Unrounded,
    ) {
        let all = range.clone();
        piece.parts_of(range, |segment, at, range| {
            let received =
                received.map(|bytes| &bytes[range.start - all.start..range.end - all.start]);
            let parts = segment.sources(at);
            if !self.short {
                let target = &mut self.memory[range];
                memory::reduce(piece.combine, piece.prescale, target, &parts, received);
                return;
            }
            let target = if unrounded.after { self.sums_of(&range) } else { range };
            let target = Short { form: form(unrounded.after), bytes: &mut self.memory[target] };
            memory::reduce_short(piece.combine.op, piece.prescale, target, &parts, received);
        });
    }

    /// Combines a block with what was received of it.
    pub(crate) fn combine(
        &mut self,
        piece: &Piece,
        range: Range<usize>,
        received: &[u8],
        theirs_first: bool,
        unrounded: Unrounded,
    ) {
        if !self.short {
            memory::combine(piece.combine, &mut self.memory[range], received, theirs_first);
            return;
        }
        let op = piece.combine.op;
        let sums = self.sums_of(&range);
        let Unrounded { before, after } = unrounded;
        if before == after {
            let mine = &mut self.memory[if after { sums } else { range }];
            let mine = Short { form: form(after), bytes: mine };
            memory::combine_short(op, mine, None, received, theirs_first);
            return;
        }
        let (blocks, rest) = self.memory.split_at_mut(self.sums);
        let (block, sum) =
            (&mut blocks[range], &mut rest[sums.start - self.sums..sums.end - self.sums]);
        let (from, to) = if before { (sum, block) } else { (block, sum) };
        let (from, to) =
            (Short { form: form(before), bytes: &*from }, Short { form: form(after), bytes: to });
        memory::combine_short(op, to, Some(from), received, theirs_first);
    }

    /// Hands the finished result to the local ranks.
    pub(crate) fn publish(&self, piece: &Piece, store: Store) {
        for segment in &piece.segments {
            // Who only sends, or adds to another node's result, has nothing to hand out.
            if segment.has_no_targets() {
                continue;
            }
            let start = piece.travelling(segment.start) as usize;
            let end = piece.travelling(segment.start + segment.bytes) as usize;
            let (source, targets) = (&self.memory[start..end], segment.targets(0));
            if self.short {
                memory::publish_short(&piece.finish, source, &targets, store);
            } else {
                memory::publish(&piece.finish, source, &targets, store);
            }
        }
    }
}
