//! How a thread hands work to helpers that sleep until there is some.
//!
//! A thread posts a job of numbered shares and takes part in it. Each participant takes the next
//! share with one atomic addition, so a slow participant delays only the share that it has. Nothing
//! depends on helpers: where none comes, the thread does all shares itself.
//!
//! The work may borrow from the thread, because [`Handover::run`] returns only when every share has
//! ended. So nobody touches a rank's memory after the lane has stopped.
//!
//! The types of `primitives` are those of the standard library, or those of a model checker, for
//! which this file is compiled a second time.

use std::{
    any::Any,
    mem::transmute,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::PoisonError,
};

use super::primitives::{Arc, AtomicUsize, Condvar, Mutex, MutexGuard, Ordering};

/// Does the share with this number.
pub(super) type Work<'a> = dyn Fn(usize) + Sync + 'a;

/// How many helpers one participant wakes. Each of them wakes as many in turn, so no thread waits
/// for more than a few system calls, and many helpers are awake soon.
const WAKES: usize = 2;

/// What a helper has done for a job.
#[derive(Debug, Clone, Copy)]
pub(super) struct Helped {
    pub(super) shares: usize,
    /// Helpers that it has woken.
    pub(super) wakes: usize,
}

struct Job {
    work: *const Work<'static>,
    shares: usize,
    /// The next share to take; may exceed their number.
    next: AtomicUsize,
    /// Shares that have not ended.
    open: AtomicUsize,
    /// The first panic of a share.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    ended: Condvar,
}

// SAFETY: `work` is `Sync`, and is called only while it lives: see `take_part`. The rest may be
// shared between threads anyway.
unsafe impl Send for Job {}
// SAFETY: as above.
unsafe impl Sync for Job {}

impl Job {
    fn new(shares: usize, work: &Work<'_>) -> Self {
        let work: *const Work<'_> = work;
        Self {
            // SAFETY: only the lifetime changes, and `take_part` observes it.
            work: unsafe { transmute::<*const Work<'_>, *const Work<'static>>(work) },
            shares,
            next: AtomicUsize::new(0),
            open: AtomicUsize::new(shares),
            panic: Mutex::new(None),
            ended: Condvar::new(),
        }
    }

    fn has_more(&self) -> bool {
        self.next.load(Ordering::Relaxed) < self.shares
    }

    /// Does shares until all are taken, and returns how many. It never unwinds.
    fn take_part(&self) -> usize {
        let mut done = 0;
        loop {
            let share = self.next.fetch_add(1, Ordering::Relaxed);
            if share >= self.shares {
                return done;
            }
            // SAFETY: this share has not ended, so `Handover::run` has not returned, and the borrow
            // of its caller lasts.
            let work = unsafe { &*self.work };
            let panic = catch_unwind(AssertUnwindSafe(|| work(share))).err();
            self.end(panic);
            done += 1;
        }
    }

    /// A share has ended.
    fn end(&self, panic: Option<Box<dyn Any + Send>>) {
        if let Some(panic) = panic {
            lock(&self.panic).get_or_insert(panic);
        }
        if self.open.fetch_sub(1, Ordering::AcqRel) == 1 {
            // With the lock, so that a thread that has just seen the share open is asleep now.
            drop(lock(&self.panic));
            self.ended.notify_all();
        }
    }

    /// Waits until all shares have ended. Returns the first panic, if there was one.
    fn wait(&self) -> Option<Box<dyn Any + Send>> {
        let mut panic = lock(&self.panic);
        while self.open.load(Ordering::Acquire) > 0 {
            panic = self.ended.wait(panic).unwrap_or_else(PoisonError::into_inner);
        }
        panic.take()
    }
}

struct Post {
    job: Arc<Job>,
    /// How many more helpers may join.
    wanted: usize,
}

struct State {
    /// The jobs of all threads, oldest first.
    posts: Vec<Post>,
    /// Helpers that wait. One that has been woken counts until it runs.
    asleep: usize,
    /// Helpers with this number or a higher one end.
    keep: usize,
}

impl State {
    /// How many helpers to wake for a job that wants `wanted` more.
    fn to_wake(&self, wanted: usize) -> usize {
        WAKES.min(wanted).min(self.asleep)
    }

    /// The oldest job that a helper may join, and how many others it should wake.
    fn join(&mut self) -> Option<(Arc<Job>, usize)> {
        let found = self.posts.iter_mut().find(|post| post.wanted > 0 && post.job.has_more())?;
        found.wanted -= 1;
        let (job, wanted) = (found.job.clone(), found.wanted);
        Some((job, self.to_wake(wanted)))
    }
}

/// The jobs that threads have posted, and the helpers that sleep.
pub(super) struct Handover {
    state: Mutex<State>,
    posted: Condvar,
}

impl Handover {
    /// For helpers with the numbers below `helpers`.
    pub(super) fn new(helpers: usize) -> Self {
        let state = State { posts: Vec::new(), asleep: 0, keep: helpers };
        Self { state: Mutex::new(state), posted: Condvar::new() }
    }

    /// Does all shares, together with at most `helpers` helpers. Returns how many it has woken.
    ///
    /// # Panics
    /// If a share does, once all shares have ended.
    pub(super) fn run(&self, shares: usize, helpers: usize, work: &Work<'_>) -> usize {
        let job = Arc::new(Job::new(shares, work));
        let mut state = lock(&self.state);
        state.posts.push(Post { job: job.clone(), wanted: helpers });
        let wakes = state.to_wake(helpers);
        drop(state);
        self.wake(wakes);
        job.take_part();
        lock(&self.state).posts.retain(|post| !Arc::ptr_eq(&post.job, &job));
        if let Some(panic) = job.wait() {
            resume_unwind(panic);
        }
        wakes
    }

    /// The life of a helper: takes part in jobs until its number is not kept any more. `note` gets
    /// what it has done for each job.
    pub(super) fn help(&self, number: usize, note: impl Fn(Helped)) {
        let mut state = lock(&self.state);
        while number < state.keep {
            let Some((job, wakes)) = state.join() else {
                state.asleep += 1;
                state = self.posted.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.asleep -= 1;
                continue;
            };
            drop(state);
            self.wake(wakes);
            let shares = job.take_part();
            drop(job);
            note(Helped { shares, wakes });
            state = lock(&self.state);
        }
    }

    fn wake(&self, helpers: usize) {
        (0..helpers).for_each(|_| self.posted.notify_one());
    }

    /// Ends all helpers but the first `helpers`.
    pub(super) fn keep(&self, helpers: usize) {
        let mut state = lock(&self.state);
        state.keep = state.keep.min(helpers);
        drop(state);
        self.posted.notify_all();
    }
}

/// No thread panics while it holds a lock.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
