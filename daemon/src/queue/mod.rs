//! The tensor queue: what local ranks have submitted and is not done.
//!
//! A tensor is *gathering* until every local member of its process set has submitted it, then
//! *announced* to the coordinator, and gone when its last byte is published or it has failed.
//! It is removed before anybody is told, so that a rank may submit the name again at once.
//!
//! BOUND: a rank may have as many submissions in flight as its rings hold, so the queue holds at
//! most that many names per local rank.

mod tensor;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, RwLock},
    time::{Duration, Instant},
};

use dashmap::{DashMap, Entry as Slot};
use gradwire_proto::{ProcessSetId, Rank, Request, TensorName};

pub(crate) use tensor::{LocalTensor, QueuedTensor};

/// A tensor's name within its process set.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct TensorKey {
    pub(crate) set: ProcessSetId,
    pub(crate) name: TensorName,
}

/// One distinct request for a tensor, and the local ranks that made it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Variant {
    pub(crate) ranks: Vec<Rank>,
    pub(crate) request: Request,
    pub(crate) priority: i32,
    pub(crate) duplicate: bool,
}

/// What the coordinator is to be told of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Announced {
    pub(crate) key: TensorKey,
    pub(crate) variants: Vec<Variant>,
}

/// A submission that can't be carried out and whose rank has to be told so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ticket {
    pub(crate) local_rank: u32,
    pub(crate) ticket: u64,
}

#[derive(Debug, Default)]
struct Entry {
    /// By local rank, ascending: the order in which they are reduced (SAME).
    submitted: Vec<LocalTensor>,
    /// Set once every local member has submitted.
    announced: Option<Arc<QueuedTensor>>,
    /// Second submissions of a name that was still in flight.
    duplicates: Vec<Ticket>,
    /// When it was first submitted, and when its wait was last told of.
    waits: Option<(Instant, Instant)>,
}

/// Tensors that wait for the same local ranks.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Stalled {
    pub(crate) missing: Vec<Rank>,
    /// The longest wait of them.
    pub(crate) waited: Duration,
    /// Their names, sorted.
    pub(crate) names: Vec<String>,
}

/// What a submission comes to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Submitted {
    /// Other local ranks have not submitted the tensor yet.
    Waits,
    /// The coordinator is to be told this.
    Announce(Announced),
    /// It can never be complete: this rank has left the job.
    RankLeft(Rank),
}

/// What has become of a tensor that is done or has failed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Removed {
    /// The submissions of the tensor itself.
    pub(crate) tickets: Vec<Ticket>,
    /// Submissions under the same name that came too early and fail in any case.
    pub(crate) duplicates: Vec<Ticket>,
}

/// All tensors in flight on this node.
#[derive(Debug)]
pub(crate) struct TensorQueue {
    entries: DashMap<TensorKey, Entry>,
    /// Global rank of local rank 0, and how many local ranks there are.
    first_rank: Rank,
    slots: u32,
    left: RwLock<BTreeSet<u32>>,
}

impl TensorQueue {
    pub(crate) fn new(first_rank: Rank, slots: u32) -> Self {
        Self { entries: DashMap::new(), first_rank, slots, left: RwLock::default() }
    }

    /// How many tensors are in flight.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Takes a submission.
    pub(crate) fn submit(&self, key: TensorKey, local: LocalTensor) -> Submitted {
        let left = self.left.read().expect("no panic while it is held");
        if let Some(gone) = left.first() {
            return Submitted::RankLeft(self.rank(*gone));
        }
        let mut entry = self.entries.entry(key.clone()).or_default();
        let same_rank = |l: &LocalTensor| l.local_rank == local.local_rank;
        if entry.submitted.iter().any(same_rank) {
            let ticket = Ticket { local_rank: local.local_rank, ticket: local.ticket };
            entry.duplicates.push(ticket);
            if entry.announced.is_none() {
                // It is told with the announcement.
                return Submitted::Waits;
            }
            // An amendment, which the coordinator heeds if the tensor has not been started yet.
            return Submitted::Announce(Announced {
                key,
                variants: vec![Variant {
                    ranks: vec![self.rank(local.local_rank)],
                    request: local.request,
                    priority: local.priority,
                    duplicate: true,
                }],
            });
        }
        if entry.waits.is_none() {
            let now = Instant::now();
            entry.waits = Some((now, now));
        }
        let at = entry.submitted.partition_point(|l| l.local_rank < local.local_rank);
        entry.submitted.insert(at, local);
        if entry.submitted.len() < self.slots as usize {
            return Submitted::Waits;
        }
        Submitted::Announce(self.announce(key, &mut entry))
    }

