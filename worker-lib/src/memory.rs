//! Tensors in the arena, and the only place of this crate where their bytes become slices.
//!
//! While an operation is in flight the daemon reads and writes its tensor from another process.
//! That nobody here looks meanwhile is a matter of ownership: a blocking call borrows the buffer
//! mutably, an asynchronous one takes it and its handle gives it back. The table of operations
//! keeps a [`Keep`] for as long as the operation runs: it keeps the memory from being given to
//! another tensor, and can't look into it.

use std::{fmt, marker::PhantomData, slice, sync::Arc};

use gradwire_proto::{DType, Shape};
use gradwire_shm::{arena::ArenaBlock, control::Place};

use crate::element::Element;

/// Keeps a buffer's memory taken without access to it.
#[derive(Debug)]
pub(crate) struct Keep {
    #[expect(dead_code, reason = "held for its drop")]
    block: Arc<ArenaBlock>,
}

/// A tensor whose element type is known at run time only. In shared memory, aligned to 64 bytes.
pub struct Buffer {
    block: Arc<ArenaBlock>,
    dtype: DType,
    shape: Shape,
}

impl Buffer {
    /// Takes a block that nobody else uses. Its size is that of the shape.
    pub(crate) fn new(block: ArenaBlock, dtype: DType, shape: Shape) -> Self {
        debug_assert_eq!(block.bytes(), shape.elements() * dtype.size() as u64);
        Self { block: Arc::new(block), dtype, shape }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The first byte, for others to make views of; valid for [`Buffer::bytes`]' length while the
    /// buffer lives, and the daemon's while an operation is in flight.
    pub fn as_ptr(&self) -> *mut u8 {
        self.block.as_ptr()
    }

    pub(crate) fn place(&self) -> Place {
        Place { segment: self.block.segment().0, offset: self.block.offset() }
    }

    pub(crate) fn keep(&self) -> Keep {
        Keep { block: self.block.clone() }
    }

    /// The elements' bytes, in the machine's order, outermost dimension first.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the block is this long and stays mapped while it lives, which is as long as the
        // borrow of `self`. In this process only a `&mut Buffer` gives a way to write to it. The
        // daemon writes between a submission and its end only, and `self` is borrowed mutably or
        // owned by the handle for that long.
        unsafe { slice::from_raw_parts(self.block.as_ptr(), self.block.bytes() as usize) }
    }

    /// The elements' bytes, to be changed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; `self` is borrowed mutably, other owners of the block (`Keep`) can't
        // look into it, and no operation is in flight.
        unsafe { slice::from_raw_parts_mut(self.block.as_ptr(), self.block.bytes() as usize) }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} {} in {:?})", self.dtype, self.shape, self.block)
    }
}

/// A tensor in shared memory: what the collectives work on without a copy.
pub struct Tensor<T: Element> {
    buffer: Buffer,
    element: PhantomData<T>,
}

impl<T: Element> Tensor<T> {
    /// Takes a buffer of `T::DTYPE`.
    pub(crate) fn new(buffer: Buffer) -> Self {
        debug_assert_eq!(buffer.dtype, T::DTYPE);
        Self { buffer, element: PhantomData }
    }

    /// The elements, outermost dimension first.
    pub fn as_slice(&self) -> &[T] {
        // Blocks are aligned to 64 bytes and as long as their elements.
        bytemuck::cast_slice(self.buffer.bytes())
    }

    /// The elements, to be changed.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(self.buffer.bytes_mut())
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &Shape {
        self.buffer.shape()
    }
}

impl<T: Element> fmt::Debug for Tensor<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor {} {:?}", self.shape(), self.as_slice())
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Buffer {}
    impl<T: super::Element> Sealed for super::Tensor<T> {}
    #[cfg(feature = "tch")]
    impl Sealed for crate::tch::Mirror {}
}

/// What a collective works on: a [`Tensor`] or a [`Buffer`]. Sealed, because owning one must mean
/// that nobody else has a way to its memory.
pub trait Payload: sealed::Sealed {
    /// The memory.
    #[doc(hidden)]
    fn buffer(&self) -> &Buffer;
}

impl Payload for Buffer {
    fn buffer(&self) -> &Buffer {
        self
    }
}

impl<T: Element> Payload for Tensor<T> {
    fn buffer(&self) -> &Buffer {
        &self.buffer
    }
}
