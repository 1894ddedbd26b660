//! `gradwire simulate plan`.

use std::{fmt::Write as _, path::PathBuf};

use clap::Args;
use gradwire_bench::size::{Rate, parse_rate};
use gradwire_cli::cluster::{self, Racks};
use gradwire_collectives::{Kind, Spec, Topology, select::time};
use gradwire_coordinator::EngineConfig;
use gradwire_launcher::error::CommandError;
use gradwire_proto::JobId;
use gradwire_settings::Settings;
use gradwire_simulator::{
    config::Transport,
    input::MAX_HOSTS,
    plan::{Change, Method, Plan, Size, Step, changes, doubled},
    table::{Chart, Table},
};
use serde_json::{Value, json};

use super::{
    model::{COMPUTE, MODELS, model, number, parse_compute},
    output::{Directory, Output, as_text},
    progress::Progress,
};

/// The most chunks to simulate: less than a minute on one core.
const WORK: u64 = 6_000_000;

/// The most gradients and pieces of steps, over all nodes, sizes and algorithms, so that a plan
/// ends in time (BOUND).
const MOST: u64 = 60_000_000;

/// A model, and a growing cluster.
#[derive(Debug, Args)]
pub struct PlanOptions {
    /// The model of the training step.
    #[arg(long, value_name = "MODEL|FILE", help = MODELS)]
    pub model: String,
    /// The smallest and the largest number of nodes, such as 8..2048. Sizes double in between.
    #[arg(long, value_name = "FROM..TO", value_parser = parse_nodes)]
    pub nodes: [u32; 2],
    /// The rate of a node's line in each direction, such as 25g or 400Mbit.
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    pub link: Rate,
    /// The racks of the largest size: their number, or the nodes of each, such as 4,4,2. Smaller
    /// sizes fill the first racks. Without this option all nodes are in one rack.
    #[arg(long)]
    pub racks: Option<Racks>,
    /// The combined rate of a rack's lines, relative to its uplinks.
    #[arg(long, value_name = "TIMES", default_value_t = 1.0, value_parser = parse_oversubscription)]
    pub oversubscription: f64,
    /// The uplinks of each rack, among which a hash divides connections. Without this option a rack
    /// has one uplink.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub spines: Option<u32>,
    /// The compute time of a node in each step, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 300.0, help = COMPUTE,
          value_parser = |text: &str| parse_compute(text, 0.001))]
    pub compute_ms: f64,
    /// An algorithm to compare, such as circulant(radix=4). Can be repeated. Without any, all that
    /// the coordinator chooses from.
    #[arg(long = "spec", value_name = "SPEC", value_parser = Spec::parse)]
    pub specs: Vec<Spec>,
    /// The seed of the hash of --spines.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Also write the table as CSV to DIR, charts as SVG and PNG, and all figures as result.json.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

fn parse_nodes(text: &str) -> Result<[u32; 2], String> {
    let (first, last) = text.split_once("..").unwrap_or((text, text));
    let number = |text: &str| {
        text.trim().parse::<u32>().map_err(|_| "expected two numbers of nodes, such as 8..2048")
    };
    let (first, last) = (number(first)?, number(last)?);
    if first > last {
        return Err(format!("{first} is more than {last}: give the smaller number first"));
    }
    if first == 0 || last as usize > MAX_HOSTS {
        return Err(format!("the number of nodes must be from 1 to {MAX_HOSTS}"));
    }
    Ok([first, last])
}

fn parse_oversubscription(text: &str) -> Result<f64, String> {
    number(text, 1.0, 1000.0, "")
}

/// The plan for these options.
fn planned(options: &PlanOptions) -> Result<Plan, CommandError> {
    let model = model(&options.model, options.compute_ms)?;
    let [first, last] = options.nodes;
    let cluster = cluster::topology(last, 0, options.racks.as_ref())?;
    if cluster.tiers().len() > 1 {
        let what = "--racks: groups of racks are not supported";
        return Err(CommandError::usage(what).hint("give the number of racks, such as 8"));
    }
    for spec in &options.specs {
        let fits = |&nodes: &u32| spec.fits(nodes).is_ok();
        if !doubled(first, last).iter().any(fits) {
            let what = format!("--spec: {spec} fits none of these numbers of nodes");
            return Err(CommandError::usage(what).hint("its parameters must fit at least one"));
        }
    }
    let settings = Settings::default();
    let config = JobId::new("plan").map_err(CommandError::failed)?;
    let config = EngineConfig::new(config, last, 0, &settings).map_err(CommandError::failed)?;
    let data = &settings.data;
    Ok(Plan {
        model,
        cluster,
        sizes: doubled(first, last),
        line: options.link.bits_per_second / 8.0,
        oversubscription: options.oversubscription,
        spines: options.spines.unwrap_or(0),
        specs: options.specs.clone(),
        transport: Transport {
            chunk: data.chunk_bytes,
            lanes: data.lanes,
            streams: data.streams,
            ..Transport::default()
        },
        config,
        seed: options.seed,
        work: WORK,
    })
}

