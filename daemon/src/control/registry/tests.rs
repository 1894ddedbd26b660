use gradwire_proto::{Collective, DType, NodeId, ReduceOp, Shape};

use super::*;
use crate::model::{tensor::Variant, world::tests::world};

const RING: u32 = 1;

/// Ranks 0 and 1 are on node 0, ranks 2 and 3 on node 1 (this node), rank 4 on node 2.
fn registry() -> Registry {
    let mut registry = Registry::new(Arc::new(world(1, &[2, 2, 1])));
    registry.instructions(specs(&[(RING, "ring")])).unwrap();
    registry
}

fn specs(specs: &[(u32, &str)]) -> pb::Execute {
    let spec = |&(id, text): &(u32, &str)| pb::Spec { id, text: text.into() };
    pb::Execute { specs: specs.iter().map(spec).collect(), ..Default::default() }
}

fn request(count: u64) -> Request {
    Request::allreduce(DType::F32, Shape::new(&[count]).unwrap(), ReduceOp::Sum)
}

fn plain(collective: Collective, dims: &[u64]) -> Request {
    Request::plain(collective, DType::F32, Shape::new(dims).unwrap())
}

/// The announcement of this node's ranks.
fn announced(requests: &[Request]) -> Announced {
    let key = TensorKey { set: ProcessSetId::GLOBAL, name: TensorName::new("w").unwrap() };
    let variant = |(rank, request): (u32, &Request)| Variant {
        ranks: vec![Rank(rank)],
        request: request.clone(),
        priority: 1,
        duplicate: false,
        sites: Vec::new(),
    };
    let variants = (2..).zip(requests).map(variant).collect();
    Announced { key, variants, all_there: true, latest: None }
}

fn announcement(registry: &Registry, announced: Announced) -> pb::Announcement {
    match registry.ready(announced, true) {
        Ready::Announce(announcement) => announcement,
        Ready::AtOnce(operation) => panic!("{operation:?} needs an order"),
    }
}

/// The agreement of these ranks.
fn agreed(ranks: &[u32], requests: &[Request]) -> pb::Agreed {
    let ranks: Vec<Rank> = ranks.iter().copied().map(Rank).collect();
    let requests: Vec<&Request> = requests.iter().collect();
    (&Agreed::of(&ranks, &requests).unwrap()).into()
}

fn all(request: &Request) -> pb::Agreed {
    agreed(&[0, 1, 2, 3, 4], &vec![request.clone(); 5])
}

fn registration(id: u32, agreed: pb::Agreed) -> pb::Registration {
    pb::Registration { id, process_set: 0, name: "w".into(), agreed: Some(agreed), priority: 1 }
}

fn execute(registrations: Vec<pb::Registration>) -> pb::Execute {
    pb::Execute { registrations, ..Default::default() }
}

fn id(id: u32) -> Option<pb::TensorRef> {
    Some(TensorRef::Id(TensorId(id)).into())
}

fn name(name: &str) -> Option<pb::TensorRef> {
    Some(TensorRef::Name(TensorName::new(name).unwrap()).into())
}

fn segment(tensor: Option<pb::TensorRef>, part: u32, offset: u64, count: u64) -> pb::Segment {
    pb::Segment { tensor, part, offset, count, agreed: None }
}

fn operation(request: &Request, segments: Vec<pb::Segment>) -> pb::Operation {
    let mut request = pb::Request::from(request);
    (request.shape, request.list, request.more) = (vec![], vec![], vec![]);
    pb::Operation {
        sequence: 9,
        process_set: 0,
        request: Some(request),
        spec: RING,
        segments,
        absent: Vec::new(),
        quantized: false,
        chunk_bytes: 0,
    }
}

/// The result of one operation.
fn order(
    registry: &mut Registry,
    operation: pb::Operation,
) -> Result<Option<Operation>, WireError> {
    let execute = pb::Execute { operations: vec![operation], ..Default::default() };
    registry.instructions(execute).map(|mut instructions| match instructions.pop() {
        Some(Instruction::Start(operation)) => Some(operation),
        None => None,
        other => panic!("{other:?}"),
    })
}

fn refusal(registry: &mut Registry, operation: pb::Operation) -> String {
    order(registry, operation).unwrap_err().to_string()
}

