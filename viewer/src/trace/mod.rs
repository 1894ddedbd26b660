//! A trace of a job as a file in the Trace Event Format of Chrome, which Perfetto opens, too.
//! (Google, "Trace Event Format": an array of JSON objects, of which the closing bracket may be
//! missing.)
//!
//! Nodes send events in batches, and what belongs together may come in any order: a rank knows the
//! ticket of a submission, its daemon the name of the tensor and the operation. [`Trace`] joins
//! them. What it waits for is bounded, and at the end the rest is written as it is.
//!
//! - `chrome`: one event of the file
//! - `clocks`: the clocks of the nodes
//! - this file: from the events of nodes to those of the file

mod chrome;
mod clocks;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};

use gradwire_proto::pb::{StatusResponse, TraceBatch, TraceEvent};
use gradwire_trace::Kind;
use serde_json::{Value, json};

use self::{
    chrome::{Line, Place},
    clocks::Clocks,
};

/// The most submissions and operations that are remembered (BOUND).
const MAX_KNOWN: usize = 1 << 16;

/// The most arrows from submissions to one operation (BOUND).
const MAX_ARROWS: usize = 8;

/// Processes of the file: daemons have the number of their node and one more, ranks these.
const FIRST_RANK: u64 = 100_000;

/// Threads of the file: those of daemons that are no lanes, and the steps of ranks.
const CONTROL: u64 = 0;
const STEPS: u64 = 1_000;

/// The events of a job.
#[derive(Debug)]
pub struct Trace {
    hosts: Vec<Host>,
    clocks: Clocks,
    /// By node and number.
    names: HashMap<(u32, u32), String>,
    /// By rank and ticket.
    submissions: BTreeMap<(u32, u64), Submission>,
    /// By node and number.
    pieces: BTreeMap<(u32, u64), Piece>,
    /// The round of each tensor that was ordered last, by node and name.
    rounds: HashMap<(u32, u32), Round>,
    /// When the last wait of a thread of a rank ended.
    waited: HashMap<(u32, u32), u64>,
    /// The last step of each rank, and when that ended.
    steps: BTreeMap<u32, (u64, u64)>,
    /// Tracks that have a name in the file already.
    named: HashMap<Place, ()>,
    /// For the ids of what may overlap.
    count: u64,
    /// Events that were written.
    pub written: u64,
    /// Events that nodes have lost, and batches that were lost on the way.
    pub lost: Lost,
}

/// What is not in the file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Lost {
    /// Events that nodes overwrote before they could send them.
    pub events: u64,
    /// Batches that this reader did not read in time.
    pub batches: u64,
}

#[derive(Debug)]
struct Host {
    name: String,
    first_rank: u32,
    ranks: u32,
}

/// What is known of a submission.
#[derive(Debug, Default)]
struct Submission {
    name: Option<String>,
    /// When its daemon said that it is done.
    complete_ns: Option<u64>,
    /// Where its slice is, once that is written.
    slice: Option<(Place, u64)>,
    /// The operation that it is a part of first.
    sequence: Option<u64>,
    /// What its rank has recorded of it, and is not written yet.
    held: Vec<Own>,
}

/// What a rank has recorded of a submission.
#[derive(Debug)]
struct Own {
    kind: Kind,
    place: Place,
    at_ns: u64,
    duration_ns: u64,
}

/// What is known of an operation on a node.
#[derive(Debug, Default)]
struct Piece {
    names: Vec<String>,
    /// Submissions that are a part of it.
    arrows: Vec<(u32, u64)>,
    /// Whether a lane has done something for it.
    has_begun: bool,
    /// The peers to which the first message has been shown, and those from which.
    sent: Vec<u32>,
    received: Vec<u32>,
}

#[derive(Debug)]
struct Round {
    announced_ns: u64,
    first_order_ns: u64,
    sequence: u64,
}

impl Trace {
    /// A trace of the job with this state.
    pub fn new(status: &StatusResponse) -> Self {
        let host = |node: &gradwire_proto::pb::NodeStatus| Host {
            name: node.host.clone(),
            first_rank: node.first_rank,
            ranks: node.slots,
        };
        Self {
            hosts: status.nodes.iter().map(host).collect(),
            clocks: Clocks::default(),
            names: HashMap::new(),
            submissions: BTreeMap::new(),
            pieces: BTreeMap::new(),
            rounds: HashMap::new(),
            waited: HashMap::new(),
            steps: BTreeMap::new(),
            named: HashMap::new(),
            count: 0,
            written: 0,
            lost: Lost::default(),
        }
    }

