//! Where output goes: each line to the launcher's own output with its rank in front, and as it is
//! to a file of its own if that is asked for.
//!
//! One thread writes, so lines never mix. Its queue is bounded (BOUND): when the terminal or the
//! disk is slow, the ranks that write wait, and nothing is lost. Nothing else waits for it: a
//! launcher whose output is blocked still hears Ctrl-C.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, BufWriter, IsTerminal, Write},
    path::{Path, PathBuf},
    thread,
};

use tokio::sync::{mpsc, oneshot};

use crate::protocol::{LineEnd, Stream, Text};

/// How many lines may wait to be written.
const QUEUE: usize = 1024;

/// Who says something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A rank: its output is the job's, and goes to files as well.
    Rank(u32),
    /// A service or an agent, by name; shown on standard error.
    Service(String),
    /// The launcher.
    Launcher,
}

/// A stretch of output, at most a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// Whose.
    pub source: Source,
    /// Where it goes.
    pub stream: Stream,
    /// Without its end.
    pub text: Text,
    /// What came after it.
    pub end: LineEnd,
}

impl Line {
    /// A line of the launcher.
    pub fn note(text: &str) -> Self {
        Self {
            source: Source::Launcher,
            stream: Stream::Stderr,
            text: Text::Utf8(text.to_owned()),
            end: LineEnd::Newline,
        }
    }
}

/// Puts lines together with their prefixes. Pure: bytes come out.
#[derive(Debug, Default)]
struct Layout {
    /// Whose line has no newline yet, and whether more of the same line follows.
    open: Option<(Source, Stream, LineEnd)>,
    /// Whether both outputs are the same terminal, where an open line of one is in the way of
    /// the other.
    shared: bool,
    /// Whether the ranks' standard output is left as it is.
    bare: bool,
}

impl Layout {
    /// What is to be written for a line, and where; in order.
    fn lay(&mut self, line: &Line) -> Vec<(Stream, Vec<u8>)> {
        let (mut parts, mut goes_on) = (Vec::new(), false);
        if let Some((source, stream, end)) = self.open.take() {
            let same = source == line.source && stream == line.stream;
            if same {
                goes_on = end == LineEnd::Open;
            } else if stream == line.stream || self.shared {
                // Somebody else's progress bar stays readable, and so does this line.
                parts.push((stream, b"\n".to_vec()));
            } else {
                self.open = Some((source, stream, end));
            }
        }
        let mut bytes = match &line.source {
            _ if goes_on => Vec::new(),
            Source::Rank(_) if self.bare && line.stream == Stream::Stdout => Vec::new(),
            Source::Rank(rank) => format!("[{rank}] ").into_bytes(),
            Source::Service(name) => format!("[{name}] ").into_bytes(),
            Source::Launcher => b"gradwire: ".to_vec(),
        };
        bytes.extend_from_slice(line.text.as_bytes());
        bytes.extend_from_slice(line.end.as_bytes());
        parts.push((line.stream, bytes));
        if line.end != LineEnd::Newline {
            self.open = Some((line.source.clone(), line.stream, line.end));
        }
        parts
    }

    /// What closes a line that is still open.
    fn close(&mut self) -> Option<(Stream, Vec<u8>)> {
        self.open.take().map(|(_, stream, _)| (stream, b"\n".to_vec()))
    }
}

/// The files of each rank: `DIR/rank.07/stdout` and `stderr`.
#[derive(Debug)]
pub struct Files(BTreeMap<(u32, Stream), BufWriter<File>>);

impl Files {
    /// Makes the files; those of an earlier run are replaced.
    ///
    /// # Errors
    /// The path that can't be made, with what the system said.
    pub fn create(directory: &Path, size: u32) -> Result<Self, (PathBuf, io::Error)> {
        let digits = size.saturating_sub(1).to_string().len().max(2);
        let mut files = BTreeMap::new();
        for rank in 0..size {
            let folder = directory.join(format!("rank.{rank:0digits$}"));
            fs::create_dir_all(&folder).map_err(|error| (folder.clone(), error))?;
            for (stream, name) in [(Stream::Stdout, "stdout"), (Stream::Stderr, "stderr")] {
                let path = folder.join(name);
                let file = File::create(&path).map_err(|error| (path, error))?;
                files.insert((rank, stream), BufWriter::new(file));
            }
        }
        Ok(Self(files))
    }
}

/// The way to the writing thread; it ends when all clones of the sender are gone.
#[derive(Debug)]
pub struct Console {
    /// Where lines go in.
    pub lines: mpsc::Sender<Line>,
    /// Becomes ready when the thread has ended: with the error, if output can't be written.
    pub ended: oneshot::Receiver<Option<String>>,
}

impl Console {
    /// Starts the writing thread. `bare`: without numbers on the ranks' standard output.
    ///
    /// # Errors
    /// If there can be no thread.
    pub fn start(files: Option<Files>, bare: bool) -> io::Result<Self> {
        let (lines, queue) = mpsc::channel(QUEUE);
        let (tell, ended) = oneshot::channel();
        thread::Builder::new().name("gradwire-output".to_owned()).spawn(move || {
            let result = Writer::new(files, bare).run(queue);
            // Nobody listens if the launcher has ended already.
            let _ = tell.send(result.err().map(|error| error.to_string()));
        })?;
        Ok(Self { lines, ended })
    }
}

