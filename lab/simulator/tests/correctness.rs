//! Properties of every run: nothing is lost, no link exceeds its rate, every schedule ends, and
//! faults cost time.

mod common;

use std::sync::Arc;

use common::{RATE, racks};
use gradwire_collectives::{Algorithm, Kind, Spec, Topology};
use gradwire_simulator::{
    Setup,
    config::{Control, Processor, Tcp, Transport},
    fair::{Fair, Use},
    fault::{Effect, Fault, Target},
    job::{InOrder, Operation},
    network::{Ecmp, Network},
    report::Outcome,
    run,
};
use proptest::prelude::*;

fn setup(topology: Topology) -> Setup {
    let is_one = topology.groups(1).len() == 1;
    let network = Network::even(topology, RATE, 10e-6);
    if is_one {
        return Setup::new(network);
    }
    Setup::new(network.with_spines(2, RATE, 5e-6, Ecmp::Hash))
}

fn simulate(setup: &Setup, kind: Kind, spec: Spec, bytes: u64, pieces: usize) -> Outcome {
    let topology = &setup.network.topology;
    let is_by_servers = gradwire_collectives::algorithms::has_servers(kind, &spec);
    let hosts = if is_by_servers { topology.participants() } else { topology.contributors() };
    let operation = Arc::new(Operation::new(kind, spec, bytes, hosts));
    run(setup, &mut InOrder::new(vec![operation; pieces], Control::default()))
}

const KINDS: [Kind; 9] = [
    Kind::Allreduce,
    Kind::Broadcast { root: 1 },
    Kind::Reduce { root: 1 },
    Kind::Move { from: 0, to: 1 },
    Kind::Allgather,
    Kind::Gather { root: 1 },
    Kind::Scatter { root: 0 },
    Kind::ReduceScatter,
    Kind::Alltoall,
];

fn specs() -> Vec<Spec> {
    let others =
        ["ring(way=around)", "circulant(radix=4)", "chain(segments=8)", "hips(along=ring)"];
    let others = others.iter().map(|text| Spec::parse(text).unwrap());
    Algorithm::ALL.iter().map(|algorithm| Spec::usual(*algorithm)).chain(others).collect()
}

/// All bytes sent are received, on every line, and no line exceeds its rate.
fn is_conserved(setup: &Setup, outcome: &Outcome, what: &str) {
    assert_eq!(outcome.standstill, None, "{what}");
    let mut fair = Fair::default();
    let links = setup.network.add_to(&mut fair);
    let near = |a: f64, b: f64| (a - b).abs() <= 1.0 + 1e-6 * a.max(b);
    let sum = |bytes: &[f64]| bytes.iter().sum::<f64>();
    assert!(near(sum(&outcome.sent), sum(&outcome.received)), "{what}");
    for host in 0..setup.network.hosts.len() {
        let used = outcome.usage.total(links.egress[host]);
        assert!(near(used, outcome.sent[host]), "{what}: {used} of {}", outcome.sent[host]);
        let used = outcome.usage.total(links.ingress[host]);
        assert!(near(used, outcome.received[host]), "{what}");
    }
    let all = |tiers: &Vec<Vec<Vec<u32>>>| tiers.iter().flatten().flatten().copied().collect();
    let (up, down): (Vec<u32>, Vec<u32>) = (all(&links.up), all(&links.down));
    let total = |ids: &[u32]| ids.iter().map(|&id| outcome.usage.total(id)).sum::<f64>();
    assert!(near(total(&up), total(&down)), "{what}");
    for id in links.egress.iter().chain(&links.ingress).chain(&up).chain(&down) {
        let most = fair.capacity(*id) * outcome.seconds;
        let used = outcome.usage.total(*id);
        assert!(used <= most * (1.0 + 1e-6) + 1.0, "{what}: {used} of {most}");
        if let Some((bins, width)) = outcome.usage.over_time(*id) {
            let most = fair.capacity(*id) * width * 1.01 + 1.0;
            assert!(bins.iter().all(|bin| *bin <= most), "{what}: {bins:?} of {most}");
        }
    }
}

/// Every schedule that daemons run ends in the simulation, with nothing lost.
#[test]
fn every_schedule_ends() {
    let servers = Topology::flat(6).with_servers(2);
    for topology in [Topology::flat(2), Topology::flat(5), racks(8, 4), racks(12, 4), servers] {
        for kind in KINDS {
            for spec in specs() {
                for bytes in [4, 4 << 10, 1 << 20] {
                    let setup = setup(topology.clone());
                    let what = format!("{kind:?} by {spec}, {bytes} bytes, {topology:?}");
                    let outcome = simulate(&setup, kind, spec, bytes, 3);
                    is_conserved(&setup, &outcome, &what);
                    assert_eq!(outcome.done.len(), 3, "{what}");
                }
            }
        }
    }
}

