//! A worker that makes invalid collective calls: places of groups and gathered results, room that
//! it was not asked for, process sets of which it is not a member, joins. Input that no correct
//! program can send ends the job, and the rank is named. Mistakes of a program fail only their
//! submission, and the job continues (TRUST, TELL).

use std::sync::{Arc, Barrier};

use gradwire_daemon::Ending;
use gradwire_proto::{
    Collective, DType, Failure, FailureKind, Part, Rank, ReduceOp, Request, Shape,
    pb::{self, daemon_message::Message as Reply, worker_message::Message as ToDaemon},
};
use gradwire_shm::control::{Place, Submission};
use gradwire_tests::{
    calls::request,
    cluster::{Cluster, Plan},
    raw::{RawWorker, START, submission},
};
use gradwire_worker::{AllgatherOptions, AllreduceOptions, GradwireError, Session};

const SEGMENT: u64 = 64 << 10;
const BEYOND: Place = Place { segment: 0, offset: SEGMENT - 8 };
const ODD: Place = Place { segment: 0, offset: 2 };
const NOWHERE: Place = Place { segment: 3, offset: 0 };

fn attach(cluster: &Cluster) -> RawWorker {
    let mut raw = RawWorker::attach(cluster, 1).unwrap();
    raw.add_segment(SEGMENT).unwrap();
    raw
}

/// Gathers one row of 16 f32 repeatedly, until the job ends.
fn work(session: &Session) -> Failure {
    for step in 0.. {
        let options = AllgatherOptions::default().name(format!("rows.{step}"));
        // The job may end at any of these calls.
        let own = session.zeros::<f32>(&[1, 16]);
        match own.and_then(|own| session.allgather(&own, options)) {
            Ok(gathered) => assert_eq!(gathered.rows.len(), 3),
            Err(GradwireError::Failed(failure)) => return failure,
            Err(other) => panic!("expected the job's failure, got {other}"),
        }
    }
    unreachable!("the job ended long before")
}

/// Ranks 0 and 2 work, and rank 1 sends invalid input. The job ends for all with rank 1 and
/// `expected`.
#[track_caller]
fn nonsense(expected: &str, evil: impl FnOnce(&RawWorker)) {
    let cluster = Cluster::start(&Plan::patient(&[2, 1])).unwrap();
    let survivors = cluster.start_ranks([0, 2], work).attached();
    let raw = attach(&cluster);
    evil(&raw);
    let cause = raw.aborted().unwrap();
    drop(raw);
    assert!(survivors.join().unwrap().iter().all(|failure| *failure == cause));
    for ending in cluster.finish().unwrap() {
        assert_eq!(ending, Ending::Failed(cause.clone()));
    }
    assert_eq!((cause.kind, cause.rank), (FailureKind::Protocol, Some(Rank(1))), "{cause}");
    assert!(cause.text().contains("sent nonsense to gradwired"), "{cause}");
    assert!(cause.text().contains(expected), "{expected:?} is not in: {cause}");
}

fn f32s(of: Collective, dims: &[u64]) -> Request {
    request(of, DType::F32, dims, 1)
}

#[test]
fn places_of_any_tensor_of_a_group() {
    let part = Part { dtype: DType::F64, shape: Shape::new(&[4]).unwrap() };
    let asked = Request { more: vec![part; 3], ..f32s(Collective::Allreduce, &[4]) };
    let evil = || submission(1, "evil", asked.clone());
    let at = |index: usize, place: Place| {
        let mut places = vec![START; 4];
        places[index] = place;
        places
    };
    let cases = [
        (1, BEYOND, "32 bytes at offset 65528 are not within segment 0"),
        (3, ODD, "offset 2 in segment 0 is not a multiple of the element's 8"),
        (2, NOWHERE, "segment 3 does not exist"),
    ];
    for (index, place, expected) in cases {
        nonsense(expected, |raw| {
            raw.submit(&Submission { inputs: at(index, place), ..evil() }).unwrap();
        });
        nonsense(expected, |raw| {
            raw.submit(&Submission { outputs: at(index, place), ..evil() }).unwrap();
        });
    }
}

