//! A lane's connections to one peer, and the queue of chunks that they share.
//!
//! The next chunk goes to any connection that can send it, so a slow one does not delay the others.
//! A connection that breaks is replaced by another one in its slot, which continues at the byte
//! where the earlier one ended, in both directions. This code never blocks.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use gradwire_collectives::execution::{self, SendQueue, Work};
use gradwire_net::Bytes;
use gradwire_proto::{NodeId, Sequence};
use mio::net::TcpStream;

use super::{
    arrivals::{Arrivals, Inbound, LinkError, piece_of},
    lateness::Activity,
    meter::{Doing, Meter},
    running::{Ordered, Pieces},
    unconfirmed::Unconfirmed,
};
use crate::transport::{
    frame::{Header, Notice, Totals},
    paths::DataSocket,
    sent::{Chunk, Impossible},
    stream::{Opening, Receiving, Source, Stream, Turn},
    window::Window,
};

/// A connection that ends sooner than this, and has moved nothing, does not count: a peer that
/// breaks every connection at once must not hold up the job for ever.
const BRIEF: Duration = Duration::from_secs(1);

/// The settings that a link gets from its lane.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LinkConfig {
    pub(crate) epoch: u32,
    pub(crate) chunk: u64,
    pub(crate) nodes: u32,
    /// How long a broken connection may be missing; `None` if a frame must not be interrupted.
    pub(crate) recovery: Option<Duration>,
}

/// The parts of a lane that its links work on.
pub(super) struct Desk<'a> {
    pub(super) pieces: &'a mut Pieces,
    pub(super) ordered: &'a Ordered,
    pub(super) meter: &'a mut Meter,
    pub(super) unconfirmed: &'a mut Unconfirmed,
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

/// A connection that replaces another one.
#[derive(Debug)]
struct Next {
    socket: Arc<DataSocket>,
    window: Option<Window>,
    /// The dialler's counts of the earlier connections, on the acceptor.
    theirs: Option<Totals>,
}

/// A connection that broke.
#[derive(Debug)]
struct Break {
    since: Instant,
    cause: String,
    /// The bytes that had moved by then.
    totals: Totals,
}

/// The slot of a connection, which may be empty.
#[derive(Debug, Default)]
struct Slot {
    stream: Option<Stream>,
    receiving: Receiving,
    /// The number of the dialler's attempt that made it.
    attempt: u32,
    /// When the connection was made.
    made: Option<Instant>,
    /// Its two addresses, if they could be read. One of several lines may be cut.
    between: String,
    /// The connections that follow once all that has arrived on this one is read. The dialler may
    /// have sent on any of them before it broke.
    next: VecDeque<Next>,
    /// The last connection that broke.
    broken: Option<Break>,
}

impl Slot {
    /// How long its connection has been missing.
    fn missing(&self, now: Instant) -> Option<Duration> {
        let broken = self.broken.as_ref().filter(|_| self.stream.is_none())?;
        Some(now.saturating_duration_since(broken.since))
    }
}

