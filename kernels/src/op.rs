//! The operations on accumulators.

/// The type in which values are combined and finished: the element type, or f32 for shorter floats.
pub(super) trait Number: Copy + PartialEq {
    /// The number of all zero bits.
    const ZERO: Self;
    /// The factor as this type.
    fn factor(factor: f64) -> Self;
    /// Multiplied by a factor; integers stay as they are, because `scaled` applies their factors.
    fn scale(self, factor: Self) -> Self;
    /// Divided by the number of contributors, at least 1.
    fn divide(self, contributors: u32) -> Self;
    /// The canonical NaN instead of any other.
    fn canonical(self) -> Self;
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn least(self, other: Self) -> Self;
    fn greatest(self, other: Self) -> Self;
}

macro_rules! float {
    ($float:ty) => {
        impl Number for $float {
            const ZERO: Self = 0.0;

            #[inline(always)]
            fn factor(factor: f64) -> Self {
                factor as $float
            }

            #[inline(always)]
            fn scale(self, factor: Self) -> Self {
                self * factor
            }

            #[inline(always)]
            fn divide(self, contributors: u32) -> Self {
                self / contributors as $float
            }

            #[inline(always)]
            fn canonical(self) -> Self {
                if self.is_nan() { Self::NAN } else { self }
            }

            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self * other
            }

            #[inline(always)]
            fn least(self, other: Self) -> Self {
                // Equal values have equal bits but for zeros, whose signs are joined.
                let equal = Self::from_bits(self.to_bits() | other.to_bits());
                let ordered = if self < other {
                    self
                } else if other < self {
                    other
                } else {
                    equal
                };
                if self.is_nan() | other.is_nan() { Self::NAN } else { ordered }
            }

            #[inline(always)]
            fn greatest(self, other: Self) -> Self {
                let equal = Self::from_bits(self.to_bits() & other.to_bits());
                let ordered = if self > other {
                    self
                } else if other > self {
                    other
                } else {
                    equal
                };
                if self.is_nan() | other.is_nan() { Self::NAN } else { ordered }
            }
        }
    };
}

float!(f32);
float!(f64);

macro_rules! integer {
    ($int:ty, $divide:expr) => {
        impl Number for $int {
            const ZERO: Self = 0;

            #[inline(always)]
            fn factor(_: f64) -> Self {
                1
            }

            #[inline(always)]
            fn scale(self, _: Self) -> Self {
                self
            }

            #[inline(always)]
            fn divide(self, contributors: u32) -> Self {
                let divide: fn($int, u32) -> $int = $divide;
                divide(self, contributors)
            }

            #[inline(always)]
            fn canonical(self) -> Self {
                self
            }

            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            #[inline(always)]
            fn least(self, other: Self) -> Self {
                self.min(other)
            }

            #[inline(always)]
            fn greatest(self, other: Self) -> Self {
                self.max(other)
            }
        }
    };
}

// Up to 32 bits the division is done in floats, which vectors have: a quotient that isn't whole is
// further from a whole number than they round, so truncation gives the integer quotient. (f32 can't
// hold all n, but where it can't the quotient is 0.)
integer!(i8, |x, n| (f32::from(x) / n as f32) as i8);
integer!(u8, |x, n| (f32::from(x) / n as f32) as u8);
integer!(i16, |x, n| (f32::from(x) / n as f32) as i16);
integer!(u16, |x, n| (f32::from(x) / n as f32) as u16);
integer!(i32, |x, n| (f64::from(x) / f64::from(n)) as i32);
integer!(u32, |x, n| (f64::from(x) / f64::from(n)) as u32);
integer!(i64, |x, n| x / i64::from(n));
integer!(u64, |x, n| x / u64::from(n));

/// An operation as a type, so that the sweep is compiled for each.
pub(super) trait Operation<N> {
    /// How many inputs are combined in registers: four for sums, which are those of gradients. For
    /// the others two, because each is compiled for all types and levels: four would take 0.6 MB
    /// more in each program.
    const GROUP: usize;

    fn apply(left: N, right: N) -> N;
}

macro_rules! operation {
    ($name:ident, $method:ident, $group:literal) => {
        pub(super) struct $name;

        impl<N: Number> Operation<N> for $name {
            const GROUP: usize = $group;

            #[inline(always)]
            fn apply(left: N, right: N) -> N {
                left.$method(right)
            }
        }
    };
}

operation!(Sum, add, 4);
operation!(Product, mul, 2);
operation!(Min, least, 2);
operation!(Max, greatest, 2);

/// Bitwise operations are independent of element boundaries, so they work on the bytes of all
/// types.
macro_rules! bitwise {
    ($name:ident, $operator:tt) => {
        pub(super) struct $name;

        impl Operation<u8> for $name {
            const GROUP: usize = 2;

            #[inline(always)]
            fn apply(left: u8, right: u8) -> u8 {
                left $operator right
            }
        }
    };
}

bitwise!(And, &);
bitwise!(Or, |);
bitwise!(Xor, ^);
