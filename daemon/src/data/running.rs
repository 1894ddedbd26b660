//! A piece in flight on this node: the staging buffer in which the result is computed, and the
//! progress of its schedule.
//!
//! The staging buffer ensures INPUT: nothing is written to a rank's output before every other step
//! of the piece has ended here. So an aborted piece could be run again.

use std::{collections::BTreeMap, ops::Range, time::Instant};

use gradwire_collectives::execution::{Chunk, HandedOut, Progress, StepPart, Work};
use gradwire_kernels::Store;
use gradwire_net::Bytes;
use gradwire_proto::{NodeId, Sequence};

use super::{
    meter::{Doing, Meter},
    piece::Piece,
    pool::Pool,
    staging::{Helpers, Staging},
    unconfirmed::Unconfirmed,
};
use crate::{model::memory, transport::sent::Chunk as Sent};

/// The pieces that a lane has started.
pub(crate) type Pieces = BTreeMap<Sequence, Running>;

/// With helpers, a lane reduces this many chunks before it looks at its sockets again. Together
/// they take about as long as it alone needs for one.
const CHUNKS_AT_ONCE: u64 = 4;

/// The position of a part of a step in the piece.
fn place(part: &StepPart) -> Range<usize> {
    part.start as usize..(part.start + part.bytes) as usize
}

/// Its position in a chunk that begins at `offset`.
fn within(part: &StepPart, offset: u64) -> Range<usize> {
    let start = (part.at - offset) as usize;
    start..start + part.bytes as usize
}

/// The operations that a lane has received.
#[derive(Debug, Default)]
pub(crate) struct Ordered {
    last: Option<Sequence>,
}

impl Ordered {
    pub(crate) fn start(&mut self, sequence: Sequence) {
        self.last = self.last.max(Some(sequence));
    }

    /// Whether an operation that is not running here may still start.
    pub(crate) fn may_come(&self, sequence: Sequence) -> bool {
        self.last.is_none_or(|last| sequence > last)
    }
}

/// A piece that has been started and waits for its peers.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) piece: Piece,
    pub(crate) progress: Progress,
    pub(crate) last_progress: Instant,
    /// Whether data has moved, and whether that was reported.
    has_begun: bool,
    is_reported: bool,
    staging: Staging,
    /// Whether each step sends inputs directly, without a copy in the buffer. Only for steps that
    /// are the only user of these values: so all nodes get the same bytes, even if a rank changes
    /// its input meanwhile (SAME).
    sends_input: Vec<bool>,
}

impl Running {
    pub(crate) fn new(piece: Piece, buffer: Vec<u8>) -> Self {
        let staging = Staging::new(&piece, buffer);
        let mut progress = Progress::new(&piece.plan);
        let mut sends_input = vec![false; piece.plan.steps.len()];
        for (step, reduction) in piece.plan.only_users() {
            let planned = &piece.plan.steps[step as usize];
            if planned.places().all(|place| piece.input(place).is_some()) {
                sends_input[step as usize] = true;
                progress.advance(&piece.plan, reduction, 0..planned.bytes);
            }
        }
        let (last_progress, has_begun, is_reported) = (Instant::now(), false, false);
        Self { piece, progress, last_progress, has_begun, is_reported, staging, sends_input }
    }

    pub(crate) fn into_parts(self) -> (Piece, Vec<u8>) {
        (self.piece, self.staging.into_memory())
    }

    fn advance(&mut self, step: u32, offset: u64, bytes: u64, now: Instant) {
        self.progress.advance(&self.piece.plan, step, offset..offset + bytes);
        self.mark_progress(now);
    }

    /// Data has moved, even if only a part of a chunk, so the piece is not late.
    pub(crate) fn mark_progress(&mut self, now: Instant) {
        self.last_progress = now;
        self.has_begun = true;
    }

    /// Whether the first byte has moved since the last call. True once.
    pub(crate) fn begins(&mut self) -> bool {
        self.has_begun && !std::mem::replace(&mut self.is_reported, self.has_begun)
    }

    /// The size of its buffer, in bytes.
    pub(crate) fn staging_bytes(&self) -> usize {
        self.staging.bytes()
    }

    /// The maximum size of its chunks; `usual` unless the coordinator has ordered another.
    fn chunk(&self, usual: u64) -> u64 {
        self.piece.chunk.unwrap_or(usual)
    }

    /// Gives a connection the next chunk of a sending step, if there is one. Call
    /// [`Running::sent`] when it has been sent.
    pub(crate) fn hand_out(&mut self, step: u32, usual: u64) -> HandedOut {
        let limit = self.chunk(usual);
        let Self { piece, progress, .. } = self;
        let chunk = progress.hand_out(&piece.plan, step, limit);
        HandedOut { chunk, is_all: progress.is_handed_out(&piece.plan, step) }
    }

