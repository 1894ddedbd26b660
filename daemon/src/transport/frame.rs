//! The format of a data connection after the handshake: frames, one after the other.
//!
//! ```text
//!  0        2    3    4            8                    16                  24        28       32
//!  ├────────┼────┼────┼────────────┼────────────────────┼───────────────────┼─────────┼────────┤
//!  │ "GW"   │ver │ 0  │ message    │ sequence           │ offset            │ length  │ epoch  │
//!  │ "GW"   │ver │ 1  │ root       │ stalled, in ms     │ 0                 │ 0       │ epoch  │
//!  │ "GW"   │ver │ 2  │ 0          │ bytes read         │ 0                 │ 0       │ epoch  │
//!  └────────┴────┴────┴────────────┴────────────────────┴───────────────────┴─────────┴────────┘
//! ```
//!
//! All numbers are little endian. The fourth byte is the kind of the frame.
//!
//! - 0, data: `sequence` is the operation, `message` the number of the message from this sender to
//!   this receiver in the operation (as in the schedule), `offset` the first byte of the payload
//!   within that message's block, `length` the bytes that follow. A message is sent as frames of
//!   ascending offset.
//! - 1, a notice: the sender itself waits. `root` is the node at the root of its wait, and
//!   `stalled` how long nothing has moved for it.
//! - 2, a count: the first bytes of a connection that replaces another one, from the acceptor, if
//!   the dialler has sent frames before. It says how many bytes of these frames the acceptor has
//!   read. Counts are not included in what they count.
//!
//! `epoch` is the low half of the world's epoch. A connection may end at any byte, and its
//! successor continues there.

use std::time::Duration;

use gradwire_proto::NodeId;

/// Bytes of a frame's header.
pub const HEADER_BYTES: usize = 32;

/// The largest payload of one frame: the upper limit of `data.chunk_bytes`.
pub const MAX_PAYLOAD: u32 = 4 << 20;

/// Also the lower limit of `data.chunk_bytes`.
pub use gradwire_collectives::execution::MIN_PAYLOAD;

const MAGIC: [u8; 2] = *b"GW";
const VERSION: u8 = 2;

/// The bytes that a connection has carried after its handshake.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Written to the socket.
    pub written: u64,
    /// Read from the socket.
    pub read: u64,
}

/// The beginning of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Frame {
    /// A part of a message, whose payload follows.
    Data(Header),
    /// The sender itself waits; nothing follows.
    Notice(Notice),
}

/// The report of a waiting node to those that may wait for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Notice {
    /// The node at the root of the wait; the sender itself, if it holds a piece back.
    pub root: NodeId,
    /// How long nothing has moved for it, to the millisecond.
    pub stalled: Duration,
}

impl Notice {
    /// The bytes on the wire.
    pub fn encode(&self, epoch: u32) -> [u8; HEADER_BYTES] {
        let stalled = u64::try_from(self.stalled.as_millis()).unwrap_or(u64::MAX);
        encode(Kind::Notice, self.root.0, [stalled, 0], 0, epoch)
    }
}

#[derive(Debug, Clone, Copy)]
#[repr(u8)]
enum Kind {
    Data = 0,
    Notice = 1,
    Read = 2,
}

fn encode(
    kind: Kind,
    message: u32,
    [sequence, offset]: [u64; 2],
    length: u32,
    epoch: u32,
) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..2].copy_from_slice(&MAGIC);
    (bytes[2], bytes[3]) = (VERSION, kind as u8);
    bytes[4..8].copy_from_slice(&message.to_le_bytes());
    bytes[8..16].copy_from_slice(&sequence.to_le_bytes());
    bytes[16..24].copy_from_slice(&offset.to_le_bytes());
    bytes[24..28].copy_from_slice(&length.to_le_bytes());
    bytes[28..].copy_from_slice(&epoch.to_le_bytes());
    bytes
}

/// The header of a frame with data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The operation.
    pub sequence: u64,
    /// The number of the message in the operation, counted per sender and receiver.
    pub message: u32,
    /// First byte of the payload within the message's block.
    pub offset: u64,
    /// Bytes of payload.
    pub length: u32,
    /// Low half of the epoch.
    pub epoch: u32,
}

/// Why received bytes are not a header (TRUST). After any of these errors the connection is given
/// up, because the next frame can't be found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// It does not begin with the magic bytes of a frame.
    #[error("a frame begins with {0:02x?} instead of the magic bytes of version {VERSION}")]
    Mark([u8; 4]),
    /// Its payload is empty or too large.
    #[error("a frame announces {0} bytes; 1 to {MAX_PAYLOAD} are allowed")]
    Length(u32),
    /// It belongs to another epoch.
    #[error("a frame belongs to epoch …{received}, but this is epoch …{expected}")]
    Epoch {
        /// Low half of the epoch that the frame names.
        received: u32,
        /// Low half of the current one.
        expected: u32,
    },
}

