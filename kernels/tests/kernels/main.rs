//! Compares every level with the scalar reference, bit for bit, and the reference with the
//! definition of the arithmetic; for integers, truth values and the rarer floats in [`meaning`].

#![expect(unsafe_code, reason = "the functions that take pointers are tested, too")]

mod meaning;
mod partial;
mod quantized;

use gradwire_kernels::{
    Combine, Finish, Level, SliceError, Store, is_a_sum, level, reduce, reduce_finish_in_place,
    reduce_finish_slices, reduce_finish_to, reduce_slices, sum_in_place, sum_slices,
};
use gradwire_proto::{DType, F8E4m3, F8E5m2, ReduceOp};
use half::{bf16, f16};
use rand::{Rng, RngExt, SeedableRng};
use rand_xoshiro::SplitMix64;

fn levels() -> impl Iterator<Item = Level> {
    Level::ALL.into_iter().filter(|l| *l != Level::Scalar && l.is_available())
}

/// The parts of an element: complex numbers consist of two floats.
fn part(dtype: DType) -> DType {
    match dtype {
        DType::C64 => DType::F32,
        DType::C128 => DType::F64,
        _ => dtype,
    }
}

/// Special and ordinary values, as the low bits of an element, or of a part of it.
fn special(dtype: DType, random: &mut SplitMix64) -> u64 {
    let any = random.next_u64();
    let pick = random.random_range(0..14);
    let small = (random.next_u64() % 32) as i64 - 16;
    let (nan, one) = match dtype {
        DType::F32 => (0x7fc0_1234, 1.0f32.to_bits().into()),
        DType::F64 => (0x7ff8_0000_0001_2345, 1.0f64.to_bits()),
        DType::F16 => (0x7e12, f16::ONE.to_bits().into()),
        DType::Bf16 => (0x7fd3, bf16::ONE.to_bits().into()),
        DType::F8E4m3 => (0x7f, F8E4m3::from_f32(1.0).to_bits().into()),
        DType::F8E5m2 => (0x7e, F8E5m2::from_f32(1.0).to_bits().into()),
        _ => (u64::MAX, 1),
    };
    let bits = dtype.size() as u32 * 8;
    let sign = 1u64 << (bits - 1);
    // Infinity is the NaN's exponent without its fraction.
    let infinity = match dtype {
        DType::F32 => 0x7f80_0000,
        DType::F64 => 0x7ff0_0000_0000_0000,
        DType::F16 => 0x7c00,
        DType::Bf16 => 0x7f80,
        // Without an infinity, the largest there is.
        DType::F8E4m3 => 0x7e,
        DType::F8E5m2 => 0x7c,
        _ => sign,
    };
    match pick {
        0 => nan,
        1 => nan | sign,
        2 => infinity,
        3 => infinity | sign,
        4 => infinity - 1, // the largest
        5 => 0,
        6 => sign,            // −0, or the smallest integer
        7 => any % 16,        // denormals
        8 => one | (any % 4), // close to 1: ties when rounded
        9 => infinity | 1,    // a signalling NaN
        10 | 11 => match dtype {
            DType::F32 => u64::from((small as f32).to_bits()),
            DType::F64 => (small as f64).to_bits(),
            DType::F16 => u64::from(f16::from_f64(small as f64).to_bits()),
            DType::Bf16 => u64::from(bf16::from_f64(small as f64).to_bits()),
            DType::F8E4m3 => u64::from(F8E4m3::from_f32(small as f32).to_bits()),
            DType::F8E5m2 => u64::from(F8E5m2::from_f32(small as f32).to_bits()),
            _ => small as u64,
        },
        _ => any,
    }
}