/// Refuses plans that would take too long.
fn check_extent(plan: &Plan) -> Result<(), CommandError> {
    let specs = match plan.specs.len() {
        0 => plan.config.rules.allowed(Kind::Allreduce, 0, &plan.cluster).1.len(),
        given => given,
    } as u64;
    let pieces = plan.model.bytes() / plan.config.piece_bytes;
    let each = (plan.model.gradients.len() as u64).saturating_add(pieces);
    let nodes: u64 = plan.sizes.iter().map(|&nodes| u64::from(nodes)).sum();
    let all = each.saturating_mul(nodes).saturating_mul(specs + 1);
    if all <= MOST {
        return Ok(());
    }
    let what = format!(
        "the steps have {all} gradients and pieces on all nodes together, but the limit of the \
         simulation is {MOST}"
    );
    let hint = "give a smaller model, fewer nodes or fewer algorithms by --spec";
    Err(CommandError::usage(what).hint(hint))
}

pub(super) fn plan(options: &PlanOptions) -> Result<Output, CommandError> {
    let plan = planned(options)?;
    check_extent(&plan)?;
    let directory = Directory::new(options.out.as_deref())?;
    let progress = Progress::new();
    let sizes = plan.run(|all| progress.one_of(all, "steps")).map_err(CommandError::failed)?;
    drop(progress);
    let changes = changes(&sizes);
    let compute = plan.model.compute;
    let text = format!(
        "{}\n{}\n{}{}{}",
        head(options, &plan),
        as_text(&wide(&sizes, compute)),
        changed(&sizes, &changes),
        choices(&sizes),
        deviation(&sizes)
    );
    let json = json!({
        "model": options.model,
        "gradients": plan.model.gradients.len(),
        "bytes": plan.model.bytes(),
        "compute_s": compute,
        "line_bits_per_s": options.link.bits_per_second,
        "oversubscription": plan.oversubscription,
        "seed": plan.seed,
        "sizes": sizes.iter().map(|size| as_json(size, compute)).collect::<Vec<_>>(),
        "changes": changes.iter().map(|change| json!({
            "nodes": change.nodes,
            "before": change.before.to_string(),
            "now": change.now.to_string(),
        })).collect::<Vec<_>>(),
    });
    let (tables, charts) = (vec![long(&sizes, compute)], charts(&sizes, compute));
    Ok(Output { text, tables, charts, json, holds: true, directory })
}

fn head(options: &PlanOptions, plan: &Plan) -> String {
    let PlanOptions { model, compute_ms, oversubscription, seed, .. } = options;
    let gigabits = options.link.bits_per_second / 1e9;
    let uplinks = match plan.spines {
        0 | 1 => "one link".to_owned(),
        links => format!("{links} links and a hash"),
    };
    format!(
        "{model}: {} gradients, {:.1} MB, ready one after the other in {compute_ms} ms.\nUp to {}. \
         Lines of {gigabits} Gbit/s.\nUplinks {oversubscription} times oversubscribed, {uplinks}; \
         seed {seed}.\nA step ends when all nodes have all gradients; efficiency is compute time / \
         step time.\nauto: the coordinator's choice. simulated: with the schedules of all nodes. \
         priced: by the\ncost model, for too many nodes. No packets are lost.\n",
        plan.model.gradients.len(),
        plan.model.bytes() as f64 / 1e6,
        places(&plan.cluster),
    )
}

/// Such as `2048 nodes in 32 racks of 64`.
fn places(cluster: &Topology) -> String {
    let (nodes, racks) = (cluster.participants(), cluster::racks(cluster));
    let (least, most) = (racks.iter().min().unwrap_or(&0), racks.iter().max().unwrap_or(&0));
    let each = if least == most { most.to_string() } else { format!("{least} to {most}") };
    match racks.len() {
        1 => format!("{nodes} nodes in 1 rack"),
        racks => format!("{nodes} nodes in {racks} racks of {each}"),
    }
}

/// The name of a step's algorithm.
fn name(step: &Step) -> String {
    step.spec.map_or_else(|| "auto".to_owned(), |spec| spec.to_string())
}

fn method(method: Method) -> &'static str {
    match method {
        Method::Simulated => "simulated",
        Method::Priced => "priced",
    }
}

