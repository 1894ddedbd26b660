//! f32 that travels as bf16: half the bytes between nodes, and sums in f32 all the same.
//!
//! A partial result lies in memory in one of two forms: as bf16 where it is sent or kept as it will be
//! published, as f32 where more is added to it first. [`reduce_short`] makes either out of the ranks' f32
//! and of partial results, [`finish_short`] makes of bf16 what ranks get. Both go through tiles that stay
//! in the first-level cache, in which [`super::reduce`] does the arithmetic; what is added here is the way
//! into a tile and out of it. So the operations are those of f32, with all that is said of them there.
//!
//! Rounding is to nearest, ties to even, at every level with the same bits; denormals stay, infinities
//! stay, what is too large becomes infinite, and a NaN becomes the canonical one.

use gradwire_proto::{DType, ReduceOp};

use super::{Combine, Finish, Job, Level, Store, dispatch, level};

/// Elements of a tile: three of them in f32 fit a first-level cache of 32 KiB.
const TILE: usize = 2048;

/// Bytes of an element in bf16.
const SHORT: usize = 2;

#[repr(C, align(64))]
struct Tile([f32; TILE]);

impl Tile {
    const fn new() -> Self {
        Self([0.0; TILE])
    }
}

/// How a partial result lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// As it travels.
    Bf16,
    /// Not rounded.
    F32,
}

impl Form {
    /// Bytes of an element.
    pub const fn size(self) -> usize {
        match self {
            Self::Bf16 => SHORT,
            Self::F32 => size_of::<f32>(),
        }
    }
}

/// `dst[i] := inputs[0][i] op … op partials[0][i] op …` in f32, rounded once if `dst` is bf16. `inputs`
/// are ranks' f32 and are multiplied by `prescale` first, `partials` are not, being sums of such. At most
/// two partials can be bf16. Nothing happens without inputs and partials.
///
/// # Safety
/// Each of `inputs` and `partials` is valid for reads, and `dst` for writes, of `count` elements of its
/// form. `dst` is exactly one of the partials, in the same form, or overlaps nothing. No alignment is
/// needed. Others may write to the inputs meanwhile, nobody to the partials and to `dst`.
pub unsafe fn reduce_short(
    op: ReduceOp,
    prescale: f64,
    dst: (Form, *mut u8),
    inputs: &[*const u8],
    partials: &[(Form, *const u8)],
    count: usize,
) {
    // SAFETY: the caller's promise.
    unsafe { reduce_at(level(), op, prescale, dst, inputs, partials, count) }
}

/// `dsts[k][i] := finish(src[i])`, where `src` is bf16 and the destinations are f32.
///
/// # Safety
/// `src` is valid for reads of `count` elements of bf16, each of `dsts` for writes of as many of f32, and
/// none of them overlaps another.
pub unsafe fn finish_short(
    finish: &Finish,
    dsts: &[*mut u8],
    src: *const u8,
    count: usize,
    hint: Store,
) {
    // SAFETY: the caller's promise.
    unsafe { finish_at(level(), finish, dsts, src, count, hint) }
}

/// [`reduce_short`] at a level.
///
/// # Safety
/// As there; this machine has the level.
pub(super) unsafe fn reduce_at(
    level: Level,
    op: ReduceOp,
    prescale: f64,
    dst: (Form, *mut u8),
    inputs: &[*const u8],
    partials: &[(Form, *const u8)],
    count: usize,
) {
    let short = partials.iter().filter(|(form, _)| *form == Form::Bf16).count();
    let (mut wide, mut sum) = ([const { Tile::new() }; 2], Tile::new());
    assert!(short <= wide.len(), "{short} partial results in bf16");
    let mut operands: Vec<*const u8> = Vec::with_capacity(inputs.len() + partials.len());
    let alone = inputs.is_empty() || partials.is_empty();
    for at in (0..count).step_by(TILE) {
        let n = TILE.min(count - at);
        // SAFETY: everything is valid for at + n elements; `sum` and `wide` hold a tile. What is
        // written lies apart from what is read, or is exactly it.
        unsafe {
            let here = |input: &*const u8| input.add(at * size_of::<f32>());
            let sum = sum.0.as_mut_ptr();
            let target = match dst.0 {
                Form::F32 => dst.1.add(at * size_of::<f32>()),
                Form::Bf16 => sum.cast(),
            };
            operands.clear();
            operands.extend(inputs.iter().map(here));
            if prescale != 1.0 && !alone {
                // Only what ranks bring is scaled: that is a pass of its own.
                reduce_tile(level, op, prescale, sum.cast(), &operands, n);
                operands.clear();
                operands.push(sum.cast_const().cast());
            }
            let mut room = wide.iter_mut();
            for &(form, partial) in partials {
                let mut partial = partial.add(at * form.size());
                if form == Form::Bf16
                    && let Some(tile) = room.next()
                {
                    let bytes = std::slice::from_raw_parts(partial, n * SHORT);
                    widen(level, bytes, &mut tile.0);
                    partial = tile.0.as_ptr().cast();
                }
                operands.push(partial);
            }
            let scaled = if partials.is_empty() { prescale } else { 1.0 };
            reduce_tile(level, op, scaled, target, &operands, n);
            if dst.0 == Form::Bf16 && !operands.is_empty() {
                let to = std::slice::from_raw_parts_mut(dst.1.add(at * SHORT), n * SHORT);
                narrow(level, std::slice::from_raw_parts(sum, n), to);
            }
        }
    }
}

