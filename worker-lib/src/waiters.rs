//! The threads of a session that wait without a limit, and what they wait for.

use std::{cell::Cell, time::Duration};

use gradwire_proto::TensorName;
use parking_lot::Mutex;
use rustix::thread::{Pid, gettid};

/// The longest sleep of a waiting thread.
pub(crate) const LOOK_AROUND: Duration = Duration::from_secs(1);

/// What a thread waits for without a limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum On {
    /// An operation, by its ticket.
    Ticket(u64),
    /// An operation of several parts, which run in another thread.
    Task(TensorName),
}

/// A thread in a wait without a limit.
#[derive(Debug)]
pub(crate) struct Waiter {
    pub(crate) thread: Pid,
    pub(crate) on: On,
    /// How many operations of several parts this thread carries out.
    pub(crate) parts: usize,
}

/// The threads that are in a wait without a limit.
#[derive(Debug, Default)]
pub(crate) struct Waiters(pub(crate) Mutex<Vec<Waiter>>);

impl Waiters {
    /// Notes that the calling thread waits. Returns its id.
    pub(crate) fn enter(&self, on: On) -> Pid {
        let thread = gettid();
        self.0.lock().push(Waiter { thread, on, parts: PARTS.get() });
        thread
    }
}

thread_local! {
    static PARTS: Cell<usize> = const { Cell::new(0) };
}

/// The calling thread carries out an operation of several parts, until this is dropped.
pub(crate) struct InParts(());

impl InParts {
    pub(crate) fn new() -> Self {
        PARTS.set(PARTS.get() + 1);
        Self(())
    }
}

impl Drop for InParts {
    fn drop(&mut self) {
        PARTS.set(PARTS.get() - 1);
    }
}
