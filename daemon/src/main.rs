//! The binary `gradwired`: configuration, telemetry, run.

use std::{
    collections::HashMap,
    fmt::Display,
    io::{self, Write},
    net::IpAddr,
    path::PathBuf,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, anyhow};
use gradwire_coordinator::host::{HostError, Hosted};
use gradwire_daemon::{Daemon, DaemonConfig, DaemonError, Ending, config::patience, metrics};
use gradwire_proto::{Failure, VERSION};
use gradwire_services::launch::{
    HERE, Notice, REPORTS_ARE_READ, ServiceReport, from_line, to_line,
};
use gradwire_settings::{
    AddressRange, Layers, Loaded, Settings, layers, table::LogFormat, variables::Variables,
};
use gradwire_telemetry::{
    Endpoint, EndpointConfig, LogConfig, OtlpConfig, Readiness, Router, TelemetryError,
    init_logging, record_events,
};
use gradwire_trace::time;
use gradwire_viewer::{access::Access, pages::router, spans::Spans};
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch},
    task::JoinHandle,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

const HELP: &str = "\
Gradwire's daemon: one per node of a job. `gradwire run` starts it and sets its environment.

Usage: gradwired [--config FILE]

Options:
      --config FILE  A TOML file with settings; see `gradwire config show`
  -h, --help         Print help
  -V, --version      Print version
";

/// What the command line asks for.
#[derive(Debug, PartialEq)]
enum Arguments {
    Serve { config: Option<PathBuf> },
    Print(String),
}

impl Arguments {
    fn parse(mut words: lexopt::Parser) -> Result<Self, lexopt::Error> {
        use lexopt::prelude::{Long, Short, ValueExt};
        let mut config = None;
        while let Some(word) = words.next()? {
            match word {
                Long("config") => config = Some(words.value()?.parse()?),
                Short('h') | Long("help") => return Ok(Self::Print(HELP.to_owned())),
                Short('V') | Long("version") => {
                    return Ok(Self::Print(format!("gradwired {VERSION}\n")));
                }
                word => return Err(word.unexpected()),
            }
        }
        Ok(Self::Serve { config })
    }
}

fn main() -> ExitCode {
    let config = match Arguments::parse(lexopt::Parser::from_env()) {
        Ok(Arguments::Serve { config }) => config,
        Ok(Arguments::Print(text)) => {
            // The reader may have closed the pipe.
            let _ = io::stdout().write_all(text.as_bytes());
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            say(&format_args!("{error}; see gradwired --help"));
            return OWN_FAULT.into();
        }
    };
    match start(config) {
        Ok((Ending::Finished, _)) => ExitCode::SUCCESS,
        Ok((Ending::Failed(failure), host)) => {
            let own = is_own(&failure, &host);
            if std::env::var_os(REPORTS_ARE_READ).is_some() {
                report(&ServiceReport::Failed { failure });
            } else {
                say(&failure);
            }
            if own { OWN_FAULT.into() } else { ExitCode::FAILURE }
        }
        Err(error) => {
            say(&format_args!("{error:#}"));
            OWN_FAULT.into()
        }
    }
}

/// Writes why the daemon ends. Unlike `eprintln`, this does not panic (and change the exit code) if
/// the reader is gone.
fn say(what: &dyn Display) {
    // One system call, because ranks write to the same place.
    let _ = io::stderr().write_all(format!("gradwired: {what}\n").as_bytes());
}

/// Tells the user, through the launcher if there is one.
fn warn(what: &str) {
    if std::env::var_os(REPORTS_ARE_READ).is_some() {
        report(&ServiceReport::Warned { what: what.to_owned() });
    } else {
        say(&what);
    }
}

/// The exit code of a daemon that ends for its own reason, not because the job has failed. The
/// launcher then knows that its ranks end because of the daemon.
const OWN_FAULT: u8 = 2;

/// Whether the job failed because the system refused this host's daemon a resource.
fn is_own(failure: &Failure, host: &str) -> bool {
    failure.blames_daemon() && failure.host == host
}

