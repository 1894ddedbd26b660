//! What schedules cost: the length of their chains, what each participant sends, and what crosses
//! between racks.

use gradwire_collectives::{
    Algorithm, Kind, Schedule, Spec, Topology, generate, verify::cross_tier_elements,
};

use crate::{all, prove, proven};

/// The costs that the literature promises for each algorithm, found in its schedules.
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

        let circulant = report(Algorithm::Circulant);
        assert!(circulant.longest_chain <= u64::from(2 * log), "{nodes}: {circulant:?}");
        assert!(circulant.most_elements_sent <= least + slack, "{nodes}: {circulant:?}");
        // One message for each round, however many blocks it holds.
        assert_eq!(circulant.messages, u64::from(2 * log * nodes), "{nodes}");

        let doubling = report(Algorithm::RecursiveDoubling);
        let fold = if nodes.is_power_of_two() { 0 } else { 2 };
        let longest = u64::from(nodes.ilog2() + fold);
        assert!((longest - u64::from(fold / 2)..=longest).contains(&doubling.longest_chain));
        assert!(doubling.most_elements_sent <= u64::from(log) * count, "{nodes}: {doubling:?}");
    }
}

/// A mesh uses only links between neighbours in its rows and columns.
#[test]
fn meshes_use_links_of_neighbours() {
    for (wide, high) in [(2, 2), (4, 3), (3, 5), (8, 4), (7, 1)] {
        let nodes = wide * high;
        let topology = Topology::flat(nodes);
        let given = Spec::parse(&format!("mesh(dims={wide}x{high})"));
        let spec = given.unwrap_or(Algorithm::Mesh.into());
        let root = nodes / 3;
        for kind in [Kind::Allreduce, Kind::Broadcast { root }, Kind::Reduce { root }] {
            let schedules = all(kind, spec, &topology, 100_000);
            let report = proven(kind, spec, &topology, &schedules);
            let farthest = u64::from(wide - 1 + high - 1);
            let ways = if kind == Kind::Allreduce { 2 } else { 1 };
            assert!(report.longest_chain <= ways * farthest, "{spec} {kind:?}: {report:?}");
            for schedule in &schedules {
                let sends = schedule.steps.iter().filter_map(|step| step.action.sends_to());
                for (peer, _) in sends {
                    let (dx, dy) = (
                        (peer % wide).abs_diff(schedule.me % wide),
                        (peer / wide).abs_diff(schedule.me / wide),
                    );
                    assert_eq!(dx + dy, 1, "{spec} {kind:?}: {} sends to {peer}", schedule.me);
                }
            }
        }
    }
}

/// An inner node of a line passes results on to both sides: twice the data of the line, or once on
/// a line of two; each further dimension has a part of the data.
#[test]
fn the_middle_of_a_mesh_sends_more() {
    for (wide, high, expected) in [
        (2, 2, 1.5),
        (2, 3, 2.0),
        (3, 2, 2.0 + 1.0 / 3.0),
        (3, 3, 2.0 + 2.0 / 3.0),
        (4, 4, 2.5),
        (5, 13, 2.4),
    ] {
        let spec = Spec::parse(&format!("mesh(dims={wide}x{high})")).unwrap();
        let topology = Topology::flat(wide * high);
        let count = u64::from(wide * high) * 64 * 100;
        let report = prove(Kind::Allreduce, spec, &topology, count);
        let sent = report.most_elements_sent as f64 / count as f64;
        assert!((sent - expected).abs() < 1e-6, "{spec}: {sent}, not {expected}");
    }
}

/// BOUND: for any number of rings.
#[test]
fn several_rings_have_a_bounded_number_of_blocks() {
    let spec = Spec::parse("multi-ring(rings=16,segments=256)").unwrap();
    for nodes in [1, 2, 3, 7, 64, 130, 1024, 4096] {
        let topology = Topology::flat(nodes);
        let schedule = generate(Kind::Allreduce, spec, &topology, nodes / 2, 1 << 40);
        assert!(schedule.blocks.len() <= 4096, "{nodes}: {}", schedule.blocks.len());
    }
    for nodes in [3, 16] {
        prove(Kind::Allreduce, spec, &Topology::flat(nodes), 1 << 22);
    }
}

/// BOUND: for any number of segments and owners.
#[test]
fn servers_have_a_bounded_number_of_blocks() {
    for segments in [1, 16, 256] {
        let spec = Spec::parse(&format!("servers(segments={segments})")).unwrap();
        for (ranks, servers) in [(2, 1), (2, 14), (64, 3), (64, 64), (1000, 24), (4000, 96)] {
            let topology = Topology::flat(ranks + servers).with_servers(servers);
            for count in [1 << 20, 1 << 40] {
                let schedule = generate(Kind::Allreduce, spec, &topology, ranks, count);
                let blocks = schedule.blocks.len();
                assert!(blocks <= 4096, "{spec}, {ranks} and {servers}: {blocks}");
            }
        }
    }
    let spec = Spec::parse("servers(segments=256)").unwrap();
    for (ranks, servers) in [(3, 1), (16, 4), (4, 16)] {
        prove(
            Kind::Allreduce,
            spec,
            &Topology::flat(ranks + servers).with_servers(servers),
            1 << 22,
        );
    }
}

/// The literature's figures for 32 nodes in 4 racks: pieces that cross between racks, and the
/// longest chain of messages.
#[test]
fn traffic_is_that_of_the_table() {
    // All shares are equal, in grids, too.
    let count = 64 * 32 * 30;
    let in_order = Topology::from_racks((0..32).map(|node| node / 8).collect());
    for (text, across, chain) in [
        // A parameter server on each node.
        ("direct", 48.0, 2),
        ("ring", 7.75, 62),
        ("ring(way=around)", 7.75, 62),
        // RAT, and PLink: they are the same schedule.
        ("hierarchical", 6.0, 4),
        ("blueconnect", 6.0, 20),
        ("halving-doubling", 6.0, 10),
        ("circulant", 6.0, 10),
        ("circulant(radix=8)", 6.0, 4),
        ("swing", 11.0, 10),
        ("bine", 11.0, 10),
    ] {
        let spec = Spec::parse(text).unwrap();
        let schedules = all(Kind::Allreduce, spec, &in_order, count);
        let found = cross_tier_elements(&schedules, &in_order, 1) as f64 / count as f64;
        assert_eq!(found, across, "{text}");
        let report = proven(Kind::Allreduce, spec, &in_order, &schedules);
        assert_eq!(report.longest_chain, chain, "{text}");
    }
    // PLink as a circulant: distances over all racks, then between them. Each node sends as much
    // inside its rack and out of it as in RAT, but to two nodes of each other rack.
    let sent = |text: &str| -> Vec<[u64; 2]> {
        let schedules = all(Kind::Allreduce, Spec::parse(text).unwrap(), &in_order, count);
        let of = |schedule: &Schedule| {
            let mut sent = [0; 2];
            for step in schedule.steps.iter() {
                if let Some((peer, _)) = step.action.sends_to() {
                    let inside = in_order.same_rack(schedule.me, peer);
                    sent[usize::from(inside)] += schedule.elements(step);
                }
            }
            sent
        };
        schedules.iter().map(of).collect()
    };
    assert_eq!(sent("hierarchical"), sent("circulant(radix=8)"));
    // Distances without regard to racks.
    let plain = all(Kind::Allreduce, Algorithm::Bcube, &in_order, count);
    let found = cross_tier_elements(&plain, &in_order, 1) as f64 / count as f64;
    assert!((53.25..53.35).contains(&found), "{found}");
}
