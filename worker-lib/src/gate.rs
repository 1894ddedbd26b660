//! Operations whose tensors are still being written when they are called.
//!
//! A GPU copies a tensor to shared memory while the program continues and calls the operation. The
//! call is checked and gets its name, its number and its handle. Its submission waits behind a
//! gate, which is opened once the copy has arrived. Several operations may wait behind one gate.

use std::{fmt, mem, process, sync::Arc};

use gradwire_proto::{Failure, FailureKind};
use parking_lot::Mutex;

use crate::{
    error::{GradwireError, Result},
    shared::{Prepared, Shared},
};

/// Holds operations back until their tensors are written
/// ([`Session::behind`](crate::Session::behind)), at most [`MAX_HELD`](crate::MAX_HELD) at a time.
/// Clones are the same gate.
///
/// If the last clone is dropped while the gate is closed, the operations behind it fail. A forked
/// child has no session, and can't open its parent's gates.
#[derive(Clone)]
pub struct Gate(Arc<Opener>);

/// The side of a gate that opens it, and fails it when dropped.
struct Opener {
    bar: Arc<Bar>,
    made_in: u32,
}

/// The side of a gate where operations wait. It does not keep the gate from being dropped.
pub(crate) struct Bar(Mutex<GateState>);

enum GateState {
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
        let bar = Arc::new(Bar(Mutex::new(GateState::Closed(Vec::new()))));
        Self(Arc::new(Opener { bar, made_in: process::id() }))
    }

    /// Submits the waiting operations, in the order of the calls. Later operations don't wait. An
    /// operation fails if too many are in flight (BOUND).
    pub fn open(&self) {
        for (shared, prepared) in self.0.leave(GateState::Open) {
            let ticket = prepared.ticket();
            shared.set_held(ticket, false);
            // TELL: waiters get the session's first cause anyway. TRUST: an operation that has
            // ended has no memory any more, and the daemon may report an end too early.
            if shared.check().is_err() || shared.is_over(ticket) {
                continue;
            }
            if let Err(error) = shared.submit(&prepared) {
                shared.refuse(ticket, &cause(error));
            }
        }
    }

    /// Fails the waiting and all later operations: their tensors could not be written.
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
        for (shared, prepared) in self.leave(GateState::Failed(failure.clone())) {
            shared.refuse(prepared.ticket(), &failure);
        }
    }

    /// Changes the state of a closed gate, and returns what waited. Otherwise does nothing.
    fn leave(&self, state: GateState) -> Vec<(Arc<Shared>, Prepared)> {
        if self.made_in != process::id() {
            return Vec::new();
        }
        let mut now = self.bar.0.lock();
        match &mut *now {
            GateState::Closed(waiting) => {
                let waiting = mem::take(waiting);
                *now = state;
                waiting
            }
            GateState::Open | GateState::Failed(_) => Vec::new(),
        }
    }
}

impl Drop for Opener {
    fn drop(&mut self) {
        self.fail("the gate that it waited behind was dropped before it was opened");
    }
}

impl Bar {
    pub(crate) fn is_closed(&self) -> bool {
        matches!(*self.0.lock(), GateState::Closed(_))
    }

    /// Submits an operation, now or when the gate is opened.
    pub(crate) fn pass(&self, shared: &Arc<Shared>, prepared: Prepared) -> Result<()> {
        let mut now = self.0.lock();
        match &mut *now {
            GateState::Closed(waiting) => {
                shared.set_held(prepared.ticket(), true);
                waiting.push((shared.clone(), prepared));
                Ok(())
            }
            GateState::Open => {
                drop(now);
                shared.submit(&prepared)
            }
            GateState::Failed(failure) => Err(failure.clone().into()),
        }
    }
}

fn cause(error: GradwireError) -> Failure {
    match error {
        GradwireError::Failed(failure) | GradwireError::Recoverable(failure) => failure,
        other => Failure::new(FailureKind::Internal, other.to_string()),
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &*self.0.bar.0.lock() {
            GateState::Closed(waiting) => format!("closed, {} wait", waiting.len()),
            GateState::Open => "open".to_owned(),
            GateState::Failed(failure) => format!("failed: {failure}"),
        };
        write!(f, "Gate({state})")
    }
}
