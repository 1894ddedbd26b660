//! Memory of the program that becomes a segment at its own addresses.
//!
//! This takes three steps. First the arena takes one of the places for adopted memory. Then it
//! makes shared memory of the right size and the daemon maps it, which may fail or take time, and
//! does not touch the program's memory: another thread may do it. Then the program's memory moves
//! there, which takes as long as a copy of it.

use std::{fmt, os::fd::BorrowedFd, ptr::NonNull, sync::Arc};

use super::{
    block::{ArenaBlock, Owner},
    error::ArenaError,
    shared::{Kind, Lent, Made, Shared, Slot},
};
use crate::segment::{
    SegmentError,
    adopt::{self, Mappings},
    renew::Successor,
};

/// A place for adopted memory. Given back on drop.
pub struct AdoptionPlace {
    arena: Arc<Shared>,
    bytes: u64,
    /// Whether the block has taken over the place, and gives it back.
    used: bool,
}

impl AdoptionPlace {
    pub(super) fn take(arena: &Arc<Shared>, bytes: u64) -> Result<Self, ArenaError> {
        let max = arena.config.max_adopted;
        let mut state = arena.state.lock();
        if state.stats.adopted >= max {
            return Err(ArenaError::Adopted { max });
        }
        state.stats.adopted += 1;
        drop(state);
        Ok(Self { arena: arena.clone(), bytes, used: false })
    }

    /// Makes the shared memory. The daemon has it when this returns.
    ///
    /// # Errors
    /// [`ArenaError`] if it cannot be made or handed over.
    pub fn make(self) -> Result<Adoption, ArenaError> {
        let made = self.arena.make(Kind::Adopted, self.bytes)?;
        Ok(Adoption { place: self, made: Some(made) })
    }
}

impl Drop for AdoptionPlace {
    fn drop(&mut self) {
        if !self.used {
            self.arena.state.lock().stats.adopted -= 1;
        }
    }
}

impl fmt::Debug for AdoptionPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AdoptionPlace({} bytes)", self.bytes)
    }
}

/// Shared memory that the daemon has, to which memory of the program can move. Given back on drop.
pub struct Adoption {
    place: AdoptionPlace,
    /// `None` once memory has moved there.
    made: Option<Made>,
}

impl Adoption {
    /// The size of the memory, in bytes.
    pub fn bytes(&self) -> u64 {
        self.place.bytes
    }

    /// Moves memory of the program here: the shared memory takes its place, with `contents`, which
    /// is the address of as many bytes. The memory must be exactly the mapping of the file `fd`,
    /// from the file's first byte on, and as large as this. It need not have contents yet:
    /// otherwise pass its own address. Afterwards the descriptor refers to the shared memory, so
    /// that the old file takes no memory any more.
    ///
    /// The addresses still belong to the program. It keeps the memory and its contents when the
    /// block is dropped. `owner` is dropped after the block.
    ///
    /// # Errors
    /// [`ArenaError`] if it is not such a mapping, or shared already, or if the daemon that has the
    /// shared memory has ended. Then nothing has changed.
    ///
    /// # Safety
    /// - During the call nobody writes to the memory or to the contents, nor uses `fd` or the file
    ///   behind it. The contents are readable.
    /// - While the block is used, that is while an operation on it is in flight or its address is
    ///   dereferenced, the addresses stay mapped and belong to nobody else. An `owner` that unmaps
    ///   them on drop ensures this.
    /// - While [`Arena::renew`](super::Arena::renew) runs, nobody writes to the memory,
    ///   unmaps it, or closes `fd`.
    /// - While the block is used, nothing in this process has a reference to the memory that an
    ///   operation on it violates.
    pub unsafe fn take_place(
        mut self,
        start: NonNull<u8>,
        fd: BorrowedFd<'_>,
        contents: NonNull<u8>,
        owner: Owner,
    ) -> Result<ArenaBlock, ArenaError> {
        let (arena, bytes) = (self.place.arena.clone(), self.bytes());
        let _alone = arena.adopting.lock();
        self.check_unshared(start.addr().get())?;
        // Always there: only this method takes it, and it consumes the adoption.
        let Some(mut made) = self.made.take() else {
            return Err(SegmentError::Size { bytes }.into());
        };
        if !Arc::ptr_eq(&made.daemon, &arena.state.lock().daemon) {
            self.made = Some(made); // to be given back
            return Err(ArenaError::Ended { bytes });
        }
        // SAFETY: the caller's promises are those of `move_to`.
        let moved = unsafe {
            let Successor { segment, memory, .. } = &mut made.new;
            adopt::move_to(segment, memory, start, bytes, fd, contents)
        };
        let place = match moved {
            Ok(place) => place,
            Err(error) => {
                self.made = Some(made); // to be given back
                return Err(error.into());
            }
        };
        self.place.used = true; // by the block
        let Made { id, new: Successor { segment, reserve, .. }, .. } = made;
        let size = segment.bytes();
        let mut state = arena.state.lock();
        state.set(id, Slot::Lent(Arc::new(Lent::new(segment, reserve, Some(place)))));
        state.stats.adopted_bytes += size;
        drop(state);
        Ok(ArenaBlock::adopted(arena.clone(), id, bytes, start.as_ptr(), owner))
    }

    /// Refuses memory that is in a segment of this arena: it would have two owners, and results
    /// would go to one of them only.
    fn check_unshared(&self, address: usize) -> Result<(), ArenaError> {
        let (bytes, start) = (self.bytes(), address as u64);
        let end = start.saturating_add(bytes);
        let mappings = Mappings::default();
        let state = self.place.arena.state.lock();
        let overlapping = state.lent().find(|(_, lent)| {
            let theirs = lent.segment.as_ptr().addr() as u64;
            let overlaps = theirs < end && start < theirs + lent.segment.bytes();
            // The program may have unmapped memory that it shared, and mapped other memory there.
            overlaps && lent.is_there(&mappings)
        });
        match overlapping {
            Some((segment, _)) => Err(ArenaError::AlreadyShared { address, bytes, segment }),
            None => Ok(()),
        }
    }
}

impl Drop for Adoption {
    fn drop(&mut self) {
        if let Some(Made { id, daemon, .. }) = &self.made {
            self.place.arena.release(daemon, *id);
        }
    }
}

impl fmt::Debug for Adoption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Adoption({} bytes)", self.bytes())
    }
}