#[test]
fn processors_connections_and_lanes_are_limits() {
    let free = setup(Topology::flat(4));
    let usual = simulate(&free, Kind::Allreduce, Algorithm::Ring.into(), 16 << 20, 4);
    let slow = Processor {
        send: 1e-9,
        receive: 1e-9,
        reduce: 1e-9,
        local: 1e-9,
        publish: 1e-9,
        frame: 1e-6,
    };
    let limited = Setup { processor: slow, details: true, ..free.clone() };
    let limited = simulate(&limited, Kind::Allreduce, Algorithm::Ring.into(), 16 << 20, 4);
    assert!(limited.seconds > usual.seconds * 1.2, "{} {}", limited.seconds, usual.seconds);
    assert!(!limited.critical_path.is_empty());
    assert!(limited.critical_path.is_sorted_by(|a, b| a.end <= b.end));
    let mut capped = free.clone();
    capped.network.connection = RATE / 4.0;
    let one = Transport { lanes: 1, ..Transport::default() };
    let four = Transport { streams: 4, ..one };
    let [one, four] = [one, four].map(|transport| {
        let setup = Setup { transport, ..capped.clone() };
        simulate(&setup, Kind::Allreduce, Algorithm::Ring.into(), 16 << 20, 1).seconds
    });
    assert!(one > 3.0 * four, "{one} {four}");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let faults = vec![Fault::lasting(Effect::Pause { hosts: 2, every: 1e-3 })];
    let tcp = Some(Tcp { buffer: 50_000, ..Tcp::default() });
    let one = Setup { faults, tcp, seed: 7, details: true, ..setup(racks(8, 4)) };
    let run =
        |setup: &Setup| simulate(setup, Kind::Allreduce, Algorithm::Direct.into(), 4 << 20, 3);
    assert_eq!(run(&one), run(&one));
    assert_ne!(run(&one), run(&Setup { seed: 8, ..one.clone() }));
}

/// A run with a fault is never faster than one without, and ends when the fault does.
#[test]
fn faults_slow_down_and_end() {
    let free = setup(racks(8, 4));
    let rack = |link| Target::Uplink { tier: 1, group: 0, link };
    let lasting = [
        Effect::Pause { hosts: 2, every: 2e-3 },
        Effect::Slow { target: Target::Host(3), factor: 0.2 },
        Effect::Slow { target: rack(None), factor: 0.2 },
        Effect::Slow { target: rack(Some(1)), factor: 0.2 },
        Effect::Loss { rate: 0.01 },
        Effect::Loss { rate: 0.2 },
    ];
    let ending = [
        Effect::Slow { target: Target::Host(3), factor: 0.0 },
        Effect::Slow { target: rack(None), factor: 0.0 },
        Effect::Pause { hosts: 8, every: 1.0 },
        Effect::Leave { host: 2 },
    ];
    let ended = |effect| Fault { effect, from: 1e-3, until: 0.25 };
    let faults = lasting.map(Fault::lasting).into_iter().chain(ending.map(ended));
    for fault in faults {
        for algorithm in [Algorithm::Ring, Algorithm::Direct, Algorithm::Hierarchical] {
            let time = |setup: &Setup| {
                let outcome = simulate(setup, Kind::Allreduce, algorithm.into(), 16 << 20, 2);
                is_conserved(setup, &outcome, &format!("{fault:?} {algorithm}"));
                outcome.seconds
            };
            let faulty = Setup { faults: vec![fault], ..free.clone() };
            let (with, without) = (time(&faulty), time(&free));
            assert!(with >= without * (1.0 - 1e-9), "{fault:?} {algorithm}: {with} {without}");
            if fault.until.is_finite() {
                assert!(with > 0.25 && with < 0.25 + 2.0 * without, "{fault:?}: {with} {without}");
            }
        }
    }
}

/// Also with TCP's timers.
#[test]
fn lost_packets_are_never_a_gain() {
    for algorithm in [Algorithm::Ring, Algorithm::Direct, Algorithm::DoubleTree] {
        for seed in 0..10 {
            let tcp = Some(Tcp::default());
            let free = Setup { tcp, seed, ..setup(Topology::flat(8)) };
            let lossy =
                Setup { faults: vec![Fault::lasting(Effect::Loss { rate: 0.02 })], ..free.clone() };
            let [with, without] = [&lossy, &free]
                .map(|setup| simulate(setup, Kind::Allreduce, algorithm.into(), 16 << 20, 2));
            assert_eq!(with.standstill, None);
            assert!(with.seconds >= without.seconds, "{algorithm} with seed {seed}");
        }
    }
}

