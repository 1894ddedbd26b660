//! Reductions via partial results: compares the rounding with the library's, sums with the
//! reference, and every level with the scalar one, bit for bit.

use gradwire_kernels::{Form, finish_partial, reduce_partials};

use super::*;

/// Rounded by the library, with the canonical NaN.
fn rounded(value: f32) -> u16 {
    if value.is_nan() { 0x7fc0 } else { bf16::from_f32(value).to_bits() }
}

/// Operands at odd addresses and of odd lengths.
struct Operands {
    /// The type of the inputs.
    dtype: DType,
    inputs: Vec<Buffer>,
    partials: Vec<(Form, Buffer)>,
}

impl Operands {
    fn random(
        dtype: DType,
        inputs: usize,
        forms: &[Form],
        count: usize,
        random: &mut SplitMix64,
    ) -> Self {
        let mut any = |dtype| Buffer::random(dtype, count, random.random_range(0..64), random);
        Self {
            dtype,
            inputs: (0..inputs).map(|_| any(dtype)).collect(),
            partials: forms
                .iter()
                .map(|&form| match form {
                    Form::Bf16 => (form, any(DType::Bf16)),
                    Form::F32 => (form, any(DType::F32)),
                })
                .collect(),
        }
    }

    fn reduced(&self, level: Level, op: ReduceOp, prescale: f64, to: Form, at: usize) -> Vec<u8> {
        let count = match (self.inputs.first(), self.partials.first()) {
            (Some(input), _) => input.len / self.dtype.size(),
            (None, Some((form, partial))) => partial.len / form.size(),
            (None, None) => 0,
        };
        let mut out = Buffer::new(count * to.size(), at);
        let inputs: Vec<_> = self.inputs.iter().map(|input| input.get().as_ptr()).collect();
        let partials: Vec<_> =
            self.partials.iter().map(|(form, partial)| (*form, partial.get().as_ptr())).collect();
        let dst = (to, out.get_mut().as_mut_ptr());
        let combine = Combine { dtype: self.dtype, op };
        // SAFETY: every buffer holds `count` elements of its form, and this machine has the level.
        unsafe { reduce_partials(level, combine, prescale, dst, &inputs, &partials, count) };
        assert!(out.is_framed(), "{level:?} wrote elsewhere");
        out.get().to_vec()
    }

    /// The same in three simple steps: inputs and partials in f32, reduced by the reference of f32,
    /// rounded by the library.
    fn by_definition(&self, op: ReduceOp, prescale: f64, to: Form) -> Vec<u8> {
        let combine = Combine { dtype: DType::F32, op };
        let fold = |prescale: f64, slices: &[&[u8]]| {
            let mut sum = vec![0; slices[0].len()];
            let finish = Finish::none(DType::F32);
            let (level, store) = (Level::Scalar, Store::Cached);
            let dsts = &mut [&mut sum[..]];
            reduce_finish_slices(level, combine, prescale, &finish, dsts, slices, store).unwrap();
            sum
        };
        let wide = self.partials.iter().map(|(form, partial)| match form {
            Form::F32 => partial.get().to_vec(),
            Form::Bf16 => widened(DType::Bf16, partial.get()),
        });
        let wide: Vec<Vec<u8>> = wide.collect();
        let inputs: Vec<Vec<u8>> =
            self.inputs.iter().map(|input| widened(self.dtype, input.get())).collect();
        let inputs: Vec<&[u8]> = inputs.iter().map(|input| &input[..]).collect();
        let scaled = (prescale != 1.0 && !inputs.is_empty()).then(|| fold(prescale, &inputs));
        let all = match &scaled {
            Some(scaled) => vec![&scaled[..]],
            None => inputs,
        };
        let all: Vec<&[u8]> = all.into_iter().chain(wide.iter().map(|w| &w[..])).collect();
        let sum =
            if scaled.is_some() && all.len() == 1 { all[0].to_vec() } else { fold(1.0, &all) };
        match to {
            Form::F32 => sum,
            Form::Bf16 => {
                let values = sum.chunks_exact(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap()));
                values.flat_map(|value| rounded(value).to_ne_bytes()).collect()
            }
        }
    }
}

/// The values in f32. Converted NaNs are canonical.
fn widened(dtype: DType, bytes: &[u8]) -> Vec<u8> {
    if dtype == DType::F32 {
        return bytes.to_vec();
    }
    let values = bytes.chunks_exact(dtype.size()).map(|b| match (dtype, b) {
        (DType::F16, &[a, b]) => f16::from_ne_bytes([a, b]).to_f32(),
        (DType::Bf16, &[a, b]) => bf16::from_ne_bytes([a, b]).to_f32(),
        (DType::F8E4m3, &[a]) => F8E4m3::from_bits(a).to_f32(),
        (DType::F8E5m2, &[a]) => F8E5m2::from_bits(a).to_f32(),
        _ => unreachable!("{dtype} does not travel as f32"),
    });
    let canonical = |value: f32| if value.is_nan() { f32::NAN } else { value };
    values.flat_map(|value| canonical(value).to_ne_bytes()).collect()
}

