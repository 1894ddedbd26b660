//! The tasks that wait for operations as futures, and the thread that wakes them.

use std::{
    collections::HashMap,
    task::Waker,
    thread::{self, JoinHandle},
};

use parking_lot::{Condvar, Mutex};

/// The tasks and the thread.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    /// By ticket. At most one for each operation (BOUND).
    pub(crate) tasks: HashMap<u64, Waker>,
    pub(crate) thread: Option<JoinHandle<()>>,
}

/// The tasks that wait for operations.
#[derive(Debug, Default)]
pub(crate) struct Wakers {
    pub(crate) waiting: Mutex<Waiting>,
    /// There is a new task.
    pub(crate) added: Condvar,
}

impl Wakers {
    /// Waits for the thread, after the session has ended.
    pub(crate) fn join(&self) {
        let thread = self.waiting.lock().thread.take();
        self.added.notify_all();
        // A task that is woken may run in that thread, and may drop the session there.
        if let Some(thread) = thread.filter(|of| of.thread().id() != thread::current().id()) {
            let _ = thread.join();
        }
    }
}
