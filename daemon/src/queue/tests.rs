use gradwire_proto::{Agreed, Collective, DType, ReduceOp, Shape, TensorName};

use super::*;
use crate::model::{
    agreement::Agreement,
    memory::Span,
    tensor::AllocationRequest,
    world::{World, tests::world},
};

fn set_key(set: u32, name: &str) -> TensorKey {
    TensorKey { set: ProcessSetId(set), name: TensorName::new(name).unwrap() }
}

fn key(name: &str) -> TensorKey {
    set_key(0, name)
}

fn with(local_rank: u32, request: Request) -> LocalTensor {
    LocalTensor {
        local_rank,
        ticket: u64::from(local_rank) * 100,
        inputs: vec![Span::empty(); request.parts()],
        outputs: vec![Span::empty(); request.parts()],
        request,
        priority: 0,
        allocated: std::sync::OnceLock::new(),
        site: format!("train.py:{local_rank}").into(),
    }
}

fn local(local_rank: u32, count: u64) -> LocalTensor {
    let shape = Shape::new(&[count]).unwrap();
    with(local_rank, Request::allreduce(DType::F32, shape, ReduceOp::Sum))
}

fn announced(submitted: Submitted) -> Announced {
    match submitted {
        Submitted::Announce(announced) => announced,
        other => panic!("{other:?}"),
    }
}

/// Rank 4 is the first of this node; ranks 0 to 3 are on other nodes.
fn node(slots: u32) -> World {
    world(1, &[4, slots])
}

fn queue_of(world: &World) -> TensorQueue {
    TensorQueue::new(world.me().first_rank, Arc::new(Members::everybody(world)))
}

fn queue() -> TensorQueue {
    queue_of(&node(2))
}

fn join(queue: &TensorQueue, set: u32, local_rank: u32) -> Vec<Announced> {
    let answer = Ticket { local_rank, ticket: 900 + u64::from(local_rank) };
    queue.join(ProcessSetId(set), answer, Request::empty(Collective::Join), 0).unwrap()
}

fn ranks(announced: &Announced) -> Vec<u32> {
    announced.variants.iter().flat_map(|variant| variant.ranks.iter().map(|r| r.0)).collect()
}

#[test]
fn the_last_local_rank_announces_a_tensor() {
    let queue = queue();
    assert_eq!(queue.submit(key("w"), local(1, 8)), Submitted::Waits);
    let announced = announced(queue.submit(key("w"), local(0, 8)));
    assert_eq!(announced.variants.len(), 1);
    assert_eq!(announced.variants[0].ranks, [Rank(4), Rank(5)]);
    let tensor = queue.announced(&key("w")).unwrap();
    let order: Vec<u32> = tensor.locals().iter().map(|l| l.local_rank).collect();
    assert_eq!(order, [0, 1], "rank order, whichever was first (SAME)");
    assert_eq!(tensor.at(None), 0..2);
    assert_eq!((tensor.at(Some(Rank(5))), tensor.at(Some(Rank(3)))), (1..2, 0..0));
}

#[test]
fn local_ranks_that_disagree_are_distinguished() {
    let queue = queue();
    queue.submit(key("w"), local(0, 8));
    let announced = announced(queue.submit(key("w"), local(1, 9)));
    let ranks: Vec<_> = announced.variants.iter().map(|v| v.ranks.clone()).collect();
    assert_eq!(ranks, [[Rank(4)], [Rank(5)]]);
}

#[test]
fn a_second_submission_is_announced() {
    let queue = queue();
    queue.submit(key("w"), local(0, 8));
    assert_eq!(queue.submit(key("w"), local(0, 8)), Submitted::Waits);
    let first = announced(queue.submit(key("w"), local(1, 8)));
    let twice: Vec<_> = first.variants.iter().map(|v| (v.duplicate, &v.ranks[..])).collect();
    assert_eq!(twice, [(true, &[Rank(4)][..]), (false, &[Rank(5)][..])]);
    let late = announced(queue.submit(key("w"), LocalTensor { ticket: 7, ..local(1, 8) }));
    assert_eq!((late.variants[0].duplicate, &late.variants[0].ranks[..]), (true, &[Rank(5)][..]));
    let removed = queue.remove(&key("w"));
    assert_eq!(removed.tickets.len(), 2);
    assert_eq!(removed.duplicates.len(), 2);
    assert_eq!(queue.len(), 0);
}

