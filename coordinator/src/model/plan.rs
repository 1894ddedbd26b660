//! What must move between nodes for a tensor on which all ranks have agreed.
//!
//! The flows of a tensor ([`Agreed::flows`]) are between ranks; the data plane moves bytes between
//! nodes. So each tensor has a [`Route`]: that of its only flow, or [`Route::Each`] if each flow
//! has its own. Tensors that differ only in their flows are of one *kind* and may share a piece.

use std::{collections::BTreeMap, sync::Arc};

use gradwire_proto::{
    Agreed, Collective, Compression, DType, Flow, NO_PART, NodeId, ProcessSetId, Rank, ReduceOp,
    Request, Route, Shape, agreed::pair,
};

use super::{lengths::Lengths, process_set::ProcessSet};

/// The most segments of one piece (BOUND).
pub(crate) const MAX_SEGMENTS: usize = 2048;

/// The most flows of one tensor: the agreed request fits in a message (BOUND).
pub(crate) const MAX_FLOWS: usize = 1 << 18;

/// What all tensors of one piece have in common.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Kind {
    pub(crate) set: ProcessSetId,
    pub(crate) dtype: DType,
    pub(crate) route: Route,
    pub(crate) collective: Collective,
    /// The participating nodes, ascending, if these are not all nodes with a member.
    only: Option<Vec<NodeId>>,
    reduce_op: ReduceOp,
    prescale: u64,
    postscale: u64,
    /// The ranks that have joined and take no part, ascending.
    pub(crate) absent: Arc<[Rank]>,
    /// Whether partial results travel in the job's eight-bit format.
    pub(crate) quantized: bool,
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

    /// The bytes on the wire between nodes, for `bytes` bytes of the ranks' elements.
    pub(crate) fn wire_bytes(&self, compression: Compression, bytes: u64) -> u64 {
        let elements = bytes / self.dtype.size() as u64;
        compression.wire_bytes(&self.request(), elements, self.quantized)
    }

    /// The participating nodes, ascending.
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

/// The flows of one tensor of a request, or the notice that the request is done.
#[derive(Debug)]
pub(crate) struct Load {
    pub(crate) kind: Arc<Kind>,
    /// The tensor's number in the request.
    pub(crate) part: u32,
    /// All flows.
    pub(crate) all: Lengths,
    /// The most that one node sends and receives, if no node has all flows.
    busiest: Option<Lengths>,
}

impl Load {
    /// The most that one node sends and receives of any range. It may pass on even more.
    pub(crate) fn busiest(&self) -> &Lengths {
        self.busiest.as_ref().unwrap_or(&self.all)
    }
}

/// The most that a node has of any range, if no node has all flows.
fn busiest(flows: &[Flow], set: &ProcessSet) -> Option<Lengths> {
    let mut by_node: BTreeMap<NodeId, Vec<u64>> = BTreeMap::new();
    for flow in flows {
        // A flow from or to all ranks concerns every node.
        let (from, to) = (set.node_of(flow.source?)?, set.node_of(flow.target?)?);
        by_node.entry(from).or_default().push(flow.count);
        if from != to {
            by_node.entry(to).or_default().push(flow.count);
        }
    }
    Some(Lengths::most(by_node.into_values()))
}