    /// What the file begins with.
    pub fn begin(&self, status: &StatusResponse, out: &mut String) {
        out.push_str("[\n");
        let about = json!({ "job": status.job, "gradwire": status.version });
        Line::about("gradwire_job", 0, about).write(out);
        for (node, host) in (1..).zip(&self.hosts) {
            Line::process(node, &format!("gradwired on {}", host.name)).write(out);
            for rank in host.first_rank..host.first_rank.saturating_add(host.ranks) {
                let (pid, name) = (process_of(rank), format!("rank {rank} on {}", host.name));
                Line::process(pid, &name).write(out);
                Line::thread(Place { pid, tid: STEPS }, "steps").write(out);
            }
        }
    }

    /// What the file ends with. What is left was never joined with what belongs to it.
    pub fn end(&mut self, out: &mut String) {
        for ((rank, ticket), submission) in std::mem::take(&mut self.submissions) {
            self.give_up(rank, ticket, submission, out);
        }
        let Lost { events, batches } = self.lost;
        let about = json!({ "lost_events": events, "lost_batches": batches });
        Line::about("gradwire_end", 0, about).write(out);
        // No comma after the last one.
        out.truncate(out.trim_end_matches([',', '\n']).len());
        out.push_str("\n]\n");
    }

    /// The latest step of each rank.
    pub fn steps(&self) -> impl Iterator<Item = (u32, u64)> {
        self.steps.iter().map(|(rank, (step, _))| (*rank, *step))
    }

    /// The most by which times of two nodes may be wrong towards each other, in nanoseconds.
    pub fn error_ns(&self) -> u64 {
        self.clocks.error_ns()
    }

    /// Batches did not come.
    pub fn missed(&mut self, batches: u64) {
        self.lost.batches += batches;
    }

    /// Adds a batch. Of what makes no sense nothing is written (TRUST). `wanted` decides by the
    /// beginning and the end of an event, in nanoseconds of the coordinator's clock.
    pub fn add(&mut self, batch: TraceBatch, wanted: impl Fn(u64, u64) -> bool, out: &mut String) {
        let node = batch.node;
        if node as usize >= self.hosts.len() {
            return;
        }
        let pid = u64::from(node) + 1;
        if let Some(about) = self.clocks.set(node, batch.ahead_ns, batch.ahead_error_ns) {
            Line::about("gradwire_clock", pid, about).write(out);
        }
        self.lost.events += batch.lost;
        let names = batch.names.into_iter().map(|named| ((node, named.number), named.name));
        self.names.extend(names);
        for event in batch.events {
            let at_ns = self.clocks.common(node, event.at_ns);
            let end_ns = event.at_ns.saturating_add(event.duration_ns);
            let end_ns = self.clocks.common(node, end_ns);
            let kind = u8::try_from(event.kind).ok().and_then(Kind::of);
            if let Some(kind) = kind {
                let event = TraceEvent { at_ns, duration_ns: end_ns - at_ns, ..event };
                // A step tells where it begins and ends, whether that is wanted or not.
                if kind == Kind::Step || wanted(at_ns, end_ns) {
                    self.event(node, kind, &event, &wanted, out);
                }
            }
        }
        if batch.lost > 0 {
            let place = Place { pid, tid: CONTROL };
            let what = format!("lost {} events", batch.lost);
            Line::instant(&what, place, self.clocks.newest()).write(out);
        }
    }

