//! The process sets of the job: which exist, which are added and removed, and which of their ranks
//! have joined.

use std::collections::{BTreeMap, BTreeSet};

use gradwire_proto::{
    Collective, Failure, FailureKind, NodeId, ProcessSetId, Rank, convert::TensorRef,
};

use crate::model::{
    command::Joined, event::Announcement, process_set::ProcessSet, text, violation::Violation,
};

/// The most process sets besides the global one (BOUND).
const MAX_SETS: usize = 4096;

pub(super) fn refuse(what: impl Into<String>, hint: &str) -> Failure {
    Failure::new(FailureKind::Invalid, what).hint(hint)
}

/// The process sets by number.
#[derive(Debug, Default)]
pub(crate) struct ProcessSets {
    all: BTreeMap<ProcessSetId, ProcessSet>,
    /// The id of the set that was added last; no id is used again.
    last: u32,
    /// Sets in which all ranks have joined, but an earlier operation is not done.
    returning: BTreeSet<ProcessSetId>,
    /// Sets that will be removed once all their operations are done, and the removal requests.
    removing: BTreeMap<ProcessSetId, TensorRef>,
}

impl ProcessSets {
    /// The process sets of a new world: only the global one.
    pub(super) fn new(world: ProcessSet) -> Self {
        Self { all: BTreeMap::from([(ProcessSetId::GLOBAL, world)]), ..Self::default() }
    }

    /// A set by its id.
    pub(crate) fn get(&self, id: ProcessSetId) -> Option<&ProcessSet> {
        self.all.get(&id)
    }

    /// All sets, the global one first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (ProcessSetId, &ProcessSet)> {
        self.all.iter().map(|(&id, set)| (id, set))
    }

    /// How many sets there are.
    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether a rank has joined any set and waits for the others.
    pub(crate) fn has_joined(&self, rank: Rank) -> bool {
        self.all.values().any(|set| set.joined().contains(&rank))
    }

    /// Whether a set has been removed, or will be.
    pub(super) fn is_gone(&self, id: ProcessSetId) -> bool {
        let was_removed = (1..=self.last).contains(&id.0) && !self.all.contains_key(&id);
        was_removed || self.removing.contains_key(&id)
    }

    /// Notes the ranks that join. Call this before the rest of a message is handled: the message
    /// may contain announcements that are possible only because a rank has joined. Returns the sets
    /// in which ranks join.
    pub(crate) fn note_joins(
        &mut self,
        node: NodeId,
        announcements: &[Announcement],
    ) -> Vec<ProcessSetId> {
        let mut concerned = Vec::new();
        for announcement in announcements {
            let Some(set) = self.all.get_mut(&announcement.set) else { continue };
            for submitted in &announcement.submitted {
                if submitted.request.collective != Collective::Join || submitted.duplicate {
                    continue;
                }
                for rank in &submitted.ranks {
                    // A rank of another node is refused with the announcement (TRUST).
                    if set.local(node).binary_search(rank).is_ok() {
                        set.join(*rank);
                    }
                }
                concerned.push(announcement.set);
            }
        }
        concerned.sort_unstable();
        concerned.dedup();
        concerned
    }

    /// Whether announcements for a set count (TRUST).
    pub(super) fn accepts(&self, announcement: &Announcement) -> Result<bool, Violation> {
        let id = announcement.set;
        if self.is_gone(id) {
            // The node has not read of the removal yet. It notifies its own ranks when it has.
            return Ok(false);
        }
        if !self.all.contains_key(&id) {
            return Err(Violation::Protocol(format!(
                "announced a tensor of the unknown process set {id}"
            )));
        }
        if !self.returning.contains(&id) {
            return Ok(true);
        }
        if announcement.submitted.iter().all(|submitted| submitted.duplicate) {
            return Ok(false);
        }
        Err(Violation::Protocol(format!(
            "announced a tensor of process set {id} before its ranks returned from their join"
        )))
    }

    /// Notes that all ranks of a set have joined.
    pub(super) fn return_later(&mut self, id: ProcessSetId) {
        self.returning.insert(id);
    }

    /// Cancels the join of a set.
    pub(super) fn cancel_join(&mut self, id: ProcessSetId) {
        if let Some(set) = self.all.get_mut(&id) {
            set.all_return();
        }
    }

    /// The sets in which all ranks take part again. `is_idle` returns whether nothing in a set is
    /// in flight, so a returning rank finds no unfinished tensor in which it takes no part.
    pub(super) fn take_joined(&mut self, is_idle: impl Fn(ProcessSetId) -> bool) -> Vec<Joined> {
        let ready = std::mem::take(&mut self.returning).into_iter();
        let (ready, later): (BTreeSet<_>, BTreeSet<_>) = ready.partition(|id| is_idle(*id));
        self.returning = later;
        let back = |id: ProcessSetId| {
            let set = self.all.get_mut(&id)?;
            set.all_return();
            Some(Joined { set: id, last: set.last_joined() })
        };
        ready.into_iter().filter_map(back).collect()
    }

    /// Returns the sets that can be removed because nothing in them is in flight, with the requests
    /// for that.
    pub(super) fn take_removed(
        &mut self,
        is_idle: impl Fn(ProcessSetId) -> bool,
    ) -> Vec<(ProcessSetId, TensorRef)> {
        let (gone, later): (BTreeMap<_, _>, BTreeMap<_, _>) =
            std::mem::take(&mut self.removing).into_iter().partition(|(id, _)| is_idle(*id));
        self.removing = later;
        self.all.retain(|id, _| !gone.contains_key(id));
        gone.into_iter().collect()
    }

    /// Adds a set of these ranks, ascending. Returns its id.
    pub(super) fn add(&mut self, ranks: &[Rank]) -> Result<ProcessSetId, Failure> {
        let world = self.all.get(&ProcessSetId::GLOBAL);
        let size = world.map_or(0, |world| world.members().len());
        if let Some(stranger) = ranks.iter().find(|rank| rank.0 as usize >= size) {
            let size = text::count(size, "rank");
            return Err(refuse(
                format!("rank {stranger} is not in the job, which has {size}"),
                "use the ranks of the whole job, numbered from 0, for process sets",
            ));
        }
        // One of them is the global one.
        if self.all.len() > MAX_SETS {
            return Err(refuse(
                format!("the job already has {MAX_SETS} process sets"),
                "remove sets that are not needed any more, and create sets once instead of in \
                 every step",
            ));
        }
        let node_of = |rank| world.and_then(|world| world.node_of(rank)).unwrap_or_default();
        let set = ProcessSet::new(ranks.to_vec(), node_of);
        self.last += 1;
        let id = ProcessSetId(self.last);
        self.all.insert(id, set);
        Ok(id)
    }

    /// The set with this id, if it can be removed.
    pub(super) fn removable(&self, number: u64) -> Result<(ProcessSetId, &ProcessSet), Failure> {
        let id = u32::try_from(number).map(ProcessSetId).unwrap_or_default();
        if number == 0 {
            return Err(refuse("process set 0, which has all ranks, can't be removed", ""));
        }
        let gone = self.is_gone(id);
        let Some(set) = self.all.get(&id).filter(|_| !gone) else {
            let why = if gone { "has already been removed" } else { "does not exist" };
            return Err(refuse(format!("process set {number} {why}"), "remove each set once"));
        };
        Ok((id, set))
    }

    /// Removes a set once nothing in it is in flight. `tensor` is the removal request.
    pub(super) fn remove_later(&mut self, id: ProcessSetId, tensor: TensorRef) {
        self.removing.insert(id, tensor);
    }
}
