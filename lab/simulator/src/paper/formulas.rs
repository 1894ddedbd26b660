//! The formulas of the literature, compared with schedules in the model that they assume.
//!
//! N hosts, S bytes, α seconds per message, β per byte (1/B), γ per reduced byte (C), h = ⌈log2 N⌉.
//! Where a formula counts α once for all simultaneous messages, α is latency, o is the overhead of
//! each message, and the messages share the lines. Otherwise α occupies both ends, and a host sends
//! and receives one whole message at a time.

use std::sync::Arc;

use gradwire_collectives::{Kind, Spec, Topology};

use crate::{
    config::{Control, Transport},
    engine::{Setup, run as run_on},
    job::{InOrder, Operation},
    network::Network,
    plain::{self, Costs},
    table::{Check, Results, Table},
};

/// Bytes per second of 25 Gbit/s.
pub(super) const RATE: f64 = 25e9 / 8.0;
pub(super) const ALPHA: f64 = 25e-6;
const OVERHEAD: f64 = 1.5e-6;
/// Seconds per reduced byte.
pub(super) const GAMMA: f64 = 1.0 / 20e9;
pub(super) const BETA: f64 = 1.0 / RATE;

/// The allowed deviation.
const PART: f64 = 0.02;

/// The numbers of hosts.
pub const HOSTS: [u32; 5] = [2, 3, 8, 13, 64];

/// The sizes.
pub const BYTES: [u64; 3] = [4 << 10, 1 << 20, 64 << 20];

/// Blocks begin at multiples of this many elements.
const GRAIN: u64 = 64;

const ROOT: Kind = Kind::Broadcast { root: 0 };

/// The arguments of a formula.
#[derive(Debug, Clone, Copy)]
pub(super) struct Of {
    pub(super) n: f64,
    pub(super) s: f64,
    pub(super) h: f64,
}

impl Of {
    pub(super) fn new(hosts: u32, bytes: u64) -> Self {
        Self { n: f64::from(hosts), s: bytes as f64, h: f64::from(hosts).log2().ceil() }
    }

    /// The bytes of an allreduce that is cut into N shares: 2S(N−1)/(NB) + (N−1)/N·SC.
    fn shares(self) -> f64 {
        self.s * (self.n - 1.0) / self.n * (2.0 * BETA + GAMMA)
    }
}

/// A formula and how it is run.
struct Formula {
    name: &'static str,
    text: &'static str,
    kind: Kind,
    spec: fn(u32) -> Option<String>,
    /// Whether α is latency, not overhead.
    overlaps: bool,
    /// Whether received bytes cost γ.
    reduces: bool,
    value: fn(u32, u64) -> f64,
    /// The least number of elements, so that they can be cut into all segments.
    segments: fn(u32, u64) -> u64,
    bound: Bound,
    /// Whether the schedule follows the formula for these hosts and bytes.
    applies: fn(u32, u64) -> bool,
}

/// How close the time has to be.
#[derive(Debug, Clone, Copy)]
enum Bound {
    /// Within the usual deviation.
    Near,
    /// The formula is an upper bound.
    Most,
}

const USUAL: Formula = Formula {
    name: "",
    text: "",
    kind: Kind::Allreduce,
    spec: |_| None,
    overlaps: false,
    reduces: true,
    value: |_, _| 0.0,
    segments: |_, _| 0,
    bound: Bound::Near,
    applies: |_, _| true,
};

fn is_power(hosts: u32) -> bool {
    hosts.is_power_of_two()
}

/// Two factors, the smaller first, as close to each other as possible.
fn factors(hosts: u32) -> Option<(u32, u32)> {
    let first = (2..=hosts).take_while(|m| m * m <= hosts).filter(|m| hosts.is_multiple_of(*m));
    first.last().map(|m| (m, hosts / m))
}

/// The messages of a host in one direction when each round divides the rest by `radix`.
fn messages(hosts: u32, radix: u32) -> (f64, f64) {
    let (mut left, mut rounds, mut all) = (hosts, 0, 0);
    while left > 1 {
        let next = left.div_ceil(radix);
        all += left.div_ceil(next) - 1;
        rounds += 1;
        left = next;
    }
    (f64::from(rounds), f64::from(all))
}

/// The best number of segments of a chain.
fn segments(hosts: u32, bytes: u64) -> f64 {
    let Of { n, s, .. } = Of::new(hosts, bytes);
    ((n - 2.0) * s * BETA / ALPHA).sqrt().round().clamp(1.0, 64.0)
}

