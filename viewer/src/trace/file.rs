//! Writes a trace as a file in Chrome's Trace Event Format, which Perfetto opens, too. (Google,
//! "Trace Event Format": an array of JSON objects; its closing bracket may be missing.)

use std::collections::HashSet;

use gradwire_proto::pb::{StatusResponse, TraceBatch};
use serde_json::json;

use super::{
    chrome::{Facts, Line, Place},
    found::{Arrow, Found, Slice, Track, What},
    join::{Joiner, Lost, MAX_KNOWN},
};

/// The process id of rank 0 in the file. A daemon has the number of its node plus 1.
const FIRST_RANK: u64 = 100_000;

/// Thread ids in the file: all threads of a daemon except lanes, and the steps of a rank.
const CONTROL: u64 = 0;
const STEPS: u64 = 1_000;

/// Writes the text of a file in parts, in UTF-8.
#[derive(Debug)]
pub struct Trace {
    joiner: Joiner,
    /// Tracks that already have a name in the file.
    named: HashSet<Place>,
    /// The last id of an overlapping slice.
    count: u64,
    written: u64,
}

impl Trace {
    /// A trace of the job with this status.
    pub fn new(status: &StatusResponse) -> Self {
        let joiner = Joiner::new(status);
        Self { joiner, named: HashSet::new(), count: 0, written: 0 }
    }

    /// Writes the beginning of the file.
    pub fn begin(&self, status: &StatusResponse, out: &mut Vec<u8>) {
        out.extend_from_slice(b"[\n");
        let about = json!({ "job": status.job, "gradwire": status.version });
        Line::about("gradwire_job", 0, about).write(out);
        for (node, host) in (1..).zip(self.joiner.hosts()) {
            Line::process(node, &format!("gradwired on {}", host.name)).write(out);
            for rank in host.first_rank..host.first_rank.saturating_add(host.ranks) {
                let (pid, name) = (process_of(rank), format!("rank {rank} on {}", host.name));
                Line::process(pid, &name).write(out);
                Line::thread(Place { pid, tid: STEPS }, "steps").write(out);
            }
        }
    }

    /// Adds a batch, without events that make no sense (TRUST). `wanted` decides by the beginning
    /// and the end of an event, in nanoseconds of the coordinator's clock.
    pub fn add(&mut self, batch: TraceBatch, wanted: impl Fn(u64, u64) -> bool, out: &mut Vec<u8>) {
        self.joiner.add(batch, wanted);
        self.write_found(out);
    }

    /// Writes the end of the file, with events whose counterparts never came.
    pub fn end(&mut self, out: &mut Vec<u8>) {
        self.joiner.end();
        self.write_found(out);
        let Lost { events, batches } = self.joiner.lost();
        let about = json!({ "lost_events": events, "lost_batches": batches });
        Line::about("gradwire_end", 0, about).write(out);
        // No comma after the last one.
        let end = out.iter().rposition(|byte| !b",\n".contains(byte));
        out.truncate(end.map_or(0, |last| last + 1));
        out.extend_from_slice(b"\n]\n");
    }

    /// How many events were written.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// The joiner of the events, which also counts missing batches.
    pub fn joiner(&mut self) -> &mut Joiner {
        &mut self.joiner
    }

    fn write_found(&mut self, out: &mut Vec<u8>) {
        for found in self.joiner.take() {
            match found {
                Found::Slice(slice) => self.slice(&slice, out),
                Found::From(arrow, track, at_ns) => self.arrow("s", arrow, track, at_ns, out),
                Found::To(arrow, track, at_ns) => self.arrow("f", arrow, track, at_ns, out),
                Found::Clock { node, ahead_ns, error_ns } => {
                    let us = |ns: f64| ns / 1e3;
                    let (ahead, error) = (us(ahead_ns as f64), us(error_ns as f64));
                    let about = json!({ "ahead_us": ahead, "error_us": error });
                    Line::about("gradwire_clock", u64::from(node) + 1, about).write(out);
                }
                Found::Lost { node, events, at_ns } => {
                    let place = place(Track::Control { node });
                    let what = format!("lost {events} events");
                    Line::instant(&what, place, at_ns).since(self.joiner.base_ns()).write(out);
                }
                Found::Stepped { .. } | Found::Part { .. } => {}
            }
        }
    }

