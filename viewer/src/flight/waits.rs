//! The operations that had not ended on some ranks, and the ranks that they waited for.

use std::collections::{BTreeMap, BTreeSet};

use gradwire_proto::Collective;
use gradwire_trace::flight::Operation;

use super::merge::{Job, is_in_flight};

/// The most waits of which each is compared with all others (BOUND).
const MAX_PAIRED: usize = 1000;

/// An operation that some ranks had submitted and that had not ended for them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wait {
    /// The process set.
    pub set: u32,
    /// The tensor.
    pub name: String,
    /// The ranks that waited.
    pub waiting: BTreeSet<u32>,
    /// The recorded ranks that had not submitted it.
    pub missing: BTreeSet<u32>,
    /// The ranks of which nothing is recorded.
    pub unknown: BTreeSet<u32>,
    /// When it was first submitted.
    pub since_ns: u64,
    /// Its place in the order of the job, if it had been ordered.
    pub sequence: Option<u64>,
    /// The nodes on which no byte of it had moved, although it had been ordered there.
    pub still: BTreeSet<u32>,
}

/// What identifies an operation on all ranks: its set and name, and if it had been ordered, its
/// place in the order. A name is in flight once at a time, so that is enough.
pub(super) type Key = (u32, String, Option<u64>);

pub(super) fn key(operation: &Operation) -> Key {
    (operation.process_set, operation.name.clone(), operation.sequence)
}

/// The ranks that an operation concerns.
pub(super) fn members(job: &Job, operation: &Operation) -> BTreeSet<u32> {
    if Collective::from_wire(operation.collective.into()) == Some(Collective::SendReceive) {
        let receiver = u32::try_from(operation.receiver).unwrap_or(operation.root);
        return [operation.root, receiver].into();
    }
    job.sets.get(&operation.process_set).cloned().unwrap_or_default()
}

/// All waits at the end of the recording, the longest first.
pub fn waits(job: &Job) -> Vec<Wait> {
    let mut waits: BTreeMap<Key, Wait> = BTreeMap::new();
    let all =
        || job.ranks.iter().flat_map(|(rank, it)| it.operations.iter().map(move |o| (rank, o)));
    for (rank, operation) in all().filter(|(_, operation)| is_in_flight(operation)) {
        let wait = waits.entry(key(operation)).or_insert_with(|| Wait {
            set: operation.process_set,
            name: operation.name.clone(),
            waiting: BTreeSet::new(),
            missing: members(job, operation),
            unknown: BTreeSet::new(),
            since_ns: operation.submitted_ns,
            sequence: operation.sequence,
            still: BTreeSet::new(),
        });
        wait.waiting.insert(*rank);
        wait.since_ns = wait.since_ns.min(operation.submitted_ns);
        if operation.ordered_ns > 0 && operation.begun_ns == 0 {
            wait.still.extend(job.ranks.get(rank).map(|rank| rank.node));
        }
    }
    let submitted = Submitted::of(job);
    for wait in waits.values_mut() {
        let is_known = |rank: &u32| job.ranks.contains_key(rank);
        let (known, unknown) = wait.missing.iter().copied().partition(is_known);
        (wait.missing, wait.unknown) = (known, unknown);
        // An operation is ordered once all of its ranks have submitted it.
        if wait.sequence.is_some() {
            wait.missing.clear();
        } else {
            submitted.remove_from(wait);
        }
    }
    let mut waits: Vec<Wait> = waits.into_values().collect();
    waits.sort_by_key(|wait| (wait.since_ns, wait.name.clone()));
    waits
}

/// The ranks that have submitted each name, so that a wait need not look through all operations.
#[derive(Debug, Default)]
struct Submitted<'a> {
    /// By set and name, the ranks and when they submitted it last; the end of time for an operation
    /// in flight.
    last_ns: BTreeMap<(u32, &'a str), BTreeMap<u32, u64>>,
    /// By set, the ranks that wait in a join.
    joined: BTreeMap<u32, BTreeSet<u32>>,
}

impl<'a> Submitted<'a> {
    fn of(job: &'a Job) -> Self {
        let mut all = Self::default();
        for (rank, record) in &job.ranks {
            for it in &record.operations {
                let at_ns = if is_in_flight(it) { u64::MAX } else { it.submitted_ns };
                let ranks = all.last_ns.entry((it.process_set, &it.name)).or_default();
                let last_ns = ranks.entry(*rank).or_default();
                *last_ns = at_ns.max(*last_ns);
                let is_join = Collective::from_wire(it.collective.into()) == Some(Collective::Join);
                if is_join && is_in_flight(it) {
                    all.joined.entry(it.process_set).or_default().insert(*rank);
                }
            }
        }
        all
    }

    /// Leaves the ranks that have not submitted the operation. It may have ended on a rank already;
    /// an earlier round of the name does not count.
    fn remove_from(&self, wait: &mut Wait) {
        let joined = self.joined.get(&wait.set);
        let last_ns = self.last_ns.get(&(wait.set, &*wait.name));
        let (since_ns, missing) = (wait.since_ns, &mut wait.missing);
        missing.retain(|rank| {
            let has_joined = joined.is_some_and(|ranks| ranks.contains(rank));
            let at_ns = last_ns.and_then(|ranks| ranks.get(rank));
            !has_joined && at_ns.is_none_or(|at_ns| *at_ns < since_ns)
        });
    }
}

/// Two waits whose ranks wait for each other under different names; of the longest waits only.
pub fn mutual(waits: &[Wait]) -> Option<(&Wait, &Wait)> {
    let waits = &waits[..waits.len().min(MAX_PAIRED)];
    let meets = |waiting: &BTreeSet<u32>, missing: &BTreeSet<u32>| !waiting.is_disjoint(missing);
    waits.iter().enumerate().find_map(|(at, one)| {
        let other = waits[at + 1..].iter().find(|other| {
            meets(&one.waiting, &other.missing)
                && meets(&other.waiting, &one.missing)
                && one.name != other.name
        })?;
        Some((one, other))
    })
}
