//! Bad input of every collective. An error that one rank can detect is refused at the call. An
//! error that only all ranks together show is reported to all of them, with each rank's request
//! (TELL). The job continues. (Allreduce and broadcast are in `disagreement.rs`; process sets and
//! join have their own files.)

use gradwire_proto::{Collective, DType, FailureKind, Part, Rank, ReduceOp, Request, Shape};
use gradwire_tests::{
    calls::{Call, failure, refusal, request, with_op},
    cluster::{Plan, run_job},
    raw::{RawWorker, submission},
};
use gradwire_worker::{
    AdasumOptions, AllgatherOptions, AllreduceOptions, AlltoallOptions, BroadcastOptions, Buffer,
    GradwireError, ReceiveOptions, ReduceScatterOptions, ScatterOptions, SendOptions, Session,
    SparseOptions, SparseRows, Tensor,
};

fn shape(dims: &[u64]) -> Shape {
    Shape::new(dims).unwrap()
}

fn f32s(of: Collective, dims: &[u64]) -> Request {
    request(of, DType::F32, dims, 0)
}

fn group(of: Collective, parts: &[(DType, &[u64])]) -> Request {
    let part = |(dtype, dims): &(DType, &[u64])| Part { dtype: *dtype, shape: shape(dims) };
    let more = parts[1..].iter().map(part).collect();
    Request { more, ..request(of, parts[0].0, parts[0].1, 0) }
}

/// Checks that the job continues, with an allreduce of all ranks.
fn goes_on(session: &Session) {
    let mut one = [1u32];
    session.allreduce_slice(&mut one, AllreduceOptions::named("on").op(ReduceOp::Sum)).unwrap();
    assert_eq!(one, [session.size()]);
}

/// The odd rank's request, the request of the others, the beginning of the error, and both rows of
/// its table.
struct Case {
    odd: Request,
    others: Request,
    head: &'static str,
    theirs: &'static str,
    usual: &'static str,
}

fn cases() -> Vec<Case> {
    use Collective::{Allgather, Allreduce, Alltoall, Gather, Reduce, ReduceScatter, Scatter};
    let two: &[(DType, &[u64])] = &[(DType::F32, &[4]), (DType::I8, &[2, 3])];
    let three: &[(DType, &[u64])] = &[two[0], two[1], two[1]];
    let other_type: &[(DType, &[u64])] = &[two[0], (DType::U8, &[2, 3])];
    let other_shape: &[(DType, &[u64])] = &[two[0], (DType::I8, &[2, 4])];
    let rooted = |of, root| request(of, DType::F32, &[4], root);
    let case = |odd, others, head, theirs, usual| Case { odd, others, head, theirs, usual };
    vec![
        case(
            f32s(Allgather, &[5, 2, 4]),
            f32s(Allgather, &[3, 2, 3]),
            "shape (dimension 2)",
            "*[*, 2, 4]",
            "[*, 2, 3]",
        ),
        case(f32s(Gather, &[5]), f32s(Gather, &[3, 2]), "shape", "*[*]", "[*, 2]"),
        case(
            f32s(Alltoall, &[4, 7]),
            f32s(Alltoall, &[8, 2]),
            "shape (dimension 1)",
            "*[*, 7]",
            "[*, 2]",
        ),
        case(
            f32s(ReduceScatter, &[6, 2]),
            f32s(ReduceScatter, &[5, 2]),
            "shape (dimension 0)",
            "*[6, 2]",
            "[5, 2]",
        ),
        case(
            with_op(f32s(ReduceScatter, &[6]), ReduceOp::Max),
            f32s(ReduceScatter, &[6]),
            "op",
            "*max",
            "sum",
        ),
        case(rooted(Reduce, 1), rooted(Reduce, 0), "root", "*1", "0"),
        case(rooted(Gather, 2), rooted(Gather, 0), "root", "*2", "0"),
        case(request(Scatter, DType::F64, &[4], 0), f32s(Scatter, &[4]), "dtype", "*f64", "f32"),
        case(
            f32s(Allgather, &[4]),
            f32s(Allreduce, &[4]),
            "collective and shape",
            "*allgather *[*]",
            "allreduce [4]",
        ),
        case(group(Allreduce, three), group(Allreduce, two), "tensors", "*3", "2"),
        case(
            group(Allgather, other_type),
            group(Allgather, two),
            "dtype of tensor 1 of the group",
            "*u8",
            "i8",
        ),
        case(
            group(ReduceScatter, other_shape),
            group(ReduceScatter, two),
            "shape of tensor 1 of the group (dimension 1)",
            "*[2, 4]",
            "[2, 3]",
        ),
    ]
}