/// If the result is larger than the input, the output's place is checked for the larger size. If
/// there is no result, the place is not checked.
#[test]
fn places_are_checked_for_their_purpose() {
    use Collective::{Allgather, Alltoall, Gather, ReduceScatter, Scatter};
    // 22 rows of 1 KiB are just over a third of the segment, so three times as much does not fit.
    let third = |of| f32s(of, &[22, 256]);
    let near = Place { segment: 0, offset: 4096 };
    let with = |asked: Request, inputs, outputs| Submission {
        inputs: vec![inputs],
        outputs: vec![outputs],
        ..submission(1, "evil", asked)
    };
    for of in [Allgather, Gather] {
        nonsense("the output of tensor 'evil': 67584 bytes at offset 4096", |raw| {
            raw.submit(&with(third(of), START, near)).unwrap();
        });
    }
    for of in [ReduceScatter, Alltoall, Scatter] {
        nonsense("the input of tensor 'evil': ", |raw| {
            raw.submit(&with(f32s(of, &[66, 256]), near, START)).unwrap();
        });
    }
}

/// Submits 16 rows where the others have one row, and waits until it is asked for room.
fn asked_for_room(raw: &RawWorker) {
    raw.submit(&submission(7, "rows.0", f32s(Collective::Allgather, &[16, 16]))).unwrap();
    let Some((Reply::Allocate(asked), _)) = raw.receive().unwrap() else {
        panic!("expected to be asked for room");
    };
    assert_eq!(asked.ticket, 7);
    let output = &asked.outputs[0];
    assert_eq!((&output.shape[..], &output.rows[..]), (&[18, 16][..], &[1, 16, 1][..]));
}

fn allocated(raw: &RawWorker, ticket: u64, places: &[Place]) {
    let place = |place: &Place| pb::Place { segment: place.segment, offset: place.offset };
    let places = places.iter().map(place).collect();
    raw.socket.say(ToDaemon::Allocated(pb::Allocated { ticket, places }), &[]).unwrap();
}

#[test]
fn invalid_room() {
    let cases: [(&[Place], &str); 5] = [
        (&[BEYOND], "1152 bytes at offset 65528 are not within segment 0"),
        (&[ODD], "offset 2 in segment 0 is not a multiple of the element's 4"),
        (&[NOWHERE], "segment 3 does not exist"),
        (&[], "0 places for 1 tensors"),
        (&[START, START], "2 places for 1 tensors"),
    ];
    for (places, expected) in cases {
        nonsense(expected, |raw| {
            asked_for_room(raw);
            allocated(raw, 7, places);
        });
    }
}

#[test]
fn room_that_was_not_asked_for() {
    let expected = "it allocated memory for submission 9, which was not requested";
    nonsense(expected, |raw| allocated(raw, 9, &[START]));
    nonsense(expected, |raw| {
        asked_for_room(raw);
        allocated(raw, 9, &[START]);
    });
    nonsense("it allocated memory for submission 7, which was not requested", |raw| {
        asked_for_room(raw);
        allocated(raw, 7, &[START]);
        allocated(raw, 7, &[START]);
    });
}

/// A rank that never makes room delays only its own tensor, and only on its own node. Its death is
/// reported (WAIT, TELL).
#[test]
fn room_that_is_never_made() {
    let cluster = Cluster::start(&Plan::patient(&[2, 1])).unwrap();
    let summed = Arc::new(Barrier::new(3));
    let both = summed.clone();
    let survivors = cluster.start_ranks([0, 2], move |session| {
        let own = session.zeros::<f32>(&[1, 16]).unwrap();
        let rows = AllgatherOptions::default().name("rows.0");
        let held = session.allgather_async(own, rows).unwrap();
        let mut sum = [1.0f32];
        let options = AllreduceOptions::named("w").op(ReduceOp::Sum);
        session.allreduce_slice(&mut sum, options).unwrap();
        both.wait();
        (sum[0], held.wait().map(drop).map_err(|error| error.to_string()))
    });
    let raw = attach(&cluster);
    asked_for_room(&raw);
    raw.submit(&submission(8, "w", f32s(Collective::Allreduce, &[1]))).unwrap();
    assert_eq!(raw.completed().unwrap().ticket, 8);
    // The sum is done on each node.
    summed.wait();
    drop(raw);
    let survivors = survivors.join().unwrap();
    // Rank 2 has its rows, unless the job ended first: another node does not wait for this room.
    assert!(survivors[0].1.is_err());
    for (sum, held) in survivors {
        // Rank 1 contributed the contents of its memory: zeros.
        assert_eq!(sum, 2.0);
        if let Err(reported) = held {
            assert!(
                reported.contains("rank 1") && reported.contains("without leaving the job"),
                "{reported}"
            );
        }
    }
    cluster.finish().unwrap();
}

