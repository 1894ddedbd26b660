//! Turns slices into complete steps. Pure: the time is an argument.
//!
//! A slice of a rank belongs to the step in which it begins. A slice of a node belongs to the step
//! in which its tensor was submitted; an operation belongs to the step of a submission that it
//! moves a part of. So a tensor is in one step, even if it is moved while other ranks have begun
//! the next.

use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    time::Duration,
};

use crate::trace::{
    found::{Found, Slice, Track, What},
    join::{Host, Lost},
};

/// How long after the end of a step its events may arrive: nodes look for new events a hundred
/// times per second.
const LATE: Duration = Duration::from_millis(300);

/// How long slices are kept that belong to no known step.
const RECENT_NS: u64 = 200_000_000;

/// How long to wait for ranks that have not ended a step, once others have.
const OTHERS: Duration = Duration::from_secs(10);

/// The longest step. Daemons give up sooner.
const LONGEST: Duration = Duration::from_secs(700);

/// How long before the news of a step its events may arrive.
const AHEAD: Duration = Duration::from_secs(2);

/// The most changes of the error of the clocks that are remembered (BOUND).
const MAX_ERRORS: usize = 256;

/// The most slices that wait for the end of their step (BOUND).
pub(super) const MAX_HELD: usize = 1 << 16;

/// The most operations that are remembered (BOUND).
const MAX_PARTS: usize = 1 << 16;

/// The most submissions of an operation that are remembered (BOUND).
pub(super) const MAX_SUBMISSIONS: usize = 128;

/// The most steps that go on at the same time (BOUND). Ranks may be in different ones.
const MAX_OPEN: usize = 1024;

/// A complete step.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Sampled {
    pub(super) number: u64,
    /// By the number of the rank.
    pub(super) ranks: BTreeMap<u32, RankStep>,
    /// By the number of the node.
    pub(super) nodes: BTreeMap<u32, Vec<Slice>>,
    /// By operation, the submissions that it moves parts of.
    pub(super) parts: HashMap<u64, Vec<(u32, u64)>>,
    /// Events known to be missing, of this step or of others.
    pub(super) lost: Lost,
    /// How many slices were dropped, for lack of room.
    pub(super) left_out: u64,
    /// The largest error between the times of two nodes.
    pub(super) error_ns: u64,
}

/// The step of one rank.
#[derive(Debug, Default, PartialEq)]
pub(super) struct RankStep {
    pub(super) begin_ns: u64,
    pub(super) end_ns: u64,
    /// Its slices, and where it computes.
    pub(super) slices: Vec<Slice>,
}

/// A step that some ranks have begun.
#[derive(Debug, Default)]
struct Open {
    begun: BTreeMap<u32, u64>,
    ended: BTreeMap<u32, (u64, u64)>,
    /// When a rank last began or ended it.
    changed: Duration,
    /// The largest error between the times of two nodes since it began.
    error_ns: u64,
}

/// Collects the sampled steps.
#[derive(Debug, Default)]
pub(super) struct Steps {
    every: u64,
    ranks: usize,
    open: BTreeMap<u64, Open>,
    held: Vec<Slice>,
    newest_ns: u64,
    left_out: u64,
    parts: BTreeMap<u64, Vec<(u32, u64)>>,
    /// The missing events when the last step was reported, and now.
    reported: Lost,
    lost: Lost,
    /// Recent errors between the times of two nodes, with the time of each change.
    errors: VecDeque<(Duration, u64)>,
}

impl Steps {
    pub(super) fn new(every: u64, hosts: &[Host]) -> Self {
        let ranks = hosts.iter().map(|host| host.ranks as usize).sum();
        Self { every, ranks, ..Self::default() }
    }

    /// Adds slices, steps and parts.
    pub(super) fn add(&mut self, found: Vec<Found>, now: Duration) {
        for found in found {
            match found {
                Found::Stepped { rank, step, at_ns } => self.stepped(rank, step, at_ns, now),
                Found::Part { rank, ticket, operation } => {
                    let submissions = self.parts.entry(operation).or_default();
                    if submissions.len() < MAX_SUBMISSIONS {
                        submissions.push((rank, ticket));
                    }
                    if self.parts.len() > MAX_PARTS {
                        self.parts.pop_first();
                    }
                }
                // `RankStep::compute` derives computing from the waits.
                Found::Slice(Slice { what: What::Step | What::Compute, .. }) => {}
                Found::Slice(slice) => {
                    self.newest_ns = self.newest_ns.max(slice.end_ns());
                    if self.held.len() < MAX_HELD {
                        self.held.push(slice);
                    } else if self.is_open() {
                        self.left_out += 1;
                    }
                }
                Found::From(..) | Found::To(..) | Found::Clock { .. } | Found::Lost { .. } => {}
            }
        }
    }

