//! The buffer in which the result of a piece is computed in wire form.
//!
//! Blocks are sent from here and received to here unchanged, so a node publishes exactly the bytes
//! that it has sent or received, and all ranks receive identical bits (SAME). If partial results
//! have another form than the ranks' elements ([`Piece::wire`]), they are finished and converted
//! when they are published. If that form is rounded (bf16), the node that computed the result
//! rounds it, too.
//!
//! A sum is not rounded before it is sent. If a schedule adds the parts of several peers to a block
//! before it sends the block, the sum is kept in f32 beside the block: so there is one rounding for
//! each hop, for any number of parts.

use std::ops::Range;

use gradwire_collectives::execution::Unrounded;
use gradwire_kernels::{Form, Store};

use super::{
    groups::{Before, Groups},
    piece::{Piece, Wire},
    pool::Pool,
};
use crate::model::memory::{self, Partial};

/// Sums begin on a cache line of their own.
const LINE: usize = 64;

/// The helpers that may do parts of a reduction, and the most bytes of a part; `None`: the lane
/// does all of it.
pub(crate) type Helpers<'a> = Option<(&'a Pool, u64)>;

#[derive(Debug)]
pub(crate) struct Staging {
    /// The blocks, and behind them the unrounded sums, if there are any.
    memory: Vec<u8>,
    /// The offset of these sums.
    sums: usize,
    wire: Option<Form>,
    /// The layout, if the piece is quantized.
    groups: Option<Groups>,
}

impl Staging {
    /// A buffer for a piece, which reuses the memory of an earlier one.
    pub(crate) fn new(piece: &Piece, mut memory: Vec<u8>) -> Self {
        let wire = match piece.wire {
            Wire::Ranks => None,
            Wire::Partial(form) => Some(form),
            Wire::Quantized(format) => {
                return Self::quantized(piece, Groups::new(piece, format), memory);
            }
        };
        let blocks = piece.wire_bytes(piece.bytes) as usize;
        let (sums, needed) = if wire == Some(Form::Bf16) && piece.plan.keeps_sums() {
            let sums = blocks.next_multiple_of(LINE);
            (sums, sums + blocks / Form::Bf16.size() * Form::F32.size())
        } else {
            (blocks, blocks)
        };
        // It only grows: excess memory is not accessed, and costs nothing.
        if memory.len() < needed {
            memory = vec![0; needed];
        }
        Self { memory, sums, wire, groups: None }
    }

    fn quantized(piece: &Piece, groups: Groups, mut memory: Vec<u8>) -> Self {
        if memory.len() < groups.bytes() {
            memory = vec![0; groups.bytes()];
        }
        groups.take_errors(&mut memory, piece);
        Self { memory, sums: 0, wire: None, groups: Some(groups) }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.memory.capacity()
    }

    pub(crate) fn into_memory(self) -> Vec<u8> {
        self.memory
    }

    /// Bytes in wire form.
    pub(crate) fn block(&self, range: Range<usize>) -> &[u8] {
        &self.memory[range]
    }