/// Bytes at a chosen misalignment, not always of whole elements.
struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    fn new(len: usize, misaligned: usize) -> Self {
        let bytes = vec![0xa5; len + 192];
        let start = bytes.as_ptr().align_offset(64) + misaligned;
        Self { bytes, start, len }
    }

    fn random(dtype: DType, count: usize, misaligned: usize, random: &mut SplitMix64) -> Self {
        let mut buffer = Self::new(count * dtype.size(), misaligned);
        let dtype = part(dtype);
        let size = dtype.size();
        // Some runs have ordinary values, so that not everything becomes NaN.
        let plain = random.random_range(0..2) == 0;
        for element in buffer.get_mut().chunks_exact_mut(size) {
            let bits = loop {
                let bits = special(dtype, random);
                if !plain || bits == 0 || bits.is_multiple_of(7) {
                    break bits;
                }
            };
            element.copy_from_slice(&bits.to_le_bytes()[..size]);
        }
        buffer
    }

    fn get(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    fn get_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }

    /// Whether only the elements were written.
    fn is_framed(&self) -> bool {
        let frame = [&self.bytes[..self.start], &self.bytes[self.start + self.len..]];
        frame.concat().iter().all(|&b| b == 0xa5)
    }
}

/// Every element type, operation, level, number of inputs, length and alignment: the same bits as
/// the reference.
#[test]
fn every_level_computes_what_the_reference_does() {
    let seed = 11;
    let mut random = SplitMix64::seed_from_u64(seed);
    for &dtype in DType::ALL {
        for &op in ReduceOp::ALL {
            for inputs in 1..=9 {
                for count in [0, 1, 31, 127, 128, 129, 300 + random.random_range(0..300)] {
                    let combine = Combine { dtype, op };
                    let misaligned = random.random_range(0..64);
                    let data: Vec<Buffer> = (0..inputs)
                        .map(|i| Buffer::random(dtype, count, (misaligned + i) % 64, &mut random))
                        .collect();
                    let slices: Vec<&[u8]> = data.iter().map(Buffer::get).collect();
                    let contributors = [1, 3, 8, 1000][random.random_range(0..4)];
                    let postscale = [1.0, 1.0, 0.1][random.random_range(0..3)];
                    let prescale = [1.0, 0.5, 1.0 / 3.0][random.random_range(0..3)];
                    let finish = Finish { dtype, op, contributors, postscale };
                    let store = [Store::Cached, Store::Streaming][random.random_range(0..2)];
                    let run = |level, misaligned| {
                        let mut one = Buffer::new(count * dtype.size(), misaligned);
                        let mut two = Buffer::new(count * dtype.size(), 0);
                        let dsts = &mut [one.get_mut(), two.get_mut()];
                        reduce_finish_slices(
                            level, combine, prescale, &finish, dsts, &slices, store,
                        )
                        .unwrap();
                        assert!(one.is_framed() && two.is_framed(), "{level:?} wrote elsewhere");
                        assert_eq!(one.get(), two.get(), "{level:?}: destinations differ");
                        one.get().to_vec()
                    };
                    let reference = run(Level::Scalar, 0);
                    for level in levels() {
                        let result = run(level, misaligned);
                        let size = dtype.size();
                        let pairs = result.chunks(size).zip(reference.chunks(size));
                        if let Some(at) = pairs.clone().position(|(a, b)| a != b) {
                            let operands: Vec<_> =
                                slices.iter().map(|s| &s[at * size..][..size]).collect();
                            panic!(
                                "{level:?} {combine:?} {finish:?} prescale {prescale}, element \
                                 {at} of {count}: {:x?} is {:x?}, the reference says {:x?}, \
                                 seed {seed}",
                                operands,
                                &result[at * size..][..size],
                                &reference[at * size..][..size],
                            );
                        }
                    }
                }
            }
        }
    }
}

