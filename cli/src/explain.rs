//! `gradwire explain`: shows which algorithms are chosen, and why: by the cost model for a cluster,
//! or by a running job, with the times that it observed.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use gradwire_collectives::{
    Choice, CostModel, Pipeline, Rules, RulesError, Topology, select, select::time,
};
use gradwire_launcher::{args::SettingsOptions, error::CommandError};
use gradwire_proto::{
    Compression, DType, ReduceOp, Request, Shape,
    pb::{self, StatusResponse},
};
use gradwire_settings::Settings;
use serde_json::{Value, json};

use crate::cluster::{self, Collective, Racks, aligned, printable};

/// The smallest piece in the table.
const SMALLEST: u64 = 256;

/// The pieces of a pipeline so long that its length does not matter.
const MANY: u32 = 64;

/// A running job, by default the one on this host; or a cluster and the settings for the choice.
#[derive(Debug, Args)]
pub struct Options {
    /// A running job: shows its choices.
    ///
    /// The job is given as in `gradwire status`.
    #[arg(value_name = "JOB", conflicts_with_all = ["cluster", "nodes", "servers", "racks"])]
    pub address: Option<String>,
    /// Cluster file from `gradwire probe --out`.
    ///
    /// `gradwire simulate` describes clusters by such files, too.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["nodes", "servers", "racks"])]
    pub cluster: Option<PathBuf>,
    /// Number of nodes.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub nodes: Option<u32>,
    /// Number of servers: nodes without ranks.
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(..=4096),
          requires = "nodes")]
    pub servers: Option<u32>,
    /// Racks: their number, or nodes of each: 4,4,2.
    ///
    /// Racks may be in groups: 2x4 means two groups of four racks.
    #[arg(long, value_name = "R", requires = "nodes")]
    pub racks: Option<Racks>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// The settings network.* and negotiation.* are used.
    #[command(flatten)]
    pub settings: SettingsOptions,
}

/// The choice for pieces of one size.
struct Row {
    collective: Collective,
    bytes: u64,
    pieces: u32,
    rule: usize,
    choice: Choice,
}

/// The choices of a running job, and the times that it observed.
pub fn of_job(status: &StatusResponse, json: bool) -> String {
    if json {
        let choices: Vec<Value> = status.choices.iter().map(observed_as_json).collect();
        let arrangement = arrangement(status);
        let sizes = status.sizes.as_ref().map(sizes_as_json);
        let all = json!({
            "job": status.job, "arrangement": arrangement, "choices": choices, "sizes": sizes,
            "advice": status.advice,
        });
        return format!("{all:#}\n");
    }
    let head = [
        "collective",
        "nodes",
        "bytes",
        "pieces",
        "algorithm",
        "version",
        "operations",
        "predicted",
        "observed",
        "next best",
    ];
    let mut table = vec![head.map(str::to_owned)];
    table.extend(status.choices.iter().map(observed_as_text));
    let arranged = arrangement(status).map(|why| format!("Arranged by the links: {why}.\n\n"));
    format!(
        "{}Choices of job {}: bytes and pieces are upper limits.\n\
         Times are per piece. Observed are pieces alone, in a burst or in a full pipeline:\n\
         mean ± standard deviation (count).\n\n{}{}{}",
        arranged.unwrap_or_default(),
        printable(&status.job),
        aligned(&table),
        reasons_as_text(&status.choices),
        sizes_as_text(status)
    )
}

/// The reasons for the choices, in the order of the table.
fn reasons_as_text(choices: &[pb::Choice]) -> String {
    let reason = |choice: &pb::Choice| {
        let pb::Choice { nodes, bytes, pieces, version, .. } = choice;
        let (collective, why) = (printable(&choice.collective), printable(&choice.reason));
        format!("{collective} {nodes} {bytes} {pieces}, version {version}: {why}\n")
    };
    match choices {
        [] => String::new(),
        _ => "\nWhy:\n".to_owned() + &choices.iter().map(reason).collect::<String>(),
    }
}