    fn event(
        &mut self,
        node: u32,
        kind: Kind,
        event: &TraceEvent,
        wanted: &impl Fn(u64, u64) -> bool,
        out: &mut String,
    ) {
        let control = Place { pid: u64::from(node) + 1, tid: CONTROL };
        match kind {
            Kind::Submit | Kind::Wait | Kind::Step => {
                let Some(rank) = self.rank_of(node, event.track) else { return };
                if kind == Kind::Step {
                    self.step(rank, event, wanted, out);
                } else {
                    self.own(rank, kind, event, out);
                }
            }
            Kind::Read | Kind::Complete => {
                let Some(rank) = self.checked(node, event.other) else { return };
                let name = (kind == Kind::Read).then(|| self.name(node, event.name));
                let submission = self.submission(rank, event.subject, out);
                match name {
                    Some(name) => submission.name = Some(name),
                    None => submission.complete_ns = Some(event.at_ns),
                }
                self.join(rank, event.subject, out);
            }
            Kind::Gather => {
                let what = format!("gather {}", self.name(node, event.name));
                self.overlapping(&what, "tensor", control, event.at_ns, event.duration_ns, out);
            }
            Kind::Order => self.order(node, control, event, out),
            Kind::Queue => {
                let what = format!("queue {}", self.title(node, event.subject));
                self.overlapping(&what, "piece", control, event.at_ns, event.duration_ns, out);
            }
            Kind::Piece => {
                let what = self.title(node, event.subject);
                self.overlapping(&what, "piece", control, event.at_ns, event.duration_ns, out);
            }
            Kind::Reduce | Kind::Send | Kind::Receive | Kind::Publish => {
                self.lane(node, kind, event, out);
            }
        }
    }

    /// The rank of a track, if the node has it.
    fn rank_of(&self, node: u32, track: u32) -> Option<u32> {
        let local = (track / 2).checked_sub(1).filter(|_| track.is_multiple_of(2))?;
        let host = &self.hosts[node as usize];
        (local < host.ranks).then(|| host.first_rank + local)
    }

    /// A rank, if it is one of the node.
    fn checked(&self, node: u32, rank: u32) -> Option<u32> {
        let host = &self.hosts[node as usize];
        let local = rank.checked_sub(host.first_rank)?;
        (local < host.ranks).then_some(rank)
    }

    fn name(&self, node: u32, number: u32) -> String {
        self.names.get(&(node, number)).cloned().unwrap_or_else(|| "a tensor".to_owned())
    }

    /// How an operation is called: as its first tensor.
    fn title(&self, node: u32, sequence: u64) -> String {
        let names = self.pieces.get(&(node, sequence)).map_or(&[][..], |piece| &piece.names);
        match names {
            [] => format!("operation {sequence}"),
            [only] => only.clone(),
            [first, others @ ..] => format!("{first} (+{})", others.len()),
        }
    }

    /// Something on a track where other things go on at the same time.
    fn overlapping(
        &mut self,
        what: &str,
        category: &str,
        place: Place,
        at_ns: u64,
        duration_ns: u64,
        out: &mut String,
    ) {
        self.count += 1;
        let end_ns = at_ns.saturating_add(duration_ns);
        let [begin, end] = [(at_ns, "b"), (end_ns, "e")].map(|(at_ns, phase)| {
            Line::overlapping(phase, what, category, place, self.count, at_ns)
        });
        self.write(&begin, out);
        self.write(&end, out);
    }

    fn write(&mut self, line: &Line, out: &mut String) {
        self.written += 1;
        line.at(self.clocks.base()).write(out);
    }

    fn step(
        &mut self,
        rank: u32,
        event: &TraceEvent,
        wanted: &impl Fn(u64, u64) -> bool,
        out: &mut String,
    ) {
        let (number, at_ns) = (event.subject, event.at_ns);
        let before = self.steps.insert(rank, (number, at_ns));
        let began = before.filter(|(_, before_ns)| *before_ns <= at_ns).map(|(_, at_ns)| at_ns);
        if let Some(began_ns) = began.filter(|began_ns| wanted(*began_ns, at_ns)) {
            let place = Place { pid: process_of(rank), tid: STEPS };
            let what = format!("step {number}");
            let line = Line::slice(&what, "step", place, began_ns, at_ns - began_ns);
            self.write(&line, out);
        }
    }

    /// What a rank has recorded of a submission of its own.
    fn own(&mut self, rank: u32, kind: Kind, event: &TraceEvent, out: &mut String) {
        let TraceEvent { at_ns, duration_ns, subject: ticket, other: thread, .. } = *event;
        let place = Place { pid: process_of(rank), tid: u64::from(thread) + 1 };
        self.named(place, || format!("thread {thread}"), out);
        if kind == Kind::Wait {
            let before = self.waited.insert((rank, thread), at_ns.saturating_add(duration_ns));
            if self.waited.len() > MAX_KNOWN {
                self.waited.clear();
            }
            if let Some(since_ns) = before.filter(|since_ns| *since_ns < at_ns) {
                let line = Line::slice("compute", "rank", place, since_ns, at_ns - since_ns);
                self.write(&line, out);
            }
        }
        let own = Own { kind, place, at_ns, duration_ns };
        self.submission(rank, ticket, out).held.push(own);
        self.join(rank, ticket, out);
    }

