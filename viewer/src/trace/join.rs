//! Turns the events of nodes into slices and arrows.
//!
//! Nodes send events in batches, and related events may come in any order: a rank knows the ticket
//! of a submission, its daemon the name of the tensor and the operation. A [`Joiner`] joins them.
//! It waits for a bounded number of events, and at the end it reports the rest without
//! counterparts.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use gradwire_proto::pb::{StatusResponse, TraceBatch};
use gradwire_trace::{Event, Kind};

use super::{
    clocks::Clocks,
    found::{Arrow, Found, Slice, Track, What},
};

/// The most submissions and operations that are remembered (BOUND).
pub(super) const MAX_KNOWN: usize = 1 << 16;

/// The most arrows from submissions to one operation (BOUND).
const MAX_ARROWS: usize = 8;

/// Joins the events of a job.
#[derive(Debug, Default)]
pub struct Joiner {
    hosts: Vec<Host>,
    clocks: Clocks,
    /// By node and number.
    names: HashMap<(u32, u32), String>,
    /// By rank and ticket.
    submissions: BTreeMap<(u32, u64), Submission>,
    /// By node and number.
    pieces: BTreeMap<(u32, u64), Piece>,
    /// The latest round of each tensor, by node and number of its name.
    rounds: HashMap<(u32, u32), Round>,
    /// When the last wait of a thread of a rank ended.
    waited: HashMap<(u32, u32), u64>,
    /// The last step of each rank, and when it ended.
    steps: BTreeMap<u32, (u64, u64)>,
    /// Events that nodes have lost, and batches that did not arrive.
    lost: Lost,
    /// The nodes whose last batch has gaps.
    torn: BTreeSet<u32>,
    /// Results that have not been taken yet.
    found: Vec<Found>,
}

/// Missing events and batches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Lost {
    /// Events that nodes overwrote before they could send them.
    pub events: u64,
    /// Batches that were not read in time.
    pub batches: u64,
}

/// A host of the job, and the ranks there.
#[derive(Debug, Clone)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// Its first rank.
    pub first_rank: u32,
    /// How many ranks it has.
    pub ranks: u32,
}

/// The known facts of a submission.
#[derive(Debug, Default)]
struct Submission {
    name: Option<String>,
    /// When its daemon completed it.
    complete_ns: Option<u64>,
    /// The track and the time of its slice, once it is reported.
    slice: Option<(Track, u64)>,
    /// The first operation that moves a part of it.
    sequence: Option<u64>,
    /// Events of its rank that are not reported yet.
    held: Vec<Own>,
}

/// An event of a rank about its submission.
#[derive(Debug)]
struct Own {
    kind: Kind,
    track: Track,
    at_ns: u64,
    duration_ns: u64,
}

/// The known facts of an operation on a node.
#[derive(Debug, Default)]
struct Piece {
    names: Vec<String>,
    /// Submissions that it moves parts of.
    arrows: Vec<(u32, u64)>,
    /// Whether a lane has worked on it.
    has_begun: bool,
    /// Events of it may be lost, so its first known message need not be its first one.
    is_torn: bool,
    /// The peers whose first sent and first received message has its arrow.
    sent: Vec<u32>,
    received: Vec<u32>,
}

#[derive(Debug)]
struct Round {
    announced_ns: u64,
    first_order_ns: u64,
    sequence: u64,
}

impl Joiner {
    /// For the job with this status.
    pub fn new(status: &StatusResponse) -> Self {
        let host = |node: &gradwire_proto::pb::NodeStatus| Host {
            name: node.host.clone(),
            first_rank: node.first_rank,
            ranks: node.slots,
        };
        Self { hosts: status.nodes.iter().map(host).collect(), ..Self::default() }
    }

    /// The hosts of the job.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// The results since the last call.
    pub fn take(&mut self) -> Vec<Found> {
        std::mem::take(&mut self.found)
    }

    /// Reports the remaining events, whose counterparts never came.
    pub fn end(&mut self) {
        for ((_, ticket), submission) in std::mem::take(&mut self.submissions) {
            self.give_up(ticket, submission);
        }
    }

    /// The events and batches that are missing so far.
    pub fn lost(&self) -> Lost {
        self.lost
    }

    /// The time of the first event.
    pub fn base_ns(&self) -> u64 {
        self.clocks.base()
    }

    /// How many submissions and operations are remembered.
    #[cfg(test)]
    pub(super) fn remembered(&self) -> (usize, usize) {
        (self.submissions.len(), self.pieces.len())
    }

