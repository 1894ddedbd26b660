//! The metrics of this process, and their text for Prometheus.
//!
//! Counters and gauges are from the `metrics` crate, with its exporter. Histograms and counters of
//! durations are our own: the exporter's histograms grow between two reads, and its counters are
//! integers.

use std::{collections::BTreeMap, fmt::Write as _, sync::Arc};

use metrics::{Unit, describe_counter, describe_gauge};
use metrics_exporter_prometheus::{
    PrometheusBuilder, PrometheusHandle,
    formatting::{sanitize_label_value, write_help_line, write_type_line},
};
use parking_lot::Mutex;

use crate::{
    TelemetryError,
    histogram::{Histogram, Recorded, TimeCounter},
    metric::{Kind, Metric},
    text::{labels_of, samples},
};

/// A series of our own instruments.
#[derive(Debug, Clone)]
enum Own {
    Histogram(Histogram),
    TimeCounter(TimeCounter),
}

/// The series of one metric, by their labels in Prometheus's notation.
type Series = BTreeMap<String, Own>;

/// Our own series, by the name of the metric.
static OWN: Mutex<BTreeMap<&'static str, (&'static Metric, Series)>> = Mutex::new(BTreeMap::new());

/// The recorder of this process.
static RECORDER: Mutex<Option<Arc<Recorder>>> = Mutex::new(None);

/// All metrics of this process.
#[derive(Debug)]
pub(crate) struct Recorder {
    exporter: PrometheusHandle,
    /// The labels of every series, in Prometheus's notation; not empty.
    common: String,
    groups: &'static [(&'static str, &'static [Metric])],
}

/// A series at one moment.
#[derive(Debug)]
pub(crate) struct Reading {
    pub(crate) metric: &'static Metric,
    /// Without the labels of every series.
    pub(crate) labels: Vec<(String, String)>,
    pub(crate) value: Value,
}

/// The value of a series.
#[derive(Debug)]
pub(crate) enum Value {
    Number(f64),
    Histogram(Box<Recorded>),
}

/// Labels in Prometheus's notation, without braces.
fn written<'a>(labels: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let label = |(name, value)| format!("{name}=\"{}\"", sanitize_label_value(value));
    labels.map(label).collect::<Vec<_>>().join(",")
}

/// The handle of one of our own series, which is created if it does not exist.
fn own(metric: &'static Metric, values: &[&str], new: impl FnOnce() -> Own) -> Own {
    let values = values.iter().copied();
    let labels = written(metric.labels.iter().map(|label| label.name).zip(values));
    let mut own = OWN.lock();
    let (_, series) = own.entry(metric.name).or_insert_with(|| (metric, Series::new()));
    series.entry(labels).or_insert_with(new).clone()
}

pub(crate) fn histogram(metric: &'static Metric, values: &[&str]) -> Histogram {
    match own(metric, values, || Own::Histogram(Histogram::default())) {
        Own::Histogram(histogram) => histogram,
        // Each name is declared once, with one type.
        Own::TimeCounter(_) => Histogram::default(),
    }
}

pub(crate) fn time_counter(metric: &'static Metric, values: &[&str]) -> TimeCounter {
    match own(metric, values, || Own::TimeCounter(TimeCounter::default())) {
        Own::TimeCounter(counter) => counter,
        Own::Histogram(_) => TimeCounter::default(),
    }
}

impl Recorder {
    /// Installs the recorder of this process. Services in one process (tests, a coordinator in a
    /// daemon) share it, with the labels of the first.
    pub(crate) fn install(
        common: &[(&'static str, &str)],
        groups: &'static [(&'static str, &'static [Metric])],
    ) -> Result<Arc<Self>, TelemetryError> {
        let mut installed = RECORDER.lock();
        if let Some(recorder) = installed.as_ref() {
            return Ok(recorder.clone());
        }
        let builder = common.iter().fold(PrometheusBuilder::new(), |builder, (name, value)| {
            builder.add_global_label(*name, *value)
        });
        let exporter = builder.install_recorder().map_err(|_| TelemetryError::Recorder)?;
        for metric in groups.iter().flat_map(|(_, metrics)| *metrics) {
            match metric.kind {
                Kind::Counter => describe_counter!(metric.name, metric.unit, metric.help),
                Kind::Gauge => describe_gauge!(metric.name, metric.unit, metric.help),
                // `render` describes them.
                Kind::Histogram => {}
            }
        }
        let common = written(common.iter().copied());
        let recorder = Arc::new(Self { exporter, common, groups });
        *installed = Some(recorder.clone());
        Ok(recorder)
    }

    /// All series, grouped by metric.
    pub(crate) fn read(&self) -> Vec<Reading> {
        let all = self.groups.iter().flat_map(|(_, metrics)| *metrics);
        let declared: BTreeMap<&str, &'static Metric> =
            all.map(|metric| (metric.name, metric)).collect();
        let common = labels_of(&self.common);
        let text = self.exporter.render();
        let mut readings: Vec<Reading> = samples(&text)
            .filter_map(|mut sample| {
                sample.labels.retain(|label| !common.contains(label));
                let metric = *declared.get(sample.name)?;
                Some(Reading { metric, labels: sample.labels, value: Value::Number(sample.value) })
            })
            .collect();
        for (metric, series) in OWN.lock().values() {
            readings.extend(series.iter().map(|(labels, instrument)| Reading {
                metric,
                labels: labels_of(labels),
                value: match instrument {
                    Own::TimeCounter(counter) => Value::Number(counter.sum().as_secs_f64()),
                    Own::Histogram(histogram) => Value::Histogram(histogram.recorded().into()),
                },
            }));
        }
        readings.sort_by_key(|reading| reading.metric.name);
        readings
    }

    /// All series, in the text format of Prometheus.
    pub(crate) fn render(&self) -> String {
        let mut text = self.exporter.render();
        // Handles are created rarely, and recording takes no lock.
        for (metric, series) in OWN.lock().values() {
            write_help_line(&mut text, metric.name, None::<Unit>, None, metric.help);
            write_type_line(&mut text, metric.name, None::<Unit>, None, metric.kind.name());
            for (own_labels, instrument) in series {
                let comma = if own_labels.is_empty() { "" } else { "," };
                let labels = format!("{}{comma}{own_labels}", self.common);
                write_series(&mut text, metric.name, &labels, instrument);
            }
            text.push('\n');
        }
        text
    }
}

fn write_series(text: &mut String, name: &str, labels: &str, instrument: &Own) {
    // Writing to a string can't fail.
    let _ = match instrument {
        Own::TimeCounter(counter) => {
            writeln!(text, "{name}{{{labels}}} {}", counter.sum().as_secs_f64())
        }
        Own::Histogram(histogram) => {
            let recorded = histogram.recorded();
            for (bound, count) in recorded.cumulative {
                let _ = writeln!(text, "{name}_bucket{{{labels},le=\"{bound}\"}} {count}");
            }
            let (count, sum) = (recorded.count, recorded.sum.as_secs_f64());
            let _ = writeln!(text, "{name}_bucket{{{labels},le=\"+Inf\"}} {count}");
            let _ = writeln!(text, "{name}_sum{{{labels}}} {sum}");
            writeln!(text, "{name}_count{{{labels}}} {count}")
        }
    };
}
