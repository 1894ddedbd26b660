//! The report of a measurement by ranks.

use std::collections::BTreeMap;

use gradwire_launcher::{error::CommandError, launch::hosts::count};
use gradwire_worker::Session;
use serde::Serialize;

use super::{
    args::Bench,
    baseline::has_program,
    machine::Machine,
    operation::{Memory, Operation},
    stats::{Stats, micros_of},
    table::{Column, Table, micros, none},
};

/// The description of a measurement.
#[derive(Debug, Clone, Serialize)]
pub struct Head {
    /// The release of Gradwire.
    pub gradwire: &'static str,
    /// The command: a collective, or `model`.
    pub command: String,
    /// The reduction or the root.
    pub detail: String,
    /// The network, for a model.
    pub shapes: Option<String>,
    /// The element type; none without elements.
    pub dtype: Option<&'static str>,
    /// The wire format between nodes.
    pub wire: Option<&'static str>,
    /// The memory of tensors; `None` if there are none.
    pub memory: Option<Memory>,
    /// The number of ranks.
    pub ranks: u32,
    /// The hosts, each with its ranks.
    pub nodes: Vec<Node>,
    /// The machine of rank 0.
    pub machine: Machine,
    /// The changed settings; `None` if another program started the job.
    pub settings: Option<BTreeMap<String, String>>,
    /// Warm-up iterations.
    pub warmup: u32,
    /// Measured iterations.
    pub iters: u32,
    /// Whether there is a barrier before each iteration.
    pub barrier: bool,
    /// The interval, in iterations, at which results are checked, if the options set it.
    pub check: Option<u32>,
    /// A description of the baseline.
    pub baseline: String,
}

/// A host of the job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Node {
    /// Its name.
    pub host: String,
    /// Its number of ranks.
    pub ranks: u32,
}

impl Node {
    /// The hosts of a job.
    pub fn all(session: &Session) -> Vec<Self> {
        let of = |node: &gradwire_worker::Node| Self { host: node.host.clone(), ranks: node.slots };
        session.nodes().iter().map(of).collect()
    }

    /// The first hosts of a list, in one line.
    pub fn list(nodes: &[Self]) -> String {
        let hosts: Vec<_> =
            nodes.iter().take(8).map(|n| format!("{}:{}", n.host, n.ranks)).collect();
        let more = if nodes.len() > 8 { ",…" } else { "" };
        format!("{}{more}", hosts.join(","))
    }
}

impl Head {
    /// The head of a report.
    pub fn new(
        bench: &Bench,
        session: &Session,
        settings: Option<BTreeMap<String, String>>,
    ) -> Self {
        let operation = bench.operation();
        let data = bench.data();
        let shapes = match bench {
            Bench::Model { shapes, .. } => Some(shapes.clone()),
            Bench::Sweep(_) | Bench::Barrier { .. } => None,
        };
        let common = bench.common();
        let nodes = Node::all(session);
        let memory = data.map(|data| data.memory);
        let line = data.and_then(|data| data.line_rate);
        let machine = Machine::look();
        let threads = format!(
            "on one thread for each rank, and for large tensors on {} threads",
            machine.cores.max(session.size() as usize)
        );
        let baseline = match (operation, nodes.len(), memory, line) {
            (Operation::Barrier, ..) => "none".to_owned(),
            (_, 1, ..) if data.is_some_and(|data| !has_program(operation, data.dtype)) => {
                "none: it reduces only sums and averages of f32, f64, f16 and bf16".to_owned()
            }
            (_, 1, Some(Memory::Ordinary), _) => {
                format!(
                    "the same work without gradwire: copied to shared memory, done there, copied \
                     back, {threads}"
                )
            }
            (Operation::Allreduce(_), 1, ..) => {
                format!("the same work without gradwire, in place in shared memory, {threads}")
            }
            (_, 1, ..) => format!("the same work without gradwire, in shared memory, {threads}"),
            (.., Some(rate)) => {
                format!("the line between nodes at {} Gbit/s", rate.bits_per_second / 1e9)
            }
            (.., None) => "unknown; --line-rate sets that of the line".to_owned(),
        };
        let command = if shapes.is_some() { "model" } else { operation.name() };
        Self {
            gradwire: gradwire_proto::VERSION,
            command: command.to_owned(),
            detail: operation.detail(),
            shapes,
            dtype: data.map(|data| data.dtype.name()),
            wire: data.map(|data| operation.wire(session, data.dtype)),
            memory,
            ranks: session.size(),
            nodes,
            machine,
            settings,
            warmup: common.warmup,
            iters: common.iters,
            barrier: common.barrier,
            check: data.and_then(|data| data.check),
            baseline,
        }
    }

