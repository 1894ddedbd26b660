//! What a session of an elastic job keeps from one epoch to the next.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use gradwire_proto::Epoch;
use parking_lot::Mutex;

use crate::launch::Launch;

/// A change of the membership that the launcher of an elastic job wants. The next epoch begins with
/// it: see [`Session::pending_change`](crate::Session::pending_change).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// Processes wait for the next epoch.
    pub added: bool,
    /// Some processes or hosts should leave.
    pub removed: bool,
}

/// What the program needs to know of the epoch that it has joined.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rejoined {
    /// The number of the epoch.
    pub epoch: u64,
    /// Some rank may lack the state of the others, because it came later. That is so until a vote
    /// in which it took part has ended.
    pub newcomers: bool,
    /// If the end of the last epoch has interrupted a [vote](crate::Session::vote): its result, the
    /// same on all ranks.
    pub vote: Option<bool>,
}

/// What a session of an elastic job needs to join the next epoch.
pub(crate) struct Elastic {
    pub(crate) launch: Launch,
    pub(crate) worker: u32,
    /// The session was shut down.
    pub(crate) closed: AtomicBool,
    /// The launcher knows that this process was asked to leave the job.
    pub(crate) leaves: Mutex<bool>,
    /// Held by the thread that rejoins.
    pub(crate) turn: Mutex<Turn>,
}

/// What only the thread that rejoins uses.
pub(crate) struct Turn {
    /// The last epoch that this process has attached to.
    pub(crate) attached: Epoch,
    pub(crate) rejoined: Option<Rejoined>,
}

impl Elastic {
    pub(crate) fn new(launch: Launch, worker: u32, attached: Epoch) -> Self {
        let turn = Mutex::new(Turn { attached, rejoined: None });
        let (closed, leaves) = Default::default();
        Self { launch, worker, closed, leaves, turn }
    }

    /// The session is shut down. Ends and waits for a thread that rejoins.
    pub(crate) fn close(&self) {
        self.closed.store(true, SeqCst);
        drop(self.turn.lock());
    }
}
