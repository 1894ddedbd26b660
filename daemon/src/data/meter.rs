//! Measures how a lane spends its time.
//!
//! A lane notes the time after each activity: bytes have moved, a chunk is reduced, a wait is over.
//! The check for late pieces needs these times anyway, so the meter does not read the clock more
//! often. It adds the time since the last note to that activity. While the job is traced, each note
//! is also an event.

use std::time::Instant;

use gradwire_proto::{NodeId, Sequence};
use gradwire_trace::{Event, Kind, Recorder};

use crate::metrics::LaneActivity;

#[derive(Debug)]
pub(super) struct Meter {
    last: Instant,
    activity: LaneActivity,
    recorder: Recorder,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Doing {
    Reduce,
    Send,
    Receive,
    Publish,
    /// It waited, or looked for work.
    Idle,
}

impl Doing {
    /// The kind of its trace event.
    fn kind(self) -> Option<Kind> {
        match self {
            Self::Reduce => Some(Kind::Reduce),
            Self::Send => Some(Kind::Send),
            Self::Receive => Some(Kind::Receive),
            Self::Publish => Some(Kind::Publish),
            Self::Idle => None,
        }
    }
}

impl Meter {
    /// A meter for the lane with this number, starting now.
    pub(super) fn new(lane: u32, recorder: Recorder) -> Self {
        Self { last: Instant::now(), activity: LaneActivity::new(lane), recorder }
    }

    /// The lane has spent the time since the last call on this activity. Returns the current time.
    pub(super) fn spent(&mut self, doing: Doing) -> Instant {
        self.add(doing).1
    }

    /// The lane has spent the time since the last call on this activity for `bytes` bytes of a
    /// piece, perhaps with a peer. Returns the current time.
    pub(super) fn spent_on(
        &mut self,
        doing: Doing,
        sequence: Sequence,
        bytes: u64,
        peer: Option<NodeId>,
    ) -> Instant {
        let (began, now) = self.add(doing);
        if self.recorder.is_on()
            && let Some(kind) = doing.kind()
        {
            let event = self.recorder.between(kind, began, now, sequence.0);
            self.recorder.record(Event { bytes, other: peer.map_or(0, |peer| peer.0), ..event });
        }
        now
    }

    /// A piece starts, which has waited for this lane since its order.
    pub(super) fn starts(&self, sequence: Sequence, ordered: Instant) {
        if self.recorder.is_on() {
            let now = Instant::now();
            self.recorder.record(self.recorder.between(Kind::Queue, ordered, now, sequence.0));
        }
    }

    /// Returns the times of the last call and of this one.
    fn add(&mut self, doing: Doing) -> (Instant, Instant) {
        let now = Instant::now();
        let LaneActivity { reduce, send, receive, publish, idle } = &self.activity;
        let counter = match doing {
            Doing::Reduce => reduce,
            Doing::Send => send,
            Doing::Receive => receive,
            Doing::Publish => publish,
            Doing::Idle => idle,
        };
        let began = std::mem::replace(&mut self.last, now);
        counter.add(now.saturating_duration_since(began));
        (began, now)
    }

    /// The time of the last call.
    pub(super) fn last(&self) -> Instant {
        self.last
    }
}
