//! Gates for operations whose tensors are still being copied when they are called.

use pyo3::prelude::*;

use crate::detached::detached;

/// Holds back operations until their tensors are in shared memory. The creator of a gate must open
/// or fail it.
#[pyclass(frozen, module = "gradwire._native")]
#[derive(Debug)]
pub(crate) struct Gate {
    pub(crate) inner: gradwire_worker::Gate,
}

#[pymethods]
impl Gate {
    /// Creates a closed gate.
    #[new]
    fn new() -> Self {
        Self { inner: gradwire_worker::Gate::new() }
    }

    /// Starts the operations behind it, in call order. Later ones don't wait.
    fn open(&self, py: Python<'_>) {
        detached(py, || self.inner.open());
    }

    /// Fails the operations behind it and later ones, because their tensors could not be copied.
    ///
    /// Args:
    ///     why: The reason.
    fn fail(&self, py: Python<'_>, why: &str) {
        detached(py, || self.inner.fail(why));
    }
}
