//! Groups of eight-bit elements: compares every level with the reference, bit for bit, and the
//! reference with its error bound.

use gradwire_kernels::{Level, Quantized, add_quantized, dequantize, level, quantize};
use gradwire_proto::compression::{GROUP, GROUP_BYTES};
use rand::RngExt;
use rand_xoshiro::{SplitMix64, rand_core::SeedableRng};

const FORMATS: [Quantized; 2] = [Quantized::Int8, Quantized::Fp8];

/// Values of very different magnitudes, including the smallest and the largest.
fn values(random: &mut SplitMix64, count: usize) -> Vec<f32> {
    let scale = f32::from_bits(random.random_range(0..0x7f00_0000));
    let value = |random: &mut SplitMix64| match random.random_range(0..8) {
        0 => 0.0,
        1 => -0.0,
        2 => f32::from_bits(random.random::<u32>() & 0x8000_ffff),
        3 => scale * (random.random_range(-254..=254) as f32 / 254.0),
        4 => scale,
        _ => scale * random.random_range(-1.0..=1.0),
    };
    (0..count).map(|_| value(random)).collect()
}

fn quantized(level: Level, format: Quantized, values: &[f32], errors: &mut [u8]) -> Vec<u8> {
    let mut groups = vec![7; values.len().div_ceil(GROUP) * GROUP_BYTES];
    quantize(level, format, values, Some(errors), &mut groups);
    groups
}

fn numbers(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect()
}

#[test]
fn every_level_gives_the_same_bytes_and_errors() {
    let mut random = SplitMix64::seed_from_u64(3);
    for round in 0..400 {
        let count = [1, 3, 255, 256, 257, 1000][round % 6];
        let mut given = values(&mut random, count);
        if round % 5 == 0 {
            given[count / 2] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][round % 3];
        }
        let start: Vec<u8> =
            values(&mut random, count).iter().flat_map(|value| value.to_ne_bytes()).collect();
        for format in FORMATS {
            let mut expected_errors = start.clone();
            let expected = quantized(Level::Scalar, format, &given, &mut expected_errors);
            for level in Level::ALL.into_iter().filter(|level| level.is_available()) {
                let mut errors = start.clone();
                let got = quantized(level, format, &given, &mut errors);
                assert_eq!(got, expected, "{format:?} at {level:?}, round {round}");
                assert_eq!(errors, expected_errors, "{format:?} at {level:?}, round {round}");
            }
        }
    }
}

#[test]
fn errors_are_exact_and_within_the_bound() {
    let mut random = SplitMix64::seed_from_u64(5);
    for _ in 0..400 {
        let given = values(&mut random, 600);
        for format in FORMATS {
            let mut errors = vec![0; 4 * given.len()];
            let groups = quantized(Level::Scalar, format, &given, &mut errors);
            let mut got = vec![1.0; given.len()];
            dequantize(format, &groups, &mut got);
            for (group, (given, got)) in given.chunks(GROUP).zip(got.chunks(GROUP)).enumerate() {
                let most = given.iter().fold(0.0, |most: f32, value| most.max(value.abs()));
                for (given, got) in given.iter().zip(got) {
                    let bound = match format {
                        Quantized::Int8 => most / 254.0,
                        Quantized::Fp8 => (given.abs() / 16.0).max(most / 448.0 / 1024.0),
                    };
                    // A scale that is not normal is 0; a rounded product is a little further away.
                    let bound = bound.max(f32::MIN_POSITIVE * 448.0) * 1.0001;
                    assert!((given - got).abs() <= bound, "{format:?}, {group}: {given} {got}");
                }
            }
            for ((given, got), lost) in given.iter().zip(&got).zip(numbers(&errors)) {
                assert_eq!(given - got, lost);
            }
            let mut twice = got.clone();
            add_quantized(format, &groups, &mut twice);
            assert!(got.iter().zip(&twice).all(|(one, two)| one + one == *two));
        }
    }
}

/// Later rounds make up for the errors of earlier ones: their mean comes close to the value.
#[test]
fn errors_that_are_kept_do_not_add_up() {
    let mut random = SplitMix64::seed_from_u64(7);
    for format in FORMATS {
        let given: Vec<f32> = (0..500).map(|_| random.random_range(-1.0..1.0)).collect();
        let mut errors = vec![0; 4 * given.len()];
        let mut groups = vec![0; 2 * GROUP_BYTES];
        let mut sums = vec![0.0; given.len()];
        for _ in 0..100 {
            quantize(level(), format, &given, Some(&mut errors), &mut groups);
            add_quantized(format, &groups, &mut sums);
        }
        for (given, sum) in given.iter().zip(sums) {
            assert!((given - sum / 100.0).abs() < 0.001, "{format:?}: {given} {sum}");
        }
    }
}

#[test]
fn one_infinity_spoils_only_its_group() {
    for format in FORMATS {
        let mut given = vec![1.0; 2 * GROUP];
        given[3] = f32::INFINITY;
        let mut errors = vec![0; 4 * given.len()];
        let groups = quantized(Level::Scalar, format, &given, &mut errors);
        let mut got = vec![0.0; given.len()];
        dequantize(format, &groups, &mut got);
        assert!(got[..GROUP].iter().all(|value| value.is_nan()));
        assert!(got[GROUP..].iter().all(|value| *value == 1.0));
        assert!(errors.iter().all(|byte| *byte == 0));
    }
}
