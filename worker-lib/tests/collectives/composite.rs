//! Collectives that consist of others: objects, sparse allreduces, Adasum.

use gradwire_worker::{
    AdasumOptions, AllgatherOptions, BarrierOptions, BroadcastOptions, DType, FailureKind,
    GradwireError, Handle, JoinOptions, ProcessSet, ReduceOp, Session, SparseOptions, SparseRows,
    half::{bf16, f16},
};
use serde::{Deserialize, Serialize};

use crate::{fake::FakeDaemon, ranks, ranks_with, text};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Plan {
    name: String,
    rates: Vec<f64>,
}

fn plan(rank: u32) -> Plan {
    Plan { name: format!("of {rank}"), rates: vec![0.1; rank as usize * 100] }
}

#[test]
fn objects_are_given_to_all() {
    ranks(3, |session| {
        let rank = session.rank();
        let own = (rank == 2).then(|| plan(2));
        let options = || BroadcastOptions::from_rank(2);
        assert_eq!(session.broadcast_object(own.as_ref(), options()).unwrap(), plan(2));
        let all = session.allgather_object(&plan(rank), AllgatherOptions::default()).unwrap();
        assert_eq!(all, [plan(0), plan(1), plan(2)]);
        // An empty object.
        session.broadcast_object(Some(&()), options()).unwrap();

        // Ranks wait in different orders: the parts run without the waits.
        let one = session.broadcast_object_async(own.as_ref(), options().name("one")).unwrap();
        let two =
            session.allgather_object_async(&plan(rank), AllgatherOptions::named("two")).unwrap();
        let (one, two) = if rank == 0 {
            let two = two.wait().unwrap();
            (one.wait().unwrap(), two)
        } else {
            (one.wait().unwrap(), two.wait().unwrap())
        };
        assert_eq!((one, two.len()), (plan(2), 3));
    });
}

#[test]
fn a_too_large_object_is_reported_to_all() {
    // Only the sender's limit counts.
    let settings = |rank, builder: gradwire_worker::SessionBuilder| {
        builder.max_object_bytes(if rank == 1 { 1000 } else { 10 })
    };
    ranks_with(3, settings, |session| {
        let large = vec![7u8; 5000];
        let options = || BroadcastOptions::from_rank(1);
        let one = session.broadcast_object(Some(&large), options()).unwrap_err();
        let own = if session.rank() == 1 { large } else { vec![1] };
        let all = session.allgather_object(&own, AllgatherOptions::default()).unwrap_err();
        for error in [one, all] {
            let failure = error.failure().unwrap();
            assert_eq!((failure.kind, failure.rank.map(|r| r.0)), (FailureKind::Invalid, Some(1)));
            let text = failure.to_string();
            assert!(text.contains("5002 bytes") && text.contains("allows 1000"), "{text}");
            assert!(failure.tensor.ends_with("-object.#1"), "{text}");
        }
        let fits = vec![1u8; 500];
        assert_eq!(session.broadcast_object(Some(&fits), options()).unwrap(), fits);
    });
}

#[test]
fn a_missing_object_or_another_type_is_an_error() {
    ranks(2, |session| {
        let options = || BroadcastOptions::from_rank(0);
        if session.rank() == 0 {
            let error = text(session.broadcast_object(None::<&u8>, options()));
            assert!(
                error.contains("rank 0 is the root of a broadcast but gives no object"),
                "{error}"
            );
            session.broadcast_object(Some(&"text".to_owned()), options().name("x")).unwrap();
        } else {
            let error = text(session.broadcast_object(None::<&u8>, options().name("x")));
            assert!(
                error.contains("object of rank 0 can't be read as u8: 4 of its 5 bytes"),
                "{error}"
            );
        }
        let error = text(session.broadcast_object(Some(&1u8), BroadcastOptions::from_rank(5)));
        assert!(error.contains("the root, rank 5, does not exist"), "{error}");
    });
}

fn rows(cols: usize, indices: &[usize], values: &[f32]) -> SparseRows<f32> {
    SparseRows { rows: 100, cols, indices: indices.to_vec(), values: values.to_vec() }
}

