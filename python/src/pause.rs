//! Times in which the program makes no training steps.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;

use crate::detached::detached;

/// A time in which the program makes no training steps. It lasts until `end` is called.
#[pyclass(frozen, module = "gradwire._native")]
#[derive(Debug)]
pub(crate) struct Pause(pub(crate) Mutex<Option<gradwire_worker::Paused>>);

#[pymethods]
impl Pause {
    /// Ends it.
    fn end(&self, py: Python<'_>) {
        let paused = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        detached(py, || drop(paused));
    }
}
