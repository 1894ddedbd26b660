//! The right results of collectives, computed in a simple way: in `f64` or in integers, one element
//! at a time, without flows, pieces, schedules and kernels.
//!
//! - [`Dice`]: reproducible random numbers
//! - [`fill`]: the contributions of ranks
//! - [`Reduction`]: checks the reduction of contributions
//! - [`adasum`]: the formula of Adasum
//! - [`mod@counted`]: whole numbers, whose sums are exact and quickly checked
//!
//! It is a crate of its own so that it can be optimised: tests check many megabytes.

#![forbid(unsafe_code)]

pub mod counted;
mod number;

use gradwire_proto::{Collective, Compression, DType, ReduceOp, compression::GROUP};
use rand_xoshiro::{
    SplitMix64,
    rand_core::{Rng, SeedableRng},
};

use self::number::{float, float_bytes, integer, is_short_float, part_of, precision, wrap};

/// A small random number generator. A seed gives the same numbers everywhere.
#[derive(Debug, Clone)]
pub struct Dice(SplitMix64);

impl Dice {
    /// The generator whose seed is made of several numbers.
    pub fn of(parts: &[u64]) -> Self {
        let seed = parts.iter().fold(0, |seed, part| Self::at(seed).roll() ^ part);
        Self::at(seed)
    }

    fn at(seed: u64) -> Self {
        Self(SplitMix64::seed_from_u64(seed))
    }

    /// The next number.
    pub fn roll(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.roll() % bound
    }

    /// True once in `times` times on average.
    pub fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// One of several things, at random.
    pub fn pick<T: Clone>(&mut self, things: &[T]) -> T {
        things[self.below(things.len() as u64) as usize].clone()
    }

    /// Shuffles things.
    pub fn shuffle<T>(&mut self, things: &mut [T]) {
        for end in (1..things.len()).rev() {
            things.swap(end, self.below(end as u64 + 1) as usize);
        }
    }
}

/// The float contributions of ranks. (Integers and truth values have random bits.)
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Values {
    /// -1, 0 and 1. Every type represents the sums of eight of them, so results have no error at
    /// all.
    Exact,
    /// Numbers whose sums and products stay within the range of the smallest float.
    Usual,
    /// Numbers as in `Usual`, infinities, NaN and negative zero.
    Wild,
}

/// All possible contributions.
fn palette(op: ReduceOp, values: Values) -> Vec<f64> {
    const WILD: [f64; 4] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0];
    if values == Values::Exact {
        return vec![-1.0, 0.0, 1.0];
    }
    let usual = |number: u32| match op {
        ReduceOp::Product => 0.75 + f64::from(number) / 512.0,
        _ => (f64::from(number) - 128.0) / 64.0,
    };
    let wild = if values == Values::Wild { 16 } else { 0 };
    (0..257).map(usual).chain(WILD.into_iter().cycle().take(wild)).collect()
}

/// Fills a rank's tensor with random numbers.
pub fn fill(dtype: DType, op: ReduceOp, values: Values, dice: &mut Dice, bytes: &mut [u8]) {
    if dtype == DType::Bool {
        // Any byte but 0 is true.
        bytes.iter_mut().for_each(|byte| *byte = dice.pick(&[0, 0, 0, 1, 1, 2, 0x80, 0xff]));
    } else if dtype.is_float() {
        let part = part_of(dtype);
        let palette: Vec<Vec<u8>> =
            palette(op, values).into_iter().map(|value| float_bytes(part, value)).collect();
        for element in bytes.chunks_exact_mut(part.size()) {
            element.copy_from_slice(&palette[dice.below(palette.len() as u64) as usize]);
        }
    } else {
        for element in bytes.chunks_exact_mut(dtype.size()) {
            element.copy_from_slice(&dice.roll().to_le_bytes()[..dtype.size()]);
        }
    }
}

