//! All steps of all participants as one graph: dependencies and messages are its edges.

use std::{collections::BTreeMap, ops::Range};

use super::error::VerifyError;
use crate::schedule::{Schedule, StepView};

/// The graph. Its nodes are the steps, participant after participant.
#[derive(Debug)]
pub struct Graph {
    /// The first node of each participant, and the end.
    offsets: Vec<usize>,
    /// The target of each edge, grouped by source.
    edges: Vec<usize>,
    /// The first edge of each node, and the end.
    first_edges: Vec<usize>,
    /// How many edges lead to each node.
    incoming: Vec<u32>,
    /// For a receive, its send.
    senders: Vec<Option<usize>>,
}

impl Graph {
    /// Checks the form of the schedules, one of each participant, and pairs their messages.
    ///
    /// # Errors
    /// [`VerifyError`] if the form is wrong or a message has no sender or receiver.
    pub fn new(schedules: &[Schedule]) -> Result<Self, VerifyError> {
        let mut offsets = vec![0];
        for (at, schedule) in (0..).zip(schedules) {
            form(at, schedule, schedules)?;
            offsets.push(offsets[at as usize] + schedule.steps.len());
        }
        let nodes = offsets[schedules.len()];
        let mut graph = Self {
            offsets,
            edges: Vec::new(),
            first_edges: Vec::new(),
            incoming: vec![0; nodes],
            senders: vec![None; nodes],
        };
        graph.pair(schedules)?;
        graph.connect(schedules);
        Ok(graph)
    }

    /// Adds the edges of all dependencies and messages.
    fn connect(&mut self, schedules: &[Schedule]) {
        let messages = (0..).zip(&self.senders).filter_map(|(to, from)| Some(((*from)?, to)));
        let mut pairs: Vec<(usize, usize)> = messages.collect();
        for (schedule, first) in schedules.iter().zip(&self.offsets) {
            for (at, step) in schedule.steps.iter().enumerate() {
                let before = step.after.iter().map(|&after| (first + after as usize, first + at));
                pairs.extend(before);
            }
        }
        let nodes = self.senders.len();
        let mut next = vec![0; nodes + 1];
        for &(from, to) in &pairs {
            next[from + 1] += 1;
            self.incoming[to] += 1;
        }
        for node in 0..nodes {
            next[node + 1] += next[node];
        }
        self.first_edges = next.clone();
        self.edges = vec![0; pairs.len()];
        for (from, to) in pairs {
            self.edges[next[from]] = to;
            next[from] += 1;
        }
    }

    /// Connects each send with its receive: same pair, same number, same blocks in the same order.
    fn pair(&mut self, schedules: &[Schedule]) -> Result<(), VerifyError> {
        let unpaired = |participant: u32, at: usize, step: &StepView<'_>, missing| {
            let action = step.action;
            let (peer, message) = action.sends_to().or(action.receives_from()).unwrap_or_default();
            let (at, block) = (at as u32, first_block(step));
            VerifyError::Unpaired { participant, step: at, block, peer, message, missing }
        };
        // For each sender and receiver the steps that send, by message number.
        let mut sends: Vec<BTreeMap<u32, Vec<usize>>> = vec![BTreeMap::new(); schedules.len()];
        for (schedule, sends) in schedules.iter().zip(&mut sends) {
            for (at, step) in schedule.steps.iter().enumerate() {
                if let Some((peer, found)) = step.action.sends_to() {
                    let to = sends.entry(peer).or_default();
                    numbered(schedule.me, at, &step, peer, to.len(), found)?;
                    to.push(at);
                }
            }
        }
        let mut received = 0;
        for schedule in schedules {
            let mut next: BTreeMap<u32, usize> = BTreeMap::new();
            for (at, step) in schedule.steps.iter().enumerate() {
                let Some((peer, found)) = step.action.receives_from() else { continue };
                let expected = next.entry(peer).or_default();
                numbered(schedule.me, at, &step, peer, *expected, found)?;
                let from_peer = sends[peer as usize].get(&schedule.me);
                let send = from_peer
                    .and_then(|s| s.get(*expected))
                    .filter(|&&send| schedules[peer as usize].steps.at(send).ranges == step.ranges);
                let Some(&send) = send else {
                    return Err(unpaired(schedule.me, at, &step, "send"));
                };
                *expected += 1;
                received += 1;
                let (from, to) =
                    (self.node(peer as usize, send), self.node(schedule.me as usize, at));
                self.senders[to] = Some(from);
            }
        }
        if received == sends.iter().flat_map(|to| to.values()).map(Vec::len).sum::<usize>() {
            return Ok(());
        }
        // Every receive has its send, so the first send that no receive took is the fault.
        let mut taken = vec![false; self.steps()];
        self.senders.iter().flatten().for_each(|&send| taken[send] = true);
        for schedule in schedules {
            for (at, step) in schedule.steps.iter().enumerate() {
                let node = self.node(schedule.me as usize, at);
                if step.action.sends_to().is_some() && !taken[node] {
                    return Err(unpaired(schedule.me, at, &step, "receive"));
                }
            }
        }
        Ok(())
    }

    /// How many steps there are.
    pub fn steps(&self) -> usize {
        self.senders.len()
    }

    /// The node of a participant's step.
    pub fn node(&self, participant: usize, step: usize) -> usize {
        self.offsets[participant] + step
    }

    /// The participant and the step of a node.
    pub fn step(&self, node: usize) -> (usize, usize) {
        let participant = self.offsets.partition_point(|&offset| offset <= node) - 1;
        (participant, node - self.offsets[participant])
    }

    /// The nodes that wait for this one.
    pub fn successors(&self, node: usize) -> &[usize] {
        &self.edges[self.first_edges[node]..self.first_edges[node + 1]]
    }

    /// For each node, how many nodes it waits for.
    pub fn waiting(&self) -> Vec<u32> {
        self.incoming.clone()
    }

    /// The send of a receive.
    pub fn sender(&self, node: usize) -> Option<usize> {
        self.senders[node]
    }

    /// How many messages there are.
    pub(super) fn messages(&self) -> u64 {
        self.senders.iter().flatten().count() as u64
    }

    /// All nodes, each after those that it waits for (WAIT).
    pub(super) fn order(&self, schedules: &[Schedule]) -> Result<Vec<usize>, VerifyError> {
        let mut waiting = self.waiting();
        let mut order: Vec<usize> = (0..self.steps()).filter(|&node| waiting[node] == 0).collect();
        let mut next = 0;
        while let Some(&node) = order.get(next) {
            for &successor in self.successors(node) {
                waiting[successor] -= 1;
                if waiting[successor] == 0 {
                    order.push(successor);
                }
            }
            next += 1;
        }
        if order.len() == self.steps() {
            return Ok(order);
        }
        let node = self.on_a_cycle(&waiting);
        let (participant, step) = self.step(node);
        let block = first_block(&schedules[participant].steps.at(step));
        Err(VerifyError::Cycle { participant: participant as u32, step: step as u32, block })
    }

    /// A node on a cycle, which exists because some of `waiting` are left.
    fn on_a_cycle(&self, waiting: &[u32]) -> usize {
        let mut blocker = vec![0; self.steps()];
        for node in (0..self.steps()).filter(|&node| waiting[node] > 0) {
            self.successors(node).iter().for_each(|&successor| blocker[successor] = node);
        }
        // Each node that is left has a blocker that is left, so enough steps back lead to a cycle.
        let mut node = waiting.iter().position(|&w| w > 0).unwrap_or(0);
        for _ in 0..self.steps() {
            node = blocker[node];
        }
        node
    }

    /// The most messages on one path.
    pub(super) fn longest_chain(&self, order: &[usize]) -> u64 {
        let mut chain = vec![0u64; self.steps()];
        for &node in order {
            for &successor in self.successors(node) {
                let message = u64::from(self.senders[successor] == Some(node));
                chain[successor] = chain[successor].max(chain[node] + message);
            }
        }
        chain.into_iter().max().unwrap_or(0)
    }
}