/// Programs with few of the kernels compute sums of floats and copy everything, as the others do.
#[test]
fn sums_are_those_of_all_kernels() {
    let mut random = SplitMix64::seed_from_u64(13);
    let (mut sums, mut copies) = (0, 0);
    for &dtype in DType::ALL {
        for &op in ReduceOp::ALL {
            for inputs in [0, 1, 2, 5] {
                let (combine, count, store) = (Combine { dtype, op }, 300, Store::Cached);
                let finish = Finish { dtype, op, contributors: 3, postscale: 1.0 };
                let data: Vec<Buffer> =
                    (0..inputs).map(|_| Buffer::random(dtype, count, 0, &mut random)).collect();
                let slices: Vec<&[u8]> = data.iter().map(Buffer::get).collect();
                let mut expected = vec![0; count * dtype.size()];
                let dsts = &mut [&mut expected[..]];
                reduce_finish_slices(level(), combine, 1.0, &finish, dsts, &slices, store).unwrap();
                let mut found = vec![0; count * dtype.size()];
                let done = sum_slices(combine, &finish, &mut [&mut found], &slices, store);
                let is_copy = inputs == 1 && op != ReduceOp::Average && dtype != DType::Bool;
                if is_a_sum(combine) || is_copy {
                    assert_eq!(done, Ok(()), "{combine:?} of {inputs}");
                    assert_eq!(found, expected, "{combine:?} of {inputs}");
                } else {
                    assert_eq!(done, Err(SliceError::NotASum(combine)), "of {inputs}");
                }
                sums += u32::from(is_a_sum(combine));
                copies += u32::from(is_copy);
                let mut buffers: Vec<Vec<u8>> = slices.iter().map(|it| it.to_vec()).collect();
                let mut all: Vec<&mut [u8]> = buffers.iter_mut().map(|it| &mut it[..]).collect();
                let done = sum_in_place(combine, &finish, &mut all, store);
                if inputs > 0 && done.is_ok() {
                    assert!(buffers.iter().all(|it| *it == expected), "{combine:?} of {inputs}");
                }
            }
        }
    }
    assert_eq!((sums, copies), (4 * 2 * 4, 16 * 7));
}

/// A destination may be one of the inputs, for all three functions.
#[test]
fn results_may_replace_inputs() {
    let mut random = SplitMix64::seed_from_u64(12);
    for &dtype in DType::ALL {
        for inputs in 1..=5 {
            for count in [1, 128, 1000] {
                let combine = Combine { dtype, op: ReduceOp::Average };
                let finish =
                    Finish { dtype, op: ReduceOp::Average, contributors: 3, postscale: 1.0 };
                let data: Vec<Buffer> =
                    (0..inputs).map(|_| Buffer::random(dtype, count, 0, &mut random)).collect();
                let slices: Vec<&[u8]> = data.iter().map(Buffer::get).collect();
                let size = count * dtype.size();
                let mut reduced = vec![0; size];
                reduce_slices(combine, 1.0, &mut reduced, &slices).unwrap();
                let mut finished = vec![0; size];
                let dsts = &mut [&mut finished[..]];
                let store = Store::Cached;
                reduce_finish_slices(level(), combine, 1.0, &finish, dsts, &slices, store).unwrap();

                for replaced in 0..inputs {
                    let mut copies: Vec<Vec<u8>> = slices.iter().map(|s| s.to_vec()).collect();
                    let pointers: Vec<*mut u8> =
                        copies.iter_mut().map(|c| c.as_mut_ptr()).collect();
                    let sources: Vec<*const u8> = pointers.iter().map(|p| p.cast_const()).collect();
                    // SAFETY: all buffers hold `count` elements and the destination is one of them.
                    unsafe { reduce(combine, 1.0, pointers[replaced], &sources, count) };
                    assert_eq!(copies[replaced], reduced, "{dtype} {inputs} inputs");
                }
                for store in [Store::Cached, Store::Streaming] {
                    let mut copies: Vec<Vec<u8>> = slices.iter().map(|s| s.to_vec()).collect();
                    let mut buffers: Vec<&mut [u8]> =
                        copies.iter_mut().map(|c| &mut c[..]).collect();
                    reduce_finish_in_place(level(), combine, 1.0, &finish, &mut buffers, store)
                        .unwrap();
                    assert!(copies.iter().all(|c| *c == finished), "{dtype} {inputs} inputs");
                }
                let mut here = reduced.clone();
                let pointer = here.as_mut_ptr();
                let finish_to = |dst: *mut u8, src: *const u8, store| {
                    // SAFETY: both hold `count` elements, and are the same or apart.
                    unsafe {
                        reduce_finish_to(combine, 1.0, &finish, &[dst], &[src], count, store);
                    }
                };
                finish_to(pointer, pointer, Store::Cached);
                let mut there = vec![0; size];
                finish_to(there.as_mut_ptr(), reduced.as_ptr(), Store::Streaming);
                assert_eq!(here, there, "{dtype}");
            }
        }
    }
}

