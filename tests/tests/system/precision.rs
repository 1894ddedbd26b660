//! Reductions of floats near the ends of their range. The result is the same on one, two and four
//! nodes, and equals that of f64, rounded once. Partial results between nodes must not be rounded,
//! and must not overflow if the result does not.

use std::fmt::Debug;

use gradwire_collectives::Algorithm;
use gradwire_tests::cluster::{Plan, run_job};
use gradwire_worker::{
    AllreduceOptions, Element, F8E4m3, F8E5m2, ReduceOp, ReduceOptions, ReduceScatterOptions,
    Session,
    half::{bf16, f16},
};

const RANKS: usize = 4;

/// A float type, with conversions from and to f64.
trait Float: Element + PartialEq {
    /// The largest number of which four can be summed. f16 and the 8-bit floats are summed in f32,
    /// and averages of bf16 are sums of parts, so for these types it is the largest number of all.
    const LARGEST: f64;
    /// The smallest number above 0; for f32 and f64, the smallest that is exact when scaled.
    const SMALLEST: f64;
    /// The largest relative error of rounding.
    const UNIT: f64;
    fn of(value: f64) -> Self;
    fn value(self) -> f64;
}

macro_rules! floats {
    ($($type:ty: $largest:expr, $smallest:expr, $bits:expr, $of:expr;)+) => {$(
        impl Float for $type {
            const LARGEST: f64 = $largest;
            const SMALLEST: f64 = $smallest;
            const UNIT: f64 = 1.0 / (1u64 << $bits) as f64;
            fn of(value: f64) -> Self {
                let of: fn(f64) -> Self = $of;
                of(value)
            }
            fn value(self) -> f64 {
                self.into()
            }
        }
    )+};
}

floats! {
    f16: 65504.0, 5.960464477539063e-8, 11, f16::from_f64;
    bf16: 3.3895313892515355e38, 9.183549615799121e-41, 8, bf16::from_f64;
    f32: 3.4028234663852886e38 / 4.0, 1.1754943508222875e-38, 24, |value| value as f32;
    f64: f64::MAX / 4.0, f64::MIN_POSITIVE, 53, |value| value;
}

macro_rules! floats8 {
    ($($type:ty: $largest:expr, $smallest:expr, $bits:expr;)+) => {$(
        impl Float for $type {
            const LARGEST: f64 = $largest;
            const SMALLEST: f64 = $smallest;
            const UNIT: f64 = 1.0 / (1u64 << $bits) as f64;
            fn of(value: f64) -> Self {
                Self::from_f32(value as f32)
            }
            fn value(self) -> f64 {
                self.to_f32().into()
            }
        }
    )+};
}

floats8! {
    F8E4m3: 448.0, 0.001953125, 4;
    F8E5m2: 57344.0, 1.52587890625e-5, 3;
}

/// For each element, the contribution of each rank.
fn contributions<T: Float>() -> Vec<[f64; RANKS]> {
    let (large, small) = (T::LARGEST, T::SMALLEST);
    let rounded = |value: f64| T::of(value).value();
    vec![
        [large; RANKS],
        [large, large, -large, -large],
        [large, -large, large, -large],
        [large, large, large, rounded(large * 0.5)],
        [rounded(large * 0.7), large, rounded(large * 0.9), rounded(large * 0.3)],
        [-large, 1.0, 1.0, 1.0],
        [large, 1.0, -large, 1.0],
        [small; RANKS],
        [3.0 * small, small, 5.0 * small, 7.0 * small],
        [1.0, 2.0, 3.0, 4.0],
    ]
}

/// Whether `got` is the result of f64, rounded once. f32 and f64 also round each addition.
fn is_right<T: Float>(got: f64, parts: [f64; RANKS], factor: f64) -> bool {
    let right = parts.iter().sum::<f64>() * factor;
    let magnitude = parts.iter().map(|part| part.abs()).sum::<f64>() * factor;
    let sums = if size_of::<T>() == 8 { f64::EPSILON } else { f64::from(f32::EPSILON) };
    let bound = (T::UNIT * right.abs()).max(T::SMALLEST / 2.0) + 2.0 * sums * magnitude;
    (got - right).abs() <= bound * (1.0 + 1e-12)
}

