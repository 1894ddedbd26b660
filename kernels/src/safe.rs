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
    /// This machine doesn't have the level.
    #[error("this machine does not support {}: use gradwire_kernels::level()", .0.name())]
    Level(Level),
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
    let lengths = inputs.iter().map(|i| i.len()).chain(dsts.iter().map(|d| d.len()));
    let count = check(level, combine, finish, lengths)?;
    let inputs: Vec<*const u8> = inputs.iter().map(|i| i.as_ptr()).collect();
    let dsts: Vec<*mut u8> = dsts.iter_mut().map(|d| d.as_mut_ptr()).collect();
    let (inputs, dsts, result) = (&inputs, &dsts, finish.dtype);
    let job = Job { combine, prescale, finish: *finish, result, inputs, dsts, count, store };
    // SAFETY: every slice holds `count` elements, borrows keep destinations apart from each other
    // and from the inputs, and the level is available.
    unsafe { dispatch::run(level, &job) };
    Ok(())
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
    let count = check(level, combine, finish, buffers.iter().map(|b| b.len()))?;
    let dsts: Vec<*mut u8> = buffers.iter_mut().map(|b| b.as_mut_ptr()).collect();
    let inputs: Vec<*const u8> = dsts.iter().map(|d| d.cast_const()).collect();
    let (inputs, dsts, result) = (&inputs, &dsts, finish.dtype);
    let job = Job { combine, prescale, finish: *finish, result, inputs, dsts, count, store };
    // SAFETY: every buffer holds `count` elements, borrows keep buffers apart from each other, each
    // destination is exactly one input, and the level is available.
    unsafe { dispatch::run(level, &job) };
    Ok(())
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
