//! What a session counts.

use std::sync::atomic::AtomicU64;

use gradwire_shm::arena;

/// Counters of a session. Counts that only grow are `u64`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Submitted operations.
    pub operations: u64,
    /// Operations in flight.
    pub in_flight: usize,
    /// Bytes of the tensors of all submitted operations.
    pub bytes: u64,
    /// The part of `bytes` that was copied from ordinary memory.
    pub copied_bytes: u64,
    /// Sparse allreduces that moved rows.
    pub sparse_rows: u64,
    /// Sparse allreduces that moved the dense tensor, because that was smaller.
    pub sparse_dense: u64,
    /// The use of the shared memory.
    pub arena: ArenaStats,
}

/// The shared memory of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArenaStats {
    /// Segments, without adopted ones.
    pub segments: usize,
    /// Adopted segments.
    pub adopted: usize,
    /// Bytes of the adopted segments.
    pub adopted_bytes: usize,
    /// Bytes of all other segments.
    pub reserved: usize,
    /// Bytes of tensors that are alive, rounded up to 64.
    pub used: usize,
}

impl From<arena::ArenaStats> for ArenaStats {
    fn from(stats: arena::ArenaStats) -> Self {
        Self {
            segments: stats.segments as usize,
            adopted: stats.adopted as usize,
            adopted_bytes: stats.adopted_bytes as usize,
            reserved: stats.reserved as usize,
            used: stats.used as usize,
        }
    }
}

/// What a session counts, over all epochs.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) operations: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) copied_bytes: AtomicU64,
    /// Sparse allreduces that moved rows, and that moved the dense tensor.
    pub(crate) sparse: [AtomicU64; 2],
}
