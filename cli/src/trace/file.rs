//! The file of a trace. Whole lines are written at once, so at any moment it ends with a whole
//! line.

use std::{fs::File, io::Write as _, path::Path};

use gradwire_launcher::error::CommandError;

/// A file with a limit.
#[derive(Debug)]
pub(super) struct TraceFile {
    name: String,
    file: File,
    left: u64,
    is_full: bool,
}

impl TraceFile {
    /// A new file, in the place of an older one, of so many mebibytes at most (BOUND).
    pub(super) fn create(path: &Path, max_mib: u64) -> Result<Self, CommandError> {
        let name = path.display().to_string();
        let file = File::create(path).map_err(|error| {
            CommandError::failed(format!("{name} can't be written: {error}"))
                .hint("name another file")
        })?;
        Ok(Self { name, file, left: max_mib << 20, is_full: false })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Whether something did not fit any more.
    pub(super) fn is_full(&self) -> bool {
        self.is_full
    }

    /// Writes lines, if they fit.
    pub(super) fn write(&mut self, lines: &str) -> Result<(), CommandError> {
        let bytes = lines.len() as u64;
        if self.is_full || bytes > self.left {
            self.is_full = true;
            return Ok(());
        }
        self.left -= bytes;
        self.put(lines)
    }

    /// Writes the last lines in any case.
    pub(super) fn end(&mut self, lines: &str) -> Result<(), CommandError> {
        self.put(lines)
    }

    fn put(&mut self, lines: &str) -> Result<(), CommandError> {
        self.file.write_all(lines.as_bytes()).map_err(|error| {
            let what = format!("{} can't be written: {error}", self.name);
            CommandError::failed(what).hint("it has what was traced until then")
        })
    }
}