    fn is_sampled(&self, step: u64) -> bool {
        step > 0 && step.is_multiple_of(self.every)
    }

    /// A rank has ended a step.
    fn stepped(&mut self, rank: u32, step: u64, at_ns: u64, now: Duration) {
        if self.is_sampled(step)
            && let Some(open) = self.open.get_mut(&step)
            && let Some(begin_ns) = open.begun.get(&rank).copied().filter(|begin| *begin <= at_ns)
        {
            open.ended.insert(rank, (begin_ns, at_ns));
            open.changed = now;
        }
        let next = step.saturating_add(1);
        if self.is_sampled(next) && (self.open.len() < MAX_OPEN || self.open.contains_key(&next)) {
            let open = self.open.entry(next).or_default();
            open.begun.insert(rank, at_ns);
            open.changed = now;
        }
    }

    /// Notes the missing events and the error of the clocks.
    pub(super) fn note_missing(&mut self, lost: Lost, error_ns: u64, now: Duration) {
        self.lost = lost;
        if self.errors.back().is_none_or(|(_, last_ns)| *last_ns != error_ns) {
            self.errors.push_back((now, error_ns));
        }
        // An error holds until the next one. One node may send events of a step long before another
        // node reports that the step has begun.
        let is_old = |since: &Duration| now.saturating_sub(*since) > AHEAD;
        while self.errors.len() > MAX_ERRORS
            || self.errors.get(1).is_some_and(|(since, _)| is_old(since))
        {
            self.errors.pop_front();
        }
        let worst_ns = self.errors.iter().map(|(_, error_ns)| *error_ns).max().unwrap_or_default();
        for open in self.open.values_mut() {
            open.error_ns = open.error_ns.max(worst_ns);
        }
    }

    /// Whether there are incomplete steps.
    pub(super) fn is_open(&self) -> bool {
        !self.open.is_empty()
    }

    /// Whether a rank is known to be in a sampled step: then all nodes must record.
    pub(super) fn goes_on(&self) -> bool {
        self.open.values().any(|open| open.ended.len() < self.ranks)
    }

    /// The steps that are complete by now.
    pub(super) fn finish(&mut self, now: Duration) -> Vec<Sampled> {
        let ranks = self.ranks;
        let is_over = |open: &Open| {
            let quiet = now.saturating_sub(open.changed);
            let all = open.ended.len() >= ranks;
            let limit = if all {
                LATE
            } else if open.ended.is_empty() {
                LONGEST
            } else {
                OTHERS
            };
            quiet >= limit
        };
        self.take(is_over)
    }

    /// The steps that are complete when the job ends.
    pub(super) fn end(&mut self) -> Vec<Sampled> {
        self.take(|_| true)
    }

    fn take(&mut self, is_over: impl Fn(&Open) -> bool) -> Vec<Sampled> {
        let over: Vec<u64> =
            self.open.iter().filter(|(_, open)| is_over(open)).map(|(step, _)| *step).collect();
        let mut steps = Vec::new();
        for number in over {
            let Some(open) = self.open.remove(&number) else { continue };
            let Open { begun, ended, error_ns, .. } = open;
            // A step that a rank has begun but not ended is incomplete.
            if !ended.is_empty() && ended.len() == begun.len() {
                steps.push(Sampled { error_ns, ..self.complete(number, &ended) });
            }
        }
        self.forget();
        steps
    }

