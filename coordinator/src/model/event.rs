//! The events of the engine, as checked types.

use std::time::Duration;

use gradwire_proto::{
    Failure, NodeId, Priority, ProcessSetId, Rank, Request, Sequence, TensorId, convert::TensorRef,
    pb,
};

use super::learned::Memory;

/// One stream to the coordinator. The runtime numbers streams in the order in which they arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// A distinct request for a tensor, and the local ranks that made it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Submitted {
    /// Global ranks.
    pub ranks: Vec<Rank>,
    /// The request.
    pub request: Request,
    /// Its priority; larger goes first.
    pub priority: Priority,
    /// Whether this is a second submission, before the first one was done.
    pub duplicate: bool,
    /// Where the programs of the ranks have called it, as far as it is known.
    pub sites: Vec<String>,
}

/// The last of a node's ranks to submit a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latest {
    /// The rank, counted from 0 on its node.
    pub local_rank: u32,
    /// How long ago the first rank of the node submitted it.
    pub waited: Duration,
}

/// A tensor that all local ranks of its process set have submitted, except those that have joined.
/// For a send and receive, these are the local ones of its two ranks; for a join, it is one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announcement {
    /// The process set that the tensor belongs to.
    pub set: ProcessSetId,
    /// The tensor.
    pub tensor: TensorRef,
    /// The requests; empty if all local ranks requested exactly what is registered under the id.
    pub submitted: Vec<Submitted>,
    /// The node's last rank to submit it. `None` if the node has only one rank, or if no rank
    /// submitted it just now.
    pub latest: Option<Latest>,
}

/// A rank that can do nothing until one of its operations ends.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct StuckRank {
    /// The rank.
    pub rank: Rank,
    /// The process set of an operation that it waits for.
    pub set: ProcessSetId,
    /// The name of that operation.
    pub name: String,
    /// The call, such as `allreduce`.
    pub call: String,
    /// How many of its operations have not ended, this one included.
    pub in_flight: u32,
    /// Where the program has called the operation; empty if it is not known.
    pub site: String,
}

/// When a failure was noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Noticed {
    /// The time since the start, by the best estimate of the clocks; `None` if it is not known.
    pub at: Option<Duration>,
    /// How long another node's report may be under way.
    pub trip: Duration,
}

impl Noticed {
    /// At an unknown time.
    pub const UNKNOWN: Self = Self { at: None, trip: Duration::ZERO };

    /// Whether this was before the other, as far as both times are known.
    pub fn is_before(&self, other: &Self) -> bool {
        matches!((self.at, other.at), (Some(this), Some(other)) if this < other)
    }
}

/// An event. Every event of a connection also shows that its node is alive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A node wants to join.
    Joined {
        /// Its stream.
        connection: ConnectionId,
        /// Its description of itself. The engine checks all of it, because the order of the checks
        /// determines which refusal a node gets.
        join: pb::Join,
        /// Whether it has proven that it knows the job's secret.
        proven: bool,
    },
    /// A stream has ended or does not accept messages.
    Lost {
        /// The stream.
        connection: ConnectionId,
        /// What the runtime saw, for the failure's text.
        why: String,
        /// Whether the node may continue on another stream.
        may_return: bool,
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
        /// How long it took there.
        time: Duration,
        /// The packets that the node had retransmitted before.
        retransmits: u64,
    },
    /// A node has read that ids are evicted, and no longer uses them.
    Forgotten {
        /// Its stream.
        connection: ConnectionId,
        /// The ids.
        ids: Vec<TensorId>,
    },
    /// A node has failed.
    Failed {
        /// Its stream.
        connection: ConnectionId,
        /// The failure that it reports.
        failure: Failure,
        /// When it noticed that.
        noticed: Noticed,
    },
    /// Ranks leave normally.
    Left {
        /// The stream of their node.
        connection: ConnectionId,
        /// The ranks that leave.
        ranks: Vec<Rank>,
        /// Whether they never attached.
        absent: bool,
    },
    /// No rank of a node can do anything until one of its operations ends, and none is running
    /// there. The node repeats this as long as it is true.
    Stuck {
        /// The stream of the node.
        connection: ConnectionId,
        /// The number of the last answer that the node had carried out.
        last: u64,
        /// Its ranks that have not left, ascending.
        ranks: Vec<StuckRank>,
    },
    /// A node is alive: a message was received.
    MessageReceived {
        /// Its stream.
        connection: ConnectionId,
    },
    /// A node is alive, even if its stream is silent: its datagram was received.
    DatagramReceived {
        /// The node.
        node: NodeId,
    },
    /// No more events are waiting: tensors that became ready together are answered together.
    Drained,
    /// [`Engine::next_deadline`](crate::engine::Engine::next_deadline) is reached.
    Tick,
    /// The coordinator itself was suspended. This time does not count for any node.
    Suspended {
        /// For how long.
        time: Duration,
    },
    /// The times of earlier jobs on this cluster.
    Recalled(Memory),
    /// Some rank is paused: time up to now does not count for waits. Repeated during the pause.
    Paused,
    /// The job must end because it stands still.
    StandsStill {
        /// What its ranks do, for the failure's text.
        what: String,
    },
    /// The others have waited too long for a rank, and go on without it in the next epoch.
    StaysAway {
        /// Why this epoch ends.
        failure: Failure,
    },
    /// The user ends the job.
    Cancel {
        /// The reason, for the failure's text.
        why: String,
    },
}

impl Event {
    /// The stream on which the event arrived, if any.
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
            | Self::Stuck { connection, .. }
            | Self::MessageReceived { connection } => Some(*connection),
            Self::DatagramReceived { .. }
            | Self::Drained
            | Self::Tick
            | Self::Suspended { .. }
            | Self::Recalled(_)
            | Self::Paused
            | Self::StandsStill { .. }
            | Self::StaysAway { .. }
            | Self::Cancel { .. } => None,
        }
    }
}
