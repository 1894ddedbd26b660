//! The daemons of a job send their metrics to an OpenTelemetry collector.

use std::collections::BTreeSet;

use gradwire_tests::launched::{Launch, processes::Role};
use opentelemetry_proto::tonic::{
    collector::metrics::v1::ExportMetricsServiceRequest,
    common::v1::{KeyValue, any_value},
    metrics::v1::{metric::Data, number_data_point},
};
use rustix::process::Signal;

use crate::collector::Collector;

fn attribute<'a>(attributes: &'a [KeyValue], name: &str) -> &'a str {
    let found = attributes.iter().find(|attribute| attribute.key == name).unwrap();
    match found.value.as_ref().and_then(|value| value.value.as_ref()) {
        Some(any_value::Value::StringValue(text)) => text,
        other => panic!("{name}: {other:?}"),
    }
}

/// The sending host of a message, and the sum of all series of a counter.
fn counted(request: &ExportMetricsServiceRequest, counter: &str) -> (String, f64) {
    let [resource] = &request.resource_metrics[..] else { panic!("{request:?}") };
    let host = attribute(&resource.resource.as_ref().unwrap().attributes, "host").to_owned();
    let metrics = resource.scope_metrics.iter().flat_map(|scope| &scope.metrics);
    let sums = metrics.filter(|metric| metric.name == counter).flat_map(|metric| {
        let Some(Data::Sum(sum)) = &metric.data else { panic!("{metric:?}") };
        sum.data_points.iter().map(|point| match point.value {
            Some(number_data_point::Value::AsDouble(value)) => value,
            other => panic!("{other:?}"),
        })
    });
    (host, sums.sum())
}

#[test]
fn a_collector_gets_the_counters_of_every_daemon() {
    let mut collector = Collector::new();
    let launch = Launch::new().two_by_two().set(&collector.setting).set("otlp.interval_ms=100");
    let mut job = launch.rank(&["attach", "loop:1:1000", "until:end", "leave"]).start();
    job.until_said("looped", 4);
    // Every rank's steps arrive, even while the job waits.
    let mut hosts = BTreeSet::new();
    while hosts.len() < 2 {
        let (host, operations) =
            counted(&collector.next_metrics(), "gradwire_daemon_operations_total");
        if operations >= 1.0 {
            hosts.insert(host);
        }
    }
    assert_eq!(hosts, ["127.0.0.1", "127.0.0.2"].map(ToOwned::to_owned).into());
    job.allow("end");
    job.finish().assert_code(0);
}

/// Without this, a reader of periodic metrics would not see why a job ended.
#[test]
fn a_collector_gets_the_failure_of_a_job() {
    let mut collector = Collector::new();
    let launch = Launch::new().two_by_two().set(&collector.setting).set("otlp.interval_ms=3600000");
    let mut job = launch.rank(&["attach", "loop:1:1000", "until:end", "leave"]).start();
    job.until_said("looped", 4);
    job.signal(Role::Rank(2), Signal::KILL);
    job.finish();
    let mut failed = BTreeSet::new();
    for request in collector.metrics() {
        let (host, failures) = counted(&request, "gradwire_daemon_failures_total");
        if failures >= 1.0 {
            failed.insert(host);
        }
    }
    assert!(failed.contains("127.0.0.2"), "{failed:?}");
}

#[test]
fn a_missing_collector_costs_one_log_line() {
    let away = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let collector = format!("otlp.endpoint=http://{}", away.local_addr().unwrap());
    drop(away);
    let launch = Launch::new().ranks(2).words(&["--verbose"]).set(&collector);
    let launch = launch.set("otlp.interval_ms=100");
    let report = launch.rank(&["attach", "loop:100:1000", "leave"]).run();
    report.assert_code(0);
    let lines = report.lines.iter().filter(|line| line.text.contains("metrics can't be sent"));
    assert_eq!(lines.count(), 1, "{}", report.all());

    let report = Launch::new().ranks(1).set("otlp.endpoint=localhost:4317").rank(&[]).run();
    assert_ne!(report.code(), 0);
    assert!(report.all().contains("expected a URL http://host:port"), "{}", report.all());
}
