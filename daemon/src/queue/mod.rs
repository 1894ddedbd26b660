//! The tensor queue: the tensors that local ranks have submitted and that are not done.
//!
//! A tensor is *gathering* until every local member of its process set that has not joined has
//! submitted it (for a send and receive: the local ones of the two ends). Then it is *announced* to
//! the coordinator. It is removed when its last byte is published or it has failed, before any rank
//! is notified, so that a rank may submit the name again immediately.
//!
//! BOUND: a rank may have as many submissions in flight as its rings hold, so the queue holds at
//! most that many names per local rank.
//!
//! - `sets`: the process sets, and which local ranks have joined or left

mod sets;

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use dashmap::{DashMap, Entry as Slot};
use gradwire_proto::{Collective, ProcessSetId, Rank, Request, pb};
use parking_lot::RwLock;

pub(crate) use self::sets::Refusal;
use self::sets::{ProcessSet, Sets};
use crate::{
    metrics,
    model::{
        blocked::Phase,
        members::Members,
        milliseconds,
        tensor::{
            Announced, Latest, LocalTensor, QueuedTensor, TensorKey, Ticket, Variant, join_of, pair,
        },
    },
};

#[derive(Debug, Default)]
struct Entry {
    /// By local rank, ascending: the order of the reduction (SAME). Empty once announced.
    gathering: Vec<LocalTensor>,
    /// Set once every required local member has submitted.
    announced: Option<Arc<QueuedTensor>>,
    /// Second submissions of a name that was still in flight.
    duplicates: Vec<Ticket>,
    /// Submissions for the next round, of ranks that were absent from this round: their join ended
    /// before the tensor was done.
    later: Vec<LocalTensor>,
    /// When it began to wait for local ranks, and when the wait was last reported.
    waits: Option<(Instant, Instant)>,
}

impl Entry {
    fn submitted(&self) -> &[LocalTensor] {
        self.announced.as_ref().map_or(&self.gathering[..], |tensor| tensor.locals())
    }

    fn has(&self, local_rank: u32) -> bool {
        self.submitted().iter().any(|local| local.local_rank == local_rank)
    }

    /// The local ranks that it still waits for.
    fn missing<'a>(
        &'a self,
        state: &'a ProcessSet,
        first_rank: Rank,
    ) -> impl Iterator<Item = u32> + 'a {
        // If all requests are sends and receives, only their two ends are required.
        let pairs = self.gathering.iter().all(|local| pair(&local.request).is_some());
        let concerns = move |local_rank: u32| {
            let rank = Rank(first_rank.0 + local_rank);
            let has_it = |local: &LocalTensor| {
                pair(&local.request).is_some_and(|(from, to)| from == rank || to == rank)
            };
            !pairs || self.gathering.iter().any(has_it)
        };
        let waited_for = move |local: &u32| {
            !self.has(*local) && concerns(*local) && !state.joined.contains_key(local)
        };
        state.members.here.iter().copied().filter(waited_for)
    }
}

/// A tensor that has waited for local ranks.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Stalled {
    pub(crate) missing: Vec<Rank>,
    pub(crate) waited: Duration,
    pub(crate) name: String,
}

/// The most tensors that are described (BOUND).
const MAX_PARTLY: usize = 100;

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Submitted {
    /// Other local ranks have not submitted the tensor yet, or it must wait for its turn.
    Waits,
    Announce(Announced),
    /// It can never be complete: this rank has left the job.
    RankLeft(Rank),
    Refused(Refusal),
}

/// The submissions of a tensor that is done or has failed.
#[derive(Debug, Default)]
pub(crate) struct Removed {
    /// The submissions of the tensor itself.
    pub(crate) tickets: Vec<Ticket>,
    /// Premature submissions of the same name, which fail in any case.
    pub(crate) duplicates: Vec<Ticket>,
    /// Submissions whose turn it is now.
    pub(crate) later: Vec<LocalTensor>,
    /// The ranks of this node that had not submitted it when its process set was removed.
    pub(crate) missing: Vec<Rank>,
}

