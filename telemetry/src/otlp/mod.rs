//! Sends the metrics with OpenTelemetry's protocol (OTLP over gRPC,
//! <https://opentelemetry.io/docs/specs/otlp/>), for those who collect them instead of having
//! Prometheus read them.
//!
//! It runs on the thread of the endpoint (`gw-http`). So a collector that is slow or away delays
//! nothing: what could not be sent is left out, and the next message has the newest sums.
//!
//! Spans of steps are sent to the same collector, by whoever makes them ([`Collector`]).
//!
//! - `collector`: the collector, and whether it takes what it is sent
//! - `message`: from what the registry has read to a message; pure

mod collector;
mod message;

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use parking_lot::Mutex;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use self::collector::{ANSWER, Health};
pub(crate) use self::message::Origin;
pub use self::{
    collector::Collector,
    message::{attribute, number_attribute},
};
use crate::{collect, process, registry::Recorder};

/// How long the collector may take to answer the last message, when the service ends (WAIT).
const LAST_ANSWER: Duration = Duration::from_secs(1);

/// Where metrics and spans are sent. Its copies share what is known of the collector.
#[derive(Debug, Clone)]
pub struct OtlpConfig {
    /// The collector: `http://host:port`.
    pub collector: String,
    /// The time between two messages.
    pub interval: Duration,
    health: Arc<Mutex<Health>>,
}

impl OtlpConfig {
    /// Sends to the collector at this URL, `http://host:port`; nowhere if it is empty.
    pub fn new(collector: &str, interval: Duration) -> Option<Self> {
        (!collector.is_empty()).then(|| Self {
            collector: collector.to_owned(),
            interval,
            health: Arc::default(),
        })
    }

    /// The collector; `None` if its URL can't be used, which the log tells. Call this within tokio.
    pub fn connect(&self) -> Option<Collector> {
        Collector::new(&self.collector, self.health.clone())
    }
}

/// Nanoseconds since 1970.
fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Sends the metrics of this process until `stop`, and once more then.
pub(crate) async fn send(
    recorder: Arc<Recorder>,
    config: OtlpConfig,
    origin: Origin,
    stop: CancellationToken,
) {
    let Some(collector) = config.connect() else { return };
    let began = now_ns();
    let mut ticks = interval(config.interval);
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
        tokio::select! {
            () = collector.send_metrics(request, limit) => {}
            // The newest values are sent instead.
            () = stop.cancelled(), if !is_last => continue,
        }
        if is_last {
            return;
        }
    }
}
