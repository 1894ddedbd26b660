//! Which node has announced which tensor, until all have: then the answers are compared.
//!
//! Every tensor has a slot for as long as anything is known of it: it waits, it is on its way, or
//! it has an id. A tensor with an id costs no allocation in the steady state.

use std::{collections::BTreeMap, time::Duration};

use gradwire_proto::{
    Failure, NodeId, Priority, ProcessSetId, Rank, Request, TensorName, convert::TensorRef,
};

use super::{
    agreement,
    command::{Registration, TensorFailure},
    event::Announcement,
    ids::{Ids, Registered},
    tensor::{self, Tensor},
    world::ProcessSet,
};

/// Where a tensor is in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Slot(pub(crate) u32);

/// All ranks have asked for the same.
#[derive(Debug)]
pub(crate) struct Agreed {
    pub(crate) request: Request,
    pub(crate) priority: Priority,
    pub(crate) since: Duration,
}

/// What a node did that ends the job.
#[derive(Debug)]
pub(crate) enum Violation {
    /// The protocol does not allow it.
    Protocol(String),
    /// It asks for more than there is room for (BOUND).
    Resource(String),
}

/// What an announcement led to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Announced {
    /// Others have to announce the tensor.
    Waiting(Slot),
    /// Everybody has announced it.
    Complete(Slot),
    /// Nothing; it was too late to matter.
    Late,
}

/// The tensors that are known, by slot, name and id.
#[derive(Debug)]
pub(crate) struct ReadyTable {
    tensors: Vec<Option<Tensor>>,
    free: Vec<Slot>,
    names: BTreeMap<(ProcessSetId, TensorName), Slot>,
    ids: Ids,
    nodes: usize,
    most: usize,
    waiting: usize,
}

impl ReadyTable {
    /// A table for a world of `nodes`, with at most `max_ids` ids and `most` tensors (BOUND).
    pub(crate) fn new(nodes: usize, max_ids: usize, most: usize) -> Self {
        Self {
            tensors: Vec::new(),
            free: Vec::new(),
            names: BTreeMap::new(),
            ids: Ids::new(max_ids),
            nodes,
            most,
            waiting: 0,
        }
    }