    fn lines(&self) -> Vec<String> {
        let what =
            [Some(&*self.command), self.shapes.as_deref(), self.dtype, Some(self.detail.as_str())];
        let what: Vec<_> = what.into_iter().flatten().filter(|word| !word.is_empty()).collect();
        let hosts = Node::list(&self.nodes);
        let lie = match self.memory {
            Some(Memory::Arena) => ", tensors in shared memory",
            Some(Memory::Ordinary) => ", tensors in ordinary memory",
            None => "",
        };
        let travel = match self.wire.filter(|wire| self.dtype != Some(wire)) {
            Some(wire) => format!(", {wire} between nodes"),
            None => String::new(),
        };
        let machine = &self.machine;
        let apart = if self.barrier { "each after a barrier" } else { "back to back" };
        let checked = match (self.dtype, self.check) {
            (None, _) => "all are checked".to_owned(),
            (_, Some(1)) => "every result is checked".to_owned(),
            (_, Some(n)) => format!("every {n}-th result is checked"),
            (_, None) => "every result is checked, above 16 MiB every 10th".to_owned(),
        };
        vec![
            format!("gradwire {} bench {}", self.gradwire, what.join(" ")),
            format!("{} ranks on {hosts}{lie}{travel}", self.ranks),
            format!("{}, {} cores, Linux {}", machine.processor, machine.cores, machine.kernel),
            format!(
                "{} {apart} after {} for warm-up; times are those of the slowest \
                 rank; {checked}",
                count(self.iters, "iteration"),
                self.warmup
            ),
            format!("baseline: {}", self.baseline),
        ]
    }
}

/// The figures of a model.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Model {
    /// The number of tensors.
    pub tensors: usize,
    /// The compute time, in milliseconds.
    pub compute_ms: f64,
    /// The median time from the last submission to the end of the step.
    pub exposed_us: f64,
}

impl Model {
    /// The figures of a model, from the exposed times in seconds.
    pub fn new(tensors: usize, compute_ms: f64, exposed: &[f64]) -> Self {
        Self { tensors, compute_ms, exposed_us: Stats::of(exposed).median_us }
    }
}

/// One line of the table. Bandwidths are in 10^9 bytes per second, by the median time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The size in bytes, as defined by nccl-tests; for a model, the bytes of all gradients.
    pub bytes: u64,
    /// The size in elements.
    pub elements: usize,
    /// The statistics of the times.
    #[serde(flatten)]
    pub stats: Stats,
    /// The size divided by the time.
    pub algorithm_gb_s: f64,
    /// The algorithm bandwidth times the factor of the collective, to compare it with that of a
    /// link.
    pub bus_gb_s: f64,
    /// The time of the baseline, if there is one.
    pub baseline_us: Option<f64>,
    /// The baseline's time divided by the median.
    pub baseline_share: Option<f64>,
    /// The figures of a model.
    #[serde(flatten)]
    pub model: Option<Model>,
    /// The time of every iteration, in order.
    pub times_us: Vec<f64>,
}

impl Row {
    /// The row for times in seconds, without a baseline.
    pub fn new(
        operation: Operation,
        ranks: u32,
        bytes: u64,
        elements: usize,
        times: Vec<f64>,
    ) -> Self {
        let stats = Stats::of(&times);
        // Times of zero are below the clock's resolution.
        let bandwidth = bytes as f64 / 1e9 / stats.median().max(1e-9);
        Self {
            bytes,
            elements,
            stats,
            algorithm_gb_s: bandwidth,
            bus_gb_s: bandwidth * operation.bus_factor(ranks),
            baseline_us: None,
            baseline_share: None,
            model: None,
            times_us: times.iter().copied().map(micros_of).collect(),
        }
    }

