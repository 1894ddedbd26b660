//! Elements whose values can be generated, reduced by definition, and compared.
//!
//! Only this module knows the Rust types of elements. Everything else works with bytes and a
//! [`Kind`], so that it is compiled once and not for each type.

use gradwire_proto::{DType, ReduceOp};
use gradwire_worker::{Bool, Complex, Element, F8E4m3, F8E5m2, half};

/// An element type whose values can be generated and checked.
pub trait Value: Element + PartialEq {
    /// The distance from 1 to the next value; 0 if arithmetic is exact.
    const EPSILON: f64;

    /// The element of a whole number; integers wrap around.
    fn whole(value: i64) -> Self;

    /// The quotient of a sum: rounded for floats, truncated for integers.
    fn quotient(sum: i64, by: u32) -> Self;

    /// 2 to the power of `exponent`; integers lose the bits that do not fit.
    fn power_of_two(exponent: u32) -> Self;

    /// The two parts of a complex number, or the number and zero. Used in errors and for
    /// comparisons with a tolerance.
    fn numbers(self) -> [f64; 2];

    /// The reduction of whole numbers, by definition. The factors of a product are 1 and 2.
    fn reduced(op: ReduceOp, values: &mut dyn Iterator<Item = i64>, ranks: u32) -> Self {
        match op {
            ReduceOp::Sum => Self::whole(values.sum()),
            ReduceOp::Average => Self::quotient(values.sum(), ranks),
            ReduceOp::Min => Self::whole(values.min().unwrap_or_default()),
            ReduceOp::Max => Self::whole(values.max().unwrap_or_default()),
            ReduceOp::Product => Self::power_of_two(values.map(|v| u32::from(v == 2)).sum()),
            ReduceOp::BitAnd => Self::whole(values.fold(-1, |all, value| all & value)),
            ReduceOp::BitOr => Self::whole(values.fold(0, |all, value| all | value)),
            ReduceOp::BitXor => Self::whole(values.fold(0, |all, value| all ^ value)),
        }
    }
}

macro_rules! integers {
    ($($type:ty),+) => {$(
        impl Value for $type {
            const EPSILON: f64 = 0.0;

            fn whole(value: i64) -> Self {
                value as Self
            }

            fn quotient(sum: i64, by: u32) -> Self {
                // The sum has the element type, and wraps around.
                (i128::from(sum as Self) / i128::from(by)) as Self
            }

            fn power_of_two(exponent: u32) -> Self {
                1_i64.checked_shl(exponent).unwrap_or_default() as Self
            }

            fn numbers(self) -> [f64; 2] {
                // All of these types convert to i128, but not all convert to f64 without loss.
                [i128::from(self) as f64, 0.0]
            }
        }
    )+};
}

macro_rules! floats {
    ($($type:ty = $epsilon:expr, $from:expr, $into:expr);+ $(;)?) => {$(
        impl Value for $type {
            const EPSILON: f64 = $epsilon;

            fn whole(value: i64) -> Self {
                let from: fn(f64) -> Self = $from;
                from(value as f64)
            }

            fn quotient(sum: i64, by: u32) -> Self {
                let from: fn(f64) -> Self = $from;
                from(sum as f64 / f64::from(by))
            }

            fn power_of_two(exponent: u32) -> Self {
                let from: fn(f64) -> Self = $from;
                from(f64::from(exponent).exp2())
            }

            fn numbers(self) -> [f64; 2] {
                let into: fn(Self) -> f64 = $into;
                [into(self), 0.0]
            }
        }
    )+};
}

/// Both parts are nonzero, so that a lost part is noticed.
macro_rules! complex {
    ($($part:ty),+) => {$(
        impl Value for Complex<$part> {
            const EPSILON: f64 = <$part as Value>::EPSILON;

            fn whole(value: i64) -> Self {
                Self::new(<$part>::whole(value), <$part>::whole(-value))
            }

            fn quotient(sum: i64, by: u32) -> Self {
                Self::new(<$part>::quotient(sum, by), <$part>::quotient(-sum, by))
            }

            fn power_of_two(exponent: u32) -> Self {
                Self::new(<$part>::power_of_two(exponent), 0.0)
            }

            fn numbers(self) -> [f64; 2] {
                [self.re.into(), self.im.into()]
            }
        }
    )+};
}

