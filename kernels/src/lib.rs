//! The arithmetic on bytes: one pass combines N inputs and stores the result at all destinations.
//!
//! Memory traffic is the limit, so everything is one sweep over tiles that stay in the first-level
//! cache: load a tile of every input, combine, finish, store to every destination. The sweep is
//! written once, generic over element type and operation; it is compiled for each instruction set
//! ([`Level`]), and the best one is chosen once, at run time.
//!
//! # Arithmetic
//!
//! - Inputs are combined in the order given, from the left (SAME). f16, bf16 and the 8-bit floats
//!   are combined in f32 over all the inputs and rounded once, to nearest, ties to even. A result
//!   that is too large for them becomes infinity, or NaN in f8e4m3, which has no infinity. If
//!   several sweeps combine them, on several nodes, partial results are f32, too
//!   ([`reduce_partials`]).
//! - Complex numbers are summed part by part: c64 as twice as many f32, c128 as f64.
//! - Integers wrap in sums and products. Scale factors are applied in f64 and truncated, for each
//!   contribution and for the result; see `scaled`. Factors of bits and truth values are ignored
//!   here, and refused where a request is checked.
//! - In truth values any byte but 0 is true, and computed values are 0 or 1: sum, maximum and
//!   bit-or are "any", product, minimum and bit-and are "all", bit-xor is "an odd number".
//! - In minimum and maximum a NaN wins, −0 is less than +0, and operands may be swapped.
//! - A computed NaN is the type's canonical quiet NaN, because otherwise its payload would depend
//!   on how the loop was compiled (SAME).
//! - A single input that is neither scaled nor finished is copied bit for bit, so moves use the
//!   same functions. Truth values are an exception; they are moved as bytes. A NaN keeps its
//!   payload only if a single rank contributes; otherwise all get the computed value (SAME).
//! - `Average` is a sum whose [`Finish`] divides: floats by the number of contributors
//!   in one correctly rounded division, or, where there is a postscale too, in one multiplication
//!   by `postscale / contributors`, computed in f64; integers with truncation towards zero, and
//!   where there is a postscale as `sum · postscale / contributors` in f64, truncated once.
//!
//! # Memory that others write
//!
//! Inputs may lie in memory that another process writes at the same time, so the unsafe functions
//! take pointers and never make references to it: each element is loaded once, and every bit
//! pattern is valid. Such a race can only cause a wrong number (TRUST). The safe wrappers take
//! slices.
#![expect(unsafe_code, reason = "raw memory of other processes, and intrinsics")]

mod dispatch;
mod element;
mod job;
mod level;
mod op;
mod partial;
mod quantized;
mod safe;
mod scalar;
mod scaled;
mod sweep;

pub use job::{Combine, Finish, Store};
pub use level::{Level, level};
pub use partial::{Form, finish_partial, reduce_partials};
pub use quantized::{Quantized, add_quantized, dequantize, quantize};
pub use safe::{
    SliceError, is_a_sum, reduce_finish_in_place, reduce_finish_slices, reduce_slices,
    sum_in_place, sum_slices,
};

use job::Job;

/// `dst[i] := inputs[0][i] op inputs[1][i] op …`, each input first multiplied by `prescale`;
/// see the crate's text for the arithmetic. Nothing happens without inputs.
///
/// # Safety
/// Each of `inputs` is valid for reads, and `dst` for writes, of `count` elements of the type.
/// `dst` is exactly one of the inputs or overlaps none. No alignment is needed. Others may write to
/// the inputs meanwhile, but not to `dst`.
pub unsafe fn reduce(
    combine: Combine,
    prescale: f64,
    dst: *mut u8,
    inputs: &[*const u8],
    count: usize,
) {
    let (finish, result) = (Finish::none(combine.dtype), combine.dtype);
    let (dsts, store) = (&[dst], Store::Cached);
    let job = Job { combine, prescale, finish, result, inputs, dsts, count, store };
    // SAFETY: the caller's promise.
    unsafe { dispatch::run(level(), &job) }
}

/// All in one sweep: `dsts[k][i] := finish(inputs[0][i] op inputs[1][i] op …)`. f16, bf16 and 8-bit
/// floats are rounded once, after the finish, so an average doesn't overflow where its sum would.
///
/// # Safety
/// As for [`reduce`], for every one of `dsts`; they don't overlap each other.
pub unsafe fn reduce_finish_to(
    combine: Combine,
    prescale: f64,
    finish: &Finish,
    dsts: &[*mut u8],
    inputs: &[*const u8],
    count: usize,
    hint: Store,
) {
    let (result, store) = (finish.dtype, hint);
    let job = Job { combine, prescale, finish: *finish, result, inputs, dsts, count, store };
    // SAFETY: the caller's promise.
    unsafe { dispatch::run(level(), &job) }
}
