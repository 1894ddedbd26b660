//! Partial results in eight bits: groups of 256 elements with one scale each.
//!
//! A group is its scale, an f32, and then a byte for each element; the value of an element is its
//! byte times the scale. The scale maps the largest magnitude of the group to the largest number of
//! a byte, so nothing is clipped:
//!
//! | format | a byte is | largest | error of an element at most |
//! |---|---|---|---|
//! | int8 | an integer | 127 | half a scale: 1/254 of the group's largest magnitude |
//! | fp8 | f8e4m3 | 448 | 1/16 of itself, or 1/1024 of a scale |
//!
//! Bytes are rounded to nearest, ties to even, at every level with the same bits. The error can be
//! kept for the next time (error feedback: Seide et al., "1-Bit Stochastic Gradient Descent and its
//! Application to Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014).
//!
//! A group with an infinite value or a NaN becomes NaN as a whole. A group whose scale would be
//! below the smallest normal number becomes 0.

use gradwire_proto::{
    F8E4m3,
    compression::{GROUP, GROUP_BYTES},
};

use super::level::{Level, level};

/// Bytes of the scale.
const SCALE: usize = size_of::<f32>();

/// The type of the bytes of groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Quantized {
    /// Integers.
    Int8,
    /// f8e4m3.
    Fp8,
}

/// The values of a group; the last one of a tensor is filled up with zeros.
type Values = [f32; GROUP];

/// Sets `values` to the elements of `groups`.
///
/// # Panics
/// If `groups` don't have as many bytes as `values` need.
pub fn dequantize(format: Quantized, groups: &[u8], values: &mut [f32]) {
    dequantize_at(level(), format, groups, values, |value, here| *value = here);
}

/// Adds the elements of `groups` to `values`.
///
/// # Panics
/// As [`dequantize`].
pub fn add_quantized(format: Quantized, groups: &[u8], values: &mut [f32]) {
    dequantize_at(level(), format, groups, values, |value, here| *value += here);
}

/// Quantizes `values` to `groups`, the last of which may have fewer than [`GROUP`] values. `errors`
/// has an f32 for each value: it is added first, and then becomes the new error.
///
/// # Panics
/// If `groups` or `errors` have the wrong length, or if this machine does not have the level.
pub fn quantize(
    level: Level,
    format: Quantized,
    values: &[f32],
    mut errors: Option<&mut [u8]>,
    groups: &mut [u8],
) {
    assert!(level.is_available(), "this machine does not support {}", level.name());
    let (groups, rest) = groups.as_chunks_mut::<GROUP_BYTES>();
    assert!(
        rest.is_empty() && groups.len() == values.len().div_ceil(GROUP),
        "wrong length of groups"
    );
    if let Some(errors) = &errors {
        assert_eq!(errors.len(), size_of_val(values), "one error for each value");
    }
    for ((at, values), group) in (0..).step_by(GROUP).zip(values.chunks(GROUP)).zip(groups) {
        let bytes = at * size_of::<f32>()..(at + values.len()) * size_of::<f32>();
        let errors = errors.as_deref_mut().map(|errors| errors[bytes].as_chunks_mut().0);
        let mut whole = [0.0; GROUP];
        whole[..values.len()].copy_from_slice(values);
        if let Some(errors) = &errors {
            for (value, error) in whole.iter_mut().zip(errors.iter()) {
                *value += f32::from_ne_bytes(*error);
            }
        }
        encode(level, format, &mut whole, group);
        for (error, lost) in errors.into_iter().flatten().zip(&whole) {
            *error = lost.to_ne_bytes();
        }
    }
}

fn dequantize_at(
    level: Level,
    format: Quantized,
    groups: &[u8],
    values: &mut [f32],
    put: impl Fn(&mut f32, f32),
) {
    let (groups, rest) = groups.as_chunks::<GROUP_BYTES>();
    assert!(
        rest.is_empty() && groups.len() == values.len().div_ceil(GROUP),
        "wrong length of groups"
    );
    let mut here = [0.0; GROUP];
    for (values, group) in values.chunks_mut(GROUP).zip(groups) {
        decode(level, format, group, &mut here);
        values.iter_mut().zip(&here).for_each(|(value, &here)| put(value, here));
    }
}