/// All tensors in flight on this node. If both locks are needed, the lock of the sets is taken
/// first.
#[derive(Debug)]
pub(crate) struct TensorQueue {
    entries: DashMap<TensorKey, Entry>,
    sets: RwLock<Sets>,
    /// The rank of local rank 0.
    first_rank: Rank,
}

impl TensorQueue {
    /// An empty queue, with the set of all ranks.
    pub(crate) fn new(first_rank: Rank, everybody: Arc<Members>) -> Self {
        Self { entries: DashMap::new(), sets: RwLock::new(Sets::new(everybody)), first_rank }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The members of a process set in which this local rank may submit a tensor now.
    ///
    /// # Errors
    /// [`Refusal`] if it may not.
    pub(crate) fn admit(
        &self,
        set: ProcessSetId,
        local_rank: u32,
    ) -> Result<Arc<Members>, Refusal> {
        self.sets.read().admit(set, local_rank).map(|state| state.members.clone())
    }

    /// Adds a process set. False if it exists already.
    pub(crate) fn create_set(&self, set: ProcessSetId, members: Arc<Members>) -> bool {
        self.sets.write().create(set, members)
    }

    /// Removes a process set. Returns its tensors and joins in flight, which will never be done;
    /// `None` if the set does not exist.
    pub(crate) fn remove_set(&self, set: ProcessSetId) -> Option<Vec<(TensorKey, Removed)>> {
        let mut sets = self.sets.write();
        let mut missing = BTreeMap::new();
        for item in self.entries.iter().filter(|item| item.key().set == set) {
            if let Some(state) = sets.get(set).filter(|_| item.announced.is_none()) {
                let ranks = item.missing(state, self.first_rank).map(|local| self.rank(local));
                missing.insert(item.key().name.clone(), ranks.collect());
            }
        }
        let tickets = sets.remove(set)?;
        let mut removed = self.remove_where(|key, _| key.set == set);
        for (key, removed) in &mut removed {
            removed.missing = missing.remove(&key.name).unwrap_or_default();
        }
        if !tickets.is_empty() {
            removed.push((join_of(set), Removed { tickets, ..Removed::default() }));
        }
        Some(removed)
    }

    /// A process set that a local rank has joined while others have not.
    pub(crate) fn joined_by(&self, local_rank: u32) -> Option<ProcessSetId> {
        self.sets.read().joined_by(local_rank)
    }

    pub(crate) fn process_sets(&self) -> usize {
        self.sets.read().len()
    }

    /// Adds a submission that is not a join.
    pub(crate) fn submit(&self, key: TensorKey, local: LocalTensor) -> Submitted {
        let sets = self.sets.read();
        let state = match sets.admit(key.set, local.local_rank) {
            Ok(state) => state,
            Err(refusal) => return Submitted::Refused(refusal),
        };
        let gone = match pair(&local.request) {
            None => sets.first_left(state),
            Some((from, to)) => {
                let is_end = |left: &u32| [from, to].contains(&self.rank(*left));
                sets.left.iter().copied().find(is_end)
            }
        };
        if let Some(gone) = gone {
            return Submitted::RankLeft(self.rank(gone));
        }
        let mut entry = self.entries.entry(key.clone()).or_insert_with(|| {
            metrics::queued();
            Entry::default()
        });
        let is_own = |l: &LocalTensor| l.local_rank == local.local_rank;
        if entry.later.iter().any(is_own) {
            return Submitted::Refused(Refusal::Twice);
        }
        if entry.has(local.local_rank) {
            entry.duplicates.push(local.answer());
            if entry.announced.is_none() {
                // It is a part of the announcement.
                return Submitted::Waits;
            }
            // A correction, which takes effect if the coordinator has not started the tensor yet.
            let variant = Variant {
                ranks: vec![self.rank(local.local_rank)],
                request: local.request,
                priority: local.priority,
                duplicate: true,
                sites: vec![local.site],
            };
            let all_there = state.joined.is_empty();
            let variants = vec![variant];
            return Submitted::Announce(Announced { key, variants, all_there, latest: None });
        }
        if entry.announced.is_some() {
            entry.later.push(local);
            return Submitted::Waits;
        }
        if entry.waits.is_none() {
            let now = Instant::now();
            entry.waits = Some((now, now));
        }
        let last = local.local_rank;
        let at = entry.gathering.partition_point(|l| l.local_rank < last);
        entry.gathering.insert(at, local);
        if entry.missing(state, self.first_rank).next().is_some() {
            return Submitted::Waits;
        }
        let (announced, waited) = self.announce(key, &mut entry, state);
        Submitted::Announce(Announced {
            latest: Some(Latest { local_rank: last, waited }),
            ..announced
        })
    }

    /// A local rank has no more data for a process set, so nobody waits for it there any more.
    /// Returns the announcements for the coordinator, in order.
    ///
    /// # Errors
    /// [`Submitted`], as from [`TensorQueue::submit`], if the rank may not join.
    pub(crate) fn join(
        &self,
        set: ProcessSetId,
        answer: Ticket,
        request: Request,
        priority: i32,
    ) -> Result<Vec<Announced>, Submitted> {
        let mut sets = self.sets.write();
        let state = sets.admit(set, answer.local_rank).map_err(Submitted::Refused)?;
        if let Some(gone) = sets.first_left(state) {
            return Err(Submitted::RankLeft(self.rank(gone)));
        }
        let Some(state) = sets.join(set, answer) else { return Ok(Vec::new()) };
        let ranks = vec![self.rank(answer.local_rank)];
        let sites = Vec::new();
        let join = Variant { ranks, request, priority, duplicate: false, sites };
        // The join goes first: it completes the tensors that are announced after it.
        let mut announced = vec![Announced {
            key: join_of(set),
            variants: vec![join],
            all_there: false,
            latest: None,
        }];
        for mut item in self.entries.iter_mut().filter(|item| item.key().set == set) {
            let (key, entry) = (item.key().clone(), item.value_mut());
            let gathers = entry.announced.is_none() && !entry.gathering.is_empty();
            if gathers && entry.missing(state, self.first_rank).next().is_none() {
                announced.push(self.announce(key, entry, state).0);
            }
        }
        Ok(announced)
    }

    /// All members of a process set have joined and take part again. Returns the submissions that
    /// wait for that; `None` if a local member has not joined.
    pub(crate) fn resume(&self, set: ProcessSetId) -> Option<Vec<Ticket>> {
        self.sets.write().resume(set)
    }

    /// The join of a process set has failed. Returns the submissions that wait for it; their ranks
    /// take part again.
    pub(crate) fn unjoin(&self, set: ProcessSetId) -> Vec<Ticket> {
        self.sets.write().unjoin(set)
    }

    /// A local rank has left the job. Removes the gathering tensors that need it, which will never
    /// be complete. The coordinator notifies the ranks of other nodes.
    pub(crate) fn leave(&self, local_rank: u32) -> Vec<(TensorKey, Removed)> {
        let mut sets = self.sets.write();
        sets.left.push(local_rank);
        let rank = self.rank(local_rank);
        self.remove_where(|key, entry| {
            let concerns = |local: &LocalTensor| match pair(&local.request) {
                None => sets.has(key.set, local_rank),
                Some((from, to)) => from == rank || to == rank,
            };
            entry.announced.is_none() && entry.gathering.iter().any(concerns)
        })
    }

    fn rank(&self, local_rank: u32) -> Rank {
        Rank(self.first_rank.0 + local_rank)
    }

    /// Announces a tensor. Also returns how long it has waited: no time if it has one rank here.
    fn announce(
        &self,
        key: TensorKey,
        entry: &mut Entry,
        state: &ProcessSet,
    ) -> (Announced, Duration) {
        let since = entry.waits.filter(|_| entry.gathering.len() > 1).map(|(since, _)| since);
        let waited = since.map_or(Duration::ZERO, |since| since.elapsed());
        metrics::gathered(waited);
        let twice = |local: u32| entry.duplicates.iter().any(|d| d.local_rank == local);
        let mut variants: Vec<Variant> = Vec::new();
        for local in &entry.gathering {
            let duplicate = twice(local.local_rank);
            let rank = self.rank(local.local_rank);
            let same = |v: &&mut Variant| v.request == local.request && v.duplicate == duplicate;
            match variants.iter_mut().find(same) {
                Some(variant) => {
                    variant.ranks.push(rank);
                    variant.priority = variant.priority.max(local.priority);
                    variant.add_site(&local.site);
                }
                None => variants.push(Variant {
                    ranks: vec![rank],
                    request: local.request.clone(),
                    priority: local.priority,
                    duplicate,
                    sites: vec![local.site.clone()],
                }),
            }
        }
        let locals = std::mem::take(&mut entry.gathering);
        let tensor = QueuedTensor::new(key.clone(), locals, self.first_rank);
        entry.announced = Some(Arc::new(tensor));
        let all_there = state.joined.is_empty();
        (Announced { key, variants, all_there, latest: None }, waited)
    }

    pub(crate) fn announced(&self, key: &TensorKey) -> Option<Arc<QueuedTensor>> {
        self.entries.get(key).and_then(|entry| entry.announced.clone())
    }

    pub(crate) fn remove(&self, key: &TensorKey) -> Removed {
        let Slot::Occupied(entry) = self.entries.entry(key.clone()) else {
            return Removed::default();
        };
        let entry = entry.remove();
        metrics::unqueued(1);
        let tickets = entry.submitted().iter().map(LocalTensor::answer).collect();
        let Entry { duplicates, later, .. } = entry;
        Removed { tickets, duplicates, later, missing: Vec::new() }
    }

    fn remove_where(
        &self,
        doomed: impl Fn(&TensorKey, &Entry) -> bool,
    ) -> Vec<(TensorKey, Removed)> {
        let items = self.entries.iter().filter(|item| doomed(item.key(), item.value()));
        let keys: Vec<TensorKey> = items.map(|item| item.key().clone()).collect();
        keys.into_iter().map(|key| (key.clone(), self.remove(&key))).collect()
    }

    /// The names of at most `most` tensors that a local rank has submitted, for messages. The
    /// removal of a process set does not count: a rank that leaves a process group requests it.
    pub(crate) fn names_of(&self, local_rank: u32, most: usize) -> Vec<String> {
        let is_tensor = |local: &LocalTensor| {
            local.local_rank == local_rank
                && local.request.collective != Collective::RemoveProcessSet
        };
        let mut names: Vec<String> = self
            .entries
            .iter()
            .filter(|item| item.submitted().iter().any(is_tensor))
            .map(|item| item.key().name.to_string())
            .collect();
        names.sort();
        names.truncate(most);
        names
    }

    /// The number of submissions of a local rank that are here, and the tensor, the collective and
    /// the line of the program of the submission with this ticket.
    pub(crate) fn submissions_of(
        &self,
        local_rank: u32,
        ticket: u64,
    ) -> (usize, Option<(TensorKey, Collective, Arc<str>)>) {
        let (mut count, mut found) = (0, None);
        let wanted = Ticket { local_rank, ticket };
        let joins = self.sets.read().joins_of(local_rank);
        for (set, join) in joins {
            count += 1;
            let is_it = join == ticket;
            found =
                found.or_else(|| is_it.then(|| (join_of(set), Collective::Join, Arc::default())));
        }
        for item in &self.entries {
            let first = item.submitted().first().or(item.later.first());
            let submitted = item.submitted().iter().chain(&item.later).map(LocalTensor::answer);
            let own = submitted.chain(item.duplicates.iter().copied());
            for own in own.filter(|own| own.local_rank == local_rank) {
                count += 1;
                if let (true, Some(local)) = (own == wanted, first) {
                    let mut all = item.submitted().iter().chain(&item.later);
                    let own = all.find(|it| it.answer() == wanted);
                    let site = own.map(|it| it.site.clone()).unwrap_or_default();
                    found = Some((item.key().clone(), local.request.collective, site));
                }
            }
        }
        (count, found)
    }

    /// The phase of the tensor that each of the first local ranks has waited for longest.
    pub(crate) fn phases(&self, ranks: usize) -> Vec<Option<Phase>> {
        let mut oldest: Vec<Option<(Instant, Phase)>> = vec![None; ranks];
        for item in &self.entries {
            let Some((since, _)) = item.waits else { continue };
            let phase = match &item.announced {
                None => Phase::Gather,
                Some(tensor) if tensor.is_ordered() => Phase::Transfer,
                Some(_) => Phase::Negotiate,
            };
            for local in item.submitted() {
                if let Some(found) = oldest.get_mut(local.local_rank as usize)
                    && found.is_none_or(|(before, _)| since < before)
                {
                    *found = Some((since, phase));
                }
            }
        }
        oldest.into_iter().map(|found| found.map(|(_, phase)| phase)).collect()
    }

    /// Whether the wait of any tensor for local ranks must be reported (WAIT): it has lasted for
    /// `limit`, or twice as long as when it was last reported. The coordinator does not know these
    /// tensors yet.
    pub(crate) fn must_report(&self, now: Instant, limit: Duration) -> bool {
        let mut must = false;
        for mut item in self.entries.iter_mut() {
            let entry = item.value_mut();
            let Some((since, reported)) = &mut entry.waits else { continue };
            let waited = now.saturating_duration_since(*since);
            let next = limit.max(2 * reported.saturating_duration_since(*since));
            if entry.announced.is_none() && waited >= next {
                *reported = now;
                must = true;
            }
        }
        must
    }

    /// The tensors that only some local ranks have submitted, at least this long ago; those that
    /// have waited longest first.
    pub(crate) fn partly(&self, now: Instant, least: Duration) -> Vec<pb::PartlySubmitted> {
        let sets = self.sets.read();
        let partly = self.entries.iter().filter_map(|item| {
            let (key, entry) = item.pair();
            let (since, _) = entry.waits.filter(|_| entry.announced.is_none())?;
            let waited = now.saturating_duration_since(since);
            if waited < least {
                return None;
            }
            let missing = entry.missing(sets.get(key.set)?, self.first_rank);
            Some(pb::PartlySubmitted {
                process_set: key.set.0,
                name: key.name.to_string(),
                waiting_ms: milliseconds(waited),
                missing: missing.map(|local| self.rank(local).0).collect(),
                submitted: entry.gathering.iter().map(|it| self.rank(it.local_rank).0).collect(),
                is_pair: entry.gathering.iter().all(|local| pair(&local.request).is_some()),
            })
        });
        let mut partly: Vec<_> = partly.collect();
        partly.sort_by(|one, other| {
            other.waiting_ms.cmp(&one.waiting_ms).then_with(|| one.name.cmp(&other.name))
        });
        partly.truncate(MAX_PARTLY);
        partly
    }

    /// The tensor that has waited for local ranks for longest (WAIT).
    pub(crate) fn longest_wait(&self, now: Instant) -> Option<Stalled> {
        let sets = self.sets.read();
        let waiting = self.entries.iter().filter(|item| item.announced.is_none());
        let since = |entry: &Entry| entry.waits.map(|(since, _)| since);
        let first = waiting.filter_map(|item| since(&item).map(|since| (since, item)));
        let (since, item) = first.min_by_key(|(since, _)| *since)?;
        let state = sets.get(item.key().set)?;
        let missing = item.missing(state, self.first_rank).map(|local| self.rank(local));
        Some(Stalled {
            missing: missing.collect(),
            waited: now.saturating_duration_since(since),
            name: item.key().name.to_string(),
        })
    }

    /// How many tensors have waited for local ranks for `limit`, reported or not.
    pub(crate) fn overdue(&self, now: Instant, limit: Duration) -> usize {
        let is_overdue = |entry: &Entry| {
            let since = entry.waits.filter(|_| entry.announced.is_none()).map(|(since, _)| since);
            since.is_some_and(|since| now.saturating_duration_since(since) >= limit)
        };
        self.entries.iter().filter(|item| is_overdue(item.value())).count()
    }

    /// Removes everything, because the job is over. The ranks are notified in other ways.
    pub(crate) fn clear(&self) {
        metrics::unqueued(self.len());
        self.entries.clear();
    }
}

#[cfg(test)]
mod tests;