/// The nodes between contributors.
#[derive(Debug, Clone, Copy)]
pub struct Between {
    /// The largest number of nodes with contributors.
    pub nodes: usize,
    /// The compression of floats of at most 32 bits between these nodes.
    pub compression: Compression,
}

impl Between {
    /// A number of nodes without compression.
    pub fn nodes(nodes: usize) -> Self {
        Self { nodes, compression: Compression::None }
    }
}

/// A reduction to check.
#[derive(Debug, Clone, Copy)]
pub struct Reduction {
    /// Element type.
    pub dtype: DType,
    /// The reduction.
    pub op: ReduceOp,
    /// The factor by which each contribution is multiplied.
    pub prescale: f64,
    /// The factor by which the result is multiplied.
    pub postscale: f64,
    /// Whether the contributions are [`Values::Exact`].
    pub exact: bool,
    /// The nodes between the contributors.
    pub between: Between,
}

impl Reduction {
    /// Compares `result` with the reduction of `inputs`, which are in rank order.
    ///
    /// - Integers are exact. Scaled integers are computed in f64 and truncated.
    /// - The error of a float is at most ((1+u)^k − 1) times the sum of the absolute values of the
    ///   inputs (product: the absolute value). Here u is the unit roundoff, and k is the number of
    ///   roundings: two for each of the n contributions, and some for the scaling and the division.
    ///   Short floats have these roundings in f32, and one in their own type. With bf16 as the wire
    ///   type, there is another rounding to bf16 on each node (product: two).
    /// - With eight bits on the wire, each node and the owner of a block add one error of a group,
    ///   relative to the largest magnitude there. The error feedback of earlier tensors of the same
    ///   name is not known here. Near both ends, a group may contain another tensor, so elements
    ///   there may have any value.
    /// - NaN and infinities are at the same places as in the reference.
    ///
    /// # Errors
    /// The first wrong element.
    pub fn check(&self, inputs: &[&[u8]], result: &[u8]) -> Result<(), String> {
        let given = inputs.first().map_or(0, |input| input.len());
        if result.len() != given {
            return Err(format!("{} bytes instead of {given}", result.len()));
        }
        let part = part_of(self.dtype);
        let size = part.size();
        let lost = self.lost(inputs);
        let elements = given / size;
        for (index, got) in result.chunks_exact(size).enumerate() {
            let parts = inputs.iter().map(|input| &input[index * size..][..size]);
            let right = if part.is_float() {
                let values: Vec<f64> = parts.map(|bytes| float(part, bytes)).collect();
                let is_inner = (GROUP..elements.saturating_sub(GROUP)).contains(&index);
                let lost = lost.map_or(0.0, |lost| if is_inner { lost } else { f64::INFINITY });
                self.check_float(part, &values, float(part, got), lost)
            } else {
                let values: Vec<i128> = parts.map(|bytes| integer(part, bytes)).collect();
                self.check_integer(&values, got)
            };
            right
                .map_err(|why| format!("{} of {}, element {index}: {why}", self.op, self.dtype))?;
        }
        Ok(())
    }

    fn check_integer(&self, values: &[i128], got: &[u8]) -> Result<(), String> {
        let dtype = self.dtype;
        let truth = dtype == DType::Bool;
        let values: Vec<i128> =
            values.iter().map(|&value| scaled(dtype, value, self.prescale, 1)).collect();
        let first = values[0];
        let all = values[1..].iter().fold(first, |all, &value| {
            let both = match self.op {
                ReduceOp::Sum | ReduceOp::Average if truth => all | value,
                ReduceOp::Sum | ReduceOp::Average => all + value,
                ReduceOp::Product => all.wrapping_mul(value),
                ReduceOp::Min => all.min(value),
                ReduceOp::Max => all.max(value),
                ReduceOp::BitAnd => all & value,
                ReduceOp::BitOr => all | value,
                ReduceOp::BitXor => all ^ value,
            };
            wrap(dtype, both)
        });
        let divisor = if self.op == ReduceOp::Average { values.len() as i128 } else { 1 };
        let right = match self.postscale {
            1.0 => all / divisor,
            factor => scaled(dtype, all, factor, divisor),
        };
        // Truth values are returned as 0 or 1.
        let got = if truth { i128::from(got[0]) } else { integer(dtype, got) };
        if got == right {
            Ok(())
        } else {
            Err(format!("{got} instead of {right}, from {values:?}"))
        }
    }