#[test]
fn a_registered_tensor_is_announced_by_its_id() {
    let mut registry = registry();
    let same = || announced(&[request(8), request(8)]);
    let first = announcement(&registry, same());
    assert_eq!(first.tensor, name("w"));
    assert_eq!(first.submitted.len(), 2);
    registry.instructions(execute(vec![registration(7, all(&request(8)))])).unwrap();
    let second = announcement(&registry, same());
    assert_eq!(second.tensor, id(7));
    assert!(second.submitted.is_empty());
    let changed = announcement(&registry, announced(&[request(8), request(9)]));
    assert_eq!(changed.submitted.len(), 2, "another shape is sent");
    let partly = announcement(&registry, announced(&[request(8)]));
    assert_eq!(partly.submitted.len(), 1, "not all local ranks take part");
    let joined = announcement(&registry, Announced { all_there: false, ..same() });
    assert_eq!(joined.submitted.len(), 2, "one of the ranks has joined since");
}

#[test]
fn an_evicted_id_is_not_used_any_more() {
    let mut registry = registry();
    registry.instructions(execute(vec![registration(7, all(&request(8)))])).unwrap();
    let evict = |ids: &[u32]| pb::Execute { evicted: ids.to_vec(), ..Default::default() };
    // The operations of the message that evicts an id may still use it.
    let whole = operation(&request(8), vec![segment(id(7), 0, 0, 8)]);
    let last = pb::Execute { operations: vec![whole.clone()], ..evict(&[7]) };
    assert_eq!(registry.instructions(last).unwrap().len(), 1);
    assert!(refusal(&mut registry, whole).contains("id 7 was never registered"));
    let again = announcement(&registry, announced(&[request(8), request(8)]));
    assert_eq!((again.tensor, again.submitted.len()), (name("w"), 2), "in full");
    // The ids that replaced it stay.
    let both = vec![registration(8, all(&request(8))), registration(9, all(&request(9)))];
    registry.instructions(pb::Execute { registrations: both, ..evict(&[8]) }).unwrap();
    assert_eq!(announcement(&registry, announced(&[request(9), request(9)])).tensor, id(9));
}

#[test]
fn tables_do_not_grow_under_eviction() {
    let mut registry = registry();
    let named = |id: u32| pb::Registration {
        name: format!("w.{id}"),
        ..registration(id, all(&request(9)))
    };
    registry.instructions(execute((0..1000).map(named).collect())).unwrap();
    let replace = |registry: &mut Registry, new: u32| {
        let execute = pb::Execute { evicted: vec![new - 1000], ..execute(vec![named(new)]) };
        registry.instructions(execute).unwrap();
        (registry.by_key.capacity(), registry.by_id.capacity())
    };
    let (keys, ids) = replace(&mut registry, 1000);
    for new in 1001..20_000 {
        let (keys_now, ids_now) = replace(&mut registry, new);
        assert!(keys_now <= keys && ids_now <= ids, "grown by {new}");
    }
}

#[test]
fn ranks_may_have_different_rows_under_an_id() {
    let mut registry = registry();
    let rows = |rows| plain(Collective::Allgather, &[rows, 2]);
    let terms = agreed(&[0, 1, 2, 3, 4], &[1, 2, 3, 4, 5].map(rows));
    registry.instructions(execute(vec![registration(7, terms)])).unwrap();
    assert!(announcement(&registry, announced(&[rows(3), rows(4)])).submitted.is_empty());
    assert_eq!(announcement(&registry, announced(&[rows(4), rows(3)])).submitted.len(), 2);
}

#[test]
fn a_new_id_replaces_the_old_one() {
    let mut registry = registry();
    let both = vec![registration(7, all(&request(8))), registration(8, all(&request(9)))];
    registry.instructions(execute(both)).unwrap();
    assert!(registry.resolve(ProcessSetId::GLOBAL, id(7)).is_err());
    assert!(registry.resolve(ProcessSetId::GLOBAL, id(8)).is_ok());
    assert!(registry.resolve(ProcessSetId(1), id(8)).is_err(), "of another set");
    let clash = pb::Registration { name: "v".into(), ..registration(8, all(&request(9))) };
    assert!(registry.instructions(execute(vec![clash])).is_err());
}

