//! The HTTP server for the metrics of this process, and for pages about its job.
//!
//! It has its own thread (`gw-http`). So it answers while the threads of the service are busy, and
//! a slow reader does not delay operations.

use std::{
    collections::BTreeMap,
    io::{self, ErrorKind},
    net::{IpAddr, SocketAddr, TcpListener},
    ops::RangeInclusive,
    sync::Arc,
    time::Duration,
};

use axum::{
    Router,
    http::{StatusCode, header::CONTENT_TYPE},
    response::IntoResponse,
    routing::get,
};
use rustix::io::Errno;
use serde_json::{Value, json};
use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;

use crate::{
    TelemetryError,
    catalog::{GROUPS, HOST, JOB, PROCESS},
    collect,
    guard::Guard,
    otlp::{self, Origin, OtlpConfig},
    process, reactor,
    registry::Recorder,
};

/// How long open requests may take to end when the endpoint stops.
const STOP: Duration = Duration::from_secs(1);

/// Whether work may be sent to a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Readiness {
    /// Work may be sent.
    Ready,
    /// Work may not be sent, for this reason.
    NotReady(String),
}

/// The configuration of an [`Endpoint`].
#[derive(Debug, Clone)]
pub struct EndpointConfig {
    /// The service, as a label of `gradwire_build_info`: `gradwired` or `coordinator`.
    pub service: &'static str,
    /// Its release.
    pub version: &'static str,
    /// The job, as a label of every series.
    pub job: String,
    /// The host, as a label of every series.
    pub host: String,
    /// Where to listen.
    pub listen: IpAddr,
    /// The first free port of these is used; with port 0 the system chooses one.
    pub ports: RangeInclusive<u16>,
    /// Whether to use any other port if all of these are taken.
    pub or_any: bool,
    /// The setting with the address and the ports, for errors.
    pub setting: &'static str,
    /// The address of this host for others, if the endpoint listens on all addresses.
    pub reached_at: IpAddr,
    /// The address of the job's coordinator, for `/coordinator`.
    pub coordinator: SocketAddr,
    /// The state that `/readyz` reports.
    pub ready: watch::Receiver<Readiness>,
    /// What `/sd` lists, if this is the coordinator.
    pub targets: Option<watch::Receiver<Arc<[Target]>>>,
    /// Whether `/sd` also lists this endpoint, because it is not the endpoint of a daemon.
    pub lists_itself: bool,
    /// Where the metrics are also sent.
    pub otlp: Option<OtlpConfig>,
    /// The pages about the job, if this is the coordinator: `/` and below.
    pub pages: Option<Router>,
}

/// An endpoint with metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The address.
    pub address: SocketAddr,
    /// Labels that distinguish it from others.
    pub labels: BTreeMap<&'static str, String>,
}

/// A running endpoint: `/metrics`, `/healthz`, `/readyz`, `/coordinator`, `/sd`, and the pages
/// about the job. Dropping it stops it.
#[derive(Debug)]
pub struct Endpoint {
    address: SocketAddr,
    cancel: CancellationToken,
    /// Closed when the thread ends.
    ended: oneshot::Receiver<()>,
}

impl Endpoint {
    /// Installs the process's metrics recorder (once per process, for all its endpoints), listens,
    /// and serves on its own thread.
    pub fn start(config: EndpointConfig) -> Result<Self, TelemetryError> {
        let labels = [(JOB.name, config.job.as_str()), (HOST.name, config.host.as_str())];
        let recorder = Recorder::install(&labels, GROUPS)?;
        PROCESS.build_info.series([config.service, config.version]).set(1.0);
        let listener = listen(&config)?;
        let mut address = listener.local_addr().map_err(|reason| refused(&config, reason))?;
        if address.ip().is_unspecified() {
            address.set_ip(config.reached_at);
        }

        let cancel = CancellationToken::new();
        let (end, ended) = oneshot::channel();
        let stop = cancel.clone();
        let run = move || async move {
            let _end = end;
            let send = config.otlp.clone().map(|otlp| {
                let EndpointConfig { service, version, job, host, .. } = config.clone();
                let origin = Origin { service, version, job, host };
                otlp::send(recorder.clone(), otlp, origin, stop.clone())
            });
            let router = router(recorder, config, address);
            serve(listener, router, send, stop).await;
        };
        reactor::start("gw-http", run).map_err(|reason| TelemetryError::Thread { reason })?;
        tracing::info!(%address, "serving metrics");
        Ok(Self { address, cancel, ended })
    }

