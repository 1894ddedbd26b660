//! A tch tensor over a buffer of shared memory: the only place of this crate where libtorch gets an
//! address of ours.

use gradwire_proto::{DType, Shape};
use tch::{Device, Kind, Tensor, no_grad};

use crate::{
    error::{GradwireError, Result},
    memory::{Buffer, Memory, Payload, sealed::Sealed},
    session::Session,
};

/// Shared memory for what one tch tensor holds. Values are copied in and out, which also crosses
/// devices and straightens strides.
#[derive(Debug)]
pub(crate) struct Mirror {
    /// Over the memory of `buffer`, with no ownership of it: dropped first, and never given out.
    view: Tensor,
    buffer: Buffer,
}

impl Sealed for Mirror {}

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

impl Mirror {
    /// Memory for a tensor like `like`, which is called `name` in errors.
    ///
    /// # Errors
    /// An element type that is not exchanged, or no memory.
    pub(crate) fn new(session: &Session, name: &str, like: &Tensor) -> Result<Self> {
        let (kind, size) = (like.kind(), like.size());
        let dtype = dtype(kind).ok_or_else(|| {
            GradwireError::Invalid(format!(
                "tensor '{name}' has elements of kind {kind:?}, which are not exchanged: gradwire \
                 has no such element type; convert it first"
            ))
        })?;
        let dims: Vec<u64> = size.iter().map(|d| d.unsigned_abs()).collect();
        let buffer = session.buffer(dtype, Shape::new(&dims)?)?;
        // SAFETY: the memory is as long as the shape says and aligned for every element type, and
        // it lives as long as the buffer, which is dropped after the view. The view is private and
        // used for copying only, so no other tensor shares its storage. Copying takes place in
        // `&mut self` and `&self` methods, never while an operation is in flight: then the handle
        // owns this.
        #[expect(unsafe_code, reason = "tch has no safe way to use memory of others")]
        let view = unsafe { Tensor::f_from_blob(buffer.as_ptr(), &size, &[], kind, Device::Cpu) }?;
        Ok(Self { view, buffer })
    }

    /// Copies a tensor's values into shared memory.
    pub(crate) fn load(&mut self, from: &Tensor) -> Result<()> {
        no_grad(|| self.view.f_copy_(from))?;
        Ok(())
    }

    /// Copies the values back, also into a parameter.
    pub(crate) fn store(&self, to: &mut Tensor) -> Result<()> {
        no_grad(|| to.f_copy_(&self.view))?;
        Ok(())
    }
}

impl Payload for Mirror {
    fn memory(&self) -> &Memory {
        self.buffer.memory()
    }
}
