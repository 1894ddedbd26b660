//! `gradwire simulate run`.

use std::sync::Arc;

use gradwire_cli::cluster::{aligned, in_words, printable};
use gradwire_collectives::{Rules, Spec, algorithms::has_servers, select::time};
use gradwire_launcher::error::CommandError;
use gradwire_simulator::{
    Setup,
    fair::{Fair, ResourceId},
    input::Input,
    job::{InOrder, Operation},
    memory,
    report::{Hop, Outcome},
    run as simulate,
    table::{Chart, Table},
};
use serde_json::{Value, json};

use super::{
    options::{RunOptions, median},
    output::{Directory, Output},
};

/// The number of printed steps of a critical path.
const SHOWN: usize = 8;

/// The most links whose use over time is written, busiest first (BOUND).
const OVER_TIME: usize = 256;

/// The most points of a line of the chart (BOUND).
const SHARES: usize = 200;

/// Bytes of a table row in memory.
const ROW: u64 = 320;

/// The simulation of one algorithm.
struct Run {
    spec: Spec,
    operation: Arc<Operation>,
}

pub(super) fn run(options: &RunOptions, input: &Input) -> Result<Output, CommandError> {
    let setup = Setup { seed: options.seed, details: true, ..input.setup.clone() };
    let runs = runs(options, input)?;
    check_memory(options, input, &setup, &runs)?;
    let directory = Directory::new(options.out.as_deref())?;

    let mut rows =
        vec![["algorithm", "time", "per piece", "GB/s", "senders", "note"].map(str::to_owned)];
    let (mut paths, mut tables) = (String::new(), Tables::new());
    let (mut times, mut all, mut has_ended) = (Vec::new(), Vec::new(), true);
    for Run { spec, operation } in &runs {
        let operations = vec![operation.clone(); input.pieces as usize];
        let mut calls = InOrder::calls(operations, options.calls, input.control);
        let outcome = simulate(&setup, &mut calls);
        let taken = calls.taken();
        rows.push(row(input, options.calls, spec, &outcome, median(&taken)));
        has_ended &= outcome.standstill.is_none();
        paths.push_str(&critical_path(input, spec, &outcome.critical_path));
        if options.out.is_some() {
            tables.add(input, spec, &outcome);
            times.push((spec.to_string(), published(&outcome)));
            all.push(as_json(input, spec, &outcome, &taken));
        }
    }
    let json = json!({
        "collective": input.kind.name(),
        "bytes": input.bytes,
        "pieces": input.pieces,
        "calls": options.calls,
        "hosts": input.setup.network.hosts.len(),
        "servers": input.servers,
        "seed": options.seed,
        "runs": all,
    });
    let text = format!("{}\n{}{paths}", head(input, options), aligned(&rows));
    let charts = vec![Chart {
        title: "operations".to_owned(),
        x: "ms".to_owned(),
        y: "operations that hosts have published, %".to_owned(),
        logarithmic: [false, false],
        lines: times,
    }];
    Ok(Output { text, tables: tables.all(), charts, json, holds: has_ended, directory })
}

/// One run for each requested algorithm, or for each that the cost model chooses from.
fn runs(options: &RunOptions, input: &Input) -> Result<Vec<Run>, CommandError> {
    let topology = &input.setup.network.topology;
    let hosts = topology.contributors();
    for spec in &options.specs {
        spec.fits(hosts).map_err(|error| {
            CommandError::usage(format!("--spec: {error}"))
                .hint("its parameters must fit the number of hosts in the file, without servers")
        })?;
    }
    let given = if options.specs.is_empty() { &input.specs } else { &options.specs };
    let specs = match &given[..] {
        [] => Rules::default().allowed(input.kind, 0, topology).1,
        given => given.to_vec(),
    };
    let mut runs: Vec<Run> = Vec::new();
    for spec in specs {
        if runs.iter().any(|run| run.spec == spec) {
            continue;
        }
        let all = has_servers(input.kind, &spec);
        let hosts = if all { topology.participants() } else { hosts };
        let operation = Operation::new(input.kind, spec, input.bytes, hosts);
        runs.push(Run { spec, operation: operation.into() });
    }
    Ok(runs)
}

