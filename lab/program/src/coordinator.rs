//! `gradwire-lab coordinator`: runs the coordinator of one job as a separate process. In a job of
//! `gradwire run`, the first node's daemon hosts it.
//!
//! The environment describes the job; the settings say how to run it. Once it serves, it prints one
//! line of JSON on standard output.

use std::{
    collections::HashMap,
    io::{self, Write},
};

use gradwire_coordinator::host::{HostError, Hosted};
use gradwire_launcher::error::CommandError;
use gradwire_proto::Ending;
use gradwire_services::launch::{ServiceReport, to_line};
use gradwire_settings::Settings;
use gradwire_telemetry::{Endpoint, EndpointConfig, OtlpConfig};
use gradwire_viewer::{access::Access, pages::router, spans::Spans};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

fn failed(error: HostError) -> CommandError {
    match error {
        HostError::Config(error) => CommandError::usage(error),
        error => CommandError::failed(error),
    }
}

/// Prints a report for the parent process. The job goes on even if nothing reads it.
fn report(report: &ServiceReport) {
    let _ = io::stdout().write_all(to_line(report).as_bytes());
}

/// Serves the job until it is over, or until SIGTERM or SIGINT.
///
/// # Errors
/// [`CommandError`] for a wrong variable, an unusable listen address, or a failed job.
pub async fn run(
    settings: &Settings,
    environment: &HashMap<String, String>,
) -> Result<(), CommandError> {
    let hosted = Hosted::bind(environment, settings).await.map_err(failed)?;
    let reached_at = hosted.address().ip();
    let host = environment.get("GRADWIRE_HOST").cloned().unwrap_or_else(|| reached_at.to_string());
    let listen = settings.coordinator.metrics_listen.ip;
    let access = Access::of_this_host(listen, &host, &settings.metrics.token_file)
        .map_err(CommandError::usage)?;
    let otlp = OtlpConfig::new(&settings.otlp.endpoint, settings.otlp.interval);
    let endpoint = Endpoint::start(EndpointConfig {
        otlp: otlp.clone(),
        pages: Some(router(hosted.inspection(), access)),
        or_any: false,
        service: "coordinator",
        version: gradwire_proto::VERSION,
        job: hosted.job().to_string(),
        host,
        listen,
        ports: settings.coordinator.metrics_listen.ports.clone(),
        setting: "coordinator.metrics_listen",
        reached_at,
        coordinator: hosted.address(),
        ready: hosted.readiness(),
        targets: Some(hosted.targets()),
        lists_itself: true,
    })
    .map_err(CommandError::failed)?;
    hosted.inspection().shown_at(endpoint.address());
    let cancel = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate()).map_err(CommandError::failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(CommandError::failed)?;
    let stop = cancel.clone();
    tokio::spawn(async move {
        tokio::select! { _ = terminate.recv() => {} _ = interrupt.recv() => {} }
        stop.cancel();
    });

    report(&ServiceReport::Serving {
        metrics: endpoint.address(),
        data: None,
        grpc: Some(hosted.address()),
    });
    let spans = match (otlp, settings.otlp.sample_steps) {
        (Some(otlp), every @ 1..) => {
            let spans = Spans::start(hosted.inspection(), otlp, every);
            Some(spans.map_err(CommandError::failed)?)
        }
        _ => None,
    };
    let ending = hosted.run(cancel.clone()).await;
    if let Some(spans) = spans {
        spans.finish().await;
    }
    endpoint.stop().await;
    let ending = ending.map_err(failed)?;
    if let Ending::Failed(failure) = &ending {
        report(&ServiceReport::Failed { failure: failure.clone() });
    }
    match ending {
        Ending::Finished => Ok(()),
        // It was asked to end.
        Ending::Failed(_) if cancel.is_cancelled() => Ok(()),
        Ending::Failed(failure) => Err(CommandError::failed(failure)),
    }
}