#[test]
fn tensors_that_need_a_left_rank_are_removed() {
    let world = node(3);
    let queue = queue_of(&world);
    let pair = Members::of(&world, vec![Rank(4), Rank(6)]).unwrap();
    assert!(queue.create_set(ProcessSetId(1), Arc::new(pair)));
    queue.submit(key("v"), local(0, 8));
    queue.submit(set_key(1, "apart"), local(0, 8));
    for rank in 0..3 {
        queue.submit(key("all"), local(rank, 8));
    }
    let given_up = queue.leave(1);
    assert_eq!(given_up.len(), 1, "complete tensors and those of other ranks stay");
    assert_eq!(given_up[0].0, key("v"));
    assert_eq!(given_up[0].1.tickets.len(), 1);
    assert_eq!(queue.submit(key("w"), local(0, 8)), Submitted::RankLeft(Rank(5)));
    announced(queue.submit(set_key(1, "apart"), local(2, 8)));
}

#[test]
fn a_name_is_free_again_once_it_is_done() {
    let (queue, world) = (queue(), node(2));
    for _ in 0..2 {
        queue.submit(key("w"), local(0, 8));
        announced(queue.submit(key("w"), local(1, 8)));
        let tensor = queue.announced(&key("w")).unwrap();
        assert_eq!(
            tensor.agree(&agreement(&world, &[], &vec![local(0, 8).request; 6])),
            Ok(vec![])
        );
        assert!(tensor.order(3) && tensor.order(5) && !tensor.order(1), "ONE");
        assert!(!tensor.published(3));
        assert!(tensor.published(5));
        assert_eq!(queue.remove(&key("w")).tickets.len(), 2);
    }
}

#[test]
fn a_wait_is_reported_at_doubling_intervals() {
    let queue = queue_of(&node(3));
    queue.submit(key("b"), local(1, 8));
    queue.submit(key("c"), local(0, 8));
    queue.submit(key("c"), local(1, 8));
    for rank in 0..3 {
        queue.submit(key("done"), local(rank, 8));
    }
    let (begin, limit) = (Instant::now(), Duration::from_secs(10));
    let late = limit + Duration::from_secs(1);
    let waits = [(Duration::ZERO, false), (late, true), (late * 3 / 2, false)];
    for (waited, expected) in waits.into_iter().chain([(late * 5 / 2, true), (late * 4, false)]) {
        assert_eq!(queue.must_report(begin + waited, limit), expected, "after {waited:?}");
    }
    let partly = queue.partly(begin + limit, limit);
    let seen: Vec<_> = partly.iter().map(|it| (&it.name[..], &it.submitted[..])).collect();
    assert_eq!(seen, [("b", &[5][..]), ("c", &[4, 5])]);
    assert_eq!((&partly[0].missing[..], &partly[1].missing[..]), (&[4, 6][..], &[6][..]));
    assert!(partly.iter().all(|it| it.waiting_ms >= 9_000 && !it.is_pair), "{partly:?}");
}

#[test]
fn process_sets_are_independent() {
    let world = node(3);
    let queue = queue_of(&world);
    let set = ProcessSetId(7);
    assert_eq!(queue.admit(set, 1), Err(Refusal::NoSet { set }));
    let members = Arc::new(Members::of(&world, vec![Rank(1), Rank(5)]).unwrap());
    assert!(queue.create_set(set, members.clone()) && !queue.create_set(set, members));
    assert_eq!(queue.process_sets(), 2);
    let refused = queue.submit(set_key(7, "w"), local(0, 8));
    assert_eq!(refused, Submitted::Refused(Refusal::NoMember { set }));
    queue.submit(key("w"), local(1, 8));
    let here = announced(queue.submit(set_key(7, "w"), local(1, 8)));
    assert_eq!((ranks(&here), here.key), (vec![5], set_key(7, "w")));
    // TELL: a tensor that is in flight when its process set is removed is not forgotten.
    let doomed = queue.remove_set(set).unwrap();
    assert_eq!((doomed.len(), &doomed[0].0), (1, &set_key(7, "w")));
    assert_eq!(doomed[0].1.tickets, [Ticket { local_rank: 1, ticket: 100 }]);
    assert!(queue.remove_set(set).is_none() && queue.remove_set(ProcessSetId::GLOBAL).is_none());
    let text = queue.submit(set_key(7, "w"), local(1, 8));
    assert_eq!(text, Submitted::Refused(Refusal::NoSet { set }));
    assert_eq!(queue.len(), 1, "the other set's is still there");
    // Nor is a join that is in flight.
    let (set, members) = (ProcessSetId(8), Members::of(&world, vec![Rank(1), Rank(5)]).unwrap());
    assert!(queue.create_set(set, Arc::new(members)));
    assert_eq!(queue.joined_by(1), None);
    join(&queue, 8, 1);
    assert_eq!(queue.joined_by(1), Some(set));
    let doomed = queue.remove_set(set).unwrap();
    assert_eq!((doomed.len(), &doomed[0].0), (1, &join_of(set)));
    assert_eq!(doomed[0].1.tickets, [Ticket { local_rank: 1, ticket: 901 }]);
    // The rank that has not submitted a tensor is named.
    let (set, members) = (ProcessSetId(9), Members::of(&world, vec![Rank(4), Rank(5)]).unwrap());
    assert!(queue.create_set(set, Arc::new(members)));
    queue.submit(set_key(9, "w"), local(1, 8));
    let doomed = queue.remove_set(set).unwrap();
    assert_eq!((doomed.len(), &doomed[0].1.missing), (1, &vec![Rank(4)]));
}