fn check_memory(
    options: &RunOptions,
    input: &Input,
    setup: &Setup,
    runs: &[Run],
) -> Result<(), CommandError> {
    let hosts = setup.network.hosts.len() as u64;
    let rows = if options.out.is_some() {
        u64::from(input.pieces) * u64::from(options.calls) * hosts
    } else {
        0
    };
    for Run { spec, operation } in runs {
        let pieces = input.pieces.saturating_mul(options.calls);
        let needed = memory::needed(setup, operation, pieces);
        let needed = needed.saturating_add(rows * ROW * runs.len() as u64);
        if needed > options.memory {
            let what = format!(
                "{spec} would need about {needed} bytes of memory, but --memory is {}",
                options.memory
            );
            let hint = "allow more, simulate fewer hosts or pieces, or select other \
                        algorithms with --spec";
            return Err(CommandError::usage(what).hint(hint));
        }
    }
    Ok(())
}

fn head(input: &Input, options: &RunOptions) -> String {
    let pieces = match input.pieces {
        1 => "1 piece".to_owned(),
        pieces => format!("{pieces} pieces"),
    };
    let calls = match options.calls {
        1 => String::new(),
        calls => format!("Times are medians of {calls} calls, one after the other. "),
    };
    format!(
        "{}, {pieces} of {} bytes, on {}; seed {}.\n{calls}GB/s: bytes of the pieces / time. \
         Senders: the most hosts that send to one host at a time.\n",
        input.kind.name(),
        input.bytes,
        in_words(&input.setup.network.topology),
        options.seed,
    )
}

fn row(
    input: &Input,
    calls: u32,
    spec: &Spec,
    outcome: &Outcome,
    seconds: Option<f64>,
) -> [String; 6] {
    let Outcome { standstill, timeouts, .. } = outcome;
    let seconds = seconds.unwrap_or(0.0);
    let bytes = input.bytes as f64 * f64::from(input.pieces);
    let pieces = input.pieces * calls;
    let [whole, each, rate] = match standstill {
        Some(_) => ["–"; 3].map(str::to_owned),
        None => [
            time(seconds),
            time(seconds / f64::from(input.pieces)),
            if seconds > 0.0 { format!("{:.3}", bytes / seconds / 1e9) } else { "–".to_owned() },
        ],
    };
    let note = match (standstill, timeouts) {
        (Some(why), _) => {
            format!("{} of {pieces} pieces: {}", outcome.done.len(), printable(why))
        }
        (None, 0) => String::new(),
        (None, 1) => "TCP waited for its timer once".to_owned(),
        (None, timeouts) => format!("TCP waited for its timer {timeouts} times"),
    };
    [spec.to_string(), whole, each, rate, outcome.most_senders().to_string(), note]
}

fn name(input: &Input, host: u32) -> String {
    printable(&input.setup.network.hosts[host as usize].name)
}

fn critical_path(input: &Input, spec: &Spec, path: &[Hop]) -> String {
    if path.is_empty() {
        return String::new();
    }
    let skipped = path.len().saturating_sub(SHOWN);
    let mut rows = vec![["at", "host", "step", "from", "bytes"].map(str::to_owned)];
    rows.extend(path.iter().skip(skipped).map(|hop| {
        let from = hop.from.map(|from| name(input, from)).unwrap_or_default();
        let step = hop.step.to_string();
        [time(hop.end), name(input, hop.host), step, from, hop.bytes.to_string()]
    }));
    let which = match (path.len(), skipped) {
        (all, 0) => format!("{all} steps"),
        (all, _) => format!("the last {SHOWN} of {all} steps"),
    };
    format!("\nCritical path of {spec}, {which}:\n{}", aligned(&rows))
}

/// The share of operations that hosts have published, in percent, over time in milliseconds.
fn published(outcome: &Outcome) -> Vec<(f64, f64)> {
    let mut times: Vec<f64> =
        outcome.done.iter().flat_map(|done| &done.nodes).map(|&(_, time)| time * 1e3).collect();
    times.sort_by(f64::total_cmp);
    let last = times.len().saturating_sub(1);
    let shown = times.len().min(SHARES);
    let at = |share: usize| if shown > 1 { share * last / (shown - 1) } else { last };
    let point = |at: usize| (times[at], (at + 1) as f64 / times.len() as f64 * 100.0);
    (0..shown).map(|share| point(at(share))).collect()
}

