//! What the parts of an arena share: its segments, by number, and how one is made, handed over to
//! the daemon, and given back.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use parking_lot::Mutex;

use super::{
    error::{ArenaError, RegisterError},
    free_list::FreeList,
    growth::{ArenaConfig, Usage, to_give_back},
};
use crate::segment::{
    Segment, SegmentError, SegmentId,
    adopt::{self, Mapped},
    reserve::Reserve,
};

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
pub(super) struct Lent {
    pub(super) segment: Segment,
    pub(super) reserve: Reserve,
    /// The mapping at the addresses of an adopted segment, which others may unmap.
    pub(super) mapped: Option<Mapped>,
    /// Somebody relies on its mapping, so it stays as long as the arena.
    pub(super) pinned: AtomicBool,
}

impl Lent {
    pub(super) fn new(segment: Segment, reserve: Reserve, mapped: Option<Mapped>) -> Self {
        Self { segment, reserve, mapped, pinned: AtomicBool::new(false) }
    }

    /// Whether its addresses still belong to it.
    pub(super) fn is_there(&self) -> bool {
        let (start, bytes) = (self.segment.as_ptr().addr(), self.segment.bytes());
        self.mapped
            .is_none_or(|file| self.reserve.is_used() || adopt::is_mapped(start, bytes, file))
    }
}

/// The use of a segment number.
#[derive(Default)]
pub(super) enum Slot {
    #[default]
    Free,
    /// The daemon has the segment, or is about to get it. If it never answered, forever.
    Taken,
    Lent(Arc<Lent>),
}

#[derive(Default)]
pub(super) struct ArenaState {
    /// By segment number.
    pub(super) slots: Vec<Slot>,
    pub(super) free: FreeList,
    pub(super) usage: Usage,
    pub(super) stats: ArenaStats,
}

impl ArenaState {
    /// Takes the lowest free number.
    pub(super) fn take_number(&mut self) -> SegmentId {
        let free = self.slots.iter().position(|slot| matches!(slot, Slot::Free));
        let index = free.unwrap_or(self.slots.len());
        if index == self.slots.len() {
            self.slots.push(Slot::Free);
        }
        self.slots[index] = Slot::Taken;
        SegmentId(index as u32)
    }

    /// Changes the use of a number; returns the previous one, to be dropped without the lock.
    pub(super) fn set(&mut self, id: SegmentId, slot: Slot) -> Option<Slot> {
        self.slots.get_mut(id.0 as usize).map(|old| std::mem::replace(old, slot))
    }

    pub(super) fn get(&self, id: SegmentId) -> Option<&Arc<Lent>> {
        match self.slots.get(id.0 as usize)? {
            Slot::Lent(lent) => Some(lent),
            Slot::Free | Slot::Taken => None,
        }
    }

    /// The segments with their numbers.
    pub(super) fn lent(&self) -> impl Iterator<Item = (SegmentId, &Lent)> {
        (0..).map(SegmentId).zip(&self.slots).filter_map(|(id, slot)| match slot {
            Slot::Lent(lent) => Some((id, &**lent)),
            Slot::Free | Slot::Taken => None,
        })
    }

    /// Takes segments without blocks out of use until `excess` bytes less are reserved, if there
    /// are enough. Their numbers stay taken.
    pub(super) fn retire(&mut self, excess: u64) -> Vec<SegmentId> {
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

pub(super) struct Shared {
    pub(super) config: ArenaConfig,
    pub(super) register: Register,
    pub(super) release: Release,
    /// Held while a segment is made and handed over: allocations that fit continue meanwhile.
    pub(super) growing: Mutex<()>,
    /// Held while memory of the program moves.
    pub(super) adopting: Mutex<()>,
    pub(super) state: Mutex<ArenaState>,
}

/// A segment that the daemon has, before anything is in it.
pub(super) struct Made {
    pub(super) id: SegmentId,
    pub(super) segment: Segment,
    pub(super) reserve: Reserve,
    pub(super) fd: OwnedFd,
}

impl Shared {
    /// Makes a segment and hands it over.
    pub(super) fn make(
        &self,
        kind: &str,
        bytes: u64,
        config: &ArenaConfig,
    ) -> Result<Made, ArenaError> {
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
    pub(super) fn release_all(&self, retired: &[SegmentId]) {
        for id in retired {
            (self.release)(*id);
            let old = self.state.lock().set(*id, Slot::Free);
            drop(old); // unmaps without holding our lock
        }
    }
}
