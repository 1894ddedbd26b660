//! The file of a trace. Complete lines are written at once, so it always ends with a complete line.

use std::{
    fs::{self, File, TryLockError},
    io::{ErrorKind, Write as _},
    path::{Path, PathBuf},
};

use gradwire_launcher::error::CommandError;

/// A file with a limit.
#[derive(Debug)]
pub(super) struct TraceFile {
    path: PathBuf,
    name: String,
    file: File,
    left: u64,
    is_full: bool,
    is_new: bool,
    has_begun: bool,
}

impl TraceFile {
    /// Opens a file of at most `max_mib` MiB (BOUND), for one trace at a time. An old file is
    /// unchanged until the first write, and a new file without a write is removed: an error neither
    /// destroys nor leaves a file.
    pub(super) fn open(path: &Path, max_mib: u64) -> Result<Self, CommandError> {
        let name = path.display().to_string();
        let mut options = File::options();
        options.write(true);
        let (opened, is_new) = match options.open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                (options.create_new(true).open(path), true)
            }
            opened => (opened, false),
        };
        let file = opened.map_err(|error| {
            CommandError::failed(format!("{name} can't be written: {error}"))
                .hint("name another file")
        })?;
        // Some file systems have no locks, and several traces may write to a device.
        let is_file = file.metadata().is_ok_and(|file| file.is_file());
        if is_file && matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
            let what = format!("{name} can't be written: another trace is writing to it");
            return Err(CommandError::failed(what).hint("name another file"));
        }
        let (path, left) = (path.to_owned(), max_mib << 20);
        Ok(Self { path, name, file, left, is_full: false, is_new, has_begun: false })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Whether lines did not fit.
    pub(super) fn is_full(&self) -> bool {
        self.is_full
    }

    /// Writes lines, if they fit. Returns whether they do.
    pub(super) fn write(&mut self, lines: &[u8]) -> Result<bool, CommandError> {
        let bytes = lines.len() as u64;
        if self.is_full || bytes > self.left {
            self.is_full = true;
            return Ok(false);
        }
        self.left -= bytes;
        self.put(lines)?;
        Ok(true)
    }

    /// Writes the last lines in any case.
    pub(super) fn end(&mut self, lines: &[u8]) -> Result<(), CommandError> {
        self.put(lines)
    }

    fn put(&mut self, lines: &[u8]) -> Result<(), CommandError> {
        // A pipe or a device has no length.
        let is_file = || self.file.metadata().is_ok_and(|file| file.is_file());
        let begun = if !self.has_begun && is_file() { self.file.set_len(0) } else { Ok(()) };
        self.has_begun = true;
        begun.and_then(|()| self.file.write_all(lines)).map_err(|error| {
            let what = format!("{} can't be written: {error}", self.name);
            CommandError::failed(what).hint("it contains the trace until then")
        })
    }
}

impl Drop for TraceFile {
    fn drop(&mut self) {
        if self.is_new && !self.has_begun {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_changes_once_something_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.json");
        drop(TraceFile::open(&path, 1).unwrap());
        assert!(!path.exists());
        fs::write(&path, "an older and longer file").unwrap();
        let mut file = TraceFile::open(&path, 1).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "an older and longer file");
        file.write(b"[\n").unwrap();
        file.end(b"]\n").unwrap();
        drop(file);
        assert_eq!(fs::read_to_string(&path).unwrap(), "[\n]\n");
        let error = TraceFile::open(folder.path(), 1).unwrap_err();
        assert!(error.what.contains("Is a directory"), "{error:?}");
    }

    #[test]
    fn two_traces_do_not_mix_in_one_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.json");
        let mut first = TraceFile::open(&path, 1).unwrap();
        first.write(b"[\n").unwrap();
        let error = TraceFile::open(&path, 1).unwrap_err();
        assert!(error.what.contains("another trace is writing to it"), "{error:?}");
        first.end(b"]\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "[\n]\n");
        drop(first);
        drop(TraceFile::open(&path, 1).unwrap());
        let _several = [(); 2].map(|()| TraceFile::open(Path::new("/dev/null"), 1).unwrap());
    }
}