    /// A track gets its name when it is used first.
    fn named(&mut self, place: Place, name: impl FnOnce() -> String, out: &mut String) {
        if self.named.len() < MAX_KNOWN && self.named.insert(place, ()).is_none() {
            Line::thread(place, &name()).write(out);
        }
    }

    fn submission(&mut self, rank: u32, ticket: u64, out: &mut String) -> &mut Submission {
        if self.submissions.len() > MAX_KNOWN
            && let Some(((rank, ticket), oldest)) = self.submissions.pop_first()
        {
            self.give_up(rank, ticket, oldest, out);
        }
        self.submissions.entry((rank, ticket)).or_default()
    }

    /// Writes what was held of a submission without what is missing.
    fn give_up(&mut self, rank: u32, ticket: u64, mut submission: Submission, out: &mut String) {
        let name = submission.name.take().unwrap_or_else(|| format!("ticket {ticket}"));
        for own in std::mem::take(&mut submission.held) {
            self.own_slice(rank, ticket, &own, &name, submission.complete_ns, out);
        }
    }

    /// Writes what is known of a submission as far as nothing is missing.
    fn join(&mut self, rank: u32, ticket: u64, out: &mut String) {
        let Some(submission) = self.submissions.get_mut(&(rank, ticket)) else { return };
        let Some(name) = submission.name.clone() else { return };
        let complete_ns = submission.complete_ns;
        let is_ready = |own: &Own| own.kind == Kind::Submit || complete_ns.is_some();
        let held = std::mem::take(&mut submission.held);
        let (ready, held): (Vec<_>, Vec<_>) = held.into_iter().partition(is_ready);
        submission.held = held;
        let submitted = ready.iter().find(|own| own.kind == Kind::Submit);
        let slice = submitted.map(|own| (own.place, own.at_ns));
        let is_over = ready.iter().any(|own| own.kind == Kind::Wait);
        let mut arrow = None;
        if let Some(slice) = slice {
            submission.slice = Some(slice);
            arrow = submission.sequence.map(|sequence| (slice, sequence));
        }
        if is_over {
            self.submissions.remove(&(rank, ticket));
        }
        for own in ready {
            self.own_slice(rank, ticket, &own, &name, complete_ns, out);
        }
        if let Some((slice, sequence)) = arrow {
            self.arrow_from(rank, ticket, sequence, slice, out);
        }
    }

    fn own_slice(
        &mut self,
        rank: u32,
        ticket: u64,
        own: &Own,
        name: &str,
        complete_ns: Option<u64>,
        out: &mut String,
    ) {
        let Own { kind, place, at_ns, duration_ns } = *own;
        let what = if kind == Kind::Submit { "submit" } else { "wait" };
        let args = json!({ "rank": rank, "ticket": ticket, "tensor": name });
        let line = Line::slice(&format!("{what} {name}"), "rank", place, at_ns, duration_ns);
        self.write(&line.with(args), out);
        let end_ns = at_ns.saturating_add(duration_ns);
        let complete_ns = complete_ns.filter(|at| kind == Kind::Wait && *at < end_ns);
        if let Some(woken_ns) = complete_ns.map(|complete_ns| complete_ns.max(at_ns)) {
            let line = Line::slice("wake-up", "rank", place, woken_ns, end_ns - woken_ns);
            self.write(&line, out);
        }
    }

    /// The arrow from a submission to an operation begins.
    fn arrow_from(
        &mut self,
        rank: u32,
        ticket: u64,
        sequence: u64,
        (place, at_ns): (Place, u64),
        out: &mut String,
    ) {
        let id = format!("r{rank}.{ticket}.{sequence}");
        self.write(&Line::arrow("s", "submitted", place, &id, at_ns), out);
    }

