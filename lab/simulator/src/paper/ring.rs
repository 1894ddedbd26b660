//! One master compared with a ring (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
//! for clusters of workstations", 2009; Baidu, 2017; Sergeev and Del Balso, "Horovod", 2018).

use gradwire_collectives::{Algorithm, Kind, Spec, Topology};

use super::setting::{allreduce, flat, gigabits, milliseconds, spec};
use crate::{
    job::Operation,
    plain::{self, Costs},
    table::{Chart, Check, Results, Table},
};

const BYTES: u64 = 64 << 20;

/// Hosts of which none is too many for a cluster of the papers.
const HOSTS: [u32; 9] = [2, 3, 4, 8, 13, 16, 24, 32, 64];

/// Only bytes take time.
fn costs() -> Costs {
    Costs { overhead: 0.0, latency: 0.0, per_byte: 1.0 / gigabits(25.0), reduce: 0.0 }
}

/// The papers' ring goes around twice; Gradwire's default returns the other way.
fn ring() -> Spec {
    spec("ring(way=around)")
}

/// With few, large elements: the papers' messages are not cut.
fn operation(spec: Spec, hosts: u32) -> Operation {
    let count = 64 * u64::from(hosts);
    let operation = Operation::new(Kind::Allreduce, spec, 4 * count, hosts);
    Operation { element: BYTES / count, ..operation }
}

/// The comparison, and the effect of a silent host on a ring.
pub fn run() -> Results {
    let head = [
        "N",
        "busiest with a master, × K",
        "N−1",
        "busiest of a ring, × K",
        "2(N−1)/N",
        "master/ring in the formulas' model",
        "ring on shared links, ms",
        "2(N−1)/N·K/B, ms",
        "senders to one host",
    ];
    let mut table = Table::new("master-and-ring", &head);
    let mut checks = Vec::new();
    let (mut masters, mut rings) = (Vec::new(), Vec::new());
    for hosts in HOSTS {
        let n = f64::from(hosts);
        let topology = Topology::flat(hosts);
        let simulate = |spec| plain::run(&operation(spec, hosts), &topology, costs(), None);
        let (master, ring) = (simulate(Algorithm::Linear.into()), simulate(self::ring()));
        let whole = operation(self::ring(), hosts).bytes() as f64;
        let busiest = |bytes: &[u64]| bytes.iter().copied().max().unwrap_or(0) as f64 / whole;
        for (what, of, expected) in
            [("a master", &master, n - 1.0), ("a ring", &ring, 2.0 * (n - 1.0) / n)]
        {
            for (way, bytes) in [("sent", &of.sent), ("received", &of.received)] {
                let what = format!("bytes {way} with {what}, N = {hosts}");
                checks.push(Check::within(what, busiest(bytes), expected, 0.001));
            }
        }
        let ratio = master.seconds / ring.seconds;
        checks.push(Check::within(format!("master/ring, N = {hosts}"), ratio, n, 0.02));
        // On shared links, chunk by chunk, as daemons work.
        let outcome = allreduce(&flat(hosts, gigabits(25.0), 5e-6), self::ring(), BYTES);
        let expected = 2.0 * (n - 1.0) / n * BYTES as f64 / gigabits(25.0);
        let what = format!("time of the ring on shared links, N = {hosts}");
        checks.push(Check::within(what, outcome.seconds, expected, 0.05));
        let senders = f64::from(outcome.most_senders());
        checks.push(Check::within(format!("senders to one host, N = {hosts}"), senders, 1.0, 0.0));
        table.push([
            hosts.to_string(),
            format!("{:.3}", busiest(&master.sent)),
            format!("{:.3}", n - 1.0),
            format!("{:.3}", busiest(&ring.sent)),
            format!("{:.3}", 2.0 * (n - 1.0) / n),
            format!("{ratio:.2}"),
            milliseconds(outcome.seconds),
            milliseconds(expected),
            format!("{senders}"),
        ]);
        masters.push((n, master.seconds * 1e3));
        rings.push((n, ring.seconds * 1e3));
    }
    let chart = Chart {
        title: "master-and-ring".to_owned(),
        x: "hosts".to_owned(),
        y: "ms for 64 MiB at 25 Gbit/s".to_owned(),
        logarithmic: [true, true],
        lines: vec![("master".to_owned(), masters), ("ring".to_owned(), rings)],
    };
    let silent = silent(&mut checks);
    Results { tables: vec![table, silent], charts: vec![chart], checks }
}

/// If one host stops sending, the j-th host after it can send j of its N shares in the reduction.
fn silent(checks: &mut Vec<Check>) -> Table {
    let head = ["N", "hosts after the silent one", "sent, × K/N", "j"];
    let mut table = Table::new("silent-host", &head);
    for hosts in [2, 4, 8, 16, 64] {
        let topology = Topology::flat(hosts);
        let order = ring_order(hosts);
        let operation = operation(ring(), hosts);
        let run = plain::run(&operation, &topology, costs(), Some(order[0]));
        for (j, &host) in order.iter().enumerate().skip(1) {
            let share = operation.bytes() as f64 / f64::from(hosts);
            let sent = run.sent[host as usize] as f64 / share;
            let what = format!("shares sent by the {j}. host after a silent one of {hosts}");
            checks.push(Check::near(what, sent, j as f64, 0.01));
            if j < 4 || j + 1 == hosts as usize {
                table.push([hosts.to_string(), j.to_string(), format!("{sent:.2}"), j.to_string()]);
            }
        }
    }
    table
}

/// The hosts in sending order, from host 0.
fn ring_order(hosts: u32) -> Vec<u32> {
    let topology = Topology::flat(hosts);
    let next = |host: u32| {
        let schedule =
            gradwire_collectives::generate(Kind::Allreduce, ring(), &topology, host, 1 << 20);
        schedule.steps.iter().find_map(|step| step.action.sends_to()).map(|(peer, _)| peer)
    };
    let mut order = vec![0];
    while let Some(host) = next(order[order.len() - 1]).filter(|&host| host != 0) {
        order.push(host);
    }
    order
}
