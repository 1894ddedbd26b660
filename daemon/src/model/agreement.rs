//! The agreement on a tensor, and the part of it that concerns this node. It is computed once and
//! shared by all rounds of the tensor. Pure.

use std::sync::Arc;

use gradwire_collectives::Roles;
use gradwire_proto::{Agreed, Collective, Flow, Rank, Request, Route, Shape};

use super::{members::Members, world::World};

/// The results of a rank: for each of its tensors the shape, if it gets a result, and the rows from
/// each member.
pub(crate) type OutputShapes = Vec<(Option<Shape>, Vec<u64>)>;

/// One flow between the participating nodes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NodeFlow {
    /// By the positions of the nodes among the participating nodes.
    pub(crate) roles: Roles,
    pub(crate) count: u64,
}

/// The non-empty flows of one tensor of a request.
#[derive(Debug)]
pub(crate) struct PartFlows {
    /// All of them, which every node needs for its schedules.
    pub(crate) all: Vec<NodeFlow>,
    /// The flows that concern this node, each with its index in `all`.
    pub(crate) here: Vec<(usize, Flow)>,
    /// The number of elements of the longest flow.
    pub(crate) longest: u64,
}

#[derive(Debug)]
pub(crate) struct Agreement {
    agreed: Agreed,
    /// The members that take part.
    pub(crate) members: Arc<Members>,
    /// The number of members of the process set, whether they take part or not.
    set: usize,
    /// The route of all its tensors.
    route: Route,
    parts: Vec<PartFlows>,
    flows: usize,
    /// Bytes of the flows that concern this node.
    bytes: u64,
}

/// The flows of a tensor; `None` if the root does not take part (TRUST).
fn part_flows(world: &World, members: &Members, flows: Vec<Flow>) -> Option<PartFlows> {
    let is_here = |end: Option<Rank>| end.is_none_or(|rank| world.local(rank).is_some());
    // A node without a member does not take part, not even in flows to all.
    let takes_part = !members.here.is_empty();
    let participant = |rank: Rank| {
        members.position(rank)?;
        Some(members.nodes.binary_search(&world.node_of(rank)?).ok()? as u32)
    };
    let end = |rank: Option<Rank>| rank.map_or(Some(None), |rank| participant(rank).map(Some));
    let (mut all, mut here) = (Vec::new(), Vec::new());
    for flow in flows {
        let roles = Roles { from: end(flow.source)?, to: end(flow.target)? };
        if flow.count == 0 {
            continue;
        }
        if takes_part && (is_here(flow.source) || is_here(flow.target)) {
            here.push((all.len(), flow));
        }
        all.push(NodeFlow { roles, count: flow.count });
    }
    let longest = all.iter().map(|flow| flow.count).max().unwrap_or(0);
    Some(PartFlows { all, here, longest })
}

impl Agreement {
    /// `None` if the agreement does not fit the members (TRUST).
    pub(crate) fn new(
        world: &World,
        set: &Members,
        members: Arc<Members>,
        agreed: Agreed,
    ) -> Option<Self> {
        if !agreed.is_of(&members.ranks) {
            return None;
        }
        let route = agreed.route(&members.ranks, |rank| world.node_of(rank))?;
        let request = agreed.request();
        let parts = 0..request.parts();
        let parts: Vec<PartFlows> = parts
            .map(|part| part_flows(world, &members, agreed.flows_of(&members.ranks, part)))
            .collect::<Option<_>>()?;
        let route = if parts.iter().all(|part| part.longest == 0) { Route::Nothing } else { route };
        let flows = parts.iter().map(|part| part.all.len()).sum();
        let bytes = parts.iter().enumerate().fold(0u64, |all, (part, flows)| {
            let elements =
                flows.here.iter().map(|(_, flow)| flow.count).fold(0, u64::saturating_add);
            all.saturating_add(elements.saturating_mul(request.dtype_of(part).size() as u64))
        });
        Some(Self { agreed, members, set: set.ranks.len(), route, parts, flows, bytes })
    }

    /// The common part of all members' requests.
    pub(crate) fn request(&self) -> &Request {
        self.agreed.request()
    }

    /// The route of all its tensors; [`Route::Nothing`] if all of them are empty.
    pub(crate) fn route(&self) -> Route {
        self.route
    }

    pub(crate) fn part(&self, part: usize) -> Option<&PartFlows> {
        self.parts.get(part)
    }

    /// The number of flows, which the size of this value depends on.
    pub(crate) fn flows(&self) -> usize {
        self.flows
    }

    /// The number of elements to be ordered and moved: the sum of the longest flows of the tensors.
    pub(crate) fn length(&self) -> u64 {
        self.parts.iter().map(|part| part.longest).fold(0, u64::saturating_add)
    }

    /// Bytes of the flows that concern this node.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether this is the same agreement of the same members.
    pub(crate) fn is(&self, agreed: &Agreed, members: &Arc<Members>) -> bool {
        self.agreed == *agreed && self.members == *members
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.is(&other.agreed, &other.members)
    }

    /// Whether this fits the request of a member.
    pub(crate) fn fits(&self, rank: Rank, asked: &Request) -> bool {
        if asked.has_free_rows() || self.request().has_free_rows() {
            // `new` has checked that the rows fit these members.
            self.agreed.fits_one(&self.members.ranks, rank, asked)
        } else {
            // All members have the same request, so the common part is the whole request.
            asked == self.request() && self.members.position(rank).is_some()
        }
    }

    /// The shapes of a member's results, if they differ from those that it could expect.
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
    use gradwire_proto::DType;

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
    fn flows_have_roles_and_local_parts() {
        let world = world(1, &[1, 2]);
        let asked = vec![request(Collective::Alltoall, &[3, 2]); 3];
        let alltoall = agreement(&world, &asked);
        assert_eq!((alltoall.flows(), alltoall.bytes()), (9, 8 * 2 * 4));
        assert_eq!((alltoall.route(), alltoall.length()), (Route::Each, 2));
        let part = alltoall.part(0).unwrap();
        assert_eq!(part.here[0].0, 1, "not the flow from rank 0 to itself");
        let (at, flow) = part.here[1];
        assert_eq!((flow.source, flow.target), (Some(Rank(0)), Some(Rank(2))));
        assert_eq!(part.all[at].roles, Roles { from: Some(0), to: Some(1) });
        assert!(alltoall.unexpected_shapes(Rank(2), &asked[0]).is_none());
        assert!(alltoall.part(1).is_none());
    }

    #[test]
    fn different_rows_give_unexpected_shapes() {
        let world = world(0, &[2]);
        let asked =
            [request(Collective::Allgather, &[1, 2]), request(Collective::Allgather, &[0, 2])];
        let gathered = agreement(&world, &asked);
        assert_eq!(gathered.bytes(), 8, "ONE: the empty flow has no bytes");
        assert_eq!(gathered.flows(), 1);
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
