//! Compares the reference with the definition for integers, truth values, complex numbers and 8-bit
//! floats, element by element. Other tests compare the other levels with the reference.

use gradwire_kernels::{Combine, Finish, Level, Store, level, reduce_finish_slices, reduce_slices};
use gradwire_proto::{DType, F8E4m3, F8E5m2, ReduceOp};
use rand::{Rng, RngExt, SeedableRng};
use rand_xoshiro::SplitMix64;

/// One element of each input, reduced and finished by the reference.
fn reduced<const N: usize>(
    dtype: DType,
    op: ReduceOp,
    contributors: u32,
    inputs: &[[u8; N]],
) -> [u8; N] {
    let slices: Vec<&[u8]> = inputs.iter().map(|input| &input[..]).collect();
    let finish = Finish { dtype, op, contributors, postscale: 1.0 };
    let mut out = [0xa5; N];
    let (combine, dsts) = (Combine { dtype, op }, &mut [&mut out[..]]);
    let store = Store::Cached;
    reduce_finish_slices(Level::Scalar, combine, 1.0, &finish, dsts, &slices, store).unwrap();
    out
}

macro_rules! integers {
    ($($int:ident $dtype:ident),+) => {
        /// Sums and products wrap, averages are the wrapped sum divided and truncated, for values
        /// of all sizes and every width.
        #[test]
        fn integers_are_reduced_as_integers() {
            let seed = 31;
            let mut random = SplitMix64::seed_from_u64(seed);
            for _ in 0..3000 {
                let inputs = 2 + random.random_range(0..5);
                let by = [2, 3, 7, 1000, u32::MAX][random.random_range(0..5)];
                let shifts = [0, 32, 56, 60];
                let draws: Vec<u64> =
                    (0..inputs)
                        .map(|_| random.next_u64() >> shifts[random.random_range(0..4)])
                        .collect();
                $({
                    let values: Vec<$int> = draws.iter().map(|&draw| draw as $int).collect();
                    let bytes: Vec<_> = values.iter().map(|v| v.to_ne_bytes()).collect();
                    let is = |op| $int::from_ne_bytes(reduced(DType::$dtype, op, by, &bytes));
                    let all = |with: fn($int, $int) -> $int| {
                        values.iter().copied().reduce(with).unwrap()
                    };
                    let sum = all(<$int>::wrapping_add);
                    let average = (i128::from(sum) / i128::from(by)) as $int;
                    for (op, should) in [
                        (ReduceOp::Sum, sum),
                        (ReduceOp::Average, average),
                        (ReduceOp::Min, all(Ord::min)),
                        (ReduceOp::Max, all(Ord::max)),
                        (ReduceOp::Product, all(<$int>::wrapping_mul)),
                        (ReduceOp::BitAnd, all(|a, b| a & b)),
                        (ReduceOp::BitOr, all(|a, b| a | b)),
                        (ReduceOp::BitXor, all(|a, b| a ^ b)),
                    ] {
                        let dtype = DType::$dtype;
                        assert_eq!(is(op), should, "{op} of {dtype} {values:?}, seed {seed}");
                    }
                })+
            }
        }
    };
}

integers!(i8 I8, u8 U8, i16 I16, u16 U16, i32 I32, u32 U32, i64 I64, u64 U64);

#[test]
fn integers_wrap_and_averages_truncate() {
    let run = |op, inputs: &[i8], contributors| {
        let bytes: Vec<[u8; 1]> = inputs.iter().map(|v| v.to_ne_bytes()).collect();
        let slices: Vec<&[u8]> = bytes.iter().map(|b| &b[..]).collect();
        let dtype = DType::I8;
        let finish = Finish { dtype, op, contributors, postscale: 1.0 };
        let mut out = [0];
        let (combine, dsts) = (Combine { dtype, op }, &mut [&mut out[..]]);
        reduce_finish_slices(level(), combine, 1.0, &finish, dsts, &slices, Store::Cached).unwrap();
        out[0] as i8
    };
    assert_eq!(run(ReduceOp::Sum, &[127, 1], 2), -128);
    assert_eq!(run(ReduceOp::Product, &[16, 17], 2), 16);
    assert_eq!(run(ReduceOp::Average, &[-3, -4], 2), -3, "-7 / 2 is truncated");
    assert_eq!(run(ReduceOp::Average, &[3, 4], 2), 3);
    assert_eq!(run(ReduceOp::Average, &[-128], 1), -128);
    assert_eq!(run(ReduceOp::Average, &[100, 20], u32::MAX), 0);
    assert_eq!(run(ReduceOp::Min, &[-128, 127], 2), -128);
    assert_eq!(run(ReduceOp::Max, &[-128, 127], 2), 127);
}

