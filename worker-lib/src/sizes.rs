//! Sizes are `usize` in the interface of this crate and `u64` on the wire. Lists of them change
//! from one to the other here, without a copy.

use gradwire_proto::{DType, Shape, TypeError};

use crate::error::{GradwireError, Result};

/// Addresses have 64 bits on all platforms that the daemon supports.
const _: () = assert!(size_of::<usize>() == size_of::<u64>());

/// Sizes of the wire.
pub(crate) fn of_wire(sizes: &[u64]) -> &[usize] {
    bytemuck::cast_slice(sizes)
}

/// Sizes for the wire.
pub(crate) fn to_wire(sizes: &[usize]) -> &[u64] {
    bytemuck::cast_slice(sizes)
}

/// The shape with these dimensions, outermost first.
pub(crate) fn shape(dims: &[usize]) -> std::result::Result<Shape, TypeError> {
    Shape::new(to_wire(dims))
}

/// The shape, of one dimension, of the elements in these bytes.
pub(crate) fn elements(dtype: DType, bytes: &[u8]) -> Result<Shape> {
    let (length, size) = (bytes.len(), dtype.size());
    if !length.is_multiple_of(size) {
        let text = format!("{length} bytes are not whole elements of {dtype}, which have {size}");
        return Err(GradwireError::Invalid(text));
    }
    Ok(Shape::new(&[(length / size) as u64])?)
}
