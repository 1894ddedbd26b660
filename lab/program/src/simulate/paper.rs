//! `gradwire simulate paper`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use gradwire_launcher::error::CommandError;
use gradwire_simulator::{
    paper::Paper,
    table::{Check, Results, Table},
};
use serde_json::{Value, json};

use super::{
    output::{Directory, Output, as_text},
    progress::Progress,
};

/// The options of `gradwire simulate paper`.
#[derive(Debug, Args)]
pub struct PaperOptions {
    /// The paper.
    pub paper: Name,
    /// Also write each table as CSV to DIR, each chart as SVG and PNG, and all figures with their
    /// bounds as result.json.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// The papers by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Name {
    /// The formulas of the literature, as printed and as corrected.
    Formulas,
    /// One master compared with a ring.
    Ring,
    /// The 2D torus.
    Torus,
    /// BytePS: servers take a part of the reduction.
    Byteps,
    /// RAT: oversubscribed racks, and hosts that stop. Takes a few minutes.
    Rat,
}

impl Name {
    fn paper(self) -> Paper {
        match self {
            Self::Formulas => Paper::Formulas,
            Self::Ring => Paper::Ring,
            Self::Torus => Paper::Torus,
            Self::Byteps => Paper::BytePs,
            Self::Rat => Paper::Rat,
        }
    }
}

pub(super) fn paper(options: &PaperOptions) -> Result<Output, CommandError> {
    let directory = Directory::new(options.out.as_deref())?;
    let progress = Progress::new();
    progress.about("all simulations of the paper");
    let results = options.paper.paper().run();
    drop(progress);
    Ok(output(results, directory))
}

fn output(results: Results, directory: Directory) -> Output {
    let (text, json) = (text(&results), as_json(&results));
    let holds = results.failures().next().is_none();
    let Results { tables, charts, .. } = results;
    Output { text, tables, charts, json, holds, directory }
}

fn text(results: &Results) -> String {
    let table = |table: &Table| format!("{}\n{}\n", table.title, as_text(table));
    let tables: String = results.tables.iter().map(table).collect();
    let failures: String = results.failures().map(failure).collect();
    let (all, failed) = (results.checks.len(), results.failures().count());
    let end = format!("{} of {all} checked results are within their bounds.\n", all - failed);
    format!("{tables}{failures}{end}")
}

fn failure(check: &Check) -> String {
    let Check { what, value, bounds: [least, most], .. } = check;
    format!("out of bounds: {what}: {value:.4}, not from {least:.4} to {most:.4}\n")
}

/// Infinite bounds are null.
fn as_json(results: &Results) -> Value {
    json!({
        "tables": results.tables,
        "charts": results.charts,
        "checks": results.checks,
        "out_of_bounds": results.failures().map(|check| &check.what).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_out_of_bounds_are_named() {
        let checks = vec![Check::within("as published", 1.01, 1.0, 0.02)];
        let good = Results { checks, ..Results::default() };
        let mut bad = good.clone();
        bad.checks.push(Check::at_least("twice as fast", 1.5, 2.0));
        let [good, bad] = [good, bad].map(|results| output(results, Directory::default()));
        assert_eq!(good.text, "1 of 1 checked results are within their bounds.\n");
        assert!(good.holds && !bad.holds);
        assert_eq!(
            bad.text,
            "out of bounds: twice as fast: 1.5000, not from 2.0000 to inf\n\
             1 of 2 checked results are within their bounds.\n"
        );
        assert_eq!(bad.json["out_of_bounds"], json!(["twice as fast"]));
        assert_eq!(bad.json["checks"][1]["bounds"], json!([2.0, null]));
    }
}
