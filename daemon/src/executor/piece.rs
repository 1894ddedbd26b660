//! One piece on its way through this node: the local ranks' inputs, the staging buffer in which
//! the result takes shape, and how far its schedule has come.
//!
//! The staging buffer is what keeps INPUT: nothing is written to a rank's output before every
//! other step of the piece has ended here, so a piece that is given up can be run again.

use std::{ops::Range, sync::Arc, time::Instant};

use gradwire_collectives::kernels::{Combine, Finish, Form, Store};
use gradwire_proto::{NodeId, Sequence};

use super::{
    plan::{Plan, Progress, Work},
    staging::Staging,
};
use crate::{
    memory::{self, Part},
    queue::QueuedTensor,
};

/// A range of one flow of a tensor within a piece, in bytes.
#[derive(Debug)]
pub(crate) struct PieceSegment {
    pub(crate) tensor: Arc<QueuedTensor>,
    /// Which tensor of the request.
    pub(crate) part: usize,
    /// Whose inputs of the tensor's local parts are taken, in this order (SAME).
    pub(crate) sources: Range<usize>,
    /// Whose outputs get the result.
    pub(crate) targets: Range<usize>,
    /// First byte within the inputs.
    pub(crate) source_offset: u64,
    /// First byte within the outputs.
    pub(crate) target_offset: u64,
    /// First byte within the piece.
    pub(crate) start: u64,
    pub(crate) bytes: u64,
}

impl PieceSegment {
    /// Of a tensor that is done without anything being moved on this node.
    pub(crate) fn nothing(tensor: Arc<QueuedTensor>, start: u64) -> Self {
        Self {
            tensor,
            part: 0,
            sources: 0..0,
            targets: 0..0,
            source_offset: 0,
            target_offset: 0,
            start,
            bytes: 0,
        }
    }

    /// Whether every result goes where an input came from.
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

    /// Whether nobody here gets anything of it.
    pub(super) fn has_no_targets(&self) -> bool {
        self.targets.is_empty()
    }

    /// The outputs from a byte of the segment on.
    pub(super) fn targets(&self, at: u64) -> Vec<Part<'_>> {
        let locals = &self.tensor.locals()[self.targets.clone()];
        locals.iter().map(|l| (l.output(self.part), self.target_offset + at)).collect()
    }
}

/// An operation as this node runs it.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) sequence: Sequence,
    pub(crate) combine: Combine,
    pub(crate) prescale: f64,
    pub(crate) finish: Finish,
    /// As what partial results travel, where that is not the ranks' type. Then the plan counts bytes
    /// as they travel, and everything else those of ranks.
    pub(crate) wire: Option<Form>,
    pub(crate) segments: Vec<PieceSegment>,
    pub(crate) bytes: u64,
    pub(crate) plan: Arc<Plan>,
    /// Which node each participant of the schedule is.
    pub(crate) nodes: Arc<[NodeId]>,
    /// When the coordinator's order came.
    pub(crate) ordered: Instant,
}

impl Piece {
    /// Whether all local ranks have made room for its results.
    pub(crate) fn has_room(&self) -> bool {
        self.segments.iter().all(|segment| segment.tensor.has_room())
    }

    /// The names of its tensors, for texts; at most three.
    pub(crate) fn names(&self) -> String {
        let mut names: Vec<&str> =
            self.segments.iter().take(3).map(|s| s.tensor.key.name.as_str()).collect();
        if self.segments.len() > names.len() {
            names.push("…");
        }
        names.join(", ")
    }

    /// Bytes of the least that is reduced, as it travels.
    pub(crate) fn grain(&self) -> usize {
        self.wire.map_or(self.combine.dtype.size(), Form::size)
    }

    /// What bytes of ranks are between nodes.
    pub(super) fn travelling(&self, bytes: u64) -> u64 {
        bytes / self.combine.dtype.size() as u64 * self.grain() as u64
    }

