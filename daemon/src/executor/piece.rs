//! One piece on its way through this node: the local ranks' inputs, the staging buffer in which
//! the result takes shape, and how far its schedule has come.
//!
//! The staging buffer is what keeps INPUT: nothing is written to a rank's output before every
//! other step of the piece has ended here, so a piece that is given up can be run again.

use std::{ops::Range, sync::Arc, time::Instant};

use gradwire_collectives::kernels::{Combine, Finish, Store};
use gradwire_proto::{NodeId, Sequence};

use super::plan::{Plan, Progress, Work};
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
    fn sources(&self, at: u64) -> Vec<Part<'_>> {
        let locals = &self.tensor.locals()[self.sources.clone()];
        locals.iter().map(|l| (l.input(self.part), self.source_offset + at)).collect()
    }

    /// The outputs from a byte of the segment on.
    fn targets(&self, at: u64) -> Vec<Part<'_>> {
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

    /// Calls `act(segment, first byte within it, first byte within the piece, bytes)` for each part
    /// of a range of the piece.
    fn parts_of(&self, start: u64, bytes: u64, mut act: impl FnMut(&PieceSegment, u64, u64, u64)) {
        let end = start + bytes;
        let first = self.segments.partition_point(|s| s.start + s.bytes <= start);
        for segment in self.segments[first..].iter().take_while(|s| s.start < end) {
            let from = start.max(segment.start);
            let to = end.min(segment.start + segment.bytes);
            if from < to {
                act(segment, from - segment.start, from, to - from);
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
    staging: Vec<u8>,
    /// Steps before this one have no local reduction left to do.
    next_local: u32,
}

impl Running {
    /// Starts a piece with a staging buffer of at least its size.
    pub(crate) fn new(piece: Piece, mut staging: Vec<u8>) -> Self {
        // It only grows: what is beyond the piece is left as it is, and costs nothing.
        if staging.len() < piece.bytes as usize {
            staging.resize(piece.bytes as usize, 0);
        }
        let progress = Progress::new(&piece.plan);
        Self { piece, progress, last_progress: Instant::now(), staging, next_local: 0 }
    }

    /// Gives the piece and its buffer back.
    pub(crate) fn into_parts(self) -> (Piece, Vec<u8>) {
        (self.piece, self.staging)
    }

    fn advance(&mut self, step: u32, bytes: u64) {
        self.progress.advance(&self.piece.plan, step, bytes);
        self.last_progress = Instant::now();
    }

    /// How many bytes of a step's block may be worked on next, at most `limit`, given that whole
    /// chunks are wanted but for the end of the block.
    pub(crate) fn available(&self, step: u32, limit: u64) -> u64 {
        let planned = &self.piece.plan.steps[step as usize];
        let done = self.progress.done(step);
        let wanted = limit.min(planned.bytes - done);
        let allowed = self.progress.allowed(&self.piece.plan, step);
        if allowed >= done + wanted { wanted } else { 0 }
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
                let bytes = self.available(step, chunk);
                if bytes == 0 {
                    return false;
                }
                self.reduce_local(planned.start + self.progress.done(step), bytes, None);
                self.advance(step, bytes);
                return true;
            }
            self.next_local += 1;
        }
        false
    }

    fn reduce_local(&mut self, start: u64, bytes: u64, received: Option<&[u8]>) {
        let (piece, staging) = (&self.piece, &mut self.staging);
        piece.parts_of(start, bytes, |segment, at, from, bytes| {
            let received =
                received.map(|all| &all[(from - start) as usize..(from - start + bytes) as usize]);
            let target = &mut staging[from as usize..(from + bytes) as usize];
            memory::reduce(piece.combine, piece.prescale, target, &segment.sources(at), received);
        });
    }

    /// Whether a receiving step keeps what it receives as it is.
    pub(crate) fn copies(&self, step: u32) -> bool {
        self.piece.plan.steps[step as usize].work == Work::Copy
    }

    /// Whether a receiving step may take these bytes of its block in now.
    pub(crate) fn takes(&self, step: u32, offset: u64, bytes: u64) -> bool {
        self.progress.done(step) == offset
            && self.progress.allowed(&self.piece.plan, step) >= offset + bytes
    }

    /// Takes a received chunk in, in the order of the block.
    pub(crate) fn take(&mut self, step: u32, offset: u64, received: &[u8]) {
        let plan = self.piece.plan.clone();
        let planned = &plan.steps[step as usize];
        let bytes = received.len() as u64;
        match (planned.fused, planned.work) {
            (Some(local), _) => {
                self.reduce_local(planned.start + offset, bytes, Some(received));
                self.advance(local, bytes);
            }
            (None, Work::Combine { theirs_first }) => {
                let range = self.range(step, offset, bytes);
                let target = &mut self.staging[range];
                memory::combine(self.piece.combine, target, received, theirs_first);
            }
            (None, _) => self.place(step, offset, bytes).copy_from_slice(received),
        }
        self.advance(step, bytes);
    }

    /// Where a chunk of a copying step may be received at once; tell [`Running::moved`] what has come.
    pub(crate) fn place(&mut self, step: u32, offset: u64, bytes: u64) -> &mut [u8] {
        let range = self.range(step, offset, bytes);
        &mut self.staging[range]
    }

    /// The bytes to send for a sending step; tell [`Running::moved`] what has gone.
    pub(crate) fn outgoing(&self, step: u32, offset: u64, bytes: u64) -> &[u8] {
        &self.staging[self.range(step, offset, bytes)]
    }

    /// Bytes were sent, or received into place.
    pub(crate) fn moved(&mut self, step: u32, bytes: u64) {
        self.advance(step, bytes);
    }

    /// Hands the finished result to the local ranks (INPUT: only now).
    pub(crate) fn publish(&self, store: Store) {
        debug_assert!(self.progress.is_complete());
        for segment in &self.piece.segments {
            // Who only sends, or adds to another node's result, has nothing to hand out.
            if segment.targets.is_empty() {
                continue;
            }
            let source =
                &self.staging[segment.start as usize..(segment.start + segment.bytes) as usize];
            memory::publish(&self.piece.finish, source, &segment.targets(0), store);
        }
    }

    /// The nodes that it still has to receive from or send to, for texts.
    pub(crate) fn waiting_for(&self) -> Vec<NodeId> {
        let plan = &self.piece.plan;
        let unfinished = |step: u32| {
            let planned = &plan.steps[step as usize];
            self.progress.done(step) < planned.bytes
        };
        let mut nodes: Vec<NodeId> = plan
            .receivers()
            .filter(|&(step, _)| unfinished(step))
            .map(|(_, peer)| self.piece.nodes[peer as usize])
            .collect();
        if nodes.is_empty() {
            nodes = plan
                .senders()
                .filter(|&(step, _)| unfinished(step))
                .map(|(_, peer)| self.piece.nodes[peer as usize])
                .collect();
        }
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }
}
