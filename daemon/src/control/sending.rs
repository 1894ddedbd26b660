//! How far the thread has come that sends what is recorded of a trace.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    thread::sleep,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

/// How long a rank that leaves may wait until what it has recorded is sent (WAIT).
const LEAVING: Duration = Duration::from_millis(500);

/// The thread that sends what is recorded, if there is one.
#[derive(Debug, Default)]
pub(crate) struct Sending {
    /// Whether the coordinator asks for what this node does.
    pub(super) is_asked: AtomicBool,
    /// Whether a rank of this node was in a step that is sampled when that was looked at last.
    pub(super) samples: AtomicBool,
    pub(super) is_running: AtomicBool,
    /// How often it has begun to look, and the last of these looks that found all there was.
    pub(super) looks: AtomicU64,
    pub(super) complete: AtomicU64,
    /// Whether somebody waits for the next look.
    is_urgent: Mutex<bool>,
    hurry: Condvar,
}

impl Sending {
    /// Waits before the next look, unless somebody waits for that.
    pub(super) fn pause(&self, time: Duration) {
        let mut is_urgent = self.is_urgent.lock();
        if !*is_urgent {
            self.hurry.wait_for(&mut is_urgent, time);
        }
        *is_urgent = false;
    }

    /// Waits until what is recorded by now is sent. What a rank has recorded can't be read once it
    /// has left.
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
