//! The outcome of a run.

use super::{Engine, state::Ordered};
use crate::{
    collapse::Collapse,
    job::Director,
    report::{Done, Outcome},
};

impl<D: Director> Engine<'_, D> {
    pub(super) fn finish(mut self) -> Outcome {
        self.fill_in();
        let mut outcome = self.outcome;
        let senders = self.senders.iter().map(|&(_, most)| most).collect();
        let finished = |(&sequence, ordered): (&u64, &Ordered)| {
            let is_done = ordered.done.len() == ordered.operation.hosts.len();
            let Ordered { at, ref done, .. } = *ordered;
            is_done.then(|| Done { sequence, ordered: at, nodes: done.clone() })
        };
        outcome.done = self.ordered.iter().filter_map(finished).collect();
        outcome.seconds = outcome.done.iter().map(Done::end).fold(0.0, f64::max);
        outcome.senders = senders;
        outcome.usage = self.flows.usage;
        if let Some(record) = self.record {
            let last = outcome.done.iter().max_by(|a, b| a.end().total_cmp(&b.end()));
            let path = last.and_then(|done| {
                let ordered = self.ordered.get(&done.sequence)?;
                let symmetry = self.collapse.as_ref().map(Collapse::symmetry);
                Some(record.path(done, &ordered.operation.hosts, &ordered.plans, symmetry))
            });
            outcome.critical_path = path.unwrap_or_default();
        }
        outcome
    }

    /// Reports which hosts wait for which.
    pub(super) fn stands_still(&mut self, next: f64) {
        let name = |host: u32| &self.setup.network.hosts[host as usize].name;
        let mut waits: Vec<String> = Vec::new();
        for ordered in self.ordered.values() {
            let missing = ordered.operation.hosts.iter();
            let done = |host: &u32| ordered.done.iter().any(|(one, _)| one == host);
            waits.extend(missing.filter(|host| !done(host)).map(|&host| name(host).clone()));
        }
        waits.sort_unstable();
        waits.dedup();
        let stuck = self
            .about
            .iter()
            .zip(0..)
            .filter(|&(_, id)| !self.flows.is_empty(id))
            .map(|(about, _)| format!("{} to {}", name(about.from), name(about.to)));
        let stuck: Vec<String> = stuck.take(3).collect();
        let what = if next.is_infinite() { "nothing moves any more" } else { "it has not ended" };
        let stuck =
            if stuck.is_empty() { String::new() } else { format!(": {}", stuck.join(", ")) };
        self.outcome.standstill = Some(format!(
            "{what} after {:.3} s{stuck}; {} of {} hosts wait",
            if next.is_infinite() { self.now } else { self.setup.limit },
            waits.len(),
            self.setup.network.hosts.len(),
        ));
    }

    /// Copies the results of representatives to the hosts they represent.
    fn fill_in(&mut self) {
        let hosts = self.hosts.len() as u32;
        self.outcome.simulated_hosts = hosts;
        let Some(collapse) = &self.collapse else { return };
        self.outcome.simulated_hosts = collapse.hosts().len() as u32;
        self.outcome.chunks *= u64::from(collapse.class_size());
        for host in 0..hosts {
            let from = collapse.representative(host) as usize;
            let to = host as usize;
            self.outcome.sent[to] = self.outcome.sent[from];
            self.outcome.received[to] = self.outcome.received[from];
            self.senders[to] = self.senders[from];
        }
        for (to, from) in collapse.resources() {
            self.flows.usage.copy(from, to);
        }
    }
}
