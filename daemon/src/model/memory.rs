//! The only module of the daemon that accesses the workers' memory.
//!
//! A worker's segment is sealed against shrinking and stays mapped as long as any [`Span`] of it
//! lives, even if the worker has dropped it meanwhile, so no access here can fault. Its contents
//! may change at any moment: the bytes are only used as numbers to reduce, never as lengths or
//! offsets (TRUST). Everything outside of this module is safe code with spans and ordinary slices.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::Arc,
};

use gradwire_kernels::{self as kernels, Combine, Finish, Form, Store};
use gradwire_net::Bytes;
use gradwire_proto::{DType, ReduceOp};
use gradwire_shm::{control::Place, segment::Segment};
use parking_lot::RwLock;

/// The segments that one worker has handed over.
#[derive(Debug, Default)]
pub(crate) struct WorkerMemory {
    /// By number.
    segments: RwLock<HashMap<u32, Arc<Segment>>>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PlaceError {
    #[error("segment {segment} does not exist ({known} were handed over)")]
    NoSegment { segment: u32, known: usize },
    #[error("{bytes} bytes at offset {offset} are not within segment {segment} of {size} bytes")]
    Outside { segment: u32, offset: u64, bytes: u64, size: u64 },
    #[error(
        "offset {offset} in segment {segment} is not a multiple of the element's {align} bytes"
    )]
    Unaligned { segment: u32, offset: u64, align: u64 },
}

impl WorkerMemory {
    /// Adds a segment under this number; returns false if the number is in use.
    pub(crate) fn add(&self, number: u32, segment: Segment) -> bool {
        let mut segments = self.segments.write();
        let Entry::Vacant(slot) = segments.entry(number) else { return false };
        slot.insert(Arc::new(segment));
        true
    }

    pub(crate) fn has(&self, number: u32) -> bool {
        self.segments.read().contains_key(&number)
    }

    /// Removes a segment; returns false if it does not exist. Its memory stays while a span of it
    /// lives.
    pub(crate) fn remove(&self, number: u32) -> bool {
        let removed = self.segments.write().remove(&number);
        removed.is_some() // unmapped here, without holding our lock
    }

    pub(crate) fn bytes(&self) -> u64 {
        let segments = self.segments.read();
        segments.values().map(|segment| segment.bytes()).sum()
    }

    /// The span at a place that a worker has named.
    pub(crate) fn resolve(&self, place: Place, bytes: u64, align: u64) -> Result<Span, PlaceError> {
        let Place { segment, offset } = place;
        let segments = self.segments.read();
        let known = segments.len();
        let owner = segments.get(&segment).ok_or(PlaceError::NoSegment { segment, known })?;
        let size = owner.bytes();
        let start = owner.range(offset, bytes).ok_or(PlaceError::Outside {
            segment,
            offset,
            bytes,
            size,
        })?;
        if !offset.is_multiple_of(align) {
            return Err(PlaceError::Unaligned { segment, offset, align });
        }
        Ok(Span { start, bytes, _segment: Some(owner.clone()) })
    }
}

/// A range of a worker's memory that stays valid as long as this value lives.
#[derive(Debug, Clone)]
pub(crate) struct Span {
    start: *mut u8,
    bytes: u64,
    /// `None` for an empty span.
    _segment: Option<Arc<Segment>>,
}

// SAFETY: the pointer is into a shared mapping that `_segment` keeps alive; it is not tied to a
// thread, and every access goes through the functions below, which treat the bytes as memory that
// others write at the same time.
unsafe impl Send for Span {}
// SAFETY: as above; a `Span` has no state of its own that could be shared unsoundly.
unsafe impl Sync for Span {}

impl Span {
    pub(crate) fn empty() -> Self {
        Self {
            start: std::ptr::NonNull::<u64>::dangling().as_ptr().cast(),
            bytes: 0,
            _segment: None,
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether both begin at the same address.
    pub(crate) fn begins_with(&self, other: &Self) -> bool {
        std::ptr::eq(self.start, other.start)
    }

    /// The address of `offset`, from which `bytes` bytes must be in the span.
    ///
    /// # Panics
    /// If they are not within the span. Callers cut pieces from the tensor's own shape, so no input
    /// can cause this.
    fn at(&self, offset: u64, bytes: u64) -> *mut u8 {
        let end = offset.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.bytes), "a piece reaches beyond its tensor");
        // SAFETY: offset ≤ bytes of the span, which lies within one mapping.
        unsafe { self.start.add(offset as usize) }
    }
}

