//! Groups of ranks with their own operations.
//!
//! The program holds a [`ProcessSet`] for the whole job. In an elastic job its members may have
//! other ranks, and the set another number, in each epoch, so both are looked up when they are
//! needed. The members themselves, which are processes, never change: a set without one of them is
//! gone for good.

use std::{collections::BTreeMap, fmt, sync::Arc};

use gradwire_proto::ProcessSetId;
use parking_lot::RwLock;

use crate::{
    error::{GradwireError, Result},
    formation::{Formation, KnownSet},
};

/// A group of ranks: all ranks, or a set from [`crate::Session::add_process_set`]. Cheap to clone.
/// Ranks keep their numbers in it: a root is always a rank of the whole job.
#[derive(Clone)]
pub struct ProcessSet(Arc<RwLock<Arc<Members>>>);

/// The number and the members of a process set in one epoch.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Members {
    id: u32,
    ranks: Box<[u32]>,
    position: Option<usize>,
    /// Why operations can't use the set any more.
    gone: Option<String>,
}

impl Members {
    /// The members of a set of ranks, which are ascending. `rank` is this rank.
    pub(crate) fn new(id: ProcessSetId, ranks: impl Into<Box<[u32]>>, rank: u32) -> Self {
        let ranks = ranks.into();
        let position = ranks.binary_search(&rank).ok();
        Self { id: id.0, ranks, position, gone: None }
    }

    /// The same set after an epoch in which it did not come back, because this worker is missing.
    fn gone(&self, missing: Option<u32>) -> Self {
        let why = match missing {
            Some(worker) => format!("worker {worker}, one of its members, is lost or has left"),
            None => "it was being created or removed when an epoch ended".to_owned(),
        };
        let gone = Some(format!("{self} does not exist any more: {why}; create another one"));
        Self { id: self.id, ranks: self.ranks.clone(), position: self.position, gone }
    }

    pub(crate) fn number(&self) -> ProcessSetId {
        ProcessSetId(self.id)
    }

    pub(crate) fn len(&self) -> usize {
        self.ranks.len()
    }

    pub(crate) fn ranks(&self) -> &[u32] {
        &self.ranks
    }

    pub(crate) fn position(&self) -> Option<usize> {
        self.position
    }

    fn includes(&self, rank: u32) -> bool {
        self.ranks.binary_search(&rank).is_ok()
    }

    /// Refuses a peer that is not a member.
    pub(crate) fn check_peer(&self, role: &str, rank: u32) -> Result<()> {
        if self.includes(rank) {
            return Ok(());
        }
        let text = match self.id {
            0 => format!(
                "the {role}, rank {rank}, does not exist: the job has only ranks 0 to {}",
                self.len() - 1
            ),
            _ => format!("the {role}, rank {rank}, is not a member of {self}"),
        };
        Err(GradwireError::Invalid(text))
    }
}

impl fmt::Display for Members {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 16;
        let some: Vec<String> = self.ranks.iter().take(SHOWN).map(ToString::to_string).collect();
        let more = if self.len() > SHOWN { ", …" } else { "" };
        write!(f, "process set {} (ranks {}{more})", self.id, some.join(", "))
    }
}

impl ProcessSet {
    pub(crate) fn new(members: Members) -> Self {
        Self(Arc::new(RwLock::new(Arc::new(members))))
    }

    /// From now on it has other numbers.
    fn change(&self, members: Members) {
        *self.0.write() = Arc::new(members);
    }

    /// Its number and members at this moment.
    pub(crate) fn now(&self) -> Arc<Members> {
        self.0.read().clone()
    }

    /// Its number; 0 for all ranks.
    pub fn id(&self) -> u32 {
        self.now().id
    }

    /// Its members, ascending.
    pub fn ranks(&self) -> Vec<u32> {
        self.now().ranks.to_vec()
    }

    /// The number of its members.
    pub fn len(&self) -> usize {
        self.now().len()
    }

    /// Always false: a process set has members.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a rank is a member.
    pub fn includes(&self, rank: u32) -> bool {
        self.now().includes(rank)
    }

    /// This rank's index among the members; `None` if it is not a member.
    pub fn position(&self) -> Option<usize> {
        self.now().position
    }
}

impl PartialEq for ProcessSet {
    /// Whether both are the same set, not only sets of the same ranks.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for ProcessSet {}

impl fmt::Display for ProcessSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.now().fmt(f)
    }
}

impl fmt::Debug for ProcessSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A process set, and what the ranks of the next epoch need to know of it.
#[derive(Debug, Clone)]
struct Entry {
    set: ProcessSet,
    known: KnownSet,
}

/// The process sets of a session in one epoch.
#[derive(Debug)]
pub(crate) struct ProcessSets {
    all: ProcessSet,
    /// By their numbers in this epoch.
    others: BTreeMap<u32, Entry>,
}

