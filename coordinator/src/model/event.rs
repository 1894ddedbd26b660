//! What may happen to the engine, in checked domain types.

use std::time::Duration;

use gradwire_proto::{
    Failure, NodeId, Priority, ProcessSetId, Rank, Request, Sequence, TensorId, convert::TensorRef,
};

/// One stream to the coordinator; the runtime numbers them in the order in which they come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// How a node describes itself when it joins. The engine checks all of it, because the order of the
/// checks decides which refusal a mistaken node reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Join {
    /// The version of the messages that the node speaks.
    pub protocol: u32,
    /// The node's release.
    pub version: String,
    /// The job that it wants to join.
    pub job: String,
    /// Its name for people.
    pub host: String,
    /// `ip:port` where its data plane listens.
    pub data_address: String,
    /// Its local ranks.
    pub slots: u32,
    /// Its position among the nodes.
    pub order: u32,
    /// Its rack label; may be empty.
    pub rack: String,
    /// Whether it has proven the job's secret.
    pub proven: bool,
}

/// One distinct request for a tensor and the local ranks that made it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Submitted {
    /// Global ranks.
    pub ranks: Vec<Rank>,
    /// What they asked for.
    pub request: Request,
    /// How urgent it is to them; larger goes first.
    pub priority: Priority,
    /// They submitted the name a second time before it was done.
    pub duplicate: bool,
}

/// One tensor that all local ranks of the set have submitted which have not joined; of a send and
/// receive, those of the two that are local; of a join, one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announcement {
    /// The process set that the tensor belongs to.
    pub set: ProcessSetId,
    /// The tensor.
    pub tensor: TensorRef,
    /// Empty: all local ranks asked for exactly what is registered under the id.
    pub submitted: Vec<Submitted>,
}

/// Something that happened. Every event of a connection also counts as a sign of life of its
/// node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A node wants to join.
    Joined {
        /// Its stream.
        connection: ConnectionId,
        /// What it said.
        join: Join,
    },
    /// A stream has ended or does not take messages.
    Lost {
        /// The stream.
        connection: ConnectionId,
        /// What the runtime saw, for the failure's text.
        why: String,
    },
    /// A node sent what is no message of the protocol.
    Nonsense {
        /// Its stream.
        connection: ConnectionId,
        /// What is wrong with it.
        what: String,
    },
    /// A node's local ranks have submitted these tensors.
    Ready {
        /// Its stream.
        connection: ConnectionId,
        /// The tensors.
        announcements: Vec<Announcement>,
    },
    /// Operations are complete on a node.
    Done {
        /// Its stream.
        connection: ConnectionId,
        /// The operations.
        sequences: Vec<Sequence>,
    },
    /// A node has read that ids stand for nothing any more, and uses them no longer.
    Forgotten {
        /// Its stream.
        connection: ConnectionId,
        /// The ids.
        ids: Vec<TensorId>,
    },
    /// A node can't go on.
    Failed {
        /// Its stream.
        connection: ConnectionId,
        /// What it reports.
        failure: Failure,
    },
    /// Ranks leave in good order.
    Left {
        /// The stream of their node.
        connection: ConnectionId,
        /// Who leaves.
        ranks: Vec<Rank>,
        /// They end without ever having joined.
        absent: bool,
    },
    /// A node is alive: a message has come.
    MessageReceived {
        /// Its stream.
        connection: ConnectionId,
    },
    /// A node is alive, although its stream may say nothing: a datagram of it has come.
    DatagramReceived {
        /// The node.
        node: NodeId,
    },
    /// No further event is waiting: what has become ready together is answered together.
    Drained,
    /// The time of [`Engine::next_deadline`](crate::engine::Engine::next_deadline) has come.
    Tick,
    /// The coordinator itself was suspended: nobody is blamed for that time.
    Suspended {
        /// How long.
        time: Duration,
    },
    /// The user ends the job.
    Cancel {
        /// Why, for the failure's text.
        why: String,
    },
}

impl Event {
    /// The stream that the event came from, if it came from one.
    pub fn connection(&self) -> Option<ConnectionId> {
        match self {
            Self::Joined { connection, .. }
            | Self::Lost { connection, .. }
            | Self::Nonsense { connection, .. }
            | Self::Ready { connection, .. }
            | Self::Done { connection, .. }
            | Self::Forgotten { connection, .. }
            | Self::Failed { connection, .. }
            | Self::Left { connection, .. }
            | Self::MessageReceived { connection } => Some(*connection),
            Self::DatagramReceived { .. }
            | Self::Drained
            | Self::Tick
            | Self::Suspended { .. }
            | Self::Cancel { .. } => None,
        }
    }
}
