//! The collector, and whether it accepts what is sent.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use gradwire_services::otlp::collector::{
    metrics::v1::{ExportMetricsServiceRequest, metrics_service_client::MetricsServiceClient},
    trace::v1::{ExportTraceServiceRequest, trace_service_client::TraceServiceClient},
};
use parking_lot::Mutex;
use tokio::time::timeout;
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint},
};

/// How long the collector may take to answer (WAIT).
pub(super) const ANSWER: Duration = Duration::from_secs(10);

/// Why something could not be sent.
#[derive(Debug)]
enum Trouble {
    /// The collector is unreachable or does not answer.
    Away(String),
    /// It does not accept this kind of message.
    Refuses(String),
}

/// Whether a collector accepts what is sent. Only changes are logged, so an unreachable collector
/// causes one log line.
#[derive(Debug, Default)]
pub(super) struct Health {
    is_away: bool,
    refuses: BTreeSet<&'static str>,
}

impl Health {
    fn note(&mut self, collector: &str, what: &'static str, outcome: Result<(), Trouble>) {
        let (is_new, error) = match outcome {
            Ok(()) => {
                let was_away = std::mem::take(&mut self.is_away);
                if self.refuses.remove(what) || was_away {
                    tracing::info!(collector, "{what} are sent again");
                }
                return;
            }
            Err(Trouble::Away(error)) => (!std::mem::replace(&mut self.is_away, true), error),
            Err(Trouble::Refuses(error)) => (self.refuses.insert(what), error),
        };
        if is_new {
            tracing::warn!(
                collector,
                error,
                "{what} can't be sent (otlp.endpoint); the job continues, and later ones are tried"
            );
        }
    }
}

/// A connection to a collector, established when it is needed.
#[derive(Debug, Clone)]
pub struct Collector {
    url: String,
    channel: Channel,
    health: Arc<Mutex<Health>>,
}

impl Collector {
    /// The collector at this URL. Must be called within tokio.
    pub(super) fn new(url: &str, health: Arc<Mutex<Health>>) -> Option<Self> {
        match Endpoint::from_shared(url.to_owned()) {
            Ok(endpoint) => {
                let channel = endpoint.connect_timeout(ANSWER).connect_lazy();
                Some(Self { url: url.to_owned(), channel, health })
            }
            Err(error) => {
                tracing::warn!(collector = url, %error, "invalid collector URL (otlp.endpoint)");
                None
            }
        }
    }

    /// Sends metrics. Logs if they can't be sent within `limit`.
    pub(super) async fn send_metrics(&self, all: ExportMetricsServiceRequest, limit: Duration) {
        let send = async {
            let mut client = MetricsServiceClient::new(self.channel.clone());
            let answer = client.export(all).await?.into_inner().partial_success;
            Ok(answer.map(|it| (it.rejected_data_points, "values", it.error_message)))
        };
        self.send("metrics", send, limit).await;
    }

    /// Sends spans. Logs and drops them if they can't be sent within `limit`.
    pub async fn send_spans(&self, spans: ExportTraceServiceRequest, limit: Duration) {
        let send = async {
            let mut client = TraceServiceClient::new(self.channel.clone());
            let answer = client.export(spans).await?.into_inner().partial_success;
            Ok(answer.map(|it| (it.rejected_spans, "spans", it.error_message)))
        };
        self.send("spans", send, limit).await;
    }

    async fn send(
        &self,
        what: &'static str,
        send: impl Future<Output = Result<Option<(i64, &'static str, String)>, Status>>,
        limit: Duration,
    ) {
        let outcome = match timeout(limit, send).await {
            Err(_) => Err(Trouble::Away(format!("no answer within {limit:?}"))),
            Ok(Err(status)) => Err(trouble(&status)),
            Ok(Ok(Some((count, what, why)))) if count > 0 => {
                Err(Trouble::Refuses(format!("the collector rejected {count} {what}: {why}")))
            }
            Ok(Ok(_)) => Ok(()),
        };
        self.health.lock().note(&self.url, what, outcome);
    }
}

fn trouble(status: &Status) -> Trouble {
    let text = match std::error::Error::source(status) {
        Some(cause) => format!("{}: {cause}", status.message()),
        None => status.message().to_owned(),
    };
    match status.code() {
        Code::Unavailable | Code::Unknown | Code::DeadlineExceeded | Code::Cancelled => {
            Trouble::Away(text)
        }
        code => Trouble::Refuses(format!("{code}: {text}")),
    }
}
