//! The element types, read and written in a simple way: by the definition of each format, one
//! element at a time.

use gradwire_proto::DType;
use half::{bf16, f16};

/// The precision of a float type: its unit roundoff, and its smallest number above zero.
pub(super) fn precision(dtype: DType) -> (f64, f64) {
    match dtype {
        DType::F8E4m3 => (2f64.powi(-4), 2f64.powi(-9)),
        DType::F8E5m2 => (2f64.powi(-3), 2f64.powi(-16)),
        DType::F16 => (2f64.powi(-11), 2f64.powi(-24)),
        DType::Bf16 => (2f64.powi(-8), 2f64.powi(-133)),
        DType::F32 => (2f64.powi(-24), 2f64.powi(-149)),
        _ => (2f64.powi(-53), f64::MIN_POSITIVE),
    }
}

/// Whether its sums are kept in f32 and rounded once on each node.
pub(super) fn is_short_float(dtype: DType) -> bool {
    matches!(dtype, DType::F8E4m3 | DType::F8E5m2 | DType::F16 | DType::Bf16)
}

/// The value of an 8-bit float with this number of exponent bits: 4 (OCP E4M3, which has no
/// infinity and one NaN) or 5 (OCP E5M2, which is like the floats of IEEE 754).
fn float8(bits: u8, exponent_bits: u32) -> f64 {
    let mantissa_bits = 7 - exponent_bits;
    let exponent = i32::from((bits & 0x7f) >> mantissa_bits);
    let mantissa = f64::from(bits & ((1 << mantissa_bits) - 1));
    let (bias, one) = ((1 << (exponent_bits - 1)) - 1, f64::from(1u32 << mantissa_bits));
    let magnitude = match (exponent_bits, bits & 0x7f) {
        (4, 0x7f) => f64::NAN,
        (5, 0x7c) => f64::INFINITY,
        (5, 0x7d..) => f64::NAN,
        _ if exponent == 0 => mantissa / one * 2f64.powi(1 - bias),
        _ => (1.0 + mantissa / one) * 2f64.powi(exponent - bias),
    };
    if bits & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The nearest of all 256 values; of two equally near ones, the one with even bits.
fn to_float8(value: f64, exponent_bits: u32) -> u8 {
    if value.is_nan() || (exponent_bits == 4 && value.is_infinite()) {
        return 0x7f;
    }
    let sign = u8::from(value.is_sign_negative()) << 7;
    if value.is_infinite() {
        return sign | 0x7c;
    }
    let far = |bits: u8| (float8(bits, exponent_bits) - value.abs()).abs();
    let finite = (0..0x7f).filter(|bits| float8(*bits, exponent_bits).is_finite());
    let nearest = finite.min_by(|a, b| far(*a).total_cmp(&far(*b)).then((a & 1).cmp(&(b & 1))));
    sign | nearest.unwrap_or_default()
}

/// The value of a float's bytes.
pub(super) fn float(dtype: DType, bytes: &[u8]) -> f64 {
    match (dtype, bytes) {
        (DType::F8E4m3, &[a]) => float8(a, 4),
        (DType::F8E5m2, &[a]) => float8(a, 5),
        (DType::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f64(),
        (DType::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f64(),
        (DType::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]).into(),
        (DType::F64, &[a, b, c, d, e, f, g, h]) => f64::from_le_bytes([a, b, c, d, e, f, g, h]),
        _ => unreachable!("{dtype} of {} bytes", bytes.len()),
    }
}

/// A float's bytes.
pub(super) fn float_bytes(dtype: DType, value: f64) -> Vec<u8> {
    match dtype {
        DType::F8E4m3 => vec![to_float8(value, 4)],
        DType::F8E5m2 => vec![to_float8(value, 5)],
        DType::F16 => f16::from_f64(value).to_le_bytes().to_vec(),
        DType::Bf16 => bf16::from_f64(value).to_le_bytes().to_vec(),
        DType::F32 => (value as f32).to_le_bytes().to_vec(),
        _ => value.to_le_bytes().to_vec(),
    }
}

/// The value of an integer's or a truth value's bytes.
pub(super) fn integer(dtype: DType, bytes: &[u8]) -> i128 {
    let mut wide = [0; 16];
    wide[..bytes.len()].copy_from_slice(bytes);
    wrap(dtype, i128::from_le_bytes(wide))
}

/// The value in an integer type, wrapped around; 0 or 1 for a truth value.
pub(super) fn wrap(dtype: DType, value: i128) -> i128 {
    match dtype {
        DType::I8 => i128::from(value as i8),
        DType::U8 => i128::from(value as u8),
        DType::I16 => i128::from(value as i16),
        DType::U16 => i128::from(value as u16),
        DType::I32 => i128::from(value as i32),
        DType::U32 => i128::from(value as u32),
        DType::I64 => i128::from(value as i64),
        DType::U64 => i128::from(value as u64),
        DType::Bool => i128::from(value != 0),
        _ => unreachable!("{dtype} is not an integer type"),
    }
}

/// The type of the two parts of a complex number; other types are returned unchanged.
pub(super) fn part_of(dtype: DType) -> DType {
    match dtype {
        DType::C64 => DType::F32,
        DType::C128 => DType::F64,
        _ => dtype,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values are from the specifications of the formats.
    #[test]
    fn eight_bit_floats_follow_their_specification() {
        let e4m3 = [(0x00, 0.0), (0x01, 2f64.powi(-9)), (0x08, 2f64.powi(-6)), (0x38, 1.0)];
        for (bits, value) in e4m3.into_iter().chain([(0x7e, 448.0), (0xb8, -1.0)]) {
            assert_eq!((float8(bits, 4), to_float8(value, 4)), (value, bits));
        }
        let e5m2 = [(0x01, 2f64.powi(-16)), (0x04, 2f64.powi(-14)), (0x3c, 1.0), (0x7b, 57344.0)];
        for (bits, value) in e5m2.into_iter().chain([(0x7c, f64::INFINITY), (0xbc, -1.0)]) {
            assert_eq!((float8(bits, 5), to_float8(value, 5)), (value, bits));
        }
        assert!(float8(0x7f, 4).is_nan() && float8(0xff, 4).is_nan() && float8(0x7e, 5).is_nan());
        // Half way between two values: rounded to even bits.
        assert_eq!((to_float8(1.0625, 4), to_float8(1.1875, 4)), (0x38, 0x3a));
    }
}