    /// How many tensors wait for somebody.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting
    }

    fn get_mut(&mut self, slot: Slot) -> Option<&mut Tensor> {
        self.tensors.get_mut(slot.0 as usize)?.as_mut()
    }

    pub(crate) fn get(&self, slot: Slot) -> Option<&Tensor> {
        self.tensors.get(slot.0 as usize)?.as_ref()
    }

    /// The tensors that wait for somebody, with the time since when.
    pub(crate) fn pending(&self) -> impl Iterator<Item = (Slot, Duration, &Tensor)> {
        self.tensors.iter().enumerate().filter_map(|(slot, tensor)| {
            let tensor = tensor.as_ref()?;
            Some((Slot(slot as u32), tensor.since?, tensor))
        })
    }

    fn find(&self, announcement: &Announcement) -> Result<Option<Slot>, Violation> {
        match &announcement.tensor {
            TensorRef::Id(id) => match self.ids.slot(*id) {
                Some(slot) if self.get(slot).is_some_and(|t| t.set == announcement.set) => {
                    Ok(Some(slot))
                }
                _ => Err(Violation::Protocol(format!(
                    "announced the tensor id {id}, which is not in use"
                ))),
            },
            TensorRef::Name(name) => {
                if announcement.submitted.is_empty() {
                    let what =
                        format!("announced tensor '{name}' without saying what is asked for");
                    return Err(Violation::Protocol(what));
                }
                Ok(self.names.get(&(announcement.set, name.clone())).copied())
            }
        }
    }

    fn add(&mut self, set: ProcessSetId, name: TensorName) -> Result<Slot, Violation> {
        if self.names.len() >= self.most {
            return Err(Violation::Resource(format!(
                "announced tensor '{name}', but {} tensors are known already",
                self.most
            )));
        }
        let tensor = Tensor::new(set, name.clone(), self.nodes);
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                self.tensors.push(None);
                Slot(self.tensors.len() as u32 - 1)
            }
        };
        self.tensors[slot.0 as usize] = Some(tensor);
        self.names.insert((set, name), slot);
        Ok(slot)
    }

    /// Takes a node's announcement (TRUST). `on_its_way` says whether the tensor in a slot is in
    /// an operation that the node has not done yet.
    pub(crate) fn announce(
        &mut self,
        node: NodeId,
        announcement: Announcement,
        set: &ProcessSet,
        now: Duration,
        on_its_way: impl Fn(Slot) -> bool,
    ) -> Result<Announced, Violation> {
        let members = set.ranks.get(node.0 as usize).map_or(&[][..], Vec::as_slice);
        let given = check_ranks(&announcement, members)?;
        let duplicate = announcement.submitted.iter().any(|s| s.duplicate);
        if let TensorRef::Id(id) = announcement.tensor
            && duplicate
            && self.ids.was_dropped(id)
        {
            // Told of a second submission while the tensor was agreed on with another request.
            return Ok(Announced::Late);
        }
        let found = self.find(&announcement)?;
        let whole = announcement.submitted.is_empty() || given == members.len();

        if let Some(tensor) = found.and_then(|slot| self.get_mut(slot)) {
            if tensor.announced.contains(node) {
                return tensor.amend(node, announcement.submitted).map(|()| Announced::Late);
            }
            let on_its_way = tensor.queued || found.is_some_and(on_its_way);
            if duplicate && on_its_way {
                return Ok(Announced::Late);
            }
            if tensor.queued {
                let name = &tensor.name;
                return Err(Violation::Protocol(format!(
                    "announced tensor '{name}' before it was done"
                )));
            }
        }
        if !whole {
            let late = announcement.submitted.iter().all(|s| s.duplicate);
            return if late {
                Ok(Announced::Late)
            } else {
                Err(incomplete(&announcement, members))
            };
        }
        let slot = match (found, announcement.tensor) {
            (Some(slot), _) => slot,
            (None, TensorRef::Name(name)) => self.add(announcement.set, name)?,
            (None, TensorRef::Id(id)) => {
                return Err(Violation::Protocol(format!("announced the unknown tensor id {id}")));
            }
        };
        let mut first = false;
        let mut announced = Announced::Late;
        if let Some(tensor) = self.get_mut(slot) {
            first = tensor.since.is_none();
            tensor.since.get_or_insert(now);
            tensor.announced.insert(node);
            tensor.spelled.extend(announcement.submitted.into_iter().map(|s| (node, s)));
            announced = if tensor.announced.len() == set.participants.len() {
                Announced::Complete(slot)
            } else {
                Announced::Waiting(slot)
            };
        }
        self.waiting += usize::from(first);
        Ok(announced)
    }

    /// Ends the round of a tensor that everybody has announced: agreed, or failed with the table
    /// of what each rank sent.
    pub(crate) fn settle(
        &mut self,
        slot: Slot,
        set: &ProcessSet,
    ) -> Option<Result<Agreed, TensorFailure>> {
        let tensor = self.get(slot)?;
        let since = tensor.since?;
        let result = match tensor.agreed() {
            Some((request, priority)) => match tensor::impossible(&request, set) {
                None => Ok(Agreed { request, priority, since }),
                Some(failure) => Err(failure.tensor(tensor.name.as_str())),
            },
            None => Err(agreement::disagreement(tensor.name.as_str(), &tensor.answers(set))),
        };
        match result {
            Ok(agreed) => {
                self.close_round(slot);
                self.register(slot, &agreed);
                Some(Ok(agreed))
            }
            Err(failure) => self.fail(slot, failure).map(Err),
        }
    }

    /// Gives an agreed tensor an id, or a new one if what it stands for has changed.
    fn register(&mut self, slot: Slot, agreed: &Agreed) {
        let Some(tensor) = self.tensors.get_mut(slot.0 as usize).and_then(Option::as_mut) else {
            return;
        };
        tensor.queued = true;
        if let Some(old) = &tensor.registered {
            if old.request == agreed.request && old.priority == agreed.priority {
                return;
            }
            self.ids.drop(old.id);
        }
        tensor.registered = self.ids.give(slot).map(|id| Registered {
            id,
            request: agreed.request.clone(),
            priority: agreed.priority,
            told: false,
        });
    }

    /// Ends the round of a tensor that can't run.
    pub(crate) fn fail(&mut self, slot: Slot, failure: Failure) -> Option<TensorFailure> {
        let tensor = self.get(slot)?;
        let failure = TensorFailure { set: tensor.set, tensor: tensor.reference(), failure };
        self.close_round(slot);
        self.forget_if_idle(slot);
        Some(failure)
    }

    fn close_round(&mut self, slot: Slot) {
        let Some(tensor) = self.get_mut(slot) else { return };
        let was_waiting = tensor.since.take().is_some();
        tensor.announced.clear();
        tensor.spelled.clear();
        tensor.amended.clear();
        self.waiting -= usize::from(was_waiting);
    }

    /// Notes that a segment of a queued tensor goes out; `last` if nothing of it is left. Gives
    /// how the segment calls it, and the registration if the nodes have not been told of it.
    pub(crate) fn sent(
        &mut self,
        slot: Slot,
        last: bool,
    ) -> Option<(TensorRef, Option<Registration>)> {
        let tensor = self.get_mut(slot)?;
        tensor.unfinished += 1;
        tensor.queued = !last;
        let registration = match &mut tensor.registered {
            Some(registered) if !registered.told => {
                registered.told = true;
                Some(Registration {
                    id: registered.id,
                    set: tensor.set,
                    name: tensor.name.clone(),
                    request: registered.request.clone(),
                    priority: registered.priority,
                })
            }
            _ => None,
        };
        Some((tensor.reference(), registration))
    }

    /// Notes that one operation of a tensor is done by everybody.
    pub(crate) fn finished(&mut self, slot: Slot) {
        if let Some(tensor) = self.get_mut(slot) {
            tensor.unfinished = tensor.unfinished.saturating_sub(1);
        }
        self.forget_if_idle(slot);
    }

    fn forget_if_idle(&mut self, slot: Slot) {
        let idle = self.get(slot).is_some_and(|t| {
            t.registered.is_none() && t.since.is_none() && !t.queued && t.unfinished == 0
        });
        if !idle {
            return;
        }
        if let Some(tensor) = self.tensors[slot.0 as usize].take() {
            self.names.remove(&(tensor.set, tensor.name));
            self.free.push(slot);
        }
    }
}

