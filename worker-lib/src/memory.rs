//! Tensors in the arena. Only this module of the crate turns their bytes into slices.
//!
//! While an operation is in flight the daemon reads and writes its tensor from another process.
//! Ownership ensures that this process does not interfere: a blocking call borrows the buffer,
//! mutably if the daemon writes to it; an asynchronous call takes it, and its handle returns it.
//! The table of operations holds a [`Keep`] while the operation runs, which keeps the memory
//! allocated and has no access to the bytes. A [`SharedBuffer`] has no slices at all, so that
//! others may have views of it.
//!
//! A session may end while the daemon still works on an operation, for example because the daemon
//! was stopped. Then the memory is taken back ([`Keep::take_back`]) before waiters are notified.

use std::{
    fmt,
    marker::PhantomData,
    ops::{Deref, DerefMut, Range},
    slice,
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed},
    },
};

use gradwire_proto::{DType, Shape};
use gradwire_shm::{
    arena::{self, Arena, ArenaBlock, Owner},
    control::Place,
    segment::SegmentError,
};

use crate::{
    element::Element,
    error::{GradwireError, Result},
    finite::{self, Found},
    sizes,
};

/// Keeps a buffer's memory allocated, without access to it.
#[derive(Debug, Clone)]
pub(crate) struct Keep {
    block: Arc<ArenaBlock>,
    /// Dropped when the operation has ended.
    _owner: Option<Owner>,
    /// Its bytes in the block.
    bytes: Range<u64>,
    /// Whether the program gets this memory back however the operation ends, so that the daemon's
    /// writes must end with it.
    is_written: bool,
    /// Whether this rank gets a result there.
    has_result: bool,
}

impl Keep {
    /// Separates memory from the daemon, whose later writes don't reach it.
    ///
    /// # Errors
    /// If the kernel refuses; then the daemon may still write to it.
    pub(crate) fn take_back<'a>(
        all: impl IntoIterator<Item = &'a Self, IntoIter: Clone>,
    ) -> Result<(), SegmentError> {
        let written = |keep: &Self| if keep.is_written { keep.bytes.clone() } else { 0..0 };
        let lent = all.into_iter().map(|keep| (&*keep.block, written(keep)));
        // SAFETY: `written` is not empty only while an operation may write there. Until it has
        // ended, its tensor is borrowed mutably by a blocking call or owned by a handle, so nobody
        // has a slice of it.
        unsafe { arena::take_back(lent) }
    }

    /// The same, if this rank gets a result there.
    pub(crate) fn with_result(self, has_result: bool) -> Self {
        Self { has_result, ..self }
    }

    /// The size of the result; 0 without one.
    pub(crate) fn result_bytes(&self) -> u64 {
        if self.has_result { self.bytes.end - self.bytes.start } else { 0 }
    }

    /// Copies bytes from `at` on. The daemon has written them, and the program does not know that
    /// yet.
    ///
    /// # Panics
    /// Panics if there are fewer bytes.
    pub(crate) fn read(&self, at: u64, into: &mut [u8]) {
        let end = self.bytes.start + at + into.len() as u64;
        assert!(end <= self.bytes.end, "only the result is read");
        let start = self.block.as_ptr().wrapping_add((self.bytes.start + at) as usize);
        let words = if start.addr().is_multiple_of(8) { into.len() / 8 } else { 0 };
        // SAFETY: the memory is `into.len()` long, as checked above, and mapped while the block
        // lives, which `self` keeps; it is aligned for the words. The loads are atomic, so they do
        // not race with another thread's. Nobody has a slice of it: the operation has not ended
        // for the program.
        let (from, rest) = unsafe {
            let from = slice::from_raw_parts(start.cast::<AtomicU64>(), words);
            let tail = start.wrapping_add(words * 8).cast::<AtomicU8>();
            (from, slice::from_raw_parts(tail, into.len() - words * 8))
        };
        let (body, tail) = into.split_at_mut(words * 8);
        for (to, from) in body.as_chunks_mut().0.iter_mut().zip(from) {
            *to = from.load(Relaxed).to_ne_bytes();
        }
        tail.iter_mut().zip(rest).for_each(|(to, from)| *to = from.load(Relaxed));
    }
}

/// The place, element type and shape of a tensor, without slices of its bytes.
#[derive(Clone)]
pub struct Memory {
    block: Arc<ArenaBlock>,
    /// Its first byte in the block.
    start: u64,
    dtype: DType,
    shape: Shape,
    /// What each operation keeps alive, besides the block.
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

    /// Whether it is in this arena. Its place is only meaningful there.
    pub(crate) fn is_in(&self, arena: &Arena) -> bool {
        arena.owns(&self.block)
    }

    /// Whether it is retired: it could not move to the daemon of the current epoch.
    pub(crate) fn is_retired(&self) -> bool {
        self.block.is_retired()
    }