/// The sizes of pieces and chunks, and advice for the settings of the next job.
pub(crate) fn sizes_as_text(status: &StatusResponse) -> String {
    let mut text = String::new();
    if let Some(sizes) = &status.sizes {
        let observed = observed(sizes.observed, sizes.mean_seconds, sizes.spread_seconds);
        let observed = observed.map(|times| format!("; a MiB took {times}")).unwrap_or_default();
        text += &format!(
            "\nPieces: up to {} KiB, {} in flight, chunks of {} KiB{observed}; version {}: {}\n",
            sizes.piece_bytes >> 10,
            sizes.credit_pieces,
            sizes.chunk_bytes >> 10,
            sizes.version,
            printable(&sizes.reason)
        );
    }
    for advice in &status.advice {
        text += &format!("For the next start: {}\n", printable(advice));
    }
    text
}

fn sizes_as_json(sizes: &pb::Sizes) -> Value {
    json!({
        "piece_bytes": sizes.piece_bytes,
        "credit_pieces": sizes.credit_pieces,
        "chunk_bytes": sizes.chunk_bytes,
        "reason": sizes.reason,
        "version": sizes.version,
        "observed": sizes.observed,
        "mean_seconds_per_mib": sizes.mean_seconds,
        "spread_seconds_per_mib": sizes.spread_seconds,
    })
}

/// Why the racks or the order of nodes differ from their labels and numbers.
fn arrangement(status: &StatusResponse) -> Option<String> {
    let why = status.network.as_ref().map(|network| printable(&network.arrangement));
    why.filter(|why| !why.is_empty())
}

/// The mean and the standard deviation of observed times, and their count.
fn observed(count: u64, mean: f64, spread: f64) -> Option<String> {
    (count > 0).then(|| format!("{} ± {} ({count})", time(mean), time(spread)))
}

fn observed_as_text(choice: &pb::Choice) -> [String; 10] {
    let next = match choice.runner_up.as_str() {
        "" => String::new(),
        spec => format!("{} {}", printable(spec), time(choice.runner_up_seconds)),
    };
    [
        printable(&choice.collective),
        choice.nodes.to_string(),
        choice.bytes.to_string(),
        choice.pieces.to_string(),
        printable(&choice.spec),
        choice.version.to_string(),
        choice.operations.to_string(),
        time(choice.predicted_seconds),
        observed(choice.observed, choice.mean_seconds, choice.spread_seconds).unwrap_or_default(),
        next,
    ]
}

fn observed_as_json(choice: &pb::Choice) -> Value {
    let runner_up = Some(&choice.runner_up).filter(|spec| !spec.is_empty());
    let candidate = |one: &pb::Candidate| {
        json!({
            "algorithm": one.spec,
            "predicted_seconds": one.predicted_seconds,
            "expected_seconds": one.expected_seconds,
            "tried": one.tried,
        })
    };
    json!({
        "collective": choice.collective,
        "nodes": choice.nodes,
        "bytes": choice.bytes,
        "pieces": choice.pieces,
        "algorithm": choice.spec,
        "predicted_seconds": choice.predicted_seconds,
        "expected_seconds": choice.expected_seconds,
        "candidates": choice.candidates.iter().map(candidate).collect::<Vec<_>>(),
        "runner_up": runner_up,
        "runner_up_seconds": runner_up.map(|_| choice.runner_up_seconds),
        "rule": choice.rule,
        "reason": choice.reason,
        "version": choice.version,
        "operations": choice.operations,
        "observed": choice.observed,
        "mean_seconds": choice.mean_seconds,
        "spread_seconds": choice.spread_seconds,
    })
}

