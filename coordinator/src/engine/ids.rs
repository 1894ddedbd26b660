//! Short ids for tensors on which all ranks have agreed once, so that steady-state messages carry
//! a few bytes instead of a name and a request.

use std::{collections::BTreeMap, sync::Arc};

use gradwire_proto::{Priority, TensorId};

use super::{plan::Plan, ready_table::Slot};

/// What an id stands for, beside the name.
#[derive(Debug, Clone)]
pub(crate) struct Registered {
    pub(crate) id: TensorId,
    pub(crate) plan: Arc<Plan>,
    pub(crate) priority: Priority,
    /// Whether the nodes have been told; it goes out with the tensor's first operation.
    pub(crate) told: bool,
}

/// The ids that are in use (BOUND: at most `most`).
#[derive(Debug)]
pub(crate) struct Ids {
    slots: BTreeMap<TensorId, Slot>,
    next: u32,
    most: usize,
}

impl Ids {
    pub(crate) fn new(most: usize) -> Self {
        Self { slots: BTreeMap::new(), next: 0, most }
    }

    /// An id for the tensor in a slot; none when all are in use. No number is given twice, so
    /// that a late message with a dropped id is seen to be wrong.
    pub(crate) fn give(&mut self, slot: Slot) -> Option<TensorId> {
        if self.slots.len() >= self.most {
            return None;
        }
        let id = TensorId(self.next);
        self.next = self.next.checked_add(1)?;
        self.slots.insert(id, slot);
        Some(id)
    }

    /// Forgets an id.
    pub(crate) fn drop(&mut self, id: TensorId) {
        self.slots.remove(&id);
    }

    /// Whether an id was in use once and is not any more.
    pub(crate) fn was_dropped(&self, id: TensorId) -> bool {
        id.0 < self.next && !self.slots.contains_key(&id)
    }

    /// Where the tensor with this id is.
    pub(crate) fn slot(&self, id: TensorId) -> Option<Slot> {
        self.slots.get(&id).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_bounded_and_never_reused() {
        let mut ids = Ids::new(2);
        let first = ids.give(Slot(7)).unwrap();
        let second = ids.give(Slot(8)).unwrap();
        assert_eq!(ids.give(Slot(9)), None, "BOUND");
        ids.drop(first);
        assert_eq!(ids.slot(first), None);
        assert!(ids.was_dropped(first) && !ids.was_dropped(second));
        assert_eq!(ids.slot(second), Some(Slot(8)));
        let third = ids.give(Slot(9)).unwrap();
        assert!(third != first && third != second && !ids.was_dropped(TensorId(third.0 + 1)));
    }
}
