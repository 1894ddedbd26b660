//! Sends the metrics with OpenTelemetry's protocol (OTLP over gRPC,
//! <https://opentelemetry.io/docs/specs/otlp/>), for those who collect them instead of having
//! Prometheus read them.
//!
//! It runs on the thread of the endpoint (`gw-http`). So a collector that is slow or away delays
//! nothing: what could not be sent is left out, and the next message has the newest sums.
//!
//! - `message`: from what the registry has read to a message; pure

mod message;

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use opentelemetry_proto::tonic::collector::metrics::v1::{
    ExportMetricsServiceRequest, metrics_service_client::MetricsServiceClient,
};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use tonic::{
    Status,
    transport::{Channel, Endpoint},
};

pub(crate) use self::message::Origin;
use crate::{collect, process, registry::Recorder};

/// How long the collector may take to answer (WAIT).
const ANSWER: Duration = Duration::from_secs(10);

/// The same for the last message, when the service ends.
const LAST_ANSWER: Duration = Duration::from_secs(1);

/// Where the metrics are sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtlpConfig {
    /// The collector: `http://host:port`.
    pub collector: String,
    /// The time between two messages.
    pub interval: Duration,
}

impl OtlpConfig {
    /// Sends to the collector at this URL, `http://host:port`; nowhere if it is empty.
    pub fn new(collector: &str, interval: Duration) -> Option<Self> {
        (!collector.is_empty()).then(|| Self { collector: collector.to_owned(), interval })
    }
}

/// Nanoseconds since 1970.
fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Whether the collector takes what it is sent. Only changes are logged, so a collector that is
/// away costs one line.
#[derive(Debug, Default)]
struct Health {
    fails: bool,
}

impl Health {
    fn note(&mut self, collector: &str, outcome: Result<(), String>) {
        let failed = std::mem::replace(&mut self.fails, outcome.is_err());
        match outcome {
            Ok(()) if failed => tracing::info!(collector, "metrics are sent again"),
            Err(error) if !failed => tracing::warn!(
                collector,
                error,
                "metrics can't be sent (otlp.endpoint); the job goes on, and they are tried again"
            ),
            _ => {}
        }
    }
}

/// Sends the metrics of this process until `stop`, and once more then.
pub(crate) async fn send(
    recorder: Arc<Recorder>,
    config: OtlpConfig,
    origin: Origin,
    stop: CancellationToken,
) {
    let OtlpConfig { collector, interval: each } = config;
    let channel = match Endpoint::from_shared(collector.clone()) {
        Ok(endpoint) => endpoint.connect_timeout(ANSWER).connect_lazy(),
        Err(error) => return tracing::warn!(collector, %error, "metrics can't be sent"),
    };
    let mut client = MetricsServiceClient::new(channel);
    let (began, mut health) = (now_ns(), Health::default());
    let mut ticks = interval(each);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first tick is at once, when there is nothing to tell.
    ticks.tick().await;
    loop {
        let is_last = tokio::select! {
            biased;
            () = stop.cancelled() => true,
            _ = ticks.tick() => false,
        };
        process::collect();
        collect::collect();
        let request = message::request(&recorder.read(), &origin, (began, now_ns()));
        let limit = if is_last { LAST_ANSWER } else { ANSWER };
        let outcome = tokio::select! {
            outcome = timeout(limit, export(&mut client, request)) => outcome,
            // The newest values are sent instead.
            () = stop.cancelled(), if !is_last => continue,
        };
        let late = |_| Err(format!("no answer within {limit:?}"));
        health.note(&collector, outcome.unwrap_or_else(late));
        if is_last {
            return;
        }
    }
}

async fn export(
    client: &mut MetricsServiceClient<Channel>,
    request: ExportMetricsServiceRequest,
) -> Result<(), String> {
    let says = |status: Status| match std::error::Error::source(&status) {
        Some(cause) => format!("{}: {cause}", status.message()),
        None => status.message().to_owned(),
    };
    let answer = client.export(request).await.map_err(says)?.into_inner();
    match answer.partial_success {
        Some(partial) if partial.rejected_data_points > 0 => Err(format!(
            "the collector rejects {} values: {}",
            partial.rejected_data_points, partial.error_message
        )),
        _ => Ok(()),
    }
}