struct Writer {
    layout: Layout,
    stdout: BufWriter<io::Stdout>,
    stderr: BufWriter<io::Stderr>,
    last: Stream,
    files: Option<Files>,
}

impl Writer {
    fn new(files: Option<Files>, bare: bool) -> Self {
        let shared = io::stdout().is_terminal() && io::stderr().is_terminal();
        Self {
            layout: Layout { open: None, shared, bare },
            stdout: BufWriter::new(io::stdout()),
            stderr: BufWriter::new(io::stderr()),
            last: Stream::Stdout,
            files,
        }
    }

    fn run(mut self, mut queue: mpsc::Receiver<Line>) -> io::Result<()> {
        while let Some(line) = queue.blocking_recv() {
            self.write(&line)?;
            while let Ok(line) = queue.try_recv() {
                self.write(&line)?;
            }
            self.flush()?;
        }
        if let Some((stream, bytes)) = self.layout.close() {
            self.emit(stream, &bytes)?;
        }
        self.flush()
    }

    fn write(&mut self, line: &Line) -> io::Result<()> {
        if let (Source::Rank(rank), Some(files)) = (&line.source, &mut self.files)
            && let Some(file) = files.0.get_mut(&(*rank, line.stream))
        {
            file.write_all(line.text.as_bytes())?;
            file.write_all(line.end.as_bytes())?;
        }
        for (stream, bytes) in self.layout.lay(line) {
            self.emit(stream, &bytes)?;
        }
        Ok(())
    }

    /// The two outputs are often one terminal: what comes first is written first.
    fn emit(&mut self, stream: Stream, bytes: &[u8]) -> io::Result<()> {
        if stream != self.last {
            self.stdout.flush()?;
            self.stderr.flush()?;
            self.last = stream;
        }
        match stream {
            Stream::Stdout => self.stdout.write_all(bytes),
            Stream::Stderr => self.stderr.write_all(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stdout.flush()?;
        self.stderr.flush()?;
        for file in self.files.iter_mut().flat_map(|files| files.0.values_mut()) {
            file.flush()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(rank: u32, stream: Stream, text: &str, end: LineEnd) -> Line {
        Line { source: Source::Rank(rank), stream, text: Text::Utf8(text.into()), end }
    }

    fn shown(shared: bool, lines: &[Line]) -> String {
        let mut layout = Layout { open: None, shared, bare: false };
        let mut parts: Vec<_> = lines.iter().flat_map(|line| layout.lay(line)).collect();
        parts.extend(layout.close());
        parts.into_iter().map(|(_, bytes)| String::from_utf8(bytes).unwrap()).collect()
    }

    #[test]
    fn a_progress_bar_stays_readable_among_other_lines() {
        use {LineEnd::*, Stream::*};
        let lines = [
            line(0, Stderr, "10%", Return),
            line(0, Stderr, "20%", Return),
            line(1, Stdout, "hello", Newline),
            line(0, Stderr, "30%", Return),
            line(0, Stderr, "done", Newline),
        ];
        assert_eq!(shown(true, &lines), "[0] 10%\r[0] 20%\r\n[1] hello\n[0] 30%\r[0] done\n");
        assert_eq!(shown(false, &lines), "[0] 10%\r[0] 20%\r[1] hello\n[0] 30%\r[0] done\n");
    }

    #[test]
    fn only_standard_output_is_left_bare() {
        use {LineEnd::*, Stream::*};
        let mut layout = Layout { open: None, shared: false, bare: true };
        let lines = [line(0, Stdout, "table", Newline), line(1, Stderr, "error", Newline)];
        let shown: Vec<_> = lines.iter().flat_map(|line| layout.lay(line)).collect();
        assert_eq!(shown, [(Stdout, b"table\n".to_vec()), (Stderr, b"[1] error\n".to_vec())]);
    }

    #[test]
    fn a_long_line_in_pieces_has_one_prefix() {
        use {LineEnd::*, Stream::*};
        let lines = [
            line(2, Stdout, "aaa", Open),
            line(2, Stdout, "bbb", Newline),
            line(2, Stdout, "c", Open),
            line(3, Stdout, "d", Newline),
            line(2, Stdout, "e", Open),
        ];
        assert_eq!(shown(false, &lines), "[2] aaabbb\n[2] c\n[3] d\n[2] e\n");
        assert_eq!(shown(false, &[Line::note("ready")]), "gradwire: ready\n");
    }

    #[test]
    fn files_are_named_by_rank_and_a_bad_folder_is_named() {
        let dir = tempfile::tempdir().unwrap();
        Files::create(dir.path(), 1).unwrap();
        assert!(dir.path().join("rank.00/stdout").is_file(), "a single rank has its folder too");
        Files::create(dir.path(), 101).unwrap();
        assert!(dir.path().join("rank.007/stderr").is_file());
        let (path, _) = Files::create(&dir.path().join("rank.00/stdout"), 1).unwrap_err();
        assert!(path.ends_with("rank.00/stdout/rank.00"), "{}", path.display());
    }
}
