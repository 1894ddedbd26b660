//! The tensors that the workers of a daemon have submitted, until an operation completes them.

use std::collections::{BTreeMap, BTreeSet};

use gradwire_coordinator::model::{
    command::Execute,
    event::{Announcement, Submitted},
};
use gradwire_proto::{
    Collective, Failure, NodeId, Priority, ProcessSetId, Rank, Request, TensorId, TensorName,
    convert::TensorRef,
};

use super::{Daemon, Slot};
use crate::{
    coordinator::FromNode,
    plants::Plant,
    worker::WorkerIn,
    world::{Pid, World},
};

/// A tensor: its process set and its name.
pub(crate) type Key = (ProcessSetId, String);

/// What the local ranks have submitted under a name.
#[derive(Debug, Default)]
pub(crate) struct Tensor {
    pub(crate) submitted: BTreeMap<Rank, (Pid, Request)>,
    announced: bool,
    pub(crate) covered: u64,
}

impl Daemon {
    /// The node of a rank.
    pub(crate) fn node_of(&self, rank: Rank) -> NodeId {
        let nodes = self.formed().map_or(&[][..], |formed| &formed.nodes);
        let after = nodes.partition_point(|node| node.first_rank <= rank);
        NodeId(u32::try_from(after - 1).expect("few nodes"))
    }

    /// A worker submits a tensor. With the last local one, the node announces it.
    pub(super) fn submit(&mut self, world: &mut World, pid: Pid, key: Key, request: Request) {
        let Some(local) = self.slots.iter().position(|slot| *slot == Slot::Attached(pid)) else {
            return;
        };
        let rank = self.rank(local);
        let Some(members) = self.sets.get(&key.0).cloned() else { return };
        self.tensors.entry(key.clone()).or_default().submitted.insert(rank, (pid, request));
        let here: Vec<Rank> =
            members.iter().copied().filter(|rank| self.node_of(*rank) == self.node).collect();
        let Some(tensor) = self.tensors.get_mut(&key) else { return };
        if tensor.announced || !here.iter().all(|rank| tensor.submitted.contains_key(rank)) {
            return;
        }
        tensor.announced = true;
        let submitted = tensor.submitted.iter().map(|(rank, (_, request))| Submitted {
            ranks: vec![*rank],
            request: request.clone(),
            priority: Priority(0),
            duplicate: false,
            sites: Vec::new(),
        });
        let name = TensorName::new(&key.1).expect("a short name");
        let announcement = Announcement {
            set: key.0,
            tensor: TensorRef::Name(name),
            submitted: submitted.collect(),
            latest: None,
        };
        self.tell_coordinator(world, FromNode::Ready(announcement));
    }

    /// The tensor that a message names.
    pub(crate) fn key(&self, set: ProcessSetId, tensor: &TensorRef) -> Key {
        match tensor {
            TensorRef::Id(id) => self.names.get(id).cloned().unwrap_or_default(),
            TensorRef::Name(name) => (set, name.to_string()),
        }
    }

    /// Carries out an answer of the coordinator.
    pub(super) fn execute(&mut self, world: &mut World, execute: Execute) {
        for created in execute.sets_created {
            let key = self.key(ProcessSetId::GLOBAL, &created.tensor);
            self.sets.insert(created.set, created.ranks);
            self.complete(world, &key, Ok(Some(created.set)));
        }
        for one in execute.registrations {
            self.names.insert(one.id, (one.set, one.name.to_string()));
        }
        let mut operations = execute.operations;
        if world.has(Plant::OperationOrder) {
            operations.reverse();
        }
        for operation in operations {
            self.start(world, operation);
        }
        for failed in execute.failures {
            let key = self.key(failed.set, &failed.tensor);
            self.complete(world, &key, Err(failed.failure));
        }
        let ids: Vec<TensorId> = execute.evicted;
        if !ids.is_empty() {
            ids.iter().for_each(|id| drop(self.names.remove(id)));
            self.tell_coordinator(world, FromNode::Forgotten(ids));
        }
    }

    /// Completes a tensor for all local ranks that have submitted it.
    pub(crate) fn complete(
        &mut self,
        world: &mut World,
        key: &Key,
        result: Result<Option<ProcessSetId>, Failure>,
    ) {
        let Some(tensor) = self.tensors.remove(key) else { return };
        let attached: BTreeSet<Pid> = self
            .slots
            .iter()
            .filter_map(|slot| match slot {
                Slot::Attached(pid) => Some(*pid),
                _ => None,
            })
            .collect();
        for (pid, request) in tensor.submitted.into_values() {
            debug_assert!(request.collective != Collective::Join);
            if attached.contains(&pid) {
                let message = WorkerIn::Completed { key: key.clone(), result: result.clone() };
                world.tell_worker(self.pid, pid, message);
            }
        }
    }
}