/// The choices of the cost model for a cluster.
///
/// # Errors
/// [`CommandError`] if the rules do not fit the number of nodes.
pub fn on_cluster(
    topology: &Topology,
    cost: &CostModel,
    settings: &Settings,
    json: bool,
) -> Result<String, CommandError> {
    let nodes = topology.contributors();
    let rules = &settings.negotiation.algorithm;
    let refused = |error: RulesError| {
        CommandError::usage(format!("setting negotiation.algorithm = \"{}\": {error}", rules.0))
    };
    rules.fits(nodes).map_err(refused)?;
    let allowed = settings.algorithms().map_err(refused)?;
    let rows = choose(topology, cost, &allowed, settings);
    if json {
        let rows: Vec<Value> = rows.iter().map(Row::as_json).collect();
        let all = json!({
            "nodes": nodes,
            "servers": topology.servers(),
            "racks": cluster::racks(topology),
            "tiers": cluster::tiers(topology),
            "choices": rows,
        });
        return Ok(format!("{all:#}\n"));
    }
    let head = ["collective", "bytes", "pieces", "algorithm", "predicted", "next best", "", "rule"];
    let mut table = vec![head.map(str::to_owned)];
    table.extend(rows.iter().map(Row::as_text));
    Ok(format!(
        "Choices on {}, based on the costs of its links.\nTimes are per piece: of a single \
         piece, and of one of {MANY} with {} in flight.{}\n\n{}",
        cluster::in_words(topology),
        settings.negotiation.credit_pieces,
        match settings.data.compression.as_str() {
            "none" => String::new(),
            name => format!("\nPieces are f32, and sums are sent as {name}."),
        },
        aligned(&table)
    ))
}

fn choose(topology: &Topology, cost: &CostModel, rules: &Rules, settings: &Settings) -> Vec<Row> {
    // Settings are validated when they are loaded.
    let compression = settings.data.compression.parse().unwrap_or(Compression::None);
    let quantized = rules.clone().quantized();
    let in_flight = settings.negotiation.credit_pieces;
    let most = settings.negotiation.piece_bytes;
    let sizes = std::iter::successors(Some(SMALLEST), |bytes| Some(bytes * 4));
    let sizes: Vec<u64> = sizes.take_while(|bytes| *bytes < most).chain([most]).collect();
    let mut rows = Vec::new();
    for &collective in Collective::value_variants() {
        let kind = collective.kind();
        for pieces in [1, MANY] {
            for &bytes in &sizes {
                let (wire_bytes, is_quantized) = on_the_wire(compression, collective, bytes);
                let rules = if is_quantized { &quantized } else { rules };
                let rule = rules.rule_for(kind, wire_bytes);
                let (rule, allowed) = rules.allowed(kind, rule, topology);
                let pipeline = Pipeline { pieces, in_flight: in_flight.min(pieces) };
                let among = (rule, allowed.as_slice());
                let choice = select(kind, topology, wire_bytes, pipeline, among, cost);
                rows.push(Row { collective, bytes, pieces, rule, choice });
            }
        }
    }
    rows
}

/// The bytes of an f32 piece between nodes, and whether it is quantized.
fn on_the_wire(compression: Compression, collective: Collective, bytes: u64) -> (u64, bool) {
    let Ok(named) = collective.to_string().parse() else { return (bytes, false) };
    let request = Request::plain(named, DType::F32, Shape::default());
    let quantized = compression.quantizes(named, DType::F32, ReduceOp::Sum, bytes);
    let elements = bytes / DType::F32.size() as u64;
    (compression.wire_bytes(&request, elements, quantized), quantized)
}

impl Row {
    fn as_json(&self) -> Value {
        let Choice { spec, predicted_seconds, reason, .. } = &self.choice;
        let runner_up = self.choice.runner_up();
        json!({
            "collective": self.collective.to_string(),
            "bytes": self.bytes,
            "pieces": self.pieces,
            "algorithm": spec.to_string(),
            "predicted_seconds": predicted_seconds,
            "runner_up": runner_up.map(|(spec, _)| spec.to_string()),
            "runner_up_seconds": runner_up.map(|(_, seconds)| seconds),
            "rule": self.rule,
            "reason": reason,
        })
    }