    /// Where others reach it, with the port that is used.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops listening and waits, for at most a second, until open requests are answered.
    pub async fn stop(mut self) {
        self.cancel.cancel();
        // Always an error: the thread drops the sender at its end.
        let _ = (&mut self.ended).await;
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

/// Listens on the first free port.
fn listen(config: &EndpointConfig) -> Result<TcpListener, TelemetryError> {
    let mut last = io::Error::from(ErrorKind::AddrInUse);
    let any = config.or_any.then_some(0);
    for port in config.ports.clone().chain(any) {
        let bound = TcpListener::bind((config.listen, port));
        match bound.and_then(|listener| listener.set_nonblocking(true).map(|()| listener)) {
            Ok(listener) => {
                if Some(port) == any {
                    let (setting, ports) = (config.setting, &config.ports);
                    tracing::warn!(setting, ?ports, "these ports are taken: using another one");
                }
                return Ok(listener);
            }
            Err(taken) if taken.kind() == ErrorKind::AddrInUse => last = taken,
            Err(reason) => return Err(refused(config, reason)),
        }
    }
    Err(refused(config, last))
}

fn refused(config: &EndpointConfig, reason: io::Error) -> TelemetryError {
    let (first, last) = (*config.ports.start(), *config.ports.end());
    let address = SocketAddr::new(config.listen, first);
    let hint = match reason.kind() {
        ErrorKind::AddrInUse if first == last => {
            "; use a range such as 0.0.0.0:9401-9499, so that the first free port is used"
        }
        ErrorKind::AddrInUse => "; all of these ports are taken: use a larger range",
        ErrorKind::AddrNotAvailable => "; this machine does not have this address",
        ErrorKind::PermissionDenied => "; choose a port above 1023",
        _ if Errno::from_io_error(&reason) == Some(Errno::MFILE) => {
            "; raise the limit of open files (ulimit -n)"
        }
        _ => "",
    };
    let address = if first == last { address.to_string() } else { format!("{address}-{last}") };
    TelemetryError::Listen { address, setting: config.setting, reason, hint }
}

/// Serves until `stop`, then finishes open requests within [`STOP`].
async fn serve(
    listener: TcpListener,
    router: Router,
    send: Option<impl Future<Output = ()> + Send + 'static>,
    stop: CancellationToken,
) {
    let sent = send.map(tokio::spawn);
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => return tracing::error!(%error, "the metrics endpoint ended"),
    };
    let stopped = stop.clone().cancelled_owned();
    let serve = axum::serve(Guard::new(listener), router).with_graceful_shutdown(stopped);
    let late = async {
        stop.cancelled().await;
        tokio::time::sleep(STOP).await;
    };
    tokio::select! {
        served = async { serve.await } => {
            if let Err(error) = served {
                tracing::error!(%error, "the metrics endpoint ended");
            }
        }
        () = late => tracing::debug!("some requests for metrics were not answered"),
    }
    // Sends the last message, within a time limit.
    if let Some(sent) = sent {
        let _ = sent.await;
    }
}

/// The JSON of Prometheus's HTTP service discovery.
fn service_discovery(targets: &[Target]) -> String {
    let group = |target: &Target| json!({"targets": [target.address], "labels": target.labels});
    Value::Array(targets.iter().map(group).collect()).to_string()
}

fn router(recorder: Arc<Recorder>, config: EndpointConfig, address: SocketAddr) -> Router {
    let EndpointConfig { ready, coordinator, targets, lists_itself, pages, .. } = config;
    // `gradwire status` looks for this at the usual ports.
    let location = format!("coordinator {coordinator}\n");
    let metrics = move || {
        process::collect();
        collect::collect();
        let body = recorder.render();
        async move { ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], body) }
    };
    let readyz = move || {
        let now = ready.borrow().clone();
        async move {
            match now {
                Readiness::Ready => (StatusCode::OK, "ready\n".to_owned()).into_response(),
                Readiness::NotReady(reason) => {
                    (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {reason}\n"))
                        .into_response()
                }
            }
        }
    };
    let labels = BTreeMap::from([(JOB.name, config.job), (HOST.name, config.host)]);
    let own = lists_itself.then_some(Target { address, labels });
    let discovery = move || {
        let targets = targets.as_ref().map(|targets| {
            let daemons = targets.borrow().clone();
            daemons.iter().chain(&own).cloned().collect::<Vec<Target>>()
        });
        async move {
            match targets {
                Some(targets) => {
                    let body = service_discovery(&targets);
                    ([(CONTENT_TYPE, "application/json")], body).into_response()
                }
                None => {
                    let text = "only the daemon of the first node lists the job's daemons\n";
                    (StatusCode::NOT_FOUND, text).into_response()
                }
            }
        }
    };
    let elsewhere = || {
        let text = "only the daemon of the first node serves the status page; `gradwire status` \
                    prints its address\n";
        Router::new().route("/", get(async move || (StatusCode::NOT_FOUND, text)))
    };
    pages
        .unwrap_or_else(elsewhere)
        .route("/sd", get(discovery))
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| std::future::ready("ok\n")))
        .route("/readyz", get(readyz))
        .route("/coordinator", get(move || std::future::ready(location)))
}
