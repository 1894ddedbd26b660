//! Memory of the program that becomes a segment at its own addresses.
//!
//! This takes two steps. First the arena makes shared memory of the right size and the daemon maps
//! it, which may fail or take time, and does not touch the program's memory. Then the program's
//! memory moves there, which takes as long as a copy of it.

use std::{fmt, os::fd::BorrowedFd, ptr::NonNull, sync::Arc};

use super::{
    block::{ArenaBlock, Owner},
    error::ArenaError,
    growth::ArenaConfig,
    shared::{Lent, Made, Shared, Slot},
};
use crate::segment::{HugePages, SegmentError, adopt};

/// Shared memory that the daemon has, to which memory of the program can move. Given back on drop.
pub struct Adoption {
    arena: Arc<Shared>,
    bytes: u64,
    /// `None` once memory has moved there.
    made: Option<Made>,
}

impl Adoption {
    pub(super) fn make(arena: &Arc<Shared>, bytes: u64) -> Result<Self, ArenaError> {
        let config = &arena.config;
        let max = config.max_adopted;
        {
            let mut state = arena.state.lock();
            if state.stats.adopted >= max {
                return Err(ArenaError::Adopted { max });
            }
            state.stats.adopted += 1;
        }
        // The program's addresses may not be aligned to the huge pages of the pool.
        let huge = match config.huge {
            HugePages::Require => HugePages::Advise,
            other => other,
        };
        let config = ArenaConfig { huge, ..config.clone() };
        let made = arena.make("adopted", bytes, &config);
        let made = made.inspect_err(|_| arena.state.lock().stats.adopted -= 1)?;
        Ok(Self { arena: arena.clone(), bytes, made: Some(made) })
    }

    /// The size of the memory, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Moves memory of the program here: the shared memory takes its place, with its contents. The
    /// memory must be exactly the mapping of the file `fd`, from the file's first byte on, and as
    /// large as this. Afterwards the descriptor refers to the shared memory, so that the old file
    /// takes no memory any more.
    ///
    /// The addresses still belong to the program. It keeps the memory and its contents when the
    /// block is dropped. `owner` is dropped after the block.
    ///
    /// # Errors
    /// [`ArenaError`] if it is not such a mapping, or shared already. Then nothing has changed.
    ///
    /// # Safety
    /// - Nobody writes to the memory during the call, nor uses `fd` or the file behind it.
    /// - While the block is used, that is while an operation on it is in flight or its address is
    ///   dereferenced, the addresses stay mapped and belong to nobody else. An `owner` that unmaps
    ///   them on drop ensures this.
    /// - While the block is used, nothing in this process has a reference to the memory that an
    ///   operation on it violates.
    pub unsafe fn take_place(
        mut self,
        start: NonNull<u8>,
        fd: BorrowedFd<'_>,
        owner: Owner,
    ) -> Result<ArenaBlock, ArenaError> {
        let arena = self.arena.clone();
        let _alone = arena.adopting.lock();
        self.check_unshared(start.addr().get())?;
        // Always there: only this method takes it, and it consumes the adoption.
        let Some(mut made) = self.made.take() else {
            return Err(SegmentError::Size { bytes: self.bytes }.into());
        };
        // SAFETY: the caller's promises are those of `move_to`.
        let moved = unsafe { adopt::move_to(&mut made.segment, &made.fd, start, self.bytes, fd) };
        let mapped = match moved {
            Ok(mapped) => mapped,
            Err(error) => {
                self.made = Some(made); // to be given back
                return Err(error.into());
            }
        };
        let Made { id, segment, reserve, .. } = made;
        let size = segment.bytes();
        let mut state = arena.state.lock();
        state.set(id, Slot::Lent(Arc::new(Lent::new(segment, reserve, Some(mapped)))));
        state.stats.adopted_bytes += size;
        drop(state);
        Ok(ArenaBlock::adopted(arena.clone(), id, self.bytes, start.as_ptr(), owner))
    }

    /// Refuses memory that is in a segment of this arena: it would have two owners, and results
    /// would go to one of them only.
    fn check_unshared(&self, address: usize) -> Result<(), ArenaError> {
        let (bytes, start) = (self.bytes, address as u64);
        let end = start.saturating_add(bytes);
        let state = self.arena.state.lock();
        let overlapping = state.lent().find(|(_, lent)| {
            let theirs = lent.segment.as_ptr().addr() as u64;
            let overlaps = theirs < end && start < theirs + lent.segment.bytes();
            // The program may have unmapped memory that it shared, and mapped other memory there.
            overlaps && lent.is_there()
        });
        match overlapping {
            Some((segment, _)) => Err(ArenaError::AlreadyShared { address, bytes, segment }),
            None => Ok(()),
        }
    }
}

impl Drop for Adoption {
    fn drop(&mut self) {
        if let Some(Made { id, .. }) = &self.made {
            self.arena.state.lock().stats.adopted -= 1;
            self.arena.release_all(&[*id]);
        }
    }
}

impl fmt::Debug for Adoption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Adoption({} bytes)", self.bytes)
    }
}
