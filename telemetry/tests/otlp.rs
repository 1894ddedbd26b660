//! Sends metrics to a real OTLP receiver over gRPC.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use gradwire_telemetry::{Endpoint, EndpointConfig, OtlpConfig, Readiness, catalog::DAEMON};
use opentelemetry_proto::tonic::{
    collector::metrics::v1::{
        ExportMetricsServiceRequest, ExportMetricsServiceResponse,
        metrics_service_server::{MetricsService, MetricsServiceServer},
    },
    common::v1::{KeyValue, any_value},
    metrics::v1::{Metric, metric::Data, number_data_point},
};
use tokio::{
    net::TcpListener,
    sync::{mpsc, watch},
    time::timeout,
};
use tonic::{
    Request, Response, Status,
    transport::{Server, server::TcpIncoming},
};

const LIMIT: Duration = Duration::from_secs(60);

struct Receiver(mpsc::UnboundedSender<ExportMetricsServiceRequest>);

#[tonic::async_trait]
impl MetricsService for Receiver {
    async fn export(
        &self,
        request: Request<ExportMetricsServiceRequest>,
    ) -> Result<Response<ExportMetricsServiceResponse>, Status> {
        let _ = self.0.send(request.into_inner());
        Ok(Response::new(ExportMetricsServiceResponse::default()))
    }
}

fn receive(listener: TcpListener) -> mpsc::UnboundedReceiver<ExportMetricsServiceRequest> {
    let (sender, received) = mpsc::unbounded_channel();
    let service = MetricsServiceServer::new(Receiver(sender));
    let incoming = TcpIncoming::from(listener);
    tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
    received
}

fn start(collector: SocketAddr, interval: Duration) -> Endpoint {
    let (_, ready) = watch::channel(Readiness::Ready);
    Endpoint::start(EndpointConfig {
        service: "gradwired",
        version: "1.2.3",
        job: "job-1".to_owned(),
        host: "node1".to_owned(),
        listen: Ipv4Addr::LOCALHOST.into(),
        ports: 0..=0,
        or_any: false,
        setting: "metrics.listen",
        reached_at: Ipv4Addr::LOCALHOST.into(),
        coordinator: ([10, 0, 0, 1], 7000).into(),
        ready,
        targets: None,
        lists_itself: false,
        otlp: OtlpConfig::new(&format!("http://{collector}"), interval),
        pages: None,
    })
    .unwrap()
}

fn text(attribute: &KeyValue) -> &str {
    match attribute.value.as_ref().and_then(|value| value.value.as_ref()) {
        Some(any_value::Value::StringValue(text)) => text,
        other => panic!("{other:?}"),
    }
}

fn pairs(attributes: &[KeyValue]) -> BTreeMap<&str, &str> {
    attributes.iter().map(|attribute| (attribute.key.as_str(), text(attribute))).collect()
}

fn metric<'a>(request: &'a ExportMetricsServiceRequest, name: &str) -> &'a Metric {
    let scopes = &request.resource_metrics[0].scope_metrics;
    let found: Vec<_> =
        scopes.iter().flat_map(|it| &it.metrics).filter(|it| it.name == name).collect();
    assert_eq!(found.len(), 1, "{name}");
    found[0]
}

#[tokio::test]
async fn metrics_are_sent_repeatedly_and_at_the_end() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let collector = listener.local_addr().unwrap();
    // At first nobody answers; the endpoint still starts.
    let endpoint = start(collector, Duration::from_millis(100));
    DAEMON.phase.series(["gather"]).record(Duration::from_millis(3));
    DAEMON.phase.series(["gather"]).record(Duration::from_secs(200));
    let mut received = receive(listener);
    let first = timeout(LIMIT, received.recv()).await.unwrap().unwrap();
    let second = timeout(LIMIT, received.recv()).await.unwrap().unwrap();

    let resource = first.resource_metrics[0].resource.as_ref().unwrap();
    let attributes = pairs(&resource.attributes);
    for (name, value) in [
        ("service.name", "gradwired"),
        ("service.version", "1.2.3"),
        ("service.instance.id", "job-1/node1"),
        ("host.name", "node1"),
        ("gradwire_job", "job-1"),
    ] {
        assert_eq!(attributes[name], value);
    }

    let phase = metric(&second, "gradwire_daemon_phase_seconds");
    assert_eq!((phase.unit.as_str(), phase.description.is_empty()), ("s", false));
    let Some(Data::Histogram(histogram)) = &phase.data else { panic!("{phase:?}") };
    let [point] = &histogram.data_points[..] else { panic!("{histogram:?}") };
    assert_eq!(pairs(&point.attributes), BTreeMap::from([("phase", "gather")]));
    assert_eq!((point.count, point.bucket_counts.len()), (2, point.explicit_bounds.len() + 1));
    assert_eq!(point.bucket_counts.iter().sum::<u64>(), 2);
    assert_eq!(point.bucket_counts.last(), Some(&1), "what is longer than the last bound");
    assert!((point.sum.unwrap() - 200.003).abs() < 1e-6, "{point:?}");
    assert!(point.start_time_unix_nano < point.time_unix_nano);

    let info = metric(&second, "gradwire_build_info");
    let Some(Data::Gauge(gauge)) = &info.data else { panic!("{info:?}") };
    let point = &gauge.data_points[0];
    assert_eq!(point.value, Some(number_data_point::Value::AsDouble(1.0)));
    assert_eq!(pairs(&point.attributes)["version"], "1.2.3");
    let cpu = metric(&second, "process_cpu_seconds_total");
    assert!(matches!(&cpu.data, Some(Data::Sum(sum)) if sum.is_monotonic), "{cpu:?}");

    // The last recordings are sent when the service ends.
    DAEMON.phase.series(["gather"]).record(Duration::from_millis(1));
    timeout(LIMIT, endpoint.stop()).await.unwrap();
    let mut last = second;
    while let Ok(request) = received.try_recv() {
        last = request;
    }
    let Some(Data::Histogram(histogram)) = &metric(&last, "gradwire_daemon_phase_seconds").data
    else {
        panic!("{last:?}")
    };
    assert_eq!(histogram.data_points[0].count, 3);
}

/// An unreachable collector and one that never answers do not delay the end.
#[tokio::test]
async fn a_service_ends_without_its_collector() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let away = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let collectors = [silent.local_addr().unwrap(), away.local_addr().unwrap()];
    drop(away);
    for collector in collectors {
        let endpoint = start(collector, Duration::from_millis(100));
        tokio::time::sleep(Duration::from_millis(500)).await;
        timeout(LIMIT, endpoint.stop()).await.unwrap();
    }
}
