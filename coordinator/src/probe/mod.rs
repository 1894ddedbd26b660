//! Measures the links between nodes before the first operation, so that the cost model matches the
//! network.
//!
//! - `steps`: what is measured in each step, and between which nodes at the same time
//! - `arrange`: racks and ring order, as the links show them
//! - `fit`: costs from measured times
//!
//! [`Probing`] sends out one step at a time, and the next one when all nodes have done the last.
//! It ends after [`LIMIT`] with the measurements until then, and never fails the job: a link that
//! is not measured counts like the others.

mod arrange;
mod fit;
mod steps;

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use gradwire_collectives::{Topology, algorithms::probe::Pattern};
use gradwire_proto::{NodeId, Sequence};

use self::{
    arrange::arrange,
    fit::{Sample, fit, measured},
    steps::{Step, between_many, between_pairs, once_more, single_lanes},
};
use crate::model::{
    command::Probe,
    network::{Arrangement, Network},
    text,
    violation::Violation,
};

/// How long operations wait for the probe.
const LIMIT: Duration = Duration::from_secs(1);

/// How long a step may take before the next one begins. Groups that have not done it by then are
/// left out from then on.
const STEP_LIMIT: Duration = Duration::from_millis(300);

/// The most groups whose times are logged.
const NAMED_GROUPS: usize = 4;

/// What the probe may determine besides costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct May {
    /// Racks, if no node has a label.
    pub(crate) find_racks: bool,
    /// The order of nodes in a ring.
    pub(crate) order: bool,
}

/// A node's report on a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Done {
    /// How long it took.
    pub(crate) time: Duration,
    /// How many packets the node had retransmitted before.
    pub(crate) retransmits: u64,
}

/// A stage of the measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Pairs,
    /// The pairs again, if nodes appear to be in racks or in a bad order, because a temporarily
    /// busy machine makes links look slow.
    OnceMore,
    /// Transfers between many nodes, and the work of single nodes.
    Rest,
    /// Single lanes again, if all lanes seem to be faster than they can be.
    SingleLanes,
}

/// The probes of one step, which run at the same time on one or more lanes.
#[derive(Debug)]
struct Flying {
    pattern: Pattern,
    groups: Vec<Vec<NodeId>>,
    is_shared: bool,
    counts: bool,
    since: Duration,
    /// The reported times of each probe.
    times: BTreeMap<Sequence, BTreeMap<NodeId, Duration>>,
    /// The packets that each node had retransmitted before.
    retransmits: BTreeMap<NodeId, u64>,
    /// When each node reported its last probe.
    reported: BTreeMap<NodeId, Duration>,
}

impl Flying {
    fn has_done(&self, group: &[NodeId]) -> bool {
        let all = |times: &BTreeMap<NodeId, _>| group.iter().all(|node| times.contains_key(node));
        self.times.values().all(all)
    }

    fn is_done(&self) -> bool {
        self.groups.iter().all(|group| self.has_done(group))
    }

    /// Whether it keeps lines busy, with more than single packets.
    fn moves(&self) -> bool {
        matches!(self.pattern, Pattern::Exchange(_) | Pattern::Gather(_) | Pattern::Messages(_))
    }

    /// How long a node took until its last probe of this step was done.
    fn time(&self, node: NodeId) -> Duration {
        let times = self.times.values().filter_map(|times| times.get(&node));
        times.copied().max().unwrap_or_default()
    }

    /// The seconds from the order until all of a group had reported.
    fn whole(&self, group: &[NodeId]) -> f64 {
        let reported = group.iter().filter_map(|node| self.reported.get(node)).max();
        reported.map_or(0.0, |&at| at.saturating_sub(self.since).as_secs_f64())
    }

    /// The samples of the groups that have done it.
    fn samples(&self, now: Duration) -> Vec<Sample> {
        let longest = self.times.values().flat_map(BTreeMap::values).max();
        let besides = now.saturating_sub(self.since).saturating_sub(*longest.unwrap_or(&now));
        let besides = self.is_done().then_some(besides.as_secs_f64());
        let done = self.groups.iter().filter(|group| self.counts && self.has_done(group));
        let sample = |group: &Vec<NodeId>| {
            let times: Vec<f64> = group.iter().map(|node| self.time(*node).as_secs_f64()).collect();
            Sample {
                pattern: self.pattern,
                nodes: group.clone(),
                lanes: self.times.len() as u32,
                is_shared: self.is_shared,
                time: seconds(self.pattern, &times).max(SHORTEST),
                whole: self.whole(group).max(SHORTEST),
                besides,
                lost: None,
            }
        };
        done.map(sample).collect()
    }

