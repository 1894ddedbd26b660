//! However a job ends, every waiting and every later call on every surviving rank fails with the
//! first cause, and every daemon reports the same (TELL). No call hangs (WAIT): every wait of the
//! tests has a limit.

use std::{
    os::fd::AsFd,
    sync::{Arc, Barrier, mpsc},
    thread,
    time::Duration,
};

use gradwire_daemon::Ending;
use gradwire_proto::{DType, Failure, FailureKind, Rank, ReduceOp, Request, Shape};
use gradwire_services::launch::{Notice, ProcessEnd};
use gradwire_shm::control::{Submission, WorkerControl};
use gradwire_tests::{
    calls::failure,
    cluster::{Cluster, Plan, Ranks},
    raw::{RawWorker, Stranger, attach, submission},
};
use gradwire_worker::{
    AllgatherOptions, AllreduceOptions, BroadcastOptions, GradwireError, JoinOptions, Session,
};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

fn sum(name: &str) -> AllreduceOptions {
    AllreduceOptions::named(name).op(ReduceOp::Sum)
}

/// Waits for a tensor that is never complete, and then makes other calls of all kinds.
fn wait_for_the_end(session: &Session, name: &str) -> Failure {
    let cause = failure(session.allreduce_slice(&mut [1.0f32; 100], sum(name)));
    let later = [
        failure(session.allreduce_slice(&mut [1i32], sum("later"))),
        failure(session.broadcast_slice(&mut [1u8], BroadcastOptions::from_rank(0))),
        failure(session.barrier()),
        failure(session.zeros::<f32>(&[4])),
        failure(session.shutdown()),
    ];
    for later in later {
        assert_eq!(later, cause);
    }
    cause
}

/// Asserts that every rank and every daemon names the same cause; returns it.
#[track_caller]
fn one_cause(cluster: Cluster, survivors: Ranks<Failure>) -> Failure {
    let reported = survivors.join().unwrap();
    for ending in cluster.finish().unwrap() {
        assert_eq!(ending, Ending::Failed(reported[0].clone()));
    }
    assert!(reported.iter().all(|failure| *failure == reported[0]), "{reported:?}");
    reported[0].clone()
}

/// Submits a tensor of `elements` f32 at the start of the worker's first segment.
fn submit(raw: &RawWorker, ticket: u64, name: &str, elements: u64) {
    let shape = Shape::new(&[elements]).unwrap();
    let request = Request::allreduce(DType::F32, shape, ReduceOp::Sum);
    raw.submit(&submission(ticket, name, request)).unwrap();
}

#[test]
fn a_rank_that_dies_before_any_call_is_named() {
    let cluster = Cluster::start(&Plan::patient(&[2, 2])).unwrap();
    let survivors = cluster.start_ranks(0..3, |session| wait_for_the_end(session, "w")).attached();
    drop(RawWorker::attach(&cluster, 3).unwrap());
    let cause = one_cause(cluster, survivors);
    assert_eq!((cause.kind, cause.rank), (FailureKind::WorkerLost, Some(Rank(3))));
    assert_eq!(cause.host, "node-1");
    let pid = format!("pid {}", std::process::id());
    assert!(
        cause.text().contains(&pid) && cause.text().contains("without leaving the job"),
        "{cause}"
    );
}

#[test]
fn a_rank_that_dies_is_named_with_its_tensor() {
    let cluster = Cluster::start(&Plan::patient(&[2, 2])).unwrap();
    let survivors = cluster.start_ranks(0..3, |session| wait_for_the_end(session, "w")).attached();
    let mut raw = RawWorker::attach(&cluster, 3).unwrap();
    raw.add_segment(1 << 20).unwrap();
    submit(&raw, 1, "fc.weight", 77);
    // An invalid submission is answered at once, after the daemon has read the earlier ones.
    let nowhere = submission(2, "nowhere", Request::barrier());
    raw.submit(&Submission { process_set: 9, ..nowhere }).unwrap();
    assert!(raw.receive().unwrap().is_some());
    drop(raw);
    let cause = one_cause(cluster, survivors);
    assert_eq!((cause.kind, cause.rank), (FailureKind::WorkerLost, Some(Rank(3))));
    assert_eq!((cause.host.as_str(), cause.tensor.as_str()), ("node-1", "fc.weight"));
}