macro_rules! scaled_integers {
    ($($int:ident $dtype:ident),+) => {
        /// Integers are scaled in f64 and truncated, for each contribution and for the result, over
        /// more than one tile; values that are too large saturate.
        #[test]
        #[expect(clippy::cast_lossless, reason = "the casts are of all widths")]
        fn factors_of_integers_are_applied_in_f64() {
            let seed = 33;
            let mut random = SplitMix64::seed_from_u64(seed);
            let factors = [1.0, 0.5, -2.0, 1.0 / 3.0, 1e300];
            $(for op in
                [ReduceOp::Sum, ReduceOp::Average, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product]
            {
                let mut factor = || factors[random.random_range(0..5)];
                let (prescale, postscale) = (factor(), factor());
                let (count, by) = (1 + random.random_range(0..2500), 1 + random.random_range(0..6));
                let mut draw = || random.next_u64() >> [0, 32, 56, 60][random.random_range(0..4)];
                let inputs: Vec<Vec<$int>> =
                    (0..by).map(|_| (0..count).map(|_| draw() as $int).collect()).collect();
                let bytes: Vec<Vec<u8>> = inputs
                    .iter()
                    .map(|input| input.iter().flat_map(|value| value.to_ne_bytes()).collect())
                    .collect();
                let slices: Vec<&[u8]> = bytes.iter().map(|input| &input[..]).collect();
                let dtype = DType::$dtype;
                let finish = Finish { dtype, op, contributors: by as u32, postscale };
                let mut out = vec![0; bytes[0].len()];
                let (combine, dsts) = (Combine { dtype, op }, &mut [&mut out[..]]);
                let store = [Store::Cached, Store::Streaming][random.random_range(0..2)];
                reduce_finish_slices(level(), combine, prescale, &finish, dsts, &slices, store)
                    .unwrap();
                let times = |value: $int, factor: f64, by: f64| match factor {
                    1.0 => value,
                    factor => (value as f64 * factor / by) as $int,
                };
                for (at, is) in out.chunks(size_of::<$int>()).enumerate() {
                    let all = inputs.iter().map(|input| times(input[at], prescale, 1.0));
                    let all = all.reduce(|a, b| match op {
                        ReduceOp::Min => a.min(b),
                        ReduceOp::Max => a.max(b),
                        ReduceOp::Product => a.wrapping_mul(b),
                        _ => a.wrapping_add(b),
                    });
                    let all = all.unwrap();
                    let by = if op == ReduceOp::Average { by } else { 1 };
                    let should = match postscale {
                        1.0 => (all as i128 / by as i128) as $int,
                        factor => times(all, factor, by as f64),
                    };
                    let is = $int::from_ne_bytes(is.try_into().unwrap());
                    let values: Vec<_> = inputs.iter().map(|input| input[at]).collect();
                    assert_eq!(
                        is, should,
                        "{op} of {dtype} {values:?}, factors {prescale} and {postscale}, \
                         seed {seed}"
                    );
                }
            })+
        }
    };
}

scaled_integers!(i8 I8, u8 U8, i16 I16, u16 U16, i32 I32, u32 U32, i64 I64, u64 U64);

