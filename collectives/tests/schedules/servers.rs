//! Servers: proofs for all numbers of them, the load that they take, and sums of data.

use super::*;

/// All algorithms with servers, with several parameters.
fn specs() -> [Spec; 6] {
    let all = [
        "servers",
        "servers(segments=3)",
        "servers(servers=1)",
        "servers(segments=2,servers=0,weights=equal)",
        "parameterhub",
        "parameterhub(across=ring)",
    ];
    all.map(|text| Spec::parse(text).unwrap())
}

fn with_servers(contributors: u32, servers: u32) -> Topology {
    Topology::flat(contributors + servers).with_servers(servers)
}

/// ONE, SAME: for 1 to 40 nodes of which up to three quarters are servers.
#[test]
fn servers_reduce_for_the_others() {
    let mut proofs = Proofs::default();
    for nodes in 1..=40u32 {
        for servers in 0..=(nodes * 3 / 4).min(nodes - 1) {
            let topology = with_servers(nodes - servers, servers);
            for count in [0, 1, 64, 1001, 64 * 64, 1 << 20] {
                for spec in specs() {
                    proofs.prove(Kind::Allreduce, spec, &topology, count);
                }
            }
        }
    }
}

/// ONE, SAME: for every number of nodes up to 130, with up to half of them as servers, in racks of
/// all shapes and in tiers above them.
#[test]
fn servers_of_any_number_are_anywhere() {
    let mut proofs = Proofs::default();
    for nodes in 2..=130u32 {
        let layouts = layouts(nodes);
        let half = nodes / 2;
        for (place, servers) in [0, 1, half / 2, half].into_iter().enumerate() {
            for (at, spec) in specs().into_iter().enumerate() {
                let turn = nodes as usize + place + 5 * at;
                let topology = layouts[turn % layouts.len()].clone().with_servers(servers);
                proofs.prove(Kind::Allreduce, spec, &topology, COUNTS[turn % COUNTS.len()]);
            }
        }
    }
}

/// The busiest node sends 2n(n−1)/(n²+kn−2k) times the piece (BytePS). Blocks are at least a cache
/// line.
#[test]
fn servers_take_load_from_the_others() {
    let count = 64 << 20;
    let busiest = |n: u32, k: u32| {
        let topology = with_servers(n, k);
        prove(Kind::Allreduce, Algorithm::Servers, &topology, count)
    };
    for n in [2u32, 4, 8, 32] {
        for k in 0..=n {
            let report = busiest(n, k);
            let (n, k) = (f64::from(n), f64::from(k));
            let expected = 2.0 * n * (n - 1.0) / (n * n + k * n - 2.0 * k);
            let sent = report.most_elements_sent as f64 / count as f64;
            assert!((sent / expected - 1.0).abs() < 1e-3, "n={n} k={k}: {sent}, not {expected}");
            assert_eq!(report.longest_chain, 2);
        }
    }
    let at_8 = [0, 1, 4, 8].map(|k| busiest(8, k).most_elements_sent as f64 / count as f64);
    for (sent, expected) in at_8.iter().zip([1.75, 1.6, 1.2727, 1.0]) {
        assert!((sent - expected).abs() < 1e-3, "{sent}, not {expected}");
    }
    // Further servers share the servers' work.
    assert_eq!(busiest(4, 12).most_elements_sent, count);
}

