//! Converts between the messages of `gradwire.v1` and the engine's types. Incoming messages are
//! checked here, once (TRUST). Outgoing answers are split into messages that a node accepts.

use std::{sync::Arc, time::Duration};

use gradwire_collectives::Links;
use gradwire_proto::{
    Failure, MAX_CONTROL_MESSAGE, MAX_REPORT, NodeId, Priority, ProcessSetId, Rank, Request,
    Sequence, TensorId, WireError,
    pb::{self, coordinator_message::Message},
};
use gradwire_services::broadcast::Broadcast;
use prost::Message as _;

use crate::model::{
    ConnectionId, Event,
    command::{
        Execute, Joined, KnownSpec, Operation, Probe, Registration, SetCreated, SetRemoved,
        TensorFailure, World,
    },
    event::{Announcement, Latest, StuckRank, Submitted},
    network::Arrangement,
    status::{milliseconds, numbers},
    text,
};

/// The most bytes of a trace batch (BOUND).
const MAX_BATCH: usize = 64 << 10;

/// The longest text of a failure that a node reports, in bytes; it is sent to every node.
const MAX_FAILURE_TEXT: usize = 16 << 10;

/// The longest name in a table of stuck ranks, in characters.
const MAX_STUCK_NAME: usize = 128;

/// The longest call site in a table, in characters, and the most of them for one request.
const MAX_SITE: usize = 96;
const MAX_SITES: usize = 3;

/// The most bytes of a part of an answer; it leaves room for the enclosing message.
const MAX_EXECUTE: usize = MAX_CONTROL_MESSAGE - 1024;

/// The meaning of a node's message, except its first one.
#[derive(Debug)]
pub enum Incoming {
    /// Something for the engine.
    Event(Event),
    /// A failure, and when the node noticed it on the coordinator's clock; 0 if it does not know.
    Failed {
        /// The failure.
        failure: Failure,
        /// Nanoseconds of the coordinator's clock.
        noticed_ns: u64,
    },
    /// A heartbeat, with the node's clock, which is echoed.
    Heartbeat {
        /// Nanoseconds of the node's monotonic clock.
        sent_ns: u64,
        /// The node's report, if it contains one.
        report: Option<pb::NodeReport>,
        /// Whether one of its ranks has begun a sampled step.
        samples: bool,
        /// Whether one of its ranks has attached.
        begun: bool,
        /// How many messages the node has received.
        received: u64,
        /// The node's shortest round trip; zero if it does not know.
        round_trip: Duration,
    },
    /// A batch of the node's trace.
    Trace(Vec<u8>),
    /// What the node's ranks do.
    Explained(pb::Explained),
    /// A tensor has waited too long for ranks of the node.
    Overdue,
}

/// Checks a message of a node that has joined.
///
/// # Errors
/// [`WireError`] with the invalid field.
pub fn incoming(connection: ConnectionId, wire: pb::NodeMessage) -> Result<Incoming, WireError> {
    use pb::node_message::Message;
    let event = match wire.message.ok_or(WireError::Missing("message"))? {
        Message::Join(_) => {
            let reason = "only the first message of a stream may be a join".into();
            return Err(WireError::Invalid { field: "join", reason });
        }
        Message::Heartbeat(beat) => {
            let report = beat.report.as_ref().map(report).transpose()?;
            let pb::Heartbeat { sent_ns, trace: samples, begun, received, .. } = beat;
            let round_trip = Duration::from_nanos(beat.round_trip_ns);
            return Ok(Incoming::Heartbeat {
                sent_ns,
                report,
                samples,
                begun,
                received,
                round_trip,
            });
        }
        Message::Trace(trace) if trace.batch.len() <= MAX_BATCH => {
            return Ok(Incoming::Trace(trace.batch));
        }
        Message::Trace(trace) => {
            let reason = format!("{} bytes, more than {MAX_BATCH}", trace.batch.len());
            return Err(WireError::Invalid { field: "trace", reason });
        }
        // The engine checks the ranks when it explains a wait.
        Message::Explained(explained) => return Ok(Incoming::Explained(explained)),
        Message::Overdue(pb::Overdue {}) => return Ok(Incoming::Overdue),
        Message::Ready(ready) => Event::Ready {
            connection,
            announcements: ready
                .announcements
                .into_iter()
                .map(announcement)
                .collect::<Result<_, _>>()?,
        },
        Message::Done(done) => Event::Done {
            connection,
            sequences: done.sequences.into_iter().map(Sequence).collect(),
        },
        Message::Probed(probed) => Event::Probed {
            connection,
            sequence: Sequence(probed.sequence),
            time: Duration::from_nanos(probed.nanoseconds),
            retransmits: probed.retransmits,
        },
        Message::Forgotten(forgotten) => {
            Event::Forgotten { connection, ids: forgotten.ids.into_iter().map(TensorId).collect() }
        }
        Message::Failed(failed) => {
            return Ok(Incoming::Failed {
                failure: failure(failed.failure.ok_or(WireError::Missing("failure"))?),
                noticed_ns: failed.noticed_ns,
            });
        }
        Message::Leave(leave) => Event::Left {
            connection,
            ranks: leave.ranks.into_iter().map(Rank).collect(),
            absent: leave.absent,
        },
        Message::Stuck(stuck) => Event::Stuck {
            connection,
            last: stuck.number,
            ranks: stuck.ranks.into_iter().map(stuck_rank).collect(),
        },
    };
    Ok(Incoming::Event(event))
}

