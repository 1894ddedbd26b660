//! Finds the line of the program that calls: the innermost Python frame outside of Gradwire, the
//! frameworks and the standard library.
//!
//! Every operation needs this, so each code object is looked at once. The table keeps its code
//! objects alive, so that no new code object gets one of their addresses. It starts over if a
//! program makes too many of them (BOUND).

use std::{
    collections::HashMap,
    mem,
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
};

use gradwire_worker::CallSite;
use pyo3::{intern, prelude::*, sync::PyOnceLock};

use crate::stacks;

/// The most code objects in the table (BOUND).
const MAX_CODES: usize = 8192;

/// The most frames that are looked at.
const MAX_FRAMES: usize = 200;

/// What is known about a code object.
#[derive(Debug)]
struct Known {
    /// Keeps it alive.
    _code: Py<PyAny>,
    /// Whether it belongs to the program.
    is_program: bool,
    /// The call sites in it, by the instruction of the call.
    sites: Vec<(i64, CallSite)>,
}

/// By the address of the code object. The lock is never held while Python code may run.
static CODES: LazyLock<Mutex<HashMap<usize, Known>>> = LazyLock::new(Mutex::default);

fn codes() -> MutexGuard<'static, HashMap<usize, Known>> {
    CODES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The line of the program from which the native module is called. It is unknown in a thread that
/// the program has not started, such as those of autograd for GPUs.
pub(crate) fn here(py: Python<'_>) -> CallSite {
    // Without it, only a line in reports is missing.
    find(py).unwrap_or(CallSite::UNKNOWN)
}

fn find(py: Python<'_>) -> PyResult<CallSite> {
    static CURRENT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let current = CURRENT
        .get_or_try_init(py, || py.import("sys")?.getattr("_getframe").map(Bound::unbind))?;
    let mut frame = current.bind(py).call0()?;
    for _ in 0..MAX_FRAMES {
        let code = frame.getattr(intern!(py, "f_code"))?;
        if is_program(&code)? {
            return site(&frame, &code);
        }
        frame = frame.getattr(intern!(py, "f_back"))?;
        if frame.is_none() {
            break;
        }
    }
    Ok(CallSite::UNKNOWN)
}

/// Whether a code object belongs to the program.
fn is_program(code: &Bound<'_, PyAny>) -> PyResult<bool> {
    let address = code.as_ptr().addr();
    if let Some(known) = codes().get(&address) {
        return Ok(known.is_program);
    }
    let file: String = code.getattr("co_filename")?.extract()?;
    let is_program = !is_library(code.py(), &file)?;
    let known = Known { _code: code.clone().unbind(), is_program, sites: Vec::new() };
    let mut codes = codes();
    let old = if codes.len() < MAX_CODES { HashMap::new() } else { mem::take(&mut *codes) };
    codes.insert(address, known);
    drop(codes);
    drop(old);
    Ok(is_program)
}

/// Whether a file is one of Gradwire, a framework or the standard library.
fn is_library(py: Python<'_>, file: &str) -> PyResult<bool> {
    if file.starts_with("<frozen ") || file.starts_with("<eval_with_key>") {
        return Ok(true);
    }
    let modules = py.import("sys")?.getattr("modules")?;
    for name in ["gradwire", "torch", "tensorflow", "keras", "jax", "optax"] {
        let module = modules.call_method1("get", (name,))?;
        if module.is_none() {
            continue;
        }
        for folder in module.getattr("__path__")?.try_iter()? {
            if is_within(file, &folder?.extract::<String>()?).is_some() {
                return Ok(true);
            }
        }
    }
    let standard: String = py.import("os")?.getattr("__file__")?.extract()?;
    let folder = standard.rsplit_once('/').map_or("", |(folder, _)| folder);
    let installed = ["site-packages/", "dist-packages/"];
    let rest = is_within(file, folder);
    Ok(rest.is_some_and(|rest| !installed.iter().any(|part| rest.starts_with(part))))
}

/// The rest of a path within a folder.
fn is_within<'p>(path: &'p str, folder: &str) -> Option<&'p str> {
    path.strip_prefix(folder)?.strip_prefix('/').filter(|_| !folder.is_empty())
}

/// The call site of a frame of the program.
fn site(frame: &Bound<'_, PyAny>, code: &Bound<'_, PyAny>) -> PyResult<CallSite> {
    let py = frame.py();
    let address = code.as_ptr().addr();
    let instruction: i64 = frame.getattr(intern!(py, "f_lasti"))?.extract()?;
    let known = |sites: &Vec<(i64, CallSite)>| {
        sites.iter().find(|(at, _)| *at == instruction).map(|(_, site)| *site)
    };
    if let Some(site) = codes().get(&address).and_then(|code| known(&code.sites)) {
        return Ok(site);
    }
    let file: String = code.getattr("co_filename")?.extract()?;
    let function: String = code.getattr("co_name")?.extract()?;
    let line: Option<u32> = frame.getattr("f_lineno")?.extract()?;
    let folder = stacks::folder();
    let place =
        stacks::Place { path: &file, line: &line.unwrap_or(0).to_string(), function: &function };
    let site = CallSite::new(&place.shorten("", &folder));
    if let Some(code) = codes().get_mut(&address) {
        code.sites.push((instruction, site));
    }
    Ok(site)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_not_a_prefix_of_a_name() {
        assert_eq!(is_within("/x/torch/nn.py", "/x/torch"), Some("nn.py"));
        assert_eq!(is_within("/x/torchvision/nn.py", "/x/torch"), None);
        assert_eq!(is_within("/x/a.py", ""), None);
    }
}