/// The data threads are using its memory, on both nodes.
#[test]
fn a_rank_that_dies_during_a_transfer_is_named() {
    const ELEMENTS: usize = 4 << 20;
    for delay in [0, 2, 10] {
        let plan = Plan::patient(&[2, 2]).set("negotiation.piece_bytes=256KiB");
        let cluster = Cluster::start(&plan).unwrap();
        let survivors = cluster
            .start_ranks(0..3, |session| {
                // The tensor may still be done in time, but no later one can be.
                let tensor = session.tensor(&vec![1.0f32; ELEMENTS], &[ELEMENTS]);
                let large = tensor.and_then(|mut t| session.allreduce(&mut t, sum("large")));
                let cause = wait_for_the_end(session, "w");
                assert!(large.is_ok() || failure(large) == cause);
                cause
            })
            .attached();
        let mut raw = RawWorker::attach(&cluster, 3).unwrap();
        raw.add_segment(4 * ELEMENTS as u64).unwrap();
        submit(&raw, 1, "large", ELEMENTS as u64);
        thread::sleep(Duration::from_millis(delay));
        drop(raw);
        let cause = one_cause(cluster, survivors);
        assert_eq!((cause.kind, cause.rank), (FailureKind::WorkerLost, Some(Rank(3))));
    }
}

#[test]
fn a_rank_that_dies_between_two_steps_is_named() {
    let cluster = Cluster::start(&Plan::patient(&[1, 1])).unwrap();
    let (done, is_done) = mpsc::channel();
    let survivors = cluster.start_ranks([0], move |session| {
        let mut tensor = [1.0f32; 10];
        session.allreduce_slice(&mut tensor, sum("step")).unwrap();
        assert_eq!(tensor, [1.0; 10], "the other rank's memory is all zeros");
        done.send(()).unwrap();
        wait_for_the_end(session, "step")
    });
    let mut raw = RawWorker::attach(&cluster, 1).unwrap();
    raw.add_segment(4096).unwrap();
    submit(&raw, 1, "step", 10);
    let seen = raw.control.epoch();
    while raw.control.pop_completion().unwrap().is_none() {
        raw.control.wait(seen, Duration::from_millis(10), Duration::ZERO);
    }
    // The other node may still be working on it.
    is_done.recv_timeout(Duration::from_secs(60)).unwrap();
    drop(raw);
    let cause = one_cause(cluster, survivors);
    assert_eq!((cause.kind, cause.rank), (FailureKind::WorkerLost, Some(Rank(1))));
    assert_eq!((cause.host.as_str(), cause.tensor.as_str()), ("node-1", ""));
}

/// A job in which the process of rank 1 has its slot while the world forms, but has ended when the
/// world is complete. The agent reports its end at that moment.
fn dead_before_the_world_forms(end: ProcessEnd) -> (Cluster, UnboundedSender<Notice>) {
    let plan = Plan::nodes(&[2, 1]).set("launch.grace_ms=500");
    let mut cluster = Cluster::without_daemons(&plan).unwrap();
    let (agent, notices) = unbounded_channel();
    let first = cluster.daemon_with_agent(0, notices).unwrap();
    let dead = Stranger::connect(&cluster.socket(0)).unwrap();
    let (_, page) = WorkerControl::create("gradwire-test-dead", 1).unwrap();
    let message = attach(&cluster, 1, &dead.challenge().unwrap(), |_| ());
    dead.say(message, &[page.as_fd()]).unwrap();
    drop(dead);
    agent.send(Notice::Ended { rank: Rank(1), end }).unwrap();
    let second = cluster.daemon(1, &[]).unwrap();
    cluster.daemons.extend([first, second]);
    (cluster, agent)
}

/// WAIT: otherwise the others would wait for it for ever.
#[test]
fn a_rank_that_ends_too_early_is_not_waited_for() {
    let (cluster, _agent) = dead_before_the_world_forms(ProcessEnd::Code(0));
    let others = cluster.start_ranks([0, 2], |session| {
        failure(session.allreduce_slice(&mut [1.0f32; 100], sum("t")))
    });
    for failure in others.join().unwrap() {
        assert_eq!(failure.rank, Some(Rank(1)), "{failure}");
        assert!(failure.text().contains("its process ended with exit code 0 before"), "{failure}");
    }
    cluster.finish().unwrap();
}

