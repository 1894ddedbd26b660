//! One piece: the local ranks' inputs and outputs, the arithmetic on the elements, and its
//! schedule.

use std::{ops::Range, sync::Arc, time::Instant};

use gradwire_collectives::execution::Plan;
use gradwire_kernels::{Combine, Finish, Form, Quantized, Store};
use gradwire_proto::{DType, NodeId, Sequence, TensorName, compression::GROUP_BYTES};
use gradwire_telemetry::Counter;

use super::feedback::Errors;
use crate::model::{
    memory::{self, Part},
    tensor::QueuedTensor,
};

/// A range of one flow of a tensor within a piece, in bytes.
#[derive(Debug)]
pub(crate) struct PieceSegment {
    pub(crate) tensor: Arc<QueuedTensor>,
    /// The number of the tensor in the request.
    pub(crate) part: usize,
    /// The local parts whose inputs are used, in this order (SAME).
    pub(crate) sources: Range<usize>,
    /// The local parts whose outputs receive the result.
    pub(crate) targets: Range<usize>,
    /// First byte within the inputs.
    pub(crate) source_offset: u64,
    /// First byte within the outputs.
    pub(crate) target_offset: u64,
    /// First byte within the piece.
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    /// The quantization errors of the tensor, and the index of the first one, if they are kept.
    pub(crate) errors: Option<(Arc<Errors>, u64)>,
}

impl PieceSegment {
    /// Whether every result replaces an input.
    fn is_in_place(&self) -> bool {
        let locals = &self.tensor.locals()[self.sources.clone()];
        self.sources == self.targets
            && self.source_offset == self.target_offset
            && locals.iter().all(|l| l.input(self.part).begins_with(l.output(self.part)))
    }

    /// The inputs from a byte of the segment on.
    pub(super) fn sources(&self, at: u64) -> Vec<Part<'_>> {
        let locals = &self.tensor.locals()[self.sources.clone()];
        locals.iter().map(|l| (l.input(self.part), self.source_offset + at)).collect()
    }

    /// Whether no local rank receives any of it.
    pub(super) fn has_no_targets(&self) -> bool {
        self.targets.is_empty()
    }

    /// The outputs from a byte of the segment on.
    pub(super) fn targets(&self, at: u64) -> Vec<Part<'_>> {
        let locals = &self.tensor.locals()[self.targets.clone()];
        locals.iter().map(|l| (l.output(self.part), self.target_offset + at)).collect()
    }
}

#[derive(Debug)]
pub(crate) enum Purpose {
    /// Tensors of local ranks.
    Ranks,
    /// Tensors of other nodes, for which this one is a server: the names of the first ones.
    Others(Vec<TensorName>),
    /// Measures links. Nobody waits for it.
    Probe,
}

/// The form of partial results in memory and between nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wire {
    /// The form of the ranks' elements.
    Ranks,
    /// Another form for each element.
    Partial(Form),
    /// Groups of elements that share a scale.
    Quantized(Quantized),
}

/// How many tensors a text names.
pub(crate) const NAMES: usize = 3;

/// This node's part of an operation.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) sequence: Sequence,
    pub(crate) purpose: Purpose,
    pub(crate) combine: Combine,
    pub(crate) prescale: f64,
    pub(crate) finish: Finish,
    /// The wire form of partial results. The plan counts bytes in wire form, and everything else
    /// counts bytes of the ranks' type.
    pub(crate) wire: Wire,
    /// Its tensors, with the number of elements of the longest flow that it contains.
    pub(crate) tensors: Vec<(Arc<QueuedTensor>, u64)>,
    /// In the order of their places in the piece. Data that is only passed on is in none of them.
    pub(crate) segments: Vec<PieceSegment>,
    /// The bytes that this node sends, receives or reduces.
    pub(crate) bytes: u64,
    pub(crate) plan: Arc<Plan>,
    /// The node of each participant of the schedule.
    pub(crate) nodes: Arc<[NodeId]>,
    /// When the coordinator's order was received.
    pub(crate) ordered: Instant,
    /// The bytes of its chunks; `None`: the lane's setting.
    pub(crate) chunk: Option<u64>,
    /// The counter of its bytes, when it is published.
    pub(crate) moved: Option<&'static Counter>,
}

impl Piece {
    pub(crate) fn is_probe(&self) -> bool {
        matches!(self.purpose, Purpose::Probe)
    }

    /// Whether all local ranks have memory for its results.
    pub(crate) fn is_allocated(&self) -> bool {
        self.tensors.iter().all(|(tensor, _)| tensor.is_allocated())
    }

