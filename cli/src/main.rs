//! The `gradwire` program: words to a command, the command to an exit code.

#![forbid(unsafe_code)]

use std::{
    ffi::OsString,
    fs,
    io::{IsTerminal, stdin},
    process::ExitCode,
    thread,
};

use clap::CommandFactory;
use gradwire_bench::{self as bench, args::Bench};
use gradwire_cli::{
    algorithms,
    args::{Cli, Command, Config, Measurement, Run},
    check_build, cluster, completions, doctor, explain, familiar, find,
    job::{Output, discover, prepare, start},
    join,
    lab::become_lab,
    process::{block_on, environment, export, load, print},
    replay, report, show, status, top, trace, why,
};
use gradwire_doctor::findings::Status;
use gradwire_launcher::{
    error::{CommandError, print_line},
    launch::{dry_run, elastic::Elastic, job::events::Request, places, plan::Plan, requests},
};
use gradwire_services::launch::ITSELF;
use gradwire_worker::starters;
use rustix::process::getppid;

/// The stack of the commands, whatever the limit of the main thread is (`ulimit -s`).
const STACK: usize = 4 << 20;

fn main() -> ExitCode {
    let thread = thread::Builder::new().name("gradwire".to_owned()).stack_size(STACK);
    match thread.spawn(command).map(thread::JoinHandle::join) {
        Ok(Ok(code)) => code,
        // It has panicked, and has said why.
        Ok(Err(_)) => ExitCode::from(101),
        Err(error) => CommandError::system(&error).report(),
    }
}

fn command() -> ExitCode {
    let words = familiar::translate(&Cli::command(), std::env::args_os().collect());
    let done = words.and_then(|words| dispatch(familiar::parse(words)));
    done.unwrap_or_else(|error| error.report())
}