#[test]
fn disagreements_are_reported_to_all_ranks() {
    let reported = run_job(&Plan::nodes(&[2, 2]), |session| {
        let all = session.global_process_set();
        let ask = |(index, case): (usize, Case)| {
            let name = format!("tensor.{index}");
            let mut call = Call::same(name.clone(), &all.ranks(), &case.others);
            call.requests[2] = case.odd;
            // All tensors of a group fail together, and no rank waits for any of them.
            let reported = failure(call.start(session, &all).and_then(|pending| pending.finish()));
            assert_eq!((reported.kind, &reported.tensor), (FailureKind::Disagreement, &name));
            goes_on(session);
            // The name can be used again.
            Call::same(name, &all.ranks(), &case.others).run(session, &all, 2).unwrap();
            reported.text()
        };
        cases().into_iter().enumerate().map(ask).collect::<Vec<_>>()
    });
    for (what, case) in reported[0].iter().zip(cases()) {
        let (head, table) = what.split_once('\n').unwrap();
        assert_eq!(head, format!("the ranks disagree on {}", case.head), "{what}");
        let lines: Vec<String> = table
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        for (ranks, cells) in [("2 ", case.theirs), ("0-1,3 ", case.usual)] {
            let line = lines.iter().find(|line| line.starts_with(ranks));
            let line = line.unwrap_or_else(|| panic!("no line of {ranks}in {what}"));
            // The last cell is the line of the call.
            let cells_of = line.strip_prefix(ranks).and_then(|line| line.rsplit_once(' '));
            assert_eq!(cells_of.map(|(cells, _)| cells), Some(cells), "{what}");
        }
    }
    assert!(reported.iter().all(|all| *all == reported[0]), "every rank receives the same");
}

/// A call that is refused at once, in a job of two ranks.
type Ask = fn(&Session) -> Result<(), GradwireError>;

fn zeros(session: &Session, dims: &[usize]) -> Tensor<f32> {
    session.zeros(dims).unwrap()
}

