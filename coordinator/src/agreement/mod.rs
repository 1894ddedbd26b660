//! Collects the announcements of nodes, checks that all ranks request the same, and decides what
//! follows.
//!
//! - `ids`: short ids for tensors; `tensor`: one name and what was submitted for it
//! - `check`: the checks of an announcement; `announcement`: its classification
//! - `evicted`: ids that were evicted; `once`: names that were used only once
//! - `disagreement`: the table of what each rank requested; `settle`: the result for a tensor that
//!   all nodes have announced
//! - `table`: all known tensors
//! - `waits`: how long tensors waited for the last of their ranks
//! - `sets`: the process sets, and the ranks that have joined them
//!
//! [`Agreement`] owns the table and the sets. What all ranks agree on becomes a [`Round`], which
//! dispatch sends out. Everything else becomes part of the next answer.

mod announcement;
mod check;
mod disagreement;
mod evicted;
mod ids;
mod once;
mod sets;
mod settle;
mod table;
mod tensor;
mod waits;

use std::{sync::Arc, time::Duration};

use gradwire_proto::{
    Collective, Failure, FailureKind, NodeId, ProcessSetId, Rank, Request, convert::TensorRef, pb,
};

use self::{
    sets::{ProcessSets, refuse},
    table::{Announced, ReadyTable, Settled},
    waits::Waiting,
};
use crate::{
    membership::members::Members,
    model::{
        EngineConfig,
        command::{Execute, SetCreated, SetRemoved},
        event::Announcement,
        process_set::ProcessSet,
        round::{Progress, Round, Slot},
        status::{MAX_SETS, numbers},
        text,
        violation::Violation,
    },
};

/// The most tensors that an error names.
const NAMED_TENSORS: usize = 3;

/// The node whose message may complete tensors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Last {
    pub(crate) node: NodeId,
    /// If known: the node's last rank to submit one of them, and how long the node's first rank
    /// had waited by then.
    pub(crate) rank: Option<(Rank, Duration)>,
}

/// The failure of a tensor that is abandoned because these ranks have not submitted it (TELL).
fn abandoned(id: ProcessSetId, silent: &[Rank]) -> Failure {
    let who = text::named_ranks(silent);
    let what = format!("process set {id} was abandoned before {who} submitted this tensor");
    Failure::new(FailureKind::Cancelled, what)
        .hint("make sure that every rank makes the same calls, the same number of times")
}

/// The tensors that ranks submit, until all agree on them.
#[derive(Debug)]
pub(crate) struct Agreement {
    pub(crate) sets: ProcessSets,
    pub(crate) table: ReadyTable,
    /// What the next answer contains besides operations.
    answer: Execute,
    /// How long tensors waited for the last rank and node, since this was last taken.
    pub(crate) waiting: Waiting,
    /// The number of disagreements, since this was last taken.
    pub(crate) disagreements: u64,
}

impl Agreement {
    /// The agreement for the nodes of a world. Without nodes, it has no process sets.
    pub(crate) fn new(members: &Members, config: &EngineConfig) -> Self {
        let all = (0..members.ranks()).map(Rank).collect();
        let world = ProcessSet::new(all, |rank| members.node_of(rank));
        let sets =
            if members.len() == 0 { ProcessSets::default() } else { ProcessSets::new(world) };
        let (ids, tensors) = (config.max_tensors as usize, config.max_pending as usize);
        Self {
            sets,
            table: ReadyTable::new(members.len(), ids, tensors, config.compression),
            answer: Execute::default(),
            waiting: Waiting::default(),
            disagreements: 0,
        }
    }

    /// The process set and the name of the tensor in a slot, and the ranks that it waits for.
    pub(crate) fn missing(&self, slot: Slot) -> Option<(ProcessSetId, &str, Vec<Rank>)> {
        let tensor = self.table.get(slot)?;
        let set = self.sets.get(tensor.set)?;
        Some((tensor.set, tensor.name.as_str(), tensor.missing(set)))
    }

    /// The ranks that have submitted a tensor. Joined ranks have not.
    pub(crate) fn waiting(&self, slot: Slot) -> Option<(ProcessSetId, &str, Vec<Rank>)> {
        let tensor = self.table.get(slot)?;
        let set = self.sets.get(tensor.set)?;
        Some((tensor.set, tensor.name.as_str(), tensor.submitted(set)))
    }

    /// Whether some rank waits for a tensor: not all of those that have submitted it have left.
    pub(crate) fn is_awaited(&self, slot: Slot, members: &Members) -> bool {
        if members.iter().all(|(_, member)| member.left.is_empty()) {
            return true; // without a list of ranks
        }
        let Some(tensor) = self.table.get(slot) else { return false };
        let Some(set) = self.sets.get(tensor.set) else { return false };
        let ranks = tensor.submitted(set);
        let has_left = |rank: &Rank| {
            let member = set.node_of(*rank).and_then(|node| members.get(node));
            member.is_some_and(|member| member.left.contains_key(rank))
        };
        ranks.is_empty() || !ranks.iter().all(has_left)
    }

