//! Process sets come and go by collective calls of all ranks, and ranks that have run out of data
//! are waited for no longer.

use std::time::Duration;

use gradwire_proto::{
    Collective, Failure, FailureKind, NodeId, ProcessSetId, Rank, Request, convert::TensorRef,
};

use super::{
    Engine, Output,
    command::{Joined, SetCreated, SetRemoved},
    event::Announcement,
    ready_table::{Slot, Violation},
    text,
};

/// The most process sets beside the one of all ranks (BOUND).
const MAX_SETS: usize = 4096;

/// How many tensors a refusal names.
const NAMED_TENSORS: usize = 3;

fn refuse(what: impl Into<String>, hint: &str) -> Failure {
    Failure::new(FailureKind::Invalid, what).hint(hint)
}

/// Why nobody waits any more for what these ranks have not submitted (TELL).
fn given_up(id: ProcessSetId, silent: &[Rank]) -> Failure {
    let who = text::named_ranks(silent);
    let what = format!("process set {id} was given up before {who} had submitted it");
    Failure::new(FailureKind::Cancelled, what)
        .hint("make sure that every rank makes the same calls, the same number of times")
}

impl Engine {
    /// Notes who joins, before anything else of a message is looked at: what a node can announce
    /// because its rank has joined may come together with that. Gives the sets that are concerned.
    pub(super) fn note_joins(
        &mut self,
        node: NodeId,
        announcements: &[Announcement],
    ) -> Vec<ProcessSetId> {
        let mut concerned = Vec::new();
        for announcement in announcements {
            let Some(set) = self.sets.get_mut(&announcement.set) else { continue };
            for submitted in &announcement.submitted {
                if submitted.request.collective != Collective::Join || submitted.duplicate {
                    continue;
                }
                for rank in &submitted.ranks {
                    // Whose rank it is not is told when the announcement is taken (TRUST).
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
    pub(super) fn heeds(&self, announcement: &Announcement) -> Result<bool, Violation> {
        let id = announcement.set;
        if self.was_removed(id) || self.removing.contains_key(&id) {
            // The node has not read that yet; it tells its own ranks when it does.
            return Ok(false);
        }
        if !self.sets.contains_key(&id) {
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
            "announced a tensor of process set {id}, where all have joined and were not told so yet"
        )))
    }

    /// What waits for nobody any more now that ranks of a set have joined goes out; once all have,
    /// the join itself is done, after everything else.
    pub(super) fn complete_without_joined(
        &mut self,
        id: ProcessSetId,
        node: NodeId,
        now: Duration,
        out: &mut Output,
    ) {
        let Some(set) = self.sets.get(&id) else { return };
        let of_set = self.table.pending().filter(|(_, _, tensor)| tensor.set == id);
        let complete = of_set.filter(|(_, _, tensor)| tensor.is_complete(set));
        let mut slots: Vec<(bool, Duration, Slot)> = complete
            .map(|(slot, since, tensor)| (tensor.mixture.has_joins(), since, slot))
            .collect();
        slots.sort_unstable();
        for (_, _, slot) in slots {
            self.complete(slot, id, node, now, out);
        }
    }

    /// All ranks have asked for something that is no operation.
    pub(super) fn asked(
        &mut self,
        slot: Slot,
        id: ProcessSetId,
        request: &Request,
        tensor: TensorRef,
    ) {
        let done = match request.collective {
            Collective::AddProcessSet => self.add_set(request, tensor),
            Collective::RemoveProcessSet => self.remove_set(request, tensor),
            _ => {
                self.returning.insert(id);
                Ok(())
            }
        };
        match done {
            Ok(()) => self.table.close(slot),
            Err(failure) => {
                let name = self.table.get(slot).map(|tensor| tensor.name.clone());
                let name = name.as_ref().map_or("", |name| name.as_str());
                self.fail_tensor(slot, failure.tensor(name));
            }
        }
    }

    /// Finishes what waits for the end of all that is under way in a process set. A join is done when
    /// everything before it is: whoever comes back finds no tensor half done that it took no part in.
    /// And nothing is in flight in a set that goes.
    pub(super) fn finish_sets(&mut self) {
        for id in std::mem::take(&mut self.returning) {
            let Some(set) = self.sets.get_mut(&id) else { continue };
            if self.table.in_progress(id).next().is_some() {
                self.returning.insert(id);
                continue;
            }
            self.answer.joined.push(Joined { set: id, last: set.last_joined() });
            set.all_return();
        }
        for (id, tensor) in std::mem::take(&mut self.removing) {
            if self.table.in_progress(id).next().is_some() {
                self.removing.insert(id, tensor);
                continue;
            }
            self.sets.remove(&id);
            self.table.forget_set(id);
            self.answer.sets_removed.push(SetRemoved { set: id, tensor });
        }
    }

    fn add_set(&mut self, request: &Request, tensor: TensorRef) -> Result<(), Failure> {
        let world = self.members.ranks();
        let ranks = request.list.iter().map(|&rank| u32::try_from(rank).unwrap_or(u32::MAX));
        let ranks: Vec<Rank> = ranks.map(Rank).collect();
        if let Some(stranger) = ranks.iter().find(|rank| rank.0 >= world) {
            return Err(refuse(
                format!("rank {stranger} is not in the job, which has {world}"),
                "the ranks of a process set are numbered over the whole job, from 0",
            ));
        }
        // The set of all ranks is one of them.
        if self.sets.len() > MAX_SETS {
            return Err(refuse(
                format!("there are {MAX_SETS} process sets already"),
                "remove those that are not needed any more, and make sets once instead of in \
                 every step",
            ));
        }
        self.last_set += 1;
        let id = ProcessSetId(self.last_set);
        self.sets.insert(id, self.members.set(ranks.clone()));
        self.answer.sets_created.push(SetCreated { set: id, ranks, tensor });
        Ok(())
    }

    fn remove_set(&mut self, request: &Request, tensor: TensorRef) -> Result<(), Failure> {
        let number = request.list.first().copied().unwrap_or_default();
        let id = u32::try_from(number).map(ProcessSetId).unwrap_or_default();
        if number == 0 {
            return Err(refuse("the process set 0 of all ranks can't be removed", ""));
        }
        let removed = self.was_removed(id) || self.removing.contains_key(&id);
        let Some(set) = self.sets.get(&id).filter(|_| !removed) else {
            let why = if removed { "has been removed already" } else { "does not exist" };
            return Err(refuse(format!("process set {number} {why}"), "remove each set once"));
        };
        let wait = "wait for what was submitted in a process set before it is removed";
        if !set.joined().is_empty() {
            let joined: Vec<Rank> = set.joined().iter().copied().collect();
            let who = text::named_ranks(&joined);
            return Err(refuse(format!("waiting in a join of process set {id}: {who}"), wait));
        }
        let of_set = self.table.pending().filter(|(_, _, tensor)| tensor.set == id);
        let waiting: Vec<(Slot, &str, Vec<Rank>)> =
            of_set.map(|(slot, _, t)| (slot, t.name.as_str(), t.silent(set))).collect();
        if request.list.get(1) == Some(&Request::GIVE_UP) {
            let given_up: Vec<(Slot, Failure)> = waiting
                .into_iter()
                .map(|(slot, name, silent)| (slot, given_up(id, &silent).tensor(name)))
                .collect();
            for (slot, failure) in given_up {
                self.answer.failures.extend(self.table.fail(slot, failure));
            }
        } else if !waiting.is_empty() {
            let names = text::some_names(waiting.iter().map(|(_, name, _)| *name), NAMED_TENSORS);
            let what = format!("not all ranks of process set {id} have submitted {names}");
            return Err(refuse(what, wait));
        }
        self.removing.insert(id, tensor);
        Ok(())
    }

    /// Whether there was such a set.
    pub(super) fn was_removed(&self, id: ProcessSetId) -> bool {
        (1..=self.last_set).contains(&id.0) && !self.sets.contains_key(&id)
    }

    /// Fails a tensor. Where that was a join nobody is in it any more, and what waits for others
    /// without the ranks that were can't go on either (TELL).
    pub(super) fn fail_tensor(&mut self, slot: Slot, failure: Failure) {
        let Some(tensor) = self.table.get(slot) else { return };
        let (id, joins) = (tensor.set, tensor.mixture.has_joins());
        self.answer.failures.extend(self.table.fail(slot, failure.clone()));
        if joins {
            self.unjoin(id, &failure);
        }
    }

    /// A join has failed.
    pub(super) fn unjoin(&mut self, id: ProcessSetId, why: &Failure) {
        let Some(set) = self.sets.get_mut(&id) else { return };
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
        set.all_return();
        for (slot, name, joined) in without {
            let who = text::named_ranks(&joined);
            let what = format!("it was to do without {who}, whose join has failed: {}", why.what);
            let failure = Failure { what, tensor: name, ..why.clone() };
            self.answer.failures.extend(self.table.fail(slot, failure));
        }
    }
}
