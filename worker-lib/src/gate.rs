//! Operations whose tensors are still being written when they are called.
//!
//! A GPU copies a tensor to shared memory while the program goes on, which calls the operation
//! meanwhile. The call is checked and gets its name, its number and its handle. Its submission
//! waits behind a gate, and whoever knows when the copy has arrived opens the gate. Several
//! operations may wait behind one.

use std::{fmt, mem, sync::Arc};

use gradwire_proto::{Failure, FailureKind};
use parking_lot::Mutex;

use crate::{
    error::{GradwireError, Result},
    shared::{Prepared, Shared},
};

/// What operations wait behind until their tensors are there
/// ([`Session::behind`](crate::Session::behind)). Clones are the same gate.
///
/// Whoever makes a gate opens it, or fails it. Otherwise its operations wait until the session
/// ends.
#[derive(Clone, Default)]
pub struct Gate(Arc<Mutex<State>>);

enum State {
    Closed(Vec<(Arc<Shared>, Prepared)>),
    Open,
    Failed(Failure),
}

impl Default for State {
    fn default() -> Self {
        Self::Closed(Vec::new())
    }
}

impl Gate {
    /// A closed gate.
    pub fn new() -> Self {
        Self::default()
    }

    /// Submits what waits, in the order of the calls. Later operations don't wait. It may wait for
    /// a place ([`Session`](crate::Session), BOUND).
    pub fn open(&self) {
        for (shared, prepared) in self.leave(State::Open) {
            if let Err(error) = shared.submit(&prepared) {
                shared.refuse(prepared.ticket(), &cause(error));
            }
        }
    }

    /// Fails what waits, and later operations: their tensors could not be written.
    pub fn fail(&self, why: &str) {
        let failure = Failure::new(FailureKind::Resource, why);
        for (shared, prepared) in self.leave(State::Failed(failure.clone())) {
            shared.refuse(prepared.ticket(), &failure);
        }
    }

    /// Whether it is neither open nor failed.
    pub fn is_closed(&self) -> bool {
        matches!(*self.0.lock(), State::Closed(_))
    }

    /// Leaves the closed state; returns what waited. A gate that was left stays as it is.
    fn leave(&self, state: State) -> Vec<(Arc<Shared>, Prepared)> {
        let mut now = self.0.lock();
        match &mut *now {
            State::Closed(waiting) => {
                let waiting = mem::take(waiting);
                *now = state;
                waiting
            }
            State::Open | State::Failed(_) => Vec::new(),
        }
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
        let state = match &*self.0.lock() {
            State::Closed(waiting) => format!("closed, {} wait", waiting.len()),
            State::Open => "open".to_owned(),
            State::Failed(failure) => format!("failed: {failure}"),
        };
        write!(f, "Gate({state})")
    }
}