integers!(i8, u8, i16, u16, i32, u32, i64, u64);
floats! {
    f32 = f64::EPSILON * (1u64 << 29) as f64, |v| v as f32, f64::from;
    f64 = f64::EPSILON, |v| v, |v| v;
    half::f16 = 1.0 / 1024.0, half::f16::from_f64, half::f16::to_f64;
    half::bf16 = 1.0 / 128.0, half::bf16::from_f64, half::bf16::to_f64;
    F8E4m3 = 1.0 / 8.0, |v| F8E4m3::from_f32(v as f32), |v| v.to_f32().into();
    F8E5m2 = 1.0 / 4.0, |v| F8E5m2::from_f32(v as f32), |v| v.to_f32().into();
}
complex!(f32, f64);

/// Odd numbers are true.
impl Value for Bool {
    const EPSILON: f64 = 0.0;

    fn whole(value: i64) -> Self {
        (value % 2 != 0).into()
    }

    fn quotient(sum: i64, _by: u32) -> Self {
        Self::whole(sum)
    }

    fn power_of_two(exponent: u32) -> Self {
        (exponent == 0).into()
    }

    fn numbers(self) -> [f64; 2] {
        [f64::from(u8::from(self.get())), 0.0]
    }

    fn reduced(op: ReduceOp, values: &mut dyn Iterator<Item = i64>, _ranks: u32) -> Self {
        let is_true = |value: i64| Self::whole(value).get();
        match op {
            ReduceOp::Sum | ReduceOp::Average | ReduceOp::Max | ReduceOp::BitOr => {
                values.fold(false, |any, value| any | is_true(value)).into()
            }
            ReduceOp::Min | ReduceOp::Product | ReduceOp::BitAnd => {
                values.fold(true, |all, value| all & is_true(value)).into()
            }
            ReduceOp::BitXor => values.fold(false, |all, value| all ^ is_true(value)).into(),
        }
    }
}

/// What a benchmark needs to know about an element type.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    /// The type.
    pub dtype: DType,
    /// The distance from 1 to the next value; 0 if arithmetic is exact.
    pub epsilon: f64,
    /// Appends the element of a whole number.
    pub whole: fn(i64, &mut Vec<u8>),
    /// Appends the reduction of whole numbers, of this many ranks.
    pub reduced: fn(ReduceOp, &mut dyn Iterator<Item = i64>, u32, &mut Vec<u8>),
    /// The two parts of a complex number, or the number and zero, for the bytes of an element.
    pub numbers: fn(&[u8]) -> [f64; 2],
}

impl Kind {
    /// The kind of an element type.
    pub fn of(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self::known::<f32>(),
            DType::F64 => Self::known::<f64>(),
            DType::F16 => Self::known::<half::f16>(),
            DType::Bf16 => Self::known::<half::bf16>(),
            DType::F8E4m3 => Self::known::<F8E4m3>(),
            DType::F8E5m2 => Self::known::<F8E5m2>(),
            DType::I8 => Self::known::<i8>(),
            DType::U8 => Self::known::<u8>(),
            DType::I16 => Self::known::<i16>(),
            DType::U16 => Self::known::<u16>(),
            DType::I32 => Self::known::<i32>(),
            DType::U32 => Self::known::<u32>(),
            DType::I64 => Self::known::<i64>(),
            DType::U64 => Self::known::<u64>(),
            DType::Bool => Self::known::<Bool>(),
            DType::C64 => Self::known::<Complex<f32>>(),
            DType::C128 => Self::known::<Complex<f64>>(),
        }
    }

    fn known<T: Value>() -> Self {
        fn append(value: impl Value, to: &mut Vec<u8>) {
            to.extend_from_slice(bytemuck::bytes_of(&value));
        }
        Self {
            dtype: T::DTYPE,
            epsilon: T::EPSILON,
            whole: |value, to| append(T::whole(value), to),
            reduced: |op, values, ranks, to| append(T::reduced(op, values, ranks), to),
            numbers: |bytes| bytemuck::pod_read_unaligned::<T>(bytes).numbers(),
        }
    }
}
