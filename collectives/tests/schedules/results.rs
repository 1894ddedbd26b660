//! Runs every algorithm on data in a random order: all receivers get the result, with the same
//! bits.

use gradwire_collectives::{Kind, Roles, Schedule, Section, Spec, Topology, generate_sections};
use gradwire_kernels::{Combine, Finish};
use gradwire_proto::{DType, F8E4m3, F8E5m2, ReduceOp};
use proptest::prelude::{
    Just, ProptestConfig, Strategy, any, prop, prop_assert, prop_assume, prop_oneof, proptest,
};
use rand::{Rng, SeedableRng};
use rand_xoshiro::SplitMix64;

use crate::{
    all,
    interpret::{self, Data},
    specs, tiers,
};

pub(super) fn bytes_of(dtype: DType, values: &[i64]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for &value in values {
        match dtype {
            DType::F32 => bytes.extend((value as f32).to_ne_bytes()),
            DType::F64 => bytes.extend((value as f64).to_ne_bytes()),
            DType::F16 => bytes.extend(half::f16::from_f64(value as f64).to_ne_bytes()),
            DType::Bf16 => bytes.extend(half::bf16::from_f64(value as f64).to_ne_bytes()),
            DType::F8E4m3 => bytes.push(F8E4m3::from_f32(value as f32).to_bits()),
            DType::F8E5m2 => bytes.push(F8E5m2::from_f32(value as f32).to_bits()),
            DType::C64 => bytes.extend([value, -value].map(|v| (v as f32).to_ne_bytes()).concat()),
            DType::C128 => bytes.extend([value, -value].map(|v| (v as f64).to_ne_bytes()).concat()),
            DType::I8 | DType::U8 | DType::Bool => bytes.push(value as u8),
            DType::I16 | DType::U16 => bytes.extend((value as u16).to_ne_bytes()),
            DType::I32 | DType::U32 => bytes.extend((value as u32).to_ne_bytes()),
            DType::I64 | DType::U64 => bytes.extend(value.to_ne_bytes()),
        }
    }
    bytes
}

/// A value of one of `world` ranks. Every type holds the sums of all such values, and of any part
/// of them, exactly, and averages are whole.
pub(super) fn draw(
    dtype: DType,
    op: ReduceOp,
    rank: usize,
    world: usize,
    random: &mut SplitMix64,
) -> i64 {
    let draw = random.next_u64();
    let short = matches!(dtype, DType::F8E4m3 | DType::F8E5m2);
    match op {
        _ if dtype == DType::Bool => (draw % 2) as i64,
        // The shortest floats hold whole numbers up to 8.
        ReduceOp::Average if short => i64::from(world <= 8),
        ReduceOp::Average => 1,
        ReduceOp::Sum if short && rank >= 8 => 0,
        // Bf16 holds them up to 256; 128 ranks of ±1 stay there. Integers wrap.
        ReduceOp::Sum => (draw % 3) as i64 - 1,
        ReduceOp::Product => 1 - 2 * (draw % 2) as i64,
        ReduceOp::Min | ReduceOp::Max if short => (draw % 9) as i64,
        ReduceOp::Min | ReduceOp::Max => (draw % 100) as i64,
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => draw as i64,
    }
}

pub(super) fn expected(dtype: DType, op: ReduceOp, contributions: &[Vec<i64>]) -> Vec<i64> {
    (0..contributions[0].len())
        .map(|i| {
            let all = contributions.iter().map(|c| c[i]);
            match op {
                ReduceOp::Sum if dtype == DType::Bool => all.max().unwrap(),
                ReduceOp::Sum => all.sum(),
                ReduceOp::Average => all.sum::<i64>() / contributions.len() as i64,
                ReduceOp::Min => all.min().unwrap(),
                ReduceOp::Max => all.max().unwrap(),
                ReduceOp::Product => all.product(),
                ReduceOp::BitAnd => all.fold(-1, |a, b| a & b),
                ReduceOp::BitOr => all.fold(0, |a, b| a | b),
                ReduceOp::BitXor => all.fold(0, |a, b| a ^ b),
            }
        })
        .collect()
}

#[derive(Debug, Clone)]
struct Case {
    topology: Topology,
    algorithm: Spec,
    dtype: DType,
    op: ReduceOp,
    ranks: Vec<u8>,
    /// The root, or none for all participants.
    root: Option<u32>,
    count: usize,
    seed: u64,
}

