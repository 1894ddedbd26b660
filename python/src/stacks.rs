//! The stacks of all Python threads, at any time, for explanations of waits.
//!
//! A thread of `gradwire/_stacks.py` writes them while it has the interpreter's lock, so nothing
//! changes meanwhile. If it does not get the lock, C code holds it, and no thread runs Python code:
//! then a handler that `faulthandler` has registered writes them without the lock. The thread that
//! needs the stacks sends itself the signal, so the program's own threads are not interrupted.
//!
//! That thread also shows reports about long waits, through Python's logging.

use std::{
    ffi::c_int,
    fs::{self, File},
    io::{self, Read as _, Seek as _},
    os::fd::{AsRawFd as _, OwnedFd},
    sync::{Mutex, PoisonError},
    thread::sleep,
    time::{Duration, Instant},
};

use gradwire_worker::witness::{Thread, Witness};
use rustix::{
    event::{PollFd, PollFlags, poll},
    fs::{MemfdFlags, ftruncate, memfd_create},
    pipe::{PipeFlags, pipe_with},
    time::Timespec,
};

/// How long the thread may take to get the interpreter's lock.
const LOCK: Duration = Duration::from_millis(400);

/// How long it may take to show a report.
const SHOW: Duration = Duration::from_secs(2);

/// The pause between two looks whether it has shown the report.
const LOOK: Duration = Duration::from_millis(20);

/// The requests for the thread.
const STACKS: &[u8] = b"s";
const REPORT: &[u8] = b"r";

/// The most bytes of stacks that are read (BOUND).
const MAX_BYTES: u64 = 4 << 20;

/// A part of the name of the thread's own file.
const OWN: &str = "gradwire/_stacks.py";

// SAFETY: the C library has this function with this signature. It accepts every number, and the
// program that has registered a handler answers for what that does.
unsafe extern "C" {
    /// Sends the calling thread a signal, and returns once its handler has returned.
    safe fn raise(signal: c_int) -> c_int;
}

/// What both sides use.
#[derive(Debug)]
struct Channel {
    requests: OwnedFd,
    answers: OwnedFd,
    /// What the thread writes, and what the handler writes.
    file: File,
    forced: File,
    /// The ends of the Python side, which stay open.
    _theirs: (OwnedFd, OwnedFd),
    signal: Option<c_int>,
    main: u64,
    package: String,
    /// Whether the thread was asked and has not answered.
    is_asked: bool,
}

static CHANNEL: Mutex<Option<Channel>> = Mutex::new(None);
static TEXT: Mutex<Option<String>> = Mutex::new(None);

/// Makes the channel. Returns the descriptors of the Python side.
pub(crate) fn open() -> io::Result<(i32, i32, i32, i32)> {
    let (requests_out, requests) = pipe_with(PipeFlags::CLOEXEC)?;
    let (answers, answers_in) = pipe_with(PipeFlags::CLOEXEC)?;
    let file = File::from(memfd_create("gradwire-stacks", MemfdFlags::CLOEXEC)?);
    let forced = File::from(memfd_create("gradwire-stacks", MemfdFlags::CLOEXEC)?);
    let numbers =
        (requests_out.as_raw_fd(), answers_in.as_raw_fd(), file.as_raw_fd(), forced.as_raw_fd());
    *CHANNEL.lock().unwrap_or_else(PoisonError::into_inner) = Some(Channel {
        requests,
        answers,
        file,
        forced,
        _theirs: (requests_out, answers_in),
        signal: None,
        main: 0,
        package: String::new(),
        is_asked: false,
    });
    Ok(numbers)
}

/// Answers questions from now on.
pub(crate) fn offer(signal: Option<c_int>, main: u64, package: String) {
    if let Some(channel) = &mut *CHANNEL.lock().unwrap_or_else(PoisonError::into_inner) {
        (channel.signal, channel.main, channel.package) = (signal, main, package);
    }
    Witness { threads, report }.install();
}

/// Takes the report that waits to be shown.
pub(crate) fn take_report() -> Option<String> {
    TEXT.lock().unwrap_or_else(PoisonError::into_inner).take()
}

fn threads() -> Vec<Thread> {
    let mut channel = CHANNEL.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(channel) = &mut *channel else { return Vec::new() };
    let text = channel.written().or_else(|| channel.forced()).unwrap_or_default();
    parse(&text, channel.main, &channel.package, &folder())
}

/// The working directory with a slash, which paths are shown without.
pub(crate) fn folder() -> String {
    let folder = std::env::current_dir().map(|folder| format!("{}/", folder.display()));
    folder.unwrap_or_default()
}

