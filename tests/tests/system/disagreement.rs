//! Ranks with different requests: every rank gets the requests of all, and the job continues
//! (TELL).

use std::sync::{Arc, Barrier};

use gradwire_daemon::Ending;
use gradwire_proto::{
    Collective, DType, Failure, FailureKind, Rank, ReduceOp, Request, Shape,
    pb::daemon_message::Message as Reply,
};
use gradwire_tests::{
    calls::failure,
    cluster::{Cluster, Plan},
    raw::{RawWorker, submission},
};
use gradwire_worker::{
    AllgatherOptions, AllreduceOptions, BroadcastOptions, GradwireError, Session,
};

fn sum(name: &str) -> AllreduceOptions {
    AllreduceOptions::named(name).op(ReduceOp::Sum)
}

fn usual() -> Request {
    Request::allreduce(DType::F32, Shape::new(&[2, 3]).unwrap(), ReduceOp::Sum)
}

/// Makes the call and returns its result.
fn ask(session: &Session, name: &str, request: &Request) -> Result<(), GradwireError> {
    let shape: Vec<usize> = request.shape.dims().iter().map(|dim| *dim as usize).collect();
    let mut buffer = session.buffer(request.dtype, &shape)?;
    if request.collective == Collective::Broadcast {
        let options = BroadcastOptions::from_rank(request.root.0).name(name);
        return session.broadcast(&mut buffer, options);
    }
    let options = AllreduceOptions::named(name).op(request.reduce_op);
    let options = options.prescale(request.prescale).postscale(request.postscale);
    session.allreduce(&mut buffer, options)
}

/// Checks that the job continues, with an allreduce of all ranks.
fn goes_on(session: &Session) {
    let mut tensor = session.tensor(&[session.rank() as i32], &[1]).unwrap();
    session.allreduce(&mut tensor, sum("after")).unwrap();
    let all = (0..session.size() as i32).sum::<i32>();
    assert_eq!(tensor.as_slice(), [all]);
}

fn finish(cluster: Cluster) {
    for ending in cluster.finish().unwrap() {
        assert_eq!(ending, Ending::Finished);
    }
}

