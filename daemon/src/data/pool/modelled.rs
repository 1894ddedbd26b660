//! Every interleaving (with up to three preemptions) of threads that post jobs and of helpers: each
//! share is done once, the work is not called any more when its thread goes on, and nobody sleeps
//! for ever. The model checker reports a missed wake-up as a deadlock.

use std::panic::{AssertUnwindSafe, catch_unwind};

use loom::{cell::UnsafeCell, model::Builder, sync::Arc, thread};

use self::handover::{Handover, Helped};

/// The types of the model checker.
mod primitives {
    pub(super) use loom::sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering},
    };
}

#[path = "handover.rs"]
#[expect(unsafe_code, reason = "as the module that it models")]
#[expect(clippy::duplicate_mod, reason = "with the model checker's primitives")]
mod handover;

/// Values to which one share each writes. The model checker reports unordered accesses.
struct Values(Vec<UnsafeCell<u32>>);

// SAFETY: in the model, each access is checked.
#[expect(unsafe_code, reason = "to let the model checker find races")]
unsafe impl Sync for Values {}

impl Values {
    fn new(count: usize) -> Self {
        Self((0..count).map(|_| UnsafeCell::new(0)).collect())
    }

    #[expect(unsafe_code, reason = "to let the model checker find races")]
    fn add(&self, at: usize) {
        // SAFETY: the model checker reports a race, and the pointer lives in the closure only.
        self.0[at].with_mut(|value| unsafe { *value += 1 });
    }

    #[expect(unsafe_code, reason = "to let the model checker find races")]
    fn read(&self) -> Vec<u32> {
        // SAFETY: as above.
        self.0.iter().map(|value| value.with(|value| unsafe { *value })).collect()
    }
}

/// Posts a job on memory of this thread, and reads the results.
fn post(handover: &Handover, shares: usize) {
    let values = Values::new(shares);
    handover.run(shares, 2, &|share| values.add(share));
    assert_eq!(values.read(), vec![1; shares]);
}

fn check(helpers: usize, test: impl Fn(&Arc<Handover>) + Send + Sync + 'static) {
    let mut model = Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let handover = Arc::new(Handover::new(helpers));
        let helpers: Vec<_> = (0..helpers)
            .map(|number| {
                let handover = handover.clone();
                thread::spawn(move || {
                    handover
                        .help(number, |Helped { shares, wakes }| assert!(shares < 3 && wakes < 2))
                })
            })
            .collect();
        test(&handover);
        handover.keep(0);
        helpers.into_iter().for_each(|helper| helper.join().unwrap());
    });
}

#[test]
fn every_share_ends_before_its_thread_goes_on() {
    check(1, |handover| {
        post(handover, 2);
        post(handover, 1);
    });
}

#[test]
fn two_helpers_share_a_job() {
    check(2, |handover| post(handover, 2));
}

#[test]
fn two_threads_share_a_helper() {
    check(1, |handover| {
        let other = {
            let handover = handover.clone();
            thread::spawn(move || post(&handover, 1))
        };
        post(handover, 2);
        other.join().unwrap();
    });
}

#[test]
fn a_helper_that_is_not_kept_ends() {
    check(2, |handover| {
        handover.keep(1);
        post(handover, 2);
    });
}

#[test]
fn a_panic_waits_for_the_other_shares() {
    check(1, |handover| {
        let values = Values::new(2);
        let job = |share| {
            values.add(share);
            if share == 0 {
                std::panic::resume_unwind(Box::new("it was asked to"));
            }
        };
        let ended = catch_unwind(AssertUnwindSafe(|| handover.run(2, 1, &job)));
        assert!(ended.is_err());
        assert_eq!(values.read(), [1, 1]);
    });
}
