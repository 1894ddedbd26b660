//! Contributions that are not finite (`checks.finite`).

use gradwire_worker::{
    AllreduceOptions, BroadcastOptions, CheckFinite, FailureKind, Gate, GradwireError, ReduceOp,
    SessionBuilder,
};

use super::{ranks_with, text};

fn failing(_: u32, builder: SessionBuilder) -> SessionBuilder {
    builder.check_finite(CheckFinite::Fail)
}

#[test]
fn a_rank_that_contributes_nan_is_named() {
    ranks_with(3, failing, |session| {
        session.allreduce_slice(&mut [f32::MAX; 4], AllreduceOptions::named("fine")).unwrap();
        let mut values = [1.0f32; 70];
        if session.rank() == 1 {
            values[65] = f32::NAN;
            values[69] = f32::INFINITY;
        }
        let error = session.allreduce_slice(&mut values, AllreduceOptions::named("loss"));
        let error = error.unwrap_err();
        let GradwireError::Failed(failure) = &error else { panic!("{error}") };
        if session.rank() == 1 {
            assert_eq!(failure.kind, FailureKind::Cancelled);
            let told = "rank 1 contributes NaN to 'loss' at element 65 of 70, and 1 more";
            assert!(failure.what.starts_with(told), "{failure}");
        } else {
            // TELL
            assert_eq!(failure.kind, FailureKind::WorkerLost);
        }
    });
}

#[test]
fn places_for_results_are_not_looked_at() {
    ranks_with(2, failing, |session| {
        let is_root = session.rank() == 0;
        let mut values = [if is_root { 2.0f64 } else { f64::NAN }; 3];
        session.broadcast_slice(&mut values, BroadcastOptions::from_rank(0)).unwrap();
        assert!(values.iter().all(|value| value.to_bits() == 2.0f64.to_bits()));
        let sum = AllreduceOptions::default().op(ReduceOp::Sum);
        session.allreduce_slice(&mut [-1i64, 7], sum).unwrap();
    });
}

#[test]
fn a_warning_changes_nothing() {
    let warning = |_, builder: SessionBuilder| builder.check_finite(CheckFinite::Warn);
    ranks_with(2, warning, |session| {
        for name in ["first", "second"] {
            let mut values = [f32::INFINITY; 2];
            session.allreduce_slice(&mut values, AllreduceOptions::named(name)).unwrap();
            assert!(values.iter().all(|value| value.is_infinite()));
        }
    });
}

/// The tensor of an operation behind a gate is written after the call.
#[test]
fn it_looks_when_the_gate_is_opened() {
    ranks_with(2, failing, |session| {
        let gate = Gate::new();
        let is_first = session.rank() == 0;
        let tensor = session.tensor(&[if is_first { f32::NAN } else { 1.0 }; 3], &[3]).unwrap();
        let options = AllreduceOptions::named("late");
        let handle = session.behind(&gate).allreduce_async(tensor, options).unwrap();
        assert!(handle.is_held() && !handle.is_finished());
        session.barrier().unwrap();
        gate.open();
        let told = text(handle.wait());
        assert_eq!(is_first, told.contains("rank 0 contributes NaN to 'late'"), "{told}");
    });
}
