//! The orders of the coordinator, checked and resolved.

use std::sync::Arc;

use gradwire_collectives::{
    Links, Topology,
    algorithms::{Kind, Spec, has_servers, probe::Pattern},
};
use gradwire_proto::{Failure, NodeId, ProcessSetId, Rank, Request, Route, Sequence};

use super::{agreement::Agreement, members::Members, tensor::TensorKey};

/// The sequence number of every operation that the coordinator has not ordered and does not know.
pub(crate) const AT_ONCE: Sequence = Sequence(u64::MAX);

/// Up to this size in bytes, reducing a piece for a few ranks takes less time than waking a lane.
/// One core reduces about this much in ten microseconds.
pub(crate) const QUICK_BYTES: u64 = 32 << 10;

/// A range of elements, the same in all flows of one tensor of a request; short flows have only a
/// part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PartRange {
    /// The number of the tensor in the request.
    pub(crate) part: usize,
    pub(crate) offset: u64,
    /// At least 1.
    pub(crate) count: u64,
}

/// The part of a request that an operation moves.
#[derive(Debug, Clone)]
pub(crate) struct OperationSegment {
    pub(crate) tensor: TensorKey,
    pub(crate) agreement: Arc<Agreement>,
    /// `None` if there is nothing to move, and the request is done.
    pub(crate) range: Option<PartRange>,
}

/// One operation in which this node takes part, as ordered by the coordinator.
#[derive(Debug, Clone)]
pub(crate) struct Operation {
    pub(crate) sequence: Sequence,
    /// Collective, element type, reduction and factors; a piece is flat.
    pub(crate) request: Request,
    pub(crate) spec: Spec,
    pub(crate) route: Route,
    /// The ranks that take part in the collective.
    pub(crate) members: Arc<Members>,
    /// The segments of ranks of this node; on a server all of them.
    pub(crate) segments: Vec<OperationSegment>,
    /// Whether partial results travel in the job's eight-bit format.
    pub(crate) quantized: bool,
    /// The bytes of its chunks; `None`: this node's setting.
    pub(crate) chunk: Option<u64>,
}

impl Operation {
    /// The nodes that take part, ascending.
    pub(crate) fn nodes(&self) -> &Arc<[NodeId]> {
        nodes_of(self.route, &self.spec, &self.members)
    }
}

/// The nodes that take part in an operation of these ranks, ascending. An allreduce between nodes
/// also includes the servers, if the spec uses them.
pub(crate) fn nodes_of<'a>(route: Route, spec: &Spec, members: &'a Members) -> &'a Arc<[NodeId]> {
    let is_allreduce = route == Route::All && members.nodes.len() > 1;
    if is_allreduce && has_servers(Kind::Allreduce, spec) {
        &members.with_servers
    } else {
        &members.nodes
    }
}

/// A measurement of links in which this node takes part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Probe {
    pub(crate) sequence: Sequence,
    /// A pattern that fits the nodes.
    pub(crate) pattern: Pattern,
    /// The participating nodes, including this one.
    pub(crate) nodes: Arc<[NodeId]>,
}

/// One order of the coordinator. They are executed in sequence.
#[derive(Debug, Clone)]
pub(crate) enum Instruction {
    /// The tensor is the request that created the set; it is done.
    CreateSet {
        set: ProcessSetId,
        members: Arc<Members>,
        tensor: TensorKey,
    },
    /// From now on, schedules use these racks and this order of nodes.
    Arrange(Topology),
    /// Probes that run at the same time.
    Probe(Vec<Probe>),
    /// From now on, load is distributed by these rates.
    Links(Links),
    Start(Operation),
    Fail {
        tensor: TensorKey,
        failure: Failure,
    },
    /// All members of the set have joined.
    Resume {
        set: ProcessSetId,
        last: Rank,
    },
    /// The tensor is the request; it is done.
    RemoveSet {
        set: ProcessSetId,
        tensor: TensorKey,
    },
}