/// Runs the daemon. Returns how the job ended, and the name of this host.
fn start(file: Option<PathBuf>) -> anyhow::Result<(Ending, String)> {
    let environment = layers::text(std::env::vars_os());
    let layers = Layers { file, environment, flags: Vec::new() };
    let Loaded { settings, without_effect, .. } = Settings::load(&layers)?;
    let json = settings.log.format == LogFormat::Json;
    init_logging(&LogConfig { filter: settings.log.level.clone(), json })?;
    let first = layers.environment.get("GRADWIRE_COORDINATOR").is_some_and(|at| at == HERE);
    // Logged once per job.
    if first && !without_effect.is_empty() {
        let variables = without_effect.join(" ");
        tracing::warn!(variables, "these Horovod variables have no effect in Gradwire");
    }
    check_limits()?;
    // One control thread is enough, because lanes move the data. It is not one of tokio's threads:
    // tokio would panic if the system refused it.
    let control = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(DaemonError::from)?;
        let ending = runtime.block_on(serve(layers.environment, &settings));
        runtime.shutdown_background();
        ending
    };
    let control = thread::Builder::new()
        .name("gw-control".to_owned())
        .spawn(control)
        .map_err(DaemonError::from)?;
    control.join().map_err(|_| anyhow!("the control thread panicked"))?
}

/// The descriptors that a daemon needs to start, and to report it if it runs out of them later.
const MIN_OPEN_FILES: u64 = 24;

/// The address space that a daemon needs to start, in bytes: for the program, the stacks of its
/// threads and a little for each worker.
const MIN_ADDRESS_SPACE: u64 = 64 << 20;

/// Raises the soft limit of descriptors to the hard limit: the usual soft limit is for programs
/// that use `select`. Fails if the hard limits are too low; without this check, libraries would
/// panic first.
fn check_limits() -> anyhow::Result<()> {
    if let Some(most) = getrlimit(Resource::As).current.filter(|most| *most < MIN_ADDRESS_SPACE) {
        return Err(anyhow!(
            "this process may use {most} bytes of address space, but needs at least \
             {MIN_ADDRESS_SPACE}; raise gradwired's memory limit (ulimit -v)"
        ));
    }
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Some(most) = limit.maximum.filter(|most| *most < MIN_OPEN_FILES) {
        return Err(anyhow!(
            "this process may open {most} files, but needs at least {MIN_OPEN_FILES}; raise \
             gradwired's limit of open files (ulimit -n)"
        ));
    }
    setrlimit(Resource::Nofile, limit).context("the limit of open files can't be raised")
}

/// How long after a signal its reason may arrive.
const REASON_WAIT: Duration = Duration::from_millis(500);