    /// The position of a step's bytes in the piece, where they must be contiguous.
    fn range(&self, step: u32, offset: u64, bytes: u64) -> Range<usize> {
        let range = self.piece.plan.steps[step as usize].beginning(offset..offset + bytes);
        debug_assert_eq!(range.len() as u64, bytes, "step {step} at {offset} is not contiguous");
        range
    }

    /// Reduces the next local bytes that other steps wait for: a chunk, or with helpers a few.
    /// Returns false if there is none.
    pub(super) fn reduce_some(
        &mut self,
        usual: u64,
        pool: &Pool,
        meter: &mut Meter,
        unconfirmed: &mut Unconfirmed,
    ) -> bool {
        let chunk = self.chunk(usual);
        let at_once = if pool.has_helpers() { CHUNKS_AT_ONCE * chunk } else { chunk };
        let next = self.progress.next_local(&self.piece.plan, at_once);
        let Some(Chunk { step, offset, bytes }) = next else { return false };
        self.keep_before_write(unconfirmed, step, offset, bytes);
        self.reduce_local(step, offset, bytes, None, Some((pool, chunk)));
        let now = meter.spent_on(Doing::Reduce, self.piece.sequence, bytes, None);
        self.advance(step, offset, bytes, now);
        true
    }

    /// Reduces the local ranks' part of a step's bytes, in one pass with the received bytes.
    fn reduce_local(
        &mut self,
        step: u32,
        offset: u64,
        bytes: u64,
        received: Option<&[u8]>,
        helpers: Helpers<'_>,
    ) {
        let plan = &self.piece.plan;
        for part in plan.steps[step as usize].parts(offset..offset + bytes) {
            let received = received.map(|bytes| &bytes[within(&part, offset)]);
            self.staging.reduce(&self.piece, place(&part), received, part.unrounded, helpers);
        }
    }

    /// Whether a receiving step copies data without reducing it.
    pub(crate) fn copies(&self, step: u32) -> bool {
        self.piece.plan.steps[step as usize].work == Work::Copy
    }

    /// Whether a receiving step may process these bytes now. Its earlier bytes may be missing: no
    /// byte of the step depends on another one.
    pub(crate) fn takes(&self, step: u32, offset: u64, bytes: u64) -> bool {
        self.progress.takes(&self.piece.plan, step, offset, bytes)
    }

    /// Processes a received chunk.
    pub(super) fn take(
        &mut self,
        step: u32,
        offset: u64,
        received: &[u8],
        meter: &mut Meter,
        unconfirmed: &mut Unconfirmed,
    ) {
        let plan = self.piece.plan.clone();
        let planned = &plan.steps[step as usize];
        let bytes = received.len() as u64;
        self.keep_before_write(unconfirmed, step, offset, bytes);
        let sequence = self.piece.sequence;
        match (planned.fused, planned.work) {
            (Some(local), _) => {
                self.reduce_local(step, offset, bytes, Some(received), None);
                let now = meter.spent_on(Doing::Reduce, sequence, bytes, None);
                self.advance(local, offset, bytes, now);
            }
            (None, Work::Combine { theirs_first }) => {
                for part in planned.parts(offset..offset + bytes) {
                    let (range, received) = (place(&part), &received[within(&part, offset)]);
                    self.staging.combine(
                        &self.piece,
                        range,
                        received,
                        theirs_first,
                        part.unrounded,
                    );
                }
                meter.spent_on(Doing::Reduce, sequence, bytes, None);
            }
            (None, _) => {
                for part in planned.parts(offset..offset + bytes) {
                    let received = &received[within(&part, offset)];
                    self.staging.block_mut(place(&part)).copy_from_slice(received);
                }
                // The note of its arrival already names the sender.
                meter.spent(Doing::Receive);
            }
        }
        self.advance(step, offset, bytes, meter.last());
    }

    /// Whether a chunk of a receiving step is contiguous in the piece.
    pub(crate) fn is_in_one_place(&self, step: u32, offset: u64, bytes: u64) -> bool {
        let planned = &self.piece.plan.steps[step as usize];
        planned.beginning(offset..offset + bytes).len() as u64 == bytes
    }

    /// The memory into which a contiguous chunk of a copying step can be received directly. Call
    /// [`Running::placed`] when it has been received.
    pub(crate) fn place(&mut self, step: u32, offset: u64, bytes: u64) -> &mut [u8] {
        let range = self.range(step, offset, bytes);
        self.staging.block_mut(range)
    }

