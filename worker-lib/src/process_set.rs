//! Groups of ranks with their own operations.

use std::{collections::HashMap, fmt, sync::Arc};

use gradwire_proto::ProcessSetId;

use crate::error::{GradwireError, Result};

/// A group of ranks: all ranks, or a set from [`crate::Session::add_process_set`]. Cheap to clone.
/// Ranks keep their numbers in it: a root is always a rank of the whole job.
#[derive(Clone, PartialEq, Eq)]
pub struct ProcessSet {
    id: u32,
    ranks: Arc<[u32]>,
    position: Option<usize>,
}

impl ProcessSet {
    /// A set of ranks, which are ascending. `rank` is this rank.
    pub(crate) fn new(id: ProcessSetId, ranks: Arc<[u32]>, rank: u32) -> Self {
        let position = ranks.binary_search(&rank).ok();
        Self { id: id.0, ranks, position }
    }

    /// Its number; 0 for all ranks.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Its members, ascending.
    pub fn ranks(&self) -> &[u32] {
        &self.ranks
    }

    /// The number of its members.
    pub fn len(&self) -> usize {
        self.ranks.len()
    }

    /// Always false: a process set has members.
    pub fn is_empty(&self) -> bool {
        self.ranks.is_empty()
    }

    /// Whether a rank is a member.
    pub fn includes(&self, rank: u32) -> bool {
        self.ranks.binary_search(&rank).is_ok()
    }

    /// This rank's index among the members; `None` if it is not a member.
    pub fn position(&self) -> Option<usize> {
        self.position
    }

    pub(crate) fn number(&self) -> ProcessSetId {
        ProcessSetId(self.id)
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

impl fmt::Display for ProcessSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 16;
        let some: Vec<String> = self.ranks.iter().take(SHOWN).map(ToString::to_string).collect();
        let more = if self.len() > SHOWN { ", …" } else { "" };
        write!(f, "process set {} (ranks {}{more})", self.id, some.join(", "))
    }
}

impl fmt::Debug for ProcessSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The process sets of a session.
#[derive(Debug)]
pub(crate) struct ProcessSets {
    all: ProcessSet,
    others: HashMap<u32, ProcessSet>,
}

impl ProcessSets {
    /// The initial sets of rank `rank` in a job of `size` ranks: only the set of all ranks.
    pub(crate) fn new(size: u32, rank: u32) -> Self {
        let all = ProcessSet::new(ProcessSetId::GLOBAL, (0..size).collect(), rank);
        Self { all, others: HashMap::new() }
    }

    /// The set of all ranks.
    pub(crate) fn all(&self) -> ProcessSet {
        self.all.clone()
    }

    /// Adds a new set; false if its number is taken.
    pub(crate) fn add(&mut self, set: ProcessSet) -> bool {
        set.id != 0 && self.others.insert(set.id, set).is_none()
    }

    /// Forgets a set.
    pub(crate) fn remove(&mut self, set: &ProcessSet) {
        self.others.remove(&set.id);
    }

    /// Refuses a set that does not exist.
    pub(crate) fn check(&self, set: &ProcessSet) -> Result<()> {
        if *set == self.all || self.others.get(&set.id) == Some(set) {
            return Ok(());
        }
        let text = format!(
            "{set} does not exist in this session: it was removed, or is another session's"
        );
        Err(GradwireError::Invalid(text))
    }

    /// The set of an operation: all ranks if none was given.
    pub(crate) fn of_member(&self, set: Option<ProcessSet>) -> Result<ProcessSet> {
        let Some(set) = set else { return Ok(self.all.clone()) };
        self.check(&set)?;
        if set.position.is_none() {
            let text = format!(
                "this rank is not a member of {set}: only members can use it in an operation"
            );
            return Err(GradwireError::Invalid(text));
        }
        Ok(set)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_knows_its_members() {
        let set = ProcessSet::new(ProcessSetId(3), [1, 4, 5].into(), 4);
        assert_eq!((set.id(), set.len(), set.position()), (3, 3, Some(1)));
        assert!(set.includes(5) && !set.includes(0));
        assert_eq!(set.to_string(), "process set 3 (ranks 1, 4, 5)");
        let error = set.check_peer("root", 2).unwrap_err().to_string();
        assert!(error.contains("root, rank 2, is not a member of process set 3"), "{error}");
    }

    #[test]
    fn only_members_can_use_an_existing_set() {
        let mut sets = ProcessSets::new(4, 2);
        let mine = ProcessSet::new(ProcessSetId(1), [0, 2].into(), 2);
        let theirs = ProcessSet::new(ProcessSetId(2), [0, 1].into(), 2);
        assert!(sets.of_member(Some(mine.clone())).is_err());
        assert!(sets.add(mine.clone()) && sets.add(theirs.clone()) && !sets.add(mine.clone()));
        assert!(!sets.add(sets.all()));
        assert_eq!(sets.of_member(Some(mine.clone())).unwrap(), mine);
        assert_eq!(sets.of_member(None).unwrap().ranks(), [0, 1, 2, 3]);
        let error = sets.of_member(Some(theirs)).unwrap_err().to_string();
        assert!(error.contains("not a member of process set 2"), "{error}");
        sets.remove(&mine);
        let error = sets.of_member(Some(mine)).unwrap_err().to_string();
        assert!(error.contains("was removed"), "{error}");
    }
}
