//! Short ids for tensors on which all ranks have agreed once. In the steady state, messages contain
//! a few bytes instead of a name and a request.
//!
//! An id costs memory in the coordinator and in every daemon: about 100 bytes for each flow of its
//! tensor. So the number of ids and their total number of flows are bounded (BOUND). If there is no
//! room, [`Ids::next`] cycles through the ids, oldest first, to find one that can be evicted.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use gradwire_proto::{Priority, TensorId};

use crate::model::{plan::Plan, round::Slot};

/// The meaning of an id, besides the name.
#[derive(Debug, Clone)]
pub(crate) struct Registered {
    pub(crate) id: TensorId,
    pub(crate) plan: Arc<Plan>,
    pub(crate) priority: Priority,
    /// Whether the nodes know the id; it is sent with the tensor's first operation.
    pub(crate) announced: bool,
    /// Whether another round has used it since it was last considered for eviction.
    pub(crate) used: bool,
}

/// The ids in use (BOUND: at most `most`, with at most `most_flows` flows in total).
#[derive(Debug)]
pub(crate) struct Ids {
    slots: BTreeMap<TensorId, (Slot, usize)>,
    /// The ids of new names that only one round has used.
    new: BTreeSet<TensorId>,
    next: u32,
    /// Where the search for an id to evict continues.
    hand: TensorId,
    flows: usize,
    most: usize,
    most_flows: usize,
}

impl Ids {
    pub(crate) fn new(most: usize, most_flows: usize) -> Self {
        let (next, hand, flows) = (0, TensorId(0), 0);
        Self { slots: BTreeMap::new(), new: BTreeSet::new(), next, hand, flows, most, most_flows }
    }

    /// Whether there is room for one more id, for a tensor with `flows` flows.
    pub(crate) fn has_room(&self, flows: usize) -> bool {
        self.slots.len() < self.most && self.flows + flows <= self.most_flows
    }

    /// Gives an id to the tensor in a slot; `None` if there is no room. Ids are never reused, so a
    /// late message with a dropped id is recognised.
    pub(crate) fn give(&mut self, slot: Slot, flows: usize) -> Option<TensorId> {
        if !self.has_room(flows) {
            return None;
        }
        let id = TensorId(self.next);
        self.next = self.next.checked_add(1)?;
        self.slots.insert(id, (slot, flows));
        self.flows += flows;
        Some(id)
    }

    /// Notes that the name of an id is new.
    pub(crate) fn mark_new(&mut self, id: TensorId) {
        self.new.insert(id);
    }

    /// Notes that another round uses an id.
    pub(crate) fn mark_used(&mut self, id: TensorId) {
        self.new.remove(&id);
    }

    /// How many ids only one round has used.
    pub(crate) fn new_ones(&self) -> usize {
        self.new.len()
    }

    /// The slots of the tensors whose ids only one round has used, oldest first.
    pub(crate) fn oldest_new(&self) -> impl Iterator<Item = Slot> {
        self.new.iter().filter_map(|id| self.slot(*id))
    }

    /// Forgets an id.
    pub(crate) fn drop(&mut self, id: TensorId) {
        self.new.remove(&id);
        if let Some((_, flows)) = self.slots.remove(&id) {
            self.flows -= flows;
        }
    }

    /// Advances to the next id, cyclically, and returns the slot of its tensor.
    pub(crate) fn next(&mut self) -> Option<Slot> {
        let mut from_here = self.slots.range(self.hand..);
        let (id, (slot, _)) = from_here.next().or_else(|| self.slots.first_key_value())?;
        self.hand = TensorId(id.0.saturating_add(1));
        Some(*slot)
    }

    /// Whether an id was in use once and no longer is.
    pub(crate) fn was_dropped(&self, id: TensorId) -> bool {
        id.0 < self.next && !self.slots.contains_key(&id)
    }

    /// The slot of the tensor with this id.
    pub(crate) fn slot(&self, id: TensorId) -> Option<Slot> {
        self.slots.get(&id).map(|(slot, _)| *slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_bounded_and_never_reused() {
        let mut ids = Ids::new(2, 100);
        let first = ids.give(Slot(7), 1).unwrap();
        let second = ids.give(Slot(8), 1).unwrap();
        assert_eq!(ids.give(Slot(9), 1), None, "BOUND");
        ids.drop(first);
        assert_eq!(ids.slot(first), None);
        assert!(ids.was_dropped(first) && !ids.was_dropped(second));
        assert_eq!(ids.slot(second), Some(Slot(8)));
        let third = ids.give(Slot(9), 1).unwrap();
        assert!(third != first && third != second && !ids.was_dropped(TensorId(third.0 + 1)));
    }

    #[test]
    fn flows_are_bounded_too() {
        let mut ids = Ids::new(10, 100);
        let large = ids.give(Slot(0), 90).unwrap();
        assert!(ids.has_room(10) && !ids.has_room(11), "BOUND");
        assert_eq!(ids.give(Slot(1), 11), None);
        ids.drop(large);
        assert!(ids.give(Slot(1), 100).is_some());
    }

    #[test]
    fn the_search_cycles_oldest_first() {
        let mut ids = Ids::new(3, 100);
        let given: Vec<_> = (0..3).map(|slot| ids.give(Slot(slot), 1).unwrap()).collect();
        let seen = |ids: &mut Ids| ids.next().map(|slot| slot.0);
        assert_eq!([(); 4].map(|()| seen(&mut ids)), [Some(0), Some(1), Some(2), Some(0)]);
        ids.drop(given[1]);
        assert_eq!(seen(&mut ids), Some(2), "dropped ids are skipped");
        ids.drop(given[0]);
        ids.drop(given[2]);
        assert_eq!(seen(&mut ids), None);
    }
}
