//! The kernels over slices of bytes, with the checks that the functions on pointers leave to the
//! caller.

use super::{
    dispatch,
    job::{Combine, Finish, Job, Store},
    level::{self, Level},
};

/// Why slices can't be reduced.
#[expect(missing_docs, reason = "the texts explain the fields")]
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SliceError {
    /// Slices of different lengths, or not of whole elements.
    #[error(
        "slice {slice} has {len} bytes where {expected} are needed: all inputs and destinations \
         hold the same number of whole {size}-byte elements"
    )]
    Length { slice: usize, len: usize, expected: usize, size: usize },
    /// The combination and the finish have different element types.
    #[error("inputs of {combine} can't be finished as {finish}: give both the same element type")]
    Type { combine: gradwire_proto::DType, finish: gradwire_proto::DType },
    /// The combination is neither a copy nor [a sum](is_a_sum).
    #[error("{} of {} is not among the sums: use reduce_finish_slices", .0.op, .0.dtype)]
    NotASum(Combine),
    /// This machine doesn't have the level.
    #[error("this machine does not support {}: use gradwire_kernels::level()", .0.name())]
    Level(Level),
}

/// Some or all of the kernels.
struct Kernels {
    contain: fn(&Job<'_>) -> bool,
    run: unsafe fn(Level, &Job<'_>),
}

const ALL: Kernels = Kernels { contain: |_| true, run: dispatch::run };

const SUMS: Kernels = Kernels { contain: dispatch::is_among_sums, run: dispatch::run_sums };

/// What is done with the inputs.
struct Task<'a> {
    level: Level,
    combine: Combine,
    prescale: f64,
    finish: &'a Finish,
    store: Store,
}

/// [`reduce`](super::reduce) over slices of bytes in the machine's byte order.
///
/// # Errors
/// [`SliceError::Length`] if lengths differ.
pub fn reduce_slices(
    combine: Combine,
    prescale: f64,
    dst: &mut [u8],
    inputs: &[&[u8]],
) -> Result<(), SliceError> {
    let finish = Finish::none(combine.dtype);
    let level = level::level();
    reduce_finish_slices(level, combine, prescale, &finish, &mut [dst], inputs, Store::Cached)
}

/// [`reduce_finish_to`](super::reduce_finish_to) over slices of bytes, at a given level.
///
/// # Errors
/// [`SliceError`] if lengths or types differ, or if the level isn't available here.
pub fn reduce_finish_slices(
    level: Level,
    combine: Combine,
    prescale: f64,
    finish: &Finish,
    dsts: &mut [&mut [u8]],
    inputs: &[&[u8]],
    store: Store,
) -> Result<(), SliceError> {
    ALL.apart(&Task { level, combine, prescale, finish, store }, dsts, inputs)
}

/// Like [`reduce_finish_slices`], but every buffer is an input and gets the result.
///
/// # Errors
/// [`SliceError`] if lengths or types differ, or if the level isn't available here.
pub fn reduce_finish_in_place(
    level: Level,
    combine: Combine,
    prescale: f64,
    finish: &Finish,
    buffers: &mut [&mut [u8]],
    store: Store,
) -> Result<(), SliceError> {
    ALL.in_place(&Task { level, combine, prescale, finish, store }, buffers)
}

/// Whether these are among the sums of [`sum_slices`]: sums and averages of f32, f64, f16 and bf16.
pub fn is_a_sum(combine: Combine) -> bool {
    dispatch::is_a_sum(combine)
}

/// [`reduce_finish_slices`] for [sums of floats](is_a_sum) and for copies, at the best level. A
/// program that uses only this and [`sum_in_place`] does not contain the kernels for anything else.
///
/// # Errors
/// [`SliceError`] if lengths or types differ, or if this is neither a sum nor a copy.
pub fn sum_slices(
    combine: Combine,
    finish: &Finish,
    dsts: &mut [&mut [u8]],
    inputs: &[&[u8]],
    store: Store,
) -> Result<(), SliceError> {
    let level = level::level();
    SUMS.apart(&Task { level, combine, prescale: 1.0, finish, store }, dsts, inputs)
}

/// [`reduce_finish_in_place`] for [sums of floats](is_a_sum), at the best level.
///
/// # Errors
/// [`SliceError`] if lengths or types differ, or if this is not a sum.
pub fn sum_in_place(
    combine: Combine,
    finish: &Finish,
    buffers: &mut [&mut [u8]],
    store: Store,
) -> Result<(), SliceError> {
    let level = level::level();
    SUMS.in_place(&Task { level, combine, prescale: 1.0, finish, store }, buffers)
}

impl Kernels {
    fn apart(
        &self,
        task: &Task<'_>,
        dsts: &mut [&mut [u8]],
        inputs: &[&[u8]],
    ) -> Result<(), SliceError> {
        let lengths = inputs.iter().map(|i| i.len()).chain(dsts.iter().map(|d| d.len()));
        let count = check(task.level, task.combine, task.finish, lengths)?;
        let inputs: Vec<*const u8> = inputs.iter().map(|i| i.as_ptr()).collect();
        let dsts: Vec<*mut u8> = dsts.iter_mut().map(|d| d.as_mut_ptr()).collect();
        // SAFETY: every slice holds `count` elements, borrows keep destinations apart from each
        // other and from the inputs, and the level is available.
        unsafe { self.run(task, &dsts, &inputs, count) }
    }

    fn in_place(&self, task: &Task<'_>, buffers: &mut [&mut [u8]]) -> Result<(), SliceError> {
        let count = check(task.level, task.combine, task.finish, buffers.iter().map(|b| b.len()))?;
        let dsts: Vec<*mut u8> = buffers.iter_mut().map(|b| b.as_mut_ptr()).collect();
        let inputs: Vec<*const u8> = dsts.iter().map(|d| d.cast_const()).collect();
        // SAFETY: every buffer holds `count` elements, borrows keep buffers apart from each other,
        // each destination is exactly one input, and the level is available.
        unsafe { self.run(task, &dsts, &inputs, count) }
    }

    /// # Safety
    /// As for [`dispatch::run`].
    unsafe fn run(
        &self,
        task: &Task<'_>,
        dsts: &[*mut u8],
        inputs: &[*const u8],
        count: usize,
    ) -> Result<(), SliceError> {
        let &Task { level, combine, prescale, finish, store } = task;
        let (finish, result) = (*finish, finish.dtype);
        let job = Job { combine, prescale, finish, result, inputs, dsts, count, store };
        if !(self.contain)(&job) {
            return Err(SliceError::NotASum(combine));
        }
        // SAFETY: the caller's promise.
        unsafe { (self.run)(level, &job) };
        Ok(())
    }
}

/// How many elements all slices hold.
fn check(
    level: Level,
    combine: Combine,
    finish: &Finish,
    lengths: impl Iterator<Item = usize>,
) -> Result<usize, SliceError> {
    if !level.is_available() {
        return Err(SliceError::Level(level));
    }
    if combine.dtype != finish.dtype {
        return Err(SliceError::Type { combine: combine.dtype, finish: finish.dtype });
    }
    let size = combine.dtype.size();
    let mut lengths = lengths.enumerate().peekable();
    let expected = lengths.peek().map_or(0, |&(_, len)| len) / size * size;
    match lengths.find(|&(_, len)| len != expected) {
        Some((slice, len)) => Err(SliceError::Length { slice, len, expected, size }),
        None => Ok(expected / size),
    }
}
