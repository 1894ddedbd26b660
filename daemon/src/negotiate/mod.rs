//! The daemon's side of the negotiation with the coordinator.
//!
//! - `client`: the stream: joins, sends what the node has to say, hands on what comes
//! - `translate`: ids and names, messages and domain types; the only place where the
//!   coordinator's messages are checked (TRUST)

pub(crate) mod client;
mod translate;

use std::{net::SocketAddr, time::Duration};

use gradwire_collectives::algorithms::Algorithm;
use gradwire_proto::{Epoch, Failure, NodeId, Rank, Request, Sequence};

use crate::queue::{Announced, TensorKey};

/// What this node has to say to the coordinator.
#[derive(Debug)]
pub(crate) enum Outgoing {
    /// A tensor is ready here.
    Ready(Announced),
    /// An operation is complete here.
    Done(Sequence),
    /// This node can't go on.
    Failed(Failure),
    /// Ranks have left in good order.
    Left(Vec<Rank>),
    /// Still alive.
    Heartbeat,
}

/// One node of the world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeInfo {
    pub(crate) host: String,
    pub(crate) address: SocketAddr,
    pub(crate) first_rank: Rank,
    pub(crate) slots: u32,
    pub(crate) rack: String,
}

/// The world as the coordinator has formed it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct World {
    pub(crate) epoch: Epoch,
    pub(crate) node: NodeId,
    pub(crate) nodes: Vec<NodeInfo>,
    pub(crate) lanes: u32,
    pub(crate) heartbeat_interval: Duration,
    pub(crate) heartbeat_timeout: Duration,
}

impl World {
    /// This node.
    pub(crate) fn me(&self) -> &NodeInfo {
        &self.nodes[self.node.0 as usize]
    }

    /// How many ranks there are.
    pub(crate) fn size(&self) -> u32 {
        self.nodes.iter().map(|n| n.slots).sum()
    }

    /// The node of a rank.
    pub(crate) fn node_of(&self, rank: Rank) -> Option<NodeId> {
        let holds = |n: &NodeInfo| (n.first_rank.0..n.first_rank.0 + n.slots).contains(&rank.0);
        self.nodes.iter().position(holds).map(|index| NodeId(index as u32))
    }
}

/// A range of a tensor, in elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OperationSegment {
    pub(crate) tensor: TensorKey,
    pub(crate) offset: u64,
    pub(crate) count: u64,
}

/// One piece of work, as the coordinator ordered it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Operation {
    pub(crate) sequence: Sequence,
    /// The shape is empty: the piece is flat.
    pub(crate) request: Request,
    pub(crate) algorithm: Algorithm,
    pub(crate) segments: Vec<OperationSegment>,
}

/// What the coordinator orders, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Instruction {
    Start(Operation),
    Fail { tensor: TensorKey, failure: Failure },
}
