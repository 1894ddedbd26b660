//! Frames and file descriptors over a Unix socket, by which memory is handed over.
//!
//! ```text
//!  u32 length, little endian, at most 1 MiB │ that many bytes
//!  └ up to 4 descriptors come with the first byte
//! ```
//!
//! Calls block, handle one frame at a time, and never read a byte past the frame. So descriptors
//! cannot get from one frame into the next. The stream's timeouts apply. Between frames a timeout
//! loses nothing. Within a frame, the read timeout applies to the whole rest, so a peer cannot hold
//! a thread by sending a byte now and then (WAIT). If the connection ends between two frames, that
//! is not an error; within a frame it is.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::Instant,
};

use rustix::{
    io::{Errno, retry_on_intr},
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags,
    },
};

/// The maximum length of a frame, in bytes without the length field.
pub const MAX_FRAME: usize = 1 << 20;

/// The maximum number of descriptors of one frame.
pub const MAX_FDS: usize = 4;

/// A received frame.
#[derive(Debug)]
pub struct Frame {
    /// Its bytes, without the length field.
    pub bytes: Vec<u8>,
    /// The descriptors that came with it, in order; closed on exec.
    pub fds: Vec<OwnedFd>,
}

/// Why no frame was received. After any error other than [`HandoverError::TimedOut`] the stream
/// must not be used any more.
#[derive(Debug, thiserror::Error)]
pub enum HandoverError {
    /// Nothing arrived within the stream's read timeout; nothing is lost.
    #[error("nothing was received within the read timeout")]
    TimedOut,
    /// The rest of a frame did not arrive within the stream's read timeout.
    #[error("the peer stopped sending within a frame: {got} of {needed} bytes had arrived")]
    Stalled {
        /// Bytes that arrived.
        got: usize,
        /// Bytes of this part of the frame.
        needed: usize,
    },
    /// The peer ended the connection within a frame.
    #[error("the connection ended within a frame: {got} of {needed} bytes had arrived")]
    Cut {
        /// Bytes that arrived.
        got: usize,
        /// Bytes of this part of the frame.
        needed: usize,
    },
    /// The announced length is more than allowed.
    #[error(
        "a frame of {bytes} bytes was announced, but at most {max} are allowed",
        max = MAX_FRAME
    )]
    TooLong {
        /// The announced length.
        bytes: u32,
    },
    /// More descriptors arrived than are allowed.
    #[error("more than {max} file descriptors arrived with a frame", max = MAX_FDS)]
    TooManyFds,
    /// The peer sent a descriptor that this process may not open: it has no fault in that.
    #[error("this process can't open any more descriptors (ulimit -n)")]
    NoDescriptor,
    /// The socket failed.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
}

/// Sends a frame and its descriptors.
///
/// # Errors
/// `InvalidInput` if the frame or the descriptors exceed the limits, otherwise the socket's error.
/// After an error other than `InvalidInput` part of the frame may have been sent: drop the stream.
pub fn send(stream: &UnixStream, frame: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    check(frame.len(), fds.len())?;
    let length = (frame.len() as u32).to_le_bytes();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds)); // there is room for MAX_FDS
    }
    let mut parts = [IoSlice::new(&length), IoSlice::new(frame)];
    let mut left: &mut [IoSlice<'_>] = &mut parts;
    while left.iter().any(|part| !part.is_empty()) {
        // Not retried as a whole: a signal after the first byte gives a count, not an error.
        let sent = retry_on_intr(|| {
            rustix::net::sendmsg(stream, left, &mut control, SendFlags::NOSIGNAL)
        })?;
        control.clear(); // the descriptors went with the first byte
        IoSlice::advance_slices(&mut left, sent);
    }
    Ok(())
}