#[test]
fn rows_are_added_up_in_the_smaller_form() {
    ranks(3, |session| {
        let own = match session.rank() {
            0 => rows(2, &[5, 1, 5], &[1.0, 2.0, 3.0, 4.0, 10.0, 20.0]),
            1 => rows(2, &[5], &[100.0, 200.0]),
            _ => rows(2, &[], &[]),
        };
        let sum = |name: &str| SparseOptions::named(name).op(ReduceOp::Sum);
        let reduced = session.sparse_allreduce(&own, sum("few")).unwrap();
        assert!(!reduced.dense);
        assert_eq!(reduced.rows, rows(2, &[1, 5], &[3.0, 4.0, 111.0, 222.0]));
        // The average is over all ranks, with or without the row.
        let handle = session.sparse_allreduce_async(own, SparseOptions::default()).unwrap();
        assert_eq!(handle.wait().unwrap().rows.values, [1.0, 4.0 / 3.0, 37.0, 74.0]);

        let all: Vec<usize> = (0..100).collect();
        let own = rows(3, &all, &[f32::from(session.rank() as u8); 300]);
        let reduced = session.sparse_allreduce(&own, sum("many")).unwrap();
        assert!(reduced.dense);
        assert_eq!(reduced.rows, rows(3, &all, &[3.0; 300]));
        assert_eq!((session.stats().sparse_rows, session.stats().sparse_dense), (2, 1));
    });
}

#[test]
fn a_bad_index_fails_on_all_ranks() {
    ranks(3, |session| {
        let indices: &[usize] = if session.rank() == 1 { &[3, 100, 200] } else { &[1, 2, 3] };
        let own = rows(1, indices, &[1.0; 3]);
        let error = session.sparse_allreduce(&own, SparseOptions::default()).unwrap_err();
        let failure = error.failure().unwrap();
        assert_eq!(failure.rank.map(|rank| rank.0), Some(1));
        let text = failure.to_string();
        assert!(text.contains("index 100") && text.contains("100 rows"), "{text}");
        assert!(text.contains("2 such indices"), "{text}");
        assert_eq!(failure.tensor, "sparse-allreduce.#1");

        // Different shapes: all ranks get the same error, with the shape of each.
        let own = rows(session.rank() as usize + 1, &[], &[]);
        let error = session.sparse_allreduce(&own, SparseOptions::default()).unwrap_err();
        assert_eq!(error.failure().unwrap().kind, FailureKind::Disagreement);
        assert!(error.to_string().contains("rank 2: average of f32 [100, 3]"), "{error}");

        let short = rows(2, &[1, 2], &[1.0; 3]);
        let error = self::text(session.sparse_allreduce(&short, SparseOptions::default()));
        assert!(error.contains("2 rows of 2 columns do not match 3 values"), "{error}");
        let own = rows(1, &[], &[]);
        let max = SparseOptions::default().op(ReduceOp::Max);
        let error = self::text(session.sparse_allreduce(&own, max));
        assert!(error.contains("not max"), "{error}");
        session.barrier().unwrap();
    });
}

#[test]
fn rows_without_columns_are_never_dense() {
    // BOUND: a dense result would list a million million rows.
    ranks(2, |session| {
        let indices = vec![session.rank() as usize, 1 << 39];
        let own = SparseRows::<f32> { rows: 1 << 40, cols: 0, indices, values: Vec::new() };
        let reduced = session.sparse_allreduce(&own, SparseOptions::default()).unwrap();
        assert!(!reduced.dense);
        assert_eq!((reduced.rows.indices, reduced.rows.values), (vec![0, 1, 1 << 39], vec![]));
    });
}

/// Pseudorandom values for a rank.
fn values(rank: u32, elements: usize) -> Vec<f64> {
    let mut bits = u64::from(rank + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        bits ^= bits << 13;
        bits ^= bits >> 7;
        bits ^= bits << 17;
        (bits % 2001) as f64 / 1000.0 - 1.0
    };
    (0..elements).map(|_| next()).collect()
}

/// The formula along the tree, in f64.
fn adasum(tensors: &[Vec<f64>]) -> Vec<f64> {
    if let [one] = tensors {
        return one.clone();
    }
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
    let above: Vec<Vec<f64>> = tensors
        .chunks(2)
        .map(|pair| {
            let [a, b] = pair else { return pair[0].clone() };
            let factor = |n: f64| if n == 0.0 { 1.0 } else { 1.0 - dot(a, b) / (2.0 * n) };
            let (of_a, of_b) = (factor(dot(a, a)), factor(dot(b, b)));
            a.iter().zip(b).map(|(a, b)| of_a * a + of_b * b).collect()
        })
        .collect();
    adasum(&above)
}