/// Mistakes of a program: only the submission fails.
#[test]
fn only_invalid_sets_and_joins_fail() {
    let cluster = Cluster::start(&Plan::patient(&[2, 1])).unwrap();
    let others = cluster.start_ranks([0, 2], |session| {
        let set = session.add_process_set(&[0, 2]).unwrap();
        assert_eq!(set.id(), 1);
        let mut sum = [1u32];
        let options = AllreduceOptions::named("w").op(ReduceOp::Sum);
        session.allreduce_slice(&mut sum, options).unwrap();
        // Without rank 1, which has joined.
        session.allreduce_slice(&mut sum, AllreduceOptions::named("v").op(ReduceOp::Sum)).unwrap();
        sum[0]
    });
    let raw = attach(&cluster);
    let add = Request { list: vec![0, 2], ..Request::empty(Collective::AddProcessSet) };
    raw.submit(&submission(1, "add-process-set.#1", add.clone())).unwrap();
    let made = raw.completed().unwrap();
    assert_eq!((made.ticket, made.aux), (1, 1), "the new set's number");
    let w = || f32s(Collective::Allreduce, &[1]);
    let in_set = |ticket, process_set, asked| Submission {
        process_set,
        ..submission(ticket, "elsewhere", asked)
    };
    let joins = || Request::empty(Collective::Join);
    let to = |to| {
        let asked = f32s(Collective::SendReceive, &[1]);
        Request { root: Rank(1), list: vec![to], ..asked }
    };
    let cases = [
        (in_set(2, 9, w()), "process set 9 does not exist"),
        (in_set(3, u32::MAX, w()), "process set 4294967295 does not exist"),
        (in_set(4, 1, w()), "this rank is not a member of process set 1"),
        (in_set(5, 1, joins()), "this rank is not a member of process set 1"),
        (in_set(6, 9, joins()), "process set 9 does not exist"),
        (in_set(7, 1, add), "not a member of process set 1"),
        (in_set(8, 0, to(9)), "rank 9 is not a member of process set 0"),
        (
            in_set(9, 0, Request { root: Rank(0), ..to(2) }),
            "rank 1 is neither the sender 0 nor the receiver 2",
        ),
    ];
    let fails = |submission: &Submission, expected: &str| {
        raw.submit(submission).unwrap();
        let (tickets, reported) = raw.failed().unwrap();
        assert_eq!(
            (tickets, reported.rank),
            (vec![submission.ticket], Some(Rank(1))),
            "{reported}"
        );
        assert_eq!(reported.kind, FailureKind::Invalid, "{reported}");
        assert!(reported.text().contains(expected), "{expected:?} is not in: {reported}");
    };
    for (submission, expected) in &cases {
        fails(submission, expected);
    }
    let sum = request(Collective::Allreduce, DType::U32, &[1], 0);
    raw.submit(&submission(20, "w", sum.clone())).unwrap();
    raw.submit(&Submission { ticket: 21, ..in_set(21, 0, joins()) }).unwrap();
    fails(&in_set(22, 0, joins()), "this rank has joined process set 0");
    fails(&in_set(23, 0, sum), "this rank has joined process set 0");
    assert_eq!(others.join().unwrap(), [4, 4]);
}
