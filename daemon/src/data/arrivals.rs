//! The frames that arrive from one peer, including those that arrive too early.
//!
//! A frame states where its bytes belong. This code never blocks, and never allocates what the peer
//! announces (TRUST, BOUND).

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use gradwire_proto::{NodeId, Sequence};

use super::{
    lateness::Activity,
    meter::{Doing, Meter},
    running::{Ordered, Pieces, Running},
    unconfirmed::Unconfirmed,
};
use crate::{
    metrics::Share,
    transport::{
        frame::{Header, MIN_PAYLOAD, Notice},
        stream::{Sink, StreamError, Target, Turn},
    },
};

/// Why a link can't be used any more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error(transparent)]
    Stream(#[from] StreamError),
    #[error("the peer claims to wait for node {0}, which does not exist")]
    NoNode(NodeId),
    #[error("the connection broke, and bytes were lost: {written} were sent, {read} received")]
    Lost { written: u64, read: u64 },
    #[error("{cause}, and it was not made again within {} ms{between}", limit.as_millis())]
    NotReturned { cause: String, limit: Duration, between: String },
    #[error("the peer sent message {message} of operation {sequence}, which was not expected")]
    Unexpected { sequence: u64, message: u32 },
    #[error(
        "the peer sent bytes {offset}+{length} of message {message} of operation {sequence}, a \
         block of {block} bytes: these are not whole new elements of the block, or too few"
    )]
    OutOfPlace { sequence: u64, message: u32, offset: u64, length: u32, block: u64 },
}

impl LinkError {
    /// Whether the connection ended and the peer has not sent anything invalid.
    pub(crate) fn is_end(&self) -> bool {
        matches!(self, Self::Stream(StreamError::Closed | StreamError::Io(_)))
    }
}

/// A frame that arrived before its step may receive it: the block must be sent first, or another
/// peer's part comes first. The frames behind it on the connection must not wait for that, because
/// the needed one may be among them. So the frame is held in its own memory (BOUND): no byte of a
/// started piece arrives twice, a frame has a minimum size, and no buffer is more than twice as
/// large as its frame.
#[derive(Debug)]
struct Held {
    sequence: Sequence,
    step: u32,
    offset: u64,
    payload: Vec<u8>,
}

/// The limit of buffers that a link keeps for reuse, in bytes.
const MAX_SPARE: usize = 16 << 20;

/// Cuts a frame's buffer to its payload, and frees excess memory.
fn fitted(mut buffer: Vec<u8>, length: usize) -> Vec<u8> {
    buffer.truncate(length);
    if buffer.capacity() > 2 * length {
        buffer.shrink_to_fit();
    }
    buffer
}

/// The state of the frames that a link receives.
#[derive(Debug)]
pub(super) struct Inbound {
    pub(super) peer: NodeId,
    pub(super) activity: Activity,
    nodes: u32,
    held: VecDeque<Held>,
    /// Buffers of frames that are no longer held, and their size in bytes.
    spare: Vec<Vec<u8>>,
    spare_bytes: usize,
    /// The shares of these frames and of their memory in the metrics.
    held_frames: Share,
    memory: Share,
    /// The minimum payload of a frame that does not end its block.
    least: u64,
}

/// The started piece of a frame that was admitted.
pub(super) fn piece_of(pieces: &mut Pieces, sequence: Sequence) -> &mut Running {
    pieces.get_mut(&sequence).expect("a piece outlives its transfers")
}

/// Receives the frames of one link for the pieces of its lane.
pub(super) struct Arrivals<'a> {
    pub(super) inbound: &'a mut Inbound,
    pub(super) pieces: &'a mut Pieces,
    pub(super) ordered: &'a Ordered,
    pub(super) meter: &'a mut Meter,
    pub(super) unconfirmed: &'a mut Unconfirmed,
}

impl Arrivals<'_> {
    fn piece(&mut self, header: &Header) -> &mut Running {
        piece_of(self.pieces, Sequence(header.sequence))
    }
}