/// As in Horovod: 7 and -7 are halved to 3 and -3. A scaled average that is a whole number is
/// exact, even if 1/n is not.
#[test]
fn scaled_integers_are_truncated_towards_zero() {
    let run = |op, prescale, postscale, inputs: &[i64]| {
        let bytes: Vec<[u8; 8]> = inputs.iter().map(|v| v.to_ne_bytes()).collect();
        let slices: Vec<&[u8]> = bytes.iter().map(|b| &b[..]).collect();
        let dtype = DType::I64;
        let finish = Finish { dtype, op, contributors: inputs.len() as u32, postscale };
        let mut out = [0; 8];
        let (combine, dsts) = (Combine { dtype, op }, &mut [&mut out[..]]);
        let store = Store::Cached;
        reduce_finish_slices(level(), combine, prescale, &finish, dsts, &slices, store).unwrap();
        i64::from_ne_bytes(out)
    };
    assert_eq!(run(ReduceOp::Sum, 0.5, 1.0, &[7, 7]), 6);
    assert_eq!(run(ReduceOp::Sum, 0.5, 1.0, &[-7, -7]), -6);
    assert_eq!(run(ReduceOp::Sum, 1.0, 0.5, &[-8, 1]), -3);
    assert_eq!(run(ReduceOp::Max, -1.0, 2.5, &[3, 5]), -7);
    assert_eq!(run(ReduceOp::Average, 1.0, 0.5, &[2; 49]), 1, "98 · 0.5 / 49");
    assert_eq!(run(ReduceOp::Sum, 1e300, 1.0, &[1]), i64::MAX);
    // Without a factor nothing is rounded.
    assert_eq!(run(ReduceOp::Sum, 1.0, 1.0, &[i64::MAX - 2, 1]), i64::MAX - 1);
    assert_eq!(run(ReduceOp::Min, 1.0, 0.5, &[8, i64::MAX - 2]), 4);
}

/// Numbers as bytes and back.
trait Integer: Copy + Into<i64> {
    const DTYPE: DType;
    fn append(self, bytes: &mut Vec<u8>);
    fn read(bytes: &[u8]) -> Self;
}

macro_rules! integer {
    ($($int:ident $dtype:ident),+) => {$(
        impl Integer for $int {
            const DTYPE: DType = DType::$dtype;

            fn append(self, bytes: &mut Vec<u8>) {
                bytes.extend(self.to_ne_bytes());
            }

            fn read(bytes: &[u8]) -> Self {
                Self::from_ne_bytes(bytes.try_into().unwrap())
            }
        }
    )+};
}

integer!(i8 I8, u8 U8, i16 I16, u16 U16, i32 I32, u32 U32);

/// The averages of these sums are those of exact division.
fn averages_are_exact<T: Integer>(sums: impl IntoIterator<Item = T>, by: u32) {
    let mut bytes = Vec::new();
    sums.into_iter().for_each(|sum| sum.append(&mut bytes));
    let op = ReduceOp::Average;
    let finish = Finish { dtype: T::DTYPE, op, contributors: by, postscale: 1.0 };
    let combine = Combine { dtype: T::DTYPE, op };
    let mut out = vec![0; bytes.len()];
    let (dsts, store) = (&mut [&mut out[..]], Store::Cached);
    reduce_finish_slices(level(), combine, 1.0, &finish, dsts, &[&bytes], store).unwrap();
    let size = size_of::<T>();
    for (average, sum) in out.chunks(size).map(T::read).zip(bytes.chunks(size).map(T::read)) {
        let (average, sum): (i64, i64) = (average.into(), sum.into());
        assert_eq!(average, sum / i64::from(by), "{sum} / {by}");
    }
}

