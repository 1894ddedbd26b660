//! The nodes of the job and their ranks, as formed by the coordinator.

use std::time::Duration;

use gradwire_collectives::Topology;
use gradwire_proto::{Compression, Endpoints, Epoch, MAX_LANES, NodeId, Rank, WireError, pb};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeInfo {
    pub(crate) host: String,
    /// Where its data plane listens.
    pub(crate) addresses: Endpoints,
    pub(crate) first_rank: Rank,
    pub(crate) slots: u32,
    pub(crate) rack: String,
    /// The rate of its line in Mbit/s; 0 if unknown.
    pub(crate) line_mbit: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct World {
    pub(crate) epoch: Epoch,
    pub(crate) node: NodeId,
    /// At least one node has ranks, which are numbered without gaps in node order. Nodes without
    /// ranks, the servers, come last.
    pub(crate) nodes: Vec<NodeInfo>,
    pub(crate) lanes: u32,
    /// From the coordinator, not from this node's settings, so all nodes use the same (SAME).
    pub(crate) compression: Compression,
    pub(crate) heartbeat_interval: Duration,
    pub(crate) heartbeat_timeout: Duration,
}

impl World {
    pub(crate) fn me(&self) -> &NodeInfo {
        &self.nodes[self.node.0 as usize]
    }

    /// The servers: nodes without ranks, which reduce for the others.
    pub(crate) fn servers(&self) -> impl ExactSizeIterator<Item = NodeId> + use<> {
        let first = self.nodes.partition_point(|node| node.slots > 0) as u32;
        (first..self.nodes.len() as u32).map(NodeId)
    }

    /// The topology of all nodes by their labels.
    pub(crate) fn topology(&self) -> Topology {
        let racks: Vec<&str> = self.nodes.iter().map(|node| node.rack.as_str()).collect();
        let lines: Vec<u32> = self.nodes.iter().map(|node| node.line_mbit).collect();
        let topology = Topology::from_labels(&racks).with_servers(self.servers().len() as u32);
        topology.with_lines(&lines)
    }

    pub(crate) fn is_server(&self) -> bool {
        self.me().slots == 0
    }

    pub(crate) fn size(&self) -> u32 {
        self.nodes.last().map_or(0, |last| last.first_rank.0 + last.slots)
    }

    pub(crate) fn node_of(&self, rank: Rank) -> Option<NodeId> {
        let after = self.nodes.partition_point(|node| node.first_rank <= rank) as u32;
        (rank.0 < self.size()).then(|| NodeId(after - 1))
    }

    /// The local rank of a rank of this node.
    pub(crate) fn local(&self, rank: Rank) -> Option<u32> {
        let me = self.me();
        rank.0.checked_sub(me.first_rank.0).filter(|local| *local < me.slots)
    }
}

/// Checks that this node is in the world, and that ranks are numbered without gaps (TRUST).
impl TryFrom<pb::World> for World {
    type Error = WireError;

    fn try_from(wire: pb::World) -> Result<Self, WireError> {
        let mut next = 0u32;
        let mut nodes = Vec::with_capacity(wire.nodes.len());
        for node in wire.nodes {
            if node.first_rank != next {
                let reason =
                    format!("{} begins at rank {}, not {next}", node.host, node.first_rank);
                return Err(invalid("nodes", reason));
            }
            let is_before_ranks = |last: &NodeInfo| last.slots == 0 && node.slots > 0;
            if next == 0 && node.slots == 0 || nodes.last().is_some_and(is_before_ranks) {
                let reason = format!("{} has no ranks, or follows a node without ranks", node.host);
                return Err(invalid("nodes", reason));
            }
            next =
                next.checked_add(node.slots).ok_or_else(|| invalid("nodes", "too many ranks"))?;
            let addresses = node.data_address.parse();
            nodes.push(NodeInfo {
                addresses: addresses.map_err(|_| invalid("data_address", node.data_address))?,
                host: node.host,
                first_rank: Rank(node.first_rank),
                slots: node.slots,
                rack: node.rack,
                line_mbit: node.line_mbit,
            });
        }
        if wire.node as usize >= nodes.len() {
            return Err(invalid("node", format!("{} of only {} nodes", wire.node, nodes.len())));
        }
        if !(1..=MAX_LANES).contains(&wire.lanes) {
            let reason = format!("{} is not within 1 to {MAX_LANES}", wire.lanes);
            return Err(invalid("lanes", reason));
        }
        let compression = Compression::from_wire(wire.compression)
            .ok_or_else(|| invalid("compression", format!("{} is unknown", wire.compression)))?;
        Ok(Self {
            epoch: Epoch(wire.epoch),
            node: NodeId(wire.node),
            nodes,
            lanes: wire.lanes,
            compression,
            heartbeat_interval: Duration::from_millis(wire.heartbeat_interval_ms.max(1)),
            heartbeat_timeout: Duration::from_millis(wire.heartbeat_timeout_ms.max(1)),
        })
    }
}

/// An error in a field of a message.
pub(crate) fn invalid(field: &'static str, reason: impl Into<String>) -> WireError {
    WireError::Invalid { field, reason: reason.into() }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn node(first_rank: u32, slots: u32) -> pb::Node {
        pb::Node {
            host: format!("n{first_rank}"),
            data_address: "127.0.0.1:1".into(),
            first_rank,
            slots,
            rack: String::new(),
            line_mbit: 0,
        }
    }

    /// Nodes with these numbers of slots, seen from node `me`.
    pub(crate) fn world(me: u32, slots: &[u32]) -> World {
        let mut next = 0;
        let nodes = slots.iter().map(|&slots| {
            next += slots;
            node(next - slots, slots)
        });
        let nodes = nodes.collect();
        pb::World { node: me, nodes, lanes: 2, ..Default::default() }.try_into().unwrap()
    }

    #[test]
    fn ranks_know_their_nodes() {
        let world = world(1, &[2, 1, 3]);
        assert_eq!(world.size(), 6);
        let nodes: Vec<_> = (0..7).map(|rank| world.node_of(Rank(rank)).map(|n| n.0)).collect();
        assert_eq!(nodes, [Some(0), Some(0), Some(1), Some(2), Some(2), Some(2), None]);
        let local: Vec<_> = (0..4).map(|rank| world.local(Rank(rank))).collect();
        assert_eq!(local, [None, None, Some(0), None]);
    }

    #[test]
    fn servers_come_last_and_have_no_ranks() {
        let world = world(3, &[2, 1, 0, 0]);
        assert_eq!((world.size(), world.is_server()), (3, true));
        assert_eq!(world.servers().collect::<Vec<_>>(), [NodeId(2), NodeId(3)]);
        assert_eq!(world.node_of(Rank(2)), Some(NodeId(1)));
        assert_eq!((world.node_of(Rank(3)), world.local(Rank(2))), (None, None));
    }

    #[test]
    fn an_invalid_world_is_refused() {
        let good =
            pb::World { nodes: vec![node(0, 2), node(2, 1)], lanes: 2, ..Default::default() };
        let formed = World::try_from(good.clone()).unwrap();
        assert_eq!((formed.size(), formed.node_of(Rank(2))), (3, Some(NodeId(1))));
        let cases = [
            pb::World { nodes: vec![node(0, 2), node(1, 1)], ..good.clone() },
            pb::World { nodes: vec![node(0, 0)], ..good.clone() },
            pb::World { nodes: vec![node(0, 0), node(0, 2)], ..good.clone() },
            pb::World { nodes: vec![node(0, 2), node(2, 0), node(2, 1)], ..good.clone() },
            pb::World { node: 2, ..good.clone() },
            pb::World { lanes: 0, ..good.clone() },
            pb::World { compression: 7, ..good.clone() },
            pb::World { nodes: vec![node(0, u32::MAX), node(u32::MAX, 2)], ..good },
        ];
        for case in cases {
            assert!(World::try_from(case).is_err());
        }
    }
}
