//! The arithmetic on bytes: N inputs in one pass, results to all who need them in the same pass.
//!
//! Memory traffic is the limit, so everything is one sweep over tiles that stay in the first-level
//! cache: load a tile of every input, combine, finish, store to every destination. The sweep is
//! written once, generic over element type and operation; it is compiled for each instruction set
//! ([`Level`]) and the best that the machine has is chosen once, at run time.
//!
//! # Arithmetic
//!
//! - Inputs are combined in the order given, from the left (SAME). f16, bf16 and the 8-bit floats
//!   are combined in f32 over all the inputs and rounded once, to nearest, ties to even. What is
//!   too large for them then is infinity, or NaN in f8e4m3, which has no infinity. Where they are
//!   combined in several sweeps, on several nodes, what lies between is f32, too
//!   ([`reduce_partials`]).
//! - Complex numbers are summed part by part: c64 as twice as many f32, c128 as f64.
//! - Integers wrap in sums and products. What a scale factor makes of one is computed in f64 and
//!   truncated, for each contribution and for the result; see `scaled`. Bits and truth values take
//!   no factors: those are ignored here and refused where a request is checked.
//! - Of truth values any byte but 0 is true, and what is computed is 0 or 1: sum, maximum and
//!   bit-or are "any", product, minimum and bit-and are "all", bit-xor is "an odd number".
//! - In minimum and maximum a NaN wins, −0 is less than +0, and operands may be swapped.
//! - A NaN that is computed is the type's canonical quiet NaN, because the processor would take the
//!   payload of one operand or the other, depending on how the loop was compiled (SAME).
//! - One input alone, neither scaled nor finished, is copied bit for bit, unless it is of truth
//!   values (which are moved as bytes): so moves go through the same functions. That keeps a NaN's
//!   payload where only one rank contributes; with two everybody has the computed value (SAME).
//! - `Average` is a sum whose [`Finish`] divides: floats by the number of contributors
//!   in one correctly rounded division, or, where there is a postscale too, in one multiplication
//!   by `postscale / contributors`, computed in f64; integers with truncation towards zero, and
//!   where there is a postscale as `sum · postscale / contributors` in f64, truncated once.
//!
//! # Memory that others write
//!
//! Inputs may lie in memory that another process writes at the same time, so the unsafe functions
//! take pointers and never make references to it: each element is loaded once, and whatever it
//! holds is as good as any other value. What such a race does is a wrong number, nothing else
//! (TRUST). The safe wrappers take slices.
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
pub use partial::{Form, finish_partial, finish_partial_at, reduce_partials, reduce_partials_at};
pub use quantized::{Quantized, add_quantized, dequantize, quantize, quantize_at};
pub use safe::{SliceError, reduce_finish_in_place, reduce_finish_slices, reduce_slices};

use job::Job;

/// `dst[i] := inputs[0][i] op inputs[1][i] op …`, each input first multiplied by `prescale`;
/// see the crate's text for the arithmetic. Nothing happens without inputs.
///
/// # Safety
/// Each of `inputs` is valid for reads, and `dst` for writes, of `count` elements of the type.
/// `dst` is exactly one of the inputs or overlaps none. No alignment is needed. Others may write
/// to the inputs meanwhile, nobody else may write to `dst`.
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

/// `dsts[k][i] := finish(src[i])`, reading `src` once.
///
/// # Safety
/// As for [`reduce`], for every one of `dsts`; they don't overlap each other.
pub unsafe fn finish_to(
    finish: &Finish,
    dsts: &[*mut u8],
    src: *const u8,
    count: usize,
    hint: Store,
) {
    let combine = Combine { dtype: finish.dtype, op: finish.op };
    // SAFETY: the caller's promise.
    unsafe { reduce_finish_to(combine, 1.0, finish, dsts, &[src], count, hint) }
}

/// All in one sweep: `dsts[k][i] := finish(inputs[0][i] op inputs[1][i] op …)`. f16, bf16 and 8-bit
/// floats are rounded once, after the finish, so an average doesn't overflow where its sum would.
///
/// # Safety
/// As for [`finish_to`]; each of `dsts` is exactly one of the inputs or overlaps none.
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
