//! Tensors in shared memory, worker side. They are never copied on their way to the daemon.
//!
//! An arena has a few segments and one list of the free ranges in them. It grows by a segment when
//! nothing fits, and uses freed blocks again (best fit; neighbours are joined). `growth` decides
//! how large a segment is, and which segments without blocks go back to the system: before the
//! arena grows, and when somebody calls [`Arena::give_back`]. If the daemon cannot be asked to
//! stop, [`take_back`] detaches segments from it.
//!
//! Memory that the program already has can become a segment of its own ([`Arena::make_adoption`]).
//! It is a single block. When the block is dropped, only the program owns the memory.
//!
//! Every safe function here is sound whatever its arguments: blocks never overlap, a segment stays
//! mapped while a block of it lives, and nothing here reads or writes the bytes of a block. Only
//! [`Adoption::take_place`] trusts its caller, because it turns an address into memory.

use std::{
    fmt,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use parking_lot::Mutex;

use crate::segment::{
    Segment, SegmentError, SegmentId,
    adopt::{self, Mapped},
    reserve::Reserve,
};

mod adoption;
mod block;
mod error;
mod free_list;
mod growth;

pub use adoption::{Adoption, Owner};
pub use block::{ArenaBlock, take_back};
pub use error::{ArenaError, RegisterError};
use free_list::FreeList;
pub use growth::{ArenaConfig, SPARE};
use growth::{Usage, to_give_back};

/// A block's address and size are multiples of this: a cache line, and the widest vector register.
pub const ALIGNMENT: u64 = 64;

/// Hands a new segment over to the daemon. It is called before any block of the segment is given
/// out.
pub type Register =
    Box<dyn Fn(SegmentId, &Segment, OwnedFd) -> Result<(), RegisterError> + Send + Sync>;

/// Notifies the daemon that a segment is no longer used. Its number may be used again. The function
/// must not fail, and must not wait for the arena.
pub type Release = Box<dyn Fn(SegmentId) + Send + Sync>;

/// How full an arena is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
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
    /// Somebody relies on its mapping, so it stays as long as the arena.
    pinned: AtomicBool,
}

impl Lent {
    fn new(segment: Segment, reserve: Reserve, mapped: Option<Mapped>) -> Self {
        Self { segment, reserve, mapped, pinned: AtomicBool::new(false) }
    }

    /// Whether its addresses still belong to it.
    fn is_there(&self) -> bool {
        let (start, bytes) = (self.segment.as_ptr().addr(), self.segment.bytes());
        self.mapped
            .is_none_or(|file| self.reserve.is_used() || adopt::is_mapped(start, bytes, file))
    }
}

/// The use of a segment number.
#[derive(Default)]
enum Slot {
    #[default]
    Free,
    /// The daemon has the segment, or is about to get it. If it never answered, forever.
    Taken,
    Lent(Arc<Lent>),
}

#[derive(Default)]
struct ArenaState {
    /// By segment number.
    slots: Vec<Slot>,
    free: FreeList,
    usage: Usage,
    stats: ArenaStats,
}

impl ArenaState {
    /// Takes the lowest free number.
    fn take_number(&mut self) -> SegmentId {
        let free = self.slots.iter().position(|slot| matches!(slot, Slot::Free));
        let index = free.unwrap_or(self.slots.len());
        if index == self.slots.len() {
            self.slots.push(Slot::Free);
        }
        self.slots[index] = Slot::Taken;
        SegmentId(index as u32)
    }

    /// Changes the use of a number; returns the previous one, to be dropped without the lock.
    fn set(&mut self, id: SegmentId, slot: Slot) -> Option<Slot> {
        self.slots.get_mut(id.0 as usize).map(|old| std::mem::replace(old, slot))
    }

    fn get(&self, id: SegmentId) -> Option<&Arc<Lent>> {
        match self.slots.get(id.0 as usize)? {
            Slot::Lent(lent) => Some(lent),
            Slot::Free | Slot::Taken => None,
        }
    }