/// A call site for a table, in which its end says more than its beginning (BOUND).
fn call_site(text: &str) -> String {
    text::excerpt_around(text, text.chars().count(), MAX_SITE)
}

/// The names are cut, because they only appear in a message (BOUND).
fn stuck_rank(wire: pb::StuckRank) -> StuckRank {
    StuckRank {
        rank: Rank(wire.rank),
        set: ProcessSetId(wire.process_set),
        name: text::excerpt(&wire.name, MAX_STUCK_NAME),
        call: text::excerpt(&wire.call, MAX_STUCK_NAME),
        in_flight: wire.in_flight,
        site: call_site(&wire.site),
    }
}

fn announcement(wire: pb::Announcement) -> Result<Announcement, WireError> {
    let submitted = wire.submitted.into_iter().map(|submitted| {
        Ok(Submitted {
            ranks: submitted.ranks.into_iter().map(Rank).collect(),
            request: Request::try_from(submitted.request.ok_or(WireError::Missing("request"))?)?,
            priority: Priority(submitted.priority),
            duplicate: submitted.duplicate,
            sites: submitted.sites.iter().take(MAX_SITES).map(|site| call_site(site)).collect(),
        })
    });
    Ok(Announcement {
        set: ProcessSetId(wire.process_set),
        tensor: wire.tensor.try_into()?,
        submitted: submitted.collect::<Result<_, WireError>>()?,
        latest: wire.latest.map(|latest| Latest {
            local_rank: latest.local_rank,
            waited: Duration::from_micros(latest.waited_us),
        }),
    })
}

