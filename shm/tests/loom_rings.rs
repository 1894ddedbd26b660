//! Every interleaving (with up to three preemptions) of the two sides of each ring: nothing is
//! lost, nothing is seen twice or half-written, and no wake-up is missed. The model checker reports
//! a missed wake-up as a deadlock. The last tests remove the fence and expect a deadlock, which
//! proves that the others can fail.

use std::{sync::atomic::Ordering, time::Duration};

use gradwire_shm::{
    backing::{Backing, Cell, Flag, Signal},
    ring::{ANY, COMPLETION_WORDS, CompletionRing, PushError, SubmissionRing},
};
use loom::{
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicU32, AtomicU64, fence},
    },
    thread,
};

struct ModelCell(AtomicU64);

impl Cell for ModelCell {
    fn load(&self, order: Ordering) -> u64 {
        self.0.load(order)
    }

    fn store(&self, value: u64, order: Ordering) {
        self.0.store(value, order);
    }
}

/// A word with the guarantee of a futex: a change before a wake-up is seen by the sleeper's last
/// check, or the wake-up finds it asleep.
struct ModelSignal {
    word: AtomicU32,
    kernel: Mutex<()>,
    woken: Condvar,
}

impl ModelSignal {
    fn new() -> Self {
        Self { word: AtomicU32::new(0), kernel: Mutex::new(()), woken: Condvar::new() }
    }
}

impl Flag for ModelSignal {
    fn load(&self, order: Ordering) -> u32 {
        self.word.load(order)
    }

    fn store(&self, value: u32, order: Ordering) {
        self.word.store(value, order);
    }

    fn swap(&self, value: u32, order: Ordering) -> u32 {
        self.word.swap(value, order)
    }

    fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
        self.word.fetch_add(value, order)
    }
}

impl Signal for ModelSignal {
    fn sleep(&self, seen: u32, _timeout: Duration) {
        let kernel = self.kernel.lock().unwrap();
        if self.word.load(Ordering::Relaxed) == seen {
            drop(self.woken.wait(kernel).unwrap());
        }
    }

    fn wake_all(&self) {
        let _kernel = self.kernel.lock().unwrap();
        self.woken.notify_all();
    }
}

struct Fenced;
struct Unfenced;

impl Backing for Fenced {
    type Cell = ModelCell;
    type Flag = ModelSignal;
    type Signal = ModelSignal;

    fn fence() {
        fence(Ordering::SeqCst);
    }
}

impl Backing for Unfenced {
    type Cell = ModelCell;
    type Flag = ModelSignal;
    type Signal = ModelSignal;

    fn fence() {}
}

/// The words of one ring, and the daemon's eventfd.
struct Words {
    head: ModelCell,
    tail: ModelCell,
    signal: ModelSignal,
    flag: ModelSignal,
    wanted: ModelCell,
    cells: Vec<ModelCell>,
    bell: Mutex<bool>,
    rung: Condvar,
}

impl Words {
    fn new(cells: usize) -> Arc<Self> {
        let cell = || ModelCell(AtomicU64::new(0));
        Arc::new(Self {
            head: cell(),
            tail: cell(),
            signal: ModelSignal::new(),
            flag: ModelSignal::new(),
            wanted: cell(),
            cells: (0..cells).map(|_| cell()).collect(),
            bell: Mutex::new(false),
            rung: Condvar::new(),
        })
    }

    fn submissions<B>(&self) -> SubmissionRing<'_, B>
    where
        B: Backing<Cell = ModelCell, Flag = ModelSignal>,
    {
        let Self { head, tail, flag, cells, .. } = self;
        SubmissionRing { head, tail, sleeping: flag, cells }
    }

    fn completions<B>(&self) -> CompletionRing<'_, B>
    where
        B: Backing<Cell = ModelCell, Flag = ModelSignal, Signal = ModelSignal>,
    {
        let Self { head, tail, flag, signal, wanted, cells, .. } = self;
        CompletionRing { head, tail, epoch: signal, waiters: flag, wanted, cells }
    }

    fn ring(&self) {
        *self.bell.lock().unwrap() = true;
        self.rung.notify_one();
    }

    fn wait_for_bell(&self) {
        let mut bell = self.bell.lock().unwrap();
        while !*bell {
            bell = self.rung.wait(bell).unwrap();
        }
        *bell = false;
    }
}

fn model(preemptions: usize, run: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(run);
}

/// The worker submits and rings if needed; only the doorbell wakes the daemon.
fn submit_and_sleep<B>(records: u64)
where
    B: Backing<Cell = ModelCell, Flag = ModelSignal>,
{
    let words = Words::new(8);
    let producer = {
        let words = Arc::clone(&words);
        thread::spawn(move || {
            let mut tail = 0;
            for record in 1..=records {
                let content = [record, record * 10];
                if words.submissions::<B>().push(&mut tail, &content).unwrap() {
                    words.ring();
                }
            }
        })
    };
    let (mut head, mut expected) = (0, 1);
    while expected <= records {
        let mut copy = Vec::new();
        let ring = words.submissions::<B>();
        let seen = head;
        match ring.pop(&mut head, seen, &mut copy).unwrap() {
            Some(content) => {
                assert_eq!(content, [expected, expected * 10]);
                expected += 1;
            }
            None if ring.prepare_sleep(head).is_none() => {
                words.wait_for_bell();
                ring.awake();
            }
            None => {}
        }
    }
    producer.join().unwrap();
}

