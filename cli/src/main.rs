//! The `gradwire` program: words to a command, the command to an exit code.

#![forbid(unsafe_code)]

use std::{
    collections::HashMap,
    io::{self, ErrorKind, Write},
    path::PathBuf,
    pin::pin,
    process::ExitCode,
    time::Duration,
};

use clap::Parser;
use gradwire_bench::{
    self as bench,
    args::{Bench, Measurement},
    negotiation,
};
use gradwire_cli::{
    algorithms,
    args::{Cli, Command, Config, Run, normalise},
    cluster, cluster_file, coordinator, doctor, explain, find, probe, show, simulate, status, top,
    trace,
};
use gradwire_doctor::findings::Status;
use gradwire_launcher::{
    agent,
    args::{JobOptions, SettingsOptions},
    error::{CommandError, limits_hint, print_line},
    launch::{
        self, Options, dry_run,
        hosts::{self, Host},
        places,
        plan::Plan,
    },
};
use gradwire_proto::launch::ITSELF;
use gradwire_settings::{Layers, Loaded, Origin, Settings};
use gradwire_simulator::input::Input;
use gradwire_telemetry::{LogConfig, init_logging};
use rustix::{
    io::Errno,
    process::{Resource, Signal, getrlimit},
};
use tokio::{
    runtime::{Builder, Runtime},
    sync::oneshot,
    time::timeout,
};

fn main() -> ExitCode {
    let cli = Cli::parse_from(normalise(std::env::args_os().collect()));
    dispatch(cli).unwrap_or_else(|error| error.report())
}

fn dispatch(cli: Cli) -> Result<ExitCode, CommandError> {
    match cli.command {
        Command::Run(run) => self::run(run),
        Command::Bench(Measurement::Job(bench)) => self::bench(&bench),
        Command::Bench(Measurement::Negotiation(options)) => {
            let loaded = load(&options.settings, &[])?;
            log(&loaded.settings)?;
            negotiation::run(&options, &loaded, &environment())
        }
        Command::Config(Config::Show { settings, explain }) => {
            print(&show::show(&load(&settings, &[])?, explain))
        }
        Command::Algorithms(options) => print(&algorithms::show(&options)?),
        Command::Explain(options) => {
            let explain::Options { address, cluster, nodes, servers, racks, json, settings } =
                options;
            let settings = || load(&settings, &[]).map(|loaded| loaded.settings);
            let (topology, cost, settings) = match (cluster, nodes) {
                (Some(path), _) => {
                    let Input { setup, cost, .. } = cluster_file::read(&path)?;
                    let settings = settings()?;
                    // As in a job: what is set counts more than what was measured.
                    let cost = cost.replaced_by(settings.cost_model());
                    (setup.network.topology, cost, settings)
                }
                (None, Some(nodes)) => {
                    let settings = settings()?;
                    let servers = servers.unwrap_or(0);
                    let topology = cluster::topology(nodes, servers, racks.as_ref())?;
                    (topology, settings.cost_model(), settings)
                }
                (None, None) => {
                    let address = find::coordinator(address.as_deref())?;
                    return print(&explain::of_job(&block_on(status::ask(&address))??, json));
                }
            };
            print(&explain::on_cluster(&topology, &cost, &settings, json)?)
        }
        Command::Doctor(options) => {
            let (loaded, hosts) = prepare(&options.at, &[])?;
            let nodes = Plan::nodes(&hosts, options.at.np)?;
            Plan::check(&nodes, &loaded.settings)?;
            let report = block_on(doctor::check(&nodes, &loaded.settings, &environment()))??;
            print(&if options.json { report.to_json()? } else { report.to_text() })?;
            Ok(ExitCode::from(u8::from(report.status == Status::Fail)))
        }
        Command::DoctorAgent => {
            // Several threads: several connections carry bytes at the same time.
            let runtime = built(Builder::new_multi_thread().worker_threads(AGENT_THREADS))?;
            let ended = runtime
                .block_on(gradwire_doctor::agent::run(tokio::io::stdin(), tokio::io::stdout()));
            runtime.shutdown_background();
            ended.map(|()| ExitCode::SUCCESS).map_err(CommandError::failed)
        }
        Command::Probe(options) if options.started => {
            let ask = |metrics: &str| block_on(status::ask(&find::coordinator_by(metrics)?))?;
            print(&probe::rank(&options, &environment(), ask)?)
        }
        Command::Probe(options) => {
            let (loaded, mut hosts) = prepare(&options.at, &["probe.enabled=true".to_owned()])?;
            options.spread(&mut hosts)?;
            let nodes = Plan::nodes(&hosts, None)?;
            let words = options.words(&loaded.settings)?;
            // On another host its rank looks first.
            if let (Some(path), Some(first)) = (&options.out, nodes.first())
                && block_on(places::is_local(&first.host))?
            {
                probe::check(path)?;
            }
            let plan = Plan::new(nodes, ITSELF.to_owned(), words, &loaded)?;
            start(plan, &loaded, &options.at, Files::default(), true)
        }
        Command::Simulate(command) => simulate::simulate(&command, print),
        Command::Status(status::Options { address, json, watch }) => {
            let address = find::coordinator(address.as_deref())?;
            block_on(status::run(&address, json, watch))??;
            Ok(ExitCode::SUCCESS)
        }
        Command::Top { address } => {
            let address = find::coordinator(address.as_deref())?;
            block_on(top::run(&address))??;
            Ok(ExitCode::SUCCESS)
        }
        Command::Trace(options) => {
            let address = find::coordinator(options.address.as_deref())?;
            block_on(trace::run(&address, &options))??;
            Ok(ExitCode::SUCCESS)
        }
        Command::Agent => {
            // One thread, the main one: the tie of a child's life is to the thread that started it.
            let work = agent::run(tokio::io::stdin(), tokio::io::stdout());
            let runtime = runtime()?;
            let code = runtime.block_on(work);
            // A read of standard input may still be under way; nobody waits for it.
            runtime.shutdown_background();
            Ok(code)
        }
        Command::Coordinator(settings) => {
            let loaded = load(&settings, &[])?;
            log(&loaded.settings)?;
            let work = async { coordinator::run(&loaded.settings, &environment()).await };
            // One thread: a decision is microseconds, and to wake another one costs tens of them.
            block_on(work)??;
            Ok(ExitCode::SUCCESS)
        }
        Command::ExecChild { gently, parent, command } => match command.split_first() {
            Some((program, args)) => {
                let signal = if gently { Signal::TERM } else { Signal::KILL };
                Err(agent::exec::exec_child(signal, parent, program, args))
            }
            None => Err(CommandError::usage("no program is given")),
        },
    }
}

