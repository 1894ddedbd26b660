//! Moves memory of the program into shared memory. This module, `dlpack` and `at_exit` are the only
//! ones in this crate with `unsafe`.

use std::{
    os::fd::BorrowedFd,
    ptr::{self, NonNull},
    sync::{Arc, Mutex, PoisonError},
};

use pyo3::prelude::*;

use crate::{
    buffer::Buffer,
    error::{PythonError, Raise},
};

/// Shared memory to which memory of the program can move, once.
#[pyclass(frozen, module = "gradwire._native")]
#[derive(Debug)]
pub(crate) struct Adoption(Mutex<Option<gradwire_worker::Adoption>>);

impl From<gradwire_worker::Adoption> for Adoption {
    fn from(adoption: gradwire_worker::Adoption) -> Self {
        Self(Mutex::new(Some(adoption)))
    }
}

#[pymethods]
impl Adoption {
    /// Moves memory of the program here, at its addresses.
    ///
    /// It must be exactly the mapping of a file. Nothing may write to it during the call.
    ///
    /// Args:
    ///     address: The address of the first byte.
    ///     fd: The file's descriptor, which will refer to the new memory.
    ///
    /// Returns:
    ///     A buffer of bytes. The memory still belongs to the program: each operation uses a part
    ///     of the buffer that is owned by an object which keeps it mapped.
    ///
    /// Raises:
    ///     OutOfResources: The memory is not such a mapping, or is shared already.
    ///     InvalidRequest: Memory has moved here before.
    fn take_place(&self, py: Python<'_>, address: usize, fd: i32) -> PyResult<Buffer> {
        let adoption = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let start = NonNull::new(ptr::with_exposed_provenance_mut(address));
        let (Some(adoption), Some(start), 0..) = (adoption, start, fd) else {
            let text = format!("memory at {address:#x} of file {fd} can't move here, or again");
            return Err(PythonError::invalid(text).raise(py));
        };
        // SAFETY: the number is not -1, and the caller owns the descriptor. The GIL is held, so
        // other Python threads neither close it nor write to the memory. `gradwire.torch` only uses
        // parts of the buffer whose owners keep the memory mapped.
        let buffer =
            unsafe { adoption.take_place(start, BorrowedFd::borrow_raw(fd), Arc::new(())) };
        Ok(buffer.or_raise(py)?.into())
    }
}
