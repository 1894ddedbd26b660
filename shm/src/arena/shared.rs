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
    HugePages, Segment, SegmentError, SegmentId,
    adopt::{Adopted, Mappings},
    renew::Successor,
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
    /// Bytes of segments that no daemon has any more ([`Arena::renew`](super::Arena::renew)).
    pub retired: u64,
    /// Bytes of blocks that are alive, rounded up to [`ALIGNMENT`], without those in retired
    /// segments.
    pub used: u64,
}

/// A segment, and the reserve mapping that takes it back.
pub(super) struct Lent {
    pub(super) segment: Segment,
    pub(super) reserve: Reserve,
    /// The program's memory in which an adopted segment is, and which others may unmap. It is
    /// locked only by those who have locked the arena's state.
    pub(super) adopted: Option<Mutex<Adopted>>,
    /// Somebody relies on its mapping, so it stays as long as the arena.
    pub(super) pinned: AtomicBool,
}

impl Lent {
    pub(super) fn new(segment: Segment, reserve: Reserve, adopted: Option<Adopted>) -> Self {
        let adopted = adopted.map(Mutex::new);
        Self { segment, reserve, adopted, pinned: AtomicBool::new(false) }
    }

    /// The program's memory in which it is, if it is adopted.
    pub(super) fn place(&self) -> Option<Adopted> {
        self.adopted.as_ref().map(|place| *place.lock())
    }

    /// It is in this memory of the program now.
    pub(super) fn set_place(&self, place: Option<Adopted>) {
        if let (Some(old), Some(new)) = (&self.adopted, place) {
            *old.lock() = new;
        }
    }

    /// Whether its addresses still belong to it.
    pub(super) fn is_there(&self, mappings: &Mappings) -> bool {
        let (start, bytes) = (self.segment.as_ptr().addr(), self.segment.bytes());
        let is_at = |place: Adopted| place.is_at(start, bytes, mappings);
        self.place().is_none_or(|place| self.reserve.is_used() || is_at(place))
    }
}

/// The use of a segment number.
#[derive(Default)]
pub(super) enum Slot {
    #[default]
    Free,
    /// The daemon has the segment, or is about to get it.
    Taken,
    /// It is not known whether the daemon has a segment of this number, or gets it later: free with
    /// the next daemon.
    Unclear,
    /// The daemon has the segment.
    Lent(Arc<Lent>),
    /// Only a daemon that has ended had the segment. [`Arena::renew`](super::Arena::renew) gives it
    /// to the next one.
    Orphaned(Arc<Lent>),
    /// No daemon will have the segment. The number stays taken while there are blocks of it.
    Retired(Arc<Lent>),
}

/// How segments reach a daemon.
pub(super) struct Daemon {
    pub(super) register: Register,
    pub(super) release: Release,
}

pub(super) struct ArenaState {
    /// By segment number.
    pub(super) slots: Vec<Slot>,
    /// The daemon that has the lent segments.
    pub(super) daemon: Arc<Daemon>,
    /// The free ranges of the lent segments.
    pub(super) free: FreeList,
    /// The free ranges of the orphaned segments.
    pub(super) withheld: FreeList,
    pub(super) usage: Usage,
    pub(super) stats: ArenaStats,
}

impl ArenaState {
    pub(super) fn new(daemon: Daemon) -> Self {
        let daemon = Arc::new(daemon);
        let (slots, free, withheld, usage, stats) = Default::default();
        Self { slots, daemon, free, withheld, usage, stats }
    }

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
            _ => None,
        }
    }

    /// The segment of a block, whether a daemon has it or not.
    pub(super) fn of_block(&self, id: SegmentId) -> Option<&Arc<Lent>> {
        match self.slots.get(id.0 as usize)? {
            Slot::Lent(lent) | Slot::Orphaned(lent) | Slot::Retired(lent) => Some(lent),
            Slot::Free | Slot::Taken | Slot::Unclear => None,
        }
    }

    pub(super) fn is_retired(&self, id: SegmentId) -> bool {
        matches!(self.slots.get(id.0 as usize), Some(Slot::Retired(_)))
    }

    /// A block of a segment ends.
    pub(super) fn give(&mut self, id: SegmentId, offset: u64, bytes: u64) {
        let free = match self.slots.get(id.0 as usize) {
            Some(Slot::Lent(_)) => &mut self.free,
            Some(Slot::Orphaned(_)) => &mut self.withheld,
            // A retired segment is used no more.
            _ => return,
        };
        free.give(id.0, offset, bytes);
        self.usage.remove(bytes);
    }

    /// The block of an adopted segment ends. Returns the segment, to be dropped without the lock,
    /// and the daemon to which its number must be released.
    pub(super) fn end_adopted(&mut self, id: SegmentId) -> (Option<Slot>, Option<Arc<Daemon>>) {
        let bytes = self.of_block(id).map_or(0, |lent| lent.segment.bytes());
        let (next, daemon) = match self.slots.get(id.0 as usize) {
            Some(Slot::Lent(_)) => (Slot::Taken, Some(self.daemon.clone())),
            // The next daemon may be about to get it.
            Some(Slot::Orphaned(_)) => (Slot::Unclear, None),
            _ => return (self.set(id, Slot::Free), None),
        };
        self.forget_adopted(bytes);
        (self.set(id, next), daemon)
    }

    /// An adopted segment of this size no longer counts.
    pub(super) fn forget_adopted(&mut self, bytes: u64) {
        self.stats.adopted_bytes -= bytes;
        self.stats.adopted -= 1;
    }

    /// All segments that may have blocks.
    pub(super) fn mapped(&self) -> impl Iterator<Item = &Lent> {
        self.slots.iter().filter_map(|slot| match slot {
            Slot::Lent(lent) | Slot::Orphaned(lent) | Slot::Retired(lent) => Some(&**lent),
            Slot::Free | Slot::Taken | Slot::Unclear => None,
        })
    }

    /// The segments that the daemon has, with their numbers.
    pub(super) fn lent(&self) -> impl Iterator<Item = (SegmentId, &Lent)> {
        (0..).map(SegmentId).zip(&self.slots).filter_map(|(id, slot)| match slot {
            Slot::Lent(lent) => Some((id, &**lent)),
            _ => None,
        })
    }

    /// Takes segments without blocks out of use until `excess` bytes less are reserved, if there
    /// are enough. Their numbers stay taken.
    fn unused(&mut self, excess: u64) -> Vec<(SegmentId, Option<Slot>)> {
        let is_empty = |(id, lent): (SegmentId, &Lent)| {
            let bytes = lent.segment.bytes();
            let may_go = lent.adopted.is_none() && !lent.pinned.load(Relaxed);
            (may_go && self.free.is_whole(id.0, bytes)).then_some((bytes, id))
        };
        let unused = to_give_back(self.lent().filter_map(is_empty).collect(), excess);
        let mut taken_out = Vec::new();
        for id in unused {
            let bytes = self.get(id).map_or(0, |lent| lent.segment.bytes());
            self.free.remove_segment(id.0);
            self.stats.segments -= 1;
            self.stats.reserved -= bytes;
            taken_out.push((id, self.set(id, Slot::Taken)));
        }
        taken_out
    }
}