    /// Calls `act(segment, first byte of ranks within it, bytes as they travel)` for each part of a
    /// range of bytes as they travel.
    pub(super) fn parts_of(
        &self,
        range: Range<usize>,
        mut act: impl FnMut(&PieceSegment, u64, Range<usize>),
    ) {
        let element = self.combine.dtype.size() as u64;
        let ranks = |at: usize| (at / self.grain()) as u64 * element;
        let (start, end) = (ranks(range.start), ranks(range.end));
        let first = self.segments.partition_point(|s| s.start + s.bytes <= start);
        for segment in self.segments[first..].iter().take_while(|s| s.start < end) {
            let from = start.max(segment.start);
            let to = end.min(segment.start + segment.bytes);
            if from < to {
                let travelling = |at: u64| self.travelling(at) as usize;
                act(segment, from - segment.start, travelling(from)..travelling(to));
            }
        }
    }

    /// Reduces and publishes without any staging: for a piece that concerns no other node. It is
    /// done in parts that fit the cache and is never interrupted, so INPUT holds.
    pub(crate) fn run_alone(&self, chunk: u64, store: Store) {
        for segment in &self.segments {
            // What has just been read is in the cache: writing past it would only throw it out.
            let store = if segment.is_in_place() { Store::Cached } else { store };
            let mut at = 0;
            while at < segment.bytes {
                let bytes = chunk.min(segment.bytes - at);
                memory::reduce_and_publish(
                    self.combine,
                    self.prescale,
                    &self.finish,
                    &segment.sources(at),
                    &segment.targets(at),
                    bytes,
                    store,
                );
                at += bytes;
            }
        }
    }
}

/// A piece that has been started and waits for its peers.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) piece: Piece,
    pub(crate) progress: Progress,
    pub(crate) last_progress: Instant,
    staging: Staging,
    /// Steps before this one have no local reduction left to do.
    next_local: u32,
}

impl Running {
    /// Starts a piece with a buffer that was another's.
    pub(crate) fn new(piece: Piece, buffer: Vec<u8>) -> Self {
        let staging = Staging::new(&piece, buffer);
        let progress = Progress::new(&piece.plan);
        Self { piece, progress, last_progress: Instant::now(), staging, next_local: 0 }
    }

    /// Gives the piece and its buffer back.
    pub(crate) fn into_parts(self) -> (Piece, Vec<u8>) {
        (self.piece, self.staging.into_memory())
    }

    fn advance(&mut self, step: u32, offset: u64, bytes: u64) {
        self.progress.advance(&self.piece.plan, step, offset..offset + bytes);
        self.stirred();
    }

    /// Something has moved, even if it is only a part of a chunk: nobody has lost patience yet.
    pub(crate) fn stirred(&mut self) {
        self.last_progress = Instant::now();
    }

    /// How many bytes of a step's block from `offset` on may be worked on now, at most `limit`,
    /// given that whole chunks are wanted but for the end of the block.
    fn available(&self, step: u32, offset: u64, limit: u64) -> u64 {
        let planned = &self.piece.plan.steps[step as usize];
        let wanted = limit.min(planned.bytes - offset);
        let allowed = self.progress.allowed(&self.piece.plan, step);
        if allowed >= offset + wanted { wanted } else { 0 }
    }

    /// Hands the next chunk of a sending step out to a connection, as offset and length, if there is
    /// one; tell [`Running::sent`] when it has gone.
    pub(crate) fn hand_out(&mut self, step: u32, limit: u64) -> Option<(u64, u64)> {
        let offset = self.progress.begun(step).prefix();
        let bytes = self.available(step, offset, limit);
        if bytes == 0 {
            return None;
        }
        self.progress.begin(step, offset..offset + bytes);
        Some((offset, bytes))
    }

    /// Whether all of a sending step has been handed out.
    pub(crate) fn is_handed_out(&self, step: u32) -> bool {
        self.progress.begun(step).prefix() == self.piece.plan.steps[step as usize].bytes
    }

    fn range(&self, step: u32, offset: u64, bytes: u64) -> std::ops::Range<usize> {
        let start = self.piece.plan.steps[step as usize].start + offset;
        start as usize..(start + bytes) as usize
    }

