//! Turns a step into messages of OTLP. Pure.
//!
//! A trace is one step. Its root span lasts from the start of its first rank to the end of its
//! last. Below it, each rank has a span for its step, with spans of its threads. Each node has a
//! span, with spans for each tensor of the step and for each piece, and below a piece the work of
//! lanes. Links lead from a piece to the submissions that it moves parts of, and from the first
//! message of a piece that a node receives to the span in which the other node sends it.

use std::collections::HashMap;

use gradwire_services::otlp::{
    collector::trace::v1::ExportTraceServiceRequest,
    common::v1::{InstrumentationScope, KeyValue},
    resource::v1::Resource,
    trace::v1::{
        ResourceSpans, ScopeSpans, Span,
        span::{Link, SpanKind},
    },
};
use gradwire_telemetry::otlp::{attribute, number_attribute};
use sha2::{Digest as _, Sha256};

use super::step::{RankStep, Sampled};
use crate::trace::{
    found::{Slice, Track, What},
    join::Host,
};

/// The most spans in one message. They need less than the 4 MiB that a collector accepts.
const MAX_SPANS: usize = 2048;

/// The flag of a sampled span.
const IS_SAMPLED: u32 = 1;

/// The job that the spans belong to.
#[derive(Debug, Clone)]
pub(super) struct Origin {
    pub(super) job: String,
    pub(super) epoch: u64,
    pub(super) version: &'static str,
    /// By the number of the node.
    pub(super) hosts: Vec<Host>,
}

impl Origin {
    fn host(&self, node: u32) -> &str {
        self.hosts.get(node as usize).map_or("", |host| &host.name)
    }

    fn host_of(&self, rank: u32) -> &str {
        let has = |host: &&Host| {
            rank.checked_sub(host.first_rank).is_some_and(|local| local < host.ranks)
        };
        self.hosts.iter().find(has).map_or("", |host| &host.name)
    }
}

/// The subject of a span: the job, a rank or a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Subject {
    Job,
    Rank(u32),
    Node(u32),
}

/// The messages for the spans of a step.
pub(super) fn requests(step: &Sampled, origin: &Origin) -> Vec<ExportTraceServiceRequest> {
    let mut spans = Spans::new(step, origin);
    spans.all();
    let Spans { mut made, .. } = spans;
    let mut requests = Vec::new();
    while !made.is_empty() {
        let rest = made.split_off(made.len().min(MAX_SPANS));
        let resource_spans =
            made.chunk_by(|(one, _), (other, _)| one == other).map(|spans| ResourceSpans {
                resource: Some(resource(spans[0].0, origin)),
                scope_spans: vec![ScopeSpans {
                    scope: Some(InstrumentationScope {
                        name: "gradwire".to_owned(),
                        version: origin.version.to_owned(),
                        ..InstrumentationScope::default()
                    }),
                    spans: spans.iter().map(|(_, span)| span.clone()).collect(),
                    schema_url: String::new(),
                }],
                schema_url: String::new(),
            });
        requests.push(ExportTraceServiceRequest { resource_spans: resource_spans.collect() });
        made = rest;
    }
    requests
}

/// The resource attributes of metrics, and the rank.
fn resource(subject: Subject, origin: &Origin) -> Resource {
    let Origin { job, version, .. } = origin;
    let (service, instance, host) = match subject {
        Subject::Job => ("gradwire", job.clone(), None),
        Subject::Rank(rank) => {
            ("gradwire-rank", format!("{job}/{rank}"), Some(origin.host_of(rank)))
        }
        Subject::Node(node) => {
            let host = origin.host(node);
            ("gradwired", format!("{job}/{host}"), Some(host))
        }
    };
    let mut attributes = vec![
        attribute("service.name", service),
        attribute("service.namespace", "gradwire"),
        attribute("service.version", version),
        attribute("service.instance.id", &instance),
        attribute("gradwire_job", job),
    ];
    if let Some(host) = host {
        attributes.extend([attribute("host.name", host), attribute("host", host)]);
    }
    if let Subject::Rank(rank) = subject {
        attributes.push(number_attribute("rank", rank.into()));
    }
    Resource { attributes, ..Resource::default() }
}

