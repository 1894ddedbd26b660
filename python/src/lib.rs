//! The native half of the Python package `gradwire`: the module `gradwire._native`.
//!
//! It provides sessions, memory and handles; the Python half handles NumPy, PyTorch and pickle. It
//! adds to the worker library what an interpreter needs:
//!
//! - during a wait, other Python threads can run, and Ctrl-C interrupts it within 50 ms;
//! - memory is shared with libraries that support DLPack or NumPy's array interface, and stays
//!   allocated while Python or the daemon uses it;
//! - errors are Python exceptions with the cause, the rank, the host and the tensor.
//!
//! Map: `session` (being a rank), `collectives` and `options` (starting operations), `handle`
//! (waiting for them), `gate` (starting them later), `process_set`, `buffer` and `dlpack` (memory),
//! `at_exit` (leaving with the exit code), `error`.

#![deny(unsafe_code)]

use pyo3::prelude::*;

#[expect(unsafe_code, reason = "called by the C library")]
mod at_exit;
mod buffer;
mod collectives;
#[expect(unsafe_code, reason = "exports memory")]
mod dlpack;
mod error;
mod gate;
mod handle;
mod options;
mod process_set;
mod session;

/// The module `gradwire._native`.
#[pymodule(name = "_native", gil_used = true)]
mod native {
    #[pymodule_export]
    use crate::{
        buffer::Buffer, gate::Gate, handle::Handle, process_set::ProcessSet, session::Session,
    };

    /// The version of the package and its programs.
    #[expect(non_upper_case_globals, reason = "Python's name")]
    #[pymodule_export]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
