//! Blink on links of any rates: proofs, sums of data, and traffic on slow links.

use gradwire_collectives::{Links, MAX_LINKED, verify::cross_tier_elements};

use super::*;

/// Links of random rates between the nodes of a topology, some of them without a limit.
fn with_rates(topology: Topology, random: &mut SplitMix64) -> Topology {
    let nodes = topology.participants();
    let mut draw = |all: &[u32]| all[(random.next_u64() % all.len() as u64) as usize];
    let lines = (0..nodes).map(|_| draw(&[1000, 10_000, 25_000])).collect();
    let pairs = (0..nodes * (nodes - 1) / 2).map(|_| draw(&[0, 1, 200, 900, 1000, 5000]));
    let pairs: Vec<u32> = pairs.collect();
    let pairs = if draw(&[0, 1, 2]) == 0 { Vec::new() } else { pairs };
    let uplink = draw(&[0, 100, 300]);
    topology.with_links(Links::new(lines, uplink, pairs))
}

/// ONE, SAME, WAIT: for every number of nodes, with rates that differ in every way.
#[test]
fn packed_trees_are_proven() {
    let mut random = SplitMix64::seed_from_u64(17);
    let mut proofs = Proofs::default();
    let specs = ["blink", "blink(trees=1)"].map(|text| Spec::parse(text).unwrap());
    for nodes in (1..=48).chain([64, 96, MAX_LINKED, MAX_LINKED + 2]) {
        let topology = layouts(nodes).swap_remove((nodes % 7) as usize);
        let topology =
            if nodes > MAX_LINKED { topology } else { with_rates(topology, &mut random) };
        for spec in specs {
            let root = nodes / 3;
            for kind in [Kind::Allreduce, Kind::Broadcast { root }, Kind::Reduce { root }] {
                for count in [1, 1001, 1 << 20] {
                    proofs.prove(kind, spec, &topology, count);
                }
            }
        }
    }
}

/// Two sites of four nodes with fast links inside and slow ones between, of which one is faster:
/// nearly all crossing traffic goes there.
#[test]
fn slow_links_carry_little() {
    let site = |node: u32| node / 4;
    let mut pairs = Vec::new();
    for a in 0..8u32 {
        pairs.extend((a + 1..8).map(|b| match (a, b) {
            (2, 5) => 800,
            _ if site(a) == site(b) => 10_000,
            _ => 10,
        }));
    }
    let links = Links::new(vec![100_000; 8], 0, pairs).unwrap();
    let topology = Topology::flat(8).with_links(Some(links));
    let count = 1 << 20;
    for (kind, ways) in [(Kind::Allreduce, 2), (Kind::Broadcast { root: 6 }, 1)] {
        let schedules = all(kind, Algorithm::Blink, &topology, count);
        proven(kind, Algorithm::Blink.into(), &topology, &schedules);
        let sites = Topology::from_racks((0..8).map(site).collect());
        let crossing = cross_tier_elements(&schedules, &sites, 1);
        assert!(crossing <= ways * count * 11 / 10, "{kind:?}: {crossing} of {count}");
        let fast: u64 = schedules
            .iter()
            .flat_map(|schedule| schedule.steps.iter().map(move |step| (schedule, step)))
            .filter(|(schedule, step)| {
                let to = step.action.sends_to().map(|(peer, _)| peer);
                matches!((schedule.me, to), (2, Some(5)) | (5, Some(2)))
            })
            .map(|(schedule, step)| schedule.elements(step))
            .sum();
        assert!(fast * 10 >= crossing * 8, "{kind:?}: {fast} of {crossing}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// On data, in a random order with random progress.
    #[test]
    fn packed_trees_have_right_sums(
        topology in (1..=20usize).prop_flat_map(tiers::any),
        count in prop_oneof![Just(0usize), Just(1), 2..200usize, 200..20_000usize],
        seed in any::<u64>(),
    ) {
        let mut random = SplitMix64::seed_from_u64(seed);
        let topology = with_rates(topology, &mut random);
        let (dtype, op) = (DType::I32, ReduceOp::Sum);
        let nodes = topology.participants() as usize;
        let values: Vec<Vec<i64>> = (0..nodes)
            .map(|rank| (0..count).map(|_| draw(dtype, op, rank, nodes, &mut random)).collect())
            .collect();
        let contributions: Vec<Vec<Vec<u8>>> =
            values.iter().map(|own| vec![bytes_of(dtype, own)]).collect();
        let data = Data {
            combine: Combine { dtype, op },
            prescale: 1.0,
            finish: Finish::none(dtype),
            contributions: &contributions,
        };
        let kind = Kind::Allreduce;
        let schedules = all(kind, Algorithm::Blink, &topology, count as u64);
        let sections = kind.sections(topology.participants(), count as u64);
        let wanted = bytes_of(dtype, &expected(dtype, op, &values));
        for result in interpret::run(&schedules, &sections, &data, seed).unwrap() {
            prop_assert!(result == wanted, "seed {seed}");
        }
    }
}