    /// The error of an element on an 8-bit wire; `None` without one. It is infinite if some element
    /// is not finite.
    fn lost(&self, inputs: &[&[u8]]) -> Option<f64> {
        let Self { between: Between { nodes, compression }, dtype, op, .. } = *self;
        let bytes = inputs.first().map_or(0, |input| input.len()) as u64;
        if nodes < 2 || !compression.quantizes(Collective::Allreduce, dtype, op, bytes) {
            return None;
        }
        let largest = |input: &&[u8]| {
            let numbers = input.chunks_exact(dtype.size()).map(|bytes| float(dtype, bytes).abs());
            numbers.fold(0.0, |most: f64, number| {
                most.max(if number.is_nan() { f64::INFINITY } else { number })
            })
        };
        let most: f64 = inputs.iter().map(largest).sum::<f64>() * self.prescale.abs();
        let each = if compression == Compression::Int8 { most / 254.0 } else { most / 16.0 };
        let divisor = if op == ReduceOp::Average { inputs.len() as f64 } else { 1.0 };
        let lost = 1.1 * (nodes as f64 + 1.0) * each * self.postscale.abs() / divisor;
        Some(if lost.is_finite() { lost } else { f64::INFINITY })
    }

    fn check_float(&self, part: DType, values: &[f64], got: f64, lost: f64) -> Result<(), String> {
        let ranks = values.len() as f64;
        let values: Vec<f64> = values.iter().map(|value| value * self.prescale).collect();
        let sum: f64 = values.iter().sum();
        let absolute: f64 = values.iter().map(|value| value.abs()).sum();
        let nan = values.iter().any(|value| value.is_nan());
        let least = |a: f64, b: &f64| if nan { f64::NAN } else { a.min(*b) };
        let greatest = |a: f64, b: &f64| if nan { f64::NAN } else { a.max(*b) };
        let (reduced, magnitude) = match self.op {
            ReduceOp::Average => (sum / ranks, absolute / ranks),
            ReduceOp::Min => (values.iter().fold(f64::INFINITY, least), absolute),
            ReduceOp::Max => (values.iter().fold(f64::NEG_INFINITY, greatest), absolute),
            ReduceOp::Product => {
                let product: f64 = values.iter().product();
                (product, product.abs())
            }
            _ => (sum, absolute),
        };
        let right = reduced * self.postscale;
        let plain = self.prescale == 1.0 && self.postscale == 1.0 && self.op != ReduceOp::Average;
        let same = if lost.is_infinite() {
            true
        } else if !right.is_finite() || (self.exact && plain && lost == 0.0) {
            got == right || (got.is_nan() && right.is_nan())
        } else {
            let (unit, smallest) = precision(part);
            let Between { nodes, compression } = self.between;
            // Short floats are computed in f32 and rounded once, whatever the nodes.
            let (computed, _) = precision(if is_short_float(part) { DType::F32 } else { part });
            let computed = 2.0 * (ranks + 3.0) * computed.ln_1p();
            let (mut logarithm, mut least) = if is_short_float(part) {
                (computed + unit.ln_1p(), smallest)
            } else {
                (computed, 2.0 * (ranks + 3.0) * smallest)
            };
            let travels = is_short_float(part) || self.dtype == DType::F32;
            if compression == Compression::Bf16 && travels && nodes > 1 {
                let (unit, smallest) = precision(DType::Bf16);
                // In a product, every rounding counts for every factor, including the roundings of
                // the other factors.
                let ways = if self.op == ReduceOp::Product { 2.0 } else { 1.0 };
                logarithm += ways * nodes as f64 * unit.ln_1p();
                least += ways * nodes as f64 * smallest;
            }
            let post = self.postscale.abs();
            let bound = logarithm.exp_m1() * magnitude * post + least * post.max(1.0);
            (got - right).abs() <= bound + lost
        };
        if same { Ok(()) } else { Err(format!("{got:e} instead of {right:e}, from {values:?}")) }
    }
}

