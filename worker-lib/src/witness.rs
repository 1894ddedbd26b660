//! What this process says about itself when a job waits, and how it shows a report about its own
//! waits. The daemon asks at any time, so a thread answers (`gw-witness`), and the watcher of the
//! daemon's messages waits for nobody.
//!
//! Only a language binding knows the stacks of its threads. Without a binding, the daemon tells
//! what the system knows.

use std::{
    io::Write as _,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread,
};

use gradwire_proto::pb::{self, worker_message::Message};

use crate::shared::Shared;

/// The name of the thread.
pub(crate) const NAME: &str = "gw-witness";

/// A thread of this process and what it does now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Thread {
    /// Its name, such as `main thread`.
    pub name: String,
    /// Its frames, such as `train.py:12 in step`, the innermost first.
    pub frames: Vec<String>,
}

/// What a language binding knows about this process. Both functions are called on a thread of their
/// own.
#[derive(Debug, Clone, Copy)]
pub struct Witness {
    /// Returns the threads, the main thread first, within a second.
    pub threads: fn() -> Vec<Thread>,
    /// Shows a report about a long wait to the user. Returns false if it can't do that soon. Then
    /// the report goes to standard error.
    pub report: fn(&str) -> bool,
}

static WITNESS: OnceLock<Witness> = OnceLock::new();

/// Whether a thread answers now.
static IS_BUSY: AtomicBool = AtomicBool::new(false);

impl Witness {
    /// Uses this for all sessions of this process. Only the first call has an effect.
    pub fn install(self) {
        let _ = WITNESS.set(self);
    }
}

/// Answers the daemon's question with this number.
pub(crate) fn answer(shared: &Arc<Shared>, number: u64) {
    if IS_BUSY.swap(true, SeqCst) {
        return;
    }
    let shared = shared.clone();
    let run = move || {
        let threads = WITNESS.get().map_or_else(Vec::new, |witness| (witness.threads)());
        let stack = |thread: Thread| pb::ThreadStack { name: thread.name, frames: thread.frames };
        let threads = threads.into_iter().map(stack).collect();
        IS_BUSY.store(false, SeqCst);
        if shared.ended().is_none() {
            // If it can't be sent, the watcher notices that.
            let _ = shared.send(Message::Observed(pb::Observed { number, threads }), None);
        }
    };
    if spawn(run).is_err() {
        IS_BUSY.store(false, SeqCst);
    }
}

/// Shows a report about a long wait of this process.
pub(crate) fn show(text: String) {
    let show = move || {
        if !WITNESS.get().is_some_and(|witness| (witness.report)(&text)) {
            // Nobody may read it.
            let line = format!("gradwire: {}\n", text.trim_end());
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
    };
    // A system without a free thread has other problems.
    let _ = spawn(show);
}

/// Starts a thread that ends by itself.
fn spawn(run: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    thread::Builder::new().name(NAME.to_owned()).spawn(run).map(drop)
}
