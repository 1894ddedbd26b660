//! What a simulation prints and writes. The same results give the same bytes.

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

/// Where files are written, if anywhere.
#[derive(Debug, Default)]
pub(super) struct Directory(Option<PathBuf>);

impl Directory {
    /// Makes it if there is none, and looks whether it can be written: a simulation may take long.
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
        .hint("name a directory that you may write to; it is made if there is none")
}

/// What was simulated.
#[derive(Debug)]
pub(super) struct Output {
    /// What is printed.
    pub(super) text: String,
    /// What is written as comma-separated values.
    pub(super) tables: Vec<Table>,
    /// What is drawn as SVG and PNG.
    pub(super) charts: Vec<Chart>,
    /// All figures.
    pub(super) json: Value,
    /// Whether all results are within their bounds, and all jobs have ended.
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
