//! A job that a command starts: its settings and hosts, the launcher, and the trace beside it.

use std::{
    io::ErrorKind,
    net::SocketAddr,
    path::{Path, PathBuf},
    pin::pin,
    process::ExitCode,
    time::Duration,
};

use gradwire_launcher::{
    allocation,
    args::{ElasticOptions, JobOptions},
    error::{CommandError, print_line},
    launch::{
        self, Options,
        discovery::Script,
        hosts::{self, Host},
        plan::{self, Plan},
    },
    outer,
};
use gradwire_settings::{Loaded, Origin, Settings};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};

use crate::{
    process::{block_on, environment, load, log},
    progress, trace,
};

/// The settings and hosts of a job that is to be started. `flags` are settings that the command
/// itself makes. `allocated`: without a list of hosts, those of a batch system are taken.
///
/// # Errors
/// [`CommandError`] for a wrong setting, a wrong list of hosts, or a hostfile that can't be read.
pub fn prepare(
    at: &JobOptions,
    flags: &[String],
    allocated: bool,
) -> Result<(Loaded, Vec<Host>), CommandError> {
    let timeout = at.start_timeout.map(|ms| format!("launch.start_timeout_ms={ms}"));
    let flags: Vec<_> = flags.iter().cloned().chain(timeout).collect();
    let mut loaded = load(&at.settings, &flags)?;
    let level = loaded.rows.iter().find(|row| row.key.name == "log.level");
    if at.verbose && level.is_some_and(|row| row.origin == Origin::Default) {
        let flags: Vec<_> = flags.into_iter().chain(["log.level=info".to_owned()]).collect();
        loaded = load(&at.settings, &flags)?;
    }
    log(&loaded.settings)?;
    let ssh_args = &mut loaded.settings.launch.ssh_args;
    ssh_args.extend(at.ssh_port.into_iter().flat_map(|port| ["-p".to_owned(), port.to_string()]));
    let key = at.ssh_identity_file.iter().map(|file| file.display().to_string());
    ssh_args.extend(key.flat_map(|file| ["-i".to_owned(), file]));
    let each = at.nproc_per_node.unwrap_or(1);
    let hosts = match (&at.hosts, &at.hostfile) {
        (Some(list), _) => hosts::parse_list_with(list, each).map_err(CommandError::usage)?,
        (None, Some(path)) => {
            let name = path.display().to_string();
            let text = std::fs::read_to_string(path).map_err(|error| {
                let hint =
                    if error.kind() == ErrorKind::InvalidData { "save it as UTF-8" } else { "" };
                CommandError::usage(format!("hostfile {name}: {error}")).hint(hint)
            })?;
            hosts::parse_file_with(&name, &text, each).map_err(CommandError::usage)?
        }
        (None, None) if allocated => of_allocation(at.np)?,
        (None, None) => Vec::new(),
    };
    let hosts = match at.nproc_per_node {
        Some(ranks) => hosts::with_slots(hosts, ranks).map_err(CommandError::usage)?,
        None => hosts,
    };
    let hosts = match &at.servers {
        Some(servers) => hosts::parse_servers(servers, &hosts).map_err(CommandError::usage)?,
        None => hosts,
    };
    Ok((loaded, hosts))
}

/// The hosts that a batch system has given to this job. A single host has room for all ranks.
fn of_allocation(np: Option<u32>) -> Result<Vec<Host>, CommandError> {
    let Some(mut allocation) = allocation::find(&environment())? else { return Ok(Vec::new()) };
    if let (Some(np), [(_, slots)]) = (np, allocation.hosts.as_mut_slice()) {
        *slots = np.max(*slots);
    }
    let (list, variable) = (allocation.text(), allocation.variable);
    print_line(format_args!("gradwire: the hosts are {list}, by {variable}"));
    hosts::parse_list(&list).map_err(CommandError::usage)
}

/// The script that lists the hosts of an elastic job, and its first list with enough slots for the
/// fewest ranks of the job and its spares.
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

/// What to do without a working directory.
const GONE: &str = "it may have been removed: cd to a folder that exists";