    /// The largest error between the times of two nodes, in nanoseconds.
    pub fn error_ns(&self) -> u64 {
        self.clocks.error_ns()
    }

    /// Counts missing batches.
    pub fn missed(&mut self, batches: u64) {
        self.lost.batches += batches;
        if batches > 0 {
            self.torn.extend(0..u32::try_from(self.hosts.len()).unwrap_or(u32::MAX));
            self.pieces.values_mut().for_each(|piece| piece.is_torn = true);
        }
    }

    /// Notes whether a batch of a node has gaps. Its threads are read one after the other, so the
    /// orders of operations with lost events may also be in the batch that follows.
    fn note_gaps(&mut self, node: u32, lost: u64) {
        if lost == 0 {
            return;
        }
        let pieces = self.pieces.range_mut((node, 0)..=(node, u64::MAX));
        pieces.for_each(|(_, piece)| piece.is_torn = true);
        self.torn.insert(node);
    }

    /// Adds a batch, without events that make no sense (TRUST). `wanted` decides by the beginning
    /// and the end of an event, in nanoseconds of the coordinator's clock.
    pub fn add(&mut self, batch: TraceBatch, wanted: impl Fn(u64, u64) -> bool) {
        let node = batch.node;
        if node as usize >= self.hosts.len() {
            return;
        }
        if let Some((ahead_ns, error_ns)) =
            self.clocks.set(node, batch.ahead_ns, batch.ahead_error_ns)
        {
            self.found.push(Found::Clock { node, ahead_ns, error_ns });
        }
        self.lost.events += batch.lost;
        self.note_gaps(node, batch.lost);
        let names = batch.names.into_iter().map(|named| ((node, named.number), named.name));
        self.names.extend(names);
        for (track, event) in batch
            .tracks
            .iter()
            .flat_map(|track| Event::read(&track.events).map(move |event| (track.track, event)))
        {
            let at_ns = self.clocks.common(node, event.at_ns);
            let end_ns = event.at_ns.saturating_add(event.duration_ns);
            let end_ns = self.clocks.common(node, end_ns);
            // The steps are needed in any case: they say where steps begin and end.
            if event.kind == Kind::Step || wanted(at_ns, end_ns) {
                let event = Event { at_ns, duration_ns: end_ns - at_ns, ..event };
                self.event(node, track, &event, &wanted);
            }
        }
        if batch.lost > 0 {
            let at_ns = self.clocks.newest();
            self.found.push(Found::Lost { node, events: batch.lost, at_ns });
        } else {
            self.torn.remove(&node);
        }
    }

    fn event(&mut self, node: u32, track: u32, event: &Event, wanted: &impl Fn(u64, u64) -> bool) {
        let (control, kind) = (Track::Control { node }, event.kind);
        match kind {
            Kind::Submit | Kind::Wait | Kind::Step => {
                let Some(rank) = self.rank_of(node, track) else { return };
                if kind == Kind::Step {
                    self.step(rank, event, wanted);
                } else {
                    self.own(rank, event);
                }
            }
            Kind::Read | Kind::Complete => {
                let Some(rank) = self.checked(node, event.other) else { return };
                let name = (kind == Kind::Read).then(|| self.name(node, event.name));
                let submission = self.submission(rank, event.subject);
                match name {
                    Some(name) => submission.name = Some(name),
                    None => submission.complete_ns = Some(event.at_ns),
                }
                self.join(rank, event.subject);
            }
            Kind::Gather => {
                let name = self.name(node, event.name);
                self.slice(Slice::new(What::Gather, control, name, event.at_ns, event.duration_ns));
            }
            Kind::Order => self.order(node, control, event),
            Kind::Queue | Kind::Piece => {
                let what = if kind == Kind::Queue { What::Queue } else { What::Piece };
                let title = self.title(node, event.subject);
                let slice = Slice::new(what, control, title, event.at_ns, event.duration_ns);
                let operation = Some(event.subject);
                self.slice(Slice { operation, bytes: event.bytes, ..slice });
            }
            Kind::Reduce | Kind::Send | Kind::Receive | Kind::Publish => {
                self.lane(node, track, event);
            }
        }
    }

    /// The rank of a track, if the node has that rank.
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

    /// The title of an operation: its first tensor.
    fn title(&self, node: u32, sequence: u64) -> String {
        let names = self.pieces.get(&(node, sequence)).map_or(&[][..], |piece| &piece.names);
        match names {
            [] => format!("operation {sequence}"),
            [only] => only.clone(),
            [first, others @ ..] => format!("{first} (+{})", others.len()),
        }
    }

