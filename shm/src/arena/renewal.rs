//! Gives the memory of an arena to the successor of a daemon that has ended.
//!
//! The successor can't open the segments of its predecessor ([`crate::segment`]), so each segment
//! moves into new memory, one after the other: this takes as long as a copy of the memory, and at
//! most the largest segment in addition. Addresses, blocks and segment numbers stay. No other
//! thread gets a free range of a segment before it has moved, so what a block contains is not
//! written meanwhile.
//!
//! Some segments can't move. They are *retired*: blocks keep their memory, which no daemon has any
//! more.
//!
//! - A mapping on which somebody relies ([`ArenaBlock::mapping`]), such as the driver of a GPU,
//!   which goes on using the old memory. It stays as long as the arena.
//! - Adopted memory that the program has unmapped, or that the successor refuses. It is ordinary
//!   memory of the program again, and may be adopted again.

use std::sync::{Arc, atomic::Ordering::Relaxed};

#[cfg(doc)]
use super::block::ArenaBlock;
use super::{
    Arena,
    error::ArenaError,
    shared::{ArenaState, Daemon, Kind, Lent, Register, Release, Renewed, Shared, Slot},
};
use crate::segment::{SegmentError, SegmentId, renew::Successor};

impl Arena {
    /// Gives the memory to another daemon, after the previous one has ended. From now on, segments
    /// are handed over by `register` and given back by `release`. Allocations wait until this
    /// returns.
    ///
    /// # Errors
    /// [`ArenaError`] if memory is missing, or if the daemon does not take a segment that is not
    /// adopted. Blocks then keep their memory and its contents, but the daemon does not have all of
    /// it: the call must be repeated, with another daemon.
    ///
    /// # Safety
    /// - During the call nobody writes to a block that exists: such a write may be lost. So no
    ///   operation is in flight, and the program waits or does not touch its tensors.
    /// - Nobody unmaps adopted memory during the call, as [`Adoption::take_place`] demands.
    ///
    /// [`Adoption::take_place`]: super::Adoption::take_place
    pub unsafe fn renew(
        &self,
        register: Register,
        release: Release,
    ) -> Result<Renewed, ArenaError> {
        let _alone = (self.0.growing.lock(), self.0.adopting.lock());
        let daemon = Arc::new(Daemon { register, release });
        let orphaned = self.0.state.lock().begin(daemon.clone());
        let mut renewed = Renewed::default();
        for (id, lent) in orphaned {
            match self.0.renew(id, &lent, &daemon)? {
                Fate::Renewed => {
                    renewed.segments += 1;
                    renewed.bytes += lent.segment.bytes();
                }
                Fate::Retired => renewed.retired += 1,
                Fate::Dropped => {}
            }
        }
        Ok(renewed)
    }
}

/// What has become of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Renewed,
    Retired,
    /// It contained no block in use.
    Dropped,
}

impl ArenaState {
    /// Begins with another daemon, which has no segment yet. Returns those that it should get.
    fn begin(&mut self, daemon: Arc<Daemon>) -> Vec<(SegmentId, Arc<Lent>)> {
        self.daemon = daemon;
        self.withheld.append(std::mem::take(&mut self.free));
        let mut orphaned = Vec::new();
        for (id, slot) in (0..).map(SegmentId).zip(&mut self.slots) {
            *slot = match std::mem::take(slot) {
                Slot::Lent(lent) | Slot::Orphaned(lent) => {
                    orphaned.push((id, lent.clone()));
                    Slot::Orphaned(lent)
                }
                Slot::Unclear => Slot::Free,
                other => other,
            };
        }
        orphaned
    }

    fn is_orphaned(&self, id: SegmentId) -> bool {
        matches!(self.slots.get(id.0 as usize), Some(Slot::Orphaned(_)))
    }

    /// Takes an orphaned segment without blocks out of use; returns it, to be dropped without the
    /// lock.
    fn drop_unused(&mut self, id: SegmentId, lent: &Lent) -> Option<Slot> {
        let bytes = lent.segment.bytes();
        if !self.withheld.is_whole(id.0, bytes) {
            return None;
        }
        self.withheld.remove_segment(id.0);
        self.stats.segments -= 1;
        self.stats.reserved -= bytes;
        self.set(id, Slot::Free)
    }

    /// The daemon has an orphaned segment.
    fn lend(&mut self, id: SegmentId, lent: &Arc<Lent>) {
        for (offset, bytes) in self.withheld.remove_segment(id.0) {
            self.free.give(id.0, offset, bytes);
        }
        self.set(id, Slot::Lent(lent.clone()));
    }

    /// No daemon gets an orphaned segment.
    fn retire(&mut self, id: SegmentId, lent: &Arc<Lent>) {
        let bytes = lent.segment.bytes();
        if lent.adopted.is_some() {
            self.forget_adopted(bytes);
        } else {
            let free: u64 = self.withheld.remove_segment(id.0).iter().map(|(_, size)| size).sum();
            self.usage.remove(bytes - free);
            self.stats.segments -= 1;
            self.stats.reserved -= bytes;
            self.stats.retired += bytes;
        }
        self.set(id, Slot::Retired(lent.clone()));
    }
}

impl Shared {
    /// Moves an orphaned segment to new memory, and hands that over to the daemon.
    fn renew(&self, id: SegmentId, lent: &Arc<Lent>, daemon: &Daemon) -> Result<Fate, ArenaError> {
        if lent.pinned.load(Relaxed) {
            return Ok(self.retire(id, lent));
        }
        let unused = self.state.lock().drop_unused(id, lent);
        if unused.is_some() {
            return Ok(Fate::Dropped);
        }
        let handed_over = self.hand_over_copy(id, lent, daemon);
        let result = handed_over.and_then(|new| {
            let fate = self.take_place(id, lent, new);
            if !matches!(fate, Ok(Fate::Renewed)) {
                (daemon.release)(id);
            }
            Ok(fate?)
        });
        match result {
            // The daemon, and not this segment, is the reason.
            Err(error @ ArenaError::Unanswered { .. }) => Err(error),
            Err(_) if lent.adopted.is_some() => Ok(self.retire(id, lent)),
            result => result,
        }
    }

    fn hand_over_copy(
        &self,
        id: SegmentId,
        lent: &Lent,
        daemon: &Daemon,
    ) -> Result<Successor, ArenaError> {
        let state = self.state.lock();
        let place = lent.place();
        drop(state);
        let kind = if place.is_some() { Kind::Adopted } else { Kind::Arena };
        let new = self.create(id, kind, lent.segment.bytes())?;
        new.copy(&lent.segment, place.as_ref())?;
        daemon.hand_over(id, &new)?;
        Ok(new)
    }

    fn take_place(
        &self,
        id: SegmentId,
        lent: &Arc<Lent>,
        new: Successor,
    ) -> Result<Fate, SegmentError> {
        // A block that ends now waits, so its memory is still there.
        let mut state = self.state.lock();
        if !state.is_orphaned(id) {
            return Ok(Fate::Dropped);
        }
        if lent.pinned.load(Relaxed) {
            drop(state);
            return Ok(self.retire(id, lent));
        }
        let mut place = lent.place();
        new.take_place(&lent.segment, &lent.reserve, place.as_mut())?;
        lent.set_place(place);
        state.lend(id, lent);
        Ok(Fate::Renewed)
    }

    fn retire(&self, id: SegmentId, lent: &Arc<Lent>) -> Fate {
        self.has_retired.store(true, Relaxed);
        let mut state = self.state.lock();
        if !state.is_orphaned(id) {
            return Fate::Dropped;
        }
        state.retire(id, lent);
        Fate::Retired
    }
}