    /// The names of its tensors, at most [`NAMES`], for messages.
    pub(crate) fn names(&self) -> String {
        let others: &[TensorName] =
            if let Purpose::Others(names) = &self.purpose { names } else { &[] };
        let own = self.tensors.iter().map(|(tensor, _)| &tensor.key.name);
        let mut all = own.chain(others).map(TensorName::as_str);
        let mut names: Vec<&str> = all.by_ref().take(NAMES).collect();
        if all.next().is_some() {
            names.push("…");
        }
        names.join(", ")
    }

    /// The bytes of an indivisible unit in wire form: an element or a group.
    pub(crate) fn wire_element(&self) -> usize {
        match self.wire {
            Wire::Ranks => self.combine.dtype.size(),
            Wire::Partial(form) => form.size(),
            Wire::Quantized(_) => GROUP_BYTES,
        }
    }

    /// Converts bytes of ranks to bytes in wire form; not for quantized pieces.
    pub(super) fn wire_bytes(&self, bytes: u64) -> u64 {
        debug_assert!(!matches!(self.wire, Wire::Quantized(_)), "a quantized piece has groups");
        bytes / self.combine.dtype.size() as u64 * self.wire_element() as u64
    }

    /// Calls `act(segment, first byte within it, bytes)` for each part of a range of bytes of the
    /// ranks' type.
    pub(super) fn segments_of(
        &self,
        bytes: Range<u64>,
        mut act: impl FnMut(&PieceSegment, u64, Range<u64>),
    ) {
        let Range { start, end } = bytes;
        let first = self.segments.partition_point(|s| s.start + s.bytes <= start);
        for segment in self.segments[first..].iter().take_while(|s| s.start < end) {
            let from = start.max(segment.start);
            let to = end.min(segment.start + segment.bytes);
            if from < to {
                act(segment, from - segment.start, from..to);
            }
        }
    }

    /// Calls `act(segment, first byte of the ranks' type within it, bytes in wire form)` for each
    /// part of a range of bytes in wire form; not for quantized pieces.
    pub(super) fn parts_of(
        &self,
        range: Range<usize>,
        mut act: impl FnMut(&PieceSegment, u64, Range<usize>),
    ) {
        let element = self.combine.dtype.size() as u64;
        let ranks = |at: usize| (at / self.wire_element()) as u64 * element;
        let wire_bytes = |at: u64| self.wire_bytes(at) as usize;
        self.segments_of(ranks(range.start)..ranks(range.end), |segment, at, bytes| {
            act(segment, at, wire_bytes(bytes.start)..wire_bytes(bytes.end));
        });
    }

    /// The input that is identical to these bytes in wire form: only one local rank contributes to
    /// the tensor, and nothing is computed on it.
    pub(super) fn input(&self, range: Range<usize>) -> Option<Part<'_>> {
        // Bool values are normalized: any value but zero is sent as one.
        let is_kept = self.prescale == 1.0 && self.combine.dtype != DType::Bool;
        let is_own = match self.wire {
            Wire::Ranks => true,
            Wire::Partial(form) => Form::of(self.combine.dtype) == Some(form),
            Wire::Quantized(_) => false,
        };
        if !is_own || !is_kept {
            return None;
        }
        let (start, end) = (range.start as u64, range.end as u64);
        let at = self.segments.partition_point(|s| s.start + s.bytes <= start);
        let segment = self.segments.get(at)?;
        let is_within = segment.start <= start && end <= segment.start + segment.bytes;
        let is_alone = segment.sources.len() == 1;
        (is_within && is_alone).then(|| segment.sources(start - segment.start).pop())?
    }

    /// The end of the last segment, in bytes of the ranks' type.
    pub(crate) fn end(&self) -> u64 {
        self.segments.last().map_or(0, |segment| segment.start + segment.bytes)
    }

    /// The bytes of ranks that are read for a reduction of the whole piece, and those that are
    /// written to publish it.
    pub(super) fn touched(&self) -> (u64, u64) {
        let sum = |ranks: fn(&PieceSegment) -> &Range<usize>| {
            self.segments.iter().map(|segment| segment.bytes * ranks(segment).len() as u64).sum()
        };
        (sum(|segment| &segment.sources), sum(|segment| &segment.targets))
    }

    /// Reduces and publishes a part of it without staging, for a piece of this node alone. Nothing
    /// interrupts it, so INPUT holds.
    pub(crate) fn run_alone(&self, part: Range<u64>, store: Store) {
        self.segments_of(part, |segment, at, range| {
            // An in-place target has just been read and is in the cache, so bypassing the cache
            // would be slower.
            let store = if segment.is_in_place() { Store::Cached } else { store };
            memory::reduce_and_publish(
                self.combine,
                self.prescale,
                &self.finish,
                &segment.sources(at),
                &segment.targets(at),
                range.end - range.start,
                store,
            );
        });
    }
}
