//! Measures how long it takes to make the plan of one node: `cargo run --release -p
//! gradwire-collectives --example plans [NODES]`. It prints the smallest and the mean of some runs,
//! in microseconds.

use std::time::Instant;

use gradwire_collectives::{Algorithm, Kind, Plan, Spec, Topology, generate};

/// Elements of f32 in a piece of 4 MiB, of 97 MiB.
const SIZES: [u64; 2] = [1 << 20, 97 << 18];

fn main() {
    let nodes = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(64);
    let racks = |size: u32| Topology::from_racks((0..nodes).map(|node| node / size).collect());
    println!(
        "{nodes} nodes\n{:22} {:>9} {:>7} {:>10} {:>10}",
        "", "bytes", "steps", "least", "mean"
    );
    let others = ["ring(way=around)", "multi-ring(rings=16)", "circulant(radix=8)"];
    let all = Algorithm::ALL.iter().map(|algorithm| algorithm.name()).chain(others);
    for text in all {
        let spec = Spec::parse(text).expect("an algorithm");
        let in_racks = ["hierarchical", "leader-ring", "blueconnect", "hips", "parameterhub"];
        let topology = if in_racks.contains(&text) { racks(16.min(nodes)) } else { racks(nodes) };
        for count in SIZES {
            let (mut least, mut sum, mut steps) = (f64::INFINITY, 0.0, 0);
            let runs = 200;
            for run in 0..runs {
                let begin = Instant::now();
                let schedule = generate(Kind::Allreduce, spec, &topology, run % nodes, count);
                let plan = Plan::new(&schedule, 4);
                let took = begin.elapsed().as_secs_f64() * 1e6;
                (least, sum, steps) = (took.min(least), sum + took, plan.steps.len());
            }
            let mean = sum / f64::from(runs);
            println!("{text:22} {:>9} {steps:>7} {least:>10.1} {mean:>10.1}", count * 4);
        }
    }
}
