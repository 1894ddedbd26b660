//! The recordings as a file for the viewers of traces, with the same lines as those of `gradwire
//! trace`.

use std::collections::{BTreeMap, BTreeSet};

use gradwire_proto::pb::{NodeStatus, StatusResponse, TraceBatch, TraceName, TraceTrack};
use gradwire_trace::{
    Event, Kind,
    flight::{Operation, Outcome},
};

use super::merge::Job;
use crate::trace::file::Trace;

/// The track of all threads of a daemon except lanes.
const CONTROL: u32 = 0;

/// Where the numbers of operations begin that have no place in the order of the job.
const UNORDERED: u64 = 1 << 48;

/// The text of the file.
pub fn text(job: &Job) -> Vec<u8> {
    let status = status(job);
    let (mut trace, mut out) = (Trace::new(&status), Vec::new());
    trace.begin(&status, &mut out);
    for node in job.hosts.keys() {
        trace.add(batch(job, *node), |_, _| true, &mut out);
    }
    trace.end(&mut out);
    out
}

fn status(job: &Job) -> StatusResponse {
    // Nodes are numbered without gaps, so those without a recording are there without ranks.
    let last = job.hosts.keys().next_back().map_or(0, |last| last + 1);
    let node = |node: u32| match job.hosts.get(&node) {
        Some(host) => NodeStatus {
            host: host.name.clone(),
            first_rank: host.first_rank,
            slots: host.slots,
            ..NodeStatus::default()
        },
        None => NodeStatus { host: format!("node {node}"), ..NodeStatus::default() },
    };
    StatusResponse {
        job: job.job.clone(),
        version: gradwire_proto::VERSION.to_owned(),
        nodes: (0..last).map(node).collect(),
        ..StatusResponse::default()
    }
}

/// The events of a node, as a thread that records for a trace would have sent them.
fn batch(job: &Job, node: u32) -> TraceBatch {
    let mut names: BTreeMap<&str, u32> = BTreeMap::new();
    let mut control: Vec<Event> = Vec::new();
    let mut tracks: Vec<TraceTrack> = Vec::new();
    let mut pieces = BTreeSet::new();
    let mut unordered = BTreeMap::new();
    let own = job.ranks.iter().filter(|(_, rank)| rank.node == node);
    for (local, (rank, record)) in (0..).zip(own) {
        let mut submits = Vec::new();
        for it in &record.operations {
            let next = names.len() as u32 + 1;
            let name = *names.entry(it.name.as_str()).or_insert(next);
            let event = |kind, at_ns, subject| Event {
                name,
                other: *rank,
                ..Event::new(kind, at_ns, subject)
            };
            Event::new(Kind::Submit, it.submitted_ns, it.ticket).write(&mut submits);
            control.push(event(Kind::Read, it.submitted_ns, it.ticket));
            let next = UNORDERED + unordered.len() as u64;
            let sequence = it.sequence.unwrap_or_else(|| {
                // All ranks of a small operation inside a node get its order at the same time.
                *unordered.entry((it.process_set, &it.name, it.ordered_ns)).or_insert(next)
            });
            let is_first = pieces.insert(sequence);
            control.extend(phases(job, it, sequence, is_first, event));
        }
        tracks.push(TraceTrack { track: 2 * local + 2, events: submits });
    }
    control.sort_by_key(|event| event.at_ns);
    let mut events = Vec::new();
    control.iter().for_each(|event| event.write(&mut events));
    tracks.push(TraceTrack { track: CONTROL, events });
    let names = names.into_iter();
    TraceBatch {
        node,
        tracks,
        names: names.map(|(name, number)| TraceName { number, name: name.to_owned() }).collect(),
        ..TraceBatch::default()
    }
}

/// What a node did for an operation of a rank. What had not ended lasts until the end of the
/// recording. `is_first`: no other rank of the node had this operation.
fn phases(
    job: &Job,
    it: &Operation,
    sequence: u64,
    is_first: bool,
    event: impl Fn(Kind, u64, u64) -> Event,
) -> Vec<Event> {
    let lasts = |kind, from_ns: u64, to_ns: u64, subject| {
        let to_ns = if to_ns == 0 { job.end_ns } else { to_ns };
        Event { duration_ns: to_ns.saturating_sub(from_ns), ..event(kind, from_ns, subject) }
    };
    let mut events = Vec::new();
    if is_first {
        events.push(lasts(Kind::Gather, it.submitted_ns, it.announced_ns, 0));
    }
    if it.announced_ns > 0 {
        let order = lasts(Kind::Order, it.announced_ns, it.ordered_ns, sequence);
        events.push(Event { bytes: it.ticket, ..order });
    }
    if it.ordered_ns > 0 && is_first {
        let piece = lasts(Kind::Piece, it.ordered_ns, it.ended_ns, sequence);
        events.push(Event { bytes: it.bytes, ..piece });
    }
    if it.outcome == Outcome::Done {
        events.push(event(Kind::Complete, it.ended_ns, it.ticket));
    }
    events
}