pub(super) struct Shared {
    pub(super) config: ArenaConfig,
    /// Held while a segment is made and handed over: allocations that fit continue meanwhile.
    pub(super) growing: Mutex<()>,
    /// Held while memory of the program moves.
    pub(super) adopting: Mutex<()>,
    /// Whether there has been a retired segment.
    pub(super) has_retired: AtomicBool,
    pub(super) state: Mutex<ArenaState>,
}

/// What a segment is for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    /// Blocks.
    Arena,
    /// Memory of the program.
    Adopted,
}

/// A segment that the daemon has, before anything is in it.
pub(super) struct Made {
    pub(super) id: SegmentId,
    pub(super) new: Successor,
    /// Which daemon.
    pub(super) daemon: Arc<Daemon>,
}

impl Shared {
    /// Makes a segment and hands it over.
    pub(super) fn make(&self, kind: Kind, bytes: u64) -> Result<Made, ArenaError> {
        let mut state = self.state.lock();
        let (id, daemon) = (state.take_number(), state.daemon.clone());
        drop(state);
        let made = self.create(id, kind, bytes).map_err(ArenaError::from).and_then(|new| {
            daemon.hand_over(id, &new)?;
            Ok(new)
        });
        match made {
            Ok(new) => Ok(Made { id, new, daemon }),
            Err(error) => {
                let mut state = self.state.lock();
                // The daemon may still get it, so the number is not used again while it lives.
                let unclear = matches!(error, ArenaError::Unanswered { .. })
                    && Arc::ptr_eq(&state.daemon, &daemon);
                state.set(id, if unclear { Slot::Unclear } else { Slot::Free });
                Err(error)
            }
        }
    }

    /// Makes a segment. The daemon does not have it yet.
    pub(super) fn create(
        &self,
        id: SegmentId,
        kind: Kind,
        bytes: u64,
    ) -> Result<Successor, SegmentError> {
        let ArenaConfig { job, huge, .. } = &self.config;
        let (kind, huge) = match (kind, *huge) {
            (Kind::Arena, huge) => ("arena", huge),
            // The program's addresses may not be aligned to the huge pages of the pool.
            (Kind::Adopted, HugePages::Require) => ("adopted", HugePages::Advise),
            (Kind::Adopted, huge) => ("adopted", huge),
        };
        let name = format!("gradwire-{job}-{}-{kind}-{id}", std::process::id());
        let (segment, memory) = Segment::create(&name, bytes, huge)?;
        let reserve = Reserve::of(&segment, memory.as_fd(), huge)?;
        Ok(Successor { segment, reserve, memory })
    }

    /// Gives segments without blocks back until at most `limit` bytes are reserved.
    pub(super) fn keep_at_most(&self, limit: impl Fn(&ArenaState) -> u64) {
        let mut state = self.state.lock();
        let excess = state.stats.reserved.saturating_sub(limit(&state));
        let unused = state.unused(excess);
        let daemon = state.daemon.clone();
        drop(state);
        for (id, old) in unused {
            self.release(&daemon, id);
            drop(old); // unmaps without holding our lock
        }
    }

    /// Gives a segment back to its daemon. Only then its number is used again.
    pub(super) fn release(&self, daemon: &Daemon, id: SegmentId) {
        (daemon.release)(id);
        self.state.lock().set(id, Slot::Free);
    }
}

impl Daemon {
    /// Hands a new segment over.
    pub(super) fn hand_over(&self, id: SegmentId, new: &Successor) -> Result<(), ArenaError> {
        let bytes = new.segment.bytes();
        let theirs = new.memory.try_clone();
        let theirs = theirs.map_err(|error| SegmentError::io("copy a descriptor", bytes, error))?;
        (self.register)(id, &new.segment, theirs).map_err(|error| match error {
            RegisterError::Refused(source) => ArenaError::Register { segment: id, bytes, source },
            RegisterError::Unanswered(source) => {
                ArenaError::Unanswered { segment: id, bytes, source }
            }
        })
    }
}

/// What has become of the memory of an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Renewed {
    /// Segments that the new daemon has.
    pub segments: u32,
    /// Bytes of these segments.
    pub bytes: u64,
    /// Segments that were retired.
    pub retired: u32,
}
