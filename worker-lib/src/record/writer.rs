//! Writes a record in a thread of its own, so that the program waits only if the disk is slower
//! than the job for long.
//!
//! What a call has received is taken in parts of at most 1 MiB, and waits in a queue (BOUND). A
//! call is written as a whole or not at all: one that would exceed the limit of the file ends the
//! record. An error ends it, too. The job continues, after one warning.

use std::{
    collections::VecDeque,
    fs::{self, File},
    io::{self, BufWriter, Write},
    mem,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};
use serde::Serialize;

use super::format::{self, CallHead, End, HEAD, Header, Kind, MAX_DATA, Why};
use crate::error::{GradwireError, Result};

/// The most bytes that wait to be written (BOUND).
pub const AHEAD: usize = 64 << 20;

/// The room in a file for the frame that tells why it ends.
const ROOM_FOR_END: u64 = 64 << 10;

/// How long the end of a session waits for the rest of its record (WAIT).
const LAST_WRITES: Duration = Duration::from_secs(30);

/// What waits to be written.
enum Item {
    Call { head: Vec<u8>, number: u64, bytes: u64 },
    Data(Vec<u8>),
    End(End),
}

impl Item {
    fn len(&self) -> usize {
        match self {
            Self::Call { head, .. } => head.len(),
            Self::Data(data) => data.len(),
            Self::End(_) => 0,
        }
    }
}

#[derive(Default)]
struct Queue {
    items: VecDeque<Item>,
    bytes: usize,
    /// The thread has written everything and has ended.
    ended: bool,
}

/// The queue between the session and the thread.
struct Waiting {
    queue: Mutex<Queue>,
    changed: Condvar,
    /// Nothing more is written.
    stopped: AtomicBool,
}

/// A record that is being written.
pub(crate) struct Writer {
    waiting: Arc<Waiting>,
    _thread: JoinHandle<()>,
}

/// The file of a record that nothing was written to.
#[derive(Debug)]
pub(crate) struct NewFile {
    file: File,
    path: PathBuf,
}

impl NewFile {
    /// Creates the file in a folder, which must not have one.
    pub(crate) fn create(folder: &Path) -> Result<Self> {
        let path = folder.join(format::FILE);
        let file = fs::create_dir_all(folder).and_then(|()| File::create_new(&path));
        file.map(|file| Self { file, path: path.clone() }).map_err(|error| {
            GradwireError::Invalid(format!(
                "the record {} can't be written: {error}; give --record a new folder",
                path.display()
            ))
        })
    }
}

impl Writer {
    /// Starts to write. `limit` is the most bytes of the file.
    pub(crate) fn start(NewFile { file, path }: NewFile, header: &Header) -> Result<Self> {
        let (rank, limit) = (header.rank, header.limit);
        let mut file = Output { file: BufWriter::new(file), written: 0, limit };
        let begun = file.begin(header);
        begun.map_err(|source| GradwireError::System { what: "writing a record", source })?;
        let waiting = Arc::new(Waiting {
            queue: Mutex::default(),
            changed: Condvar::new(),
            stopped: AtomicBool::new(false),
        });
        let own = waiting.clone();
        let run = move || own.run(file, &format!("the record of rank {rank} ({})", path.display()));
        let thread = std::thread::Builder::new().name("gw-record".to_owned()).spawn(run);
        let thread = thread.map_err(|source| GradwireError::System { what: "a thread", source })?;
        Ok(Self { waiting, _thread: thread })
    }

    /// Whether nothing more is written.
    pub(crate) fn has_stopped(&self) -> bool {
        self.waiting.stopped.load(Relaxed)
    }

    /// Adds a call. `read` copies its results from a place on; the place counts the bytes of all
    /// results. The calls of several threads must not mix.
    pub(crate) fn add(&self, call: &CallHead, mut read: impl FnMut(u64, &mut [u8])) {
        let Ok(head) = postcard::to_allocvec(call) else { return }; // it has no other types
        let bytes = call.outcome.bytes();
        self.waiting.put(Item::Call { head, number: call.number, bytes });
        let mut at = 0;
        while at < bytes && !self.has_stopped() {
            let mut data = vec![0; MAX_DATA.min((bytes - at) as usize)];
            read(at, &mut data);
            at += data.len() as u64;
            self.waiting.put(Item::Data(data));
        }
    }

    /// Ends the record, and waits until it is written.
    pub(crate) fn end(&self, end: End) {
        self.waiting.put(Item::End(end));
        let deadline = Instant::now() + LAST_WRITES;
        let mut queue = self.waiting.queue.lock();
        while !queue.ended && Instant::now() < deadline {
            self.waiting.changed.wait_until(&mut queue, deadline);
        }
    }
}

