//! The 2D torus (Mikami et al., "Massively distributed SGD: ImageNet/ResNet-50 training in a
//! flash", arXiv 1811.05233): reduce-scatter in rows, allreduce in columns, allgather in rows.

use gradwire_collectives::{Algorithm, Kind, Topology};

use super::setting::{allreduce, flat, gigabits, milliseconds, spec};
use crate::{
    job::Operation,
    plain::{self, Costs},
    table::{Check, Results, Table},
};

const BYTES: u64 = 97_000_000;

/// Grids of m×n hosts.
pub const GRIDS: [(u32, u32); 3] = [(4, 4), (8, 16), (32, 32)];

const ALPHA: f64 = 25e-6;

/// The longest chain of messages, bytes and time, compared with a ring.
pub fn run() -> Results {
    let head = [
        "grid",
        "chain of messages",
        "2(m+n−2)",
        "bytes of a host / ring's",
        "torus, ms",
        "ring, ms",
        "formula of the torus, ms",
        "torus on shared links, ms",
    ];
    let mut table = Table::new("torus", &head);
    let mut checks = Vec::new();
    let rate = gigabits(25.0);
    let costs = Costs { overhead: ALPHA, latency: 0.0, per_byte: 1.0 / rate, reduce: 0.0 };
    for (m, n) in GRIDS {
        let hosts = m * n;
        let topology = Topology::flat(hosts);
        let simulate = |spec| {
            plain::run(&Operation::new(Kind::Allreduce, spec, BYTES, hosts), &topology, costs, None)
        };
        let torus_spec = spec(&format!("torus(dims={m}x{n})"));
        let torus = simulate(torus_spec);
        let chain = f64::from(2 * (m + n - 2));
        let most = |bytes: &[u64]| bytes.iter().copied().max().unwrap_or(0) as f64;
        let share = f64::from(hosts - 1) / f64::from(hosts);
        // A ring of a thousand hosts has millions of steps, and `formulas` covers its time.
        let is_small = hosts <= 128;
        let (ring_bytes, ring_seconds) = if is_small {
            let ring = simulate(Algorithm::Ring.into());
            (most(&ring.sent), ring.seconds)
        } else {
            let bytes = 2.0 * share * BYTES as f64;
            (bytes, 2.0 * f64::from(hosts - 1) * ALPHA + bytes / rate)
        };
        let bytes = most(&torus.sent) / ring_bytes;
        let expected = chain * ALPHA + 2.0 * share * BYTES as f64 / rate;
        let grid = format!("{m}×{n}");
        let name = |what: &str| format!("{what}, {grid}");
        checks.push(Check::within(name("chain"), f64::from(torus.chain), chain, 0.0));
        checks.push(Check::within(name("bytes of the torus / ring"), bytes, 1.0, 0.01));
        checks.push(Check::within(name("time"), torus.seconds, expected, 0.02));
        let shared =
            is_small.then(|| allreduce(&flat(hosts, rate, ALPHA), torus_spec, BYTES).seconds);
        table.push([
            grid,
            torus.chain.to_string(),
            chain.to_string(),
            format!("{bytes:.4}"),
            milliseconds(torus.seconds),
            milliseconds(ring_seconds),
            milliseconds(expected),
            shared.map_or("–".to_owned(), milliseconds),
        ]);
    }
    Results { tables: vec![table], charts: Vec::new(), checks }
}
