//! Ids and names, messages and domain types. Pure.
//!
//! The coordinator gives a tensor an id when it has been agreed on once; from then on an
//! announcement of the same request is that id and nothing else. What comes from the coordinator
//! is checked here, once (TRUST): every id must be known, every number within its range.

use std::collections::HashMap;

use gradwire_proto::{
    Failure, NodeId, Priority, ProcessSetId, Rank, Request, Sequence, TensorId, TensorName,
    WireError, convert::TensorRef, pb,
};

use super::{Instruction, NodeInfo, Operation, OperationSegment, World};
use crate::queue::{Announced, TensorKey};

#[derive(Debug)]
struct Registered {
    id: TensorId,
    request: Request,
    priority: Priority,
}

/// The tensors that have ids.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    by_key: HashMap<TensorKey, Registered>,
    by_id: HashMap<TensorId, TensorKey>,
}

fn invalid(field: &'static str, reason: impl Into<String>) -> WireError {
    WireError::Invalid { field, reason: reason.into() }
}

impl Registry {
    /// The message that announces a tensor: as short as its id allows.
    pub(crate) fn announcement(&self, announced: Announced, slots: u32) -> pb::Announcement {
        let Announced { key, variants } = announced;
        let known = self.by_key.get(&key);
        let unchanged = known.is_some_and(|known| {
            matches!(&variants[..], [only] if only.ranks.len() == slots as usize
                && only.request == known.request
                && only.priority == known.priority.0
                && !only.duplicate)
        });
        let tensor = known
            .map_or_else(|| TensorRef::Name(key.name.clone()), |known| TensorRef::Id(known.id));
        let submitted = variants.into_iter().filter(|_| !unchanged).map(|v| pb::Submitted {
            ranks: v.ranks.iter().map(|r| r.0).collect(),
            request: Some((&v.request).into()),
            priority: v.priority,
            duplicate: v.duplicate,
        });
        pb::Announcement {
            process_set: key.set.0,
            tensor: Some(tensor.into()),
            submitted: submitted.collect(),
        }
    }

    fn register(&mut self, wire: pb::Registration) -> Result<(), WireError> {
        let request: Request = wire.request.ok_or(WireError::Missing("request"))?.try_into()?;
        let key =
            TensorKey { set: ProcessSetId(wire.process_set), name: TensorName::new(&wire.name)? };
        let id = TensorId(wire.id);
        if let Some(other) = self.by_id.get(&id).filter(|other| **other != key) {
            return Err(invalid(
                "registration",
                format!("id {id} already stands for {}", other.name),
            ));
        }
        let registered = Registered { id, request, priority: Priority(wire.priority) };
        if let Some(old) = self.by_key.insert(key.clone(), registered) {
            self.by_id.remove(&old.id);
        }
        self.by_id.insert(id, key);
        Ok(())
    }

    fn resolve(&self, set: u32, wire: Option<pb::TensorRef>) -> Result<TensorKey, WireError> {
        match TensorRef::try_from(wire)? {
            TensorRef::Name(name) => Ok(TensorKey { set: ProcessSetId(set), name }),
            TensorRef::Id(id) => self
                .by_id
                .get(&id)
                .cloned()
                .ok_or_else(|| invalid("tensor", format!("id {id} was never registered"))),
        }
    }

    fn operation(&self, wire: pb::Operation) -> Result<Operation, WireError> {
        let request: Request = wire.request.ok_or(WireError::Missing("request"))?.try_into()?;
        let algorithm = pb::Algorithm::try_from(wire.algorithm)
            .ok()
            .and_then(|algorithm| algorithm.try_into().ok())
            .ok_or(WireError::Unknown { field: "algorithm", number: wire.algorithm })?;
        let segment = |wire_segment: pb::Segment| {
            Ok(OperationSegment {
                tensor: self.resolve(wire.process_set, wire_segment.tensor)?,
                offset: wire_segment.offset,
                count: wire_segment.count,
            })
        };
        let segments = wire.segments.into_iter().map(segment).collect::<Result<_, WireError>>()?;
        Ok(Operation { sequence: Sequence(wire.sequence), request, algorithm, segments })
    }

    /// What an `Execute` orders, in order: operations, then failures.
    ///
    /// # Errors
    /// [`WireError`] when any of it is not understood; nothing of it must be carried out then.
    pub(crate) fn instructions(
        &mut self,
        wire: pb::Execute,
    ) -> Result<Vec<Instruction>, WireError> {
        for registration in wire.registrations {
            self.register(registration)?;
        }
        let mut instructions = Vec::with_capacity(wire.operations.len() + wire.failures.len());
        for operation in wire.operations {
            instructions.push(Instruction::Start(self.operation(operation)?));
        }
        for wire in wire.failures {
            let tensor = self.resolve(wire.process_set, wire.tensor)?;
            let failure = wire.failure.ok_or(WireError::Missing("failure"))?.into();
            instructions.push(Instruction::Fail { tensor, failure });
        }
        Ok(instructions)
    }
}

