//! The slots of this node's ranks.

use std::sync::Arc;

use parking_lot::RwLock;

use super::worker::Worker;

#[derive(Debug)]
pub(crate) struct Workers {
    slots: Vec<RwLock<Slot>>,
}

#[derive(Debug, Default)]
pub(crate) enum Slot {
    #[default]
    Free,
    /// Taken by this process, which waits for the world.
    Claimed {
        pid: u32,
    },
    Attached(Arc<Worker>),
    Left,
    /// Its process ended before it attached.
    Absent,
}

/// A rank, as its slot shows it.
#[derive(Debug)]
pub(crate) enum Seen {
    /// It has not attached yet. Its process, once that has claimed the slot.
    Coming(Option<u32>),
    Attached(Arc<Worker>),
    Left,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ClaimError {
    #[error("local rank {local_rank} is taken by process {pid} on this host")]
    Taken { local_rank: u32, pid: u32 },
    #[error("local rank {local_rank} has left the job already")]
    Left { local_rank: u32 },
    #[error("local rank {local_rank} does not exist: this node has {slots} slots, numbered from 0")]
    Outside { local_rank: u32, slots: usize },
}

impl Workers {
    pub(crate) fn new(slots: u32) -> Self {
        Self { slots: (0..slots).map(|_| RwLock::default()).collect() }
    }

    fn slot(&self, local_rank: u32) -> Option<&RwLock<Slot>> {
        self.slots.get(local_rank as usize)
    }

    pub(crate) fn claim(&self, local_rank: u32, pid: u32) -> Result<(), ClaimError> {
        let slots = self.slots.len();
        let slot = self.slot(local_rank).ok_or(ClaimError::Outside { local_rank, slots })?;
        let mut slot = slot.write();
        match &*slot {
            Slot::Free => {
                *slot = Slot::Claimed { pid };
                Ok(())
            }
            Slot::Claimed { pid } => Err(ClaimError::Taken { local_rank, pid: *pid }),
            Slot::Attached(worker) => Err(ClaimError::Taken { local_rank, pid: worker.pid }),
            Slot::Left | Slot::Absent => Err(ClaimError::Left { local_rank }),
        }
    }

    /// The process of a rank has ended. Returns true if it never attached, so that nothing else
    /// reports its end.
    pub(crate) fn ended(&self, local_rank: u32) -> bool {
        let Some(slot) = self.slot(local_rank) else { return false };
        let mut slot = slot.write();
        let never = matches!(*slot, Slot::Free);
        if never {
            *slot = Slot::Absent;
        }
        never
    }

    /// Whether a rank's process ended before it attached.
    pub(crate) fn never_came(&self, local_rank: u32) -> bool {
        let slot = self.slot(local_rank);
        slot.is_some_and(|s| matches!(*s.read(), Slot::Absent))
    }

    pub(crate) fn set(&self, local_rank: u32, value: Slot) {
        if let Some(slot) = self.slot(local_rank) {
            *slot.write() = value;
        }
    }

    /// The worker of a local rank, while it is attached.
    pub(crate) fn get(&self, local_rank: u32) -> Option<Arc<Worker>> {
        match &*self.slot(local_rank)?.read() {
            Slot::Attached(worker) => Some(worker.clone()),
            _ => None,
        }
    }

    /// A rank, as its slot shows it.
    pub(crate) fn seen(&self, local_rank: u32) -> Seen {
        let Some(slot) = self.slot(local_rank) else { return Seen::Left };
        match &*slot.read() {
            Slot::Free => Seen::Coming(None),
            Slot::Claimed { pid } => Seen::Coming(Some(*pid)),
            Slot::Attached(worker) => Seen::Attached(worker.clone()),
            Slot::Left | Slot::Absent => Seen::Left,
        }
    }

    /// Whether any process is attached or attaching.
    pub(crate) fn any_there(&self) -> bool {
        let is_there = |slot: &Slot| matches!(slot, Slot::Claimed { .. } | Slot::Attached(_));
        self.slots.iter().any(|slot| is_there(&slot.read()))
    }

    /// Whether a process waits for an answer, or has not received all of its messages.
    pub(crate) fn are_owed_messages(&self) -> bool {
        let is_owed = |slot: &RwLock<Slot>| match &*slot.read() {
            Slot::Claimed { .. } => true,
            Slot::Attached(worker) => !worker.outbox.flush(),
            Slot::Free | Slot::Left | Slot::Absent => false,
        };
        self.slots.iter().any(is_owed)
    }

    /// The local ranks that may come and are not attached yet, and their processes, once these have
    /// claimed the slots.
    pub(crate) fn missing(&self) -> impl Iterator<Item = (u32, Option<u32>)> {
        let missing = |(local_rank, slot): (u32, &RwLock<Slot>)| match &*slot.read() {
            Slot::Free => Some((local_rank, None)),
            Slot::Claimed { pid } => Some((local_rank, Some(*pid))),
            Slot::Attached(_) | Slot::Left | Slot::Absent => None,
        };
        (0..).zip(&self.slots).filter_map(missing)
    }

    /// Whether a rank may come that is not attached yet.
    pub(crate) fn is_any_missing(&self) -> bool {
        self.missing().next().is_some()
    }

    pub(crate) fn all(&self) -> Vec<Arc<Worker>> {
        (0..self.slots.len() as u32).filter_map(|local| self.get(local)).collect()
    }
}