#[test]
fn adasum_is_its_formula_for_any_number_of_ranks() {
    const ELEMENTS: usize = 13; // not a multiple of any size
    for size in 1..=5 {
        let expected = adasum(&(0..size).map(|rank| values(rank, ELEMENTS)).collect::<Vec<_>>());
        ranks(size, |session| {
            let own = values(session.rank(), ELEMENTS);
            let mut tensor = session.tensor(&own, &[ELEMENTS]).unwrap();
            session.adasum(&mut tensor, AdasumOptions::default()).unwrap();
            for (got, want) in tensor.as_slice().iter().zip(&expected) {
                assert!((got - want).abs() < 1e-12, "{size} ranks: {got} {want}");
            }
            // SAME
            let all = session.allgather(&tensor, AllgatherOptions::default()).unwrap().tensor;
            for other in all.as_slice().chunks_exact(ELEMENTS) {
                assert_eq!(other, tensor.as_slice());
            }
            let half: Vec<f16> = own.iter().map(|&v| f16::from_f64(v)).collect();
            let tensor = session.tensor(&half, &[1, ELEMENTS]).unwrap();
            let handle = session.adasum_async(tensor, AdasumOptions::named("half")).unwrap();
            for (got, want) in handle.wait().unwrap().as_slice().iter().zip(&expected) {
                assert!((got.to_f64() - want).abs() < 0.01, "{size} ranks: {got} {want}");
            }
        });
    }
}

#[test]
fn adasum_of_nothing_and_of_zeros() {
    ranks(3, |session| {
        let mut empty = session.zeros::<f32>(&[0]).unwrap();
        session.adasum(&mut empty, AdasumOptions::default()).unwrap();
        // Fewer elements than ranks, and no NaN from zeros.
        let value = if session.rank() == 1 { 2.0 } else { 0.0 };
        let mut tensor = session.tensor(&[bf16::from_f32(value)], &[]).unwrap();
        session.adasum(&mut tensor, AdasumOptions::default()).unwrap();
        assert_eq!(tensor.as_slice(), [bf16::from_f32(2.0)]);
        // Also for shared buffers.
        let buffer = session.buffer(DType::F32, &[3]).unwrap();
        let handle = session.adasum_async(buffer.into_shared(), AdasumOptions::default()).unwrap();
        assert_eq!(handle.wait().unwrap().byte_len(), 12);
        let mut whole = session.zeros::<i32>(&[1]).unwrap();
        let error = text(session.adasum(&mut whole, AdasumOptions::default()));
        assert!(error.contains("adasum of i32 is not possible"), "{error}");
    });
}

#[test]
fn adasum_of_different_tensors_fails_everywhere() {
    ranks(3, |session| {
        let rank = session.rank();
        let fails = |error: GradwireError, name: &str, lines: [&str; 3]| {
            let failure = error.failure().unwrap();
            assert_eq!(failure.kind, FailureKind::Disagreement);
            assert_eq!(failure.tensor, name);
            for line in lines {
                assert!(failure.text().contains(line), "{failure}");
            }
        };
        // More or fewer elements, the same number in another shape, and another type.
        let rows = [4, 3, 4][rank as usize];
        let error = session
            .adasum(&mut session.zeros::<f32>(&[rows]).unwrap(), AdasumOptions::named("rows"))
            .unwrap_err();
        fails(error, "rows", ["rank 0: f32 [4]", "rank 1: f32 [3]", "rank 2: f32 [4]"]);
        let shape: &[usize] = if rank == 2 { &[3, 2] } else { &[2, 3] };
        let tensor = session.zeros::<f64>(shape).unwrap();
        let error = session.adasum_async(tensor, AdasumOptions::default()).unwrap().wait();
        let lines = ["rank 0: f64 [2, 3]", "rank 1: f64 [2, 3]", "rank 2: f64 [3, 2]"];
        fails(error.unwrap_err(), "adasum.#1", lines);
        let dtype = if rank == 0 { DType::Bf16 } else { DType::F16 };
        let mut buffer = session.buffer(dtype, &[1]).unwrap();
        let error = session.adasum(&mut buffer, AdasumOptions::default()).unwrap_err();
        fails(error, "adasum.#2", ["rank 0: bf16 [1]", "rank 1: f16 [1]", "rank 2: f16 [1]"]);
        session.barrier().unwrap();
    });
}

/// Releases a held operation until it has ended: its thread may submit it late.
fn release(session: &Session, set: &ProcessSet, held: Handle<Vec<u8>>) {
    while !held.is_finished() {
        let options = BarrierOptions::named("release").process_set(set);
        session.barrier_with(options).unwrap();
    }
    held.wait().unwrap();
}

