//! A part of an arena.

use std::{
    any::Any,
    fmt,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use super::shared::Shared;
use crate::segment::{SegmentError, SegmentId, adopt::Mappings, reserve};

/// Keeps adopted memory mapped at its address, for example an array of a framework.
pub type Owner = Arc<dyn Any + Send + Sync>;

/// What is freed with a block.
#[derive(Debug)]
enum Kind {
    /// A range of a segment, with the bytes that it occupies: a multiple of
    /// [`ALIGNMENT`](super::shared::ALIGNMENT).
    Range { taken: u64 },
    /// A whole adopted segment, and what keeps it mapped.
    Adopted { _owner: Owner },
}

/// A part of an arena, which is freed on drop. It keeps the memory mapped.
pub struct ArenaBlock {
    arena: Arc<Shared>,
    segment: SegmentId,
    offset: u64,
    bytes: u64,
    pointer: *mut u8,
    /// It was filled from ordinary memory, and this has not been counted yet.
    copied: AtomicBool,
    /// The last field: an owner may unmap the memory only after the daemon was notified.
    kind: Kind,
}

// SAFETY: a block is an address range that nobody else gets while it lives; nothing in it is bound
// to a thread.
unsafe impl Send for ArenaBlock {}
// SAFETY: the methods read fields only; ordering accesses through the pointer is the duty of
// whoever dereferences it.
unsafe impl Sync for ArenaBlock {}

impl ArenaBlock {
    pub(super) fn new(
        arena: Arc<Shared>,
        segment: SegmentId,
        offset: u64,
        bytes: u64,
        taken: u64,
        pointer: *mut u8,
    ) -> Self {
        let kind = Kind::Range { taken };
        Self { arena, segment, offset, bytes, pointer, copied: AtomicBool::new(false), kind }
    }

    /// The whole of an adopted segment. It has the address `pointer`.
    pub(super) fn adopted(
        arena: Arc<Shared>,
        segment: SegmentId,
        bytes: u64,
        pointer: *mut u8,
        owner: Owner,
    ) -> Self {
        let (offset, kind) = (0, Kind::Adopted { _owner: owner });
        Self { arena, segment, offset, bytes, pointer, copied: AtomicBool::new(false), kind }
    }

    pub(super) fn is_of(&self, arena: &Arc<Shared>) -> bool {
        Arc::ptr_eq(arena, &self.arena)
    }

    /// The segment that contains it.
    pub fn segment(&self) -> SegmentId {
        self.segment
    }

    /// Its first byte in the segment.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Its size in bytes, as requested.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The mapping that contains it: its first byte and size in bytes. From now on it lives as long
    /// as the arena, so a driver needs to register it only once.
    pub fn mapping(&self) -> (*mut u8, u64) {
        let state = self.arena.state.lock();
        let bytes = state.of_block(self.segment).map_or(0, |lent| {
            lent.pinned.store(true, Relaxed);
            lent.segment.bytes()
        });
        (self.pointer.wrapping_sub(self.offset as usize), bytes)
    }

    /// Whether no daemon has its memory, or will have it ([`Arena::renew`]). Then no operation can
    /// use it.
    ///
    /// [`Arena::renew`]: super::Arena::renew
    pub fn is_retired(&self) -> bool {
        // Most arenas never retire a segment, and a load is cheaper than a lock.
        self.arena.has_retired.load(Relaxed) && self.arena.state.lock().is_retired(self.segment)
    }

    /// Records, for metrics, that it was filled from ordinary memory.
    pub fn mark_copied(&self) {
        self.copied.store(true, Relaxed);
    }

    /// Whether it was filled from ordinary memory since the last call.
    pub fn take_copied(&self) -> bool {
        // Usually it was not, and a load is cheaper than a swap.
        self.copied.load(Relaxed) && self.copied.swap(false, Relaxed)
    }

    /// Its first byte, valid for [`ArenaBlock::bytes`] bytes while the block lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.pointer
    }
}

/// Takes blocks back from a daemon that may still work on them and cannot be asked to stop. After
/// this the daemon sees nothing that this process writes to any block of their segments, and the
/// daemon's writes to the given bytes of a block have no effect here: the bytes keep the values of
/// some moment during the call. If memory for copies is missing, some of them are zeros. Addresses
/// do not change.
///
/// # Errors
/// [`SegmentError`] if the kernel refuses a step, or if a range is not within its block. The daemon
/// may then still write to some blocks.
///
/// # Safety
/// Nothing in this process has a reference to the given bytes, or uses their values afterwards as
/// those of before the call.
pub unsafe fn take_back<'a>(
    blocks: impl IntoIterator<Item = (&'a ArenaBlock, Range<u64>), IntoIter: Clone>,
) -> Result<(), SegmentError> {
    let blocks = blocks.into_iter();
    let bytes = |(_, range): (_, Range<u64>)| range.end.saturating_sub(range.start);
    let copied = reserve::fits(blocks.clone().map(bytes).sum());
    let mappings = Mappings::default();
    for (block, Range { start, end }) in blocks {
        if end > block.bytes {
            return Err(SegmentError::OutOfRange { bytes: end, max: block.bytes });
        }
        let state = block.arena.state.lock();
        let lent = state.get(block.segment).cloned();
        // A segment is not removed before its blocks. If the program has unmapped the memory,
        // something else may be at its addresses.
        let Some(lent) = lent.filter(|lent| lent.is_there(&mappings)) else { continue };
        lent.reserve.replace(&lent.segment)?;
        drop(state); // a forked child has a whole segment or a replaced one
        let range = block.offset + start..block.offset + end;
        lent.reserve.settle(&lent.segment, range, copied)?;
    }
    Ok(())
}

impl fmt::Debug for ArenaBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { segment, offset, bytes, .. } = self;
        write!(f, "ArenaBlock({bytes} bytes at {segment}:{offset})")
    }
}

impl Drop for ArenaBlock {
    fn drop(&mut self) {
        let mut state = self.arena.state.lock();
        match self.kind {
            Kind::Range { taken } => state.give(self.segment, self.offset, taken),
            Kind::Adopted { .. } => {
                let (lent, daemon) = state.end_adopted(self.segment);
                drop(state);
                if let Some(daemon) = daemon {
                    self.arena.release(&daemon, self.segment);
                }
                drop(lent); // unmaps its reserve without holding our lock
            }
        }
    }
}
