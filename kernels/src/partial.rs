//! Partial results that are sent in another form than the ranks' elements.
//!
//! f16, bf16 and the 8-bit floats are summed in f32 across nodes: their partial results are f32,
//! and the result is rounded once, after it is finished. If a job asks for it, all of these and f32
//! itself are sent as bf16: half the bytes of f32, and still sums in f32.
//!
//! [`reduce_partials`] combines ranks' elements and other partial results to a partial result, and
//! [`finish_partial`] turns it into the result for the ranks. A partial result that is still added
//! to is in f32, even if it is sent as bf16. Both functions convert tiles that stay in the
//! first-level cache, and combine them by [`super::reduce`], so the arithmetic is that of f32
//! there.
//!
//! Rounding is to nearest, ties to even, at every level with the same bits; denormals and
//! infinities stay, too large values become infinite, and a NaN becomes the canonical one.

use gradwire_proto::DType;

use super::{
    dispatch,
    job::{Combine, Finish, Job, Store},
    level::Level,
};

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

/// The form of a partial result in memory and on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// Rounded.
    Bf16,
    /// Not rounded.
    F32,
}

impl Form {
    /// The form with this element type, if there is one.
    pub fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::Bf16 => Some(Self::Bf16),
            DType::F32 => Some(Self::F32),
            _ => None,
        }
    }

    /// Bytes of an element.
    pub const fn size(self) -> usize {
        match self {
            Self::Bf16 => SHORT,
            Self::F32 => size_of::<f32>(),
        }
    }
}

/// `dst[i] := inputs[0][i] op … op partials[0][i] op …` in f32, rounded once if `dst` is bf16.
/// `inputs` are ranks' elements, floats of at most 32 bits, and are multiplied by `prescale` first;
/// `partials` are not. At most two partials can be bf16. Nothing happens without inputs and
/// partials.
///
/// # Safety
/// Each of `inputs` is valid for reads of `count` elements of the type of `combine`, each of
/// `partials` for reads, and `dst` for writes, of as many of its form. `dst` is exactly one of the
/// partials, in the same form, or overlaps nothing. No alignment is needed. Others may write to the
/// inputs meanwhile, but not to the partials and to `dst`. This machine has the level.
pub unsafe fn reduce_partials(
    level: Level,
    combine: Combine,
    prescale: f64,
    dst: (Form, *mut u8),
    inputs: &[*const u8],
    partials: &[(Form, *const u8)],
    count: usize,
) {
    let short = partials.iter().filter(|(form, _)| *form == Form::Bf16).count();
    let (mut wide, mut sum) = ([const { Tile::new() }; 2], Tile::new());
    assert!(short <= wide.len(), "{short} partial results in bf16");
    let f32s = Combine { dtype: DType::F32, op: combine.op };
    // Only ranks' elements are scaled, and may be of another type: beside partial results they need
    // a pass of their own.
    let differs = combine.dtype != DType::F32 || prescale != 1.0;
    let own_pass = differs && !inputs.is_empty() && !partials.is_empty();
    let mixed = own_pass || inputs.is_empty();
    let (last, scaled) = if mixed { (f32s, 1.0) } else { (combine, prescale) };
    let mut operands: Vec<*const u8> = Vec::with_capacity(inputs.len() + partials.len());
    for at in (0..count).step_by(TILE) {
        let n = TILE.min(count - at);
        // SAFETY: everything is valid for at + n elements; `sum` and `wide` hold a tile. Written
        // memory is apart from read memory, or exactly the same.
        unsafe {
            let here = |input: &*const u8| input.add(at * combine.dtype.size());
            let sum = sum.0.as_mut_ptr();
            let target = match dst.0 {
                Form::F32 => dst.1.add(at * size_of::<f32>()),
                Form::Bf16 => sum.cast(),
            };
            operands.clear();
            operands.extend(inputs.iter().map(here));
            if own_pass {
                reduce_tile(level, combine, prescale, sum.cast(), &operands, n);
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
            reduce_tile(level, last, scaled, target, &operands, n);
            if dst.0 == Form::Bf16 && !operands.is_empty() {
                let to = std::slice::from_raw_parts_mut(dst.1.add(at * SHORT), n * SHORT);
                narrow(level, std::slice::from_raw_parts(sum, n), to);
            }
        }
    }
}

/// The inputs of one type, reduced to f32.
///
/// # Safety
/// As for [`super::reduce`]; this machine has the level.
unsafe fn reduce_tile(
    level: Level,
    combine: Combine,
    prescale: f64,
    dst: *mut u8,
    inputs: &[*const u8],
    count: usize,
) {
    let (finish, result) = (Finish::none(DType::F32), DType::F32);
    let (dsts, store) = (&[dst], Store::Cached);
    let job = Job { combine, prescale, finish, result, inputs, dsts, count, store };
    // SAFETY: the caller's promise.
    unsafe { dispatch::run(level, &job) }
}

/// `dsts[k][i] := finish(src[i])`, computed in f32 and rounded once to the type of `finish`, a
/// float of at most 32 bits.
///
/// # Safety
/// `src` is valid for reads of `count` elements of its form, each of `dsts` for writes of as many
/// of the type of `finish`, and none of them overlaps another. This machine has the level.
pub unsafe fn finish_partial(
    level: Level,
    finish: &Finish,
    dsts: &[*mut u8],
    (form, src): (Form, *const u8),
    count: usize,
    store: Store,
) {
    let result = finish.dtype;
    let finish = Finish { dtype: DType::F32, ..*finish };
    let combine = Combine { dtype: DType::F32, op: finish.op };
    let job = |inputs: &[*const u8], dsts: &[*mut u8], count| {
        let job = Job { combine, prescale: 1.0, finish, result, inputs, dsts, count, store };
        // SAFETY: the caller's promise, of which each call below is a part.
        unsafe { dispatch::run(level, &job) }
    };
    if form == Form::F32 {
        return job(&[src], dsts, count);
    }
    let mut tile = Tile::new();
    let mut here = Vec::with_capacity(dsts.len());
    for at in (0..count).step_by(TILE) {
        let n = TILE.min(count - at);
        // SAFETY: the source is valid for at + n elements, and the destinations are.
        unsafe {
            widen(level, std::slice::from_raw_parts(src.add(at * SHORT), n * SHORT), &mut tile.0);
            here.clear();
            here.extend(dsts.iter().map(|dst| dst.add(at * result.size())));
        }
        job(&[tile.0.as_ptr().cast()], &here, n);
    }
}

/// Converts each element of `src`, two bytes, to f32.
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

/// Rounds each element of `src` to two bytes.
///
/// # Safety
/// This machine has the level.
unsafe fn narrow(level: Level, src: &[f32], dst: &mut [u8]) {
    match level {
        Level::Scalar => {
            // By the library, as the reference for the integer arithmetic of the other levels.
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

// Plain loops, which the compiler vectorises for the level that they are inlined in.

#[inline(always)]
fn widen_all(src: &[u8], dst: &mut [f32]) {
    for (to, from) in dst.iter_mut().zip(src.as_chunks::<SHORT>().0) {
        *to = f32::from_bits(u32::from(u16::from_ne_bytes(*from)) << 16);
    }
}

/// In integers: AVX-512's own conversion flushes denormals to zero, so it would differ from the
/// other levels.
#[inline(always)]
fn narrow_all(src: &[f32], dst: &mut [u8]) {
    for (to, from) in dst.as_chunks_mut::<SHORT>().0.iter_mut().zip(src) {
        let bits = from.to_bits();
        // The addition can overflow only for a NaN, whose result isn't used.
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
