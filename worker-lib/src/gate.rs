//! Operations whose tensors are still being written when they are called.
//!
//! A GPU copies a tensor to shared memory while the program goes on and calls the operation. The
//! call is checked and gets its name, its number and its handle. Its submission
//! waits behind a gate, and whoever knows when the copy has arrived opens the gate. Several
//! operations may wait behind one.

use std::{fmt, mem, process, sync::Arc};

use gradwire_proto::{Failure, FailureKind};
use parking_lot::Mutex;

use crate::{
    error::{GradwireError, Result},
    shared::{Prepared, Shared},
};

/// What operations wait behind until their tensors are there
/// ([`Session::behind`](crate::Session::behind)), at most [`MAX_HELD`](crate::MAX_HELD) at a time.
/// Clones are the same gate.
///
/// If the last clone is dropped and the gate is closed, what waits behind it fails. A forked child
/// has no session (`fork`), and can't open its parent's gates.
#[derive(Clone)]
pub struct Gate(Arc<Opener>);

/// What opens a gate.
struct Opener {
    bar: Arc<Bar>,
    made_in: u32,
}

/// A gate as those who wait know it. They don't keep it from being dropped.
pub(crate) struct Bar(Mutex<State>);

enum State {
    Closed(Vec<(Arc<Shared>, Prepared)>),
    Open,
    Failed(Failure),
}

impl Default for Gate {
    fn default() -> Self {
        Self::new()
    }
}

impl Gate {
    /// A closed gate.
    pub fn new() -> Self {
        let bar = Arc::new(Bar(Mutex::new(State::Closed(Vec::new()))));
        Self(Arc::new(Opener { bar, made_in: process::id() }))
    }

    /// Submits what waits, in the order of the calls. Later operations don't wait. It may wait for
    /// a place ([`Session`](crate::Session), BOUND).
    pub fn open(&self) {
        for (shared, prepared) in self.0.leave(State::Open) {
            let ticket = prepared.ticket();
            // TELL: those who wait get the session's first cause by themselves. TRUST: what has
            // ended has no memory any more, and the daemon may say so too early.
            if shared.check().is_err() || shared.is_over(ticket) {
                continue;
            }
            if let Err(error) = shared.submit(&prepared) {
                shared.refuse(ticket, &cause(error));
            }
        }
    }

    /// Fails what waits, and later operations: their tensors could not be written.
    pub fn fail(&self, why: &str) {
        self.0.fail(why);
    }

    /// Whether it is neither open nor failed.
    pub fn is_closed(&self) -> bool {
        self.0.bar.is_closed()
    }

    pub(crate) fn bar(&self) -> Arc<Bar> {
        self.0.bar.clone()
    }
}

impl Opener {
    fn fail(&self, why: &str) {
        let failure = Failure::new(FailureKind::Resource, why);
        for (shared, prepared) in self.leave(State::Failed(failure.clone())) {
            shared.refuse(prepared.ticket(), &failure);
        }
    }

    /// Leaves the closed state; returns what waited. A gate that was left stays as it is.
    fn leave(&self, state: State) -> Vec<(Arc<Shared>, Prepared)> {
        if self.made_in != process::id() {
            return Vec::new();
        }
        let mut now = self.bar.0.lock();
        match &mut *now {
            State::Closed(waiting) => {
                let waiting = mem::take(waiting);
                *now = state;
                waiting
            }
            State::Open | State::Failed(_) => Vec::new(),
        }
    }
}

impl Drop for Opener {
    fn drop(&mut self) {
        self.fail("the gate that it waited behind was dropped, and nobody had opened it");
    }
}

impl Bar {
    pub(crate) fn is_closed(&self) -> bool {
        matches!(*self.0.lock(), State::Closed(_))
    }

    /// Submits an operation, now or when the gate is opened.
    pub(crate) fn pass(&self, shared: &Arc<Shared>, prepared: Prepared) -> Result<()> {
        let mut now = self.0.lock();
        match &mut *now {
            State::Closed(waiting) => {
                waiting.push((shared.clone(), prepared));
                Ok(())
            }
            State::Open => {
                drop(now);
                shared.submit(&prepared)
            }
            State::Failed(failure) => Err(failure.clone().into()),
        }
    }
}

fn cause(error: GradwireError) -> Failure {
    match error {
        GradwireError::Failed(failure) => failure,
        other => Failure::new(FailureKind::Internal, other.to_string()),
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &*self.0.bar.0.lock() {
            State::Closed(waiting) => format!("closed, {} wait", waiting.len()),
            State::Open => "open".to_owned(),
            State::Failed(failure) => format!("failed: {failure}"),
        };
        write!(f, "Gate({state})")
    }
}