/// The time between two runs of a discovery script that lists too few slots.
const LIST_AGAIN: Duration = Duration::from_secs(1);

/// What the launcher of a job writes, and how it shows the output of the ranks.
#[derive(Debug, Default)]
pub struct Output {
    /// The folder for the output of each rank.
    pub output_dir: Option<PathBuf>,
    /// The folder for the file from which Prometheus learns where metrics are.
    pub metrics_sd: Option<PathBuf>,
    /// The file for the trace.
    pub trace: Option<PathBuf>,
    /// Whether the line of progress is shown on the terminal.
    pub progress: bool,
    /// Whether lines begin with the time.
    pub with_time: bool,
    /// Whether only the output of the ranks is shown, without a prefix.
    pub bare: bool,
}

/// Runs a job from its start to its end, and returns its exit code. `discovery` is the script that
/// lists its hosts, if there is one. The ranks run in the folder `wdir`, or in this one.
///
/// # Errors
/// [`CommandError`] if the job can't be started.
pub fn start(
    plan: Plan,
    loaded: &Loaded,
    at: &JobOptions,
    output: Output,
    discovery: Option<(Script, Vec<Host>)>,
    wdir: Option<PathBuf>,
) -> Result<ExitCode, CommandError> {
    let (serving, served) = watch::channel(None);
    let directory = std::env::current_dir().map_err(|error| {
        CommandError::failed(format!("no working directory: {error}")).hint(GONE)
    })?;
    let (line, lines) = watch::channel(String::new());
    let options = Options {
        output_dir: output.output_dir,
        metrics_sd: output.metrics_sd,
        serving: Some(serving),
        progress: output.progress.then_some(lines),
        discovery,
        verbose: at.verbose,
        bare: output.bare,
        with_time: output.with_time,
        environment: outer::outside(environment()),
        directory: directory.join(wdir.unwrap_or_default()),
    };
    let report = block_on(async {
        let followed =
            output.progress.then(|| tokio::spawn(progress::follow(served.clone(), line)));
        let traced = async {
            if let Some(path) = output.trace.as_deref() {
                trace_epochs(served, path, followed.is_some()).await;
            }
        };
        // The trace ends with the job, at the latest soon after it.
        let mut traced = pin!(traced);
        let job = launch::run(plan, &loaded.settings, options);
        let mut job = pin!(job);
        let report = tokio::select! {
            report = &mut job => {
                let _ = timeout(TRACE_END, traced).await;
                report
            }
            () = &mut traced => job.await,
        };
        if let Some(followed) = &followed {
            followed.abort();
        }
        report
    })??;
    Ok(ExitCode::from(report.code))
}

/// Traces each epoch of a job that `served` announces, until the job ends. The names of the files
/// of later epochs have their numbers before the extension. `clears`: a line of progress may be on
/// the terminal.
async fn trace_epochs(
    mut served: watch::Receiver<Option<(u64, SocketAddr)>>,
    path: &Path,
    clears: bool,
) {
    let clear = if clears { launch::progress::CLEAR } else { "" };
    while served.changed().await.is_ok() {
        let Some((epoch, address)) = *served.borrow_and_update() else { continue };
        match trace::whole(&address.to_string(), &file_of(path, epoch)).await {
            Ok(summary) => print_line(format_args!("{clear}{summary}")),
            Err(error) => print_line(format_args!("{clear}trace: {error}")),
        }
    }
}

/// The file for the trace of an epoch.
fn file_of(path: &Path, epoch: u64) -> PathBuf {
    if epoch == 1 {
        return path.to_owned();
    }
    let number = format!("epoch-{epoch}");
    path.with_extension(match path.extension() {
        Some(extension) => format!("{number}.{}", extension.display()),
        None => number,
    })
}

/// How long a trace may take to end after its job.
const TRACE_END: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_epoch_has_a_trace_file() {
        let file = |path: &str, epoch| file_of(Path::new(path), epoch).display().to_string();
        assert_eq!(file("a/t.json", 1), "a/t.json");
        assert_eq!(file("a/t.json", 12), "a/t.epoch-12.json");
        assert_eq!(file("a.b/trace", 2), "a.b/trace.epoch-2");
    }
}
