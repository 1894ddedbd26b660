//! The coordinator of a job, inside a daemon or as its own process. The launcher's variables
//! describe the job; the settings describe how it runs.
//!
//! The daemon of the first node hosts the coordinator, so submissions from that node's ranks wake
//! no other process. For all other nodes it makes no difference where it runs.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use gradwire_proto::{Ending, Epoch, JobId, Secret};
use gradwire_settings::{
    Settings,
    variables::{VariableError, Variables},
};
use gradwire_telemetry::{Readiness, Target};
use tokio::{net::TcpListener, sync::watch};
use tokio_util::sync::CancellationToken;

use crate::{
    error::CoordinatorError,
    inspection::Inspection,
    model::Phase,
    runtime::{CoordinatorConfig, Health},
    server::Coordinator,
    session::SessionAcceptor,
};

/// How long the coordinator and the daemons of an elastic job try to send their last messages.
/// Their successors can't begin before they have ended.
pub const LAST_MESSAGES: Duration = Duration::from_secs(1);

/// Why a coordinator can't be hosted.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// A variable or setting is missing or invalid.
    #[error(transparent)]
    Config(#[from] VariableError),
    /// Its address can't be bound.
    #[error(
        "the coordinator can't listen on {address} ({setting}): {reason}; choose another address \
         or port with coordinator.listen, or GRADWIRE_RENDEZVOUS for ranks of another launcher"
    )]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Where the address comes from.
        setting: &'static str,
        /// The system's error.
        reason: io::Error,
    },
    /// It can't serve.
    #[error(transparent)]
    Serve(#[from] CoordinatorError),
}

impl HostError {
    /// Whether another process, or one that has just ended, has its address.
    pub fn is_taken(&self) -> bool {
        matches!(self, Self::Listen { reason, .. } if reason.kind() == io::ErrorKind::AddrInUse)
    }
}

/// The job's variables, which the launcher sets.
#[derive(Debug)]
struct JobVariables {
    job: JobId,
    secret: Secret,
    nodes: u32,
    /// How many nodes, the last ones, have no ranks.
    servers: u32,
    ranks: u32,
    /// In an elastic job.
    epoch: Option<Epoch>,
    bind: IpAddr,
}

impl JobVariables {
    /// Reads and checks the variables (TRUST); an error never shows the secret.
    fn read(variables: &HashMap<String, String>) -> Result<Self, VariableError> {
        let env = Variables(variables);
        // A daemon that hosts the coordinator has its own address.
        let bind = if variables.contains_key("GRADWIRE_BIND") {
            "GRADWIRE_BIND"
        } else {
            "GRADWIRE_ADDRESS"
        };
        Ok(Self {
            job: env.read("GRADWIRE_JOB", JobId::new)?,
            secret: env.secret("GRADWIRE_SECRET", Secret::from_hex)?,
            nodes: env.parse("GRADWIRE_NODES", "expected a number")?,
            servers: match variables.contains_key("GRADWIRE_SERVERS") {
                true => env.parse("GRADWIRE_SERVERS", "expected a number")?,
                false => 0,
            },
            ranks: env.parse("GRADWIRE_RANKS", "expected a number")?,
            epoch: env.epoch()?,
            bind: env.parse(bind, "expected an IP address")?,
        })
    }
}

fn configuration(
    job: &JobVariables,
    settings: &Settings,
    health: watch::Sender<Health>,
) -> Result<CoordinatorConfig, VariableError> {
    let nodes = (job.nodes, job.servers);
    let mut config = CoordinatorConfig::new(job.job.clone(), job.secret.clone(), nodes, settings)?;
    config.engine.ranks = Some(job.ranks);
    if let Some(epoch) = job.epoch {
        (config.engine.epoch, config.engine.elastic) = (epoch, true);
        config.grace = config.grace.min(LAST_MESSAGES);
    }
    config.health = Some(health);
    Ok(config)
}

fn readiness(health: &Health) -> Readiness {
    match health.phase {
        Phase::Running => Readiness::Ready,
        phase => Readiness::NotReady(format!("{}: {}", phase.name(), health.reason)),
    }
}

/// A coordinator that is listening.
#[derive(Debug)]
pub struct Hosted {
    coordinator: Coordinator,
    job: JobId,
    address: SocketAddr,
    readiness: watch::Receiver<Readiness>,
    targets: watch::Receiver<Arc<[Target]>>,
}

