//! The report for each number of nodes.

use std::collections::BTreeMap;

use gradwire_bench::{
    machine::Machine,
    stats::{Stats, micros_of},
    table::{Column, Table, micros},
};
use gradwire_launcher::error::CommandError;
use gradwire_settings::{Loaded, Origin};
use serde::Serialize;

use super::{args::Negotiation, meter::Traffic, node::Counts, step::Tensors};
use crate::process::Usage;

/// The description of a measurement.
#[derive(Debug, Clone, Serialize)]
pub struct Head {
    /// The release of Gradwire.
    pub gradwire: &'static str,
    /// The command.
    pub command: &'static str,
    /// The network.
    pub shapes: String,
    /// Its tensors, which every node announces in every step.
    pub tensors: usize,
    /// The number of their elements.
    pub elements: u64,
    /// The number of messages that announce a node's tensors.
    pub ready: u32,
    /// Whether each operation's end has its own message.
    pub done_each: bool,
    /// The machine of all nodes and the coordinator.
    pub machine: Machine,
    /// The number of threads that all simulated nodes share.
    pub threads: usize,
    /// The changed settings.
    pub settings: BTreeMap<String, String>,
    /// Warm-up steps.
    pub warmup: u32,
    /// Measured steps.
    pub iters: u32,
}

impl Head {
    /// The head of a report.
    pub fn new(
        options: &Negotiation,
        tensors: &Tensors,
        threads: usize,
        settings: &Loaded,
    ) -> Self {
        let made = settings.rows.iter().filter(|row| row.origin != Origin::Default);
        Self {
            gradwire: gradwire_proto::VERSION,
            command: "negotiation",
            shapes: options.shapes.clone(),
            tensors: tensors.count(),
            elements: tensors.elements(),
            ready: options.ready,
            done_each: options.done_each,
            machine: Machine::look(),
            threads,
            settings: made.map(|row| (row.key.name.to_owned(), row.value.clone())).collect(),
            warmup: options.warmup,
            iters: options.iters,
        }
    }

    /// Begins the table.
    ///
    /// # Errors
    /// As for [`Table::begin`].
    pub fn begin(self, options: &Negotiation) -> Result<Table<Self, Row>, CommandError> {
        let machine = &self.machine;
        let done = if self.done_each { "one by one" } else { "together, as ordered" };
        let lines = vec![
            format!("gradwire {} bench {} {}", self.gradwire, self.command, self.shapes),
            format!("{}, {} cores, Linux {}", machine.processor, machine.cores, machine.kernel),
            format!(
                "a step: every node announces {} tensors in {} messages, and reports finished \
                 operations {done}",
                self.tensors, self.ready
            ),
            format!(
                "{} steps after {} for warm-up, from the first message to the last order received; \
                 simulated nodes share {} threads",
                self.iters, self.warmup, self.threads
            ),
            "messages and bytes: per node and step; cpu and memory: the coordinator's".to_owned(),
        ];
        Table::begin(self, lines, COLUMNS.iter().collect(), options.json.as_deref(), true)
    }
}

/// The first step, in which tensors have no ids yet and are announced by name.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct First {
    /// Its time.
    pub us: f64,
    /// What each node sent to the coordinator.
    pub sent: Traffic,
    /// What each node received from the coordinator.
    pub received: Traffic,
}

/// One line of the table. Messages and bytes are per node and step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The number of nodes.
    pub nodes: u32,
    /// The statistics of the times.
    #[serde(flatten)]
    pub stats: Stats,
    /// The median time divided by the number of tensors.
    pub us_per_tensor: f64,
    /// The number of operations in a step.
    pub operations: f64,
    /// What was sent to the coordinator.
    pub sent: Traffic,
    /// What was received from the coordinator.
    pub received: Traffic,
    /// The coordinator's time on a processor, per step.
    pub coordinator_cpu_us: f64,
    /// The coordinator's memory after the last step.
    pub coordinator_bytes: u64,
    /// All simulated nodes' time on processors, per step.
    pub nodes_cpu_us: f64,
    /// The step before the warm-up.
    pub first: First,
    /// The time of every step, in order.
    pub times_us: Vec<f64>,
}

