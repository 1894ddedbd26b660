//! Errors and their texts. An error at the call starts nothing; other errors reach all ranks.

use gradwire_worker::{
    AllgatherOptions, AllreduceOptions, AlltoallOptions, BroadcastOptions, Buffer, Complex,
    FailureKind, GatherOptions, GradwireError, HugePages, ReceiveOptions, ReduceOp, ReduceOptions,
    ReduceScatterOptions, ScatterOptions, SendOptions, Tensor,
};

use crate::{fake::FakeDaemon, ranks, ranks_with, text};

fn named(name: &str) -> AllreduceOptions {
    AllreduceOptions::named(name)
}

#[test]
fn impossible_calls_start_nothing_and_say_why() {
    ranks(2, |session| {
        let rank = session.rank();
        let other = 1 - rank;
        let six = session.zeros::<f32>(&[6, 2]).unwrap();
        let five = session.zeros::<f32>(&[5]).unwrap();
        let number = session.zeros::<f32>(&[]).unwrap();
        let mut whole = session.zeros::<i32>(&[2]).unwrap();
        let mut complex = session.zeros::<Complex<f32>>(&[2]).unwrap();
        let splits = |splits: &[usize]| AlltoallOptions::default().splits(splits);
        let scatter = |splits: &[usize]| ScatterOptions::from_rank(rank).splits(splits);
        let many: Vec<Tensor<u8>> = (0..1025).map(|_| session.zeros(&[1]).unwrap()).collect();
        let none: Vec<Buffer> = Vec::new();
        let op = |op| named("op").op(op);

        let sized = format!("rank {rank}");
        let cases = [
            (
                text(session.alltoall(&six, splits(&[1]))),
                format!("{sized} gave 1 splits for 2 members"),
            ),
            (
                text(session.alltoall(&six, splits(&[4, 3]))),
                format!("the splits of {sized} add up to 7 rows, but its tensor has 6"),
            ),
            (text(session.alltoall(&six, splits(&[usize::MAX, 9]))), "rows, but its tensor".into()),
            (
                text(session.alltoall(&five, AlltoallOptions::default())),
                format!("the 5 rows of {sized} can't be split evenly between 2 members"),
            ),
            (
                text(session.alltoall(&number, AlltoallOptions::default())),
                "a 0-d tensor has none".into(),
            ),
            (
                text(session.reducescatter(&number, ReduceScatterOptions::default())),
                "0-d tensor".into(),
            ),
            (text(session.scatter(Some(&number), scatter(&[]))), "0-d tensor".into()),
            (text(session.scatter(Some(&six), scatter(&[1, 2, 3]))), "gave 3 splits".into()),
            (text(session.scatter(Some(&six), scatter(&[6, 1]))), "add up to 7 rows".into()),
            (text(session.scatter(Some(&five), scatter(&[]))), "can't be split evenly".into()),
            (text(session.scatter(None::<&Tensor<f32>>, scatter(&[]))), "gives no tensor".into()),
            (
                text(session.scatter(None::<&Buffer>, ScatterOptions::from_rank(other))),
                "set it with .dtype".into(),
            ),
            (text(session.receive::<Buffer>(ReceiveOptions::from_rank(other))), ".dtype".into()),
            (
                text(session.send(&six, SendOptions::to_rank(2))),
                "the receiver, rank 2, does not exist: the job has only ranks 0 to 1".into(),
            ),
            (
                text(session.receive::<Tensor<f32>>(ReceiveOptions::from_rank(9))),
                "the sender, rank 9, does not exist".into(),
            ),
            (text(session.send(&six, SendOptions::to_rank(rank))), "would send to itself".into()),
            (
                text(session.gather(&six, GatherOptions::to_rank(2))),
                "the root, rank 2, does not exist".into(),
            ),
            (text(session.reduce(&mut whole, ReduceOptions::to_rank(7))), "rank 7".into()),
            (
                text(session.allreduce(&mut complex, op(ReduceOp::Max))),
                "max of c64 is not possible".into(),
            ),
            (text(session.allreduce_to(&six, op(ReduceOp::BitXor))), "bit-xor of f32".into()),
            (
                text(session.allreduce(&mut whole, op(ReduceOp::BitOr).postscale(0.5))),
                "a factor of 0.5 can't be applied to bits".into(),
            ),
            (
                text(
                    session
                        .grouped_allreduce(&mut many.into_iter().collect::<Vec<_>>(), named("g")),
                ),
                "a group of 1025 tensors exceeds the limit of 1024".into(),
            ),
            (text(session.grouped_allreduce_to(&none, named("g"))), "a group of no tensors".into()),
            (
                text(session.grouped_allgather(&none, AllgatherOptions::default())),
                "no tensors".into(),
            ),
            (
                text(session.receive::<Tensor<f32>>(
                    ReceiveOptions::from_rank(other).expecting(&[usize::MAX, 2]),
                )),
                "shape".into(),
            ),
        ];
        for (error, part) in cases {
            assert!(error.contains(&part), "{part}: {error}");
        }
        assert_eq!(session.stats().operations, 0);
        // Refused calls were not counted: the names still agree on both ranks.
        session.barrier().unwrap();
        session.alltoall(&six, AlltoallOptions::default()).unwrap();
    });
}