/// All names, in order of appearance.
fn names(sizes: &[Size]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for name in sizes.iter().flat_map(|size| &size.steps).map(name) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

fn seconds_of(size: &Size, of: &str) -> Option<f64> {
    size.steps.iter().find(|step| name(step) == of)?.seconds
}

/// A row for each size, and a column for each algorithm.
fn wide(sizes: &[Size], compute: f64) -> Table {
    let names = names(sizes);
    let mut table = Table::new("steps", &["nodes", "racks", "how", "best"]);
    table.head.extend(names.iter().cloned());
    for size in sizes {
        let best = size.best().map_or_else(|| "–".to_owned(), |(spec, _)| spec.to_string());
        let cell = |of: &String| match seconds_of(size, of) {
            Some(seconds) => format!("{} {:.1} %", time(seconds), compute / seconds * 100.0),
            None => "–".to_owned(),
        };
        let first =
            [size.nodes.to_string(), size.racks.to_string(), method(size.method).to_owned(), best];
        table.push(first.into_iter().chain(names.iter().map(cell)));
    }
    table
}

/// A row for each size and algorithm.
fn long(sizes: &[Size], compute: f64) -> Table {
    let head = [
        "nodes",
        "racks",
        "algorithm",
        "method",
        "step_s",
        "efficiency",
        "priced_s",
        "chosen",
        "operations",
    ];
    let mut table = Table::new("plan", &head);
    let number = |value: Option<f64>| value.map_or_else(String::new, |value| format!("{value:.9}"));
    for size in sizes {
        for step in &size.steps {
            table.push([
                size.nodes.to_string(),
                size.racks.to_string(),
                name(step),
                method(size.method).to_owned(),
                number(step.seconds),
                number(step.seconds.map(|seconds| compute / seconds)),
                number(step.priced),
                step.chosen.map(|spec| spec.to_string()).unwrap_or_default(),
                step.operations.to_string(),
            ]);
        }
    }
    table
}

fn changed(sizes: &[Size], changes: &[Change]) -> String {
    let Some((best, _)) = sizes.iter().find_map(Size::best) else { return String::new() };
    let first = changes.first().map_or(best, |change| change.before);
    let mut text = format!("The best algorithm is {first}");
    for Change { nodes, now, .. } in changes {
        // Writing to a string can't fail.
        let _ = write!(text, ", from {nodes} nodes on {now}");
    }
    text + ". Savings of up to 1 % are ignored.\n"
}

/// What the coordinator chose.
fn choices(sizes: &[Size]) -> String {
    let auto = |size: &Size| Some((size.nodes, size.steps.first()?.chosen?));
    let mut all: Vec<(u32, Spec)> = sizes.iter().filter_map(auto).collect();
    all.dedup_by_key(|(_, spec)| *spec);
    let mut all = all.into_iter();
    let Some((_, first)) = all.next() else { return String::new() };
    let later = all.map(|(nodes, spec)| format!(", from {nodes} nodes on {spec}"));
    format!("auto sends most of the bytes by {first}{}.\n", later.collect::<String>())
}

/// The deviation of the cost model's times from the simulated ones.
fn deviation(sizes: &[Size]) -> String {
    let simulated = sizes.iter().filter(|size| size.method == Method::Simulated);
    let of = |step: &Step| Some(step.priced? / step.seconds? - 1.0);
    let all: Vec<f64> = simulated.flat_map(|size| &size.steps).filter_map(of).collect();
    let least = all.iter().copied().reduce(f64::min);
    let most = all.iter().copied().reduce(f64::max);
    match least.zip(most) {
        Some((least, most)) => format!(
            "The cost model's times differ from the simulated ones by {:+.1} % to {:+.1} %.\n",
            least * 100.0,
            most * 100.0
        ),
        None => String::new(),
    }
}

fn charts(sizes: &[Size], compute: f64) -> Vec<Chart> {
    let lines = |of: &dyn Fn(f64) -> f64| {
        let line = |name: String| {
            let point = |size: &Size| Some((f64::from(size.nodes), of(seconds_of(size, &name)?)));
            let points = sizes.iter().filter_map(point).collect();
            (name, points)
        };
        names(sizes).into_iter().map(line).collect()
    };
    let chart = |title: &str, y: &str, log_y, lines| Chart {
        title: title.to_owned(),
        x: "nodes".to_owned(),
        y: y.to_owned(),
        logarithmic: [true, log_y],
        lines,
    };
    vec![
        chart("plan-step", "time of a step, ms", true, lines(&|seconds| seconds * 1e3)),
        chart(
            "plan-efficiency",
            "scaling efficiency, %",
            false,
            lines(&|seconds| compute / seconds * 100.0),
        ),
    ]
}

fn as_json(size: &Size, compute: f64) -> Value {
    let step = |step: &Step| {
        json!({
            "algorithm": name(step),
            "seconds": step.seconds,
            "efficiency": step.seconds.map(|seconds| compute / seconds),
            "priced_s": step.priced,
            "chosen": step.chosen.map(|spec| spec.to_string()),
            "operations": step.operations,
        })
    };
    json!({
        "nodes": size.nodes,
        "racks": size.racks,
        "method": method(size.method),
        "steps": size.steps.iter().map(step).collect::<Vec<_>>(),
    })
}
