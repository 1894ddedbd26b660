//! An OpenTelemetry collector for the tests of metrics and spans.

use std::time::Duration;

use opentelemetry_proto::tonic::collector::{
    metrics::v1::{
        ExportMetricsServiceRequest, ExportMetricsServiceResponse,
        metrics_service_server::{MetricsService, MetricsServiceServer},
    },
    trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
};
use tokio::{net::TcpListener, runtime::Runtime, sync::mpsc, time::timeout};
use tonic::{
    Request, Response, Status,
    transport::{Server, server::TcpIncoming},
};

/// The time limit of everything.
pub(super) const LIMIT: Duration = Duration::from_secs(60);

struct Receiver<T>(mpsc::UnboundedSender<T>);

#[tonic::async_trait]
impl MetricsService for Receiver<ExportMetricsServiceRequest> {
    async fn export(
        &self,
        request: Request<ExportMetricsServiceRequest>,
    ) -> Result<Response<ExportMetricsServiceResponse>, Status> {
        let _ = self.0.send(request.into_inner());
        Ok(Response::new(ExportMetricsServiceResponse::default()))
    }
}

#[tonic::async_trait]
impl TraceService for Receiver<ExportTraceServiceRequest> {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let _ = self.0.send(request.into_inner());
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// A collector, which runs until it is dropped.
pub(super) struct Collector {
    runtime: Runtime,
    /// The setting with which a job sends to it.
    pub(super) setting: String,
    metrics: mpsc::UnboundedReceiver<ExportMetricsServiceRequest>,
    spans: mpsc::UnboundedReceiver<ExportTraceServiceRequest>,
}

impl Collector {
    /// A collector that accepts metrics and spans.
    pub(super) fn new() -> Self {
        Self::start(true)
    }

    /// A collector that accepts only metrics.
    pub(super) fn of_metrics() -> Self {
        Self::start(false)
    }

    fn start(takes_spans: bool) -> Self {
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let setting = format!("otlp.endpoint=http://{}", listener.local_addr().unwrap());
        let ((to_metrics, metrics), (to_spans, spans)) =
            (mpsc::unbounded_channel(), mpsc::unbounded_channel());
        let server = Server::builder()
            .add_service(MetricsServiceServer::new(Receiver(to_metrics)))
            .add_optional_service(takes_spans.then(|| TraceServiceServer::new(Receiver(to_spans))));
        runtime.spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
        Self { runtime, setting, metrics, spans }
    }

    /// The next message with metrics.
    pub(super) fn next_metrics(&mut self) -> ExportMetricsServiceRequest {
        let next = async { timeout(LIMIT, self.metrics.recv()).await };
        self.runtime.block_on(next).unwrap().unwrap()
    }

    /// The messages with metrics received so far.
    pub(super) fn metrics(&mut self) -> Vec<ExportMetricsServiceRequest> {
        std::iter::from_fn(|| self.metrics.try_recv().ok()).collect()
    }

    /// The messages with spans received so far.
    pub(super) fn spans(&mut self) -> Vec<ExportTraceServiceRequest> {
        std::iter::from_fn(|| self.spans.try_recv().ok()).collect()
    }
}
