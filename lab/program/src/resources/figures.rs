//! Turns measurements into a report. Pure.

use std::collections::BTreeMap;

use gradwire_bench::{
    machine::Machine,
    operation::Memory,
    rank::Changed,
    report::Node,
    table::{Column, none},
};
use gradwire_worker::Session;
use serde::{Deserialize, Serialize};

use super::args::Resources;
use crate::process::Usage;

const MIB: f64 = 1_048_576.0;

/// The description of a measurement.
#[derive(Debug, Clone, Serialize)]
pub struct Head {
    /// The release of Gradwire.
    pub gradwire: &'static str,
    /// The command.
    pub command: &'static str,
    /// The number of ranks.
    pub ranks: u32,
    /// The hosts, each with its ranks.
    pub nodes: Vec<Node>,
    /// The machine of rank 0.
    pub machine: Machine,
    /// The changed settings; `None` if another program started the job.
    pub settings: Changed,
    /// The tensor's size.
    pub bytes: u64,
    /// The memory of the tensor.
    pub memory: Memory,
    /// How long the job was idle, in seconds.
    pub idle_seconds: f64,
    /// The number of steps after that.
    pub steps: u32,
    /// The number of additional steps while system calls were counted.
    pub calls_steps: u32,
}

impl Head {
    /// The head of a report.
    pub fn new(session: &Session, options: &Resources, settings: Changed) -> Self {
        Self {
            gradwire: gradwire_proto::VERSION,
            command: "resources",
            ranks: session.size(),
            nodes: Node::all(session),
            machine: Machine::look(),
            settings,
            bytes: options.bytes,
            memory: options.memory,
            idle_seconds: options.idle,
            steps: options.steps,
            calls_steps: options.calls,
        }
    }

    /// The head as lines for people.
    pub fn lines(&self) -> Vec<String> {
        let machine = &self.machine;
        vec![
            format!("gradwire {} bench resources", self.gradwire),
            format!("{} ranks on {}", self.ranks, Node::list(&self.nodes)),
            format!("{}, {} cores, Linux {}", machine.processor, machine.cores, machine.kernel),
            format!(
                "{} s without submissions, then {} steps, each an allreduce of {} bytes, then {} \
                 steps while system calls are counted",
                self.idle_seconds, self.steps, self.bytes, self.calls_steps
            ),
            "idle is a share of one core; own is memory that is not shared, after 100 steps and at \
             the end; all other figures are per step"
                .to_owned(),
        ]
    }
}

/// The resources that a process had used at some time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Time on a processor, in seconds.
    pub cpu: f64,
    /// Private memory, in bytes.
    pub private: u64,
    /// All its memory, including arenas.
    pub memory: u64,
    /// How often its threads waited.
    pub waits: u64,
    /// How often its threads were preempted.
    pub preemptions: u64,
    /// The number of page faults.
    pub faults: u64,
}

impl From<Usage> for Sample {
    fn from(usage: Usage) -> Self {
        let Usage { cpu, memory, private, waits, preemptions, faults } = usage;
        Self { cpu, private, memory, waits, preemptions, faults }
    }
}

/// The measurements of one process.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Seen {
    /// Its host.
    pub host: String,
    /// Its name.
    pub process: String,
    /// Its processor time while the job was idle, in seconds.
    pub idle_cpu: f64,
    /// How often it woke up while the job was idle.
    pub idle_waits: u64,
    /// The samples, by the number of finished steps.
    pub samples: BTreeMap<u32, Sample>,
    /// The number of system calls in the last part.
    pub calls: Option<u64>,
    /// Why system calls could not be counted.
    pub uncounted: Option<String>,
}

/// One line of the table.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// Its host.
    pub host: String,
    /// Its name: `daemon`, `coordinator` or `rank N`.
    pub process: String,
    /// The share of one core used while the job was idle, from 0 to 1.
    pub idle_share: f64,
    /// Wake-ups per second while the job was idle.
    pub idle_wakes: f64,
    /// Private memory in bytes, by the number of finished steps.
    pub private_bytes: BTreeMap<u32, u64>,
    /// The growth of private memory from the first sample to the last.
    pub growth_bytes: i64,
    /// Processor time in microseconds per step, after the first sample.
    pub cpu_us: f64,
    /// Waits of threads, per step.
    pub waits: f64,
    /// Preemptions of threads, per step.
    pub preemptions: f64,
    /// Page faults, per step.
    pub faults: f64,
    /// System calls, per step; `None` if they could not be counted.
    pub calls: Option<f64>,
    /// System calls, per step and MiB of a rank's tensor.
    pub calls_per_mib: Option<f64>,
    /// Why system calls could not be counted.
    pub uncounted: Option<String>,
}

