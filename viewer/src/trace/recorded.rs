//! Events like those of a node, for tests.

use gradwire_proto::pb::{TraceBatch, TraceName, TraceTrack};
use gradwire_trace::{Event, Kind};

/// The track of all threads of a daemon except lanes, and the track of its first lane.
pub(crate) const CONTROL: u32 = 0;
pub(crate) const LANE_0: u32 = 1;

/// An event and its track.
#[derive(Debug, Clone)]
pub(crate) struct Recorded {
    pub(crate) track: u32,
    pub(crate) event: Event,
}

/// An event with a subject and no other details.
pub(crate) fn recorded(
    kind: Kind,
    track: u32,
    at_ns: u64,
    duration_ns: u64,
    subject: u64,
) -> Recorded {
    Recorded { track, event: Event { duration_ns, ..Event::new(kind, at_ns, subject) } }
}

impl Recorded {
    pub(crate) fn name(mut self, name: u32) -> Self {
        self.event.name = name;
        self
    }

    pub(crate) fn other(mut self, other: u32) -> Self {
        self.event.other = other;
        self
    }

    pub(crate) fn bytes(mut self, bytes: u64) -> Self {
        self.event.bytes = bytes;
        self
    }
}

/// A batch of a node that calls this name number 1.
pub(crate) fn batch(node: u32, name: &str, events: &[Recorded]) -> TraceBatch {
    let names = vec![TraceName { number: 1, name: name.to_owned() }];
    let of = |one: &Recorded| {
        let mut events = Vec::new();
        one.event.write(&mut events);
        TraceTrack { track: one.track, events }
    };
    let tracks = events.iter().map(of).collect();
    TraceBatch { node, ahead_error_ns: 50, names, tracks, ..TraceBatch::default() }
}