    fn slice(&mut self, slice: Slice) {
        self.found.push(Found::Slice(slice));
    }

    fn step(&mut self, rank: u32, event: &Event, wanted: &impl Fn(u64, u64) -> bool) {
        let (number, at_ns) = (event.subject, event.at_ns);
        self.found.push(Found::Stepped { rank, step: number, at_ns });
        let before = self.steps.insert(rank, (number, at_ns));
        // If steps in between are missing, the beginning of this one is unknown.
        let follows = |(before, before_ns): &(u64, u64)| {
            before.checked_add(1) == Some(number) && *before_ns <= at_ns
        };
        let began = before.filter(follows).map(|(_, at_ns)| at_ns);
        if let Some(began_ns) = began.filter(|began_ns| wanted(*began_ns, at_ns)) {
            let (track, title) = (Track::Steps { rank }, number.to_string());
            self.slice(Slice::new(What::Step, track, title, began_ns, at_ns - began_ns));
        }
    }

    /// An event of a rank about its own submission.
    fn own(&mut self, rank: u32, event: &Event) {
        let Event { kind, at_ns, duration_ns, subject: ticket, other: thread, .. } = *event;
        let track = Track::Thread { rank, thread };
        if kind == Kind::Wait {
            let before = self.waited.insert((rank, thread), at_ns.saturating_add(duration_ns));
            if self.waited.len() > MAX_KNOWN {
                self.waited.clear();
            }
            if let Some(since_ns) = before.filter(|since_ns| *since_ns < at_ns) {
                let took_ns = at_ns - since_ns;
                self.slice(Slice::new(What::Compute, track, String::new(), since_ns, took_ns));
            }
        }
        let own = Own { kind, track, at_ns, duration_ns };
        self.submission(rank, ticket).held.push(own);
        self.join(rank, ticket);
    }

    fn submission(&mut self, rank: u32, ticket: u64) -> &mut Submission {
        if self.submissions.len() > MAX_KNOWN
            && let Some(((_, ticket), oldest)) = self.submissions.pop_first()
        {
            self.give_up(ticket, oldest);
        }
        self.submissions.entry((rank, ticket)).or_default()
    }

    /// Reports the held events of a submission without the missing facts.
    fn give_up(&mut self, ticket: u64, mut submission: Submission) {
        let name = submission.name.take().unwrap_or_else(|| format!("ticket {ticket}"));
        for own in std::mem::take(&mut submission.held) {
            self.own_slice(ticket, &own, &name, submission.complete_ns);
        }
    }

