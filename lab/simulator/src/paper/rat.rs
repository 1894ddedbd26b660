//! RAT: aggregation along the tiers of the network (Wan et al., "RAT - Resilient Allreduce Tree for
//! Distributed Machine Learning", APNet 2020).
//!
//! Two figures: oversubscribed racks, in which every host is also a server (PS), and hosts that
//! stop sending for a while. Some parameters are not published. The rates, and how many hosts stop
//! for how long, were chosen so that they give the figures of the text.

use gradwire_collectives::{Algorithm, Spec, Topology};
use rayon::prelude::*;

use super::setting::{allreduce, gigabits, milliseconds, one_lane, spec};
use crate::{
    config::{Tcp, Transport},
    engine::Setup,
    fault::{Effect, Fault},
    network::{Ecmp, Network},
    table::{Chart, Check, Results, Table},
};

/// The gradients of ResNet-50.
const BYTES: u64 = 97_000_000;

const LATENCY: f64 = 5e-6;

/// Stopped hosts and milliseconds for which the ring's time has bounds.
const BOUNDED: [(u32, u32); 3] = [(8, 20), (12, 20), (24, 50)];

/// How much to simulate.
#[derive(Debug, Clone)]
pub struct Extent {
    /// The oversubscriptions of the first figure.
    pub oversubscriptions: Vec<u32>,
    /// The cells of the second figure: the number of stopped hosts, for how many milliseconds, and
    /// the draws of which a cell is the mean.
    pub cells: Vec<(u32, u32, u64)>,
}

impl Default for Extent {
    fn default() -> Self {
        let hosts = [1, 4, 8, 12, 16, 24];
        let cells = hosts.iter().flat_map(|&k| [5, 10, 20, 50, 100].map(|d| (k, d)));
        // Cells with bounds get more draws, to depend less on chance.
        let cells = cells.map(|(k, d)| (k, d, if BOUNDED.contains(&(k, d)) { 20 } else { 10 }));
        Self { oversubscriptions: vec![2, 4, 6, 8, 10, 12], cells: cells.collect() }
    }
}

/// Racks with `size` hosts each, two spines, and 40 Gbit/s everywhere.
fn oversubscribed(racks: u32, size: u32, ecmp: Ecmp, hop: f64) -> Setup {
    let topology = Topology::from_racks((0..racks * size).map(|host| host / size).collect());
    let rate = gigabits(40.0);
    let network = Network::even(topology, rate, hop).with_spines(2, rate, hop, ecmp);
    // Small chunks: data reduced in a rack can cross to others while the rest still arrives.
    let transport = Transport { chunk: 64 << 10, ..one_lane() };
    Setup { transport, ..Setup::new(network) }
}

fn seconds(setup: &Setup, spec: Spec) -> f64 {
    allreduce(setup, spec, BYTES).seconds
}

/// The slow-down of servers, by the corrected formula.
pub fn slow_down(o: f64, hosts: f64, racks: f64) -> f64 {
    o * hosts * (1.0 - 1.0 / racks) / (hosts - 1.0)
}

/// Both figures.
pub fn run(extent: &Extent) -> Results {
    let mut results = Results::default();
    oversubscription(extent, &mut results);
    timeouts(extent, &mut results);
    faults(extent, &mut results);
    results
}

