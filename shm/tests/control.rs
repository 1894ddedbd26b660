//! Both sides of a control page in one process: waiting, waking, several threads, heartbeats.

use std::{
    collections::BTreeSet,
    os::fd::{AsFd, BorrowedFd},
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use gradwire_shm::control::{
    Completion, CompletionWriter, DaemonControl, Doorbell, Heartbeats, Progress, SubmissionReader,
    SubmitError, WorkerControl,
};
use gradwire_trace::{Kind, ring::SLOT_WORDS, tracer::RING_BYTES};

mod common;

use common::MAX_IN_FLIGHT;

const LONG: Duration = Duration::from_secs(60);
const SPIN: Duration = Duration::from_micros(50);

fn both() -> (WorkerControl, SubmissionReader, CompletionWriter, Heartbeats) {
    let (worker, fd) = WorkerControl::create("gradwire-test-control", MAX_IN_FLIGHT).unwrap();
    let daemon = DaemonControl::open(fd, MAX_IN_FLIGHT).unwrap();
    (worker, daemon.submissions, daemon.completions, daemon.heartbeats)
}

#[test]
fn a_wait_ends_with_an_answer_or_its_timeout() {
    let (worker, _, writer, _) = both();
    let seen = worker.epoch();
    let start = Instant::now();
    assert!(!worker.wait(seen, Duration::from_millis(30), SPIN), "nothing arrived");
    assert!(start.elapsed() >= Duration::from_millis(30));

    thread::scope(|scope| {
        let waiter = scope.spawn(|| worker.wait(seen, LONG, SPIN));
        thread::sleep(Duration::from_millis(20));
        writer.push(Completion { ticket: 5, aux: 9 }).unwrap();
        assert!(waiter.join().unwrap());
    });
    // An answer from before the wait ends it, too.
    assert!(worker.wait(seen, LONG, SPIN));
    assert_eq!(worker.pop_completion(), Ok(Some(Completion { ticket: 5, aux: 9 })));
    assert_eq!(worker.pop_completion(), Ok(None));

    let seen = worker.epoch();
    thread::scope(|scope| {
        let waiters: Vec<_> =
            (0..3).map(|_| scope.spawn(|| worker.wait(seen, LONG, Duration::ZERO))).collect();
        thread::sleep(Duration::from_millis(20));
        worker.wake_all();
        assert!(waiters.into_iter().all(|waiter| waiter.join().unwrap()));
    });
    // The shortest and the longest timeout are both possible.
    assert!(!worker.wait(worker.epoch(), Duration::ZERO, Duration::MAX));
    assert!(worker.wait(seen, Duration::MAX, Duration::MAX));
}

/// How a rank spends its time: steps, blocked threads, operations in flight. Overlapping times
/// count once, and unfinished ones count, too.
#[test]
fn the_daemon_sees_how_a_rank_spends_its_time() {
    const PAUSE: Duration = Duration::from_millis(20);
    let (worker, fd) = WorkerControl::create("gradwire-test-activity", MAX_IN_FLIGHT).unwrap();
    let DaemonControl { mut submissions, completions, activity, .. } =
        DaemonControl::open(fd, MAX_IN_FLIGHT).unwrap();
    let begin = Instant::now();
    assert_eq!(activity.look(), Progress::default());
    worker.mark_step();
    worker.mark_step();
    let blocked = [worker.block(), worker.block()];
    for ticket in 0..2 {
        let _ = worker.submit(&common::submission(ticket)).unwrap();
        submissions.pop().unwrap().unwrap();
    }
    thread::sleep(PAUSE);
    let during = activity.look();
    assert_eq!(during.steps, 2);
    assert!(during.since_step.is_some_and(|since| since >= PAUSE), "{during:?}");
    thread::sleep(PAUSE);
    drop(blocked);
    completions.push(Completion { ticket: 0, aux: 0 }).unwrap();
    completions.answered();
    let after = activity.look();
    let all = begin.elapsed();
    for (during, after) in [(during.blocked, after.blocked), (during.in_flight, after.in_flight)] {
        assert!(during >= PAUSE && after >= PAUSE && during + after <= all, "{during:?} {after:?}");
    }
    assert_eq!(after.steps, 0);
    thread::sleep(PAUSE);
    let idle = activity.look();
    assert_eq!((idle.blocked, idle.in_flight), (Duration::ZERO, Duration::ZERO));
}

#[test]
fn a_stuck_rank_is_seen_until_anything_changes() {
    let (worker, fd) = WorkerControl::create("gradwire-test-stuck", MAX_IN_FLIGHT).unwrap();
    let DaemonControl { mut submissions, completions, activity, .. } =
        DaemonControl::open(fd, MAX_IN_FLIGHT).unwrap();
    assert_eq!(activity.stuck(), None);
    for ticket in [4, 5] {
        let _ = worker.submit(&common::submission(ticket)).unwrap();
    }
    worker.say_stuck(worker.epoch(), 5);
    submissions.pop().unwrap();
    assert_eq!(activity.stuck(), None, "a submission is not read yet");
    submissions.pop().unwrap();
    assert_eq!(activity.stuck(), Some((5, 2)));
    completions.push(Completion { ticket: 4, aux: 0 }).unwrap();
    assert_eq!(activity.stuck(), None, "an answer is on its way");
    worker.pop_completion().unwrap();
    worker.say_stuck(worker.epoch(), 5);
    assert_eq!(activity.stuck(), Some((5, 1)));
    worker.take_back_stuck();
    assert_eq!(activity.stuck(), None);
    // A failure goes over the socket.
    worker.say_stuck(worker.epoch(), 5);
    completions.answered();
    assert_eq!(activity.stuck(), None, "a failure is on its way");
}

/// Without a trace a rank records sampled steps, from their beginning to their end.
#[test]
fn a_rank_records_sampled_steps() {
    let (worker, fd) = WorkerControl::create("gradwire-test-samples", MAX_IN_FLIGHT).unwrap();
    let DaemonControl { trace, .. } = DaemonControl::open(fd, MAX_IN_FLIGHT).unwrap();
    let read = || {
        let mut found = Vec::new();
        trace.read(usize::MAX, |event| found.push((event.kind, event.subject)));
        found
    };
    let submit = |ticket| {
        if let Some(began) = worker.traced() {
            worker.record(Kind::Submit, began, ticket);
        }
    };
    trace.sample(3).unwrap();
    for step in 1..=7 {
        submit(step);
        assert_eq!(trace.is_sampled(), step % 3 == 0, "step {step}");
        worker.mark_step();
    }
    let step = |number| (Kind::Step, number);
    let sampled = |number| [step(number - 1), (Kind::Submit, number), step(number)];
    assert_eq!(read(), [sampled(3), sampled(6)].concat());
    // A trace of the job begins meanwhile: nothing of the step is lost.
    worker.mark_step();
    trace.turn(true).unwrap();
    submit(9);
    worker.mark_step();
    assert!(!trace.is_sampled());
    submit(10);
    trace.turn(false).unwrap();
    submit(11);
    worker.mark_step();
    assert_eq!(read(), [&sampled(9)[..], &[(Kind::Submit, 10)]].concat());
    // The recording of a step that takes too long ends.
    worker.mark_step();
    assert!(trace.is_sampled());
    trace.end_sample();
    submit(12);
    worker.mark_step();
    assert_eq!(read(), [step(11)]);
    // Without samples nothing is recorded outside of a trace.
    trace.sample(0).unwrap();
    (0..4).for_each(|_| worker.mark_step());
    assert!(read().is_empty() && worker.traced().is_none());
}

/// The trace ring has megabytes, which are taken only when it is needed.
#[test]
fn the_trace_ring_takes_memory_when_needed() {
    let taken = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).unwrap().st_blocks * 512;
    let ring = RING_BYTES as i64;
    let (worker, fd) = WorkerControl::create("gradwire-test-ring", MAX_IN_FLIGHT).unwrap();
    let file = fd.try_clone().unwrap();
    let DaemonControl { trace, .. } = DaemonControl::open(fd, MAX_IN_FLIGHT).unwrap();
    let before = taken(file.as_fd());
    assert!(before < ring, "{before}");
    trace.turn(true).unwrap();
    assert!(taken(file.as_fd()) >= before + ring - 4096, "{before}");
    // All of it is used: no event is lost until it is full.
    let events = RING_BYTES / 8 / SLOT_WORDS;
    for number in 0..=events as u64 {
        worker.record(Kind::Submit, worker.traced().unwrap(), number);
    }
    let mut subjects = Vec::new();
    assert_eq!(trace.read(usize::MAX, |event| subjects.push(event.subject)), 1);
    assert!(subjects.iter().copied().eq(1..=events as u64));
}

