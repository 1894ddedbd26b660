//! Converts all metrics to an OTLP message. Pure: readings and times are arguments.
//!
//! Names, units and help are the same as in the text for Prometheus, so dashboards work with both.
//! The labels of every series (job and host) are attributes of the resource.

use gradwire_services::otlp::{
    collector::metrics::v1::ExportMetricsServiceRequest,
    common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value},
    metrics::v1::{
        AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric as Message,
        NumberDataPoint, ResourceMetrics, ScopeMetrics, Sum, metric::Data, number_data_point,
    },
    resource::v1::Resource,
};
use metrics::Unit;

use crate::{
    histogram::{BOUNDS, Recorded},
    metric::{Kind, Metric},
    registry::{Reading, Value},
};

/// The service that sends the metrics.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    /// `gradwired` or `coordinator`.
    pub(crate) service: &'static str,
    pub(crate) version: &'static str,
    pub(crate) job: String,
    pub(crate) host: String,
}

/// All readings. `times` are the beginning of counting and now, in nanoseconds since 1970.
pub(crate) fn request(
    readings: &[Reading],
    origin: &Origin,
    times: (u64, u64),
) -> ExportMetricsServiceRequest {
    let series = readings.chunk_by(|one, other| one.metric.name == other.metric.name);
    let scope = InstrumentationScope {
        name: "gradwire".to_owned(),
        version: origin.version.to_owned(),
        ..InstrumentationScope::default()
    };
    let metrics = ScopeMetrics {
        scope: Some(scope),
        metrics: series.map(|series| message(series[0].metric, series, times)).collect(),
        schema_url: String::new(),
    };
    let attributes = [
        ("service.name", origin.service),
        ("service.namespace", "gradwire"),
        ("service.version", origin.version),
        ("service.instance.id", &format!("{}/{}", origin.job, origin.host)),
        ("host.name", &origin.host),
        ("gradwire_job", &origin.job),
        ("host", &origin.host),
    ];
    let resource = Resource {
        attributes: attributes.map(|(name, value)| attribute(name, value)).into(),
        ..Resource::default()
    };
    let resource_metrics = vec![ResourceMetrics {
        resource: Some(resource),
        scope_metrics: vec![metrics],
        schema_url: String::new(),
    }];
    ExportMetricsServiceRequest { resource_metrics }
}

/// An attribute with a text.
pub fn attribute(name: &str, value: &str) -> KeyValue {
    attribute_of(name, any_value::Value::StringValue(value.to_owned()))
}

/// An attribute with a number, at most `i64::MAX`.
pub fn number_attribute(name: &str, value: u64) -> KeyValue {
    attribute_of(name, any_value::Value::IntValue(i64::try_from(value).unwrap_or(i64::MAX)))
}

fn attribute_of(name: &str, value: any_value::Value) -> KeyValue {
    let value = Some(AnyValue { value: Some(value) });
    KeyValue { key: name.to_owned(), value, ..KeyValue::default() }
}

/// A unit in OTLP's notation (<https://ucum.org>).
fn unit(unit: Unit) -> &'static str {
    match unit {
        Unit::Seconds => "s",
        Unit::Bytes => "By",
        _ => "1",
    }
}

fn message(metric: &Metric, series: &[Reading], times: (u64, u64)) -> Message {
    let cumulative = AggregationTemporality::Cumulative.into();
    let (mut numbers, mut histograms) = (Vec::new(), Vec::new());
    for Reading { labels, value, .. } in series {
        match value {
            Value::Number(value) => numbers.push(number(labels, *value, times)),
            Value::Histogram(recorded) => histograms.push(histogram(labels, recorded, times)),
        }
    }
    let data = match metric.kind {
        Kind::Counter => Data::Sum(Sum {
            data_points: numbers,
            aggregation_temporality: cumulative,
            is_monotonic: true,
        }),
        Kind::Gauge => Data::Gauge(Gauge { data_points: numbers }),
        Kind::Histogram => Data::Histogram(Histogram {
            data_points: histograms,
            aggregation_temporality: cumulative,
        }),
    };
    Message {
        name: metric.name.to_owned(),
        description: metric.help.to_owned(),
        unit: unit(metric.unit).to_owned(),
        metadata: Vec::new(),
        data: Some(data),
    }
}

fn attributes(labels: &[(String, String)]) -> Vec<KeyValue> {
    labels.iter().map(|(name, value)| attribute(name, value)).collect()
}

fn number(labels: &[(String, String)], value: f64, (began, now): (u64, u64)) -> NumberDataPoint {
    NumberDataPoint {
        attributes: attributes(labels),
        start_time_unix_nano: began,
        time_unix_nano: now,
        value: Some(number_data_point::Value::AsDouble(value)),
        ..NumberDataPoint::default()
    }
}

/// In OTLP the counts of buckets are not cumulative, and the last bucket has no bound.
fn histogram(
    labels: &[(String, String)],
    recorded: &Recorded,
    (began, now): (u64, u64),
) -> HistogramDataPoint {
    let mut bucket_counts = Vec::with_capacity(BOUNDS + 1);
    let mut below = 0;
    for (_, cumulative) in recorded.cumulative {
        bucket_counts.push(cumulative - below);
        below = cumulative;
    }
    bucket_counts.push(recorded.count - below);
    HistogramDataPoint {
        attributes: attributes(labels),
        start_time_unix_nano: began,
        time_unix_nano: now,
        count: recorded.count,
        sum: Some(recorded.sum.as_secs_f64()),
        bucket_counts,
        explicit_bounds: recorded.cumulative.map(|(bound, _)| bound).into(),
        ..HistogramDataPoint::default()
    }
}