/// Makes the spans of a step.
struct Spans<'a> {
    step: &'a Sampled,
    origin: &'a Origin,
    trace: [u8; 16],
    made: Vec<(Subject, Span)>,
    /// The spans of submissions, by rank and ticket.
    submitted: HashMap<(u32, u64), Vec<u8>>,
    /// The first send of an operation, by its number, the sending node and the receiving node.
    sent: HashMap<(u64, u32, u32), Vec<u8>>,
    /// The first receive, with its index among all spans.
    received: HashMap<(u64, u32, u32), usize>,
    count: u64,
}

impl<'a> Spans<'a> {
    fn new(step: &'a Sampled, origin: &'a Origin) -> Self {
        let hash = Sha256::new()
            .chain_update(origin.job.as_bytes())
            .chain_update(origin.epoch.to_le_bytes())
            .chain_update(step.number.to_le_bytes())
            .finalize();
        let trace = std::array::from_fn(|index| hash[index]);
        Self {
            step,
            origin,
            trace,
            made: Vec::new(),
            submitted: HashMap::new(),
            sent: HashMap::new(),
            received: HashMap::new(),
            count: 0,
        }
    }

    /// The next span id: unique in the trace, and not 0.
    fn id(&mut self) -> Vec<u8> {
        self.count += 1;
        let first = u64::from_le_bytes(std::array::from_fn(|index| self.trace[index])) >> 1;
        (first + self.count).to_be_bytes().to_vec()
    }

    fn span(
        &mut self,
        subject: Subject,
        parent: &[u8],
        name: String,
        (begin_ns, end_ns): (u64, u64),
        attributes: Vec<KeyValue>,
    ) -> (Vec<u8>, &mut Span) {
        let id = self.id();
        self.made.push((
            subject,
            Span {
                trace_id: self.trace.to_vec(),
                span_id: id.clone(),
                parent_span_id: parent.to_vec(),
                name,
                kind: SpanKind::Internal.into(),
                start_time_unix_nano: begin_ns,
                end_time_unix_nano: end_ns,
                attributes,
                flags: IS_SAMPLED,
                ..Span::default()
            },
        ));
        let index = self.made.len() - 1;
        (id, &mut self.made[index].1)
    }

    fn all(&mut self) {
        let Sampled { number, ranks, nodes, lost, left_out, error_ns, .. } = self.step;
        let of_ranks = ranks.values().map(|rank| (rank.begin_ns, rank.end_ns));
        let of_nodes = nodes.values().flatten().map(|slice| (slice.at_ns, slice.end_ns()));
        let Some(times) = hull(of_ranks.chain(of_nodes)) else { return };
        let about = vec![
            number_attribute("gradwire.step", *number),
            number_attribute("gradwire.ranks", ranks.len() as u64),
            number_attribute("gradwire.clock_error_ns", *error_ns),
            number_attribute("gradwire.lost_events", lost.events),
            number_attribute("gradwire.lost_batches", lost.batches),
            number_attribute("gradwire.left_out", *left_out),
        ];
        let (root, _) = self.span(Subject::Job, &[], format!("step {number}"), times, about);
        for (&rank, step) in ranks {
            self.rank(rank, step, &root);
        }
        for (&node, slices) in nodes {
            self.node(node, slices, &root);
        }
        self.link_messages();
    }

    fn rank(&mut self, rank: u32, step: &RankStep, root: &[u8]) {
        let subject = Subject::Rank(rank);
        let about = vec![number_attribute("gradwire.step", self.step.number)];
        let times = (step.begin_ns, step.end_ns);
        let (own, _) = self.span(subject, root, format!("rank {rank}"), times, about);
        let mut waits: HashMap<(Track, Option<u64>), Vec<u8>> = HashMap::new();
        for slice in &step.slices {
            // A wake-up is the end of a wait, which has come before it.
            let key = (slice.track, slice.ticket);
            let parent = match slice.what {
                What::WakeUp => waits.get(&key).unwrap_or(&own),
                _ => &own,
            };
            let parent = parent.clone();
            let id = self.slice(subject, &parent, slice);
            match (slice.what, slice.ticket) {
                (What::Wait, _) => drop(waits.insert(key, id)),
                (What::Submit, Some(ticket)) => drop(self.submitted.insert((rank, ticket), id)),
                _ => {}
            }
        }
    }