#[test]
fn a_send_and_receive_needs_only_its_two_ends() {
    let queue = queue_of(&node(3));
    let send = |from: u32, to: u64| Request {
        root: Rank(from),
        list: vec![to],
        ..Request::plain(Collective::SendReceive, DType::F32, Shape::default())
    };
    assert_eq!(queue.submit(key("near"), with(2, send(6, 4))), Submitted::Waits);
    let partly = queue.partly(Instant::now(), Duration::ZERO);
    assert!(partly[0].is_pair && partly[0].missing == [4], "{partly:?}");
    assert_eq!(ranks(&announced(queue.submit(key("near"), with(0, send(6, 4))))), [4, 6]);
    let far = announced(queue.submit(key("far"), with(1, send(0, 5))));
    assert_eq!(ranks(&far), [5], "the sender is on another node");
    assert_eq!(ranks(&announced(queue.submit(key("self"), with(1, send(5, 5))))), [5]);
    // If any rank has a different request under the name, all ranks are required.
    queue.submit(key("odd"), with(0, send(4, 5)));
    assert_eq!(queue.submit(key("odd"), local(1, 8)), Submitted::Waits);
    assert_eq!(ranks(&announced(queue.submit(key("odd"), local(2, 8)))), [4, 5, 6]);
    assert_eq!(queue.leave(0).len(), 0);
    assert_eq!(queue.submit(key("x"), with(1, send(5, 4))), Submitted::RankLeft(Rank(4)));
    announced(queue.submit(key("y"), with(1, send(5, 0))));
}

#[test]
fn a_joined_rank_is_not_waited_for() {
    let queue = queue();
    queue.submit(key("before"), local(1, 8));
    queue.submit(key("w"), local(0, 8));
    let reported = join(&queue, 0, 1);
    assert_eq!(reported.iter().map(|a| a.key.name.as_str()).collect::<Vec<_>>(), ["join", "w"]);
    let joins = reported[0].variants.iter().all(|v| v.request.collective == Collective::Join);
    assert_eq!((ranks(&reported[0]), joins), (vec![5], true));
    assert_eq!((ranks(&reported[1]), reported[1].all_there), (vec![4], false));
    let before = announced(queue.submit(key("before"), local(0, 8)));
    assert_eq!(ranks(&before), [4, 5], "its earlier submission counts");
    assert!(!before.all_there, "but the id alone would be wrong");
    let set = ProcessSetId::GLOBAL;
    let again = queue.submit(key("x"), local(1, 8));
    assert_eq!(again, Submitted::Refused(Refusal::Joined { set }));
    let twice = Ticket { local_rank: 1, ticket: 1 };
    let twice = queue.join(set, twice, Request::empty(Collective::Join), 0);
    assert_eq!(twice, Err(Submitted::Refused(Refusal::Joined { set })));
    assert_eq!(queue.resume(set), None, "rank 4 has not joined");
    assert_eq!(join(&queue, 0, 0).len(), 1);
    assert_eq!(queue.resume(set).unwrap().len(), 2);
    assert_eq!(queue.submit(key("x"), local(1, 8)), Submitted::Waits);
}

#[test]
fn a_failed_join_brings_the_ranks_back() {
    let queue = queue();
    join(&queue, 0, 1);
    assert_eq!(queue.unjoin(ProcessSetId::GLOBAL), [Ticket { local_rank: 1, ticket: 901 }]);
    assert_eq!(queue.submit(key("w"), local(0, 8)), Submitted::Waits);
    assert!(announced(queue.submit(key("w"), local(1, 8))).all_there);
}

