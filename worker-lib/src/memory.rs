//! Tensors in the arena. Their bytes become slices only in this module of the crate.
//!
//! While an operation is in flight the daemon reads and writes its tensor from another process.
//! Ownership ensures that this process does not interfere meanwhile: a blocking call borrows the
//! buffer, mutably if the daemon writes to it; an asynchronous call takes it, and its handle
//! returns it. The table of operations holds a [`Keep`] while the operation runs: it keeps other
//! tensors from getting the memory, and has no access to the bytes. A [`SharedBuffer`] has no
//! slices at all, so that others may have views of it.
//!
//! A session may end while the daemon still works on an operation, for example because the daemon
//! was stopped. The memory is taken back ([`Keep::take_back`]) before a waiter is notified that the
//! operation has ended.

use std::{
    any::Any,
    fmt,
    marker::PhantomData,
    ops::Range,
    slice,
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU64, Ordering::Relaxed},
    },
};

use gradwire_proto::{DType, Shape};
use gradwire_shm::{
    arena::{self, Arena, ArenaBlock},
    control::Place,
    segment::SegmentError,
};

use crate::{
    element::Element,
    error::{GradwireError, Result},
};

/// Whatever keeps memory that was adopted where it is: for example an array of a framework.
pub type Owner = Arc<dyn Any + Send + Sync>;

/// Keeps a buffer's memory in use, without access to it.
#[derive(Debug, Clone)]
pub(crate) struct Keep {
    block: Arc<ArenaBlock>,
    /// Dropped when the operation has ended.
    _owner: Option<Owner>,
    /// The bytes of the block that the daemon writes.
    written: Range<u64>,
}

impl Keep {
    /// Makes memory independent of what the daemon does with it from now on.
    ///
    /// # Errors
    /// If the kernel refuses that; the daemon may still write to it then.
    pub(crate) fn take_back<'a>(
        all: impl IntoIterator<Item = &'a Self, IntoIter: Clone>,
    ) -> Result<(), SegmentError> {
        arena::take_back(all.into_iter().map(|keep| (&*keep.block, keep.written.clone())))
    }
}

/// The place, element type and shape of a tensor, without slices of its bytes.
pub struct Memory {
    block: Arc<ArenaBlock>,
    /// Its first byte in the block.
    start: u64,
    dtype: DType,
    shape: Shape,
    /// What keeps adopted memory mapped.
    owner: Option<Owner>,
}

impl Memory {
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn shape(&self) -> &Shape {
        &self.shape
    }

    fn byte_len(&self) -> u64 {
        self.shape.elements() * self.dtype.size() as u64
    }

    fn as_ptr(&self) -> *mut u8 {
        // Within the block: `start` and the shape were checked against it.
        self.block.as_ptr().wrapping_add(self.start as usize)
    }

    pub(crate) fn place(&self) -> Place {
        Place { segment: self.block.segment().0, offset: self.block.offset() + self.start }
    }

    /// Whether it is in this arena. In another arena the same place belongs to another tensor.
    pub(crate) fn is_in(&self, arena: &Arena) -> bool {
        arena.owns(&self.block)
    }

    /// Notes, for metrics, that it was filled from ordinary memory.
    pub(crate) fn mark_copied(&self) {
        self.block.mark_copied();
    }

    /// Whether it was filled from ordinary memory since the last call.
    pub(crate) fn take_copied(&self) -> bool {
        self.block.take_copied()
    }

    /// Keeps the memory in use while the daemon reads it.
    pub(crate) fn lend(&self) -> Keep {
        Keep { block: self.block.clone(), _owner: self.owner.clone(), written: 0..0 }
    }

    /// Keeps the memory in use while the daemon writes it.
    pub(crate) fn lend_mut(&self) -> Keep {
        Keep { written: self.start..self.start + self.byte_len(), ..self.lend() }
    }

    /// Writes the whole tensor. Other owners of the memory may see a part of it earlier.
    ///
    /// # Panics
    /// If `bytes` has another length.
    pub(crate) fn write(&self, bytes: &[u8]) {
        assert_eq!(bytes.len() as u64, self.byte_len(), "all of the tensor is written");
        let start = self.as_ptr();
        let words = if start.addr().is_multiple_of(8) { bytes.len() / 8 } else { 0 };
        let (body, tail) = bytes.split_at(words * 8);
        // SAFETY: the memory is `bytes.len()` long and mapped while the block lives, which `self`
        // keeps; it is aligned for the words, checked above. The stores are atomic, so another
        // thread's stores here do not race with them. Nobody has a slice of it: a `SharedBuffer`
        // has none, and whoever owns a `Buffer` has given it away or lent it mutably to call this.
        let (to, rest) = unsafe {
            let to = slice::from_raw_parts(start.cast::<AtomicU64>(), words);
            let rest = start.wrapping_add(words * 8).cast::<AtomicU8>();
            (to, slice::from_raw_parts(rest, tail.len()))
        };
        for (to, bytes) in to.iter().zip(body.as_chunks().0) {
            to.store(u64::from_ne_bytes(*bytes), Relaxed);
        }
        rest.iter().zip(tail).for_each(|(to, byte)| to.store(*byte, Relaxed));
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} in {:?}", self.dtype, self.shape, self.block)
    }
}

