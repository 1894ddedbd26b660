//! Sessions against a fake daemon with a real socket and real shared memory.

#[expect(dead_code, reason = "other tests use the rest of it")]
mod fake;

use std::{
    pin::pin,
    sync::{Arc, atomic::AtomicBool},
    task::{Context, Poll, Wake},
    thread,
    time::{Duration, Instant},
};

use fake::FakeDaemon;
use gradwire_proto::{DType, FailureKind, Secret};
use gradwire_worker::{
    AllreduceOptions, AlltoallOptions, BroadcastOptions, Gate, GradwireError, MAX_HELD, ReduceOp,
    Session, WaitError,
};

fn named(name: &str) -> AllreduceOptions {
    AllreduceOptions::named(name).op(ReduceOp::Sum)
}

/// Runs `body` as each rank of a job.
fn ranks(size: u32, body: impl Fn(Session) + Sync) {
    let daemon = FakeDaemon::start(size);
    thread::scope(|scope| {
        for rank in 0..size {
            let builder = daemon.rank(rank);
            scope.spawn(|| {
                let session = builder.attach().unwrap();
                body(session.clone());
                // Without it, dropping the session would be a failure.
                let _ = session.shutdown();
            });
        }
    });
}

/// The failure in an error.
fn failure(error: GradwireError) -> gradwire_worker::Failure {
    match error {
        GradwireError::Failed(failure) => failure,
        other => panic!("no failure: {other}"),
    }
}

#[test]
fn a_rank_knows_its_place() {
    ranks(3, |session| {
        assert!(session.rank() < 3);
        assert_eq!((session.size(), session.local_size(), session.cross_size()), (3, 3, 1));
        assert_eq!((session.host().as_str(), session.nodes().len()), ("fake", 1));
        assert_eq!(session.epoch(), 1);
    });
}

#[test]
fn all_ranks_get_the_sum_and_the_roots_tensor() {
    ranks(4, |session| {
        let mut tensor = session.tensor(&[session.rank() as f32, 1.0], &[2]).unwrap();
        session.allreduce(&mut tensor, named("sum")).unwrap();
        assert_eq!(tensor.as_slice(), [6.0, 4.0]);

        let mut values = [i64::from(session.rank()); 1000];
        session.allreduce_slice(&mut values, named("slice")).unwrap();
        assert_eq!(values, [6; 1000]);

        let mut root = [f64::from(session.rank())];
        session.broadcast_slice(&mut root, BroadcastOptions::from_rank(2).name("root")).unwrap();
        assert_eq!(root, [2.0]);
        session.barrier().unwrap();
        session.shutdown().unwrap();
    });
}

#[test]
fn the_limit_in_flight_names_its_setting() {
    let daemon = FakeDaemon::start(1);
    let too_few = daemon.rank(0).max_in_flight(63).attach().unwrap_err().to_string();
    assert!(too_few.contains("max_in_flight is \"63\": it must be at least 64"), "{too_few}");
    let session = daemon.rank(0).max_in_flight(64).attach().unwrap();
    let start = |name: String| {
        session.allreduce_async(session.tensor(&[1.0f32], &[1]).unwrap(), named(&name))
    };
    let handles: Vec<_> = (0..64).map(|i| start(format!("hold{i}")).unwrap()).collect();
    // BOUND: it is refused at once, and gives the tensor back.
    let refused = start("one too many".to_owned()).unwrap_err();
    let text = refused.error.to_string();
    assert!(text.contains("64 operations are in flight, which is the limit"), "{text}");
    assert!(text.contains("raise worker.max_in_flight"), "{text}");
    assert_eq!((refused.tensor[0], session.stats().in_flight), (1.0, 64));
    drop(handles);
    session.shutdown().unwrap();
}

#[test]
fn many_threads_have_many_operations_in_flight() {
    ranks(2, |session| {
        thread::scope(|scope| {
            for lane in 0..3 {
                let session = session.clone();
                scope.spawn(move || {
                    let handles: Vec<_> = (0..200)
                        .map(|i| {
                            let tensor = session.tensor(&[i as f32; 17], &[17]).unwrap();
                            session.allreduce_async(tensor, named(&format!("{lane}/{i}"))).unwrap()
                        })
                        .collect();
                    for (i, handle) in handles.into_iter().enumerate() {
                        assert_eq!(handle.wait().unwrap().as_slice(), [2.0 * i as f32; 17]);
                    }
                });
            }
        });
        assert_eq!(session.stats().in_flight, 0);
        assert_eq!(session.stats().operations, 600);
        assert_eq!(session.stats().bytes, 600 * 17 * 4);
        assert_eq!(session.stats().arena.used, 0);
    });
}