    /// Adds a baseline in seconds.
    #[must_use]
    pub fn with_baseline(self, baseline: Option<f64>) -> Self {
        let baseline_share = baseline.map(|baseline| baseline / self.stats.median().max(1e-9));
        Self { baseline_us: baseline.map(micros_of), baseline_share, ..self }
    }

    /// Adds the figures of a model.
    #[must_use]
    pub fn model(self, model: Model) -> Self {
        Self { model: Some(model), ..self }
    }
}

const SIZE: &[Column<Row>] =
    &[("bytes", 12, |row| row.bytes.to_string()), ("elements", 11, |row| row.elements.to_string())];
const TIME: &[Column<Row>] = &[
    ("min µs", 11, |row| micros(row.stats.min_us)),
    ("median µs", 11, |row| micros(row.stats.median_us)),
    ("p99 µs", 11, |row| micros(row.stats.p99_us)),
];
const MODEL: &[Column<Row>] = &[
    ("tensors", 8, |row| row.model.map_or_else(none, |model| model.tensors.to_string())),
    ("compute ms", 11, |row| row.model.map_or_else(none, |model| model.compute_ms.to_string())),
    ("exposed µs", 11, |row| row.model.map_or_else(none, |model| micros(model.exposed_us))),
];
const BANDWIDTH: &[Column<Row>] = &[
    ("alg GB/s", 9, |row| format!("{:.3}", row.algorithm_gb_s)),
    ("bus GB/s", 9, |row| format!("{:.3}", row.bus_gb_s)),
    ("base µs", 11, |row| row.baseline_us.map_or_else(none, micros)),
    ("share", 7, |row| row.baseline_share.map_or_else(none, |s| format!("{:.1}%", s * 100.0))),
];

/// The report being written: by rank 0; the other ranks write nothing.
pub type Report = Table<Head, Row>;

/// Begins the report.
///
/// # Errors
/// As [`Table::begin`].
pub fn begin(head: Head, bench: &Bench, writes: bool) -> Result<Report, CommandError> {
    let groups: &[&[Column<Row>]] = match bench {
        Bench::Sweep(_) => &[SIZE, TIME, BANDWIDTH],
        Bench::Barrier { .. } => &[TIME],
        Bench::Model { .. } => &[SIZE, MODEL, TIME, BANDWIDTH],
    };
    let columns = groups.iter().flat_map(|group| group.iter()).collect();
    let (lines, json) = (head.lines(), bench.common().json.as_deref());
    Table::begin(head, lines, columns, json, writes)
}

#[cfg(test)]
mod tests {
    use gradwire_proto::ReduceOp;

    use super::*;

    #[test]
    fn bandwidths_are_of_the_median() {
        let sum = Operation::Allreduce(ReduceOp::Sum);
        let row =
            Row::new(sum, 4, 1_000_000, 250_000, vec![3e-3, 1e-3, 2e-3]).with_baseline(Some(1e-3));
        assert!((row.algorithm_gb_s - 0.5).abs() < 1e-9);
        assert!((row.bus_gb_s - 0.75).abs() < 1e-9);
        assert!(row.baseline_share.is_some_and(|share| (share - 0.5).abs() < 1e-9));
        assert_eq!(row.times_us.len(), 3);
        let cells: Vec<_> = BANDWIDTH.iter().map(|(.., cell)| cell(&row)).collect();
        assert_eq!(cells, ["0.500", "0.750", "1000.0", "50.0%"]);
        let barrier = Row::new(Operation::Barrier, 4, 0, 0, vec![0.0]);
        let cells: Vec<_> = BANDWIDTH.iter().map(|(.., cell)| cell(&barrier)).collect();
        assert_eq!(cells, ["0.000", "0.000", "-", "-"]);
    }

    #[test]
    fn a_row_is_flat_in_json() {
        let sum = Operation::Allreduce(ReduceOp::Sum);
        let row = Row::new(sum, 2, 8, 2, vec![1e-6]).model(Model::new(3, 1.5, &[1e-6]));
        let json = serde_json::to_value(&row).unwrap();
        for name in ["bytes", "median_us", "bus_gb_s", "tensors", "exposed_us", "baseline_us"] {
            assert!(json.get(name).is_some(), "no {name} in {json}");
        }
    }
}