/// A tensor in shared memory whose element type is known only at run time. Aligned to 64 bytes.
pub struct Buffer {
    memory: Memory,
}

impl Buffer {
    /// A buffer in a block that nobody else uses and that has the size of the shape.
    pub(crate) fn new(block: ArenaBlock, dtype: DType, shape: Shape) -> Self {
        debug_assert_eq!(block.bytes(), shape.elements() * dtype.size() as u64);
        Self { memory: Memory { block: Arc::new(block), start: 0, dtype, shape, owner: None } }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.memory.dtype
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &Shape {
        &self.memory.shape
    }

    /// The address of the first byte, for views. It is valid for the length of [`Buffer::bytes`]
    /// while the buffer lives. The memory belongs to the daemon while an operation is in flight.
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    pub(crate) fn place(&self) -> Place {
        self.memory.place()
    }

    /// The same memory as a tensor whose element type is known.
    ///
    /// # Errors
    /// The buffer, if its elements are of another type.
    pub fn into_tensor<T: Element>(self) -> Result<Tensor<T>, Self> {
        if self.dtype() == T::DTYPE { Ok(Tensor::new(self)) } else { Err(self) }
    }

    /// The same memory as a buffer that others may have views of.
    pub fn into_shared(self) -> SharedBuffer {
        SharedBuffer { memory: self.memory }
    }

    /// The elements' bytes, in the machine's byte order, outermost dimension first.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the block is this long and stays mapped while it lives, which is as long as the
        // borrow of `self`. In this process only a `&mut Buffer` gives a way to write to it. The
        // daemon writes between a submission and its end only, and `self` is borrowed mutably or
        // owned by the handle for that long. Where that ends before the daemon is known to have
        // stopped, the memory was taken back.
        unsafe { slice::from_raw_parts(self.as_ptr(), self.memory.byte_len() as usize) }
    }

    /// The elements' bytes, mutable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; `self` is borrowed mutably, other owners of the block (`Keep`) can't
        // look into it, and no operation is in flight.
        unsafe { slice::from_raw_parts_mut(self.as_ptr(), self.memory.byte_len() as usize) }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({:?})", self.memory)
    }
}

/// A result, and how many of its rows came from each member that took part. There are no such
/// numbers if all results have the rows that the request implies.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) buffer: Buffer,
    pub(crate) rows: Vec<u64>,
}

/// A tensor that others may have views of at the same time: a framework's tensors, or parts of it.
/// Cheap to clone. Clones share the memory, which stays in use while one of them lives or an
/// operation on it is in flight. Only the address gives access to its bytes. Whoever uses the
/// address must ensure that nothing else reads or writes there at the same time, neither a view nor
/// an operation in flight.
#[derive(Debug)]
pub struct SharedBuffer {
    memory: Memory,
}

impl Clone for SharedBuffer {
    fn clone(&self) -> Self {
        let Memory { block, start, dtype, shape, owner } = &self.memory;
        let (block, shape, owner) = (block.clone(), shape.clone(), owner.clone());
        Self { memory: Memory { block, start: *start, dtype: *dtype, shape, owner } }
    }
}

