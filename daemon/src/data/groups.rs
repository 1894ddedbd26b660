//! The arithmetic on a piece with quantized partial results: groups of 256 elements share a scale
//! ([`gradwire_kernels::Quantized`]).
//!
//! Everything is computed in f32, in tiles of a few groups that stay in the first-level cache. A
//! value is quantized when it is sent or published; intermediate sums are kept in f32 beside the
//! block, like those of bf16. Each node quantizes each block once ([`ROUNDS_ONCE`]), so there is
//! one error per element, which is added the next time.
//!
//! [`ROUNDS_ONCE`]: gradwire_collectives::Algorithm::ROUNDS_ONCE

use std::ops::Range;

use gradwire_collectives::execution::Unrounded;
use gradwire_kernels::{Finish, Quantized, Store, add_quantized, dequantize, level, quantize};
use gradwire_proto::compression::{GROUP, GROUP_BYTES};

use super::piece::Piece;
use crate::model::memory::{self, Part};

const TILE: usize = 8 * GROUP;

const WIDE: usize = size_of::<f32>();

/// The place of a block's value before a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Before {
    /// In the local ranks' inputs.
    Ranks,
    Buffer,
}

/// The layout of a quantized piece in its buffer, which begins with the blocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Groups {
    format: Quantized,
    elements: usize,
    /// The offsets of the unrounded sums and of the errors.
    sums: usize,
    errors: usize,
    end: usize,
}

/// A tile's elements, in the forms of the kernels and of the ranks.
struct Tile {
    values: [f32; TILE],
    bytes: [u8; TILE * WIDE],
}

impl Tile {
    const fn new() -> Self {
        Self { values: [0.0; TILE], bytes: [0; TILE * WIDE] }
    }

    fn bytes_to_values(&mut self, count: usize) {
        let bytes = self.bytes.as_chunks::<WIDE>().0;
        for (value, bytes) in self.values[..count].iter_mut().zip(bytes) {
            *value = f32::from_ne_bytes(*bytes);
        }
    }

    fn values_to_bytes(&mut self, count: usize) {
        let bytes = self.bytes.as_chunks_mut::<WIDE>().0;
        for (bytes, value) in bytes.iter_mut().zip(&self.values[..count]) {
            *bytes = value.to_ne_bytes();
        }
    }
}

impl Groups {
    pub(super) fn new(piece: &Piece, format: Quantized) -> Self {
        let elements = piece.bytes as usize / WIDE;
        let sums = elements.div_ceil(GROUP) * GROUP_BYTES;
        let wide = |wanted: bool| if wanted { elements * WIDE } else { 0 };
        let errors = sums + wide(piece.plan.keeps_sums());
        let has_errors = piece.segments.iter().any(|segment| segment.errors.is_some());
        let end = errors + wide(has_errors);
        Self { format, elements, sums, errors, end }
    }

    pub(super) fn bytes(&self) -> usize {
        self.end
    }

    fn has_errors(&self) -> bool {
        self.end > self.errors
    }

    /// The range of a segment's errors in the buffer.
    fn errors_of(&self, start: u64, bytes: u64) -> Range<usize> {
        self.errors + start as usize..self.errors + (start + bytes) as usize
    }

    /// Copies the last errors. Segments without any get zeros.
    pub(super) fn take_errors(&self, memory: &mut [u8], piece: &Piece) {
        if !self.has_errors() {
            return;
        }
        for segment in &piece.segments {
            let here = &mut memory[self.errors_of(segment.start, segment.bytes)];
            match &segment.errors {
                Some((errors, first)) => errors.take(*first, here),
                None => here.fill(0),
            }
        }
    }

    /// Keeps the errors for the next time.
    pub(super) fn put_errors(&self, memory: &[u8], piece: &Piece) {
        for segment in &piece.segments {
            if let Some((errors, first)) = &segment.errors {
                errors.put(*first, &memory[self.errors_of(segment.start, segment.bytes)]);
            }
        }
    }

