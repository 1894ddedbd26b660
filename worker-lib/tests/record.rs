//! The record of a rank has what its operations have returned.

#[allow(dead_code, reason = "only some test files use all of it")]
mod fake;

use std::{fs, path::Path, thread};

use fake::FakeDaemon;
use gradwire_worker::{
    AllgatherOptions, AllreduceOptions, FailureKind, Gate, GradwireError, Session,
    record::{
        format::{Outcome, Why, folder},
        reader::{Call, Next, Reader},
    },
};

const LIMIT: u64 = 1 << 30;

fn attach(daemon: &FakeDaemon, rank: u32, at: &Path, limit: u64) -> Session {
    daemon.rank(rank).record(at.join(folder(rank)), limit).attach().unwrap()
}

/// All calls of a rank, their results, and why the record ends.
fn read(at: &Path, rank: u32) -> (Vec<(Call, Vec<u8>)>, Option<Why>) {
    let mut reader = Reader::open(at, rank).unwrap();
    let mut calls = Vec::new();
    loop {
        match reader.next().unwrap() {
            Next::Call(call) => {
                let mut bytes = Vec::new();
                reader.results(&call, |data| bytes.extend(data)).unwrap();
                calls.push((*call, bytes));
            }
            Next::End(end) => return (calls, Some(end.why)),
            Next::Cut => return (calls, None),
        }
    }
}

#[test]
fn results_and_failures_are_recorded() {
    let at = tempfile::tempdir().unwrap();
    let daemon = FakeDaemon::start(2);
    thread::scope(|scope| {
        for rank in 0..2 {
            let (daemon, at) = (&daemon, at.path());
            scope.spawn(move || {
                let session = attach(daemon, rank, at, LIMIT);
                let large = vec![rank as f32 + 1.0; 600_000];
                let mut large = session.tensor(&large, &[600_000]).unwrap();
                session.allreduce(&mut large, AllreduceOptions::named("large")).unwrap();
                // Other rows than the rank could expect.
                let rows = session.tensor(&vec![rank; rank as usize + 1], &[rank as usize + 1]);
                session.allgather(&rows.unwrap(), AllgatherOptions::named("rows")).unwrap();
                let failed = session.allreduce(&mut large, AllreduceOptions::named("fails"));
                assert!(matches!(failed, Err(GradwireError::Failed(_))));
                session.shutdown().unwrap();
            });
        }
    });
    for rank in 0..2 {
        let (calls, why) = read(at.path(), rank);
        let names: Vec<_> = calls.iter().map(|(call, _)| call.name.as_str()).collect();
        assert_eq!((names, why), (vec!["large", "rows", "fails"], Some(Why::Left)));
        assert_eq!(calls[0].1, 1.5f32.to_le_bytes().repeat(600_000));
        assert_eq!(calls[1].1, [0u32, 1, 1].map(u32::to_le_bytes).concat());
        let Outcome::Done { moved: true, results, .. } = &calls[1].0.head.outcome else {
            panic!("{:?}", calls[1].0);
        };
        assert_eq!((&*results[0].shape, &*results[0].rows), (&[3][..], &[1, 2][..]));
        let Outcome::Failed(failure) = &calls[2].0.head.outcome else { panic!("it has failed") };
        assert_eq!(failure.kind, FailureKind::Disagreement);
        assert!(calls.iter().all(|(call, _)| call.head.thread == calls[0].0.head.thread));
    }
}

#[test]
fn a_failed_session_says_what_was_in_flight() {
    let at = tempfile::tempdir().unwrap();
    let daemon = FakeDaemon::start(1);
    let session = attach(&daemon, 0, at.path(), LIMIT);
    let held = session.zeros::<f32>(&[4]).unwrap();
    let held = session.allreduce_async(held, AllreduceOptions::named("hold")).unwrap();
    let mut tensor = session.zeros::<f32>(&[4]).unwrap();
    session.allreduce(&mut tensor, AllreduceOptions::named("abort")).unwrap_err();
    held.wait().unwrap_err();
    let (calls, why) = read(at.path(), 0);
    let mut open: Vec<_> = calls.iter().map(|(call, _)| call.name.as_str()).collect();
    open.sort_unstable();
    assert_eq!(open, ["abort", "hold"]);
    assert!(calls.iter().all(|(call, _)| call.head.outcome == Outcome::Open));
    assert!(matches!(why, Some(Why::Failed(failure)) if failure.what == "the process was killed"));
}

#[test]
fn what_was_never_submitted_is_not_recorded() {
    let at = tempfile::tempdir().unwrap();
    let daemon = FakeDaemon::start(1);
    let session = attach(&daemon, 0, at.path(), LIMIT);
    let (gate, tensor) = (Gate::new(), session.zeros::<f32>(&[4]).unwrap());
    let late = session.behind(&gate).allreduce_async(tensor, AllreduceOptions::named("late"));
    gate.fail("it could not be copied");
    let tensor = session.zeros::<f32>(&[4]).unwrap();
    assert!(late.unwrap().wait().is_err(), "the gate has failed");
    session.allreduce_async(tensor, AllreduceOptions::named("late")).unwrap().wait().unwrap();
    session.shutdown().unwrap();
    let (calls, why) = read(at.path(), 0);
    assert_eq!((calls.len(), why), (1, Some(Why::Left)));
    assert!(matches!(calls[0].0.head.outcome, Outcome::Done { .. }));
}

#[test]
fn a_record_never_exceeds_its_limit() {
    let at = tempfile::tempdir().unwrap();
    let daemon = FakeDaemon::start(1);
    let session = attach(&daemon, 0, at.path(), 1 << 20);
    for step in 0..8 {
        let mut tensor = session.zeros::<u8>(&[200_000]).unwrap();
        // Random, so that it can't be compressed.
        let mut state = step + 1u32;
        tensor.as_mut_slice().fill_with(|| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        });
        let gathered = session.allgather(&tensor, AllgatherOptions::named(format!("s{step}")));
        assert_eq!(gathered.unwrap().tensor.as_slice(), tensor.as_slice());
    }
    session.shutdown().unwrap();
    let file = at.path().join(folder(0)).join("calls");
    assert!(fs::metadata(file).unwrap().len() <= 1 << 20);
    let (calls, why) = read(at.path(), 0);
    assert_eq!((calls.len(), why), (4, Some(Why::Full)));
}

#[test]
fn a_record_is_never_written_twice() {
    let at = tempfile::tempdir().unwrap();
    let daemon = FakeDaemon::start(1);
    attach(&daemon, 0, at.path(), LIMIT).shutdown().unwrap();
    let daemon = FakeDaemon::start(1);
    let again = daemon.rank(0).record(at.path().join(folder(0)), LIMIT).attach();
    let error = again.unwrap_err().to_string();
    assert!(error.contains("rank.0") && error.contains("--record a new folder"), "{error}");
}
