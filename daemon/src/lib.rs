//! `gradwired`: one per node, between the training processes of the node and all other nodes.
//!
//! The modules, lowest first. A module imports only from those above it in this list.
//!
//! - [`metrics`]: what is measured
//! - `model`: the types that all others share
//! - [`transport`]: bytes between nodes
//! - [`config`]: the configuration of a daemon
//! - `queue`: the tensors that local ranks have submitted
//! - `data`: pieces, and the threads that run them
//! - `ops`: turns an operation into a piece with a schedule
//! - `workers`: the attached training processes, and the messages to them
//! - `control`: the stream to the coordinator, and the execution of its orders
//! - `intake`: the workers' submissions
//!
//! A gradient passes through the modules from the end of this list to its beginning:
//!
//! ```text
//!  workers ──► intake ──► queue ──► control ──► (coordinator)
//!                                      │ Execute
//!                                      ▼
//!                                     ops ──► data ──► transport ◄──► other nodes
//!                                               │
//!  workers ◄────────────── control ◄────────────┘ finished
//! ```
//!
//! Control runs on tokio, data on lane threads, heartbeats on a thread of their own. No lock is
//! held across an await, and control never waits for data.

#![deny(unsafe_code)]

pub mod config;
mod control;
mod data;
mod intake;
pub mod metrics;
mod model;
mod ops;
mod queue;
pub mod transport;
mod workers;

use std::{
    io,
    net::SocketAddr,
    os::{linux::net::SocketAddrExt, unix::net::SocketAddr as UnixAddress},
    sync::Arc,
    time::{Duration, Instant},
};

use gradwire_coordinator::{SessionAcceptor, host::LAST_MESSAGES};
pub use gradwire_proto::Ending;
use gradwire_proto::{Endpoints, Failure, FailureKind};
use gradwire_services::launch::Notice;
use gradwire_shm::flight::FlightMemory;
use gradwire_telemetry::on_scrape;
use rustix::io::Errno;
use tokio::{
    net::{TcpListener, UnixListener},
    sync::mpsc,
};
use tokio_util::sync::CancellationToken;

pub use self::config::DaemonConfig;
use self::{
    control::{
        client, connect::Introduction, dispatch::Dispatcher, heartbeat, node::Node, recording,
    },
    model::{
        hint::resource_hint,
        job::{self, Job},
    },
    transport::line::Line,
};

/// Why a daemon could not start.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// The daemon can't listen on the data plane's address.
    #[error(
        "can't listen on {address} for other nodes: {reason}{hint}; see data.listen",
        hint = resource_hint(reason)
    )]
    Data {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        reason: io::Error,
    },
    /// The workers' socket can't be made.
    #[error("can't listen on {socket:?} for this node's workers: {reason}{hint}")]
    Socket {
        /// The path or `@name`.
        socket: String,
        /// The system's error.
        reason: io::Error,
        /// What to do about the error.
        hint: &'static str,
    },
    /// The system refused a thread or a descriptor.
    #[error("the system refused a resource: {reason}{hint}", hint = resource_hint(reason))]
    System {
        /// The system's error.
        reason: io::Error,
    },
}

impl DaemonError {
    /// Whether another process, or one that has just ended, has an address of this daemon.
    pub fn is_taken(&self) -> bool {
        match self {
            Self::Data { reason, .. } | Self::Socket { reason, .. } | Self::System { reason } => {
                reason.kind() == io::ErrorKind::AddrInUse
            }
        }
    }
}

impl From<io::Error> for DaemonError {
    fn from(reason: io::Error) -> Self {
        Self::System { reason }
    }
}

/// A daemon that listens and has not joined its job yet.
#[derive(Debug)]
pub struct Daemon {
    config: DaemonConfig,
    data: Vec<TcpListener>,
    data_addresses: Endpoints,
    workers: UnixListener,
    notices: Option<mpsc::UnboundedReceiver<Notice>>,
    acceptor: Option<SessionAcceptor>,
    metrics: Option<SocketAddr>,
    recording: Arc<FlightMemory>,
    warn: fn(&str),
}

