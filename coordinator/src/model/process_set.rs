//! A group of ranks with its own operations, and which of its ranks have joined.

use std::collections::BTreeSet;

use gradwire_proto::{NodeId, Rank};

/// The ranks of one process set, by node. Ranks are numbered in the order of the nodes, so the
/// ranks of each node are adjacent.
#[derive(Debug)]
pub(crate) struct ProcessSet {
    /// The ranks, ascending.
    members: Vec<Rank>,
    /// The nodes that have members, ascending.
    nodes: Vec<NodeId>,
    /// Where each node's members begin, and where the last node's members end.
    bounds: Vec<usize>,
    /// The ranks that have joined and wait for the others.
    joined: BTreeSet<Rank>,
    last_joined: Rank,
}

impl ProcessSet {
    /// A set of `members`, ascending; `node_of` returns the node of each.
    pub(crate) fn new(members: Vec<Rank>, node_of: impl Fn(Rank) -> NodeId) -> Self {
        let (mut nodes, mut bounds) = (Vec::new(), Vec::new());
        for (at, rank) in members.iter().enumerate() {
            let node = node_of(*rank);
            if nodes.last() != Some(&node) {
                nodes.push(node);
                bounds.push(at);
            }
        }
        bounds.push(members.len());
        Self { members, nodes, bounds, joined: BTreeSet::new(), last_joined: Rank(0) }
    }

    /// All ranks, ascending.
    pub(crate) fn members(&self) -> &[Rank] {
        &self.members
    }

    /// The nodes that have ranks, ascending.
    pub(crate) fn nodes(&self) -> &[NodeId] {
        &self.nodes
    }

    /// The ranks of a node, ascending; empty if it has none.
    pub(crate) fn local(&self, node: NodeId) -> &[Rank] {
        match self.nodes.binary_search(&node) {
            Ok(at) => &self.members[self.bounds[at]..self.bounds[at + 1]],
            Err(_) => &[],
        }
    }

    /// Whether a rank is a member.
    pub(crate) fn contains(&self, rank: Rank) -> bool {
        self.members.binary_search(&rank).is_ok()
    }

    /// The node of a rank; `None` if the rank is not in the set.
    pub(crate) fn node_of(&self, rank: Rank) -> Option<NodeId> {
        let at = self.members.binary_search(&rank).ok()?;
        let node = self.bounds.partition_point(|&begin| begin <= at) - 1;
        self.nodes.get(node).copied()
    }

    /// The nodes with a member that is not `absent`, ascending.
    pub(crate) fn nodes_without(&self, absent: &[Rank]) -> Vec<NodeId> {
        if absent.is_empty() {
            return self.nodes.clone();
        }
        let takes_part = |rank: &Rank| absent.binary_search(rank).is_err();
        let nodes = self.nodes.iter().copied();
        nodes.filter(|&node| self.local(node).iter().any(takes_part)).collect()
    }

    /// The ranks that have joined and wait for the others.
    pub(crate) fn joined(&self) -> &BTreeSet<Rank> {
        &self.joined
    }

    /// Whether every rank has joined.
    pub(crate) fn all_joined(&self) -> bool {
        self.joined.len() == self.members.len()
    }

    /// The rank that joined last.
    pub(crate) fn last_joined(&self) -> Rank {
        self.last_joined
    }

    /// Notes that a rank has no more data.
    pub(crate) fn join(&mut self, rank: Rank) {
        if self.joined.insert(rank) {
            self.last_joined = rank;
        }
    }

    /// Lets all ranks take part again.
    pub(crate) fn all_return(&mut self) {
        self.joined.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(ranks: &[u32]) -> Vec<Rank> {
        ranks.iter().copied().map(Rank).collect()
    }

    #[test]
    fn each_rank_is_on_its_node() {
        // Four ranks per node; nodes 0, 2 and 3 have members.
        let set = ProcessSet::new(ranks(&[1, 2, 9, 12, 15]), |rank| NodeId(rank.0 / 4));
        assert_eq!(set.nodes(), [NodeId(0), NodeId(2), NodeId(3)]);
        assert_eq!(set.local(NodeId(0)), ranks(&[1, 2]));
        assert_eq!(set.local(NodeId(1)), []);
        assert_eq!(set.local(NodeId(3)), ranks(&[12, 15]));
        for &rank in set.members() {
            assert_eq!(set.node_of(rank), Some(NodeId(rank.0 / 4)));
        }
        assert_eq!(set.node_of(Rank(0)), None);
        assert_eq!(set.nodes_without(&ranks(&[1, 9])), [NodeId(0), NodeId(3)]);
        assert_eq!(set.nodes_without(&[]), set.nodes());
    }

    #[test]
    fn the_last_rank_to_join_is_known() {
        let mut set = ProcessSet::new(ranks(&[0, 1, 2]), |rank| NodeId(rank.0));
        for rank in [2, 0, 2, 1] {
            assert!(!set.all_joined());
            set.join(Rank(rank));
        }
        assert!(set.all_joined());
        assert_eq!(set.last_joined(), Rank(1));
        set.all_return();
        assert!(set.joined().is_empty());
    }
}
