//! Code without the interpreter's lock, in threads that may outlive the interpreter.
//!
//! A daemon thread that asks for the lock while the interpreter ends is ended by Python in the
//! middle of native code, which unwinds frames of Rust and crashes the process. So such a thread
//! waits for ever instead, as Python itself does from release 3.14 on.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

use pyo3::{marker::Ungil, prelude::*};

/// The thread that ends the interpreter, once it has begun to.
static ENDING: OnceLock<ThreadId> = OnceLock::new();

/// The threads that have decided to ask for the lock, and have not got it yet.
static RETURNING: AtomicUsize = AtomicUsize::new(0);

/// How long the end of the interpreter waits for threads that ask for the lock.
const LIMIT: Duration = Duration::from_secs(1);

/// Runs `work` without the interpreter's lock.
pub(crate) fn detached<T: Ungil + Send>(
    py: Python<'_>,
    work: impl Ungil + Send + FnOnce() -> T,
) -> T {
    let result = py.detach(|| {
        let result = work();
        // First, so that the ending thread sees this one, or this one sees that it has begun.
        RETURNING.fetch_add(1, SeqCst);
        if ENDING.get().is_some_and(|main| *main != thread::current().id()) {
            RETURNING.fetch_sub(1, SeqCst);
            loop {
                thread::park();
            }
        }
        result
    });
    RETURNING.fetch_sub(1, SeqCst);
    result
}

/// Keeps all other threads that are in Gradwire's native code from returning to Python. The last
/// call before the interpreter ends.
#[pyfunction]
pub(crate) fn hold_threads(py: Python<'_>) {
    let _ = ENDING.set(thread::current().id());
    let deadline = Instant::now() + LIMIT;
    while RETURNING.load(SeqCst) > 0 && Instant::now() < deadline {
        py.detach(|| thread::sleep(Duration::from_millis(1)));
    }
}
