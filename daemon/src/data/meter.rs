//! What a lane does with its time.
//!
//! A lane notes the time whenever something has happened: bytes have moved, a chunk is reduced, a
//! wait is over. The stall detector needs these times in any case, so the meter reads no clock of
//! its own. It adds the time since the last note to what has happened since.

use std::time::Instant;

use crate::metrics::LaneActivity;

/// The clock of a lane.
#[derive(Debug)]
pub(super) struct Meter {
    last: Instant,
    activity: LaneActivity,
}

/// What a lane has done.
#[derive(Debug, Clone, Copy)]
pub(super) enum Doing {
    Reduce,
    Send,
    Receive,
    Publish,
    /// It waited, or looked for something to do.
    Idle,
}

impl Meter {
    /// For the lane with this number, from now on.
    pub(super) fn new(lane: u32) -> Self {
        Self { last: Instant::now(), activity: LaneActivity::new(lane) }
    }

    /// Since the last call the lane has done this. Returns the time.
    pub(super) fn spent(&mut self, doing: Doing) -> Instant {
        let now = Instant::now();
        let LaneActivity { reduce, send, receive, publish, idle } = &self.activity;
        let counter = match doing {
            Doing::Reduce => reduce,
            Doing::Send => send,
            Doing::Receive => receive,
            Doing::Publish => publish,
            Doing::Idle => idle,
        };
        counter.add(now.saturating_duration_since(std::mem::replace(&mut self.last, now)));
        now
    }

    /// The time of the last call.
    pub(super) fn last(&self) -> Instant {
        self.last
    }
}