/// Oversubscribed racks.
pub fn oversubscription(extent: &Extent, results: &mut Results) {
    let head = [
        "o",
        "w",
        "RAT, ms",
        "PS/RAT",
        "o·w(1−1/r)/(w−1)",
        "PS/RAT, hashed",
        "ring/RAT, 5 µs",
        "ring/RAT, 35 µs",
    ];
    let mut table = Table::new("rat-oversubscribed", &head);
    let (mut ideal_line, mut hashed_line, mut formula_line) = (Vec::new(), Vec::new(), Vec::new());
    for &o in &extent.oversubscriptions {
        let (hosts, size) = (8 * o, 2 * o);
        let ideal = oversubscribed(4, size, Ecmp::Ideal, LATENCY);
        let rat = seconds(&ideal, Algorithm::Hierarchical.into());
        let ps = seconds(&ideal, Algorithm::Direct.into());
        let expected = slow_down(f64::from(o), f64::from(hosts), 4.0);
        let hashed = oversubscribed(4, size, Ecmp::Hash, LATENCY);
        let hashed = seconds(&hashed, Algorithm::Direct.into())
            / seconds(&hashed, Algorithm::Hierarchical.into());
        let rings = [5e-6, 35e-6].map(|hop| {
            let setup = oversubscribed(4, size, Ecmp::Ideal, hop);
            seconds(&setup, spec("ring(way=around)"))
                / seconds(&setup, Algorithm::Hierarchical.into())
        });
        let what = format!("PS/RAT, o = {o}");
        results.checks.push(Check::within(what, ps / rat, expected, 0.1));
        for ring in rings {
            let near = Check { bounds: [0.97, 1.2], ..Check::at_least("", ring, 0.97) };
            results.checks.push(Check { what: format!("ring/RAT, o = {o}"), ..near });
        }
        table.push([
            o.to_string(),
            hosts.to_string(),
            milliseconds(rat),
            format!("{:.2}", ps / rat),
            format!("{expected:.2}"),
            format!("{hashed:.2}"),
            format!("{:.2}", rings[0]),
            format!("{:.2}", rings[1]),
        ]);
        let x = f64::from(o);
        ideal_line.push((x, ps / rat));
        hashed_line.push((x, hashed));
        formula_line.push((x, expected));
    }
    results.tables.push(table);
    results.charts.push(Chart {
        title: "rat-oversubscribed".to_owned(),
        x: "oversubscription".to_owned(),
        y: "time of PS / time of RAT".to_owned(),
        logarithmic: [false, false],
        lines: vec![
            ("ideal ECMP".to_owned(), ideal_line),
            ("hashed ECMP".to_owned(), hashed_line),
            ("formula".to_owned(), formula_line),
        ],
    });
    // The primer's example: 4 hosts in 2 racks, twice oversubscribed. One spine has the rate of one
    // host, half of a rack's rate.
    let topology = Topology::from_racks(vec![0, 0, 1, 1]);
    let rate = gigabits(40.0);
    let network = Network::even(topology, rate, LATENCY);
    let network = network.with_spines(1, rate, LATENCY, Ecmp::Ideal);
    let setup = Setup { transport: one_lane(), ..Setup::new(network) };
    let ratio =
        seconds(&setup, Algorithm::Direct.into()) / seconds(&setup, Algorithm::Hierarchical.into());
    results.checks.push(Check::within("PS/RAT of the primer's example", ratio, 4.0 / 3.0, 0.1));
    let mut table = Table::new("rat-example", &["w", "r", "o", "PS/RAT", "formula", "as printed"]);
    table.push(["4", "2", "2"].map(str::to_owned).into_iter().chain([
        format!("{ratio:.2}"),
        "1.33".to_owned(),
        "3.00".to_owned(),
    ]));
    results.tables.push(table);
}

/// The effect of TCP when many hosts send to one.
pub fn timeouts(extent: &Extent, results: &mut Results) {
    let head = ["o", "w", "least timeout, ms", "RAT, ms", "PS, ms", "PS/RAT", "timeouts of PS"];
    let mut table = Table::new("rat-timeouts", &head);
    let mut best = f64::NEG_INFINITY;
    for &o in &extent.oversubscriptions {
        for timeout in [1.0, 0.2] {
            let setup = Setup {
                tcp: Some(Tcp { timeout, ..Tcp::default() }),
                ..oversubscribed(4, 2 * o, Ecmp::Ideal, LATENCY)
            };
            let rat = allreduce(&setup, Algorithm::Hierarchical.into(), BYTES);
            let ps = allreduce(&setup, Algorithm::Direct.into(), BYTES);
            let ratio = ps.seconds / rat.seconds;
            if timeout == 1.0 {
                best = best.max(ratio);
            }
            table.push([
                o.to_string(),
                (8 * o).to_string(),
                format!("{:.0}", timeout * 1e3),
                milliseconds(rat.seconds),
                milliseconds(ps.seconds),
                format!("{ratio:.1}"),
                ps.timeouts.to_string(),
            ]);
        }
    }
    results.checks.push(Check::at_least("PS/RAT with incast and a timeout of 1 s", best, 20.0));
    results.tables.push(table);
}

