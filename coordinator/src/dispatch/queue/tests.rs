use std::time::Duration;

use gradwire_proto::{
    Agreed, Collective, Compression, DType, Part, ProcessSetId, Rank, ReduceOp, Request, Route,
    Shape, TensorId, convert::TensorRef,
};
use proptest::prelude::*;

use super::*;
use crate::model::{plan::Plan, round::Text};

fn request(dtype: DType, elements: u64) -> Request {
    Request::allreduce(dtype, Shape::new(&[elements]).unwrap(), ReduceOp::Sum)
}

/// The plan for what all members of a set have agreed on.
fn plan(set: &ProcessSet, members: &[Rank], agreed: Agreed) -> Plan {
    Plan::new(ProcessSetId::GLOBAL, set, members, Vec::new(), agreed, Compression::None)
}

/// A tensor on which two ranks have agreed, each on its own node.
fn round(slot: u32, request: &Request, priority: i32) -> Arc<Round> {
    let members = [Rank(0), Rank(1)];
    let set = ProcessSet::new(members.to_vec(), |rank| NodeId(rank.0));
    let agreed = Agreed::of(&members, &[request, request]).unwrap();
    let plan = plan(&set, &members, agreed);
    Arc::new(Round {
        slot: Slot(slot),
        tensor: TensorRef::Id(TensorId(slot)),
        text: Text { each: 100, first: 0 },
        plan: Arc::new(plan),
        priority: Priority(priority),
        since: Duration::ZERO,
        agreed: Duration::ZERO,
    })
}

fn queue(tensors: &[(DType, u64, i32)]) -> Queue {
    let mut queue = Queue::default();
    for (slot, &(dtype, elements, priority)) in (0..).zip(tensors) {
        queue.push(&round(slot, &request(dtype, elements), priority));
    }
    queue
}

fn shape(piece: &Piece) -> Vec<(u32, u64, u64)> {
    piece.cuts.iter().map(|cut| (cut.round.slot.0, cut.offset, cut.count)).collect()
}

#[test]
fn alternating_element_types_still_fuse() {
    let (a, b) = (DType::F32, DType::F16);
    let mut queue = queue(&[(a, 4, 0), (b, 4, 0), (a, 4, 0), (b, 4, 0)]);
    assert_eq!(shape(&queue.cut(4096).unwrap()), [(0, 0, 4), (2, 0, 4)]);
    assert_eq!(shape(&queue.cut(4096).unwrap()), [(1, 0, 4), (3, 0, 4)]);
    assert!(queue.cut(4096).is_none());
}

#[test]
fn urgent_tensors_overtake_unsent_ones() {
    let mut queue = queue(&[(DType::F32, 64, 0)]);
    assert_eq!(shape(&queue.cut(128).unwrap()), [(0, 0, 32)]);
    queue.push(&round(9, &request(DType::F32, 16), 5));
    assert_eq!(shape(&queue.cut(128).unwrap()), [(9, 0, 16), (0, 32, 16)]);
    assert_eq!(shape(&queue.cut(128).unwrap()), [(0, 48, 16)]);
}

#[test]
fn different_kinds_do_not_share_pieces() {
    let mut queue = queue(&[(DType::F32, 4, 0)]);
    let scaled = Request { prescale: 0.5, ..request(DType::F32, 4) };
    let rooted = Request::broadcast(DType::F32, Shape::new(&[4]).unwrap(), Rank(1));
    queue.push(&round(1, &scaled, 0));
    queue.push(&round(2, &rooted, 0));
    for slot in 0..3 {
        assert_eq!(shape(&queue.cut(4096).unwrap()), [(slot, 0, 4)]);
    }
}

#[test]
fn all_flows_of_several_tensors_fuse() {
    let gathered = Request::plain(Collective::Allgather, DType::F32, Shape::new(&[2]).unwrap());
    let mut queue = Queue::default();
    queue.push(&round(0, &gathered, 0));
    queue.push(&round(1, &gathered, 0));
    let piece = queue.cut(4096).unwrap();
    assert_eq!((piece.kind.route, piece.bytes), (Route::Each, 2 * 2 * 8));
    assert_eq!(shape(&piece), [(0, 0, 2), (1, 0, 2)]);
    assert!(piece.cuts.iter().all(|cut| cut.first && cut.last && cut.opens));
    assert_eq!(queue.len(), 0);
}

/// Each piece has a part of all flows, and no node has more of it than its size.
#[test]
fn an_alltoall_is_cut_across() {
    let all = Request::plain(Collective::Alltoall, DType::F32, Shape::new(&[200]).unwrap());
    let mut queue = Queue::default();
    queue.push(&round(0, &all, 0));
    // A node has three of the four flows of 100 elements.
    let piece = queue.cut(3 * 64 * 4).unwrap();
    assert_eq!((shape(&piece), piece.bytes), (vec![(0, 0, 64)], 4 * 64 * 4));
    assert_eq!(queue.pieces(1), 3 * 36 * 4);
    // Even the smallest piece has a cache line of each flow.
    assert_eq!(shape(&queue.cut(64).unwrap()), [(0, 64, 16)]);
    assert_eq!(shape(&queue.cut(4096).unwrap()), [(0, 80, 20)]);
    assert!(queue.cut(4096).is_none());
}

