//! A coordinator on its socket: the services, the sessions and the runtime, until the job is over.

use std::{sync::Arc, time::Duration};

use gradwire_proto::Ending;
use tokio::{
    net::TcpListener,
    sync::{mpsc, oneshot},
    time::{Instant, timeout, timeout_at},
};
use tokio_util::{
    sync::CancellationToken,
    task::{AbortOnDropHandle, TaskTracker},
};

use crate::{
    accept,
    error::CoordinatorError,
    grpc,
    heartbeat::Heartbeats,
    inbox::Inbound,
    inspection::Inspection,
    metrics,
    permits::Permits,
    runtime::{CoordinatorConfig, Runtime},
    session::{SessionAcceptor, SessionContext},
    traces::Traces,
};

/// The most events that wait for the engine. Streams are not read while there is no room.
const INBOX: usize = 256;

/// How long connections may take to close after their last session.
const CLOSING: Duration = Duration::from_millis(100);

/// The longest grace period, whatever is configured.
const MAX_GRACE: Duration = Duration::from_secs(3600);

/// Serves one job on a socket until it is over or `cancel` is cancelled, and every node has been
/// notified. The notification takes at most [`CoordinatorConfig::grace`].
///
/// # Errors
/// [`CoordinatorError`] if the configuration is out of range or the socket can't be served. A
/// failure of the job is an [`Ending`], not an error.
pub async fn run(
    config: CoordinatorConfig,
    listener: TcpListener,
    cancel: CancellationToken,
) -> Result<Ending, CoordinatorError> {
    Coordinator::new(config, listener)?.run(cancel).await
}

/// A coordinator to which nodes can already connect. [`Coordinator::run`] answers them.
#[derive(Debug)]
pub struct Coordinator {
    config: CoordinatorConfig,
    listener: TcpListener,
    inbox: mpsc::Receiver<Inbound>,
    sessions: TaskTracker,
    stop_sessions: CancellationToken,
    acceptor: SessionAcceptor,
    inspection: Arc<Inspection>,
}

impl Coordinator {
    /// A coordinator for nodes that connect to this socket, or through [`Coordinator::acceptor`].
    ///
    /// # Errors
    /// [`CoordinatorError`] if the configuration is out of range.
    pub fn new(config: CoordinatorConfig, listener: TcpListener) -> Result<Self, CoordinatorError> {
        config.engine.validate()?;
        let (sender, inbox) = mpsc::channel(INBOX);
        let sessions = TaskTracker::new();
        let stop_sessions = CancellationToken::new();
        let traces = Arc::<Traces>::default();
        let inspection = Inspection::new(
            sender.clone(),
            traces.clone(),
            Permits::new(config.secret.clone(), config.engine.job.clone()),
        );
        let context = SessionContext {
            inbox: sender,
            secret: config.secret.clone(),
            join_timeout: config.join_timeout,
            epoch: config.engine.named_epoch(),
            recovers: config.engine.return_timeout.is_some(),
            traces,
            sessions: sessions.clone(),
            stop: stop_sessions.clone(),
        };
        Ok(Self {
            config,
            listener,
            inbox,
            sessions,
            stop_sessions,
            acceptor: SessionAcceptor::new(context),
            inspection: Arc::new(inspection),
        })
    }

    /// Accepts the session of a node in this process.
    pub fn acceptor(&self) -> SessionAcceptor {
        self.acceptor.clone()
    }

    /// The view of the job, for viewers.
    pub fn inspection(&self) -> Arc<Inspection> {
        self.inspection.clone()
    }

    /// Serves until the job is over or `cancel` is cancelled; see [`run`].
    ///
    /// # Errors
    /// [`CoordinatorError`] if the socket can't be served.
    pub async fn run(self, cancel: CancellationToken) -> Result<Ending, CoordinatorError> {
        let Self { config, listener, mut inbox, sessions, stop_sessions, acceptor, inspection } =
            self;
        metrics::start();
        let inbox_in = acceptor.context().inbox.clone();
        let traces = acceptor.context().traces.clone();
        let address = listener.local_addr()?;
        let (job, nodes) = (&config.engine.job, config.engine.nodes);
        tracing::info!(%address, %job, nodes, "coordinator is serving");

        let stop_server = CancellationToken::new();
        // After an outage, a stream must continue before the timeout. Accepted streams inherit the
        // options of the listener.
        let limits = config.engine.silence();
        let limited = gradwire_net::limit_retransmission_interval(&listener, limits.retransmission);
        if let Err(error) = limited {
            tracing::debug!(%error, "can't limit the retransmission interval");
        }
        let (job, secret) = (config.engine.job.clone(), config.secret.clone());
        let beats = Heartbeats::bind(
            address,
            job,
            secret,
            config.engine.epoch,
            acceptor.context().inbox.clone(),
        );
        let _beats = match beats.await {
            Ok(beats) => Some(AbortOnDropHandle::new(tokio::spawn(beats.serve()))),
            Err(error) => {
                let what = "no heartbeats over UDP: only shorter outages are survived";
                tracing::warn!(%address, %error, "{what}");
                None
            }
        };
        let _stop_server = stop_server.clone().drop_guard();
        let (nodes, mut viewers) = accept::start(
            listener,
            config.engine.nodes,
            acceptor.clone(),
            inspection.clone(),
            stop_server.clone(),
        )?;
        let stopped = stop_server.clone().cancelled_owned();
        let server = grpc::serve_nodes(acceptor, nodes, stopped);
        let mut server = AbortOnDropHandle::new(tokio::spawn(server));

        let grace = config.grace.min(MAX_GRACE);
        let mut runtime = Runtime::new(config, inbox_in, traces, inspection.timeline());
        let outcome = tokio::select! {
            outcome = runtime.drive(&mut inbox, cancel) => outcome,
            error = ended(&mut server, &mut viewers) => {
                stop_sessions.cancel();
                inspection.end(None);
                return Err(error);
            }
        };
        inspection.end(Some(runtime.snapshot()));
        // Nodes close their streams once they know that the job is over.
        let until = Instant::now() + grace;
        runtime.keep_times().await;
        runtime.finish(&mut inbox, until).await;
        sessions.close();
        if timeout_at(until, sessions.wait()).await.is_err() {
            tracing::warn!(
                ?grace,
                "some nodes did not close their streams within the grace period"
            );
        }
        stop_sessions.cancel();
        stop_server.cancel();
        let until = until.max(Instant::now() + CLOSING);
        // The rest of both servers ends with their handles.
        let _ = timeout_at(until, async {
            // Its sessions have ended. A connection that another one has replaced may be dead.
            let _ = timeout(CLOSING, &mut server).await;
            let _ = (&mut viewers).await;
        })
        .await;
        Ok(outcome)
    }
}

/// Resolves once a server has ended by itself.
async fn ended(
    nodes: &mut AbortOnDropHandle<Result<(), tonic::transport::Error>>,
    viewers: &mut oneshot::Receiver<String>,
) -> CoordinatorError {
    tokio::select! {
        ended = nodes => match ended {
            Ok(Err(error)) => error.into(),
            Ok(Ok(())) => CoordinatorError::Task { task: "server", why: "it stopped".into() },
            Err(panic) => CoordinatorError::Task { task: "server", why: panic.to_string() },
        },
        ended = viewers => {
            let why = ended.unwrap_or_else(|_| "its thread stopped".to_owned());
            CoordinatorError::Task { task: "server of viewers", why }
        }
    }
}
