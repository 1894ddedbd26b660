//! The process's metrics recorder, its upkeep, and the HTTP server that shows it.

use std::{io::ErrorKind, net::SocketAddr, time::Duration};

use axum::{
    Router,
    http::{StatusCode, header::CONTENT_TYPE},
    response::IntoResponse,
    routing::get,
};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use parking_lot::Mutex;
use rustix::io::Errno;
use tokio::{
    net::TcpListener,
    sync::watch,
    time::{MissedTickBehavior, interval, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::TelemetryError;

/// How often histograms are drained into their buckets; between two drains they grow.
const UPKEEP: Duration = Duration::from_secs(5);

/// How long open requests may take to end when the endpoint stops.
const STOP: Duration = Duration::from_secs(1);

/// Bounds of every histogram whose name ends in `_seconds`: 10 µs to a minute, times about 2.5.
const SECONDS: &[f64] = &[
    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
];

/// Bounds of every histogram whose name ends in `_bytes`: 256 bytes to 1 GiB, times 4.
const BYTES: &[f64] = &[
    256.0,
    1024.0,
    4096.0,
    16384.0,
    65536.0,
    262_144.0,
    1_048_576.0,
    4_194_304.0,
    16_777_216.0,
    67_108_864.0,
    268_435_456.0,
    1_073_741_824.0,
];

/// Bounds of every other histogram: counts.
const COUNTS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0];

/// Whether work may be sent to a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Readiness {
    /// Work may be sent.
    Ready,
    /// Work may not be sent, for this reason.
    NotReady(String),
}

/// What an [`Endpoint`] is and where it listens.
#[derive(Debug, Clone)]
pub struct EndpointConfig {
    /// The service, as a label of `gradwire_build_info`: `gradwired` or `coordinator`.
    pub service: &'static str,
    /// Its release.
    pub version: &'static str,
    /// Where to listen; port 0 lets the system choose.
    pub listen: SocketAddr,
    /// The setting `listen` comes from, for the error if it is taken.
    pub setting: &'static str,
    /// The state that `/readyz` reports.
    pub ready: watch::Receiver<Readiness>,
}

/// A running endpoint: `/metrics`, `/healthz`, `/readyz`. Dropping it stops it.
#[derive(Debug)]
pub struct Endpoint {
    address: SocketAddr,
    tasks: TaskTracker,
    cancel: CancellationToken,
}

impl Endpoint {
    /// Installs the process's metrics recorder (once for the process, however many endpoints
    /// it has), listens, and serves in tasks of the current tokio runtime.
    ///
    /// # Errors
    /// [`TelemetryError::Listen`] with the address and its setting if it can't be listened on.
    pub async fn start(config: EndpointConfig) -> Result<Self, TelemetryError> {
        let failed = |reason: std::io::Error| TelemetryError::Listen {
            address: config.listen,
            setting: config.setting,
            hint: match reason.kind() {
                ErrorKind::AddrInUse => "; choose another port, or 0 for any free one",
                ErrorKind::AddrNotAvailable => "; the address is not one of this machine",
                ErrorKind::PermissionDenied => "; choose a port above 1023",
                _ if Errno::from_io_error(&reason) == Some(Errno::MFILE) => {
                    "; raise the limit of open files (ulimit -n)"
                }
                _ => "",
            },
            reason,
        };
        let recorder = recorder()?;
        let listener = TcpListener::bind(config.listen).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        describe_build(&config);

        let cancel = CancellationToken::new();
        let tasks = TaskTracker::new();
        tasks.spawn(upkeep(recorder.clone(), cancel.clone()));
        let router = router(recorder, config.ready);
        let stop = cancel.clone().cancelled_owned();
        tasks.spawn(async move {
            let serve = axum::serve(listener, router).with_graceful_shutdown(stop);
            if let Err(error) = serve.await {
                tracing::error!(%error, %address, "metrics endpoint ended");
            }
        });
        tasks.close();
        tracing::info!(%address, "serving metrics");
        Ok(Self { address, tasks, cancel })
    }

    /// Where it listens, with the port the system chose.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops listening and waits, for at most a second, until open requests are answered.
    pub async fn stop(self) {
        self.cancel.cancel();
        if timeout(STOP, self.tasks.wait()).await.is_err() {
            tracing::debug!(address = %self.address, "metrics requests left unanswered");
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

/// The process's recorder. Several services in one process (tests, a coordinator beside a daemon)
/// share it.
fn recorder() -> Result<PrometheusHandle, TelemetryError> {
    static RECORDER: Mutex<Option<PrometheusHandle>> = Mutex::new(None);
    let mut installed = RECORDER.lock();
    if let Some(handle) = installed.as_ref() {
        return Ok(handle.clone());
    }
    let builder = [("_seconds", SECONDS), ("_bytes", BYTES)].into_iter().try_fold(
        PrometheusBuilder::new().set_buckets(COUNTS).map_err(|_| TelemetryError::Recorder)?,
        |builder, (suffix, bounds)| {
            builder
                .set_buckets_for_metric(Matcher::Suffix(suffix.to_owned()), bounds)
                .map_err(|_| TelemetryError::Recorder)
        },
    )?;
    let handle = builder.install_recorder().map_err(|_| TelemetryError::Recorder)?;
    *installed = Some(handle.clone());
    Ok(handle)
}

fn describe_build(config: &EndpointConfig) {
    metrics::describe_gauge!("gradwire_build_info", "always 1; the labels say what is running");
    metrics::gauge!("gradwire_build_info", "service" => config.service, "version" => config.version)
        .set(1.0);
}

async fn upkeep(recorder: PrometheusHandle, cancel: CancellationToken) {
    let mut ticks = interval(UPKEEP);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while cancel.run_until_cancelled(ticks.tick()).await.is_some() {
        recorder.run_upkeep();
    }
}

fn router(recorder: PrometheusHandle, ready: watch::Receiver<Readiness>) -> Router {
    let metrics = move || {
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
    Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| std::future::ready("ok\n")))
        .route("/readyz", get(readyz))
}
