//! What a collective must give, computed in the plainest way: in `f64` or in integers, one element
//! after the other, knowing nothing of pieces, schedules and kernels.

use gradwire_proto::{DType, ReduceOp, Request};
use half::{bf16, f16};

/// A small generator of numbers (splitmix64): the same seed gives the same numbers everywhere.
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    /// A generator for a thing that several numbers name.
    pub fn of(parts: &[u64]) -> Self {
        parts.iter().fold(Self(0), |dice, part| Self(dice.clone().roll() ^ part))
    }

    /// The next number.
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.roll() % bound
    }

    /// Puts things in another order.
    pub fn shuffle<T>(&mut self, things: &mut [T]) {
        for end in (1..things.len()).rev() {
            things.swap(end, self.below(end as u64 + 1) as usize);
        }
    }
}

/// How precise a float type is: its unit roundoff, and the smallest number above zero.
fn precision(dtype: DType) -> (f64, f64) {
    match dtype {
        DType::F16 => (2f64.powi(-11), 2f64.powi(-24)),
        DType::Bf16 => (2f64.powi(-8), 2f64.powi(-133)),
        DType::F32 => (2f64.powi(-24), 2f64.powi(-149)),
        _ => (2f64.powi(-53), f64::MIN_POSITIVE),
    }
}

fn float(dtype: DType, bytes: &[u8]) -> f64 {
    match (dtype, bytes) {
        (DType::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f64(),
        (DType::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f64(),
        (DType::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]).into(),
        (DType::F64, _) => f64::from_bits(integer(DType::I64, bytes).cast_unsigned()),
        _ => unreachable!("{dtype} of {} bytes", bytes.len()),
    }
}

fn put_float(dtype: DType, value: f64, bytes: &mut [u8]) {
    match dtype {
        DType::F16 => bytes.copy_from_slice(&f16::from_f64(value).to_le_bytes()),
        DType::Bf16 => bytes.copy_from_slice(&bf16::from_f64(value).to_le_bytes()),
        DType::F32 => bytes.copy_from_slice(&(value as f32).to_le_bytes()),
        _ => bytes.copy_from_slice(&value.to_le_bytes()),
    }
}

fn integer(dtype: DType, bytes: &[u8]) -> i64 {
    let mut wide = [0; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    wrap(dtype, i64::from_le_bytes(wide))
}

/// The value that an integer type holds after it has wrapped around.
fn wrap(dtype: DType, value: i64) -> i64 {
    match dtype {
        DType::I8 => i64::from(value as i8),
        DType::U8 => i64::from(value as u8),
        DType::I32 => i64::from(value as i32),
        _ => value,
    }
}

/// Numbers whose sums and products stay within the range of the smallest float; where `wild`, also
/// infinities, NaN and the negative zero.
fn some_float(op: ReduceOp, wild: bool, dice: &mut Dice) -> f64 {
    const WILD: [f64; 4] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0];
    if wild && dice.below(16) == 0 {
        return WILD[dice.below(4) as usize];
    }
    let number = dice.below(257) as f64;
    if op == ReduceOp::Product { 0.75 + number / 512.0 } else { (number - 128.0) / 64.0 }
}

/// Fills a rank's tensor with numbers of its own.
pub fn fill(dtype: DType, op: ReduceOp, wild: bool, dice: &mut Dice, bytes: &mut [u8]) {
    for element in bytes.chunks_exact_mut(dtype.size()) {
        if dtype.is_float() {
            put_float(dtype, some_float(op, wild, dice), element);
        } else {
            element.copy_from_slice(&dice.roll().to_le_bytes()[..dtype.size()]);
        }
    }
}

/// Checks the result of an allreduce of `inputs`, by rank. Integers are exact. For floats, with n
/// ranks and the unit roundoff u, the error is at most 2(n+3)·u times the sum of the absolute
/// values (product: the absolute value) that were reduced: one rounding for each of the n scaled
/// inputs' sums, some for the scaling, the division and the hops, and as much again for the
/// reference's own. NaN and infinities are where the reference has them.
///
/// # Errors
/// With the first element that is wrong.
pub fn check_allreduce(request: &Request, inputs: &[Vec<u8>], result: &[u8]) -> Result<(), String> {
    let size = request.dtype.size();
    if result.len() as u64 != request.bytes() {
        return Err(format!("{} bytes instead of {}", result.len(), request.bytes()));
    }
    for (index, got) in result.chunks_exact(size).enumerate() {
        let parts = inputs.iter().map(|input| &input[index * size..(index + 1) * size]);
        let right = if request.dtype.is_float() {
            check_float(request, parts, float(request.dtype, got))
        } else {
            check_integer(request, parts, integer(request.dtype, got))
        };
        right.map_err(|why| {
            format!("{} of {}, element {index}: {why}", request.reduce_op, request.dtype)
        })?;
    }
    Ok(())
}

fn check_integer<'a>(
    request: &Request,
    parts: impl ExactSizeIterator<Item = &'a [u8]>,
    got: i64,
) -> Result<(), String> {
    let dtype = request.dtype;
    let ranks = parts.len() as i64;
    let values = parts.map(|part| integer(dtype, part));
    let all = match request.reduce_op {
        ReduceOp::Sum | ReduceOp::Average => values.fold(0, i64::wrapping_add),
        ReduceOp::Product => values.fold(1, i64::wrapping_mul),
        ReduceOp::Min => values.min().unwrap_or_default(),
        ReduceOp::Max => values.max().unwrap_or_default(),
    };
    let all = wrap(dtype, all);
    let right = if request.reduce_op == ReduceOp::Average { all / ranks } else { all };
    if got == right { Ok(()) } else { Err(format!("{got} instead of {right}")) }
}

