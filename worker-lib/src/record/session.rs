//! What a session hands to the writer of its record.

use std::{
    cell::Cell,
    collections::{BTreeMap, HashMap},
    env, fmt, mem,
    sync::atomic::{AtomicU32, Ordering::Relaxed},
};

use gradwire_proto::{Ending, Failure, VERSION, pb};
use parking_lot::Mutex;
use prost::Message;

use super::{
    format::{CallHead, End, Header, Outcome, Stored, Why},
    writer::{NewFile, Writer},
};
use crate::{
    error::Result,
    launch::{Launch, Recording},
    link::World,
    memory::{Keep, Output, Payload},
    tickets::InFlight,
};

/// An operation in the table of a session.
type Entry<'a> = InFlight<'a, Vec<Keep>, Vec<Output>>;

/// Variables of the launcher without its prefix. Programs and PyTorch read them.
const PLAIN: [&str; 11] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
];

/// Variables that concern only the recorded process. The secret is not for files.
const NOT_KEPT: [&str; 5] =
    ["GRADWIRE_SECRET", "GRADWIRE_SOCKET", "GRADWIRE_STDERR", Recording::FOLDER, Recording::BYTES];

/// The recorder of a session.
pub(crate) struct Recorder {
    writer: Writer,
    /// The threads that have made the calls in flight.
    threads: Mutex<HashMap<u64, u32>>,
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Recorder")
    }
}

/// The number of the calling thread among those that have made calls.
fn this_thread() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    thread_local!(static OWN: Cell<Option<u32>> = const { Cell::new(None) });
    OWN.get().unwrap_or_else(|| {
        let number = NEXT.fetch_add(1, Relaxed);
        OWN.set(Some(number));
        number
    })
}

/// The variables of the launcher.
fn variables() -> BTreeMap<String, String> {
    let is_kept = |name: &str| {
        let is_ours = name.starts_with("GRADWIRE_") || name.starts_with("HOROVOD_");
        (is_ours || PLAIN.contains(&name)) && !NOT_KEPT.contains(&name)
    };
    let text = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
    let all = env::vars_os().map(|(name, value)| (text(name), text(value)));
    all.filter(|(name, _)| is_kept(name)).collect()
}

impl Recorder {
    /// Starts the record of a rank that has attached.
    pub(crate) fn start(file: NewFile, launch: &Launch, world: &World, limit: u64) -> Result<Self> {
        let header = Header {
            gradwire: VERSION.to_owned(),
            job: launch.job.as_str().to_owned(),
            rank: world.rank,
            size: world.size,
            attached: world.to_wire().encode_to_vec(),
            variables: variables(),
            command: env::args_os().map(|word| word.to_string_lossy().into_owned()).collect(),
            limit,
        };
        Ok(Self { writer: Writer::start(file, &header)?, threads: Mutex::default() })
    }

    /// Notes that the calling thread makes a call.
    pub(crate) fn begin(&self, ticket: u64) {
        if !self.writer.has_stopped() {
            self.threads.lock().insert(ticket, this_thread());
        }
    }

    /// A call was not submitted.
    pub(crate) fn forget(&self, ticket: u64) {
        self.threads.lock().remove(&ticket);
    }

    /// Records an operation that ends now. Until this returns, the program does not see its end and
    /// can't change its results.
    pub(crate) fn ended(&self, ticket: u64, entry: &Entry<'_>, outcome: &Result<u64, Failure>) {
        let thread = self.threads.lock().remove(&ticket);
        // The thread is known, unless the record had ended before the call.
        let Some(thread) = thread.filter(|_| !self.writer.has_stopped()) else { return };
        let aux = match outcome {
            Ok(aux) => aux,
            Err(failure) => {
                let failed = Outcome::Failed(failure.clone());
                return self.writer.add(&head(ticket, thread, entry, failed), |_, _| {});
            }
        };
        let sources: Vec<Source<'_>> = match entry.moved {
            Some(outputs) => outputs.iter().map(Source::Moved).collect(),
            // Each tensor has two places; the second one is for its result.
            None => entry.memory.iter().skip(1).step_by(2).map(Source::Given).collect(),
        };
        let results: Vec<Stored> = sources.iter().map(Source::stored).collect();
        let begins: Vec<u64> =
            results.iter().scan(0, |at, each| Some(mem::replace(at, *at + each.bytes))).collect();
        let done = Outcome::Done { aux: *aux, moved: entry.moved.is_some(), results };
        self.writer.add(&head(ticket, thread, entry, done), |mut at, mut into| {
            while !into.is_empty() {
                // The last result that begins there: results before it may be empty.
                let after = begins.partition_point(|begin| *begin <= at);
                let end = begins.get(after).copied().unwrap_or(u64::MAX);
                let length = into.len().min(usize::try_from(end - at).unwrap_or(usize::MAX));
                let (now, later) = into.split_at_mut(length);
                sources[after - 1].read(at - begins[after - 1], now);
                (at, into) = (at + length as u64, later);
            }
        });
    }

    /// The session ends after `calls` calls. The operations in `open` have not ended.
    pub(crate) fn end<'a>(
        &self,
        calls: u64,
        open: impl Iterator<Item = (u64, Entry<'a>)>,
        ending: &Ending,
    ) {
        for (ticket, entry) in open {
            if let Some(thread) = self.threads.lock().remove(&ticket) {
                self.writer.add(&head(ticket, thread, &entry, Outcome::Open), |_, _| {});
            }
        }
        let why = match ending {
            Ending::Finished => Why::Left,
            Ending::Failed(failure) => Why::Failed(failure.clone()),
        };
        self.writer.end(End { calls, why });
    }
}

/// Where a result is.
enum Source<'a> {
    Moved(&'a Output),
    Given(&'a Keep),
}

impl Source<'_> {
    fn stored(&self) -> Stored {
        match self {
            Self::Moved(output) => Stored {
                bytes: output.buffer.bytes().len() as u64,
                shape: output.buffer.memory().shape().dims().to_vec(),
                rows: output.rows.clone(),
            },
            Self::Given(memory) => {
                Stored { bytes: memory.result_bytes(), shape: Vec::new(), rows: Vec::new() }
            }
        }
    }

    fn read(&self, at: u64, into: &mut [u8]) {
        match self {
            Self::Moved(output) => {
                let at = at as usize;
                into.copy_from_slice(&output.buffer.bytes()[at..at + into.len()]);
            }
            Self::Given(memory) => memory.read(at, into),
        }
    }
}

fn head(number: u64, thread: u32, entry: &Entry<'_>, outcome: Outcome) -> CallHead {
    let (set, name) = entry.key;
    CallHead {
        number,
        thread,
        process_set: set.0,
        name: name.as_str().to_owned(),
        request: pb::Request::from(entry.request).encode_to_vec(),
        outcome,
    }
}

/// The new file and its limit, if this rank is to be recorded.
pub(crate) fn file_of(launch: &Launch) -> Result<Option<(NewFile, u64)>> {
    let Some(Recording { folder, bytes }) = &launch.recording else { return Ok(None) };
    Ok(Some((NewFile::create(folder)?, *bytes)))
}