fn run(run: Run) -> Result<ExitCode, CommandError> {
    let (loaded, hosts) = prepare(&run.at, &[])?;
    let nodes = Plan::nodes(&hosts, run.at.np)?;
    let mut words = run.command.into_iter();
    let program = words.next().filter(|program| program != ITSELF);
    let program = program.ok_or_else(|| CommandError::usage("the program's name is empty"))?;
    let plan = Plan::new(nodes, program, words.collect(), &loaded)?;
    if run.dry_run {
        let names: Vec<_> = plan.nodes.iter().map(|node| node.host.clone()).collect();
        let local = block_on(async {
            let mut local = Vec::new();
            for name in &names {
                local.push(places::is_local(name).await);
            }
            local
        })?;
        return print(&dry_run::describe(&plan, &loaded.settings, &local));
    }
    let Run { output_dir, metrics_sd, trace, .. } = run;
    trace.as_deref().map_or(Ok(()), trace::check)?;
    start(plan, &loaded, &run.at, Files { output_dir, metrics_sd, trace }, false)
}

/// A rank measures; who is no rank yet starts ranks that do.
fn bench(bench: &Bench) -> Result<ExitCode, CommandError> {
    bench.check()?;
    if bench::is_rank(bench, &environment())? {
        return bench::rank::run(bench);
    }
    let common = bench.common();
    let (loaded, mut hosts) = prepare(&common.at, &bench::flags(common))?;
    let np = bench::spread(&mut hosts, common);
    let words = bench::words(std::env::args_os().skip(1), &loaded)?;
    let plan = Plan::new(Plan::nodes(&hosts, np)?, ITSELF.to_owned(), words, &loaded)?;
    bench.check_size(plan.size())?;
    start(plan, &loaded, &common.at, Files::default(), true)
}

/// The settings and hosts of a job that is to be started.
fn prepare(at: &JobOptions, flags: &[String]) -> Result<(Loaded, Vec<Host>), CommandError> {
    let timeout = at.start_timeout.map(|ms| format!("launch.start_timeout_ms={ms}"));
    let flags: Vec<_> = flags.iter().cloned().chain(timeout).collect();
    let mut loaded = load(&at.settings, &flags)?;
    let level = loaded.rows.iter().find(|row| row.key.name == "log.level");
    if at.verbose && level.is_some_and(|row| row.origin == Origin::Default) {
        let flags: Vec<_> = flags.into_iter().chain(["log.level=info".to_owned()]).collect();
        loaded = load(&at.settings, &flags)?;
    }
    log(&loaded.settings)?;
    let hosts = match (&at.hosts, &at.hostfile) {
        (Some(list), _) => hosts::parse_list(list).map_err(CommandError::usage)?,
        (None, Some(path)) => {
            let name = path.display().to_string();
            let text = std::fs::read_to_string(path).map_err(|error| {
                let hint =
                    if error.kind() == ErrorKind::InvalidData { "save it as UTF-8" } else { "" };
                CommandError::usage(format!("hostfile {name}: {error}")).hint(hint)
            })?;
            hosts::parse_file(&name, &text).map_err(CommandError::usage)?
        }
        (None, None) => Vec::new(),
    };
    let hosts = match &at.servers {
        Some(servers) => hosts::parse_servers(servers, &hosts).map_err(CommandError::usage)?,
        None => hosts,
    };
    Ok((loaded, hosts))
}