/// The best number of segments of each of two trees.
fn tree_segments(hosts: u32, bytes: u64) -> u64 {
    let Of { s, h, .. } = Of::new(hosts, bytes);
    ((h * s * BETA / (2.0 * ALPHA)).sqrt().round() as u64).clamp(1, 64)
}

pub(super) fn whole(messages: f64, s: f64) -> f64 {
    messages * (ALPHA + s * BETA)
}

fn formulas() -> Vec<Formula> {
    vec![
        Formula {
            name: "linear",
            text: "2(N−1)(α+S/B) + (N−1)SC",
            spec: |_| Some("linear".into()),
            value: |n, s| {
                let Of { n, s, .. } = Of::new(n, s);
                whole(2.0 * (n - 1.0), s) + (n - 1.0) * s * GAMMA
            },
            ..USUAL
        },
        Formula {
            name: "binomial tree, there and back",
            text: "2h(α+S/B) + hSC",
            spec: |_| Some("binomial".into()),
            value: |n, s| {
                let Of { s, h, .. } = Of::new(n, s);
                whole(2.0 * h, s) + h * s * GAMMA
            },
            ..USUAL
        },
        Formula {
            name: "broadcast along a chain in q segments",
            text: "(N−2+q)(α+S/(qB)), q = 8",
            kind: ROOT,
            spec: |_| Some("chain(segments=8)".into()),
            value: |n, s| {
                let Of { n, s, .. } = Of::new(n, s);
                (n - 2.0 + 8.0) * (ALPHA + s / 8.0 * BETA)
            },
            ..USUAL
        },
        Formula {
            name: "k-nomial tree, radix 4, there and back",
            text: "2⌈log_k N⌉(k−1)(α+S/B), + half of it without α as C",
            spec: |n| (n == 64).then(|| "k-nomial(radix=4)".into()),
            reduces: false,
            value: |_, s| whole(2.0 * 3.0 * 3.0, s as f64),
            ..USUAL
        },
        Formula {
            name: "recursive doubling",
            text: "h(α+S/B+SC); otherwise ⌊log2 N⌋ rounds and a fold: \
                   (α+S/B+SC) + (α+S/B)",
            spec: |_| Some("recursive-doubling".into()),
            value: |n, s| {
                let power = is_power(n);
                let s = s as f64;
                let rounds = f64::from(n.ilog2()) + if power { 0.0 } else { 1.0 };
                let back = if power { 0.0 } else { whole(1.0, s) };
                rounds * (ALPHA + s * (BETA + GAMMA)) + back
            },
            ..USUAL
        },
        Formula {
            name: "halving and doubling (Rabenseifner)",
            text: "2hα + 2S(N−1)/(NB) + SC(N−1)/N",
            spec: |n| is_power(n).then(|| "halving-doubling".into()),
            value: |n, s| 2.0 * Of::new(n, s).h * ALPHA + Of::new(n, s).shares(),
            ..USUAL
        },
        Formula {
            name: "circulant",
            text: "2⌈log2 N⌉α + 2S(N−1)/(NB) + SC(N−1)/N",
            spec: |_| Some("circulant".into()),
            value: |n, s| 2.0 * Of::new(n, s).h * ALPHA + Of::new(n, s).shares(),
            ..USUAL
        },
        Formula {
            name: "direct",
            text: "2α + 2(N−1)o + 2S(N−1)/(NB)",
            spec: |_| Some("direct".into()),
            overlaps: true,
            reduces: false,
            value: |n, s| {
                let Of { n, s, .. } = Of::new(n, s);
                2.0 * ALPHA + 2.0 * (n - 1.0) * (OVERHEAD + s / n * BETA)
            },
            ..USUAL
        },
        Formula {
            name: "bcube, radix 4",
            text: "2⌈log_k N⌉α + 2(k−1)⌈log_k N⌉o + 2S(N−1)/(NB)",
            spec: |n| (n == 64).then(|| "bcube(radix=4)".into()),
            overlaps: true,
            reduces: false,
            value: |n, s| {
                let (rounds, all) = messages(n, 4);
                let Of { n, s, .. } = Of::new(n, s);
                2.0 * rounds * ALPHA + 2.0 * all * OVERHEAD + 2.0 * s * (n - 1.0) / n * BETA
            },
            ..USUAL
        },
        Formula {
            name: "ring",
            text: "2(N−1)(α+S/(NB)) + (N−1)SC/N",
            spec: |_| Some("ring".into()),
            value: |n, s| {
                let of = Of::new(n, s);
                2.0 * (of.n - 1.0) * ALPHA + of.shares()
            },
            ..USUAL
        },
        Formula {
            name: "2D torus of m×n (also BlueConnect)",
            text: "2(m+n−2)α + 2S(N−1)/(NB) + SC(N−1)/N",
            spec: |n| factors(n).map(|(a, b)| format!("torus(dims={a}x{b})")),
            value: |n, s| {
                let (a, b) = factors(n).unwrap_or_default();
                2.0 * f64::from(a + b - 2) * ALPHA + Of::new(n, s).shares()
            },
            ..USUAL
        },
        Formula {
            name: "RAT, two tiers (racks of m)",
            // Blocks have at least 512 elements, so smaller pieces have fewer owners than hosts.
            applies: |n, s| s >= 512 * u64::from(n),
            text: "4α + 2(m−1+N/m−1)o + 2S(N−1)/(NB)",
            spec: |n| factors(n).map(|_| "hierarchical".into()),
            overlaps: true,
            reduces: false,
            value: |n, s| {
                let (a, b) = factors(n).unwrap_or_default();
                let Of { n, s, .. } = Of::new(n, s);
                let others = 2.0 * f64::from(a + b - 2);
                4.0 * ALPHA + others * OVERHEAD + 2.0 * s * (n - 1.0) / n * BETA
            },
            ..USUAL
        },
        Formula {
            name: "double binary tree",
            text: "≤ 4hα + 2S/B + 2√(8hαS/B) + (S+√(2hαBS))C",
            spec: |_| Some("double-tree".into()),
            segments: |n, s| 2 * tree_segments(n, s),
            value: |n, s| {
                let Of { s, h, .. } = Of::new(n, s);
                4.0 * h * ALPHA
                    + 2.0 * s * BETA
                    + 2.0 * (8.0 * h * ALPHA * s * BETA).sqrt()
                    + (s + (2.0 * h * ALPHA * RATE * s).sqrt()) * GAMMA
            },
            bound: Bound::Most,
            ..USUAL
        },
        Formula {
            name: "broadcast, binomial tree",
            text: "h(a + b·l)",
            kind: ROOT,
            spec: |_| Some("binomial".into()),
            value: |n, s| whole(Of::new(n, s).h, s as f64),
            ..USUAL
        },
        Formula {
            name: "reduce, binomial tree",
            text: "h(a + b·l + γ·l)",
            kind: Kind::Reduce { root: 0 },
            spec: |_| Some("binomial".into()),
            value: |n, s| whole(Of::new(n, s).h, s as f64) + Of::new(n, s).h * s as f64 * GAMMA,
            ..USUAL
        },
        Formula {
            name: "gather, binomial tree",
            text: "a·⌈log2 p⌉ + (p−1)b·l",
            kind: Kind::Gather { root: 0 },
            spec: |_| Some("circulant".into()),
            value: |n, s| Of::new(n, s).h * ALPHA + share(n, s),
            ..USUAL
        },
        Formula {
            name: "scatter, binomial tree",
            text: "a·⌈log2 p⌉ + (p−1)b·l",
            kind: Kind::Scatter { root: 0 },
            spec: |_| Some("circulant".into()),
            value: |n, s| Of::new(n, s).h * ALPHA + share(n, s),
            ..USUAL
        },
        Formula {
            name: "allgather, ring",
            text: "(p−1)(a + b·l)",
            kind: Kind::Allgather,
            spec: |_| Some("ring".into()),
            value: |n, s| (f64::from(n) - 1.0) * ALPHA + share(n, s),
            ..USUAL
        },
        Formula {
            name: "allgather, circulant (Bruck)",
            text: "a·⌈log2 p⌉ + (p−1)b·l",
            kind: Kind::Allgather,
            spec: |_| Some("circulant".into()),
            value: |n, s| Of::new(n, s).h * ALPHA + share(n, s),
            ..USUAL
        },
    ]
}