/// A part of a worker's tensor: the span, and the first byte.
pub(crate) type Part<'a> = (&'a Span, u64);

/// Bytes of a worker's tensor, to be sent directly.
pub(crate) fn outgoing((span, offset): Part<'_>, bytes: u64) -> Bytes<'_> {
    let start = span.at(offset, bytes).cast_const();
    // SAFETY: `bytes` of the span follow (checked by `at`), and they stay mapped while it lives.
    unsafe { Bytes::at(start, bytes as usize) }
}

/// A copy of bytes of a worker's tensor.
pub(crate) fn copy(part: Part<'_>, bytes: u64) -> Vec<u8> {
    let mut copy = vec![0; bytes as usize];
    reduce(Combine { dtype: DType::U8, op: ReduceOp::Sum }, 1.0, &mut copy, &[part], None);
    copy
}

fn count(combine: Combine, bytes: usize) -> usize {
    debug_assert!(bytes.is_multiple_of(combine.dtype.size()));
    bytes / combine.dtype.size()
}

/// `target := parts[0] op parts[1] op … [op received]`, in that order, each part scaled first.
pub(crate) fn reduce(
    combine: Combine,
    prescale: f64,
    target: &mut [u8],
    parts: &[Part<'_>],
    received: Option<&[u8]>,
) {
    let bytes = target.len() as u64;
    let mut inputs: Vec<*const u8> =
        parts.iter().map(|(span, offset)| span.at(*offset, bytes).cast_const()).collect();
    if let Some(received) = received {
        assert_eq!(received.len(), target.len());
    }
    // The received bytes are a scaled sum and must not be scaled again, so they may need a second
    // pass.
    let same_pass = received.filter(|_| prescale == 1.0);
    inputs.extend(same_pass.map(<[u8]>::as_ptr));
    let elements = count(combine, target.len());
    // SAFETY: each input has `bytes` bytes (the workers' checked by `at`, what was received by the
    // assertion above), and the target is a slice of as many.
    unsafe { kernels::reduce(combine, prescale, target.as_mut_ptr(), &inputs, elements) };
    if let (Some(received), None) = (received, same_pass) {
        self::combine(combine, target, received, false);
    }
}

/// `target := received op target` or `target op received`.
pub(crate) fn combine(combine: Combine, target: &mut [u8], received: &[u8], theirs_first: bool) {
    assert_eq!(received.len(), target.len());
    let mine = target.as_mut_ptr();
    let theirs = received.as_ptr();
    let inputs =
        if theirs_first { [theirs, mine.cast_const()] } else { [mine.cast_const(), theirs] };
    // SAFETY: both slices have the same length; the target is exactly one of the inputs, which
    // `reduce` allows.
    unsafe { kernels::reduce(combine, 1.0, mine, &inputs, count(combine, target.len())) };
}

/// Writes the finished result to every target.
pub(crate) fn publish(finish: &Finish, source: &[u8], targets: &[Part<'_>], store: Store) {
    let bytes = source.len() as u64;
    let targets: Vec<*mut u8> =
        targets.iter().map(|(span, offset)| span.at(*offset, bytes)).collect();
    let elements = source.len() / finish.dtype.size();
    let (combine, source) = (Combine { dtype: finish.dtype, op: finish.op }, &[source.as_ptr()]);
    // SAFETY: each target has `bytes` bytes (checked by `at`), the source is a slice of as many.
    unsafe {
        kernels::reduce_finish_to(combine, 1.0, finish, &targets, source, elements, store);
    }
}

/// A partial result in another form than the ranks' elements.
#[derive(Debug)]
pub(crate) struct Partial<Bytes> {
    pub(crate) form: Form,
    pub(crate) bytes: Bytes,
}

impl<Bytes: AsRef<[u8]>> Partial<Bytes> {
    fn elements(&self) -> usize {
        self.bytes.as_ref().len() / self.form.size()
    }

    /// The operand for the kernels, which must have `elements` elements.
    fn operand(&self, elements: usize) -> (Form, *const u8) {
        assert_eq!(self.elements(), elements);
        (self.form, self.bytes.as_ref().as_ptr())
    }
}

/// Like [`reduce`], but `target` and `received` are partial results.
pub(crate) fn reduce_partial(
    combine: Combine,
    prescale: f64,
    target: Partial<&mut [u8]>,
    parts: &[Part<'_>],
    received: Option<Partial<&[u8]>>,
) {
    let elements = target.elements();
    let bytes = (elements * combine.dtype.size()) as u64;
    let inputs: Vec<*const u8> =
        parts.iter().map(|(span, offset)| span.at(*offset, bytes).cast_const()).collect();
    let partial = received.map(|received| received.operand(elements));
    let dst = (target.form, target.bytes.as_mut_ptr());
    let (level, partials) = (kernels::level(), partial.as_slice());
    // SAFETY: each input has `elements` of the ranks' type (checked by `at`), what was received as
    // many of its form (checked by `operand`), and the target is a slice of as many of its form.
    unsafe {
        kernels::reduce_partials(level, combine, prescale, dst, &inputs, partials, elements);
    }
}

/// Like [`combine`], for partial results: `target := received op mine` or `mine op received`.
/// `mine` is the target itself by default.
pub(crate) fn combine_partial(
    op: ReduceOp,
    target: Partial<&mut [u8]>,
    mine: Option<Partial<&[u8]>>,
    received: Partial<&[u8]>,
    theirs_first: bool,
) {
    let elements = target.elements();
    let dst = (target.form, target.bytes.as_mut_ptr());
    let mine = mine.map_or((dst.0, dst.1.cast_const()), |mine| mine.operand(elements));
    let theirs = received.operand(elements);
    let partials = if theirs_first { [theirs, mine] } else { [mine, theirs] };
    let combine = Combine { dtype: DType::F32, op };
    // SAFETY: all are slices of `elements` of their forms (checked by `operand`); the target is
    // exactly one of the partials or apart from them.
    unsafe {
        kernels::reduce_partials(kernels::level(), combine, 1.0, dst, &[], &partials, elements);
    }
}

/// Like [`publish`], for a partial result.
pub(crate) fn publish_partial(
    finish: &Finish,
    source: Partial<&[u8]>,
    targets: &[Part<'_>],
    store: Store,
) {
    let elements = source.elements();
    let bytes = (elements * finish.dtype.size()) as u64;
    let targets: Vec<*mut u8> =
        targets.iter().map(|(span, offset)| span.at(*offset, bytes)).collect();
    let (level, source) = (kernels::level(), source.operand(elements));
    // SAFETY: each target has `elements` of the ranks' type (checked by `at`), the source as many.
    unsafe { kernels::finish_partial(level, finish, &targets, source, elements, store) };
}

/// Reduces and publishes in one pass if no other node takes part: every target gets the finished
/// reduction of the parts. Targets may be the parts themselves.
pub(crate) fn reduce_and_publish(
    combine: Combine,
    prescale: f64,
    finish: &Finish,
    parts: &[Part<'_>],
    targets: &[Part<'_>],
    bytes: u64,
    store: Store,
) {
    let inputs: Vec<*const u8> =
        parts.iter().map(|(span, offset)| span.at(*offset, bytes).cast_const()).collect();
    let outputs: Vec<*mut u8> =
        targets.iter().map(|(span, offset)| span.at(*offset, bytes)).collect();
    let elements = bytes as usize / combine.dtype.size();
    // SAFETY: each part and target has `bytes` bytes (checked by `at`). A target that overlaps an
    // input without being exactly it comes from a worker whose input and output overlap; the
    // result is then meaningless to that worker, but every access stays within the mappings.
    unsafe {
        kernels::reduce_finish_to(combine, prescale, finish, &outputs, &inputs, elements, store);
    }
}