#[test]
fn a_rank_that_dies_too_early_is_named() {
    let (cluster, _agent) = dead_before_the_world_forms(ProcessEnd::Signal(9));
    for ending in cluster.finish().unwrap() {
        let Ending::Failed(failure) = ending else { panic!("{ending:?}") };
        assert_eq!((failure.kind, failure.rank), (FailureKind::WorkerLost, Some(Rank(1))));
        let what = "its process was killed by SIGKILL before it had joined the job";
        assert!(failure.text().contains(what), "{failure}");
    }
}

#[test]
fn a_rank_that_shows_no_sign_of_life_is_named() {
    let plan = Plan::nodes(&[1, 1]).set("heartbeat.timeout_ms=1500").set("launch.grace_ms=300");
    let cluster = Cluster::start(&plan).unwrap();
    let survivors = cluster.start_ranks([0], |session| wait_for_the_end(session, "w")).attached();
    let raw = RawWorker::attach(&cluster, 1).unwrap();
    let cause = one_cause(cluster, survivors);
    assert_eq!((cause.kind, cause.rank), (FailureKind::WorkerLost, Some(Rank(1))));
    assert!(cause.text().contains("no heartbeat"), "{cause}");
    assert_eq!(raw.aborted().unwrap(), cause);
}

#[test]
fn the_reason_of_an_abort_is_reported_to_all() {
    let cluster = Cluster::start(&Plan::nodes(&[2, 1])).unwrap();
    let survivors = cluster.start_ranks([0, 2], |session| {
        session.barrier().unwrap();
        wait_for_the_end(session, "w")
    });
    let own = cluster.start_ranks([1], |session| {
        let tensor = session.zeros::<f32>(&[100]).unwrap();
        let waiting = session.allreduce_async(tensor, sum("mine")).unwrap();
        // After the barrier, the daemon knows the earlier submission.
        session.barrier().unwrap();
        session.abort("the data set is empty");
        let cause = failure(waiting.wait());
        assert_eq!(failure(session.barrier()), cause);
        cause
    });
    let own = own.join().unwrap();
    assert_eq!((own[0].kind, own[0].host.as_str()), (FailureKind::Cancelled, "node-0"));
    assert_eq!(own[0].what, "the data set is empty");
    let cause = one_cause(cluster, survivors);
    assert_eq!((cause.kind, cause.rank), (FailureKind::WorkerLost, Some(Rank(1))));
    assert_eq!((cause.host.as_str(), cause.tensor.as_str()), ("node-0", "mine"));
    assert!(cause.text().ends_with("gave up: the data set is empty"), "{cause}");
}

#[test]
fn a_session_dropped_by_a_panic_has_failed() {
    let cluster = Cluster::start(&Plan::nodes(&[1, 1])).unwrap();
    let survivors = cluster.start_ranks([0], |session| wait_for_the_end(session, "w"));
    let own = cluster.start_ranks([1], |_| panic!("on purpose: as an error that leaves main"));
    let cause = one_cause(cluster, survivors);
    assert!(own.join().is_err());
    assert_eq!((cause.kind, cause.rank), (FailureKind::WorkerLost, Some(Rank(1))));
    assert!(cause.text().contains("gave up: it panicked at "), "{cause}");
    assert!(cause.text().contains("on purpose: as an error that leaves main"), "{cause}");
}

/// Ranks that wait in several threads for a tensor that the last rank does not submit. They pass
/// `begun` just before.
fn waiting_ranks(cluster: &Cluster, begun: &Arc<Barrier>) -> Ranks<Failure> {
    let begun = begun.clone();
    cluster.start_ranks(0..cluster.size(), move |session| {
        session.barrier().unwrap();
        begun.wait();
        let last = session.rank() + 1 == session.size();
        let name = if last { "only on the last rank" } else { "w" };
        let others: Vec<_> = (0..3)
            .map(|index| {
                let session = session.clone();
                let name = format!("{name}.{index}");
                thread::spawn(move || {
                    failure(session.allreduce_slice(&mut vec![1u8; 1 << 17], sum(&name)))
                })
            })
            .collect();
        let cause = wait_for_the_end(session, name);
        for other in others {
            assert_eq!(other.join().unwrap(), cause);
        }
        cause
    })
}

