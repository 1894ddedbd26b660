//! Results as they are measured: a table at once, and JSON at the end.

use std::{
    fs::File,
    io::{self, Write},
    path::{Path, PathBuf},
};

use serde::Serialize;

use gradwire_launcher::error::CommandError;

/// A column: its heading, its width, and the text of a cell.
pub type Column<R> = (&'static str, usize, fn(&R) -> String);

/// Formats microseconds for a cell.
pub fn micros(us: f64) -> String {
    format!("{us:.1}")
}

/// The cell of an unknown value.
pub fn none() -> String {
    "-".to_owned()
}

/// The table of a measurement: a head with its description, and rows.
#[derive(Debug)]
pub struct Table<H, R: 'static> {
    head: H,
    rows: Vec<R>,
    columns: Vec<&'static Column<R>>,
    json: Option<(PathBuf, File)>,
    writes: bool,
}

impl<H: Serialize, R: Serialize> Table<H, R> {
    /// Begins the table with `lines` and the column headings. Without `writes`, nothing is written,
    /// because only one of many processes writes.
    ///
    /// # Errors
    /// [`CommandError`] if the JSON file can't be created, or if the reader closed the pipe.
    pub fn begin(
        head: H,
        lines: Vec<String>,
        columns: Vec<&'static Column<R>>,
        json: Option<&Path>,
        writes: bool,
    ) -> Result<Self, CommandError> {
        // Created now, so that errors are reported before anything is measured.
        let json = json
            .filter(|_| writes)
            .map(|path| match File::create(path) {
                Ok(file) => Ok((path.to_owned(), file)),
                Err(error) => Err(unwritable(path, &error)),
            })
            .transpose()?;
        let table = Self { head, rows: Vec::new(), columns, json, writes };
        let heads = table.columns.iter().map(|(head, width, _)| format!("{head:>width$}"));
        let heads = heads.collect::<Vec<_>>().join(" ");
        let lines = lines.into_iter().chain([heads]);
        table.say(&lines.map(|line| format!("# {line}\n")).collect::<String>())?;
        Ok(table)
    }

    /// Adds a row.
    ///
    /// # Errors
    /// [`CommandError`] if the reader closed the pipe.
    pub fn row(&mut self, row: R) -> Result<(), CommandError> {
        let cells = self.columns.iter().map(|(_, width, cell)| format!("{:>width$}", cell(&row)));
        let line = cells.collect::<Vec<_>>().join(" ");
        self.rows.push(row);
        self.say(&format!("  {line}\n"))
    }

    /// Writes the JSON file.
    ///
    /// # Errors
    /// [`CommandError`] if it can't be written.
    pub fn finish(self) -> Result<(), CommandError> {
        #[derive(Serialize)]
        struct Document<'a, H, R> {
            #[serde(flatten)]
            head: &'a H,
            rows: &'a [R],
        }
        let Some((path, mut file)) = self.json else { return Ok(()) };
        let document = Document { head: &self.head, rows: &self.rows };
        let text = serde_json::to_string_pretty(&document).map_err(CommandError::failed)?;
        file.write_all(text.as_bytes())
            .and_then(|()| file.write_all(b"\n"))
            .map_err(|error| unwritable(&path, &error))
    }

    fn say(&self, text: &str) -> Result<(), CommandError> {
        if !self.writes {
            return Ok(());
        }
        let mut out = io::stdout().lock();
        out.write_all(text.as_bytes())
            .and_then(|()| out.flush())
            .map_err(|error| CommandError::failed(format!("the table can't be written: {error}")))
    }
}

fn unwritable(path: &Path, error: &io::Error) -> CommandError {
    CommandError::failed(format!("--json {} can't be written: {error}", path.display()))
        .hint("the file of a job is on its first host; relative paths begin in the job's directory")
}