#[test]
fn a_segment_becomes_a_range_of_all_flows() {
    let mut registry = registry();
    let alltoall = plain(Collective::Alltoall, &[5, 3]);
    registry.instructions(execute(vec![registration(7, all(&alltoall))])).unwrap();
    let piece = operation(&alltoall, vec![segment(id(7), 0, 1, 2)]);
    let started = order(&mut registry, piece).unwrap().unwrap();
    assert_eq!(started.route, Route::Each);
    assert_eq!(started.segments[0].range, Some(PartRange { part: 0, offset: 1, count: 2 }));
}

/// TRUST: an order of the coordinator that is outside of the agreement is refused.
#[test]
fn segments_outside_of_the_agreement_are_refused() {
    let mut registry = registry();
    let gather = plain(Collective::Allgather, &[4]);
    registry.instructions(execute(vec![registration(7, all(&gather))])).unwrap();
    let sum = request(4);
    let of = |part, offset, count| operation(&gather, vec![segment(id(7), part, offset, count)]);
    let by_name = |agreed| {
        let segment = pb::Segment { agreed, ..segment(name("v"), 0, 0, 1) };
        operation(&gather, vec![segment])
    };
    let some = |rows: &[u64]| {
        let rows = rows.to_vec();
        Some(pb::Agreed { request: Some((&plain(Collective::Allgather, &[0])).into()), rows })
    };
    let rooted = |root| {
        let request = Request { root: Rank(root), ..plain(Collective::Broadcast, &[4]) };
        let agreed = pb::Agreed { request: Some((&request).into()), rows: Vec::new() };
        let tensor = name(&format!("from {root}"));
        pb::Segment { agreed: Some(agreed), ..segment(tensor, 0, 0, 1) }
    };
    let broadcast = |segments| operation(&plain(Collective::Broadcast, &[4]), segments);
    let cases = [
        (of(5, 0, 4), "4 elements of tensor 5, but there are 1"),
        (of(0, 0, 0), "0 elements of tensor 0"),
        (of(0, 1, 4), "4 elements from 1 on, but the flows have 4"),
        (of(0, u64::MAX, 2), "but the flows have 4"),
        (of(NO_PART, 0, 1), "a segment without a tensor must have no range"),
        (of(NO_PART, 0, 0), "no elements"),
        (operation(&sum, vec![segment(id(7), 0, 0, 1)]), "not what was agreed on"),
        (operation(&sum, vec![segment(id(7), NO_PART, 0, 0)]), "request's collective"),
        (broadcast(vec![rooted(0), rooted(4)]), "do not all have the same route"),
        (operation(&gather, vec![]), "no segments"),
        (operation(&gather, vec![segment(id(3), 0, 0, 1)]), "id 3 was never registered"),
        (pb::Operation { spec: 7, ..of(0, 0, 4) }, "spec: id 7 was never registered"),
        (pb::Operation { quantized: true, ..of(0, 0, 4) }, "that this job may quantize"),
        (
            pb::Operation { process_set: 4, ..by_name(some(&[1; 5])) },
            "process set 4 does not exist",
        ),
        (pb::Operation { absent: vec![1], ..of(0, 0, 4) }, "registered for all ranks"),
        (pb::Operation { absent: vec![7], ..by_name(some(&[1; 5])) }, "absent"),
        (pb::Operation { absent: vec![1], ..by_name(some(&[1; 5])) }, "do not match 4 ranks"),
        (by_name(None), "no agreed"),
        (by_name(some(&[1, 2])), "do not match 5 ranks"),
        (by_name(some(&[u64::MAX; 5])), "do not match 5 ranks"),
        (broadcast(vec![rooted(9)]), "do not match 5 ranks"),
    ];
    for (operation, text) in cases {
        let refused = refusal(&mut registry, operation);
        assert!(refused.contains(text), "{refused:?} does not contain {text:?}");
    }
    assert!(order(&mut registry, of(0, 1, 3)).unwrap().is_some());
}

