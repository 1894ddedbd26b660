//! Operations that are called before their tensors are written.

use std::time::Duration;

use gradwire_worker::{
    AdasumOptions, AllreduceOptions, Gate, GradwireError, ReduceOp, SendOptions, Session, Tensor,
    WaitError,
};

use crate::{fake::FakeDaemon, ranks, text};

fn sum() -> AllreduceOptions {
    AllreduceOptions::default().op(ReduceOp::Sum)
}

fn filled(session: &Session, value: f32) -> Tensor<f32> {
    session.tensor(&[value; 3], &[3]).unwrap()
}

#[test]
fn a_held_operation_counts_at_once() {
    ranks(2, |session| {
        let gate = Gate::new();
        let first = session.behind(&gate).allreduce_async(filled(&session, 1.0), sum()).unwrap();
        // The second call without a name, on both ranks; only one of them holds the first one.
        let second = session.allreduce_async(filled(&session, 10.0), sum()).unwrap();
        assert_eq!(second.wait().unwrap().as_slice(), [20.0; 3]);
        assert!(first.is_held() && !first.is_finished());
        assert_eq!((session.stats().operations, session.stats().in_flight), (1, 1));
        let Err(WaitError::Timeout { handle, .. }) = first.wait_timeout(Duration::from_millis(20))
        else {
            panic!("it has started");
        };
        gate.open();
        assert!(!handle.is_held());
        assert_eq!(handle.wait().unwrap().as_slice(), [2.0; 3]);
        // An open gate holds nothing back.
        let third = session.behind(&gate).allreduce_async(filled(&session, 2.0), sum()).unwrap();
        assert_eq!(third.wait().unwrap().as_slice(), [4.0; 3]);
        gate.open();
        assert_eq!(session.stats().operations, 3);
    });
}

#[test]
fn several_operations_wait_behind_one_gate() {
    ranks(3, |session| {
        let gate = Gate::new();
        let behind = session.behind(&gate);
        let handles: Vec<_> = (0..5)
            .map(|at| behind.allreduce_async(filled(&session, at as f32), sum()).unwrap())
            .collect();
        let equal = filled(&session, 4.0);
        let adasum = behind.adasum_async(equal, AdasumOptions::default()).unwrap();
        let barrier = behind.barrier_async().unwrap();
        assert!(!barrier.is_finished() && !adasum.is_finished());
        gate.clone().open();
        for (at, handle) in handles.into_iter().enumerate() {
            assert_eq!(handle.wait().unwrap().as_slice(), [3.0 * at as f32; 3]);
        }
        assert_eq!(adasum.wait().unwrap().as_slice(), [4.0; 3]);
        barrier.wait().unwrap();
    });
}

#[test]
fn a_refused_call_behind_a_gate_is_not_counted() {
    ranks(2, |session| {
        let gate = Gate::new();
        let behind = session.behind(&gate);
        if session.rank() == 0 {
            let wrong = behind.allreduce_async(filled(&session, 1.0), sum().op(ReduceOp::BitXor));
            assert!(text(wrong).contains("bit-xor of f32"));
            let wrong = behind.send_async(filled(&session, 1.0), SendOptions::to_rank(0));
            assert!(text(wrong).contains("would send to itself"));
        }
        let held = behind.allreduce_async(filled(&session, 1.0), sum()).unwrap();
        let named = || AllreduceOptions::named("held");
        let _other = behind.allreduce_async(filled(&session, 1.0), named()).unwrap();
        let twice = session.allreduce_async(filled(&session, 1.0), named());
        assert!(text(twice).contains("'held' is already in flight"));
        gate.open();
        assert_eq!(held.wait().unwrap().as_slice(), [2.0; 3]);
    });
}

#[test]
fn a_failed_gate_fails_waiting_and_later_calls() {
    ranks(2, |session| {
        let gate = Gate::new();
        let behind = session.behind(&gate);
        let held =
            behind.allreduce_async(filled(&session, 1.0), AllreduceOptions::named("lost")).unwrap();
        let unnamed = behind.allreduce_async(filled(&session, 1.0), sum()).unwrap();
        gate.fail("the copy failed");
        gate.open();
        for error in [text(held.wait()), text(unnamed.wait())] {
            assert!(error.contains("the copy failed"), "{error}");
        }
        assert!(text(behind.allreduce_async(filled(&session, 1.0), sum())).contains("copy failed"));
        // The name is free, and refused calls were not counted. The session continues.
        let options = AllreduceOptions::named("lost").op(ReduceOp::Sum);
        let again = session.allreduce_async(filled(&session, 1.0), options).unwrap();
        assert_eq!(again.wait().unwrap().as_slice(), [2.0; 3]);
        assert_eq!(session.stats().in_flight, 0);
    });
}

#[test]
fn the_end_of_a_session_ends_held_operations() {
    let (_daemon, session) = FakeDaemon::alone();
    let gate = Gate::new();
    let held = session.behind(&gate).allreduce_async(filled(&session, 1.0), sum()).unwrap();
    session.shutdown().unwrap();
    assert!(matches!(held.wait(), Err(GradwireError::Closed)));
    gate.open();
    assert!(matches!(session.behind(&Gate::new()).barrier(), Err(GradwireError::Closed)));
}

#[test]
fn a_dropped_gate_fails_waiting_operations() {
    ranks(2, |session| {
        let gate = Gate::new();
        let behind = session.behind(&gate);
        let plain = behind.allreduce_async(filled(&session, 1.0), sum()).unwrap();
        let parts = behind.adasum_async(filled(&session, 1.0), AdasumOptions::default()).unwrap();
        let clone = gate.clone();
        drop(gate);
        assert!(plain.is_held());
        drop(clone);
        for error in [text(plain.wait()), text(parts.wait())] {
            assert!(error.contains("was dropped"), "{error}");
        }
        assert!(text(behind.barrier()).contains("was dropped"));
        session.barrier().unwrap();
    });
}

#[test]
fn the_end_of_a_session_is_the_first_cause() {
    let (_daemon, session) = FakeDaemon::alone();
    let (first, second) = (Gate::new(), Gate::new());
    let one = session.behind(&first).allreduce_async(filled(&session, 1.0), sum()).unwrap();
    let two = session.behind(&second).allreduce_async(filled(&session, 1.0), sum()).unwrap();
    session.shutdown().unwrap();
    first.fail("a consequence");
    second.open();
    assert!(matches!(one.wait(), Err(GradwireError::Closed)));
    assert!(matches!(two.wait(), Err(GradwireError::Closed)));
    assert_eq!(session.stats().operations, 0);
}
