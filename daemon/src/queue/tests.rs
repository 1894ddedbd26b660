use gradwire_proto::{DType, ReduceOp, Shape};

use super::*;
use crate::memory::Span;

fn key(name: &str) -> TensorKey {
    TensorKey { set: ProcessSetId::GLOBAL, name: TensorName::new(name).unwrap() }
}

fn local(local_rank: u32, count: u64) -> LocalTensor {
    LocalTensor {
        local_rank,
        ticket: u64::from(local_rank) * 100,
        request: Request::allreduce(DType::F32, Shape::new(&[count]).unwrap(), ReduceOp::Sum),
        priority: 0,
        input: Span::empty(),
        output: Span::empty(),
    }
}

fn announced(submitted: Submitted) -> Announced {
    match submitted {
        Submitted::Announce(announced) => announced,
        other => panic!("{other:?}"),
    }
}

fn queue() -> TensorQueue {
    TensorQueue::new(Rank(4), 2)
}

#[test]
fn a_tensor_is_announced_once_by_the_last_local_rank() {
    let queue = queue();
    assert_eq!(queue.submit(key("w"), local(1, 8)), Submitted::Waits);
    let announced = announced(queue.submit(key("w"), local(0, 8)));
    assert_eq!(announced.variants.len(), 1);
    assert_eq!(announced.variants[0].ranks, [Rank(4), Rank(5)]);
    let tensor = queue.announced(&key("w")).unwrap();
    let order: Vec<u32> = tensor.locals().iter().map(|l| l.local_rank).collect();
    assert_eq!(order, [0, 1], "rank order, whoever came first (SAME)");
}

#[test]
fn local_ranks_that_disagree_are_told_apart() {
    let queue = queue();
    queue.submit(key("w"), local(0, 8));
    let announced = announced(queue.submit(key("w"), local(1, 9)));
    let ranks: Vec<_> = announced.variants.iter().map(|v| v.ranks.clone()).collect();
    assert_eq!(ranks, [[Rank(4)], [Rank(5)]]);
}

#[test]
fn a_second_submission_is_told_with_or_after_the_announcement() {
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
fn what_needs_a_rank_that_has_left_is_given_up() {
    let queue = queue();
    queue.submit(key("v"), local(0, 8));
    announced_by_both(&queue);
    let given_up = queue.leave(1);
    assert_eq!(given_up.len(), 1, "what everybody submitted before goes on");
    assert_eq!(given_up[0].0, key("v"));
    assert_eq!(given_up[0].1.tickets.len(), 1);
    assert_eq!(queue.submit(key("w"), local(0, 8)), Submitted::RankLeft(Rank(5)));
}

fn announced_by_both(queue: &TensorQueue) {
    queue.submit(key("both"), local(0, 8));
    announced(queue.submit(key("both"), local(1, 8)));
}

#[test]
fn after_it_is_done_a_name_is_free_again() {
    let queue = queue();
    for _ in 0..2 {
        queue.submit(key("w"), local(0, 8));
        announced(queue.submit(key("w"), local(1, 8)));
        let tensor = queue.announced(&key("w")).unwrap();
        assert!(!tensor.published(12));
        assert!(tensor.published(20));
        assert_eq!(queue.remove(&key("w")).tickets.len(), 2);
    }
}

#[test]
fn a_wait_for_a_local_rank_is_told_after_each_limit() {
    let queue = TensorQueue::new(Rank(4), 3);
    queue.submit(key("b"), local(1, 8));
    queue.submit(key("a"), local(1, 8));
    queue.submit(key("c"), local(0, 8));
    queue.submit(key("c"), local(1, 8));
    for rank in 0..3 {
        queue.submit(key("done"), local(rank, 8));
    }
    let (begin, limit) = (Instant::now(), Duration::from_secs(10));
    assert_eq!(queue.stalled(begin, limit), []);
    let told = queue.stalled(begin + limit, limit);
    let told: Vec<_> = told.iter().map(|s| (s.missing.as_slice(), s.names.as_slice())).collect();
    let (alone, both) = (["c".to_owned()], ["a".to_owned(), "b".to_owned()]);
    let expected: [(&[Rank], &[String]); 2] = [(&[Rank(4), Rank(6)], &both), (&[Rank(6)], &alone)];
    assert_eq!(told, expected);
    assert_eq!(queue.stalled(begin + limit * 3 / 2, limit), [], "not before the next limit");
    let again = queue.stalled(begin + limit * 2, limit);
    assert!(again.len() == 2 && again[0].waited >= limit * 2, "{again:?}");
}