    /// Records, for metrics, that it was filled from ordinary memory.
    pub(crate) fn mark_copied(&self) {
        self.block.mark_copied();
    }

    /// Whether it was filled from ordinary memory since the last call.
    pub(crate) fn take_copied(&self) -> bool {
        self.block.take_copied()
    }

    /// Keeps the memory allocated while the daemon reads it.
    pub(crate) fn lend(&self) -> Keep {
        Keep {
            block: self.block.clone(),
            _owner: self.owner.clone(),
            bytes: self.start..self.start + self.byte_len(),
            is_written: false,
            has_result: false,
        }
    }

    /// Keeps the memory allocated while the daemon writes it.
    pub(crate) fn lend_mut(&self) -> Keep {
        Keep { is_written: true, ..self.lend() }
    }

    /// Looks for values that are not finite. No operation on it is in flight.
    pub(crate) fn not_finite(&self) -> Option<Found> {
        let start = self.as_ptr();
        let bytes = self.byte_len() as usize;
        /// The numbers of a tensor as atomic words, because others may have views of its memory.
        macro_rules! numbers {
            ($atomic:ty) => {{
                // SAFETY: the memory is `bytes` long and mapped while the block lives, which `self`
                // keeps. Blocks are aligned to 64 bytes and views to their elements, so to the
                // numbers in them. The loads are atomic.
                let numbers = unsafe {
                    slice::from_raw_parts(start.cast::<$atomic>(), bytes / size_of::<$atomic>())
                };
                finite::look(self.dtype, numbers.iter().map(|each| u64::from(each.load(Relaxed))))
            }};
        }
        match self.dtype {
            DType::C64 => numbers!(AtomicU32),
            DType::C128 => numbers!(AtomicU64),
            other => match other.size() {
                1 => numbers!(AtomicU8),
                2 => numbers!(AtomicU16),
                4 => numbers!(AtomicU32),
                _ => numbers!(AtomicU64),
            },
        }
    }

