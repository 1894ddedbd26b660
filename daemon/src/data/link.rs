//! The connections to one peer as their lane sees them: the chunks to send, which the connections
//! share, and the frames that arrive too early.
//!
//! The next chunk goes to any connection that can send it, so a slow one does not delay the others.
//! A frame states where its bytes belong. This code never blocks, and never allocates what the peer
//! announces (TRUST, BOUND).

use std::{collections::VecDeque, sync::Arc, time::Instant};

use gradwire_proto::{NodeId, Sequence};

use super::{
    meter::{Doing, Meter},
    plan::Work,
    running::{Ordered, Pieces, Running},
    stall::Activity,
};
use crate::{
    metrics::Share,
    transport::{
        frame::{Header, MIN_PAYLOAD, Notice, Totals},
        paths::DataSocket,
        stream::{Chunk, OutgoingFrame, Sink, Source, Stream, StreamError, Target, Turn},
        window::Window,
    },
};

/// Why a link can't be used any more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error(transparent)]
    Stream(#[from] StreamError),
    #[error("the peer says that it waits for node {0}, and there is none of that number")]
    NoNode(NodeId),
    #[error("the connection broke, and bytes were lost: {written} were sent, {read} have come")]
    Lost { written: u64, read: u64 },
    #[error("the peer sent message {message} of operation {sequence}, which expects none such")]
    Unexpected { sequence: u64, message: u32 },
    #[error(
        "the peer sent bytes {offset}+{length} of message {message} of operation {sequence}, \
         a block of {block} bytes: not whole elements of it that had not come before, or too few"
    )]
    OutOfPlace { sequence: u64, message: u32, offset: u64, length: u32, block: u64 },
}

impl LinkError {
    /// Whether the connection ended, and the peer has not sent anything wrong.
    pub(crate) fn is_end(&self) -> bool {
        matches!(self, Self::Stream(StreamError::Closed | StreamError::Io(_)))
    }
}

/// A frame that arrived before its step may receive it: the block is still to be sent, or another
/// peer's part comes first. The frames behind it on the connection must not wait for that, because
/// the needed one may be among them. It is held in memory of its own (BOUND): no byte of a started
/// piece comes twice, a frame has a minimum size, and no buffer is more than twice as large as its
/// frame.
#[derive(Debug)]
struct Held {
    sequence: Sequence,
    step: u32,
    offset: u64,
    payload: Vec<u8>,
}

/// The most bytes that a link keeps in buffers for reuse.
const MAX_SPARE: usize = 16 << 20;

/// Cuts a frame's buffer to its payload, and returns memory that is far too much.
fn fitted(mut buffer: Vec<u8>, length: usize) -> Vec<u8> {
    buffer.truncate(length);
    if buffer.capacity() > 2 * length {
        buffer.shrink_to_fit();
    }
    buffer
}

/// What links need to know of their lane.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LinkConfig {
    pub(crate) epoch: u32,
    pub(crate) chunk: u64,
    /// How many nodes there are.
    pub(crate) nodes: u32,
}

/// What a link knows of the frames that its peer sends.
#[derive(Debug)]
struct Inbound {
    peer: NodeId,
    activity: Activity,
    nodes: u32,
    held: VecDeque<Held>,
    /// Buffers of frames that are no longer held, and their size in bytes.
    spare: Vec<Vec<u8>>,
    spare_bytes: usize,
    /// What the metrics show of these frames and of their memory.
    held_frames: Share,
    memory: Share,
    /// The smallest payload of a frame that does not end its block.
    least: u64,
}

/// The started piece of a frame that was admitted.
fn piece_of(pieces: &mut Pieces, sequence: Sequence) -> &mut Running {
    pieces.get_mut(&sequence).expect("a piece outlives its transfers")
}

/// Sends the frames of the pieces of a lane.
struct Departures<'a> {
    peer: NodeId,
    pieces: &'a mut Pieces,
    meter: &'a mut Meter,
}