async fn serve(
    mut environment: HashMap<String, String>,
    settings: &Settings,
) -> anyhow::Result<(Ending, String)> {
    let here = environment.get("GRADWIRE_COORDINATOR").is_some_and(|place| place == HERE);
    let patience = Patience(patience(Variables(&environment))?);
    let hosted = if here {
        let bind = || Hosted::bind(&environment, settings);
        Some(patience.bind(bind, HostError::is_taken).await?)
    } else {
        None
    };
    if let Some(hosted) = &hosted {
        environment.insert("GRADWIRE_COORDINATOR".to_owned(), hosted.address().to_string());
    }
    let config = DaemonConfig::from_env(&environment, settings)?;
    let own_host = environment.get("GRADWIRE_HOST").cloned().unwrap_or_default();
    let pages = |listen: IpAddr| match &hosted {
        Some(hosted) => pages(hosted, settings, listen, &own_host).map(Some),
        None => Ok(None),
    };
    let forming = || Readiness::NotReady("the world has not formed".into());
    let (readiness, ready) = watch::channel(forming());
    let otlp = OtlpConfig::new(&settings.otlp.endpoint, settings.otlp.interval);
    let show = |service, listen, setting, is_default| {
        // The daemon that hosts the coordinator knows which ranks are missing.
        let ready = hosted.as_ref().map_or_else(|| ready.clone(), Hosted::readiness);
        let AddressRange { ip: listen, ports } = listen;
        let (job, host) = config.labels();
        Endpoint::start(EndpointConfig {
            service,
            version: VERSION,
            job,
            host,
            listen,
            ports,
            or_any: is_default,
            setting,
            reached_at: config.address(),
            coordinator: config.coordinator(),
            ready,
            targets: hosted.as_ref().map(Hosted::targets),
            lists_itself: false,
            // Once for the process, even if it has two endpoints.
            otlp: if service == "gradwired" { otlp.clone() } else { None },
            pages: pages(listen)?,
        })
        .map_err(anyhow::Error::from)
    };
    // Default ports may be taken by others: the job must not fail because of that.
    let is_default = settings.metrics.listen == Settings::default().metrics.listen;
    let listen = settings.metrics.listen.clone();
    let is_taken =
        |error: &anyhow::Error| error.downcast_ref().is_some_and(TelemetryError::is_taken);
    let bind = async || show("gradwired", listen.clone(), "metrics.listen", is_default);
    let endpoint = patience.bind(bind, is_taken).await?;
    // The daemon's endpoint also shows the coordinator's metrics. The coordinator has its own
    // endpoint only if the settings say so.
    let coordinators = settings.coordinator.metrics_listen.clone();
    let coordinators = if hosted.is_some() && *coordinators.ports.end() != 0 {
        let setting = "coordinator.metrics_listen";
        let bind = async || show("coordinator", coordinators.clone(), setting, false);
        Some(patience.bind(bind, is_taken).await?)
    } else {
        None
    };
    if let Some(hosted) = &hosted {
        hosted.inspection().shown_at(endpoint.address());
    }
    metrics::start();
    let daemon = patience.bind(|| Daemon::bind(config.clone()), DaemonError::is_taken);
    let mut daemon = daemon.await?.shown_at(endpoint.address());
    let recording = daemon.recording();
    record_events(move |level, text| {
        recording.flight().event(time::now_ns(), level, text);
    });
    // All resources that the system may refuse are taken before other processes rely on this
    // daemon.
    let mut terminate = signal(SignalKind::terminate()).map_err(DaemonError::from)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(DaemonError::from)?;
    let notices = launcher().map_err(DaemonError::from)?;
    // The launcher reads this line, and then starts the other daemons and the ranks.
    report(&ServiceReport::Serving {
        metrics: endpoint.address(),
        data: Some(daemon.data_address()),
        grpc: hosted.as_ref().map(Hosted::address),
    });
    let (cancel, stop_coordinator) = (CancellationToken::new(), CancellationToken::new());
    let (on_signal, after_signal) = (cancel.clone(), stop_coordinator.clone());
    let cause_window = settings.coordinator.cause_window;
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        // The signal may be the consequence of an event that this daemon has not noticed yet, such
        // as a worker's death. The sender of the signal may also be about to report the reason
        // (TELL).
        sleep(REASON_WAIT).await;
        on_signal.cancel();
        // The daemon reports that it was asked to end, and the coordinator ends with that cause. It
        // must be asked, too, if it still waits for other nodes.
        sleep(cause_window + REASON_WAIT).await;
        after_signal.cancel();
    });
    if let Some(hosted) = &hosted {
        daemon = daemon.beside(hosted.acceptor());
    }
    let spans = match (&hosted, otlp, settings.otlp.sample_steps) {
        (Some(hosted), Some(otlp), every @ 1..) => {
            Some(Spans::start(hosted.inspection(), otlp, every).map_err(DaemonError::from)?)
        }
        _ => None,
    };
    let coordinator =
        hosted.map(|hosted| tokio::spawn(coordinate(hosted, stop_coordinator.clone())));
    let ending = daemon
        .with_agent(notices)
        .with_warnings(warn)
        .run(cancel.clone(), move |formed| {
            let state = if formed { Readiness::Ready } else { forming() };
            let _ = readiness.send(state);
        })
        .await?;
    if let Some(coordinator) = coordinator {
        end(coordinator, &stop_coordinator, settings.launch.grace.max(MIN_GRACE)).await;
    }
    if let Some(spans) = spans {
        spans.finish().await;
    }
    if let Some(endpoint) = coordinators {
        endpoint.stop().await;
    }
    endpoint.stop().await;
    Ok((ending, own_host))
}

/// How long the addresses of a daemon may be taken.
#[derive(Debug, Clone, Copy)]
struct Patience(Duration);