/// A connection that has replaced a broken one.
#[derive(Debug)]
pub(crate) struct Returned {
    /// Its number among the lane's connections with the peer.
    pub(crate) number: u32,
    /// Why the earlier one ended.
    pub(crate) cause: String,
    /// How long there was none.
    pub(crate) after: Duration,
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
    /// Connections that have replaced broken ones, for the report.
    returned: Vec<Returned>,
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
            returned: Vec::new(),
        }
    }

    pub(crate) fn peer(&self) -> NodeId {
        self.inbound.peer
    }

    pub(crate) fn activity(&self) -> Activity {
        self.inbound.activity
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.slots.iter().any(|slot| slot.stream.is_some())
    }

    /// Takes a connection that has passed its handshake. If the earlier one in its slot still
    /// exists, all that has arrived on that one is read first. `theirs` are the peer's counts for
    /// the earlier connections, on the acceptor. Returns false if a later attempt already has the
    /// slot.
    ///
    /// # Errors
    /// [`LinkError::Lost`] if it can't continue where the earlier one ended.
    pub(super) fn connect(
        &mut self,
        number: u32,
        attempt: u32,
        (socket, window): (Arc<DataSocket>, Option<Window>),
        theirs: Option<Totals>,
        unconfirmed: &mut Unconfirmed,
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
        slot.next.push_back(Next { socket, window, theirs });
        match &mut slot.stream {
            Some(stream) => stream.is_replaced(),
            None => self.establish(number, unconfirmed)?,
        }
        Ok(true)
    }

    /// Ends a connection. Establishes the next one, if it is already there.
    ///
    /// # Errors
    /// [`LinkError::Lost`] if that can't continue where this one ended.
    pub(super) fn disconnect(
        &mut self,
        Broken { number, error }: &Broken,
        now: Instant,
        unconfirmed: &mut Unconfirmed,
    ) -> Result<Ended, LinkError> {
        let slot = &mut self.slots[*number as usize];
        let line = unconfirmed.line(self.inbound.peer, *number as usize);
        // The system still knows what the peer had acknowledged.
        line.look();
        (slot.stream, line.socket) = (None, None);
        let totals = Totals { written: line.sent.written(), read: slot.receiving.read() };
        let is_between = !slot.receiving.is_within_frame() && !line.sent.is_within_frame();
        let made = slot.made.take();
        let was_brief = made.is_some_and(|made| now.saturating_duration_since(made) < BRIEF);
        match &slot.broken {
            Some(broken) if was_brief && broken.totals == totals => {}
            _ => slot.broken = Some(Break { since: now, cause: error.to_string(), totals }),
        }
        let is_replaced = !slot.next.is_empty();
        if is_replaced {
            self.establish(*number, unconfirmed)?;
        }
        Ok(Ended { totals, is_between, is_replaced })
    }

    /// Begins to use the next connection of a slot.
    fn establish(&mut self, number: u32, unconfirmed: &mut Unconfirmed) -> Result<(), LinkError> {
        let slot = &mut self.slots[number as usize];
        let Some(Next { socket, window, theirs }) = slot.next.pop_front() else { return Ok(()) };
        let line = unconfirmed.line(self.inbound.peer, number as usize);
        let (written, read) = (line.sent.written(), slot.receiving.read());
        let opening = match theirs {
            // The dialler has nothing to continue, so it can send at once.
            None if written == 0 => Opening::Frames,
            None => Opening::HearsRead,
            Some(theirs) => {
                let is_whole = theirs.written == read
                    && !slot.receiving.is_within_frame()
                    && !line.sent.is_within_frame();
                if theirs.written < read || self.config.recovery.is_none() && !is_whole {
                    return Err(LinkError::Lost { written: theirs.written, read });
                }
                line.sent.resume(theirs.read)?;
                match theirs.written {
                    0 => Opening::Frames,
                    _ => Opening::SaysRead(read, self.config.epoch),
                }
            }
        };
        if let (Ok(own), Ok(peer)) = (socket.socket.local_addr(), socket.socket.peer_addr()) {
            slot.between = format!(" between {} and {}", own.ip(), peer.ip());
        }
        // Until the count is heard, the socket says nothing about what was sent before.
        line.socket = (opening != Opening::HearsRead).then(|| socket.clone());
        let mut stream = Stream::new(socket, window, line.sent.written(), opening);
        if !slot.next.is_empty() {
            stream.is_replaced();
        }
        slot.stream = Some(stream);
        let now = Instant::now();
        slot.made = Some(now);
        if let Some(Break { since, cause, .. }) = &slot.broken {
            let after = now.saturating_duration_since(*since);
            self.returned.push(Returned { number, cause: cause.clone(), after });
        }
        Ok(())
    }

    /// The connections that have replaced broken ones since the last call.
    pub(crate) fn take_returned(&mut self) -> Vec<Returned> {
        std::mem::take(&mut self.returned)
    }

    /// Checks how long broken connections have been missing. Only time in which this link
    /// `is_needed` counts.
    ///
    /// # Errors
    /// [`LinkError::NotReturned`] if a needed one has been missing for longer than the setting
    /// allows, and `spare` for the dialler, which knows better why.
    pub(crate) fn check_missing(
        &mut self,
        now: Instant,
        spare: Duration,
        is_needed: bool,
    ) -> Result<(), LinkError> {
        let Some(limit) = self.config.recovery else { return Ok(()) };
        for slot in &mut self.slots {
            let missing = slot.missing(now);
            let Some(broken) = &mut slot.broken else { continue };
            if !is_needed {
                broken.since = now;
            } else if missing.is_some_and(|missing| missing > limit + spare) {
                let (cause, between) = (broken.cause.clone(), slot.between.clone());
                return Err(LinkError::NotReturned { cause, limit, between });
            }
        }
        Ok(())
    }

    pub(crate) fn stream(&mut self, number: u32) -> Option<&mut Stream> {
        self.slots.get_mut(number as usize)?.stream.as_mut()
    }

    /// Bytes sent and received since the last call, on all connections, past and present. Bytes
    /// that were sent again count again.
    pub(super) fn take_moved(&mut self, unconfirmed: &Unconfirmed) -> Totals {
        let read = self.slots.iter().map(|slot| slot.receiving.read()).sum();
        let now = Totals { written: unconfirmed.moved_to(self.peer()), read };
        let before = std::mem::replace(&mut self.counted, now);
        Totals { written: now.written - before.written, read: now.read - before.read }
    }

    /// Checks whether the peer's system has acknowledged data. A frame that waits for a piece to
    /// start here also counts as activity, and so does a connection that may return, and a
    /// suspension of this process (`was_suspended`).
    pub(super) fn look(
        &mut self,
        now: Instant,
        was_suspended: bool,
        unconfirmed: &mut Unconfirmed,
    ) {
        let (mut has_moved, limit) = (was_suspended, self.config.recovery.unwrap_or_default());
        for (number, slot) in self.slots.iter_mut().enumerate() {
            has_moved |= slot.missing(now).is_some_and(|missing| missing < limit);
            let Some(stream) = &mut slot.stream else { continue };
            let line = unconfirmed.line(self.inbound.peer, number);
            line.look();
            has_moved |= stream.has_been_acknowledged(&line.sent) || slot.receiving.is_held();
        }
        if has_moved {
            self.inbound.activity.moved(now);
        }
    }

    /// Gives up connections on which the peer's system has not answered for `limit`.
    pub(super) fn check_answers(&mut self, limit: Duration) {
        for stream in self.slots.iter_mut().filter_map(|slot| slot.stream.as_mut()) {
            stream.check_answers(limit);
        }
    }

    /// Gives up all connections except those that are kept.
    pub(super) fn keep(&mut self, is_kept: impl Fn(&TcpStream) -> bool) {
        for stream in self.slots.iter_mut().filter_map(|slot| slot.stream.as_mut()) {
            if !is_kept(&stream.data_socket().socket) {
                stream.leaves();
            }
        }
    }

    /// Sends the peer a notice, unless data was sent since the last one.
    pub(super) fn give_notice(&mut self, notice: Notice, unconfirmed: &mut Unconfirmed) {
        if std::mem::take(&mut self.has_sent) {
            return;
        }
        for (number, slot) in self.slots.iter().enumerate() {
            let sent = &mut unconfirmed.line(self.inbound.peer, number).sent;
            if slot.stream.as_ref().is_some_and(Stream::is_writable) && sent.is_free() {
                sent.carry(notice.encode(self.config.epoch), None);
                return;
            }
        }
    }

    /// Notes that a step of a started piece will send to this peer.
    pub(crate) fn enqueue(&mut self, sequence: Sequence, step: u32) {
        self.queue.push(sequence, step);
    }

    /// Sends ready data, at most one chunk on each connection.
    pub(super) fn send(&mut self, desk: &mut Desk<'_>) -> Turn {
        let Desk { pieces, meter, unconfirmed, .. } = desk;
        let (mut turn, count) = (Turn::Idle, self.slots.len());
        let (first, peer) = (self.first, self.peer());
        for index in (0..count).map(|i| (first + i) % count) {
            let stream = self.slots[index].stream.as_mut();
            let Some(stream) = stream.filter(|s| s.is_writable()) else { continue };
            let line = unconfirmed.line(peer, index);
            if line.sent.is_free() && !stream.must_speak() {
                let Some(chunk) = next_chunk(&mut self.queue, self.config, pieces) else {
                    continue;
                };
                line.sent.carry(chunk.header.encode(), Some(chunk));
                line.shorten();
                self.first = (index + 1) % count;
                self.has_sent = true;
            }
            turn = turn.or(stream.send(&mut line.sent, &mut Departures { peer, pieces, meter }));
        }
        turn
    }

    /// Receives data that has arrived, at most one frame on each connection.
    pub(super) fn receive(&mut self, desk: &mut Desk<'_>) -> Result<Turn, Broken> {
        let Desk { pieces, ordered, meter, unconfirmed } = desk;
        let (peer, epoch) = (self.peer(), self.config.epoch);
        let mut turn = self.inbound.take_held(pieces, meter, unconfirmed);
        for (number, slot) in (0..).zip(&mut self.slots) {
            let Some(stream) = &mut slot.stream else { continue };
            let broken = |error| Broken { number, error };
            match stream.receive_count(epoch) {
                Ok(None) => {}
                Ok(Some(read)) => {
                    let line = unconfirmed.line(peer, number as usize);
                    line.sent.resume(read).map_err(|error| broken(error.into()))?;
                    line.socket = Some(stream.data_socket());
                    turn = Turn::Moved;
                }
                Err(error) => return Err(broken(error.into())),
            }
            let inbound = &mut self.inbound;
            let mut arrivals = Arrivals { inbound, pieces, ordered, meter, unconfirmed };
            let received = stream.receive(&mut slot.receiving, &mut arrivals, epoch);
            turn = turn.or(received.map_err(broken)?);
        }
        Ok(turn)
    }
}

/// How a connection ended.
#[derive(Debug)]
pub(crate) struct Ended {
    /// The counts of this and the earlier connections.
    pub(crate) totals: Totals,
    /// Whether no frame was in flight.
    pub(crate) is_between: bool,
    /// Whether another one has already replaced it.
    pub(crate) is_replaced: bool,
}

impl From<Impossible> for LinkError {
    fn from(Impossible { written, read }: Impossible) -> Self {
        Self::Lost { written, read }
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