    /// Does the next chunk of local reduction that others wait for. False when there is none.
    pub(crate) fn reduce_some(&mut self, chunk: u64) -> bool {
        let plan = self.piece.plan.clone();
        while let Some(planned) = plan.steps.get(self.next_local as usize) {
            let step = self.next_local;
            let left = planned.bytes - self.progress.done(step);
            if planned.work == (Work::Reduce { lazily: false }) && left > 0 {
                let offset = self.progress.done(step);
                let bytes = self.available(step, offset, chunk);
                if bytes == 0 {
                    return false;
                }
                self.reduce_local(step, offset, bytes, None);
                self.advance(step, offset, bytes);
                return true;
            }
            self.next_local += 1;
        }
        false
    }

    /// Reduces the local ranks' part of a step's block, with what was received of it, in one pass.
    fn reduce_local(&mut self, step: u32, offset: u64, bytes: u64, received: Option<&[u8]>) {
        let range = self.range(step, offset, bytes);
        let unrounded = self.piece.plan.steps[step as usize].unrounded;
        self.staging.reduce(&self.piece, range, received, unrounded);
    }

    /// Whether a receiving step keeps what it receives as it is.
    pub(crate) fn copies(&self, step: u32) -> bool {
        self.piece.plan.steps[step as usize].work == Work::Copy
    }

    /// Whether a receiving step may take these bytes of its block in now. Its own earlier bytes need
    /// not have come: no byte of a block depends on another one.
    pub(crate) fn takes(&self, step: u32, offset: u64, bytes: u64) -> bool {
        self.progress.allowed(&self.piece.plan, step) >= offset + bytes
    }

    /// Takes a received chunk in.
    pub(crate) fn take(&mut self, step: u32, offset: u64, received: &[u8]) {
        let plan = self.piece.plan.clone();
        let planned = &plan.steps[step as usize];
        let bytes = received.len() as u64;
        match (planned.fused, planned.work) {
            (Some(local), _) => {
                self.reduce_local(step, offset, bytes, Some(received));
                self.advance(local, offset, bytes);
            }
            (None, Work::Combine { theirs_first }) => {
                let range = self.range(step, offset, bytes);
                let unrounded = planned.unrounded;
                self.staging.combine(&self.piece, range, received, theirs_first, unrounded);
            }
            (None, _) => self.place(step, offset, bytes).copy_from_slice(received),
        }
        self.advance(step, offset, bytes);
    }

    /// Where a chunk of a copying step may be received at once; tell [`Running::placed`] when it has come.
    pub(crate) fn place(&mut self, step: u32, offset: u64, bytes: u64) -> &mut [u8] {
        let range = self.range(step, offset, bytes);
        self.staging.block_mut(range)
    }

    /// The bytes to send for a sending step; tell [`Running::sent`] when they have gone.
    pub(crate) fn outgoing(&self, step: u32, offset: u64, bytes: u64) -> &[u8] {
        self.staging.block(self.range(step, offset, bytes))
    }

    /// A chunk that was handed out has gone.
    pub(crate) fn sent(&mut self, step: u32, offset: u64, bytes: u64) {
        self.advance(step, offset, bytes);
    }

    /// A chunk has been received into its place.
    pub(crate) fn placed(&mut self, step: u32, offset: u64, bytes: u64) {
        self.advance(step, offset, bytes);
    }

    /// Hands the finished result to the local ranks (INPUT: only now).
    pub(crate) fn publish(&self, store: Store) {
        debug_assert!(self.progress.is_complete());
        self.staging.publish(&self.piece, store);
    }

    /// The nodes that it waits for: those from which something is yet to come, and those that
    /// something is ready for which has not gone. `chunk`: what is sent at once.
    pub(crate) fn waits_for(&self, chunk: u64) -> Vec<NodeId> {
        let plan = &self.piece.plan;
        let is_ready = |step: u32| {
            let begun = self.progress.begun(step).prefix();
            begun > self.progress.done(step) || self.available(step, begun, chunk) > 0
        };
        let is_unfinished = |step: u32| self.progress.done(step) < plan.steps[step as usize].bytes;
        let receives = plan.receivers().filter(|&(step, _)| is_unfinished(step));
        let sends = plan.senders().filter(|&(step, _)| is_unfinished(step) && is_ready(step));
        let mut nodes: Vec<NodeId> =
            receives.chain(sends).map(|(_, peer)| self.piece.nodes[peer as usize]).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }
}