const REFUSED: &[(Ask, &str)] = &[
    (
        |s| s.alltoall(&zeros(s, &[6]), AlltoallOptions::default().splits(&[1, 2, 3])).map(drop),
        "gave 3 splits for 2 members",
    ),
    (
        |s| s.alltoall(&zeros(s, &[6]), AlltoallOptions::default().splits(&[4, 3])).map(drop),
        "add up to 7 rows, but its tensor has 6",
    ),
    (
        |s| {
            let splits = [usize::MAX, usize::MAX];
            s.alltoall(&zeros(s, &[6]), AlltoallOptions::default().splits(&splits)).map(drop)
        },
        "rows, but its tensor has 6",
    ),
    (
        |s| s.alltoall(&zeros(s, &[5, 2]), AlltoallOptions::default()).map(drop),
        "can't be split evenly between 2 members: give splits",
    ),
    (
        |s| s.alltoall(&zeros(s, &[]), AlltoallOptions::default()).map(drop),
        "alltoall works along the first dimension, and a 0-d tensor has none",
    ),
    (
        |s| {
            let options = ScatterOptions::from_rank(s.rank()).splits(&[9, 9]);
            s.scatter(Some(&zeros(s, &[6])), options).map(drop)
        },
        "add up to 18 rows, but its tensor has 6",
    ),
    (
        |s| s.scatter(Some(&zeros(s, &[])), ScatterOptions::from_rank(s.rank())).map(drop),
        "scatter works along the first dimension, and a 0-d tensor has none",
    ),
    (
        |s| s.scatter::<Tensor<f32>>(None, ScatterOptions::from_rank(s.rank())).map(drop),
        "is the root of a scatter but gives no tensor",
    ),
    (
        |s| s.scatter::<Buffer>(None, ScatterOptions::from_rank(1 - s.rank())).map(drop),
        "the element type of the result is unknown: set it with .dtype(",
    ),
    (
        |s| s.reducescatter(&zeros(s, &[]), ReduceScatterOptions::default()).map(drop),
        "reducescatter works along the first dimension, and a 0-d tensor has none",
    ),
    (
        |s| s.send(&zeros(s, &[1]), SendOptions::to_rank(2)),
        "the receiver, rank 2, does not exist: the job has only ranks 0 to 1",
    ),
    (
        |s| s.receive::<Tensor<f32>>(ReceiveOptions::from_rank(u32::MAX)).map(drop),
        "the sender, rank 4294967295, does not exist",
    ),
    (
        |s| s.send(&zeros(s, &[1]), SendOptions::to_rank(s.rank())),
        "would send to itself; copy the tensor instead",
    ),
    (
        |s| s.broadcast(&mut zeros(s, &[1]), BroadcastOptions::from_rank(2)),
        "the root, rank 2, does not exist: the job has only ranks 0 to 1",
    ),
    (
        |s| s.grouped_allreduce::<Buffer>(&mut [], AllreduceOptions::default()),
        "a group of no tensors",
    ),
    (
        |s| {
            let mut many: Vec<_> = (0..1025).map(|_| zeros(s, &[1])).collect();
            s.grouped_allreduce(&mut many, AllreduceOptions::default())
        },
        "a group of 1025 tensors exceeds the limit of 1024",
    ),
    (
        |s| {
            let truth = s.buffer(DType::Bool, &[2])?;
            let mut mixed = [zeros(s, &[2]).into_buffer(), truth];
            s.grouped_allreduce(
                &mut mixed,
                AllreduceOptions::default().op(ReduceOp::Sum).prescale(0.5),
            )
        },
        "a factor of 0.5 can't be applied to booleans",
    ),
    (
        |s| {
            let mut complex = s.buffer(DType::C64, &[2])?;
            s.allreduce(&mut complex, AllreduceOptions::default().op(ReduceOp::Min))
        },
        "min of c64 is not possible: complex numbers can only be summed",
    ),
    (
        |s| {
            let mut float = zeros(s, &[2]);
            s.allreduce(&mut float, AllreduceOptions::default().op(ReduceOp::BitOr))
        },
        "bit-or of f32 is not possible: only integers and bool have bits to combine",
    ),
    (
        |s| {
            let mut truth = s.buffer(DType::Bool, &[2])?;
            s.allreduce(&mut truth, AllreduceOptions::default().op(ReduceOp::Average))
        },
        "average of bool is not possible: booleans have no average",
    ),
    (
        |s| s.adasum(&mut s.zeros::<i32>(&[2])?, AdasumOptions::default()),
        "adasum of i32 is not possible: use f16, bf16, f32 or f64",
    ),
    (
        |s| {
            let rows = SparseRows { rows: 9, cols: 2, indices: vec![1, 2], values: vec![1.0f32] };
            s.sparse_allreduce(&rows, SparseOptions::default()).map(drop)
        },
        "2 rows of 2 columns do not match 1 values",
    ),
    (
        |s| {
            let rows = SparseRows::<f32> { rows: 9, cols: 2, indices: vec![], values: vec![] };
            s.sparse_allreduce(&rows, SparseOptions::default().op(ReduceOp::Max)).map(drop)
        },
        "a sparse allreduce is a sum or an average, not max",
    ),
    (
        |s| s.broadcast_object::<u8>(None, BroadcastOptions::from_rank(s.rank())).map(drop),
        "is the root of a broadcast but gives no object",
    ),
];

#[test]
fn errors_of_one_rank_are_refused_at_the_call() {
    run_job(&Plan::nodes(&[1, 1]), |session| {
        for (ask, expected) in REFUSED {
            let text = refusal(ask(session));
            assert!(text.contains(expected), "{expected:?} is not in: {text}");
        }
        assert_eq!(session.stats().operations, 0, "nothing was started");
        goes_on(session);
        // Refused calls don't count, so unnamed calls and messages still match.
        let mut tensor = zeros(session, &[1]);
        session.allreduce(&mut tensor, AllreduceOptions::default()).unwrap();
        if session.rank() == 0 {
            session.send(&tensor, SendOptions::to_rank(1)).unwrap();
        } else {
            session.receive::<Tensor<f32>>(ReceiveOptions::from_rank(0)).unwrap();
        }
    });
}

#[test]
fn unexpected_messages_fail_at_both_ends() {
    run_job(&Plan::nodes(&[2, 1]), |session| match session.rank() {
        0 => {
            let sent = failure(session.send(&zeros(session, &[3]), SendOptions::to_rank(2)));
            assert!(sent.text().starts_with("the ranks disagree on dtype"), "{sent}");
            // The sender does not have to know the receiver's shape.
            session.send(&zeros(session, &[2, 2]), SendOptions::to_rank(2)).unwrap();
        }
        2 => {
            let options = || ReceiveOptions::from_rank(0);
            let got = failure(session.receive::<Tensor<i32>>(options()));
            assert!(got.text().contains("*i32") || got.text().contains("*f32"), "{got}");
            let mut given = zeros(session, &[3]);
            let text = session.receive_into(&mut given, options()).unwrap_err().to_string();
            let expected = "rank 0 sent a tensor of shape [2, 2], which does not fit the given one";
            assert!(text.contains(expected), "{text}");
        }
        _ => {}
    });
}

