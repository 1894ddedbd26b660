//! A job that a command starts: its settings and hosts, the launcher, and the trace beside it.

use std::{io::ErrorKind, path::PathBuf, pin::pin, process::ExitCode, time::Duration};

use gradwire_launcher::{
    args::{ElasticOptions, JobOptions},
    error::{CommandError, print_line},
    launch::{
        self, Options,
        discovery::Script,
        hosts::{self, Host},
        plan::{self, Plan},
    },
};
use gradwire_settings::{Loaded, Origin, Settings};
use tokio::{
    sync::oneshot,
    time::{Instant, sleep, timeout},
};

use crate::{
    process::{block_on, environment, load, log},
    trace,
};

/// The settings and hosts of a job that is to be started. `flags` are settings that the command
/// itself makes.
///
/// # Errors
/// [`CommandError`] for a wrong setting, a wrong list of hosts, or a hostfile that can't be read.
pub fn prepare(at: &JobOptions, flags: &[String]) -> Result<(Loaded, Vec<Host>), CommandError> {
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

/// The script that lists the hosts of an elastic job, and its first list: once that has enough
/// slots for the fewest ranks of the job.
///
/// # Errors
/// [`CommandError`] if the script fails, or lists too few slots until the time is over.
pub fn discover(
    options: &ElasticOptions,
    np: Option<u32>,
    settings: &Settings,
) -> Result<Option<(Script, Vec<Host>)>, CommandError> {
    let Some(path) = options.host_discovery_script.clone() else { return Ok(None) };
    let script = Script { path, slots: options.slots_per_host.unwrap_or(1) };
    let needed = options.min_np.or(np).unwrap_or(1).saturating_add(options.spares.unwrap_or(0));
    let limit = settings.elastic.timeout;
    block_on(async {
        let begun = Instant::now();
        let mut has_told = false;
        loop {
            let hosts = script.run().await.map_err(CommandError::usage)?;
            let slots = hosts.iter().map(|host| u64::from(host.slots)).sum::<u64>();
            if slots >= u64::from(needed) {
                return Ok(Some((script, hosts)));
            }
            let lacks = format!(
                "the host discovery script {} lists {}, but the job needs {needed}",
                script.path.display(),
                plan::count(slots, "slot"),
            );
            if begun.elapsed() >= limit {
                let what = format!("{lacks}, within {:.0} s", limit.as_secs_f64());
                return Err(CommandError::failed(what));
            }
            if !std::mem::replace(&mut has_told, true) {
                let seconds = limit.as_secs_f64();
                print_line(format_args!("gradwire: {lacks}: waiting up to {seconds:.0} s"));
            }
            sleep(LIST_AGAIN).await;
        }
    })?
}

/// The time between two runs of a discovery script that lists too few slots.
const LIST_AGAIN: Duration = Duration::from_secs(1);

/// What the launcher of a job writes besides the output of its ranks.
#[derive(Debug, Default)]
pub struct Files {
    /// The folder for the output of each rank.
    pub output_dir: Option<PathBuf>,
    /// The folder for the file from which Prometheus learns where metrics are.
    pub metrics_sd: Option<PathBuf>,
    /// The file for the trace.
    pub trace: Option<PathBuf>,
}

/// Runs a job from its start to its end, and returns its exit code. `discovery` is the script that
/// lists its hosts, if there is one. `bare`: only the output of the ranks is shown, without a
/// prefix.
///
/// # Errors
/// [`CommandError`] if the job can't be started.
pub fn start(
    plan: Plan,
    loaded: &Loaded,
    at: &JobOptions,
    files: Files,
    discovery: Option<(Script, Vec<Host>)>,
    bare: bool,
) -> Result<ExitCode, CommandError> {
    let (serving, served) = oneshot::channel();
    let options = Options {
        output_dir: files.output_dir,
        metrics_sd: files.metrics_sd,
        serving: Some(serving),
        discovery,
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
