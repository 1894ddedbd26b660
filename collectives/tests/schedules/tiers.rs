//! Layouts of nodes: racks, groups of racks, groups of these, and so on. The traffic that crosses
//! them, and the number of messages.

use gradwire_collectives::{
    Algorithm, Kind, Schedule, Spec, Topology, verify::cross_tier_elements,
};
use proptest::prelude::{Just, Strategy, prop, prop_oneof};

use crate::{all, prove, proven};

/// The number of layouts without a tier above the racks.
pub(crate) const RACKS: usize = 7;

/// All layouts that are proven: the first [`RACKS`] have no tier above the racks.
pub(crate) fn layouts(nodes: u32) -> Vec<Topology> {
    let by = |rack: fn(u32, u32) -> u32| {
        Topology::from_racks((0..nodes).map(|node| rack(node, nodes)).collect())
    };
    let racks: [Topology; RACKS] = [
        Topology::flat(nodes),
        by(|node, nodes| node * 2 / nodes),
        by(|node, _| node % 3),
        by(|node, _| u32::from(node != 0)),
        by(|node, _| node),
        // Unequal racks: 1, 2, 3, … members.
        by(|node, _| ((8 * node + 1).isqrt() - 1) / 2),
        // Scattered, and numbered in no order.
        by(|node, _| (node * node + 3) % 7 * 10),
    ];
    racks.into_iter().chain(in_tiers(nodes)).collect()
}

/// Layouts with two and three tiers.
fn in_tiers(nodes: u32) -> Vec<Topology> {
    let by = |tiers: &[fn(u32) -> u32]| {
        let tiers = tiers.iter().map(|group| (0..nodes).map(group).collect()).collect();
        Topology::from_tiers(tiers).unwrap()
    };
    // 0, 1, 1, 2, 2, 2, …
    fn triangle(node: u32) -> u32 {
        ((8 * node + 1).isqrt() - 1) / 2
    }
    // Eleven racks in four groups, which are in two larger groups.
    fn scattered(node: u32) -> u32 {
        (5 * node + node / 7) % 11
    }
    vec![
        by(&[|node| node / 2, |node| node / 4]),
        by(&[|node| node / 2, |node| node / 4, |node| node / 8]),
        // Unequal racks in unequal groups.
        by(&[triangle, |node| triangle(triangle(node))]),
        by(&[scattered, |node| scattered(node) % 4, |node| scattered(node) % 2]),
    ]
}

/// Any racks, without tiers above them or with paths of different lengths, in any order.
pub(crate) fn any(nodes: usize) -> impl Strategy<Value = Topology> {
    let numbers: Vec<u32> = (0..nodes as u32).collect();
    let order = prop_oneof![Just(Vec::new()), Just(numbers).prop_shuffle()];
    let arranged = |(topology, order): (Topology, Vec<u32>)| topology.arranged(&[], &order);
    (grouped(nodes), order).prop_map(move |it| arranged(it).expect("an order of all nodes"))
}

fn grouped(nodes: usize) -> impl Strategy<Value = Topology> {
    let paths = prop::collection::vec(prop::collection::vec(0..3u8, 0..=3), nodes);
    prop_oneof![
        prop::collection::vec(0..6u32, nodes).prop_map(Topology::from_racks),
        paths.prop_map(|paths| {
            let label =
                |path: Vec<u8>| path.iter().map(u8::to_string).collect::<Vec<_>>().join("/");
            Topology::from_labels(&paths.into_iter().map(label).collect::<Vec<_>>())
        }),
    ]
}

/// Groups of one size: the nodes of a rack, the racks of a group, and so on. Successive numbers are
/// in different groups, so an order by number would cross at each step.
fn regular(sizes: &[u32]) -> Topology {
    let nodes: u32 = sizes.iter().product();
    let tier = |tier: usize| {
        let groups: u32 = sizes[tier..].iter().product();
        (0..nodes).map(|node| node % groups).collect()
    };
    Topology::from_tiers((1..sizes.len()).map(tier).collect()).unwrap()
}

/// The number of pieces that cross each tier, the racks first.
fn crossing(schedules: &[Schedule], topology: &Topology, count: u64) -> Vec<f64> {
    let tiers = 1..=topology.tiers().len();
    let crossing = tiers.map(|tier| cross_tier_elements(schedules, topology, tier));
    crossing.map(|elements| elements as f64 / count as f64).collect()
}

/// The minimum of pieces that cross each tier in a reduction to all owners, or in its way back.
fn least(topology: &Topology) -> Vec<f64> {
    (1..=topology.tiers().len()).map(|tier| topology.groups(tier).len() as f64 - 1.0).collect()
}

fn doubled(each: &[f64]) -> Vec<f64> {
    each.iter().map(|one| 2.0 * one).collect()
}

const REGULAR: [&[u32]; 6] =
    [&[2, 2, 2], &[4, 2, 3], &[2, 5, 2], &[1, 3, 2], &[2, 3, 2, 2], &[2, 2, 2, 2, 2]];

