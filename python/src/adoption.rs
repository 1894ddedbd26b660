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
    detached::detached,
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
    /// It must be exactly the mapping of a file. During the call nothing may use it, nor write to
    /// the contents. Other Python threads continue.
    ///
    /// Args:
    ///     address: The address of the first byte.
    ///     fd: The file's descriptor, which will refer to the new memory.
    ///     contents: The address of what the memory will contain; it may be the same address.
    ///
    /// Returns:
    ///     A buffer of bytes. The memory still belongs to the program: each operation uses a part
    ///     of the buffer that is owned by an object which keeps it mapped.
    ///
    /// Raises:
    ///     OutOfResources: The memory is not such a mapping, or is shared already.
    ///     InvalidRequest: Memory has moved here before.
    fn take_place(
        &self,
        py: Python<'_>,
        address: usize,
        fd: i32,
        contents: usize,
    ) -> PyResult<Buffer> {
        let adoption = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let at = |address| NonNull::new(ptr::with_exposed_provenance_mut(address)).map(Address);
        let (Some(adoption), Some(start), Some(contents), 0..) =
            (adoption, at(address), at(contents), fd)
        else {
            let text = format!("memory at {address:#x} of file {fd} can't move here, or again");
            return Err(PythonError::invalid(text).raise(py));
        };
        let moved = detached(py, || {
            // Captures each `Address` as a whole: the pointer in it is not `Send`.
            let (Address(start), Address(contents)) = (start, { contents });
            // SAFETY: the number is not -1. `gradwire.torch` owns the descriptor and the memory,
            // which PyTorch has just made, and an operation owns the contents: nothing else may use
            // its tensors. It only uses parts of the buffer whose owners keep the memory mapped.
            unsafe {
                let fd = BorrowedFd::borrow_raw(fd);
                adoption.take_place(start, fd, contents, Arc::new(()))
            }
        });
        Ok(moved.or_raise(py)?.into())
    }
}

/// An address of the program.
struct Address(NonNull<u8>);

// SAFETY: nothing in the memory is bound to a thread.
unsafe impl Send for Address {}

/// Shared memory that is being made in the background.
#[pyclass(frozen, module = "gradwire._native")]
#[derive(Debug)]
pub(crate) struct Preparation(Mutex<Option<gradwire_worker::Preparation>>);

impl From<gradwire_worker::Preparation> for Preparation {
    fn from(preparation: gradwire_worker::Preparation) -> Self {
        Self(Mutex::new(Some(preparation)))
    }
}

#[pymethods]
impl Preparation {
    /// Whether ``wait`` returns at once.
    #[getter]
    fn is_done(&self) -> bool {
        let mut preparation = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        preparation.as_mut().is_none_or(gradwire_worker::Preparation::is_done)
    }

    /// Waits for the shared memory. This may be called once.
    ///
    /// Returns:
    ///     The shared memory. It is given back if nothing moves there.
    ///
    /// Raises:
    ///     OutOfResources: Not enough memory is available, here or to the daemon.
    ///     InvalidRequest: It was called before.
    fn wait(&self, py: Python<'_>) -> PyResult<Adoption> {
        let preparation = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(preparation) = preparation else {
            return Err(PythonError::invalid("this memory was waited for before").raise(py));
        };
        Ok(detached(py, || preparation.wait()).or_raise(py)?.into())
    }
}
