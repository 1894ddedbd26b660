//! The ranks that take part in a collective, and their nodes: a process set, or the rest of one
//! while some of its ranks have joined. Pure.

use std::sync::Arc;

use gradwire_proto::{NodeId, Rank};

use super::world::World;

/// Some ranks of the job, at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Members {
    /// Ascending.
    pub(crate) ranks: Vec<Rank>,
    /// The nodes of these ranks, ascending: the participants of their schedules.
    pub(crate) nodes: Arc<[NodeId]>,
    /// The same plus all servers, for schedules with servers.
    pub(crate) with_servers: Arc<[NodeId]>,
    /// The local ranks on this node, ascending.
    pub(crate) here: Vec<u32>,
}

impl Members {
    /// Members with these ranks; `None` if the list is empty or not ascending, or if a rank is not
    /// in the job (TRUST).
    pub(crate) fn of(world: &World, ranks: Vec<Rank>) -> Option<Self> {
        if ranks.is_empty() || !ranks.is_sorted_by(|a, b| a < b) {
            return None;
        }
        let mut nodes = Vec::new();
        let mut here = Vec::new();
        for rank in &ranks {
            let node = world.node_of(*rank)?;
            if nodes.last() != Some(&node) {
                nodes.push(node);
            }
            here.extend(world.local(*rank));
        }
        Some(Self::with(world, ranks, nodes.into(), here))
    }

    fn with(world: &World, ranks: Vec<Rank>, nodes: Arc<[NodeId]>, here: Vec<u32>) -> Self {
        let servers = world.servers();
        let with_servers = match servers.len() {
            0 => nodes.clone(),
            _ => nodes.iter().copied().chain(servers).collect(),
        };
        Self { ranks, nodes, with_servers, here }
    }

    /// All ranks of the job.
    pub(crate) fn everybody(world: &World) -> Self {
        let ranks = (0..world.size()).map(Rank).collect();
        let nodes = (0..(world.nodes.len() - world.servers().len()) as u32).map(NodeId).collect();
        Self::with(world, ranks, nodes, (0..world.me().slots).collect())
    }

    /// The position of a rank in the list.
    pub(crate) fn position(&self, rank: Rank) -> Option<usize> {
        self.ranks.binary_search(&rank).ok()
    }

    /// Whether a local rank of this node is one of them.
    pub(crate) fn has_local(&self, local_rank: u32) -> bool {
        self.here.binary_search(&local_rank).is_ok()
    }

    /// The ranks that are not `absent`; `None` if `absent` is not ascending, names a rank that is
    /// not in the list, or leaves no rank (TRUST).
    pub(crate) fn without(&self, world: &World, absent: &[Rank]) -> Option<Self> {
        let known = absent.is_sorted_by(|a, b| a < b)
            && absent.iter().all(|rank| self.position(*rank).is_some());
        let rest = self.ranks.iter().filter(|rank| absent.binary_search(rank).is_err());
        known.then(|| Self::of(world, rest.copied().collect())).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::world::tests::world;

    fn ranks(ranks: &[u32]) -> Vec<Rank> {
        ranks.iter().copied().map(Rank).collect()
    }

    #[test]
    fn members_know_their_nodes() {
        let world = world(1, &[2, 3, 1]);
        let set = Members::of(&world, ranks(&[0, 3, 4])).unwrap();
        assert_eq!((&*set.nodes, &set.here[..]), (&[NodeId(0), NodeId(1)][..], &[1, 2][..]));
        assert_eq!((set.position(Rank(4)), set.position(Rank(1))), (Some(2), None));
        let rest = set.without(&world, &ranks(&[3, 4])).unwrap();
        assert_eq!((&*rest.nodes, rest.here.len()), (&[NodeId(0)][..], 0));
        let all = Members::everybody(&world);
        assert_eq!(Members::of(&world, all.ranks.clone()), Some(all));
    }

    /// TRUST: a list of ranks from the coordinator is checked before it is used.
    #[test]
    fn invalid_lists_of_ranks_are_refused() {
        let world = world(0, &[2, 3]);
        for bad in [&[][..], &[1, 0], &[1, 1], &[5]] {
            assert_eq!(Members::of(&world, ranks(bad)), None, "{bad:?}");
        }
        let set = Members::of(&world, ranks(&[1, 2])).unwrap();
        for bad in [&[0][..], &[2, 1], &[1, 2]] {
            assert_eq!(set.without(&world, &ranks(bad)), None, "{bad:?}");
        }
    }
}
