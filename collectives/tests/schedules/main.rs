//! Proves and runs every algorithm, for 1 to 130 participants in racks of all shapes and in tiers
//! above them.

mod costs;
mod exchanges;
mod grids;
mod interpret;
mod packed;
mod results;
mod servers;
mod tiers;

use std::{
    collections::HashMap,
    hash::{Hash, Hasher},
    iter::once,
    ops::RangeInclusive,
};

use gradwire_collectives::{
    Action, Algorithm, Block, Kind, Report, Schedule, Spec, Topology,
    algorithms::late,
    generate,
    verify::{self, canonical_order, verify},
};
use gradwire_kernels::{Combine, Finish};
use gradwire_proto::{DType, ReduceOp};
use proptest::prelude::{
    Just, ProptestConfig, Strategy, any, prop, prop_assert, prop_oneof, proptest,
};
use rand::{Rng, SeedableRng};
use rand_xoshiro::SplitMix64;

use interpret::Data;
use results::{bytes_of, draw, expected};
use tiers::{RACKS, layouts};

/// Every algorithm with its usual parameters, and some with others.
fn specs() -> Vec<Spec> {
    let others = [
        "ring(way=around)",
        "multi-ring(rings=3)",
        "circulant(radix=3)",
        "circulant(radix=8)",
        "bcube(radix=4)",
        "k-nomial(radix=3)",
        "circulant-blocks(blocks=5)",
        "ring(segments=3)",
        "chain(segments=9)",
        "binomial(segments=5)",
        "double-tree(segments=20)",
        "hips(along=ring)",
        "parameterhub(across=ring)",
        "blink(trees=3)",
    ];
    let others = others.iter().map(|text| Spec::parse(text).unwrap());
    Algorithm::ALL.iter().map(|algorithm| Spec::usual(*algorithm)).chain(others).collect()
}

fn all(kind: Kind, algorithm: impl Into<Spec>, topology: &Topology, count: u64) -> Vec<Schedule> {
    let spec = algorithm.into();
    (0..topology.participants()).map(|me| generate(kind, spec, topology, me, count)).collect()
}

fn prove(kind: Kind, algorithm: impl Into<Spec>, topology: &Topology, count: u64) -> Report {
    let spec = algorithm.into();
    proven(kind, spec, topology, &all(kind, spec, topology, count))
}

fn proven(kind: Kind, spec: Spec, topology: &Topology, schedules: &[Schedule]) -> Report {
    verify(schedules, kind).unwrap_or_else(|error| {
        let count: u64 = schedules[0].blocks.iter().map(|block| block.count).sum();
        panic!("{spec} {kind:?} over {topology:?}, {count} elements: {error}")
    })
}

/// A fast hash of many small numbers; the default one takes as long as a proof.
#[derive(Default)]
struct Mixer(u64);

