//! `gradwire coordinator`: the coordinator of one job as a process.
//!
//! What the job is comes from the environment, where the launcher puts it; how it is run comes
//! from the settings. Once it serves it prints one line of JSON on standard output.

use std::{
    collections::HashMap,
    io::Write,
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

use gradwire_collectives::Algorithm;
use gradwire_coordinator::{CoordinatorConfig, EngineConfig, Health, Outcome, Phase};
use gradwire_proto::{JobId, Secret};
use gradwire_settings::Settings;
use gradwire_telemetry::{Endpoint, EndpointConfig, Readiness};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::watch,
};
use tokio_util::sync::CancellationToken;

use crate::error::CliError;

/// What the launcher says of the job.
#[derive(Debug)]
struct JobVariables {
    job: JobId,
    secret: Secret,
    nodes: u32,
    ranks: u32,
    bind: IpAddr,
}

impl JobVariables {
    /// Reads and checks them (TRUST); an error names the variable, never the secret.
    fn read(environment: &HashMap<String, String>) -> Result<Self, CliError> {
        let get = |name: &str| {
            environment.get(name).map(String::as_str).ok_or_else(|| {
                CliError::usage(format!("{name} is not set"))
                    .hint("gradwire run sets it; a coordinator by hand needs it too")
            })
        };
        let wrong =
            |name: &str, why: &dyn std::fmt::Display| CliError::usage(format!("{name}: {why}"));
        Ok(Self {
            job: JobId::new(get("GRADWIRE_JOB")?).map_err(|e| wrong("GRADWIRE_JOB", &e))?,
            secret: Secret::from_hex(get("GRADWIRE_SECRET")?)
                .map_err(|e| wrong("GRADWIRE_SECRET", &e))?,
            nodes: parse("GRADWIRE_NODES", get("GRADWIRE_NODES")?)?,
            ranks: parse("GRADWIRE_RANKS", get("GRADWIRE_RANKS")?)?,
            bind: parse("GRADWIRE_BIND", get("GRADWIRE_BIND")?)?,
        })
    }
}

fn parse<T: FromStr<Err: std::fmt::Display>>(name: &str, text: &str) -> Result<T, CliError> {
    text.parse().map_err(|error| CliError::usage(format!("{name} = {text:?}: {error}")))
}

fn configuration(
    job: &JobVariables,
    settings: &Settings,
    health: watch::Sender<Health>,
) -> Result<CoordinatorConfig, CliError> {
    let negotiation = &settings.negotiation;
    let algorithm = match negotiation.algorithm.as_str() {
        "auto" => None,
        name => Some(Algorithm::parse(name).map_err(CliError::usage)?),
    };
    let defaults = CoordinatorConfig::new(job.job.clone(), job.secret.clone(), job.nodes);
    let engine = EngineConfig {
        ranks: Some(job.ranks),
        lanes: settings.data.lanes,
        heartbeat_interval: settings.heartbeat.interval,
        heartbeat_timeout: settings.heartbeat.timeout,
        start_timeout: settings.launch.start_timeout,
        cause_window: settings.coordinator.cause_window,
        stall_warning: negotiation.stall_warning,
        piece_bytes: negotiation.piece_bytes,
        credit_pieces: negotiation.credit_pieces,
        max_tensors: negotiation.max_tensors,
        max_pending: defaults.engine.max_pending.max(negotiation.max_tensors),
        algorithm,
        ..defaults.engine
    };
    let grace = settings.launch.grace;
    Ok(CoordinatorConfig { engine, grace, health: Some(health), ..defaults })
}

fn readiness(health: &Health) -> Readiness {
    match health.phase {
        Phase::Running => Readiness::Ready,
        phase => Readiness::NotReady(format!("{}: {}", phase.name(), health.reason)),
    }
}

async fn bind(address: SocketAddr, setting: &str) -> Result<TcpListener, CliError> {
    TcpListener::bind(address).await.map_err(|error| {
        CliError::failed(format!("the coordinator can't listen on {address} ({setting}): {error}"))
            .hint("choose another address or port with coordinator.listen")
    })
}