impl Header {
    /// The bytes on the wire.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let Self { sequence, message, offset, length, epoch } = *self;
        encode(Kind::Data, message, [sequence, offset], length, epoch)
    }
}

impl Frame {
    /// Reads and checks the beginning of a frame.
    ///
    /// # Errors
    /// [`FrameError`] if it isn't a frame of this version and epoch with an allowed length.
    pub fn decode(bytes: &[u8; HEADER_BYTES], epoch: u32) -> Result<Self, FrameError> {
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[at + i]));
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let mark = [0, 1, 2, 3].map(|i| bytes[i]);
        if mark[..3] != [MAGIC[0], MAGIC[1], VERSION] || mark[3] > Kind::Notice as u8 {
            return Err(FrameError::Mark(mark));
        }
        let header = Header {
            sequence: long(8),
            message: word(4),
            offset: long(16),
            length: word(24),
            epoch: word(28),
        };
        if header.epoch != epoch {
            return Err(FrameError::Epoch { received: header.epoch, expected: epoch });
        }
        if mark[3] == Kind::Notice as u8 {
            let stalled = Duration::from_millis(header.sequence);
            return Ok(Self::Notice(Notice { root: NodeId(header.message), stalled }));
        }
        if header.length == 0 || header.length > MAX_PAYLOAD {
            return Err(FrameError::Length(header.length));
        }
        Ok(Self::Data(header))
    }
}

/// The bytes on the wire that say how many bytes were read on the connections before.
pub(crate) fn encode_read(read: u64, epoch: u32) -> [u8; HEADER_BYTES] {
    encode(Kind::Read, 0, [read, 0], 0, epoch)
}

/// Reads what [`encode_read`] has made.
///
/// # Errors
/// [`FrameError`] if it is something else, or of another epoch.
pub(crate) fn decode_read(bytes: &[u8; HEADER_BYTES], epoch: u32) -> Result<u64, FrameError> {
    let part = |at: usize| [0, 1, 2, 3].map(|i| bytes[at + i]);
    let word = |at: usize| u32::from_le_bytes(part(at));
    if part(0) != [MAGIC[0], MAGIC[1], VERSION, Kind::Read as u8] {
        return Err(FrameError::Mark(part(0)));
    }
    if word(28) != epoch {
        return Err(FrameError::Epoch { received: word(28), expected: epoch });
    }
    Ok(u64::from(word(8)) | u64::from(word(12)) << 32)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header() -> Header {
        Header { sequence: 7 << 40, message: 3, offset: 5 << 33, length: 4096, epoch: 9 }
    }

    #[test]
    fn a_header_survives_the_wire() {
        assert_eq!(Frame::decode(&header().encode(), 9), Ok(Frame::Data(header())));
    }

    #[test]
    fn a_notice_survives_the_wire() {
        let notice = Notice { root: NodeId(3), stalled: Duration::from_millis(5 << 33) };
        assert_eq!(Frame::decode(&notice.encode(9), 9), Ok(Frame::Notice(notice)));
    }

    #[test]
    fn a_count_survives_the_wire() {
        let bytes = encode_read(5 << 40, 9);
        assert_eq!(decode_read(&bytes, 9), Ok(5 << 40));
        let other = FrameError::Epoch { received: 9, expected: 8 };
        assert_eq!(decode_read(&bytes, 8), Err(other));
        assert!(matches!(decode_read(&header().encode(), 9), Err(FrameError::Mark(_))));
        assert!(matches!(Frame::decode(&bytes, 9), Err(FrameError::Mark(_))), "not a frame");
    }

    #[test]
    fn invalid_headers_are_named() {
        let mut bytes = header().encode();
        assert!(matches!(Frame::decode(&bytes, 8), Err(FrameError::Epoch { received: 9, .. })));
        for (at, wrong) in [(0, b'H'), (2, 1), (3, 2)] {
            let right = std::mem::replace(&mut bytes[at], wrong);
            assert!(matches!(Frame::decode(&bytes, 9), Err(FrameError::Mark(_))));
            bytes[at] = right;
        }
        for length in [0, MAX_PAYLOAD + 1, u32::MAX] {
            let bytes = Header { length, ..header() }.encode();
            assert_eq!(Frame::decode(&bytes, 9), Err(FrameError::Length(length)));
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in any::<[u8; HEADER_BYTES]>(), epoch: u32) {
            let _ = Frame::decode(&bytes, epoch);
        }
    }
}