/// (p−1)b·l, for equal shares l = S/p.
fn share(hosts: u32, bytes: u64) -> f64 {
    let Of { n, s, .. } = Of::new(hosts, bytes);
    s * (n - 1.0) / n * BETA
}

fn topology(spec: &str, hosts: u32) -> Topology {
    match factors(hosts) {
        Some((_, size)) if spec == "hierarchical" => {
            Topology::from_racks((0..hosts).map(|host| host / size).collect())
        }
        _ => Topology::flat(hosts),
    }
}

/// The number of elements, and the bytes of each. Elements are few and large, because schedules cut
/// many elements into more messages than the formulas. Their number can be divided by all hosts,
/// and into eighths.
fn elements(hosts: u32, bytes: u64) -> (u64, u64) {
    let hosts = u64::from(hosts);
    let shared = [hosts * 8, hosts].map(|shares| shares * GRAIN);
    let count = shared.into_iter().find(|&count| count <= bytes).unwrap_or(shared[1]);
    (count, (bytes + count / 2) / count)
}

/// The time in the formulas' model, and the bytes, which are close to `bytes`.
pub(super) fn simulated(
    kind: Kind,
    spec: &str,
    hosts: u32,
    (bytes, segments): (u64, u64),
    costs: Costs,
) -> Option<(f64, u64)> {
    let parsed = Spec::parse(spec).ok()?;
    let (count, element) = match segments {
        0 => elements(hosts, bytes),
        many => (many * GRAIN, (bytes / (many * GRAIN)).max(1)),
    };
    let operation = Operation { element, ..Operation::new(kind, parsed, count * 4, hosts) };
    let bytes = operation.bytes();
    let topology = topology(spec, hosts);
    if costs.latency == 0.0 {
        return Some((plain::run(&operation, &topology, costs, None).seconds, bytes));
    }
    // Messages of a round share the lines. Their overhead is expressed as bytes.
    let network = Network::even(topology, 1.0 / costs.per_byte, costs.latency);
    let header = (costs.overhead / costs.per_byte).round() as u64;
    let transport = Transport { header, ..Transport::WHOLE };
    let setup = Setup { transport, ..Setup::new(network) };
    let mut job = InOrder::new(vec![Arc::new(operation)], Control::default());
    Some((run_on(&setup, &mut job).seconds, bytes))
}