    /// Writes the whole tensor. Other owners of the memory may see a partial write.
    ///
    /// # Panics
    /// Panics if `bytes` has another length.
    pub(crate) fn write(&self, bytes: &[u8]) {
        assert_eq!(bytes.len() as u64, self.byte_len(), "the whole tensor is written");
        let start = self.as_ptr();
        let words = if start.addr().is_multiple_of(8) { bytes.len() / 8 } else { 0 };
        let (body, tail) = bytes.split_at(words * 8);
        // SAFETY: the memory is `bytes.len()` long and mapped while the block lives, which `self`
        // keeps; it is aligned for the words, as checked above. The stores are atomic, so they do
        // not race with another thread's stores here. There is no slice of it: a `SharedBuffer` has
        // none, and the owner of a `Buffer` has given it away or lent it mutably for this call.
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

/// A tensor in shared memory with an element type known only at run time. Aligned to 64 bytes.
pub struct Buffer {
    memory: Memory,
}

impl Buffer {
    /// A buffer in an otherwise unused block, which has the size of the shape.
    pub(crate) fn new(block: ArenaBlock, dtype: DType, shape: Shape) -> Self {
        debug_assert_eq!(block.bytes(), shape.elements() * dtype.size() as u64);
        Self { memory: Memory { block: Arc::new(block), start: 0, dtype, shape, owner: None } }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.memory.dtype
    }

    /// The dimensions, outermost first; empty for a single number.
    pub fn shape(&self) -> &[usize] {
        sizes::of_wire(self.memory.shape.dims())
    }

    /// The address of the first byte, for views. It is valid for the length of [`Buffer::bytes`]
    /// while the buffer lives. The memory belongs to the daemon while an operation is in flight.
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    /// The same memory as a tensor with a static element type.
    ///
    /// # Errors
    /// The buffer, if it has another element type.
    pub fn into_tensor<T: Element>(self) -> Result<Tensor<T>, Self> {
        if self.dtype() == T::DTYPE { Ok(Tensor::new(self)) } else { Err(self) }
    }

    /// The same memory as a buffer of which others may have views.
    pub fn into_shared(self) -> SharedBuffer {
        SharedBuffer { memory: self.memory }
    }

    /// The elements' bytes, in the machine's byte order, outermost dimension first.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the block is this long and stays mapped while it lives, which is as long as the
        // borrow of `self`. In this process, writing to it needs a `&mut Buffer`. The daemon writes
        // only between a submission and its end, and for that time `self` is borrowed mutably or
        // owned by the handle. If that time ends before the daemon is known to have stopped, the
        // memory was taken back.
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

/// A result, and the number of rows from each member that took part. `rows` is empty if the request
/// alone determines the shape.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) buffer: Buffer,
    pub(crate) rows: Vec<u64>,
}

/// A tensor of which others may have views at the same time, such as tensors of a framework. Cheap
/// to clone. Clones share the memory, which stays allocated while one of them lives or an operation
/// on it is in flight. Only the address gives access to its bytes. Code that uses the address must
/// ensure that nothing else reads or writes there at the same time, neither a view nor an operation
/// in flight.
#[derive(Debug, Clone)]
pub struct SharedBuffer {
    memory: Memory,
}

impl SharedBuffer {
    /// The element type.
    pub fn dtype(&self) -> DType {
        self.memory.dtype
    }

    /// The dimensions, outermost first; empty for a single number.
    pub fn shape(&self) -> &[usize] {
        sizes::of_wire(self.memory.shape.dims())
    }

    /// The size of the elements in bytes.
    pub fn byte_len(&self) -> usize {
        self.memory.byte_len() as usize
    }

    /// Records that it was filled from ordinary memory. The next operation on it counts that in the
    /// daemon's metrics.
    pub fn mark_copied(&self) {
        self.memory.mark_copied();
    }

    /// The first byte, valid for [`SharedBuffer::byte_len`] bytes while a clone or a view lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    /// The mapping that contains it: its first byte and its size in bytes. A GPU's driver must
    /// register the memory before the GPU can copy it. From now on the mapping lives as long as the
    /// session.
    pub fn mapping(&self) -> (*mut u8, usize) {
        let (start, bytes) = self.memory.block.mapping();
        (start, bytes as usize)
    }

    /// A part of the same memory as a separate tensor. `first_element` is counted in elements of
    /// `dtype`.
    ///
    /// # Errors
    /// [`GradwireError::Invalid`] if it exceeds this buffer, or if its address is not aligned to
    /// the elements. [`GradwireError::Type`] if the shape is too large.
    pub fn view(&self, first_element: usize, dtype: DType, shape: &[usize]) -> Result<Self> {
        let shape = sizes::shape(shape)?;
        let size = dtype.size() as u64;
        let whole = self.memory.byte_len();
        let bytes = shape.elements().checked_mul(size);
        let first = (first_element as u64).checked_mul(size);
        let end = first.zip(bytes).and_then(|(first, bytes)| first.checked_add(bytes));
        let (Some(first), true) = (first, end.is_some_and(|end| end <= whole)) else {
            let text = format!(
                "a view of {dtype} {shape} from element {first_element} exceeds a buffer of \
                 {whole} bytes"
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
        Ok(Self { memory: Memory { start, dtype, shape, ..self.memory.clone() } })
    }

    /// The same memory, with another owner, for example the object of a framework that has a view
    /// of it. An operation holds the owner until it has ended, even if its handle is dropped.
    pub fn kept_by(mut self, owner: Owner) -> Self {
        self.memory.owner = Some(owner);
        self
    }

    /// The same memory, without the owner of [`SharedBuffer::kept_by`].
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
    /// A tensor in a buffer with element type `T::DTYPE`.
    pub(crate) fn new(buffer: Buffer) -> Self {
        debug_assert_eq!(buffer.dtype(), T::DTYPE);
        Self { buffer, element: PhantomData }
    }

    /// The elements, outermost dimension first.
    pub fn as_slice(&self) -> &[T] {
        // Can't panic: blocks are aligned to 64 bytes and as long as their elements.
        bytemuck::cast_slice(self.buffer.bytes())
    }

    /// The elements, mutable.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(self.buffer.bytes_mut())
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        self.buffer.shape()
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.as_slice().len()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The same memory as a [`Buffer`], for example for a group of different element types.
    pub fn into_buffer(self) -> Buffer {
        self.buffer
    }
}

/// A tensor is a slice of its elements: `tensor[3]`, `tensor.iter()`.
impl<T: Element> Deref for Tensor<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.as_slice()
    }
}

impl<T: Element> DerefMut for Tensor<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.as_mut_slice()
    }
}

impl<T: Element> fmt::Debug for Tensor<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor {:?} {:?}", self.shape(), self.as_slice())
    }
}

pub(crate) mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Buffer {}
    impl Sealed for super::SharedBuffer {}
    impl<T: super::Element> Sealed for super::Tensor<T> {}
}

/// The operand of a collective: a [`Tensor`], a [`Buffer`] or a [`SharedBuffer`]. Sealed, because
/// owning one must guarantee that nobody else has a slice of its memory.
pub trait Payload: sealed::Sealed + Send + 'static {
    /// The memory.
    #[doc(hidden)]
    fn memory(&self) -> &Memory;
}

/// A new result of a collective: a [`Tensor`], a [`Buffer`] or a [`SharedBuffer`].
pub trait FromBuffer: Payload {
    /// The element type, if the Rust type determines it.
    const DTYPE: Option<DType>;

    /// Creates it from a buffer with element type [`FromBuffer::DTYPE`], if that is known.
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
