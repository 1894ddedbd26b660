//! Exports memory to other libraries in DLPack capsules, and copies from and to their memory. This
//! module, `adoption` and `at_exit` are the only ones in this crate with `unsafe`.
//!
//! A capsule holds a pointer to a structure whose layout is defined by DLPack. A consumer renames
//! the capsule and calls the structure's deleter when it is done; a capsule without a consumer
//! calls it itself. The structure keeps the shared memory allocated until then. This module never
//! creates a reference to the memory: Python and the daemon access it through pointers.

use std::{
    ffi::{CStr, c_void},
    ptr,
};

use gradwire_worker::{DType, SharedBuffer};
use pyo3::{ffi, prelude::*};

/// `kDLCPU`.
pub(crate) const CPU: i32 = 1;

#[repr(C)]
struct DlDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor` of dlpack.h.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    dtype: DlDataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// A structure in a capsule.
trait Managed {
    /// The name of its capsules.
    const NAME: &'static CStr;
}

/// `DLManagedTensor` of dlpack.h, for consumers before DLPack 1.0.
#[repr(C)]
struct Unversioned {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

impl Managed for Unversioned {
    const NAME: &'static CStr = c"dltensor";
}

/// `DLManagedTensorVersioned` of dlpack.h. Without it, NumPy creates read-only arrays.
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: DlTensor,
}

impl Managed for Versioned {
    const NAME: &'static CStr = c"dltensor_versioned";
}

type Kept = (Vec<i64>, Vec<i64>, SharedBuffer);

/// The structure and the data that it points to, freed together. A pointer to the structure is also
/// one to this.
#[repr(C)]
struct Export<M> {
    managed: M,
    /// What the structure points to.
    kept: Kept,
}

fn data_type(dtype: DType) -> DlDataType {
    let code = match dtype {
        DType::I8 | DType::I16 | DType::I32 | DType::I64 => 0,
        DType::U8 | DType::U16 | DType::U32 | DType::U64 => 1,
        DType::F16 | DType::F32 | DType::F64 => 2,
        DType::Bf16 => 4,
        DType::C64 | DType::C128 => 5,
        DType::Bool => 6,
        DType::F8E4m3 => 10,
        DType::F8E5m2 => 12,
    };
    DlDataType { code, bits: (dtype.size() * 8) as u8, lanes: 1 }
}

fn tensor(memory: &SharedBuffer, shape: &mut [i64], strides: &mut [i64]) -> DlTensor {
    DlTensor {
        data: memory.as_ptr().cast(),
        device_type: CPU,
        device_id: 0,
        ndim: shape.len() as i32,
        dtype: data_type(memory.dtype()),
        shape: shape.as_mut_ptr(),
        strides: strides.as_mut_ptr(),
        byte_offset: 0,
    }
}

/// Dimensions and strides, in elements. Shapes have at most 2^53 elements.
fn geometry(memory: &SharedBuffer) -> (Vec<i64>, Vec<i64>) {
    let shape: Vec<i64> = memory.shape().iter().map(|&d| d as i64).collect();
    let mut strides = vec![1; shape.len()];
    for at in (1..shape.len()).rev() {
        strides[at - 1] = strides[at] * shape[at].max(1);
    }
    (shape, strides)
}

/// A capsule with the memory, for the consumer's version of DLPack.
pub(crate) fn capsule(
    py: Python<'_>,
    memory: SharedBuffer,
    versioned: bool,
) -> PyResult<Bound<'_, PyAny>> {
    let (mut shape, mut strides) = geometry(&memory);
    let tensor = tensor(&memory, &mut shape, &mut strides);
    let (context, kept) = (ptr::null_mut(), (shape, strides, memory));
    if versioned {
        let deleter = Some(delete as unsafe extern "C" fn(*mut Versioned));
        let managed = Versioned { major: 1, minor: 1, context, deleter, flags: 0, tensor };
        new_capsule(py, managed, kept)
    } else {
        let deleter = Some(delete as unsafe extern "C" fn(*mut Unversioned));
        new_capsule(py, Unversioned { tensor, context, deleter }, kept)
    }
}

fn new_capsule<M: Managed>(py: Python<'_>, managed: M, kept: Kept) -> PyResult<Bound<'_, PyAny>> {
    let managed: *mut M = Box::into_raw(Box::new(Export { managed, kept })).cast();
    // SAFETY: the interpreter is attached; the pointer is not null and valid until the deleter is
    // called; the name is static; the destructor is for capsules of this name.
    let capsule =
        unsafe { ffi::PyCapsule_New(managed.cast(), M::NAME.as_ptr(), Some(destroy::<M>)) };
    // SAFETY: a new reference, or null with an exception set.
    let capsule = unsafe { Bound::from_owned_ptr_or_err(py, capsule) };
    if capsule.is_err() {
        // SAFETY: no capsule was created, so the structure has no other users.
        unsafe { delete(managed) };
    }
    capsule
}

/// Copies bytes to the beginning of the memory, as many as fit.
pub(crate) fn write(memory: &SharedBuffer, bytes: &[u8]) {
    let count = bytes.len().min(memory.byte_len());
    // SAFETY: the memory has at least `count` bytes and is mapped while `memory` lives; there are
    // no references to it, and `bytes` belongs to Python.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), memory.as_ptr(), count) };
}

/// Fills the memory from ordinary memory. No arrays are created, which would dominate the latency
/// of small tensors. The address must have as many readable bytes as the memory holds.
pub(crate) fn copy_from(memory: &SharedBuffer, address: usize) {
    let from = ptr::with_exposed_provenance::<u8>(address);
    // SAFETY: as in `write`; the caller guarantees the bytes at the address, as for a capsule. The
    // GIL is held, so other Python threads don't free them; XLA keeps the tensors of a call.
    unsafe { ptr::copy(from, memory.as_ptr(), memory.byte_len()) };
}

/// Copies the memory to ordinary memory with as many writable bytes.
pub(crate) fn copy_to(memory: &SharedBuffer, address: usize) {
    let to = ptr::with_exposed_provenance_mut::<u8>(address);
    // SAFETY: as above.
    unsafe { ptr::copy(memory.as_ptr(), to, memory.byte_len()) };
}

/// Copies the beginning of the memory, as much as fits into `into`.
pub(crate) fn read(memory: &SharedBuffer, into: &mut [u8]) {
    let count = into.len().min(memory.byte_len());
    // SAFETY: as above; `into` is borrowed mutably.
    unsafe { ptr::copy_nonoverlapping(memory.as_ptr(), into.as_mut_ptr(), count) };
}

/// # Safety
/// `managed` is part of an [`Export`] created by [`new_capsule`], and is not used afterwards.
unsafe extern "C" fn delete<M>(managed: *mut M) {
    // SAFETY: the structure is the first field of the boxed export. Consumers call this once;
    // releasing the memory needs no interpreter.
    drop(unsafe { Box::from_raw(managed.cast::<Export<M>>()) });
}

/// Deletes the structure of a capsule without a consumer, which still has its name.
///
/// # Safety
/// Python calls it once, with a capsule created by [`new_capsule`].
unsafe extern "C" fn destroy<M: Managed>(capsule: *mut ffi::PyObject) {
    let name = M::NAME.as_ptr();
    // SAFETY: by the contract, and the interpreter is attached; the name is checked before the
    // pointer is requested, so no exception is set.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, name) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, name).cast::<M>());
        }
    }
}