fn listen_for_workers(socket: &str) -> io::Result<UnixListener> {
    let address = match socket.strip_prefix('@') {
        Some(name) => UnixAddress::from_abstract_name(name)?,
        None => UnixAddress::from_pathname(socket)?,
    };
    let listener = std::os::unix::net::UnixListener::bind_addr(&address)?;
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

impl Daemon {
    /// Listens for workers and for other nodes.
    ///
    /// # Errors
    /// [`DaemonError`] if an address is taken or is not one of this machine's.
    pub async fn bind(config: DaemonConfig) -> Result<Self, DaemonError> {
        let (mut data, mut addresses) = (Vec::new(), Vec::new());
        for address in config.data_listen.iter().copied() {
            let listener = TcpListener::bind(address)
                .await
                .map_err(|reason| DaemonError::Data { address, reason })?;
            let mut own = listener.local_addr()?;
            if own.ip().is_unspecified() {
                // Other nodes reach a listener on all addresses at the node's own address.
                own.set_ip(config.address);
            }
            data.push(listener);
            addresses.push(own);
        }
        let data_addresses = Endpoints::new(addresses).map_err(io::Error::other)?;
        let workers = listen_for_workers(&config.socket).map_err(|reason| DaemonError::Socket {
            socket: config.socket.clone(),
            hint: match Errno::from_io_error(&reason) {
                Some(Errno::ADDRINUSE) => "; another daemon of this job runs on this node",
                _ => resource_hint(&reason),
            },
            reason,
        })?;
        let (job, host) = (config.identity.job.as_str(), config.host.as_str());
        let recording = FlightMemory::create(job, host, config.order, config.slots)
            .map_err(|error| io::Error::new(io::ErrorKind::OutOfMemory, error))?;
        Ok(Self {
            config,
            data,
            data_addresses,
            workers,
            notices: None,
            acceptor: None,
            metrics: None,
            recording: Arc::new(recording),
            warn: |what| tracing::warn!("{what}"),
        })
    }

    /// Passes what the user should know to `warn`. By default it is only logged.
    #[must_use]
    pub fn with_warnings(mut self, warn: fn(&str)) -> Self {
        self.warn = warn;
        self
    }

    /// The flight recording of this node, for the events that this process logs.
    pub fn recording(&self) -> Arc<FlightMemory> {
        self.recording.clone()
    }

    /// The first address on which the data plane listens.
    pub fn data_address(&self) -> SocketAddr {
        self.data_addresses.first()
    }

    /// Receives the agent's reports on the ranks' processes. So the job does not wait for ranks
    /// that never attach, and failures say how a process ended.
    #[must_use]
    pub fn with_agent(mut self, notices: mpsc::UnboundedReceiver<Notice>) -> Self {
        self.notices = Some(notices);
        self
    }

    /// Uses the coordinator of this process directly, without gRPC.
    #[must_use]
    pub fn beside(mut self, acceptor: SessionAcceptor) -> Self {
        self.acceptor = Some(acceptor);
        self
    }

    /// Sets the address of this daemon's metrics; the coordinator lists the addresses of all
    /// daemons.
    #[must_use]
    pub fn shown_at(mut self, metrics: SocketAddr) -> Self {
        self.metrics = Some(metrics);
        self
    }

    /// Takes part in the job until it is over, or until `cancel` ends it for all nodes. `ready` is
    /// called with true once the world has formed, and with false at the end.
    ///
    /// # Errors
    /// [`DaemonError`] if the system refuses a thread or a descriptor.
    pub async fn run(
        self,
        cancel: CancellationToken,
        ready: impl Fn(bool) + Send + Sync + 'static,
    ) -> Result<Ending, DaemonError> {
        let Self {
            config,
            data,
            data_addresses,
            workers,
            mut notices,
            acceptor,
            metrics,
            recording,
            warn,
        } = self;
        let (job, outgoing) = Job::new();
        let (intake, added) = mpsc::unbounded_channel();
        let (resubmit, resubmitted) = mpsc::unbounded_channel();
        let node = Node::new(config.clone(), recording, job.clone(), resubmit, acceptor.clone());
        on_scrape(&node);
        intake::reader::start(Arc::downgrade(&node), added, resubmitted);
        if notices.is_some() {
            node.process_ends.expect(true);
        }
        let stop = CancellationToken::new();
        let accept = intake::attach::serve(node.clone(), intake, workers, stop.clone());
        let accept = node.spawn("the workers' listener", accept);
        heartbeat::start(&node, acceptor.is_some())?;

        let introduction = Introduction {
            job: config.identity.job.clone(),
            secret: config.identity.secret.clone(),
            coordinator: config.coordinator,
            acceptor,
            host: config.host.clone(),
            data_addresses: data_addresses.clone(),
            metrics_address: metrics,
            slots: config.slots,
            order: config.order,
            epoch: config.named_epoch(),
            rack: config.rack.clone(),
            line_mbit: Line::of(&data_addresses, config.line_rate).mbit(),
            start_timeout: config.start_timeout,
            patience: config.patience,
            retransmission: config.retransmission,
            recovery: config.recovery,
        };
        let mut dispatcher =
            Dispatcher { node: node.clone(), listeners: Some(data), cancel: stop.clone() };
        let mut phase = job.watch();
        let announce = async {
            let formed = |phase: &job::Phase| matches!(phase, job::Phase::Running(_));
            let has_formed = phase.wait_for(formed).await.is_ok();
            if has_formed {
                ready(true);
            }
            handle_notices(&node, &mut notices).await;
        };
        let cancelled = async {
            cancel.cancelled().await;
            node.terminated();
            std::future::pending::<()>().await;
        };
        let liveness = node.liveness.clone();
        let negotiated = client::negotiate(
            introduction,
            job.clone(),
            outgoing,
            liveness,
            node.coordinator_ended.clone(),
            &mut dispatcher,
        );
        let farewell = tokio::select! {
            farewell = negotiated => farewell,
            () = announce => None,
            () = cancelled => None,
        };
        ready(false);

        // First stop all access to the workers' memory, then notify them.
        node.stop_lanes().await;
        let unfinished = || Failure::new(FailureKind::Internal, "the negotiation ended early");
        let ending = job.ending().unwrap_or_else(|| Ending::Failed(unfinished()));
        let works_alone = !node.liveness.has_begun() && node.acceptor.is_some();
        if ending == Ending::Finished && works_alone && config.elastic.is_none() {
            tracing::warn!("no process of this job called init(), so each of them ran on its own");
        }
        if let Ending::Failed(failure) = &ending {
            node.abort_workers(failure);
        }
        let saving = recording::ended(&node, &ending);
        // The workers have the grace period to read the cause and leave. After a failure, workers
        // that attach late receive the cause, too (TELL). The daemon does not wait for them if this
        // host is being stopped, or if no agent would report that they will not attach. If an agent
        // has started them, only their end or that of this host ends the wait: the launcher limits
        // it (WAIT). In an elastic job they go on with its successor, which begins when this daemon
        // has ended.
        let failed = ending != Ending::Finished;
        let makes_way = failed && config.elastic.is_some();
        let late = failed && notices.is_some();
        let limit = if makes_way { config.grace.min(LAST_MESSAGES) } else { config.grace };
        let deadline = Instant::now() + limit;
        let is_needed = || {
            let in_time = Instant::now() < deadline;
            if makes_way {
                return in_time && node.workers.are_owed_messages();
            }
            let may_come = in_time || node.process_ends.any_runs();
            let is_late = node.workers.is_any_missing();
            let serves = late && !cancel.is_cancelled() && may_come && is_late;
            serves || in_time && node.workers.any_there()
        };
        let gone = async {
            while is_needed() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::select! { () = gone => {} () = handle_notices(&node, &mut notices) => {} }
        if makes_way {
            node.workers.all().iter().for_each(|worker| worker.outbox.hang_up());
        }
        stop.cancel();
        // A panic of the task has already been reported.
        let _ = accept.await;
        if let Some(farewell) = farewell {
            let _ = farewell.await;
        }
        if let Some(saving) = saving
            && let Err(why) = saving.wait().await
        {
            warn(&why);
        }
        if let Some(path) = Some(&config.socket).filter(|socket| !socket.starts_with('@')) {
            // CLEAN: a socket in the file system outlives its process.
            let _ = std::fs::remove_file(path);
        }
        Ok(ending)
    }
}

/// Handles the agent's reports; never returns.
async fn handle_notices(node: &Node, notices: &mut Option<mpsc::UnboundedReceiver<Notice>>) {
    if let Some(notices) = notices {
        while let Some(notice) = notices.recv().await {
            node.handle_notice(notice);
        }
        node.process_ends.expect(false);
    }
    std::future::pending().await
}
