//! Consecutive calls, and lines that pass bursts.

use std::sync::Arc;

use gradwire_collectives::{Algorithm, Kind, Spec, Topology};
use gradwire_simulator::{
    Setup,
    config::{Control, Processor, Transport},
    fault::{Effect, Fault, Target},
    job::{InOrder, Operation},
    network::Network,
    run,
};

/// Bytes per second of a line, and the bytes of a burst.
const RATE: f64 = 1e6;
const BURST: f64 = 300_000.0;
const FAST: f64 = 1e12;

fn setup(burst: f64) -> Setup {
    let network =
        Network { burst, burst_rate: FAST, ..Network::even(Topology::flat(2), RATE, 0.0) };
    let transport = Transport { header: 0, lanes: 1, ..Transport::default() };
    Setup { transport, ..Setup::new(network) }
}

/// Seconds of calls that broadcast `bytes` from the first host to the second.
fn taken(setup: &Setup, bytes: u64, calls: u32, control: Control) -> Vec<f64> {
    let operation = Operation::new(Kind::Broadcast { root: 0 }, Algorithm::Linear, bytes, 2);
    let mut calls = InOrder::calls(vec![Arc::new(operation)], calls, control);
    let outcome = run(setup, &mut calls);
    assert_eq!(outcome.standstill, None);
    calls.taken()
}

fn close(found: f64, expected: f64) {
    assert!((found - expected).abs() < 1e-3 * expected.max(0.01), "{found}, expected {expected}");
}

#[test]
fn each_call_waits_for_the_one_before() {
    let control = Control { call: 0.2, order: 0.1, done: 0.3, credit: 8 };
    for seconds in taken(&setup(0.0), 1_000_000, 4, control) {
        close(seconds, 1.3);
    }
    // With one credit, which is returned after the next call begins.
    let control = Control { credit: 1, ..control };
    let all = taken(&setup(0.0), 1_000_000, 3, control);
    close(all[0], 1.3);
    close(all[1], 1.4);
    close(all[2], 1.4);
}

#[test]
fn a_line_that_has_rested_is_faster() {
    let control = Control::default();
    // The saved burst passes at once. Then the line has its own rate.
    let all = taken(&setup(BURST), 1_000_000, 3, control);
    close(all[0], 0.7);
    close(all[1], 1.0);
    close(all[2], 1.0);
    // Between calls it saves again, up to its limit.
    let all = taken(&setup(BURST), 1_000_000, 3, Control { call: 0.1, ..control });
    close(all[0], 0.1 + 0.7);
    close(all[1], 0.1 + 0.9);
    close(all[2], 0.1 + 0.9);
    let all = taken(&setup(BURST), 1_000_000, 2, Control { call: 10.0, ..control });
    close(all[1], 10.0 + 0.7);
    // Smaller calls take no time, until they have used up the burst.
    let all = taken(&setup(BURST), 100_000, 5, control);
    close(all[0] + all[1] + all[2], 0.0);
    close(all[4], 0.1);
}

#[test]
fn nothing_passes_a_dead_line_at_once() {
    let effect = Effect::Slow { target: Target::Host(0), factor: 0.0 };
    let dead = Fault { effect, from: 0.0, until: 5.0 };
    let setup = Setup { faults: vec![dead], ..setup(BURST) };
    let all = taken(&setup, 200_000, 1, Control::default());
    close(all[0], 5.0);
}

/// A spec's own chunk size works like that of daemons. Only how much a connection accepts at a time
/// depends on the daemons' setting, which makes a small difference.
#[test]
fn a_spec_may_set_its_own_chunks() {
    let outcome = |spec: &str, chunk: u64| {
        let topology = Topology::flat(8);
        let transport = Transport { chunk, ..Transport::default() };
        let network = Network::even(topology, RATE, 1e-3);
        let setup = Setup { transport, ..Setup::new(network) };
        let spec = Spec::parse(spec).unwrap();
        let operation = Operation::new(Kind::Allreduce, spec, 1_000_000, 8);
        let mut one = InOrder::new(vec![Arc::new(operation)], Control::default());
        let outcome = run(&setup, &mut one);
        (outcome.chunks, outcome.seconds)
    };
    for name in ["ring", "double-tree", "circulant"] {
        let own = outcome(&format!("{name}(chunk=16K)"), 256 << 10);
        let set = outcome(name, 16 << 10);
        assert_eq!(own.0, set.0, "{name}");
        assert!((own.1 / set.1 - 1.0).abs() < 0.05, "{name}: {} and {}", own.1, set.1);
        assert!(own.0 > outcome(name, 256 << 10).0, "{name}");
    }
}

/// With one rank, contributions that are only sent are not copied first.
#[test]
fn contributions_only_sent_are_not_copied() {
    let seconds = |local: f64| {
        let processor = Processor { local, ..Processor::default() };
        let setup = Setup { processor, ..setup(0.0) };
        let operation = Operation::new(Kind::Reduce { root: 0 }, Algorithm::Linear, 1_000_000, 2);
        let mut one = InOrder::new(vec![Arc::new(operation)], Control::default());
        run(&setup, &mut one).seconds
    };
    close(seconds(1e-6), seconds(0.0));
}
