//! The printed and written results of a simulation. Equal results give equal bytes.

use std::{
    fs::{self, OpenOptions},
    io,
    path::{Path, PathBuf},
};

use gradwire_cli::cluster::aligned;
use gradwire_launcher::error::CommandError;
use gradwire_simulator::table::{Chart, Table};
use serde_json::Value;

use super::plot;

/// The file with all figures.
const RESULT: &str = "result.json";

/// The output directory, if any.
#[derive(Debug, Default)]
pub(super) struct Directory(Option<PathBuf>);

impl Directory {
    /// Creates it if it is missing, and checks that it can be written, because a simulation may
    /// take long.
    pub(super) fn new(path: Option<&Path>) -> Result<Self, CommandError> {
        let Some(path) = path else { return Ok(Self::default()) };
        fs::create_dir_all(path).map_err(|error| refused(path, &error))?;
        let file = path.join(RESULT);
        let open = OpenOptions::new().append(true).create(true).open(&file);
        open.map_err(|error| refused(&file, &error))?;
        Ok(Self(Some(path.to_owned())))
    }
}

fn refused(path: &Path, error: &io::Error) -> CommandError {
    CommandError::usage(format!("--out: {}: {error}", path.display()))
        .hint("name a directory that you may write to; it is created if it is missing")
}

/// The output of a simulation.
#[derive(Debug)]
pub(super) struct Output {
    /// The printed text.
    pub(super) text: String,
    /// The tables to write as comma-separated values.
    pub(super) tables: Vec<Table>,
    /// The charts to draw as SVG and PNG.
    pub(super) charts: Vec<Chart>,
    /// All figures.
    pub(super) json: Value,
    /// Whether all results are within their bounds and all jobs ended.
    pub(super) holds: bool,
    /// Where to write.
    pub(super) directory: Directory,
}

impl Output {
    pub(super) fn write(&self) -> Result<(), CommandError> {
        let Directory(Some(directory)) = &self.directory else { return Ok(()) };
        let write = |name: String, bytes: &[u8]| {
            let path = directory.join(name);
            fs::write(&path, bytes).map_err(|error| {
                CommandError::failed(format!("{} can't be written: {error}", path.display()))
            })
        };
        write(RESULT.to_owned(), format!("{:#}\n", self.json).as_bytes())?;
        for table in &self.tables {
            write(format!("{}.csv", table.title), table.to_csv().as_bytes())?;
        }
        for chart in &self.charts {
            write(format!("{}.svg", chart.title), plot::svg(chart)?.as_bytes())?;
            write(format!("{}.png", chart.title), &plot::png(chart)?)?;
        }
        Ok(())
    }
}

/// A table as text.
pub(super) fn as_text(table: &Table) -> String {
    let rows: Vec<&Vec<String>> = std::iter::once(&table.head).chain(&table.rows).collect();
    aligned(&rows)
}