/// The daemon answers; the worker sleeps on the epoch, for the ticket that `wanted` returns.
fn complete_and_sleep<B>(entries: u64, wanted: impl Fn(u64) -> u64)
where
    B: Backing<Cell = ModelCell, Flag = ModelSignal, Signal = ModelSignal>,
{
    let words = Words::new(2 * COMPLETION_WORDS);
    let producer = {
        let words = Arc::clone(&words);
        thread::spawn(move || {
            let mut tail = 0;
            for entry in 1..=entries {
                words.completions::<B>().push(&mut tail, [entry, 0, entry]).unwrap();
            }
        })
    };
    let (mut head, mut expected) = (0, 1);
    while expected <= entries {
        let ring = words.completions::<B>();
        let seen = ring.epoch.load(Ordering::Acquire);
        match ring.pop(&mut head).unwrap() {
            Some(entry) => {
                assert_eq!(entry, [expected, 0, expected]);
                expected += 1;
            }
            None => {
                ring.register_waiter(wanted(expected));
                assert!(ring.sleep(seen, Duration::MAX));
            }
        }
    }
    producer.join().unwrap();
}

#[test]
fn no_submission_and_no_doorbell_is_lost() {
    model(3, || submit_and_sleep::<Fenced>(2));
}

#[test]
fn no_completion_and_no_wake_up_is_lost() {
    model(3, || complete_and_sleep::<Fenced>(2, |_| ANY));
}

#[test]
fn a_sleeper_for_a_ticket_is_woken_by_it() {
    model(3, || complete_and_sleep::<Fenced>(2, |expected| expected));
    model(3, || complete_and_sleep::<Fenced>(2, |_| 2));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_sleeper_for_a_ticket_sleeps_through_others() {
    model(3, || complete_and_sleep::<Fenced>(1, |_| 2));
}

#[test]
fn a_full_ring_is_never_overwritten() {
    model(2, || {
        // Room for one record of three words and a part of the next, which wraps around.
        let words = Words::new(4);
        let producer = {
            let words = Arc::clone(&words);
            thread::spawn(move || {
                let mut tail = 0;
                for record in [[1, 10], [2, 20]] {
                    loop {
                        match words.submissions::<Fenced>().push(&mut tail, &record) {
                            Ok(_) => break,
                            Err(PushError::Full) => thread::yield_now(),
                            Err(error) => panic!("{error:?}"),
                        }
                    }
                }
            })
        };
        let (mut head, mut got) = (0, Vec::new());
        while got.len() < 2 {
            let mut copy = Vec::new();
            let seen = head;
            match words.submissions::<Fenced>().pop(&mut head, seen, &mut copy).unwrap() {
                Some(content) => got.push(content.to_vec()),
                None => thread::yield_now(),
            }
        }
        assert_eq!(got, [[1, 10], [2, 20]]);
        producer.join().unwrap();
    });
}

#[test]
fn both_of_two_waiters_are_woken() {
    model(2, || {
        let words = Words::new(2 * COMPLETION_WORDS);
        // A thread that is awake empties the ring, as the threads of a worker do.
        let taken = Arc::new(Mutex::new((0, Vec::new())));
        let registering = Arc::new(Mutex::new(()));
        let waiter = {
            let (words, taken) = (Arc::clone(&words), Arc::clone(&taken));
            move |ticket| {
                let ring = words.completions::<Fenced>();
                loop {
                    let seen = ring.epoch.load(Ordering::Acquire);
                    let mut taken = taken.lock().unwrap();
                    while let Some([came, ..]) = ring.pop(&mut taken.0).unwrap() {
                        taken.1.push(came);
                    }
                    if taken.1.contains(&ticket) {
                        break;
                    }
                    drop(taken);
                    let alone = registering.lock().unwrap();
                    ring.register_waiter(ticket);
                    drop(alone);
                    ring.sleep(seen, Duration::MAX);
                }
            }
        };
        let other = {
            let waiter = waiter.clone();
            thread::spawn(move || waiter(2))
        };
        let producer = {
            let words = Arc::clone(&words);
            thread::spawn(move || {
                let mut tail = 0;
                for entry in [1, 2] {
                    words.completions::<Fenced>().push(&mut tail, [entry, 0, 0]).unwrap();
                }
            })
        };
        waiter(1);
        other.join().unwrap();
        producer.join().unwrap();
    });
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_the_fence_a_doorbell_is_lost() {
    model(3, || submit_and_sleep::<Unfenced>(2));
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_the_fence_a_wake_up_is_lost() {
    model(3, || complete_and_sleep::<Unfenced>(2, |_| ANY));
}
