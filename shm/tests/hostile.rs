//! A worker that writes anything into the shared page (TRUST): the daemon gets an error or a valid
//! submission, never a fault, a panic or an endless loop.

use std::{
    os::fd::{AsFd, OwnedFd},
    ptr,
    sync::atomic::{
        AtomicBool, AtomicU64,
        Ordering::{Relaxed, SeqCst},
    },
    thread,
    time::Duration,
};

use gradwire_proto::{DType, ReduceOp, Request, Shape, TensorName};
use gradwire_shm::{
    control::{
        Activity, COMPLETIONS, CONTROL_BYTES, Completion, CompletionWriter, ControlError,
        DaemonControl, Doorbell, MAX_CALL_SITES, Progress, RingError, SUBMISSION_RING_BYTES,
        SubmissionReader, SubmitError, WorkerControl,
    },
    ring::{MAX_RECORD_WORDS, Nonsense},
    segment::{HugePages, Segment},
};
use proptest::prelude::*;
use rustix::mm::{MapFlags, ProtFlags};

mod common;

use common::MAX_IN_FLIGHT;

/// The page's words, as a hostile worker maps them.
struct Words(*mut AtomicU64);

// SAFETY: the pointer is to a mapping that lives as long as the value; it is only used atomically.
unsafe impl Sync for Words {}

const WORDS: usize = CONTROL_BYTES as usize / 8;

impl Words {
    /// Maps the page a second time, which is impossible after the daemon has opened it.
    fn map(fd: &OwnedFd) -> Self {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe {
            let both = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(ptr::null_mut(), WORDS * 8, both, MapFlags::SHARED, fd, 0)
        };
        Self(start.unwrap().cast())
    }

    fn set(&self, index: usize, value: u64) {
        assert!(index < WORDS);
        // SAFETY: within the mapping, checked above.
        unsafe { &*self.0.add(index) }.store(value, SeqCst);
    }

    fn get(&self, index: usize) -> u64 {
        assert!(index < WORDS);
        // SAFETY: within the mapping, checked above.
        unsafe { &*self.0.add(index) }.load(SeqCst)
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: the range is our own mapping.
        unsafe { rustix::mm::munmap(self.0.cast(), WORDS * 8) }.unwrap();
    }
}

const SUBMISSION_TAIL: usize = 128 / 8;
const SUBMISSION_HEAD: usize = 256 / 8;
const COMPLETION_TAIL: usize = 384 / 8;
const COMPLETION_HEAD: usize = 512 / 8;
const RECORDS: usize = 4096 / 8;

fn sides() -> (WorkerControl, Words, DaemonControl) {
    let (worker, fd) = WorkerControl::create("gradwire-test-hostile", MAX_IN_FLIGHT).unwrap();
    let words = Words::map(&fd);
    (worker, words, DaemonControl::open(fd, MAX_IN_FLIGHT).unwrap())
}

fn page() -> (WorkerControl, Words, SubmissionReader, CompletionWriter) {
    let (worker, words, daemon) = sides();
    (worker, words, daemon.submissions, daemon.completions)
}

/// A rank's times never exceed the time that has passed by much.
fn look(activity: &Activity) {
    let Progress { steps, blocked, in_flight, since_step } = activity.look();
    assert!(steps <= 60_000_000 && blocked.max(in_flight) <= Duration::from_secs(120));
    assert!(since_step.is_none_or(|since| since < Duration::from_secs(1 << 40)));
}

#[test]
fn a_tail_beyond_the_ring_is_named() {
    let (_worker, words, mut reader, _) = page();
    words.set(SUBMISSION_TAIL, 1 << 40);
    let error = reader.pop().unwrap_err();
    assert!(matches!(error, RingError::Submissions(Nonsense::Tail { head: 0, .. })), "{error}");
    assert!(error.to_string().contains("tail is 1099511627776 with the head at 0"), "{error}");
}

#[test]
fn a_tail_that_goes_back_is_named() {
    let (_worker, words, mut reader, _) = page();
    words.set(SUBMISSION_TAIL, 10);
    assert!(!reader.prepare_sleep());
    words.set(SUBMISSION_TAIL, 0);
    assert_eq!(
        reader.pop(),
        Err(RingError::Submissions(Nonsense::TailWentBack { seen: 10, tail: 0 }))
    );
}

#[test]
fn impossible_lengths_are_named() {
    let (_worker, words, mut reader, _) = page();
    words.set(SUBMISSION_TAIL, 500);
    for length in [0, 501, MAX_RECORD_WORDS as u64 + 1, u64::MAX] {
        words.set(RECORDS, length);
        let expected = Nonsense::Length { words: length, available: 500 };
        assert_eq!(reader.pop(), Err(RingError::Submissions(expected)), "length {length}");
    }
    // Long enough for a record, too short for a submission.
    words.set(RECORDS, 3);
    assert_eq!(reader.pop(), Err(RingError::Size { words: 3, tensors: 0, list: 0, name: 0 }));
}