#[test]
fn unnamed_operations_wait_for_their_names() {
    let (_daemon, session) = FakeDaemon::alone();
    let handles: Vec<_> = (0..6000)
        .map(|_| session.allreduce_async(session.zeros::<f32>(&[1]).unwrap(), Default::default()))
        .collect::<Result<_, _>>()
        .unwrap();
    for (i, handle) in handles.into_iter().enumerate() {
        let names = 4096 + MAX_HELD as usize + 1;
        assert_eq!(handle.name().as_str(), format!("allreduce.#{}", i % names + 1));
        handle.wait().unwrap();
    }
}

/// The first operation of one rank is the last one of the other, so none ends before all started.
#[test]
fn many_operations_start_in_any_order() {
    const COUNT: usize = 9000;
    ranks(2, |session| {
        let order = |i| if session.rank() == 0 { i } else { COUNT - 1 - i };
        let start = |i: usize| {
            let tensor = session.tensor(&[i as f32], &[1]).unwrap();
            (i, session.allreduce_async(tensor, named(&format!("n{i}"))).unwrap())
        };
        let handles: Vec<_> = (0..COUNT).map(|i| start(order(i))).collect();
        for (i, handle) in handles {
            assert_eq!(handle.wait().unwrap().as_slice(), [2.0 * i as f32]);
        }
        assert_eq!(session.stats().in_flight, 0);
    });
}

#[test]
fn a_wrong_secret_is_refused() {
    let daemon = FakeDaemon::start(1);
    let error = daemon.rank_with(0, Secret::generate()).attach().unwrap_err();
    assert!(matches!(error, GradwireError::Refused(_)), "{error}");
    assert!(error.to_string().contains("the secret differs"), "{error}");
}

#[test]
fn a_missing_daemon_is_named() {
    let job = gradwire_worker::JobId::new("nobody").unwrap();
    for socket in ["@gradwire-nobody-is-here", "/nowhere/gradwire.sock"] {
        let builder = Session::builder(job.clone(), Secret::generate(), socket, 0);
        let error = builder.attach().unwrap_err();
        assert!(matches!(error, GradwireError::Connect { .. }), "{error}");
        assert!(error.to_string().contains(socket), "{error}");
    }
}

#[test]
fn attaching_has_a_timeout_and_can_be_cancelled() {
    let daemon = FakeDaemon::start(1);
    // The first rank waits in a world of two, because the second does not attach.
    let two = FakeDaemon::start(2);
    let error = two.rank(0).start_timeout(Duration::from_millis(300)).attach().unwrap_err();
    assert!(matches!(error, GradwireError::Timeout { .. }), "{error}");
    assert!(error.to_string().contains("all ranks attached"), "{error}");

    let cancel = Arc::new(AtomicBool::new(true));
    let error = daemon.rank(0).cancel(cancel).attach().unwrap_err();
    assert_eq!(failure(error).kind, FailureKind::Cancelled);
    // Releases the fake daemon's thread: the second rank attaches, and may find that the first has
    // left.
    drop(two.rank(1).attach());
}

#[test]
fn a_failed_operation_leaves_the_session_alive() {
    ranks(2, |session| {
        let handle =
            session.allreduce_async(session.zeros::<f32>(&[2]).unwrap(), named("fail")).unwrap();
        let failure = failure(handle.wait().unwrap_err());
        assert_eq!((failure.kind, failure.tensor.as_str()), (FailureKind::Disagreement, "fail"));
        let mut values = [1.0f32];
        session.allreduce_slice(&mut values, named("after")).unwrap();
        assert_eq!(values, [2.0]);
    });
}

#[test]
fn an_abort_reaches_waiters_and_later_calls() {
    let (_daemon, session) = FakeDaemon::alone();
    thread::scope(|scope| {
        let waiters: Vec<_> = (0..3)
            .map(|i| {
                let tensor = session.zeros::<f32>(&[8]).unwrap();
                let handle = session.allreduce_async(tensor, named(&format!("hold{i}"))).unwrap();
                scope.spawn(move || handle.wait().unwrap_err())
            })
            .collect();
        let mut values = [0.0f32];
        let own = session.allreduce_slice(&mut values, named("abort")).unwrap_err();
        for error in waiters.into_iter().map(|w| w.join().unwrap()).chain([own]) {
            // TELL: the same first cause for all.
            assert_eq!(error.to_string(), "rank 7 on host n7: the process was killed");
        }
    });
    assert_eq!(failure(session.barrier().unwrap_err()).kind, FailureKind::WorkerLost);
    assert_eq!(failure(session.zeros::<f32>(&[1]).unwrap_err()).kind, FailureKind::WorkerLost);
    assert!(session.shutdown().is_err());
}

