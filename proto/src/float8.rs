//! The two 8-bit floats of the Open Compute Project's OFP8 specification (2023), as in PyTorch.
//!
//! | | sign, exponent, fraction | bias | largest | infinity | NaN |
//! |---|---|---|---|---|---|
//! | [`F8E4m3`] | 1, 4, 3 | 7 | 448 | none | `s.1111.111` |
//! | [`F8E5m2`] | 1, 5, 2 | 15 | 57344 | `s.11111.00` | the others of `s.11111` |
//!
//! They are for storage: sums are kept in f32 and rounded once, to nearest, ties to even. Values
//! that exceed the largest number after rounding become infinity, or NaN if the format has no
//! infinity. Conversions have no branches and no tables, so that loops over them are vectorized.

use std::{cmp::Ordering, fmt};

use bytemuck::{Pod, Zeroable};

/// The bits of the f32 equal to a magnitude (no sign) with `man` bits of fraction.
#[inline]
fn widen(magnitude: u32, man: u32, bias: u32, largest: u32, nan: u32) -> u32 {
    let normal = (magnitude << (23 - man)) + ((127 - bias) << 23);
    // With exponent 0, a multiple of the smallest number.
    let smallest = f32::from_bits((128 - bias - man) << 23);
    let denormal = (magnitude as f32 * smallest).to_bits();
    let finite = if magnitude >> man == 0 { denormal } else { normal };
    let infinite = if magnitude > largest { f32::INFINITY.to_bits() } else { finite };
    if magnitude >= nan { f32::NAN.to_bits() } else { infinite }
}

/// The magnitude nearest to an f32, given without its sign.
#[inline]
fn narrow(bits: u32, man: u32, bias: u32, largest: u32) -> u32 {
    let shift = 23 - man;
    let half = (1 << (shift - 1)) - 1 + ((bits >> shift) & 1);
    let normal = ((bits + half) >> shift).wrapping_sub((127 - bias) << man);
    // In the sum, one unit in the last place is the smallest number, so the addition rounds.
    let unit = (151 - bias - man) << 23;
    let denormal = (f32::from_bits(bits) + f32::from_bits(unit)).to_bits().wrapping_sub(unit);
    let finite = if bits < (128 - bias) << 23 { denormal } else { normal };
    // The magnitude after the largest is infinity or NaN.
    let finite = finite.min(largest + 1);
    if bits > f32::INFINITY.to_bits() { 0x7f } else { finite }
}

macro_rules! float8 {
    (
        $(#[$doc:meta])* $name:ident, $man:literal bits, bias $bias:literal,
        largest $largest:literal, nan $nan:literal
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Default, Pod, Zeroable)]
        #[repr(transparent)]
        pub struct $name(u8);

        impl $name {
            /// The largest number.
            pub const MAX: Self = Self($largest);
            /// Not a number, as returned by computations.
            pub const NAN: Self = Self(0x7f);

            /// From the bits; every byte is valid.
            #[inline]
            pub const fn from_bits(bits: u8) -> Self {
                Self(bits)
            }

            /// The bits.
            #[inline]
            pub const fn to_bits(self) -> u8 {
                self.0
            }

            /// The same number as f32, exactly. NaNs become the canonical NaN and keep the sign.
            #[inline]
            pub fn to_f32(self) -> f32 {
                let sign = u32::from(self.0 & 0x80) << 24;
                let magnitude = widen(u32::from(self.0 & 0x7f), $man, $bias, $largest, $nan);
                f32::from_bits(sign | magnitude)
            }

            /// The nearest number; ties go to the even last bit. For values that are too large see
            /// the module's documentation. NaN stays NaN and zero keeps its sign.
            #[inline]
            pub fn from_f32(value: f32) -> Self {
                let bits = value.to_bits();
                let sign = (bits >> 24) as u8 & 0x80;
                Self(sign | narrow(bits & 0x7fff_ffff, $man, $bias, $largest) as u8)
            }
        }

        impl From<$name> for f32 {
            fn from(value: $name) -> Self {
                value.to_f32()
            }
        }

        /// Compares numbers: NaN equals nothing, and both zeros are equal.
        impl PartialEq for $name {
            fn eq(&self, other: &Self) -> bool {
                self.to_f32() == other.to_f32()
            }
        }

        impl PartialOrd for $name {
            fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
                self.to_f32().partial_cmp(&other.to_f32())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.to_f32(), f)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.to_f32(), f)
            }
        }
    };
}

float8! {
    /// 8-bit float with 4 bits of exponent and 3 of fraction, without infinity: `float8_e4m3fn`.
    F8E4m3, 3 bits, bias 7, largest 0x7e, nan 0x7f
}

