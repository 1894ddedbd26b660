//! Calls that race with a change of the epoch, and sessions that end meanwhile.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Instant,
};

use gradwire_worker::Gate;

use super::*;

/// The only rank of an elastic job.
fn alone() -> (FakeDaemon, Session) {
    let daemon = FakeDaemon::elastic(&[3]);
    let session = daemon.worker(3).attach().unwrap();
    (daemon, session)
}

#[test]
fn a_fixed_job_has_no_next_epoch() {
    let (daemon, session) = FakeDaemon::alone();
    assert!(!session.is_elastic());
    let error = rejoin(&session).unwrap_err();
    assert!(matches!(error, GradwireError::Invalid(_)), "{error}");
    assert!(error.to_string().contains("the job is not elastic"), "{error}");
    session.barrier().unwrap();
    let error = daemon.worker(0).attach().unwrap_err().to_string();
    assert!(error.contains("its job is not elastic, but this process is part of"), "{error}");
    let lost = session.allreduce_slice(&mut [1.0f32], named("die")).unwrap_err();
    assert!(!lost.is_recoverable() && lost.failure().unwrap().is_recoverable(), "{lost}");
}

#[test]
fn an_error_of_the_program_ends_the_job() {
    let (_daemon, session) = alone();
    session.abort("the loss is NaN");
    for error in [rejoin(&session).unwrap_err(), session.barrier().unwrap_err()] {
        assert!(!error.is_recoverable() && error.to_string().contains("NaN"), "{error}");
    }
}

#[test]
fn a_wait_for_an_epoch_has_a_limit() {
    let daemon = FakeDaemon::elastic(&[3]);
    let limit = Duration::from_millis(300);
    let session = daemon.worker(3).elastic_timeout(limit).attach().unwrap();
    let again = daemon.worker(3);
    drop(daemon);
    let error = rejoin(&session).unwrap_err();
    assert!(matches!(error, GradwireError::Timeout { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("worker 3") && text.contains("no daemon (gradwired) answers"), "{text}");
    let flag = Arc::new(AtomicBool::new(true));
    let error = again.cancel(flag).attach().unwrap_err().to_string();
    assert!(error.contains("cancelled"), "{error}");
    // SAFETY: nobody writes to a tensor.
    #[expect(unsafe_code, reason = "the call moves tensors")]
    let error = unsafe { session.rejoin_unless(&AtomicBool::new(true)) }.unwrap_err();
    assert!(error.to_string().contains("rejoining the job was cancelled"), "{error}");
    assert!(session.barrier().unwrap_err().is_recoverable());
}

#[test]
fn calls_in_flight_end_with_their_own_epoch() {
    let (daemon, session) = alone();
    let gate = Gate::new();
    let own = || session.tensor(&[1.0f32], &[1]).unwrap();
    let held = session.behind(&gate).allreduce_async(own(), named("behind")).unwrap();
    let handle = session.allreduce_async(own(), named("hold")).unwrap();
    let parts = session.broadcast_object_async(Some(&7u32), Default::default()).unwrap();
    assert_eq!(parts.wait().unwrap(), 7);
    thread::scope(|scope| {
        let blocked = scope.spawn(|| {
            let mut own = own();
            session.allreduce(&mut own, named("hold too")).unwrap_err()
        });
        while session.stats().in_flight < 3 {
            thread::sleep(Duration::from_millis(1));
        }
        let rejoins = scope.spawn(|| rejoin(&session).unwrap());
        let error = blocked.join().unwrap();
        assert!(error.is_recoverable(), "{error}");
        assert!(error.to_string().contains("it has left epoch 1 to join the next"), "{error}");
        let daemon = daemon.succeed(&[3]);
        assert_eq!(rejoins.join().unwrap().epoch, 2);
        assert!(handle.wait().unwrap_err().is_recoverable());
        gate.open();
        assert!(held.wait().unwrap_err().is_recoverable());
        assert_eq!(session.stats().in_flight, 0);
        // Their names are free.
        session.allreduce_async(own(), named("behind")).unwrap().wait().unwrap();
        session.shutdown().unwrap();
        drop(daemon);
    });
}

#[test]
fn threads_that_rejoin_at_once_get_the_same() {
    let (daemon, session) = alone();
    // Afterwards only the old daemon answers.
    session.allreduce_slice(&mut [1.0f32], named("die")).unwrap_err();
    let both: Vec<_> = (0..2)
        .map(|_| session.clone())
        .map(|session| thread::spawn(move || rejoin(&session).unwrap()))
        .collect();
    thread::sleep(Duration::from_millis(200));
    let daemon = daemon.succeed(&[3]);
    let both: Vec<_> = both.into_iter().map(|thread| thread.join().unwrap()).collect();
    assert_eq!((both[0].epoch, &both[0]), (2, &both[1]));
    session.barrier().unwrap();
    session.shutdown().unwrap();
    drop(daemon);
}

#[test]
fn a_session_may_be_dropped_while_it_rejoins() {
    let (daemon, session) = alone();
    session.allreduce_slice(&mut [1.0f32], named("die")).unwrap_err();
    let rejoins = thread::spawn(move || rejoin(&session).unwrap().epoch);
    thread::sleep(Duration::from_millis(50));
    let daemon = daemon.succeed(&[3]);
    // That thread has the last clone, so the rank fails when it ends.
    assert_eq!(rejoins.join().unwrap(), 2);
    assert!(daemon.reason().contains("dropped its session without shutdown"));
}

#[test]
fn a_shutdown_ends_a_wait_for_the_next_epoch() {
    let (daemon, session) = alone();
    drop(daemon);
    let began = Instant::now();
    thread::scope(|scope| {
        let rejoins = scope.spawn(|| rejoin(&session).unwrap_err());
        thread::sleep(Duration::from_millis(50));
        let _ = session.shutdown();
        let error = rejoins.join().unwrap();
        assert!(matches!(error, GradwireError::Closed), "{error}");
    });
    assert!(began.elapsed() < Duration::from_secs(25), "the limit is 30 s");
    assert!(matches!(rejoin(&session).unwrap_err(), GradwireError::Closed));
}

#[test]
fn a_change_is_pending_until_the_next_epoch() {
    let (daemon, session) = alone();
    assert_eq!(session.pending_change(), None);
    daemon.wants(true, false);
    daemon.wants(false, true);
    let done = AtomicBool::new(false);
    while !done.load(SeqCst) {
        if let Some(change) = session.pending_change().filter(|change| change.removed) {
            assert!(change.added);
            done.store(true, SeqCst);
        }
        thread::sleep(Duration::from_millis(1));
    }
    session.barrier().unwrap();
    thread::scope(|scope| {
        let rejoins = scope.spawn(|| rejoin(&session).unwrap());
        until_lost_or_rejoined(&session);
        let daemon = daemon.succeed(&[3]);
        rejoins.join().unwrap();
        assert_eq!(session.pending_change(), None);
        session.shutdown().unwrap();
        drop(daemon);
    });
}

/// Waits until the session has left its epoch.
fn until_lost_or_rejoined(session: &Session) {
    while session.barrier().is_ok() {
        thread::sleep(Duration::from_millis(1));
    }
}
