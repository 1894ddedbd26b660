//! The contents of tensors before a collective, and the right contents after it.
//!
//! Values are small whole numbers. All types represent them exactly except the 8-bit floats, which
//! round expected values as they round inputs. Sums are exact in bf16, too, which may be the wire
//! type of f32. Values repeat with a period that is not a power of two, so that misplaced blocks
//! are noticed. Patterns are one period long, so filling and checking cost no more than reading the
//! tensor.

use gradwire_proto::{Collective, DType, ReduceOp};
use gradwire_worker::{Compression, Session};

use super::element::Kind;

/// The period of values, in elements. It is prime, so no power of two is a multiple.
const PERIOD: usize = 61;

/// The number of stored periods, so that elements are copied and compared in longer runs.
const REPEAT: usize = 64;

/// One period of values, repeated.
#[derive(Debug, Clone)]
pub struct Pattern {
    kind: Kind,
    /// The bytes of the elements.
    values: Vec<u8>,
    /// The allowed relative error; 0 if arithmetic is exact.
    tolerance: f64,
    /// The additional allowed absolute error.
    lost: f64,
}

/// An element with a wrong value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Wrong {
    /// The index of the element.
    pub element: usize,
    /// Its value.
    pub got: f64,
    /// The right value.
    pub expected: f64,
}

impl Pattern {
    /// `append` appends the element with an index.
    fn new(kind: Kind, tolerance: f64, append: impl Fn(usize, &mut Vec<u8>)) -> Self {
        let mut period = Vec::with_capacity(PERIOD * kind.dtype.size());
        (0..PERIOD).for_each(|index| append(index, &mut period));
        Self { kind, values: period.repeat(REPEAT), tolerance, lost: 0.0 }
    }

    /// The contribution of rank `rank` of `ranks` to a reduction. `salt` varies several tensors.
    pub fn contribution(dtype: DType, op: ReduceOp, rank: u32, ranks: u32, salt: usize) -> Self {
        let kind = Kind::of(dtype);
        let stride = stride(kind, ranks);
        Self::new(kind, 0.0, |i, to| (kind.whole)(contribution(op, rank, stride, i + salt), to))
    }

    /// The reduction of `ranks` contributions.
    pub fn reduction(dtype: DType, op: ReduceOp, ranks: u32, salt: usize) -> Self {
        let kind = Kind::of(dtype);
        let stride = stride(kind, ranks);
        let tolerance = match op {
            ReduceOp::Sum => rounding(kind, ranks, 0.0),
            // The division rounds. It rounds twice if the sum was sent in a shorter type.
            ReduceOp::Average => rounding(kind, ranks, 2.0 * kind.epsilon),
            _ => 0.0,
        };
        Self::new(kind, tolerance, |i, to| {
            let mut all = (0..ranks).map(|rank| contribution(op, rank, stride, i + salt));
            (kind.reduced)(op, &mut all, ranks, to);
        })
    }

    /// The same reduction of tensors of `elements` elements in a job with this compression. In an
    /// 8-bit wire format, each node and the owner of a block lose a part of the largest value
    /// there, and as much as they lost the time before.
    pub fn compressed(self, op: ReduceOp, session: &Session, elements: usize) -> Self {
        let (nodes, compression) = (session.nodes().len(), session.compression());
        let dtype = self.kind.dtype;
        let bytes = (elements * dtype.size()) as u64;
        if nodes < 2 || !compression.quantizes(Collective::Allreduce, dtype, op, bytes) {
            return self;
        }
        let unit = if compression == Compression::Int8 { 254.0 } else { 16.0 };
        let ranks = if op == ReduceOp::Average { 1.0 } else { f64::from(session.size()) };
        let lost = 2.2 * (nodes as f64 + 1.0) * ranks * LARGEST as f64 / unit;
        Self { lost, ..self }
    }

    /// The input of a rank that is moved and not reduced. It equals that of the rank [`OWNERS`]
    /// before.
    pub fn own(dtype: DType, rank: u32) -> Self {
        let kind = Kind::of(dtype);
        Self::new(kind, 0.0, |i, to| (kind.whole)(own(i64::from(rank), i as i64), to))
    }