/// A run that can't end says so.
#[test]
fn a_dead_line_is_reported() {
    let fault = Fault::lasting(Effect::Slow { target: Target::Host(1), factor: 0.0 });
    let dead = Setup { faults: vec![fault], ..setup(Topology::flat(4)) };
    let outcome = simulate(&dead, Kind::Allreduce, Algorithm::Ring.into(), 1 << 20, 1);
    let why = outcome.standstill.unwrap();
    assert!(why.contains("nothing moves any more") && why.contains("host1"), "{why}");
    let fault = Fault::lasting(Effect::Pause { hosts: 4, every: 1.0 });
    let paused = Setup { faults: vec![fault], limit: 10.0, ..setup(Topology::flat(4)) };
    let outcome = simulate(&paused, Kind::Allreduce, Algorithm::Ring.into(), 1 << 20, 1);
    assert!(outcome.standstill.unwrap().contains("has not ended after 10.000 s"));
}

/// The cap of a flow, and its resources with their weights.
type Flow = (f64, Vec<(usize, f64)>);

/// A random network: capacities and flows.
fn networks() -> impl Strategy<Value = (Vec<f64>, Vec<Flow>)> {
    let capacities = prop::collection::vec(prop_oneof![9 => 1.0..100.0, 1 => Just(0.0)], 1..12);
    capacities.prop_flat_map(|capacities| {
        let many = capacities.len();
        let uses = prop::collection::btree_map(0..many, 0.1..3.0f64, 1..=many.min(4));
        let cap = prop_oneof![2 => Just(f64::INFINITY), 1 => 0.1..50.0];
        let flow = (cap, uses.prop_map(|uses| uses.into_iter().collect()));
        (Just(capacities), prop::collection::vec(flow, 1..20))
    })
}

/// Max-min by definition: all flows that can still grow do so, in small steps.
fn reference(capacities: &[f64], flows: &[Flow], active: &[bool]) -> Vec<f64> {
    let mut rates = vec![0.0; flows.len()];
    let mut grows: Vec<bool> = active.to_vec();
    while grows.iter().any(|&one| one) {
        let used = |at: usize, who: &dyn Fn(usize) -> f64| -> f64 {
            let of = |(flow, (_, uses)): (usize, &Flow)| {
                let weight = uses.iter().find(|(one, _)| *one == at).map_or(0.0, |one| one.1);
                weight * who(flow)
            };
            flows.iter().enumerate().map(of).sum()
        };
        let mut step = f64::INFINITY;
        for (at, capacity) in capacities.iter().enumerate() {
            let growing = used(at, &|flow| f64::from(u8::from(grows[flow])));
            if growing > 0.0 {
                step = step.min((capacity - used(at, &|flow| rates[flow])).max(0.0) / growing);
            }
        }
        for (flow, (cap, _)) in flows.iter().enumerate() {
            if grows[flow] {
                step = step.min(cap - rates[flow]);
            }
        }
        for (flow, rate) in rates.iter_mut().enumerate() {
            *rate += if grows[flow] { step } else { 0.0 };
        }
        let full: Vec<bool> = (0..capacities.len())
            .map(|at| {
                capacities[at] - used(at, &|flow| rates[flow]) < 1e-9 * (1.0 + capacities[at])
            })
            .collect();
        for (flow, (cap, uses)) in flows.iter().enumerate() {
            grows[flow] &= rates[flow] < cap - 1e-9 && !uses.iter().any(|one| full[one.0]);
        }
    }
    rates
}

proptest! {
    /// Also after flows have started and stopped, which recomputes only a part.
    #[test]
    fn rates_are_those_of_the_definition(
        (capacities, flows) in networks(),
        changes in prop::collection::vec((0usize..20, 0usize..12, 0.0..100.0f64), 0..12),
    ) {
        let mut fair = Fair::default();
        let mut capacities = capacities;
        for &capacity in &capacities {
            fair.add_resource(capacity);
        }
        for (cap, uses) in &flows {
            let uses: Vec<Use> = uses
                .iter()
                .map(|&(resource, weight)| Use { resource: resource as u32, weight })
                .collect();
            let flow = fair.add_flow(&uses, *cap);
            fair.start(flow);
        }
        let mut active = vec![true; flows.len()];
        let compare = |fair: &mut Fair, active: &[bool], capacities: &[f64]| {
            fair.compute(|_, _, _| {});
            for (flow, rate) in (0..).zip(reference(capacities, &flows, active)) {
                let is = fair.rate(flow);
                prop_assert!((is - rate).abs() <= 1e-6 * (1.0 + rate), "{flow}: {is} {rate}");
            }
            Ok(())
        };
        compare(&mut fair, &active, &capacities)?;
        for (flow, resource, capacity) in changes {
            if flow < flows.len() {
                active[flow] = !active[flow];
                if active[flow] { fair.start(flow as u32) } else { fair.stop(flow as u32) }
            }
            if resource < capacities.len() {
                capacities[resource] = capacity;
                fair.set_capacity(resource as u32, capacity);
            }
            compare(&mut fair, &active, &capacities)?;
        }
    }
}
