//! What travels on a data connection after the handshake: frames, one after the other.
//!
//! ```text
//!  0        2    3    4            8                    16                  24        28       32
//!  ├────────┼────┼────┼────────────┼────────────────────┼───────────────────┼─────────┼────────┤
//!  │ "GW"   │ver │ 0  │ message    │ sequence           │ offset            │ length  │ epoch  │
//!  └────────┴────┴────┴────────────┴────────────────────┴───────────────────┴─────────┴────────┘
//! ```
//!
//! All numbers are little endian. `sequence` names the operation, `message` the n-th message of
//! it from this sender to this receiver (as the schedule numbers them), `offset` the first byte
//! of the payload within that message's block, `length` the bytes that follow; `epoch` is the low
//! half of the world's epoch. A message travels as frames of ascending offset; a connection ends
//! only between frames.

/// Bytes of a frame's header.
pub const HEADER_BYTES: usize = 32;

/// The largest payload of one frame: the upper limit of `data.chunk_bytes`.
pub const MAX_PAYLOAD: u32 = 4 << 20;

const MAGIC: [u8; 2] = *b"GW";
const VERSION: u8 = 1;

/// A frame's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The operation.
    pub sequence: u64,
    /// Which message of the operation, counted per sender and receiver.
    pub message: u32,
    /// First byte of the payload within the message's block.
    pub offset: u64,
    /// Bytes of payload.
    pub length: u32,
    /// Low half of the epoch.
    pub epoch: u32,
}

/// Why received bytes are no header (TRUST). After any of these the connection is given up: there
/// is no way to find the next frame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// It does not begin like a frame.
    #[error("a frame begins with {0:02x?} instead of the mark of version {VERSION}")]
    Mark([u8; 4]),
    /// Its payload is empty or larger than any sender may make it.
    #[error("a frame announces {0} bytes; 1 to {MAX_PAYLOAD} are allowed")]
    Length(u32),
    /// It belongs to another epoch.
    #[error("a frame is of epoch …{received}, this is …{expected}")]
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
        let mut bytes = [0; HEADER_BYTES];
        bytes[..2].copy_from_slice(&MAGIC);
        bytes[2] = VERSION;
        bytes[4..8].copy_from_slice(&self.message.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.length.to_le_bytes());
        bytes[28..].copy_from_slice(&self.epoch.to_le_bytes());
        bytes
    }

    /// Reads and checks a header.
    ///
    /// # Errors
    /// [`FrameError`] if it isn't one of this version and epoch with a length within the limit.
    pub fn decode(bytes: &[u8; HEADER_BYTES], epoch: u32) -> Result<Self, FrameError> {
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[at + i]));
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let mark = [0, 1, 2, 3].map(|i| bytes[i]);
        if mark != [MAGIC[0], MAGIC[1], VERSION, 0] {
            return Err(FrameError::Mark(mark));
        }
        let header = Self {
            sequence: long(8),
            message: word(4),
            offset: long(16),
            length: word(24),
            epoch: word(28),
        };
        if header.length == 0 || header.length > MAX_PAYLOAD {
            return Err(FrameError::Length(header.length));
        }
        if header.epoch != epoch {
            return Err(FrameError::Epoch { received: header.epoch, expected: epoch });
        }
        Ok(header)
    }
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
        assert_eq!(Header::decode(&header().encode(), 9), Ok(header()));
    }

    #[test]
    fn nonsense_is_named() {
        let mut bytes = header().encode();
        assert!(matches!(Header::decode(&bytes, 8), Err(FrameError::Epoch { received: 9, .. })));
        bytes[2] = 2;
        assert!(matches!(Header::decode(&bytes, 9), Err(FrameError::Mark(_))));
        for length in [0, MAX_PAYLOAD + 1, u32::MAX] {
            let bytes = Header { length, ..header() }.encode();
            assert_eq!(Header::decode(&bytes, 9), Err(FrameError::Length(length)));
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in any::<[u8; HEADER_BYTES]>(), epoch: u32) {
            let _ = Header::decode(&bytes, epoch);
        }
    }
}