#[test]
fn a_daemon_that_dies_is_noticed_while_waiting() {
    let (_daemon, session) = FakeDaemon::alone();
    let mut values = [0.0f32];
    let failure = failure(session.allreduce_slice(&mut values, named("die")).unwrap_err());
    assert_eq!(failure.kind, FailureKind::NodeLost);
    assert!(failure.what.contains("gradwired"), "{failure}");
}

#[test]
fn a_stopped_daemon_is_noticed_while_waiting() {
    let daemon = FakeDaemon::start(1);
    let session = daemon.rank(0).daemon_timeout(Duration::from_secs(1)).attach().unwrap();
    // Long enough for heartbeats to arrive.
    thread::sleep(Duration::from_millis(500));
    session.barrier().unwrap();
    let error = session.allreduce_slice(&mut [0.0f32], named("freeze")).unwrap_err();
    let failure = failure(error);
    assert_eq!(failure.kind, FailureKind::NodeLost);
    assert!(failure.what.contains("no sign of life"), "{failure}");
}

#[test]
fn a_dying_daemon_does_not_block_allocations() {
    // The session may end at any point of an allocation; none may hang (WAIT).
    for _ in 0..50 {
        let (_daemon, session) = FakeDaemon::alone();
        let first = session.zeros::<f32>(&[1]).unwrap();
        let dying = session.allreduce_async(first, named("die")).unwrap();
        // Each needs its own segment.
        let failed = (0..1000).find_map(|_| session.zeros::<u8>(&[1 << 20]).map(drop).err());
        if let Some(error) = failed {
            assert_eq!(failure(error).kind, FailureKind::NodeLost);
        }
        assert_eq!(failure(dying.wait().unwrap_err()).kind, FailureKind::NodeLost);
    }
}

#[test]
fn other_ranks_learn_that_a_rank_gave_up() {
    ranks(2, |session| {
        let tensor = session.zeros::<f32>(&[1]).unwrap();
        let handle = session.allreduce_async(tensor, named("hold")).unwrap();
        session.barrier().unwrap(); // both are in flight
        if session.rank() == 0 {
            session.abort("the user has seen enough");
        }
        let failure = failure(handle.wait().unwrap_err());
        if session.rank() == 0 {
            assert_eq!(failure.what, "the user has seen enough");
        } else {
            assert_eq!(failure.kind, FailureKind::WorkerLost);
        }
    });
}

#[test]
fn a_deadline_returns_the_handle() {
    let (_daemon, session) = FakeDaemon::alone();
    let tensor = session.tensor(&[5.0f32], &[]).unwrap();
    let handle = session.allreduce_async(tensor, named("hold")).unwrap();
    assert!(!handle.is_finished());
    let start = Instant::now();
    let within = Duration::from_millis(50);
    let handle = match handle.wait_timeout(within) {
        Err(WaitError::Timeout { handle, .. }) => handle,
        other => panic!("{other:?}"),
    };
    assert!(start.elapsed() >= within);
    session.barrier().unwrap();
    session.allreduce_slice(&mut [0.0f32], named("release")).unwrap();
    assert_eq!(handle.wait_timeout(Duration::from_secs(20)).unwrap().as_slice(), [5.0]);
}

/// Runs a future to its end in this thread, which sleeps while the future waits.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(thread::current())).into();
    let (mut future, mut context) = (pin!(future), Context::from_waker(&waker));
    let begin = Instant::now();
    loop {
        if let Poll::Ready(result) = future.as_mut().poll(&mut context) {
            return result;
        }
        assert!(begin.elapsed() < Duration::from_secs(20), "nobody woke it");
        thread::park_timeout(Duration::from_secs(20));
    }
}

#[test]
fn a_handle_is_a_future() {
    ranks(2, |session| {
        let start = |name: &str| {
            let tensor = session.tensor(&[3.0f32], &[1]).unwrap();
            session.allreduce_async(tensor, named(name)).unwrap()
        };
        block_on(async {
            let (first, second) = (start("first"), start("second"));
            assert_eq!(second.await.unwrap()[0], 6.0);
            assert_eq!(first.await.unwrap()[0], 6.0);
            // Each of them waits for the other rank, which may be late.
            for round in 0..50 {
                let number = session.allgather_object_async(&round, Default::default()).unwrap();
                assert_eq!(number.await.unwrap(), [round, round]);
                assert_eq!(start(&format!("round{}", round % 3)).await.unwrap()[0], 6.0);
            }
            let failed = start("fail").await.unwrap_err();
            assert_eq!(failure(failed).kind, FailureKind::Disagreement);
        });
    });
}