/// All ways to compute the average of the ranks; returns the result of each.
fn averages<T: Float + Debug>(session: &Session) -> Vec<Vec<f64>> {
    let rank = session.rank() as usize;
    let all = contributions::<T>();
    let mine: Vec<T> = all.iter().map(|parts| T::of(parts[rank])).collect();
    let tensor = || session.tensor(&mine, &[mine.len()]).unwrap();
    let values = |numbers: &[T]| numbers.iter().map(|number| number.value()).collect();
    let quarter = 1.0 / RANKS as f64;
    let mut results: Vec<Vec<f64>> = Vec::new();
    for (name, op, prescale, postscale) in [
        ("average", ReduceOp::Average, 1.0, 1.0),
        ("postscaled", ReduceOp::Sum, 1.0, quarter),
        ("prescaled", ReduceOp::Sum, quarter, 1.0),
    ] {
        // f32 has the same range as bf16, so the sum is too large before it is scaled.
        if name == "postscaled" && T::DTYPE == bf16::DTYPE {
            continue;
        }
        let mut tensor = tensor();
        let options = AllreduceOptions::named(format!("{}.{name}", T::DTYPE));
        let options = options.op(op).prescale(prescale).postscale(postscale);
        session.allreduce(&mut tensor, options).unwrap();
        results.push(values(tensor.as_slice()));
    }
    // The root is on the last node. The other ranks keep their input.
    let mut reduced = tensor();
    session.reduce(&mut reduced, ReduceOptions::to_rank(3)).unwrap();
    if rank == 3 {
        results.push(values(reduced.as_slice()));
    }
    // All rows are equal, so every rank receives all elements, in its own row.
    let rows: Vec<T> = (0..RANKS).flat_map(|_| mine.iter().copied()).collect();
    let rows = session.tensor(&rows, &[RANKS, mine.len()]).unwrap();
    let scattered = session.reducescatter(&rows, ReduceScatterOptions::default()).unwrap();
    results.push(values(scattered.as_slice()));
    for result in &results {
        for (parts, got) in all.iter().zip(result) {
            let parts = parts.map(|part| T::of(part).value());
            let is_right = is_right::<T>(*got, parts, quarter);
            assert!(is_right, "{}: {got:e} as the average of {parts:?}", T::DTYPE);
        }
    }
    results
}

/// Products that fit the type although partial products do not.
fn products<T: Float + Debug>(session: &Session) -> Vec<f64> {
    let mine = [[256.0, 256.0, 0.00390625, 0.00390625], [16.0, 0.0625, 16.0, 0.0625]]
        .map(|parts| T::of(parts[session.rank() as usize]));
    let mut tensor = session.tensor(&mine, &[2]).unwrap();
    let options = AllreduceOptions::named(format!("{}.product", T::DTYPE)).op(ReduceOp::Product);
    session.allreduce(&mut tensor, options).unwrap();
    tensor.as_slice().iter().map(|product| product.value()).collect()
}

#[test]
fn extreme_averages_do_not_depend_on_the_nodes() {
    for algorithm in Algorithm::ALL {
        let results: Vec<_> = [&[4][..], &[2, 2], &[1, 1, 1, 1]]
            .into_iter()
            .map(|slots| {
                let plan = Plan::nodes(slots).set(format!("negotiation.algorithm={algorithm}"));
                run_job(&plan, |session| {
                    let short = [
                        averages::<f16>(session),
                        averages::<F8E4m3>(session),
                        averages::<F8E5m2>(session),
                        averages::<bf16>(session),
                    ];
                    averages::<f32>(session);
                    averages::<f64>(session);
                    let products = [
                        products::<f16>(session),
                        products::<F8E4m3>(session),
                        products::<F8E5m2>(session),
                    ];
                    assert_eq!(products, [[1.0, 1.0]; 3]);
                    short
                })
            })
            .collect();
        // Sums of f16 and the 8-bit floats are exact in f32. Sums of bf16 are not, and depend on
        // the order.
        for (slots, result) in ["2x2", "4x1"].into_iter().zip(&results[1..]) {
            for (rank, (got, one_node)) in result.iter().zip(&results[0]).enumerate() {
                assert_eq!(got[..3], one_node[..3], "rank {rank} on {slots}, {algorithm}");
            }
        }
    }
}

/// Minimum and maximum of values from 1 to 2, with a prescale and a postscale factor.
fn scaled_extremes<T: Float + Debug>(session: &Session) -> Vec<f64> {
    let (prescale, postscale) = (1.0 / 3.0, -1.5);
    let value = |index: usize, rank: usize| T::of(1.0 + (index * (rank + 5) % 256) as f64 / 256.0);
    let rank = session.rank() as usize;
    let mine: Vec<T> = (0..256).map(|index| value(index, rank)).collect();
    let mut results = Vec::new();
    for op in [ReduceOp::Min, ReduceOp::Max] {
        let mut tensor = session.tensor(&mine, &[mine.len()]).unwrap();
        let options = AllreduceOptions::named(format!("{}.{op}", T::DTYPE)).op(op);
        let options = options.prescale(prescale).postscale(postscale);
        session.allreduce(&mut tensor, options).unwrap();
        for (index, got) in tensor.as_slice().iter().enumerate() {
            let values = (0..RANKS).map(|rank| value(index, rank).value());
            let extreme = if op == ReduceOp::Min { f64::min } else { f64::max };
            let right = values.reduce(extreme).unwrap() * prescale * postscale;
            let got = got.value();
            let bound = T::UNIT * right.abs() * (1.0 + 1e-6);
            assert!((got - right).abs() <= bound, "{op} of {}: {got:e}, not {right:e}", T::DTYPE);
            results.push(got);
        }
    }
    results
}

#[test]
fn extremes_with_two_factors_are_rounded_once() {
    let [one_node, two, four] = [&[4][..], &[2, 2], &[1, 1, 1, 1]].map(|slots| {
        run_job(&Plan::nodes(slots), |session| {
            [
                scaled_extremes::<f16>(session),
                scaled_extremes::<bf16>(session),
                scaled_extremes::<F8E4m3>(session),
                scaled_extremes::<F8E5m2>(session),
            ]
        })
    });
    assert_eq!(two, one_node);
    assert_eq!(four, one_node);
}
