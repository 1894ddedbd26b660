//! Tensors in shared memory, worker side. They are never copied on their way to the daemon.
//!
//! An arena has a few segments and one list of the free ranges in them. It grows by a segment when
//! nothing fits, and uses freed blocks again (best fit; neighbours are joined). Each segment is
//! about as large as all before it together (`ArenaConfig::next_segment`), so that a small job uses
//! little memory and a large one has few segments. Segments live as long as the arena, because the
//! daemon has mapped them. If the daemon cannot be asked to stop, [`take_back`] detaches them from
//! it.
//!
//! Memory that the program already has can become a segment of its own ([`Arena::adopt`]). It is a
//! single block. When the block is dropped, only the program owns the memory.

use std::{
    error::Error,
    fmt,
    ops::Range,
    os::fd::{AsFd, OwnedFd, RawFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use gradwire_proto::JobId;
use parking_lot::Mutex;

use crate::segment::{
    HUGE_PAGE, HugePages, Segment, SegmentError, SegmentId,
    adopt::{self, Adopted, Mapped},
    reserve::{self, Reserve},
};

mod free_list;

use free_list::FreeList;

/// A block's address and size are multiples of this: a cache line, and the widest vector register.
pub const ALIGNMENT: u64 = 64;

/// The size of the first segment, in bytes.
const FIRST_SEGMENT: u64 = 4 << 20;

/// A new segment has at least the reserved bytes divided by this.
const MIN_GROWTH: u64 = 64;

/// How an arena grows.
#[derive(Debug, Clone)]
pub struct ArenaConfig {
    /// The job, which is part of the memory's name (CLEAN).
    pub job: JobId,
    /// The size up to which segments double, in bytes. A larger tensor gets a segment of its own
    /// size.
    pub segment_bytes: u64,
    /// The limit for all segments together, in bytes (BOUND). `None`: the machine's memory.
    pub max_bytes: Option<u64>,
    /// How many segments may be adopted at a time (BOUND). Segment numbers are limited, and the
    /// arena needs some to grow.
    pub max_adopted: u32,
    /// Whether the segments use huge pages.
    pub huge: HugePages,
}

impl ArenaConfig {
    /// Segments of up to 64 MiB without a limit in total, up to 512 adopted segments, and huge
    /// pages where the kernel offers them.
    pub fn new(job: JobId) -> Self {
        let (segment_bytes, huge) = (64 << 20, HugePages::default());
        Self { job, segment_bytes, max_bytes: None, max_adopted: 512, huge }
    }

    /// The size of the next segment, which is made for a block of `block` bytes when all segments
    /// together have `reserved` bytes. `None` if the limit does not allow it.
    ///
    /// Segments have 4, 4, 8, 16 … MiB, up to `segment_bytes`. Later they grow again: each has a
    /// 64th of the total. So their number grows with the logarithm of the memory (BOUND).
    fn next_segment(&self, reserved: u64, block: u64) -> Option<u64> {
        let left = self.max_bytes.map_or(u64::MAX, |max| max.saturating_sub(reserved));
        let doubled = round_down(reserved).max(FIRST_SEGMENT).min(self.segment_bytes);
        let step = doubled.max(round_down(reserved / MIN_GROWTH));
        let wanted = if block > step { block.checked_next_multiple_of(HUGE_PAGE)? } else { step };
        // The last segments may be smaller than the others, but hold the block.
        let size = wanted.min(left).max(block);
        (size <= left).then_some(size)
    }
}

/// The largest power of two that is not above `bytes`; 0 for 0.
fn round_down(bytes: u64) -> u64 {
    bytes.checked_ilog2().map_or(0, |log| 1 << log)
}

/// Why a block could not be allocated.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// The arena would grow beyond its limit.
    #[error(
        "a tensor of {bytes} bytes does not fit: {reserved} of at most {max} bytes of shared \
         memory are taken, {used} of them in use; raise the arena's limit or drop tensors"
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
        source: RegisterError,
    },
}

/// The error of a [`Register`] function.
pub type RegisterError = Box<dyn Error + Send + Sync>;

/// Hands a new segment over to the daemon. It is called before any block of the segment is given
/// out, and never by two threads at once.
pub type Register =
    Box<dyn Fn(SegmentId, &Segment, OwnedFd) -> Result<(), RegisterError> + Send + Sync>;

/// Notifies the daemon that an adopted segment is no longer used. Its number may be used again. The
/// function must not fail, and must not wait for the arena.
pub type Release = Box<dyn Fn(SegmentId) + Send + Sync>;

/// How full an arena is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ArenaStats {
    /// Segments, without adopted ones.
    pub segments: u32,
    /// Adopted segments.
    pub adopted: u32,
    /// Bytes of the adopted segments.
    pub adopted_bytes: u64,
    /// Bytes of all other segments.
    pub reserved: u64,
    /// Bytes of blocks that are alive, rounded up to [`ALIGNMENT`].
    pub used: u64,
}