/// The ranks of an announcement are this node's, each at most once. Gives how many there are.
fn check_ranks(announcement: &Announcement, members: &[Rank]) -> Result<usize, Violation> {
    if members.is_empty() {
        let set = announcement.set;
        return Err(Violation::Protocol(format!(
            "announced a tensor of process set {set}, where it has no ranks"
        )));
    }
    let mut given: Vec<Rank> = Vec::new();
    for rank in announcement.submitted.iter().flat_map(|s| &s.ranks) {
        if members.binary_search(rank).is_err() {
            return Err(Violation::Protocol(format!(
                "announced a tensor for rank {rank}, which is not its own"
            )));
        }
        given.push(*rank);
    }
    let number = given.len();
    given.sort_unstable();
    given.dedup();
    if given.len() != number {
        return Err(Violation::Protocol(
            "announced a tensor twice for one rank in one message".into(),
        ));
    }
    Ok(number)
}

fn incomplete(announcement: &Announcement, members: &[Rank]) -> Violation {
    let given: usize = announcement.submitted.iter().map(|s| s.ranks.len()).sum();
    let tensor = match &announcement.tensor {
        TensorRef::Id(id) => format!("tensor id {id}"),
        TensorRef::Name(name) => format!("tensor '{name}'"),
    };
    Violation::Protocol(format!("announced {tensor} for {given} of its {} ranks", members.len()))
}
