//! `gradwire simulate run --model`: a model's training step on the cluster of a file, ordered by
//! the coordinator's own engine.

use gradwire_cli::cluster::{aligned, in_words, printable};
use gradwire_collectives::{Kind, Rules, Spec, select::time};
use gradwire_coordinator::EngineConfig;
use gradwire_launcher::error::CommandError;
use gradwire_proto::JobId;
use gradwire_settings::{Algorithms, Settings};
use gradwire_simulator::{
    Setup,
    input::Input,
    job::Operation,
    memory, run as simulate,
    training::{Model, Training, Used},
};
use serde_json::json;

use super::{
    model::model,
    options::{RunOptions, median},
    output::{Directory, Output},
};

/// The name of the coordinator's choice.
const AUTO: &str = "auto";

/// A simulated step.
struct Step {
    name: String,
    /// None if the step did not end.
    seconds: Option<f64>,
    operations: u64,
    /// The algorithm that moved most bytes.
    most: Option<Spec>,
    standstill: Option<String>,
}

pub(super) fn step(
    options: &RunOptions,
    name: &str,
    input: &Input,
) -> Result<Output, CommandError> {
    let hosts = input.setup.network.topology.contributors();
    if input.servers > 0 {
        let what = "--model: training steps are simulated without servers, but the file has some";
        return Err(CommandError::usage(what).hint("remove the hosts with server = true"));
    }
    for spec in &options.specs {
        spec.fits(hosts).map_err(|error| CommandError::usage(format!("--spec: {error}")))?;
    }
    let model = model(name, options.compute_ms)?;
    let setup = Setup { seed: options.seed, ..input.setup.clone() };
    check_memory(options, input, &setup, &model)?;
    let directory = Directory::new(options.out.as_deref())?;
    let mut steps = vec![one(input, &setup, &model, options.calls, None)?];
    for spec in &options.specs {
        if steps.iter().all(|step| step.name != spec.to_string()) {
            steps.push(one(input, &setup, &model, options.calls, Some(spec))?);
        }
    }
    let mut rows =
        vec![["algorithm", "time", "pieces", "most bytes by", "note"].map(str::to_owned)];
    rows.extend(steps.iter().map(row));
    let text = format!(
        "A step of {name}: {} gradients, {:.1} MB, ready in {} ms, on {}; seed {}.\n\
         auto: the coordinator's choice.\n\n{}",
        model.gradients.len(),
        model.bytes() as f64 / 1e6,
        options.compute_ms,
        in_words(&input.setup.network.topology),
        options.seed,
        aligned(&rows)
    );
    let runs = steps.iter().map(|step| {
        json!({
            "algorithm": step.name,
            "seconds": step.seconds,
            "operations": step.operations,
            "most_bytes_by": step.most.map(|spec| spec.to_string()),
            "standstill": step.standstill,
        })
    });
    let json = json!({
        "model": name,
        "gradients": model.gradients.len(),
        "bytes": model.bytes(),
        "compute_s": model.compute,
        "hosts": hosts,
        "seed": options.seed,
        "runs": runs.collect::<Vec<_>>(),
    });
    let holds = steps.iter().all(|step| step.seconds.is_some());
    Ok(Output { text, tables: Vec::new(), charts: Vec::new(), json, holds, directory })
}

fn config(input: &Input, spec: Option<&Spec>) -> Result<EngineConfig, CommandError> {
    let hosts = input.setup.network.topology.contributors();
    let mut settings = Settings::default();
    let (transport, data) = (input.setup.transport, &mut settings.data);
    data.lanes = transport.lanes;
    data.streams = transport.streams;
    data.chunk_bytes = transport.chunk.min(input.piece_bytes);
    settings.negotiation.credit_pieces = input.control.credit;
    settings.negotiation.piece_bytes = input.piece_bytes;
    if let Some(spec) = spec {
        settings.negotiation.algorithm =
            Algorithms(Rules::parse(&spec.to_string()).map_err(CommandError::failed)?);
    }
    let job = JobId::new("simulated").map_err(CommandError::failed)?;
    let config = EngineConfig::new(job, hosts, 0, &settings).map_err(CommandError::failed)?;
    Ok(EngineConfig { cost: input.cost, ..config })
}

fn one(
    input: &Input,
    setup: &Setup,
    model: &Model,
    calls: u32,
    spec: Option<&Spec>,
) -> Result<Step, CommandError> {
    let (topology, config) = (&setup.network.topology, config(input, spec)?);
    let mut training = Training::new(model, calls, topology, config, input.control)
        .map_err(CommandError::failed)?;
    let outcome = simulate(setup, &mut training);
    if let Some(why) = training.failure() {
        return Err(CommandError::failed(printable(why)));
    }
    let used = training.used();
    let most = used.iter().max_by_key(|(_, used)| used.bytes).map(|(&spec, _)| spec);
    Ok(Step {
        name: spec.map_or_else(|| AUTO.to_owned(), Spec::to_string),
        seconds: median(training.taken()).filter(|_| outcome.standstill.is_none()),
        operations: used.values().map(|&Used { operations, .. }| operations).sum::<u64>()
            / u64::from(calls),
        most,
        standstill: outcome.standstill.as_deref().map(printable),
    })
}

/// A step keeps the plans of pieces of many sizes, at most one for each gradient and piece.
fn check_memory(
    options: &RunOptions,
    input: &Input,
    setup: &Setup,
    model: &Model,
) -> Result<(), CommandError> {
    let pieces = model.gradients.len() as u64 + model.bytes() / input.piece_bytes;
    let rules = Rules::default().allowed(Kind::Allreduce, 0, &setup.network.topology).1;
    let each = rules.iter().chain(&options.specs).map(|&spec| {
        let hosts = setup.network.topology.contributors();
        memory::needed(setup, &Operation::new(Kind::Allreduce, spec, input.piece_bytes, hosts), 1)
    });
    let needed = each.max().unwrap_or(0).saturating_mul(pieces);
    if needed <= options.memory {
        return Ok(());
    }
    let what = format!(
        "--model: the step would need up to {needed} bytes of memory, but --memory is {}",
        options.memory
    );
    Err(CommandError::usage(what).hint("allow more, or simulate fewer hosts or another model"))
}

fn row(step: &Step) -> [String; 5] {
    [
        step.name.clone(),
        step.seconds.map_or_else(|| "–".to_owned(), time),
        step.operations.to_string(),
        step.most.map(|spec| spec.to_string()).unwrap_or_default(),
        step.standstill.clone().unwrap_or_default(),
    ]
}
