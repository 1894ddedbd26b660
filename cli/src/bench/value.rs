//! What tensors hold before a collective, and what they must hold after it.
//!
//! Values are small whole numbers, exact in every element type, that repeat with a period that is
//! no power of two: a block that ends up in another's place is seen. Inputs and results are one
//! period long, so neither filling nor checking costs more than reading the tensor.

use gradwire_proto::ReduceOp;
use gradwire_worker::{Element, half};

/// After how many elements the values repeat. Prime, so that no power of two is a multiple of it.
const PERIOD: usize = 61;

/// How many periods are kept, so that elements are copied and compared in longer stretches.
const REPEAT: usize = 64;

/// An element type whose values can be made and checked.
pub trait Value: Element + PartialEq {
    /// A whole number; integers wrap around.
    fn whole(value: i64) -> Self;
    /// The quotient of a sum: rounded for floats, cut towards zero for integers.
    fn quotient(sum: i64, by: u32) -> Self;
    /// 2 to the power of `exponent`; integers lose what does not fit.
    fn power_of_two(exponent: u32) -> Self;
    /// For errors, and to compare with a tolerance.
    fn number(self) -> f64;
    /// The distance from 1 to the next value; 0 for integers.
    const EPSILON: f64;
}

macro_rules! integers {
    ($($type:ty),+) => {$(
        impl Value for $type {
            fn whole(value: i64) -> Self {
                value as Self
            }
            fn quotient(sum: i64, by: u32) -> Self {
                // The sum is in the element type, and wraps in it.
                (i128::from(sum as Self) / i128::from(by)) as Self
            }
            fn power_of_two(exponent: u32) -> Self {
                1_i64.checked_shl(exponent).unwrap_or_default() as Self
            }
            fn number(self) -> f64 {
                // Through the widest: there is no lossless way that all of them have.
                i64::from(self) as f64
            }
            const EPSILON: f64 = 0.0;
        }
    )+};
}

macro_rules! floats {
    ($($type:ty = $epsilon:expr, $from:expr, $into:expr);+ $(;)?) => {$(
        impl Value for $type {
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
            fn number(self) -> f64 {
                let into: fn(Self) -> f64 = $into;
                into(self)
            }
            const EPSILON: f64 = $epsilon;
        }
    )+};
}

integers!(i8, u8, i32, i64);
floats! {
    f32 = f64::EPSILON * (1u64 << 29) as f64, |v| v as f32, f64::from;
    f64 = f64::EPSILON, |v| v, |v| v;
    half::f16 = 1.0 / 1024.0, half::f16::from_f64, half::f16::to_f64;
    half::bf16 = 1.0 / 128.0, half::bf16::from_f64, half::bf16::to_f64;
}

/// Calls a function with the Rust type of an element type.
macro_rules! with_type {
    ($dtype:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match $dtype {
            gradwire_proto::DType::F32 => $function::<f32>($($argument),*),
            gradwire_proto::DType::F64 => $function::<f64>($($argument),*),
            gradwire_proto::DType::F16 => $function::<gradwire_worker::half::f16>($($argument),*),
            gradwire_proto::DType::Bf16 => $function::<gradwire_worker::half::bf16>($($argument),*),
            gradwire_proto::DType::I8 => $function::<i8>($($argument),*),
            gradwire_proto::DType::U8 => $function::<u8>($($argument),*),
            gradwire_proto::DType::I32 => $function::<i32>($($argument),*),
            gradwire_proto::DType::I64 => $function::<i64>($($argument),*),
        }
    };
}
pub(crate) use with_type;

/// One period of values, repeated.
#[derive(Debug, Clone, PartialEq)]
pub struct Pattern<T> {
    values: Vec<T>,
    /// How far a value may be off, in its own size; 0 where arithmetic is exact.
    tolerance: f64,
}

/// An element that is not what it must be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Wrong {
    /// Which.
    pub element: usize,
    /// What it is.
    pub got: f64,
    /// What it must be.
    pub expected: f64,
}

impl<T: Value> Pattern<T> {
    fn new(tolerance: f64, value: impl Fn(usize) -> T) -> Self {
        let period: Vec<T> = (0..PERIOD).map(value).collect();
        Self { values: period.repeat(REPEAT), tolerance }
    }

    /// What rank `rank` of `ranks` brings to a reduction; `salt` tells several tensors apart.
    pub fn contribution(op: ReduceOp, rank: u32, ranks: u32, salt: usize) -> Self {
        Self::new(0.0, |i| T::whole(contribution(op, rank, ranks, i + salt)))
    }

    /// What `ranks` contributions come to.
    pub fn reduction(op: ReduceOp, ranks: u32, salt: usize) -> Self {
        let all = |i: usize| (0..ranks).map(move |rank| contribution(op, rank, ranks, i + salt));
        match op {
            ReduceOp::Sum => Self::new(Self::rounding(ranks, 0.0), |i| T::whole(all(i).sum())),
            ReduceOp::Average => {
                // The division rounds, and does so twice where the sum travelled in f16 or bf16.
                let tolerance = Self::rounding(ranks, 2.0 * T::EPSILON);
                Self::new(tolerance, |i| T::quotient(all(i).sum(), ranks))
            }
            ReduceOp::Min => Self::new(0.0, |i| T::whole(all(i).min().unwrap_or_default())),
            ReduceOp::Max => Self::new(0.0, |i| T::whole(all(i).max().unwrap_or_default())),
            ReduceOp::Product => {
                Self::new(0.0, |i| T::power_of_two(all(i).map(|value| u32::from(value == 2)).sum()))
            }
        }
    }

    /// What a broadcast brings to everybody, and what others have before it.
    pub fn own(rank: u32) -> Self {
        Self::new(0.0, |i| T::whole(own(i64::from(rank), i as i64)))
    }

