//! Ids that were evicted from idle tensors to make room for others, until every node knows.
//!
//! Only the coordinator decides which id is evicted, and it announces this in the stream of
//! operations. So every daemon forgets the same ids at the same point of that stream. A node may
//! use an id until it has read of its eviction. So the meaning of the id is kept here until every
//! node has confirmed the eviction. Until then, an announcement by this id is turned into one by
//! name with full requests, so the table of tensors never sees an evicted id.

use std::collections::BTreeMap;

use fixedbitset::FixedBitSet;
use gradwire_proto::{NodeId, ProcessSetId, Rank, TensorId, TensorName, convert::TensorRef};

use super::{
    ids::Registered,
    tensor::{answers_by_id, asked_by_id},
};
use crate::model::{
    event::{Announcement, Submitted},
    process_set::ProcessSet,
};

/// The meaning of an evicted id.
#[derive(Debug)]
struct Entry {
    set: ProcessSetId,
    name: TensorName,
    registered: Registered,
    /// The nodes that may still use the id.
    nodes: FixedBitSet,
}

/// The evicted ids that some node may still use.
#[derive(Debug, Default)]
pub(crate) struct Evicted {
    entries: BTreeMap<TensorId, Entry>,
    flows: usize,
}

impl Evicted {
    /// The total number of flows of the kept tensors.
    pub(crate) fn flows(&self) -> usize {
        self.flows
    }

    /// Keeps the meaning of an id until all `nodes` nodes have confirmed its eviction.
    pub(crate) fn add(
        &mut self,
        set: ProcessSetId,
        name: TensorName,
        registered: Registered,
        nodes: usize,
    ) {
        self.flows += registered.plan.flow_count();
        let mut all = FixedBitSet::with_capacity(nodes);
        all.insert_range(..);
        self.entries.insert(registered.id, Entry { set, name, registered, nodes: all });
    }

    /// Notes that a node has confirmed an eviction. Returns false if no confirmation was due
    /// (TRUST).
    pub(crate) fn confirmed(&mut self, node: NodeId, id: TensorId) -> bool {
        let Some(entry) = self.entries.get_mut(&id) else { return false };
        if !entry.nodes.contains(node.index()) {
            return false;
        }
        entry.nodes.remove(node.index());
        if entry.nodes.is_clear() {
            self.flows -= entry.registered.plan.flow_count();
            self.entries.remove(&id);
        }
        true
    }

    /// Turns an announcement by an evicted id that the node may still use into one by name with
    /// full requests. Returns any other announcement unchanged.
    pub(crate) fn restore(
        &self,
        node: NodeId,
        mut announcement: Announcement,
        set: &ProcessSet,
    ) -> Announcement {
        let TensorRef::Id(id) = announcement.tensor else { return announcement };
        let found = self.entries.get(&id).filter(|entry| entry.set == announcement.set);
        let Some(entry) = found.filter(|entry| entry.nodes.contains(node.index())) else {
            return announcement;
        };
        announcement.tensor = TensorRef::Name(entry.name.clone());
        if announcement.submitted.is_empty() {
            let agreed = &entry.registered.plan.agreed;
            let priority = entry.registered.priority;
            let submitted = |ranks: Vec<Rank>| {
                let request = asked_by_id(agreed, set, ranks[0]).into_owned();
                Submitted { ranks, request, priority, duplicate: false, sites: Vec::new() }
            };
            let ranks = answers_by_id(agreed.request(), set, node).into_owned();
            announcement.submitted = if agreed.request().has_free_rows() {
                ranks.into_iter().map(|rank| submitted(vec![rank])).collect()
            } else {
                Some(ranks).filter(|ranks| !ranks.is_empty()).map(submitted).into_iter().collect()
            };
        }
        announcement
    }
}
