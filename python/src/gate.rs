//! Operations whose tensors are still being copied when they are called.

use pyo3::prelude::*;

/// What operations wait behind until their tensors are in shared memory. Whoever makes a gate opens
/// it, or fails it.
#[pyclass(frozen, module = "gradwire._native")]
#[derive(Debug)]
pub(crate) struct Gate {
    pub(crate) inner: gradwire_worker::Gate,
}

#[pymethods]
impl Gate {
    /// Makes a closed gate.
    #[new]
    fn new() -> Self {
        Self { inner: gradwire_worker::Gate::new() }
    }

    /// Starts the operations behind it, in the order of their calls. Later ones don't wait.
    fn open(&self, py: Python<'_>) {
        py.detach(|| self.inner.open());
    }

    /// Fails the operations behind it, and later ones: their tensors could not be copied.
    ///
    /// Args:
    ///     why: What happened.
    fn fail(&self, py: Python<'_>, why: &str) {
        py.detach(|| self.inner.fail(why));
    }
}