    /// Bytes in wire form, to receive into.
    pub(crate) fn block_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        &mut self.memory[range]
    }

    /// The range of sums that belongs to a range of blocks.
    fn sums_of(&self, range: &Range<usize>) -> Range<usize> {
        let wide = |at: usize| self.sums + at / Form::Bf16.size() * Form::F32.size();
        wide(range.start)..wide(range.end)
    }

    /// Reduces the local ranks' inputs and the received bytes of the same elements.
    pub(crate) fn reduce(
        &mut self,
        piece: &Piece,
        range: Range<usize>,
        received: Option<&[u8]>,
        unrounded: Unrounded,
        helpers: Helpers<'_>,
    ) {
        if let Some(groups) = self.groups {
            let before = Before::Ranks;
            groups.combine(&mut self.memory, piece, &range, before, received, unrounded);
            return;
        }
        let all = range.clone();
        piece.parts_of(range, |segment, at, range| {
            let received =
                received.map(|bytes| &bytes[range.start - all.start..range.end - all.start]);
            let (combine, prescale) = (piece.combine, piece.prescale);
            let (form, target) = match self.wire {
                None => (None, range),
                Some(wire) => {
                    let (form, target) = self.place(wire, range, unrounded.after);
                    (Some(form), target)
                }
            };
            // `from` is the first byte of `target` in the whole target.
            let part = |from: usize, target: &mut [u8]| {
                let size = form.map_or(combine.dtype.size(), Form::size);
                let (first, elements) = (from / size, target.len() / size);
                let sources = segment.sources(at + (first * combine.dtype.size()) as u64);
                let Some((form, wire)) = form.zip(self.wire) else {
                    let received = received.map(|bytes| &bytes[from..from + target.len()]);
                    memory::reduce(combine, prescale, target, &sources, received);
                    return;
                };
                let received = received.map(|bytes| {
                    let bytes = &bytes[first * wire.size()..(first + elements) * wire.size()];
                    Partial { form: wire, bytes }
                });
                let target = Partial { form, bytes: target };
                memory::reduce_partial(combine, prescale, target, &sources, received);
            };
            let target = &mut self.memory[target];
            match helpers {
                Some((pool, most)) => {
                    let touched = target.len() * (segment.sources.len() + 1);
                    pool.run_on(target, touched as u64, most, &part);
                }
                None => part(0, target),
            }
        });
    }

    /// The form and the position of a block's value, which may be `unrounded`.
    fn place(&self, wire: Form, range: Range<usize>, unrounded: bool) -> (Form, Range<usize>) {
        match wire {
            Form::Bf16 if unrounded => (Form::F32, self.sums_of(&range)),
            _ => (wire, range),
        }
    }

    pub(crate) fn combine(
        &mut self,
        piece: &Piece,
        range: Range<usize>,
        received: &[u8],
        theirs_first: bool,
        unrounded: Unrounded,
    ) {
        if let Some(groups) = self.groups {
            let before = Before::Buffer;
            groups.combine(&mut self.memory, piece, &range, before, Some(received), unrounded);
            return;
        }
        let Some(wire) = self.wire else {
            memory::combine(piece.combine, &mut self.memory[range], received, theirs_first);
            return;
        };
        let op = piece.combine.op;
        let received = Partial { form: wire, bytes: received };
        let (before, from) = self.place(wire, range.clone(), unrounded.before);
        let (after, to) = self.place(wire, range, unrounded.after);
        if from == to {
            let mine = Partial { form: after, bytes: &mut self.memory[to] };
            memory::combine_partial(op, mine, None, received, theirs_first);
            return;
        }
        // One of them is a block, and the other is its unrounded sum.
        let (blocks, sums) = self.memory.split_at_mut(self.sums);
        let shifted = |range: &Range<usize>| range.start - self.sums..range.end - self.sums;
        let (from, to) = if before == wire {
            (&mut blocks[from], &mut sums[shifted(&to)])
        } else {
            let sum = &mut sums[shifted(&from)];
            (sum, &mut blocks[to])
        };
        let from = Partial { form: before, bytes: &*from };
        let to = Partial { form: after, bytes: to };
        memory::combine_partial(op, to, Some(from), received, theirs_first);
    }

    /// Keeps the rounding errors of a finished quantized piece for the next time.
    pub(crate) fn put_errors(&self, piece: &Piece) {
        if let Some(groups) = self.groups {
            groups.put_errors(&self.memory, piece);
        }
    }

    /// Publishes a part of the piece, in bytes of the ranks' type.
    pub(crate) fn publish(&self, piece: &Piece, part: Range<u64>, store: Store) {
        piece.segments_of(part, |segment, at, range| {
            // A rank that only sends, or contributes to another node's result, receives nothing.
            if segment.has_no_targets() {
                return;
            }
            let targets = segment.targets(at);
            if let Some(groups) = self.groups {
                groups.publish(&self.memory, &piece.finish, range, &targets, store);
                return;
            }
            let start = piece.wire_bytes(range.start) as usize;
            let end = piece.wire_bytes(range.end) as usize;
            let bytes = &self.memory[start..end];
            match self.wire {
                None => memory::publish(&piece.finish, bytes, &targets, store),
                Some(form) => {
                    let source = Partial { form, bytes };
                    memory::publish_partial(&piece.finish, source, &targets, store);
                }
            }
        });
    }
}