    /// Fills a tensor.
    pub fn fill(&self, tensor: &mut [u8]) {
        for part in tensor.chunks_mut(self.values.len()) {
            part.copy_from_slice(&self.values[..part.len()]);
        }
    }

    /// Checks every element of a tensor whose first element has position `from` in the pattern.
    ///
    /// # Errors
    /// The first wrong element.
    pub fn check(&self, tensor: &[u8], from: usize) -> Result<(), Wrong> {
        let size = self.kind.dtype.size();
        // One stored period less, so that a run can begin at any element of the first period.
        let stretch = self.values.len() - PERIOD * size;
        let values = &self.values[from % PERIOD * size..][..stretch];
        for (i, part) in tensor.chunks(stretch).enumerate() {
            if part == &values[..part.len()] {
                continue;
            }
            let elements = part.chunks_exact(size).zip(values.chunks_exact(size)).enumerate();
            for (j, (got, expected)) in elements.filter(|(_, (got, expected))| got != expected) {
                let numbers = self.kind.numbers;
                for (got, expected) in numbers(got).into_iter().zip(numbers(expected)) {
                    let near =
                        (got - expected).abs() <= self.tolerance * expected.abs() + self.lost;
                    // A value that exceeds a type's range may become NaN.
                    let both_nan = got.is_nan() && expected.is_nan();
                    if got != expected && !near && !both_nan {
                        return Err(Wrong { element: i * stretch / size + j, got, expected });
                    }
                }
            }
        }
        Ok(())
    }
}

/// The relative error of a sum: at least `least`, and more if sums are too large to be exact,
/// because each addition may round.
fn rounding(kind: Kind, ranks: u32, least: f64) -> f64 {
    let largest = f64::from(ranks.div_ceil(stride(kind, ranks))) * LARGEST as f64;
    if kind.epsilon == 0.0 || largest <= 2.0 / kind.epsilon {
        return least;
    }
    (f64::from(ranks) * kind.epsilon).max(least)
}

/// The largest contribution to a sum.
const LARGEST: i64 = 4;

/// For each element of a sum, one in this many ranks contributes. It is large enough for exact sums
/// even in the shortest floats (64 ranks in bf16, which has 8 significant bits, and 2 in f8e5m2),
/// and small enough for every rank to contribute to some element.
fn stride(kind: Kind, ranks: u32) -> u32 {
    let exact = (2.0 / kind.epsilon / LARGEST as f64).clamp(1.0, 64.0);
    ranks.div_ceil(exact as u32).clamp(1, PERIOD as u32)
}

fn contribution(op: ReduceOp, rank: u32, stride: u32, i: usize) -> i64 {
    let stride = i64::from(stride);
    let (rank, i) = (i64::from(rank), (i % PERIOD) as i64);
    match op {
        ReduceOp::Sum | ReduceOp::Average if (i + rank) % stride != 0 => 0,
        ReduceOp::Sum | ReduceOp::Average => 1 + (i * 5 + rank * 3) % LARGEST,
        ReduceOp::Min | ReduceOp::Max | ReduceOp::BitOr | ReduceOp::BitXor => own(rank, i),
        ReduceOp::Product => 1 + i64::from((i + rank) % 16 == 0),
        // Few bits are 0, so some bits remain for any number of ranks.
        ReduceOp::BitAnd => 127 & !(i64::from((i + rank) % 16 == 0) << (i % 7)),
    }
}

/// The number of ranks with distinct values.
pub const OWNERS: u32 = 53;

fn own(rank: i64, i: i64) -> i64 {
    1 + (i * 7 + rank * 11) % i64::from(OWNERS)
}

#[cfg(test)]
mod tests {
    use gradwire_kernels::{Combine, Finish, Store, level, reduce_finish_slices};

    use super::*;