/// Every line and link: name, id, rate.
fn links(input: &Input) -> Vec<(String, ResourceId, f64)> {
    let mut fair = Fair::default();
    let network = &input.setup.network;
    let links = network.add_to(&mut fair);
    let mut all = Vec::new();
    for (host, (&out, &into)) in (0..).zip(links.egress.iter().zip(&links.ingress)) {
        all.push((format!("{} out", name(input, host)), out));
        all.push((format!("{} in", name(input, host)), into));
    }
    for (way, tiers) in [("up", &links.up), ("down", &links.down)] {
        for (tier, groups) in (1..).zip(tiers) {
            for (members, numbers) in network.topology.groups(tier).iter().zip(groups) {
                let first = name(input, members[0]);
                for (number, &id) in numbers.iter().enumerate() {
                    all.push((format!("tier {tier} of {first} {way} {number}"), id));
                }
            }
        }
    }
    all.into_iter().map(|(name, id)| (name, id, fair.capacity(id))).collect()
}

/// The tables of all algorithms.
struct Tables {
    operations: Table,
    links: Table,
    over_time: Table,
    paths: Table,
}

impl Tables {
    fn new() -> Self {
        let operations = ["algorithm", "operation", "host", "ordered_s", "published_s"];
        let links = ["algorithm", "link", "bytes", "bytes_per_s", "utilisation"];
        let over_time = ["algorithm", "link", "from_s", "to_s", "bytes", "utilisation"];
        let paths = ["algorithm", "end_s", "host", "operation", "step", "from", "bytes"];
        Self {
            operations: Table::new("operations", &operations),
            links: Table::new("links", &links),
            over_time: Table::new("links-over-time", &over_time),
            paths: Table::new("critical-paths", &paths),
        }
    }

    fn add(&mut self, input: &Input, spec: &Spec, outcome: &Outcome) {
        let spec = spec.to_string();
        for done in &outcome.done {
            for &(host, at) in &done.nodes {
                self.operations.push([
                    spec.clone(),
                    done.sequence.to_string(),
                    name(input, host),
                    seconds(done.ordered),
                    seconds(at),
                ]);
            }
        }
        let mut busiest = Vec::new();
        for (link, id, rate) in links(input) {
            let bytes = outcome.usage.total(id);
            // A run without an end has no mean.
            let part = match outcome.standstill {
                None if outcome.seconds > 0.0 => share(bytes, rate * outcome.seconds),
                _ => String::new(),
            };
            let bytes_and_rate = [bytes, rate].map(|value| format!("{value:.0}"));
            let row = [spec.clone(), link.clone()].into_iter().chain(bytes_and_rate);
            self.links.push(row.chain([part]));
            busiest.push((bytes, link, id, rate));
        }
        busiest.sort_by(|a, b| b.0.total_cmp(&a.0));
        for (_, link, id, rate) in busiest.into_iter().take(OVER_TIME) {
            let Some((bins, width)) = outcome.usage.over_time(id) else { continue };
            for (bin, &bytes) in bins.iter().enumerate() {
                let from = bin as f64 * width;
                self.over_time.push([
                    spec.clone(),
                    link.clone(),
                    seconds(from),
                    seconds(from + width),
                    format!("{bytes:.0}"),
                    share(bytes, rate * width),
                ]);
            }
        }
        for hop in &outcome.critical_path {
            self.paths.push([
                spec.clone(),
                seconds(hop.end),
                name(input, hop.host),
                hop.sequence.to_string(),
                hop.step.to_string(),
                hop.from.map(|from| name(input, from)).unwrap_or_default(),
                hop.bytes.to_string(),
            ]);
        }
    }

    fn all(self) -> Vec<Table> {
        vec![self.operations, self.links, self.over_time, self.paths]
    }
}

fn seconds(seconds: f64) -> String {
    format!("{seconds:.9}")
}

fn share(bytes: f64, most: f64) -> String {
    format!("{:.4}", bytes / most)
}

/// The result of a run. The seconds are null if it did not end.
fn as_json(input: &Input, spec: &Spec, outcome: &Outcome, taken: &[f64]) -> Value {
    let operations = outcome.done.iter().map(|done| {
        json!({ "operation": done.sequence, "ordered_s": done.ordered, "published_s": done.end() })
    });
    let by_host = |bytes: &[f64]| -> Value {
        let one = |(host, &bytes): (u32, &f64)| (name(input, host), json!(bytes.round()));
        Value::Object((0..).zip(bytes).map(one).collect())
    };
    json!({
        "algorithm": spec.to_string(),
        "seconds": median(taken).filter(|_| outcome.standstill.is_none()),
        "calls_s": taken,
        "standstill": outcome.standstill.as_deref().map(printable),
        "most_senders": outcome.most_senders(),
        "timeouts": outcome.timeouts,
        "chunks": outcome.chunks,
        "sent_bytes": by_host(&outcome.sent),
        "received_bytes": by_host(&outcome.received),
        "operations": operations.collect::<Vec<_>>(),
    })
}
