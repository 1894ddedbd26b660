//! Exchanges, in which each block has its own roles: proofs and costs.

use gradwire_collectives::{Algorithm, Kind, Spec, Topology, verify::cross_tier_elements};

use crate::{Proofs, all, in_turn, layouts, prove, proven, some};

/// One spec for each kind of trees that an exchange can have.
fn exchanges() -> Vec<Spec> {
    let all = [
        "ring",
        "direct",
        "hierarchical",
        "circulant",
        "circulant(radix=3)",
        "bcube(radix=4)",
        "recursive-doubling",
    ];
    all.iter().map(|text| Spec::parse(text).unwrap()).collect()
}

/// ONE, SAME, WAIT: also if each participant has its own share. All alltoalls are proven only for
/// few participants, because they have a block for each pair.
#[test]
fn every_exchange_is_proven() {
    let mut proofs = Proofs::default();
    for nodes in 1..=64 {
        for (layout, topology) in (0..).zip(layouts(nodes)) {
            // Other specs have the trees of one of these.
            for spec in exchanges() {
                let root = some(nodes)[layout as usize % some(nodes).len()];
                let kinds = [
                    Kind::Allgather,
                    Kind::Gather { root },
                    Kind::Scatter { root },
                    Kind::ReduceScatter,
                ];
                for kind in in_turn(spec, nodes, layout, &kinds) {
                    proofs.prove(kind, spec, &topology, 100_003);
                }
                if nodes <= 10 || (layout == 0 && nodes % 13 == 0) {
                    proofs.prove(Kind::Alltoall, spec, &topology, 100_003);
                }
            }
        }
    }
}

/// ONE, SAME, WAIT: with more nodes, each spec in another layout and with another collective.
#[test]
fn exchanges_of_many_nodes_are_proven() {
    let mut proofs = Proofs::default();
    for nodes in 65..=130u32 {
        let (layouts, root) = (layouts(nodes), nodes / 3);
        for (place, spec) in (0..).zip(exchanges()) {
            let turn: usize = nodes as usize + place;
            let kinds = [
                Kind::Allgather,
                Kind::Gather { root },
                Kind::Scatter { root },
                Kind::ReduceScatter,
            ];
            let topology = &layouts[turn % layouts.len()];
            proofs.prove(kinds[turn / layouts.len() % kinds.len()], spec, topology, 100_003);
        }
    }
    // An alltoall has a block for each pair.
    for (nodes, spec) in [65u32, 84, 96, 101, 113, 120, 130].into_iter().zip(exchanges()) {
        proofs.prove(Kind::Alltoall, spec, &Topology::flat(nodes), 100_003);
    }
}

/// The costs of exchanges: the longest chain of messages, and how many messages and elements each
/// participant sends.
#[test]
fn exchanges_cost_what_they_should() {
    let racks = |nodes: u32, racks: u32| {
        Topology::from_racks((0..nodes).map(|node| node * racks / nodes).collect())
    };
    for nodes in 2..=32u32 {
        let share = 64 * 16;
        let others = u64::from(nodes - 1);
        let log = u64::from(nodes.next_power_of_two().ilog2());
        let flat = Topology::flat(nodes);
        let all = [
            (Algorithm::Ring, others, others),
            (Algorithm::Direct, 1, others),
            (Algorithm::Circulant, log, log),
        ];
        // A contribution skips the rounds that don't lead to its owner: among three participants
        // all but one.
        let is_chain = |found: u64, algorithm, longest: u64| match algorithm {
            Algorithm::Circulant => (longest.div_ceil(2)..=longest).contains(&found),
            _ => found == longest,
        };
        for (algorithm, chain, messages) in all {
            for kind in [Kind::Allgather, Kind::ReduceScatter] {
                let report = prove(kind, algorithm, &flat, u64::from(nodes) * share);
                let each = messages * u64::from(nodes);
                assert!(is_chain(report.longest_chain, algorithm, chain), "{kind:?}: {report:?}");
                assert_eq!(report.messages, each, "{algorithm} {kind:?}");
                assert_eq!(report.most_elements_sent, others * share, "{algorithm} {kind:?}");
            }
            let count = u64::from(nodes * nodes) * share;
            let report = prove(Kind::Alltoall, algorithm, &flat, count);
            let each = messages * u64::from(nodes);
            assert!(is_chain(report.longest_chain, algorithm, chain), "{report:?}");
            assert_eq!(report.messages, each, "{algorithm}");
            if algorithm == Algorithm::Direct {
                assert_eq!(report.most_elements_sent, others * share);
            }
            for kind in [Kind::Gather { root: 1 }, Kind::Scatter { root: 1 }] {
                let report = prove(kind, algorithm, &flat, u64::from(nodes) * share);
                assert!(is_chain(report.longest_chain, algorithm, chain), "{kind:?}: {report:?}");
            }
        }
    }
    // 32 nodes in 4 racks of 8: what has to cross, crosses once.
    let topology = racks(32, 4);
    let count = 32 * 64 * 16;
    for (algorithm, chain) in [(Algorithm::Hierarchical, 2), (Algorithm::Circulant, 5)] {
        for kind in [Kind::Allgather, Kind::ReduceScatter] {
            let schedules = all(kind, algorithm, &topology, count);
            assert_eq!(proven(kind, algorithm.into(), &topology, &schedules).longest_chain, chain);
            assert_eq!(cross_tier_elements(&schedules, &topology, 1), 3 * count, "{algorithm}");
        }
    }
}