#[test]
fn a_future_learns_that_the_job_has_failed() {
    let (_daemon, session) = FakeDaemon::alone();
    let tensor = session.zeros::<f32>(&[8]).unwrap();
    let handle = session.allreduce_async(tensor, named("hold")).unwrap();
    thread::scope(|scope| {
        let waits = scope.spawn(|| block_on(handle).unwrap_err());
        thread::sleep(Duration::from_millis(50));
        session.abort("enough");
        assert_eq!(failure(waits.join().unwrap()).what, "enough");
    });
}

#[test]
fn a_blocking_call_out_of_time_ends_the_session() {
    let (_daemon, session) = FakeDaemon::alone();
    let hasty = session.within(Duration::from_millis(50));
    hasty.barrier().unwrap();
    let mut tensor = session.tensor(&[1.0f32; 4], &[4]).unwrap();
    let late = failure(hasty.allreduce(&mut tensor, named("hold")).unwrap_err());
    assert_eq!(late.kind, FailureKind::Timeout);
    assert!(late.what.contains("'hold' did not complete within 50ms"), "{late}");
    assert_eq!(tensor.as_slice(), [1.0; 4]);
    assert_eq!(failure(session.barrier().unwrap_err()).kind, FailureKind::Timeout);
}

#[test]
fn a_refused_start_returns_the_tensor() {
    let (_daemon, session) = FakeDaemon::alone();
    let tensor = session.tensor(&[1.0f32, 2.0], &[2]).unwrap();
    let refused = session.allreduce_async(tensor, named("")).unwrap_err();
    assert!(refused.error.to_string().contains("tensor name"), "{refused}");
    let tensor = refused.tensor;
    assert_eq!((tensor.len(), tensor[1], tensor.iter().sum::<f32>()), (2, 2.0, 3.0));
    session.allreduce_async(tensor, named("again")).unwrap().wait().unwrap();
}

#[test]
fn unnamed_calls_of_two_threads_are_refused() {
    let daemon = FakeDaemon::start(1);
    let session = daemon.rank(0).attach().unwrap();
    let tensor = || session.zeros::<f32>(&[1]).unwrap();
    let held = session.allreduce_async(tensor(), named("hold")).unwrap();
    let gate = Gate::new();
    let own = session.behind(&gate).allreduce_async(tensor(), Default::default()).unwrap();
    let other = || session.allreduce_async(tensor(), AllreduceOptions::default());
    thread::scope(|scope| {
        let refused = scope.spawn(|| other().unwrap_err().to_string()).join().unwrap();
        assert!(refused.contains("'allreduce.#1', and now another allreduce"), "{refused}");
        scope.spawn(|| session.barrier().unwrap()); // another kind
        gate.open();
        own.wait().unwrap();
        scope.spawn(|| other().unwrap().wait().unwrap()); // one after the other
    });
    drop(held);
}

#[test]
fn a_panic_is_the_reason_for_the_other_ranks() {
    let daemon = FakeDaemon::start(1);
    let builder = daemon.rank(0);
    let died = thread::spawn(move || {
        let _session = builder.attach().unwrap();
        panic!("the loss is {}", "NaN");
    });
    assert!(died.join().is_err());
    let reason = daemon.reason();
    assert!(reason.contains("it panicked at ") && reason.contains("the loss is NaN"), "{reason}");
}

#[test]
fn splits_that_leave_rows_are_refused() {
    let (_daemon, session) = FakeDaemon::alone();
    let tensor = session.tensor(&[1, 2, 3], &[3]).unwrap();
    let two = AlltoallOptions::default().splits(&[2]);
    let error = session.alltoall(&tensor, two.clone()).unwrap_err().to_string();
    assert!(error.contains("rank 0 add up to 2 rows, but its tensor has 3"), "{error}");
    assert_eq!(session.alltoall(&tensor, two.leave_rest()).unwrap().tensor.as_slice(), [1, 2]);
}

#[test]
fn memory_is_kept_after_its_handle_is_dropped() {
    let (_daemon, session) = FakeDaemon::alone();
    let tensor = session.zeros::<f32>(&[1000]).unwrap();
    let used = session.stats().arena.used;
    drop(session.allreduce_async(tensor, named("hold")).unwrap());
    assert_eq!((session.stats().arena.used, session.stats().in_flight), (used, 1));
    session.allreduce_slice(&mut [0.0f32], named("release")).unwrap();
    session.barrier().unwrap();
    assert_eq!((session.stats().arena.used, session.stats().in_flight), (0, 0));
}