proptest! {
    /// BOUND: no node has more of a piece than its size, however uneven an alltoall is.
    #[test]
    fn no_node_has_more_of_a_piece_than_its_size(
        rows in prop::collection::vec(prop_oneof![0..20u64, 0..3000u64], 16),
        piece_bytes in 64..9000u64,
    ) {
        let members: Vec<Rank> = (0..4).map(Rank).collect();
        let set = ProcessSet::new(members.clone(), |rank| NodeId(rank.0));
        let requests: Vec<Request> = rows
            .chunks(4)
            .map(|list| Request {
                list: list.to_vec(),
                ..Request::plain(
                    Collective::Alltoall,
                    DType::F32,
                    Shape::new(&[list.iter().sum()]).unwrap(),
                )
            })
            .collect();
        let agreed = Agreed::of(&members, &requests.iter().collect::<Vec<_>>()).unwrap();
        let flows = agreed.flows(&members);
        let plan = plan(&set, &members, agreed);
        let other = Arc::into_inner(round(0, &request(DType::F32, 1), 0)).unwrap();
        let mut queue = Queue::default();
        queue.push(&Arc::new(Round { plan: Arc::new(plan), ..other }));
        let longest = flows.iter().map(|flow| flow.count).max().unwrap();
        let mut next = 0;
        while let Some(piece) = queue.cut(piece_bytes) {
            let [cut] = &piece.cuts[..] else { panic!("{piece:?}") };
            prop_assert_eq!(cut.offset, next, "ONE");
            next += cut.count;
            for rank in &members {
                let own = flows.iter().filter(|flow| {
                    flow.source == Some(*rank) || flow.target == Some(*rank)
                });
                let end = cut.offset + cut.count;
                let has = own.map(|flow| flow.count.min(end) - flow.count.min(cut.offset));
                let bytes = 4 * has.sum::<u64>();
                prop_assert!(bytes <= piece_bytes.max(7 * ALIGNMENT), "{bytes} bytes");
            }
        }
        prop_assert_eq!(next, longest);
        prop_assert_eq!(queue.bytes, 0);
    }
}

#[test]
fn waiting_flows_are_known_by_node() {
    let set = ProcessSet::new(vec![Rank(0), Rank(1)], |rank| NodeId(rank.0));
    let split = Request::plain(Collective::Alltoall, DType::F32, Shape::new(&[64]).unwrap());
    let mut queue = Queue::default();
    queue.push(&round(7, &split, 0));
    let holds = |queue: &Queue| [0, 1].map(|node| queue.holds(Slot(7), NodeId(node), &set));
    assert_eq!(holds(&queue), [true, true]);
    assert!(!queue.holds(Slot(8), NodeId(0), &set));
    queue.cut(64).unwrap();
    assert_eq!(holds(&queue), [true, true], "half of all flows is left");
    queue.cut(4096).unwrap();
    assert_eq!(holds(&queue), [false, false]);
}

#[test]
fn an_empty_tensor_concerns_all_nodes() {
    let set = ProcessSet::new(vec![Rank(0), Rank(1)], |rank| NodeId(rank.0));
    let empty = Request::plain(Collective::Gather, DType::F32, Shape::new(&[0]).unwrap());
    let mut queue = Queue::default();
    queue.push(&round(0, &empty, 0));
    let holds = |queue: &Queue| [0, 1].map(|node| queue.holds(Slot(0), NodeId(node), &set));
    assert_eq!(holds(&queue), [true, true]);
    let piece = queue.cut(4096).unwrap();
    assert_eq!((piece.kind.route, piece.bytes, piece.cuts.len()), (Route::Nothing, 0, 1));
    assert_eq!(holds(&queue), [false, false]);
}

/// BOUND: a piece whose segments contain the agreed requests fits in a message.
#[test]
fn long_descriptions_end_a_piece() {
    let mut queue = Queue::default();
    for slot in 0..4 {
        let long = Arc::into_inner(round(slot, &request(DType::F32, 1), 0)).unwrap();
        let text = Text { each: 100, first: MAX_TEXT / 2 - 100 };
        queue.push(&Arc::new(Round { text, ..long }));
    }
    for first in [0, 2] {
        let piece = queue.cut(4096).unwrap();
        assert_eq!(shape(&piece), [(first, 0, 1), (first + 1, 0, 1)]);
    }
    let huge = Arc::into_inner(round(9, &request(DType::F32, 1), 0)).unwrap();
    let text = Text { each: 0, first: MAX_TEXT + 1 };
    queue.push(&Arc::new(Round { text, ..huge }));
    assert_eq!(queue.cut(4096).unwrap().cuts.len(), 1, "it is sent alone");
}