impl ProcessSets {
    /// The initial sets of rank `rank` in a job of `size` ranks: only the set of all ranks.
    pub(crate) fn new(size: u32, rank: u32) -> Self {
        let all = Members::new(ProcessSetId::GLOBAL, (0..size).collect::<Vec<_>>(), rank);
        Self { all: ProcessSet::new(all), others: BTreeMap::new() }
    }

    /// The set of all ranks.
    pub(crate) fn all(&self) -> ProcessSet {
        self.all.clone()
    }

    /// Adds a new set; false if its number is taken.
    pub(crate) fn add(&mut self, set: ProcessSet, known: KnownSet) -> bool {
        let id = set.id();
        id != 0 && self.others.insert(id, Entry { set, known }).is_none()
    }

    /// What the ranks of the next epoch need to know of the sets.
    pub(crate) fn known(&self) -> Vec<KnownSet> {
        self.others.values().map(|entry| entry.known.clone()).collect()
    }

    /// The sets of the next epoch, in which rank `rank` of `size` is this one. `back` are those
    /// that come back, with their new numbers. Each [`ProcessSet`] of the program is updated.
    pub(crate) fn renewed(
        &self,
        (size, rank): (u32, u32),
        formation: &Formation,
        back: &[(KnownSet, ProcessSetId)],
    ) -> Self {
        let all = (0..size).collect::<Vec<_>>();
        self.all.change(Members::new(ProcessSetId::GLOBAL, all, rank));
        let mut renewed = Self { all: self.all.clone(), others: BTreeMap::new() };
        for (known, id) in back {
            let members = Members::new(*id, formation.ranks_of(known), rank);
            let own = self.others.values().find(|entry| entry.known == *known);
            let set = match own {
                Some(Entry { set, .. }) => {
                    set.change(members);
                    set.clone()
                }
                None => ProcessSet::new(members),
            };
            renewed.others.insert(id.0, Entry { set, known: known.clone() });
        }
        for Entry { set, known } in self.others.values() {
            if back.iter().all(|(other, _)| other != known) {
                set.change(set.now().gone(formation.missing(known)));
            }
        }
        renewed
    }

    /// Forgets a set.
    pub(crate) fn remove(&mut self, id: ProcessSetId) {
        self.others.remove(&id.0);
    }

    /// Refuses a set that does not exist.
    pub(crate) fn check(&self, set: &ProcessSet) -> Result<Arc<Members>> {
        let members = set.now();
        let is_here = self.others.get(&members.id).is_some_and(|entry| entry.set == *set);
        if *set == self.all || is_here {
            return Ok(members);
        }
        let text = members.gone.clone().unwrap_or_else(|| {
            format!("{set} does not exist in this session: it was removed, or is another session's")
        });
        Err(GradwireError::Invalid(text))
    }

    /// The members of the set of an operation: all ranks if none was given.
    pub(crate) fn of_member(&self, set: Option<&ProcessSet>) -> Result<Arc<Members>> {
        let Some(set) = set else { return Ok(self.all.now()) };
        let members = self.check(set)?;
        if members.position.is_none() {
            let text = format!(
                "this rank is not a member of {set}: only members can use it in an operation"
            );
            return Err(GradwireError::Invalid(text));
        }
        Ok(members)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set_of(id: u32, ranks: Box<[u32]>, rank: u32) -> ProcessSet {
        ProcessSet::new(Members::new(ProcessSetId(id), ranks, rank))
    }

    #[test]
    fn a_set_knows_its_members() {
        let set = set_of(3, [1, 4, 5].into(), 4);
        assert_eq!((set.id(), set.len(), set.position()), (3, 3, Some(1)));
        assert!(set.includes(5) && !set.includes(0));
        assert_eq!(set.to_string(), "process set 3 (ranks 1, 4, 5)");
        let error = set.now().check_peer("root", 2).unwrap_err().to_string();
        assert!(error.contains("root, rank 2, is not a member of process set 3"), "{error}");
    }

    #[test]
    fn only_members_can_use_an_existing_set() {
        let mut sets = ProcessSets::new(4, 2);
        let mine = set_of(1, [0, 2].into(), 2);
        let theirs = set_of(2, [0, 1].into(), 2);
        assert!(sets.of_member(Some(&mine)).is_err());
        let known = |id| KnownSet { epoch: 1, id, workers: vec![0, 2] };
        assert!(sets.add(mine.clone(), known(1)) && sets.add(theirs.clone(), known(2)));
        assert!(!sets.add(mine.clone(), known(1)) && !sets.add(sets.all(), known(0)));
        assert_eq!(sets.of_member(Some(&mine)).unwrap(), mine.now());
        assert_eq!(*sets.of_member(None).unwrap().ranks, [0, 1, 2, 3]);
        let error = sets.of_member(Some(&theirs)).unwrap_err().to_string();
        assert!(error.contains("not a member of process set 2"), "{error}");
        sets.remove(ProcessSetId(1));
        let error = sets.of_member(Some(&mine)).unwrap_err().to_string();
        assert!(error.contains("was removed"), "{error}");
    }
}
