//! Every algorithm, proven and run: for 1 to 64 participants in racks of all shapes.

use gradwire_collectives::{
    Algorithm, Block, Kind, Report, Schedule, Topology, generate,
    interpret::{self, Data, Random},
    kernels::{Combine, Finish},
    verify::{cross_rack_elements, verify},
};
use gradwire_proto::{DType, ReduceOp};
use proptest::prelude::*;

fn all(kind: Kind, algorithm: Algorithm, topology: &Topology, count: u64) -> Vec<Schedule> {
    (0..topology.participants()).map(|me| generate(kind, algorithm, topology, me, count)).collect()
}

fn layouts(nodes: u32) -> Vec<Topology> {
    let by = |rack: fn(u32, u32) -> u32| Topology {
        racks: (0..nodes).map(|node| rack(node, nodes)).collect(),
    };
    vec![
        Topology::flat(nodes),
        by(|node, nodes| node * 2 / nodes),
        by(|node, _| node % 3),
        by(|node, _| u32::from(node != 0)),
        by(|node, _| node),
        // Unequal racks: 1, 2, 3, … members.
        by(|node, _| ((8 * node + 1).isqrt() - 1) / 2),
        // Scattered, and numbered in no order.
        by(|node, _| (node * node + 3) % 7 * 10),
    ]
}

fn prove(kind: Kind, algorithm: Algorithm, topology: &Topology, count: u64) -> Report {
    let schedules = all(kind, algorithm, topology, count);
    let blocks = &schedules[0].blocks;
    assert_eq!(blocks.iter().map(|b| b.count).sum::<u64>(), count);
    assert!(blocks.len() <= 1024, "{} blocks", blocks.len());
    if count > 0 {
        assert!(blocks.iter().all(|b| b.count > 0));
    }
    verify(&schedules, kind).unwrap_or_else(|error| {
        panic!("{algorithm} {kind:?} over {topology:?}, {count} elements: {error}")
    })
}

const COUNTS: [u64; 5] = [0, 1, 1001, 64 * 64, (4 << 20) + 3];

/// ONE, SAME, WAIT: proven for every number of nodes, not only powers of two.
#[test]
fn every_allreduce_is_proven() {
    for nodes in 1..=64 {
        for topology in layouts(nodes) {
            for algorithm in Algorithm::ALL {
                for count in COUNTS {
                    prove(Kind::Allreduce, algorithm, &topology, count);
                }
            }
        }
    }
}

/// ONE, WAIT: the same for broadcasts, from the first, a middle and the last node.
#[test]
fn every_broadcast_is_proven() {
    for nodes in 1..=64 {
        for topology in layouts(nodes) {
            let mut roots = vec![0, nodes / 2, nodes - 1];
            roots.dedup();
            for root in roots {
                for algorithm in Algorithm::ALL {
                    for count in COUNTS {
                        prove(Kind::Broadcast { root }, algorithm, &topology, count);
                    }
                }
            }
        }
    }
}

/// What the literature promises of each algorithm, for the schedules as they are.
#[test]
fn costs_are_those_of_the_papers() {
    let count = 64 * 5040 * 4;
    for nodes in 2..=64u32 {
        let log = nodes.next_power_of_two().ilog2();
        let least = 2 * count * u64::from(nodes - 1) / u64::from(nodes);
        let slack = 64 * 1024;
        let flat = Topology::flat(nodes);
        let report = |algorithm| prove(Kind::Allreduce, algorithm, &flat, count);

        let ring = report(Algorithm::Ring);
        assert_eq!(ring.longest_chain, 2 * u64::from(nodes - 1));
        assert!(ring.most_elements_sent <= least + slack, "{nodes}: {ring:?}");

        let direct = report(Algorithm::Hierarchical);
        assert_eq!(direct.longest_chain, 2);
        assert!(direct.most_elements_sent <= least + slack, "{nodes}: {direct:?}");

        let tree = report(Algorithm::DoubleTree);
        assert!(tree.longest_chain <= u64::from(2 * log), "{nodes}: {tree:?}");
        assert!(tree.most_elements_sent <= 2 * count + slack, "{nodes}: {tree:?}");

        let doubling = report(Algorithm::RecursiveDoubling);
        let fold = if nodes.is_power_of_two() { 0 } else { 2 };
        let longest = u64::from(nodes.ilog2() + fold);
        assert!((longest - u64::from(fold / 2)..=longest).contains(&doubling.longest_chain));
        assert!(doubling.most_elements_sent <= u64::from(log) * count, "{nodes}: {doubling:?}");
    }
}

