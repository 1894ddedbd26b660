//! Sizes are `usize` in the interface of this crate and `u64` on the wire. Lists of them change
//! from one to the other here, without a copy.

use gradwire_proto::{Shape, TypeError};

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
pub(crate) fn shape(dims: &[usize]) -> Result<Shape, TypeError> {
    Shape::new(to_wire(dims))
}
