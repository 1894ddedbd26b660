//! The progress of the thread that sends trace events.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    thread::sleep,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

/// How long a leaving rank may wait until its events are sent (WAIT).
const LEAVING: Duration = Duration::from_millis(500);

/// The state of the thread that sends trace events, if it runs.
#[derive(Debug, Default)]
pub(crate) struct Sending {
    /// Whether the coordinator asks for events.
    pub(super) is_asked: AtomicBool,
    /// Whether a rank of this node was in a sampled step at the last check.
    pub(super) samples: AtomicBool,
    pub(super) is_running: AtomicBool,
    /// How many rounds it has begun, and the last round that read all events.
    pub(super) looks: AtomicU64,
    pub(super) complete: AtomicU64,
    /// Whether somebody waits for the next round.
    is_urgent: Mutex<bool>,
    hurry: Condvar,
}

impl Sending {
    /// Waits before the next round, unless somebody waits for it.
    pub(super) fn pause(&self, time: Duration) {
        let mut is_urgent = self.is_urgent.lock();
        if !*is_urgent {
            self.hurry.wait_for(&mut is_urgent, time);
        }
        *is_urgent = false;
    }

    /// Waits until the events recorded so far are sent. A rank's events can't be read after it has
    /// left.
    pub(crate) fn flush(&self) {
        let until = Instant::now() + LEAVING;
        let next = self.looks.load(SeqCst) + 1;
        *self.is_urgent.lock() = true;
        self.hurry.notify_one();
        while self.is_running.load(SeqCst)
            && self.complete.load(SeqCst) < next
            && Instant::now() < until
        {
            sleep(Duration::from_millis(1));
        }
    }
}
