//! The macro that declares metrics: one line makes the row of the reference and the handle for
//! recording.
//!
//! Handles are created once. So recording is an addition to an atomic, without a look-up or an
//! allocation for labels. If the values of the labels are not known in advance (peers,
//! collectives), the line makes a [`Family`], and the recording code keeps each value's handle.

use std::marker::PhantomData;

use metrics::{Counter, Gauge};

use crate::{
    histogram::{Histogram, TimeCounter},
    metric::{Kind, Metric},
    registry,
};

/// The handle of a series.
pub trait Instrument: Sized {
    /// The type for Prometheus.
    const KIND: Kind;

    /// The handle of one series.
    fn series(metric: &'static Metric, values: &[&str]) -> Self;
}

impl Instrument for Counter {
    const KIND: Kind = Kind::Counter;

    fn series(metric: &'static Metric, values: &[&str]) -> Self {
        metrics::counter!(metric.name, labels(metric, values))
    }
}

impl Instrument for Gauge {
    const KIND: Kind = Kind::Gauge;

    fn series(metric: &'static Metric, values: &[&str]) -> Self {
        metrics::gauge!(metric.name, labels(metric, values))
    }
}

impl Instrument for Histogram {
    const KIND: Kind = Kind::Histogram;

    fn series(metric: &'static Metric, values: &[&str]) -> Self {
        registry::histogram(metric, values)
    }
}

impl Instrument for TimeCounter {
    const KIND: Kind = Kind::Counter;

    fn series(metric: &'static Metric, values: &[&str]) -> Self {
        registry::time_counter(metric, values)
    }
}

fn labels(metric: &Metric, values: &[&str]) -> Vec<metrics::Label> {
    let labels = metric.labels.iter().zip(values);
    labels.map(|(label, value)| metrics::Label::new(label.name, (*value).to_owned())).collect()
}

/// A metric with labels: one series for each combination of values.
#[derive(Debug)]
pub struct Family<T, const LABELS: usize> {
    metric: &'static Metric,
    series: PhantomData<T>,
}

impl<T: Instrument, const LABELS: usize> Family<T, LABELS> {
    /// The handle of the series with these label values, in the order of the declaration. This is a
    /// look-up: keep the handle.
    pub fn series(&self, values: [&str; LABELS]) -> T {
        T::series(self.metric, &values)
    }
}

/// The field that a line of a declaration makes.
pub trait Declared: Sized {
    /// The type for Prometheus.
    const KIND: Kind;

    /// The number of its labels.
    const LABELS: usize;

    /// Creates it.
    fn declared(metric: &'static Metric) -> Self;
}

impl<T: Instrument> Declared for T {
    const KIND: Kind = T::KIND;
    const LABELS: usize = 0;

    fn declared(metric: &'static Metric) -> Self {
        Self::series(metric, &[])
    }
}

impl<T: Instrument, const LABELS: usize> Declared for Family<T, LABELS> {
    const KIND: Kind = T::KIND;
    const LABELS: usize = LABELS;

    fn declared(metric: &'static Metric) -> Self {
        Self { metric, series: PhantomData }
    }
}

/// Declares groups of metrics. A wrong number of labels does not compile.
macro_rules! metrics {
    ($(
        $(#[doc = $gdoc:literal])+
        $GROUP:ident: $Group:ident {
            $(
                $(#[doc = $doc:literal])+
                $field:ident: $type:ty = $name:literal, $unit:ident, [$($label:ident),*];
            )+
        }
    )+) => {
        $(
            $(#[doc = $gdoc])+
            #[derive(Debug)]
            pub struct $Group {
                $(
                    $(#[doc = $doc])+
                    #[doc = ""]
                    #[doc = concat!("Metric `", $name, "`.")]
                    pub $field: $type,
                )+
            }

            $(#[doc = $gdoc])+
            ///
            /// Use it only after the recorder is installed: handles that are created earlier record
            /// nothing.
            pub static $GROUP: LazyLock<$Group> = LazyLock::new(|| $Group {
                $($field: {
                    const METRIC: &Metric = &Metric {
                        name: $name,
                        kind: <$type as Declared>::KIND,
                        unit: Unit::$unit,
                        help: concat!($($doc),+).trim_ascii(),
                        labels: &[$($label),*],
                    };
                    const { assert!(METRIC.labels.len() == <$type as Declared>::LABELS) };
                    <$type as Declared>::declared(METRIC)
                },)+
            });
        )+

        /// Every group of metrics: its title and its metrics.
        pub const GROUPS: &[(&str, &[Metric])] = &[$((
            concat!($($gdoc),+).trim_ascii(),
            &[$(Metric {
                name: $name,
                kind: <$type as Declared>::KIND,
                unit: Unit::$unit,
                help: concat!($($doc),+).trim_ascii(),
                labels: &[$($label),*],
            }),+],
        )),+];
    };
}

pub(crate) use metrics;