/// What the launcher of a job writes besides the output of its ranks.
#[derive(Debug, Default)]
struct Files {
    output_dir: Option<PathBuf>,
    metrics_sd: Option<PathBuf>,
    trace: Option<PathBuf>,
}

fn start(
    plan: Plan,
    loaded: &Loaded,
    at: &JobOptions,
    files: Files,
    bare: bool,
) -> Result<ExitCode, CommandError> {
    let (serving, served) = oneshot::channel();
    let options = Options {
        output_dir: files.output_dir,
        metrics_sd: files.metrics_sd,
        serving: Some(serving),
        verbose: at.verbose,
        bare,
        environment: environment(),
        directory: std::env::current_dir()
            .map_err(|error| CommandError::failed(format!("no working directory: {error}")))?,
    };
    let report = block_on(async {
        let traced = async {
            let (path, address) = (files.trace.as_deref()?, served.await.ok()?);
            Some(trace::whole(&address.to_string(), path).await)
        };
        // The trace ends with the job, at the latest soon after it.
        let mut traced = pin!(traced);
        let job = launch::run(plan, &loaded.settings, options);
        let mut job = pin!(job);
        let (report, traced) = tokio::select! {
            report = &mut job => (report, timeout(TRACE_END, traced).await.unwrap_or_default()),
            done = &mut traced => (job.await, done),
        };
        match traced {
            Some(Ok(summary)) => print_line(&summary),
            Some(Err(error)) => print_line(format_args!("trace: {error}")),
            None => {}
        }
        report
    })??;
    Ok(ExitCode::from(report.code))
}

/// How long a trace may take to end after its job.
const TRACE_END: Duration = Duration::from_secs(2);

/// The threads of the agent of `gradwire doctor`; a daemon has two for data by default.
const AGENT_THREADS: usize = 2;

/// Descriptors without which nothing can begin, so that whatever runs out of them later can say so.
const MIN_OPEN_FILES: u64 = 24;

/// One thread's runtime.
fn runtime() -> Result<Runtime, CommandError> {
    built(&mut Builder::new_current_thread())
}

/// A runtime. Tokio panics where it gets no descriptor, so that is looked at before.
fn built(builder: &mut Builder) -> Result<Runtime, CommandError> {
    let most = getrlimit(Resource::Nofile).current;
    if let Some(most) = most.filter(|most| *most < MIN_OPEN_FILES) {
        let error = io::Error::from(Errno::MFILE);
        let what =
            format!("{error}: this process may open {most}, and needs at least {MIN_OPEN_FILES}");
        return Err(CommandError::failed(what).hint(limits_hint(&error).unwrap_or_default()));
    }
    builder.enable_all().build().map_err(|error| CommandError::system(&error))
}

fn block_on<T>(work: impl Future<Output = T>) -> Result<T, CommandError> {
    let runtime = runtime()?;
    let result = runtime.block_on(work);
    runtime.shutdown_background();
    Ok(result)
}

/// The environment as text; what is not UTF-8 can't be a setting, and can't travel as JSON.
fn environment() -> HashMap<String, String> {
    let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    std::env::vars_os().filter_map(text).collect()
}

fn load(args: &SettingsOptions, flags: &[String]) -> Result<Loaded, CommandError> {
    let flags = args.set.iter().chain(flags).cloned().collect();
    let layers = Layers { file: args.config.clone(), environment: environment(), flags };
    Ok(Settings::load(&layers)?)
}

fn log(settings: &Settings) -> Result<(), CommandError> {
    let json = settings.log.format == gradwire_settings::LogFormat::Json;
    init_logging(&LogConfig { filter: settings.log.level.clone(), json })
        .map_err(CommandError::usage)
}

/// Prints to standard output; a reader that has read enough is no error.
fn print(text: &str) -> Result<ExitCode, CommandError> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(CommandError::failed(format!("the output can't be written: {error}")))
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}