/// Everything that must be sent out for one tensor.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) agreed: Arc<Agreed>,
    pub(crate) absent: Arc<[Rank]>,
    /// The tensors that are not empty, in order. Never empty itself, so every request completes.
    pub(crate) loads: Vec<Load>,
    /// The number of flows.
    flows: usize,
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
        compression: Compression,
    ) -> Self {
        let absent: Arc<[Rank]> = absent.into();
        let request = agreed.request();
        let mut kinds: BTreeMap<(DType, Route, bool), Arc<Kind>> = BTreeMap::new();
        // Flows are between members, which belong to the set.
        let node = |rank: Rank| set.node_of(rank).unwrap_or_default();
        // An empty send and receive concerns only the nodes of its two ranks.
        let idle = match (request.collective, members) {
            (Collective::SendReceive, [first, .., last]) => Some(pair(node(*first), node(*last))),
            (Collective::SendReceive, [only]) => Some(vec![node(*only)]),
            _ => None,
        };
        let mut kind = |dtype: DType, route: Route, quantized: bool| {
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
                quantized,
            };
            Arc::clone(kinds.entry((dtype, route, quantized)).or_insert_with(|| Arc::new(new())))
        };
        let route = agreed.route(members, |rank| set.node_of(rank)).unwrap_or(Route::Nothing);
        let mut loads = Vec::new();
        let mut flows = 0;
        for part in 0..request.parts() {
            let own = agreed.flows_of(members, part);
            let all = Lengths::new(own.iter().map(|flow| flow.count));
            flows += own.len();
            if all.flows() > 0 {
                let dtype = request.dtype_of(part);
                let bytes = all.longest() * dtype.size() as u64;
                let Request { collective, reduce_op: op, .. } = *request;
                let quantized =
                    route == Route::All && compression.quantizes(collective, dtype, op, bytes);
                let kind = kind(dtype, route, quantized);
                let busiest = busiest(&own, set).filter(|_| route == Route::Each);
                loads.push(Load { kind, part: part as u32, all, busiest });
            }
        }
        if loads.is_empty() {
            let kind = kind(request.dtype, Route::Nothing, false);
            loads.push(Load { kind, part: NO_PART, all: Lengths::default(), busiest: None });
        }
        Self { agreed: Arc::new(agreed), absent, loads, flows }
    }

    /// The number of flows. The memory of daemons grows with it.
    pub(crate) fn flow_count(&self) -> usize {
        self.flows
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

    /// The route and the lengths of a collective of four ranks on two nodes.
    fn plan(request: &Request, rows: &[u64]) -> (Route, Plan) {
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
        let plan = Plan::new(ProcessSetId(3), &set, &all, Vec::new(), agreed, Compression::None);
        assert_eq!(plan.loads.len(), 1);
        (plan.loads[0].kind.route, plan)
    }

    fn plain(collective: Collective) -> Request {
        Request::plain(collective, DType::F32, Shape::new(&[0]).unwrap())
    }

    #[test]
    fn every_tensor_has_a_route_and_completes() {
        let even = [4; 4];
        let gather = Request { root: Rank(2), ..plain(Collective::Gather) };
        for (request, rows, route, part, flows) in [
            (&plain(Collective::Allreduce), even, Route::All, 0, 1),
            (&plain(Collective::Broadcast), even, Route::From(NodeId(0)), 0, 1),
            (&plain(Collective::Barrier), [0; 4], Route::Nothing, NO_PART, 0),
            (&plain(Collective::Allgather), [1, 0, 2, 0], Route::Each, 0, 2),
            (&gather, [0, 1, 0, 0], Route::Each, 0, 1),
            (&gather, [0; 4], Route::Nothing, NO_PART, 0),
            (&plain(Collective::ReduceScatter), even, Route::Each, 0, 4),
            (&plain(Collective::Alltoall), even, Route::Each, 0, 16),
            (&plain(Collective::Allreduce), [0; 4], Route::Nothing, NO_PART, 0),
        ] {
            let (found, plan) = plan(request, &rows);
            let load = &plan.loads[0];
            assert_eq!((found, load.part, load.all.flows()), (route, part, flows), "{request:?}");
            let set = ProcessSet::new((0..4).map(Rank).collect(), |rank| NodeId(rank.0 / 2));
            assert_eq!(load.kind.participants(&set), [NodeId(0), NodeId(1)]);
        }
    }

    /// In an alltoall, a node has the flows of its ranks; in an allgather, it has all.
    #[test]
    fn the_busiest_node_is_known() {
        let (_, even) = plan(&plain(Collective::Alltoall), &[4; 4]);
        assert_eq!((even.loads[0].all.flows(), even.loads[0].busiest().flows()), (16, 12));
        let (_, uneven) = plan(&plain(Collective::Alltoall), &[4, 0, 16, 0]);
        // Node 0 has four short flows and two long ones, node 1 two and four.
        assert_eq!(uneven.loads[0].busiest(), &Lengths::new([4, 4, 4, 4, 1, 1]));
        let (_, all) = plan(&plain(Collective::Allgather), &[1, 0, 2, 0]);
        assert_eq!(all.loads[0].busiest(), &Lengths::new([1, 2]));
    }

    #[test]
    fn compressed_pieces_count_by_wire_bytes() {
        let all: Vec<Rank> = (0..2).map(Rank).collect();
        let set = ProcessSet::new(all.clone(), |rank| NodeId(rank.0));
        let wire_bytes = |collective, compression| {
            let request = Request { shape: Shape::new(&[8]).unwrap(), ..plain(collective) };
            let agreed = Agreed::of(&all, &[&request, &request]).unwrap();
            let plan =
                Plan::new(ProcessSetId(3), &set, &all, Vec::new(), agreed, Compression::None);
            plan.loads[0].kind.wire_bytes(compression, 4096)
        };
        assert_eq!(wire_bytes(Collective::Allreduce, Compression::None), 4096);
        assert_eq!(wire_bytes(Collective::Allreduce, Compression::Bf16), 2048);
        assert_eq!(wire_bytes(Collective::ReduceScatter, Compression::Bf16), 2048);
        assert_eq!(wire_bytes(Collective::Broadcast, Compression::Bf16), 4096);
    }
}
