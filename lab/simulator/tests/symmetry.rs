//! Simulating one representative gives the same result as simulating all hosts.

mod common;

use std::sync::Arc;

use common::{RATE, racks};
use gradwire_collectives::{Kind, Spec, Topology};
use gradwire_simulator::{
    Setup,
    config::{Control, Processor, Tcp, Transport},
    fair::Fair,
    fault::{Effect, Fault},
    job::{InOrder, Operation},
    network::{Ecmp, Network},
    report::Outcome,
    run,
};

/// Uplinks at half the rate of a rack's lines, if there are several racks.
fn setup(topology: Topology) -> Setup {
    let members = topology.groups(1)[0].len();
    let is_one = topology.groups(1).len() == 1;
    let network = Network::even(topology, RATE, 10e-6);
    let transport = Transport { chunk: 4096, socket: 8192, ..Transport::default() };
    let network = match is_one {
        true => network,
        false => network.with_spines(2, RATE * members as f64 / 4.0, 5e-6, Ecmp::Ideal),
    };
    Setup { transport, details: true, ..Setup::new(network) }
}

fn simulate(setup: &Setup, spec: &str, bytes: u64, pieces: usize) -> Outcome {
    let hosts = setup.network.topology.participants();
    let spec = Spec::parse(spec).unwrap();
    let operation = Arc::new(Operation::new(Kind::Allreduce, spec, bytes, hosts));
    run(
        setup,
        &mut InOrder::new(vec![operation; pieces], Control { credit: 2, ..Control::default() }),
    )
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.max(b)
}

/// Returns the number of simulated hosts.
fn agree(setup: &Setup, spec: &str, bytes: u64) -> u32 {
    let hosts = setup.network.hosts.len();
    let what =
        format!("{spec} of {bytes} bytes on {hosts} in {:?}", setup.network.topology.racks());
    let few = simulate(setup, spec, bytes, 3);
    let all = simulate(&Setup { collapse: false, ..setup.clone() }, spec, bytes, 3);
    assert_eq!(all.simulated_hosts, hosts as u32);
    assert!(near(few.seconds, all.seconds), "{what}: {} {}", few.seconds, all.seconds);
    assert_eq!((few.chunks, few.done.len()), (all.chunks, all.done.len()), "{what}");
    assert_eq!(few.senders, all.senders, "{what}");
    for (few, all) in few.done.iter().zip(&all.done) {
        let mut sorted = [few.nodes.clone(), all.nodes.clone()];
        sorted.iter_mut().for_each(|nodes| nodes.sort_by_key(|&(host, _)| host));
        for (few, all) in sorted[0].iter().zip(&sorted[1]) {
            assert!(few.0 == all.0 && near(few.1, all.1), "{what}: {few:?} {all:?}");
        }
    }
    let mut fair = Fair::default();
    let links = setup.network.add_to(&mut fair);
    let up_and_down = links.up.iter().chain(&links.down).flatten().flatten();
    for &id in links.egress.iter().chain(&links.ingress).chain(up_and_down) {
        let (few, all) = (few.usage.total(id), all.usage.total(id));
        // The rest of a chunk, when ends within a microsecond are one event.
        assert!((few - all).abs() <= 1.0, "{what}: {few} {all}");
    }
    for host in 0..hosts {
        assert!(near(few.sent[host], all.sent[host]), "{what}");
        assert!(near(few.received[host], all.received[host]), "{what}");
    }
    assert!(!few.critical_path.is_empty(), "{what}");
    let [last, expected] = [&few, &all].map(|outcome| outcome.critical_path.last().unwrap());
    assert!(near(last.end, expected.end), "{what}: {last:?} {expected:?}");
    let senders = few.critical_path.iter().filter_map(|hop| hop.from.map(|from| (from, hop.host)));
    assert!(senders.clone().all(|(from, to)| from != to), "{what}");
    assert_eq!(senders.count() > 0, hosts > 1, "{what}");
    few.simulated_hosts
}

#[test]
fn one_host_represents_all() {
    for hosts in [2, 3, 4, 5, 7, 8, 12, 13, 16, 31, 32, 48, 64] {
        let flat = setup(Topology::flat(hosts));
        for spec in
            ["ring", "ring(way=around)", "ring(segments=4)", "direct", "rat", "bcube(radix=64)"]
        {
            for share in [256, 12 << 10, 52 * 256] {
                // RAT's blocks are at least this large.
                let share = if spec == "rat" { share.max(2048) } else { share };
                let simulated = agree(&flat, spec, share * u64::from(hosts));
                assert_eq!(simulated, 1, "{spec} on {hosts}, {share} bytes each");
            }
        }
        for spec in ["circulant", "circulant(radix=4)", "bcube", "bcube(radix=3)"] {
            for share in [4096, 3 * 4096] {
                let simulated = agree(&flat, spec, share * u64::from(hosts));
                assert_eq!(simulated, 1, "{spec} on {hosts}, {share} bytes each");
            }
        }
    }
}

#[test]
fn racks_are_alike_and_so_are_their_members() {
    for (hosts, size) in [(4, 2), (6, 2), (8, 4), (12, 4), (15, 5), (32, 8), (64, 16), (64, 8)] {
        let racks = setup(racks(hosts, size));
        let share = 4096 * u64::from(hosts);
        for (spec, simulated) in [
            ("ring", size),
            ("ring(way=around)", size),
            ("circulant", 1),
            ("circulant(radix=4)", 1),
            ("bcube", size),
            ("direct", 1),
            ("rat", 1),
        ] {
            assert_eq!(agree(&racks, spec, share), simulated, "{spec} on {hosts} by {size}");
        }
        // Chunks contain parts of several blocks, different ones in each rack.
        let simulated = agree(&racks, "rat", 3 * 1024 * u64::from(hosts));
        assert_eq!(simulated, hosts / size, "{hosts} by {size}");
    }
}

/// If hosts differ in any respect, all of them are simulated.
#[test]
fn hosts_that_differ_are_all_simulated() {
    let even = setup(racks(16, 4));
    let count = |setup: &Setup, spec: &str, bytes| simulate(setup, spec, bytes, 1).simulated_hosts;
    let usual = 4096 * 16;
    assert_eq!(count(&even, "circulant", usual), 1);
    // Unequal shares, chunks with parts of two blocks, and trees.
    for (spec, bytes) in [
        ("ring", usual + 4),
        ("ring", 256 * 8),
        ("circulant", 2048 * 16),
        ("double-tree", usual),
        ("halving-doubling", usual),
    ] {
        assert_eq!(count(&even, spec, bytes), 16, "{spec} of {bytes} bytes");
    }
    let mut slow = even.clone();
    slow.network.hosts[3].egress /= 2.0;
    let mut hashed = even.clone();
    hashed.network.ecmp = Ecmp::Hash;
    let fault = Fault { until: 1e-3, ..Fault::lasting(Effect::Leave { host: 3 }) };
    let others = [
        slow,
        hashed,
        setup(Topology::from_racks((0..16).map(|host| u32::from(host > 5)).collect())),
        Setup { faults: vec![fault], ..even.clone() },
        Setup { tcp: Some(Tcp::default()), ..even.clone() },
        Setup { processor: Processor { local: 1e-9, ..Processor::default() }, ..even.clone() },
        Setup { processor: Processor { send: 1e-9, ..Processor::default() }, ..even.clone() },
        Setup { collapse: false, ..even },
    ];
    for setup in &others {
        assert_eq!(count(setup, "rat", usual), 16, "{setup:?}");
    }
}
