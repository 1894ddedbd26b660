//! Memory that is lent to the daemon: however a session ends, writes of the daemon after the end of
//! a wait do not reach a tensor, and later results do not count.

#[expect(dead_code, reason = "other tests use the rest of it")]
mod fake;

use std::{
    panic::{self, AssertUnwindSafe},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use fake::FakeDaemon;
use gradwire_worker::{AllreduceOptions, FailureKind, GradwireError, ReduceOp, Session};

/// Several pages, but not a whole number.
const ELEMENTS: usize = 5000;

fn named(name: &str) -> AllreduceOptions {
    AllreduceOptions::named(name).op(ReduceOp::Sum)
}

/// A rank waits for an operation in one thread while `end` ends the session in another; returns the
/// error of the wait. Afterwards the daemon continues the operation twice.
fn resumes(silence: Duration, end: impl FnOnce(&FakeDaemon, &Session)) -> GradwireError {
    let daemon = FakeDaemon::start(1);
    let session = daemon.rank(0).daemon_timeout(silence).attach().unwrap();
    let numbers: Vec<f32> = (0..ELEMENTS).map(|i| i as f32).collect();
    // They share pages.
    let mut before = session.tensor(&numbers, &[ELEMENTS]).unwrap();
    let mut tensor = session.tensor(&numbers, &[ELEMENTS]).unwrap();
    let after = session.tensor(&numbers, &[ELEMENTS]).unwrap();
    let (error, lent) = thread::scope(|scope| {
        let waits = scope.spawn(|| session.allreduce(&mut tensor, named("hold")).unwrap_err());
        let lent = daemon.lent(0, "hold");
        // Heartbeats of the daemon have arrived, so that their end is noticed.
        thread::sleep(Duration::from_millis(300));
        end(&daemon, &session);
        (waits.join().unwrap(), lent)
    });
    assert_eq!(tensor.as_slice(), numbers, "it is unchanged");
    lent.resume();
    assert_eq!(tensor.as_slice(), numbers, "the daemon has written to it");
    tensor.as_mut_slice()[ELEMENTS / 2] = -1.0;
    before.as_mut_slice()[0] = -1.0;
    lent.resume();
    assert_eq!(tensor.as_slice()[ELEMENTS / 2], -1.0);
    assert_eq!(tensor.as_slice()[1..ELEMENTS / 2], numbers[1..ELEMENTS / 2]);
    assert_eq!((before.as_slice()[0], &before.as_slice()[1..]), (-1.0, &numbers[1..]));
    assert_eq!(after.as_slice(), numbers);
    error
}

fn failure(error: &GradwireError) -> (FailureKind, &str) {
    let failure = error.failure().unwrap_or_else(|| panic!("no failure: {error}"));
    (failure.kind, &failure.what)
}

const LONG: Duration = Duration::from_secs(60);

#[test]
fn a_stopped_daemon_continues() {
    let error = resumes(Duration::from_secs(1), |_, session| {
        let own = session.allreduce_slice(&mut [0.0f32], named("freeze")).unwrap_err();
        assert_eq!(failure(&own).0, FailureKind::NodeLost);
    });
    assert!(failure(&error).1.contains("no sign of life"), "{error}");
}

#[test]
fn a_daemon_continues_after_the_rank_gave_up() {
    let error = resumes(LONG, |_, session| session.abort("enough"));
    assert_eq!(failure(&error), (FailureKind::Cancelled, "enough"));
}

#[test]
fn a_daemon_continues_after_the_rank_has_left() {
    let error = resumes(LONG, |_, session| session.shutdown().unwrap());
    assert!(matches!(error, GradwireError::Closed), "{error}");
}

#[test]
fn a_daemon_continues_after_disconnecting() {
    let error = resumes(LONG, |_, session| {
        session.allreduce_slice(&mut [0.0f32], named("die")).unwrap_err();
    });
    assert!(failure(&error).1.contains("gradwired"), "{error}");
}

#[test]
fn a_daemon_continues_but_accepts_no_messages() {
    let error = resumes(LONG, |daemon, session| {
        thread::scope(|scope| {
            scope.spawn(|| session.allreduce_slice(&mut [0.0f32], named("deaf")).unwrap_err());
            // An earlier message would get no answer and no error.
            daemon.until_deaf();
            // This needs its own segment, which must be handed over.
            session.zeros::<u8>(&[2 << 20]).unwrap_err();
        });
    });
    assert!(failure(&error).1.contains("accepts no messages"), "{error}");
}

/// Panics when it is dropped.
struct Bad;

impl Drop for Bad {
    fn drop(&mut self) {
        panic!("a bad owner");
    }
}

/// Another operation ends while a thread waits, and that thread drops its memory.
#[test]
fn a_blocking_call_that_panics_takes_memory_back() {
    let daemon = FakeDaemon::start(1);
    let session = daemon.rank(0).attach().unwrap();
    let mut tensor = session.zeros::<f32>(&[ELEMENTS]).unwrap();
    let shared = session.zeros::<f32>(&[1]).unwrap().into_buffer().into_shared();
    let owned = shared.kept_by(Arc::new(Bad));
    let lent = thread::scope(|scope| {
        let waits = scope.spawn(|| {
            panic::catch_unwind(AssertUnwindSafe(|| session.allreduce(&mut tensor, named("hold"))))
        });
        let lent = daemon.lent(0, "hold");
        drop(session.allreduce_async(owned, named("quick")).unwrap());
        let panicked = waits.join().unwrap().unwrap_err();
        assert_eq!(panicked.downcast_ref(), Some(&"a bad owner"));
        lent
    });
    lent.resume();
    assert_eq!(tensor[..], [0.0; ELEMENTS]);
    let error = session.barrier().unwrap_err();
    assert!(failure(&error).1.contains("'hold' panicked"), "{error}");
}

/// The daemon has written it to memory that was taken back.
#[test]
fn a_result_after_the_end_does_not_count() {
    let daemon = FakeDaemon::start(1);
    let session = daemon.rank(0).daemon_timeout(Duration::from_secs(1)).attach().unwrap();
    let tensor = session.zeros::<f32>(&[ELEMENTS]).unwrap();
    let handle = session.allreduce_async(tensor, named("hold")).unwrap();
    let lent = daemon.lent(0, "hold");
    thread::sleep(Duration::from_millis(300));
    session.allreduce_slice(&mut [0.0f32], named("freeze")).unwrap_err();
    lent.resume();
    assert_eq!(failure(&handle.wait().unwrap_err()).0, FailureKind::NodeLost);
}

#[test]
fn a_tensor_of_another_session_is_refused() {
    let (_first, first) = FakeDaemon::alone();
    let (_second, second) = FakeDaemon::alone();
    let mut tensor = first.zeros::<f32>(&[10]).unwrap();
    // A tensor at the same place in the other session.
    let _other = second.zeros::<f32>(&[10]).unwrap();
    let error = second.allreduce(&mut tensor, named("strange")).unwrap_err();
    assert!(error.to_string().contains("belongs to another session"), "{error}");
    assert_eq!(second.stats().operations, 0);
    first.allreduce(&mut tensor, named("own")).unwrap();
}

/// Nobody fetches the outcome, so completions are collected when the name is used again.
#[test]
fn a_name_is_free_when_its_operation_has_ended() {
    let (_daemon, session) = FakeDaemon::alone();
    for _ in 0..20 {
        let begin = Instant::now();
        loop {
            let tensor = session.zeros::<f32>(&[1]).unwrap();
            match session.allreduce_async(tensor, named("metric")) {
                Ok(handle) => break drop(handle),
                Err(error) => {
                    assert!(error.to_string().contains("already in flight"), "{error}");
                    assert!(begin.elapsed() < Duration::from_secs(20), "{error}");
                    thread::sleep(Duration::from_millis(1));
                }
            }
        }
    }
}
