//! Measures the links between nodes before the first operation, so that the cost model counts with
//! the network that is there.
//!
//! - `steps`: what is measured, one thing after the other, and between which nodes at a time
//! - `fit`: from times to costs
//!
//! [`Probing`] sends out one step after the other, and the next one when all nodes have done the
//! last. It is over after [`LIMIT`], whatever has been measured until then, and never fails the
//! job: a link that is not measured counts like the others.

mod fit;
mod steps;

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use gradwire_collectives::{Topology, algorithms::probe::Pattern};
use gradwire_proto::{NodeId, Sequence};

pub(crate) use self::fit::without_set;
use self::{
    fit::{Sample, fit},
    steps::{Step, steps},
};
use crate::model::{command::Probe, network::Network, violation::Violation};

/// How long operations wait for the probe.
const LIMIT: Duration = Duration::from_secs(1);

/// The most groups whose times are logged.
const NAMED_GROUPS: usize = 4;

/// The probes of one step, which run at the same time, one on each of some lanes.
#[derive(Debug)]
struct Flying {
    pattern: Pattern,
    groups: Vec<Vec<NodeId>>,
    is_shared: bool,
    since: Duration,
    /// What the nodes have reported of each probe.
    times: BTreeMap<Sequence, BTreeMap<NodeId, Duration>>,
}

impl Flying {
    fn is_done(&self) -> bool {
        let nodes: usize = self.groups.iter().map(Vec::len).sum();
        self.times.values().all(|times| times.len() == nodes)
    }

    /// What follows from the times of all nodes. Of probes at the same time the slowest counts.
    fn samples(&self, now: Duration) -> impl Iterator<Item = Sample> + '_ {
        let longest = self.times.values().flat_map(BTreeMap::values).max();
        let besides = now.saturating_sub(self.since).saturating_sub(*longest.unwrap_or(&now));
        self.groups.iter().map(move |group| {
            let times = self.times.values().map(|times| seconds(self.pattern, group, times));
            Sample {
                pattern: self.pattern,
                nodes: group.clone(),
                lanes: self.times.len() as u32,
                is_shared: self.is_shared,
                time: times.fold(0.0, f64::max),
                besides: besides.as_secs_f64(),
            }
        })
    }
}

/// How long a group took, by the times of its nodes. Orders do not arrive everywhere at the same
/// time: who gets its order first waits for the others, and what it has sent is there when the last
/// one begins. So of an exchange the mean counts: one node has measured as much too long as the
/// other one too short. Of round trips it is the shorter time, and where some send to one, that of
/// the one.
fn seconds(pattern: Pattern, group: &[NodeId], times: &BTreeMap<NodeId, Duration>) -> f64 {
    let mut times = group.iter().filter_map(|node| times.get(node)).map(Duration::as_secs_f64);
    let time = match pattern {
        Pattern::Gather(_) => times.next(),
        // The receiver.
        Pattern::Messages(_) => times.nth(1),
        Pattern::Exchange(_) => Some(times.sum::<f64>() / group.len() as f64),
        _ => times.reduce(f64::min),
    };
    time.unwrap_or(0.0)
}

/// The measurement of a job's links.
#[derive(Debug)]
pub(crate) struct Probing {
    topology: Topology,
    lanes: u32,
    left: VecDeque<Step>,
    began: Option<Duration>,
    /// The step that some node has not done.
    flying: Option<Flying>,
    samples: Vec<Sample>,
    /// How many of them are of the last step.
    last: usize,
    is_over: bool,
}

impl Probing {
    /// A measurement of the links between the nodes of a topology, with so many lanes.
    pub(crate) fn new(topology: Topology, lanes: u32) -> Self {
        let left = steps(&topology, lanes).into();
        Self {
            topology,
            lanes,
            left,
            began: None,
            flying: None,
            samples: Vec::new(),
            last: 0,
            is_over: false,
        }
    }

    /// No measurement.
    pub(crate) fn none() -> Self {
        let mut none = Self::new(Topology::flat(1), 1);
        none.is_over = true;
        none
    }

    /// Whether operations may go out.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }

    /// When it is over at the latest.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.began.filter(|_| !self.is_over).map(|began| began + LIMIT)
    }

    /// The probes to send out now; each gets its number from `number`.
    pub(crate) fn next(
        &mut self,
        now: Duration,
        mut number: impl FnMut() -> Sequence,
    ) -> Vec<Probe> {
        let began = *self.began.get_or_insert(now);
        if self.is_over || now >= began + LIMIT || self.flying.is_some() {
            return Vec::new();
        }
        let Some(step) = self.left.pop_front() else { return Vec::new() };
        let pattern = step.pattern(&self.samples);
        let lanes = if step.is_on_all_lanes { self.lanes } else { 1 };
        let probes = (0..lanes).map(|_| {
            let groups = step.groups.clone();
            Probe { sequence: number(), pattern, groups }
        });
        let probes: Vec<Probe> = probes.collect();
        self.flying = Some(Flying {
            pattern,
            groups: step.groups,
            is_shared: step.is_shared,
            since: now,
            times: probes.iter().map(|probe| (probe.sequence, BTreeMap::new())).collect(),
        });
        probes
    }

    /// A node has run a probe in this time.
    pub(crate) fn done(
        &mut self,
        node: NodeId,
        sequence: Sequence,
        time: Duration,
        now: Duration,
    ) -> Result<(), Violation> {
        let flying = self.flying.as_mut();
        let known = flying.filter(|flying| flying.groups.iter().any(|group| group.contains(&node)));
        let times = known.and_then(|flying| flying.times.get_mut(&sequence));
        let Some(times) = times.filter(|times| !times.contains_key(&node)) else {
            let what = "which it was not doing";
            let what = format!("says that it has done probe {sequence}, {what}");
            return Err(Violation::Protocol(what));
        };
        times.insert(node, time);
        if let Some(flying) = self.flying.take_if(|flying| flying.is_done()) {
            self.last = flying.groups.len();
            self.samples.extend(flying.samples(now));
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
        let is_complete = self.left.is_empty() && self.flying.is_none();
        let is_due = self.deadline().is_some_and(|deadline| now >= deadline);
        if self.is_over || !(is_complete || is_due) {
            return None;
        }
        self.is_over = true;
        let took = now.saturating_sub(self.began.unwrap_or(now));
        let samples = std::mem::take(&mut self.samples);
        self.left.clear();
        Some(fit(&self.topology, &samples, took, is_complete))
    }
}

#[cfg(test)]
mod tests;