    /// `least`, or more where sums are too large to be exact: each of them may round then.
    fn rounding(ranks: u32, least: f64) -> f64 {
        let largest = f64::from(ranks.div_ceil(stride(ranks))) * LARGEST as f64;
        if T::EPSILON == 0.0 || largest <= 2.0 / T::EPSILON {
            return least;
        }
        (f64::from(ranks) * T::EPSILON).max(least)
    }

    /// Fills a tensor.
    pub fn fill(&self, tensor: &mut [T]) {
        for part in tensor.chunks_mut(self.values.len()) {
            part.copy_from_slice(&self.values[..part.len()]);
        }
    }

    /// Checks every element of a tensor.
    ///
    /// # Errors
    /// The first that is wrong.
    pub fn check(&self, tensor: &[T]) -> Result<(), Wrong> {
        for (i, part) in tensor.chunks(self.values.len()).enumerate() {
            if part == &self.values[..part.len()] {
                continue;
            }
            for (j, (got, expected)) in part.iter().zip(&self.values).enumerate() {
                let (got, expected) = (got.number(), expected.number());
                let near = (got - expected).abs() <= self.tolerance * expected.abs();
                if got != expected && !near {
                    return Err(Wrong { element: i * self.values.len() + j, got, expected });
                }
            }
        }
        Ok(())
    }
}

/// The largest contribution to a sum.
const LARGEST: i64 = 4;

/// Of how many ranks one brings something to an element of a sum: so many that sums are exact even
/// in bf16, which has 8 bits for them, and so few that every rank brings something somewhere.
fn stride(ranks: u32) -> u32 {
    ranks.div_ceil(64).clamp(1, PERIOD as u32)
}

fn contribution(op: ReduceOp, rank: u32, ranks: u32, i: usize) -> i64 {
    let stride = i64::from(stride(ranks));
    let (rank, i) = (i64::from(rank), (i % PERIOD) as i64);
    match op {
        ReduceOp::Sum | ReduceOp::Average if (i + rank) % stride != 0 => 0,
        ReduceOp::Sum | ReduceOp::Average => 1 + (i * 5 + rank * 3) % LARGEST,
        ReduceOp::Min | ReduceOp::Max => own(rank, i),
        ReduceOp::Product => 1 + i64::from((i + rank) % 16 == 0),
    }
}

fn own(rank: i64, i: i64) -> i64 {
    1 + (i * 7 + rank * 11) % 53
}

#[cfg(test)]
mod tests {
    use gradwire_collectives::kernels::{Combine, Finish, Store, level, reduce_finish_slices};

    use gradwire_proto::DType;

    use super::*;

    /// The reduction as the kernels make it.
    fn reduced<T: Value>(op: ReduceOp, ranks: u32, elements: usize) -> Vec<T> {
        let mut inputs = vec![vec![T::whole(0); elements]; ranks as usize];
        for (rank, input) in inputs.iter_mut().enumerate() {
            Pattern::contribution(op, rank as u32, ranks, 3).fill(input);
        }
        let inputs: Vec<&[u8]> = inputs.iter().map(|input| bytemuck::cast_slice(input)).collect();
        let mut output = vec![T::whole(0); elements];
        let combine = Combine { dtype: T::DTYPE, op };
        let finish = Finish { dtype: T::DTYPE, op, contributors: ranks, postscale: 1.0 };
        let destination: &mut [u8] = bytemuck::cast_slice_mut(&mut output);
        reduce_finish_slices(
            level(),
            combine,
            1.0,
            &finish,
            &mut [destination],
            &inputs,
            Store::Cached,
        )
        .unwrap();
        output
    }

    fn agrees<T: Value>() {
        for &op in ReduceOp::ALL {
            for ranks in [1, 2, 3, 4, 7, 16, 31, 33, 200] {
                let mut output: Vec<T> = reduced(op, ranks, 5000);
                let expected = Pattern::reduction(op, ranks, 3);
                let name = format!("{} {op} of {ranks}", T::DTYPE);
                assert_eq!(expected.check(&output), Ok(()), "{name}");
                if ranks == 3 {
                    let right = output[4321];
                    output[4321] = T::whole(right.number() as i64 + 9);
                    let wrong = expected.check(&output).unwrap_err();
                    assert_eq!((wrong.element, wrong.expected), (4321, right.number()), "{name}");
                }
            }
        }
    }

    #[test]
    fn what_is_expected_is_what_the_kernels_make() {
        for &dtype in DType::ALL {
            with_type!(dtype, agrees());
        }
    }

    #[test]
    fn results_are_not_what_any_rank_brought() {
        for &op in ReduceOp::ALL {
            let result = Pattern::<f32>::reduction(op, 4, 0);
            let mut tensor = vec![0.0; 1000];
            for rank in 0..4 {
                Pattern::contribution(op, rank, 4, 0).fill(&mut tensor);
                assert!(result.check(&tensor).is_err(), "{op} by rank {rank} is no work");
            }
        }
        let mut tensor = vec![0_i8; 100];
        Pattern::own(1).fill(&mut tensor);
        assert_eq!(Pattern::own(1).check(&tensor), Ok(()));
        assert!(Pattern::own(0).check(&tensor).is_err());
    }

    #[test]
    fn a_block_in_another_ones_place_is_seen() {
        let pattern = Pattern::<f32>::reduction(ReduceOp::Sum, 3, 0);
        let mut tensor = vec![0.0; 1 << 16];
        pattern.fill(&mut tensor);
        tensor.copy_within(0..4096, 32768);
        assert!((32768..36864).contains(&pattern.check(&tensor).unwrap_err().element));
    }
}
