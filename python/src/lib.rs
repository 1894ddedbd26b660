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
//! Map: `session` (being a rank), `collectives`, `options` and `call_site` (starting operations),
//! `handle` (waiting for them), `stuck` (finding out that nothing else goes on), `stacks` (what all
//! threads do, for explanations of waits), `gate` (starting them later), `process_set`, `pause`,
//! `elastic` (from one epoch of the job to the next), `buffer`, `adoption` and `dlpack` (memory),
//! `xla` (operations in programs that XLA has compiled), `at_exit` (leaving with the exit code),
//! `interruptible`, `error`.

#![deny(unsafe_code)]

use pyo3::prelude::*;

#[expect(unsafe_code, reason = "turns addresses of the program into memory")]
mod adoption;
#[expect(unsafe_code, reason = "called by the C library")]
mod at_exit;
mod buffer;
mod call_site;
mod collectives;
mod detached;
#[expect(unsafe_code, reason = "exports memory")]
mod dlpack;
#[expect(unsafe_code, reason = "moves the memory of tensors to another daemon")]
mod elastic;
mod error;
mod gate;
mod handle;
mod interruptible;
mod options;
mod pause;
mod process_set;
mod session;
#[expect(unsafe_code, reason = "declares a function of the C library")]
mod stacks;
mod stuck;
mod xla;

/// The module `gradwire._native`.
#[pymodule(name = "_native", gil_used = true)]
mod native {
    use gradwire_worker::starters::{self, Program};
    use pyo3::{PyResult, pyfunction};

    use crate::stacks;

    #[pymodule_export]
    use crate::{
        adoption::Adoption, adoption::Preparation, buffer::Buffer, detached::hold_threads,
        error::PythonFailure, gate::Gate, handle::Handle, pause::Pause, process_set::ProcessSet,
        session::Session, xla::xla_bind, xla::xla_know, xla::xla_last_error, xla::xla_site,
        xla::xla_targets,
    };

    /// Explains why this process may not be the only rank of a job: another starter, such as srun,
    /// has started several.
    ///
    /// Args:
    ///     command: The command line of this program.
    ///     script: The words after torchrun's options that start it.
    ///
    /// Returns:
    ///     The reason, or None if this process may train alone.
    #[pyfunction]
    fn why_not_alone(command: String, script: String) -> Option<String> {
        let text = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
        let variables = std::env::vars_os().map(|(name, value)| (text(name), text(value)));
        let program = Program { command, torchrun: Some(script) };
        starters::refusal(&variables.collect(), &program).map(|refusal| refusal.to_string())
    }

    /// Makes what `gradwire._stacks` and this module use to talk to each other.
    ///
    /// Returns:
    ///     File descriptors: the pipe of requests, to read; the pipe of answers, to write; a file
    ///     for stacks that the thread writes; a file for stacks that the signal's handler writes.
    ///     They stay open as long as the process lives.
    ///
    /// Raises:
    ///     OSError: The system has no descriptors left.
    #[pyfunction]
    fn open_stacks() -> PyResult<(i32, i32, i32, i32)> {
        Ok(stacks::open()?)
    }

    /// Answers questions about the stacks of this process from now on.
    ///
    /// Args:
    ///     signal: The signal whose handler writes the stacks of all threads; None: there is none.
    ///     main: The identifier of the main thread.
    ///     package: The folder of this package.
    #[pyfunction]
    fn offer_stacks(signal: Option<i32>, main: u64, package: String) {
        stacks::offer(signal, main, package);
    }

    /// Takes the report that the thread has been asked to show.
    ///
    /// Returns:
    ///     The report, or None if it has been shown otherwise.
    #[pyfunction]
    fn take_report() -> Option<String> {
        stacks::take_report()
    }

    /// The version of the package and its programs.
    #[expect(non_upper_case_globals, reason = "Python's name")]
    #[pymodule_export]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