/// The division in floats is the integer division, for the numbers that come closest.
#[test]
fn averages_of_integers_are_exact() {
    let mut random = SplitMix64::seed_from_u64(13);
    for by in (1..=70_000).chain([1 << 24, (1 << 24) + 1, u32::MAX - 1, u32::MAX]) {
        averages_are_exact(i8::MIN..=i8::MAX, by);
        averages_are_exact(u8::MIN..=u8::MAX, by);
    }
    // All 16-bit integers, by divisors near the edges.
    for x in i16::MIN..=i16::MAX {
        let edges = [i32::from(x).unsigned_abs(), 1, 3, 1 << 15, 1 << 16, 1 << 24, u32::MAX];
        for by in edges.into_iter().flat_map(|by| [by.max(2) - 1, by.max(1), by.saturating_add(1)])
        {
            averages_are_exact([x], by);
            averages_are_exact([x as u16], by);
        }
        for _ in 0..20 {
            let by = (random.next_u64() as u32 >> random.random_range(0..32)).max(1);
            let (multiple, below) = ((x as u16).checked_div(by as u16).unwrap_or(0), x as u16);
            let sums = [below, multiple.wrapping_mul(by as u16)];
            averages_are_exact(sums, by);
            averages_are_exact(sums.map(|sum| sum as i16), by);
        }
    }
    let edges = [i32::MIN, i32::MIN + 1, -1, 0, 1, i32::MAX - 1, i32::MAX];
    for by in [1u32, 2, 3, 7, 1 << 16, u32::MAX / 2, u32::MAX - 1, u32::MAX] {
        let mut sums = Vec::new();
        for x in edges.into_iter().chain((0..10_000).map(|_| random.next_u64() as i32)) {
            let whole = (x / by.min(i32::MAX as u32) as i32).wrapping_mul(by as i32);
            sums.extend([x, whole, whole.wrapping_sub(1), whole.wrapping_add(1)]);
        }
        averages_are_exact(sums.iter().copied(), by);
        averages_are_exact(sums.iter().map(|&sum| sum as u32), by);
    }
}

/// Any byte but 0 is true, and computed values are 0 or 1.
#[test]
fn truth_values_are_all_any_or_odd() {
    for a in [0u8, 1, 2, 0x80, 0xff] {
        for b in [0u8, 1, 4, 0xff] {
            for c in [0u8, 1, 3] {
                let truths = [a != 0, b != 0, c != 0];
                let all = truths.iter().all(|&truth| truth);
                let any = truths.iter().any(|&truth| truth);
                let odd = truths.iter().filter(|&&truth| truth).count() % 2 == 1;
                for (op, should) in [
                    (ReduceOp::Sum, any),
                    (ReduceOp::Max, any),
                    (ReduceOp::BitOr, any),
                    (ReduceOp::Product, all),
                    (ReduceOp::Min, all),
                    (ReduceOp::BitAnd, all),
                    (ReduceOp::BitXor, odd),
                ] {
                    let is = reduced(DType::Bool, op, 3, &[[a], [b], [c]]);
                    assert_eq!(is, [u8::from(should)], "{op} of {a} {b} {c}");
                }
            }
        }
    }
    // Also with a single input.
    assert_eq!(reduced(DType::Bool, ReduceOp::Max, 1, &[[7]]), [1]);
}

/// Complex numbers are reduced, averaged and scaled part by part.
#[test]
fn complex_numbers_are_summed_part_by_part() {
    let mut random = SplitMix64::seed_from_u64(32);
    for (complex, float) in [(DType::C64, DType::F32), (DType::C128, DType::F64)] {
        for op in [ReduceOp::Sum, ReduceOp::Average] {
            for count in [1, 64, 100, 1000] {
                let bytes = count * complex.size();
                let inputs: Vec<Vec<u8>> =
                    (0..3).map(|_| (0..bytes).map(|_| random.next_u64() as u8).collect()).collect();
                let slices: Vec<&[u8]> = inputs.iter().map(|input| &input[..]).collect();
                let run = |dtype, postscale| {
                    let finish = Finish { dtype, op, contributors: 3, postscale };
                    let mut out = vec![0; bytes];
                    let (combine, dsts) = (Combine { dtype, op }, &mut [&mut out[..]]);
                    let store = Store::Streaming;
                    reduce_finish_slices(level(), combine, 0.5, &finish, dsts, &slices, store)
                        .unwrap();
                    out
                };
                for postscale in [1.0, 0.3] {
                    assert_eq!(run(complex, postscale), run(float, postscale), "{complex} {op}");
                }
            }
        }
    }
    // (1 + 2i) + (3 − 5i) = 4 − 3i
    let number = |re: f32, im: f32| [re.to_ne_bytes(), im.to_ne_bytes()].concat();
    let mut out = [0; 8];
    let combine = Combine { dtype: DType::C64, op: ReduceOp::Sum };
    reduce_slices(combine, 1.0, &mut out, &[&number(1.0, 2.0), &number(3.0, -5.0)]).unwrap();
    assert_eq!(out[..], number(4.0, -3.0));
    // Half a complex number is refused.
    let error = reduce_slices(combine, 1.0, &mut [0; 12], &[&[0; 12]]).unwrap_err();
    assert!(error.to_string().contains("whole 8-byte elements"), "{error}");
}