/// The traffic between racks is minimal; a ring crosses each boundary once.
#[test]
fn racks_are_crossed_as_rarely_as_possible() {
    let count = 64 * 5040;
    for (racks, size) in [(2u32, 4u32), (3, 5), (4, 8), (8, 3)] {
        let nodes = racks * size;
        // Striped, so that an order by number would cross at each step.
        let topology = Topology::from_racks((0..nodes).map(|node| node % racks).collect());
        let crossing = |kind, algorithm| {
            cross_tier_elements(&all(kind, algorithm, &topology, count), &topology, 1)
        };
        let least = 2 * u64::from(racks - 1) * count;
        assert_eq!(crossing(Kind::Allreduce, Algorithm::Hierarchical), least);
        assert_eq!(crossing(Kind::Allreduce, Algorithm::Circulant), least);
        let ring = 2 * u64::from(racks) * count * u64::from(nodes - 1) / u64::from(nodes);
        assert!(crossing(Kind::Allreduce, Algorithm::Ring) <= ring + 64 * u64::from(nodes));
        let once = u64::from(racks - 1) * count;
        let down = Kind::Broadcast { root: nodes / 2 };
        assert_eq!(crossing(down, Algorithm::Hierarchical), once);
        assert_eq!(crossing(down, Algorithm::Ring), once);
        let up = Kind::Reduce { root: nodes / 2 };
        assert_eq!(crossing(up, Algorithm::Hierarchical), once);
        assert_eq!(crossing(up, Algorithm::Ring), once);
    }
}

/// Cross-rack traffic is minimal at every tier, on any tree of groups. The chain has two messages
/// for each tier and two inside racks.
#[test]
fn hierarchical_has_minimal_traffic_in_tiers() {
    let count = 64 * 5040;
    let trees = REGULAR.into_iter().map(regular);
    let unequal = [3, 7, 20, 33, 64].into_iter().flat_map(in_tiers);
    for topology in trees.chain(unequal) {
        let nodes = topology.participants();
        let (least, tiers) = (least(&topology), topology.tiers().len() as u64);
        let alone = topology.members().iter().all(|rack| rack.len() == 1);
        for (kind, most) in [
            (Kind::Allreduce, 2 * (tiers + 1)),
            (Kind::Broadcast { root: nodes / 2 }, tiers + 1),
            (Kind::Reduce { root: nodes / 2 }, tiers + 1),
            (Kind::Allgather, tiers + 1),
            (Kind::ReduceScatter, tiers + 1),
        ] {
            // An exchange has an equal share for each node.
            let count = count / u64::from(nodes) * u64::from(nodes);
            let schedules = all(kind, Algorithm::Hierarchical, &topology, count);
            let chain =
                proven(kind, Algorithm::Hierarchical.into(), &topology, &schedules).longest_chain;
            let both = if kind == Kind::Allreduce { doubled(&least) } else { least.clone() };
            assert_eq!(crossing(&schedules, &topology, count), both, "{kind:?} {topology:?}");
            assert!(chain <= most, "{kind:?} over {topology:?}: {chain}");
            if kind == Kind::Allreduce && !alone && nodes > 20 {
                assert_eq!(chain, most, "{topology:?}");
            }
        }
    }
}

/// The same for the circulant on regular trees, and for grids with a dimension for each tier. A
/// ring crosses out of each group once.
#[test]
fn circulants_and_rings_keep_groups_together() {
    for topology in REGULAR.into_iter().map(regular) {
        let nodes = topology.participants();
        let count = 5040 * u64::from(nodes);
        let least = least(&topology);
        for spec in ["circulant", "circulant(radix=3)", "circulant(radix=8)"] {
            let spec = Spec::parse(spec).unwrap();
            let schedules = all(Kind::Allreduce, spec, &topology, count);
            assert_eq!(crossing(&schedules, &topology, count), doubled(&least), "{topology:?}");
            for kind in [Kind::Allgather, Kind::ReduceScatter] {
                let schedules = all(kind, spec, &topology, count);
                assert_eq!(crossing(&schedules, &topology, count), least, "{kind:?} {topology:?}");
            }
        }
        for spec in ["blueconnect", "hips", "hips(along=ring)"] {
            let spec = Spec::parse(spec).unwrap();
            let schedules = all(Kind::Allreduce, spec, &topology, count);
            assert_eq!(crossing(&schedules, &topology, count), doubled(&least), "{topology:?}");
        }
        for kind in [Kind::Broadcast { root: nodes / 2 }, Kind::Reduce { root: nodes / 2 }] {
            let schedules = all(kind, Algorithm::Ring, &topology, count);
            assert_eq!(crossing(&schedules, &topology, count), least, "{kind:?} {topology:?}");
        }
        let schedules = all(Kind::Allreduce, Algorithm::Ring, &topology, count);
        let around = 2.0 * f64::from(nodes - 1) / f64::from(nodes);
        let each: Vec<f64> = least.iter().map(|others| around * (others + 1.0)).collect();
        for (found, each) in crossing(&schedules, &topology, count).iter().zip(&each) {
            // Blocks have whole numbers of elements.
            assert!((found / each - 1.0).abs() < 1e-3, "{found}, {each} over {topology:?}");
        }
    }
}

/// No node sends more than in direct exchange without regard to racks, if groups have one size, and
/// not much more otherwise.
#[test]
fn the_work_is_shared() {
    let count = 64 * 5040 * 4;
    let sent = |topology: &Topology| {
        let report = prove(Kind::Allreduce, Algorithm::Hierarchical, topology, count);
        let even = 2 * count * u64::from(topology.participants() - 1);
        report.most_elements_sent as f64 / (even as f64 / f64::from(topology.participants()))
    };
    for topology in REGULAR.into_iter().map(regular) {
        assert!(sent(&topology) < 1.01, "{} over {topology:?}", sent(&topology));
    }
    for topology in [24, 64].into_iter().flat_map(in_tiers) {
        // Without the tiers above them, members of small racks have more work.
        let in_racks = Topology::from_racks(topology.racks().to_vec());
        let (with, without) = (sent(&topology), sent(&in_racks));
        assert!(with < 1.05 * without, "{with}, {without} over {topology:?}");
    }
}