/// What crosses between racks is the least there is; a ring crosses each boundary once.
#[test]
fn racks_are_crossed_as_rarely_as_can_be() {
    let count = 64 * 5040;
    for (racks, size) in [(2u32, 4u32), (3, 5), (4, 8), (8, 3)] {
        let nodes = racks * size;
        // Striped, so that an order by number would cross all the time.
        let topology = Topology { racks: (0..nodes).map(|node| node % racks).collect() };
        let crossing = |kind, algorithm| {
            cross_rack_elements(&all(kind, algorithm, &topology, count), &topology)
        };
        let least = 2 * u64::from(racks - 1) * count;
        assert_eq!(crossing(Kind::Allreduce, Algorithm::Hierarchical), least);
        let ring = 2 * u64::from(racks) * count * u64::from(nodes - 1) / u64::from(nodes);
        assert!(crossing(Kind::Allreduce, Algorithm::Ring) <= ring + 64 * u64::from(nodes));
        let once = u64::from(racks - 1) * count;
        let down = Kind::Broadcast { root: nodes / 2 };
        assert_eq!(crossing(down, Algorithm::Hierarchical), once);
        assert_eq!(crossing(down, Algorithm::Ring), once);
    }
}

/// One participant and no elements need no messages, but still a publication to complete.
#[test]
fn trivial_pieces_still_complete() {
    for algorithm in Algorithm::ALL {
        let alone = generate(Kind::Allreduce, algorithm, &Topology::flat(1), 0, 10);
        assert_eq!(alone.blocks, [Block { offset: 0, count: 10 }]);
        assert_eq!(alone.steps.len(), 2);
        let empty = generate(Kind::Allreduce, algorithm, &Topology::flat(9), 4, 0);
        assert_eq!(empty.steps.len(), 1);
    }
}

fn bytes_of(dtype: DType, values: &[i64]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for &value in values {
        match dtype {
            DType::F32 => bytes.extend((value as f32).to_ne_bytes()),
            DType::F64 => bytes.extend((value as f64).to_ne_bytes()),
            DType::F16 => bytes.extend(half::f16::from_f64(value as f64).to_ne_bytes()),
            DType::Bf16 => bytes.extend(half::bf16::from_f64(value as f64).to_ne_bytes()),
            DType::I8 => bytes.extend((value as i8).to_ne_bytes()),
            DType::U8 => bytes.extend((value as u8).to_ne_bytes()),
            DType::I32 => bytes.extend((value as i32).to_ne_bytes()),
            DType::I64 => bytes.extend(value.to_ne_bytes()),
        }
    }
    bytes
}

/// Small whole numbers, whose sums every type holds exactly; products of signs.
fn expected(op: ReduceOp, contributions: &[Vec<i64>]) -> Vec<i64> {
    (0..contributions[0].len())
        .map(|i| {
            let all = contributions.iter().map(|c| c[i]);
            match op {
                ReduceOp::Sum => all.sum(),
                ReduceOp::Average => all.sum::<i64>() / contributions.len() as i64,
                ReduceOp::Min => all.min().unwrap(),
                ReduceOp::Max => all.max().unwrap(),
                ReduceOp::Product => all.product(),
            }
        })
        .collect()
}

