//! What was agreed on for a tensor, and what of it concerns this node. This is computed once and
//! shared by all rounds of the tensor. Pure.

use std::sync::Arc;

use gradwire_proto::{Agreed, Collective, Flow, Rank, Request, Shape};

use super::{members::Members, world::World};

/// The results of a rank: for each of its tensors the shape, if it gets any, and the rows from each
/// member.
pub(crate) type OutputShapes = Vec<(Option<Shape>, Vec<u64>)>;

/// What was agreed on.
#[derive(Debug)]
pub(crate) struct Agreement {
    agreed: Agreed,
    /// The members that take part.
    pub(crate) members: Arc<Members>,
    /// How many members the process set has, whether they take part or not.
    set: usize,
    /// The flows that concern this node, by their numbers, ascending. They are a small part of all
    /// flows of an alltoall (BOUND).
    here: Vec<(u32, Flow)>,
    /// How many flows there are.
    flows: u32,
    /// Bytes of the flows that concern this node.
    bytes: u64,
}

impl Agreement {
    /// `None` if what was agreed does not fit the members (TRUST).
    pub(crate) fn new(
        world: &World,
        set: &Members,
        members: Arc<Members>,
        agreed: Agreed,
    ) -> Option<Self> {
        if !agreed.is_of(&members.ranks) {
            return None;
        }
        let is_here = |end: Option<Rank>| end.is_none_or(|rank| world.local(rank).is_some());
        let flows = agreed.flows(&members.ranks);
        let count = flows.len() as u32;
        // A node without a member takes part in nothing, not even in flows to all.
        let takes_part = !members.here.is_empty();
        let concerns = |flow: &Flow| takes_part && (is_here(flow.source) || is_here(flow.target));
        let here: Vec<(u32, Flow)> =
            (0..).zip(flows).filter(|(_, flow)| flow.count > 0 && concerns(flow)).collect();
        let bytes = here.iter().fold(0u64, |all, (_, flow)| {
            let size = agreed.request().dtype_of(flow.part as usize).size() as u64;
            all.saturating_add(flow.count * size)
        });
        Some(Self { agreed, members, set: set.ranks.len(), here, flows: count, bytes })
    }

    /// What is the same for all members.
    pub(crate) fn request(&self) -> &Request {
        self.agreed.request()
    }

    /// The number of flows, including those that do not concern this node.
    pub(crate) fn flows(&self) -> u32 {
        self.flows
    }

    /// The number of flows that concern this node. The memory of this value grows with it.
    pub(crate) fn flows_here(&self) -> usize {
        self.here.len()
    }

    /// Bytes of the flows that concern this node.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A flow that concerns this node.
    pub(crate) fn flow(&self, number: u32) -> Option<&Flow> {
        let at = self.here.binary_search_by_key(&number, |(number, _)| *number).ok()?;
        Some(&self.here[at].1)
    }

    /// Whether this is what these members agreed on.
    pub(crate) fn is(&self, agreed: &Agreed, members: &Arc<Members>) -> bool {
        self.agreed == *agreed && self.members == *members
    }

    /// Whether both are the same.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.is(&other.agreed, &other.members)
    }

    /// Whether this is what a member asked for.
    pub(crate) fn fits(&self, rank: Rank, asked: &Request) -> bool {
        if asked.has_free_rows() || self.request().has_free_rows() {
            // `new` has checked that the rows are those of these members.
            self.agreed.fits_one(&self.members.ranks, rank, asked)
        } else {
            // All members ask for the same, so the common part is the whole request.
            asked == self.request() && self.members.position(rank).is_some()
        }
    }

    /// The shapes of a member's results, if they are not those that it could expect.
    pub(crate) fn unexpected_shapes(&self, rank: Rank, asked: &Request) -> Option<OutputShapes> {
        let as_asked = matches!(
            asked.collective,
            Collective::Allreduce | Collective::Broadcast | Collective::Reduce
        );
        let ranks = &self.members.ranks;
        if as_asked || self.agreed.is_expected(ranks, self.set, rank, asked) {
            return None;
        }
        let outputs = self.agreed.outputs(ranks, rank).into_iter().enumerate();
        Some(
            outputs.map(|(part, shape)| (shape, self.agreed.received(ranks, rank, part))).collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use gradwire_proto::{DType, NodeId, Route};

    use super::*;
    use crate::model::world::tests::world;

    fn request(collective: Collective, dims: &[u64]) -> Request {
        Request::plain(collective, DType::F32, Shape::new(dims).unwrap())
    }

    fn agreement(world: &World, requests: &[Request]) -> Agreement {
        let members = Arc::new(Members::everybody(world));
        let requests: Vec<&Request> = requests.iter().collect();
        let agreed = Agreed::of(&members.ranks, &requests).unwrap();
        Agreement::new(world, &members.clone(), members, agreed).unwrap()
    }

    #[test]
    fn only_what_concerns_this_node_is_kept() {
        let world = world(1, &[1, 2]);
        let asked = vec![request(Collective::Alltoall, &[3, 2]); 3];
        let alltoall = agreement(&world, &asked);
        assert_eq!((alltoall.flows(), alltoall.bytes()), (9, 8 * 2 * 4));
        assert!(alltoall.flow(0).is_none(), "from rank 0 to itself");
        let flow = alltoall.flow(2).unwrap();
        assert_eq!((flow.source, flow.target), (Some(Rank(0)), Some(Rank(2))));
        let way = Route::Move(NodeId(0), NodeId(1));
        assert_eq!(flow.route(|rank| world.node_of(rank)), Some(way));
        assert!(alltoall.unexpected_shapes(Rank(2), &asked[0]).is_none());
    }

    #[test]
    fn other_rows_than_ones_own_are_a_surprise() {
        let world = world(0, &[2]);
        let asked =
            [request(Collective::Allgather, &[1, 2]), request(Collective::Allgather, &[0, 2])];
        let gathered = agreement(&world, &asked);
        assert_eq!(gathered.bytes(), 8, "ONE: the empty flow counts for nothing");
        assert!(gathered.flow(1).is_none());
        assert!(gathered.fits(Rank(0), &asked[0]) && !gathered.fits(Rank(0), &asked[1]));
        let outcome = gathered.unexpected_shapes(Rank(1), &asked[1]).unwrap();
        assert_eq!(outcome, [(Some(Shape::new(&[1, 2]).unwrap()), vec![1, 0])]);
    }

    #[test]
    fn a_node_without_a_member_is_not_concerned() {
        let world = world(1, &[1, 1]);
        let set = Arc::new(Members::of(&world, vec![Rank(0)]).unwrap());
        let asked = request(Collective::Allreduce, &[4]);
        let agreed = Agreed::of(&set.ranks, &[&asked]).unwrap();
        let agreement = Agreement::new(&world, &set, set.clone(), agreed).unwrap();
        assert_eq!((agreement.bytes(), agreement.flows()), (0, 1));
        // TRUST: rows of a world of another size.
        let forged = Agreed::from_parts(request(Collective::Allgather, &[0]), vec![1, 1]);
        assert!(Agreement::new(&world, &set, set.clone(), forged).is_none());
    }
}
