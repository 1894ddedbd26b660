//! Why an arena has no memory for a tensor.

use std::error::Error;

use crate::segment::{SegmentError, SegmentId};

/// Why a block could not be allocated, or memory not be adopted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// The arena would grow beyond its limit.
    #[error(
        "a tensor of {bytes} bytes does not fit: {reserved} of at most {max} bytes of shared \
         memory are taken, {used} of them in use; raise worker.arena_max_bytes or drop tensors"
    )]
    Full {
        /// The requested size, in bytes.
        bytes: u64,
        /// Bytes of all segments.
        reserved: u64,
        /// Bytes in use.
        used: u64,
        /// The limit, in bytes.
        max: u64,
    },
    /// The limit of adopted segments is reached.
    #[error("{max} segments are adopted, which is the limit; raise worker.max_segments")]
    Adopted {
        /// The limit.
        max: u32,
    },
    /// The memory belongs to a segment already.
    #[error(
        "memory of {bytes} bytes at {address:#x} is shared already, as segment {segment}: use the \
         buffer that it belongs to"
    )]
    AlreadyShared {
        /// Its first byte.
        address: usize,
        /// Its size, in bytes.
        bytes: u64,
        /// The segment that contains some of it.
        segment: SegmentId,
    },
    /// Shared memory was made for a daemon that has ended.
    #[error(
        "shared memory of {bytes} bytes was made for a daemon that has ended; make it again for \
         its successor"
    )]
    Ended {
        /// Its size, in bytes.
        bytes: u64,
    },
    /// The memory for another segment could not be made.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// The daemon did not take the new segment.
    #[error("segment {segment} of {bytes} bytes could not be handed over: {source}")]
    Register {
        /// The new segment.
        segment: SegmentId,
        /// Its size, in bytes.
        bytes: u64,
        /// Why not.
        source: Box<dyn Error + Send + Sync>,
    },
    /// It is unknown whether the daemon has taken the new segment. Its number is not used again.
    #[error("segment {segment} of {bytes} bytes was handed over without an answer: {source}")]
    Unanswered {
        /// The new segment.
        segment: SegmentId,
        /// Its size, in bytes.
        bytes: u64,
        /// What happened.
        source: Box<dyn Error + Send + Sync>,
    },
}

/// The error of a [`Register`](super::Register) function.
#[derive(Debug)]
pub enum RegisterError {
    /// The daemon does not have the segment, and will not get it.
    Refused(Box<dyn Error + Send + Sync>),
    /// The daemon may have the segment, or get it later.
    Unanswered(Box<dyn Error + Send + Sync>),
}
