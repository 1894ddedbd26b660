//! The sweep over tiles: load, combine, finish, store.
//!
//! Tiles are local, so the compiler knows that nothing overlaps them and vectorises the plain
//! loops, even where a destination is one of the inputs.

use std::mem::MaybeUninit;

use gradwire_proto::DType;

use super::{
    element::{Element, Tile},
    job::{Job, Store},
    level::{Instructions, TILE},
    op::{Number, Operation},
};

/// The most inputs that are combined in registers before the accumulators go to memory.
const GROUP: usize = 4;

/// Bytes that are copied to one destination after the other; they stay in the first-level cache.
const PART: usize = 4096;

/// The last operation on the numbers.
#[derive(Clone, Copy)]
pub(super) enum Last<N> {
    /// Only makes NaNs canonical.
    Keep,
    Divide(u32),
    Scale(N),
}

impl<N: Number> Last<N> {
    pub(super) fn of(job: &Job<'_>) -> Self {
        let divisor = job.finish.divisor();
        if job.finish.is_identity() {
            Self::Keep
        } else if job.finish.postscale == 1.0 {
            Self::Divide(divisor)
        } else {
            Self::Scale(N::factor(job.finish.postscale / f64::from(divisor)))
        }
    }

    #[inline(always)]
    pub(super) fn apply(self, number: N) -> N {
        match self {
            Self::Keep => number.canonical(),
            Self::Divide(contributors) => number.divide(contributors).canonical(),
            Self::Scale(factor) => number.scale(factor).canonical(),
        }
    }
}

/// Whether a job only moves bits: those of a single input, without factors. A truth value becomes
/// 0 or 1 even where only one rank contributes.
pub(super) fn is_copy(job: &Job<'_>) -> bool {
    job.inputs.len() == 1
        && job.prescale == 1.0
        && job.finish.is_identity()
        && job.result == job.combine.dtype
        && job.result != DType::Bool
}

