//! A tch tensor over a buffer of shared memory, for copying values in and out.

use std::time::Instant;

use gradwire_worker::{Buffer, DType, GradwireError, Handle, Session, Start};
use tch::{Device, Kind, Tensor, no_grad};

use crate::Result;

/// Shared memory for the values of a tch tensor. Copying in and out also handles other devices and
/// strides.
#[derive(Debug)]
pub(crate) struct Mirror {
    /// A tensor over the memory of `buffer`, without owning it: never given out.
    view: Tensor,
    buffer: Buffer,
}

/// Shared memory during a collective; nothing else accesses it.
#[derive(Debug)]
pub(crate) struct Exchange {
    view: Tensor,
    handle: Handle<Buffer>,
}

fn dtype(kind: Kind) -> Option<DType> {
    Some(match kind {
        Kind::Float => DType::F32,
        Kind::Double => DType::F64,
        Kind::Half => DType::F16,
        Kind::BFloat16 => DType::Bf16,
        Kind::Int8 => DType::I8,
        Kind::Uint8 => DType::U8,
        Kind::Int => DType::I32,
        Kind::Int64 => DType::I64,
        Kind::Int16 => DType::I16,
        Kind::Bool => DType::Bool,
        Kind::Float8e4m3fn => DType::F8E4m3,
        Kind::Float8e5m2 => DType::F8E5m2,
        Kind::ComplexFloat => DType::C64,
        Kind::ComplexDouble => DType::C128,
        _ => return None,
    })
}

/// Shared memory with the size and element type of `like`. `name` is for errors.
///
/// # Errors
/// If the element type is not supported, or memory can't be allocated.
pub(crate) fn buffer_like(session: &Session, name: &str, like: &Tensor) -> Result<Buffer> {
    let kind = like.kind();
    let dtype = dtype(kind).ok_or_else(|| {
        GradwireError::Invalid(format!(
            "tensor '{name}' has elements of kind {kind:?}, which Gradwire does not support; \
             convert it first"
        ))
    })?;
    let shape: Vec<usize> = like.size().iter().map(|d| d.unsigned_abs() as usize).collect();
    Ok(session.buffer(dtype, &shape)?)
}

impl Mirror {
    /// Memory for a tensor like `like`. `name` is for errors.
    ///
    /// # Errors
    /// If the element type is not supported, or memory can't be allocated.
    pub(crate) fn new(session: &Session, name: &str, like: &Tensor) -> Result<Self> {
        let (kind, size) = (like.kind(), like.size());
        let buffer = buffer_like(session, name, like)?;
        // SAFETY: the memory has the size of the shape and is aligned for every element type. The
        // view is private and only used for copying, so no other tensor shares its storage. Only
        // methods of `Mirror` copy, which owns the buffer: the memory is mapped, and no operation
        // is in flight. `Exchange` keeps the view and never accesses its memory; nor does dropping
        // the view.
        #[expect(unsafe_code, reason = "tch has no safe way to use existing memory")]
        let view = unsafe { Tensor::f_from_blob(buffer.as_ptr(), &size, &[], kind, Device::Cpu) }?;
        Ok(Self { view, buffer })
    }

    /// Copies a tensor's values into shared memory.
    pub(crate) fn load(&mut self, from: &Tensor) -> Result<()> {
        no_grad(|| self.view.f_copy_(from))?;
        Ok(())
    }

    /// Copies the values to a tensor, which may be a parameter.
    pub(crate) fn store(&self, to: &mut Tensor) -> Result<()> {
        no_grad(|| to.f_copy_(&self.view))?;
        Ok(())
    }

    /// Passes the memory to a collective that `start` starts.
    pub(crate) fn exchange(
        self,
        start: impl FnOnce(Buffer) -> Start<Buffer, Buffer>,
    ) -> Result<Exchange> {
        let Self { view, buffer } = self;
        Ok(Exchange { view, handle: start(buffer).map_err(GradwireError::from)? })
    }
}

impl Exchange {
    /// Waits for the end of the collective, but at most until `end`. Ignores its outcome.
    pub(crate) fn wait_until(self, end: Instant) {
        // If it does not end in time, the session keeps the memory.
        let _ = self.handle.wait_timeout(end.saturating_duration_since(Instant::now()));
    }

    /// Waits for the collective and returns the memory.
    ///
    /// # Errors
    /// The failure of the collective.
    pub(crate) fn wait(self) -> Result<Mirror> {
        let Self { view, handle } = self;
        Ok(Mirror { view, buffer: handle.wait()? })
    }
}