/// TRUST: a spec is parsed once, when it gets its id.
#[test]
fn unknown_and_duplicate_specs_are_refused() {
    let mut registry = registry();
    for (id, text, expected) in [
        (2, "rign", "unknown algorithm"),
        (2, "circulant(radix=1)", "radix is a number"),
        (2, &"x".repeat(1000), "longer than"),
        (RING, "double-tree", "id 1 is already used for ring"),
    ] {
        let error = registry.instructions(specs(&[(id, text)])).unwrap_err().to_string();
        assert!(error.contains("spec") && error.contains(expected), "{error}");
    }
    let mut registry = self::registry();
    for id in 2..=MAX_SPECS as u32 {
        registry.instructions(specs(&[(id, "circulant(radix=4)")])).unwrap();
    }
    assert!(registry.instructions(specs(&[(9999, "ring")])).is_err(), "BOUND");
}

/// TRUST: an arrangement contains all nodes.
#[test]
fn arrangements_are_checked() {
    let arrange = |racks: &[u32], order: &[u32]| pb::Execute {
        arrangement: Some(pb::Arrangement { racks: racks.to_vec(), order: order.to_vec() }),
        ..Default::default()
    };
    let mut registry = registry();
    for (racks, order) in [
        (&[0, 1][..], &[][..]),
        (&[0; 4], &[0, 1, 2]),
        (&[], &[0, 1]),
        (&[], &[0, 1, 2, 0]),
        (&[], &[0, 1, 1]),
        (&[0, 0, 1], &[0, 1, 3]),
        (&[], &[2, 1, u32::MAX]),
    ] {
        let error = registry.instructions(arrange(racks, order)).unwrap_err().to_string();
        let (racks, order) = (racks.len(), order.len());
        let expected =
            format!("racks of {racks} nodes and an order of {order} do not match 3 nodes");
        assert!(error.contains("arrangement") && error.contains(&expected), "{error}");
        assert!(error.contains("each number from 0 to 2 once"), "{error}");
    }
    // It precedes the operations of the same message. Racks may have any numbers.
    registry.instructions(execute(vec![registration(7, all(&request(8)))])).unwrap();
    let started = operation(&request(0), vec![segment(id(7), 0, 0, 8)]);
    let both = pb::Execute { operations: vec![started], ..arrange(&[u32::MAX, 9, 9], &[2, 0, 1]) };
    let known = registry.instructions(both).unwrap();
    let [Instruction::Arrange(topology), Instruction::Start(_)] = &known[..] else {
        panic!("{known:?}")
    };
    assert_eq!(topology.order(), [2, 1, 0]);
    assert!(topology.same_rack(1, 2) && !topology.same_rack(0, 1));
}

/// TRUST: there are rates for all nodes, and chunks have a size that the settings allow.
#[test]
fn rates_and_chunks_are_checked() {
    let links = |line_mbit: &[u32], pair_mbit: &[u32]| pb::Execute {
        links: Some(pb::Links {
            line_mbit: line_mbit.to_vec(),
            uplink_mbit: 0,
            pair_mbit: pair_mbit.to_vec(),
        }),
        ..Default::default()
    };
    let mut registry = registry();
    for (lines, pairs) in [(&[1, 1][..], &[][..]), (&[1, 0, 1], &[]), (&[1, 1, 1], &[1, 2])] {
        let error = registry.instructions(links(lines, pairs)).unwrap_err().to_string();
        assert!(error.contains("do not match 3 nodes"), "{error}");
    }
    let known = registry.instructions(links(&[1, 1, 2], &[0, 5, 1])).unwrap();
    assert!(matches!(&known[..], [Instruction::Links(links)] if links.pair(2, 0) == 5));
    registry.instructions(execute(vec![registration(7, all(&request(8)))])).unwrap();
    let of = |chunk_bytes| pb::Operation {
        chunk_bytes,
        ..operation(&request(0), vec![segment(id(7), 0, 0, 8)])
    };
    for (bytes, chunk) in [(0, None), (4 << 10, Some(4 << 10)), (4 << 20, Some(4 << 20))] {
        assert_eq!(order(&mut registry, of(bytes)).unwrap().unwrap().chunk, chunk);
    }
    for bytes in [1, 4095, (4 << 20) + 1, u32::MAX] {
        let refused = refusal(&mut registry, of(bytes));
        assert!(refused.contains("chunk_bytes") && refused.contains("not possible"), "{refused}");
    }
}

