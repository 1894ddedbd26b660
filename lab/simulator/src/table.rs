//! Results as tables and charts, with their bounds.

use serde::Serialize;

/// Rows of text under column heads.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Table {
    /// The title; also the name of its file.
    pub title: String,
    /// The columns.
    pub head: Vec<String>,
    /// The rows, as long as the head.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows.
    pub fn new(title: &str, head: &[&str]) -> Self {
        let head = head.iter().map(|&column| column.to_owned()).collect();
        Self { title: title.to_owned(), head, rows: Vec::new() }
    }

    /// Adds a row.
    pub fn push(&mut self, row: impl IntoIterator<Item = String>) {
        self.rows.push(row.into_iter().collect());
    }

    /// As comma-separated values (RFC 4180).
    pub fn to_csv(&self) -> String {
        let cell = |text: &String| {
            let is_plain = !text.contains([',', '"', '\n']);
            if is_plain { text.clone() } else { format!("\"{}\"", text.replace('"', "\"\"")) }
        };
        let line = |cells: &[String]| {
            let cells: Vec<String> = cells.iter().map(cell).collect();
            cells.join(",") + "\n"
        };
        std::iter::once(&self.head).chain(&self.rows).map(|row| line(row)).collect()
    }
}

/// Lines over a horizontal axis.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Chart {
    /// The title; also the name of its file.
    pub title: String,
    /// The horizontal axis.
    pub x: String,
    /// The vertical axis.
    pub y: String,
    /// Whether an axis is logarithmic.
    pub logarithmic: [bool; 2],
    /// The lines with their names.
    pub lines: Vec<(String, Vec<(f64, f64)>)>,
}

/// A value with its bounds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Check {
    /// What is compared.
    pub what: String,
    /// What was simulated.
    pub value: f64,
    /// The expected value.
    pub expected: f64,
    /// The least and greatest allowed value.
    pub bounds: [f64; 2],
}

impl Check {
    /// May deviate from the expected value by a relative part.
    pub fn within(what: impl Into<String>, value: f64, expected: f64, part: f64) -> Self {
        let bounds = [expected * (1.0 - part), expected * (1.0 + part)];
        Self { what: what.into(), value, expected, bounds }
    }

    /// May deviate by an absolute amount.
    pub fn near(what: impl Into<String>, value: f64, expected: f64, by: f64) -> Self {
        Self { what: what.into(), value, expected, bounds: [expected - by, expected + by] }
    }

    /// Must not be more than `most`.
    pub fn at_most(what: impl Into<String>, value: f64, most: f64) -> Self {
        let bounds = [f64::NEG_INFINITY, most];
        Self { what: what.into(), value, expected: most, bounds }
    }

    /// Must not be less than `least`.
    pub fn at_least(what: impl Into<String>, value: f64, least: f64) -> Self {
        let bounds = [least, f64::INFINITY];
        Self { what: what.into(), value, expected: least, bounds }
    }

    /// Whether it is within its bounds.
    pub fn holds(&self) -> bool {
        self.bounds[0] <= self.value && self.value <= self.bounds[1]
    }

    /// The deviation, relative to the expected value.
    pub fn deviation(&self) -> f64 {
        if self.value == self.expected { 0.0 } else { self.value / self.expected - 1.0 }
    }
}

/// All results of a paper.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Results {
    /// The tables.
    pub tables: Vec<Table>,
    /// The charts.
    pub charts: Vec<Chart>,
    /// The checks.
    pub checks: Vec<Check>,
}

impl Results {
    /// The failed checks.
    pub fn failures(&self) -> impl Iterator<Item = &Check> {
        self.checks.iter().filter(|check| !check.holds())
    }
}