impl Case {
    fn reduction(&self) -> Kind {
        self.root.map_or(Kind::Allreduce, |root| Kind::Reduce { root })
    }
}

/// All valid pairs of type and operation.
fn pairs() -> Vec<(DType, ReduceOp)> {
    let all = DType::ALL.iter().flat_map(|&dtype| ReduceOp::ALL.iter().map(move |&op| (dtype, op)));
    all.filter(|(dtype, op)| op.refuses(*dtype).is_none()).collect()
}

fn case() -> impl Strategy<Value = Case> {
    (1..=64usize).prop_flat_map(|nodes| {
        (
            tiers::any(nodes),
            prop::sample::select(specs()),
            prop::sample::select(pairs()),
            prop::collection::vec(1..=2u8, nodes),
            prop::option::of(0..nodes as u32),
            prop_oneof![Just(0usize), Just(1), 2..200usize, 200..6000usize],
            any::<u64>(),
        )
            .prop_map(|(topology, algorithm, (dtype, op), ranks, root, count, seed)| {
                Case { topology, algorithm, dtype, op, ranks, root, count, seed }
            })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]

    /// ONE, SAME: on data, in a random order with random progress, exactly the receivers get the
    /// result, for all element types and operations.
    #[test]
    fn reductions_compute_what_they_should(case in case()) {
        let kind = case.reduction();
        let Case { topology, algorithm, dtype, op, ranks, count, seed, .. } = case;
        let mut random = SplitMix64::seed_from_u64(seed);
        let world: usize = ranks.iter().map(|&r| usize::from(r)).sum();
        // Their sum would overflow.
        prop_assume!(!(op == ReduceOp::Average && dtype == DType::I8 && world > 127));
        let mut values = Vec::new();
        let contributions: Vec<Vec<Vec<u8>>> = ranks
            .iter()
            .map(|&local| {
                let locals = (0..local).map(|_| {
                    let rank = values.len();
                    let own: Vec<i64> =
                        (0..count).map(|_| draw(dtype, op, rank, world, &mut random)).collect();
                    let bytes = bytes_of(dtype, &own);
                    values.push(own);
                    bytes
                });
                locals.collect()
            })
            .collect();
        let data = Data {
            combine: Combine { dtype, op },
            prescale: 1.0,
            finish: Finish { dtype, op, contributors: world as u32, postscale: 1.0 },
            contributions: &contributions,
        };
        let schedules = all(kind, algorithm, &topology, count as u64);
        let sections = kind.sections(topology.participants(), count as u64);
        let results = interpret::run(&schedules, &sections, &data, seed).unwrap();
        let wanted = bytes_of(dtype, &expected(dtype, op, &values));
        for (participant, result) in (0..).zip(&results) {
            let wanted = if sections[0].roles.publishes(participant) { &wanted[..] } else { &[] };
            prop_assert!(*result == wanted, "participant {participant}, seed {seed}");
        }
    }

    /// SAME: even if the result depends on the order of additions by rounding, all participants get
    /// the same bits, in every order of events.
    #[test]
    fn all_get_the_same_bits(case in case(), other in any::<u64>()) {
        let kind = case.reduction();
        let Case { topology, algorithm, dtype, ranks, count, seed, .. } = case;
        let mut random = SplitMix64::seed_from_u64(seed);
        let op = ReduceOp::Sum;
        let count = count.min(500);
        // Any bits at all, NaNs and infinities among them.
        let mut bytes = || (0..count * dtype.size()).map(|_| random.next_u64() as u8).collect();
        let contributions: Vec<Vec<Vec<u8>>> =
            ranks.iter().map(|&local| (0..local).map(|_| bytes()).collect()).collect();
        let postscale = if dtype.is_float() { 0.3 } else { 1.0 };
        let data = Data {
            combine: Combine { dtype, op },
            prescale: 1.0,
            finish: Finish { dtype, op, contributors: 3, postscale },
            contributions: &contributions,
        };
        let schedules = all(kind, algorithm, &topology, count as u64);
        let sections = kind.sections(topology.participants(), count as u64);
        let results = interpret::run(&schedules, &sections, &data, seed).unwrap();
        let again = interpret::run(&schedules, &sections, &data, other).unwrap();
        let got = |results: &[Vec<u8>]| {
            let results = (0..).zip(results).filter(|(me, _)| sections[0].roles.publishes(*me));
            results.map(|(_, result)| result.clone()).collect::<Vec<_>>()
        };
        let (results, again) = (got(&results), got(&again));
        for result in results.iter().chain(&again) {
            prop_assert!(*result == results[0], "{algorithm}, seeds {seed} and {other}");
        }
    }

    /// Sections of any roles and sizes, including empty ones, in any order: each participant gets
    /// the right result.
    #[test]
    fn sections_get_what_they_should(
        case in case(),
        roles in prop::collection::vec((any::<u8>(), any::<u8>(), 0..300u64), 1..40),
    ) {
        let Case { topology, algorithm, ranks, seed, .. } = case;
        let nodes = topology.participants();
        let end = |dice: u8| (!dice.is_multiple_of(4)).then(|| u32::from(dice) % nodes);
        let sections: Vec<Section> = roles
            .into_iter()
            .map(|(from, to, count)| {
                let roles = Roles { from: end(from), to: end(to) };
                Section { roles, count }
            })
            .collect();
        let count: u64 = sections.iter().map(|section| section.count).sum();
        let (dtype, op) = (DType::I32, ReduceOp::Sum);
        let mut random = SplitMix64::seed_from_u64(seed);
        let mut sums: Vec<Vec<i64>> = Vec::new();
        let contributions: Vec<Vec<Vec<u8>>> = ranks
            .iter()
            .map(|&local| {
                let all: Vec<Vec<i64>> = (0..local)
                    .map(|_| (0..count).map(|_| (random.next_u64() % 1000) as i64).collect())
                    .collect();
                sums.push(expected(dtype, op, &all));
                all.iter().map(|own| bytes_of(dtype, own)).collect()
            })
            .collect();
        let finish = Finish::none(dtype);
        let combine = Combine { dtype, op };
        let data = Data { combine, prescale: 1.0, finish, contributions: &contributions };
        let schedules: Vec<Schedule> =
            (0..nodes).map(|me| generate_sections(&sections, algorithm, &topology, me)).collect();
        let results = interpret::run(&schedules, &sections, &data, seed).unwrap();
        let total = expected(dtype, op, &sums);
        for (me, result) in (0..).zip(&results) {
            let mut at = 0;
            for section in &sections {
                let range = at..at + section.count as usize;
                at = range.end;
                if section.roles.publishes(me) {
                    let from = section.roles.from.map_or(&total, |from| &sums[from as usize]);
                    let wanted = bytes_of(dtype, &from[range.clone()]);
                    let published = &result[4 * range.start..4 * range.end];
                    prop_assert!(published == wanted, "{algorithm} at {me}");
                }
            }
        }
    }

    /// Broadcasts and moves copy bits, whatever they mean.
    #[test]
    fn moves_copy_bits(case in case(), from in any::<prop::sample::Index>()) {
        let Case { topology, algorithm, dtype, root: to, count, seed, .. } = case;
        // Truth values are moved as bytes; only results of computations are 0 or 1.
        let dtype = if dtype == DType::Bool { DType::U8 } else { dtype };
        let nodes = topology.participants();
        let from = from.index(nodes as usize) as u32;
        let mut random = SplitMix64::seed_from_u64(seed);
        let piece: Vec<u8> = (0..count * dtype.size()).map(|_| random.next_u64() as u8).collect();
        let mut contributions = vec![Vec::new(); nodes as usize];
        contributions[from as usize] = vec![piece.clone()];
        let data = Data {
            combine: Combine { dtype, op: ReduceOp::Sum },
            prescale: 1.0,
            finish: Finish::none(dtype),
            contributions: &contributions,
        };
        let kind = to.map_or(Kind::Broadcast { root: from }, |to| Kind::Move { from, to });
        let schedules = all(kind, algorithm, &topology, count as u64);
        let sections = kind.sections(topology.participants(), count as u64);
        for (me, result) in (0..).zip(interpret::run(&schedules, &sections, &data, seed).unwrap()) {
            let wanted = if sections[0].roles.publishes(me) { &piece[..] } else { &[] };
            prop_assert!(result == wanted, "{algorithm} {kind:?} at {me}, seed {seed}");
        }
    }
}