/// The shortest floats are combined in f32 over all inputs, finished, and rounded once.
#[test]
fn eight_bits_are_summed_in_f32_and_rounded_once() {
    let e4m3 = |op, by, values: &[f32]| {
        let bytes: Vec<_> = values.iter().map(|&v| [F8E4m3::from_f32(v).to_bits()]).collect();
        let [bits] = reduced(DType::F8E4m3, op, by, &bytes);
        F8E4m3::from_bits(bits).to_f32()
    };
    let e5m2 = |op, by, values: &[f32]| {
        let bytes: Vec<_> = values.iter().map(|&v| [F8E5m2::from_f32(v).to_bits()]).collect();
        let [bits] = reduced(DType::F8E5m2, op, by, &bytes);
        F8E5m2::from_bits(bits).to_f32()
    };
    // 16 + 1 is a tie that goes down to even; with another 1 it is 18 only if kept in f32.
    assert_eq!(e4m3(ReduceOp::Sum, 1, &[16.0, 1.0]), 16.0);
    assert_eq!(e4m3(ReduceOp::Sum, 1, &[18.0, 1.0]), 20.0);
    assert_eq!(e4m3(ReduceOp::Sum, 1, &[16.0, 1.0, 1.0]), 18.0);
    assert_eq!(e5m2(ReduceOp::Sum, 1, &[8.0, 1.0]), 8.0);
    assert_eq!(e5m2(ReduceOp::Sum, 1, &[8.0, 1.0, 1.0]), 10.0);
    // A sum that is too large is NaN or infinity, but its average may fit.
    assert!(e4m3(ReduceOp::Sum, 1, &[448.0, 448.0]).is_nan());
    assert_eq!(e4m3(ReduceOp::Average, 2, &[448.0, 448.0]), 448.0);
    assert_eq!(e5m2(ReduceOp::Sum, 1, &[57344.0, 57344.0]), f32::INFINITY);
    assert_eq!(e5m2(ReduceOp::Average, 2, &[57344.0, 57344.0]), 57344.0);
    assert_eq!(e4m3(ReduceOp::Average, 3, &[1.0, 1.0, 0.5]), 0.8125, "5/6 of 32nds");
    for op in [ReduceOp::Min, ReduceOp::Max, ReduceOp::Sum, ReduceOp::Product] {
        assert!(e4m3(op, 1, &[1.0, f32::NAN]).is_nan(), "{op}");
        assert!(e5m2(op, 1, &[f32::NAN, 1.0]).is_nan(), "{op}");
    }
    assert_eq!(e4m3(ReduceOp::Product, 1, &[-3.0, 0.5, 2.0]), -3.0);
    assert!(e4m3(ReduceOp::Min, 1, &[0.0, -0.0]).is_sign_negative());
    // Denormals are numbers.
    assert_eq!(reduced(DType::F8E4m3, ReduceOp::Sum, 1, &[[1], [1]]), [2]);
    assert_eq!(reduced(DType::F8E5m2, ReduceOp::Sum, 1, &[[1], [1]]), [2]);
    // All pairs, compared with f32.
    for a in 0..=u8::MAX {
        for b in 0..=u8::MAX {
            let sum = F8E4m3::from_bits(a).to_f32() + F8E4m3::from_bits(b).to_f32();
            let [is] = reduced(DType::F8E4m3, ReduceOp::Sum, 1, &[[a], [b]]);
            let should = F8E4m3::from_f32(sum);
            let equal = if sum.is_nan() { is == 0x7f } else { is == should.to_bits() };
            assert!(equal, "{a:#x} + {b:#x} is {is:#x}, not {should}");
        }
    }
}