    /// The name of the tensor in a slot.
    pub(crate) fn name(&self, slot: Slot) -> Option<&str> {
        self.table.get(slot).map(|tensor| tensor.name.as_str())
    }

    /// The names of the tensors that wait for a rank.
    pub(crate) fn pending_names(&self) -> impl Iterator<Item = &str> {
        self.table.pending().map(|(_, _, tensor)| tensor.name.as_str())
    }

    /// The first process sets, for the status.
    pub(crate) fn set_status(&self) -> Vec<pb::ProcessSetStatus> {
        let status = self.sets.iter().take(MAX_SETS).map(|(id, set)| pb::ProcessSetStatus {
            process_set: id.0,
            ranks: numbers(set.members()),
            joined_ranks: numbers(set.joined()),
        });
        status.collect()
    }

    /// Handles a node's announcement of a tensor. With the same message, ranks join the sets in
    /// `joins`. `progress` returns the node's progress with a tensor of a set. Returns the tensor
    /// if it can be sent out now.
    pub(crate) fn announce(
        &mut self,
        from: Last,
        announcement: Announcement,
        joins: &[ProcessSetId],
        now: Duration,
        members: &Members,
        progress: impl Fn(Slot, &ProcessSet) -> Progress,
    ) -> Result<Option<Arc<Round>>, Violation> {
        let id = announcement.set;
        if !self.sets.accepts(&announcement)? {
            return Ok(None);
        }
        let Some(set) = self.sets.get(id) else { return Ok(None) };
        let announced =
            self.table.announce(from.node, announcement, set, now, |slot| progress(slot, set))?;
        match announced {
            Announced::Nothing => Ok(None),
            // The rest of the message may concern the same tensor.
            Announced::Complete(_) if joins.contains(&id) => Ok(None),
            Announced::Complete(slot) => Ok(self.complete(slot, id, from, now)),
            Announced::Waiting(slot) => {
                if members.has_departures() {
                    self.fail_if_left_behind(slot, members);
                }
                Ok(None)
            }
        }
    }

    /// Completes the tensors that no longer wait for any rank, after ranks of a set have joined
    /// with a message of this node. Once all ranks have joined, the join itself completes last.
    pub(crate) fn complete_without_joined(
        &mut self,
        id: ProcessSetId,
        node: NodeId,
        now: Duration,
    ) -> Vec<Arc<Round>> {
        let Some(set) = self.sets.get(id) else { return Vec::new() };
        let of_set = self.table.pending().filter(|(_, _, tensor)| tensor.set == id);
        let complete = of_set.filter(|(_, _, tensor)| tensor.is_complete(set));
        let mut slots: Vec<(bool, Duration, Slot)> =
            complete.map(|(slot, since, tensor)| (tensor.kinds.has_joins(), since, slot)).collect();
        slots.sort_unstable();
        let node = Last { node, rank: None };
        slots.into_iter().filter_map(|(.., slot)| self.complete(slot, id, node, now)).collect()
    }

    /// Settles a tensor that all nodes have announced, with `last` as the last node. Returns it if
    /// it can be sent out.
    fn complete(
        &mut self,
        slot: Slot,
        id: ProcessSetId,
        last: Last,
        now: Duration,
    ) -> Option<Arc<Round>> {
        let set = self.sets.get(id)?;
        let tensor = self.table.get(slot)?;
        let (joins, submitted) = (tensor.kinds.has_joins(), tensor.submitted);
        match self.table.settle(slot, set, now)? {
            Settled::Runs(round) => {
                self.waiting.node(last.node, round.since, now);
                let member = |&(rank, _): &(Rank, _)| set.contains(rank);
                if let Some((rank, _)) = last.rank.filter(member) {
                    self.waiting.rank(rank, submitted, now);
                }
                return Some(round);
            }
            Settled::Asks { request, tensor } => self.carry_out(slot, id, &request, tensor),
            Settled::Fails(failed) => {
                let disagreement = failed.failure.kind == FailureKind::Disagreement;
                self.disagreements += u64::from(disagreement);
                let why = failed.failure.clone();
                self.answer.failures.push(failed);
                if joins {
                    self.fail_join(id, &why);
                }
            }
        }
        None
    }

    /// Carries out a request that is not an operation, once all ranks have made it.
    fn carry_out(&mut self, slot: Slot, id: ProcessSetId, request: &Request, tensor: TensorRef) {
        let done = match request.collective {
            Collective::AddProcessSet => self.add_set(request, tensor),
            Collective::RemoveProcessSet => self.remove_set(request, tensor),
            _ => {
                self.sets.return_later(id);
                Ok(())
            }
        };
        match done {
            Ok(()) => self.table.close(slot),
            Err(failure) => {
                let name = self.name(slot).unwrap_or_default().to_owned();
                self.fail_tensor(slot, failure.tensor(name));
            }
        }
    }

