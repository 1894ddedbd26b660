//! An attached worker that writes and sends invalid data. The job ends for every rank with a
//! failure that names the rank and the problem. The daemon neither faults, panics nor hangs (TRUST,
//! TELL).

use std::{
    fs::File,
    os::fd::AsFd,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use gradwire_daemon::Ending;
use gradwire_proto::{
    DType, Failure, FailureKind, Rank, ReduceOp, Request, Shape,
    pb::{self, daemon_message::Message as Reply, worker_message::Message as ToDaemon},
};
use gradwire_reference::Dice;
use gradwire_shm::{
    control::{Place, Submission},
    ring::MAX_RECORD_WORDS,
    segment::{HugePages, Segment},
};
use gradwire_tests::{
    cluster::{Cluster, Plan},
    raw::{RawWorker, attach, submission},
};
use gradwire_worker::{AllreduceOptions, GradwireError, Session};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

const SEGMENT: u64 = 64 << 10;

/// The default of `worker.max_in_flight`.
const MAX_IN_FLIGHT: u32 = 1 << 16;

/// Offsets in the control page, whose layout is in `gradwire_shm::control`.
const SUBMISSION_TAIL: u64 = 128;
const COMPLETION_HEAD: u64 = 512;
const RECORDS: u64 = 4096;

/// Calls allreduce until the job ends; returns the job's failure.
fn work(session: &Session) -> Failure {
    loop {
        let options = AllreduceOptions::named("w").op(ReduceOp::Sum);
        match session.allreduce_slice(&mut [1.0f32; 10], options) {
            Ok(()) => {}
            Err(GradwireError::Failed(failure)) => return failure,
            Err(other) => panic!("expected the job's failure, got {other}"),
        }
    }
}

/// Ranks 0 and 2 work, and rank 1 sends invalid data. Returns the failure that all of them receive.
fn end_of_job(evil: impl FnOnce(&Cluster, &mut RawWorker) -> Option<Failure>) -> Failure {
    let plan = Plan::patient(&[2, 1]);
    let cluster = Cluster::start(&plan).unwrap();
    let survivors = cluster.start_ranks([0, 2], work).attached();
    let mut raw = RawWorker::attach(&cluster, 1).unwrap();
    raw.add_segment(SEGMENT).unwrap();
    // Rank 1 receives the failure as well.
    let cause = evil(&cluster, &mut raw).unwrap_or_else(|| raw.aborted().unwrap());
    drop(raw);
    assert!(survivors.join().unwrap().iter().all(|failure| *failure == cause));
    for ending in cluster.finish().unwrap() {
        assert_eq!(ending, Ending::Failed(cause.clone()));
    }
    cause
}

#[track_caller]
fn nonsense(expected: &str, evil: impl FnOnce(&Cluster, &mut RawWorker)) {
    let cause = end_of_job(|cluster, raw| {
        evil(cluster, raw);
        None
    });
    assert_eq!((cause.kind, cause.rank), (FailureKind::Protocol, Some(Rank(1))), "{cause}");
    assert_eq!(cause.host, "node-0");
    assert!(cause.what.contains("sent nonsense to gradwired"), "{cause}");
    assert!(cause.what.contains(expected), "{expected:?} is not in: {cause}");
}

/// An allreduce of 16 f32.
fn sixteen() -> Request {
    Request::allreduce(DType::F32, Shape::new(&[16]).unwrap(), ReduceOp::Sum)
}

#[test]
fn places_outside_of_its_memory() {
    let bytes = SEGMENT;
    let cases: [(Place, &str); 6] = [
        (Place { segment: 0, offset: bytes - 60 }, "64 bytes at offset 65476 are not within"),
        (Place { segment: 0, offset: bytes }, "are not within segment 0 of 65536 bytes"),
        (Place { segment: 0, offset: u64::MAX - 59 }, "are not within segment 0"),
        (Place { segment: 0, offset: 2 }, "offset 2 in segment 0 is not a multiple of"),
        (Place { segment: 1, offset: 0 }, "segment 1 does not exist (1 were handed over)"),
        (Place { segment: u32::MAX, offset: 0 }, "segment 4294967295 does not exist"),
    ];
    for (place, expected) in cases {
        let evil = || submission(1, "evil", sixteen());
        nonsense("the input of tensor 'evil': ", |_, raw| {
            raw.submit(&Submission { inputs: vec![place], ..evil() }).unwrap()
        });
        nonsense(expected, |_, raw| {
            raw.submit(&Submission { outputs: vec![place], ..evil() }).unwrap()
        });
    }
}

#[test]
fn impossible_counters() {
    let write = |offset: u64, value: u64| {
        move |_: &Cluster, raw: &mut RawWorker| {
            raw.scribble(offset, &value.to_le_bytes()).unwrap();
            raw.ring().unwrap();
        }
    };
    nonsense("submissions: the ring's tail is", write(SUBMISSION_TAIL, 1 << 40));
    nonsense("submissions: the ring's tail is", write(SUBMISSION_TAIL, u64::MAX));
    nonsense("a record claims 0 words, but 9 are published", write(SUBMISSION_TAIL, 9));
    nonsense("completions: the ring's head is", |_, raw| {
        raw.scribble(COMPLETION_HEAD, &(1u64 << 40).to_le_bytes()).unwrap();
        // The daemon sees the wrong head when it has to answer.
        let shape = Shape::new(&[10]).unwrap();
        let request = Request::allreduce(DType::F32, shape, ReduceOp::Sum);
        raw.submit(&submission(1, "w", request)).unwrap();
    });
}

#[test]
fn invalid_records() {
    let name = u64::from_le_bytes(*b"evil\0\0\0\0");
    let one = 1f64.to_bits();
    // The words of a valid record in the ring, and their replacements.
    let kinds = |collective: u8, op: u8, origin: u8| {
        u64::from(u32::from_le_bytes([collective, op, origin, 0]))
    };
    let tensor = |dtype: u8, dims: u8| u64::from(u16::from_le_bytes([dtype, dims]));
    let record = |spoil: &[(usize, u64)]| {
        let fixed = [0, 1, 0, kinds(1, 1, 0), one, one, 4, 1];
        let mut words = [&fixed[..], &[tensor(1, 1), 0, 0, 0, 4, name]].concat();
        words[0] = words.len() as u64;
        spoil.iter().for_each(|(at, word)| words[*at] = *word);
        words
    };
    let most = MAX_RECORD_WORDS as u64 + 1;
    let too_long = format!("a record claims {most} words");
    let does_not_fit = "which does not match its length";
    let cases: Vec<(Vec<u64>, &str)> = vec![
        (vec![2, 7], "a submission of 2 words"),
        (vec![most; MAX_RECORD_WORDS + 1], &too_long),
        (record(&[(3, kinds(14, 1, 0))]), "collective has the unknown number 14"),
        (record(&[(8, tensor(0, 1))]), "element type has the unknown number 0"),
        (record(&[(3, kinds(1, 9, 0))]), "reduce operation has the unknown number 9"),
        (record(&[(3, kinds(1, 1, 200))]), "200"),
        (record(&[(8, tensor(1, 255))]), does_not_fit),
        (record(&[(7, 2)]), does_not_fit),
        (record(&[(7, 0)]), does_not_fit),
        (record(&[(7, u64::from(u32::MAX))]), does_not_fit),
        (record(&[(6, 4 | 7 << 32)]), does_not_fit),
        (record(&[(6, 4 | u64::from(u32::MAX) << 32)]), does_not_fit),
        (record(&[(6, u64::from(u32::MAX))]), does_not_fit),
        (record(&[(4, f64::NAN.to_bits())]), "prescale: NaN"),
        (record(&[(8, tensor(13, 1)), (5, 2f64.to_bits())]), "can't be applied to booleans"),
        (record(&[(3, kinds(1, 6, 0))]), "only integers and bool have bits to combine"),
        (record(&[(8, tensor(16, 1)), (3, kinds(1, 3, 0))]), "complex numbers can only be summed"),
        (record(&[(12, u64::MAX)]), "shape [18446744073709551615]"),
        (record(&[(13, u64::MAX)]), "is not valid UTF-8"),
    ];
    for (words, expected) in cases {
        nonsense(expected, |_, raw| {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            raw.scribble(RECORDS, &bytes).unwrap();
            raw.scribble(SUBMISSION_TAIL, &(words.len() as u64).to_le_bytes()).unwrap();
            raw.ring().unwrap();
        });
    }
}

/// BOUND: the number of unanswered submissions of a worker is limited, whatever the worker counts.
#[test]
fn more_submissions_than_it_may_have() {
    nonsense(&format!("more than {MAX_IN_FLIGHT} operations are unanswered"), |_, raw| {
        for ticket in 0..=u64::from(MAX_IN_FLIGHT) {
            // The ring may be full until the daemon has read more.
            let submission = submission(ticket, &format!("evil.{ticket}"), sixteen());
            while raw.submit(&submission).is_err() {
                thread::yield_now();
            }
            raw.control.answered();
        }
    });
}

/// It drops the memory of a tensor in flight. The daemon's pages stay until the end.
#[test]
fn memory_that_is_dropped_while_it_is_used() {
    let ten = || Request::allreduce(DType::F32, Shape::new(&[10]).unwrap(), ReduceOp::Sum);
    for seed in 0..4u64 {
        println!("seed {seed}");
        let cause = end_of_job(|_, raw| {
            let mut dice = Dice::of(&[seed]);
            for ticket in 1..40 {
                // The other ranks make the same request.
                raw.submit(&submission(ticket, "w", ten())).unwrap();
                thread::sleep(Duration::from_micros(dice.below(2000)));
                let gone = pb::DropSegment { segment: 0 };
                if raw.socket.say(ToDaemon::DropSegment(gone), &[]).is_err() {
                    return None;
                }
                let (_segment, fd) =
                    Segment::create("gradwire-test", SEGMENT, HugePages::Never).unwrap();
                let add = pb::AddSegment { segment: 0, bytes: SEGMENT };
                if raw.socket.say(ToDaemon::AddSegment(add), &[fd.as_fd()]).is_err() {
                    return None;
                }
                // None comes if the daemon has refused that, which ends the job.
                let until = Instant::now() + Duration::from_secs(2);
                let mut completed = None;
                while completed.is_none() && Instant::now() < until {
                    completed = raw.control.pop_completion().unwrap();
                    thread::yield_now();
                }
                if completed.is_none() {
                    break;
                }
            }
            let gone = pb::DropSegment { segment: 7 };
            let _ = raw.socket.say(ToDaemon::DropSegment(gone), &[]);
            None
        });
        // If it dropped the memory before the daemon read of it, that is the cause.
        assert_eq!((cause.kind, cause.rank), (FailureKind::Protocol, Some(Rank(1))), "{cause}");
    }
}

#[test]
fn messages_at_the_wrong_time() {
    nonsense("it attached a second time", |cluster, raw| {
        let challenge = pb::Challenge::default();
        raw.socket.say(attach(cluster, 1, &challenge, |_| ()), &[]).unwrap();
    });
    let add = |segment, bytes| ToDaemon::AddSegment(pb::AddSegment { segment, bytes });
    for segment in [0, 1024, u32::MAX] {
        let what =
            format!("it handed over segment {segment}, which exists already or is not below");
        nonsense(&what, |_, raw| {
            let (_segment, fd) = Segment::create("gradwire-test", 4096, HugePages::Never).unwrap();
            raw.socket.say(add(segment, 4096), &[fd.as_fd()]).unwrap();
        });
    }
    nonsense("it dropped segment 1, which does not exist", |_, raw| {
        let gone = pb::DropSegment { segment: 1 };
        raw.socket.say(ToDaemon::DropSegment(gone), &[]).unwrap();
    });
    nonsense("AddSegment came with 0 descriptors", |_, raw| {
        raw.socket.say(add(1, 4096), &[]).unwrap();
    });
    nonsense("not memory sealed against shrinking and growing", |_, raw| {
        let null = File::open("/dev/null").unwrap();
        raw.socket.say(add(1, 4096), &[null.as_fd()]).unwrap();
    });
    nonsense("it was opened before", |_, raw| {
        let (_segment, fd) = Segment::create("gradwire-test", 4096, HugePages::Never).unwrap();
        raw.socket.say(add(1, 4096), &[fd.as_fd()]).unwrap();
        assert!(matches!(raw.receive().unwrap(), Some((Reply::SegmentAdded(_), _))));
        raw.socket.say(add(2, 4096), &[fd.as_fd()]).unwrap();
    });
    nonsense("a frame of 4294967295 bytes was announced", |_, raw| {
        raw.socket.send(&[0xff; 64]).unwrap();
    });
    nonsense("a message of an unknown kind", |_, raw| {
        raw.socket.send(&0u32.to_le_bytes()).unwrap();
    });
}

/// The daemon has no memory for a segment. It says so, and the job continues.
#[test]
fn a_segment_too_large_for_the_daemon_is_refused() {
    nonsense("it dropped segment 9, which does not exist", |_, raw| {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = memfd_create("gradwire-test-sparse", flags).unwrap();
        let bytes = 1 << 46;
        ftruncate(&fd, bytes).unwrap();
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        let add = ToDaemon::AddSegment(pb::AddSegment { segment: 1, bytes });
        raw.socket.say(add, &[fd.as_fd()]).unwrap();
        match raw.receive().unwrap() {
            Some((Reply::SegmentRefused(refused), _)) => {
                assert_eq!(refused.segment, 1);
                let reason = refused.reason;
                assert!(reason.contains("70368744177664 bytes"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
        raw.add_segment(SEGMENT).unwrap();
        // The end of the test.
        let gone = pb::DropSegment { segment: 9 };
        raw.socket.say(ToDaemon::DropSegment(gone), &[]).unwrap();
    });
}

/// It writes anything, anywhere, at any time, even while it has a tensor in flight.
#[test]
fn random_writes_into_its_control_page() {
    for seed in 0..12 {
        println!("seed {seed}");
        let cause = end_of_job(|_, raw| {
            let over = AtomicBool::new(false);
            let mut dice = Dice::of(&[seed]);
            raw.submit(&submission(1, "evil", sixteen())).unwrap();
            thread::scope(|scope| {
                let (raw, done) = (&*raw, &over);
                scope.spawn(move || {
                    while !done.load(Relaxed) {
                        // The counters, the records that are read next, or any other place.
                        let place = match dice.below(3) {
                            0 => dice.below(100),
                            1 => 512 + dice.below(400),
                            _ => dice.below(512 + (1 << 17)),
                        };
                        let value = dice.roll() >> dice.below(64);
                        raw.scribble(8 * place, &value.to_le_bytes()).unwrap();
                        raw.ring().unwrap();
                    }
                });
                let cause = raw.aborted();
                over.store(true, Relaxed);
                Some(cause.unwrap())
            })
        });
        assert_eq!((cause.kind, cause.rank), (FailureKind::Protocol, Some(Rank(1))), "{cause}");
    }
}
