//! Results as tables and charts, with the bounds that they have to keep.

use serde::Serialize;

/// Rows of text under a head.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Table {
    /// What it shows; also the name of its file.
    pub title: String,
    /// The columns.
    pub head: Vec<String>,
    /// The rows, with as many entries.
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
    /// What it shows; also the name of its file.
    pub title: String,
    /// The horizontal axis.
    pub x: String,
    /// The vertical axis.
    pub y: String,
    /// Whether each step of an axis is a factor.
    pub logarithmic: [bool; 2],
    /// The lines with their names.
    pub lines: Vec<(String, Vec<(f64, f64)>)>,
}

/// A value and where it has to be.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Check {
    /// What is compared.
    pub what: String,
    /// What was simulated.
    pub value: f64,
    /// What it should be.
    pub expected: f64,
    /// The least and the most that it may be.
    pub bounds: [f64; 2],
}

impl Check {
    /// It may differ from what is expected by a part of that.
    pub fn within(what: impl Into<String>, value: f64, expected: f64, part: f64) -> Self {
        let bounds = [expected * (1.0 - part), expected * (1.0 + part)];
        Self { what: what.into(), value, expected, bounds }
    }

    /// It may differ by an amount.
    pub fn near(what: impl Into<String>, value: f64, expected: f64, by: f64) -> Self {
        Self { what: what.into(), value, expected, bounds: [expected - by, expected + by] }
    }

    /// It has to be at most so much.
    pub fn at_most(what: impl Into<String>, value: f64, most: f64) -> Self {
        let bounds = [f64::NEG_INFINITY, most];
        Self { what: what.into(), value, expected: most, bounds }
    }

    /// It has to be at least so much.
    pub fn at_least(what: impl Into<String>, value: f64, least: f64) -> Self {
        let bounds = [least, f64::INFINITY];
        Self { what: what.into(), value, expected: least, bounds }
    }

    /// Whether it is within its bounds.
    pub fn holds(&self) -> bool {
        self.bounds[0] <= self.value && self.value <= self.bounds[1]
    }

    /// By how much it differs, as a part of what is expected.
    pub fn deviation(&self) -> f64 {
        if self.value == self.expected { 0.0 } else { self.value / self.expected - 1.0 }
    }
}

/// All that was simulated of one paper.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Results {
    /// The tables.
    pub tables: Vec<Table>,
    /// The charts.
    pub charts: Vec<Chart>,
    /// What has to hold.
    pub checks: Vec<Check>,
}

impl Results {
    /// What does not hold.
    pub fn failures(&self) -> impl Iterator<Item = &Check> {
        self.checks.iter().filter(|check| !check.holds())
    }
}