fn check_float<'a>(
    request: &Request,
    parts: impl ExactSizeIterator<Item = &'a [u8]>,
    got: f64,
) -> Result<(), String> {
    let ranks = parts.len() as f64;
    let values: Vec<f64> =
        parts.map(|part| float(request.dtype, part) * request.prescale).collect();
    let sum: f64 = values.iter().sum();
    let absolute: f64 = values.iter().map(|value| value.abs()).sum();
    let nan = values.iter().any(|value| value.is_nan());
    let least = |a: f64, b: &f64| if nan { f64::NAN } else { a.min(*b) };
    let greatest = |a: f64, b: &f64| if nan { f64::NAN } else { a.max(*b) };
    let (reduced, magnitude) = match request.reduce_op {
        ReduceOp::Sum => (sum, absolute),
        ReduceOp::Average => (sum / ranks, absolute / ranks),
        ReduceOp::Min => (values.iter().fold(f64::INFINITY, least), absolute),
        ReduceOp::Max => (values.iter().fold(f64::NEG_INFINITY, greatest), absolute),
        ReduceOp::Product => {
            let product: f64 = values.iter().product();
            (product, product.abs())
        }
    };
    let right = reduced * request.postscale;
    let same = if right.is_finite() {
        let (unit, smallest) = precision(request.dtype);
        let post = request.postscale.abs();
        let bound = (ranks + 3.0) * (2.0 * unit * magnitude * post + smallest * post.max(1.0));
        (got - right).abs() <= bound
    } else {
        got == right || (got.is_nan() && right.is_nan())
    };
    if same { Ok(()) } else { Err(format!("{got:e} instead of {right:e}, from {values:?}")) }
}

#[cfg(test)]
mod tests {
    use gradwire_proto::Shape;

    use super::*;

    fn one(dtype: DType, op: ReduceOp, values: &[f64]) -> (Request, Vec<Vec<u8>>) {
        let request = Request::allreduce(dtype, Shape::new(&[1]).unwrap(), op);
        let put = |value: &f64| {
            let mut bytes = vec![0; dtype.size()];
            if dtype.is_float() {
                put_float(dtype, *value, &mut bytes);
            } else {
                bytes.copy_from_slice(&(*value as i64).to_le_bytes()[..dtype.size()]);
            }
            bytes
        };
        (request, values.iter().map(put).collect())
    }

    #[test]
    fn a_wrong_result_is_seen() {
        let cases = [
            (DType::I8, ReduceOp::Sum, [100.0, 100.0], -56.0),
            (DType::U8, ReduceOp::Average, [200.0, 100.0], 22.0),
            (DType::I32, ReduceOp::Product, [-3.0, 5.0], -15.0),
            (DType::F16, ReduceOp::Average, [1.0, 2.0], 1.5),
            (DType::Bf16, ReduceOp::Min, [1.0, -2.0], -2.0),
            (DType::F32, ReduceOp::Max, [f64::NAN, 3.0], f64::NAN),
            (DType::F64, ReduceOp::Sum, [f64::INFINITY, 3.0], f64::INFINITY),
        ];
        for (dtype, op, inputs, right) in cases {
            let (request, bytes) = one(dtype, op, &inputs);
            let (_, result) = one(dtype, op, &[right]);
            assert_eq!(check_allreduce(&request, &bytes, &result[0]), Ok(()));
            let (_, wrong) = one(dtype, op, &[if right.is_finite() { right + 1.0 } else { 0.0 }]);
            assert!(check_allreduce(&request, &bytes, &wrong[0]).is_err(), "{dtype} {op}");
        }
    }
}