    fn as_text(&self) -> [String; 8] {
        let runner_up = self.choice.runner_up();
        [
            self.collective.to_string(),
            self.bytes.to_string(),
            self.pieces.to_string(),
            self.choice.spec.to_string(),
            time(self.choice.predicted_seconds),
            runner_up.map(|(spec, _)| spec.to_string()).unwrap_or_default(),
            runner_up.map(|(_, seconds)| time(seconds)).unwrap_or_default(),
            if self.rule == 0 { String::new() } else { self.rule.to_string() },
        ]
    }
}

#[cfg(test)]
mod tests {
    use gradwire_settings::Layers;

    use super::*;

    fn shown(nodes: u32, racks: Option<&str>, flags: &[&str], json: bool) -> String {
        let flags = flags.iter().map(|&flag| flag.to_owned()).collect();
        let loaded = Settings::load(&Layers { flags, ..Layers::default() }).unwrap();
        let racks = racks.map(|racks| racks.parse().unwrap());
        let (settings, topology) = (&loaded.settings, cluster::topology(nodes, 0, racks.as_ref()));
        on_cluster(&topology.unwrap(), &settings.cost_model(), settings, json)
            .unwrap_or_else(|error| error.to_string())
    }

    fn chosen(flags: &[&str], collective: &str, bytes: u64, pieces: u32) -> Value {
        let all: Value = serde_json::from_str(&shown(8, Some("2"), flags, true)).unwrap();
        let is_it = |row: &&Value| {
            row["collective"] == collective && row["bytes"] == bytes && row["pieces"] == pieces
        };
        all["choices"].as_array().unwrap().iter().find(is_it).unwrap().clone()
    }

    #[test]
    fn settings_and_rules_change_the_choice() {
        let usual = chosen(&[], "allreduce", 4 << 20, 1);
        assert!(usual["predicted_seconds"].as_f64() < usual["runner_up_seconds"].as_f64());
        let slow = chosen(&["network.rate_mbit=100"], "allreduce", 4 << 20, 1);
        let ratio = slow["predicted_seconds"].as_f64().unwrap()
            / usual["predicted_seconds"].as_f64().unwrap();
        assert!(ratio > 20.0, "{ratio}");
        let rules = &["negotiation.algorithm=broadcast:0-1K=chain; 1K-=^ring,^linear"];
        let chain = chosen(rules, "broadcast", 1024, 1);
        assert_eq!((&chain["algorithm"], &chain["rule"]), (&json!("chain"), &json!(1)));
        assert_eq!(chain["runner_up"], Value::Null);
        let other = chosen(rules, "broadcast", 4096, 64);
        assert_eq!(other["rule"], 2);
        assert_ne!(other["algorithm"], "ring");
        assert_eq!(chosen(rules, "reduce", 1024, 1)["rule"], 0);
    }

    /// Like in the coordinator: the size between nodes counts, and only some pieces are quantized.
    #[test]
    fn compression_changes_size_and_choice() {
        let half = chosen(&["negotiation.piece_bytes=2MiB"], "allreduce", 2 << 20, 64);
        let bf16 = |collective, bytes| chosen(&["data.compression=bf16"], collective, bytes, 64);
        let whole = bf16("allreduce", 4 << 20);
        assert_eq!(whole["predicted_seconds"], half["predicted_seconds"]);
        assert_eq!(bf16("allgather", 4 << 20), chosen(&[], "allgather", 4 << 20, 64));
        for bytes in [64 << 10, 1 << 20, 4 << 20] {
            for pieces in [1, 64] {
                let eight = chosen(&["data.compression=int8"], "allreduce", bytes, pieces);
                let spec = eight["algorithm"].as_str().unwrap();
                assert!(["direct", "hierarchical"].contains(&spec), "{eight}");
                assert_ne!(eight, chosen(&[], "allreduce", bytes, pieces));
            }
        }
        // Pieces below 64 KiB are not quantized.
        let small = chosen(&["data.compression=int8"], "allreduce", 16 << 10, 1);
        assert_eq!(small, chosen(&[], "allreduce", 16 << 10, 1));
        let text = shown(8, Some("2"), &["data.compression=fp8"], false);
        assert!(text.contains("\nPieces are f32, and sums are sent as fp8.\n"), "{text}");
    }