#[test]
fn each_field_of_a_record_is_checked() {
    // Word of the record, its new value, text of the error.
    let cases: &[(usize, u64, &str)] = &[
        (3, 1 << 8, "collective has the unknown number 0"),
        (3, 1 | 99 << 8, "reduce operation has the unknown number 99"),
        (3, 1 | 1 << 8 | 77 << 16, "origin has the unknown number 77"),
        (3, 2 | 1 << 8, "takes no scale factors"),
        (4, f64::NAN.to_bits(), "prescale: NaN"),
        (5, f64::INFINITY.to_bits(), "postscale: inf"),
        (6, u64::from(u32::MAX), "a name of 65535 bytes"),
        (6, 0, "a name of 0 bytes"),
        (6, 3 | u64::from(u32::MAX) << 32, "a list of 4294967295"),
        (7, 0, "0 tensors"),
        (7, u64::MAX, "4294967295 tensors"),
        (7, 1 | u64::from(MAX_CALL_SITES) << 32, "a call site with number 4096"),
        (8, 99 | 2 << 8, "element type has the unknown number 99"),
        (8, 1 | 255 << 8, "does not match its length"),
        (12, u64::MAX, "shape [18446744073709551615, 4]"),
        (
            14,
            u64::from_le_bytes([b'a', 0xff, b'b', 0, 0, 0, 0, 0]),
            "not valid UTF-8 from byte 1 on",
        ),
        (14, u64::from_le_bytes(*b"a\nb\0\0\0\0\0"), "without control characters"),
    ];
    for &(word, value, text) in cases {
        let (worker, words, mut reader, _) = page();
        let mut submission = common::submission(1);
        submission.request =
            Request::allreduce(DType::F32, Shape::new(&[2, 4]).unwrap(), ReduceOp::Sum);
        submission.request.prescale = 2.0;
        submission.name = TensorName::new("abc").unwrap();
        submission.inputs.truncate(1);
        submission.outputs.truncate(1);
        assert_eq!(worker.submit(&submission).unwrap(), Doorbell::Quiet);
        words.set(RECORDS + word, value);
        let error = reader.pop().unwrap_err().to_string();
        assert!(error.contains(text), "word {word}: {error}");
    }
}

#[test]
fn a_head_that_was_never_reached_is_named() {
    let (_worker, words, _, writer) = page();
    words.set(COMPLETION_HEAD, 7);
    let error = writer.push(Completion { ticket: 1, aux: 0 }).unwrap_err();
    let expected = Nonsense::Head { head: 7, tail: 0, capacity: u64::from(COMPLETIONS) };
    assert_eq!(error, RingError::Completions(expected));
}

#[test]
fn answers_that_nobody_reads_fill_the_ring() {
    let (_worker, _, _, writer) = page();
    for ticket in 0..u64::from(COMPLETIONS) {
        writer.push(Completion { ticket, aux: 0 }).unwrap();
    }
    assert_eq!(writer.push(Completion { ticket: 0, aux: 0 }), Err(RingError::CompletionsFull));
}

#[test]
fn both_sides_enforce_the_limit_in_flight() {
    // BOUND: the side of an honest worker enforces it …
    let (worker, words, mut reader, writer) = page();
    let mut submission = common::submission(0);
    for ticket in 0..u64::from(MAX_IN_FLIGHT) {
        submission.ticket = ticket;
        let _ = worker.submit(&submission).unwrap();
        reader.pop().unwrap().unwrap();
    }
    assert_eq!(worker.submit(&submission), Err(SubmitError::TooMany { limit: MAX_IN_FLIGHT }));
    // … and the daemon, if the worker does not.
    let consumed = words.get(SUBMISSION_HEAD);
    words.set(RECORDS + consumed as usize % (SUBMISSION_RING_BYTES as usize / 8), 1);
    words.set(SUBMISSION_TAIL, consumed + 1);
    assert_eq!(reader.pop(), Err(RingError::TooMany { limit: MAX_IN_FLIGHT }));
    // Each answer makes room for one submission.
    writer.push(Completion { ticket: 0, aux: 0 }).unwrap();
    assert_eq!(worker.pop_completion(), Ok(Some(Completion { ticket: 0, aux: 0 })));
    assert_eq!(worker.in_flight(), MAX_IN_FLIGHT - 1);
}