    /// Takes the slices of a step out of the held ones.
    fn complete(&mut self, number: u64, ended: &BTreeMap<u32, (u64, u64)>) -> Sampled {
        let mut ranks: BTreeMap<u32, RankStep> = BTreeMap::new();
        for (&rank, &(begin_ns, end_ns)) in ended {
            ranks.insert(rank, RankStep { begin_ns, end_ns, slices: Vec::new() });
        }
        let of_rank = |slice: &Slice| {
            let Track::Thread { rank, .. } = slice.track else { return None };
            let (begin_ns, end_ns) = *ended.get(&rank)?;
            (slice.at_ns >= begin_ns && slice.at_ns < end_ns.max(begin_ns + 1)).then_some(rank)
        };
        let is_of_rank = |slice: &mut Slice| of_rank(slice).is_some();
        for slice in self.held.extract_if(.., is_of_rank) {
            if let Track::Thread { rank, .. } = slice.track
                && let Some(step) = ranks.get_mut(&rank)
            {
                step.slices.push(slice);
            }
        }
        let tickets: HashSet<(u32, u64)> = ranks
            .iter()
            .flat_map(|(rank, step)| step.slices.iter().map(move |slice| (*rank, slice)))
            .filter(|(_, slice)| slice.what == What::Submit)
            .filter_map(|(rank, slice)| Some((rank, slice.ticket?)))
            .collect();
        let is_here = |submissions: &[(u32, u64)]| {
            submissions.iter().any(|submission| tickets.contains(submission))
        };
        let parts: HashMap<u64, Vec<(u32, u64)>> =
            self.parts.extract_if(.., |_, submissions| is_here(submissions)).collect();
        let nodes = self.of_nodes(&parts);
        for step in ranks.values_mut() {
            step.compute();
        }
        let lost = Lost {
            events: self.lost.events - self.reported.events,
            batches: self.lost.batches - self.reported.batches,
        };
        self.reported = self.lost;
        let left_out = std::mem::take(&mut self.left_out);
        Sampled { number, ranks, nodes, parts, lost, left_out, error_ns: 0 }
    }

    /// Takes the slices of nodes for these operations.
    fn of_nodes(&mut self, parts: &HashMap<u64, Vec<(u32, u64)>>) -> BTreeMap<u32, Vec<Slice>> {
        let mut nodes: BTreeMap<u32, Vec<Slice>> = BTreeMap::new();
        let is_here = |slice: &mut Slice| slice.operation.is_some_and(|it| parts.contains_key(&it));
        for slice in self.held.extract_if(.., is_here) {
            if let Some(node) = node_of(slice.track) {
                nodes.entry(node).or_default().push(slice);
            }
        }
        // A tensor is announced right after it has been gathered.
        for (node, slices) in &mut nodes {
            let of_node = |slice: &Slice| node_of(slice.track) == Some(*node);
            let negotiated = slices.iter().filter(|slice| slice.what == What::Negotiate);
            let mut gathered = Vec::new();
            for Slice { title, at_ns, .. } in negotiated {
                let candidates = self.held.iter().enumerate().filter(|(_, slice)| {
                    slice.what == What::Gather && of_node(slice) && slice.title == *title
                });
                let nearest = candidates.min_by_key(|(_, slice)| slice.end_ns().abs_diff(*at_ns));
                if let Some((index, _)) = nearest {
                    gathered.push(self.held.swap_remove(index));
                }
            }
            slices.append(&mut gathered);
        }
        nodes
    }

    /// Forgets slices that can't belong to a future step.
    fn forget(&mut self) {
        let begins = self.open.values().flat_map(|open| open.begun.values());
        // A node may send events before another node reports that a step has begun.
        let recent_ns = self.newest_ns.saturating_sub(RECENT_NS);
        let begin_ns = begins.copied().min().map_or(recent_ns, |begin_ns| begin_ns.min(recent_ns));
        self.held.retain(|slice| slice.end_ns() >= begin_ns);
    }
}

/// The node of a daemon's track.
fn node_of(track: Track) -> Option<u32> {
    match track {
        Track::Control { node } | Track::Lane { node, .. } => Some(node),
        Track::Thread { .. } | Track::Steps { .. } => None,
    }
}

impl RankStep {
    /// Adds slices for computing: a thread that waits at some time computes the rest of the time.
    fn compute(&mut self) {
        let waits = self.slices.iter().filter(|slice| slice.what == What::Wait);
        let mut threads: BTreeMap<Track, Vec<(u64, u64)>> = BTreeMap::new();
        for wait in waits {
            threads.entry(wait.track).or_default().push((wait.at_ns, wait.end_ns()));
        }
        for (track, mut waits) in threads {
            waits.sort_unstable();
            let mut since_ns = self.begin_ns;
            for (at_ns, end_ns) in waits.into_iter().chain([(self.end_ns, self.end_ns)]) {
                if at_ns > since_ns {
                    let took_ns = at_ns - since_ns;
                    let slice = Slice::new(What::Compute, track, String::new(), since_ns, took_ns);
                    self.slices.push(slice);
                }
                since_ns = since_ns.max(end_ns);
            }
        }
        // Parents before children.
        self.slices.sort_by_key(|slice| (slice.at_ns, std::cmp::Reverse(slice.duration_ns)));
    }
}