/// A segment, and the reserve mapping that takes it back.
struct Lent {
    segment: Segment,
    reserve: Reserve,
    /// The mapping at the addresses of an adopted segment, which others may unmap.
    mapped: Option<Mapped>,
}

impl Lent {
    /// Whether its addresses still belong to it.
    fn is_there(&self) -> bool {
        let (start, bytes) = (self.segment.as_ptr().addr(), self.segment.bytes());
        self.mapped
            .is_none_or(|file| self.reserve.is_used() || adopt::is_mapped(start, bytes, file))
    }
}

#[derive(Default)]
struct ArenaState {
    /// By number. `None`: an adopted segment that was released.
    segments: Vec<Option<Arc<Lent>>>,
    free: FreeList,
    stats: ArenaStats,
}

impl ArenaState {
    /// The lowest free number.
    fn next(&self) -> SegmentId {
        let free = self.segments.iter().position(Option::is_none);
        SegmentId(free.unwrap_or(self.segments.len()) as u32)
    }

    fn put(&mut self, id: SegmentId, lent: Lent) {
        let (index, lent) = (id.0 as usize, Some(Arc::new(lent)));
        match self.segments.get_mut(index) {
            Some(slot) => *slot = lent,
            None => self.segments.push(lent),
        }
    }

    fn get(&self, id: SegmentId) -> Option<&Arc<Lent>> {
        self.segments.get(id.0 as usize)?.as_ref()
    }
}

struct Shared {
    config: ArenaConfig,
    register: Register,
    release: Release,
    /// Held while a segment is made and handed over: allocations that fit continue meanwhile.
    growing: Mutex<()>,
    state: Mutex<ArenaState>,
}

/// A growing pool of shared memory. Cheap to clone; clones share the memory.
#[derive(Clone)]
pub struct Arena(Arc<Shared>);

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shared { config, .. } = &*self.0;
        f.debug_struct("Arena").field("config", config).field("stats", &self.stats()).finish()
    }
}

impl Arena {
    /// An arena without memory; the first allocation makes the first segment.
    pub fn new(config: ArenaConfig, register: Register, release: Release) -> Self {
        let (growing, state) = Default::default();
        Self(Arc::new(Shared { config, register, release, growing, state }))
    }

    /// Allocates `bytes` bytes, aligned to [`ALIGNMENT`]. The memory is not cleared: it may hold
    /// the contents of an earlier block.
    ///
    /// # Errors
    /// [`ArenaError`] if it does not fit, or if its memory cannot be made or handed over.
    pub fn allocate(&self, bytes: u64) -> Result<ArenaBlock, ArenaError> {
        let full = || {
            let ArenaStats { reserved, used, .. } = self.stats();
            match self.0.config.max_bytes {
                Some(max) => ArenaError::Full { bytes, reserved, used, max },
                None => SegmentError::Size { bytes }.into(),
            }
        };
        // An empty tensor gets an address of its own, too.
        let taken = bytes.max(1).checked_next_multiple_of(ALIGNMENT).ok_or_else(full)?;
        if let Some(block) = self.take(bytes, taken) {
            return Ok(block);
        }
        let _growing = self.0.growing.lock();
        // Another thread may have grown the arena while this one waited.
        if let Some(block) = self.take(bytes, taken) {
            return Ok(block);
        }
        self.grow(taken, full)?;
        self.take(bytes, taken).ok_or_else(full)
    }

    fn take(&self, bytes: u64, taken: u64) -> Option<ArenaBlock> {
        let mut state = self.0.state.lock();
        let (index, offset) = state.free.take(taken)?;
        state.stats.used += taken;
        let segment = SegmentId(index);
        // Only segments that are never removed have free ranges.
        let start = state.get(segment)?.segment.as_ptr();
        drop(state);
        let pointer = start.wrapping_add(offset as usize);
        let arena = Arc::clone(&self.0);
        let copied = AtomicBool::new(false);
        Some(ArenaBlock { arena, segment, offset, bytes, taken: Some(taken), pointer, copied })
    }

    /// Adds a segment in which `taken` bytes fit.
    fn grow(&self, taken: u64, full: impl Fn() -> ArenaError) -> Result<(), ArenaError> {
        let ArenaConfig { job, huge, .. } = &self.0.config;
        let size = self.0.config.next_segment(self.stats().reserved, taken).ok_or_else(full)?;
        let id = self.0.state.lock().next();
        let name = format!("gradwire-{job}-{}-arena-{id}", std::process::id());
        let (segment, fd) = Segment::create(&name, size, *huge)?;
        let bytes = segment.bytes();
        let reserve = Reserve::of(&segment, fd.as_fd(), *huge)?;
        (self.0.register)(id, &segment, fd).map_err(|source| ArenaError::Register {
            segment: id,
            bytes,
            source,
        })?;
        let mut state = self.0.state.lock();
        state.put(id, Lent { segment, reserve, mapped: None });
        state.free.add(id.0, bytes);
        state.stats.segments += 1;
        state.stats.reserved += bytes;
        Ok(())
    }

