//! What the engine asks of the runtime, and why.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc, time::Duration};

use gradwire_collectives::{Links, Spec, algorithms::probe::Pattern};
use gradwire_proto::{
    Agreed, Compression, Ending, Epoch, Failure, NodeId, Priority, ProcessSetId, Rank, Request,
    Sequence, SpecId, TensorId, TensorName, convert::TensorRef,
};

use super::{event::ConnectionId, network::Arrangement};

/// A node of the world, as every node knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Its host name.
    pub host: String,
    /// `ip:port` of its data plane.
    pub data_address: String,
    /// `ip:port` of its metrics; other nodes do not get it.
    pub metrics_address: Option<SocketAddr>,
    /// Its first rank; the others follow.
    pub first_rank: Rank,
    /// The number of its ranks.
    pub slots: u32,
    /// Its rack label; may be empty.
    pub rack: String,
    /// The rate of its line in Mbit/s; 0 if it is not known.
    pub line_mbit: u32,
}

/// The world, once it is complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct World {
    /// The number of this formation.
    pub epoch: Epoch,
    /// All nodes in rank order; a node's id is its index.
    pub nodes: Vec<Node>,
    /// Data threads per daemon, each with its own connections.
    pub lanes: u32,
    /// The wire type of f32 where it is reduced.
    pub compression: Compression,
    /// The interval between signs of life, on both sides.
    pub heartbeat_interval: Duration,
    /// The silence after which a node counts as lost.
    pub heartbeat_timeout: Duration,
}

/// Why a node may not join. It decides the gRPC status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalKind {
    /// Its version of the protocol is different.
    Version,
    /// It does not know the job's secret.
    Secret,
    /// It belongs to another job.
    Job,
    /// Its description of itself is not usable.
    Invalid,
    /// Its position is taken, or the world is complete.
    Taken,
    /// The job is over.
    Over,
}

/// An id for a tensor's name; from now on announcements may carry the id alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registration {
    /// The id.
    pub id: TensorId,
    /// The process set.
    pub set: ProcessSetId,
    /// The name that it stands for.
    pub name: TensorName,
    /// What all ranks of the set have agreed on.
    pub agreed: Arc<Agreed>,
    /// The priority that it stands for.
    pub priority: Priority,
}

/// The same range of all flows of one tensor of a request, in elements, as far as each flow has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// The request.
    pub tensor: TensorRef,
    /// The number of the tensor in the request, or [`gradwire_proto::NO_PART`].
    pub part: u32,
    /// The first element of each flow in this piece.
    pub offset: u64,
    /// The number of elements of the longest flow.
    pub count: u64,
    /// What was agreed, if the tensor is called by its name. Only its first segment in an operation
    /// has this; it holds for its other segments there.
    pub agreed: Option<Arc<Agreed>>,
}

/// An algorithm with its parameters, and its id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnownSpec {
    /// Its id; 0 where there is nothing to choose.
    pub id: SpecId,
    /// The spec.
    pub spec: Spec,
}

/// One piece: what is reduced, moved and published as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operation {
    /// Its number in the job's one total order (ORD).
    pub sequence: Sequence,
    /// The process set that takes part.
    pub set: ProcessSetId,
    /// The kind of work: only collective, element type, reduction and factors.
    pub request: Request,
    /// The spec that it runs with.
    pub spec: KnownSpec,
    /// The segments that it moves.
    pub segments: Vec<Segment>,
    /// Ranks of the set that have joined and take no part, ascending.
    pub absent: Arc<[Rank]>,
    /// Whether partial results travel in the job's eight-bit format.
    pub quantized: bool,
    /// The bytes of its chunks; none: as many as each node is set to.
    pub chunk: Option<u64>,
}

/// A process set that exists from now on. The tensor, of set 0, is the request for it, which is
/// done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetCreated {
    /// Its id.
    pub set: ProcessSetId,
    /// Its ranks, ascending.
    pub ranks: Vec<Rank>,
    /// The request.
    pub tensor: TensorRef,
}

/// A process set that is removed. The tensor, of set 0, is the request for that, which is done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetRemoved {
    /// Its id, which is not used again.
    pub set: ProcessSetId,
    /// The request.
    pub tensor: TensorRef,
}

/// Every rank of a process set has joined: all take part again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Joined {
    /// The set.
    pub set: ProcessSetId,
    /// The rank that joined last.
    pub last: Rank,
}