/// The world, checked: this node is in it, ranks are numbered without gaps.
///
/// # Errors
/// [`WireError`] with the field that does not fit.
pub(crate) fn world(wire: pb::World) -> Result<World, WireError> {
    let mut next = 0u32;
    let mut nodes = Vec::with_capacity(wire.nodes.len());
    for node in wire.nodes {
        if node.first_rank != next || node.slots == 0 {
            let reason = format!("{} begins at rank {}, not {next}", node.host, node.first_rank);
            return Err(invalid("nodes", reason));
        }
        next = next.checked_add(node.slots).ok_or_else(|| invalid("nodes", "too many ranks"))?;
        let address = node.data_address.parse();
        nodes.push(NodeInfo {
            address: address.map_err(|_| invalid("data_address", node.data_address))?,
            host: node.host,
            first_rank: Rank(node.first_rank),
            slots: node.slots,
            rack: node.rack,
        });
    }
    if wire.node as usize >= nodes.len() {
        return Err(invalid("node", format!("{} of {} nodes", wire.node, nodes.len())));
    }
    if !(1..=64).contains(&wire.lanes) {
        return Err(invalid("lanes", format!("{} is not within 1 to 64", wire.lanes)));
    }
    Ok(World {
        epoch: gradwire_proto::Epoch(wire.epoch),
        node: NodeId(wire.node),
        nodes,
        lanes: wire.lanes,
        heartbeat_interval: std::time::Duration::from_millis(wire.heartbeat_interval_ms.max(1)),
        heartbeat_timeout: std::time::Duration::from_millis(wire.heartbeat_timeout_ms.max(1)),
    })
}

/// A failure that says the coordinator sent something that makes no sense.
pub(crate) fn nonsense(error: &WireError) -> Failure {
    let what = format!("the coordinator sent a message that makes no sense: {error}");
    Failure::new(gradwire_proto::FailureKind::Protocol, what)
        .hint("coordinator and gradwired must be of the same release")
}

#[cfg(test)]
mod tests {
    use gradwire_proto::{DType, ReduceOp, Shape};

    use super::*;
    use crate::queue::Variant;

    fn request(count: u64) -> Request {
        Request::allreduce(DType::F32, Shape::new(&[count]).unwrap(), ReduceOp::Sum)
    }

    fn announced(count: u64) -> Announced {
        let key = TensorKey { set: ProcessSetId::GLOBAL, name: TensorName::new("w").unwrap() };
        let ranks = vec![Rank(2), Rank(3)];
        let variants =
            vec![Variant { ranks, request: request(count), priority: 1, duplicate: false }];
        Announced { key, variants }
    }

    fn registration(id: u32, count: u64) -> pb::Registration {
        pb::Registration {
            id,
            process_set: 0,
            name: "w".into(),
            request: Some((&request(count)).into()),
            priority: 1,
        }
    }

    fn execute(registrations: Vec<pb::Registration>) -> pb::Execute {
        pb::Execute { registrations, ..Default::default() }
    }

    #[test]
    fn once_registered_an_announcement_is_an_id() {
        let mut registry = Registry::default();
        let first = registry.announcement(announced(8), 2);
        assert_eq!(first.tensor, Some(TensorRef::Name(TensorName::new("w").unwrap()).into()));
        assert_eq!(first.submitted.len(), 1);
        registry.instructions(execute(vec![registration(7, 8)])).unwrap();
        let second = registry.announcement(announced(8), 2);
        assert_eq!(second.tensor, Some(TensorRef::Id(TensorId(7)).into()));
        assert!(second.submitted.is_empty());
        let changed = registry.announcement(announced(9), 2);
        assert_eq!(changed.submitted.len(), 1, "another shape is told");
        let partly = registry.announcement(announced(8), 3);
        assert_eq!(partly.submitted.len(), 1, "not all local ranks take part");
    }

    #[test]
    fn a_new_id_replaces_the_old_one() {
        let mut registry = Registry::default();
        registry.instructions(execute(vec![registration(7, 8), registration(8, 9)])).unwrap();
        assert!(registry.resolve(0, Some(TensorRef::Id(TensorId(7)).into())).is_err());
        assert!(registry.resolve(0, Some(TensorRef::Id(TensorId(8)).into())).is_ok());
        let clash = pb::Registration { name: "v".into(), ..registration(8, 9) };
        assert!(registry.instructions(execute(vec![clash])).is_err());
    }

    #[test]
    fn a_world_that_makes_no_sense_is_refused() {
        let node = |first_rank, slots| pb::Node {
            host: "a".into(),
            data_address: "127.0.0.1:1".into(),
            first_rank,
            slots,
            rack: String::new(),
        };
        let good =
            pb::World { nodes: vec![node(0, 2), node(2, 1)], lanes: 2, ..Default::default() };
        let formed = world(good.clone()).unwrap();
        assert_eq!((formed.size(), formed.node_of(Rank(2))), (3, Some(NodeId(1))));
        let cases = [
            pb::World { nodes: vec![node(0, 2), node(1, 1)], ..good.clone() },
            pb::World { nodes: vec![node(0, 0)], ..good.clone() },
            pb::World { node: 2, ..good.clone() },
            pb::World { lanes: 0, ..good.clone() },
            pb::World { nodes: vec![node(0, u32::MAX), node(u32::MAX, 2)], ..good },
        ];
        for case in cases {
            assert!(world(case).is_err());
        }
    }
}
