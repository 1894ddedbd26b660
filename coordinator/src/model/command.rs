//! What the engine asks of the runtime, and why.

use std::{sync::Arc, time::Duration};

use gradwire_collectives::Spec;
use gradwire_proto::{
    Agreed, Compression, Ending, Epoch, Failure, NodeId, Priority, ProcessSetId, Rank, Request,
    Sequence, SpecId, TensorId, TensorName, convert::TensorRef,
};

use super::event::ConnectionId;

/// A node of the world, as every node knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Its name for people.
    pub host: String,
    /// `ip:port` of its data plane.
    pub data_address: String,
    /// Its first rank; the others follow.
    pub first_rank: Rank,
    /// How many ranks it has.
    pub slots: u32,
    /// Its rack label; may be empty.
    pub rack: String,
}

/// The world, once it is complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct World {
    /// The formation that this is.
    pub epoch: Epoch,
    /// All nodes in rank order; a node's id is its index.
    pub nodes: Vec<Node>,
    /// Data threads per daemon, each with its own connections.
    pub lanes: u32,
    /// The wire type of f32 where it is reduced.
    pub compression: Compression,
    /// How often both sides send a sign of life.
    pub heartbeat_interval: Duration,
    /// After which silence a node counts as lost.
    pub heartbeat_timeout: Duration,
}

/// Why a node may not join; decides the gRPC status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalKind {
    /// It speaks another version of the protocol.
    Version,
    /// It does not know the job's secret.
    Secret,
    /// It belongs to another job.
    Job,
    /// Its own description of itself is unusable.
    Invalid,
    /// Its place is taken, or the world is complete.
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

/// A range of one flow of one tensor, in elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// The tensor.
    pub tensor: TensorRef,
    /// The number of the flow in [`Agreed::flows`], or [`gradwire_proto::NO_FLOW`].
    pub flow: u32,
    /// The first element of the flow in this piece.
    pub offset: u64,
    /// How many elements.
    pub count: u64,
    /// What was agreed, where the tensor is called by its name: with its first segment in an
    /// operation, which its others there follow.
    pub agreed: Option<Arc<Agreed>>,
}

/// An algorithm with its parameters, and what it is called from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnownSpec {
    /// Its number, 0 where there is nothing to choose.
    pub id: SpecId,
    /// What it is.
    pub spec: Spec,
}

/// One piece: what is reduced, moved and published as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operation {
    /// Its place in the job's one total order (ORD).
    pub sequence: Sequence,
    /// The process set that takes part.
    pub set: ProcessSetId,
    /// What is done: collective, element type, reduction and factors only.
    pub request: Request,
    /// How.
    pub spec: KnownSpec,
    /// On what.
    pub segments: Vec<Segment>,
    /// Ranks of the set that have joined and take no part, ascending.
    pub absent: Arc<[Rank]>,
}

/// A process set that exists from now on. The tensor, of set 0, is the request for it, and done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetCreated {
    /// Its number.
    pub set: ProcessSetId,
    /// Its ranks, ascending.
    pub ranks: Vec<Rank>,
    /// The request.
    pub tensor: TensorRef,
}

/// A process set that is gone. The tensor, of set 0, is the request for that, and done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetRemoved {
    /// Its number, which does not come again.
    pub set: ProcessSetId,
    /// The request.
    pub tensor: TensorRef,
}

/// Every rank of a process set has joined: all take part again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Joined {
    /// The set.
    pub set: ProcessSetId,
    /// Who came last.
    pub last: Rank,
}

/// A tensor that will never run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorFailure {
    /// Its process set.
    pub set: ProcessSetId,
    /// The tensor.
    pub tensor: TensorRef,
    /// Why.
    pub failure: Failure,
}

/// One answer to all nodes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Execute {
    /// To be applied before anything else.
    pub sets_created: Vec<SetCreated>,
    /// To be applied before the operations.
    pub registrations: Vec<Registration>,
    /// Those that operations call by their ids from now on.
    pub specs: Vec<KnownSpec>,
    /// By ascending sequence.
    pub operations: Vec<Operation>,
    /// What will never run.
    pub failures: Vec<TensorFailure>,
    /// Sets in which everybody takes part again.
    pub joined: Vec<Joined>,
    /// To be applied after anything else.
    pub sets_removed: Vec<SetRemoved>,
    /// Ids that stand for nothing any more, after all that is above; every node confirms them
    /// ([`Event::Forgotten`](super::event::Event::Forgotten)). One of them may have gone before,
    /// with its set or because another id has taken its place.
    pub evicted: Vec<TensorId>,
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
        } = self;
        sets_created.is_empty()
            && registrations.is_empty()
            && specs.is_empty()
            && operations.is_empty()
            && failures.is_empty()
            && joined.is_empty()
            && sets_removed.is_empty()
            && evicted.is_empty()
    }
}

/// How important a line to the operator is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// Good to know.
    Info,
    /// Somebody should look.
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
    /// End a stream that may not join.
    Refuse {
        /// The stream.
        connection: ConnectionId,
        /// Decides the status code.
        kind: RefusalKind,
        /// What the node's operator reads.
        text: String,
    },
    /// Send to every node of the world. Nodes that take no part in an operation skip it.
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

/// How long things took, for the metrics.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Measures {
    /// For each tensor that went out: from its first announcement to its first operation.
    pub negotiated: Vec<Duration>,
    /// For nodes whose announcement completed a tensor: how long the others had waited for it,
    /// at most.
    pub lags: Vec<(NodeId, Duration)>,
    /// Tensors on which ranks disagreed.
    pub disagreements: u64,
}

/// What one step decided.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Output {
    /// To be done, in this order.
    pub commands: Vec<Command>,
    /// Why; empty if there was nothing to decide.
    pub reason: String,
    /// What was measured.
    pub measures: Measures,
}