/// Ends the queue with its thread, even if the thread panics (WAIT).
struct Ends<'a>(&'a Waiting);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.stopped.store(true, Relaxed);
        let mut queue = self.0.queue.lock();
        queue.ended = true;
        let left = mem::take(&mut queue.items);
        self.0.changed.notify_all();
        drop(queue);
        drop(left);
    }
}

impl Waiting {
    /// Waits until there is room.
    fn put(&self, item: Item) {
        let mut queue = self.queue.lock();
        while queue.bytes > AHEAD && !queue.ended {
            self.changed.wait(&mut queue);
        }
        if !queue.ended {
            queue.bytes += item.len();
            queue.items.push_back(item);
            self.changed.notify_all();
        }
    }

    /// The next item; `None` if there is none now.
    fn take(&self, wait: bool) -> Option<Item> {
        let mut queue = self.queue.lock();
        while queue.items.is_empty() && wait {
            self.changed.wait(&mut queue);
        }
        let item = queue.items.pop_front()?;
        queue.bytes -= item.len();
        self.changed.notify_all();
        Some(item)
    }

    /// The thread: writes until the end of the record.
    fn run(&self, mut file: Output, what: &str) {
        let _ends = Ends(self);
        let why = self.write(&mut file);
        self.stopped.store(true, Relaxed);
        let told = match &why {
            Ok(End { why: Why::Full, calls }) => Some(format!(
                "{what} has reached its limit of {} bytes after {calls} calls: later calls are not \
                 recorded (--record-bytes)",
                file.limit
            )),
            Ok(_) => None,
            Err((_, error)) => {
                Some(format!("{what} can't be written: {error}; later calls are not recorded"))
            }
        };
        let end = why.unwrap_or_else(|(calls, error)| End { calls, why: Why::Unwritten(error) });
        let _ = file.put_encoded(Kind::End, &end).and_then(|()| file.file.flush());
        if let Some(told) = told {
            let _ = io::stderr().write_all(format!("gradwire: {told}\n").as_bytes());
        }
    }

    /// Writes items until the record ends. Returns why, or the calls before an error, and its text.
    fn write(&self, file: &mut Output) -> Result<End, (u64, String)> {
        let mut calls = 0;
        loop {
            let item = match self.take(false) {
                Some(item) => item,
                // Flushed bytes remain in the file if this process is killed.
                None => {
                    file.file.flush().map_err(|error| (calls, error.to_string()))?;
                    match self.take(true) {
                        Some(item) => item,
                        None => continue,
                    }
                }
            };
            let written = match item {
                Item::Call { head, bytes, .. } if !file.has_room(head.len(), bytes) => {
                    return Ok(End { calls, why: Why::Full });
                }
                Item::Call { head, number, .. } => {
                    file.put(Kind::Call, &head).inspect(|()| calls = calls.max(number))
                }
                Item::Data(data) => file.put(Kind::Data, &format::pack(&data)),
                Item::End(end) => return Ok(end),
            };
            written.map_err(|error| (calls, error.to_string()))?;
        }
    }
}

/// The file and how much is in it.
struct Output {
    file: BufWriter<File>,
    written: u64,
    limit: u64,
}

impl Output {
    fn begin(&mut self, header: &Header) -> io::Result<()> {
        self.file.write_all(&format::MAGIC)?;
        self.file.write_all(&format::VERSION.to_le_bytes())?;
        self.written = 12;
        self.put_encoded(Kind::Header, header)?;
        self.file.flush()
    }

    /// Whether a call fits, with results that can't be compressed.
    fn has_room(&self, head: usize, bytes: u64) -> bool {
        let frames = 2 + bytes / MAX_DATA as u64;
        let most = bytes.saturating_add(frames * (HEAD as u64 + 5)).saturating_add(head as u64);
        self.written.saturating_add(most).saturating_add(ROOM_FOR_END) <= self.limit
    }

    fn put_encoded<T: Serialize>(&mut self, kind: Kind, what: &T) -> io::Result<()> {
        self.put(kind, &postcard::to_allocvec(what).map_err(io::Error::other)?)
    }

    fn put(&mut self, kind: Kind, body: &[u8]) -> io::Result<()> {
        if body.len() > format::MAX_BODY {
            return Err(io::Error::other("a frame exceeds 8 MiB"));
        }
        let frame = format::frame(kind, body);
        self.written += frame.len() as u64;
        self.file.write_all(&frame)
    }
}