impl Sink for Arrivals<'_> {
    type Error = LinkError;

    fn notice(&mut self, notice: Notice) -> Result<(), LinkError> {
        if notice.root.0 >= self.inbound.nodes {
            return Err(LinkError::NoNode(notice.root));
        }
        self.inbound.activity.receive(notice, Instant::now());
        Ok(())
    }

    /// A frame of a piece that has not started here waits, and so do the frames behind it on its
    /// connection. The coordinator has sent the start, and does not wait for data, so waits never
    /// form a circle (ORD).
    fn admit(&mut self, header: &Header) -> Result<Option<Target>, LinkError> {
        let Header { sequence, message, offset, length, .. } = *header;
        let Some(piece) = self.pieces.get_mut(&Sequence(sequence)) else {
            let unexpected = LinkError::Unexpected { sequence, message };
            let may_come = self.ordered.may_come(Sequence(sequence));
            return if may_come { Ok(None) } else { Err(unexpected) };
        };
        let participant = piece.piece.nodes.iter().position(|node| *node == self.inbound.peer);
        let step = participant
            .and_then(|peer| piece.piece.plan.receiving(peer as u32, message))
            .ok_or(LinkError::Unexpected { sequence, message })?;
        let planned = &piece.piece.plan.steps[step as usize];
        let block = planned.bytes;
        let element = piece.piece.wire_element() as u64;
        let bytes = offset..offset.saturating_add(length.into());
        let fits = bytes.end <= block
            && (u64::from(length) >= self.inbound.least
                || piece.piece.plan.breaks_at(step, bytes.end))
            && offset.is_multiple_of(element)
            && bytes.end.is_multiple_of(element)
            && piece.progress.begun(step).accepts(bytes.clone());
        if !fits {
            return Err(LinkError::OutOfPlace { sequence, message, offset, length, block });
        }
        piece.progress.begin(step, bytes);
        let is_direct = piece.copies(step)
            && piece.takes(step, offset, length.into())
            && piece.is_in_one_place(step, offset, length.into());
        if is_direct {
            piece.keep_before_write(self.unconfirmed, step, offset, length.into());
        }
        Ok(Some(Target { step, is_direct }))
    }

    fn memory(&mut self, header: &Header, target: Target) -> &mut [u8] {
        self.piece(header).place(target.step, header.offset, header.length.into())
    }

    fn progressed(&mut self, header: &Header, is_whole: bool) {
        let sequence = Sequence(header.sequence);
        let bytes = if is_whole { header.length.into() } else { 0 };
        let peer = Some(self.inbound.peer);
        let now = self.meter.spent_on(Doing::Receive, sequence, bytes, peer);
        self.inbound.activity.moved(now);
        if !is_whole {
            self.piece(header).mark_progress(now);
        }
    }

    fn placed(&mut self, header: &Header, target: Target) {
        let now = self.meter.last();
        self.piece(header).placed(target.step, header.offset, header.length.into(), now);
    }

    fn take(&mut self, header: &Header, target: Target, payload: &mut Vec<u8>) {
        let length = header.length as usize;
        let piece = piece_of(self.pieces, Sequence(header.sequence));
        if piece.takes(target.step, header.offset, length as u64) {
            let payload = &payload[..length];
            piece.take(target.step, header.offset, payload, self.meter, self.unconfirmed);
            return;
        }
        let Inbound { held, spare, spare_bytes, held_frames, memory, .. } = &mut *self.inbound;
        let next = spare.pop().unwrap_or_default();
        *spare_bytes -= next.capacity();
        memory.remove(next.capacity());
        let payload = fitted(std::mem::replace(payload, next), length);
        memory.add(payload.capacity());
        held_frames.add(1);
        let sequence = Sequence(header.sequence);
        held.push_back(Held { sequence, step: target.step, offset: header.offset, payload });
    }
}

impl Inbound {
    pub(super) fn new(peer: NodeId, nodes: u32, chunk: u64) -> Self {
        Self {
            peer,
            activity: Activity::new(Instant::now()),
            nodes,
            held: VecDeque::new(),
            spare: Vec::new(),
            spare_bytes: 0,
            held_frames: Share::of_held_frames(),
            memory: Share::of_memory("frames"),
            least: chunk.min(MIN_PAYLOAD),
        }
    }

    /// Receives held frames whose step may receive them now.
    pub(super) fn take_held(
        &mut self,
        pieces: &mut Pieces,
        meter: &mut Meter,
        unconfirmed: &mut Unconfirmed,
    ) -> Turn {
        let mut turn = Turn::Idle;
        let mut index = 0;
        while let Some(held) = self.held.get(index) {
            let piece = piece_of(pieces, held.sequence);
            if piece.takes(held.step, held.offset, held.payload.len() as u64) {
                piece.take(held.step, held.offset, &held.payload, meter, unconfirmed);
                self.held_frames.remove(1);
                let buffer = self.held.remove(index).map(|held| held.payload).unwrap_or_default();
                if self.spare_bytes + buffer.capacity() <= MAX_SPARE {
                    self.spare_bytes += buffer.capacity();
                    self.spare.push(buffer);
                } else {
                    self.memory.remove(buffer.capacity());
                }
                turn = Turn::Moved;
            } else {
                index += 1;
            }
        }
        turn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// BOUND: a small frame does not hold the buffer of an earlier large frame.
    #[test]
    fn a_held_frame_takes_about_its_size() {
        for (was, length) in [(4 << 20, 4096), (262_144, 262_144), (262_144, 200_000), (8192, 1)] {
            let held = fitted(vec![7; was], length);
            assert_eq!(held, vec![7; length]);
            assert!(held.capacity() <= 2 * length, "{} for {length}", held.capacity());
        }
    }
}
