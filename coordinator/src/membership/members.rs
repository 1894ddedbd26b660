//! The nodes of the complete world.
//!
//! A node's id is the order that the launcher assigned, and ranks are numbered in that order.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use gradwire_proto::{
    NodeId, Rank,
    beat::{LastReceived, Limits},
};

use super::absence::Absence;
use crate::model::{ConnectionId, command::Node, text};

/// One node of the world.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) connection: ConnectionId,
    pub(crate) node: Node,
    /// When it last sent something.
    pub(crate) last_received: LastReceived,
    /// Its ranks that have left, each with the number of ranks of the job that had left before.
    pub(crate) left: BTreeMap<Rank, u32>,
    /// The ranks that have left without ever having attached.
    pub(crate) absent: BTreeSet<Rank>,
    /// Whether its stream has ended after all of its ranks had left.
    pub(crate) gone: bool,
    /// Whether it has no stream now.
    pub(crate) absence: Absence,
    /// The number of its stream.
    pub(crate) attempt: u32,
    /// Why it is lost for good, if it is.
    pub(crate) lost: Option<String>,
}

impl Member {
    /// Its ranks.
    pub(crate) fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        let first = self.node.first_rank.0;
        (first..first + self.node.slots).map(Rank)
    }

    /// Whether it has no ranks and only reduces for others; it stays until all ranks of the job
    /// have left.
    pub(crate) fn is_server(&self) -> bool {
        self.node.slots == 0
    }

    /// Whether all its ranks have left.
    pub(crate) fn has_left(&self) -> bool {
        !self.is_server() && self.left.len() == self.node.slots as usize
    }
}

/// A node that has joined, when the world becomes complete.
#[derive(Debug)]
pub(crate) struct Joined {
    pub(crate) connection: ConnectionId,
    pub(crate) node: Node,
    pub(crate) attempt: u32,
    pub(crate) absence: Absence,
}

/// The nodes of the complete world; empty before it is.
#[derive(Debug, Default)]
pub(crate) struct Members {
    all: Vec<Member>,
    by_connection: BTreeMap<ConnectionId, NodeId>,
    /// How many ranks have left.
    departures: u32,
}

impl Members {
    /// A world of these nodes, in the order of their ids.
    pub(crate) fn new(nodes: impl IntoIterator<Item = Joined>, now: Duration) -> Self {
        let mut members = Self::default();
        for Joined { connection, node, attempt, absence } in nodes {
            members.by_connection.insert(connection, NodeId(members.all.len() as u32));
            members.all.push(Member {
                connection,
                node,
                last_received: LastReceived::at(now),
                left: BTreeMap::new(),
                absent: BTreeSet::new(),
                gone: false,
                absence,
                attempt,
                lost: None,
            });
        }
        members
    }

    /// The node at the other end of a stream.
    pub(crate) fn id(&self, connection: ConnectionId) -> Option<NodeId> {
        self.by_connection.get(&connection).copied()
    }

    /// The node continues on another stream. Returns the earlier one.
    pub(crate) fn moves(
        &mut self,
        node: NodeId,
        connection: ConnectionId,
        attempt: u32,
    ) -> Option<ConnectionId> {
        let member = self.all.get_mut(node.index())?;
        member.attempt = attempt;
        let earlier = std::mem::replace(&mut member.connection, connection);
        self.by_connection.remove(&earlier);
        self.by_connection.insert(connection, node);
        Some(earlier)
    }

    /// A node by its id.
    pub(crate) fn get(&self, node: NodeId) -> Option<&Member> {
        self.all.get(node.0 as usize)
    }

    /// A node by its id, mutable.
    pub(crate) fn get_mut(&mut self, node: NodeId) -> Option<&mut Member> {
        self.all.get_mut(node.0 as usize)
    }

    /// All nodes with their ids.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (NodeId, &Member)> {
        self.all.iter().enumerate().map(|(id, member)| (NodeId(id as u32), member))
    }

    /// The number of nodes.
    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// The number of ranks.
    pub(crate) fn ranks(&self) -> u32 {
        self.all.iter().map(|m| m.node.slots).sum()
    }

    /// The node of a rank.
    pub(crate) fn node_of(&self, rank: Rank) -> NodeId {
        let after = self.all.partition_point(|member| member.node.first_rank <= rank);
        NodeId(after.saturating_sub(1) as u32)
    }

    /// A rank of a node, by its local number.
    pub(crate) fn rank(&self, node: NodeId, local_rank: u32) -> Option<Rank> {
        let node = &self.all.get(node.index())?.node;
        (local_rank < node.slots).then(|| Rank(node.first_rank.0 + local_rank))
    }

    /// The rank of a node that has only one.
    pub(crate) fn only_rank(&self, node: NodeId) -> Option<Rank> {
        let node = &self.all.get(node.index())?.node;
        (node.slots == 1).then_some(node.first_rank)
    }

    /// Notes that a rank leaves. Returns false if it had left before.
    pub(crate) fn leave(&mut self, node: NodeId, rank: Rank, absent: bool) -> bool {
        let Some(member) = self.all.get_mut(node.index()) else { return false };
        member.absent.extend(absent.then_some(rank));
        self.departures += 1;
        member.left.insert(rank, self.departures - 1).is_none()
    }

    /// Whether any rank has left.
    pub(crate) fn has_departures(&self) -> bool {
        self.departures > 0
    }

    /// A text such as `node 1 (ranks 2-3)`, for a failure that also names the host.
    pub(crate) fn describe(&self, node: NodeId) -> String {
        if self.get(node).is_some_and(Member::is_server) {
            return format!("node {node} (a server)");
        }
        let ranks: Vec<Rank> = self.get(node).map_or_else(Vec::new, |m| m.ranks().collect());
        format!("node {node} ({})", text::named_ranks(&ranks))
    }

    /// The host name of a node.
    pub(crate) fn host(&self, node: NodeId) -> &str {
        self.get(node).map_or("", |m| m.node.host.as_str())
    }

    /// The node whose silence or absence will exceed its limit first, and when.
    pub(crate) fn first_due(&self, limits: &Limits, away: Duration) -> Option<(NodeId, Duration)> {
        let alive = self.iter().filter(|(_, member)| !member.gone);
        let due = |member: &Member| {
            member.absence.until(away).unwrap_or_else(|| member.last_received.deadline(limits))
        };
        alive.map(|(id, member)| (id, due(member))).min_by_key(|due| due.1)
    }

    /// Ignores all silence up to now, because the coordinator itself was suspended.
    pub(crate) fn received_from_all(&mut self, now: Duration) {
        for member in &mut self.all {
            member.last_received = LastReceived::at(now);
            member.absence.restart(now);
        }
    }
}