/// Checks a report (TRUST, BOUND). Its ranks have their local numbers.
fn report(wire: &pb::Report) -> Result<pb::NodeReport, WireError> {
    let invalid = |reason: String| WireError::Invalid { field: "report", reason };
    let bytes = wire.encoded_len();
    if bytes > MAX_REPORT {
        return Err(invalid(format!("{bytes} bytes, more than {MAX_REPORT}")));
    }
    let lists = [&wire.rank_step_seconds, &wire.rank_exposed, &wire.rank_since_step_seconds];
    let rates = [&wire.sent_bytes_per_second, &wire.received_bytes_per_second];
    if lists.iter().any(|list| list.len() != wire.rank_steps.len())
        || rates.iter().any(|list| list.len() != wire.peers.len())
        || wire.rank_blocked.len() != 4 * wire.rank_steps.len()
    {
        return Err(invalid("its lists differ in length".to_owned()));
    }
    let operations = &wire.operations_per_second;
    let mut numbers = lists.into_iter().chain(rates).flatten().chain([operations]);
    if let Some(number) = numbers.find(|number| !(number.is_finite() && **number >= 0.0)) {
        return Err(invalid(format!("invalid duration or rate {number}")));
    }
    let ranks = wire.rank_steps.iter().enumerate().map(|(at, &steps)| pb::RankReport {
        rank: at as u32,
        steps,
        step_seconds: wire.rank_step_seconds[at].into(),
        exposed: wire.rank_exposed[at].into(),
        since_step_seconds: wire.rank_since_step_seconds[at].into(),
        paused: at < 32 && wire.paused_ranks >> at & 1 == 1,
        blocked: Some(blocked(&wire.rank_blocked[4 * at..][..4])),
    });
    let peers = wire.peers.iter().enumerate().map(|(at, &node)| pb::PeerReport {
        node,
        sent_bytes_per_second: wire.sent_bytes_per_second[at].into(),
        received_bytes_per_second: wire.received_bytes_per_second[at].into(),
    });
    Ok(pb::NodeReport {
        age_ms: 0,
        ranks: ranks.collect(),
        peers: peers.collect(),
        line_bytes_per_second: Some(wire.line_bytes_per_second).filter(|rate| *rate > 0),
        resident_bytes: wire.resident_bytes,
        shared_bytes: wire.shared_bytes,
        pieces_in_flight: wire.pieces_in_flight,
        queued_tensors: wire.queued_tensors,
        stalled_tensors: wire.stalled_tensors,
        operations_per_second: wire.operations_per_second.into(),
        partly: wire.partly.clone(),
        more_partly: wire.more_partly,
    })
}

/// The four shares of a rank in a report.
fn blocked(bytes: &[u8]) -> pb::Blocked {
    let share = |at: usize| f64::from(bytes[at]) / 255.0;
    pb::Blocked { gather: share(0), negotiate: share(1), transfer: share(2), publish: share(3) }
}

fn failure(wire: pb::Failure) -> Failure {
    let mut failure = Failure::from(wire);
    failure.limit(MAX_FAILURE_TEXT);
    failure
}

/// The world as it is sent to one node.
pub fn world(world: &World, node: u32, proof: Vec<u8>) -> pb::World {
    let nodes = world.nodes.iter().map(|node| pb::Node {
        host: node.host.clone(),
        data_address: node.data_address.clone(),
        first_rank: node.first_rank.0,
        slots: node.slots,
        rack: node.rack.clone(),
        line_mbit: node.line_mbit,
    });
    pb::World {
        epoch: world.epoch.0,
        node,
        nodes: nodes.collect(),
        lanes: world.lanes,
        heartbeat_interval_ms: milliseconds(world.heartbeat_interval),
        heartbeat_timeout_ms: milliseconds(world.heartbeat_timeout),
        proof,
        compression: world.compression.to_wire(),
        trace: false,
    }
}

fn registration(registration: Registration) -> pb::Registration {
    pb::Registration {
        id: registration.id.0,
        process_set: registration.set.0,
        name: registration.name.as_str().to_owned(),
        agreed: Some(pb::Agreed::from(&*registration.agreed)),
        priority: registration.priority.0,
    }
}

fn spec(known: KnownSpec) -> pb::Spec {
    pb::Spec { id: known.id.0, text: known.spec.to_string() }
}

fn operation(operation: Operation) -> pb::Operation {
    let segments = operation.segments.into_iter().map(|segment| pb::Segment {
        tensor: Some(segment.tensor.into()),
        part: segment.part,
        offset: segment.offset,
        count: segment.count,
        agreed: segment.agreed.map(|agreed| pb::Agreed::from(&*agreed)),
    });
    pb::Operation {
        sequence: operation.sequence.0,
        process_set: operation.set.0,
        request: Some(pb::Request::from(&operation.request)),
        spec: operation.spec.id.0,
        segments: segments.collect(),
        absent: numbers(&*operation.absent),
        quantized: operation.quantized,
        chunk_bytes: operation.chunk.unwrap_or(0) as u32,
    }
}

fn probe(probe: Probe) -> pb::Probe {
    let group = |nodes: Vec<NodeId>| pb::ProbeGroup {
        nodes: nodes.into_iter().map(|node| node.0).collect(),
    };
    pb::Probe {
        sequence: probe.sequence.0,
        pattern: probe.pattern.to_string(),
        groups: probe.groups.into_iter().map(group).collect(),
    }
}