/// Checks what concerns one schedule alone.
fn form(at: u32, schedule: &Schedule, all: &[Schedule]) -> Result<(), VerifyError> {
    let &Schedule { participants, servers, me, ref blocks, ref steps } = schedule;
    let schedules = all.len() as u32;
    if participants != schedules || me != at {
        return Err(VerifyError::Participants { at, schedules, me, participants });
    }
    if servers != all[0].servers || servers >= participants {
        return Err(VerifyError::Servers { participant: me, servers });
    }
    let mut end = 0u64;
    for (block, range) in (0..).zip(&**blocks) {
        let tiles = range.offset == end && all[0].blocks.get(block as usize) == Some(range);
        end = match end.checked_add(range.count) {
            Some(end) if tiles => end,
            _ => return Err(VerifyError::Blocks { participant: me, block }),
        };
    }
    if blocks.len() != all[0].blocks.len() {
        return Err(VerifyError::Blocks { participant: me, block: blocks.len() as u32 });
    }
    let mut covered_by = vec![None; blocks.len()];
    for (step, StepView { action, ranges, after }) in (0..).zip(steps.iter()) {
        let peer = action.sends_to().or(action.receives_from()).map(|(peer, _)| peer);
        let peer_fits = peer.is_none_or(|peer| peer < participants && peer != me);
        let is_there = |range: &Range<u32>| !range.is_empty() && range.end as usize <= blocks.len();
        if !peer_fits || ranges.is_empty() || !ranges.iter().all(is_there) {
            return Err(VerifyError::Names { participant: me, step, action });
        }
        for block in ranges.iter().cloned().flatten() {
            if covered_by[block as usize].replace(step) == Some(step) {
                return Err(VerifyError::Repeated { participant: me, step, block });
            }
        }
        if let Some(&after) = after.iter().find(|&&after| after >= step) {
            return Err(VerifyError::After { participant: me, step, after });
        }
    }
    Ok(())
}

/// Messages of a pair are numbered in list order at both ends.
fn numbered(
    participant: u32,
    at: usize,
    step: &StepView<'_>,
    peer: u32,
    expected: usize,
    found: u32,
) -> Result<(), VerifyError> {
    let (at, block, expected) = (at as u32, first_block(step), expected as u32);
    if expected == found {
        return Ok(());
    }
    Err(VerifyError::Number { participant, step: at, block, peer, expected, found })
}

/// The first block of a step, for errors.
fn first_block(step: &StepView<'_>) -> u32 {
    step.blocks().next().unwrap_or_default()
}
