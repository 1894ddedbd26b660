//! The events of the engine, in checked types.

use std::time::Duration;

use gradwire_proto::{
    Failure, NodeId, Priority, ProcessSetId, Rank, Request, Sequence, TensorId, convert::TensorRef,
};

use super::learned::Memory;

/// One stream to the coordinator. The runtime numbers streams in the order in which they arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// A node's description of itself when it joins. The engine checks all of it, because the order of
/// the checks decides which refusal a node gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Join {
    /// The version of the messages that the node speaks.
    pub protocol: u32,
    /// The node's release.
    pub version: String,
    /// The job that it wants to join.
    pub job: String,
    /// Its host name.
    pub host: String,
    /// `ip:port` where its data plane listens.
    pub data_address: String,
    /// `ip:port` where it shows its metrics; empty if it shows none.
    pub metrics_address: String,
    /// The number of its local ranks.
    pub slots: u32,
    /// Its position among the nodes.
    pub order: u32,
    /// Its rack label; may be empty.
    pub rack: String,
    /// The rate of its line in Mbit/s; 0 if it is not known.
    pub line_mbit: u32,
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
    /// The priority that they gave it; larger goes first.
    pub priority: Priority,
    /// Whether they submitted the name a second time before it was done.
    pub duplicate: bool,
}

/// The last of a node's ranks to submit a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latest {
    /// The rank, counted from 0 on its node.
    pub local_rank: u32,
    /// How long ago the first rank of the node submitted it.
    pub waited: Duration,
}

/// One tensor that all local ranks of the process set which have not joined have submitted. For a
/// send and receive, these are the local ones of its two ranks; for a join, it is one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announcement {
    /// The process set that the tensor belongs to.
    pub set: ProcessSetId,
    /// The tensor.
    pub tensor: TensorRef,
    /// The requests; empty if all local ranks asked for exactly what is registered under the id.
    pub submitted: Vec<Submitted>,
    /// Who was the last of the node's ranks to submit it. `None` if there is no choice, or if
    /// nobody submitted it just now.
    pub latest: Option<Latest>,
}

/// Something that happened. Every event of a connection also counts as a sign of life of its
/// node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A node wants to join.
    Joined {
        /// Its stream.
        connection: ConnectionId,
        /// Its description of itself.
        join: Join,
    },
    /// A stream has ended or does not accept messages.
    Lost {
        /// The stream.
        connection: ConnectionId,
        /// What the runtime saw, for the failure's text.
        why: String,
    },
    /// A node sent something that is not a message of the protocol.
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
    /// A node has run a probe.
    Probed {
        /// Its stream.
        connection: ConnectionId,
        /// The probe.
        sequence: Sequence,
        /// The time that it took there.
        time: Duration,
        /// The packets that the node had sent again before.
        retransmits: u64,
    },
    /// A node has read that ids are not valid any more, and no longer uses them.
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
        /// The failure that it reports.
        failure: Failure,
    },
    /// Ranks leave in good order.
    Left {
        /// The stream of their node.
        connection: ConnectionId,
        /// The ranks that leave.
        ranks: Vec<Rank>,
        /// Whether they end without ever having attached.
        absent: bool,
    },
    /// A node is alive: a message was received.
    MessageReceived {
        /// Its stream.
        connection: ConnectionId,
    },
    /// A node is alive, even if its stream is silent: a datagram of it was received.
    DatagramReceived {
        /// The node.
        node: NodeId,
    },
    /// No further event is waiting: what has become ready together is answered together.
    Drained,
    /// The time of [`Engine::next_deadline`](crate::engine::Engine::next_deadline) has come.
    Tick,
    /// The coordinator itself was suspended. That time counts for no node.
    Suspended {
        /// For how long.
        time: Duration,
    },
    /// What earlier jobs on this cluster have measured.
    Recalled(Memory),
    /// The user ends the job.
    Cancel {
        /// The reason, for the failure's text.
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
            | Self::Probed { connection, .. }
            | Self::Forgotten { connection, .. }
            | Self::Failed { connection, .. }
            | Self::Left { connection, .. }
            | Self::MessageReceived { connection } => Some(*connection),
            Self::DatagramReceived { .. }
            | Self::Drained
            | Self::Tick
            | Self::Suspended { .. }
            | Self::Recalled(_)
            | Self::Cancel { .. } => None,
        }
    }
}