    #[test]
    fn the_table_has_every_size() {
        let text = shown(8, Some("2"), &["negotiation.piece_bytes=1MiB"], false);
        assert!(text.starts_with("Choices on 8 nodes in 2 racks of 4, 4"), "{text}");
        assert_eq!(text.lines().filter(|line| line.starts_with("broadcast ")).count(), 14);
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        let error = shown(6, None, &["negotiation.algorithm=torus(dims=2x4)"], false);
        assert!(error.contains("is for 8 nodes, and there are 6"), "{error}");
        assert!(shown(1, None, &[], false).contains("on 1 node in 1 rack"));
    }

    #[test]
    fn a_jobs_choices_have_observed_times() {
        let choice = pb::Choice {
            collective: "allreduce".into(),
            nodes: 2,
            bytes: 4096,
            pieces: 1,
            rule: 0,
            spec: "ring".into(),
            predicted_seconds: 1e-3,
            expected_seconds: 5e-3,
            candidates: vec![pb::Candidate { spec: "ring".into(), ..pb::Candidate::default() }],
            runner_up: "linear".into(),
            runner_up_seconds: 2e-3,
            reason: "why".into(),
            version: 3,
            operations: 12,
            observed: 10,
            mean_seconds: 5e-3,
            spread_seconds: 5e-4,
        };
        let alone = pb::Choice { observed: 0, runner_up: String::new(), ..choice.clone() };
        let status = StatusResponse {
            job: "j\u{1b}1".into(),
            choices: vec![choice, alone],
            ..StatusResponse::default()
        };
        let text = of_job(&status, false);
        assert!(text.contains("job j1:"), "{text}");
        assert!(
            text.contains(
                "ring       3        12          1.00 ms    5.00 ms ± 500 µs (10)  linear"
            )
        );
        let why = "allreduce 2 4096 1, version 3: why\n";
        let end = format!("12          1.00 ms\n\nWhy:\n{why}{why}");
        assert!(text.ends_with(&end), "{text}");
        let network = pb::Network { arrangement: "2 racks".into(), ..pb::Network::default() };
        let arranged = StatusResponse { network: Some(network), ..status.clone() };
        let text = of_job(&arranged, false);
        assert!(text.starts_with("Arranged by the links: 2 racks.\n\nChoices"), "{text}");
        let sizes = pb::Sizes {
            piece_bytes: 2 << 20,
            credit_pieces: 16,
            chunk_bytes: 65536,
            reason: "faster".into(),
            version: 2,
            observed: 30,
            mean_seconds: 1e-3,
            spread_seconds: 1e-4,
        };
        let advice = vec!["data.lanes=1: one is enough".to_owned()];
        let status = StatusResponse { sizes: Some(sizes), advice, ..status };
        let text = of_job(&status, false);
        let pieces = "\nPieces: up to 2048 KiB, 16 in flight, chunks of 64 KiB; a MiB took 1.00 ms \
                      ± 100 µs (30); version 2: faster\n\
                      For the next start: data.lanes=1: one is enough\n";
        assert!(text.ends_with(pieces), "{text}");
        let json: Value = serde_json::from_str(&of_job(&status, true)).unwrap();
        assert_eq!(json["choices"][0]["expected_seconds"], 5e-3);
        assert_eq!(json["choices"][0]["candidates"][0]["algorithm"], "ring");
        assert_eq!(json["sizes"]["credit_pieces"], 16);
        assert_eq!(json["advice"][0], "data.lanes=1: one is enough");
        assert_eq!(json["arrangement"], Value::Null);
        assert_eq!(json["choices"][0]["mean_seconds"], 5e-3);
        assert_eq!(json["choices"][1]["runner_up"], Value::Null);
    }
}