/// Quantizes a group. Its values become their errors.
fn encode(level: Level, format: Quantized, values: &mut Values, group: &mut [u8; GROUP_BYTES]) {
    match (level, format) {
        (Level::Scalar, Quantized::Int8) => encode_by(values, group, INT8_MAX, int8_of, int8),
        (Level::Scalar, Quantized::Fp8) => encode_by(values, group, FP8_MAX, fp8_of, fp8),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the machine has the level.
        (Level::Avx2, _) => unsafe { x86::encode_avx2(format, values, group) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        (Level::Avx512, _) => unsafe { x86::encode_avx512(format, values, group) },
        _ => encode_all(format, values, group),
    }
}

/// The values of a group.
fn decode(level: Level, format: Quantized, group: &[u8; GROUP_BYTES], values: &mut Values) {
    match level {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the machine has the level: it is that of `level()`.
        Level::Avx2 => unsafe { x86::decode_avx2(format, group, values) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx512 => unsafe { x86::decode_avx512(format, group, values) },
        _ => decode_all(format, group, values),
    }
}

const INT8_MAX: f32 = 127.0;
const FP8_MAX: f32 = 448.0;

/// The bits of infinity; those of finite magnitudes are less.
const INFINITY: u32 = 0x7f80_0000;

/// The scale of a group, and its reciprocal.
#[inline(always)]
fn scale_of(values: &Values, largest: f32) -> (f32, f32) {
    let most = values.iter().fold(0, |most, value| (value.to_bits() & 0x7fff_ffff).max(most));
    if most >= INFINITY {
        return (f32::NAN, 0.0);
    }
    let scale = f32::from_bits(most) / largest;
    if scale < f32::MIN_POSITIVE { (0.0, 0.0) } else { (scale, 1.0 / scale) }
}

// Plain loops, which the compiler vectorises for the level that they are inlined in.

#[inline(always)]
fn encode_by(
    values: &mut Values,
    group: &mut [u8; GROUP_BYTES],
    largest: f32,
    byte_of: impl Fn(f32) -> u8,
    value_of: impl Fn(u8) -> f32,
) {
    let (scale, reciprocal) = scale_of(values, largest);
    let (head, bytes) = group.split_at_mut(SCALE);
    head.copy_from_slice(&scale.to_ne_bytes());
    if scale.is_nan() {
        // Its error can't be compensated.
        bytes.fill(0);
        values.fill(0.0);
        return;
    }
    for (byte, value) in bytes.iter_mut().zip(values) {
        *byte = byte_of(*value * reciprocal);
        *value -= value_of(*byte) * scale;
    }
}

#[inline(always)]
fn encode_all(format: Quantized, values: &mut Values, group: &mut [u8; GROUP_BYTES]) {
    match format {
        Quantized::Int8 => encode_by(values, group, INT8_MAX, int8_of_bits, int8),
        Quantized::Fp8 => encode_by(values, group, FP8_MAX, fp8_of_bits, fp8_bits),
    }
}

#[inline(always)]
fn decode_all(format: Quantized, group: &[u8; GROUP_BYTES], values: &mut Values) {
    let (head, bytes) = group.split_at(SCALE);
    let scale = head.first_chunk().map_or(f32::NAN, |bytes| f32::from_ne_bytes(*bytes));
    let pairs = values.iter_mut().zip(bytes);
    match format {
        Quantized::Int8 => pairs.for_each(|(value, &byte)| *value = int8(byte) * scale),
        Quantized::Fp8 => pairs.for_each(|(value, &byte)| *value = fp8_bits(byte) * scale),
    }
}

/// By the library's functions, as the reference for the other levels.
fn int8_of(value: f32) -> u8 {
    value.round_ties_even() as i8 as u8
}

#[inline(always)]
fn int8(byte: u8) -> f32 {
    f32::from(byte as i8)
}

/// The last bit of such a large number counts ones, so adding it rounds.
#[inline(always)]
fn int8_of_bits(value: f32) -> u8 {
    const ONES: f32 = 12_582_912.0;
    (value + ONES).to_bits() as u8
}

fn fp8_of(value: f32) -> u8 {
    F8E4m3::from_f32(value).to_bits()
}

fn fp8(byte: u8) -> f32 {
    F8E4m3::from_bits(byte).to_f32()
}

/// As `int8_of_bits` if the result is not a normal number; otherwise the last bits are rounded as
/// an integer, and the bias of the exponent is changed.
#[inline(always)]
fn fp8_of_bits(value: f32) -> u8 {
    /// 2⁻⁶, the smallest normal number, and a number whose last bit counts 2⁻⁹.
    const NORMAL: u32 = 0x3c80_0000;
    const STEPS: f32 = 16_384.0;
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let rounded = magnitude.wrapping_add(0x7_ffff + ((magnitude >> 20) & 1)) >> 20;
    let normal = rounded.wrapping_sub((127 - 7) << 3);
    let steps = (f32::from_bits(magnitude) + STEPS).to_bits().wrapping_sub(STEPS.to_bits());
    let byte = if magnitude < NORMAL { steps } else { normal };
    (byte | ((bits >> 24) & 0x80)) as u8
}

/// The bits are those of an f32 with another bias, also for numbers that are not normal.
#[inline(always)]
fn fp8_bits(byte: u8) -> f32 {
    /// 2¹²⁰.
    const BIAS: f32 = f32::from_bits((120 + 127) << 23);
    let magnitude = f32::from_bits(u32::from(byte & 0x7f) << 20) * BIAS;
    f32::from_bits(magnitude.to_bits() | (u32::from(byte & 0x80) << 24))
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{GROUP_BYTES, Quantized, Values, decode_all, encode_all};

    #[target_feature(enable = "avx2")]
    pub(super) fn encode_avx2(
        format: Quantized,
        values: &mut Values,
        group: &mut [u8; GROUP_BYTES],
    ) {
        encode_all(format, values, group);
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn decode_avx2(format: Quantized, group: &[u8; GROUP_BYTES], values: &mut Values) {
        decode_all(format, group, values);
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")]
    pub(super) fn encode_avx512(
        format: Quantized,
        values: &mut Values,
        group: &mut [u8; GROUP_BYTES],
    ) {
        encode_all(format, values, group);
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")]
    pub(super) fn decode_avx512(format: Quantized, group: &[u8; GROUP_BYTES], values: &mut Values) {
        decode_all(format, group, values);
    }
}