#[test]
fn a_name_in_flight_twice_describes_both() {
    let (_daemon, session) = FakeDaemon::alone();
    let first = session.zeros::<f32>(&[2, 3]).unwrap();
    let held = session.allreduce_async(first, named("hold").op(ReduceOp::Sum)).unwrap();
    let mut second = session.zeros::<u8>(&[4]).unwrap();
    let options = BroadcastOptions::from_rank(0).name("hold");
    let error = text(session.broadcast(&mut second, options));
    for part in [
        "'hold' is already in flight",
        "allreduce (sum) of f32 [2, 3] was submitted as operation 1",
        "broadcast (root 0) of u8 [4]",
    ] {
        assert!(error.contains(part), "{error}");
    }
    drop(held);
}

#[test]
fn requests_that_disagree_fail_on_all_ranks() {
    ranks(2, |session| {
        // Each request is possible by itself, but the element types differ.
        let failure = if session.rank() == 0 {
            let own = session.zeros::<f32>(&[2]).unwrap();
            session.allgather(&own, AllgatherOptions::named("x")).unwrap_err()
        } else {
            let own = session.zeros::<f64>(&[2]).unwrap();
            session.allgather(&own, AllgatherOptions::named("x")).unwrap_err()
        };
        assert_eq!(failure.failure().unwrap().kind, FailureKind::Disagreement);
        session.barrier().unwrap();
    });
}

#[test]
fn a_rank_without_memory_for_its_result_gives_up() {
    let settings = |rank, builder: gradwire_worker::SessionBuilder| {
        let builder = builder.huge_pages(HugePages::Never);
        if rank == 0 { builder.arena_max_bytes(1 << 20) } else { builder }
    };
    ranks_with(2, settings, |session| {
        let rows = if session.rank() == 0 { 1 } else { 1 << 20 };
        let own = session.zeros::<f32>(&[rows]).unwrap();
        let error = session.allgather(&own, AllgatherOptions::default()).unwrap_err();
        let GradwireError::Failed(failure) = error else { panic!("{error}") };
        if session.rank() == 0 {
            assert_eq!(failure.kind, FailureKind::Resource);
            let text = "can't allocate a result of f32 [1048577]";
            assert!(failure.text().contains(text), "{failure}");
        } else {
            // TELL
            assert_eq!(failure.kind, FailureKind::WorkerLost);
        }
    });
}

#[test]
fn no_memory_is_allocated_for_a_large_guess() {
    // BOUND: 48 MiB and the same again for the result, not three times as much for a guess.
    let settings = |rank, builder: gradwire_worker::SessionBuilder| {
        let builder = builder.huge_pages(HugePages::Never);
        if rank == 0 { builder.arena_max_bytes(100 << 20) } else { builder }
    };
    ranks_with(3, settings, |session| {
        let rows = if session.rank() == 0 { 48 } else { 0 };
        let own = session.zeros::<u8>(&[rows, 1 << 20]).unwrap();
        let gathered = session.gather(&own, GatherOptions::to_rank(0)).unwrap();
        assert_eq!(gathered.map(|g| g.rows), (session.rank() == 0).then(|| vec![48, 0, 0]));
    });
}
