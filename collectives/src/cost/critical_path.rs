//! The price of schedules as they are: every step at the earliest time that its dependencies,
//! the lines and the uplinks allow.

use std::{cmp::Reverse, collections::BinaryHeap};

use super::model::CostModel;
use crate::{
    schedule::{Action, Schedule},
    topology::Topology,
    verify::{Graph, VerifyError},
};

/// When something is begun and finished: a prefix that the next hop can use, and all of it.
#[derive(Debug, Clone, Copy, Default)]
struct Times {
    first: f64,
    last: f64,
}

/// Times as ordered keys: they are never NaN and never negative.
fn key(time: f64) -> u64 {
    time.to_bits()
}

/// Seconds until the last step of `schedules` is done, for elements of `element_bytes`. A line
/// serves one message at a time in each direction, in the order in which they are ready; so does an
/// uplink. Time and memory grow with the number of steps, so it is for some hundred nodes.
///
/// # Errors
/// [`VerifyError`] if the schedules don't fit together.
pub fn critical_path(
    model: &CostModel,
    topology: &Topology,
    schedules: &[Schedule],
    element_bytes: u64,
) -> Result<f64, VerifyError> {
    let graph = Graph::new(schedules)?;
    let members = topology.members();
    let mut rack_size = vec![0u32; members.len()];
    let mut rack_of = vec![0usize; schedules.len()];
    for (rack, members) in members.iter().enumerate() {
        rack_size[rack] = members.len() as u32;
        for &member in members {
            if let Some(of) = rack_of.get_mut(member as usize) {
                *of = rack;
            }
        }
    }
    let mut lines = Lines {
        model,
        arrivals: vec![Times::default(); graph.steps()],
        rack_of,
        rack_size,
        out: vec![0.0; schedules.len()],
        into: vec![0.0; schedules.len()],
        up: vec![0.0; members.len()],
        down: vec![0.0; members.len()],
    };

    let mut waiting = graph.waiting();
    let mut times = vec![Times::default(); graph.steps()];
    let mut ready: BinaryHeap<Reverse<(u64, usize)>> = (0..graph.steps())
        .filter(|&node| waiting[node] == 0)
        .map(|node| Reverse((key(0.0), node)))
        .collect();
    let mut end = 0.0f64;
    while let Some(Reverse((_, node))) = ready.pop() {
        let (participant, step) = graph.step(node);
        let schedule = &schedules[participant];
        let from = begin(&graph, schedules, &times, &lines.arrivals, node);
        let action = schedule.steps.at(step).action;
        let bytes = (schedule.elements(schedule.steps.at(step)) * element_bytes) as f64;
        times[node] = lines.take(node, participant, action, bytes, from);
        end = end.max(times[node].last);
        for &next in graph.successors(node) {
            waiting[next] -= 1;
            if waiting[next] == 0 {
                let from = begin(&graph, schedules, &times, &lines.arrivals, next);
                ready.push(Reverse((key(from.first), next)));
            }
        }
    }
    Ok(end)
}

/// When a step could begin and end if lines were free.
fn begin(
    graph: &Graph,
    schedules: &[Schedule],
    times: &[Times],
    arrivals: &[Times],
    node: usize,
) -> Times {
    let (participant, step) = graph.step(node);
    let steps = &schedules[participant].steps;
    let mut from = Times::default();
    for &before in steps.at(step).after {
        let done = times[graph.node(participant, before as usize)];
        // A step of the same blocks is followed chunk by chunk.
        let follows = steps.at(before as usize).shares_blocks(&steps.at(step));
        from.first = from.first.max(if follows { done.first } else { done.last });
        from.last = from.last.max(done.last);
    }
    if let Some(sender) = graph.sender(node) {
        from.first = from.first.max(arrivals[sender].first);
        from.last = from.last.max(arrivals[sender].last);
    }
    from
}

struct Lines<'a> {
    model: &'a CostModel,
    /// When what each send has sent is there.
    arrivals: Vec<Times>,
    rack_of: Vec<usize>,
    rack_size: Vec<u32>,
    /// When each line is free again, in both directions, and each uplink.
    out: Vec<f64>,
    into: Vec<f64>,
    up: Vec<f64>,
    down: Vec<f64>,
}

impl Lines<'_> {
    /// Does a step from `from` on: its times.
    fn take(&mut self, node: usize, me: usize, action: Action, bytes: f64, from: Times) -> Times {
        let model = self.model;
        let line = model.in_rack.per_byte;
        let chunk = bytes.min(model.chunk as f64);
        match action {
            Action::Send { peer, .. } => {
                let start = from.first.max(self.out[me]) + model.per_message;
                self.out[me] = start + bytes * line;
                let first = start + chunk * line;
                let last = self.out[me].max(from.last + chunk * line);
                self.arrivals[node] = self.arrival(me, peer as usize, bytes, Times { first, last });
                Times { first, last }
            }
            Action::RecvReduce { .. } | Action::RecvCopy { .. } => {
                let reduces = matches!(action, Action::RecvReduce { .. });
                let gamma = if reduces { model.reduce_per_byte } else { 0.0 };
                // The first chunk is here; the rest follows as fast as the line and the sender are.
                let start = from.first.max(self.into[me] + chunk * line);
                self.into[me] = start + (bytes - chunk) * line;
                let first = start + model.per_message + chunk * gamma;
                // Reduced as it comes in: what is left at the end is the last chunk, unless
                // reducing is slower than receiving.
                let received = self.into[me].max(from.last) + model.per_message + chunk * gamma;
                Times { first, last: received.max(first + (bytes - chunk) * gamma) }
            }
            // The same for every algorithm, so no part of the comparison.
            Action::ReduceLocal | Action::Publish => from,
        }
    }

    /// When the receiver has what was sent at `sent`. Between racks it queues for the sender's
    /// uplink and for the receiver's, while the sender goes on with others.
    fn arrival(&mut self, me: usize, peer: usize, bytes: f64, sent: Times) -> Times {
        let (mine, theirs) = (self.rack_of[me], self.rack_of[peer]);
        let model = self.model;
        let after = |time: Times, by: f64| Times { first: time.first + by, last: time.last + by };
        if mine == theirs {
            return after(sent, model.in_rack.latency);
        }
        let mut there = sent;
        for (free, rack) in [(&mut self.up[mine], mine), (&mut self.down[theirs], theirs)] {
            let share = model.cross_rack.per_byte / f64::from(self.rack_size[rack]);
            let start = there.first.max(*free);
            *free = start + bytes * share;
            there = Times { first: start, last: there.last.max(*free) };
        }
        after(there, model.cross_rack.latency)
    }
}