/// The agreed request is sent once in each piece, with its first segment.
#[test]
fn a_description_is_counted_once_in_a_piece() {
    let members = [Rank(0), Rank(1)];
    let set = ProcessSet::new(members.to_vec(), |_| NodeId(0));
    let one = request(DType::F32, 10);
    let more = Part { dtype: DType::F32, shape: one.shape.clone() };
    let asked = Request { more: vec![more.clone(), more.clone(), more], ..one };
    let agreed = Agreed::of(&members, &[&asked, &asked]).unwrap();
    let plan = plan(&set, &members, agreed);
    assert_eq!(plan.loads.len(), 4);
    let plan = Arc::new(plan);
    let mut queue = Queue::default();
    for slot in 0..2 {
        let other = Arc::into_inner(round(slot, &request(DType::F32, 1), 0)).unwrap();
        let text = Text { each: 100, first: MAX_TEXT / 2 - 400 };
        queue.push(&Arc::new(Round { text, plan: Arc::clone(&plan), ..other }));
    }
    let opens = |piece: Piece| piece.cuts.iter().map(|cut| cut.opens).collect::<Vec<_>>();
    // Four tensors of ten elements each: the piece ends after the first one of the second request.
    let piece = queue.cut(4 * 40 + 64).unwrap();
    assert_eq!(opens(piece), [true, false, false, false, true]);
    assert_eq!(opens(queue.cut(4096).unwrap()), [true, false, false]);
}

fn tensors() -> impl Strategy<Value = Vec<(DType, u64, i32)>> {
    let dtypes = prop::sample::select(vec![DType::F32, DType::Bf16, DType::U8, DType::C128]);
    let elements = prop_oneof![Just(0), 1..40u64, 0..5000u64];
    prop::collection::vec((dtypes, elements, -2..3i32), 0..60)
}

proptest! {
    #[test]
    fn every_element_is_sent_once_in_order(
        tensors in tensors(), piece_bytes in 64..9000u64
    ) {
        let mut queue = queue(&tensors);
        let mut next = vec![0; tensors.len()];
        let mut ended = vec![false; tensors.len()];
        let mut previous_head: Option<(Reverse<i32>, u32)> = None;
        while let Some(piece) = queue.cut(piece_bytes) {
            let size = piece.kind.dtype.size() as u64;
            let elements: u64 = piece.cuts.iter().map(|cut| cut.count).sum();
            prop_assert_eq!(piece.bytes, elements * size);
            prop_assert!(piece.bytes <= piece_bytes && piece.cuts.len() <= MAX_SEGMENTS);
            prop_assert!(!piece.cuts.is_empty());
            for cut in &piece.cuts {
                let slot = cut.round.slot.0 as usize;
                let (dtype, elements, _) = tensors[slot];
                prop_assert_eq!(piece.kind.dtype, dtype);
                prop_assert_eq!(cut.offset, next[slot], "ONE: no gap and no overlap");
                prop_assert!(!ended[slot]);
                next[slot] += cut.count;
                ended[slot] = cut.last;
                prop_assert_eq!(cut.last, next[slot] == elements);
                prop_assert!(cut.last || (cut.count * size).is_multiple_of(ALIGNMENT));
                prop_assert_eq!(cut.first, cut.offset == 0);
            }
            // Each piece begins with the most urgent waiting tensor.
            let first = piece.cuts[0].round.slot.0;
            let head = (Reverse(tensors[first as usize].2), first);
            prop_assert!(previous_head.is_none_or(|previous| previous <= head));
            previous_head = Some(head);
            // Each piece is ordered, too.
            let order: Vec<_> = piece
                .cuts
                .iter()
                .map(|c| (Reverse(tensors[c.round.slot.0 as usize].2), c.round.slot))
                .collect();
            prop_assert!(order.is_sorted());
        }
        prop_assert!(ended.iter().all(|&ended| ended));
        prop_assert_eq!(queue.len(), 0);
        prop_assert!(queue.kinds.is_empty() && queue.heads.is_empty());
    }
}

#[test]
fn large_tensors_are_shared_between_lanes() {
    const MIB: u64 = 1 << 20;
    let fair = |elements: &[u64], lanes: u32| {
        let tensors: Vec<_> = elements.iter().map(|&count| (DType::F32, count, 0)).collect();
        queue(&tensors).fair_piece(lanes, 4 * MIB)
    };
    assert_eq!(fair(&[MIB / 4], 2), MIB / 2, "1 MiB, half for each lane");
    assert_eq!(fair(&[MIB / 8, MIB / 8], 2), MIB / 2, "all waiting tensors count");
    assert_eq!(fair(&[1000], 2), MIB / 4, "waking a second lane would take longer");
    assert_eq!(fair(&[16 * MIB], 2), 4 * MIB);
    assert_eq!(fair(&[], 2), MIB / 4);
    let mut left = queue(&[(DType::F32, MIB, 0)]);
    left.cut(3 * MIB).unwrap();
    assert_eq!(left.fair_piece(2, 4 * MIB), MIB / 2, "sent bytes do not count");
    assert_eq!(left.fair_piece(2, 64), 64);
}