/// `servers=K` ignores further servers, and `weights=equal` the rates of lines.
#[test]
fn servers_and_weights_can_be_chosen() {
    let count = 64 << 20;
    let sent = |text: &str, topology: &Topology| {
        let spec = Spec::parse(text).unwrap();
        let schedules = all(Kind::Allreduce, spec, topology, count);
        proven(Kind::Allreduce, spec, topology, &schedules);
        let of = |schedule: &Schedule| {
            let sends = schedule.steps.iter().filter(|step| step.action.sends_to().is_some());
            sends.map(|step| schedule.elements(step)).sum()
        };
        schedules.iter().map(of).collect::<Vec<u64>>()
    };
    for n in [2, 5, 8] {
        for used in 0..=4 {
            let found = sent(&format!("servers(servers={used})"), &with_servers(n, 4));
            let (busy, idle) = found.split_at((n + used) as usize);
            // Blocks are whole cache lines.
            for (sent, alone) in busy.iter().zip(sent("servers", &with_servers(n, used))) {
                assert!(sent.abs_diff(alone) <= 1024, "{n} and {used}: {sent}, {alone}");
            }
            assert!(idle.iter().all(|&sent| sent == 0), "{n} and {used}: {idle:?}");
        }
    }
    let lines = with_servers(4, 1).with_lines(&[1, 2, 3, 4, 5]);
    assert_eq!(sent("servers(weights=equal)", &lines), sent("servers", &with_servers(4, 1)));
    assert_ne!(sent("servers", &lines), sent("servers", &with_servers(4, 1)));
}

/// When the last line is done, in pieces divided by the unit of rates, found by bisection. At each
/// time, no owner takes more than its line allows.
fn bisected(own: &[u32], servers: &[u32]) -> f64 {
    let n = own.len() as f64;
    let shares = |time: f64| {
        let takes = |rate: &u32| ((time * f64::from(*rate) - 1.0) / (n - 2.0)).clamp(0.0, 1.0);
        let served = |rate: &u32| time * f64::from(*rate) / n;
        own.iter().map(takes).sum::<f64>() + servers.iter().map(served).sum::<f64>()
    };
    // Each has to send its own piece.
    let least = 1.0 / f64::from(*own.iter().min().unwrap());
    let (mut low, mut high) = (0.0, 4.0);
    while own.len() > 2 && high - low > 1e-9 {
        let middle = (low + high) / 2.0;
        if shares(middle) >= 1.0 { high = middle } else { low = middle }
    }
    if own.len() > 2 { high.max(least) } else { least }
}

/// With lines of any rates, the last one is done as early as possible. Compares the traffic of the
/// schedules with a search.
#[test]
fn faster_lines_do_more() {
    let mut random = SplitMix64::seed_from_u64(7);
    let mut below = |most: u64| (random.next_u64() % most) as usize;
    let count = 16 << 20;
    for _ in 0..300 {
        let (n, k) = (2 + below(11), below(6));
        let rates: Vec<u32> = (0..n + k).map(|_| [1, 2, 4, 5, 10, 40][below(6)]).collect();
        let topology = with_servers(n as u32, k as u32).with_lines(&rates);
        let schedules = all(Kind::Allreduce, Algorithm::Servers, &topology, count);
        verify::verify(&schedules, Kind::Allreduce).unwrap();
        let busy = schedules.iter().zip(&rates).map(|(schedule, rate)| {
            let sends = schedule.steps.iter().filter(|step| step.action.sends_to().is_some());
            let sent: u64 = sends.map(|step| schedule.elements(step)).sum();
            sent as f64 / count as f64 / f64::from(*rate)
        });
        let busy = busy.fold(0.0, f64::max);
        let expected = bisected(&rates[..n], &rates[n..]);
        assert!((busy / expected - 1.0).abs() < 2e-3, "{n}+{k} {rates:?}: {busy}, not {expected}");
    }
}

/// ONE, SAME: for all small numbers of nodes, with lines of random rates.
#[test]
fn any_lines_have_right_sums() {
    let mut random = SplitMix64::seed_from_u64(11);
    let mut proofs = Proofs::default();
    for nodes in 2..=40u32 {
        for servers in [0, 1, nodes / 2] {
            let rates: Vec<u32> =
                (0..nodes).map(|_| 1 + (random.next_u64() % 400) as u32).collect();
            let topology = with_servers(nodes - servers, servers).with_lines(&rates);
            for count in [0, 1, 64, 1001, 64 * 64, 1 << 20] {
                for spec in specs() {
                    proofs.prove(Kind::Allreduce, spec, &topology, count);
                }
            }
        }
    }
}