/// Asks the thread to show a report. Returns whether it has taken it.
fn report(text: &str) -> bool {
    *TEXT.lock().unwrap_or_else(PoisonError::into_inner) = Some(text.to_owned());
    {
        let channel = CHANNEL.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(channel) = &*channel else { return take_report().is_none() };
        if rustix::io::write(&channel.requests, REPORT).is_err() {
            return take_report().is_none();
        }
    }
    let deadline = Instant::now() + SHOW;
    while TEXT.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
        if Instant::now() >= deadline {
            return take_report().is_none();
        }
        sleep(LOOK);
    }
    true
}

impl Channel {
    /// What the thread writes; `None` if it does not get the interpreter's lock.
    fn written(&mut self) -> Option<String> {
        // An earlier answer that came late is of no use.
        if self.is_asked && self.has_answered(Duration::ZERO) {
            self.is_asked = false;
        }
        if !self.is_asked {
            rustix::io::write(&self.requests, STACKS).ok()?;
            self.is_asked = true;
        }
        if !self.has_answered(LOCK) {
            return None;
        }
        self.is_asked = false;
        content(&mut self.file)
    }

    /// Waits for an answer, and takes it.
    fn has_answered(&self, limit: Duration) -> bool {
        let limit = Timespec::try_from(limit).ok();
        let mut fds = [PollFd::new(&self.answers, PollFlags::IN)];
        let is_there = poll(&mut fds, limit.as_ref()).is_ok_and(|ready| ready > 0);
        is_there && rustix::io::read(&self.answers, &mut [0; 1]).is_ok_and(|read| read > 0)
    }

    /// What the handler of the signal writes without the lock. A signal without a handler would end
    /// the process.
    fn forced(&mut self) -> Option<String> {
        let signal = self.signal.filter(|signal| is_caught(*signal))?;
        ftruncate(&self.forced, 0).ok()?;
        self.forced.rewind().ok()?;
        (raise(signal) == 0).then(|| content(&mut self.forced))?
    }
}

/// The whole content of a file.
fn content(file: &mut File) -> Option<String> {
    file.rewind().ok()?;
    let mut bytes = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Whether this process has a handler for a signal.
fn is_caught(signal: c_int) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| (1..=64).contains(&signal) && mask >> (signal - 1) & 1 == 1)
}

/// The threads in the text that `faulthandler` writes, the main thread first.
fn parse(text: &str, main: u64, package: &str, folder: &str) -> Vec<Thread> {
    let mut threads: Vec<(bool, Thread)> = Vec::new();
    for line in text.lines() {
        let begin = line.strip_prefix("Current thread 0x").or(line.strip_prefix("Thread 0x"));
        if let Some(rest) = begin {
            let number = rest.split(' ').next().unwrap_or_default();
            let is_main = u64::from_str_radix(number, 16).is_ok_and(|ident| ident == main);
            // Newer releases of Python write a name in brackets.
            let name = rest.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
            let name = match name {
                _ if is_main => "main thread".to_owned(),
                Some((name, _)) => format!("thread {}", name.trim()),
                None => "another thread".to_owned(),
            };
            threads.push((is_main, Thread { name, frames: Vec::new() }));
        } else if let (Some((_, thread)), Some(frame)) =
            (threads.last_mut(), line.strip_prefix("  "))
        {
            thread.frames.push(shorten(frame.trim_start(), package, folder));
        }
    }
    threads.retain(|(_, thread)| !thread.frames.iter().any(|frame| frame.starts_with(OWN)));
    threads.sort_by_key(|(is_main, _)| !is_main);
    threads.into_iter().map(|(_, thread)| thread).collect()
}

/// `File "dir/train.py", line 12 in step` as `train.py:12 in step`.
fn shorten(frame: &str, package: &str, folder: &str) -> String {
    let place = frame.strip_prefix("File \"").and_then(|rest| {
        let (path, rest) = rest.split_once("\", line ")?;
        let (line, function) = rest.split_once(" in ")?;
        Some(Place { path, line, function })
    });
    place.map_or_else(|| frame.to_owned(), |place| place.shorten(package, folder))
}

/// A line of a Python program.
#[derive(Debug)]
pub(crate) struct Place<'a> {
    pub(crate) path: &'a str,
    pub(crate) line: &'a str,
    pub(crate) function: &'a str,
}

impl Place<'_> {
    /// `train.py:12 in step`, for this folder of the package and this working directory.
    pub(crate) fn shorten(&self, package: &str, folder: &str) -> String {
        let Self { path, line, function } = *self;
        let libraries = "site-packages/";
        let path = match (path.strip_prefix(package), path.find(libraries)) {
            (Some(rest), _) if !package.is_empty() => format!("gradwire{rest}"),
            (_, Some(at)) => path[at..].to_owned(),
            _ if folder.len() > 1 => path.strip_prefix(folder).unwrap_or(path).to_owned(),
            _ => path.to_owned(),
        };
        format!("{path}:{line} in {function}")
    }
}
