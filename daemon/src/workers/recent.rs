//! The last operations that a rank has submitted, for explanations of waits. Two short locks per
//! operation are all they cost.

use std::{collections::VecDeque, sync::Arc, time::Instant};

use gradwire_proto::{Collective, TensorName, pb};
use parking_lot::Mutex;

use crate::model::milliseconds;

/// How many are kept (BOUND).
const KEPT: usize = 3;

#[derive(Debug)]
struct Operation {
    ticket: u64,
    name: TensorName,
    collective: Collective,
    site: Arc<str>,
    submitted: Instant,
    outcome: pb::Outcome,
}

#[derive(Debug, Default)]
struct State {
    last: VecDeque<Operation>,
    count: u64,
}

/// The last operations of one rank.
#[derive(Debug, Default)]
pub(crate) struct Recent(Mutex<State>);

impl Recent {
    /// The rank has submitted an operation.
    pub(crate) fn submitted(
        &self,
        ticket: u64,
        name: TensorName,
        collective: Collective,
        site: Arc<str>,
    ) {
        let (submitted, outcome) = (Instant::now(), pb::Outcome::InFlight);
        let operation = Operation { ticket, name, collective, site, submitted, outcome };
        let mut state = self.0.lock();
        state.count += 1;
        if state.last.len() >= KEPT {
            state.last.pop_front();
        }
        state.last.push_back(operation);
    }

    /// An operation has ended.
    pub(crate) fn ended(&self, ticket: u64, outcome: pb::Outcome) {
        let mut state = self.0.lock();
        if let Some(operation) = state.last.iter_mut().find(|it| it.ticket == ticket) {
            operation.outcome = outcome;
        }
    }

    /// Where the program has called an operation; empty if it is not one of the last.
    pub(crate) fn site(&self, ticket: u64) -> Arc<str> {
        let state = self.0.lock();
        let found = state.last.iter().find(|it| it.ticket == ticket);
        found.map(|it| it.site.clone()).unwrap_or_default()
    }

    /// The last operations, the newest first, and the number of all.
    pub(crate) fn look(&self, now: Instant) -> (Vec<pb::RecentOperation>, u64) {
        let state = self.0.lock();
        let operation = |it: &Operation| pb::RecentOperation {
            name: it.name.to_string(),
            call: it.collective.to_string(),
            age_ms: milliseconds(now.saturating_duration_since(it.submitted)),
            outcome: it.outcome.into(),
            site: it.site.to_string(),
        };
        (state.last.iter().rev().map(operation).collect(), state.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_three_operations_are_kept() {
        let recent = Recent::default();
        for (ticket, name) in (0..).zip(["a", "b", "c", "d"]) {
            let (call, site) = (Collective::Allreduce, format!("train.py:{ticket}").into());
            recent.submitted(ticket, TensorName::new(name).unwrap(), call, site);
        }
        for ended in [0, 1, 3] {
            recent.ended(ended, pb::Outcome::Done);
        }
        let (last, count) = recent.look(Instant::now());
        let last: Vec<_> = last.iter().map(|it| (&it.name[..], it.outcome())).collect();
        let (done, in_flight) = (pb::Outcome::Done, pb::Outcome::InFlight);
        assert_eq!(last, [("d", done), ("c", in_flight), ("b", done)]);
        assert_eq!(count, 4);
        assert_eq!((&*recent.site(2), &*recent.site(0)), ("train.py:2", ""));
    }
}