fn f32s(op: ReduceOp, inputs: &[f32]) -> u32 {
    let bytes: Vec<[u8; 4]> = inputs.iter().map(|v| v.to_ne_bytes()).collect();
    let slices: Vec<&[u8]> = bytes.iter().map(|b| &b[..]).collect();
    let mut out = [0; 4];
    reduce_slices(Combine { dtype: DType::F32, op }, 1.0, &mut out, &slices).unwrap();
    u32::from_ne_bytes(out)
}

/// NaN wins, zeros have an order, and operands may be swapped (SAME).
#[test]
fn minimum_and_maximum_are_symmetric() {
    let payload = f32::from_bits(0xffc0_0001);
    let values = [
        payload,
        f32::NAN,
        0.0,
        -0.0,
        1.0,
        -1.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MIN_POSITIVE,
    ];
    for op in [ReduceOp::Min, ReduceOp::Max, ReduceOp::Sum, ReduceOp::Product] {
        for a in values {
            for b in values {
                assert_eq!(f32s(op, &[a, b]), f32s(op, &[b, a]), "{op} of {a} and {b}");
            }
            if op == ReduceOp::Min || op == ReduceOp::Max {
                assert_eq!(f32s(op, &[a, payload]), f32::NAN.to_bits());
            }
        }
    }
    assert_eq!(f32s(ReduceOp::Min, &[0.0, -0.0]), (-0.0f32).to_bits());
    assert_eq!(f32s(ReduceOp::Max, &[0.0, -0.0]), 0);
    assert_eq!(f32s(ReduceOp::Min, &[2.0, -3.0, 1.0]), (-3.0f32).to_bits());
    assert_eq!(f32s(ReduceOp::Max, &[2.0, -3.0, 1.0]), 2.0f32.to_bits());
    // A single input is copied with its payload.
    assert_eq!(f32s(ReduceOp::Sum, &[payload]), payload.to_bits());
}

/// From the left, in the order given: (1e30 − 1e30) + 1 is 1, but (1 + 1e30) − 1e30 is 0.
#[test]
fn order_is_that_of_the_inputs() {
    assert_eq!(f32s(ReduceOp::Sum, &[1e30, -1e30, 1.0]), 1.0f32.to_bits());
    assert_eq!(f32s(ReduceOp::Sum, &[1.0, 1e30, -1e30]), 0.0f32.to_bits());
    // Over more inputs than are combined at once.
    let mut inputs = [0.0; 9];
    (inputs[3], inputs[4], inputs[8]) = (1e30, -1e30, 1.0);
    assert_eq!(f32s(ReduceOp::Sum, &inputs), 1.0f32.to_bits());
}

/// Half precisions are rounded once, to nearest even, after all inputs.
#[test]
fn halves_are_summed_in_f32_and_rounded_once() {
    let run = |dtype, inputs: &[u16]| {
        let bytes: Vec<[u8; 2]> = inputs.iter().map(|v| v.to_ne_bytes()).collect();
        let slices: Vec<&[u8]> = bytes.iter().map(|b| &b[..]).collect();
        let mut results = Level::ALL.into_iter().filter(|l| l.is_available()).map(|level| {
            let combine = Combine { dtype, op: ReduceOp::Sum };
            let mut out = [0; 2];
            let (finish, dsts) = (Finish::none(dtype), &mut [&mut out[..]]);
            reduce_finish_slices(level, combine, 1.0, &finish, dsts, &slices, Store::Cached)
                .unwrap();
            u16::from_ne_bytes(out)
        });
        let reference = results.next().unwrap();
        assert!(results.all(|result| result == reference));
        reference
    };
    let half = |v: f32| f16::from_f32(v).to_bits();
    // 2048 + 1 is a tie that goes down to even; with another 1 it is 2050 only if kept in f32.
    assert_eq!(run(DType::F16, &[half(2048.0), half(1.0)]), half(2048.0));
    assert_eq!(run(DType::F16, &[half(2050.0), half(1.0)]), half(2052.0));
    assert_eq!(run(DType::F16, &[half(2048.0), half(1.0), half(1.0)]), half(2050.0));
    assert_eq!(run(DType::F16, &[half(65504.0), half(16.0)]), f16::INFINITY.to_bits());
    assert_eq!(run(DType::F16, &[1, 1]), 2, "denormals are numbers");
    let brain = |v: f32| bf16::from_f32(v).to_bits();
    assert_eq!(run(DType::Bf16, &[brain(256.0), brain(1.0)]), brain(256.0));
    assert_eq!(run(DType::Bf16, &[brain(258.0), brain(1.0)]), brain(260.0));
    assert_eq!(run(DType::Bf16, &[brain(256.0), brain(1.0), brain(1.0)]), brain(258.0));
    assert_eq!(run(DType::Bf16, &[1, 1]), 2, "denormals are numbers");
}

