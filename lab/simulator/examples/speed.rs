//! How long the simulator takes: `cargo run --release -p gradwire-simulator --example speed CASE
//! [NODES]`. CASE is `faults`, an algorithm, or `slow:` and an algorithm, in which one host is
//! slow. Prints simulated and real seconds, the number of chunks and peak memory.

use std::{sync::Arc, time::Instant};

use gradwire_collectives::{Kind, Spec, Topology};
use gradwire_simulator::{
    Setup,
    config::{Control, Transport},
    fault::{Effect, Fault, Target},
    job::{InOrder, Operation},
    network::{Ecmp, Network},
    run,
};

/// 97 MB, in a size that divides evenly among 4,096 nodes.
const BYTES: u64 = 97 << 20;

/// Bytes per second of 40 Gbit/s.
const RATE: f64 = 5e9;

fn peak() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.map_or_else(String::new, |line| line.trim().to_owned())
}

fn simulate(setup: &Setup, spec: &str, bytes: u64) {
    let spec = Spec::parse(spec).expect("an algorithm");
    let hosts = setup.network.topology.participants();
    let operation = Arc::new(Operation::new(Kind::Allreduce, spec, bytes, hosts));
    let begin = Instant::now();
    let outcome = run(setup, &mut InOrder::new(vec![operation], Control::default()));
    let took = begin.elapsed().as_secs_f64();
    println!(
        "{spec} on {hosts}: {:.9} s simulated in {took:.2} s, {} chunks, peak {}",
        outcome.seconds,
        outcome.chunks,
        peak()
    );
    assert_eq!(outcome.standstill, None);
}

fn main() -> Result<(), String> {
    let mut arguments = std::env::args().skip(1);
    let case = arguments.next().unwrap_or_else(|| "faults".to_owned());
    let nodes: u32 = arguments.next().map_or(Ok(4096), |text| {
        let nodes = text.parse().ok().filter(|nodes| (1..=4096).contains(nodes));
        nodes.ok_or(format!("NODES must be a number from 1 to 4096, not {text:?}"))
    })?;
    if case == "faults" {
        let begin = Instant::now();
        let topology = Topology::from_racks((0..64).map(|host| host / 32).collect());
        let network = Network::even(topology, RATE, 5e-6);
        for spec in ["ring", "circulant", "direct", "rat"] {
            for seed in 0..20 {
                let pause = Effect::Pause { hosts: 8, every: 20e-3 };
                let setup = Setup {
                    faults: vec![Fault::lasting(pause)],
                    seed,
                    transport: Transport { lanes: 1, ..Transport::default() },
                    ..Setup::new(network.clone())
                };
                simulate(&setup, spec, BYTES);
            }
        }
        println!("all: {:.2} s", begin.elapsed().as_secs_f64());
        return Ok(());
    }
    let (spec, is_slow) = match case.strip_prefix("slow:") {
        Some(spec) => (spec, true),
        None => (&case[..], false),
    };
    Spec::parse(spec).map_err(|error| error.to_string())?;
    let size = if spec == "rat" { nodes.isqrt().max(1) } else { nodes };
    let topology = Topology::from_racks((0..nodes).map(|host| host / size).collect());
    let mut network = Network::even(topology, RATE, 5e-6);
    if size < nodes {
        network = network.with_spines(4, RATE * f64::from(size) / 4.0, 5e-6, Ecmp::Ideal);
    }
    let mut setup = Setup::new(network);
    if is_slow {
        let slow = Effect::Slow { target: Target::Host(nodes / 2 + 1), factor: 0.5 };
        setup.faults.push(Fault::lasting(slow));
    }
    simulate(&setup, spec, BYTES);
    Ok(())
}