#[derive(Debug, Clone)]
struct Case {
    topology: Topology,
    algorithm: Algorithm,
    dtype: DType,
    op: ReduceOp,
    ranks: Vec<u8>,
    count: usize,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    (1..=64usize).prop_flat_map(|nodes| {
        (
            prop::collection::vec(0..6u32, nodes),
            prop::sample::select(&Algorithm::ALL[..]),
            prop::sample::select(DType::ALL),
            prop::sample::select(ReduceOp::ALL),
            prop::collection::vec(1..=2u8, nodes),
            prop_oneof![Just(0usize), Just(1), 2..200usize, 200..6000usize],
            any::<u64>(),
        )
            .prop_map(|(racks, algorithm, dtype, op, ranks, count, seed)| Case {
                topology: Topology { racks },
                algorithm,
                dtype,
                op,
                ranks,
                count,
                seed,
            })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]

    /// ONE, SAME: on data, in a random order with random progress, every participant gets the
    /// result, for all element types and operations.
    #[test]
    fn allreduce_computes_the_reduction(case in case()) {
        let Case { topology, algorithm, dtype, op, ranks, count, seed } = case;
        let mut random = Random::new(seed);
        let world: usize = ranks.iter().map(|&r| usize::from(r)).sum();
        let mut values = Vec::new();
        let contributions: Vec<Vec<Vec<u8>>> = ranks
            .iter()
            .map(|&local| {
                let locals = (0..local).map(|_| {
                    let own: Vec<i64> = (0..count)
                        .map(|_| match op {
                            // Multiples, so that the average is whole, and u8 doesn't wrap.
                            ReduceOp::Average if dtype == DType::F16 || dtype == DType::Bf16 => 1,
                            ReduceOp::Sum if dtype == DType::U8 => (random.draw() % 2) as i64,
                            ReduceOp::Average => 1,
                            ReduceOp::Product if dtype == DType::U8 => 1,
                            ReduceOp::Product => 1 - 2 * (random.draw() % 2) as i64,
                            // Bf16 holds whole numbers up to 256 exactly; 128 ranks of ±1 stay there.
                            ReduceOp::Sum => (random.draw() % 3) as i64 - 1,
                            ReduceOp::Min | ReduceOp::Max => (random.draw() % 100) as i64,
                        })
                        .collect();
                    let bytes = bytes_of(dtype, &own);
                    values.push(own);
                    bytes
                });
                locals.collect()
            })
            .collect();
        let contributors = world as u32;
        let data = Data {
            combine: Combine { dtype, op },
            prescale: 1.0,
            // i8 wraps where 128 ranks add up; an average of one kind stays exact below.
            finish: Finish { dtype, op, contributors, postscale: 1.0 },
            contributions: &contributions,
        };
        prop_assume!(!(op == ReduceOp::Average && dtype == DType::I8 && world > 127));
        let schedules = all(Kind::Allreduce, algorithm, &topology, count as u64);
        let results = interpret::run(&schedules, Kind::Allreduce, &data, seed).unwrap();
        let wanted = bytes_of(dtype, &expected(op, &values));
        for (participant, result) in results.iter().enumerate() {
            prop_assert!(*result == wanted, "participant {participant}, seed {seed}");
        }
    }

    /// SAME: where rounding makes every order of reduction another result, all participants still
    /// get the same bits, and get them again in another order of events.
    #[test]
    fn everybody_gets_the_same_bits(case in case(), other in any::<u64>()) {
        let Case { topology, algorithm, dtype, ranks, count, seed, .. } = case;
        let mut random = Random::new(seed);
        let op = ReduceOp::Sum;
        let count = count.min(500);
        // Any bits at all, NaNs and infinities among them.
        let mut bytes = || (0..count * dtype.size()).map(|_| random.draw() as u8).collect();
        let contributions: Vec<Vec<Vec<u8>>> =
            ranks.iter().map(|&local| (0..local).map(|_| bytes()).collect()).collect();
        let data = Data {
            combine: Combine { dtype, op },
            prescale: 1.0,
            finish: Finish { dtype, op, contributors: 3, postscale: if dtype.is_float() { 0.3 } else { 1.0 } },
            contributions: &contributions,
        };
        let schedules = all(Kind::Allreduce, algorithm, &topology, count as u64);
        let results = interpret::run(&schedules, Kind::Allreduce, &data, seed).unwrap();
        let again = interpret::run(&schedules, Kind::Allreduce, &data, other).unwrap();
        for result in results.iter().chain(&again) {
            prop_assert!(*result == results[0], "{algorithm}, seeds {seed} and {other}");
        }
    }

    /// Broadcasts move bits, whatever they mean.
    #[test]
    fn broadcast_copies_the_root(case in case(), root in any::<prop::sample::Index>()) {
        let Case { topology, algorithm, dtype, count, seed, .. } = case;
        let nodes = topology.participants();
        let root = root.index(nodes as usize) as u32;
        let mut random = Random::new(seed);
        let piece: Vec<u8> = (0..count * dtype.size()).map(|_| random.draw() as u8).collect();
        let mut contributions = vec![Vec::new(); nodes as usize];
        contributions[root as usize] = vec![piece.clone()];
        let data = Data {
            combine: Combine { dtype, op: ReduceOp::Sum },
            prescale: 1.0,
            finish: Finish::none(dtype),
            contributions: &contributions,
        };
        let kind = Kind::Broadcast { root };
        let schedules = all(kind, algorithm, &topology, count as u64);
        for result in interpret::run(&schedules, kind, &data, seed).unwrap() {
            prop_assert!(result == piece, "{algorithm} from {root}, seed {seed}");
        }
    }
}