    /// The input that a sending step sends, unless it sends this range of the buffer.
    fn sent_input(&self, step: u32, range: &Range<usize>) -> Option<memory::Part<'_>> {
        self.sends_input[step as usize].then(|| self.piece.input(range.clone())).flatten()
    }

    /// The bytes that a sending step sends. Call [`Running::sent`] when they have been sent.
    pub(crate) fn outgoing(&self, step: u32, offset: u64, bytes: u64) -> Bytes<'_> {
        let range = self.range(step, offset, bytes);
        match self.sent_input(step, &range) {
            Some(input) => memory::outgoing(input, bytes),
            None => Bytes::from(self.staging.block(range)),
        }
    }

    /// A copy of what was sent as a chunk, from its byte `from` on.
    fn copy_of(&self, chunk: &Sent, from: u64) -> Vec<u8> {
        let bytes = u64::from(chunk.header.length) - from;
        let range = self.range(chunk.step, chunk.header.offset + from, bytes);
        match self.sent_input(chunk.step, &range) {
            Some(input) => memory::copy(input, bytes),
            None => self.staging.block(range).to_vec(),
        }
    }

    /// A step is about to write these bytes of its message to the staging buffer. Keeps what peers
    /// may lack of the bytes that were sent from there.
    pub(super) fn keep_before_write(
        &self,
        unconfirmed: &mut Unconfirmed,
        step: u32,
        offset: u64,
        bytes: u64,
    ) {
        if unconfirmed.remembers() && self.overwrites_sent(step) {
            self.keep(unconfirmed, |chunk| self.changes(chunk, step, offset..offset + bytes));
        }
    }

    /// The piece has ended, and its memory is about to belong to others. Keeps what peers may lack.
    pub(super) fn keep_before_end(&self, unconfirmed: &mut Unconfirmed) {
        if unconfirmed.remembers() {
            self.keep(unconfirmed, |_| true);
        }
    }

    fn keep(&self, unconfirmed: &mut Unconfirmed, which: impl Fn(&Sent) -> bool) {
        let sequence = self.piece.sequence.0;
        let peers = self.piece.plan.peers.iter().map(|&peer| self.piece.nodes[peer as usize]);
        let which = |chunk: &Sent| chunk.header.sequence == sequence && which(chunk);
        unconfirmed.keep(peers, which, |chunk, from| self.copy_of(chunk, from));
    }

    /// Whether a step may write to bytes of the buffer that an earlier step sends.
    fn overwrites_sent(&self, step: u32) -> bool {
        let steps = &self.piece.plan.steps;
        let step = &steps[step as usize];
        step.overwrites_sent
            || step.fused.is_some_and(|local| steps[local as usize].overwrites_sent)
    }

    /// Whether a step that writes these bytes of its message changes what was sent as a chunk.
    fn changes(&self, chunk: &Sent, step: u32, bytes: Range<u64>) -> bool {
        let sent = self.range(chunk.step, chunk.header.offset, chunk.header.length.into());
        let overlaps = |part: StepPart| {
            let written = place(&part);
            written.start < sent.end && sent.start < written.end
        };
        self.piece.plan.steps[step as usize].parts(bytes).any(overlaps)
            && self.sent_input(chunk.step, &sent).is_none()
    }

    /// A chunk that was handed out has been sent.
    pub(crate) fn sent(&mut self, step: u32, offset: u64, bytes: u64, now: Instant) {
        self.advance(step, offset, bytes, now);
    }

    /// A chunk has been received directly into the piece.
    pub(crate) fn placed(&mut self, step: u32, offset: u64, bytes: u64, now: Instant) {
        self.advance(step, offset, bytes, now);
    }

    /// Publishes the finished result to the local ranks (INPUT: only now).
    pub(crate) fn publish(&self, store: Store, pool: &Pool, chunk: u64) {
        debug_assert!(self.progress.is_complete());
        let Self { piece, staging, .. } = self;
        let (_, written) = piece.touched();
        let part = |part| staging.publish(piece, part, store);
        pool.run(piece.end(), piece.end() + written, chunk, &part);
        staging.put_errors(piece);
    }

    /// The nodes that the piece waits for: those that have not sent all their data, and those to
    /// which a ready chunk has not been sent. `usual` is the size of a chunk, unless another was
    /// ordered.
    pub(crate) fn waits_for(&self, usual: u64) -> Vec<NodeId> {
        let (plan, chunk) = (&self.piece.plan, self.chunk(usual));
        let is_ready = |step: u32| {
            let begun = self.progress.begun(step).prefix();
            begun > self.progress.done(step)
                || self.progress.available(plan, step, begun, chunk) > 0
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