#[test]
fn a_rank_that_was_absent_waits_for_its_turn() {
    let queue = queue();
    join(&queue, 0, 1);
    announced(queue.submit(key("w"), local(0, 8)));
    join(&queue, 0, 0);
    queue.resume(ProcessSetId::GLOBAL).unwrap();
    // The tensor of the round in which it was absent is still in flight.
    assert_eq!(queue.submit(key("w"), local(1, 8)), Submitted::Waits);
    let twice = queue.submit(key("w"), LocalTensor { ticket: 3, ..local(1, 8) });
    assert_eq!(twice, Submitted::Refused(Refusal::Twice));
    let mut removed = queue.remove(&key("w"));
    assert_eq!(removed.tickets, [Ticket { local_rank: 0, ticket: 0 }]);
    assert_eq!(removed.duplicates, []);
    let turn = removed.later.pop().unwrap();
    assert_eq!(queue.submit(key("w"), turn), Submitted::Waits);
    assert_eq!(ranks(&announced(queue.submit(key("w"), local(0, 8)))), [4, 5]);
}

/// The agreement on these requests of all ranks except the absent ones.
fn agreement(world: &World, absent: &[Rank], requests: &[Request]) -> Arc<Agreement> {
    let set = Members::everybody(world);
    let members = Arc::new(set.without(world, absent).unwrap());
    let requests: Vec<&Request> = requests.iter().collect();
    let agreed = Agreed::of(&members.ranks, &requests).unwrap();
    Arc::new(Agreement::new(world, &set, members, agreed).unwrap())
}

/// TRUST: after this check, no order of the coordinator is outside the memory of the ranks.
#[test]
fn an_agreement_must_fit_the_requests() {
    let world = node(2);
    let queue = queue_of(&world);
    queue.submit(key("w"), local(0, 8));
    queue.submit(key("w"), local(1, 8));
    let tensor = queue.announced(&key("w")).unwrap();
    let asked = |count| vec![local(0, count).request; 6];
    assert!(tensor.agree(&agreement(&world, &[], &asked(9))).is_err(), "another shape");
    let absent = agreement(&world, &[Rank(5)], &asked(8)[1..]);
    assert!(tensor.agree(&absent).is_err(), "without a rank that takes part");
    assert_eq!(tensor.agree(&agreement(&world, &[], &asked(8))), Ok(vec![]));
    assert_eq!(tensor.agree(&agreement(&world, &[], &asked(8))), Ok(vec![]), "the same again");
    let fewer = agreement(&world, &[Rank(0)], &asked(8)[1..]);
    assert!(tensor.agree(&fewer).is_err(), "something else");
    assert_eq!(tensor.bytes(), 32);
}

#[test]
fn unexpected_results_need_allocations() {
    let world = node(2);
    let queue = queue_of(&world);
    let rows =
        |rows| Request::plain(Collective::Allgather, DType::F32, Shape::new(&[rows]).unwrap());
    queue.submit(key("w"), with(0, rows(2)));
    queue.submit(key("w"), with(1, rows(3)));
    let tensor = queue.announced(&key("w")).unwrap();
    let agreed = agreement(&world, &[], &[1, 0, 0, 4, 2, 3].map(rows));
    let wanted = tensor.agree(&agreed).unwrap();
    let outputs = vec![(Some(Shape::new(&[10]).unwrap()), vec![1, 0, 0, 4, 2, 3])];
    let of = |local_rank| AllocationRequest {
        answer: Ticket { local_rank, ticket: u64::from(local_rank) * 100 },
        outputs: outputs.clone(),
        name: key("w").name,
    };
    assert_eq!(wanted, [of(0), of(1)]);
    assert!(!tensor.is_allocated());
    tensor.set_outputs(0, vec![Span::empty()]);
    tensor.set_outputs(0, vec![Span::empty()]);
    assert!(!tensor.is_allocated(), "a rank allocates once");
    tensor.set_outputs(1, vec![Span::empty()]);
    assert!(tensor.is_allocated());
}

#[test]
fn each_rank_has_the_phase_it_waits_in() {
    let world = node(2);
    let queue = queue_of(&world);
    assert_eq!(queue.phases(3), [None; 3]);
    queue.submit(key("v"), local(0, 8));
    assert_eq!(queue.phases(3), [Some(Phase::Gather), None, None]);
    queue.submit(key("v"), local(1, 8));
    assert_eq!(queue.phases(3), [Some(Phase::Negotiate), Some(Phase::Negotiate), None]);
    // What it has waited for longest counts.
    queue.submit(key("w"), local(1, 8));
    let tensor = queue.announced(&key("v")).unwrap();
    let asked = vec![local(0, 8).request; 6];
    tensor.agree(&agreement(&world, &[], &asked)).unwrap();
    assert_eq!(queue.phases(2), [Some(Phase::Negotiate); 2]);
    assert!(tensor.order(8));
    assert_eq!(queue.phases(2), [Some(Phase::Transfer); 2]);
    queue.remove(&key("v"));
    assert_eq!(queue.phases(2), [None, Some(Phase::Gather)]);
}
