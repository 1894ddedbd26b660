//! The `gradwire-lab` program: words to a command, the command to an exit code.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::CommandFactory;
use gradwire_bench::{self as bench, rank::run_with};
use gradwire_cli::{
    explain,
    familiar::{parse, translate},
    find,
    job::{Output, prepare, start},
    process::{block_on, environment, load, log, print},
    status,
};
use gradwire_lab::{
    args::{Command, Explain, Lab, Measurement},
    cluster_file, coordinator, negotiation, probe,
    resources::{self, args::Resources},
    simulate,
};
use gradwire_launcher::{
    error::CommandError,
    launch::{places, plan::Plan},
};
use gradwire_services::launch::ITSELF;
use gradwire_simulator::input::Input;

fn main() -> ExitCode {
    let words = translate(&Lab::command(), std::env::args_os().collect());
    let done = words.and_then(|words| dispatch(parse(words)));
    done.unwrap_or_else(|error| error.report())
}

fn dispatch(lab: Lab) -> Result<ExitCode, CommandError> {
    match lab.command {
        Command::Simulate(command) => simulate::simulate(&command, print),
        Command::Probe(options) => self::probe(&options),
        Command::Explain(options) => self::explain(&options),
        Command::Bench(Measurement::Negotiation(options)) => {
            let loaded = load(&options.settings, &[])?;
            log(&loaded.settings)?;
            negotiation::run(&options, &loaded, &environment())
        }
        Command::Bench(Measurement::Resources(options)) => self::resources(&options),
        Command::Coordinator(settings) => {
            let loaded = load(&settings, &[])?;
            log(&loaded.settings)?;
            let work = async { coordinator::run(&loaded.settings, &environment()).await };
            // One thread: a decision takes microseconds, and waking another thread takes tens of
            // them.
            block_on(work)??;
            Ok(ExitCode::SUCCESS)
        }
        Command::Role(role) => role.run(),
    }
}

fn probe(options: &probe::Options) -> Result<ExitCode, CommandError> {
    if options.started {
        let ask = |metrics: &str| block_on(status::ask(&find::coordinator_by(metrics)?))?;
        return print(&probe::rank(options, &environment(), ask)?);
    }
    let (loaded, mut hosts) = prepare(&options.at, &["probe.enabled=true".to_owned()], true)?;
    options.spread(&mut hosts)?;
    let nodes = Plan::nodes(&hosts, None)?;
    let words = options.words(&loaded.settings)?;
    // On another host its rank checks it first.
    if let (Some(path), Some(first)) = (&options.out, nodes.first())
        && block_on(places::is_local(&first.host))?
    {
        probe::check(path)?;
    }
    let plan = Plan::new(nodes, ITSELF, words, &loaded)?;
    start(plan, &loaded, &options.at, Output { bare: true, ..Output::default() }, None, None)
}

fn explain(options: &Explain) -> Result<ExitCode, CommandError> {
    let Input { setup, cost, .. } = cluster_file::read(&options.cluster)?;
    let settings = load(&options.settings, &[])?.settings;
    // As in a job: settings override what was measured.
    let cost = cost.replaced_by(settings.cost_model());
    print(&explain::on_cluster(&setup.network.topology, &cost, &settings, options.json)?)
}

/// A rank measures. Any other process starts ranks, which measure.
fn resources(options: &Resources) -> Result<ExitCode, CommandError> {
    let common = &options.common;
    if bench::is_rank(common, &environment())? {
        let any = |_| Ok(());
        return run_with(common, any, |session, made| resources::run(session, options, made));
    }
    let (loaded, mut hosts) = prepare(&common.at, &bench::flags(common), true)?;
    let np = bench::spread(&mut hosts, common);
    let words = bench::words(std::env::args_os().skip(1), &loaded)?;
    let plan = Plan::new(Plan::nodes(&hosts, np)?, ITSELF, words, &loaded)?;
    start(plan, &loaded, &common.at, Output { bare: true, ..Output::default() }, None, None)
}
