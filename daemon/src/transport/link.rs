//! One connection to a peer as its lane sees it: what is to be sent, and the frame that is being
//! read. Never blocks, never allocates for what the peer announces (TRUST, BOUND).

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    io::{ErrorKind, IoSlice, Read, Write},
};

use gradwire_proto::{NodeId, Sequence};
use mio::net::TcpStream;

use super::frame::{FrameError, HEADER_BYTES, Header};
use crate::executor::{piece::Running, plan::Work};

/// The pieces that a lane has started.
pub(crate) type Pieces = BTreeMap<Sequence, Running>;

/// Which operations a lane has heard of.
#[derive(Debug, Default)]
pub(crate) struct Ordered {
    last: Option<Sequence>,
    /// Those that will be started later than their turn.
    held: BTreeSet<Sequence>,
}

impl Ordered {
    pub(crate) fn start(&mut self, sequence: Sequence) {
        self.held.remove(&sequence);
        self.last = self.last.max(Some(sequence));
    }

    pub(crate) fn hold(&mut self, sequence: Sequence) {
        self.held.insert(sequence);
        self.last = self.last.max(Some(sequence));
    }

    /// Whether one that is not running here will be, for all that is known.
    fn may_come(&self, sequence: Sequence) -> bool {
        self.last.is_none_or(|last| sequence > last) || self.held.contains(&sequence)
    }
}

/// Why a link is of no use any more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error("the connection was closed")]
    Closed,
    #[error("the connection broke: {0}")]
    Io(#[from] std::io::Error),
    #[error("the peer sent nonsense: {0}")]
    Frame(#[from] FrameError),
    #[error("the peer sent message {message} of operation {sequence}, which expects none such")]
    Unexpected { sequence: u64, message: u32 },
    #[error(
        "the peer sent bytes {offset}+{length} of message {message} of operation {sequence}, \
         where {expected} of {block} were expected next"
    )]
    OutOfPlace { sequence: u64, message: u32, offset: u64, length: u32, expected: u64, block: u64 },
}

/// What a turn at a link came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Something was moved; another turn may move more.
    Moved,
    /// Nothing can be moved until the socket or a piece changes.
    Idle,
}

#[derive(Debug)]
struct Outgoing {
    header: [u8; HEADER_BYTES],
    header_sent: usize,
    sequence: Sequence,
    step: u32,
    offset: u64,
    length: u64,
    sent: u64,
}

#[derive(Debug)]
enum Incoming {
    Header {
        filled: usize,
    },
    /// A frame of a piece that may not have been started here yet.
    Waiting(Header),
    /// `direct`: into the piece's own memory; otherwise into the scratch buffer.
    Payload {
        header: Header,
        step: u32,
        filled: usize,
        direct: bool,
    },
}

/// A frame that came before its step may take it in: the block is still to be sent, or another
/// peer's part comes first. What is behind it on the connection must not wait for that, because
/// what it waits for may be there. It is held in memory of its own, which is bounded by what the
/// started pieces receive (BOUND).
#[derive(Debug)]
struct Held {
    sequence: Sequence,
    step: u32,
    offset: u64,
    payload: Vec<u8>,
}

/// What links need to know of their lane.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LinkConfig {
    pub(crate) epoch: u32,
    pub(crate) chunk: u64,
}

/// One connection to a peer, or the place of one that is still being made.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) peer: NodeId,
    pub(crate) stream: Option<TcpStream>,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    config: LinkConfig,
    queue: VecDeque<(Sequence, u32)>,
    outgoing: Option<Outgoing>,
    incoming: Incoming,
    header: [u8; HEADER_BYTES],
    scratch: Vec<u8>,
    held: VecDeque<Held>,
    /// Buffers of frames that are held no more.
    spare: Vec<Vec<u8>>,
    pub(crate) bytes_sent: u64,
    pub(crate) bytes_received: u64,
}

impl Link {
    pub(crate) fn new(peer: NodeId, config: LinkConfig) -> Self {
        Self {
            peer,
            stream: None,
            readable: false,
            writable: false,
            config,
            queue: VecDeque::new(),
            outgoing: None,
            incoming: Incoming::Header { filled: 0 },
            header: [0; HEADER_BYTES],
            scratch: Vec::new(),
            held: VecDeque::new(),
            spare: Vec::new(),
            bytes_sent: 0,
            bytes_received: 0,
        }
    }