    /// Notes that a node has run one of the probes. Returns false if it was not running it.
    fn done(&mut self, node: NodeId, sequence: Sequence, done: Done, now: Duration) -> bool {
        let is_in_it = self.groups.iter().any(|group| group.contains(&node));
        let times = self.times.get_mut(&sequence).filter(|_| is_in_it);
        let is_new = times.is_some_and(|times| times.insert(node, done.time).is_none());
        if is_new {
            self.retransmits.entry(node).or_insert(done.retransmits);
            self.reported.insert(node, now);
        }
        is_new
    }
}

/// The shortest time of a transfer, whatever nodes report (TRUST), so that rates are finite.
const SHORTEST: f64 = 1e-9;

/// How long a group took, from the times of its nodes. Orders do not arrive everywhere at the same
/// time: the first node waits for the others, and its data has arrived when the last one begins. So
/// the mean counts for an exchange: one node's time is too long by as much as the other one's is
/// too short. (Each node's time must be that of its slowest lane: lanes share the line, and the
/// last lane on one node need not be the last on the other.) For messages, the time of the receiver
/// counts. Otherwise it is that of the first node, which waits for all others.
fn seconds(pattern: Pattern, times: &[f64]) -> f64 {
    let time = match pattern {
        Pattern::Messages(_) => times.get(1).copied(),
        Pattern::Exchange(_) => Some(times.iter().sum::<f64>() / times.len() as f64),
        _ => times.first().copied(),
    };
    time.unwrap_or(0.0)
}

/// The measurement of a job's links.
#[derive(Debug)]
pub(crate) struct Probing {
    topology: Topology,
    lanes: u32,
    may: May,
    stage: Stage,
    arrangement: Option<Arrangement>,
    left: VecDeque<Step>,
    began: Option<Duration>,
    /// The current step.
    flying: Option<Flying>,
    /// Earlier steps that some nodes have not done. They may still report them.
    late: Vec<Flying>,
    samples: Vec<Sample>,
    /// The number of samples of the last step.
    last: usize,
    /// The packets that each node had retransmitted before the last step.
    retransmits: BTreeMap<NodeId, u64>,
    is_over: bool,
}

impl Probing {
    /// A measurement of the links between the nodes of a topology, with `lanes` lanes.
    pub(crate) fn new(topology: Topology, lanes: u32, may: May) -> Self {
        let left = between_pairs(&topology, lanes).into();
        Self {
            topology,
            lanes,
            may,
            stage: Stage::Pairs,
            arrangement: None,
            left,
            began: None,
            flying: None,
            late: Vec::new(),
            samples: Vec::new(),
            last: 0,
            retransmits: BTreeMap::new(),
            is_over: false,
        }
    }

    /// No measurement.
    pub(crate) fn none() -> Self {
        let may = May { find_racks: false, order: false };
        let mut none = Self::new(Topology::flat(1), 1, may);
        none.is_over = true;
        none
    }

    /// Whether operations may be sent out.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }

    /// The latest time at which the next step begins, or the measurement ends.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        let end = self.began.filter(|_| !self.is_over)? + LIMIT;
        Some(self.flying.as_ref().map_or(end, |flying| end.min(flying.since + STEP_LIMIT)))
    }

    /// Ends the current step with the reports until now.
    fn end_step(&mut self, now: Duration) {
        let Some(flying) = self.flying.take() else { return };
        let samples = flying.samples(now);
        self.lost(&flying.retransmits);
        self.retransmits.clone_from(&flying.retransmits);
        self.last = samples.len();
        self.samples.extend(samples);
        if !flying.is_done() {
            self.late.push(flying);
        }
    }

    /// Computes the packets lost in the last step. Each report contains the count before its step.
    fn lost(&mut self, now: &BTreeMap<NodeId, u64>) {
        let first = self.samples.len().saturating_sub(self.last);
        for sample in &mut self.samples[first..] {
            let known = sample.nodes.iter().filter_map(|node| {
                let before = self.retransmits.get(node)?;
                Some(now.get(node)?.saturating_sub(*before))
            });
            // Nodes may report any number (TRUST).
            sample.lost = known.reduce(u64::saturating_add);
        }
    }

    /// The next step, without groups that have not done an earlier one, and without nodes with
    /// lines that are still busy: more bytes would queue there, and operations behind them.
    fn next_step(&mut self) -> Option<Step> {
        loop {
            let Some(mut step) = self.left.pop_front() else {
                self.next_stage()?;
                continue;
            };
            let is_late = |group: &Vec<NodeId>| {
                let waits_for = |step: &Flying, late: &Vec<NodeId>| {
                    let is_busy = step.moves() && late.iter().any(|node| group.contains(node));
                    (late == group || is_busy) && !step.has_done(late)
                };
                self.late.iter().any(|step| step.groups.iter().any(|late| waits_for(step, late)))
            };
            step.groups.retain(|group| !is_late(group));
            if !step.groups.is_empty() {
                return Some(step);
            }
        }
    }

    /// Begins the next stage; `None` after the last one.
    fn next_stage(&mut self) -> Option<()> {
        match self.stage {
            Stage::Rest if self.is_disturbed() => {
                self.stage = Stage::SingleLanes;
                self.left = single_lanes(&self.topology, self.lanes).into();
                return Some(());
            }
            Stage::Rest | Stage::SingleLanes => return None,
            Stage::Pairs | Stage::OnceMore => {}
        }
        let is_first = self.stage == Stage::Pairs;
        self.arrangement = match self.may.order {
            false => None,
            true => arrange(&self.topology, !self.may.find_racks, &measured(&self.samples)),
        };
        if is_first && self.arrangement.is_some() {
            self.stage = Stage::OnceMore;
            self.left = once_more(&self.topology, self.lanes).into();
            return Some(());
        }
        if let Some(Arrangement { racks, order, .. }) = &self.arrangement {
            let arranged = self.topology.clone().arranged(racks, order);
            self.topology = arranged.unwrap_or_else(|| self.topology.clone());
        }
        self.stage = Stage::Rest;
        self.left = between_many(&self.topology, self.lanes).into();
        Some(())
    }

    /// Whether single lanes of a link look slower than they can be.
    fn is_disturbed(&self) -> bool {
        self.lanes > 1 && measured(&self.samples).iter().any(|link| !link.is_possible(self.lanes))
    }

    /// The probes to send out now; each gets its number from `number`.
    pub(crate) fn next(
        &mut self,
        now: Duration,
        mut number: impl FnMut() -> Sequence,
    ) -> Vec<Probe> {
        let began = *self.began.get_or_insert(now);
        if self.is_over || now >= began + LIMIT {
            return Vec::new();
        }
        if self.flying.as_ref().is_some_and(|flying| now >= flying.since + STEP_LIMIT) {
            self.end_step(now);
        }
        if self.flying.is_some() {
            return Vec::new();
        }
        let Some(step) = self.next_step() else { return Vec::new() };
        let pattern = step.pattern(&self.samples);
        let lanes = step.lanes;
        let probes = (0..lanes).map(|_| {
            let groups = step.groups.clone();
            Probe { sequence: number(), pattern, groups }
        });
        let probes: Vec<Probe> = probes.collect();
        self.flying = Some(Flying {
            pattern,
            groups: step.groups,
            is_shared: step.is_shared,
            counts: step.counts,
            since: now,
            times: probes.iter().map(|probe| (probe.sequence, BTreeMap::new())).collect(),
            retransmits: BTreeMap::new(),
            reported: BTreeMap::new(),
        });
        probes
    }

    /// Handles a node's report on a probe.
    pub(crate) fn done(
        &mut self,
        node: NodeId,
        sequence: Sequence,
        done: Done,
        now: Duration,
    ) -> Result<(), Violation> {
        let mut steps = self.flying.iter_mut().chain(&mut self.late);
        if !steps.any(|step| step.done(node, sequence, done, now)) {
            let what = format!("reported probe {sequence} as done, but was not running it");
            return Err(Violation::Protocol(what));
        }
        self.late.retain(|step| !step.is_done());
        if self.flying.as_ref().is_some_and(Flying::is_done) {
            self.end_step(now);
        }
        Ok(())
    }

    /// Describes the times of the last step's first groups.
    pub(crate) fn last(&self) -> Option<String> {
        let last = &self.samples[self.samples.len().saturating_sub(self.last)..];
        let Sample { pattern, lanes, .. } = last.first()?;
        let times = last.iter().take(NAMED_GROUPS).map(|sample| {
            let nodes: Vec<String> = sample.nodes.iter().map(|node| node.0.to_string()).collect();
            format!("{} {:.0} us", nodes.join("+"), sample.time * 1e6)
        });
        let lanes = text::count(*lanes as usize, "lane");
        Some(format!("{pattern} on {lanes} took {}", times.collect::<Vec<_>>().join(", ")))
    }

    /// The result, once, when everything is measured or the limit is reached.
    pub(crate) fn finish(&mut self, now: Duration) -> Option<Network> {
        let began = self.began.filter(|_| !self.is_over)?;
        let is_last = match self.stage {
            Stage::Pairs | Stage::OnceMore => self.topology.participants() < 2,
            Stage::Rest => !self.is_disturbed(),
            Stage::SingleLanes => true,
        };
        let is_through = is_last && self.left.is_empty() && self.flying.is_none();
        if !is_through && now < began + LIMIT {
            return None;
        }
        self.end_step(now);
        self.is_over = true;
        let is_complete = is_through && self.late.is_empty();
        let took = now.saturating_sub(began);
        let samples = std::mem::take(&mut self.samples);
        self.left.clear();
        // An arrangement that was not confirmed is not clear.
        let arrangement = self.arrangement.take();
        let arrangement =
            arrangement.filter(|_| matches!(self.stage, Stage::Rest | Stage::SingleLanes));
        Some(Network { arrangement, ..fit(&self.topology, &samples, took, is_complete) })
    }
}

#[cfg(test)]
mod tests;