    /// Reports the events of a submission whose facts are complete.
    fn join(&mut self, rank: u32, ticket: u64) {
        let Some(submission) = self.submissions.get_mut(&(rank, ticket)) else { return };
        let Some(name) = submission.name.clone() else { return };
        let complete_ns = submission.complete_ns;
        let is_ready = |own: &Own| own.kind == Kind::Submit || complete_ns.is_some();
        let held = std::mem::take(&mut submission.held);
        let (ready, held): (Vec<_>, Vec<_>) = held.into_iter().partition(is_ready);
        submission.held = held;
        let submitted = ready.iter().find(|own| own.kind == Kind::Submit);
        let slice = submitted.map(|own| (own.track, own.at_ns));
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
            self.own_slice(ticket, &own, &name, complete_ns);
        }
        if let Some((slice, sequence)) = arrow {
            self.arrow_from(rank, ticket, sequence, slice);
        }
    }

    fn own_slice(&mut self, ticket: u64, own: &Own, name: &str, complete_ns: Option<u64>) {
        let Own { kind, track, at_ns, duration_ns } = *own;
        let what = if kind == Kind::Submit { What::Submit } else { What::Wait };
        let slice = Slice::new(what, track, name.to_owned(), at_ns, duration_ns);
        let end_ns = slice.end_ns();
        self.slice(Slice { ticket: Some(ticket), ..slice });
        let complete_ns = complete_ns.filter(|at| kind == Kind::Wait && *at < end_ns);
        if let Some(woken_ns) = complete_ns.map(|complete_ns| complete_ns.max(at_ns)) {
            let took_ns = end_ns - woken_ns;
            let slice = Slice::new(What::WakeUp, track, String::new(), woken_ns, took_ns);
            self.slice(Slice { ticket: Some(ticket), ..slice });
        }
    }

    /// The arrow from a submission to an operation begins.
    fn arrow_from(&mut self, rank: u32, ticket: u64, operation: u64, (track, at_ns): (Track, u64)) {
        let arrow = Arrow::Submitted { rank, ticket, operation };
        self.found.push(Found::From(arrow, track, at_ns));
    }

    fn order(&mut self, node: u32, control: Track, event: &Event) {
        let Event { subject: sequence, at_ns, duration_ns, name: number, .. } = *event;
        let ordered_ns = at_ns.saturating_add(duration_ns);
        let name = self.name(node, number);
        let round = self.rounds.get(&(node, number));
        let round = round.filter(|round| round.announced_ns == at_ns);
        if round.is_none_or(|round| round.sequence != sequence) {
            let first_order_ns = round.map_or(ordered_ns, |round| round.first_order_ns);
            // A later part of a tensor waits for its turn while earlier parts are moved.
            let (what, since_ns) = match round {
                None => (What::Negotiate, at_ns),
                Some(_) => (What::Credit, first_order_ns),
            };
            let took_ns = ordered_ns.saturating_sub(since_ns);
            let slice = Slice::new(what, control, name.clone(), since_ns, took_ns);
            self.slice(Slice { operation: Some(sequence), ..slice });
            let round = Round { announced_ns: at_ns, first_order_ns, sequence };
            self.rounds.insert((node, number), round);
        }
        if self.pieces.len() > MAX_KNOWN {
            self.pieces.pop_first();
        }
        let piece = self.pieces.entry((node, sequence)).or_default();
        piece.is_torn |= self.torn.contains(&node);
        if !piece.names.contains(&name) && piece.names.len() < MAX_ARROWS {
            piece.names.push(name.clone());
        }
        let Some(rank) = self.checked(node, event.other) else { return };
        let ticket = event.bytes;
        self.found.push(Found::Part { rank, ticket, operation: sequence });
        let submission = self.submission(rank, ticket);
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
                self.arrow_from(rank, ticket, sequence, slice);
            }
        }
        self.join(rank, ticket);
    }

    fn lane(&mut self, node: u32, track: u32, event: &Event) {
        let Event { kind, at_ns, duration_ns, subject: sequence, other: peer, bytes, .. } = *event;
        // A small piece of one node is done at once, by the thread that received its order.
        let lane = track.checked_sub(1).map(|track| track / 2);
        if track.is_multiple_of(2) && lane.is_some() {
            return;
        }
        let track = lane.map_or(Track::Control { node }, |lane| Track::Lane { node, lane });
        let what = match kind {
            Kind::Reduce => What::Reduce,
            Kind::Send => What::Send,
            Kind::Receive => What::Receive,
            _ => What::Publish,
        };
        let has_peer = matches!(kind, Kind::Send | Kind::Receive);
        let is_known = (peer as usize) < self.hosts.len();
        let slice = Slice::new(what, track, self.title(node, sequence), at_ns, duration_ns);
        let (operation, known) = (Some(sequence), (has_peer && is_known).then_some(peer));
        self.slice(Slice { operation, peer: known, bytes, ..slice });
        let Some(piece) = self.pieces.get_mut(&(node, sequence)) else { return };
        let arrows = if piece.has_begun { Vec::new() } else { piece.arrows.clone() };
        piece.has_begun = true;
        // Only the first message between two nodes has an arrow.
        let known = if kind == Kind::Send { &mut piece.sent } else { &mut piece.received };
        let is_first = has_peer && !piece.is_torn && !known.contains(&peer);
        if is_first {
            known.push(peer);
        }
        // Arrows arrive just before the end of a slice. The slice may begin before its cause: a
        // lane that looks for work can be preempted, and its slice includes that time. At the end
        // itself, Perfetto would use the next slice.
        let by_ns = at_ns.saturating_add(duration_ns.saturating_sub(1));
        for (rank, ticket) in arrows {
            let arrow = Arrow::Submitted { rank, ticket, operation: sequence };
            self.found.push(Found::To(arrow, track, by_ns));
        }
        if is_first && kind == Kind::Send {
            // A message leaves at the beginning of the slice.
            let arrow = Arrow::Message { operation: sequence, from: node, to: peer };
            self.found.push(Found::From(arrow, track, at_ns));
        } else if is_first {
            let arrow = Arrow::Message { operation: sequence, from: peer, to: node };
            self.found.push(Found::To(arrow, track, by_ns));
        }
    }
}