/// The measurements of some steps.
#[derive(Debug)]
pub struct Steps {
    /// The time of each, in seconds.
    pub times: Vec<f64>,
    /// What all nodes sent and received.
    pub counts: Counts,
    /// The usage of the coordinator, before and after.
    pub coordinator: [Usage; 2],
    /// The usage of this process, before and after.
    pub simulator: [Usage; 2],
}

impl Row {
    /// The row for the first step and the measured steps.
    pub fn new(nodes: u32, tensors: usize, first: &Steps, steps: &Steps) -> Self {
        let stats = Stats::of(&steps.times);
        let count = steps.times.len().max(1) as f64;
        let all = count * f64::from(nodes);
        let cpu =
            |[before, after]: [Usage; 2]| micros_of((after.cpu - before.cpu).max(0.0) / count);
        Self {
            nodes,
            stats,
            us_per_tensor: stats.median_us / tensors.max(1) as f64,
            operations: steps.counts.operations as f64 / all,
            sent: steps.counts.sent.per(all),
            received: steps.counts.received.per(all),
            coordinator_cpu_us: cpu(steps.coordinator),
            coordinator_bytes: steps.coordinator[1].memory,
            nodes_cpu_us: cpu(steps.simulator),
            first: First {
                us: Stats::of(&first.times).median_us,
                sent: first.counts.sent.per(nodes.into()),
                received: first.counts.received.per(nodes.into()),
            },
            times_us: steps.times.iter().copied().map(micros_of).collect(),
        }
    }
}

const COLUMNS: &[Column<Row>] = &[
    ("nodes", 6, |row| row.nodes.to_string()),
    ("min µs", 10, |row| micros(row.stats.min_us)),
    ("median µs", 10, |row| micros(row.stats.median_us)),
    ("p99 µs", 10, |row| micros(row.stats.p99_us)),
    ("µs/tensor", 9, |row| format!("{:.2}", row.us_per_tensor)),
    ("out msgs", 8, |row| micros(row.sent.messages)),
    ("bytes", 8, |row| format!("{:.0}", row.sent.bytes)),
    ("wire", 8, |row| format!("{:.0}", row.sent.wire_bytes)),
    ("in msgs", 8, |row| micros(row.received.messages)),
    ("bytes", 8, |row| format!("{:.0}", row.received.bytes)),
    ("wire", 8, |row| format!("{:.0}", row.received.wire_bytes)),
    ("cpu µs", 10, |row| micros(row.coordinator_cpu_us)),
    ("MiB", 6, |row| format!("{:.1}", row.coordinator_bytes as f64 / f64::from(1 << 20))),
    ("first µs", 10, |row| micros(row.first.us)),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_per_step_per_node_and_per_tensor() {
        let usage = |cpu, memory| Usage { cpu, memory, ..Usage::default() };
        let traffic = |messages, bytes| Traffic { messages, bytes, wire_bytes: 2.0 * bytes };
        let steps = |times: &[f64]| Steps {
            times: times.to_vec(),
            counts: Counts {
                sent: traffic(24.0, 2400.0),
                received: traffic(48.0, 9600.0),
                operations: 72,
            },
            coordinator: [usage(1.0, 1 << 20), usage(1.003, 3 << 20)],
            simulator: [usage(5.0, 0), usage(5.03, 0)],
        };
        let row = Row::new(8, 10, &steps(&[9e-3]), &steps(&[3e-3, 1e-3, 2e-3]));
        assert_eq!((row.stats.median_us, row.us_per_tensor, row.operations), (2000.0, 200.0, 3.0));
        assert_eq!((row.sent, row.received), (traffic(1.0, 100.0), traffic(2.0, 400.0)));
        assert_eq!((row.coordinator_cpu_us, row.coordinator_bytes), (1000.0, 3 << 20));
        assert_eq!((row.nodes_cpu_us, row.first.us), (10_000.0, 9000.0));
        assert_eq!(row.first.sent, traffic(3.0, 300.0));
        let json = serde_json::to_value(&row).unwrap();
        assert_eq!(json["sent"]["wire_bytes"], 200.0);
        assert_eq!(json["median_us"], 2000.0);
    }
}