/// A tensor that will never run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorFailure {
    /// Its process set.
    pub set: ProcessSetId,
    /// The tensor.
    pub tensor: TensorRef,
    /// The reason.
    pub failure: Failure,
}

/// Moves bytes that mean nothing, to measure links.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// Its number in the job's one total order (ORD).
    pub sequence: Sequence,
    /// What each group does.
    pub pattern: Pattern,
    /// Groups of nodes, which have no node in common.
    pub groups: Vec<Vec<NodeId>>,
}

/// One answer to all nodes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Execute {
    /// To be applied before anything else.
    pub sets_created: Vec<SetCreated>,
    /// To be applied before the operations.
    pub registrations: Vec<Registration>,
    /// The specs that operations call by their ids from now on.
    pub specs: Vec<KnownSpec>,
    /// The operations, by ascending sequence number.
    pub operations: Vec<Operation>,
    /// The tensors that will never run.
    pub failures: Vec<TensorFailure>,
    /// The process sets in which all members take part again.
    pub joined: Vec<Joined>,
    /// To be applied after anything else.
    pub sets_removed: Vec<SetRemoved>,
    /// Ids that are not valid any more, to be applied after all of the above. Every node confirms
    /// them ([`Event::Forgotten`](super::event::Event::Forgotten)). An id may have been removed
    /// before, with its process set or because another id has replaced it.
    pub evicted: Vec<TensorId>,
    /// To be run before the operations.
    pub probes: Vec<Probe>,
    /// The rates by which load is distributed, from now on.
    pub links: Option<Links>,
    /// To be applied before the operations.
    pub arrangement: Option<Arrangement>,
}

impl Execute {
    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        let Self {
            sets_created,
            registrations,
            specs,
            operations,
            failures,
            joined,
            sets_removed,
            evicted,
            probes,
            links,
            arrangement,
        } = self;
        arrangement.is_none()
            && sets_created.is_empty()
            && registrations.is_empty()
            && specs.is_empty()
            && operations.is_empty()
            && failures.is_empty()
            && joined.is_empty()
            && sets_removed.is_empty()
            && evicted.is_empty()
            && probes.is_empty()
            && links.is_none()
    }
}

/// The severity of a line to the operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// For information.
    Info,
    /// The operator should look at it.
    Warning,
}

/// Something that the runtime has to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Notify a node that the world is complete.
    Welcome {
        /// Its stream.
        connection: ConnectionId,
        /// Its id.
        node: NodeId,
        /// The world.
        world: Arc<World>,
    },
    /// End a stream whose node may not join.
    Refuse {
        /// The stream.
        connection: ConnectionId,
        /// Decides the status code.
        kind: RefusalKind,
        /// The text for the node's operator.
        text: String,
    },
    /// Send this to every node of the world. Nodes that take no part in an operation skip it.
    Execute(Execute),
    /// Notify every joined node that the job is over with this failure (TELL).
    Abort(Failure),
    /// Notify every node that every rank has left.
    Shutdown,
    /// Report to the operator.
    Report {
        /// How important it is.
        severity: Severity,
        /// One line.
        text: String,
    },
    /// The job is over; nothing follows.
    Finish(Ending),
}

/// How long tensors waited for one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RankWait {
    /// The time in which some tensor waited for it.
    pub time: Duration,
    /// How many tensors did.
    pub tensors: u64,
}

/// How long tensors waited for those that came last.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Waits {
    /// By node: the time in which some tensor waited for it.
    pub nodes: BTreeMap<NodeId, Duration>,
    /// By rank.
    pub ranks: BTreeMap<Rank, RankWait>,
    /// For each tensor: from the submission of its first rank to that of the last one.
    pub of_tensors: Vec<Duration>,
}

/// How long the first operation of a tensor took to start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Negotiated {
    /// From its first announcement until all ranks agreed on it.
    pub negotiate: Duration,
    /// From then on until there was credit for it.
    pub credit: Duration,
}

/// How long things took, for the metrics.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Measures {
    /// For each tensor whose first operation started.
    pub negotiated: Vec<Negotiated>,
    /// How long tensors waited for those that came last.
    pub waits: Waits,
    /// Tensors on which ranks disagreed.
    pub disagreements: u64,
}

/// The decision of one step.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Output {
    /// The commands, to be executed in this order.
    pub commands: Vec<Command>,
    /// The reason; empty if there was nothing to decide.
    pub reason: String,
    /// What of it viewers are shown, one by one; all of it if this is `None`.
    pub decided: Option<Vec<String>>,
    /// The measurements.
    pub measures: Measures,
}