/// TRUST: the factors of a grid match the nodes that take part.
#[test]
fn a_grid_of_other_nodes_is_refused() {
    let mut registry = registry();
    registry.instructions(specs(&[(2, "torus(dims=2x2)")])).unwrap();
    registry.instructions(execute(vec![registration(7, all(&request(8)))])).unwrap();
    let grid = pb::Operation { spec: 2, ..operation(&request(0), vec![segment(id(7), 0, 0, 8)]) };
    let refused = refusal(&mut registry, grid);
    assert!(refused.contains("torus(dims=2x2) is for 4 nodes, and there are 3"), "{refused}");
}

#[test]
fn a_segment_carries_terms_without_joined_ranks() {
    let mut registry = registry();
    let rows = |rows| plain(Collective::Allgather, &[rows]);
    let terms = agreed(&[0, 2, 4], &[1, 2, 3].map(rows));
    let piece = |offset, count| {
        let segment =
            pb::Segment { agreed: Some(terms.clone()), ..segment(name("v"), 0, offset, count) };
        pb::Operation { absent: vec![1, 3], ..operation(&rows(0), vec![segment]) }
    };
    let first = order(&mut registry, piece(0, 1)).unwrap().unwrap();
    assert_eq!(first.members.ranks, [Rank(0), Rank(2), Rank(4)]);
    assert_eq!(first.route, Route::Each);
    let second = order(&mut registry, piece(1, 2)).unwrap().unwrap();
    assert_eq!(second.segments[0].range.map(|range| range.offset), Some(1));
    let [first, second] = [first, second].map(|o| o.segments[0].agreement.clone());
    assert!(Arc::ptr_eq(&first, &second), "computed once");
    // All of this node's ranks have joined: it takes no part.
    let others = agreed(&[0, 1, 4], &[1, 2, 3].map(rows));
    let elsewhere = pb::Segment { agreed: Some(others), ..segment(name("u"), 0, 0, 1) };
    let elsewhere = pb::Operation { absent: vec![2, 3], ..operation(&rows(0), vec![elsewhere]) };
    assert!(order(&mut registry, elsewhere).unwrap().is_none());
}

#[test]
fn terms_are_sent_once_per_operation() {
    let mut registry = registry();
    let terms = all(&plain(Collective::Alltoall, &[5, 3]));
    let of = |tensor: &str, agreed: Option<&pb::Agreed>, offset| pb::Segment {
        agreed: agreed.cloned(),
        ..segment(name(tensor), 0, offset, 1)
    };
    let mut moves = |segments| {
        let whole = operation(&plain(Collective::Alltoall, &[0, 3]), segments);
        order(&mut registry, whole).map(|order| order.map(|order| order.segments))
    };
    let there = moves(vec![of("v", Some(&terms), 0), of("v", None, 1)]).unwrap().unwrap();
    assert_eq!(there.len(), 2);
    assert!(Arc::ptr_eq(&there[0].agreement, &there[1].agreement));
    let next = vec![of("v", Some(&terms), 0), of("u", None, 1)];
    let again = vec![of("v", Some(&terms), 0), of("u", Some(&terms), 0), of("v", None, 1)];
    // TRUST: each operation contains the agreement on each of its tensors.
    for segments in [next, again, vec![of("v", None, 0)]] {
        assert!(moves(segments).unwrap_err().to_string().contains("no agreed"));
    }
}

/// A node without elements of a tensor takes part, too: it may pass on the elements of others.
#[test]
fn a_tensor_that_is_empty_here_is_still_moved() {
    let mut registry = registry();
    let gather = |rows| plain(Collective::Gather, &[rows]);
    let ranks = [0, 1, 2, 3, 4];
    let of = |terms: pb::Agreed, part, count| {
        let segment = pb::Segment { agreed: Some(terms), ..segment(name("v"), part, 0, count) };
        operation(&gather(0), vec![segment])
    };
    let some = || agreed(&ranks, &[1, 1, 0, 0, 1].map(gather));
    let started = order(&mut registry, of(some(), 0, 1)).unwrap().unwrap();
    assert_eq!((started.route, started.segments.len()), (Route::Each, 1));
    assert!(refusal(&mut registry, of(some(), NO_PART, 0)).contains("no elements"));
    let none = agreed(&ranks, &[0; 5].map(gather));
    let ended = order(&mut registry, of(none, NO_PART, 0)).unwrap().unwrap();
    assert_eq!((ended.route, ended.segments[0].range), (Route::Nothing, None));
    let barrier = all(&Request::barrier());
    let segment = pb::Segment { agreed: Some(barrier), ..segment(name("b"), NO_PART, 0, 0) };
    let started = order(&mut registry, operation(&Request::barrier(), vec![segment])).unwrap();
    assert_eq!(started.unwrap().segments.len(), 1);
}