pub(super) fn costs(overlaps: bool, reduces: bool) -> Costs {
    let (overhead, latency) = if overlaps { (OVERHEAD, ALPHA) } else { (ALPHA, 0.0) };
    Costs { overhead, latency, per_byte: BETA, reduce: if reduces { GAMMA } else { 0.0 } }
}

pub(super) fn milliseconds(seconds: f64) -> String {
    format!("{:.4}", seconds * 1e3)
}

pub(super) fn percent(part: f64) -> String {
    format!("{:+.2} %", part * 100.0)
}

/// Every formula for every number of hosts and size.
pub fn run() -> Results {
    let head = ["algorithm", "formula", "N", "bytes", "formula, ms", "simulated, ms", "deviation"];
    let mut table = Table::new("formulas", &head);
    let mut checks = Vec::new();
    for formula in formulas() {
        for hosts in HOSTS {
            let Some(spec) = (formula.spec)(hosts) else { continue };
            for bytes in BYTES {
                let costs = costs(formula.overlaps, formula.reduces);
                let segments = (formula.segments)(hosts, bytes);
                let spec = if segments > 0 {
                    format!("{spec}(segments={})", segments / 2)
                } else {
                    spec.clone()
                };
                let of = (bytes, segments);
                let done = simulated(formula.kind, &spec, hosts, of, costs);
                let Some((time, bytes)) = done else { continue };
                let expected = (formula.value)(hosts, bytes);
                let what = format!("{}, N = {hosts}, {bytes} bytes", formula.name);
                let check = match formula.bound {
                    Bound::Most => Check::at_most(what, time, expected),
                    Bound::Near => Check::within(what, time, expected, PART),
                };
                table.push([
                    formula.name.to_owned(),
                    formula.text.to_owned(),
                    hosts.to_string(),
                    bytes.to_string(),
                    milliseconds(expected),
                    milliseconds(time),
                    percent(check.deviation()),
                ]);
                if (formula.applies)(hosts, bytes) {
                    checks.push(check);
                }
            }
        }
    }
    chains(&mut table, &mut checks);
    Results { tables: vec![table], charts: Vec::new(), checks }
}

/// The chain with the best number of segments: (√((N−2)α)+√(S/B))².
fn chains(table: &mut Table, checks: &mut Vec<Check>) {
    let (hosts, bytes) = (13, 1 << 20);
    let q = segments(hosts, bytes);
    let spec = format!("chain(segments={q})");
    let done = simulated(ROOT, &spec, hosts, (bytes, q as u64), costs(false, false));
    let Some((time, bytes)) = done else { return };
    let Of { n, s, .. } = Of::new(hosts, bytes);
    let expected = (((n - 2.0) * ALPHA).sqrt() + (s * BETA).sqrt()).powi(2);
    let check = Check::within("the best chain", time, expected, PART);
    table.push([
        format!("broadcast along a chain in the best number of segments, {q}"),
        "(√((N−2)α) + √(S/B))²".to_owned(),
        hosts.to_string(),
        bytes.to_string(),
        milliseconds(expected),
        milliseconds(time),
        percent(check.deviation()),
    ]);
    checks.push(check);
}