/// Serves the job until it is over, or SIGTERM or SIGINT.
///
/// # Errors
/// [`CliError`] for a wrong variable, an address that can't be listened on, and a job that failed.
pub async fn run(
    settings: &Settings,
    environment: &HashMap<String, String>,
) -> Result<(), CliError> {
    let job = JobVariables::read(environment)?;
    let listen = settings.coordinator.listen;
    let listener = match listen {
        Some(address) => bind(address, "coordinator.listen").await?,
        None => bind((job.bind, 0).into(), "GRADWIRE_BIND").await?,
    };
    let address = listener.local_addr().map_err(CliError::failed)?;

    let first = Health { phase: Phase::Forming, reason: "no node has joined yet".to_owned() };
    let (ready_in, ready) = watch::channel(readiness(&first));
    let (health_in, mut health) = watch::channel(first);
    tokio::spawn(async move {
        while health.changed().await.is_ok() {
            let now = readiness(&health.borrow_and_update());
            ready_in.send_replace(now);
        }
    });
    let endpoint = Endpoint::start(EndpointConfig {
        service: "coordinator",
        version: gradwire_proto::VERSION,
        listen: settings.coordinator.metrics_listen,
        setting: "coordinator.metrics_listen",
        ready,
    })
    .await
    .map_err(CliError::failed)?;

    let config = configuration(&job, settings, health_in)?;
    let cancel = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate()).map_err(CliError::failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(CliError::failed)?;
    let stop = cancel.clone();
    tokio::spawn(async move {
        tokio::select! { _ = terminate.recv() => {} _ = interrupt.recv() => {} }
        stop.cancel();
    });

    let serving = serde_json::json!({
        "event": "serving",
        "grpc": address.to_string(),
        "metrics": endpoint.address().to_string(),
    });
    // Whoever started us may not listen; the job does not depend on it.
    let _ = writeln!(std::io::stdout(), "{serving}");
    let outcome = gradwire_coordinator::run(config, listener, cancel.clone()).await;
    endpoint.stop().await;
    match outcome.map_err(CliError::failed)? {
        Outcome::Finished => Ok(()),
        // It ended because it was asked to; whoever asked knows.
        Outcome::Failed(_) if cancel.is_cancelled() => Ok(()),
        Outcome::Failed(failure) => {
            if let Some(rank) = failure.rank {
                let failed = serde_json::json!({ "event": "failed", "rank": rank.0 });
                let _ = writeln!(std::io::stdout(), "{failed}");
            }
            Err(CliError::failed(failure))
        }
    }
}

#[cfg(test)]
mod tests {
    use gradwire_settings::{KEYS, Kind};

    use super::*;

    fn variables() -> HashMap<String, String> {
        [
            ("GRADWIRE_JOB", "j1".to_owned()),
            ("GRADWIRE_SECRET", "ab".repeat(32)),
            ("GRADWIRE_NODES", "2".to_owned()),
            ("GRADWIRE_RANKS", "4".to_owned()),
            ("GRADWIRE_BIND", "127.0.0.1".to_owned()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into()
    }

    #[test]
    fn a_wrong_variable_is_named_and_the_secret_is_not_shown() {
        assert_eq!(JobVariables::read(&variables()).unwrap().nodes, 2);
        for name in variables().keys() {
            let mut without = variables();
            without.remove(name);
            let error = JobVariables::read(&without).unwrap_err();
            assert_eq!(error.what, format!("{name} is not set"));
            let mut wrong = variables();
            wrong.insert(name.clone(), "zonk!".to_owned());
            let error = JobVariables::read(&wrong).unwrap_err();
            assert!(error.what.starts_with(name.as_str()), "{error}");
            assert_eq!(error.what.contains("zonk"), name != "GRADWIRE_SECRET", "{error}");
        }
    }

    #[test]
    fn every_setting_the_engine_can_be_given_is_valid() {
        let (health, _) = watch::channel(Health { phase: Phase::Forming, reason: String::new() });
        let job = JobVariables::read(&variables()).unwrap();
        let config = configuration(&job, &Settings::default(), health.clone()).unwrap();
        assert!(config.engine.validate().is_ok());
        let key = KEYS.iter().find(|key| key.name == "negotiation.algorithm").unwrap();
        let Kind::Choice(names) = key.kind else { panic!("{key:?}") };
        for name in names {
            let mut settings = Settings::default();
            settings.negotiation.algorithm = (*name).to_owned();
            settings.negotiation.max_tensors = 16_777_216;
            let config = configuration(&job, &settings, health.clone()).unwrap();
            assert_eq!(config.engine.algorithm.is_none(), *name == "auto");
            assert!(config.engine.validate().is_ok(), "{name}");
        }
    }
}
