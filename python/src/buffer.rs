//! Tensors in shared memory, for Python.

use std::sync::Arc;

use gradwire_worker::{DType, SharedBuffer};
use pyo3::{
    exceptions::{PyAttributeError, PyBufferError},
    prelude::*,
    types::{PyBytes, PyDict, PyTuple},
};

use crate::{
    dlpack,
    error::{PythonError, Raise},
    options::parse,
};

/// Parses an element type.
pub(crate) fn dtype(name: &str) -> Result<DType, PythonError> {
    parse("element type", name, DType::NAMES)
}

/// Memory shared by this process and the daemon: typed, shaped, contiguous.
///
/// Other libraries access it through `__dlpack__` or `__array_interface__`. It is not reused while
/// it is referenced.
#[pyclass(frozen, module = "gradwire._native")]
#[derive(Debug)]
pub(crate) struct Buffer {
    pub(crate) memory: SharedBuffer,
}

impl From<SharedBuffer> for Buffer {
    fn from(memory: SharedBuffer) -> Self {
        Self { memory }
    }
}

/// NumPy's name for an element type, if it has one.
fn typestr(dtype: DType) -> Option<&'static str> {
    Some(match dtype {
        DType::F32 => "<f4",
        DType::F64 => "<f8",
        DType::F16 => "<f2",
        DType::I8 => "|i1",
        DType::U8 => "|u1",
        DType::I16 => "<i2",
        DType::U16 => "<u2",
        DType::I32 => "<i4",
        DType::U32 => "<u4",
        DType::I64 => "<i8",
        DType::U64 => "<u8",
        DType::Bool => "|b1",
        DType::C64 => "<c8",
        DType::C128 => "<c16",
        DType::Bf16 | DType::F8E4m3 | DType::F8E5m2 => return None,
    })
}

#[pymethods]
impl Buffer {
    /// The name of the element type.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.memory.dtype().name()
    }

    /// The dimensions, outermost first.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.memory.shape())
    }

    /// The size in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.memory.byte_len()
    }

    /// The address of the first byte.
    #[getter]
    fn address(&self) -> usize {
        self.memory.as_ptr().addr()
    }

    /// The address and the size in bytes of the mapping that contains the memory.
    #[getter]
    fn mapping(&self) -> (usize, usize) {
        let (start, bytes) = self.memory.mapping();
        (start.addr(), bytes)
    }

    /// Returns a part of the same memory, with a given element type and shape.
    ///
    /// Args:
    ///     first_element: The start of the part, in elements of `dtype`.
    ///     dtype: The name of the element type.
    ///     shape: The dimensions, outermost first.
    ///
    /// Returns:
    ///     A buffer on the same memory.
    ///
    /// Raises:
    ///     InvalidRequest: The part is outside of the memory, or not aligned.
    fn view(
        &self,
        py: Python<'_>,
        first_element: usize,
        dtype: &str,
        shape: Vec<usize>,
    ) -> PyResult<Self> {
        let dtype = self::dtype(dtype).or_raise(py)?;
        Ok(self.memory.view(first_element, dtype, &shape).or_raise(py)?.into())
    }

    /// Returns a part of the same memory that is owned by another object.
    ///
    /// Operations on the part keep that object alive until they complete.
    ///
    /// Args:
    ///     first_element: The start of the part, in elements of `dtype`.
    ///     dtype: The name of the element type.
    ///     shape: The dimensions, outermost first.
    ///     owner: The object that owns the memory.
    ///
    /// Returns:
    ///     A buffer on the same memory.
    ///
    /// Raises:
    ///     InvalidRequest: The part is outside of the memory, or not aligned.
    fn part(
        &self,
        py: Python<'_>,
        first_element: usize,
        dtype: &str,
        shape: Vec<usize>,
        owner: Py<PyAny>,
    ) -> PyResult<Self> {
        let part = self.view(py, first_element, dtype, shape)?;
        Ok(part.memory.kept_by(Arc::new(owner)).into())
    }

    /// Records that the memory was filled from ordinary memory.
    ///
    /// The next operation on it counts the copy in the daemon's metrics.
    fn mark_copied(&self) {
        self.memory.mark_copied();
    }

    /// Copies bytes to the memory.
    ///
    /// Args:
    ///     bytes: The bytes, exactly as many as the memory holds.
    ///
    /// Raises:
    ///     InvalidRequest: The number of bytes differs.
    fn write(&self, py: Python<'_>, bytes: &[u8]) -> PyResult<()> {
        if bytes.len() != self.memory.byte_len() {
            let text = format!("{} has another size than {} bytes", self.__repr__(), bytes.len());
            return Err(PythonError::invalid(text).raise(py));
        }
        dlpack::write(&self.memory, bytes);
        self.memory.mark_copied();
        Ok(())
    }

    /// Copies the memory.
    ///
    /// Returns:
    ///     The bytes.
    fn read<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        PyBytes::new_with(py, self.memory.byte_len(), |into| {
            dlpack::read(&self.memory, into);
            Ok(())
        })
    }

    /// Fills the memory from ordinary memory.
    ///
    /// Args:
    ///     address: The source address, with as many readable bytes as the memory holds.
    fn copy_from(&self, address: usize) {
        dlpack::copy_from(&self.memory, address);
        self.memory.mark_copied();
    }

    /// Copies the memory to ordinary memory.
    ///
    /// Args:
    ///     address: The destination address, with as many writable bytes as the memory holds.
    fn copy_to(&self, address: usize) {
        dlpack::copy_to(&self.memory, address);
    }

    /// Exports the memory through DLPack, without a copy.
    ///
    /// Args:
    ///     stream: Ignored: CPU memory has no streams.
    ///     max_version: The newest DLPack version that the caller supports.
    ///     dl_device: The requested device; only the CPU is supported.
    ///     copy: Whether a copy is requested; True is not supported.
    ///
    /// Returns:
    ///     A capsule.
    ///
    /// Raises:
    ///     BufferError: Another device or a copy is requested.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let _ = stream; // CPU memory has no streams
        if dl_device.is_some_and(|device| device.0 != dlpack::CPU) {
            return Err(PyBufferError::new_err("a gradwire buffer is CPU memory"));
        }
        if copy == Some(true) {
            let text = "a gradwire buffer is exported without a copy; copy the imported array";
            return Err(PyBufferError::new_err(text));
        }
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        dlpack::capsule(py, self.memory.clone(), versioned)
    }

    /// Returns DLPack's device numbers for CPU memory.
    ///
    /// Returns:
    ///     The device type and the device id.
    fn __dlpack_device__(&self) -> (i32, i32) {
        (dlpack::CPU, 0)
    }

    /// The description of the memory for NumPy. Raises an AttributeError for element types that
    /// NumPy lacks.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dtype = self.memory.dtype();
        let typestr = typestr(dtype).ok_or_else(|| {
            PyAttributeError::new_err(format!("NumPy has no element type {dtype}"))
        })?;
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("typestr", typestr)?;
        interface.set_item("shape", self.shape(py)?)?;
        interface.set_item("data", (self.address(), false))?;
        Ok(interface)
    }

    fn __repr__(&self) -> String {
        format!("Buffer({} {:?})", self.memory.dtype(), self.memory.shape())
    }
}
