//! Tensors in shared memory, worker side. They are never copied on their way to the daemon.
//!
//! An arena has a few segments and one list of the free ranges in them. It grows by a segment when
//! nothing fits, and uses freed blocks again (best fit; neighbours are joined). `growth` decides
//! how large a segment is, and which segments without blocks go back to the system: before the
//! arena grows, and when somebody calls [`Arena::give_back`]. If the daemon cannot be asked to
//! stop, [`take_back`] detaches segments from it. When a daemon has ended, [`Arena::renew`] gives
//! the memory to its successor.
//!
//! A forked child gets memory of its own (`fork`).
//!
//! Memory that the program already has can become a segment of its own ([`Arena::adoption`]).
//! It is a single block. When the block is dropped, only the program owns the memory.
//!
//! # Soundness
//!
//! Safe code can't cause undefined behaviour here, whatever it calls: blocks never overlap, a
//! segment stays mapped while a block of it lives, addresses come out as raw pointers only, and no
//! safe function reads or writes the bytes of a block. Three functions trust their caller and are
//! unsafe: [`Adoption::take_place`] turns an address into memory, [`take_back`] changes bytes, and
//! [`Arena::renew`] copies them.

use std::{fmt, sync::Arc};

use crate::segment::{SegmentError, SegmentId, renew::Successor};

mod adoption;
mod block;
mod error;
mod fork;
mod free_list;
mod growth;
mod renewal;
mod shared;

pub use adoption::{Adoption, AdoptionPlace};
pub use block::{ArenaBlock, Owner, take_back};
pub use error::{ArenaError, RegisterError};
pub use growth::{ArenaConfig, SPARE};
pub use shared::Renewed;
pub use shared::{ALIGNMENT, ArenaStats, Register, Release};
use shared::{ArenaState, Daemon, Kind, Lent, Made, Shared, Slot};

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
        let (growing, adopting, has_retired) = Default::default();
        let state = ArenaState::new(Daemon { register, release }).into();
        let shared = Arc::new(Shared { config, growing, adopting, has_retired, state });
        fork::watch(&shared);
        Self(shared)
    }

    /// Allocates `bytes` bytes, aligned to [`ALIGNMENT`]. The memory is not cleared: it may hold
    /// the contents of an earlier block.
    ///
    /// # Errors
    /// [`ArenaError`] if it does not fit, or if its memory cannot be made or handed over.
    pub fn allocate(&self, bytes: u64) -> Result<ArenaBlock, ArenaError> {
        let full = || {
            let ArenaStats { reserved, retired, used, .. } = self.stats();
            let reserved = reserved + retired;
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
        let make = |bytes: Option<u64>| self.0.make(Kind::Arena, bytes.ok_or_else(&full)?);
        let reserved = || {
            let ArenaStats { reserved, retired, .. } = self.stats();
            reserved + retired
        };
        let new = config.next_segment(reserved(), taken).unwrap_or(taken);
        self.0.keep_at_most(|state| state.usage.allowed(taken).saturating_sub(new));
        let first = make(config.next_segment(reserved(), taken));
        let made = match first {
            // Memory is short: all that is empty goes back, and the segment only holds the block.
            Err(ArenaError::Full { .. } | ArenaError::Segment(_)) => {
                self.0.keep_at_most(|_| 0);
                make(config.least_segment(reserved(), taken))
            }
            first => first,
        }?;
        let Made { id, new: Successor { segment, reserve, .. }, .. } = made;
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
        self.0.keep_at_most(|state| state.usage.allowed(0));
        self.0.state.lock().usage.turn();
    }

    /// Takes a place for memory of the program of this size. [`AdoptionPlace::make`] makes the
    /// shared memory, to which it can move ([`Adoption::take_place`]).
    ///
    /// # Errors
    /// [`ArenaError`] if too many segments are adopted.
    pub fn adoption(&self, bytes: u64) -> Result<AdoptionPlace, ArenaError> {
        AdoptionPlace::take(&self.0, bytes)
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
