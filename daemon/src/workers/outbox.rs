//! Sends messages to a worker over its socket, in order and without waiting for it.
//!
//! A worker that is busy, or stopped for a while, does not read. The socket holds some messages for
//! it, and the rest is kept here, up to a limit (BOUND): no failure is lost (TELL), and no thread
//! of the daemon waits (WAIT). A worker that does not read for long also misses its heartbeats, and
//! is lost.

use std::{collections::VecDeque, io, net::Shutdown, os::unix::net::UnixStream};

use gradwire_proto::pb;
use gradwire_shm::handover;
use parking_lot::Mutex;
use prost::Message;
use rustix::{io::Errno, net::SendFlags};

/// The limit of kept messages, in bytes: enough for a failure with a table of all ranks for each
/// operation that a worker may have in flight.
const MAX_KEPT: usize = 32 << 20;

#[derive(Debug, thiserror::Error)]
pub(crate) enum OutboxError {
    #[error("it does not read its messages: {bytes} bytes are waiting")]
    Full { bytes: usize },
    #[error("a message for it can't be sent: {0}")]
    Invalid(io::Error),
}

#[derive(Debug, Default)]
struct Kept {
    frames: VecDeque<Vec<u8>>,
    /// Bytes of the first frame that were sent.
    sent: usize,
    bytes: usize,
    closed: bool,
}

/// The messages to one worker.
#[derive(Debug)]
pub(crate) struct Outbox {
    socket: UnixStream,
    kept: Mutex<Kept>,
}

impl Outbox {
    pub(crate) fn new(socket: UnixStream) -> Self {
        Self { socket, kept: Mutex::default() }
    }

    /// Sends a message, or keeps it. A message for a worker that is gone is dropped: the thread
    /// that reads the worker's messages notices its end after the last of them.
    ///
    /// # Errors
    /// [`OutboxError`]: the worker will never get the message. If it does not read, the earlier
    /// messages are dropped, too, to make room for the last message of the job.
    pub(crate) fn send(&self, message: pb::daemon_message::Message) -> Result<(), OutboxError> {
        let message = pb::DaemonMessage { message: Some(message) };
        let frame = handover::encode(&message.encode_to_vec()).map_err(OutboxError::Invalid)?;
        let mut kept = self.kept.lock();
        if kept.bytes + frame.len() > MAX_KEPT {
            let bytes = kept.bytes;
            // The rest of a partly sent message must follow.
            let begun = usize::from(kept.sent > 0);
            kept.frames.truncate(begun);
            kept.bytes = kept.frames.iter().map(Vec::len).sum();
            return Err(OutboxError::Full { bytes });
        }
        kept.bytes += frame.len();
        kept.frames.push_back(frame);
        self.flush_kept(&mut kept);
        Ok(())
    }

    /// Sends as many kept messages as the socket accepts. Returns true if nothing is left.
    pub(crate) fn flush(&self) -> bool {
        let mut kept = self.kept.lock();
        self.flush_kept(&mut kept);
        kept.frames.is_empty()
    }

    /// Ends the connection in both directions: the worker's process has ended, but a process that
    /// it forked may hold the other end open. Messages that it sent before are still read.
    pub(crate) fn hang_up(&self) {
        // It may have ended already.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    fn flush_kept(&self, kept: &mut Kept) {
        while let Some(frame) = kept.frames.front().filter(|_| !kept.closed) {
            let rest = &frame[kept.sent..];
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::io::retry_on_intr(|| rustix::net::send(&self.socket, rest, flags)) {
                Ok(sent) if sent == rest.len() => {
                    kept.bytes -= frame.len();
                    kept.sent = 0;
                    kept.frames.pop_front();
                }
                Ok(sent) => kept.sent += sent,
                // Its buffer is full, or the system has no memory: both are temporary.
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => return,
                Err(error) => {
                    tracing::debug!(%error, "a worker is gone");
                    kept.closed = true;
                }
            }
        }
        if kept.closed {
            *kept = Kept { closed: true, ..Kept::default() };
        }
    }
}

#[cfg(test)]
mod tests {
    use gradwire_proto::{Failure, FailureKind};

    use super::*;

    fn failure(number: usize, bytes: usize) -> pb::daemon_message::Message {
        let failure = Failure::new(FailureKind::RankLeft, "x".repeat(bytes));
        pb::daemon_message::Message::TensorFailed(pb::TensorFailed {
            tickets: vec![number as u64],
            failure: Some(failure.into()),
        })
    }

    /// TELL: far more than the socket can hold arrives whole and in order once it is read.
    #[test]
    fn unread_messages_are_kept() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let outbox = Outbox::new(ours);
        for number in 0..2000 {
            outbox.send(failure(number, 1000)).unwrap();
        }
        assert!(!outbox.flush());
        for number in 0..2000 {
            let frame = handover::receive(&theirs).unwrap().unwrap();
            let message = pb::DaemonMessage::decode(&frame.bytes[..]).unwrap().message;
            assert_eq!(message, Some(failure(number, 1000)));
            outbox.flush();
        }
        assert!(outbox.flush());
        assert_eq!(outbox.kept.lock().bytes, 0);
    }

    #[test]
    fn a_worker_that_never_reads_is_reported() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let outbox = Outbox::new(ours);
        let full = (0..1000).find_map(|number| outbox.send(failure(number, 100_000)).err());
        let text = full.unwrap().to_string();
        assert!(text.contains("it does not read its messages"), "{text}");
        assert!(outbox.kept.lock().bytes <= MAX_KEPT, "BOUND");
        let text = outbox.send(failure(0, 2 << 20)).unwrap_err().to_string();
        assert!(text.contains("a frame may have at most"), "{text}");
        drop(theirs);
        outbox.flush();
        assert_eq!(outbox.kept.lock().bytes, 0);
        assert!(outbox.send(failure(0, 100)).is_ok());
    }
}