#[test]
fn wrong_objects_fail_on_every_rank() {
    let plan = Plan::nodes(&[2, 1]).set("worker.max_object_bytes=64KiB");
    run_job(&plan, |session| {
        let large = vec![7u8; 70_000];
        let expected =
            "the object of rank 1 has 70003 bytes, but its worker.max_object_bytes allows 65536";
        let own = (session.rank() == 1).then_some(&large);
        let reported = failure(session.broadcast_object(own, BroadcastOptions::from_rank(1)));
        assert!(reported.text().contains(expected), "{reported}");
        let mine = if session.rank() == 1 { large.clone() } else { vec![1] };
        let reported = failure(session.allgather_object(&mine, AllgatherOptions::default()));
        assert!(reported.text().contains(expected) && reported.rank == Some(Rank(1)), "{reported}");
        goes_on(session);
        // Rank 0 sends a number, but the others expect a text.
        let own = (session.rank() == 0).then_some(300u64);
        if session.rank() == 0 {
            session.broadcast_object(own.as_ref(), BroadcastOptions::from_rank(0)).unwrap();
        } else {
            let text = session.broadcast_object::<String>(None, BroadcastOptions::from_rank(0));
            let text = text.unwrap_err().to_string();
            assert!(text.contains("the object of rank 0 can't be read as"), "{text}");
        }
        goes_on(session);
    });
}

#[test]
fn a_wrong_sparse_index_is_reported_to_all() {
    run_job(&Plan::nodes(&[2, 1]), |session| {
        let bad = session.rank() == 2;
        let indices = vec![0, if bad { 10 } else { 9 }, if bad { 77 } else { 1 }];
        let rows = SparseRows { rows: 10, cols: 1, indices, values: vec![1.0f32; 3] };
        let reported = failure(session.sparse_allreduce(&rows, SparseOptions::default()));
        assert_eq!((reported.kind, reported.rank), (FailureKind::Invalid, Some(Rank(2))));
        let expected = "index 10 of a sparse allreduce is out of range: its tensor has 10 rows \
                        (2 such indices)";
        assert!(reported.text().contains(expected), "{reported}");
        goes_on(session);
        // One rank has a different number of columns.
        let cols = if session.rank() == 1 { 2 } else { 1 };
        let values = vec![1.0f32; cols];
        let rows = SparseRows { rows: 10, cols, indices: vec![3], values };
        let reported = failure(session.sparse_allreduce(&rows, SparseOptions::default()));
        assert!(reported.text().contains("ranks disagree on a sparse allreduce"), "{reported}");
        for line in ["rank 0: average of f32 [10, 1]", "rank 1: average of f32 [10, 2]"] {
            assert!(reported.text().contains(line), "{reported}");
        }
        goes_on(session);
    });
}

/// A session never makes such requests; the coordinator reports them to all, with the rank.
#[test]
fn invalid_splits_are_reported_to_all() {
    use gradwire_tests::cluster::Cluster;
    let plan = Plan::patient(&[1, 1]);
    let cluster = Cluster::start(&plan).unwrap();
    let honest = cluster.start_ranks([0], |session| {
        let name = |n: u32| AlltoallOptions::default().name(format!("rows.{n}"));
        (0..3)
            .map(|n| failure(session.alltoall(&zeros(session, &[4]), name(n))))
            .collect::<Vec<_>>()
    });
    let mut raw = RawWorker::attach(&cluster, 1).unwrap();
    raw.add_segment(4096).unwrap();
    let cases = [
        (vec![1, 2, 1], 4, "rank 1 gave 3 splits for 2 members"),
        (vec![3, 3], 4, "the splits of rank 1 add up to 6 rows, but its tensor has 4"),
        (vec![], 3, "the 3 rows of rank 1 can't be split evenly between 2 members"),
    ];
    for (n, (list, rows, _)) in (0..).zip(&cases) {
        let asked = Request { list: list.clone(), ..f32s(Collective::Alltoall, &[*rows]) };
        raw.submit(&submission(n, &format!("rows.{n}"), asked)).unwrap();
        let (tickets, reported) = raw.failed().unwrap();
        assert_eq!((tickets, reported.rank), (vec![n], Some(Rank(1))), "{reported}");
    }
    for (reported, (.., expected)) in honest.join().unwrap()[0].iter().zip(&cases) {
        assert_eq!((reported.kind, reported.rank), (FailureKind::Invalid, Some(Rank(1))));
        assert!(reported.text().contains(expected), "{reported}");
    }
}
