//! Finds out whether this process can do nothing until one of its operations ends: every Python
//! thread that could start one is in a wait without a limit.
//!
//! The Python half knows which other threads never start operations (`_quiet.py`). Threads may
//! change at any time, so what was found out holds only until the next look, and not while a signal
//! handler runs.

use std::sync::{Mutex, PoisonError};

use gradwire_worker::EndlessWait;
use pyo3::{exceptions::PyImportError, prelude::*, types::PyFrozenSet};

/// The Python threads in a wait without a limit, by their identifiers.
static WAITING: Mutex<Vec<u64>> = Mutex::new(Vec::new());

/// A wait without a limit of one Python thread.
pub(crate) struct PatientThread {
    wait: EndlessWait,
    ident: u64,
}

impl PatientThread {
    /// The calling thread waits without a limit.
    pub(crate) fn new(py: Python<'_>, wait: EndlessWait) -> PyResult<Self> {
        let ident = py.import("_thread")?.call_method0("get_ident")?.extract()?;
        WAITING.lock().unwrap_or_else(PoisonError::into_inner).push(ident);
        Ok(Self { wait, ident })
    }

    /// Tells the daemon that this process can do nothing until an operation ends, if that is so.
    pub(crate) fn look(&self, py: Python<'_>) -> PyResult<()> {
        // First: a thread whose operation ends from here on does not wait any more.
        let moment = self.wait.moment();
        let waiting = WAITING.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let module = match py.import("gradwire._quiet") {
            Ok(module) => module,
            // While the interpreter exits, nothing can be imported.
            Err(error) if error.is_instance_of::<PyImportError>(py) => return Ok(()),
            Err(error) => return Err(error),
        };
        let waiting = PyFrozenSet::new(py, waiting)?;
        if module.call_method1("others_are_quiet", (waiting,))?.extract()? {
            self.wait.say_stuck(moment);
        } else {
            self.wait.take_back();
        }
        Ok(())
    }
}

impl Drop for PatientThread {
    fn drop(&mut self) {
        let mut waiting = WAITING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = waiting.iter().rposition(|ident| *ident == self.ident) {
            waiting.swap_remove(at);
        }
    }
}
