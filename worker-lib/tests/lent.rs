//! Memory that is lent to the daemon: however a session ends, nothing that the daemon does after a
//! wait has ended is seen in a tensor, and no result that comes after it counts.

mod fake;

use std::{
    thread,
    time::{Duration, Instant},
};

use fake::FakeDaemon;
use gradwire_worker::{AllreduceOptions, FailureKind, GradwireError, ReduceOp, Session};

/// Some pages, and not whole ones.
const ELEMENTS: usize = 5000;

fn named(name: &str) -> AllreduceOptions {
    AllreduceOptions::named(name).op(ReduceOp::Sum)
}

/// A rank that waits for an operation in one thread while `end` ends the session in another one;
/// gives what the wait came to. Before and after it the daemon goes on with the operation.
fn goes_on(silence: Duration, end: impl FnOnce(&FakeDaemon, &Session)) -> GradwireError {
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
        // Beats of the daemon have come, so that their end is noticed.
        thread::sleep(Duration::from_millis(300));
        end(&daemon, &session);
        (waits.join().unwrap(), lent)
    });
    assert_eq!(tensor.as_slice(), numbers, "it is as it was lent");
    lent.go_on();
    assert_eq!(tensor.as_slice(), numbers, "the daemon has written to it");
    tensor.as_mut_slice()[ELEMENTS / 2] = -1.0;
    before.as_mut_slice()[0] = -1.0;
    lent.go_on();
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
fn a_daemon_that_was_stopped_goes_on() {
    let error = goes_on(Duration::from_secs(1), |_, session| {
        let own = session.allreduce_slice(&mut [0.0f32], named("freeze")).unwrap_err();
        assert_eq!(failure(&own).0, FailureKind::NodeLost);
    });
    assert!(failure(&error).1.contains("no sign of life"), "{error}");
}

#[test]
fn a_daemon_goes_on_after_the_rank_gave_up() {
    let error = goes_on(LONG, |_, session| session.abort("enough"));
    assert_eq!(failure(&error), (FailureKind::Cancelled, "enough"));
}

#[test]
fn a_daemon_goes_on_after_it_let_the_rank_go() {
    let error = goes_on(LONG, |_, session| session.shutdown().unwrap());
    assert!(matches!(error, GradwireError::Closed), "{error}");
}

#[test]
fn a_daemon_goes_on_that_has_closed_the_connection() {
    let error = goes_on(LONG, |_, session| {
        session.allreduce_slice(&mut [0.0f32], named("die")).unwrap_err();
    });
    assert!(failure(&error).1.contains("gradwired"), "{error}");
}

#[test]
fn a_daemon_goes_on_that_takes_no_messages() {
    let error = goes_on(LONG, |daemon, session| {
        thread::scope(|scope| {
            scope.spawn(|| session.allreduce_slice(&mut [0.0f32], named("deaf")).unwrap_err());
            // A message that it has not read yet would get no answer, and no error either.
            daemon.until_deaf();
            // It needs a segment of its own, which has to be handed over.
            session.zeros::<u8>(&[2 << 20]).unwrap_err();
        });
    });
    assert!(failure(&error).1.contains("takes no messages"), "{error}");
}

/// Its memory is not where the daemon wrote.
#[test]
fn a_result_that_comes_after_the_end_is_none() {
    let daemon = FakeDaemon::start(1);
    let session = daemon.rank(0).daemon_timeout(Duration::from_secs(1)).attach().unwrap();
    let tensor = session.zeros::<f32>(&[ELEMENTS]).unwrap();
    let handle = session.allreduce_async(tensor, named("hold")).unwrap();
    let lent = daemon.lent(0, "hold");
    thread::sleep(Duration::from_millis(300));
    session.allreduce_slice(&mut [0.0f32], named("freeze")).unwrap_err();
    lent.go_on();
    assert_eq!(failure(&handle.wait().unwrap_err()).0, FailureKind::NodeLost);
}

#[test]
fn a_tensor_of_another_session_is_refused() {
    let (_first, first) = FakeDaemon::alone();
    let (_second, second) = FakeDaemon::alone();
    let mut tensor = first.zeros::<f32>(&[10]).unwrap();
    // Something that lies at the same place there.
    let _other = second.zeros::<f32>(&[10]).unwrap();
    let error = second.allreduce(&mut tensor, named("strange")).unwrap_err();
    assert!(error.to_string().contains("made by another session"), "{error}");
    assert_eq!(second.stats().operations, 0);
    first.allreduce(&mut tensor, named("own")).unwrap();
}

/// Nobody asks for the outcome, so it is looked for when the name is wanted again.
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
