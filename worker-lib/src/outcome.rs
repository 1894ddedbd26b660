//! The result of an operation that runs in a separate thread.

use std::{task::Waker, time::Instant};

use parking_lot::{Condvar, Mutex};

use crate::{error::Result, waiters::LOOK_AROUND};

/// The result of a thread, for the threads or the task that wait for it.
pub(crate) struct Outcome<R> {
    result: Mutex<Option<Result<R>>>,
    ended: Condvar,
    task: Mutex<Option<Waker>>,
}

impl<R> Default for Outcome<R> {
    fn default() -> Self {
        Self { result: Mutex::new(None), ended: Condvar::new(), task: Mutex::new(None) }
    }
}

impl<R> Outcome<R> {
    pub(crate) fn has_ended(&self) -> bool {
        self.result.lock().is_some()
    }

    /// Waits for the result, which can be fetched once; `None` if the deadline passed first.
    pub(crate) fn wait(&self, deadline: Option<Instant>) -> Option<Result<R>> {
        let mut result = self.result.lock();
        loop {
            if let Some(result) = result.take() {
                return Some(result);
            }
            // WAIT: the thread always sets a result, and its own waits end with the session.
            let left = match deadline {
                None => LOOK_AROUND,
                Some(deadline) => deadline.saturating_duration_since(Instant::now()),
            };
            if left.is_zero() {
                return None;
            }
            self.ended.wait_for(&mut result, left.min(LOOK_AROUND));
        }
    }

    /// Sets the result; only the first one counts.
    pub(crate) fn set(&self, result: Result<R>) {
        self.result.lock().get_or_insert(result);
        self.ended.notify_all();
        let task = self.task.lock().take();
        task.into_iter().for_each(Waker::wake);
    }

    /// Wakes a task when there is a result. If there may be one already, the caller must check that
    /// afterwards.
    pub(crate) fn wake_later(&self, waker: &Waker) {
        let old = self.task.lock().replace(waker.clone());
        drop(old); // may run code of the program
    }
}