#[test]
fn operations_of_several_parts_are_limited() {
    const LIMIT: usize = 256;
    let (_daemon, session) = FakeDaemon::alone();
    // BOUND: from several threads at once.
    let held: Vec<_> = std::thread::scope(|scope| {
        let start = |thread: usize| {
            let session = &session;
            scope.spawn(move || -> Vec<_> {
                let options = |i: usize| AllgatherOptions::named(format!("hold.{thread}.{i}"));
                (0..40).map(|i| session.allgather_object_async(&1u8, options(i))).collect()
            })
        };
        let threads: Vec<_> = (0..8).map(start).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let (started, refused): (Vec<_>, Vec<_>) = held.into_iter().partition(Result::is_ok);
    assert_eq!((started.len(), refused.len()), (LIMIT, 320 - LIMIT));
    for refused in refused {
        assert!(text(refused).contains("256 operations of several parts"));
    }
    let all = session.global_process_set();
    started.into_iter().for_each(|handle| release(&session, &all, handle.unwrap()));
    // Refused operations took no number.
    session.allgather_object(&1u8, AllgatherOptions::default()).unwrap();
}

#[test]
fn a_set_with_parts_in_flight_can_not_be_removed() {
    let (_daemon, session) = FakeDaemon::alone();
    let set = session.add_process_set(&[0]).unwrap();
    let other = session.add_process_set(&[0]).unwrap();
    let options = AllgatherOptions::named("hold").process_set(&set);
    let held = session.allgather_object_async(&1u8, options).unwrap();
    let error = text(session.remove_process_set(set.clone()));
    assert!(error.contains("can't remove process set 1"), "{error}");
    assert!(error.contains("while 1 of its operations of several parts"), "{error}");
    session.remove_process_set(other).unwrap();
    release(&session, &set, held);
    session.remove_process_set(set).unwrap();
}

#[test]
fn names_are_checked_and_dropped_handles_end() {
    ranks(2, |session| {
        let tensor = |session: &Session| session.zeros::<f32>(&[4]).unwrap();
        let long = AdasumOptions::named("x".repeat(1020));
        let error = text(session.adasum(&mut tensor(&session), long));
        assert!(error.contains("may have 1008 bytes"), "{error}");
        // Nobody waits for it, but it completes.
        drop(session.adasum_async(tensor(&session), AdasumOptions::named("dropped")).unwrap());
        session.barrier().unwrap();
    });
    // An operation that can't end yet.
    let (_daemon, session) = FakeDaemon::alone();
    let options = || AllgatherOptions::named("hold");
    let held = session.allgather_object_async(&1u8, options()).unwrap();
    let error = text(session.allgather_object(&1u8, options()));
    assert!(error.contains("'hold' is already in flight"), "{error}");
    assert!(error.matches("allgather-object").count() == 2, "{error}");
    let error = text(session.join(JoinOptions::default()));
    assert!(error.contains("while 1 of its operations"), "{error}");
    let held = match held.wait_timeout(std::time::Duration::from_millis(20)) {
        Err(gradwire_worker::WaitError::Timeout { handle, .. }) => handle,
        other => panic!("{other:?}"),
    };
    assert!(!held.is_finished());
    session.abort("enough of it");
    let error = held.wait().unwrap_err();
    assert!(
        matches!(&error, GradwireError::Failed(failure) if failure.what == "enough of it"),
        "{error}"
    );
}

/// An object whose deserialization panics.
#[derive(Debug, Serialize)]
struct Trap;

impl<'de> Deserialize<'de> for Trap {
    fn deserialize<D: serde::Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
        panic!("a trap");
    }
}

#[test]
fn a_panic_in_a_separate_thread_is_reported() {
    ranks(2, |session| {
        let held = session.allreduce_async(
            session.zeros::<f32>(&[1]).unwrap(),
            gradwire_worker::AllreduceOptions::named("hold"),
        );
        if session.rank() == 0 {
            let options = BroadcastOptions::from_rank(0).name("trap");
            let handle = session.broadcast_object_async(Some(&Trap), options).unwrap();
            let error = handle.wait().unwrap_err().to_string();
            assert!(error.contains("'trap' panicked"), "{error}");
        } else {
            // The same object as another type, which can be read.
            let options = BroadcastOptions::from_rank(0).name("trap");
            session.broadcast_object(None::<&()>, options).unwrap();
        }
        let error = held.unwrap().wait().unwrap_err();
        let kind = error.failure().unwrap().kind;
        let own = session.rank() == 0;
        assert_eq!(kind, if own { FailureKind::Internal } else { FailureKind::WorkerLost });
    });
}

#[test]
fn a_panic_in_the_callers_thread_is_reported() {
    ranks(2, |session| {
        let options = || BroadcastOptions::from_rank(0).name("trap");
        if session.rank() == 0 {
            let call = || session.broadcast_object(Some(&Trap), options());
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).is_err());
            let error = session.barrier().unwrap_err().to_string();
            assert!(error.contains("'trap' panicked"), "{error}");
        } else {
            session.broadcast_object(None::<&()>, options()).unwrap();
            // TELL: it might have been in the middle.
            let waits = session.barrier_async().unwrap();
            let error = match waits.wait_timeout(std::time::Duration::from_secs(20)) {
                Err(gradwire_worker::WaitError::Failed(error)) => error,
                other => panic!("{other:?}"),
            };
            assert_eq!(error.failure().unwrap().kind, FailureKind::WorkerLost);
        }
    });
}
