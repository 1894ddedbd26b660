//! Sessions that outlive epochs, against fake daemons: each epoch has another one.

#[expect(dead_code, reason = "other tests use the rest of it")]
#[path = "../fake/mod.rs"]
mod fake;

mod ends;
mod memory;
mod sets;
mod votes;

use std::{sync::Barrier, thread, time::Duration};

use fake::FakeDaemon;
use gradwire_worker::{
    AllreduceOptions, BarrierOptions, BroadcastOptions, GradwireError, ProcessSet, ReduceOp,
    Rejoined, Session, Tensor,
};

/// Calls `rejoin`.
fn rejoin(session: &Session) -> Result<Rejoined, GradwireError> {
    // SAFETY: the tests write to tensors only in the thread that rejoins.
    #[expect(unsafe_code, reason = "the call moves tensors")]
    unsafe {
        session.rejoin()
    }
}

fn named(name: &str) -> AllreduceOptions {
    AllreduceOptions::named(name).op(ReduceOp::Sum)
}

/// Attaches all workers.
fn attach(daemon: &FakeDaemon, workers: &[u32]) -> Vec<Session> {
    let builders: Vec<_> = workers.iter().map(|worker| daemon.worker(*worker)).collect();
    on_each(builders, |_, builder| builder.attach().unwrap())
}

/// Runs `body` for each item in a thread of its own; returns the results in order.
fn on_each<T: Send, R: Send>(items: Vec<T>, body: impl Fn(usize, T) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let (body, items) = (&body, items.into_iter().enumerate());
        let threads: Vec<_> = items.map(|(at, item)| scope.spawn(move || body(at, item))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Fails with the end of the epoch.
fn until_lost(session: &Session) {
    let error = session.barrier_with(BarrierOptions::named("until lost")).unwrap_err();
    assert!(error.is_recoverable(), "{error}");
}

/// Adds up a number of each rank.
fn sum(session: &Session, tensor: &mut Tensor<f32>, set: Option<&ProcessSet>) -> f32 {
    let options = named("sum");
    let options = match set {
        Some(set) => options.process_set(set),
        None => options,
    };
    session.allreduce(tensor, options).unwrap();
    tensor[0]
}

#[test]
fn survivors_go_on_with_their_memory() {
    let daemon = FakeDaemon::elastic(&[4, 5, 6]);
    let mut sessions = attach(&daemon, &[4, 5, 6]);
    let lost = sessions.pop().unwrap();
    assert_eq!((lost.rank(), lost.size(), lost.epoch(), lost.is_elastic()), (2, 3, 1, true));
    let tensors = sessions.iter().map(|session| {
        let mut all = session.zeros::<f32>(&[3000]).unwrap();
        all.fill(session.rank() as f32 + 1.0);
        all
    });
    let tensors: Vec<_> = tensors.collect();
    let addresses: Vec<_> = tensors.iter().map(|tensor| tensor.as_ptr().addr()).collect();
    drop(lost); // without shutdown: it has failed
    let ranks: Vec<_> = sessions.into_iter().zip(tensors).collect();
    let ranks = on_each(ranks, |_, (session, mut tensor)| {
        let error = session.allreduce(&mut tensor, named("lost")).unwrap_err();
        assert!(error.is_recoverable(), "{error}");
        assert!(session.barrier().unwrap_err().is_recoverable());
        (session, tensor)
    });
    let daemon = daemon.succeed(&[4, 5]);
    let ranks = on_each(ranks, |at, (session, mut tensor)| {
        let rejoined = rejoin(&session).unwrap();
        assert_eq!((rejoined.epoch, rejoined.newcomers, rejoined.vote), (2, false, None));
        assert_eq!((session.epoch(), session.rank(), session.size()), (2, at as u32, 2));
        assert_eq!(tensor.as_ptr().addr(), addresses[at]);
        assert!(tensor.iter().all(|value| *value == at as f32 + 1.0), "{:?}", &tensor[..4]);
        assert_eq!(sum(&session, &mut tensor, None), 3.0);
        assert_eq!(tensor[2999], 3.0);
        assert_eq!(session.global_process_set().ranks(), [0, 1]);
        (session, tensor)
    });
    on_each(ranks, |_, (session, _)| session.shutdown().unwrap());
    drop(daemon);
}

#[test]
fn newcomers_wait_for_an_epoch_that_has_them() {
    let daemon = FakeDaemon::elastic(&[4, 5]);
    let sessions = attach(&daemon, &[4, 5]);
    let (new, impatient) = (daemon.worker(9), daemon.worker(8));
    let error = impatient.elastic_timeout(Duration::from_millis(300)).attach().unwrap_err();
    let text = error.to_string();
    assert!(text.contains("with this process (worker 8)"), "{text}");
    assert!(text.contains("(epoch 1 does not include this process) did not happen"), "{text}");
    let new = thread::spawn(move || new.attach().unwrap());
    // Without a loss, all ranks leave the epoch.
    let left = Barrier::new(3);
    thread::scope(|scope| {
        let old = scope.spawn(|| {
            on_each(sessions, |at, session| {
                // Other numbers of unnamed operations than a newcomer has made.
                session.barrier().unwrap();
                left.wait();
                let rejoined = rejoin(&session).unwrap();
                assert_eq!((rejoined.epoch, rejoined.newcomers), (2, true));
                assert_eq!((session.rank(), session.size()), (at as u32, 3));
                session
            })
        });
        left.wait();
        thread::sleep(Duration::from_millis(100));
        let daemon = daemon.succeed(&[4, 5, 9]);
        let mut sessions = old.join().unwrap();
        sessions.push(new.join().unwrap());
        on_each(sessions, |at, session| {
            assert_eq!((session.rank(), session.epoch()), (at as u32, 2));
            assert_eq!(session.barrier_async().unwrap().name().as_str(), "barrier.#1");
            session.shutdown().unwrap();
        });
        drop(daemon);
    });
}