fn set_created(created: SetCreated) -> pb::SetCreated {
    pb::SetCreated {
        process_set: created.set.0,
        ranks: numbers(&created.ranks),
        tensor: Some(created.tensor.into()),
    }
}

fn set_removed(removed: SetRemoved) -> pb::SetRemoved {
    pb::SetRemoved { process_set: removed.set.0, tensor: Some(removed.tensor.into()) }
}

fn joined(joined: Joined) -> pb::Joined {
    pb::Joined { process_set: joined.set.0, last_rank: joined.last.0 }
}

fn tensor_failure(failed: TensorFailure) -> pb::TensorFailure {
    pb::TensorFailure {
        process_set: failed.set.0,
        tensor: Some(failed.tensor.into()),
        failure: Some(failed.failure.into()),
    }
}

/// Collects parts into messages of at most [`MAX_EXECUTE`] bytes.
#[derive(Default)]
struct Splitter {
    done: Vec<pb::Execute>,
    open: pb::Execute,
    bytes: usize,
}

impl Splitter {
    /// The message with room for a part of `bytes` bytes, and 6 more for its tag and length.
    fn room_for(&mut self, bytes: usize) -> &mut pb::Execute {
        let bytes = bytes + 6;
        if self.bytes + bytes > MAX_EXECUTE && self.bytes > 0 {
            self.done.push(std::mem::take(&mut self.open));
            self.bytes = 0;
        }
        self.bytes += bytes;
        &mut self.open
    }

    /// The messages; the last one carries the number of the answer.
    fn finish(mut self, number: u64) -> Vec<pb::Execute> {
        if self.bytes > 0 {
            self.done.push(self.open);
        }
        if let Some(last) = self.done.last_mut() {
            last.number = number;
        }
        self.done
    }
}

/// One answer as messages that each fit the limit. First come the parts that others depend on: the
/// arrangement, process sets and registrations. Last come the parts that depend on all others:
/// removed sets and evicted ids.
pub fn execute(execute: Execute) -> Vec<Arc<Broadcast>> {
    let mut splitter = Splitter::default();
    if let Some(Arrangement { racks, order, .. }) = execute.arrangement {
        let part = pb::Arrangement { racks, order };
        let bytes = part.encoded_len();
        splitter.room_for(bytes).arrangement = Some(part);
    }
    for part in execute.sets_created.into_iter().map(set_created) {
        splitter.room_for(part.encoded_len()).sets_created.push(part);
    }
    for part in execute.registrations.into_iter().map(registration) {
        splitter.room_for(part.encoded_len()).registrations.push(part);
    }
    for part in execute.specs.into_iter().map(spec) {
        splitter.room_for(part.encoded_len()).specs.push(part);
    }
    if let Some(part) = execute.links.as_ref().map(links) {
        let bytes = part.encoded_len();
        splitter.room_for(bytes).links = Some(part);
    }
    for part in execute.failures.into_iter().map(tensor_failure) {
        splitter.room_for(part.encoded_len()).failures.push(part);
    }
    for part in execute.probes.into_iter().map(probe) {
        splitter.room_for(part.encoded_len()).probes.push(part);
    }
    for part in execute.operations.into_iter().map(operation) {
        splitter.room_for(part.encoded_len()).operations.push(part);
    }
    for part in execute.joined.into_iter().map(joined) {
        splitter.room_for(part.encoded_len()).joined.push(part);
    }
    for part in execute.sets_removed.into_iter().map(set_removed) {
        splitter.room_for(part.encoded_len()).sets_removed.push(part);
    }
    for TensorId(id) in execute.evicted {
        splitter.room_for(size_of::<u32>()).evicted.push(id);
    }
    splitter
        .finish(execute.number)
        .into_iter()
        .map(|part| message(Message::Execute(part)))
        .collect()
}

fn links(links: &Links) -> pb::Links {
    pb::Links {
        line_mbit: links.lines().to_vec(),
        uplink_mbit: links.uplink(),
        pair_mbit: links.pairs().to_vec(),
    }
}

/// Wraps one message.
pub fn message(message: Message) -> Arc<Broadcast> {
    Broadcast::new(pb::CoordinatorMessage { message: Some(message) })
}

#[cfg(test)]
mod tests;
