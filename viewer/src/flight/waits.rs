//! The operations that had not ended on some ranks, and the ranks that they waited for.

use std::collections::{BTreeMap, BTreeSet};

use gradwire_proto::Collective;
use gradwire_trace::flight::Operation;

use super::merge::{Job, is_in_flight};

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
    // A set that is not recorded consists of the ranks that have used it.
    let used = || {
        let uses = |operations: &[Operation]| {
            operations.iter().any(|it| it.process_set == operation.process_set)
        };
        let ranks = job.ranks.iter().filter(|(_, rank)| uses(&rank.operations));
        ranks.map(|(rank, _)| *rank).collect()
    };
    job.sets.get(&operation.process_set).cloned().unwrap_or_else(used)
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
    let has_joined = |rank: u32, set: u32| {
        let join = |it: &Operation| {
            let is_join = Collective::from_wire(it.collective.into()) == Some(Collective::Join);
            is_join && it.process_set == set && is_in_flight(it)
        };
        job.ranks.get(&rank).is_some_and(|rank| rank.operations.iter().any(join))
    };
    for wait in waits.values_mut() {
        let is_known = |rank: &u32| job.ranks.contains_key(rank);
        let (known, unknown) = wait.missing.iter().copied().partition(is_known);
        (wait.missing, wait.unknown) = (known, unknown);
        // It may have ended on this rank already; an earlier round of the name does not count.
        let is_it = |it: &Operation| {
            let is_named_so = it.process_set == wait.set && it.name == wait.name;
            is_named_so && (is_in_flight(it) || it.submitted_ns >= wait.since_ns)
        };
        let submitted =
            |rank: u32| job.ranks.get(&rank).is_some_and(|rank| rank.operations.iter().any(is_it));
        // An operation is ordered once all of its ranks have submitted it.
        let is_ordered = wait.sequence.is_some();
        let has = |rank: u32| is_ordered || has_joined(rank, wait.set) || submitted(rank);
        let missing = wait.missing.iter().copied().filter(|rank| !has(*rank)).collect();
        wait.missing = missing;
    }
    let mut waits: Vec<Wait> = waits.into_values().collect();
    waits.sort_by_key(|wait| (wait.since_ns, wait.name.clone()));
    waits
}

/// Two waits whose ranks wait for each other under different names.
pub fn mutual(waits: &[Wait]) -> Option<(&Wait, &Wait)> {
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