/// The library's rounding, with the canonical NaN.
fn narrowed(dtype: DType, value: f32) -> Vec<u8> {
    // Rounding makes all NaNs canonical.
    let value = if value.is_nan() && dtype != DType::F32 { f32::NAN } else { value };
    match dtype {
        DType::F16 if value.is_nan() => 0x7e00_u16.to_ne_bytes().to_vec(),
        DType::F16 => f16::from_f32(value).to_ne_bytes().to_vec(),
        DType::Bf16 => rounded(value).to_ne_bytes().to_vec(),
        DType::F8E4m3 => vec![F8E4m3::from_f32(value).to_bits()],
        DType::F8E5m2 => vec![F8E5m2::from_f32(value).to_bits()],
        _ => value.to_ne_bytes().to_vec(),
    }
}

/// The types that may be sent in another form.
const TYPES: [DType; 5] = [DType::F32, DType::F16, DType::Bf16, DType::F8E4m3, DType::F8E5m2];

const OPS: [ReduceOp; 5] =
    [ReduceOp::Sum, ReduceOp::Average, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product];

/// Every combination that the executor uses, at every level, in lengths around that of a tile.
#[test]
fn every_level_reduces_to_the_same_bits() {
    const B: Form = Form::Bf16;
    const F: Form = Form::F32;
    let seed = 23;
    let mut random = SplitMix64::seed_from_u64(seed);
    let mixtures: [(usize, &[Form]); 11] = [
        (1, &[]),
        (3, &[]),
        (1, &[B]),
        (2, &[B]),
        (5, &[B]),
        (2, &[F]),
        (0, &[F, F]),
        (0, &[B, B]),
        (0, &[F, B]),
        (0, &[B, F]),
        (2, &[B, F]),
    ];
    let all = mixtures.iter().flat_map(|mixture| TYPES.map(|dtype| (dtype, mixture)));
    for (dtype, &(inputs, forms)) in all {
        for count in [1, 127, 129, 2047, 2048, 2049, 4500 + random.random_range(0..999)] {
            let operands = Operands::random(dtype, inputs, forms, count, &mut random);
            for op in OPS {
                for (prescale, to) in [(1.0, B), (0.3, B), (1.0, F), (0.3, F)] {
                    let right = operands.by_definition(op, prescale, to);
                    for level in levels().chain([Level::Scalar]) {
                        let at = random.random_range(0..64);
                        let got = operands.reduced(level, op, prescale, to, at);
                        let wrong = (0..count).find(|i| {
                            let element = i * to.size()..(i + 1) * to.size();
                            got[element.clone()] != right[element]
                        });
                        assert_eq!(
                            wrong, None,
                            "{level:?}, {op} of {inputs} {dtype} and {forms:?} to {to:?}, {count} \
                             elements, prescale {prescale}, seed {seed}"
                        );
                    }
                }
            }
        }
    }
}

/// All 2^16 upper halves, with the lower halves that decide: ties, their neighbours, and any.
#[test]
fn rounding_is_that_of_the_library() {
    let mut random = SplitMix64::seed_from_u64(5);
    let lower = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff, random.next_u64() as u32 & 0xffff];
    for lower in lower {
        let values: Vec<f32> =
            (0..=0xffff_u32).map(|up| f32::from_bits(up << 16 | lower)).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        for level in levels().chain([Level::Scalar]) {
            let mut out = vec![0_u8; values.len() * 2];
            let dst = (Form::Bf16, out.as_mut_ptr());
            let combine = Combine { dtype: DType::F32, op: ReduceOp::Sum };
            let inputs = &[bytes.as_ptr()];
            // SAFETY: both hold as many elements as there are values; the level is there.
            unsafe { reduce_partials(level, combine, 1.0, dst, inputs, &[], values.len()) };
            for (value, got) in values.iter().zip(out.chunks_exact(2)) {
                let got = u16::from_ne_bytes(got.try_into().unwrap());
                assert_eq!(got, rounded(*value), "{level:?}: {value:e} ({:08x})", value.to_bits());
                if lower == 0 && !value.is_nan() {
                    assert_eq!(
                        u32::from(got) << 16,
                        value.to_bits(),
                        "{level:?} changed {value:e}"
                    );
                }
            }
        }
    }
    for (value, right) in [
        (f32::INFINITY, 0x7f80),
        (f32::NEG_INFINITY, 0xff80),
        (f32::MAX, 0x7f80), // too large: rounds to infinity
        (-0.0, 0x8000),
        (1.0 + f32::EPSILON, 0x3f80),
        (f32::from_bits(1), 0), // the smallest denormal
        (f32::from_bits(0x0001_8001), 2),
        (f32::from_bits(0x7f80_0001), 0x7fc0), // a signalling NaN
        (f32::from_bits(0xffff_ffff), 0x7fc0), // which the addition alone would make a zero
    ] {
        assert_eq!(rounded(value), right, "{value:e}");
    }
}

