//! What a metric is: the row of a declaration.

use metrics::Unit;

/// A label, with values of which there are few (BOUND).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Label {
    /// Its name.
    pub name: &'static str,
    /// What its values are.
    pub values: &'static str,
}

/// The type of a metric, as Prometheus names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A number that only grows.
    Counter,
    /// A number that may change in any way.
    Gauge,
    /// The distribution of durations.
    Histogram,
}

impl Kind {
    /// Prometheus's name for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// One metric, as it is declared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metric {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub kind: Kind,
    /// Its unit; counts have none.
    pub unit: Unit,
    /// What it tells, in a sentence.
    pub help: &'static str,
    /// The labels that only this metric has.
    pub labels: &'static [Label],
}