impl Source for Departures<'_> {
    fn payload(&self, chunk: &Chunk, from: u64) -> &[u8] {
        let piece = self.pieces.get(&Sequence(chunk.header.sequence));
        let piece = piece.expect("a piece outlives its transfers");
        let length = u64::from(chunk.header.length) - from;
        piece.outgoing(chunk.step, chunk.header.offset + from, length)
    }

    fn progressed(&mut self, chunk: &Chunk) {
        let sequence = Sequence(chunk.header.sequence);
        let now = self.meter.spent_on(Doing::Send, sequence, 0, Some(self.peer));
        piece_of(self.pieces, sequence).mark_progress(now);
    }

    fn sent(&mut self, chunk: &Chunk) {
        let Header { sequence, offset, length, .. } = chunk.header;
        let sequence = Sequence(sequence);
        let now = self.meter.spent_on(Doing::Send, sequence, length.into(), Some(self.peer));
        piece_of(self.pieces, sequence).sent(chunk.step, offset, length.into(), now);
    }
}

/// Receives the frames of one link for the pieces of its lane.
struct Arrivals<'a> {
    inbound: &'a mut Inbound,
    pieces: &'a mut Pieces,
    ordered: &'a Ordered,
    meter: &'a mut Meter,
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
    /// connection. The start is on its way from the coordinator, which does not wait for data. So
    /// no wait goes in a circle (ORD).
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
            && (u64::from(length) >= self.inbound.least || planned.breaks_at(bytes.end))
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
            piece.take(target.step, header.offset, &payload[..length], self.meter);
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
    /// Receives held frames whose step may receive them now.
    fn take_held(&mut self, pieces: &mut Pieces, meter: &mut Meter) -> Turn {
        let mut turn = Turn::Idle;
        let mut index = 0;
        while let Some(held) = self.held.get(index) {
            let piece = piece_of(pieces, held.sequence);
            if piece.takes(held.step, held.offset, held.payload.len() as u64) {
                piece.take(held.step, held.offset, &held.payload, meter);
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

/// The slot of a connection, which may be empty.
#[derive(Debug, Default)]
struct Slot {
    stream: Option<Stream>,
    /// The number of the dialler's attempt that made it.
    attempt: u32,
    /// The counts of the earlier connections.
    totals: Totals,
    /// The frame that a broken connection has not sent.
    unsent: Option<OutgoingFrame>,
}

impl Slot {
    /// Ends the connection, if there is one. Returns false if a frame was under way.
    fn end(&mut self) -> bool {
        let Some(stream) = self.stream.take() else { return true };
        self.totals = stream.totals();
        let between = stream.end();
        let is_between = between.is_some();
        self.unsent = between.flatten();
        is_between
    }
}

/// A connection that can't be used any more.
#[derive(Debug)]
pub(crate) struct Broken {
    /// Its number among the lane's connections with the peer.
    pub(crate) number: u32,
    pub(crate) error: LinkError,
}

/// The connections to a peer, or the slots of those that are not made yet.
#[derive(Debug)]
pub(crate) struct Link {
    config: LinkConfig,
    slots: Vec<Slot>,
    /// Which connection gets the next chunk first: the one after the last that got one.
    first: usize,
    queue: VecDeque<(Sequence, u32)>,
    inbound: Inbound,
    /// Whether anything was sent since the last notice.
    has_sent: bool,
    /// What the metrics have counted.
    counted: Totals,
}

impl Link {
    pub(crate) fn new(peer: NodeId, config: LinkConfig) -> Self {
        Self {
            config,
            slots: Vec::new(),
            first: 0,
            queue: VecDeque::new(),
            inbound: Inbound {
                peer,
                activity: Activity::new(Instant::now()),
                nodes: config.nodes,
                held: VecDeque::new(),
                spare: Vec::new(),
                spare_bytes: 0,
                held_frames: Share::of_held_frames(),
                memory: Share::of_memory("frames"),
                least: config.chunk.min(MIN_PAYLOAD),
            },
            has_sent: false,
            counted: Totals::default(),
        }
    }

    pub(crate) fn peer(&self) -> NodeId {
        self.inbound.peer
    }

    /// The activity on this link.
    pub(crate) fn activity(&self) -> Activity {
        self.inbound.activity
    }

    fn streams(&mut self) -> impl Iterator<Item = &mut Stream> {
        self.slots.iter_mut().filter_map(|slot| slot.stream.as_mut())
    }

    /// Whether there is any connection.
    pub(crate) fn is_connected(&self) -> bool {
        self.slots.iter().any(|slot| slot.stream.is_some())
    }

    /// Prepares the slot of a connection that has passed its handshake. What the earlier connection
    /// has received is handled first. `theirs` are the peer's counts for that one, if this node has
    /// to compare them. Returns false if a later attempt has been made already.
    ///
    /// # Errors
    /// [`LinkError`] if something was under way on the earlier connection when it broke.
    pub(super) fn prepare(
        &mut self,
        number: u32,
        attempt: u32,
        theirs: Option<Totals>,
        pieces: &mut Pieces,
        ordered: &Ordered,
        meter: &mut Meter,
    ) -> Result<bool, LinkError> {
        let index = number as usize;
        if self.slots.len() <= index {
            self.slots.resize_with(index + 1, Slot::default);
        }
        let slot = &mut self.slots[index];
        if attempt < slot.attempt {
            return Ok(false);
        }
        slot.attempt = attempt;
        if let Some(stream) = &mut slot.stream {
            stream.is_replaced();
            let mut arrivals = Arrivals { inbound: &mut self.inbound, pieces, ordered, meter };
            let mut receive = || stream.receive(&mut arrivals, self.config.epoch);
            let end = loop {
                match receive() {
                    Ok(Turn::Moved) => {}
                    Ok(Turn::Idle) => break None,
                    Err(error) => break Some(error),
                }
            };
            if let Some(error) = end.filter(|error| !error.is_end()) {
                return Err(error);
            }
        }
        let is_between = slot.end();
        let ours = slot.totals;
        if let Some(theirs) = theirs {
            for (written, read) in [(theirs.written, ours.read), (ours.written, theirs.read)] {
                if written != read || !is_between {
                    return Err(LinkError::Lost { written, read });
                }
            }
        }
        Ok(true)
    }

    /// Puts a connection into its prepared slot.
    pub(crate) fn connect(&mut self, number: u32, socket: Arc<DataSocket>, window: Option<Window>) {
        let slot = &mut self.slots[number as usize];
        slot.stream = Some(Stream::new(socket, window, slot.totals, slot.unsent.take()));
    }

    /// Ends a connection that broke. Returns its counts, if no frame was under way.
    pub(crate) fn disconnect(&mut self, number: u32) -> Option<Totals> {
        let slot = &mut self.slots[number as usize];
        slot.end().then_some(slot.totals)
    }

    /// One of the connections.
    pub(crate) fn stream(&mut self, number: u32) -> Option<&mut Stream> {
        self.slots.get_mut(number as usize)?.stream.as_mut()
    }

    /// Bytes sent and received since the last call, on all connections that there were.
    pub(crate) fn take_moved(&mut self) -> Totals {
        let of = |slot: &Slot| slot.stream.as_ref().map_or(slot.totals, Stream::totals);
        let now = self.slots.iter().map(of).fold(Totals::default(), |sum, one| Totals {
            written: sum.written + one.written,
            read: sum.read + one.read,
        });
        let before = std::mem::replace(&mut self.counted, now);
        Totals { written: now.written - before.written, read: now.read - before.read }
    }

    /// Checks what the peer's system has acknowledged. A frame that waits for a piece to start here
    /// counts as moving. If this process `was_suspended`, everything does.
    pub(crate) fn look(&mut self, now: Instant, was_suspended: bool) {
        let mut has_moved = was_suspended;
        for stream in self.streams() {
            has_moved |= stream.has_been_acknowledged() || stream.is_held();
        }
        if has_moved {
            self.inbound.activity.moved(now);
        }
    }

    /// Sends the peer a notice, unless data was sent since the last one.
    pub(crate) fn give_notice(&mut self, notice: Notice) {
        if std::mem::take(&mut self.has_sent) {
            return;
        }
        let epoch = self.config.epoch;
        if let Some(stream) = self.streams().find(|stream| stream.writable && stream.is_free()) {
            stream.carry(OutgoingFrame::bare(notice.encode(epoch)));
        }
    }

    /// Notes that a step of a started piece will send to this peer.
    pub(crate) fn enqueue(&mut self, sequence: Sequence, step: u32) {
        self.queue.push_back((sequence, step));
    }

    /// Sends what is ready, at most one chunk on each connection.
    pub(super) fn send(&mut self, pieces: &mut Pieces, meter: &mut Meter) -> Turn {
        let (mut turn, count) = (Turn::Idle, self.slots.len());
        let (first, peer) = (self.first, self.peer());
        for index in (0..count).map(|i| (first + i) % count) {
            let stream = self.slots[index].stream.as_mut();
            let Some(stream) = stream.filter(|s| s.writable) else { continue };
            if stream.is_free() {
                let Some(chunk) = next_chunk(&mut self.queue, self.config, pieces) else {
                    continue;
                };
                stream.carry(chunk);
                self.first = (index + 1) % count;
                self.has_sent = true;
            }
            turn = turn.or(stream.send(&mut Departures { peer, pieces, meter }));
        }
        turn
    }

    /// Receives what has arrived, at most one frame on each connection.
    pub(super) fn receive(
        &mut self,
        pieces: &mut Pieces,
        ordered: &Ordered,
        meter: &mut Meter,
    ) -> Result<Turn, Broken> {
        let mut turn = self.inbound.take_held(pieces, meter);
        for (number, slot) in (0..).zip(&mut self.slots) {
            let Some(stream) = &mut slot.stream else { continue };
            let inbound = &mut self.inbound;
            let mut arrivals = Arrivals { inbound, pieces, ordered, meter };
            let received = stream.receive(&mut arrivals, self.config.epoch);
            turn = turn.or(received.map_err(|error| Broken { number, error })?);
        }
        Ok(turn)
    }
}

/// The first item of the queue that has a chunk ready. The oldest piece comes first.
fn next_chunk(
    queue: &mut VecDeque<(Sequence, u32)>,
    config: LinkConfig,
    pieces: &mut Pieces,
) -> Option<OutgoingFrame> {
    let mut index = 0;
    while index < queue.len() {
        let (sequence, step) = queue[index];
        let piece = piece_of(pieces, sequence);
        let chunk = piece.hand_out(step, config.chunk);
        if piece.is_handed_out(step) {
            queue.remove(index);
        } else {
            index += 1;
        }
        let Some((offset, length)) = chunk else { continue };
        let Work::Send { message, .. } = piece.piece.plan.steps[step as usize].work else {
            unreachable!("only sending steps are queued")
        };
        let header = Header {
            sequence: sequence.0,
            message,
            offset,
            length: length as u32,
            epoch: config.epoch,
        };
        return Some(OutgoingFrame::chunk(Chunk { header, step }));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// BOUND: the memory of earlier large frames is not kept for small frames that are held.
    #[test]
    fn what_is_held_takes_about_its_size() {
        for (was, length) in [(4 << 20, 4096), (262_144, 262_144), (262_144, 200_000), (8192, 1)] {
            let held = fitted(vec![7; was], length);
            assert_eq!(held, vec![7; length]);
            assert!(held.capacity() <= 2 * length, "{} for {length}", held.capacity());
        }
    }
}
