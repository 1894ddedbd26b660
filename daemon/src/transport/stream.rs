//! One connection: the frame that is being sent on it, and the frame that is being received.
//!
//! It makes as few system calls as possible: a header is sent with its payload, and received with
//! the end of the previous payload. A call that moves less than requested shows that the socket is
//! full or empty, so it is not tried again before the next event.

use std::{
    io::{self, ErrorKind, IoSliceMut, Read},
    sync::Arc,
    time::Instant,
};

use gradwire_net::Bytes;
use mio::{event::Event, net::TcpStream};
use socket2::SockRef;

use super::{
    frame::{Frame, FrameError, HEADER_BYTES, Header, Notice, Totals},
    paths::DataSocket,
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

/// A chunk of data in a frame, and the step that it belongs to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Chunk {
    pub(crate) header: Header,
    pub(crate) step: u32,
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

#[derive(Debug)]
pub(crate) struct OutgoingFrame {
    header: [u8; HEADER_BYTES],
    header_sent: usize,
    /// The data after the header, and how many of its bytes were sent. A notice has no data.
    payload: Option<(Chunk, u64)>,
}

impl OutgoingFrame {
    pub(crate) fn chunk(chunk: Chunk) -> Self {
        Self { header: chunk.header.encode(), header_sent: 0, payload: Some((chunk, 0)) }
    }

    /// A frame with only a header.
    pub(crate) fn bare(header: [u8; HEADER_BYTES]) -> Self {
        Self { header, header_sent: 0, payload: None }
    }
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

#[derive(Debug)]
pub(crate) struct Stream {
    socket: Arc<DataSocket>,
    readable: bool,
    pub(crate) writable: bool,
    /// The peer will send no more. The data that has arrived must be read to its end without
    /// further events of the socket.
    closing: bool,
    /// Why nothing can be sent any more. Data that had arrived can still be read.
    broken: Option<io::Error>,
    outgoing: Option<OutgoingFrame>,
    incoming: Incoming,
    header: [u8; HEADER_BYTES],
    scratch: Vec<u8>,
    /// The size of the send buffer, if the daemon chooses it.
    window: Option<Window>,
    /// The counts, including those of the connections that this one replaces.
    totals: Totals,
    /// How many bytes had been written after the last chunk.
    chunks_end: u64,
    /// How many of these bytes the peer's system had acknowledged at the last check.
    acknowledged: u64,
}

impl Stream {
    /// A connection that has passed its handshake. Its send buffer has the size of `window` and
    /// grows as far as the path needs it; without `window` it is not changed. `totals` are the
    /// counts of the earlier connections, which have left `unsent`.
    pub(crate) fn new(
        socket: Arc<DataSocket>,
        window: Option<Window>,
        totals: Totals,
        unsent: Option<OutgoingFrame>,
    ) -> Self {
        Self {
            socket,
            window,
            totals,
            chunks_end: totals.written,
            acknowledged: totals.written,
            readable: true,
            writable: true,
            closing: false,
            broken: None,
            outgoing: unsent,
            incoming: Incoming::Header { filled: 0 },
            header: [0; HEADER_BYTES],
            scratch: Vec::new(),
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

    fn socket(&self) -> &TcpStream {
        &self.socket.socket
    }

    /// The bytes that it and the earlier connections have carried.
    pub(crate) fn totals(&self) -> Totals {
        self.totals
    }

    /// Ends the connection. Returns the frame that has not been started yet, if there is one; the
    /// outer `None` if a frame is in flight in either direction.
    pub(crate) fn end(self) -> Option<Option<OutgoingFrame>> {
        let has_begun = |out: &OutgoingFrame| out.header_sent > 0;
        let between = matches!(self.incoming, Incoming::Header { filled: 0 })
            && !self.outgoing.as_ref().is_some_and(has_begun);
        between.then_some(self.outgoing)
    }

    /// Whether a received frame waits to be admitted.
    pub(crate) fn is_held(&self) -> bool {
        matches!(self.incoming, Incoming::Waiting(_))
    }

    /// Whether the peer's system has acknowledged more of the pieces' data since the last check.
    /// Notices don't count, because the system of a stopped peer also acknowledges them.
    pub(crate) fn has_been_acknowledged(&mut self) -> bool {
        if self.acknowledged == self.chunks_end {
            return false;
        }
        let Ok(missing) = gradwire_net::unacknowledged(self.socket()) else { return false };
        let acknowledged = self.totals.written.saturating_sub(missing).min(self.chunks_end);
        let more = acknowledged > self.acknowledged;
        self.acknowledged = self.acknowledged.max(acknowledged);
        more
    }

    /// The peer has replaced this connection. Data that has arrived is read to its end.
    pub(crate) fn is_replaced(&mut self) {
        self.breaks(ErrorKind::ConnectionReset.into());
    }

    /// Whether it can take a frame to send.
    pub(crate) fn is_free(&self) -> bool {
        self.outgoing.is_none()
    }

    /// Takes a frame to send.
    pub(crate) fn carry(&mut self, frame: OutgoingFrame) {
        debug_assert!(self.is_free());
        self.outgoing = Some(frame);
    }

    /// Sends its frame as far as possible. If the connection broke, this is reported once all data
    /// that had arrived is read.
    pub(crate) fn send(&mut self, source: &mut impl Source) -> Turn {
        let Some(out) = &mut self.outgoing else { return Turn::Idle };
        let header = &out.header[out.header_sent..];
        let payload = out.payload.as_ref();
        let nothing = Bytes::from(&[][..]);
        let payload = payload.map_or(nothing, |(chunk, sent)| source.payload(chunk, *sent));
        let wanted = header.len() + payload.len();
        let written = match gradwire_net::send(&self.socket.socket, header, payload) {
            Ok(written) => written,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.writable = false;
                return Turn::Idle;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => return Turn::Moved,
            Err(error) => {
                self.breaks(error);
                return Turn::Moved;
            }
        };
        let of_header = written.min(header.len());
        out.header_sent += of_header;
        self.totals.written += written as u64;
        self.writable = written == wanted;
        if let Some(window) = &mut self.window
            && let Some(size) = window.moved(written, Instant::now())
            && !grow(&SockRef::from(&self.socket.socket), size)
        {
            window.settle();
        }
        if let Some((chunk, sent)) = &mut out.payload {
            *sent += (written - of_header) as u64;
            self.chunks_end = self.totals.written;
            if self.writable {
                source.sent(chunk);
            } else {
                source.progressed(chunk);
            }
        }
        if self.writable {
            self.outgoing = None;
        }
        Turn::Moved
    }

    /// Receives data that has arrived, at most to the end of one frame.
    pub(crate) fn receive<S: Sink>(&mut self, sink: &mut S, epoch: u32) -> Result<Turn, S::Error> {
        loop {
            match self.incoming {
                Incoming::Header { filled: HEADER_BYTES } => {
                    let frame = Frame::decode(&self.header, epoch).map_err(StreamError::from)?;
                    self.incoming = match frame {
                        Frame::Data(header) => Incoming::Waiting(header),
                        Frame::Notice(notice) => {
                            sink.notice(notice)?;
                            Incoming::Header { filled: 0 }
                        }
                    };
                }
                Incoming::Header { filled } => {
                    let mut parts = [IoSliceMut::new(&mut self.header[filled..])];
                    let wants = HEADER_BYTES - filled;
                    let read = read(
                        &self.socket.socket,
                        &mut self.readable,
                        self.closing,
                        &mut parts,
                        wants,
                    );
                    let Some(read) = read.map_err(|error| self.cause(error))? else {
                        return Ok(Turn::Idle);
                    };
                    self.totals.read += read as u64;
                    self.incoming = Incoming::Header { filled: filled + read };
                }
                Incoming::Waiting(header) => {
                    let Some(target) = sink.admit(&header)? else {
                        let broken = self.broken.take().map(StreamError::Io);
                        return broken.map_or(Ok(Turn::Idle), |error| Err(error.into()));
                    };
                    self.incoming = Incoming::Payload { header, target, filled: 0 };
                }
                Incoming::Payload { header, target, filled } => {
                    return self.read_payload(sink, header, target, filled);
                }
            }
        }
    }

    fn read_payload<S: Sink>(
        &mut self,
        sink: &mut S,
        header: Header,
        target: Target,
        filled: usize,
    ) -> Result<Turn, S::Error> {
        let length = header.length as usize;
        let memory = if target.is_direct {
            &mut sink.memory(&header, target)[filled..]
        } else {
            if self.scratch.len() < length {
                self.scratch.resize(length, 0);
            }
            &mut self.scratch[filled..length]
        };
        // The next header has often arrived already, so it is read together with the payload.
        let wants = memory.len() + HEADER_BYTES;
        let mut parts = [IoSliceMut::new(memory), IoSliceMut::new(&mut self.header)];
        let read = read(&self.socket.socket, &mut self.readable, self.closing, &mut parts, wants);
        let Some(read) = read.map_err(|error| self.cause(error))? else {
            return Ok(Turn::Idle);
        };
        self.totals.read += read as u64;
        let next = (filled + read).saturating_sub(length);
        let is_whole = filled + read >= length;
        sink.progressed(&header, is_whole);
        if !is_whole {
            self.incoming = Incoming::Payload { header, target, filled: filled + read };
            return Ok(Turn::Moved);
        }
        self.incoming = Incoming::Header { filled: next };
        if target.is_direct {
            sink.placed(&header, target);
        } else {
            sink.take(&header, target, &mut self.scratch);
        }
        Ok(Turn::Moved)
    }

    /// Why the connection ended: the first error.
    fn cause(&mut self, error: StreamError) -> StreamError {
        self.broken.take().map_or(error, StreamError::Io)
    }
}

/// Requests a larger send buffer; the system reports twice its size. Returns false if the system
/// does not grant all of it, which only costs speed.
fn grow(socket: &SockRef<'_>, size: usize) -> bool {
    let granted = socket.set_send_buffer_size(size).and_then(|()| socket.send_buffer_size());
    granted.is_ok_and(|granted| granted >= 2 * size)
}

/// Reads into `parts`, which have room for `wants` bytes; `None` if no data is available.
fn read(
    mut socket: &TcpStream,
    readable: &mut bool,
    closing: bool,
    parts: &mut [IoSliceMut<'_>],
    wants: usize,
) -> Result<Option<usize>, StreamError> {
    while *readable {
        match socket.read_vectored(parts) {
            Ok(0) => return Err(StreamError::Closed),
            Ok(read) => {
                *readable = read == wants || closing;
                return Ok(Some(read));
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => *readable = false,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(None)
}