#[test]
fn joined_ranks_do_not_affect_send_and_receive() {
    let mut registry = registry();
    let send = Request { root: Rank(4), list: vec![2], ..plain(Collective::SendReceive, &[3]) };
    let terms = agreed(&[2, 4], &[send.clone(), send.clone()]);
    registry.instructions(execute(vec![registration(7, terms.clone())])).unwrap();
    let of = |absent: &[u32], segment| pb::Operation {
        absent: absent.to_vec(),
        ..operation(&send, vec![segment])
    };
    let started = order(&mut registry, of(&[3], segment(id(7), 0, 0, 3))).unwrap().unwrap();
    assert_eq!(started.route, Route::Move(NodeId(2), NodeId(1)));
    assert_eq!(started.members.here, [0]);
    let only = announced(std::slice::from_ref(&send));
    assert!(announcement(&registry, only).submitted.is_empty(), "the other one is not here");
    let named = pb::Segment { agreed: Some(terms), ..segment(name("v"), 0, 0, 3) };
    assert!(refusal(&mut registry, of(&[4], named)).contains("absent"));
}

#[test]
fn process_sets_come_and_go() {
    let mut registry = registry();
    let created = |set, ranks: &[u32]| pb::Execute {
        sets_created: vec![pb::SetCreated {
            process_set: set,
            ranks: ranks.to_vec(),
            tensor: name("make"),
        }],
        ..Default::default()
    };
    let removed = |set| pb::Execute {
        sets_removed: vec![pb::SetRemoved { process_set: set, tensor: name("unmake") }],
        ..Default::default()
    };
    let joined = |set, last_rank| pb::Execute {
        joined: vec![pb::Joined { process_set: set, last_rank }],
        ..Default::default()
    };
    let made = registry.instructions(created(3, &[1, 2])).unwrap();
    assert!(matches!(&made[..], [Instruction::CreateSet { members, .. }] if members.here == [0]));
    let of_set = pb::Registration {
        process_set: 3,
        ..registration(7, agreed(&[1, 2], &[request(8), request(8)]))
    };
    registry.instructions(execute(vec![of_set])).unwrap();
    let whole =
        pb::Operation { process_set: 3, ..operation(&request(8), vec![segment(id(7), 0, 0, 8)]) };
    let started = order(&mut registry, whole).unwrap().unwrap();
    assert_eq!(*started.members.nodes, [NodeId(0), NodeId(1)]);
    let resumed = registry.instructions(joined(3, 2)).unwrap();
    assert!(matches!(resumed[..], [Instruction::Resume { last: Rank(2), .. }]));
    for (bad, text) in [
        (created(3, &[0, 1]), "process set 3 already exists"),
        (created(4, &[1, 0]), "not ascending ranks"),
        (created(4, &[5]), "not ascending ranks"),
        (removed(4), "process set 4 does not exist"),
        (removed(0), "can't be removed"),
        (joined(3, 0), "rank 0 is not a member"),
    ] {
        let refused = registry.instructions(bad).unwrap_err().to_string();
        assert!(refused.contains(text), "{refused:?} does not contain {text:?}");
    }
    registry.instructions(removed(3)).unwrap();
    assert!(registry.resolve(ProcessSetId(3), id(7)).is_err(), "its ids go with it");
    let late = pb::TensorFailure {
        process_set: 3,
        tensor: id(7),
        failure: Some(Failure::new(gradwire_proto::FailureKind::Invalid, "gone").into()),
    };
    let late = pb::Execute { failures: vec![late], ..Default::default() };
    assert!(registry.instructions(late).unwrap().is_empty(), "it has failed with its set");
}
