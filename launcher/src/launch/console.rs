//! Where output goes: each line to the launcher's own output with its rank as a prefix and, with
//! `--output-dir`, unchanged to a file of its process.
//!
//! One thread writes, so lines never mix. Its queue is bounded (BOUND): when the terminal or the
//! disk is slow, the ranks that write wait, and nothing is lost. Nothing else waits for it: a
//! launcher whose output is blocked still reacts to Ctrl-C. [`Reading`] distinguishes a slow reader
//! from a missing one.

use std::{
    collections::BTreeMap,
    io::{self, BufWriter, IsTerminal, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use gradwire_proto::Rank;
use gradwire_services::launch::{LineEnd, Stream};
use humantime::format_rfc3339_millis;
use rustix::fs::fstat;
use tokio::sync::{mpsc, oneshot};

use super::{
    files::Files,
    fold::Fold,
    lines::{Entry, Line, Source},
    progress::Progress,
};

/// How many lines may wait for the writer.
const QUEUE: usize = 1024;

/// How long output may wait for a reader that does not read (WAIT).
const READER_LIMIT: Duration = Duration::from_secs(300);

/// A line that has no newline yet: its source, and whether more of the same line follows.
type OpenLine = (Source, LineEnd);

/// How many bytes of a line of a rank's standard error are shown on a terminal: more than a screen.
/// An error with a text of megabytes would hide all others.
const SHOWN: usize = 8 << 10;

/// Adds prefixes to lines. Pure: it returns bytes.
#[derive(Debug, Default)]
struct Layout {
    /// How long the unfinished lines of the ranks' standard error are, in bytes.
    lengths: BTreeMap<u32, usize>,
    /// The open line of each output.
    open: BTreeMap<Stream, OpenLine>,
    /// Whether both outputs are the same terminal, where an open line of one must be closed before
    /// the other writes.
    shared: bool,
    /// Whether standard error is a terminal, where long lines are cut.
    cuts: bool,
    /// Whether files have all output, too.
    has_files: bool,
    /// Whether the standard output of ranks gets no prefix.
    bare: bool,
    /// The clock, if lines begin with the time.
    clock: Option<fn() -> SystemTime>,
}

impl Layout {
    /// The bytes to write for a line, and where, in order.
    fn lay(&mut self, line: &Line) -> Vec<(Stream, Vec<u8>)> {
        let before = self.open.remove(&line.stream);
        let goes_on = before == Some((line.source.clone(), LineEnd::Open));
        let mut parts = Vec::new();
        if before.is_some_and(|(source, _)| source != line.source) {
            // The progress bar of another process stays readable, and so does this line.
            parts.push((line.stream, b"\n".to_vec()));
        }
        if self.shared {
            parts.extend(self.close());
        }
        let mut bytes = match self.clock {
            Some(clock) if !goes_on && line.source != Source::Report => {
                format!("{} ", format_rfc3339_millis(clock())).into_bytes()
            }
            _ => Vec::new(),
        };
        bytes.extend(match &line.source {
            _ if goes_on => Vec::new(),
            Source::Report => Vec::new(),
            Source::Rank(_) if self.bare && line.stream == Stream::Stdout => Vec::new(),
            Source::Rank(rank) => format!("[{rank}] ").into_bytes(),
            Source::Ranks(ranks) => {
                format!("[{}] ", Rank::list(ranks.iter().copied().map(Rank))).into_bytes()
            }
            Source::Service(name) => format!("[{name}] ").into_bytes(),
            Source::Launcher => b"gradwire: ".to_vec(),
        });
        self.add_text(line, &mut bytes);
        bytes.extend_from_slice(line.end.as_bytes());
        parts.push((line.stream, bytes));
        if line.end != LineEnd::Newline {
            self.open.insert(line.stream, (line.source.clone(), line.end));
        }
        parts
    }

    /// Adds the text of a line. If only a part of it is shown, adds the length of the whole.
    fn add_text(&mut self, line: &Line, bytes: &mut Vec<u8>) {
        let text = line.text.as_bytes();
        let rank = match &line.source {
            Source::Rank(rank) if line.stream == Stream::Stderr => rank,
            Source::Ranks(ranks) if let Some(rank) = ranks.first() => rank,
            _ => return bytes.extend_from_slice(text),
        };
        if !self.cuts {
            return bytes.extend_from_slice(text);
        }
        let before = self.lengths.remove(rank).unwrap_or_default();
        let length = before + text.len();
        let mut shown = SHOWN.saturating_sub(before).min(text.len());
        // Not in the middle of a character.
        while shown < text.len() && text[shown] & 0xc0 == 0x80 {
            shown += 1;
        }
        bytes.extend_from_slice(&text[..shown]);
        if line.end == LineEnd::Open {
            self.lengths.insert(*rank, length);
        } else if length > SHOWN + 4 {
            let all = if self.has_files {
                "the file of this output has all of it"
            } else {
                "--output-dir DIR writes all of it to a file"
            };
            bytes.extend_from_slice(format!("… ({length} bytes; {all})").as_bytes());
        }
    }

    /// Whether a line without its end is on the terminal of standard error.
    fn is_open(&self) -> bool {
        self.open.keys().any(|stream| self.shared || *stream == Stream::Stderr)
    }

    /// The newlines that close the open lines.
    fn close(&mut self) -> Vec<(Stream, Vec<u8>)> {
        std::mem::take(&mut self.open).into_keys().map(|stream| (stream, b"\n".to_vec())).collect()
    }
}

/// The writing thread, which ends when all clones of the sender are gone.
#[derive(Debug)]
pub struct Console {
    /// Where lines go in.
    pub lines: mpsc::Sender<Entry>,
    /// Becomes ready when the thread ends: with the error, if output can't be written.
    pub ended: oneshot::Receiver<Option<String>>,
    /// Whether a reader takes the output.
    pub reading: Reading,
}

/// How many lines the writing thread has begun and finished.
#[derive(Debug, Default)]
struct Meter {
    begun: AtomicU64,
    out: AtomicU64,
}

/// Whether output waits, and whether its reader still reads.
#[derive(Debug)]
pub struct Reading {
    meter: Arc<Meter>,
    lines: mpsc::WeakSender<Entry>,
    seen: u64,
    since: Instant,
}

impl Reading {
    /// Whether output waits for its reader.
    pub fn is_behind(&self) -> bool {
        let queued = self.lines.upgrade().is_some_and(|l| l.capacity() < l.max_capacity());
        queued || self.meter.begun.load(Relaxed) > self.meter.out.load(Relaxed)
    }

    /// A function that tells whether nothing has been read since this call, although output waits.
    pub fn stuck(&self) -> impl Fn() -> bool + Send + use<> {
        let (meter, seen) = (self.meter.clone(), self.meter.begun.load(Relaxed));
        move || {
            let now = meter.begun.load(Relaxed);
            now == seen && now > meter.out.load(Relaxed)
        }
    }

    /// Whether output waits for a reader that has read some of it within the last minutes.
    pub fn is_slow(&mut self) -> bool {
        let seen = self.meter.begun.load(Relaxed);
        if seen != self.seen {
            (self.seen, self.since) = (seen, Instant::now());
        }
        self.is_behind() && self.since.elapsed() < READER_LIMIT
    }
}

impl Console {
    /// Starts the writing thread. With `bare`, the standard output of ranks gets no prefix.
    ///
    /// # Errors
    /// If the thread can't be started.
    pub fn start(files: Option<Files>, bare: bool, with_time: bool) -> io::Result<Self> {
        let (lines, queue) = mpsc::channel(QUEUE);
        let (tell, ended) = oneshot::channel();
        let meter = Arc::<Meter>::default();
        let writer = Writer::new(files, bare, with_time, meter.clone());
        thread::Builder::new().name("gradwire-output".to_owned()).spawn(move || {
            let result = writer.run(queue);
            // The launcher may have ended already.
            let _ = tell.send(result.err().map(|error| error.to_string()));
        })?;
        let reading = Reading { meter, lines: lines.downgrade(), seen: 0, since: Instant::now() };
        Ok(Self { lines, ended, reading })
    }
}

/// Whether standard output and standard error are different files: a reader may read only one.
pub fn outputs_differ() -> bool {
    let file = |about: rustix::io::Result<rustix::fs::Stat>| about.map(|it| (it.st_dev, it.st_ino));
    file(fstat(io::stdout())).ok() != file(fstat(io::stderr())).ok()
}

struct Writer {
    layout: Layout,
    stdout: BufWriter<io::Stdout>,
    stderr: BufWriter<io::Stderr>,
    last: Stream,
    files: Option<Files>,
    fold: Fold,
    progress: Progress,
    meter: Arc<Meter>,
}

impl Writer {
    fn new(files: Option<Files>, bare: bool, with_time: bool, meter: Arc<Meter>) -> Self {
        let cuts = io::stderr().is_terminal();
        let (shared, has_files) = (io::stdout().is_terminal() && cuts, files.is_some());
        let clock = with_time.then_some(SystemTime::now as fn() -> SystemTime);
        Self {
            layout: Layout { shared, cuts, has_files, bare, clock, ..Layout::default() },
            stdout: BufWriter::new(io::stdout()),
            stderr: BufWriter::new(io::stderr()),
            last: Stream::Stdout,
            files,
            fold: Fold::default(),
            progress: Progress::default(),
            meter,
        }
    }

    fn run(mut self, mut queue: mpsc::Receiver<Entry>) -> io::Result<()> {
        while let Some(entry) = queue.blocking_recv() {
            self.handle(entry)?;
            while let Ok(entry) = queue.try_recv() {
                self.handle(entry)?;
            }
            self.flush()?;
            // The output of ranks comes first, and is never in the same line.
            if !self.layout.is_open() {
                let line = self.progress.show();
                self.stderr.write_all(line.as_bytes())?;
                self.stderr.flush()?;
            }
        }
        let held = self.fold.release();
        self.show(&held)?;
        let clear = self.progress.hide();
        self.stderr.write_all(clear.as_bytes())?;
        for (stream, bytes) in self.layout.close() {
            self.emit(stream, &bytes)?;
        }
        self.flush()
    }

    fn handle(&mut self, entry: Entry) -> io::Result<()> {
        self.meter.begun.fetch_add(1, Relaxed);
        let held = match entry {
            Entry::Line(line) => return self.write(line),
            Entry::Begins(rank) => {
                self.fold.begin(rank, Instant::now());
                return Ok(());
            }
            Entry::Progress(text) => {
                self.progress.set(text);
                return Ok(());
            }
            Entry::Ends(rank) => self.fold.end(rank, Instant::now()),
            Entry::Over => self.fold.over(Instant::now()),
        };
        self.show(&held)
    }

    fn write(&mut self, line: Line) -> io::Result<()> {
        if let Some(files) = &mut self.files {
            files.write(&line)?;
        }
        if line.hidden {
            return Ok(());
        }
        // What the ranks reported comes before the launcher's own report.
        if line.source == Source::Report || self.fold.is_full() {
            let held = self.fold.release();
            self.show(&held)?;
        }
        let line = self.fold.take(line);
        self.show(line.as_slice())
    }

    fn show(&mut self, lines: &[Line]) -> io::Result<()> {
        for line in lines {
            for (stream, bytes) in self.layout.lay(line) {
                self.emit(stream, &bytes)?;
            }
        }
        Ok(())
    }

    /// Both outputs are often one terminal, so the order across them is kept.
    fn emit(&mut self, stream: Stream, bytes: &[u8]) -> io::Result<()> {
        let clear = self.progress.hide();
        if !clear.is_empty() {
            // The terminal must be clear before the other stream writes to it.
            self.stderr.write_all(clear.as_bytes())?;
            self.stderr.flush()?;
        }
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
        if let Some(files) = &mut self.files {
            files.flush()?;
        }
        self.meter.out.store(self.meter.begun.load(Relaxed), Relaxed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use gradwire_services::launch::Text;

    use super::*;

    fn line(rank: u32, stream: Stream, text: &str, end: LineEnd) -> Line {
        Line {
            source: Source::Rank(rank),
            stream,
            text: Text::Utf8(text.into()),
            end,
            hidden: false,
        }
    }

    fn shown(shared: bool, lines: &[Line]) -> String {
        let mut layout = Layout { shared, cuts: true, ..Layout::default() };
        let mut parts: Vec<_> = lines.iter().flat_map(|line| layout.lay(line)).collect();
        parts.extend(layout.close());
        parts.into_iter().map(|(_, bytes)| String::from_utf8(bytes).unwrap()).collect()
    }

    #[test]
    fn progress_bars_stay_readable() {
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
        let mut layout = Layout { bare: true, ..Layout::default() };
        let lines = [line(0, Stdout, "table", Newline), line(1, Stderr, "error", Newline)];
        let shown: Vec<_> = lines.iter().flat_map(|line| layout.lay(line)).collect();
        assert_eq!(shown, [(Stdout, b"table\n".to_vec()), (Stderr, b"[1] error\n".to_vec())]);
    }

    #[test]
    fn each_line_may_begin_with_the_time() {
        use {LineEnd::*, Stream::*};
        let clock = || SystemTime::UNIX_EPOCH + Duration::from_millis(1_500);
        let mut layout = Layout { clock: Some(clock), ..Layout::default() };
        let lines = [
            line(0, Stdout, "a", Open),
            line(0, Stdout, "b", Newline),
            Line::note("ready"),
            Line::report("rank 1 failed"),
        ];
        let parts = lines.iter().flat_map(|line| layout.lay(line));
        let shown: Vec<u8> = parts.flat_map(|(_, bytes)| bytes).collect();
        let time = "1970-01-01T00:00:01.500Z";
        let expected = format!("{time} [0] ab\n{time} gradwire: ready\nrank 1 failed\n");
        assert_eq!(String::from_utf8(shown).unwrap(), expected);
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
    fn a_huge_line_of_an_error_is_cut() {
        use {LineEnd::*, Stream::*};
        let part = "é".repeat(SHOWN);
        let parts = [Open, Open, Newline].map(|end| line(1, Stderr, &part, end));
        let text = shown(false, &parts);
        let length = 3 * part.len();
        assert!(text.len() < SHOWN + 100, "{} bytes", text.len());
        let end = format!("é… ({length} bytes; --output-dir DIR writes all of it to a file)\n");
        assert!(text.starts_with("[1] éé") && text.ends_with(&end), "{}", text.len());
        assert_eq!(shown(false, &[line(1, Stderr, "short", Newline)]), "[1] short\n");
        let mut layout = Layout::default();
        let written = parts.iter().flat_map(|line| layout.lay(line)).map(|(_, bytes)| bytes.len());
        assert_eq!(written.sum::<usize>(), length + "[1] \n".len(), "a file gets all of it");
        let whole = parts.map(|line| Line { stream: Stdout, ..line });
        assert_eq!(shown(false, &whole).len(), length + "[1] \n".len(), "results are not cut");
    }

    #[test]
    fn unfinished_lines_are_closed() {
        use {LineEnd::*, Stream::*};
        let lines = [
            line(1, Stdout, "no eol", Open),
            line(1, Stderr, "none either", Open),
            line(0, Stdout, "no eol", Open),
            line(0, Stderr, "10%", Return),
        ];
        let only = |stream| {
            let mut layout = Layout::default();
            let mut parts: Vec<_> = lines.iter().flat_map(|line| layout.lay(line)).collect();
            parts.extend(layout.close());
            let parts = parts.into_iter().filter(|(of, _)| *of == stream);
            parts.map(|(_, bytes)| String::from_utf8(bytes).unwrap()).collect::<String>()
        };
        assert_eq!(only(Stdout), "[1] no eol\n[0] no eol\n");
        assert_eq!(only(Stderr), "[1] none either\n[0] 10%\r\n");
        let terminal = "[1] no eol\n[1] none either\n[0] no eol\n[0] 10%\r\n";
        assert_eq!(shown(true, &lines), terminal);
        assert_eq!(shown(false, &[Line::report("error: x")]), "error: x\n");
    }
}