/// A parameter server for each worker: 2wS cross racks, less what stays inside (errata, table
/// 1.10: 48 S of 32 workers in 4 racks with an owner on each).
#[test]
fn a_server_in_each_rack_is_near_its_rack() {
    let racks: Vec<u32> = (0..8).map(|node| node / 4).chain(0..2).collect();
    let topology = Topology::from_racks(racks).with_servers(2);
    let schedules = all(Kind::Allreduce, Algorithm::Servers, &topology, 1 << 20);
    let crossing = verify::cross_tier_elements(&schedules, &topology, 1) as f64;
    // Each of 8 owners has (8−2)/76 of the piece and each server 14/76; half of it crosses.
    assert!((crossing / f64::from(1 << 20) - 8.0).abs() < 1e-3, "{crossing}");
}

/// ParameterHub with one and with several servers in each of four racks of eight, and without: the
/// chain is 4 messages or 2 + 2(r−1), crossing traffic is minimal, and nodes send the piece once if
/// there are enough servers.
#[test]
fn hubs_cross_racks_once() {
    let count = 64 * 32 * 30;
    for (servers, busiest) in [(0, 1.9375), (1, 9.5), (2, 4.75), (12, 1.0)] {
        let racks = (0..32).map(|node| node / 8).chain((0..4 * servers).map(|one| one % 4));
        let topology = Topology::from_racks(racks.collect()).with_servers(4 * servers);
        for (text, chain) in [("parameterhub", 4), ("parameterhub(across=ring)", 8)] {
            let spec = Spec::parse(text).unwrap();
            let schedules = all(Kind::Allreduce, spec, &topology, count);
            let report = proven(Kind::Allreduce, spec, &topology, &schedules);
            assert_eq!(report.longest_chain, chain, "{text}, {servers} servers in each rack");
            let crossing = verify::cross_tier_elements(&schedules, &topology, 1);
            assert_eq!(crossing, 6 * count, "{text}, {servers} servers in each rack");
            let sent = report.most_elements_sent as f64 / count as f64;
            assert!((sent - busiest).abs() < 0.3, "{text}, {servers}: {sent}, not {busiest}");
        }
    }
    let one_rack = with_servers(8, 2);
    assert_eq!(prove(Kind::Allreduce, Algorithm::Parameterhub, &one_rack, count).longest_chain, 2);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// On data, in a random order with random progress, in racks of all shapes.
    #[test]
    fn sums_over_servers_are_right(
        (topology, servers, rates) in (2..=24usize).prop_flat_map(|nodes| {
            let rates = prop::collection::vec(0..5u32, nodes);
            (tiers::any(nodes), 0..nodes as u32, rates)
        }),
        dtype in prop::sample::select(vec![DType::F32, DType::F64, DType::I32, DType::F16]),
        count in prop_oneof![Just(0usize), Just(1), 2..200usize, 200..6000usize],
        spec in prop::sample::select(specs().to_vec()),
        seed in any::<u64>(),
    ) {
        let topology = topology.with_servers(servers).with_lines(&rates);
        let mut random = SplitMix64::seed_from_u64(seed);
        let op = ReduceOp::Sum;
        let world = topology.contributors() as usize;
        let values: Vec<Vec<i64>> = (0..world)
            .map(|rank| (0..count).map(|_| draw(dtype, op, rank, world, &mut random)).collect())
            .collect();
        let own = values.iter().map(|own| vec![bytes_of(dtype, own)]);
        let nothing = std::iter::repeat_n(Vec::new(), servers as usize);
        let contributions: Vec<Vec<Vec<u8>>> = own.chain(nothing).collect();
        let data = Data {
            combine: Combine { dtype, op },
            prescale: 1.0,
            finish: Finish { dtype, op, contributors: world as u32, postscale: 1.0 },
            contributions: &contributions,
        };
        let kind = Kind::Allreduce;
        let schedules = all(kind, spec, &topology, count as u64);
        let sections = kind.sections(topology.participants(), count as u64);
        let results = interpret::run(&schedules, &sections, &data, seed).unwrap();
        let wanted = bytes_of(dtype, &expected(dtype, op, &values));
        for (participant, result) in results.iter().enumerate().take(world) {
            prop_assert!(*result == wanted, "participant {participant}, seed {seed}");
        }
    }
}