impl Hasher for Mixer {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
    }

    fn write_u64(&mut self, number: u64) {
        let mixed = u128::from(self.0 ^ number ^ 0x9e37_79b9_7f4a_7c15);
        let mixed = mixed * 0xd129_0d3a_7f4a_7c15;
        self.0 = (mixed as u64 ^ (mixed >> 64) as u64).rotate_left(23);
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }

    fn write_isize(&mut self, number: isize) {
        self.write_u64(number as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// The schedules that have been proven. Many layouts and sizes lead to the same steps. A proof
/// depends only on the steps and on which blocks are empty, so one proof is enough for all of them.
#[derive(Default)]
struct Proofs(HashMap<u64, Option<u64>>);

impl Proofs {
    fn prove(&mut self, kind: Kind, spec: Spec, topology: &Topology, count: u64) {
        let schedules = all(kind, spec, topology, count);
        let blocks = &schedules[0].blocks;
        assert_eq!(blocks.iter().map(|block| block.count).sum::<u64>(), count);
        let sections = kind.sections(topology.participants(), count).len();
        assert!(blocks.len() <= sections.max(1024), "{} blocks", blocks.len());
        assert!(count == 0 || blocks.iter().all(|block| block.count > 0));
        let ends = blocks.iter().map(|block| block.offset + block.count);
        assert!(blocks.iter().map(|block| block.offset).eq(once(0).chain(ends).take(blocks.len())));
        let mut hasher = Mixer::default();
        (kind, blocks.len(), count == 0).hash(&mut hasher);
        for schedule in &schedules {
            assert_eq!(schedule.blocks, *blocks);
            let Schedule { participants, servers, me, steps, .. } = schedule;
            (participants, servers, me, steps).hash(&mut hasher);
        }
        let prove = || proven(kind, spec, topology, &schedules).order;
        let order = *self.0.entry(hasher.finish()).or_insert_with(prove);
        if kind.reduces() && spec.algorithm().is_canonical() && count > 0 {
            let canonical = canonical_order(&topology.order());
            assert_eq!(order, Some(canonical), "{spec} {kind:?} over {topology:?}");
        }
    }
}

const COUNTS: [u64; 5] = [0, 1, 1001, 64 * 64, (4 << 20) + 3];

/// Up to this many nodes everything is proven. With more nodes everything is proven only for the
/// algorithms that the cost model chooses; for the others each layout is proven with one choice in
/// turn. For algorithms that ignore tiers above the racks, tiers only change the order of nodes:
/// they are proven with one choice in turn, and only with few nodes.
const FEW: u32 = 24;

/// Up to this many nodes every spec is proven in every layout.
const FULL: u32 = 64;

fn in_turn<T: Copy>(spec: Spec, nodes: u32, layout: u32, all: &[T]) -> Vec<T> {
    let one = (nodes + layout) as usize % all.len();
    let is_chosen = [
        Algorithm::Ring,
        Algorithm::RecursiveDoubling,
        Algorithm::DoubleTree,
        Algorithm::Hierarchical,
        Algorithm::Linear,
        Algorithm::Circulant,
    ]
    .map(Spec::usual)
    .contains(&spec);
    let has_tiers = layout >= RACKS as u32;
    let in_tiers = [Algorithm::Hierarchical, Algorithm::Circulant].contains(&spec.algorithm());
    match nodes <= FEW {
        true if in_tiers || !has_tiers => all.to_vec(),
        false if is_chosen && !has_tiers => all.to_vec(),
        false if has_tiers && !in_tiers => Vec::new(),
        _ => vec![all[one]],
    }
}

/// A test for each range of numbers of nodes; the ranges take about equally long. A proof is for
/// one number of nodes, so nothing is proven twice.
macro_rules! in_parts {
    ($(#[$about:meta])* $name:ident, $prove:expr) => {
        $(#[$about])*
        mod $name {
            use super::*;

            #[test]
            fn up_to_24_nodes() {
                $prove(1..=FEW);
            }

            #[test]
            fn up_to_48_nodes() {
                $prove(FEW + 1..=48);
            }

            #[test]
            fn up_to_64_nodes() {
                $prove(49..=FULL);
            }

            #[test]
            fn up_to_130_nodes() {
                $prove(FULL + 1..=130);
            }
        }
    };
}

/// Every spec with every number of nodes above 64, each time with another layout and another of
/// `each` choices.
fn many(nodes: RangeInclusive<u32>, each: u32) -> impl Iterator<Item = (Spec, Topology, usize)> {
    let in_turn = move |nodes: u32| {
        let all = layouts(nodes);
        (0..).zip(specs()).map(move |(place, spec): (u32, Spec)| {
            let turn = nodes + place;
            let topology = all[turn as usize % all.len()].clone();
            (spec, topology, ((turn / all.len() as u32 + turn) % each) as usize)
        })
    };
    nodes.filter(|nodes| *nodes > FULL).flat_map(in_turn)
}

fn prove_allreduces(nodes: RangeInclusive<u32>) {
    let mut proofs = Proofs::default();
    for (spec, topology, turn) in many(nodes.clone(), COUNTS.len() as u32) {
        proofs.prove(Kind::Allreduce, spec, &topology, COUNTS[turn]);
    }
    for nodes in nodes.filter(|nodes| *nodes <= FULL) {
        for (layout, topology) in (0..).zip(layouts(nodes)) {
            for algorithm in specs() {
                for count in in_turn(algorithm, nodes, layout, &COUNTS) {
                    proofs.prove(Kind::Allreduce, algorithm, &topology, count);
                }
            }
        }
    }
}

in_parts! {
    /// ONE, SAME, WAIT: proven for every number of nodes, not only powers of two.
    every_allreduce_is_proven, prove_allreduces
}

/// ONE, SAME, WAIT: also if one node may be late. Each owner adds its contribution last, and only
/// two messages depend on its arrival.
#[test]
fn the_late_contribution_is_added_last() {
    for nodes in 1..=130 {
        let topology = Topology::flat(nodes);
        let all_of_them = (0..nodes).flat_map(|late| COUNTS.map(|count| (late, count))).collect();
        let one = vec![(some(nodes)[nodes as usize % some(nodes).len()], 1_000_003)];
        for (late, count) in if nodes <= 12 { all_of_them } else { one } {
            let schedules: Vec<Schedule> =
                (0..nodes).map(|me| late::generate(&topology, late, me, count)).collect();
            let report = verify(&schedules, Kind::Allreduce).unwrap();
            assert_eq!(report.longest_chain, if nodes > 1 && count > 0 { 2 } else { 0 });
            for schedule in &schedules {
                let reductions = schedule.steps.iter().filter_map(|step| match step.action {
                    Action::RecvReduce { peer, .. } => Some(peer),
                    _ => None,
                });
                let reductions: Vec<u32> = reductions.collect();
                assert!(schedule.me != late || reductions.is_empty());
                assert_eq!(reductions.last(), Some(&late).filter(|_| !reductions.is_empty()));
            }
        }
    }
}

/// The first, a middle and the last node.
fn some(nodes: u32) -> Vec<u32> {
    let mut some = vec![0, nodes / 2, nodes - 1];
    some.dedup();
    some
}

fn prove_rooted(nodes: RangeInclusive<u32>, kind: fn(u32) -> Kind, counts: &[u64]) {
    let mut proofs = Proofs::default();
    for (spec, topology, turn) in many(nodes.clone(), counts.len() as u32) {
        let roots = some(topology.participants());
        proofs.prove(kind(roots[turn % 3]), spec, &topology, counts[turn]);
    }
    for nodes in nodes.filter(|nodes| *nodes <= FULL) {
        for (layout, topology) in (0..).zip(layouts(nodes)) {
            for algorithm in specs() {
                for root in in_turn(algorithm, nodes, layout, &some(nodes)) {
                    for count in in_turn(algorithm, nodes, layout, counts) {
                        proofs.prove(kind(root), algorithm, &topology, count);
                    }
                }
            }
        }
    }
}

in_parts! {
    /// ONE, WAIT: the same for broadcasts, with some nodes as roots.
    every_broadcast_is_proven, |nodes| prove_rooted(nodes, |root| Kind::Broadcast { root }, &COUNTS)
}

in_parts! {
    /// ONE, WAIT: and for reductions to one node. Their blocks are those of the broadcasts, so
    /// there are fewer sizes.
    every_reduction_to_one_is_proven,
    |nodes| prove_rooted(nodes, |root| Kind::Reduce { root }, &[0, 1001, (4 << 20) + 3])
}

/// ONE, WAIT: and for moves, which are the same for all algorithms.
#[test]
fn every_move_is_proven() {
    for nodes in 1..=64 {
        let topology = Topology::flat(nodes);
        for (from, to) in
            some(nodes).into_iter().flat_map(|a| some(nodes).into_iter().map(move |b| (a, b)))
        {
            let kind = Kind::Move { from, to };
            for count in COUNTS {
                let report = prove(kind, Algorithm::Ring, &topology, count);
                let sent = if from == to { 0 } else { count };
                assert_eq!((report.elements_sent, report.most_elements_sent), (sent, sent));
                assert_eq!(report.longest_chain, u64::from(sent > 0));
                for me in 0..nodes {
                    let schedule = generate(kind, Algorithm::Ring, &topology, me, count);
                    // Participants that neither send nor receive have nothing to do.
                    assert_eq!(schedule.steps.is_empty(), me != to && (me != from || count == 0));
                    for algorithm in specs() {
                        assert_eq!(generate(kind, algorithm, &topology, me, count), schedule);
                    }
                }
            }
        }
    }
}

/// A reduction to one node sends the same as the broadcast from there, in the other direction,
/// except with the canonical order of additions.
#[test]
fn reductions_mirror_broadcasts() {
    let links = |schedules: &[Schedule], up: bool| {
        let mut links = Vec::new();
        for schedule in schedules {
            for step in schedule.steps.iter() {
                let Some((peer, _)) = step.action.sends_to() else { continue };
                let ends = if up { (peer, schedule.me) } else { (schedule.me, peer) };
                links.extend(step.blocks().map(|block| (ends, block)));
            }
        }
        links.sort_unstable();
        links
    };
    for nodes in 2..=24 {
        for topology in layouts(nodes) {
            for algorithm in specs() {
                if algorithm.algorithm().is_canonical() {
                    continue;
                }
                let root = nodes / 3;
                let down = all(Kind::Broadcast { root }, algorithm, &topology, 100_000);
                let up = all(Kind::Reduce { root }, algorithm, &topology, 100_000);
                assert_eq!(links(&down, false), links(&up, true), "{algorithm} over {topology:?}");
            }
        }
    }
}

/// One participant and no elements need no messages, but still a publication to complete.
#[test]
fn trivial_pieces_still_complete() {
    for algorithm in specs() {
        let alone = generate(Kind::Allreduce, algorithm, &Topology::flat(1), 0, 10);
        assert_eq!(*alone.blocks, [Block { offset: 0, count: 10 }]);
        assert_eq!(alone.steps.len(), 2);
        let empty = generate(Kind::Allreduce, algorithm, &Topology::flat(9), 4, 0);
        assert_eq!(empty.steps.len(), 1);
        // Participants without a result publish nothing.
        let up = Kind::Reduce { root: 4 };
        for me in 0..9 {
            let empty = generate(up, algorithm, &Topology::flat(9), me, 0);
            assert_eq!(empty.steps.len(), usize::from(me == 4));
        }
    }
}