/// An integer times a factor: the product in f64, truncated to the type's range.
fn scaled(dtype: DType, value: i128, factor: f64, divisor: i128) -> i128 {
    if factor == 1.0 {
        return value;
    }
    let product = value as f64 * factor / divisor as f64;
    let bits = 8 * dtype.size() as u32;
    let range = match wrap(dtype, -1) {
        -1 => -(1i128 << (bits - 1))..=(1i128 << (bits - 1)) - 1,
        _ => 0..=(1i128 << bits) - 1,
    };
    (product as i128).clamp(*range.start(), *range.end())
}

/// Adasum by its formula (docs/collectives.md): ranks are combined in pairs, then pairs in pairs.
/// An odd one waits for the next level.
pub fn adasum(mut vectors: Vec<Vec<f64>>) -> Vec<f64> {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    while vectors.len() > 1 {
        let pairs = vectors.chunks(2).map(|pair| {
            let [a, b] = pair else { return pair[0].clone() };
            let common = dot(a, b);
            let factor = |norm: f64| if norm == 0.0 { 1.0 } else { 1.0 - common / (2.0 * norm) };
            let (of_a, of_b) = (factor(dot(a, a)), factor(dot(b, b)));
            a.iter().zip(b).map(|(a, b)| of_a * a + of_b * b).collect()
        });
        vectors = pairs.collect();
    }
    vectors.remove(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(dtype: DType, value: f64) -> Vec<u8> {
        let part = part_of(dtype);
        if part.is_float() {
            return float_bytes(part, value).repeat(dtype.size() / part.size());
        }
        (value as i128).to_le_bytes()[..dtype.size()].to_vec()
    }

    #[test]
    fn a_wrong_result_is_noticed() {
        let cases = [
            (DType::I8, ReduceOp::Sum, [100.0, 100.0], -56.0),
            (DType::U8, ReduceOp::Average, [200.0, 100.0], 22.0),
            (DType::U64, ReduceOp::Max, [-1.0, 5.0], -1.0),
            (DType::I16, ReduceOp::BitXor, [12.0, 10.0], 6.0),
            (DType::I32, ReduceOp::Product, [-3.0, 5.0], -15.0),
            (DType::Bool, ReduceOp::Sum, [2.0, 0.0], 1.0),
            (DType::Bool, ReduceOp::Product, [2.0, 4.0], 1.0),
            (DType::F8E4m3, ReduceOp::Sum, [1.0, 3.0], 4.0),
            (DType::F8E5m2, ReduceOp::Max, [f64::INFINITY, 3.0], f64::INFINITY),
            (DType::F16, ReduceOp::Average, [1.0, 2.0], 1.5),
            (DType::Bf16, ReduceOp::Min, [1.0, -2.0], -2.0),
            (DType::F32, ReduceOp::Max, [f64::NAN, 3.0], f64::NAN),
            (DType::F64, ReduceOp::Sum, [f64::INFINITY, 3.0], f64::INFINITY),
            (DType::C64, ReduceOp::Sum, [1.0, -4.0], -3.0),
        ];
        for (dtype, op, inputs, right) in cases {
            let between = Between::nodes(1);
            let reduction =
                Reduction { dtype, op, prescale: 1.0, postscale: 1.0, exact: false, between };
            let inputs = inputs.map(|value| bytes(dtype, value));
            let check = |result| reduction.check(&[&inputs[0], &inputs[1]], &bytes(dtype, result));
            assert_eq!(check(right), Ok(()));
            assert!(
                check(if right.is_finite() { right + 2.0 } else { 0.0 }).is_err(),
                "{dtype} {op}"
            );
        }
    }

    /// The error of bf16 is accepted only with compression.
    #[test]
    fn rounding_on_the_wire_is_not_a_mistake() {
        let check = |dtype, nodes, compression, got: f64| {
            let between = Between { nodes, compression };
            let op = ReduceOp::Sum;
            let reduction =
                Reduction { dtype, op, prescale: 1.0, postscale: 1.0, exact: false, between };
            let [a, b] = [1.0, 0.01].map(|value| bytes(dtype, value));
            reduction.check(&[&a, &b], &bytes(dtype, got)).is_ok()
        };
        // The neighbours of 1.01 in bf16 are 1.0078125 and 1.015625.
        let (near, far) = (1.0078125, 1.03125);
        assert!(check(DType::F32, 2, Compression::Bf16, near));
        assert!(!check(DType::F32, 2, Compression::Bf16, far));
        assert!(!check(DType::F32, 1, Compression::Bf16, near));
        assert!(!check(DType::F32, 2, Compression::None, near));
        assert!(!check(DType::F64, 2, Compression::Bf16, near));
        assert!(!check(DType::C64, 2, Compression::Bf16, near));
        assert!(!check(DType::F32, 2, Compression::Int8, near), "it is too small for quantization");
    }

    /// The error of eight bits is accepted in large tensors, relative to the largest element.
    #[test]
    fn quantization_is_not_a_mistake() {
        let values = |at: usize| if at == 9000 { 100.0 } else { 1.0 };
        let input: Vec<u8> = (0..20_000).flat_map(|at| bytes(DType::F32, values(at))).collect();
        let check = |compression, nodes, op, at: usize, off: f64| {
            let between = Between { nodes, compression };
            let reduction = Reduction {
                dtype: DType::F32,
                op,
                prescale: 1.0,
                postscale: 1.0,
                exact: true,
                between,
            };
            let all = if op == ReduceOp::Sum { 2.0 } else { 1.0 };
            let wrong = |index| if index == at { off } else { 0.0 };
            let result = (0..20_000).flat_map(|i| bytes(DType::F32, all * values(i) + wrong(i)));
            reduction.check(&[&input, &input], &result.collect::<Vec<u8>>()).is_ok()
        };
        use Compression::{Fp8, Int8};
        use ReduceOp::{Average, Max, Sum};
        assert!(check(Int8, 2, Sum, 5000, 2.0));
        assert!(!check(Int8, 2, Sum, 5000, 4.0));
        assert!(check(Int8, 2, Average, 5000, 1.0));
        assert!(!check(Int8, 2, Average, 5000, 2.0));
        assert!(check(Fp8, 2, Sum, 5000, 30.0));
        assert!(!check(Fp8, 2, Sum, 5000, 60.0));
        assert!(!check(Int8, 2, Max, 5000, 0.5) && !check(Int8, 1, Sum, 5000, 0.5));
        assert!(check(Int8, 2, Sum, 3, 1000.0), "another tensor's group");
    }

    /// Adasum of two equal vectors is that vector; of two orthogonal vectors it is their sum.
    #[test]
    fn adasum_removes_the_common_part_of_vectors() {
        assert_eq!(adasum(vec![vec![2.0, 1.0]; 5]), [2.0, 1.0]);
        assert_eq!(adasum(vec![vec![2.0, 0.0], vec![0.0, 3.0]]), [2.0, 3.0]);
        assert_eq!(adasum(vec![vec![0.0, 0.0], vec![1.0, 3.0]]), [1.0, 3.0]);
    }
}