    fn order(&mut self, node: u32, control: Place, event: &TraceEvent, out: &mut String) {
        let TraceEvent { subject: sequence, at_ns, duration_ns, name: number, .. } = *event;
        let ordered_ns = at_ns.saturating_add(duration_ns);
        let name = self.name(node, number);
        let round = self.rounds.get(&(node, number));
        let round = round.filter(|round| round.announced_ns == at_ns);
        if round.is_none_or(|round| round.sequence != sequence) {
            let first_order_ns = round.map_or(ordered_ns, |round| round.first_order_ns);
            // The rest of a tensor waits for its turn while earlier parts are moved.
            let (what, since_ns) = match round {
                None => ("negotiate", at_ns),
                Some(_) => ("credit", first_order_ns),
            };
            let took_ns = ordered_ns.saturating_sub(since_ns);
            self.overlapping(&format!("{what} {name}"), "tensor", control, since_ns, took_ns, out);
            let round = Round { announced_ns: at_ns, first_order_ns, sequence };
            self.rounds.insert((node, number), round);
        }
        if self.pieces.len() > MAX_KNOWN {
            self.pieces.pop_first();
        }
        let piece = self.pieces.entry((node, sequence)).or_default();
        if !piece.names.contains(&name) && piece.names.len() < MAX_ARROWS {
            piece.names.push(name.clone());
        }
        let Some(rank) = self.checked(node, event.other) else { return };
        let ticket = event.bytes;
        let submission = self.submission(rank, ticket, out);
        submission.name.get_or_insert(name);
        if submission.sequence.is_some() {
            return;
        }
        submission.sequence = Some(sequence);
        let slice = submission.slice;
        let piece = self.pieces.entry((node, sequence)).or_default();
        if piece.arrows.len() < MAX_ARROWS {
            piece.arrows.push((rank, ticket));
            if let Some(slice) = slice {
                self.arrow_from(rank, ticket, sequence, slice, out);
            }
        }
        self.join(rank, ticket, out);
    }

    fn lane(&mut self, node: u32, kind: Kind, event: &TraceEvent, out: &mut String) {
        let TraceEvent { track, at_ns, duration_ns, subject: sequence, other: peer, bytes, .. } =
            *event;
        // A small piece of one node is done at once, by the thread that has its order.
        let lane = track.checked_sub(1).map(|track| track / 2);
        if track.is_multiple_of(2) && lane.is_some() {
            return;
        }
        let tid = lane.map_or(CONTROL, |lane| u64::from(lane) + 1);
        let place = Place { pid: u64::from(node) + 1, tid };
        self.named(place, || lane.map_or("control".into(), |lane| format!("lane {lane}")), out);
        let what = match kind {
            Kind::Reduce => "reduce",
            Kind::Send => "send",
            Kind::Receive => "receive",
            _ => "publish",
        };
        let has_peer = matches!(kind, Kind::Send | Kind::Receive);
        let host = self.hosts.get(peer as usize).filter(|_| has_peer);
        let mut args = json!({ "operation": sequence, "bytes": bytes });
        if let Some(host) = host {
            args["peer"] = Value::from(host.name.as_str());
        }
        let title = format!("{what} {}", self.title(node, sequence));
        let line = Line::slice(&title, "lane", place, at_ns, duration_ns).with(args);
        self.write(&line, out);
        let Some(piece) = self.pieces.get_mut(&(node, sequence)) else { return };
        let arrows = if piece.has_begun { Vec::new() } else { piece.arrows.clone() };
        piece.has_begun = true;
        // Only the first message between two nodes has an arrow.
        let known = if kind == Kind::Send { &mut piece.sent } else { &mut piece.received };
        let is_first = has_peer && !known.contains(&peer);
        if is_first {
            known.push(peer);
        }
        for (rank, ticket) in arrows {
            let id = format!("r{rank}.{ticket}.{sequence}");
            self.write(&Line::arrow("f", "submitted", place, &id, at_ns), out);
        }
        if is_first {
            let (phase, from, to) =
                if kind == Kind::Send { ("s", node, peer) } else { ("f", peer, node) };
            let id = format!("p{sequence}.{from}.{to}");
            // It leaves at the end of the slice at the latest, and arrives by its end.
            let at_ns = if phase == "s" { at_ns } else { at_ns.saturating_add(duration_ns) };
            self.write(&Line::arrow(phase, "message", place, &id, at_ns), out);
        }
    }
}

/// The process of a rank in the file.
fn process_of(rank: u32) -> u64 {
    FIRST_RANK + u64::from(rank)
}
