//! The macro that declares metrics: one line makes the row of the reference and the handle that
//! code records with.
//!
//! Handles are created once. So to record is an addition to an atomic, with no look-up and no
//! label to allocate. Where labels have more values than one line can name (peers, collectives),
//! the line makes a [`Family`], and whoever records keeps the handle of each value.

use std::marker::PhantomData;

use metrics::{Counter, Gauge};

use crate::{
    histogram::{Histogram, TimeCounter},
    metric::{Kind, Metric},
    registry,
};

/// What can be recorded with.
pub trait Instrument: Sized {
    /// The type that Prometheus sees.
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
    /// The handle of the series with these values, in the order of the declared labels. This looks
    /// the series up: keep the handle.
    pub fn series(&self, values: [&str; LABELS]) -> T {
        T::series(self.metric, &values)
    }
}

/// What one line of a declaration can make.
pub trait Declared: Sized {
    /// The type that Prometheus sees.
    const KIND: Kind;

    /// The number of its own labels.
    const LABELS: usize;

    /// Makes it.
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
            /// Use it only after the recorder is installed: handles that are made before record
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

        /// Every group of metrics: what it is about, and its metrics.
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