/// Runs a job at the level of `I`.
///
/// # Safety
/// As for [`super::reduce_finish_to`]; inputs aren't empty and of type `E`, destinations are of
/// type `D`, the operation is `O`, and the level's instructions are available to the function that
/// this is inlined in.
#[inline(always)]
pub(super) unsafe fn sweep<E, O, D, I>(job: &Job<'_>)
where
    E: Element,
    O: Operation<E::Number>,
    D: Element<Number = E::Number>,
    I: Instructions,
{
    let last = Last::<E::Number>::of(job);
    let prescale = <E::Number as Number>::factor(job.prescale);
    let size = size_of::<D>();
    // Created once, because clearing them for each tile takes as long as a sum.
    let mut edge = [Tile([E::ZERO; TILE]); GROUP];
    let mut out = Tile([D::ZERO; TILE]);
    let mut at = 0;
    while at < job.count {
        let mut n = TILE.min(job.count - at);
        if at == 0 && job.store == Store::Streaming {
            // A short first tile brings the first destination to a cache line.
            let ahead = job.dsts.first().map_or(0, |dst| dst.align_offset(64)) / size;
            n = if ahead == 0 { n } else { n.min(ahead) };
        }
        // SAFETY: all pointers are valid for `count` elements, and at + n <= count.
        unsafe {
            let mut numbers = combine::<E, O, I>(job.inputs, at, n, prescale, &mut edge);
            finish(&mut numbers, last);
            D::store::<I>(&numbers, &mut out);
            for &dst in job.dsts {
                let to = dst.add(at * size);
                let from = out.0.as_ptr().cast::<u8>();
                if job.store == Store::Streaming && n == TILE && to.addr().is_multiple_of(64) {
                    I::stream(to, from, TILE * size);
                } else if n == TILE {
                    // The compiler knows this length: a few moves in place of a call.
                    std::ptr::copy_nonoverlapping(from, to, TILE * size);
                } else {
                    std::ptr::copy_nonoverlapping(from, to, n * size);
                }
            }
        }
        at += n;
    }
    if job.store == Store::Streaming {
        // SAFETY: the level's instructions are there.
        unsafe { I::fence() }
    }
}

/// Copies the single input to every destination: directly to a single one, and to several via a
/// buffer that is loaded once, so that all get the same bits even if the input is written to
/// meanwhile (SAME).
///
/// It depends on no element type, so it is compiled once for each level.
///
/// # Safety
/// As for [`sweep`]; [`is_copy`] holds.
#[inline(always)]
pub(super) unsafe fn copy<I: Instructions>(job: &Job<'_>) {
    let src = job.inputs[0];
    let bytes = job.count * job.result.size();
    let streaming = job.store == Store::Streaming;
    let mut part = [MaybeUninit::<u8>::uninit(); PART];
    let mut at = 0;
    while at < bytes {
        let mut n = PART.min(bytes - at);
        if at == 0 && streaming {
            // A short first part brings the first destination to a cache line.
            let ahead = job.dsts.first().map_or(0, |dst| dst.align_offset(64));
            n = if ahead == 0 { n } else { n.min(ahead) };
        }
        // SAFETY: all pointers are valid for `bytes`, and at + n <= bytes. A destination may be the
        // input itself, or overlap it in any way if a worker asks for that, which harms only its
        // own result.
        unsafe {
            let mut from = src.add(at);
            if job.dsts.len() > 1 {
                let loaded = part.as_mut_ptr().cast::<u8>();
                std::ptr::copy_nonoverlapping(from, loaded, n);
                from = loaded;
            }
            for &dst in job.dsts {
                let to = dst.add(at);
                if to.cast_const() == from {
                    continue;
                }
                let lines = if streaming && to.addr().is_multiple_of(64) { n / 64 * 64 } else { 0 };
                I::stream(to, from, lines);
                std::ptr::copy(from.add(lines), to.add(lines), n - lines);
            }
        }
        at += n;
    }
    if streaming {
        // SAFETY: the level's instructions are there.
        unsafe { I::fence() }
    }
}

/// The combination of `n` elements of every input from `at` on. Partial tiles are copied to `edge`,
/// where a whole tile can be read.
///
/// # Safety
/// As for [`sweep`].
#[inline(always)]
unsafe fn combine<E: Element, O: Operation<E::Number>, I: Instructions>(
    inputs: &[*const u8],
    at: usize,
    n: usize,
    prescale: E::Number,
    edge: &mut [Tile<E>; GROUP],
) -> Tile<E::Number> {
    let mut numbers = None;
    for group in inputs.chunks(O::GROUP) {
        let mut tiles = [std::ptr::null::<E>(); GROUP];
        for ((tile, edge), input) in tiles.iter_mut().zip(&mut *edge).zip(group) {
            // SAFETY: the input is valid for `at + n` elements.
            unsafe {
                let src = input.cast::<E>().add(at);
                *tile = if n == TILE {
                    src
                } else {
                    let bytes = n * size_of::<E>();
                    let edge = edge.0.as_mut_ptr();
                    std::ptr::copy_nonoverlapping(src.cast::<u8>(), edge.cast::<u8>(), bytes);
                    edge
                };
            }
        }
        // SAFETY: `group.len()` tiles are readable.
        let folded = unsafe {
            match (group.len(), &numbers) {
                (3, None) if O::GROUP > 2 => fold::<E, O, I, 3>(None, &tiles, prescale),
                (4, None) if O::GROUP > 2 => fold::<E, O, I, 4>(None, &tiles, prescale),
                (1, None) => fold::<E, O, I, 1>(None, &tiles, prescale),
                (_, None) => fold::<E, O, I, 2>(None, &tiles, prescale),
                (3, before) if O::GROUP > 2 => {
                    fold::<E, O, I, 3>(before.as_ref(), &tiles, prescale)
                }
                (4, before) if O::GROUP > 2 => {
                    fold::<E, O, I, 4>(before.as_ref(), &tiles, prescale)
                }
                (1, before) => fold::<E, O, I, 1>(before.as_ref(), &tiles, prescale),
                (_, before) => fold::<E, O, I, 2>(before.as_ref(), &tiles, prescale),
            }
        };
        numbers = Some(folded);
    }
    numbers.unwrap_or(Tile([E::Number::ZERO; TILE]))
}

/// Combines the first `K` tiles in order, on top of `before`.
///
/// # Safety
/// `K` tiles are readable; the level's instructions are there.
#[inline(always)]
unsafe fn fold<E: Element, O: Operation<E::Number>, I: Instructions, const K: usize>(
    before: Option<&Tile<E::Number>>,
    tiles: &[*const E; GROUP],
    prescale: E::Number,
) -> Tile<E::Number> {
    let mut converted = [const { MaybeUninit::<Tile<E::Number>>::uninit() }; K];
    let mut lanes = [std::ptr::null::<E::Lane>(); K];
    for ((lane, &tile), room) in lanes.iter_mut().zip(tiles).zip(&mut converted) {
        // SAFETY: the tile is readable, and there is room for one.
        *lane = unsafe { E::stage::<I>(tile, room.as_mut_ptr().cast::<E::Number>()) };
    }
    let load = |k: usize, i: usize| {
        // SAFETY: there are as many lanes as a tile has, with any alignment.
        E::number(unsafe { lanes[k].add(i).read_unaligned() }).scale(prescale)
    };
    // Local to this function, so that no input can overlap it.
    let mut folded = MaybeUninit::<Tile<E::Number>>::uninit();
    let to = folded.as_mut_ptr().cast::<E::Number>();
    // Two loops, so that neither contains a branch.
    match before {
        None => (0..TILE).for_each(|i| {
            let value = (1..K).fold(load(0, i), |value, k| O::apply(value, load(k, i)));
            // SAFETY: the tile has TILE numbers.
            unsafe { to.add(i).write(value) }
        }),
        Some(before) => (0..TILE).for_each(|i| {
            let value = (0..K).fold(before.0[i], |value, k| O::apply(value, load(k, i)));
            // SAFETY: the tile has TILE numbers.
            unsafe { to.add(i).write(value) }
        }),
    }
    // SAFETY: all of its numbers have been written.
    unsafe { folded.assume_init() }
}

#[inline(always)]
fn finish<N: Number>(numbers: &mut Tile<N>, last: Last<N>) {
    // One loop for each, so that each is vectorised.
    match last {
        Last::Keep => numbers.0.iter_mut().for_each(|n| *n = Last::Keep.apply(*n)),
        Last::Divide(by) => numbers.0.iter_mut().for_each(|n| *n = Last::Divide(by).apply(*n)),
        Last::Scale(by) => numbers.0.iter_mut().for_each(|n| *n = Last::Scale(by).apply(*n)),
    }
}
