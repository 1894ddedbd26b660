//! The critical path, from the last step back to the first.

use std::collections::HashMap;

use gradwire_collectives::{Symmetry, execution::Work};

use crate::{
    lane::Plans,
    report::{Done, Hop},
};

/// When each step of each host ended, by operation.
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

    /// The critical path of an operation: each step follows the last one that it waited for.
    /// `symmetry` says which hosts represented others, if any did.
    pub(crate) fn path(
        &self,
        done: &Done,
        hosts: &[u32],
        plans: &Plans,
        symmetry: Option<&Symmetry>,
    ) -> Vec<Hop> {
        let last = done.nodes.iter().max_by(|a, b| a.1.total_cmp(&b.1));
        let Some(&(host, _)) = last else { return Vec::new() };
        let stands = |host: u32| symmetry.map_or(host, |all| all.representative(host));
        let place = |host: u32| hosts.binary_search(&host).unwrap_or_default() as u32;
        let mut hops = Vec::new();
        let mut next = self.latest(done.sequence, stands(host)).map(|(step, at)| (host, step, at));
        while let Some((host, step, at)) = next {
            // `me` did it on behalf of `host`.
            let me = stands(host);
            let Some(planned) = plans.of(place(me)) else { break };
            let from = self.ended(done.sequence, me, step).from;
            let sender = from.map(|from| symmetry.map_or(from, |all| all.seen_by(host, from)));
            let bytes = planned.plan.steps[step as usize].bytes;
            hops.push(Hop { host, sequence: done.sequence, step, from: sender, bytes, end: at });
            let sent = from.zip(sender).and_then(|(from, sender)| {
                let message = planned.message(step, place(from))?;
                let its = stands(sender);
                let to = place(symmetry.map_or(me, |all| all.seen_from(sender, host)));
                let theirs = &plans.of(place(its))?.plan;
                let sends = |&(step, peer): &(u32, u32)| {
                    let work = theirs.steps[step as usize].work;
                    peer == to && matches!(work, Work::Send { message: its, .. } if its == message)
                };
                let (step, _) = theirs.senders().find(sends)?;
                Some((sender, step, self.ended(done.sequence, its, step).at))
            });
            let earlier = planned.plan.steps[step as usize]
                .earlier()
                .map(|earlier| (host, earlier, self.ended(done.sequence, me, earlier).at));
            // Dependencies and messages are acyclic, so this ends.
            next = earlier.chain(sent).max_by(|a, b| a.2.total_cmp(&b.2));
        }
        hops.reverse();
        hops
    }

    fn ended(&self, sequence: u64, host: u32, step: u32) -> Ended {
        let steps = self.steps.get(&(sequence, host));
        steps.map_or(Ended::default(), |steps| steps[step as usize])
    }

    fn latest(&self, sequence: u64, host: u32) -> Option<(u32, f64)> {
        let steps = self.steps.get(&(sequence, host))?;
        let all = (0..).zip(steps).map(|(step, ended)| (step, ended.at));
        all.max_by(|a, b| a.1.total_cmp(&b.1))
    }
}