    fn add_set(&mut self, request: &Request, tensor: TensorRef) -> Result<(), Failure> {
        let ranks = request.list.iter().map(|&rank| u32::try_from(rank).unwrap_or(u32::MAX));
        let ranks: Vec<Rank> = ranks.map(Rank).collect();
        let set = self.sets.add(&ranks)?;
        self.answer.sets_created.push(SetCreated { set, ranks, tensor });
        Ok(())
    }

    fn remove_set(&mut self, request: &Request, tensor: TensorRef) -> Result<(), Failure> {
        let number = request.list.first().copied().unwrap_or_default();
        let (id, set) = self.sets.removable(number)?;
        let wait = "wait for all operations in a process set before you remove it";
        if !set.joined().is_empty() {
            let joined: Vec<Rank> = set.joined().iter().copied().collect();
            let who = text::named_ranks(&joined);
            let what = format!("a join in process set {id} is not done; joined so far: {who}");
            return Err(refuse(what, wait));
        }
        let of_set = self.table.pending().filter(|(_, _, tensor)| tensor.set == id);
        let waiting: Vec<(Slot, &str, Vec<Rank>)> =
            of_set.map(|(slot, _, t)| (slot, t.name.as_str(), t.silent(set))).collect();
        if request.list.get(1) == Some(&Request::GIVE_UP) {
            let failed: Vec<(Slot, Failure)> = waiting
                .into_iter()
                .map(|(slot, name, silent)| (slot, abandoned(id, &silent).tensor(name)))
                .collect();
            for (slot, failure) in failed {
                self.answer.failures.extend(self.table.fail(slot, failure));
            }
        } else if !waiting.is_empty() {
            let names = text::some_names(waiting.iter().map(|(_, name, _)| *name), NAMED_TENSORS);
            let what = format!("not all ranks of process set {id} have submitted {names}");
            return Err(refuse(what, wait));
        }
        self.sets.remove_later(id, tensor);
        Ok(())
    }

    /// Fails the tensors that wait for a rank that has left.
    pub(crate) fn fail_left_behind(&mut self, members: &Members) {
        let waiting: Vec<Slot> = self.table.pending().map(|(slot, ..)| slot).collect();
        waiting.into_iter().for_each(|slot| self.fail_if_left_behind(slot, members));
    }

    /// Fails a tensor if it waits for a rank that has left.
    fn fail_if_left_behind(&mut self, slot: Slot, members: &Members) {
        let Some(tensor) = self.table.get(slot) else { return };
        let Some(set) = self.sets.get(tensor.set) else { return };
        let Some((node, rank)) = tensor.left_behind(set, members) else { return };
        let host = members.host(node);
        let absent = members.get(node).is_some_and(|member| member.absent.contains(&rank));
        let failure = if absent { Failure::never_came(rank) } else { Failure::left(rank) };
        let failure = failure.host(host).tensor(tensor.name.as_str());
        self.fail_tensor(slot, failure);
    }

    /// Fails a tensor. If it is a join, the join is cancelled for all ranks, and the tensors that
    /// would have run without the joined ranks fail, too (TELL).
    fn fail_tensor(&mut self, slot: Slot, failure: Failure) {
        let Some(tensor) = self.table.get(slot) else { return };
        let (id, joins) = (tensor.set, tensor.kinds.has_joins());
        self.answer.failures.extend(self.table.fail(slot, failure.clone()));
        if joins {
            self.fail_join(id, &failure);
        }
    }

    /// Cancels a join that has failed.
    fn fail_join(&mut self, id: ProcessSetId, why: &Failure) {
        let Some(set) = self.sets.get(id) else { return };
        let of_set = self.table.pending().filter(|(_, _, tensor)| tensor.set == id);
        let without: Vec<_> = of_set
            .filter_map(|(slot, _, tensor)| {
                let silent = tensor.silent(set);
                let joined = silent.into_iter().filter(|rank| set.joined().contains(rank));
                let joined: Vec<Rank> = joined.collect();
                let name = tensor.name.as_str().to_owned();
                (!joined.is_empty()).then_some((slot, name, joined))
            })
            .collect();
        self.sets.cancel_join(id);
        for (slot, name, joined) in without {
            let who = text::named_ranks(&joined);
            let what = format!(
                "{}; so the join failed, and this tensor can't run without {who}",
                why.what
            );
            let mut failure = why.clone().tensor(name);
            failure.what = what;
            self.answer.failures.extend(self.table.fail(slot, failure));
        }
    }

    /// What the next answer contains besides operations and ids.
    pub(crate) fn take_answer(&mut self) -> Execute {
        let idle = |id| self.table.in_progress(id).next().is_none();
        let joined = self.sets.take_joined(idle);
        let removed = self.sets.take_removed(idle);
        self.answer.joined.extend(joined);
        for (set, tensor) in removed {
            self.table.forget_set(set);
            self.answer.sets_removed.push(SetRemoved { set, tensor });
        }
        std::mem::take(&mut self.answer)
    }
}