    /// The reduction, as the kernels compute it.
    fn reduced(dtype: DType, op: ReduceOp, ranks: u32, elements: usize) -> Vec<u8> {
        let mut inputs = vec![vec![0; elements * dtype.size()]; ranks as usize];
        for (rank, input) in inputs.iter_mut().enumerate() {
            Pattern::contribution(dtype, op, rank as u32, ranks, 3).fill(input);
        }
        let inputs: Vec<&[u8]> = inputs.iter().map(|input| &input[..]).collect();
        let mut output = vec![0; elements * dtype.size()];
        let combine = Combine { dtype, op };
        let finish = Finish { dtype, op, contributors: ranks, postscale: 1.0 };
        let destinations = &mut [&mut output[..]];
        reduce_finish_slices(level(), combine, 1.0, &finish, destinations, &inputs, Store::Cached)
            .unwrap();
        output
    }

    #[test]
    fn expected_values_agree_with_the_kernels() {
        for &dtype in DType::ALL {
            let (kind, size) = (Kind::of(dtype), dtype.size());
            for &op in ReduceOp::ALL.iter().filter(|op| op.refuses(dtype).is_none()) {
                for ranks in [1, 2, 3, 4, 7, 16, 31, 33, 200] {
                    let mut output = reduced(dtype, op, ranks, 5000);
                    let expected = Pattern::reduction(dtype, op, ranks, 3);
                    let name = format!("{dtype} {op} of {ranks}");
                    assert_eq!(expected.check(&output, 0), Ok(()), "{name}");
                    if ranks == 3 {
                        let element = &mut output[4321 * size..][..size];
                        let right = (kind.numbers)(element)[0];
                        let mut other = Vec::new();
                        (kind.whole)(right as i64 + 9, &mut other);
                        element.copy_from_slice(&other);
                        let wrong = expected.check(&output, 0).unwrap_err();
                        assert_eq!((wrong.element, wrong.expected), (4321, right), "{name}");
                    }
                }
            }
        }
    }

    /// So results are exact even if f32 is sent as bf16.
    #[test]
    fn sums_of_f32_are_exact_in_bf16() {
        for ranks in [2, 4, 31, 64, 65, 200, 4096] {
            for salt in 0..PERIOD {
                let sums = Pattern::reduction(DType::F32, ReduceOp::Sum, ranks, salt);
                let exact = |sum: &[u8]| {
                    let sum = bytemuck::pod_read_unaligned::<f32>(sum);
                    gradwire_worker::half::bf16::from_f32(sum).to_f32() == sum
                };
                assert!(sums.values.chunks(4).all(exact), "{ranks} ranks");
            }
        }
    }

    #[test]
    fn results_differ_from_every_contribution() {
        let dtype = DType::F32;
        for &op in ReduceOp::ALL {
            let result = Pattern::reduction(dtype, op, 4, 0);
            let mut tensor = vec![0; 4000];
            for rank in 0..4 {
                Pattern::contribution(dtype, op, rank, 4, 0).fill(&mut tensor);
                assert!(result.check(&tensor, 0).is_err(), "{op} by rank {rank} equals the result");
            }
        }
        let own = |rank| Pattern::own(DType::I8, rank);
        let mut tensor = vec![0; 100];
        own(1).fill(&mut tensor);
        assert_eq!(own(1).check(&tensor, 0), Ok(()));
        assert!(own(0).check(&tensor, 0).is_err());
    }

    #[test]
    fn a_misplaced_block_is_noticed() {
        let pattern = Pattern::reduction(DType::F32, ReduceOp::Sum, 3, 0);
        let mut tensor = vec![0; 4 << 16];
        pattern.fill(&mut tensor);
        tensor.copy_within(0..4 * 4096, 4 * 32768);
        assert!((32768..36864).contains(&pattern.check(&tensor, 0).unwrap_err().element));
    }

    #[test]
    fn a_range_begins_anywhere_in_the_pattern() {
        let pattern = Pattern::own(DType::I32, 3);
        let mut tensor = vec![0; 80_000];
        pattern.fill(&mut tensor);
        for from in [0, 1, 60, 61, 4096, 12_345] {
            assert_eq!(pattern.check(&tensor[4 * from..], from), Ok(()), "from {from}");
            assert!(pattern.check(&tensor[4 * from..], from + 1).is_err(), "from {from}");
        }
    }
}