#[test]
fn many_threads_submit_and_many_threads_answer() {
    const EACH: u64 = 2_000;
    let (worker, mut reader, writer, _) = both();
    let (answered, queue) = (Mutex::new(BTreeSet::new()), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for first in [0, EACH] {
            let worker = &worker;
            scope.spawn(move || {
                for ticket in first..first + EACH {
                    loop {
                        match worker.submit(&common::submission(ticket)) {
                            Ok(Doorbell::Ring | Doorbell::Quiet) => break,
                            Err(SubmitError::Full { .. } | SubmitError::TooMany { .. }) => {
                                thread::yield_now();
                            }
                            Err(error) => panic!("{error}"),
                        }
                    }
                }
            });
            scope.spawn(|| {
                loop {
                    let seen = worker.epoch();
                    while let Some(Completion { ticket, .. }) = worker.pop_completion().unwrap() {
                        assert!(
                            answered.lock().unwrap().insert(ticket),
                            "{ticket} was answered twice"
                        );
                    }
                    if answered.lock().unwrap().len() as u64 == 2 * EACH {
                        worker.wake_all(); // nothing else wakes the other one
                        break;
                    }
                    assert!(worker.wait(seen, LONG, SPIN));
                }
            });
            scope.spawn(|| {
                let mut done = 0;
                while done < EACH {
                    let Some(ticket) = queue.lock().unwrap().pop() else {
                        thread::yield_now();
                        continue;
                    };
                    writer.push(Completion { ticket, aux: 0 }).unwrap();
                    done += 1;
                }
            });
        }
        for _ in 0..2 * EACH {
            let submission = loop {
                match reader.pop().unwrap() {
                    Some(submission) => break submission,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(submission, common::submission(submission.ticket));
            queue.lock().unwrap().push(submission.ticket);
        }
    });
    assert_eq!(answered.into_inner().unwrap(), (0..2 * EACH).collect());
    assert_eq!((worker.in_flight(), writer.in_flight()), (0, 0));
}

#[test]
fn only_a_sleeping_daemon_needs_its_doorbell() {
    let (worker, mut reader, _, _) = both();
    assert_eq!(worker.submit(&common::submission(1)), Ok(Doorbell::Quiet));
    assert!(!reader.prepare_sleep(), "there is something to read");
    assert!(reader.pop().unwrap().is_some());
    assert!(reader.prepare_sleep());
    assert_eq!(worker.submit(&common::submission(2)), Ok(Doorbell::Ring));
    assert_eq!(worker.submit(&common::submission(3)), Ok(Doorbell::Quiet));
    assert_eq!(reader.pop().unwrap().unwrap().ticket, 2);
    assert_eq!(reader.pop().unwrap().unwrap().ticket, 3);
    assert!(reader.prepare_sleep());
    reader.awake();
    assert_eq!(worker.submit(&common::submission(4)), Ok(Doorbell::Quiet));
}

#[test]
fn a_full_ring_is_an_error_until_it_is_read() {
    let (worker, mut reader, _, _) = both();
    let mut submission = common::submission(0);
    submission.name = gradwire_proto::TensorName::new(&"n".repeat(1024)).unwrap();
    let full = loop {
        match worker.submit(&submission) {
            Ok(_) => submission.ticket += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(full, SubmitError::Full { capacity_bytes: 1 << 20 });
    assert_eq!(
        u64::from(worker.in_flight()),
        submission.ticket,
        "a refused submission is not in flight"
    );
    assert_eq!(reader.pop().unwrap().unwrap().ticket, 0);
    let _ = worker.submit(&submission).unwrap();
}

#[test]
fn an_invalid_request_never_leaves_the_worker() {
    let (worker, mut reader, _, _) = both();
    let mut submission = common::submission(1);
    submission.request.prescale = f64::NAN;
    let error = worker.submit(&submission).unwrap_err();
    assert!(matches!(error, SubmitError::Invalid(_)), "{error}");
    let mut submission = common::submission(2);
    submission.outputs.clear();
    let error = worker.submit(&submission).unwrap_err();
    assert!(matches!(error, SubmitError::Places { outputs: 0, .. }), "{error}");
    assert_eq!(reader.pop(), Ok(None));
}

#[test]
fn failures_over_the_socket_count_as_answers() {
    let (worker, mut reader, writer, _) = both();
    let _ = worker.submit(&common::submission(1)).unwrap();
    assert!(reader.pop().unwrap().is_some());
    assert_eq!((worker.in_flight(), writer.in_flight()), (1, 1));
    writer.answered();
    worker.answered();
    assert_eq!((worker.in_flight(), writer.in_flight()), (0, 0));
    // An excess call does no harm.
    writer.answered();
    worker.answered();
    assert_eq!((worker.in_flight(), writer.in_flight()), (0, 0));
}

#[test]
fn each_side_sees_the_others_heartbeats() {
    let (worker, reader, _, beats) = both();
    assert_eq!((beats.count(), worker.daemon_beats()), (0, 0));
    worker.beat();
    worker.beat();
    beats.beat();
    assert_eq!((beats.count(), worker.daemon_beats()), (2, 1));
    assert_eq!(reader.claimed_pid(), std::process::id());
}