#[test]
fn other_memory_than_a_control_page_is_refused() {
    let other = |bytes| Segment::create("gradwire-test-page", bytes, HugePages::Never).unwrap().1;
    let error = DaemonControl::open(other(4096), MAX_IN_FLIGHT).unwrap_err();
    assert!(matches!(error, ControlError::Size { bytes: 4096, .. }), "{error}");
    let error = DaemonControl::open(other(CONTROL_BYTES + 4096), MAX_IN_FLIGHT).unwrap_err();
    assert!(matches!(error, ControlError::Size { .. }), "{error}");
    assert!(error.to_string().contains("install the same release"), "{error}");
    let error = DaemonControl::open(other(CONTROL_BYTES), MAX_IN_FLIGHT).unwrap_err();
    assert!(matches!(error, ControlError::Magic { magic: 0 }), "{error}");
    // A page of another release is reported as such, whatever its size is.
    let fd = other(CONTROL_BYTES / 2);
    let words = Words::map(&fd);
    words.set(0, u64::from_le_bytes(*b"GRADWIRE"));
    words.set(1, 3);
    let error = DaemonControl::open(fd, MAX_IN_FLIGHT).unwrap_err();
    assert!(matches!(error, ControlError::Version { found: 3, .. }), "{error}");

    let cases: &[(usize, u64, &str)] = &[
        (1, 0, "layout version 0"),
        (1, 77, "layout version 77 and this daemon needs 9; install the same release"),
        (2, 5, "rings have 5 words and 0 entries"),
    ];
    for &(word, value, text) in cases {
        let (_worker, fd) = WorkerControl::create("gradwire-test-page", MAX_IN_FLIGHT).unwrap();
        Words::map(&fd).set(word, value);
        let error = DaemonControl::open(fd, MAX_IN_FLIGHT).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
}

#[test]
fn a_worker_notices_damage_to_its_own_page() {
    let (worker, words, _, _) = page();
    words.set(SUBMISSION_HEAD, 1); // the daemon's head, before anything was submitted
    let error = worker.submit(&common::submission(1)).unwrap_err();
    assert!(matches!(error, SubmitError::Damaged(_)), "{error}");
    assert_eq!(worker.in_flight(), 0);
    words.set(COMPLETION_TAIL, 1 << 50); // the daemon's tail of completions
    let error = worker.pop_completion().unwrap_err().to_string();
    assert!(error.contains("the ring's tail is 1125899906842624"), "{error}");
}

/// The targets of random writes: mostly the counters and the first records.
fn place() -> impl Strategy<Value = usize> {
    prop_oneof![
        3 => 0..104usize,
        3 => RECORDS..RECORDS + 400,
        1 => 0..WORDS,
    ]
}

/// Meaningful values, values near them, or any values.
fn value() -> impl Strategy<Value = u64> {
    prop_oneof![0..400u64, Just(u64::MAX), (0..64u32).prop_map(|bit| 1 << bit), any::<u64>()]
}

#[derive(Debug, Clone)]
enum Step {
    Write(usize, u64),
    Submit(u64),
    Pop,
    Sleep,
    Push(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (place(), value()).prop_map(|(place, value)| Step::Write(place, value)),
        1 => any::<u64>().prop_map(Step::Submit),
        3 => Just(Step::Pop),
        1 => Just(Step::Sleep),
        1 => any::<u64>().prop_map(Step::Push),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 400,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn writes_between_steps_do_no_harm(steps in prop::collection::vec(step(), 1..120)) {
        let (worker, words, daemon) = sides();
        let DaemonControl { submissions: mut reader, completions: writer, activity, .. } = daemon;
        for step in steps {
            match step {
                Step::Write(place, value) => words.set(place, value),
                Step::Submit(ticket) => _ = worker.submit(&common::submission(ticket)),
                Step::Pop => {
                    if let Ok(Some(submission)) = reader.pop() {
                        prop_assert!(submission.request.validate().is_ok());
                    }
                }
                Step::Sleep => _ = reader.prepare_sleep(),
                Step::Push(ticket) => _ = writer.push(Completion { ticket, aux: 0 }),
            }
            look(&activity);
        }
    }

    #[test]
    fn concurrent_writes_do_no_harm(seed in any::<u64>()) {
        let (worker, words, daemon) = sides();
        let DaemonControl { submissions: mut reader, completions: writer, activity, .. } = daemon;
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let (words, done) = (&words, &done);
            scope.spawn(move || {
                let mut bits = seed | 1;
                while !done.load(Relaxed) {
                    bits ^= bits << 13;
                    bits ^= bits >> 7;
                    bits ^= bits << 17;
                    let place = [104, RECORDS + 400, WORDS][(bits % 3) as usize];
                    words.set((bits >> 8) as usize % place, bits >> (bits % 64));
                }
            });
            for ticket in 0..300 {
                _ = worker.submit(&common::submission(ticket));
                _ = reader.pop();
                _ = reader.prepare_sleep();
                _ = writer.push(Completion { ticket, aux: 0 });
                look(&activity);
            }
            done.store(true, Relaxed);
        });
    }
}

#[test]
fn mapped_pages_cannot_be_taken_away() {
    use rustix::fs::{FallocateFlags, SealFlags};
    let (_segment, fd) = Segment::create("gradwire-test-holes", 1 << 20, HugePages::Never).unwrap();
    let kept = fd.as_fd().try_clone_to_owned().unwrap();
    let opened = Segment::open(fd, 1 << 20).unwrap();
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert!(rustix::fs::fallocate(&kept, hole, 0, 4096).is_err());
    assert!(rustix::fs::ftruncate(&kept, 0).is_err());
    assert!(rustix::fs::ftruncate(&kept, 2 << 20).is_err());
    assert!(rustix::fs::fcntl_add_seals(&kept, SealFlags::WRITE).is_err());
    let again = Segment::open(kept, 1 << 20).unwrap_err();
    assert_eq!(opened.bytes(), 1 << 20);
    assert!(again.to_string().contains("hand over memory that nobody has opened"), "{again}");
}