fn ended_by(plan: &Plan, end: impl FnOnce(&mut Cluster)) -> Failure {
    let mut cluster = Cluster::start(plan).unwrap();
    let begun = Arc::new(Barrier::new(cluster.size() as usize + 1));
    let ranks = waiting_ranks(&cluster, &begun);
    begun.wait();
    end(&mut cluster);
    one_cause(cluster, ranks)
}

#[test]
fn asking_a_daemon_to_end_ends_the_job() {
    let cause = ended_by(&Plan::nodes(&[2, 1, 1]), |cluster| cluster.daemons[1].stop.cancel());
    assert_eq!((cause.kind, cause.host.as_str()), (FailureKind::Cancelled, "node-1"));
    assert!(cause.text().contains("gradwired was asked to end"), "{cause}");
}

#[test]
fn asking_the_coordinator_to_end_ends_the_job() {
    let cause = ended_by(&Plan::nodes(&[2, 1]), |cluster| cluster.stop_coordinator.cancel());
    assert_eq!(cause.kind, FailureKind::Cancelled);
    assert!(cause.text().contains("the coordinator was asked to end"), "{cause}");
}

#[test]
fn the_death_of_the_coordinator_ends_the_job() {
    let plan = Plan::nodes(&[2, 1]).set("recovery.return_timeout_ms=500");
    let cause = ended_by(&plan, Cluster::kill_coordinator);
    assert_eq!(cause.kind, FailureKind::CoordinatorLost);
    assert!(cause.text().contains("the coordinator at 127.0.0.1:"), "{cause}");
    assert!(cause.text().contains("was not made again within 500 ms"), "{cause}");
}

/// Its sockets stay open, so only the missing heartbeats show it.
#[test]
fn a_frozen_coordinator_ends_the_job() {
    let plan = Plan::nodes(&[2, 1]).set("heartbeat.interval_ms=200");
    let plan = plan.set("heartbeat.timeout_ms=1500").set("recovery.return_timeout_ms=1000");
    let mut cluster = Cluster::start(&plan).unwrap();
    let begun = Arc::new(Barrier::new(4));
    let ranks = waiting_ranks(&cluster, &begun);
    begun.wait();
    cluster.freeze_coordinator(Duration::from_secs(5));
    let reported = ranks.join().unwrap();
    for cause in reported {
        assert_eq!(cause.kind, FailureKind::CoordinatorLost);
        assert!(cause.text().contains("has been silent for"), "{cause}");
        assert!(cause.details.hint.contains("it is stopped"), "{cause}");
    }
    cluster.kill_coordinator();
    for ending in cluster.finish().unwrap() {
        let Ending::Failed(failure) = ending else { panic!("{ending:?}") };
        assert_eq!(failure.kind, FailureKind::CoordinatorLost);
    }
}

/// Nodes open other streams, on which the coordinator continues when it runs again.
#[test]
fn a_coordinator_that_comes_back_in_time_goes_on() {
    let plan = Plan::nodes(&[2, 1]).set("heartbeat.interval_ms=200");
    let plan = plan.set("heartbeat.timeout_ms=1500");
    let cluster = Cluster::start(&plan).unwrap();
    let begun = Arc::new(Barrier::new(4));
    let again = begun.clone();
    let ranks = cluster.start_ranks([0, 1, 2], move |session| {
        session.barrier().unwrap();
        again.wait();
        for step in 0..20 {
            let mut values = [1_u64; 1000];
            session.allreduce_slice(&mut values, sum(&format!("step {step}"))).unwrap();
            assert_eq!(values, [3; 1000]);
            thread::sleep(Duration::from_millis(50));
        }
        session.shutdown().unwrap();
    });
    begun.wait();
    cluster.freeze_coordinator(Duration::from_secs(4));
    ranks.join().unwrap();
    for ending in cluster.finish().unwrap() {
        assert_eq!(ending, Ending::Finished);
    }
}