    /// Turns memory that the program already has into a segment at the same addresses. The memory
    /// must be exactly the mapping of the file `fd`, from the file's first byte on; the descriptor
    /// then refers to the segment's memory. The addresses still belong to the program, which may
    /// unmap them.
    ///
    /// The caller ensures that nothing writes to the memory during the call: such a write may be
    /// lost. If the daemon refuses the segment, the memory stays usable.
    ///
    /// # Errors
    /// [`ArenaError`] if it is not such a mapping, or if its memory cannot be made or handed over.
    pub fn adopt(&self, start: usize, bytes: u64, fd: RawFd) -> Result<ArenaBlock, ArenaError> {
        let _growing = self.0.growing.lock();
        let ArenaConfig { job, huge, max_adopted, .. } = &self.0.config;
        if !self.may_adopt() {
            return Err(ArenaError::Adopted { max: *max_adopted });
        }
        let id = self.0.state.lock().next();
        let name = format!("gradwire-{job}-{}-adopted-{id}", std::process::id());
        let Adopted { segment, reserve, mapped, fd } =
            adopt::adopt(&name, start, bytes, fd, *huge)?;
        let (pointer, size) = (segment.as_ptr(), segment.bytes());
        (self.0.register)(id, &segment, fd).map_err(|source| ArenaError::Register {
            segment: id,
            bytes: size,
            source,
        })?;
        let mut state = self.0.state.lock();
        state.put(id, Lent { segment, reserve, mapped: Some(mapped) });
        state.stats.adopted += 1;
        state.stats.adopted_bytes += size;
        drop(state);
        let (arena, copied) = (Arc::clone(&self.0), AtomicBool::new(false));
        Ok(ArenaBlock { arena, segment: id, offset: 0, bytes, taken: None, pointer, copied })
    }

    /// Whether another segment may be adopted.
    pub fn may_adopt(&self) -> bool {
        self.stats().adopted < self.0.config.max_adopted
    }

    /// The segment and offset of `pointer`, if the `bytes` bytes from there are in one segment of
    /// this arena.
    pub fn locate(&self, pointer: *const u8, bytes: u64) -> Option<(SegmentId, u64)> {
        let state = self.0.state.lock();
        (0..).zip(&state.segments).find_map(|(index, lent)| {
            let segment = &lent.as_ref()?.segment;
            let offset = pointer.addr().checked_sub(segment.as_ptr().addr())? as u64;
            segment.range(offset, bytes).map(|_| (SegmentId(index), offset))
        })
    }

    /// Whether a block belongs to this arena.
    pub fn owns(&self, block: &ArenaBlock) -> bool {
        Arc::ptr_eq(&self.0, &block.arena)
    }

    /// How full the arena is.
    pub fn stats(&self) -> ArenaStats {
        self.0.state.lock().stats
    }
}

/// A part of an arena, which is freed on drop. It keeps the memory mapped.
pub struct ArenaBlock {
    arena: Arc<Shared>,
    segment: SegmentId,
    offset: u64,
    bytes: u64,
    /// The bytes that it occupies, a multiple of [`ALIGNMENT`]. `None` for an adopted segment.
    taken: Option<u64>,
    pointer: *mut u8,
    /// It was filled from ordinary memory, and this has not been counted yet.
    copied: AtomicBool,
}

// SAFETY: a block is an address range that nobody else gets while it lives; nothing in it is bound
// to a thread.
unsafe impl Send for ArenaBlock {}
// SAFETY: the methods read fields only; ordering accesses through the pointer is the duty of
// whoever dereferences it.
unsafe impl Sync for ArenaBlock {}

impl ArenaBlock {
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

    /// The mapping that contains it: its first byte and size in bytes. It lives as long as the
    /// arena, so a driver needs to register it only once.
    pub fn mapping(&self) -> (*mut u8, u64) {
        let state = self.arena.state.lock();
        let bytes = state.get(self.segment).map_or(0, |lent| lent.segment.bytes());
        (self.pointer.wrapping_sub(self.offset as usize), bytes)
    }

    /// Records, for metrics, that it was filled from ordinary memory.
    pub fn mark_copied(&self) {
        self.copied.store(true, Ordering::Relaxed);
    }