    /// A local rank has left in good order: what it has not submitted will never be complete, and
    /// is removed. The other nodes' ranks are told by the coordinator.
    pub(crate) fn leave(&self, local_rank: u32) -> Vec<(TensorKey, Removed)> {
        self.left.write().expect("no panic while it is held").insert(local_rank);
        let incomplete: Vec<TensorKey> = self
            .entries
            .iter()
            .filter(|item| item.announced.is_none())
            .map(|item| item.key().clone())
            .collect();
        incomplete.into_iter().map(|key| (key.clone(), self.remove(&key))).collect()
    }

    fn rank(&self, local_rank: u32) -> Rank {
        Rank(self.first_rank.0 + local_rank)
    }

    fn announce(&self, key: TensorKey, entry: &mut Entry) -> Announced {
        let twice = |local: u32| entry.duplicates.iter().any(|d| d.local_rank == local);
        let mut variants: Vec<Variant> = Vec::new();
        for local in &entry.submitted {
            let duplicate = twice(local.local_rank);
            let rank = self.rank(local.local_rank);
            let same = |v: &&mut Variant| v.request == local.request && v.duplicate == duplicate;
            match variants.iter_mut().find(same) {
                Some(variant) => {
                    variant.ranks.push(rank);
                    variant.priority = variant.priority.max(local.priority);
                }
                None => variants.push(Variant {
                    ranks: vec![rank],
                    request: local.request.clone(),
                    priority: local.priority,
                    duplicate,
                }),
            }
        }
        let locals = std::mem::take(&mut entry.submitted);
        // Ranks that disagree never run; the first one's request stands for the tensor until then.
        let tensor = Arc::new(QueuedTensor::new(key.clone(), locals, self.first_rank));
        entry.submitted = tensor.locals().to_vec();
        entry.announced = Some(tensor);
        Announced { key, variants }
    }

    /// An announced tensor.
    pub(crate) fn announced(&self, key: &TensorKey) -> Option<Arc<QueuedTensor>> {
        self.entries.get(key).and_then(|entry| entry.announced.clone())
    }

    /// Removes a tensor that is done or has failed.
    pub(crate) fn remove(&self, key: &TensorKey) -> Removed {
        let Slot::Occupied(entry) = self.entries.entry(key.clone()) else {
            return Removed::default();
        };
        let entry = entry.remove();
        let tickets = entry
            .submitted
            .iter()
            .map(|l| Ticket { local_rank: l.local_rank, ticket: l.ticket })
            .collect();
        Removed { tickets, duplicates: entry.duplicates }
    }

    /// Names of tensors that a local rank has submitted, at most `most`, for texts.
    pub(crate) fn names_of(&self, local_rank: u32, most: usize) -> Vec<String> {
        let mut names: Vec<String> = self
            .entries
            .iter()
            .filter(|item| item.submitted.iter().any(|l| l.local_rank == local_rank))
            .map(|item| item.key().name.to_string())
            .collect();
        names.sort();
        names.truncate(most);
        names
    }

    /// What has waited for local ranks for as long as `limit`, since it began to or was last told of
    /// (WAIT). The coordinator can't tell: it has not heard of these tensors.
    pub(crate) fn stalled(&self, now: Instant, limit: Duration) -> Vec<Stalled> {
        let mut found: BTreeMap<Vec<Rank>, (Duration, Vec<String>)> = BTreeMap::new();
        for mut item in self.entries.iter_mut() {
            let name = item.key().name.to_string();
            let entry = item.value_mut();
            let Some((since, told)) = &mut entry.waits else { continue };
            if entry.announced.is_some() || now.saturating_duration_since(*told) < limit {
                continue;
            }
            *told = now;
            let waited = now.saturating_duration_since(*since);
            let is_here = |local: &u32| entry.submitted.iter().any(|l| l.local_rank == *local);
            let missing = (0..self.slots).filter(|local| !is_here(local)).map(|l| self.rank(l));
            let (longest, names) = found.entry(missing.collect()).or_default();
            *longest = waited.max(*longest);
            names.push(name);
        }
        let stalled = found.into_iter().map(|(missing, (waited, mut names))| {
            names.sort();
            Stalled { missing, waited, names }
        });
        stalled.collect()
    }

    /// Forgets everything: the job is over and its ranks are told by other means.
    pub(crate) fn clear(&self) {
        self.entries.clear();
    }
}

#[cfg(test)]
mod tests;
