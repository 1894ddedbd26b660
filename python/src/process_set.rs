//! Process sets, for Python.

use pyo3::prelude::*;

/// A group of ranks that is registered with the job.
#[pyclass(frozen, eq, module = "gradwire._native")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProcessSet {
    pub(crate) inner: gradwire_worker::ProcessSet,
}

impl From<gradwire_worker::ProcessSet> for ProcessSet {
    fn from(inner: gradwire_worker::ProcessSet) -> Self {
        Self { inner }
    }
}

#[pymethods]
impl ProcessSet {
    /// The id of the process set; 0 for all ranks.
    #[getter]
    fn id(&self) -> u32 {
        self.inner.id()
    }

    /// The ranks of the members, in ascending order.
    #[getter]
    fn ranks(&self) -> Vec<u32> {
        self.inner.ranks()
    }

    /// This process's rank within the process set; None if it is not a member.
    #[getter]
    fn position(&self) -> Option<usize> {
        self.inner.position()
    }

    fn __repr__(&self) -> String {
        self.inner.to_string()
    }
}
