//! One connection: the chunk that is being sent on it, and the frame that is being read.
//!
//! As few system calls as the bytes allow: a header leaves with its payload, and arrives with the
//! end of the payload before it. A call that moves less than it was asked to has found out that the
//! socket is full or empty, so it is not asked again before it says so.

use std::{
    io::{ErrorKind, IoSlice, IoSliceMut, Read, Write},
    time::Instant,
};

use gradwire_proto::Sequence;
use mio::{event::Event, net::TcpStream};
use socket2::SockRef;

use super::{
    frame::{HEADER_BYTES, Header},
    link::{Inbound, LinkError, Ordered, Pieces, Turn},
    window::Window,
};

/// A chunk on its way out.
#[derive(Debug)]
pub(crate) struct Outgoing {
    header: [u8; HEADER_BYTES],
    header_sent: usize,
    sequence: Sequence,
    step: u32,
    offset: u64,
    length: u64,
    sent: u64,
}

impl Outgoing {
    pub(crate) fn new(header: &Header, step: u32) -> Self {
        Self {
            header: header.encode(),
            header_sent: 0,
            sequence: Sequence(header.sequence),
            step,
            offset: header.offset,
            length: header.length.into(),
            sent: 0,
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Incoming {
    /// So many of the next header's bytes are there.
    Header { filled: usize },
    /// A frame of a piece that may not have been started here yet.
    Waiting(Header),
    /// `direct`: into the piece's own memory; otherwise into the scratch buffer.
    Payload { header: Header, step: u32, filled: usize, direct: bool },
}

/// One connection to a peer.
#[derive(Debug)]
pub(crate) struct Stream {
    socket: TcpStream,
    readable: bool,
    pub(crate) writable: bool,
    /// The peer will send no more: what is there has to be read to its end, for which the socket
    /// gives no further sign.
    closing: bool,
    outgoing: Option<Outgoing>,
    incoming: Incoming,
    header: [u8; HEADER_BYTES],
    scratch: Vec<u8>,
    /// The size of the socket's buffer for what goes out, where it is ours to choose.
    window: Option<Window>,
    sent: u64,
    received: u64,
}

impl Stream {
    /// A connection that has passed its handshake, with a buffer for what goes out like `window`, which
    /// grows as far as the path needs it; without it stays as it is.
    pub(crate) fn new(socket: TcpStream, window: Option<Window>) -> Self {
        Self {
            socket,
            window,
            readable: true,
            writable: true,
            closing: false,
            outgoing: None,
            incoming: Incoming::Header { filled: 0 },
            header: [0; HEADER_BYTES],
            scratch: Vec::new(),
            sent: 0,
            received: 0,
        }
    }

    /// The socket has changed.
    pub(crate) fn notice(&mut self, event: &Event) {
        self.closing |= event.is_read_closed() || event.is_error();
        self.readable |= event.is_readable() || self.closing;
        self.writable |= event.is_writable();
    }

    /// Bytes sent and received since the last call.
    pub(crate) fn take_moved(&mut self) -> (u64, u64) {
        (std::mem::take(&mut self.sent), std::mem::take(&mut self.received))
    }

    /// Whether it may be given a chunk to carry.
    pub(crate) fn is_free(&self) -> bool {
        self.outgoing.is_none()
    }

    /// Gives it a chunk to carry.
    pub(crate) fn carry(&mut self, chunk: Outgoing) {
        debug_assert!(self.is_free());
        self.outgoing = Some(chunk);
    }

    /// Sends what it carries, as far as it can.
    pub(crate) fn send(&mut self, pieces: &mut Pieces) -> Result<Turn, LinkError> {
        let Some(out) = &mut self.outgoing else { return Ok(Turn::Idle) };
        let piece = pieces.get_mut(&out.sequence).expect("a piece outlives its sends");
        let header = &out.header[out.header_sent..];
        let payload = piece.outgoing(out.step, out.offset + out.sent, out.length - out.sent);
        let wanted = header.len() + payload.len();
        let parts = [IoSlice::new(header), IoSlice::new(payload)];
        let written = match self.socket.write_vectored(&parts) {
            Ok(0) => return Err(LinkError::Closed),
            Ok(written) => written,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.writable = false;
                return Ok(Turn::Idle);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(Turn::Moved),
            Err(error) => return Err(error.into()),
        };
        let of_header = written.min(header.len());
        out.header_sent += of_header;
        out.sent += (written - of_header) as u64;
        self.sent += written as u64;
        self.writable = written == wanted;
        if let Some(window) = &mut self.window
            && let Some(size) = window.moved(written, Instant::now())
            && !grow(&SockRef::from(&self.socket), size)
        {
            window.settle();
        }
        if self.writable {
            piece.sent(out.step, out.offset, out.length);
            self.outgoing = None;
        } else {
            piece.stirred();
        }
        Ok(Turn::Moved)
    }

    /// Receives what has come, at most to the end of one frame.
    pub(crate) fn receive(
        &mut self,
        inbound: &mut Inbound,
        pieces: &mut Pieces,
        ordered: &Ordered,
        epoch: u32,
    ) -> Result<Turn, LinkError> {
        loop {
            match self.incoming {
                Incoming::Header { filled: HEADER_BYTES } => {
                    self.incoming = Incoming::Waiting(Header::decode(&self.header, epoch)?);
                }
                Incoming::Header { filled } => {
                    let mut parts = [IoSliceMut::new(&mut self.header[filled..])];
                    let wants = HEADER_BYTES - filled;
                    let Some(read) = read(
                        &mut self.socket,
                        &mut self.readable,
                        self.closing,
                        &mut parts,
                        wants,
                    )?
                    else {
                        return Ok(Turn::Idle);
                    };
                    self.incoming = Incoming::Header { filled: filled + read };
                }
                Incoming::Waiting(header) => {
                    let Some(step) = inbound.admit(&header, pieces, ordered)? else {
                        return Ok(Turn::Idle);
                    };
                    let piece = Inbound::piece(pieces, Sequence(header.sequence));
                    let direct = piece.copies(step)
                        && piece.takes(step, header.offset, header.length.into());
                    self.incoming = Incoming::Payload { header, step, filled: 0, direct };
                }
                Incoming::Payload { header, step, filled, direct } => {
                    return self.read_payload(inbound, pieces, header, step, filled, direct);
                }
            }
        }
    }

    fn read_payload(
        &mut self,
        inbound: &mut Inbound,
        pieces: &mut Pieces,
        header: Header,
        step: u32,
        filled: usize,
        direct: bool,
    ) -> Result<Turn, LinkError> {
        let piece = Inbound::piece(pieces, Sequence(header.sequence));
        let length = header.length as usize;
        let target = if direct {
            &mut piece.place(step, header.offset, length as u64)[filled..]
        } else {
            if self.scratch.len() < length {
                self.scratch.resize(length, 0);
            }
            &mut self.scratch[filled..length]
        };
        // The next header, which is often there already, comes with it.
        let wants = target.len() + HEADER_BYTES;
        let mut parts = [IoSliceMut::new(target), IoSliceMut::new(&mut self.header)];
        let Some(read) =
            read(&mut self.socket, &mut self.readable, self.closing, &mut parts, wants)?
        else {
            return Ok(Turn::Idle);
        };
        let next = (filled + read).saturating_sub(length);
        self.received += (read - next) as u64;
        if filled + read < length {
            self.incoming = Incoming::Payload { header, step, filled: filled + read, direct };
            piece.stirred();
            return Ok(Turn::Moved);
        }
        self.incoming = Incoming::Header { filled: next };
        if direct {
            piece.placed(step, header.offset, length as u64);
        } else {
            inbound.take(piece, &header, step, &mut self.scratch);
        }
        Ok(Turn::Moved)
    }
}

/// Asks for a larger buffer for what goes out, which the system then reports as twice as large. False
/// when it does not give all of it: that is a matter of speed alone, and no failure.
fn grow(socket: &SockRef<'_>, size: usize) -> bool {
    let granted = socket.set_send_buffer_size(size).and_then(|()| socket.send_buffer_size());
    granted.is_ok_and(|granted| granted >= 2 * size)
}

/// Reads into `parts`, which have room for `wants` bytes; None when nothing is there.
fn read(
    socket: &mut TcpStream,
    readable: &mut bool,
    closing: bool,
    parts: &mut [IoSliceMut<'_>],
    wants: usize,
) -> Result<Option<usize>, LinkError> {
    while *readable {
        match socket.read_vectored(parts) {
            Ok(0) => return Err(LinkError::Closed),
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
