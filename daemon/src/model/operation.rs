//! The orders of the coordinator, checked and resolved.

use std::sync::Arc;

use gradwire_collectives::{
    Links, Topology,
    algorithms::{Kind, Spec, has_servers, probe::Pattern},
};
use gradwire_proto::{Failure, NodeId, ProcessSetId, Rank, Request, Route, Sequence};

use super::{agreement::Agreement, members::Members, tensor::TensorKey};

/// The same range of all flows of one tensor of a request, in elements, as far as each flow has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PartRange {
    /// The number of the tensor in the request.
    pub(crate) part: usize,
    pub(crate) offset: u64,
    /// At least 1.
    pub(crate) count: u64,
}

/// What an operation has of a request.
#[derive(Debug, Clone)]
pub(crate) struct OperationSegment {
    pub(crate) tensor: TensorKey,
    pub(crate) agreement: Arc<Agreement>,
    /// `None` if there is nothing to move: the request is done.
    pub(crate) range: Option<PartRange>,
}

/// One piece of work in which this node takes part, as the coordinator ordered it.
#[derive(Debug, Clone)]
pub(crate) struct Operation {
    pub(crate) sequence: Sequence,
    /// Collective, element type, reduction and factors; a piece is flat.
    pub(crate) request: Request,
    pub(crate) spec: Spec,
    /// The route of all segments.
    pub(crate) route: Route,
    /// The ranks that take part in the collective.
    pub(crate) members: Arc<Members>,
    /// Those of ranks of this node; on a server all of them.
    pub(crate) segments: Vec<OperationSegment>,
    /// Whether partial results travel in the job's eight-bit format.
    pub(crate) quantized: bool,
    /// The bytes of its chunks; none: as many as this node is set to.
    pub(crate) chunk: Option<u64>,
}

impl Operation {
    /// The nodes that take part, ascending.
    pub(crate) fn nodes(&self) -> &Arc<[NodeId]> {
        nodes_of(self.route, &self.spec, &self.members)
    }
}

/// The nodes that take part in an operation of these ranks, ascending: where there is something to
/// exchange, also the servers, if it is by such a spec.
pub(crate) fn nodes_of<'a>(route: Route, spec: &Spec, members: &'a Members) -> &'a Arc<[NodeId]> {
    let is_allreduce = route == Route::All && members.nodes.len() > 1;
    if is_allreduce && has_servers(Kind::Allreduce, spec) {
        &members.with_servers
    } else {
        &members.nodes
    }
}

/// What this node does to measure links.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Probe {
    pub(crate) sequence: Sequence,
    /// It fits the nodes.
    pub(crate) pattern: Pattern,
    /// Who does it together with this node, which is one of them.
    pub(crate) nodes: Arc<[NodeId]>,
}

/// One order of the coordinator. They are executed in sequence.
#[derive(Debug, Clone)]
pub(crate) enum Instruction {
    /// The tensor is the request that made the set; it is done.
    CreateSet {
        set: ProcessSetId,
        members: Arc<Members>,
        tensor: TensorKey,
    },
    /// Schedules are for all nodes in these racks and this order from now on.
    Arrange(Topology),
    /// They run at the same time.
    Probe(Vec<Probe>),
    /// By which load is distributed from now on.
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
