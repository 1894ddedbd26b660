//! The commands of the engine to the runtime, and their reasons.

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
    /// `ip:port` of its metrics; not sent to other nodes.
    pub metrics_address: Option<SocketAddr>,
    /// Its first rank; the others follow.
    pub first_rank: Rank,
    /// The number of its ranks.
    pub slots: u32,
    /// Its rack label; may be empty.
    pub rack: String,
    /// The rate of its line in Mbit/s; 0 if unknown.
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
    /// The wire type of reduced f32.
    pub compression: Compression,
    /// The interval between heartbeats, on both sides.
    pub heartbeat_interval: Duration,
    /// The silence after which a node counts as lost.
    pub heartbeat_timeout: Duration,
}

/// Why a node may not join. It determines the gRPC status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalKind {
    /// Its version of the protocol is different.
    Version,
    /// It does not know the job's secret.
    Secret,
    /// It belongs to another job.
    Job,
    /// It belongs to another epoch of the job.
    Epoch,
    /// Its description of itself is invalid.
    Invalid,
    /// Its position is taken, or the world is complete.
    Taken,
    /// The job is over.
    Over,
}

/// An id for a tensor's name; from now on announcements may carry only the id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registration {
    /// The id.
    pub id: TensorId,
    /// The process set.
    pub set: ProcessSetId,
    /// The name.
    pub name: TensorName,
    /// What all ranks of the set have agreed on.
    pub agreed: Arc<Agreed>,
    /// The priority.
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
    /// What was agreed, if the tensor is sent by name. Only its first segment in an operation has
    /// this; it holds for the other segments, too.
    pub agreed: Option<Arc<Agreed>>,
}

/// An algorithm with its parameters, and its id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnownSpec {
    /// Its id; 0 without a choice.
    pub id: SpecId,
    /// The spec.
    pub spec: Spec,
}

/// One piece: what is reduced, moved and published as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operation {
    /// Its number in the job's one total order (ORD).
    pub sequence: Sequence,
    /// The process set.
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
    /// The bytes of its chunks; `None` for the setting of each node.
    pub chunk: Option<u64>,
}

/// A new process set. The tensor, in set 0, is the request for it, which is done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetCreated {
    /// Its id.
    pub set: ProcessSetId,
    /// Its ranks, ascending.
    pub ranks: Vec<Rank>,
    /// The request.
    pub tensor: TensorRef,
}

/// A removed process set. The tensor, in set 0, is the request for that, which is done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetRemoved {
    /// Its id, which is never reused.
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

/// Moves meaningless bytes to measure links.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// Its number in the job's one total order (ORD).
    pub sequence: Sequence,
    /// The pattern that each group runs.
    pub pattern: Pattern,
    /// Groups of nodes, which have no node in common.
    pub groups: Vec<Vec<NodeId>>,
}

/// One answer to all nodes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Execute {
    /// Applied before anything else.
    pub sets_created: Vec<SetCreated>,
    /// Applied before the operations.
    pub registrations: Vec<Registration>,
    /// The specs to which operations refer by id from now on.
    pub specs: Vec<KnownSpec>,
    /// The operations, by ascending sequence number.
    pub operations: Vec<Operation>,
    /// The tensors that will never run.
    pub failures: Vec<TensorFailure>,
    /// The process sets in which all members take part again.
    pub joined: Vec<Joined>,
    /// Applied after anything else.
    pub sets_removed: Vec<SetRemoved>,
    /// Ids that are no longer valid, applied after all of the above. Every node confirms them
    /// ([`Event::Forgotten`](super::event::Event::Forgotten)). An id may already have been removed
    /// with its process set, or replaced by another id.
    pub evicted: Vec<TensorId>,
    /// Run before the operations.
    pub probes: Vec<Probe>,
    /// The rates by which load is distributed from now on.
    pub links: Option<Links>,
    /// Applied before the operations.
    pub arrangement: Option<Arrangement>,
    /// The number of this answer, from 1; set last.
    pub number: u64,
}

impl Execute {
    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
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

/// An order to the runtime.
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
    /// Continue with a node on another stream.
    Resume {
        /// The new stream.
        connection: ConnectionId,
        /// The stream that it replaces; `None` if the coordinator has not seen its join.
        earlier: Option<ConnectionId>,
        /// How many messages the node has received.
        received: u64,
    },
    /// Notify every node that a node has other addresses.
    Moved {
        /// The node.
        node: NodeId,
        /// `ip:port` of its data plane.
        data_address: String,
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
    /// Send this to every node of the world. Nodes skip operations in which they take no part.
    Execute(Box<Execute>),
    /// Notify every joined node that the job is over with this failure (TELL).
    Abort(Failure),
    /// Notify every node that every rank has left.
    Shutdown,
    /// Report to the operator.
    Report {
        /// Its severity.
        severity: Severity,
        /// One line.
        text: String,
    },
    /// Explain waits that have lasted too long to the operator and to the ranks that wait.
    Stalled {
        /// One line for all tensors that wait for the same ranks.
        texts: Vec<String>,
    },
    /// The job is over; nothing follows.
    Finish(Ending),
}

/// How long tensors waited for one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RankWait {
    /// The time in which any tensor waited for it.
    pub time: Duration,
    /// The number of tensors that waited.
    pub tensors: u64,
}

/// How long tensors waited for the last rank and the last node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Waits {
    /// By node: the time in which any tensor waited for it.
    pub nodes: BTreeMap<NodeId, Duration>,
    /// By rank.
    pub ranks: BTreeMap<Rank, RankWait>,
    /// For each tensor: from the submission of the first rank to that of the last one.
    pub of_tensors: Vec<Duration>,
}

/// How long it took until the first operation of a tensor started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Negotiated {
    /// From its first announcement until all ranks agreed on it.
    pub negotiate: Duration,
    /// From then until there was credit for it.
    pub credit: Duration,
}

/// How long things took, for the metrics.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Measures {
    /// For each tensor whose first operation started.
    pub negotiated: Vec<Negotiated>,
    /// How long tensors waited for the last rank and the last node.
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
    /// The decisions that viewers see; `None` to show them the whole reason.
    pub decided: Option<Vec<String>>,
    /// The measurements.
    pub measures: Measures,
}
