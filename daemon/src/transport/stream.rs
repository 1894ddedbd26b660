//! One connection: what is sent on it, and what is received.
//!
//! It may replace a broken one. What was received of a frame ([`Receiving`]) and the frames that
//! were sent ([`Sent`]) outlive connections, so both directions continue at the byte where they
//! ended. The dialler's Hello says what it has read; the acceptor's first bytes answer that, if the
//! dialler has sent anything before.
//!
//! It makes as few system calls as possible: a header is sent with its payload, and received with
//! the end of the previous payload. A call that moves less than requested shows that the socket is
//! full or empty, so it is not tried again before the next event.

use std::{
    io::{self, ErrorKind, IoSliceMut, Read},
    sync::Arc,
    time::{Duration, Instant},
};

use gradwire_net::Bytes;
use mio::{event::Event, net::TcpStream};
use socket2::SockRef;

use super::{
    frame::{self, Frame, FrameError, HEADER_BYTES, Header, Notice},
    paths::DataSocket,
    sent::{Chunk, Due, Payload, Sent},
    window::Window,
};

/// Why a connection can't be used any more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StreamError {
    #[error("the connection was closed")]
    Closed,
    #[error("the connection broke: {0}")]
    Io(#[from] io::Error),
    #[error("the peer sent invalid data: {0}")]
    Frame(#[from] FrameError),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Data was moved; another call may move more.
    Moved,
    /// Nothing can be moved until a socket or a piece changes.
    Idle,
}

impl Turn {
    pub(crate) fn or(self, other: Self) -> Self {
        if self == Self::Moved { self } else { other }
    }
}

pub(crate) trait Source {
    /// The bytes of a chunk, starting from its byte `from`.
    fn payload(&self, chunk: &Chunk, from: u64) -> Bytes<'_>;
    /// A part of a chunk has been written to the socket.
    fn progressed(&mut self, chunk: &Chunk);
    /// All of a chunk has been written to the socket.
    fn sent(&mut self, chunk: &Chunk);
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Target {
    pub(crate) step: u32,
    /// The payload is received into [`Sink::memory`]; otherwise into a buffer for [`Sink::take`].
    pub(crate) is_direct: bool,
}

pub(crate) trait Sink {
    type Error: From<StreamError>;
    fn notice(&mut self, notice: Notice) -> Result<(), Self::Error>;
    /// The destination of a frame's payload; `None` while the frame must wait.
    fn admit(&mut self, header: &Header) -> Result<Option<Target>, Self::Error>;
    /// The memory for the whole payload of a frame.
    fn memory(&mut self, header: &Header, target: Target) -> &mut [u8];
    /// Bytes of a frame were received; `is_whole` if they are the last.
    fn progressed(&mut self, header: &Header, is_whole: bool);
    /// A whole frame is in its memory.
    fn placed(&mut self, header: &Header, target: Target);
    /// A whole frame is in `payload`, which may be replaced by another buffer.
    fn take(&mut self, header: &Header, target: Target, payload: &mut Vec<u8>);
}

#[derive(Debug, Clone, Copy)]
enum Incoming {
    /// `filled` bytes of the next header were received.
    Header {
        filled: usize,
    },
    Waiting(Header),
    Payload {
        header: Header,
        target: Target,
        filled: usize,
    },
}

/// What was received on the successive connections of a slot.
#[derive(Debug)]
pub(crate) struct Receiving {
    incoming: Incoming,
    header: [u8; HEADER_BYTES],
    scratch: Vec<u8>,
    /// The bytes that were read.
    read: u64,
}

impl Default for Receiving {
    fn default() -> Self {
        let incoming = Incoming::Header { filled: 0 };
        Self { incoming, header: [0; HEADER_BYTES], scratch: Vec::new(), read: 0 }
    }
}

impl Receiving {
    /// The bytes that were read.
    pub(crate) fn read(&self) -> u64 {
        self.read
    }

    /// Whether a part of a frame was received.
    pub(crate) fn is_within_frame(&self) -> bool {
        !matches!(self.incoming, Incoming::Header { filled: 0 })
    }

    /// Whether a received frame waits to be admitted.
    pub(crate) fn is_held(&self) -> bool {
        matches!(self.incoming, Incoming::Waiting(_))
    }
}

/// The acceptor's count of received bytes, which precedes the frames of a connection.
#[derive(Debug)]
enum Count {
    /// It was sent, or received, or is not needed.
    Done,
    /// It is sent before anything else: its bytes, and how many of them were written.
    ToSend([u8; HEADER_BYTES], usize),
    /// It is received before anything else, and before anything is sent: the bytes so far.
    ToReceive([u8; HEADER_BYTES], usize),
}

/// What precedes the frames of a new connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Opening {
    /// Nothing.
    Frames,
    /// This side says first how many bytes it has read before, in this epoch.
    SaysRead(u64, u32),
    /// The other side says first how many bytes it has read before.
    HearsRead,
}

#[derive(Debug)]
pub(crate) struct Stream {
    socket: Arc<DataSocket>,
    readable: bool,
    writable: bool,
    /// The peer will send no more. The data that has arrived must be read to its end without
    /// further events of the socket.
    closing: bool,
    /// Why nothing can be sent any more. Data that had arrived can still be read.
    broken: Option<io::Error>,
    /// The size of the send buffer, if the daemon chooses it.
    window: Option<Window>,
    count: Count,
    /// How many bytes the peer's system had acknowledged at the last check.
    acknowledged: u64,
}

impl Stream {
    /// A connection that has passed its handshake, whose next byte to write has the position
    /// `written`. Its send buffer has the size of `window` and grows as far as the path needs it;
    /// without `window` it is not changed.
    pub(crate) fn new(
        socket: Arc<DataSocket>,
        window: Option<Window>,
        written: u64,
        opening: Opening,
    ) -> Self {
        Self {
            socket,
            window,
            acknowledged: written,
            readable: true,
            writable: true,
            closing: false,
            broken: None,
            count: match opening {
                Opening::Frames => Count::Done,
                Opening::SaysRead(read, epoch) => Count::ToSend(frame::encode_read(read, epoch), 0),
                Opening::HearsRead => Count::ToReceive([0; HEADER_BYTES], 0),
            },
        }
    }

    /// Handles an event of the socket.
    pub(crate) fn notice(&mut self, event: &Event) {
        self.closing |= event.is_read_closed();
        self.readable |= event.is_readable() || self.closing;
        self.writable |= event.is_writable() && self.broken.is_none();
        if event.is_error()
            && let Ok(Some(error)) = self.socket().take_error()
        {
            self.breaks(error);
        }
    }

    /// Nothing can be sent any more. Data that has arrived is read to its end.
    fn breaks(&mut self, error: io::Error) {
        self.broken.get_or_insert(error);
        self.writable = false;
        (self.closing, self.readable) = (true, true);
    }

    /// Gives it up if the peer's system has not answered for `limit`: something on the path may
    /// drop the packets of this connection, and pass those of another one.
    pub(crate) fn check_answers(&mut self, limit: Duration) {
        let silence = gradwire_net::unanswered(self.socket()).unwrap_or_default();
        if silence >= limit && self.broken.is_none() {
            let seconds = silence.as_secs_f64();
            let why = format!("the peer's system has not answered for {seconds:.1} s");
            self.breaks(io::Error::new(ErrorKind::TimedOut, why));
        }
    }

    /// Gives it up: one of the hosts does not have its address any more.
    pub(crate) fn leaves(&mut self) {
        self.breaks(io::Error::new(ErrorKind::AddrNotAvailable, "a host has got another address"));
    }

    /// Its socket, to ask what was acknowledged.
    pub(crate) fn data_socket(&self) -> Arc<DataSocket> {
        self.socket.clone()
    }

    fn socket(&self) -> &TcpStream {
        &self.socket.socket
    }

    /// Whether the peer's system has acknowledged more of the pieces' data since the last check.
    /// Notices don't count, because the system of a stopped peer also acknowledges them.
    pub(crate) fn has_been_acknowledged(&mut self, sent: &Sent) -> bool {
        let acknowledged = sent.arrived().min(sent.chunks_end());
        let more = acknowledged > self.acknowledged;
        self.acknowledged = self.acknowledged.max(acknowledged);
        more
    }

    /// The peer has replaced this connection. Data that has arrived is read to its end.
    pub(crate) fn is_replaced(&mut self) {
        self.breaks(ErrorKind::ConnectionReset.into());
    }

    /// Whether frames may be sent now.
    pub(crate) fn is_writable(&self) -> bool {
        self.writable && !matches!(self.count, Count::ToReceive(..))
    }

    /// Whether it must send its count first.
    pub(crate) fn must_speak(&self) -> bool {
        matches!(self.count, Count::ToSend(..))
    }

    /// Writes a part of a frame, or says with `None` that nothing can be written now.
    fn write(&mut self, header: &[u8], payload: Bytes<'_>) -> Option<usize> {
        let wanted = header.len() + payload.len();
        match gradwire_net::send(&self.socket.socket, header, payload) {
            Ok(written) => {
                self.writable = written == wanted;
                Some(written)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.writable = false;
                None
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => Some(0),
            Err(error) => {
                self.breaks(error);
                Some(0)
            }
        }
    }

    /// Sends the due frame as far as possible. If the connection broke, this is reported once all
    /// data that had arrived is read.
    pub(crate) fn send(&mut self, sent: &mut Sent, source: &mut impl Source) -> Turn {
        if let Count::ToSend(bytes, from) = self.count {
            let nothing = Bytes::from(&[][..]);
            let Some(written) = self.write(&bytes[from..], nothing) else { return Turn::Idle };
            let is_all = from + written == HEADER_BYTES;
            self.count = if is_all { Count::Done } else { Count::ToSend(bytes, from + written) };
            if !is_all {
                return Turn::Moved;
            }
        }
        let Some(Due { header, payload }) = sent.due() else { return Turn::Idle };
        let payload = match payload {
            Payload::None => Bytes::from(&[][..]),
            Payload::Piece(chunk, from) => source.payload(chunk, from),
            Payload::Kept(bytes) => Bytes::from(bytes),
        };
        let Some(written) = self.write(header, payload) else { return Turn::Idle };
        if let Some(window) = &mut self.window
            && let Some(size) = window.moved(written, Instant::now())
            && !grow(&SockRef::from(&self.socket.socket), size)
        {
            window.settle();
        }
        if let Some(news) = sent.wrote(written as u64) {
            if news.is_whole {
                source.sent(&news.chunk);
            } else {
                source.progressed(&news.chunk);
            }
        }
        Turn::Moved
    }

    /// Receives the peer's count, if it precedes the frames: how many bytes it has read before.
    ///
    /// # Errors
    /// As [`Stream::receive`].
    pub(crate) fn receive_count(&mut self, epoch: u32) -> Result<Option<u64>, StreamError> {
        let Count::ToReceive(mut bytes, filled) = self.count else { return Ok(None) };
        let mut parts = [IoSliceMut::new(&mut bytes[filled..])];
        let Some(read) = self.read(&mut parts, HEADER_BYTES - filled)? else { return Ok(None) };
        let filled = filled + read;
        self.count = Count::ToReceive(bytes, filled);
        if filled < HEADER_BYTES {
            return Ok(None);
        }
        let read = frame::decode_read(&bytes, epoch)?;
        self.count = Count::Done;
        Ok(Some(read))
    }

    /// Receives data that has arrived, at most to the end of one frame.
    ///
    /// # Errors
    /// If the peer has sent something invalid, or if the connection has ended and all data that had
    /// arrived was received.
    pub(crate) fn receive<S: Sink>(
        &mut self,
        receiving: &mut Receiving,
        sink: &mut S,
        epoch: u32,
    ) -> Result<Turn, S::Error> {
        if matches!(self.count, Count::ToReceive(..)) {
            return Ok(Turn::Idle);
        }
        loop {
            match receiving.incoming {
                Incoming::Header { filled: HEADER_BYTES } => {
                    let frame = Frame::decode(&receiving.header, epoch);
                    receiving.incoming = match frame.map_err(StreamError::from)? {
                        Frame::Data(header) => Incoming::Waiting(header),
                        Frame::Notice(notice) => {
                            sink.notice(notice)?;
                            Incoming::Header { filled: 0 }
                        }
                    };
                }
                Incoming::Header { filled } => {
                    let mut parts = [IoSliceMut::new(&mut receiving.header[filled..])];
                    let Some(read) = self.read(&mut parts, HEADER_BYTES - filled)? else {
                        return Ok(Turn::Idle);
                    };
                    receiving.read += read as u64;
                    receiving.incoming = Incoming::Header { filled: filled + read };
                }
                // The end of the connection is reported later, because data behind this frame may
                // have arrived, too.
                Incoming::Waiting(header) => {
                    let Some(target) = sink.admit(&header)? else { return Ok(Turn::Idle) };
                    receiving.incoming = Incoming::Payload { header, target, filled: 0 };
                }
                Incoming::Payload { header, target, filled } => {
                    return self.receive_payload(receiving, sink, header, target, filled);
                }
            }
        }
    }

    fn receive_payload<S: Sink>(
        &mut self,
        receiving: &mut Receiving,
        sink: &mut S,
        header: Header,
        target: Target,
        filled: usize,
    ) -> Result<Turn, S::Error> {
        let length = header.length as usize;
        let memory = if target.is_direct {
            &mut sink.memory(&header, target)[filled..]
        } else {
            if receiving.scratch.len() < length {
                receiving.scratch = vec![0; length];
            }
            &mut receiving.scratch[filled..length]
        };
        // The next header has often arrived already, so it is read together with the payload.
        let wants = memory.len() + HEADER_BYTES;
        let mut parts = [IoSliceMut::new(memory), IoSliceMut::new(&mut receiving.header)];
        let Some(read) = self.read(&mut parts, wants)? else { return Ok(Turn::Idle) };
        receiving.read += read as u64;
        let next = (filled + read).saturating_sub(length);
        let is_whole = filled + read >= length;
        sink.progressed(&header, is_whole);
        if !is_whole {
            receiving.incoming = Incoming::Payload { header, target, filled: filled + read };
            return Ok(Turn::Moved);
        }
        receiving.incoming = Incoming::Header { filled: next };
        if target.is_direct {
            sink.placed(&header, target);
        } else {
            sink.take(&header, target, &mut receiving.scratch);
        }
        Ok(Turn::Moved)
    }

    /// Reads into `parts`, which have room for `wants` bytes; `None` if no data is available.
    ///
    /// # Errors
    /// Why the connection ended: the first error.
    fn read(
        &mut self,
        parts: &mut [IoSliceMut<'_>],
        wants: usize,
    ) -> Result<Option<usize>, StreamError> {
        let error = loop {
            if !self.readable {
                return Ok(None);
            }
            match (&self.socket.socket).read_vectored(parts) {
                Ok(0) => break StreamError::Closed,
                Ok(read) => {
                    self.readable = read == wants || self.closing;
                    return Ok(Some(read));
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // A closed connection never returns this error, so the event was of an earlier
                // connection.
                Err(error) if error.kind() == ErrorKind::WouldBlock && self.broken.is_none() => {
                    (self.readable, self.closing) = (false, false);
                }
                Err(error) => break error.into(),
            }
        };
        Err(self.broken.take().map_or(error, StreamError::Io))
    }
}

/// Requests a larger send buffer; the system reports twice its size. Returns false if the system
/// does not grant all of it, which only costs speed.
fn grow(socket: &SockRef<'_>, size: usize) -> bool {
    let granted = socket.set_send_buffer_size(size).and_then(|()| socket.send_buffer_size());
    granted.is_ok_and(|granted| granted >= 2 * size)
}