fn check(bytes: usize, fds: usize) -> io::Result<()> {
    if bytes <= MAX_FRAME && fds <= MAX_FDS {
        return Ok(());
    }
    let text = format!(
        "a frame may have at most {MAX_FRAME} bytes and {MAX_FDS} file descriptors, this one has \
         {bytes} and {fds}"
    );
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

/// The bytes of a frame without descriptors, for a caller that sends them in parts.
///
/// # Errors
/// `InvalidInput` if the frame exceeds the limit.
pub fn encode(frame: &[u8]) -> io::Result<Vec<u8>> {
    check(frame.len(), 0)?;
    Ok([&(frame.len() as u32).to_le_bytes(), frame].concat())
}

/// Receives the next frame; `None` if the peer has ended the connection.
///
/// # Errors
/// [`HandoverError`]; all descriptors that arrived are closed.
pub fn receive(stream: &UnixStream) -> Result<Option<Frame>, HandoverError> {
    let mut reader = Reader { stream, started: false, deadline: None, fds: Vec::new() };
    let mut length = [0; 4];
    if !reader.fill(&mut length)? {
        return Ok(None);
    }
    let bytes = u32::from_le_bytes(length);
    // Before anything is allocated for it.
    if bytes as usize > MAX_FRAME {
        return Err(HandoverError::TooLong { bytes });
    }
    let mut frame = vec![0; bytes as usize];
    if !reader.fill(&mut frame)? {
        return Err(HandoverError::Cut { got: 0, needed: frame.len() });
    }
    Ok(Some(Frame { bytes: frame, fds: reader.fds }))
}

struct Reader<'a> {
    stream: &'a UnixStream,
    /// Whether a byte of the frame has arrived: from then on a timeout loses data.
    started: bool,
    /// When the frame must be complete, if the stream has a timeout.
    deadline: Option<Instant>,
    fds: Vec<OwnedFd>,
}

impl Reader<'_> {
    /// Fills the buffer; false if the connection ended before its first byte.
    fn fill(&mut self, buffer: &mut [u8]) -> Result<bool, HandoverError> {
        let needed = buffer.len();
        let mut got = 0;
        while got < needed {
            match self.read(&mut buffer[got..]) {
                Ok(0) if got == 0 => return Ok(false),
                Ok(0) => return Err(HandoverError::Cut { got, needed }),
                Ok(bytes) => got += bytes,
                Err(HandoverError::TimedOut) if self.started => {
                    return Err(HandoverError::Stalled { got, needed });
                }
                Err(error) => return Err(error),
            }
            if !self.started {
                self.started = true;
                let timeout = self.stream.read_timeout()?;
                self.deadline = timeout.and_then(|t| Instant::now().checked_add(t));
            }
            if got < needed && self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(HandoverError::Stalled { got, needed });
            }
        }
        Ok(true)
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, HandoverError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(buffer)];
        let message = retry_on_intr(|| {
            rustix::net::recvmsg(self.stream, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)
        })
        .map_err(|errno| match errno {
            Errno::AGAIN => HandoverError::TimedOut,
            other => HandoverError::Io(other.into()),
        })?;
        let before = self.fds.len();
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = part {
                self.fds.extend(fds);
            }
        }
        // The kernel has closed the descriptors that did not fit; `self` closes the others.
        let is_cut = message.flags.contains(ReturnFlags::CTRUNC);
        if is_cut && self.fds.len() - before < MAX_FDS {
            return Err(HandoverError::NoDescriptor);
        }
        if is_cut || self.fds.len() > MAX_FDS {
            return Err(HandoverError::TooManyFds);
        }
        Ok(message.bytes)
    }
}

/// The process at the other end, as reported by the kernel, so it cannot be forged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// The process id when it connected.
    pub pid: u32,
    /// The user id when it connected.
    pub uid: u32,
}

/// The process at the other end of a stream.
///
/// # Errors
/// The socket's error.
pub fn peer(stream: &UnixStream) -> io::Result<Peer> {
    let credentials = rustix::net::sockopt::socket_peercred(stream)?;
    Ok(Peer {
        pid: credentials.pid.as_raw_nonzero().get().cast_unsigned(),
        uid: credentials.uid.as_raw(),
    })
}
