//! A metric, as it is declared.

use metrics::Unit;

/// A label with few values (BOUND).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Label {
    /// Its name.
    pub name: &'static str,
    /// A description of its values.
    pub values: &'static str,
}

/// The type of a metric, as Prometheus names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A number that only increases.
    Counter,
    /// A number that may go up and down.
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
    /// Its meaning, in a sentence.
    pub help: &'static str,
    /// Its labels, without those of every series.
    pub labels: &'static [Label],
}