    /// Whether it was filled from ordinary memory since the last call.
    pub fn take_copied(&self) -> bool {
        // Usually it was not, and a load is cheaper than a swap.
        self.copied.load(Ordering::Relaxed) && self.copied.swap(false, Ordering::Relaxed)
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
pub fn take_back<'a>(
    blocks: impl IntoIterator<Item = (&'a ArenaBlock, Range<u64>), IntoIter: Clone>,
) -> Result<(), SegmentError> {
    let blocks = blocks.into_iter();
    let bytes = |(_, range): (_, Range<u64>)| range.end.saturating_sub(range.start);
    let copied = reserve::fits(blocks.clone().map(bytes).sum());
    for (block, Range { start, end }) in blocks {
        if end > block.bytes {
            return Err(SegmentError::OutOfRange { bytes: end, max: block.bytes });
        }
        let lent = block.arena.state.lock().get(block.segment).cloned();
        // A segment is not removed before its blocks. If the program has unmapped the memory,
        // something else may be at its addresses.
        let Some(lent) = lent.filter(|lent| lent.is_there()) else { continue };
        lent.reserve.replace(&lent.segment)?;
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
        if let Some(taken) = self.taken {
            state.free.give(self.segment.0, self.offset, taken);
            state.stats.used -= taken;
            return;
        }
        // The number may be used again only after the daemon has been notified.
        let lent = state.get(self.segment).cloned();
        state.stats.adopted -= 1;
        state.stats.adopted_bytes -= lent.as_ref().map_or(0, |lent| lent.segment.bytes());
        drop(state);
        (self.arena.release)(self.segment);
        let slot =
            self.arena.state.lock().segments.get_mut(self.segment.0 as usize).map(Option::take);
        drop((lent, slot)); // unmaps without holding our lock
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn config() -> ArenaConfig {
        ArenaConfig::new(JobId::new("test-growth").unwrap())
    }

    /// The sizes of the segments that are made for small blocks, until there are `bytes` bytes.
    fn sizes(config: &ArenaConfig, bytes: u64) -> Vec<u64> {
        let mut reserved = 0;
        let next = || {
            let size = config.next_segment(reserved, ALIGNMENT).filter(|_| reserved < bytes)?;
            reserved += size;
            Some(size)
        };
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn segments_double_up_to_the_configured_size() {
        let mib = |sizes: &[u64]| sizes.iter().map(|size| size / MIB).collect::<Vec<_>>();
        let sizes = |segment_bytes| sizes(&ArenaConfig { segment_bytes, ..config() }, 256 * MIB);
        assert_eq!(mib(&sizes(64 * MIB)), [4, 4, 8, 16, 32, 64, 64, 64]);
        assert_eq!(mib(&sizes(24 * MIB))[..6], [4, 4, 8, 16, 24, 24]);
        assert_eq!(mib(&sizes(MIB))[..128], [1; 128]);
    }

    #[test]
    fn an_arena_without_limit_has_few_segments() {
        let all = sizes(&config(), 4 << 40);
        assert!(all.len() < 1024, "{} segments are more than a worker may have", all.len());
        assert_eq!(config().next_segment(64 << 30, 1 << 40), Some(1 << 40));
        assert_eq!(config().next_segment(0, u64::MAX - 63), None, "no huge page ends there");
        let register = Box::new(|_, _: &_, _| unreachable!("nothing is made"));
        let arena = Arena::new(config(), register, Box::new(drop));
        let refused = arena.allocate(u64::MAX);
        assert!(matches!(refused, Err(ArenaError::Segment(SegmentError::Size { .. }))));
    }

    proptest! {
        /// Any blocks of any sizes: each fits its segment, the limit holds (BOUND), the total at
        /// most doubles at a time, and no segment is smaller than necessary.
        #[test]
        fn growth_fits_and_is_bounded(
            blocks in prop::collection::vec((0u32..34, 0u64..1 << 20), 1..400),
            segment_bytes in (16u64..1 << 18).prop_map(|pages| pages * 4096),
            max_bytes in prop::option::of((1u64..1 << 24).prop_map(|pages| pages * 4096)),
        ) {
            let config = ArenaConfig { segment_bytes, max_bytes, ..config() };
            let mut reserved = 0u64;
            for (log, more) in blocks {
                let block = ((1u64 << log) + more).next_multiple_of(ALIGNMENT);
                let left = max_bytes.map_or(u64::MAX, |max| max.saturating_sub(reserved));
                let Some(size) = config.next_segment(reserved, block) else {
                    prop_assert!(block > left, "{block} bytes are refused at {reserved}");
                    continue;
                };
                prop_assert!((block..=left).contains(&size));
                let (own, first) = (block.next_multiple_of(HUGE_PAGE), 4 << 20);
                prop_assert!(size <= reserved.max(first).max(own));
                prop_assert!(size <= segment_bytes.max(reserved / 64).max(own));
                let least = (reserved / 2).max(first).min(segment_bytes).max(reserved / 128);
                prop_assert!(size >= least.min(left));
                reserved += size;
            }
        }
    }
}