    fn node(&mut self, node: u32, slices: &[Slice], root: &[u8]) {
        let subject = Subject::Node(node);
        let Some(times) = hull(slices.iter().map(|slice| (slice.at_ns, slice.end_ns()))) else {
            return;
        };
        let about = vec![number_attribute("gradwire.step", self.step.number)];
        let name = format!("node {}", self.origin.host(node));
        let (own, _) = self.span(subject, root, name, times, about);
        let of_piece = |slice: &Slice| {
            use What::{Publish, Queue, Receive, Reduce, Send};
            matches!(slice.what, Queue | Reduce | Send | Receive | Publish)
        };
        let mut pieces: HashMap<u64, Vec<u8>> = HashMap::new();
        for slice in slices.iter().filter(|slice| !of_piece(slice)) {
            let id = self.slice(subject, &own, slice);
            let (What::Piece, Some(operation)) = (slice.what, slice.operation) else { continue };
            // A lane may still work on a piece after its end.
            let parts = slices.iter().filter(|part| part.operation == Some(operation));
            let parts = parts.filter(|part| of_piece(part) || part.what == What::Piece);
            let times = hull(parts.map(|part| (part.at_ns, part.end_ns())));
            let submissions = self.step.parts.get(&operation).into_iter().flatten();
            let linked: Vec<_> =
                submissions.filter_map(|submission| self.submitted.get(submission)).collect();
            let links: Vec<Link> = linked.into_iter().map(|id| link(&self.trace, id)).collect();
            if let Some((_, span)) = self.made.last_mut() {
                span.links = links;
                if let Some((begin_ns, end_ns)) = times {
                    (span.start_time_unix_nano, span.end_time_unix_nano) = (begin_ns, end_ns);
                }
            }
            pieces.insert(operation, id);
        }
        let mut parts: Vec<&Slice> = slices.iter().filter(|slice| of_piece(slice)).collect();
        parts.sort_by_key(|slice| slice.at_ns);
        for slice in parts {
            let piece = slice.operation.and_then(|operation| pieces.get(&operation));
            let parent = piece.unwrap_or(&own).clone();
            let id = self.slice(subject, &parent, slice);
            // The first message of an operation between two nodes.
            let (Some(operation), Some(peer)) = (slice.operation, slice.peer) else { continue };
            match slice.what {
                What::Send => drop(self.sent.entry((operation, node, peer)).or_insert(id)),
                What::Receive => {
                    let index = self.made.len() - 1;
                    self.received.entry((operation, peer, node)).or_insert(index);
                }
                _ => {}
            }
        }
    }

    /// Links the spans of receivers to the spans of senders.
    fn link_messages(&mut self) {
        for (message, index) in &self.received {
            if let (Some(id), Some((_, span))) = (self.sent.get(message), self.made.get_mut(*index))
            {
                span.links.push(link(&self.trace, id));
            }
        }
    }

    /// The span of a slice. Returns its id.
    fn slice(&mut self, subject: Subject, parent: &[u8], slice: &Slice) -> Vec<u8> {
        let Slice { what, track, title, ticket, operation, peer, bytes, .. } = slice;
        let mut about = Vec::new();
        match track {
            Track::Lane { lane, .. } => {
                about.push(number_attribute("gradwire.lane", (*lane).into()));
            }
            Track::Thread { thread, .. } => {
                about.push(number_attribute("gradwire.thread", (*thread).into()));
            }
            Track::Control { .. } | Track::Steps { .. } => {}
        }
        let numbers = [("gradwire.ticket", ticket), ("gradwire.operation", operation)];
        for (name, number) in numbers {
            about.extend(number.map(|number| number_attribute(name, number)));
        }
        if *bytes > 0 {
            about.push(number_attribute("gradwire.bytes", *bytes));
        }
        if let Some(peer) = peer {
            about.push(attribute("gradwire.peer", self.origin.host(*peer)));
        }
        let name = match title.as_str() {
            "" => what.name().to_owned(),
            title => {
                about.push(attribute("gradwire.tensor", title));
                format!("{} {title}", what.name())
            }
        };
        self.span(subject, parent, name, (slice.at_ns, slice.end_ns()), about).0
    }
}

fn link(trace: &[u8; 16], span: &[u8]) -> Link {
    let (trace_id, span_id) = (trace.to_vec(), span.to_vec());
    Link { trace_id, span_id, flags: IS_SAMPLED, ..Link::default() }
}

/// From the earliest beginning to the latest end.
fn hull(times: impl Iterator<Item = (u64, u64)>) -> Option<(u64, u64)> {
    times.reduce(|(begin, end), (other, until)| (begin.min(other), end.max(until)))
}