fn dispatch(cli: Cli) -> Result<ExitCode, CommandError> {
    match cli.command {
        Command::Run(run) => self::run(*run),
        Command::Demo(options) => dispatch(familiar::parse(options.words()?)),
        Command::Join(options) => join::run(options),
        Command::Completions { shell } => print(&completions::script(shell, &Cli::command())),
        Command::Secret { file } => join::secret(file.as_deref()),
        Command::Bench(Measurement::Job(bench)) => self::bench(&bench),
        Command::Config(Config::Show { settings, all, explain, json }) => {
            let loaded = load(&settings, &[])?;
            print(&if json {
                show::to_json(&loaded, all)?
            } else {
                show::show(&loaded, all, explain)
            })
        }
        Command::Algorithms(options) => print(&algorithms::show(&options)?),
        Command::Explain(options) => self::explain(options),
        Command::Doctor(options) => {
            let (loaded, hosts) = prepare(&options.at, &[], true)?;
            let nodes = Plan::nodes(&hosts, options.at.np)?;
            Plan::check(&nodes, &loaded.settings)?;
            let path = options.write_hostfile.as_deref();
            path.map_or(Ok(()), doctor::hostfile::check)?;
            let environment = environment();
            let check = doctor::check(&nodes, &loaded.settings, &environment, path.is_some());
            let report = block_on(check)??;
            print(&if options.json { report.to_json()? } else { report.to_text() })?;
            if let Some((path, text)) = path.zip(report.hostfile) {
                doctor::hostfile::save(path, &text?)?;
                if !options.json {
                    print(&format!("wrote {}\n", path.display()))?;
                }
            }
            Ok(ExitCode::from(u8::from(report.status == Status::Fail)))
        }
        Command::Status(status::Options { address, json, watch }) => {
            let address = find::coordinator(address.as_deref())?;
            block_on(status::run(&address, json, watch))??;
            Ok(ExitCode::SUCCESS)
        }
        Command::Why(options) => {
            why::run(&options)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Report(options) => {
            let found = match options.folder()? {
                Some(folder) => report::Found::in_folder(&folder, options.job.as_deref())?,
                None => {
                    let address = find::coordinator(options.place.as_deref())?;
                    block_on(report::ask(&address))??
                }
            };
            report::show(&found, &options)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Top { address } => {
            let address = find::coordinator(address.as_deref())?;
            block_on(top::run(&address))??;
            Ok(ExitCode::SUCCESS)
        }
        Command::Drain { host, job } => {
            let job = find::own_job(job.as_deref())?.job;
            let answer = requests::ask(&job, &Request::Drain { host })?;
            print(&format!("{}\n", answer.map_err(CommandError::failed)?))
        }
        Command::Trace(options) => {
            let address = find::coordinator(options.address.as_deref())?;
            block_on(trace::run(&address, &options))??;
            Ok(ExitCode::SUCCESS)
        }
        Command::Replay(options) => replay::run(&options),
        Command::Bench(Measurement::Negotiation(_) | Measurement::Resources(_))
        | Command::Probe(_)
        | Command::Simulate(_) => Err(become_lab()),
        Command::Role(role) => role.run(),
    }
}

fn explain(options: explain::Options) -> Result<ExitCode, CommandError> {
    if options.cluster.is_some() {
        return Err(become_lab());
    }
    let Some(nodes) = options.nodes else {
        let address = find::coordinator(options.address.as_deref())?;
        return print(&explain::of_job(&block_on(status::ask(&address))??, options.json));
    };
    let settings = load(&options.settings, &[])?.settings;
    let topology = cluster::topology(nodes, options.servers.unwrap_or(0), options.racks.as_ref())?;
    print(&explain::on_cluster(&topology, &settings.cost_model(), &settings, options.json)?)
}

fn run(run: Run) -> Result<ExitCode, CommandError> {
    if run.check_build {
        return print(&check_build::describe());
    }
    let (folder, caller) = (run.folder_of_caller.clone(), getppid());
    let ended = run_job(run);
    if let Some(folder) = folder.filter(|_| getppid() != caller) {
        // If the folder is gone, too, nothing is left.
        let _ = fs::remove_dir_all(folder);
    }
    ended
}

fn run_job(run: Run) -> Result<ExitCode, CommandError> {
    export(&run.variables);
    if let Some(tasks) = starters::several_tasks(&environment()) {
        let what = "and each of them runs a job of its own; start gradwire run once for one job";
        print_line(format_args!("gradwire: {tasks}, {what}"));
    }
    let timeout = run.elastic.elastic_timeout.map(|ms| format!("elastic.timeout_ms={ms}"));
    let signal = run.stop_signal.map(|signal| format!("worker.stop_signal={}", signal.name()));
    let binding = run.bind_to.map(|what| format!("worker.bind_to={what}"));
    let flags: Vec<_> = timeout.into_iter().chain(signal).chain(binding).collect();
    // A discovery script lists all hosts.
    let allocated = run.elastic.host_discovery_script.is_none();
    let (loaded, mut hosts) = prepare(&run.at, &flags, allocated)?;
    let discovery = discover(&run.elastic, run.at.np, &loaded.settings)?;
    hosts.splice(0..0, discovery.iter().flat_map(|(_, found)| found.clone()));
    let elastic = Elastic::new(&run.elastic, run.at.np, &hosts, &loaded.settings)?;
    let nodes = match &elastic {
        Some((elastic, first)) => Plan::nodes(&elastic.hosts, Some(*first))?,
        None => Plan::nodes(&hosts, run.at.np)?,
    };
    let module = ["python3", "-m"].into_iter().filter(|_| run.module).map(OsString::from);
    let mut words = module.chain(run.command);
    let program = words.next().filter(|program| program != ITSELF);
    let program = program.ok_or_else(|| CommandError::usage("the program's name is empty"))?;
    let words: Vec<_> = words.collect();
    if words.iter().any(|word| word == "-") && !stdin().is_terminal() {
        print_line("gradwire: '-' may mean standard input, which is empty for ranks");
    }
    let mut plan = Plan::new(nodes, program, words, &loaded)?;
    for (name, value) in &run.variables {
        // Ranks get a value of this one in any case.
        let is_set = std::env::var_os(name).is_some() || name == "OMP_NUM_THREADS";
        if value.is_none() && !is_set {
            print_line(format_args!("gradwire: -x {name}: it is not set here, so ranks lack it"));
        }
    }
    let variables = run.variables.into_iter();
    plan.record = run.record.plan(plan.size(), elastic.is_some())?;
    plan.output_dir = run.output_dir.as_deref().and_then(|dir| std::path::absolute(dir).ok());
    plan.elastic = elastic.map(|(elastic, _)| elastic);
    plan.exported = variables.filter_map(|(name, value)| Some((name, value?))).collect();
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
    let shares = plan.nodes.iter().any(|node| node.ranks() > 1);
    if run.at.verbose && shares && std::env::var_os("OMP_NUM_THREADS").is_none() {
        let what = "OMP_NUM_THREADS is not set: each rank gets its share of its host's cores";
        print_line(format_args!("gradwire: {what}"));
    }
    let Run { output_dir, metrics_sd, trace, progress, wdir, .. } = run;
    trace.as_deref().map_or(Ok(()), trace::check)?;
    let output = Output {
        output_dir,
        metrics_sd,
        trace,
        progress: progress.applies(),
        with_time: run.timestamp_output,
        bare: false,
    };
    start(plan, &loaded, &run.at, output, discovery, wdir)
}

/// A rank measures. Any other process starts ranks, which measure.
fn bench(bench: &Bench) -> Result<ExitCode, CommandError> {
    bench.check()?;
    if bench::is_rank(bench.common(), &environment())? {
        return bench::rank::run(bench);
    }
    let common = bench.common();
    let (loaded, mut hosts) = prepare(&common.at, &bench::flags(common), true)?;
    let np = bench::spread(&mut hosts, common);
    let words = bench::words(std::env::args_os().skip(1), &loaded)?;
    let plan = Plan::new(Plan::nodes(&hosts, np)?, ITSELF, words, &loaded)?;
    bench.check_size(plan.size())?;
    let output = Output { bare: true, ..Output::default() };
    start(plan, &loaded, &common.at, output, None, None)
}