/// An average whose sum would overflow doesn't, if it is finished in the same sweep.
#[test]
fn halves_are_finished_before_they_are_rounded() {
    let dtype = DType::F16;
    let big = f16::from_f32(30000.0).to_ne_bytes();
    let finish = Finish { dtype, op: ReduceOp::Average, contributors: 4, postscale: 1.0 };
    let combine = Combine { dtype, op: ReduceOp::Average };
    let mut out = [0; 2];
    let dsts = &mut [&mut out[..]];
    let store = Store::Cached;
    reduce_finish_slices(level(), combine, 1.0, &finish, dsts, &[&big[..]; 4], store).unwrap();
    assert_eq!(out, big);
}

#[test]
fn identity_is_recognised() {
    let finish = |dtype, op, contributors, postscale| Finish { dtype, op, contributors, postscale };
    assert!(Finish::none(DType::F32).is_identity());
    assert!(finish(DType::F32, ReduceOp::Sum, 9, 1.0).is_identity());
    assert!(finish(DType::F32, ReduceOp::Average, 1, 1.0).is_identity());
    assert!(finish(DType::F32, ReduceOp::Average, 0, 1.0).is_identity());
    assert!(!finish(DType::I32, ReduceOp::Sum, 9, 2.0).is_identity());
    assert!(!finish(DType::I32, ReduceOp::Average, 9, 1.0).is_identity());
    assert!(!finish(DType::F32, ReduceOp::Sum, 9, 2.0).is_identity());
}

#[test]
fn slices_are_checked() {
    let combine = Combine { dtype: DType::F32, op: ReduceOp::Sum };
    let error = reduce_slices(combine, 1.0, &mut [0; 8], &[&[0; 8], &[0; 4]]).unwrap_err();
    assert_eq!(error, SliceError::Length { slice: 1, len: 4, expected: 8, size: 4 });
    let error = reduce_slices(combine, 1.0, &mut [0; 6], &[&[0; 6]]).unwrap_err();
    assert!(error.to_string().contains("whole 4-byte elements"), "{error}");
    let finish = Finish::none(DType::I64);
    let error = reduce_finish_slices(level(), combine, 1.0, &finish, &mut [], &[], Store::Cached)
        .unwrap_err();
    assert!(matches!(error, SliceError::Type { .. }), "{error}");
    assert_eq!(reduce_slices(combine, 1.0, &mut [], &[]), Ok(()));
}

/// Without inputs nothing is written, at any level.
#[test]
fn no_inputs_do_nothing() {
    let combine = Combine { dtype: DType::U8, op: ReduceOp::Sum };
    let finish = Finish::none(DType::U8);
    for level in Level::ALL.into_iter().filter(|level| level.is_available()) {
        let mut out = [7u8; 3];
        let dsts = &mut [&mut out[..]];
        reduce_finish_slices(level, combine, 1.0, &finish, dsts, &[], Store::Cached).unwrap();
        assert_eq!(out, [7; 3], "{level:?}");
    }
}
