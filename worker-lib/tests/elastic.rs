//! Sessions that outlive epochs, against fake daemons: each epoch has another one.

#[expect(dead_code, reason = "other tests use the rest of it")]
mod fake;

use std::{sync::mpsc, thread, time::Duration};

use fake::FakeDaemon;
use gradwire_worker::{
    AllreduceOptions, GradwireError, ProcessSet, ReduceOp, Rejoined, Session, Tensor,
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
    // A second time, with a newcomer, and without a loss: all ranks leave the epoch.
    drop(ranks.iter().map(|(session, _)| session.clone()).collect::<Vec<_>>());
    let (begun, begins) = mpsc::channel();
    thread::scope(|scope| {
        let old = scope.spawn(|| {
            on_each(ranks, |at, (session, mut tensor)| {
                begun.send(()).unwrap();
                let rejoined = rejoin(&session).unwrap();
                assert_eq!((rejoined.epoch, rejoined.newcomers), (3, true));
                assert_eq!((session.rank(), session.size()), (at as u32, 3));
                assert_eq!(sum(&session, &mut tensor, None), 16.0);
                session.shutdown().unwrap();
            });
        });
        let new = daemon.worker(9);
        begins.recv().unwrap();
        begins.recv().unwrap();
        thread::sleep(Duration::from_millis(100));
        let _daemon = daemon.succeed(&[4, 5, 9]);
        let session = new.attach().unwrap();
        assert_eq!((session.rank(), session.epoch()), (2, 3));
        let mut own = session.zeros::<f32>(&[3000]).unwrap();
        own.fill(10.0);
        assert_eq!(sum(&session, &mut own, None), 16.0);
        session.shutdown().unwrap();
        old.join().unwrap();
    });
}
