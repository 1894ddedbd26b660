//! Which values of a tensor are not finite. Pure.

use gradwire_proto::DType;

/// The values of a tensor that are not finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Found {
    /// How many there are.
    pub(crate) count: u64,
    /// The first of them: the number of the element.
    pub(crate) first: u64,
    /// Whether the first one is NaN.
    pub(crate) is_nan: bool,
}

/// Whether a type has a NaN. Most of these have infinite values, too.
pub(crate) fn has_nan(dtype: DType) -> bool {
    not_finite_bits(dtype, 0).is_some()
}

/// Whether these bits are a NaN or an infinite value, and whether they are a NaN. `None` for types
/// without such values. The two numbers of a complex element are looked at separately.
fn not_finite_bits(dtype: DType, bits: u64) -> Option<(bool, bool)> {
    let (exponent, fraction) = match dtype {
        DType::F32 | DType::C64 => (0xff << 23, (1 << 23) - 1),
        DType::F64 | DType::C128 => (0x7ff << 52, (1 << 52) - 1),
        DType::F16 => (0x1f << 10, (1 << 10) - 1),
        DType::Bf16 => (0xff << 7, (1 << 7) - 1),
        DType::F8E5m2 => (0x1f << 2, 3),
        // It has a NaN, but nothing infinite.
        DType::F8E4m3 => (0x7f, 0x7f),
        DType::I8
        | DType::U8
        | DType::I16
        | DType::U16
        | DType::I32
        | DType::U32
        | DType::I64
        | DType::U64
        | DType::Bool => return None,
    };
    Some((bits & exponent == exponent, bits & fraction != 0))
}

/// Looks through the numbers of a tensor.
pub(crate) fn look(dtype: DType, numbers: impl Iterator<Item = u64>) -> Option<Found> {
    let parts = if matches!(dtype, DType::C64 | DType::C128) { 2 } else { 1 };
    let mut found: Option<Found> = None;
    for (at, bits) in numbers.enumerate() {
        let (true, is_nan) = not_finite_bits(dtype, bits)? else { continue };
        let new = Found { count: 0, first: at as u64 / parts, is_nan };
        found.get_or_insert(new).count += 1;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(first: u64, count: u64, is_nan: bool) -> Option<Found> {
        Some(Found { count, first, is_nan })
    }

    #[test]
    fn every_float_type_is_recognised() {
        let of = |dtype, numbers: &[u64]| look(dtype, numbers.iter().copied());
        let f32s = [1.5, f32::NEG_INFINITY, f32::NAN, f32::MAX].map(|x| u64::from(x.to_bits()));
        assert_eq!(of(DType::F32, &f32s), at(1, 2, false));
        assert_eq!(of(DType::C64, &f32s[2..]), at(0, 1, true));
        let f64s = [f64::MIN, f64::NAN].map(f64::to_bits);
        assert_eq!(of(DType::F64, &f64s), at(1, 1, true));
        assert_eq!(of(DType::C128, &[0, 0, 0, f64s[1]]), at(1, 1, true));
        // The largest finite value, infinity, a NaN.
        assert_eq!(of(DType::F16, &[0x7bff, 0xfc00, 0x7e00]), at(1, 2, false));
        assert_eq!(of(DType::Bf16, &[0x7f7f, 0x7fc0]), at(1, 1, true));
        assert_eq!(of(DType::F8E5m2, &[0x7b, 0x7c]), at(1, 1, false));
        assert_eq!(of(DType::F8E4m3, &[0x7e, 0xfe, 0xff]), at(2, 1, true));
        assert_eq!(of(DType::I32, &[u64::MAX]), None);
        assert_eq!(of(DType::F32, &[]), None);
    }
}