/// The odd rank's request, the beginning of the error, and the marked cells.
type Case = (Request, &'static str, &'static [&'static str]);

fn cases() -> Vec<Case> {
    let shape = |dims: &[u64]| Shape::new(dims).unwrap();
    vec![
        (Request { dtype: DType::F64, ..usual() }, "dtype\n", &["*f64"]),
        (Request { shape: shape(&[3, 2]), ..usual() }, "shape\n", &["*[3, 2]"]),
        (Request { shape: shape(&[]), ..usual() }, "shape\n", &["*[]"]),
        (Request::broadcast(DType::F32, shape(&[2, 3]), Rank(0)), "collective\n", &["*broadcast"]),
        (Request { reduce_op: ReduceOp::Average, ..usual() }, "op\n", &["*average"]),
        (Request { prescale: 0.5, ..usual() }, "prescale\n", &["*0.5"]),
        (Request { postscale: 0.25, ..usual() }, "postscale\n", &["*0.25"]),
        (
            Request { dtype: DType::I8, shape: shape(&[7]), ..usual() },
            "dtype and shape\n",
            &["*i8", "*[7]"],
        ),
    ]
}

/// The rows of the table: the ranks, and their cells.
fn rows(failure: &Failure) -> Vec<(String, Vec<String>)> {
    let split = |line: &str| {
        let mut cells = line.split("  ").map(str::trim).filter(|c| !c.is_empty()).map(Into::into);
        (cells.next().unwrap_or_default(), cells.collect())
    };
    failure.details.lines.iter().skip(1).map(|line| split(line)).collect()
}

#[test]
fn every_difference_is_reported_to_all_ranks() {
    let cluster = Cluster::start(&Plan::nodes(&[2, 1])).unwrap();
    let failures = cluster
        .ranks(|session| {
            let mut failures = Vec::new();
            // The odd rank either shares its node with another rank or is alone on it.
            for odd in [1, 2] {
                for (index, (request, ..)) in cases().into_iter().enumerate() {
                    let mine = if session.rank() == odd { request } else { usual() };
                    let name = format!("tensor.{odd}.{index}");
                    failures.push((odd, index, failure(ask(session, &name, &mine))));
                    goes_on(session);
                    // The name can be used again.
                    ask(session, &name, &usual()).unwrap();
                }
            }
            failures
        })
        .unwrap();
    for (odd, index, failure) in &failures[0] {
        let (_, head, cells) = cases()[*index];
        assert_eq!(failure.kind, FailureKind::Disagreement, "{failure}");
        assert_eq!(failure.tensor, format!("tensor.{odd}.{index}"));
        let begin = format!("the ranks disagree on {head}");
        assert!(failure.text().starts_with(&begin), "{failure}");
        let (others, theirs) = if *odd == 1 { ("0,2", "1") } else { ("0-1", "2") };
        let rows = rows(failure);
        let row = |ranks: &str| &rows.iter().find(|(r, _)| r == ranks).expect(ranks).1;
        let marked: Vec<&String> = row(theirs).iter().filter(|c| c.starts_with('*')).collect();
        assert_eq!(marked, cells, "{failure}");
        // The last cell is the line of the call.
        assert_eq!(row(others).len(), cells.len() + 1, "only differences are shown: {failure}");
        assert!(!row(others).iter().any(|cell| cell.contains('*')), "{failure}");
        assert!(failure.details.hint.contains("the same call on every rank"), "{failure}");
    }
    assert!(failures.iter().all(|all| *all == failures[0]), "every rank receives the same");
    finish(cluster);
}

#[test]
fn roots_that_differ_are_named_for_each_rank() {
    let cluster = Cluster::start(&Plan::nodes(&[1, 1, 1])).unwrap();
    let failures = cluster
        .ranks(|session| {
            let shape = Shape::new(&[4]).unwrap();
            let request = Request::broadcast(DType::U8, shape, Rank(session.rank()));
            let failure = failure(ask(session, "start", &request));
            goes_on(session);
            failure
        })
        .unwrap();
    for failure in &failures {
        assert!(failure.text().starts_with("the ranks disagree on root\n"), "{failure}");
        let rows = rows(failure);
        // If all rows are equally frequent, that of the lowest rank counts as the usual one.
        for (rank, root) in [("0", "0"), ("1", "*1"), ("2", "*2")] {
            let row = rows.iter().find(|(ranks, _)| ranks == rank).unwrap();
            assert!(row.1.iter().any(|cell| cell == root), "{failure}");
        }
        assert_eq!(failure, &failures[0]);
    }
    finish(cluster);
}

/// The session refuses this itself, so the test uses a worker without a session.
#[test]
fn a_name_submitted_twice_fails_for_all() {
    let cluster = Cluster::start(&Plan::patient(&[2, 1])).unwrap();
    // The messages of a node arrive in order: once a later tensor of node 0 is done, the
    // coordinator knows both submissions. Only then does the last rank submit the tensor.
    let others = cluster.start_ranks([0, 2], |session| {
        if session.rank() == 2 {
            ask(session, "later", &usual()).unwrap();
            return failure(ask(session, "twice", &usual()));
        }
        let tensor = session.zeros::<f32>(&[2, 3]).unwrap();
        let twice = session.allreduce_async(tensor, sum("twice")).unwrap();
        ask(session, "later", &usual()).unwrap();
        failure(twice.wait().map(drop))
    });
    let mut raw = RawWorker::attach(&cluster, 1).unwrap();
    raw.add_segment(4096).unwrap();
    for (ticket, name) in [(1, "twice"), (2, "twice"), (3, "later")] {
        raw.submit(&submission(ticket, name, usual())).unwrap();
    }

    let mut failed = Vec::new();
    let mut reported = Vec::new();
    while !(failed.contains(&1) && failed.contains(&2)) {
        let Some((Reply::TensorFailed(message), _)) = raw.receive().unwrap() else {
            panic!("expected the failures of the tickets");
        };
        failed.extend(message.tickets);
        reported.push(Failure::from(message.failure.unwrap()));
    }
    let others = others.join().unwrap();
    for failure in reported.iter().chain(&others) {
        assert_eq!((failure.kind, failure.tensor.as_str()), (FailureKind::Disagreement, "twice"));
        assert!(failure.text().contains("submitted again by"), "{failure}");
        assert!(failure.text().contains("rank 1"), "{failure}");
    }
    let times = rows(&others[0]);
    let has = |ranks: &str, times_of: &str| {
        times.iter().any(|(row, cells)| row == ranks && cells.iter().any(|cell| cell == times_of))
    };
    assert!(has("1", "*2") && has("0,2", "1"), "{}", others[0]);
}

#[test]
fn a_name_in_flight_is_refused_by_the_session() {
    let cluster = Cluster::start(&Plan::nodes(&[1, 1])).unwrap();
    let late = Arc::new(Barrier::new(2));
    cluster
        .ranks(move |session| {
            let tensor = || session.tensor(&[1i32], &[1]).unwrap();
            if session.rank() == 1 {
                late.wait();
                assert_eq!(
                    session.allreduce_async(tensor(), sum("w")).unwrap().wait().unwrap().as_slice(),
                    [2]
                );
                return;
            }
            let first = session.allreduce_async(tensor(), sum("w")).unwrap();
            // The error describes both submissions.
            let other = session.tensor(&[1.0f64; 2], &[2]).unwrap();
            let second = AllgatherOptions::default().name("w");
            let second = session.allgather(&other, second).unwrap_err().to_string();
            for part in [
                "tensor 'w' is already in flight on this rank",
                "allreduce (sum) of i32 [1] was submitted as operation 1 at ",
                "and now allgather of f64 [2] has the same name",
            ] {
                assert!(second.contains(part), "{part:?} is not in: {second}");
            }
            late.wait();
            assert_eq!(first.wait().unwrap().as_slice(), [2]);
        })
        .unwrap();
    finish(cluster);
}

/// The session refuses this itself. The coordinator refuses it if all ranks agree on it.
#[test]
fn a_root_that_is_not_in_the_job_is_refused() {
    let cluster = Cluster::start(&Plan::patient(&[1])).unwrap();
    let workers = cluster.ranks(|session| {
        let result = session.broadcast_slice(&mut [0u8], BroadcastOptions::from_rank(2));
        result.unwrap_err().to_string()
    });
    let text = &workers.unwrap()[0];
    assert!(
        text.contains("the root, rank 2, does not exist: the job has only ranks 0 to 0"),
        "{text}"
    );
    finish(cluster);

    let cluster = Cluster::start(&Plan::patient(&[1, 1])).unwrap();
    let attach = |rank| {
        let mut raw = RawWorker::attach(&cluster, rank).unwrap();
        raw.add_segment(4096).unwrap();
        raw
    };
    let workers = [0, 1].map(attach);
    for raw in &workers {
        let request = Request::broadcast(DType::U8, Shape::default(), Rank(7));
        raw.submit(&submission(5, "start", request)).unwrap();
    }
    for raw in &workers {
        let Some((Reply::TensorFailed(failed), _)) = raw.receive().unwrap() else {
            panic!("expected a failure of the tensor");
        };
        assert_eq!(failed.tickets, [5]);
        let failure = Failure::from(failed.failure.unwrap());
        assert_eq!((failure.kind, failure.tensor.as_str()), (FailureKind::Invalid, "start"));
        assert!(
            failure.text().contains("rank 7 of this broadcast is not in process set 0"),
            "{failure}"
        );
    }
}

#[test]
fn a_departed_rank_is_named_with_waiting_tensors() {
    let cluster = Cluster::start(&Plan::nodes(&[2, 1])).unwrap();
    let reported = Barrier::new(2);
    let failures = cluster
        .ranks(move |session| {
            goes_on(session);
            if session.rank() == 1 {
                // It leaves in good order, while tensors of its own node and of another one wait
                // for it.
                session.shutdown().unwrap();
                let after = session.barrier().unwrap_err();
                assert!(matches!(after, GradwireError::Closed), "{after}");
                return None;
            }
            let waiting = failure(ask(session, "waiting", &usual()));
            // A later call fails at once.
            let later = failure(ask(session, "later", &usual()));
            assert_eq!((later.kind, later.rank), (FailureKind::RankLeft, Some(Rank(1))));
            // Neither rank leaves before this.
            reported.wait();
            Some(waiting)
        })
        .unwrap();
    for failure in [&failures[0], &failures[2]] {
        let failure = failure.as_ref().unwrap();
        assert_eq!((failure.kind, failure.rank), (FailureKind::RankLeft, Some(Rank(1))));
        assert_eq!((failure.host.as_str(), failure.tensor.as_str()), ("node-0", "waiting"));
        assert!(failure.text().contains("has left the job"), "{failure}");
    }
    finish(cluster);
}

#[test]
fn impossible_requests_are_refused_at_once() {
    let cluster = Cluster::start(&Plan::nodes(&[1])).unwrap();
    cluster
        .ranks(|session| {
            let text = |options: AllreduceOptions| {
                let mut tensor = session.tensor(&[1i32, 2], &[2]).unwrap();
                session.allreduce(&mut tensor, options).unwrap_err().to_string()
            };
            let or = || sum("w").op(ReduceOp::BitOr);
            let cases = [
                (or().prescale(0.5), "prescale: a factor of 0.5 can't be applied to bits"),
                (or().postscale(2.0), "postscale: a factor of 2 can't be applied to bits"),
                (sum(""), "1 to 1024 bytes"),
                (sum("a\nb"), "without control characters"),
                (sum(&"x".repeat(1025)), "1 to 1024 bytes"),
            ];
            for (options, expected) in cases {
                let text = text(options);
                assert!(text.contains(expected), "{text}");
            }
            let nan = session.allreduce_slice(&mut [1.0f32], sum("w").prescale(f64::NAN));
            assert!(nan.unwrap_err().to_string().contains("NaN is not a finite number"));
            // Large slices are cut into several parts, and are refused before the first one.
            let mut large = vec![1i32; 1 << 20];
            let half = session.allreduce_slice(&mut large, or().prescale(0.5)).unwrap_err();
            assert!(half.to_string().contains("can't be applied to bits"), "{half}");
            let long = session.allreduce_slice(&mut large, sum(&"x".repeat(1020))).unwrap_err();
            assert!(long.to_string().contains("may have 1008 bytes"), "{long}");
            let wrong = session.tensor(&[1u8, 2, 3], &[2, 2]).unwrap_err().to_string();
            assert!(wrong.contains("shape [2, 2] has 4 elements, but 3 were given"), "{wrong}");
            let huge = session.zeros::<u8>(&[usize::MAX, 2]).unwrap_err().to_string();
            assert!(huge.contains("invalid shape"), "{huge}");
            // The longest name is accepted.
            session.allreduce_slice(&mut [1i32], sum(&"x".repeat(1024))).unwrap();
            assert_eq!(session.stats().operations, 1);
        })
        .unwrap();
    finish(cluster);
}

#[test]
fn large_slices_that_differ_fail_on_all_ranks() {
    const LARGE: usize = 3 << 20;
    let cluster = Cluster::start(&Plan::nodes(&[2, 1])).unwrap();
    let failures = cluster.ranks(|session| {
        let odd = session.rank() == 2;
        let mut bytes = vec![1u8; LARGE + usize::from(odd)];
        let length = failure(session.allreduce_slice(&mut bytes, sum("large")));
        let op = if odd { ReduceOp::Max } else { ReduceOp::Sum };
        let options = AllreduceOptions::named("large").op(op);
        let ops = failure(session.allreduce_slice(&mut bytes[..LARGE], options));
        session.allreduce_slice(&mut bytes[..LARGE], sum("large")).unwrap();
        assert!(bytes[..LARGE].iter().all(|byte| *byte == 3), "no part was reduced before");
        session.shutdown().unwrap();
        (length, ops)
    });
    for (length, ops) in failures.unwrap() {
        assert_eq!((length.kind, length.tensor.as_str()), (FailureKind::Disagreement, "large"));
        // What the program gave, and not the parts of it.
        assert!(length.text().starts_with("the ranks disagree on shape\n"), "{length}");
        let shapes: Vec<_> =
            rows(&length).into_iter().map(|(ranks, cells)| (ranks, cells[0].clone())).collect();
        let expected = [("0-1", format!("[{LARGE}]")), ("2", format!("*[{}]", LARGE + 1))];
        assert_eq!(shapes, expected.map(|(ranks, shape)| (ranks.to_owned(), shape)), "{length}");
        assert_eq!((ops.kind, ops.tensor.as_str()), (FailureKind::Disagreement, "large"));
    }
    finish(cluster);
}

/// One rank's slice is cut, another's is not. Both count as the same call, and all ranks get the
/// error at once.
#[test]
fn slices_of_different_sizes_fail_on_all_ranks() {
    let cluster = Cluster::start(&Plan::nodes(&[1, 1])).unwrap();
    let failures = cluster.ranks(|session| {
        let elements = if session.rank() == 0 { 1000 } else { 3 << 20 };
        let failure = failure(session.allreduce_slice(&mut vec![1u8; elements], sum("slice")));
        goes_on(session);
        session.shutdown().unwrap();
        failure
    });
    for failure in failures.unwrap() {
        assert_eq!(failure.kind, FailureKind::Disagreement);
        assert_eq!(failure.tensor, "slice");
        assert!(failure.text().contains("disagree on shape"), "{failure}");
        assert!(failure.text().contains("[1000]"), "{failure}");
        assert!(failure.text().contains("[3145728]"), "{failure}");
    }
    finish(cluster);
}

/// Rank 1 is late, so the name is still in flight on rank 0. A refused call does not affect others.
#[test]
fn a_slice_with_a_name_in_flight_is_refused() {
    let cluster = Cluster::start(&Plan::nodes(&[1, 1])).unwrap();
    let refused = Arc::new(Barrier::new(2));
    let ranks = cluster.ranks(move |session| {
        let tensor = session.tensor(&[1u8], &[1]).unwrap();
        if session.rank() == 0 {
            let handle = session.allreduce_async(tensor, sum("held")).unwrap();
            let twice = session.allreduce_slice(&mut vec![1u8; 3 << 20], sum("held")).unwrap_err();
            assert!(twice.to_string().contains("'held' is already in flight"), "{twice}");
            refused.wait();
            assert_eq!(handle.wait().unwrap().as_slice(), [2]);
        } else {
            refused.wait();
            session.allreduce_async(tensor, sum("held")).unwrap().wait().unwrap();
        }
        goes_on(session);
        session.shutdown().unwrap();
    });
    ranks.unwrap();
    finish(cluster);
}
