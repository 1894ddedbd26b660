//! Long calls of the worker library on threads of their own, so that Ctrl-C interrupts them.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc,
    },
    thread,
};

use gradwire_worker::GradwireError;
use pyo3::prelude::*;

use crate::{
    detached::detached,
    error::{PythonError, Raise},
    handle::SLICE,
};

/// Runs a call on another thread, while this one checks for signals. If a signal's handler raises
/// an exception, sets the flag that cancels the call.
pub(crate) fn run<R: Send + 'static>(
    py: Python<'_>,
    name: &str,
    call: impl FnOnce(Arc<AtomicBool>) -> Result<R, GradwireError> + Send + 'static,
) -> PyResult<R> {
    let cancel = Arc::new(AtomicBool::new(false));
    let (sender, receiver) = mpsc::sync_channel(1);
    let flag = cancel.clone();
    let work = move || {
        // If the receiver is gone, nobody wants the result any more.
        let _ = sender.send(call(flag));
    };
    let thread = thread::Builder::new().name(name.to_owned()).spawn(work);
    thread.map_err(|source| GradwireError::System { what: "a thread", source }).or_raise(py)?;
    let receiver = Mutex::new(receiver);
    let slice = || {
        let receiver = receiver.lock().unwrap_or_else(PoisonError::into_inner);
        receiver.recv_timeout(SLICE)
    };
    loop {
        match detached(py, slice) {
            Ok(result) => return result.or_raise(py),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                py.check_signals().inspect_err(|_| cancel.store(true, Relaxed))?;
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(PythonError::from(GradwireError::Closed).raise(py));
            }
        }
    }
}