/// The algorithms compared when hosts stop sending.
fn compared() -> [(&'static str, Spec, bool); 4] {
    [
        ("PS", Algorithm::Direct.into(), false),
        ("RAT, two tiers", Algorithm::Hierarchical.into(), true),
        ("circulant", spec("circulant"), false),
        ("ring", spec("ring(way=around)"), false),
    ]
}

/// 64 hosts in two racks, limited only by their lines.
fn with_faults(in_racks: bool, fault: Option<Fault>, seed: u64) -> Setup {
    let topology = if in_racks {
        Topology::from_racks((0..64).map(|host| host / 32).collect())
    } else {
        Topology::flat(64)
    };
    let network = Network::even(topology, gigabits(40.0), LATENCY);
    let transport = Transport { chunk: 256 << 10, ..one_lane() };
    let faults = fault.into_iter().collect();
    Setup { transport, faults, seed, ..Setup::new(network) }
}

/// The mean seconds of an allreduce by colocated parameter servers, RAT with two tiers, a circulant
/// and a ring, in this order, when `hosts` hosts at a time stop for `milliseconds`, over `draws`
/// draws.
pub fn under_faults(hosts: u32, milliseconds: u32, draws: u64) -> [f64; 4] {
    let every = f64::from(milliseconds) / 1e3;
    compared().map(|(_, spec, in_racks)| {
        let fault = (hosts > 0).then(|| Fault::lasting(Effect::Pause { hosts, every }));
        let draws = if hosts > 0 { draws } else { 1 };
        let draw = |seed| seconds(&with_faults(in_racks, fault, 1 + seed), spec);
        // Summed in order, so that the result is reproducible.
        let all: Vec<f64> = (0..draws).into_par_iter().map(draw).collect();
        all.iter().sum::<f64>() / draws as f64
    })
}

/// Hosts that stop sending.
pub fn faults(extent: &Extent, results: &mut Results) {
    let names = compared().map(|(name, ..)| format!("{name}, ms"));
    let head =
        ["k", "d, ms", "draws", &names[0], &names[1], &names[2], &names[3], "RAT/PS", "ring/PS"];
    let mut table = Table::new("rat-faults", &head);
    let mut lines: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    let none = under_faults(0, 0, 1);
    for (time, (name, ..)) in none.iter().zip(compared()) {
        let what = format!("{name} without faults, ms");
        results
            .checks
            .push(Check { bounds: [38.0, 39.0], ..Check::near(what, time * 1e3, 38.5, 0.5) });
    }
    let mut ratios = Vec::new();
    let row = |k: u32, d: u32, draws: u64, times: [f64; 4]| {
        let cells = times.map(milliseconds).into_iter();
        let ratios = [times[1] / times[0], times[3] / times[0]].map(|r| format!("{r:.2}"));
        [k.to_string(), d.to_string(), draws.to_string()].into_iter().chain(cells).chain(ratios)
    };
    table.push(row(0, 0, 1, none));
    for &(k, d, draws) in &extent.cells {
        let times = under_faults(k, d, draws);
        let (rat, ring) = (times[1] / times[0], times[3] / times[0]);
        if BOUNDED.contains(&(k, d)) {
            let what = format!("ring/PS, k = {k}, d = {d} ms");
            results.checks.push(match k {
                8 => Check::near(what, ring, 5.0, 1.0),
                12 => Check::near(what, ring, 5.9, 1.2),
                _ => Check::at_least(what, ring, 10.0),
            });
            let what = format!("RAT/PS, k = {k}, d = {d} ms");
            results.checks.push(Check::at_most(what, rat, 1.35));
        }
        ratios.push(ring);
        table.push(row(k, d, draws, times));
        let name = format!("d = {d} ms");
        match lines.iter_mut().find(|(known, _)| *known == name) {
            Some((_, line)) => line.push((f64::from(k), ring)),
            None => lines.push((name, vec![(f64::from(k), ring)])),
        }
    }
    results.tables.push(table);
    let mean = ratios.iter().sum::<f64>() / ratios.len().max(1) as f64;
    let worst = ratios.iter().copied().fold(0.0, f64::max);
    let mut summary = Table::new("rat-faults-summary", &["ring/PS", "simulated", "published"]);
    summary.push(["mean of the grid".to_owned(), format!("{mean:.1}"), "5.7".to_owned()]);
    summary.push(["worst of the grid".to_owned(), format!("{worst:.1}"), "12".to_owned()]);
    results.tables.push(summary);
    results.charts.push(Chart {
        title: "rat-faults".to_owned(),
        x: "hosts that stop".to_owned(),
        y: "time of the ring / time of PS".to_owned(),
        logarithmic: [false, false],
        lines,
    });
}
