//! What has to move between nodes for a tensor on which all ranks have agreed.
//!
//! The flows of a tensor ([`Agreed::flows`]) are between ranks; the data plane moves bytes between
//! nodes. Each flow has a [`Route`] there. Flows that have all but their ranges in common are of
//! one *kind*: they may share a piece.

use std::{collections::BTreeMap, sync::Arc};

use gradwire_proto::{
    Agreed, Collective, Compression, DType, NO_FLOW, NodeId, ProcessSetId, Rank, ReduceOp, Request,
    Route, Shape, agreed::pair,
};

use super::process_set::ProcessSet;

/// The most segments of one piece (BOUND).
pub(crate) const MAX_SEGMENTS: usize = 2048;

/// The most flows of one tensor: what all ranks have agreed on fits one message (BOUND).
pub(crate) const MAX_FLOWS: usize = 1 << 18;

/// What all flows of one piece have in common.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Kind {
    pub(crate) set: ProcessSetId,
    pub(crate) dtype: DType,
    pub(crate) route: Route,
    /// The nodes that take part, ascending, if these are not all nodes with a member.
    only: Option<Vec<NodeId>>,
    collective: Collective,
    reduce_op: ReduceOp,
    prescale: u64,
    postscale: u64,
    /// The ranks that have joined and take no part, ascending.
    pub(crate) absent: Arc<[Rank]>,
}

impl Kind {
    /// The request of a piece, which has no shape, no root and no list.
    pub(crate) fn request(&self) -> Request {
        Request {
            collective: self.collective,
            dtype: self.dtype,
            shape: Shape::default(),
            reduce_op: self.reduce_op,
            root: Rank(0),
            prescale: f64::from_bits(self.prescale),
            postscale: f64::from_bits(self.postscale),
            list: Vec::new(),
            more: Vec::new(),
        }
    }

    /// How many bytes `bytes` of the ranks' elements take between nodes.
    pub(crate) fn wire_bytes(&self, compression: Compression, bytes: u64) -> u64 {
        let wire = compression.between_nodes(&self.request());
        bytes / self.dtype.size() as u64 * wire.size() as u64
    }

    /// The nodes that take part, ascending.
    pub(crate) fn participants(&self, set: &ProcessSet) -> Vec<NodeId> {
        self.only.clone().unwrap_or_else(|| set.nodes_without(&self.absent))
    }

    /// Whether a node takes part.
    pub(crate) fn concerns(&self, node: NodeId, set: &ProcessSet) -> bool {
        match &self.only {
            Some(nodes) => nodes.contains(&node),
            None => set.local(node).iter().any(|rank| self.absent.binary_search(rank).is_err()),
        }
    }
}

/// One flow, or the notice that a tensor is done.
#[derive(Debug)]
pub(crate) struct Load {
    pub(crate) kind: Arc<Kind>,
    /// The flow's number among those of the tensor.
    pub(crate) flow: u32,
    pub(crate) elements: u64,
}

/// Everything that has to be sent out for one tensor.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) agreed: Arc<Agreed>,
    pub(crate) absent: Arc<[Rank]>,
    /// The flows, in order; never empty, so that every tensor comes to its end.
    pub(crate) loads: Vec<Load>,
}

impl Plan {
    /// The plan for what `members` have agreed on. `absent` are the other ranks of the set that the
    /// tensor concerns. Both are ascending, and `members` belong to the set.
    pub(crate) fn new(
        id: ProcessSetId,
        set: &ProcessSet,
        members: &[Rank],
        absent: Vec<Rank>,
        agreed: Agreed,
    ) -> Self {
        let absent: Arc<[Rank]> = absent.into();
        let request = agreed.request();
        let mut kinds: BTreeMap<(DType, Route), Arc<Kind>> = BTreeMap::new();
        // Flows are between members, which belong to the set.
        let node = |rank: Rank| set.node_of(rank).unwrap_or_default();
        // An empty send and receive concerns the nodes of its two ranks alone.
        let idle = match (request.collective, members) {
            (Collective::SendReceive, [first, .., last]) => Some(pair(node(*first), node(*last))),
            (Collective::SendReceive, [only]) => Some(vec![node(*only)]),
            _ => None,
        };
        let mut kind = |dtype: DType, route: Route| {
            let new = || Kind {
                set: id,
                dtype,
                route,
                only: if route == Route::Nothing { idle.clone() } else { route.ends() },
                collective: request.collective,
                reduce_op: request.reduce_op,
                prescale: request.prescale.to_bits(),
                postscale: request.postscale.to_bits(),
                absent: Arc::clone(&absent),
            };
            Arc::clone(kinds.entry((dtype, route)).or_insert_with(|| Arc::new(new())))
        };
        let mut loads = Vec::new();
        let mut reached = Vec::new();
        let mut everywhere = false;
        for (number, flow) in (0..).zip(agreed.flows(members)) {
            if flow.count == 0 {
                continue;
            }
            let Some(route) = flow.route(|rank| set.node_of(rank)) else { continue };
            match route.ends() {
                Some(ends) => reached.extend(ends),
                None => everywhere = true,
            }
            let kind = kind(request.dtype_of(flow.part as usize), route);
            loads.push(Load { kind, flow: number, elements: flow.count });
        }
        reached.sort_unstable();
        reached.dedup();
        let there = |rank: &Rank| reached.binary_search(&node(*rank)).is_ok();
        if !everywhere && !members.iter().all(there) {
            let kind = kind(request.dtype, Route::Nothing);
            loads.push(Load { kind, flow: NO_FLOW, elements: 0 });
        }
        Self { agreed: Arc::new(agreed), absent, loads }
    }

