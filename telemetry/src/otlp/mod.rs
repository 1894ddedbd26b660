//! Sends the metrics with OpenTelemetry's protocol (OTLP over gRPC,
//! <https://opentelemetry.io/docs/specs/otlp/>), as an alternative to scraping by Prometheus.
//!
//! It runs on the thread of the endpoint (`gw-http`). So a slow or unreachable collector delays
//! nothing: a message that can't be sent is dropped, and the next one has the current sums.
//!
//! The viewer sends the spans of steps to the same collector ([`Collector`]).
//!
//! - `collector`: the collector, and whether it accepts what is sent
//! - `message`: converts readings to a message; pure

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
use crate::{collect, histogram::nanoseconds, process, registry::Recorder};

/// How long the collector may take to answer the last message, when the service ends (WAIT).
const LAST_ANSWER: Duration = Duration::from_secs(1);

/// Where metrics and spans are sent. Clones share what is known about the collector.
#[derive(Debug, Clone)]
pub struct OtlpConfig {
    /// The collector: `http://host:port`.
    pub collector: String,
    /// The time between two messages.
    pub interval: Duration,
    health: Arc<Mutex<Health>>,
}

impl OtlpConfig {
    /// Sends to the collector at this URL, `http://host:port`; `None` if it is empty.
    pub fn new(collector: &str, interval: Duration) -> Option<Self> {
        (!collector.is_empty()).then(|| Self {
            collector: collector.to_owned(),
            interval,
            health: Arc::default(),
        })
    }

    /// The collector; logs and returns `None` if its URL is invalid. Must be called within tokio.
    pub fn connect(&self) -> Option<Collector> {
        Collector::new(&self.collector, self.health.clone())
    }
}

/// Nanoseconds since 1970.
fn now_ns() -> u64 {
    nanoseconds(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

/// Sends the metrics of this process until `stop`, and then once more.
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
    // The first tick is immediate, when there is nothing to send.
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
            // The last message replaces this one.
            () = stop.cancelled(), if !is_last => continue,
        }
        if is_last {
            return;
        }
    }
}
