//! `gradwire coordinator`: the coordinator of one job as a process of its own, for whoever starts the
//! daemons by other means than `gradwire run`, where the first node's daemon hosts it.
//!
//! What the job is comes from the environment; how it is run comes from the settings. Once it serves
//! it prints one line of JSON on standard output.

use std::{collections::HashMap, io::Write};

use gradwire_coordinator::host::{self, HostError, Hosted};
use gradwire_launcher::error::CommandError;
use gradwire_proto::Ending;
use gradwire_settings::Settings;
use gradwire_telemetry::{Endpoint, EndpointConfig};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

fn failed(error: HostError) -> CommandError {
    match error {
        HostError::Config(error) => CommandError::usage(error),
        error => CommandError::failed(error),
    }
}

/// Serves the job until it is over, or SIGTERM or SIGINT.
///
/// # Errors
/// [`CommandError`] for a wrong variable, an address that can't be listened on, and a job that failed.
pub async fn run(
    settings: &Settings,
    environment: &HashMap<String, String>,
) -> Result<(), CommandError> {
    let hosted = Hosted::bind(environment, settings).await.map_err(failed)?;
    let endpoint = Endpoint::start(EndpointConfig {
        service: "coordinator",
        version: gradwire_proto::VERSION,
        listen: settings.coordinator.metrics_listen,
        setting: "coordinator.metrics_listen",
        ready: hosted.readiness(),
    })
    .await
    .map_err(CommandError::failed)?;
    let cancel = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate()).map_err(CommandError::failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(CommandError::failed)?;
    let stop = cancel.clone();
    tokio::spawn(async move {
        tokio::select! { _ = terminate.recv() => {} _ = interrupt.recv() => {} }
        stop.cancel();
    });

    let serving = serde_json::json!({
        "event": "serving",
        "grpc": hosted.address().to_string(),
        "metrics": endpoint.address().to_string(),
    });
    // Whoever started us may not listen; the job does not depend on it.
    let _ = writeln!(std::io::stdout(), "{serving}");
    let outcome = hosted.run(cancel.clone()).await;
    endpoint.stop().await;
    let outcome = outcome.map_err(failed)?;
    if let Some(line) = host::blame(&outcome) {
        let _ = writeln!(std::io::stdout(), "{line}");
    }
    match outcome {
        Ending::Finished => Ok(()),
        // It ended because it was asked to; whoever asked knows.
        Ending::Failed(_) if cancel.is_cancelled() => Ok(()),
        Ending::Failed(failure) => Err(CommandError::failed(failure)),
    }
}
