//! Measures the links between nodes before the first operation, so that the cost model counts with
//! the network that is there.
//!
//! - `steps`: what is measured, one thing after the other, and between which nodes at a time
//! - `arrange`: which nodes are near each other, where links show it and no label says it
//! - `fit`: from times to costs
//!
//! [`Probing`] sends out one step after the other, and the next one when all nodes have done the
//! last. It is over after [`LIMIT`], whatever has been measured until then, and never fails the
//! job: a link that is not measured counts like the others.

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
    steps::{Step, between_many, between_pairs, once_more},
};
use crate::model::{
    command::Probe,
    network::{Arrangement, Network},
    violation::Violation,
};

/// How long operations wait for the probe.
const LIMIT: Duration = Duration::from_secs(1);

/// How long a step may take before the next one begins. Groups that have not done it then are left
/// out from there on.
const STEP_LIMIT: Duration = Duration::from_millis(300);

/// The most groups whose times are logged.
const NAMED_GROUPS: usize = 4;

/// What may follow from the links besides costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct May {
    /// Racks: no node has a label.
    pub(crate) find_racks: bool,
    /// The order of nodes in a ring.
    pub(crate) order: bool,
}

/// What a node reports of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Done {
    /// How long it took.
    pub(crate) time: Duration,
    /// How many packets the node had sent again before.
    pub(crate) retransmits: u64,
}

/// What is measured now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Pairs,
    /// The pairs once more, because nodes look as if they were in racks, or in a bad order. A
    /// machine that is busy for a while makes links slow that are not.
    OnceMore,
    /// What several nodes do at the same time, and what a node does by itself.
    Rest,
}

/// The probes of one step, which run at the same time, one on each of some lanes.
#[derive(Debug)]
struct Flying {
    pattern: Pattern,
    groups: Vec<Vec<NodeId>>,
    is_shared: bool,
    counts: bool,
    since: Duration,
    /// What the nodes have reported of each probe.
    times: BTreeMap<Sequence, BTreeMap<NodeId, Duration>>,
    /// The packets that each node had sent again before.
    retransmits: BTreeMap<NodeId, u64>,
    /// When each node has reported its last probe.
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

    /// Whether it keeps lines busy: more than single packets travel.
    fn moves(&self) -> bool {
        matches!(self.pattern, Pattern::Exchange(_) | Pattern::Gather(_) | Pattern::Messages(_))
    }

    /// How long a node took for its probes of this step: until the last one was done.
    fn time(&self, node: NodeId) -> Duration {
        let times = self.times.values().filter_map(|times| times.get(&node));
        times.copied().max().unwrap_or_default()
    }

    /// The seconds from the order until all of a group had reported.
    fn whole(&self, group: &[NodeId]) -> f64 {
        let reported = group.iter().filter_map(|node| self.reported.get(node)).max();
        reported.map_or(0.0, |&at| at.saturating_sub(self.since).as_secs_f64())
    }

    /// What follows from the times of the groups that have done it.
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

    /// A node has run one of the probes. Returns whether it was doing that.
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

/// No transfer takes less, whatever a node reports (TRUST): a rate is a number.
const SHORTEST: f64 = 1e-9;

/// How long a group took, by the times of its nodes. Orders do not arrive everywhere at the same
/// time: who gets its order first waits for the others, and what it has sent is there when the last
/// one begins. So of an exchange the mean counts: one node has measured as much too long as the
/// other one too short. (Each node's time must be that of its slowest lane: lanes share the line,
/// and the one that ends last on a node need not be the last one on the other.) Of messages it is
/// the time of the receiver, and otherwise that of the first node, which waits for all that the
/// others do.
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
    /// The step that is under way.
    flying: Option<Flying>,
    /// Earlier ones that some nodes have not done. They may still report it.
    late: Vec<Flying>,
    samples: Vec<Sample>,
    /// How many of them are of the last step.
    last: usize,
    /// The packets that each node had sent again before that.
    retransmits: BTreeMap<NodeId, u64>,
    is_over: bool,
}

impl Probing {
    /// A measurement of the links between the nodes of a topology, with so many lanes.
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

    /// Whether operations may go out.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }

    /// When the next step begins, or all is over, at the latest.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        let end = self.began.filter(|_| !self.is_over)? + LIMIT;
        Some(self.flying.as_ref().map_or(end, |flying| end.min(flying.since + STEP_LIMIT)))
    }

    /// Ends the step that is under way, with what has been reported of it.
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

    /// What nodes say before a step tells what was lost in the step before it.
    fn lost(&mut self, now: &BTreeMap<NodeId, u64>) {
        let first = self.samples.len().saturating_sub(self.last);
        for sample in &mut self.samples[first..] {
            let known = sample.nodes.iter().filter_map(|node| {
                let before = self.retransmits.get(node)?;
                Some(now.get(node)?.saturating_sub(*before))
            });
            // Any number may be reported (TRUST).
            sample.lost = known.reduce(u64::saturating_add);
        }
    }

    /// The next step, without groups that have not done an earlier one, and without nodes whose
    /// lines are still busy with one: more bytes would wait there, and operations behind them.
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

    /// What is measured after all steps of a stage; `None` after the last one.
    fn next_stage(&mut self) -> Option<()> {
        let is_first = self.stage == Stage::Pairs;
        self.arrangement = match self.stage {
            Stage::Rest => return None,
            _ if !self.may.order => None,
            _ => arrange(&self.topology, !self.may.find_racks, &measured(&self.samples)),
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

    /// A node has run a probe in this time.
    pub(crate) fn done(
        &mut self,
        node: NodeId,
        sequence: Sequence,
        done: Done,
        now: Duration,
    ) -> Result<(), Violation> {
        let mut steps = self.flying.iter_mut().chain(&mut self.late);
        if !steps.any(|step| step.done(node, sequence, done, now)) {
            let what = "which it was not doing";
            let what = format!("says that it has done probe {sequence}, {what}");
            return Err(Violation::Protocol(what));
        }
        self.late.retain(|step| !step.is_done());
        if self.flying.as_ref().is_some_and(Flying::is_done) {
            self.end_step(now);
        }
        Ok(())
    }

    /// The times of the last step, as text; only of its first groups.
    pub(crate) fn last(&self) -> Option<String> {
        let last = &self.samples[self.samples.len().saturating_sub(self.last)..];
        let Sample { pattern, lanes, .. } = last.first()?;
        let times = last.iter().take(NAMED_GROUPS).map(|sample| {
            let nodes: Vec<String> = sample.nodes.iter().map(|node| node.0.to_string()).collect();
            format!("{} {:.0} us", nodes.join("+"), sample.time * 1e6)
        });
        Some(format!("{pattern} on {lanes} took {}", times.collect::<Vec<_>>().join(", ")))
    }

    /// What was measured, once, as soon as it is over: when everything is measured, or at the
    /// deadline.
    pub(crate) fn finish(&mut self, now: Duration) -> Option<Network> {
        let began = self.began.filter(|_| !self.is_over)?;
        let is_last = self.stage == Stage::Rest || self.topology.participants() < 2;
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
        // What was not looked at once more is not clear.
        let arrangement = self.arrangement.take().filter(|_| self.stage == Stage::Rest);
        Some(Network { arrangement, ..fit(&self.topology, &samples, took, is_complete) })
    }
}

#[cfg(test)]
mod tests;