/// # Safety
/// As for [`super::reduce`]; this machine has the level.
unsafe fn reduce_tile(
    level: Level,
    op: ReduceOp,
    prescale: f64,
    dst: *mut u8,
    inputs: &[*const u8],
    count: usize,
) {
    let combine = Combine { dtype: DType::F32, op };
    let finish = Finish::none(DType::F32);
    let job = Job { combine, prescale, finish, inputs, dsts: &[dst], count, store: Store::Cached };
    // SAFETY: the caller's promise.
    unsafe { dispatch::run(level, &job) }
}

/// [`finish_short`] at a level.
///
/// # Safety
/// As there; this machine has the level.
pub(super) unsafe fn finish_at(
    level: Level,
    finish: &Finish,
    dsts: &[*mut u8],
    src: *const u8,
    count: usize,
    store: Store,
) {
    let finish = Finish { dtype: DType::F32, ..*finish };
    let combine = Combine { dtype: DType::F32, op: finish.op };
    let mut tile = Tile::new();
    let mut here = Vec::with_capacity(dsts.len());
    for at in (0..count).step_by(TILE) {
        let n = TILE.min(count - at);
        // SAFETY: the source is valid for at + n elements, and the destinations are.
        unsafe {
            widen(level, std::slice::from_raw_parts(src.add(at * SHORT), n * SHORT), &mut tile.0);
            here.clear();
            here.extend(dsts.iter().map(|dst| dst.add(at * size_of::<f32>())));
            let inputs = &[tile.0.as_ptr().cast()];
            let dsts = &here;
            let job = Job { combine, prescale: 1.0, finish, inputs, dsts, count: n, store };
            dispatch::run(level, &job);
        }
    }
}

/// Each element of `src`, two bytes, to f32.
///
/// # Safety
/// This machine has the level.
unsafe fn widen(level: Level, src: &[u8], dst: &mut [f32]) {
    match level {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's promise.
        Level::Avx2 => unsafe { x86::widen_avx2(src, dst) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx512 => unsafe { x86::widen_avx512(src, dst) },
        _ => widen_all(src, dst),
    }
}

/// Each element of `src` to two bytes, rounded.
///
/// # Safety
/// This machine has the level.
unsafe fn narrow(level: Level, src: &[f32], dst: &mut [u8]) {
    match level {
        Level::Scalar => {
            // By the library: the reference of the others' arithmetic in integers.
            for (to, &from) in dst.as_chunks_mut::<SHORT>().0.iter_mut().zip(src) {
                let rounded = half::bf16::from_f32(from);
                *to = if rounded.is_nan() { QUIET_NAN } else { rounded.to_bits() }.to_ne_bytes();
            }
        }
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's promise.
        Level::Avx2 => unsafe { x86::narrow_avx2(src, dst) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx512 => unsafe { x86::narrow_avx512(src, dst) },
        _ => narrow_all(src, dst),
    }
}

const QUIET_NAN: u16 = 0x7fc0;

// Plain loops, of which the compiler makes vectors of the level that they are inlined in.

#[inline(always)]
fn widen_all(src: &[u8], dst: &mut [f32]) {
    for (to, from) in dst.iter_mut().zip(src.as_chunks::<SHORT>().0) {
        *to = f32::from_bits(u32::from(u16::from_ne_bytes(*from)) << 16);
    }
}

/// In integers: AVX-512's own conversion flushes denormals to zero, so it would differ from the other
/// levels.
#[inline(always)]
fn narrow_all(src: &[f32], dst: &mut [u8]) {
    for (to, from) in dst.as_chunks_mut::<SHORT>().0.iter_mut().zip(src) {
        let bits = from.to_bits();
        // Only that of a NaN can overflow, and it isn't taken.
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        *to = (if from.is_nan() { QUIET_NAN } else { rounded as u16 }).to_ne_bytes();
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{narrow_all, widen_all};

    #[target_feature(enable = "avx2")]
    pub(super) fn widen_avx2(src: &[u8], dst: &mut [f32]) {
        widen_all(src, dst);
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn narrow_avx2(src: &[f32], dst: &mut [u8]) {
        narrow_all(src, dst);
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")]
    pub(super) fn widen_avx512(src: &[u8], dst: &mut [f32]) {
        widen_all(src, dst);
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")]
    pub(super) fn narrow_avx512(src: &[f32], dst: &mut [u8]) {
        narrow_all(src, dst);
    }
}