impl SharedBuffer {
    /// The element type.
    pub fn dtype(&self) -> DType {
        self.memory.dtype
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &Shape {
        &self.memory.shape
    }

    /// The size of the elements in bytes.
    pub fn byte_len(&self) -> u64 {
        self.memory.byte_len()
    }

    /// Notes that it was filled from ordinary memory. The next operation on it counts that in the
    /// metrics of the daemon.
    pub fn mark_copied(&self) {
        self.memory.mark_copied();
    }

    /// The first byte, valid for [`SharedBuffer::byte_len`] bytes while a clone or a view lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    /// The mapping that contains it: the first byte and the size in bytes. A GPU's driver needs to
    /// know the memory before the GPU can copy it by itself. The mapping lives as long as the
    /// session.
    pub fn mapping(&self) -> (*mut u8, u64) {
        self.memory.block.mapping()
    }

    /// A part of the same memory as a tensor of its own. `first_element` is counted in elements of
    /// `dtype`.
    ///
    /// # Errors
    /// [`GradwireError::Invalid`] if it is not within this buffer, or if its address is not aligned
    /// to the elements.
    pub fn view(&self, first_element: u64, dtype: DType, shape: &Shape) -> Result<Self> {
        let size = dtype.size() as u64;
        let whole = self.byte_len();
        let bytes = shape.elements().checked_mul(size);
        let first = first_element.checked_mul(size);
        let end = first.zip(bytes).and_then(|(first, bytes)| first.checked_add(bytes));
        let (Some(first), true) = (first, end.is_some_and(|end| end <= whole)) else {
            let text = format!(
                "a view of {dtype} {shape} from element {first_element} on is not within a buffer \
                 of {whole} bytes"
            );
            return Err(GradwireError::Invalid(text));
        };
        let start = self.memory.start + first;
        // Blocks are aligned to 64 bytes.
        if !start.is_multiple_of(size) {
            let text = format!(
                "a view of {dtype} can't begin at byte {start}, which is not a multiple of {size}"
            );
            return Err(GradwireError::Invalid(text));
        }
        let (block, shape, owner) =
            (self.memory.block.clone(), shape.clone(), self.memory.owner.clone());
        Ok(Self { memory: Memory { block, start, dtype, shape, owner } })
    }

    /// The same memory, which the given owner keeps where it is. An operation holds the owner until
    /// it has ended, even if its handle is dropped.
    pub fn kept_by(mut self, owner: Owner) -> Self {
        self.memory.owner = Some(owner);
        self
    }

    /// The same memory, without an owner.
    pub fn without_owner(mut self) -> Self {
        self.memory.owner = None;
        self
    }
}

/// A tensor in shared memory. Collectives work on it without a copy.
pub struct Tensor<T: Element> {
    buffer: Buffer,
    element: PhantomData<T>,
}

impl<T: Element> Tensor<T> {
    /// A tensor in a buffer of `T::DTYPE`.
    pub(crate) fn new(buffer: Buffer) -> Self {
        debug_assert_eq!(buffer.dtype(), T::DTYPE);
        Self { buffer, element: PhantomData }
    }

    /// The elements, outermost dimension first.
    pub fn as_slice(&self) -> &[T] {
        // Blocks are aligned to 64 bytes and as long as their elements.
        bytemuck::cast_slice(self.buffer.bytes())
    }

    /// The elements, mutable.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(self.buffer.bytes_mut())
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &Shape {
        self.buffer.shape()
    }

    /// The same memory as a [`Buffer`], such as for a group of different element types.
    pub fn into_buffer(self) -> Buffer {
        self.buffer
    }
}

impl<T: Element> fmt::Debug for Tensor<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor {} {:?}", self.shape(), self.as_slice())
    }
}

pub(crate) mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Buffer {}
    impl Sealed for super::SharedBuffer {}
    impl<T: super::Element> Sealed for super::Tensor<T> {}
}

/// What a collective works on: a [`Tensor`], a [`Buffer`] or a [`SharedBuffer`]. Sealed, because
/// owning one must mean that nobody else has a slice of its memory.
pub trait Payload: sealed::Sealed + Send + 'static {
    /// The memory.
    #[doc(hidden)]
    fn memory(&self) -> &Memory;
}

/// What a collective can return as a new result: a [`Tensor`], a [`Buffer`] or a [`SharedBuffer`].
pub trait FromBuffer: Payload {
    /// The element type, if the Rust type determines it.
    const DTYPE: Option<DType>;

    /// Makes it from memory whose elements are of [`FromBuffer::DTYPE`], if that is known.
    #[doc(hidden)]
    fn from_buffer(buffer: Buffer) -> Self;
}

impl Payload for Buffer {
    fn memory(&self) -> &Memory {
        &self.memory
    }
}

impl FromBuffer for Buffer {
    const DTYPE: Option<DType> = None;

    fn from_buffer(buffer: Buffer) -> Self {
        buffer
    }
}

impl Payload for SharedBuffer {
    fn memory(&self) -> &Memory {
        &self.memory
    }
}

impl FromBuffer for SharedBuffer {
    const DTYPE: Option<DType> = None;

    fn from_buffer(buffer: Buffer) -> Self {
        buffer.into_shared()
    }
}

impl<T: Element> Payload for Tensor<T> {
    fn memory(&self) -> &Memory {
        &self.buffer.memory
    }
}

impl<T: Element> FromBuffer for Tensor<T> {
    const DTYPE: Option<DType> = Some(T::DTYPE);

    fn from_buffer(buffer: Buffer) -> Self {
        Self::new(buffer)
    }
}