    /// The number of flows. The memory of this value grows with it.
    pub(crate) fn flow_count(&self) -> usize {
        self.loads.len()
    }

    /// The smallest number of pieces that it takes: at least one for each kind, with a limited
    /// number of flows in each.
    pub(crate) fn least_pieces(&self) -> usize {
        let mut kinds: BTreeMap<&Kind, usize> = BTreeMap::new();
        for load in &self.loads {
            *kinds.entry(&*load.kind).or_default() += 1;
        }
        kinds.values().map(|flows| flows.div_ceil(MAX_SEGMENTS)).sum()
    }

    /// Whether a flow concerns a node.
    pub(crate) fn reaches(&self, node: NodeId, set: &ProcessSet) -> bool {
        let mut flows = self.loads.iter().filter(|load| load.flow != NO_FLOW);
        flows.any(|load| load.kind.concerns(node, set))
    }

    /// The number of flows of a request between `members`, without listing them.
    pub(crate) fn flows(request: &Request, members: usize) -> usize {
        let each = match request.collective {
            Collective::Allgather
            | Collective::Gather
            | Collective::Scatter
            | Collective::ReduceScatter => members,
            Collective::Alltoall => members.saturating_mul(members),
            Collective::Allreduce
            | Collective::Reduce
            | Collective::Broadcast
            | Collective::SendReceive => 1,
            Collective::Barrier
            | Collective::Join
            | Collective::AddProcessSet
            | Collective::RemoveProcessSet => 0,
        };
        each.saturating_mul(request.parts())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routes(request: &Request, rows: &[u64]) -> Vec<(Route, u32)> {
        let all: Vec<Rank> = (0..4).map(Rank).collect();
        let set = ProcessSet::new(all.clone(), |rank| NodeId(rank.0 / 2));
        let requests: Vec<Request> = rows
            .iter()
            .map(|&rows| Request {
                shape: request.shape.with_rows(rows).unwrap(),
                ..request.clone()
            })
            .collect();
        let requests: Vec<&Request> = requests.iter().collect();
        let agreed = Agreed::of(&all, &requests).unwrap();
        assert_eq!(Plan::flows(request, 4), agreed.flows(&all).len());
        let plan = Plan::new(ProcessSetId(3), &set, &all, Vec::new(), agreed);
        plan.loads.iter().map(|load| (load.kind.route, load.flow)).collect()
    }

    fn plain(collective: Collective) -> Request {
        Request::plain(collective, DType::F32, Shape::new(&[0]).unwrap())
    }

    #[test]
    fn every_flow_has_its_route_and_every_tensor_an_end() {
        let (a, b) = (NodeId(0), NodeId(1));
        let even = [4; 4];
        assert_eq!(routes(&plain(Collective::Allreduce), &even), [(Route::All, 0)]);
        assert_eq!(routes(&plain(Collective::Broadcast), &even), [(Route::From(a), 0)]);
        assert_eq!(routes(&plain(Collective::Barrier), &[0; 4]), [(Route::Nothing, NO_FLOW)]);
        let gathered = routes(&plain(Collective::Allgather), &[1, 0, 2, 0]);
        assert_eq!(gathered, [(Route::From(a), 0), (Route::From(b), 2)]);
        let gather = Request { root: Rank(2), ..plain(Collective::Gather) };
        assert_eq!(routes(&gather, &[0, 1, 0, 0]), [(Route::Move(a, b), 1)]);
        let local = routes(&gather, &[0, 0, 0, 1]);
        assert_eq!(local, [(Route::Move(b, b), 3), (Route::Nothing, NO_FLOW)]);
        let scattered = routes(&plain(Collective::ReduceScatter), &even);
        assert_eq!(
            scattered,
            [(Route::To(a), 0), (Route::To(a), 1), (Route::To(b), 2), (Route::To(b), 3)]
        );
        assert_eq!(routes(&plain(Collective::Alltoall), &even).len(), 16);
        assert_eq!(routes(&plain(Collective::Allreduce), &[0; 4]), [(Route::Nothing, NO_FLOW)]);
    }

    #[test]
    fn compressed_pieces_are_priced_by_their_wire_bytes() {
        let all: Vec<Rank> = (0..2).map(Rank).collect();
        let set = ProcessSet::new(all.clone(), |rank| NodeId(rank.0));
        let wire_bytes = |collective, compression| {
            let request = Request { shape: Shape::new(&[8]).unwrap(), ..plain(collective) };
            let agreed = Agreed::of(&all, &[&request, &request]).unwrap();
            let plan = Plan::new(ProcessSetId(3), &set, &all, Vec::new(), agreed);
            plan.loads[0].kind.wire_bytes(compression, 4096)
        };
        assert_eq!(wire_bytes(Collective::Allreduce, Compression::None), 4096);
        assert_eq!(wire_bytes(Collective::Allreduce, Compression::Bf16), 2048);
        assert_eq!(wire_bytes(Collective::ReduceScatter, Compression::Bf16), 2048);
        assert_eq!(wire_bytes(Collective::Broadcast, Compression::Bf16), 4096);
    }
}
