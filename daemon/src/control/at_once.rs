//! Small operations inside this node that need no order of the coordinator. Pure.
//!
//! The coordinator agrees on a tensor once. If all of its ranks are on this node and make the same
//! request again, there is nothing left to agree on: the ranks are all there, and no other node
//! sees the operation. A small one takes less time than an order, so the control thread runs it at
//! once. It waits for nothing, so the order of other operations does not matter to it (ORD).

use std::sync::Arc;

use gradwire_collectives::algorithms::Algorithm;
use gradwire_proto::{Collective, Request, Route, Shape};

use crate::model::{
    agreement::Agreement,
    operation::{AT_ONCE, Operation, OperationSegment, PartRange, QUICK_BYTES},
    tensor::Announced,
};

/// The operation for a tensor whose requests fit this agreement; `None` if the coordinator must
/// order it.
pub(super) fn operation(announced: &Announced, agreement: &Arc<Agreement>) -> Option<Operation> {
    let (whole, members) = (agreement.request(), &agreement.members);
    let is_here = members.nodes.len() == 1 && members.ranks.len() == members.here.len();
    // Other requests change process sets, or move tensors of several types.
    let moves = agreement.route() != Route::Nothing || whole.collective == Collective::Barrier;
    let is_quick = whole.parts() == 1 && moves && agreement.bytes() <= QUICK_BYTES;
    let allocates = || {
        let mut ranks = announced.variants.iter().flat_map(|variant| {
            variant.ranks.iter().map(|rank| agreement.unexpected_shapes(*rank, &variant.request))
        });
        ranks.any(|shapes| shapes.is_some())
    };
    if !is_here || !is_quick || allocates() {
        return None;
    }
    let longest = agreement.part(0).map_or(0, |part| part.longest);
    let range = (longest > 0).then_some(PartRange { part: 0, offset: 0, count: longest });
    let request =
        Request { shape: Shape::default(), list: Vec::new(), more: Vec::new(), ..whole.clone() };
    let segment =
        OperationSegment { tensor: announced.key.clone(), agreement: agreement.clone(), range };
    Some(Operation {
        sequence: AT_ONCE,
        request,
        spec: Algorithm::Ring.into(),
        route: agreement.route(),
        members: members.clone(),
        segments: vec![segment],
        quantized: false,
        chunk: None,
    })
}

#[cfg(test)]
mod tests {
    use gradwire_proto::{Agreed, DType, ProcessSetId, Rank, ReduceOp, TensorName};

    use super::*;
    use crate::model::{
        members::Members,
        tensor::{TensorKey, Variant},
        world::tests::world,
    };

    fn ranks_of(slots: &[u32]) -> impl Iterator<Item = Rank> {
        (0..slots.iter().sum()).map(Rank)
    }

    /// The operation of requests that all ranks of these nodes have agreed on.
    fn of(slots: &[u32], requests: &[Request]) -> Option<Operation> {
        let world = world(0, slots);
        let members = Arc::new(Members::everybody(&world));
        let asked: Vec<&Request> = requests.iter().collect();
        let agreed = Agreed::of(&members.ranks, &asked).unwrap();
        let agreement = Agreement::new(&world, &members.clone(), members, agreed).unwrap();
        let variant = |(rank, request): (Rank, &Request)| Variant {
            ranks: vec![rank],
            request: request.clone(),
            priority: 0,
            duplicate: false,
            sites: Vec::new(),
        };
        let key = TensorKey { set: ProcessSetId::GLOBAL, name: TensorName::new("w").unwrap() };
        let variants = ranks_of(slots).zip(requests).map(variant).collect();
        let announced = Announced { key, variants, all_there: true, latest: None };
        operation(&announced, &Arc::new(agreement))
    }

    fn allreduce(elements: u64) -> Request {
        Request::allreduce(DType::F32, Shape::new(&[elements]).unwrap(), ReduceOp::Average)
    }

    fn allgather(rows: u64) -> Request {
        Request::plain(Collective::Allgather, DType::F32, Shape::new(&[rows, 2]).unwrap())
    }

    #[test]
    fn a_small_tensor_of_one_node_needs_no_order() {
        let operation = of(&[2], &[allreduce(8), allreduce(8)]).unwrap();
        assert_eq!(operation.segments[0].range.unwrap().count, 8);
        assert!(operation.request.is_piece_of(&allreduce(8), 0));
        let barrier = of(&[2], &[Request::barrier(), Request::barrier()]).unwrap();
        assert_eq!(barrier.segments[0].range, None);
        assert!(of(&[2], &[allgather(3), allgather(3)]).is_some());
    }

    #[test]
    fn other_tensors_are_ordered() {
        assert!(of(&[1, 1], &[allreduce(8), allreduce(8)]).is_none(), "two nodes");
        let large = allreduce(QUICK_BYTES / 4 + 1);
        assert!(of(&[2], &[large.clone(), large]).is_none(), "lanes are faster");
        assert!(of(&[2], &[allgather(3), allgather(1)]).is_none(), "ranks must allocate");
        let add = Request { list: vec![0], ..Request::empty(Collective::AddProcessSet) };
        assert!(of(&[2], &[add.clone(), add]).is_none(), "all nodes must know of a set");
    }
}
