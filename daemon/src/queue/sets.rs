//! The process sets from this node's point of view: members, joined ranks, ranks that have left.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use gradwire_proto::ProcessSetId;

use crate::model::{members::Members, tensor::Ticket};

/// Why a rank may not submit a tensor in a process set. The job goes on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("process set {set} does not exist: it was never created, or it has been removed")]
    NoSet { set: ProcessSetId },
    #[error("this rank is not a member of process set {set}")]
    NoMember { set: ProcessSetId },
    #[error("this rank has joined process set {set}, but not all others have joined yet")]
    Joined { set: ProcessSetId },
    #[error("it was submitted a second time while the first submission waits for its turn")]
    Twice,
}

impl Refusal {
    pub(crate) fn hint(&self) -> &'static str {
        match self {
            Self::NoSet { .. } => "create process sets with a collective call of all ranks",
            Self::NoMember { .. } => "submit only to process sets that include this rank",
            Self::Joined { .. } => "wait for the join before submitting anything else there",
            Self::Twice => "wait for a tensor before submitting its name again",
        }
    }
}

#[derive(Debug)]
pub(super) struct ProcessSet {
    pub(super) members: Arc<Members>,
    /// The local ranks that have joined, and the tickets of their joins.
    pub(super) joined: BTreeMap<u32, u64>,
}

/// All process sets, and the local ranks that have left the job, in the order in which they left.
#[derive(Debug)]
pub(super) struct Sets {
    by_id: HashMap<ProcessSetId, ProcessSet>,
    pub(super) left: Vec<u32>,
}

impl Sets {
    pub(super) fn new(everybody: Arc<Members>) -> Self {
        let mut sets = Self { by_id: HashMap::new(), left: Vec::new() };
        sets.create(ProcessSetId::GLOBAL, everybody);
        sets
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn create(&mut self, set: ProcessSetId, members: Arc<Members>) -> bool {
        let state = ProcessSet { members, joined: BTreeMap::new() };
        let is_new = !self.by_id.contains_key(&set);
        if is_new {
            self.by_id.insert(set, state);
        }
        is_new
    }

    /// Removes a set and returns the joins in it; `None` if it does not exist or can't be removed.
    pub(super) fn remove(&mut self, set: ProcessSetId) -> Option<Vec<Ticket>> {
        if set == ProcessSetId::GLOBAL || !self.by_id.contains_key(&set) {
            return None;
        }
        let joined = self.unjoin(set);
        self.by_id.remove(&set);
        Some(joined)
    }

    /// A set that a local rank has joined while others have not.
    pub(super) fn joined_by(&self, local_rank: u32) -> Option<ProcessSetId> {
        let joined =
            |(_, state): &(&ProcessSetId, &ProcessSet)| state.joined.contains_key(&local_rank);
        self.by_id.iter().find(joined).map(|(set, _)| *set)
    }

    /// The sets that a local rank has joined, and the tickets of the joins.
    pub(super) fn joins_of(&self, local_rank: u32) -> Vec<(ProcessSetId, u64)> {
        let join = |(set, state): (&ProcessSetId, &ProcessSet)| {
            state.joined.get(&local_rank).map(|ticket| (*set, *ticket))
        };
        self.by_id.iter().filter_map(join).collect()
    }

    pub(super) fn get(&self, set: ProcessSetId) -> Option<&ProcessSet> {
        self.by_id.get(&set)
    }

    pub(super) fn has(&self, set: ProcessSetId, local_rank: u32) -> bool {
        self.get(set).is_some_and(|state| state.members.has_local(local_rank))
    }

    /// A process set in which a local rank may submit a tensor now.
    pub(super) fn admit(&self, set: ProcessSetId, local_rank: u32) -> Result<&ProcessSet, Refusal> {
        let state = self.get(set).ok_or(Refusal::NoSet { set })?;
        if !state.members.has_local(local_rank) {
            return Err(Refusal::NoMember { set });
        }
        if state.joined.contains_key(&local_rank) {
            return Err(Refusal::Joined { set });
        }
        Ok(state)
    }

    /// The first local member that has left the job without joining. Others may have left because
    /// of that.
    pub(super) fn first_left(&self, state: &ProcessSet) -> Option<u32> {
        let is_missed = |l: &u32| state.members.has_local(*l) && !state.joined.contains_key(l);
        self.left.iter().copied().find(is_missed)
    }

    pub(super) fn join(&mut self, set: ProcessSetId, answer: Ticket) -> Option<&ProcessSet> {
        let state = self.by_id.get_mut(&set)?;
        state.joined.insert(answer.local_rank, answer.ticket);
        Some(state)
    }

    /// Ends all joins and returns them; `None` if a local member has not joined.
    pub(super) fn resume(&mut self, set: ProcessSetId) -> Option<Vec<Ticket>> {
        let state = self.get(set)?;
        let all = state.members.here.iter().all(|local| state.joined.contains_key(local));
        all.then(|| self.unjoin(set))
    }

    /// Ends the joins of this node's ranks and returns them.
    pub(super) fn unjoin(&mut self, set: ProcessSetId) -> Vec<Ticket> {
        let state = self.by_id.get_mut(&set);
        let joined = state.map(|state| std::mem::take(&mut state.joined)).unwrap_or_default();
        let answer = |(local_rank, ticket)| Ticket { local_rank, ticket };
        joined.into_iter().map(answer).collect()
    }
}
