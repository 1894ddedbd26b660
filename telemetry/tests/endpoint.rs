//! The endpoint over real sockets.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    ops::RangeInclusive,
    sync::{Arc, LazyLock},
    time::Duration,
};

use gradwire_telemetry::{
    Endpoint, EndpointConfig, Readiness, Target,
    catalog::{COORDINATOR, DAEMON},
};
use prometheus_parse::{Scrape, Value};
use serde_json::json;
use tokio::{sync::watch, time::timeout};

/// All endpoints of a process have the labels of the first.
const HOST: &str = "node\"1\\";

fn config(
    listen: &str,
    ports: RangeInclusive<u16>,
    ready: watch::Receiver<Readiness>,
) -> EndpointConfig {
    EndpointConfig {
        targets: None,
        lists_itself: false,
        otlp: None,
        pages: None,
        or_any: false,
        service: "test",
        version: "1.2.3",
        job: "job-1".to_owned(),
        host: HOST.to_owned(),
        listen: listen.parse().unwrap(),
        ports,
        setting: "metrics.listen",
        reached_at: [127, 0, 0, 7].into(),
        coordinator: ([10, 0, 0, 1], 7000).into(),
        ready,
    }
}

/// Requests without tokio, so that this thread is blocked like the thread of a busy service.
fn get(address: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn scrape(address: SocketAddr) -> (Scrape, String) {
    let answer = get(address, "/metrics");
    let (_, text) = answer.split_once("\r\n\r\n").unwrap();
    let lines = text.lines().map(|line| Ok(line.to_owned()));
    (Scrape::parse(lines).unwrap(), text.to_owned())
}

#[tokio::test]
async fn a_busy_service_serves_health_and_readiness() {
    let (tell, ready) = watch::channel(Readiness::NotReady("2 of 3 nodes have joined".into()));
    let endpoint = Endpoint::start(config("127.0.0.1", 0..=0, ready)).unwrap();
    let address = endpoint.address();

    assert!(get(address, "/healthz").starts_with("HTTP/1.1 200"));
    let answer = get(address, "/readyz");
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    assert!(answer.ends_with("not ready: 2 of 3 nodes have joined\n"), "{answer}");
    tell.send_replace(Readiness::Ready);
    assert!(get(address, "/readyz").starts_with("HTTP/1.1 200"));
    assert!(get(address, "/coordinator").ends_with("\r\n\r\ncoordinator 10.0.0.1:7000\n"));
    assert!(get(address, "/nothing").starts_with("HTTP/1.1 404"));

    // CLEAN: after `stop` the port is free again.
    timeout(Duration::from_secs(20), endpoint.stop()).await.unwrap();
    assert!(TcpStream::connect(address).is_err());
}

/// The body of `/sd`; checks the content type that Prometheus expects.
fn listed(address: SocketAddr) -> serde_json::Value {
    let answer = get(address, "/sd");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    assert!(head.contains("content-type: application/json\r\n"), "{head}");
    serde_json::from_str(body).unwrap()
}

/// The format is described at <https://prometheus.io/docs/prometheus/latest/http_sd/>.
#[tokio::test]
async fn the_coordinator_lists_metrics_endpoints() {
    let (_tell, ready) = watch::channel(Readiness::Ready);
    let start = |targets, lists_itself| {
        let config = config("127.0.0.1", 0..=0, ready.clone());
        Endpoint::start(EndpointConfig { targets, lists_itself, ..config }).unwrap()
    };
    let (joined, targets) = watch::channel(Arc::default());
    let (daemon, alone) = (start(Some(targets.clone()), false), start(Some(targets), true));
    assert_eq!(listed(daemon.address()), json!([]));

    let labels = BTreeMap::from([("host", "a \"b\"".to_owned()), ("node", "0".to_owned())]);
    let address = "[::1]:9401".parse().unwrap();
    joined.send_replace(Arc::from([Target { address, labels }]));
    let first = json!({"targets": ["[::1]:9401"], "labels": {"host": "a \"b\"", "node": "0"}});
    assert_eq!(listed(daemon.address()), json!([first]));
    let labels = json!({"gradwire_job": "job-1", "host": HOST});
    let own = json!({"targets": [alone.address()], "labels": labels});
    assert_eq!(listed(alone.address()), json!([first, own]));

    let other = start(None, false);
    let answer = get(other.address(), "/sd");
    assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
    assert!(answer.contains("only the daemon of the first node lists"), "{answer}");
    for endpoint in [daemon, alone, other] {
        endpoint.stop().await;
    }
}

#[tokio::test]
async fn every_series_is_valid_with_job_and_host() {
    let (_tell, ready) = watch::channel(Readiness::Ready);
    let endpoint = Endpoint::start(config("127.0.0.1", 0..=0, ready)).unwrap();
    LazyLock::force(&DAEMON);
    DAEMON.operations.increment(3);
    DAEMON.submissions.series(["allreduce", "plain"]).increment(2);
    DAEMON.clock_offset.set(-0.25);
    for micros in [1, 7, 7, 90_000_000] {
        DAEMON.operation.record(Duration::from_micros(micros));
    }
    for _ in 0..2 {
        // A second handle continues the series.
        COORDINATOR.node_lag.series(["b\\c"]).add(Duration::from_millis(1250));
    }
    let (scraped, text) = scrape(endpoint.address());

    let mut values = BTreeMap::new();
    for sample in &scraped.samples {
        assert_eq!(sample.labels.get("gradwire_job"), Some("job-1"), "{sample:?}");
        assert!(sample.labels.get("host").is_some_and(|host| host.contains("node")), "{sample:?}");
        // The parser keeps the sum and the count of a histogram separate.
        let part = ["_sum", "_count"].iter().find_map(|end| sample.metric.strip_suffix(end));
        let part = part.filter(|family| scraped.docs.contains_key(*family));
        let has_type = part.is_some() || !matches!(sample.value, Value::Untyped(_));
        assert!(has_type, "no type: {sample:?}");
        let family = part.unwrap_or(&sample.metric);
        assert!(scraped.docs.contains_key(family), "no description: {sample:?}");
        values.insert(sample.metric.clone(), sample.value.clone());
    }
    assert!(text.contains(r#"host="node\"1\\""#), "{text}");
    assert!(text.contains(r#"node_host="b\\c"} 2.5"#), "{text}");
    assert_eq!(values["gradwire_build_info"], Value::Gauge(1.0));
    assert_eq!(values["gradwire_daemon_operations_total"], Value::Counter(3.0));
    assert_eq!(values["gradwire_daemon_submissions_total"], Value::Counter(2.0));
    assert_eq!(values["gradwire_daemon_clock_offset_seconds"], Value::Gauge(-0.25));
    assert_eq!(values["gradwire_coordinator_node_lag_seconds_total"], Value::Counter(2.5));
    // A metric without recordings is there, too.
    assert_eq!(values["gradwire_daemon_allocation_requests_total"], Value::Counter(0.0));

    let Value::Histogram(buckets) = &values["gradwire_daemon_operation_seconds"] else {
        panic!("{values:?}");
    };
    let counts: Vec<(f64, f64)> = buckets.iter().map(|b| (b.less_than, b.count)).collect();
    assert_eq!(counts[..2], [(5e-6, 1.0), (1e-5, 3.0)]);
    assert_eq!(counts[counts.len() - 2..], [(83.88608, 3.0), (f64::INFINITY, 4.0)]);
    let line = |end: &str| {
        let name = format!("gradwire_daemon_operation_seconds_{end}{{");
        let line = text.lines().find(|line| line.starts_with(&name)).unwrap();
        line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()
    };
    assert_eq!((line("count"), line("sum")), (4.0, 90.000_015));

    // Each series and each family appears once.
    let series: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("gradwire_"))
        .filter_map(|line| line.rsplit_once(' ').map(|(series, _)| series))
        .collect();
    assert_eq!(series.iter().collect::<BTreeSet<_>>().len(), series.len(), "{text}");
    let types: Vec<&str> = text.lines().filter(|line| line.starts_with("# TYPE")).collect();
    assert_eq!(types.iter().collect::<BTreeSet<_>>().len(), types.len(), "{text}");
    endpoint.stop().await;
}

#[tokio::test]
async fn the_first_free_port_of_a_range_is_used() {
    let (_tell, ready) = watch::channel(Readiness::Ready);
    // Two consecutive free ports, outside of the range for ephemeral ports.
    let begin = 20_000 + (std::process::id() % 5_000) as u16 * 2;
    let is_free = |port: u16| TcpListener::bind(("0.0.0.0", port)).is_ok();
    let (first, second) = (begin..)
        .map(|port| (port, port + 1))
        .find(|&(first, second)| is_free(first) && is_free(second))
        .unwrap();
    let start = || Endpoint::start(config("0.0.0.0", first..=second, ready.clone()));
    let (one, other) = (start().unwrap(), start().unwrap());
    // The address for other hosts: 0.0.0.0 means their own.
    let at = |port| SocketAddr::new(IpAddr::from([127, 0, 0, 7]), port);
    assert_eq!((one.address(), other.address()), (at(first), at(second)));
    assert!(get(other.address(), "/healthz").starts_with("HTTP/1.1 200"));

    let text = start().unwrap_err().to_string();
    let begin = format!("can't serve metrics on 0.0.0.0:{first}-{second} (metrics.listen): ");
    assert!(text.starts_with(&begin), "{text}");
    assert!(text.ends_with("use a larger range"), "{text}");
    let any = EndpointConfig { or_any: true, ..config("0.0.0.0", first..=second, ready.clone()) };
    let any = Endpoint::start(any).unwrap();
    assert!(![first, second].contains(&any.address().port()));
    any.stop().await;
    one.stop().await;
    let again = start().unwrap();
    assert_eq!(again.address(), at(first));
    again.stop().await;
    other.stop().await;
}

#[tokio::test]
async fn a_port_in_use_is_named_with_its_setting() {
    let (_tell, ready) = watch::channel(Readiness::Ready);
    let first = Endpoint::start(config("127.0.0.1", 0..=0, ready.clone())).unwrap();
    let taken = first.address();
    let port = taken.port();
    let error = Endpoint::start(config("127.0.0.1", port..=port, ready.clone())).unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with(&format!("can't serve metrics on {taken} (metrics.listen): ")),
        "{text}"
    );
    assert!(text.ends_with("so that the first free port is used"), "{text}");
    let error = Endpoint::start(config("192.0.2.1", 0..=0, ready)).unwrap_err().to_string();
    assert!(error.ends_with("this machine does not have this address"), "{error}");
    first.stop().await;
}