impl Hosted {
    /// Listens on `coordinator.listen`, or on a free port of the address in the variable
    /// `GRADWIRE_BIND` or `GRADWIRE_ADDRESS`.
    ///
    /// # Errors
    /// [`HostError`] with the invalid variable, setting or address.
    pub async fn bind(
        variables: &HashMap<String, String>,
        settings: &Settings,
    ) -> Result<Self, HostError> {
        let job = JobVariables::read(variables)?;
        let (address, setting) = match settings.coordinator.listen {
            Some(address) => (address, "coordinator.listen"),
            None => ((job.bind, 0).into(), "the first host's address"),
        };
        let failed = |reason| HostError::Listen { address, setting, reason };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let mut address = listener.local_addr().map_err(failed)?;
        if address.ip().is_unspecified() {
            // A listener on all addresses is reached at the host's own address.
            address.set_ip(job.bind);
        }

        let reason = "no node has joined yet".to_owned();
        let first = Health { phase: Phase::Forming, reason, daemons: Arc::default() };
        let (ready, readiness_now) = watch::channel(readiness(&first));
        let (daemons, targets) = watch::channel(Arc::default());
        let (health_in, mut health) = watch::channel(first);
        tokio::spawn(async move {
            while health.changed().await.is_ok() {
                let now = health.borrow_and_update().clone();
                ready.send_replace(readiness(&now));
                daemons.send_replace(now.daemons);
            }
        });
        let coordinator = Coordinator::new(configuration(&job, settings, health_in)?, listener)?;
        Ok(Self { coordinator, job: job.job, address, readiness: readiness_now, targets })
    }

    /// The job.
    pub fn job(&self) -> &JobId {
        &self.job
    }

    /// The address at which daemons of other nodes reach it.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether the job runs, for a readiness endpoint.
    pub fn readiness(&self) -> watch::Receiver<Readiness> {
        self.readiness.clone()
    }

    /// The metrics endpoints of the job's daemons, once all have joined.
    pub fn targets(&self) -> watch::Receiver<Arc<[Target]>> {
        self.targets.clone()
    }

    /// The view of the job, for viewers.
    pub fn inspection(&self) -> Arc<Inspection> {
        self.coordinator.inspection()
    }

    /// Accepts the session of the daemon in this process.
    pub fn acceptor(&self) -> SessionAcceptor {
        self.coordinator.acceptor()
    }

    /// Serves the job until it is over or `cancel` is cancelled.
    ///
    /// # Errors
    /// [`HostError::Serve`] if it can't serve; a failure of the job is an [`Ending`].
    pub async fn run(self, cancel: CancellationToken) -> Result<Ending, HostError> {
        Ok(self.coordinator.run(cancel).await?)
    }
}

#[cfg(test)]
mod tests {
    use gradwire_collectives::{Algorithm, Rules};
    use gradwire_proto::MAX_LANES;
    use gradwire_settings::{Algorithms, KEYS, Kind};

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
    fn invalid_variables_are_named_without_secrets() {
        assert_eq!(JobVariables::read(&variables()).unwrap().nodes, 2);
        for name in variables().keys() {
            let mut without = variables();
            without.remove(name);
            let error = JobVariables::read(&without).unwrap_err();
            let missing = if name == "GRADWIRE_BIND" { "GRADWIRE_ADDRESS" } else { name };
            assert!(error.to_string().starts_with(&format!("{missing} is not set")), "{error}");
            let mut wrong = variables();
            wrong.insert(name.clone(), "zonk!".to_owned());
            let error = JobVariables::read(&wrong).unwrap_err().to_string();
            assert!(error.starts_with(&format!("invalid {name}=")), "{error}");
            assert_eq!(error.contains("zonk"), name != "GRADWIRE_SECRET", "{error}");
        }
    }

    /// The protocol and the setting have the same limit.
    #[test]
    fn lanes_have_one_limit() {
        let key = KEYS.iter().find(|key| key.name == "data.lanes").unwrap();
        assert!(matches!(key.kind, Kind::Number { min: 1, max } if max == u64::from(MAX_LANES)));
    }

    #[test]
    fn settings_become_valid_engine_configurations() {
        let (health, _) = watch::channel(Health {
            phase: Phase::Forming,
            reason: String::new(),
            daemons: Arc::default(),
        });
        let job = JobVariables::read(&variables()).unwrap();
        let config = configuration(&job, &Settings::default(), health.clone()).unwrap();
        assert!(config.engine.validate().is_ok());
        let names = Algorithm::ALL.iter().map(|known| known.name());
        for name in names.chain(["auto", "circulant(radix=4)", "allreduce:1M-=^ring"]) {
            let mut settings = Settings::default();
            settings.negotiation.algorithm = Algorithms(Rules::parse(name).unwrap());
            settings.negotiation.max_tensors = 16_777_216;
            let config = configuration(&job, &settings, health.clone()).unwrap();
            assert_eq!(config.engine.rules, settings.negotiation.algorithm.0);
            assert!(config.engine.validate().is_ok(), "{name}");
        }
    }
}