impl Patience {
    /// Binds addresses, again and again while they are taken.
    async fn bind<T, E>(
        self,
        bind: impl AsyncFn() -> Result<T, E>,
        is_taken: impl Fn(&E) -> bool,
    ) -> Result<T, E> {
        let deadline = Instant::now() + self.0;
        loop {
            match bind().await {
                Err(error) if is_taken(&error) && Instant::now() < deadline => {
                    sleep(Duration::from_millis(20)).await;
                }
                result => return result,
            }
        }
    }
}

/// The pages about the job, for a listener at this address.
fn pages(
    hosted: &Hosted,
    settings: &Settings,
    listen: IpAddr,
    own_host: &str,
) -> anyhow::Result<Router> {
    let access = Access::of_this_host(listen, own_host, &settings.metrics.token_file)?;
    Ok(router(hosted.inspection(), access))
}

/// The minimum time for the coordinator's last messages to other nodes.
const MIN_GRACE: Duration = Duration::from_millis(200);

/// Serves the job as its coordinator. Reports the cause of a failure to the launcher as soon as it
/// is known, before this node waits for its ranks.
async fn coordinate(hosted: Hosted, cancel: CancellationToken) {
    match hosted.run(cancel).await {
        Ok(Ending::Failed(failure)) => report(&ServiceReport::Failed { failure }),
        Ok(Ending::Finished) => {}
        Err(error) => tracing::error!(%error, "the coordinator ended"),
    }
}

/// Waits until the coordinator has told the other nodes how the job ended. If this daemon could not
/// take part at all, the coordinator may still be waiting for nodes that never join.
async fn end(mut coordinator: JoinHandle<()>, cancel: &CancellationToken, grace: Duration) {
    if timeout(grace, &mut coordinator).await.is_err() {
        cancel.cancel();
        if timeout(grace, coordinator).await.is_err() {
            tracing::warn!(?grace, "the coordinator does not stop");
        }
    }
}

/// Reports to the launcher. The job does not depend on whether the launcher reads the report.
fn report(report: &ServiceReport) {
    let _ = io::stdout().write_all(to_line(report).as_bytes());
}

/// The notices of the launcher's agent on standard input. A separate thread reads them, because a
/// blocked read of a terminal or pipe can't be cancelled.
fn launcher() -> io::Result<mpsc::UnboundedReceiver<Notice>> {
    let (sender, notices) = mpsc::unbounded_channel();
    let listen = move || {
        for line in io::stdin().lines().map_while(Result::ok) {
            match from_line(&line) {
                Ok(notice) => drop(sender.send(notice)),
                Err(error) => tracing::warn!(%error, "a line on standard input is ignored"),
            }
        }
    };
    thread::Builder::new().name("gw-launcher".to_owned()).spawn(listen)?;
    Ok(notices)
}

#[cfg(test)]
mod tests {
    use gradwire_proto::{FailureKind, Rank};

    use super::*;

    #[test]
    fn the_command_line_has_one_option() {
        let parse = |words: &[&str]| {
            let words = ["gradwired"].iter().chain(words).copied();
            Arguments::parse(lexopt::Parser::from_iter(words)).map_err(|error| error.to_string())
        };
        assert_eq!(parse(&[]), Ok(Arguments::Serve { config: None }));
        let config = Some(PathBuf::from("g.toml"));
        assert_eq!(parse(&["--config=g.toml"]), Ok(Arguments::Serve { config: config.clone() }));
        assert_eq!(parse(&["--config", "g.toml"]), Ok(Arguments::Serve { config }));
        assert_eq!(parse(&["--version"]), Ok(Arguments::Print(format!("gradwired {VERSION}\n"))));
        assert_eq!(parse(&["-h"]), Ok(Arguments::Print(HELP.to_owned())));
        for (words, part) in
            [(&["--configs"][..], "--configs"), (&["--config"], "--config"), (&["x"], "x")]
        {
            let error = parse(words).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn only_resources_refused_here_are_an_own_fault() {
        let refused = Failure::new(FailureKind::Resource, "no thread").host("a");
        assert!(is_own(&refused, "a"));
        assert!(!is_own(&refused, "b"));
        assert!(!is_own(&refused.clone().rank(Rank(1)), "a"), "a rank's");
        let lost = Failure::new(FailureKind::NodeLost, "gone").host("a");
        assert!(!is_own(&lost, "a"));
    }
}
