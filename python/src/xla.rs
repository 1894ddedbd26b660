//! Operations inside of programs that XLA has compiled, for `gradwire.jax`.
//!
//! XLA calls two functions of this module, through its C interface and without Python: there is no
//! lock of the interpreter to wait for (docs/decisions/043-jax.md). `abi` is that interface,
//! `exchange` what they do.

use pyo3::{prelude::*, types::IntoPyDict};

use crate::{call_site, detached::detached, process_set::ProcessSet, session::Session};

#[expect(unsafe_code, reason = "called by XLA")]
mod abi;
mod exchange;

/// The functions that XLA calls.
///
/// Returns:
///     A capsule for `jax.ffi.register_ffi_target` for each name.
#[pyfunction]
#[pyo3(signature = () -> "dict[str, object]")]
pub(crate) fn xla_targets(py: Python<'_>) -> PyResult<Bound<'_, pyo3::types::PyDict>> {
    abi::capsules::<exchange::Exchange>(py)?.into_py_dict(py)
}

/// Sets the session that compiled programs use.
///
/// Args:
///     session: The session; None after its end.
#[pyfunction]
pub(crate) fn xla_bind(py: Python<'_>, session: Option<PyRef<'_, Session>>) {
    let session = session.map(|session| session.inner.clone());
    detached(py, || exchange::bind(session));
}

/// Lets compiled programs use a process set.
///
/// Args:
///     set: The process set.
#[pyfunction]
pub(crate) fn xla_know(set: PyRef<'_, ProcessSet>) {
    exchange::know(&set.inner);
}

/// Returns the line of the program that calls this package.
///
/// Returns:
///     Such as `train.py:12 in step`; empty if it is unknown.
#[pyfunction]
pub(crate) fn xla_site(py: Python<'_>) -> String {
    call_site::here(py).text().map(|text| text.to_string()).unwrap_or_default()
}

/// Returns the error of the last call in a compiled program that has failed.
///
/// Returns:
///     An exception; None if none has failed.
#[pyfunction]
#[pyo3(signature = () -> "BaseException | None")]
pub(crate) fn xla_last_error(py: Python<'_>) -> Option<Py<PyAny>> {
    exchange::last_error().map(|error| error.raise(py).into_value(py).into_any())
}