    /// The segments with their numbers.
    fn lent(&self) -> impl Iterator<Item = (SegmentId, &Lent)> {
        (0..).map(SegmentId).zip(&self.slots).filter_map(|(id, slot)| match slot {
            Slot::Lent(lent) => Some((id, &**lent)),
            Slot::Free | Slot::Taken => None,
        })
    }

    /// Takes segments without blocks out of use until `excess` bytes less are reserved, if there
    /// are enough. Their numbers stay taken.
    fn retire(&mut self, excess: u64) -> Vec<SegmentId> {
        let is_empty = |(id, lent): (SegmentId, &Lent)| {
            let bytes = lent.segment.bytes();
            let may_go = lent.mapped.is_none() && !lent.pinned.load(Relaxed);
            (may_go && self.free.is_whole(id.0, bytes)).then_some((bytes, id))
        };
        let retired = to_give_back(self.lent().filter_map(is_empty).collect(), excess);
        for id in &retired {
            let bytes = self.get(*id).map_or(0, |lent| lent.segment.bytes());
            self.free.remove_segment(id.0, bytes);
            self.stats.segments -= 1;
            self.stats.reserved -= bytes;
        }
        retired
    }
}

struct Shared {
    config: ArenaConfig,
    register: Register,
    release: Release,
    /// Held while a segment is made and handed over: allocations that fit continue meanwhile.
    growing: Mutex<()>,
    /// Held while memory of the program moves.
    adopting: Mutex<()>,
    state: Mutex<ArenaState>,
}

/// A segment that the daemon has, before anything is in it.
struct Made {
    id: SegmentId,
    segment: Segment,
    reserve: Reserve,
    fd: OwnedFd,
}

impl Shared {
    /// Makes a segment and hands it over.
    fn make(&self, kind: &str, bytes: u64, config: &ArenaConfig) -> Result<Made, ArenaError> {
        let id = self.state.lock().take_number();
        let made = self.make_as(id, kind, bytes, config);
        match &made {
            // The daemon may still get it, so the number is not used again.
            Ok(_) | Err(ArenaError::Unanswered { .. }) => {}
            Err(_) => drop(self.state.lock().set(id, Slot::Free)),
        }
        made
    }

    fn make_as(
        &self,
        id: SegmentId,
        kind: &str,
        bytes: u64,
        config: &ArenaConfig,
    ) -> Result<Made, ArenaError> {
        let ArenaConfig { job, huge, .. } = config;
        let name = format!("gradwire-{job}-{}-{kind}-{id}", std::process::id());
        let (segment, fd) = Segment::create(&name, bytes, *huge)?;
        let reserve = Reserve::of(&segment, fd.as_fd(), *huge)?;
        let theirs =
            fd.try_clone().map_err(|error| SegmentError::io("copy a descriptor", bytes, error))?;
        let bytes = segment.bytes();
        (self.register)(id, &segment, theirs).map_err(|error| match error {
            RegisterError::Refused(source) => ArenaError::Register { segment: id, bytes, source },
            RegisterError::Unanswered(source) => {
                ArenaError::Unanswered { segment: id, bytes, source }
            }
        })?;
        Ok(Made { id, segment, reserve, fd })
    }