/// The rows of all measured processes.
pub fn rows(seen: &[Seen], options: &Resources) -> Vec<Row> {
    seen.iter().map(|seen| row(seen, options)).collect()
}

fn row(seen: &Seen, options: &Resources) -> Row {
    let first = seen.samples.first_key_value().map(|(step, sample)| (*step, *sample));
    let last = seen.samples.last_key_value().map(|(step, sample)| (*step, *sample));
    let ((from, before), (to, after)) = (first.unwrap_or_default(), last.unwrap_or_default());
    // A single sample at the end has no earlier one to compare with.
    let steps = f64::from(to.saturating_sub(from).max(1));
    let per = |before: u64, after: u64| after.saturating_sub(before) as f64 / steps;
    let calls = seen.calls.map(|calls| calls as f64 / f64::from(options.calls.max(1)));
    let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    Row {
        host: seen.host.clone(),
        process: seen.process.clone(),
        idle_share: seen.idle_cpu / options.idle.max(1e-9),
        idle_wakes: seen.idle_waits as f64 / options.idle.max(1e-9),
        private_bytes: seen.samples.iter().map(|(step, sample)| (*step, sample.private)).collect(),
        growth_bytes: signed(after.private) - signed(before.private),
        cpu_us: (after.cpu - before.cpu).max(0.0) * 1e6 / steps,
        waits: per(before.waits, after.waits),
        preemptions: per(before.preemptions, after.preemptions),
        faults: per(before.faults, after.faults),
        calls,
        calls_per_mib: calls.map(|calls| calls / (options.bytes as f64 / MIB)),
        uncounted: seen.uncounted.clone(),
    }
}

const COLUMNS: &[Column<Row>] = &[
    ("host", 15, |row| row.host.clone()),
    ("process", 11, |row| row.process.clone()),
    ("idle", 7, |row| format!("{:.2}%", row.idle_share * 100.0)),
    ("wakes/s", 8, |row| format!("{:.1}", row.idle_wakes)),
    ("own MiB", 8, |row| mib(row.private_bytes.first_key_value())),
    ("at end", 8, |row| mib(row.private_bytes.last_key_value())),
    ("cpu µs", 9, |row| format!("{:.1}", row.cpu_us)),
    ("waits", 7, |row| format!("{:.2}", row.waits)),
    ("preempt", 7, |row| format!("{:.2}", row.preemptions)),
    ("faults", 7, |row| format!("{:.2}", row.faults)),
    ("calls", 8, |row| row.calls.map_or_else(none, |calls| format!("{calls:.1}"))),
    ("calls/MiB", 9, |row| row.calls_per_mib.map_or_else(none, |calls| format!("{calls:.1}"))),
];

fn mib(sample: Option<(&u32, &u64)>) -> String {
    sample.map_or_else(none, |(_, bytes)| format!("{:.1}", *bytes as f64 / MIB))
}

/// All columns.
pub fn columns() -> Vec<&'static Column<Row>> {
    COLUMNS.iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> Resources {
        use clap::Parser;

        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            options: Resources,
        }
        let line = "bench -b 2M --idle 20 --steps 1100 --calls 10";
        Line::parse_from(line.split(' ')).options
    }

    #[test]
    fn steps_are_counted_between_samples() {
        let sample = |n: u64| Sample {
            cpu: n as f64,
            private: (10 + n) << 20,
            memory: 0,
            waits: 1000 * n,
            preemptions: 500 * n,
            faults: 0,
        };
        let seen = Seen {
            process: "daemon".to_owned(),
            idle_cpu: 0.1,
            idle_waits: 40,
            samples: [(100, sample(1)), (1000, sample(2)), (1100, sample(3))].into(),
            calls: Some(50),
            ..Seen::default()
        };
        let row = &rows(&[seen.clone(), Seen::default()], &options())[0];
        assert!((row.idle_share - 0.005).abs() < 1e-9 && (row.idle_wakes - 2.0).abs() < 1e-9);
        assert_eq!((row.growth_bytes, row.private_bytes.len()), (2 << 20, 3));
        assert_eq!((row.cpu_us, row.waits, row.preemptions, row.faults), (2000.0, 2.0, 1.0, 0.0));
        assert_eq!((row.calls, row.calls_per_mib), (Some(5.0), Some(2.5)));
        let cells: Vec<_> = COLUMNS.iter().map(|(.., cell)| cell(row)).collect();
        assert_eq!(cells[1..6], ["daemon", "0.50%", "2.0", "11.0", "13.0"]);
        let nothing = &rows(&[Seen::default()], &options())[0];
        let cells: Vec<_> = COLUMNS.iter().map(|(.., cell)| cell(nothing)).collect();
        assert_eq!(cells[4..], ["-", "-", "0.0", "0.00", "0.00", "0.00", "-", "-"]);
    }
}
