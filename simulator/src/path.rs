//! The way that took longest, from the last step back to the first.

use std::{collections::HashMap, sync::Arc};

use gradwire_collectives::execution::Work;

use crate::{
    lane::Planned,
    report::{Done, Hop},
};

/// When each step of each host has ended, by operation.
#[derive(Debug, Default)]
pub(crate) struct Record {
    steps: HashMap<(u64, u32), Vec<Ended>>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Ended {
    at: f64,
    from: Option<u32>,
}

impl Record {
    pub(crate) fn begin(&mut self, sequence: u64, host: u32, steps: usize) {
        self.steps.insert((sequence, host), vec![Ended::default(); steps]);
    }

    pub(crate) fn advance(&mut self, sequence: u64, host: u32, step: u32, now: f64) {
        if let Some(steps) = self.steps.get_mut(&(sequence, host)) {
            steps[step as usize].at = now;
        }
    }

    pub(crate) fn received(&mut self, sequence: u64, host: u32, step: u32, from: u32) {
        if let Some(steps) = self.steps.get_mut(&(sequence, host)) {
            steps[step as usize].from = Some(from);
        }
    }

    /// The way of an operation: each step with the one that it waited for last.
    pub(crate) fn path(&self, done: &Done, hosts: &[u32], plans: &[Arc<Planned>]) -> Vec<Hop> {
        let last = done.nodes.iter().max_by(|a, b| a.1.total_cmp(&b.1));
        let Some(&(host, _)) = last else { return Vec::new() };
        let mut hops = Vec::new();
        let mut next = self.latest(done.sequence, host);
        while let Some((host, step, at)) = next {
            let place = hosts.binary_search(&host).unwrap_or_default();
            let planned = &plans[place].plan.steps[step as usize];
            let from = self.ended(done.sequence, host, step).from;
            let bytes = planned.bytes;
            hops.push(Hop { host, sequence: done.sequence, step, from, bytes, end: at });
            let sender = from.and_then(|from| {
                let from_place = hosts.binary_search(&from).ok()?;
                let message = plans[place].message(step, from_place as u32)?;
                let theirs = &plans[from_place].plan;
                let sends = |&(step, peer): &(u32, u32)| {
                    let work = theirs.steps[step as usize].work;
                    peer == place as u32
                        && matches!(work, Work::Send { message: its, .. } if its == message)
                };
                let (step, _) = theirs.senders().find(sends)?;
                Some((from, step, self.ended(done.sequence, from, step).at))
            });
            let earlier = planned
                .earlier()
                .map(|earlier| (host, earlier, self.ended(done.sequence, host, earlier).at));
            // Dependencies and messages have no cycle, so this ends.
            next = earlier.chain(sender).max_by(|a, b| a.2.total_cmp(&b.2));
        }
        hops.reverse();
        hops
    }

    fn ended(&self, sequence: u64, host: u32, step: u32) -> Ended {
        let steps = self.steps.get(&(sequence, host));
        steps.map_or(Ended::default(), |steps| steps[step as usize])
    }

    fn latest(&self, sequence: u64, host: u32) -> Option<(u32, u32, f64)> {
        let steps = self.steps.get(&(sequence, host))?;
        let all = (0..).zip(steps).map(|(step, ended)| (host, step, ended.at));
        all.max_by(|a, b| a.2.total_cmp(&b.2))
    }
}