    fn slice(&mut self, slice: &Slice, out: &mut Vec<u8>) {
        let Slice { what, track, title, at_ns, duration_ns, .. } = slice;
        let (place, name) = (place(*track), what.name());
        let name = match (what, title.as_str()) {
            (What::Piece, title) => title.to_owned(),
            (_, "") => name.to_owned(),
            (_, title) => format!("{name} {title}"),
        };
        let category = match what {
            What::Step => "step",
            What::Submit | What::Wait | What::WakeUp | What::Compute => "rank",
            What::Gather | What::Negotiate | What::Credit => "tensor",
            What::Queue | What::Piece => "piece",
            What::Reduce | What::Send | What::Receive | What::Publish => "lane",
        };
        if matches!(category, "tensor" | "piece") {
            // These may overlap with others on the same track.
            self.count += 1;
            for (phase, at_ns) in [("b", *at_ns), ("e", slice.end_ns())] {
                let line = Line::overlapping(phase, &name, category, place, self.count, at_ns);
                self.write(line, out);
            }
            return;
        }
        self.name(*track, place, out);
        let base_ns = self.joiner.base_ns();
        let line = Line::slice(&name, category, place, *at_ns, *duration_ns).since(base_ns);
        match self.about(slice) {
            Some(about) => line.with(about).write(out),
            None => line.write(out),
        }
        self.written += 1;
    }

    /// The details of a slice that a viewer shows.
    fn about<'a>(&'a self, slice: &'a Slice) -> Option<Facts<'a>> {
        let Slice { track, what, title, ticket, operation, peer, bytes, .. } = slice;
        match (track, what) {
            (Track::Thread { rank, .. }, What::Submit | What::Wait) => {
                Some(Facts::Submission { rank: *rank, ticket: *ticket, tensor: title })
            }
            (Track::Lane { .. } | Track::Control { .. }, _) => {
                let host = peer.and_then(|peer| self.joiner.hosts().get(peer as usize));
                let peer = host.map(|host| host.name.as_str());
                Some(Facts::Moved { operation: *operation, bytes: *bytes, peer })
            }
            _ => None,
        }
    }

    fn arrow(
        &mut self,
        phase: &'static str,
        arrow: Arrow,
        track: Track,
        at_ns: u64,
        out: &mut Vec<u8>,
    ) {
        let (name, id) = match arrow {
            Arrow::Submitted { rank, ticket, operation } => {
                ("submitted", format!("r{rank}.{ticket}.{operation}"))
            }
            Arrow::Message { operation, from, to } => {
                ("message", format!("p{operation}.{from}.{to}"))
            }
        };
        self.write(Line::arrow(phase, name, place(track), &id, at_ns), out);
    }

    /// Writes the name of a track when it is first used.
    fn name(&mut self, track: Track, place: Place, out: &mut Vec<u8>) {
        let name = match track {
            // The beginning of the file has their names.
            Track::Steps { .. } => return,
            Track::Control { .. } => "control".to_owned(),
            Track::Lane { lane, .. } => format!("lane {lane}"),
            Track::Thread { thread, .. } => format!("thread {thread}"),
        };
        if self.named.len() < MAX_KNOWN && self.named.insert(place) {
            Line::thread(place, &name).write(out);
        }
    }

    fn write(&mut self, line: Line<'_>, out: &mut Vec<u8>) {
        self.written += 1;
        line.since(self.joiner.base_ns()).write(out);
    }
}

/// The process of a rank in the file.
fn process_of(rank: u32) -> u64 {
    FIRST_RANK + u64::from(rank)
}

/// The process and the thread of a track.
fn place(track: Track) -> Place {
    let of_node = |node: u32, tid| Place { pid: u64::from(node) + 1, tid };
    match track {
        Track::Control { node } => of_node(node, CONTROL),
        Track::Lane { node, lane } => of_node(node, u64::from(lane) + 1),
        Track::Thread { rank, thread } => {
            Place { pid: process_of(rank), tid: u64::from(thread) + 1 }
        }
        Track::Steps { rank } => Place { pid: process_of(rank), tid: STEPS },
    }
}
