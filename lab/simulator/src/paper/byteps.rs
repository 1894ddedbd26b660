//! BytePS: hosts without GPUs take a part of the reduction (Jiang et al., "A unified architecture
//! for accelerating distributed DNN training in heterogeneous GPU/CPU clusters", OSDI 2020,
//! theorem 1).
//!
//! The theorem assumes lines that are always busy. They are in the model in which a host sends one
//! message at a time and each owner's part is cut into many segments. Where connections share lines
//! fairly, the small parts of workers are done early, and those of servers late.

use gradwire_collectives::{Algorithm, Kind, Spec, Topology};
use rayon::prelude::*;

use super::setting::{gigabits, one_lane, spec};
use crate::{
    config::{Control, Transport},
    engine::{Setup, run as run_on},
    job::{InOrder, Operation},
    network::Network,
    plain::{self, Costs},
    table::{Chart, Check, Results, Table},
};

/// Large enough for many segments in each part.
const BYTES: u64 = 400_000_000;

/// Segments of an owner's part.
const SEGMENTS: u32 = 64;

/// The allowed deviation. All but 29 to 31 servers beside 32 workers are within 2 %.
const PART: f64 = 0.025;

/// The numbers of workers.
pub const WORKERS: [u32; 4] = [2, 4, 8, 32];

fn by(servers: u32) -> Spec {
    match servers {
        0 => Algorithm::Direct.into(),
        _ => spec(&format!("servers(segments={SEGMENTS})")),
    }
}

/// Large elements, because a large piece has more segments by itself.
const ELEMENT: u64 = 64;

fn operation(workers: u32, servers: u32, by: Spec) -> (Topology, Operation) {
    let hosts = workers + servers;
    let topology = Topology::flat(hosts).with_servers(servers);
    let operation = Operation::new(Kind::Allreduce, by, 4 * BYTES / ELEMENT, hosts);
    (topology, Operation { element: ELEMENT, ..operation })
}

/// The time with `servers` beside `workers`, relative to sending all bytes over one line.
fn times(workers: u32, servers: u32) -> f64 {
    let (topology, operation) = operation(workers, servers, by(servers));
    let costs = Costs { overhead: 0.0, latency: 0.0, per_byte: 1.0 / BYTES as f64, reduce: 0.0 };
    plain::run(&operation, &topology, costs, None).seconds
}

/// The same where connections share lines.
fn shared(workers: u32, servers: u32, by: Spec) -> f64 {
    let (topology, operation) = operation(workers, servers, by);
    let rate = gigabits(25.0);
    let transport = Transport { chunk: 1 << 20, ..one_lane() };
    let setup = Setup { transport, ..Setup::new(Network::even(topology, rate, 1e-6)) };
    let mut job = InOrder::new(vec![operation.into()], Control::default());
    run_on(&setup, &mut job).seconds * rate / BYTES as f64
}

/// The published time, for the whole S at the rate of a line.
pub fn expected(workers: u32, servers: u32) -> f64 {
    let (n, k) = (f64::from(workers), f64::from(servers));
    2.0 * n * (n - 1.0) / (n * n + k * n - 2.0 * k)
}

/// All numbers of servers, compared with the theorem; beside 32 workers only every `step`-th.
pub fn run(step: usize) -> Results {
    let head = [
        "workers",
        "servers",
        "simulated, × S/B",
        "theorem",
        "deviation",
        "deviation with 1 + 1/q",
    ];
    let mut table = Table::new("byteps", &head);
    let (mut checks, mut lines) = (Vec::new(), Vec::new());
    for workers in WORKERS {
        let mut line = Vec::new();
        let step = if workers < 32 { 1 } else { step };
        let all: Vec<u32> = (0..=workers).step_by(step).collect();
        let time = |&servers: &u32| match servers {
            0 => shared(workers, 0, by(0)),
            _ => times(workers, servers),
        };
        let simulated: Vec<f64> = all.par_iter().map(time).collect();
        for (servers, time) in all.into_iter().zip(simulated) {
            let should = expected(workers, servers);
            // A single piece of q segments takes 1 + 1/q times as long as with busy lines.
            let alone = match servers {
                0 => should,
                _ => should * (1.0 + 1.0 / f64::from(SEGMENTS)),
            };
            let what = format!("{workers} workers, {servers} servers");
            let check = Check::within(what, time, alone, PART);
            line.push((f64::from(servers) / f64::from(workers), time));
            table.push([
                workers.to_string(),
                servers.to_string(),
                format!("{time:.3}"),
                format!("{should:.3}"),
                format!("{:+.2} %", (time / should - 1.0) * 100.0),
                format!("{:+.2} %", check.deviation() * 100.0),
            ]);
            checks.push(check);
        }
        lines.push((format!("{workers} workers"), line));
    }
    let chart = Chart {
        title: "byteps".to_owned(),
        x: "servers for each worker".to_owned(),
        y: "time, × S/B".to_owned(),
        logarithmic: [false, false],
        lines,
    };
    Results { tables: vec![table, peers()], charts: vec![chart], checks }
}

/// On shared lines, compared with algorithms that need no servers.
fn peers() -> Table {
    let head = ["workers", "k = n", "k = n/2", "theorem, k = n/2", "direct", "ring"];
    let mut table = Table::new("byteps-and-others", &head);
    let row = |workers: u32| {
        let half = (workers / 2).max(1);
        [
            shared(workers, workers, by(workers)),
            shared(workers, half, by(half)),
            expected(workers, half),
            shared(workers, 0, by(0)),
            shared(workers, 0, spec("ring(way=around)")),
        ]
    };
    let rows: Vec<_> = WORKERS.into_par_iter().map(row).collect();
    for (workers, row) in WORKERS.iter().zip(rows) {
        let cells = row.map(|time| format!("{time:.3}"));
        table.push(std::iter::once(workers.to_string()).chain(cells));
    }
    table
}