/// Every destination gets the reference's result of the widened numbers, rounded by the library.
#[test]
fn every_level_finishes_to_the_same_bits() {
    let mut random = SplitMix64::seed_from_u64(77);
    let forms = [(Form::Bf16, DType::Bf16), (Form::F32, DType::F32)];
    let types = TYPES.into_iter().flat_map(|dtype| forms.map(|form| (dtype, form)));
    for (dtype, (form, partial)) in types {
        for count in [1, 63, 2048, 2049, 5000] {
            let src = Buffer::random(partial, count, random.random_range(0..64), &mut random);
            // By bits, so that NaNs keep theirs on the way to f32.
            let upper = |b: &[u8]| u32::from(u16::from_ne_bytes([b[0], b[1]])) << 16;
            let wide = match form {
                Form::Bf16 => {
                    src.get().chunks_exact(2).flat_map(|b| upper(b).to_ne_bytes()).collect()
                }
                _ => src.get().to_vec(),
            };
            for (op, postscale) in
                [(ReduceOp::Sum, 1.0), (ReduceOp::Average, 1.0), (ReduceOp::Max, 0.7)]
            {
                let finish = Finish { dtype: DType::F32, op, contributors: 3, postscale };
                let (combine, scalar) = (Combine { dtype: DType::F32, op }, Level::Scalar);
                let mut right = vec![0; wide.len()];
                let (dsts, inputs) = (&mut [&mut right[..]], &[&wide[..]]);
                let cached = Store::Cached;
                reduce_finish_slices(scalar, combine, 1.0, &finish, dsts, inputs, cached).unwrap();
                let values = right.chunks_exact(4);
                let values = values.map(|b| f32::from_ne_bytes(b.try_into().unwrap()));
                let right: Vec<u8> = values.flat_map(|value| narrowed(dtype, value)).collect();
                let finish = Finish { dtype, ..finish };
                for store in [Store::Cached, Store::Streaming] {
                    for level in levels().chain([scalar]) {
                        let size = dtype.size();
                        let mut one = Buffer::new(count * size, size * random.random_range(0..16));
                        let mut two = Buffer::new(count * size, 0);
                        let dsts = [one.get_mut().as_mut_ptr(), two.get_mut().as_mut_ptr()];
                        let src = (form, src.get().as_ptr());
                        // SAFETY: all buffers hold `count` elements; the level is there.
                        unsafe { finish_partial(level, &finish, &dsts, src, count, store) };
                        assert!(one.is_framed() && two.is_framed(), "{level:?} wrote elsewhere");
                        for got in [one.get(), two.get()] {
                            let pairs = got.chunks_exact(size).zip(right.chunks_exact(size));
                            let wrong = pairs.zip(0..).find(|((got, right), _)| got != right);
                            let what = format!("{level:?}: {form:?} to {dtype}, {op}, {store:?}");
                            assert_eq!(wrong, None, "{what} of {count}, not the same");
                        }
                    }
                }
            }
        }
    }
}

/// In place, as when a partial result is added to.
#[test]
fn a_partial_result_may_be_replaced() {
    let mut random = SplitMix64::seed_from_u64(9);
    let count = 5000;
    for form in [Form::Bf16, Form::F32] {
        let operands = Operands::random(DType::F32, 0, &[form, Form::Bf16], count, &mut random);
        let right = operands.reduced(level(), ReduceOp::Sum, 1.0, form, 0);
        let [(_, mine), (_, theirs)] = &operands.partials[..] else { panic!("two") };
        let mut mine = mine.get().to_vec();
        let at = mine.as_mut_ptr();
        let partials = [(form, at.cast_const()), (Form::Bf16, theirs.get().as_ptr())];
        let combine = Combine { dtype: DType::F32, op: ReduceOp::Sum };
        // SAFETY: both hold `count` elements; the destination is exactly the first.
        unsafe { reduce_partials(level(), combine, 1.0, (form, at), &[], &partials, count) };
        assert_eq!(mine, right);
    }
}
