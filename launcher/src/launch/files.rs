//! The files of `--output-dir`: the output of each process, unchanged.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use gradwire_services::launch::Stream;

use super::lines::{Line, Source};

/// How many digits the number of a rank has at least in the name of its folder.
fn digits(size: u32) -> usize {
    size.saturating_sub(1).to_string().len().max(2)
}

fn rank_folder(rank: u32, digits: usize) -> String {
    format!("rank.{rank:0digits$}")
}

/// The file in which a rank of a job of `size` ranks describes an uncaught error, if its program
/// uses PyTorch's `torch.distributed.elastic.multiprocessing.errors.record`.
pub(super) fn error_file(directory: &Path, size: u32, rank: u32) -> PathBuf {
    directory.join(rank_folder(rank, digits(size))).join("error.json")
}

/// The files of each process: `DIR/rank.07/stdout` and `stderr`, with as many digits as the job
/// needs at first, and `DIR/daemon.HOST/stderr`.
#[derive(Debug)]
pub struct Files {
    directory: PathBuf,
    /// How many digits the number of a rank has.
    digits: usize,
    open: BTreeMap<(Source, Stream), OutputFile>,
}

#[derive(Debug)]
struct OutputFile {
    path: PathBuf,
    file: BufWriter<File>,
}

impl OutputFile {
    /// Uses the file, and adds its path to an error.
    fn with(
        &mut self,
        work: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
    ) -> io::Result<()> {
        let named = |error: io::Error| format!("{}: {error}", self.path.display());
        work(&mut self.file).map_err(|error| io::Error::new(error.kind(), named(error)))
    }
}

impl Files {
    /// Creates the files of `size` ranks and of the daemons of `hosts`, and replaces those of an
    /// earlier run.
    ///
    /// # Errors
    /// The path that can't be created, with the system's error.
    pub fn create<'a>(
        directory: &Path,
        size: u32,
        hosts: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, (PathBuf, io::Error)> {
        let (directory, digits) = (directory.to_owned(), digits(size));
        let mut files = Self { directory, digits, open: BTreeMap::new() };
        for rank in 0..size {
            files.add_rank(rank)?;
        }
        for host in hosts {
            files.add_daemon(host)?;
        }
        Ok(files)
    }

    /// Creates the files of a rank.
    fn add_rank(&mut self, rank: u32) -> Result<(), (PathBuf, io::Error)> {
        let folder = self.directory.join(rank_folder(rank, self.digits));
        for (stream, name) in [(Stream::Stdout, "stdout"), (Stream::Stderr, "stderr")] {
            self.add(Source::Rank(rank), stream, &folder, name)?;
        }
        Ok(())
    }

    /// Creates the file of a daemon.
    fn add_daemon(&mut self, host: &str) -> Result<(), (PathBuf, io::Error)> {
        let folder = self.directory.join(format!("daemon.{host}"));
        self.add(Source::daemon(host), Stream::Stderr, &folder, "stderr")
    }

    fn add(
        &mut self,
        source: Source,
        stream: Stream,
        folder: &Path,
        name: &str,
    ) -> Result<(), (PathBuf, io::Error)> {
        fs::create_dir_all(folder).map_err(|error| (folder.to_owned(), error))?;
        let path = folder.join(name);
        let file = File::create(&path).map_err(|error| (path.clone(), error))?;
        self.open.insert((source, stream), OutputFile { path, file: BufWriter::new(file) });
        Ok(())
    }

    /// Writes a line to the file of its source, if it has one. Ranks and daemons that an elastic
    /// job starts later get theirs with their first line.
    ///
    /// # Errors
    /// The system's error, with the path.
    pub fn write(&mut self, line: &Line) -> io::Result<()> {
        let of = (line.source.clone(), line.stream);
        if !self.open.contains_key(&of) {
            let added = match &line.source {
                Source::Rank(rank) => self.add_rank(*rank),
                source => source.daemon_host().map_or(Ok(()), |host| self.add_daemon(host)),
            };
            added.map_err(|(path, error)| {
                io::Error::new(error.kind(), format!("{}: {error}", path.display()))
            })?;
        }
        let Some(file) = self.open.get_mut(&of) else { return Ok(()) };
        file.with(|file| {
            file.write_all(line.text.as_bytes())?;
            file.write_all(line.end.as_bytes())
        })
    }

    /// Passes everything on to the system.
    ///
    /// # Errors
    /// As of [`Files::write`].
    pub fn flush(&mut self) -> io::Result<()> {
        self.open.values_mut().try_for_each(|file| file.with(BufWriter::flush))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_named_by_rank() {
        let dir = tempfile::tempdir().unwrap();
        Files::create(dir.path(), 1, ["n1"]).unwrap();
        assert!(dir.path().join("daemon.n1/stderr").is_file());
        assert!(dir.path().join("rank.00/stdout").is_file(), "a single rank has its folder too");
        Files::create(dir.path(), 101, []).unwrap();
        assert!(dir.path().join("rank.007/stderr").is_file());
        let mut files = Files::create(dir.path(), 2, []).unwrap();
        let line = Line { source: Source::Rank(12), ..Line::note("late") };
        files.write(&line).unwrap();
        files.write(&Line { source: Source::daemon("n2"), ..line }).unwrap();
        files.flush().unwrap();
        let read = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
        let late = ["rank.12/stderr", "daemon.n2/stderr"].map(read);
        assert_eq!(late, ["late\n", "late\n"]);
        let (path, _) = Files::create(&dir.path().join("rank.00/stdout"), 1, []).unwrap_err();
        assert!(path.ends_with("rank.00/stdout/rank.00"), "{}", path.display());
    }
}