float8! {
    /// 8-bit float with 5 bits of exponent and 2 of fraction: `float8_e5m2`, the upper half of an
    /// f16.
    F8E5m2, 2 bits, bias 15, largest 0x7b, nan 0x7d
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One of the formats, with slow arithmetic that follows the definition.
    struct Format {
        man: u32,
        bias: i32,
        largest: u8,
        has_infinity: bool,
        to_f32: fn(u8) -> f32,
        from_f32: fn(f32) -> u8,
    }

    const FORMATS: [Format; 2] = [
        Format {
            man: 3,
            bias: 7,
            largest: 0x7e,
            has_infinity: false,
            to_f32: |bits| F8E4m3::from_bits(bits).to_f32(),
            from_f32: |value| F8E4m3::from_f32(value).to_bits(),
        },
        Format {
            man: 2,
            bias: 15,
            largest: 0x7b,
            has_infinity: true,
            to_f32: |bits| F8E5m2::from_bits(bits).to_f32(),
            from_f32: |value| F8E5m2::from_f32(value).to_bits(),
        },
    ];

    impl Format {
        /// The value of a finite magnitude.
        fn worth(&self, magnitude: u8) -> f64 {
            let one = f64::from(1u32 << self.man);
            let fraction = f64::from(magnitude & ((1 << self.man) - 1)) / one;
            match i32::from(magnitude >> self.man) {
                0 => fraction * f64::powi(2.0, 1 - self.bias),
                exponent => (1.0 + fraction) * f64::powi(2.0, exponent - self.bias),
            }
        }

        /// The nearest of all numbers, found by trying each, with one more after the largest.
        fn nearest(&self, value: f32) -> u8 {
            let sign = if value.is_sign_negative() { 0x80 } else { 0 };
            if value.is_nan() {
                return sign | 0x7f;
            }
            let above = self.largest + 1;
            // Far beyond, distances would be equal for lack of precision.
            let value = f64::from(value.abs()).min(self.worth(above));
            let distance = |magnitude: u8| (self.worth(magnitude) - value).abs();
            let nearest = (0..=above)
                .min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2))));
            sign | nearest.unwrap()
        }
    }

    #[test]
    fn every_byte_is_its_number_and_comes_back() {
        for format in FORMATS {
            for bits in 0..=u8::MAX {
                let (value, magnitude) = ((format.to_f32)(bits), bits & 0x7f);
                assert_eq!(value.is_sign_negative(), bits >= 0x80, "{bits:#x}");
                if magnitude <= format.largest {
                    assert_eq!(f64::from(value.abs()), format.worth(magnitude), "{bits:#x}");
                } else if format.has_infinity && magnitude == format.largest + 1 {
                    assert!(value.is_infinite(), "{bits:#x}");
                } else {
                    assert!(value.is_nan(), "{bits:#x}");
                    assert_eq!((format.from_f32)(value), bits | 0x7f);
                    continue;
                }
                assert_eq!((format.from_f32)(value), bits, "{value}");
            }
        }
    }

    #[test]
    fn rounding_is_to_nearest_even() {
        let check = |format: &Format, value: f32| {
            for value in [value, -value] {
                let (is, should) = ((format.from_f32)(value), format.nearest(value));
                assert_eq!(is, should, "{value:e} ({:#x})", value.to_bits());
            }
        };
        for format in &FORMATS {
            // Ties between all neighbours, including the number after the largest, and the floats
            // next to them.
            for magnitude in 0..=format.largest {
                let tie = (format.worth(magnitude) + format.worth(magnitude + 1)) / 2.0;
                let tie = tie as f32;
                for value in [tie, tie.next_up(), tie.next_down()] {
                    check(format, value);
                }
            }
            for value in [
                0.0,
                f32::MIN_POSITIVE,
                f32::from_bits(1),
                f32::from_bits(0x007f_ffff),
                f32::MAX,
                f32::INFINITY,
                f32::NAN,
                f32::from_bits(0x7f80_0001),
                f32::from_bits(0x7fff_ffff),
            ] {
                check(format, value);
            }
            // Random floats, half of them in the range of the format.
            let mut state = 41u32;
            for _ in 0..50_000 {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let bits = state ^ (state >> 15);
                check(format, f32::from_bits(bits));
                check(format, f32::from_bits((bits & 0x0fff_ffff) + 0x3600_0000));
            }
        }
    }

    #[test]
    fn too_large_is_nan_or_infinity() {
        assert_eq!(F8E4m3::from_f32(464.0), F8E4m3::MAX);
        assert_eq!(F8E4m3::MAX.to_f32(), 448.0);
        for value in [464.1, 480.0, 1e30, f32::INFINITY, f32::NAN] {
            assert!(F8E4m3::from_f32(value).to_f32().is_nan(), "{value}");
        }
        assert_eq!(F8E5m2::from_f32(61439.0), F8E5m2::MAX);
        assert_eq!(F8E5m2::MAX.to_f32(), 57344.0);
        for value in [61440.0, 65536.0, 1e30, f32::INFINITY] {
            assert_eq!(F8E5m2::from_f32(value).to_f32(), f32::INFINITY, "{value}");
        }
        assert!(F8E5m2::from_f32(f32::NAN).to_f32().is_nan());
    }

    #[test]
    fn they_read_and_compare_as_numbers() {
        let (a, b) = (F8E4m3::from_f32(-1.5), F8E5m2::from_f32(0.25));
        assert_eq!(format!("{a} {a:?} {b} {b:?}"), "-1.5 -1.5 0.25 0.25");
        assert_eq!(format!("{:>6.2}", F8E4m3::from_f32(2.0)), "  2.00");
        assert!(a < F8E4m3::default() && F8E4m3::NAN != F8E4m3::NAN);
        assert_eq!(F8E5m2::from_bits(0x80), F8E5m2::default(), "zeros are equal");
        assert_eq!(f32::from(b), 0.25);
    }
}