    /// The elements of a range of blocks, tile by tile, each with its place in the range.
    fn tiles(&self, range: &Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> + use<> {
        debug_assert!(range.start.is_multiple_of(GROUP_BYTES));
        let first = range.start / GROUP_BYTES * GROUP;
        let end = (range.end / GROUP_BYTES * GROUP).min(self.elements);
        let tile = move |from| (from..end.min(from + TILE), (from - first) / GROUP * GROUP_BYTES);
        (first..end).step_by(TILE).map(tile)
    }

    /// Adds the received groups, if any, to the value `before` of a range of blocks.
    pub(super) fn combine(
        &self,
        memory: &mut [u8],
        piece: &Piece,
        range: &Range<usize>,
        before: Before,
        received: Option<&[u8]>,
        unrounded: Unrounded,
    ) {
        let mut tile = Tile::new();
        for (elements, at) in self.tiles(range) {
            let count = elements.len();
            let bytes = count.div_ceil(GROUP) * GROUP_BYTES;
            let block = range.start + at..range.start + at + bytes;
            let sums = self.sums + elements.start * WIDE..self.sums + elements.end * WIDE;
            match before {
                Before::Ranks => {
                    reduce_ranks(piece, &elements, &mut tile.bytes);
                    tile.bytes_to_values(count);
                }
                Before::Buffer if unrounded.before => {
                    tile.bytes[..count * WIDE].copy_from_slice(&memory[sums.clone()]);
                    tile.bytes_to_values(count);
                }
                Before::Buffer => {
                    dequantize(self.format, &memory[block.clone()], &mut tile.values[..count]);
                }
            }
            if let Some(received) = received {
                add_quantized(self.format, &received[at..at + bytes], &mut tile.values[..count]);
            }
            if unrounded.after {
                tile.values_to_bytes(count);
                memory[sums].copy_from_slice(&tile.bytes[..count * WIDE]);
                continue;
            }
            let (blocks, others) = memory.split_at_mut(self.sums);
            let errors = self.has_errors().then(|| {
                let start = self.errors - self.sums + elements.start * WIDE;
                &mut others[start..start + count * WIDE]
            });
            quantize(level(), self.format, &tile.values[..count], errors, &mut blocks[block]);
        }
    }

    /// Publishes a range of bytes of the ranks' type to `targets`.
    pub(super) fn publish(
        &self,
        memory: &[u8],
        finish: &Finish,
        range: Range<u64>,
        targets: &[Part<'_>],
        store: Store,
    ) {
        let mut tile = Tile::new();
        let (first, end) = (range.start as usize / WIDE, range.end as usize / WIDE);
        let mut from = first / GROUP * GROUP;
        while from < end {
            // Groups may belong to several segments or parts.
            let to = self.elements.min(from + TILE);
            let block = from / GROUP * GROUP_BYTES..to.div_ceil(GROUP) * GROUP_BYTES;
            dequantize(self.format, &memory[block], &mut tile.values[..to - from]);
            tile.values_to_bytes(to - from);
            let (start, stop) = (from.max(first), to.min(end));
            let bytes = &tile.bytes[(start - from) * WIDE..(stop - from) * WIDE];
            let here = ((start - first) * WIDE) as u64;
            let targets: Vec<Part<'_>> =
                targets.iter().map(|(span, offset)| (*span, offset + here)).collect();
            memory::publish(finish, bytes, &targets, store);
            from = to;
        }
    }
}

/// Reduces the local ranks' inputs for some elements.
fn reduce_ranks(piece: &Piece, elements: &Range<usize>, to: &mut [u8]) {
    let bytes = (elements.start * WIDE) as u64..(elements.end * WIDE) as u64;
    piece.segments_of(bytes.clone(), |segment, at, range| {
        let here = (range.start - bytes.start) as usize..(range.end - bytes.start) as usize;
        let target = &mut to[here];
        memory::reduce(piece.combine, piece.prescale, target, &segment.sources(at), None);
    });
}
