//! Integers with scale factors: each product is computed in f64 and truncated, as in Horovod.
//!
//! A factor of 1 is skipped, so that integers beyond 2⁵³ stay exact. A product that is too large
//! for the type saturates, in the same way on every machine (SAME).
//!
//! Such jobs are rare, so the sweep doesn't support them. This module scales one tile at a time,
//! and uses the sweep to combine and store tiles.

#![expect(clippy::cast_lossless, reason = "one cast for the integers of all widths")]

use super::{
    job::{Combine, Finish, Job, Store},
    level::Level,
};

/// Elements of a tile: two tiles of 8-byte elements take half of a first-level cache of 32 KiB.
const TILE: usize = 1024;

#[repr(C, align(64))]
struct Tile<E>([E; TILE]);

/// An integer that takes factors.
pub(super) trait Scaled: Copy {
    const ZERO: Self;
    /// `self · factor / divisor`, computed in f64 and truncated.
    fn scaled(self, factor: f64, divisor: f64) -> Self;
}

macro_rules! scaled {
    ($($int:ty),+) => {$(
        impl Scaled for $int {
            const ZERO: Self = 0;

            #[inline(always)]
            fn scaled(self, factor: f64, divisor: f64) -> Self {
                (self as f64 * factor / divisor) as $int
            }
        }
    )+};
}

scaled!(i8, u8, i16, u16, i32, u32, i64, u64);

impl Job<'_> {
    /// Whether inputs or results are multiplied by something.
    pub(super) fn has_factors(&self) -> bool {
        self.prescale != 1.0 || self.finish.postscale != 1.0
    }
}

/// A function that runs a job without factors.
type Run = unsafe fn(Level, &Job<'_>);

/// Runs a job with factors; `sweep` runs its tiles.
///
/// # Safety
/// As for [`super::reduce_finish_to`]; all elements are of type `E`, this machine has the level,
/// and `sweep` needs no more than this.
pub(super) unsafe fn run<E: Scaled>(level: Level, job: &Job<'_>, sweep: Run) {
    let Job { combine, prescale, finish, result, inputs, dsts, count, store } = *job;
    let (mut sum, mut next) = (Tile([E::ZERO; TILE]), Tile([E::ZERO; TILE]));
    let mut here = Vec::with_capacity(dsts.len());
    for at in (0..count).step_by(TILE) {
        let n = TILE.min(count - at);
        let offset = at * size_of::<E>();
        for (number, input) in inputs.iter().enumerate() {
            let tile = if number == 0 { &mut sum } else { &mut next };
            // SAFETY: the input is valid for at + n elements, and may be anywhere.
            unsafe {
                let from = input.add(offset);
                let bytes = n * size_of::<E>();
                std::ptr::copy_nonoverlapping(from, tile.0.as_mut_ptr().cast::<u8>(), bytes);
            }
            scale(&mut tile.0[..n], prescale, 1.0);
            if number > 0 {
                // SAFETY: both tiles hold n elements, and the destination is one of the inputs.
                unsafe { combine_tiles(level, combine, &mut sum, &next, n, sweep) }
            }
        }
        let finish = if finish.postscale == 1.0 {
            finish
        } else {
            scale(&mut sum.0[..n], finish.postscale, f64::from(finish.divisor()));
            Finish::none(combine.dtype)
        };
        // SAFETY: each destination is valid for at + n elements; all inputs of the tile were read.
        unsafe {
            here.clear();
            here.extend(dsts.iter().map(|dst| dst.add(offset)));
            let inputs = &[sum.0.as_ptr().cast::<u8>()];
            let dsts = &here[..];
            let (prescale, count) = (1.0, n);
            let job = Job { combine, prescale, finish, result, inputs, dsts, count, store };
            sweep(level, &job);
        }
    }
}

/// `sum := sum op next`, of `n` elements.
///
/// # Safety
/// `combine` is for elements of type `E`; this machine has the level, and `sweep` needs no more.
unsafe fn combine_tiles<E>(
    level: Level,
    combine: Combine,
    sum: &mut Tile<E>,
    next: &Tile<E>,
    n: usize,
    sweep: Run,
) {
    let to = sum.0.as_mut_ptr().cast::<u8>();
    let inputs = &[to.cast_const(), next.0.as_ptr().cast::<u8>()];
    let (finish, result) = (Finish::none(combine.dtype), combine.dtype);
    let (prescale, dsts, count, store) = (1.0, &[to], n, Store::Cached);
    let job = Job { combine, prescale, finish, result, inputs, dsts, count, store };
    // SAFETY: the caller's promise; a tile has room for n elements.
    unsafe { sweep(level, &job) }
}

/// Multiplies and divides every element. A factor of 1 leaves them as they are.
fn scale<E: Scaled>(elements: &mut [E], factor: f64, divisor: f64) {
    if factor != 1.0 {
        elements.iter_mut().for_each(|element| *element = element.scaled(factor, divisor));
    }
}