#[test]
fn ranks_may_leave_at_different_times() {
    let cluster = Cluster::start(&Plan::nodes(&[2, 1])).unwrap();
    cluster
        .ranks(|session| {
            session.barrier().unwrap();
            thread::sleep(Duration::from_millis(30 * u64::from(session.rank())));
            session.shutdown().unwrap();
            session.shutdown().unwrap(); // a second call is not an error
            let after = session.allreduce_slice(&mut [1u8], sum("after")).unwrap_err();
            assert!(matches!(after, GradwireError::Closed), "{after}");
        })
        .unwrap();
    for ending in cluster.finish().unwrap() {
        assert_eq!(ending, Ending::Finished);
    }
}

/// TELL: failures that the socket does not accept are kept for the worker, in order.
#[test]
fn failures_that_are_read_late_are_not_lost() {
    const SUBMISSIONS: u64 = 4000;
    let cluster = Cluster::start(&Plan::patient(&[2])).unwrap();
    let other = cluster.start_ranks([0], |session| wait_for_the_end(session, "w")).attached();
    let raw = RawWorker::attach(&cluster, 1).unwrap();
    for ticket in 1..=SUBMISSIONS {
        let nowhere = submission(ticket, &format!("nowhere.{ticket}"), Request::barrier());
        let nowhere = Submission { process_set: 9, ..nowhere };
        // The ring may be full until the daemon has read more.
        while raw.submit(&nowhere).is_err() {
            thread::yield_now();
        }
    }
    // Long enough for the daemon to answer most submissions.
    thread::sleep(Duration::from_millis(300));
    for ticket in 1..=SUBMISSIONS {
        let (tickets, failure) = raw.failed().unwrap();
        assert_eq!((tickets, failure.tensor), (vec![ticket], format!("nowhere.{ticket}")));
    }
    drop(raw);
    let cause = one_cause(cluster, other);
    assert_eq!((cause.kind, cause.rank), (FailureKind::WorkerLost, Some(Rank(1))));
}

/// The others continue without the rank, but it can't take part again after the join.
#[test]
fn a_rank_that_leaves_while_it_joins_is_named() {
    let cluster = Cluster::start(&Plan::patient(&[2, 1])).unwrap();
    let survivors = cluster.start_ranks([0, 2], |session| {
        loop {
            if let Err(GradwireError::Failed(cause)) =
                session.allreduce_slice(&mut [1i32], sum("w"))
            {
                return cause;
            }
        }
    });
    let leaver = cluster.start_ranks([1], |session| {
        let join = session.join_async(JoinOptions::default()).unwrap();
        // Long enough for the daemon to see the join.
        drop(join.wait_timeout(Duration::from_millis(300)).unwrap_err());
        failure(session.shutdown())
    });
    let left = leaver.join().unwrap().remove(0);
    let cause = one_cause(cluster, survivors);
    assert_eq!((left, cause.rank), (cause.clone(), Some(Rank(1))));
    assert!(
        cause.text().contains("it was in the join of process set 0: wait for the join first"),
        "{cause}"
    );
}

/// The rank leaves before or after it is asked for room. No other rank waits for ever (WAIT).
#[test]
fn a_rank_that_leaves_before_its_room_is_named() {
    for _ in 0..4 {
        let cluster = Cluster::start(&Plan::nodes(&[2])).unwrap();
        let results = cluster.ranks(|session| {
            let rows = session.rank() as usize + 1;
            let tensor = session.zeros::<f32>(&[rows]).unwrap();
            let options = AllgatherOptions::default().name("rows");
            if session.rank() == 0 {
                drop(session.allgather_async(tensor, options).unwrap());
                let _ = session.shutdown();
                return Ok(3);
            }
            session.allgather(&tensor, options).map(|all| all.tensor.as_slice().len())
        });
        match &results.unwrap()[1] {
            Ok(rows) => assert_eq!(*rows, 3),
            Err(GradwireError::Failed(cause)) => {
                assert_eq!((cause.kind, cause.rank), (FailureKind::RankLeft, Some(Rank(0))));
            }
            Err(other) => panic!("{other}"),
        }
        drop(cluster.finish());
    }
}