#[test]
fn impossible_calls_are_named_and_start_nothing() {
    let (_daemon, session) = FakeDaemon::alone();
    let held = session.allreduce_async(session.zeros::<f32>(&[1]).unwrap(), named("hold")).unwrap();
    let mut floats = [0.0f32];
    let mut numbers = [0i32];
    let bits = named("a").op(ReduceOp::BitOr);
    let cases = [
        (session.allreduce_slice(&mut floats, named("hold")), "'hold' is already in flight"),
        (session.allreduce_slice(&mut floats, named("")), "tensor name"),
        (session.allreduce_slice(&mut floats, named("a\n")), "control characters"),
        (session.allreduce_slice(&mut floats, named("a").prescale(f64::NAN)), "finite"),
        (session.allreduce_slice(&mut numbers, bits.postscale(0.5)), "to bits"),
        (session.broadcast_slice(&mut floats, BroadcastOptions::from_rank(1)), "root, rank 1"),
        (session.tensor(&[1.0f32], &[2]).map(drop), "2 elements, but 1 were given"),
        (session.allreduce_bytes(DType::F32, &mut [0; 7], named("a")), "7 bytes are not whole"),
        (session.buffer_from(DType::C64, &[0; 12]).map(drop), "c64, which have 8"),
        (session.zeros::<f32>(&[usize::MAX, 2]).map(drop), "shape"),
        (session.zeros::<f64>(&[1 << 52]).map(drop), "bytes"),
    ];
    for (result, text) in cases {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
    assert_eq!(session.stats().operations, 1);
    drop(held);
}

#[test]
fn a_large_tensor_fits_up_to_the_limit() {
    let daemon = FakeDaemon::start(1);
    let session = daemon.rank(0).arena_max_bytes(8 << 20).attach().unwrap();
    let mut tensor = session.zeros::<f64>(&[3 << 17]).unwrap(); // 3 MiB, segments have 1
    tensor.as_mut_slice()[(3 << 17) - 1] = 2.5;
    session.allreduce(&mut tensor, named("large")).unwrap();
    assert_eq!(tensor.as_slice()[(3 << 17) - 1], 2.5);
    let error = session.zeros::<f64>(&[1 << 20]).unwrap_err().to_string();
    assert!(error.contains("8388608"), "{error}");
}

#[test]
fn a_daemon_without_memory_refuses_one_tensor() {
    let (daemon, session) = FakeDaemon::alone();
    let first = session.zeros::<f32>(&[100]).unwrap();
    daemon.has_memory(false);
    let error = session.zeros::<f32>(&[2 << 20]).unwrap_err().to_string();
    assert!(error.contains("(gradwired) can't use it: it has no address space"), "{error}");
    session.allreduce_async(first, named("small")).unwrap().wait().unwrap();
    daemon.has_memory(true);
    let mut large = session.zeros::<f32>(&[2 << 20]).unwrap();
    session.allreduce(&mut large, named("large")).unwrap();
}

#[test]
fn memory_to_adopt_is_made_in_the_background() {
    let (daemon, session) = FakeDaemon::alone();
    let adopted = || session.stats().arena.adopted;
    let mut making: Vec<_> =
        (1..4).map(|mib| session.prepare_adoption(mib << 20).unwrap()).collect();
    assert_eq!(adopted(), 3, "each has its place already");
    let last = making.pop().unwrap();
    assert!(last.wait().is_ok());
    assert!(making.iter_mut().all(|earlier| earlier.is_done()), "they are made in order");
    assert_eq!(adopted(), 2, "what nobody uses is given back");
    drop(making);
    assert_eq!(adopted(), 0);
    daemon.has_memory(false);
    let refused = session.prepare_adoption(4096).unwrap().wait().unwrap_err().to_string();
    assert!(refused.contains("no address space"), "{refused}");
    assert_eq!(adopted(), 0);
    daemon.has_memory(true);
    let late = session.prepare_adoption(64 << 20).unwrap();
    session.shutdown().unwrap();
    drop(late.wait()); // it was made before, or fails: it does not hang
    assert!(matches!(session.prepare_adoption(4096), Err(GradwireError::Closed)));
}

#[test]
fn after_the_shutdown_nothing_starts() {
    let (_daemon, session) = FakeDaemon::alone();
    let other = session.clone();
    session.shutdown().unwrap();
    session.shutdown().unwrap();
    assert!(matches!(other.barrier(), Err(GradwireError::Closed)));
}
