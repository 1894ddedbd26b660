//! The binary `gradwired`: configuration, telemetry, run.

use std::{collections::HashMap, path::PathBuf, process::ExitCode};

use anyhow::Context;
use clap::Parser;
use gradwire_daemon::{Daemon, DaemonConfig, Ending, metrics};
use gradwire_proto::{Rank, VERSION};
use gradwire_settings::{Layers, Settings, table::LogFormat};
use gradwire_telemetry::{Endpoint, EndpointConfig, LogConfig, Readiness, init_logging};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch},
};
use tokio_util::sync::CancellationToken;

/// Gradwire's daemon: one per node of a job. `gradwire run` starts it and sets its environment.
#[derive(Debug, Parser)]
#[command(name = "gradwired", version)]
struct Arguments {
    /// A TOML file with settings; see `gradwire config show`.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match start(arguments) {
        Ok(Ending::Finished) => ExitCode::SUCCESS,
        Ok(Ending::Failed(failure)) => {
            eprintln!("gradwired: {failure}");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("gradwired: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(arguments: Arguments) -> anyhow::Result<Ending> {
    let environment: HashMap<String, String> = std::env::vars().collect();
    let layers = Layers { file: arguments.config, environment, flags: Vec::new() };
    let settings = Settings::load(&layers)?.settings;
    let json = settings.log.format == LogFormat::Json;
    init_logging(&LogConfig { filter: settings.log.level.clone(), json })?;
    let config = DaemonConfig::from_env(&layers.environment, &settings)?;
    // One thread of control is plenty; the bytes have threads of their own.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("gw-control")
        .enable_all()
        .build()
        .context("no control runtime")?;
    let ending = runtime.block_on(serve(config, &settings));
    runtime.shutdown_background();
    ending
}

async fn serve(config: DaemonConfig, settings: &Settings) -> anyhow::Result<Ending> {
    let forming = || Readiness::NotReady("the world has not formed".into());
    let (readiness, ready) = watch::channel(forming());
    let endpoint = Endpoint::start(EndpointConfig {
        service: "gradwired",
        version: VERSION,
        listen: settings.metrics.listen,
        setting: "metrics.listen",
        ready,
    })
    .await?;
    metrics::describe();
    let daemon = Daemon::bind(config).await?;
    // The launcher reads this one line and starts the ranks then.
    println!(
        r#"{{"event":"serving","metrics":"{}","data":"{}"}}"#,
        endpoint.address(),
        daemon.data_address()
    );
    let cancel = CancellationToken::new();
    let (mut terminate, mut interrupt) =
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let on_signal = cancel.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        on_signal.cancel();
    });
    let ending = daemon
        .hear_of_ends(launcher())
        .run(cancel, move |formed| {
            let state = if formed { Readiness::Ready } else { forming() };
            let _ = readiness.send(state);
        })
        .await?;
    endpoint.stop().await;
    Ok(ending)
}

/// What the launcher says on standard input: `ended <rank>`, a line each. Read on a thread of its
/// own, because nothing can take a blocked read of a terminal or pipe back.
fn launcher() -> mpsc::UnboundedReceiver<Rank> {
    let (sender, ended) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            let rank = line.strip_prefix("ended ").and_then(|rank| rank.parse().ok());
            match rank {
                Some(rank) => {
                    let _ = sender.send(Rank(rank));
                }
                None => tracing::warn!(line, "standard input: only `ended <rank>` is understood"),
            }
        }
    });
    ended
}
