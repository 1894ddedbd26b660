//! A lane's connections to one peer, and the queue of chunks that they share.
//!
//! The next chunk goes to any connection that can send it, so a slow one does not delay the others.
//! This code never blocks.

use std::{sync::Arc, time::Instant};

use gradwire_collectives::execution::{self, SendQueue, Work};
use gradwire_net::Bytes;
use gradwire_proto::{NodeId, Sequence};

use super::{
    arrivals::{Arrivals, Inbound, LinkError, piece_of},
    lateness::Activity,
    meter::{Doing, Meter},
    running::{Ordered, Pieces},
};
use crate::transport::{
    frame::{Header, Notice, Totals},
    paths::DataSocket,
    stream::{Chunk, OutgoingFrame, Source, Stream, Turn},
    window::Window,
};

/// The settings that a link gets from its lane.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LinkConfig {
    pub(crate) epoch: u32,
    pub(crate) chunk: u64,
    pub(crate) nodes: u32,
}

struct Departures<'a> {
    peer: NodeId,
    pieces: &'a mut Pieces,
    meter: &'a mut Meter,
}

impl Source for Departures<'_> {
    fn payload(&self, chunk: &Chunk, from: u64) -> Bytes<'_> {
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

/// The slot of a connection, which may be empty.
#[derive(Debug, Default)]
struct Slot {
    stream: Option<Stream>,
    /// The number of the dialler's attempt that made it.
    attempt: u32,
    /// The counts of the earlier connections.
    totals: Totals,
    /// The frame that a broken connection did not send.
    unsent: Option<OutgoingFrame>,
}

impl Slot {
    /// Ends the connection, if there is one. Returns false if a frame was in flight.
    fn end(&mut self) -> bool {
        let Some(stream) = self.stream.take() else { return true };
        self.totals = stream.totals();
        let between = stream.end();
        let is_between = between.is_some();
        self.unsent = between.flatten();
        is_between
    }
}

#[derive(Debug)]
pub(crate) struct Broken {
    /// Its number among the lane's connections with the peer.
    pub(crate) number: u32,
    pub(crate) error: LinkError,
}

/// The connections to a peer, or slots for those that do not exist yet.
#[derive(Debug)]
pub(crate) struct Link {
    config: LinkConfig,
    slots: Vec<Slot>,
    /// The connection that gets the next chunk first: the one after the last that got one.
    first: usize,
    queue: SendQueue,
    inbound: Inbound,
    /// Whether anything was sent since the last notice.
    has_sent: bool,
    /// The counts that the metrics include.
    counted: Totals,
}

impl Link {
    pub(crate) fn new(peer: NodeId, config: LinkConfig) -> Self {
        Self {
            config,
            slots: Vec::new(),
            first: 0,
            queue: SendQueue::default(),
            inbound: Inbound::new(peer, config.nodes, config.chunk),
            has_sent: false,
            counted: Totals::default(),
        }
    }

    pub(crate) fn peer(&self) -> NodeId {
        self.inbound.peer
    }

    pub(crate) fn activity(&self) -> Activity {
        self.inbound.activity
    }

    fn streams(&mut self) -> impl Iterator<Item = &mut Stream> {
        self.slots.iter_mut().filter_map(|slot| slot.stream.as_mut())
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.slots.iter().any(|slot| slot.stream.is_some())
    }

    /// Prepares the slot of a connection that has passed its handshake. First handles the data that
    /// the earlier connection has received. `theirs` are the peer's counts for the earlier
    /// connection, if this node must compare them. Returns false if a later attempt already has the
    /// slot.
    ///
    /// # Errors
    /// [`LinkError`] if a frame was in flight on the earlier connection when it broke.
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

    pub(crate) fn connect(&mut self, number: u32, socket: Arc<DataSocket>, window: Option<Window>) {
        let slot = &mut self.slots[number as usize];
        slot.stream = Some(Stream::new(socket, window, slot.totals, slot.unsent.take()));
    }

    /// Ends a connection that broke. Returns its counts, if no frame was in flight.
    pub(crate) fn disconnect(&mut self, number: u32) -> Option<Totals> {
        let slot = &mut self.slots[number as usize];
        slot.end().then_some(slot.totals)
    }

    pub(crate) fn stream(&mut self, number: u32) -> Option<&mut Stream> {
        self.slots.get_mut(number as usize)?.stream.as_mut()
    }

    /// Bytes sent and received since the last call, on all connections, past and present.
    pub(crate) fn take_moved(&mut self) -> Totals {
        let of = |slot: &Slot| slot.stream.as_ref().map_or(slot.totals, Stream::totals);
        let now = self.slots.iter().map(of).fold(Totals::default(), |sum, one| Totals {
            written: sum.written + one.written,
            read: sum.read + one.read,
        });
        let before = std::mem::replace(&mut self.counted, now);
        Totals { written: now.written - before.written, read: now.read - before.read }
    }

    /// Checks whether the peer's system has acknowledged data. A frame that waits for a piece to
    /// start here also counts as activity, and so does a suspension of this process
    /// (`was_suspended`).
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
        self.queue.push(sequence, step);
    }

    /// Sends ready data, at most one chunk on each connection.
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
                stream.carry(OutgoingFrame::chunk(chunk));
                self.first = (index + 1) % count;
                self.has_sent = true;
            }
            turn = turn.or(stream.send(&mut Departures { peer, pieces, meter }));
        }
        turn
    }

    /// Receives data that has arrived, at most one frame on each connection.
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

/// The next chunk of the queue, with its header.
fn next_chunk(queue: &mut SendQueue, config: LinkConfig, pieces: &mut Pieces) -> Option<Chunk> {
    let hand_out = |sequence, step| piece_of(pieces, sequence).hand_out(step, config.chunk);
    let (sequence, execution::Chunk { step, offset, bytes }) = queue.next_chunk(hand_out)?;
    let piece = piece_of(pieces, sequence);
    let Work::Send { message, .. } = piece.piece.plan.steps[step as usize].work else {
        unreachable!("only sending steps are queued")
    };
    let (sequence, length, epoch) = (sequence.0, bytes as u32, config.epoch);
    Some(Chunk { header: Header { sequence, message, offset, length, epoch }, step })
}