    /// Gives segments back: the daemon first, so that their numbers are used again only afterwards.
    fn release_all(&self, retired: &[SegmentId]) {
        for id in retired {
            (self.release)(*id);
            let old = self.state.lock().set(*id, Slot::Free);
            drop(old); // unmaps without holding our lock
        }
    }
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
        let (growing, adopting, state) = Default::default();
        Self(Arc::new(Shared { config, register, release, growing, adopting, state }))
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
        // Another thread may have grown the arena while this one waited, and may take what this one
        // has made.
        loop {
            if let Some(block) = self.take(bytes, taken) {
                return Ok(block);
            }
            self.grow(taken, full)?;
        }
    }

    fn take(&self, bytes: u64, taken: u64) -> Option<ArenaBlock> {
        let mut state = self.0.state.lock();
        let (index, offset) = state.free.take(taken)?;
        state.usage.add(taken);
        let segment = SegmentId(index);
        // A segment without free ranges stays while it has blocks.
        let start = state.get(segment)?.segment.as_ptr();
        drop(state);
        let pointer = start.wrapping_add(offset as usize);
        Some(ArenaBlock::new(self.0.clone(), segment, offset, bytes, taken, pointer))
    }

    /// Adds a segment in which `taken` bytes fit.
    fn grow(&self, taken: u64, full: impl Fn() -> ArenaError) -> Result<(), ArenaError> {
        let config = &self.0.config;
        let make = |bytes: Option<u64>| self.0.make("arena", bytes.ok_or_else(&full)?, config);
        let new = config.next_segment(self.stats().reserved, taken).unwrap_or(taken);
        self.keep_at_most(|state| state.usage.allowed(taken).saturating_sub(new));
        let first = make(config.next_segment(self.stats().reserved, taken));
        let made = match first {
            // Memory is short: all that is empty goes back, and the segment only holds the block.
            Err(ArenaError::Full { .. } | ArenaError::Segment(_)) => {
                self.keep_at_most(|_| 0);
                make(config.least_segment(self.stats().reserved, taken))
            }
            first => first,
        }?;
        let Made { id, segment, reserve, .. } = made;
        let bytes = segment.bytes();
        let mut state = self.0.state.lock();
        state.set(id, Slot::Lent(Arc::new(Lent::new(segment, reserve, None))));
        state.free.add(id.0, bytes);
        state.stats.segments += 1;
        state.stats.reserved += bytes;
        Ok(())
    }

    /// Gives segments without blocks back to the system, as far as there are more than twice the
    /// bytes that were in use since the call before the last one, plus [`SPARE`]. Call it now and
    /// then: the arena itself gives memory back only before it grows.
    pub fn give_back(&self) {
        self.keep_at_most(|state| state.usage.allowed(0));
        self.0.state.lock().usage.turn();
    }

    /// Gives segments without blocks back until at most `limit` bytes are reserved.
    fn keep_at_most(&self, limit: impl Fn(&ArenaState) -> u64) {
        let mut state = self.0.state.lock();
        let excess = state.stats.reserved.saturating_sub(limit(&state));
        let retired = state.retire(excess);
        drop(state);
        self.0.release_all(&retired);
    }

    /// Makes shared memory of this size, to which memory of the program can move
    /// ([`Adoption::take_place`]). The daemon has it when this returns.
    ///
    /// # Errors
    /// [`ArenaError`] if it cannot be made or handed over, or if too many segments are adopted.
    pub fn make_adoption(&self, bytes: u64) -> Result<Adoption, ArenaError> {
        Adoption::make(&self.0, bytes)
    }

    /// Whether another segment may be adopted.
    pub fn may_adopt(&self) -> bool {
        self.stats().adopted < self.0.config.max_adopted
    }

    /// The segment and offset of `pointer`, if the `bytes` bytes from there are in one segment of
    /// this arena.
    pub fn locate(&self, pointer: *const u8, bytes: u64) -> Option<(SegmentId, u64)> {
        let state = self.0.state.lock();
        state.lent().find_map(|(id, Lent { segment, .. })| {
            let offset = pointer.addr().checked_sub(segment.as_ptr().addr())? as u64;
            segment.range(offset, bytes).map(|_| (id, offset))
        })
    }

    /// Whether a block belongs to this arena.
    pub fn owns(&self, block: &ArenaBlock) -> bool {
        block.is_of(&self.0)
    }

    /// How full the arena is.
    pub fn stats(&self) -> ArenaStats {
        let state = self.0.state.lock();
        ArenaStats { used: state.usage.now(), ..state.stats }
    }
}