    /// Takes a connection that has passed its handshake.
    pub(crate) fn connect(&mut self, stream: TcpStream) {
        self.stream = Some(stream);
        self.readable = true;
        self.writable = true;
    }

    /// A step of a started piece will send to this peer.
    pub(crate) fn enqueue(&mut self, sequence: Sequence, step: u32) {
        self.queue.push_back((sequence, step));
    }

    /// Sends what can be sent, at most one chunk.
    pub(crate) fn send(&mut self, pieces: &mut Pieces) -> Result<Turn, LinkError> {
        if !self.writable || self.stream.is_none() {
            return Ok(Turn::Idle);
        }
        if self.outgoing.is_none() {
            self.outgoing = self.next_chunk(pieces);
        }
        let (Some(out), Some(stream)) = (&mut self.outgoing, &mut self.stream) else {
            return Ok(Turn::Idle);
        };
        let piece = pieces.get_mut(&out.sequence).expect("a piece outlives its sends");
        while out.sent < out.length {
            let payload = piece.outgoing(out.step, out.offset + out.sent, out.length - out.sent);
            let parts = [IoSlice::new(&out.header[out.header_sent..]), IoSlice::new(payload)];
            match stream.write_vectored(&parts) {
                Ok(0) => return Err(LinkError::Closed),
                Ok(written) => {
                    let header = written.min(HEADER_BYTES - out.header_sent);
                    out.header_sent += header;
                    out.sent += (written - header) as u64;
                    self.bytes_sent += written as u64;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.writable = false;
                    return Ok(Turn::Idle);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        piece.moved(out.step, out.length);
        self.outgoing = None;
        Ok(Turn::Moved)
    }

    /// The first of the queue that has a chunk ready; of equals the oldest piece comes first.
    fn next_chunk(&mut self, pieces: &Pieces) -> Option<Outgoing> {
        let mut index = 0;
        while index < self.queue.len() {
            let (sequence, step) = self.queue[index];
            let piece = &pieces[&sequence];
            let planned = &piece.piece.plan.steps[step as usize];
            let offset = piece.progress.done(step);
            if offset == planned.bytes {
                self.queue.remove(index);
                continue;
            }
            let length = piece.available(step, self.config.chunk);
            let Work::Send { message, .. } = planned.work else {
                unreachable!("only sending steps are queued")
            };
            if length > 0 {
                if offset + length == planned.bytes {
                    self.queue.remove(index);
                }
                let header = Header {
                    sequence: sequence.0,
                    message,
                    offset,
                    length: length as u32,
                    epoch: self.config.epoch,
                }
                .encode();
                return Some(Outgoing {
                    header,
                    header_sent: 0,
                    sequence,
                    step,
                    offset,
                    length,
                    sent: 0,
                });
            }
            index += 1;
        }
        None
    }

    /// Receives what has come, at most one frame.
    pub(crate) fn receive(
        &mut self,
        pieces: &mut Pieces,
        ordered: &Ordered,
    ) -> Result<Turn, LinkError> {
        let took = self.take_held(pieces);
        loop {
            match self.incoming {
                Incoming::Header { filled } => {
                    let Some(read) = self.read_header(filled)? else { return Ok(took) };
                    self.incoming = if filled + read < HEADER_BYTES {
                        Incoming::Header { filled: filled + read }
                    } else {
                        Incoming::Waiting(Header::decode(&self.header, self.config.epoch)?)
                    };
                }
                Incoming::Waiting(header) => {
                    let Some(step) = self.admit(&header, pieces, ordered)? else {
                        return Ok(took);
                    };
                    let piece = Self::piece(pieces, Sequence(header.sequence));
                    let length = u64::from(header.length);
                    piece.progress.receive(step, length);
                    let direct = piece.copies(step) && piece.takes(step, header.offset, length);
                    self.incoming = Incoming::Payload { header, step, filled: 0, direct };
                }
                Incoming::Payload { header, step, filled, direct } => {
                    let piece = Self::piece(pieces, Sequence(header.sequence));
                    return self.read_payload(piece, header, step, filled, direct);
                }
            }
        }
    }

    fn piece(pieces: &mut Pieces, sequence: Sequence) -> &mut Running {
        pieces.get_mut(&sequence).expect("a piece outlives its receives")
    }

    /// Frames that were held and can be taken in now.
    fn take_held(&mut self, pieces: &mut Pieces) -> Turn {
        let mut turn = Turn::Idle;
        let mut index = 0;
        while let Some(held) = self.held.get(index) {
            let piece = Self::piece(pieces, held.sequence);
            if piece.takes(held.step, held.offset, held.payload.len() as u64) {
                piece.take(held.step, held.offset, &held.payload);
                self.spare.extend(self.held.remove(index).map(|held| held.payload));
                turn = Turn::Moved;
            } else {
                index += 1;
            }
        }
        turn
    }

    /// Reads into `target`; None when nothing is there yet.
    fn read(
        stream: &mut Option<TcpStream>,
        readable: &mut bool,
        target: &mut [u8],
    ) -> Result<Option<usize>, LinkError> {
        let Some(stream) = stream.as_mut().filter(|_| *readable) else { return Ok(None) };
        loop {
            match stream.read(target) {
                Ok(0) => return Err(LinkError::Closed),
                Ok(read) => return Ok(Some(read)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    *readable = false;
                    return Ok(None);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn read_header(&mut self, filled: usize) -> Result<Option<usize>, LinkError> {
        Self::read(&mut self.stream, &mut self.readable, &mut self.header[filled..])
    }

    /// The step that a frame is for. A frame of a piece that has not been started here waits, and
    /// with it what is behind it on this connection: the start is on its way from the coordinator,
    /// or waits for a rank to make room, and neither waits for data. So no wait goes in a circle
    /// (ORD).
    fn admit(
        &self,
        header: &Header,
        pieces: &Pieces,
        ordered: &Ordered,
    ) -> Result<Option<u32>, LinkError> {
        let Header { sequence, message, offset, length, .. } = *header;
        let Some(piece) = pieces.get(&Sequence(sequence)) else {
            let unexpected = LinkError::Unexpected { sequence, message };
            return if ordered.may_come(Sequence(sequence)) { Ok(None) } else { Err(unexpected) };
        };
        let participant = piece.piece.nodes.iter().position(|node| *node == self.peer);
        let step = participant
            .and_then(|peer| piece.piece.plan.receiving(peer as u32, message))
            .ok_or(LinkError::Unexpected { sequence, message })?;
        let block = piece.piece.plan.steps[step as usize].bytes;
        let expected = piece.progress.received(step);
        let element = piece.piece.combine.dtype.size() as u32;
        let fits = offset == expected
            && u64::from(length) <= block - expected
            && length.is_multiple_of(element);
        if !fits {
            return Err(LinkError::OutOfPlace {
                sequence,
                message,
                offset,
                length,
                expected,
                block,
            });
        }
        Ok(Some(step))
    }

    fn read_payload(
        &mut self,
        piece: &mut Running,
        header: Header,
        step: u32,
        filled: usize,
        direct: bool,
    ) -> Result<Turn, LinkError> {
        let length = header.length as usize;
        let target = if direct {
            &mut piece.place(step, header.offset, length as u64)[filled..]
        } else {
            if self.scratch.len() < length {
                self.scratch.resize(length, 0);
            }
            &mut self.scratch[filled..length]
        };
        let Some(read) = Self::read(&mut self.stream, &mut self.readable, target)? else {
            return Ok(Turn::Idle);
        };
        self.bytes_received += read as u64;
        if direct {
            piece.moved(step, read as u64);
        }
        let filled = filled + read;
        if filled < length {
            self.incoming = Incoming::Payload { header, step, filled, direct };
            return Ok(Turn::Moved);
        }
        self.incoming = Incoming::Header { filled: 0 };
        if !direct {
            let Header { sequence, offset, .. } = header;
            if piece.takes(step, offset, length as u64) {
                piece.take(step, offset, &self.scratch[..length]);
            } else {
                let next = self.spare.pop().unwrap_or_default();
                let mut payload = std::mem::replace(&mut self.scratch, next);
                payload.truncate(length);
                self.held.push_back(Held { sequence: Sequence(sequence), step, offset, payload });
            }
        }
        Ok(Turn::Moved)
    }
}
