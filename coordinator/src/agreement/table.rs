//! All known tensors, and which nodes have announced them. Once all nodes have announced a tensor,
//! the requests are compared.
//!
//! Every tensor has a slot while it waits, is in flight, or has an id. A tensor with an id needs no
//! allocation in the steady state. If ids run out, an idle tensor that was not used recently loses
//! its id and is forgotten (BOUND). So does one that was used only once, if there are many of
//! these.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use gradwire_proto::{
    Collective, Compression, Failure, NodeId, Priority, ProcessSetId, Request, TensorId,
    TensorName, convert::TensorRef,
};

use super::{
    announcement::{Before, Carries, Case, Facts, before, case},
    check,
    evicted::Evicted,
    ids::{Ids, Registered},
    once::{MAX_NEW, UsedOnce},
    settle::{self, Consent},
    tensor::{CallKinds, Tensor, peers},
};
use crate::model::{
    command::{Registration, TensorFailure},
    event::Announcement,
    plan::{MAX_FLOWS, Plan},
    process_set::ProcessSet,
    round::{Progress, Round, Slot, Text},
    violation::Violation,
};

/// How many tensors are considered for eviction when an id is needed, in addition to one for each
/// flow that needs room.
const CONSIDERED: usize = 256;

/// The result for a tensor that all nodes have announced.
#[derive(Debug)]
pub(crate) enum Settled {
    /// All ranks have made the same request: it can be sent out.
    Runs(Arc<Round>),
    /// All ranks have requested something that is not an operation; the round is still open.
    Asks {
        /// The request.
        request: Request,
        /// How messages refer to the tensor.
        tensor: TensorRef,
    },
    /// It will never run.
    Fails(TensorFailure),
}

/// The result of an announcement.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Announced {
    /// Other nodes have yet to announce the tensor.
    Waiting(Slot),
    /// All nodes have announced it.
    Complete(Slot),
    /// No pending tensor is affected.
    Nothing,
}

fn unknown(id: TensorId) -> Violation {
    Violation::Protocol(format!("announced the tensor id {id}, which is not in use"))
}

/// The known tensors by slot, name and id.
#[derive(Debug)]
pub(crate) struct ReadyTable {
    tensors: Vec<Option<Tensor>>,
    free: Vec<Slot>,
    names: BTreeMap<(ProcessSetId, TensorName), Slot>,
    ids: Ids,
    evicted: Evicted,
    once: UsedOnce,
    /// A warning about names that has not been reported.
    warning: Option<String>,
    /// Evicted ids that the nodes have not been told about.
    unannounced: Vec<TensorId>,
    nodes: usize,
    most: usize,
    compression: Compression,
    waiting: usize,
}

impl ReadyTable {
    /// A table for `nodes` nodes, with at most `max_ids` ids and `most` tensors (BOUND). All ids
    /// together have at most as many flows as one tensor may have.
    pub(crate) fn new(nodes: usize, max_ids: usize, most: usize, compression: Compression) -> Self {
        Self {
            tensors: Vec::new(),
            free: Vec::new(),
            names: BTreeMap::new(),
            ids: Ids::new(max_ids, MAX_FLOWS),
            evicted: Evicted::default(),
            once: UsedOnce::default(),
            warning: None,
            unannounced: Vec::new(),
            nodes,
            most,
            compression,
            waiting: 0,
        }
    }

    /// How many tensors wait for a node.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting
    }

    fn get_mut(&mut self, slot: Slot) -> Option<&mut Tensor> {
        self.tensors.get_mut(slot.0 as usize)?.as_mut()
    }

    pub(crate) fn get(&self, slot: Slot) -> Option<&Tensor> {
        self.tensors.get(slot.0 as usize)?.as_ref()
    }

    /// The tensors that wait for a node, and since when.
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
                _ => Err(unknown(*id)),
            },
            TensorRef::Name(name) => {
                if announcement.submitted.is_empty() {
                    let what =
                        format!("announced tensor '{name}' by its name, but without requests");
                    return Err(Violation::Protocol(what));
                }
                Ok(self.names.get(&(announcement.set, name.clone())).copied())
            }
        }
    }

    fn add(&mut self, set: ProcessSetId, name: TensorName) -> Result<Slot, Violation> {
        if self.names.len() >= self.most {
            return Err(Violation::Resource(format!(
                "announced tensor '{name}', but the limit of {} tensors is reached",
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

    /// Handles a node's announcement (TRUST). `progress` returns the node's progress with the
    /// tensor in a slot.
    pub(crate) fn announce(
        &mut self,
        node: NodeId,
        announcement: Announcement,
        set: &ProcessSet,
        now: Duration,
        progress: impl Fn(Slot) -> Progress,
    ) -> Result<Announced, Violation> {
        let local = set.local(node);
        let announcement = self.evicted.restore(node, announcement, set);
        check::name(&announcement)?;
        let given = check::ranks(&announcement, local)?;
        let carries = Carries::of(&announcement);
        if let TensorRef::Id(id) = announcement.tensor
            && matches!(carries, Carries::Mixed | Carries::Duplicates)
            && self.ids.was_dropped(id)
        {
            // In the meantime, the ranks have agreed on another request for the tensor.
            return Ok(Announced::Nothing);
        }
        let slot = self.find(&announcement)?;
        let mut kinds = CallKinds::default();
        announcement.submitted.iter().for_each(|s| kinds.add(&s.request));

        let tensor = slot.and_then(|slot| self.get(slot));
        let (before, earlier) = before(tensor, node, &given, kinds);
        let is_out = matches!((before, tensor), (Before::Nothing, Some(t)) if t.is_out());
        let facts = Facts {
            carries,
            before,
            progress: slot.filter(|_| is_out).map_or(Progress::Done, progress),
            has_joined: local.iter().any(|rank| set.joined().contains(rank)),
            is_whole: carries == Carries::Id
                || check::is_whole(&announcement, &given, &earlier, kinds, local, set),
        };
        let name =
            |tensor: Option<&Tensor>| tensor.map_or_else(String::new, |t| t.name.to_string());
        match case(facts) {
            Case::Late => Ok(Announced::Nothing),
            Case::TooEarly => Err(Violation::Protocol(format!(
                "announced tensor '{}' before it was done",
                name(tensor)
            ))),
            Case::Again => Err(Violation::Protocol(format!(
                "announced tensor '{}' again before it was done",
                name(tensor)
            ))),
            Case::Incomplete => Err(check::incomplete(&announcement, local)),
            Case::AddsDuplicates => {
                if let Some(tensor) = slot.and_then(|slot| self.get_mut(slot)) {
                    tensor.add_duplicates(announcement.submitted);
                }
                Ok(Announced::Nothing)
            }
            Case::Replaces => {
                if let Some(tensor) = slot.and_then(|slot| self.get_mut(slot)) {
                    tensor.replace(node, announcement.submitted);
                }
                Ok(Announced::Nothing)
            }
            Case::Counts => {
                if let Some(tensor) = tensor.filter(|_| carries == Carries::Id) {
                    let ranks = tensor.ranks_by_id(set, node);
                    check::all_there(&ranks, set, tensor.name.as_str())?;
                }
                let slot = match (slot, &announcement.tensor) {
                    (Some(slot), _) => slot,
                    (None, TensorRef::Name(name)) => self.add(announcement.set, name.clone())?,
                    (None, TensorRef::Id(id)) => return Err(unknown(*id)),
                };
                Ok(self.count(slot, node, announcement, kinds, set, now))
            }
        }
    }

    /// Adds an announcement that counts.
    fn count(
        &mut self,
        slot: Slot,
        node: NodeId,
        announcement: Announcement,
        mut kinds: CallKinds,
        set: &ProcessSet,
        now: Duration,
    ) -> Announced {
        let Some(tensor) = self.get_mut(slot) else { return Announced::Nothing };
        let is_first = tensor.since.is_none();
        tensor.since.get_or_insert(now);
        let waited = announcement.latest.map_or(Duration::ZERO, |latest| latest.waited);
        let submitted = now.saturating_sub(waited);
        tensor.submitted = if is_first { submitted } else { submitted.min(tensor.submitted) };
        tensor.announced.insert(node.index());
        if announcement.submitted.is_empty()
            && let Some(registered) = &tensor.registered
        {
            kinds.add(registered.plan.agreed.request());
        }
        tensor.kinds = tensor.kinds.with(kinds);
        tensor.requests.extend(announcement.submitted.into_iter().map(|s| (node, s)));
        let is_complete = tensor.is_complete(set);
        self.waiting += usize::from(is_first);
        if is_complete { Announced::Complete(slot) } else { Announced::Waiting(slot) }
    }

    /// Ends the round of a tensor that all nodes have announced. If the request is not an
    /// operation, the round stays open until [`ReadyTable::close`] or [`ReadyTable::fail`].
    pub(crate) fn settle(
        &mut self,
        slot: Slot,
        set: &ProcessSet,
        now: Duration,
    ) -> Option<Settled> {
        let tensor = self.get(slot)?;
        let since = tensor.since?;
        let nothing_new = tensor.requests.is_empty() && tensor.duplicates.is_empty();
        let unchanged =
            tensor.registered.as_ref().filter(|_| nothing_new && set.joined().is_empty());
        if let Some(registered) = unchanged {
            let round = Round {
                slot,
                tensor: TensorRef::Id(registered.id),
                text: Text::BY_ID,
                plan: Arc::clone(&registered.plan),
                priority: registered.priority,
                since,
                agreed: now,
            };
            self.start(slot);
            return Some(Settled::Runs(Arc::new(round)));
        }
        let consent = match settle::settle(tensor, set) {
            Ok(consent) => consent,
            Err(failure) => return self.fail(slot, failure).map(Settled::Fails),
        };
        let request = consent.agreed.request();
        match request.collective {
            Collective::Join | Collective::AddProcessSet | Collective::RemoveProcessSet => {
                return Some(Settled::Asks {
                    request: request.clone(),
                    tensor: tensor.reference(),
                });
            }
            _ => {}
        }
        let id = tensor.set;
        let Consent { agreed, priority, members, absent } = consent;
        let plan = Arc::new(Plan::new(id, set, &members, absent, agreed, self.compression));
        let (tensor, text, plan) = match self.register(slot, &plan, priority) {
            Some((id, plan)) => (TensorRef::Id(id), Text::BY_ID, plan),
            None => {
                let name = self.get(slot)?.name.clone();
                let text = check::text_by_name(&name, &plan.agreed);
                (TensorRef::Name(name), text, plan)
            }
        };
        let round = Round { slot, tensor, text, plan, priority, since, agreed: now };
        self.start(slot);
        Some(Settled::Runs(Arc::new(round)))
    }

    fn start(&mut self, slot: Slot) {
        self.close_round(slot);
        if let Some(tensor) = self.get_mut(slot) {
            tensor.queued = true;
            if let Some(registered) = &mut tensor.registered {
                registered.used = registered.announced;
                if registered.used {
                    let id = registered.id;
                    self.ids.mark_used(id);
                }
            }
        }
    }

    /// The id of an agreed tensor: its old id, or a new one if its meaning has changed. `None` if
    /// the tensor must be sent by name: if ranks are absent, if no id is free, or if the old id
    /// can't be dropped because its segments have not all been sent out or too many evictions are
    /// not confirmed.
    fn register(
        &mut self,
        slot: Slot,
        plan: &Arc<Plan>,
        priority: Priority,
    ) -> Option<(TensorId, Arc<Plan>)> {
        let tensor = self.get_mut(slot)?;
        if !plan.absent.is_empty() {
            return None;
        }
        // A send and receive concerns only two ranks. Other ranks that used the name before did not
        // wait for these two, and may have announced the tensor by its old id again.
        let mut others_may_use_it = false;
        if let Some(old) = &tensor.registered {
            if old.plan.agreed == plan.agreed && old.priority == priority {
                return Some((old.id, Arc::clone(&old.plan)));
            }
            let is_sent = |plan: &Plan| peers(plan.agreed.request()).is_some();
            others_may_use_it = is_sent(&old.plan) || is_sent(plan);
            if tensor.queued || (others_may_use_it && self.evicted.flows() >= MAX_FLOWS) {
                return None;
            }
        }
        let tensor = self.get_mut(slot)?;
        let old = tensor.registered.take();
        if let Some(old) = &old {
            self.ids.drop(old.id);
        }
        let flows = plan.flow_count();
        self.make_room(flows);
        let id = self.ids.give(slot, flows);
        if let Some(id) = id.filter(|_| old.is_none()) {
            self.note_name(slot, id);
        }
        let plan = Arc::clone(plan);
        let new = id.map(|id| {
            let plan = Arc::clone(&plan);
            Registered { id, plan, priority, announced: false, used: false }
        });
        // Without a new registration, the nodes would not notice that the old id is gone.
        let is_evicted = new.is_none() || others_may_use_it;
        let tensor = self.get_mut(slot)?;
        tensor.registered = new;
        if let Some(old) = old.filter(|old| old.announced && is_evicted) {
            let (set, name) = (tensor.set, tensor.name.clone());
            self.evict(set, name, old);
        }
        Some((id?, plan))
    }

    fn evict(&mut self, set: ProcessSetId, name: TensorName, registered: Registered) {
        self.unannounced.push(registered.id);
        self.evicted.add(set, name, registered, self.nodes);
    }

    /// Notes whether the name of a tensor that gets an id is new. If there are too many of these,
    /// evicts the oldest that is idle (BOUND).
    fn note_name(&mut self, slot: Slot, id: TensorId) {
        let Some(tensor) = self.tensors.get(slot.0 as usize).and_then(Option::as_ref) else {
            return;
        };
        if self.once.comes_again(tensor.set, &tensor.name) {
            return;
        }
        self.ids.mark_new(id);
        if self.ids.new_ones() <= MAX_NEW || self.evicted.flows() >= MAX_FLOWS {
            return;
        }
        let is_idle = |slot: &Slot| self.get(*slot).is_some_and(Tensor::is_idle);
        let oldest = self.ids.oldest_new().take(CONSIDERED).find(is_idle);
        let Some(oldest) = oldest.filter(|oldest| *oldest != slot) else { return };
        if let Some(Tensor { set, name, registered: Some(registered), .. }) = self.forget(oldest) {
            self.warning = self.warning.take().or(self.once.add(set, &name));
            self.evict(set, name, registered);
        }
    }

    /// Takes the warning about the names of tensors, if there is one.
    pub(crate) fn take_warning(&mut self) -> Option<String> {
        self.warning.take()
    }

    /// Evicts ids of idle tensors until there is room for one more id with `flows` flows (BOUND).
    /// It cycles through all ids, oldest first, and skips those that have been used since the last
    /// visit. Unconfirmed evictions are bounded in the same way.
    fn make_room(&mut self, flows: usize) {
        for _ in 0..CONSIDERED + flows {
            if self.ids.has_room(flows) || self.evicted.flows() >= MAX_FLOWS {
                return;
            }
            let Some(slot) = self.ids.next() else { return };
            let Some(tensor) = self.get_mut(slot).filter(|tensor| tensor.is_idle()) else {
                continue;
            };
            let in_use = tensor.registered.as_mut().map(|registered| &mut registered.used);
            if in_use.is_none_or(std::mem::take) {
                continue;
            }
            if let Some(Tensor { set, name, registered: Some(registered), .. }) = self.forget(slot)
            {
                self.evict(set, name, registered);
            }
        }
    }

    /// The evicted ids that the nodes must be told about.
    pub(crate) fn take_evicted(&mut self) -> Vec<TensorId> {
        std::mem::take(&mut self.unannounced)
    }

    /// Notes that a node has forgotten these evicted ids.
    pub(crate) fn forgotten(&mut self, node: NodeId, ids: &[TensorId]) -> Result<(), Violation> {
        match ids.iter().find(|id| !self.evicted.confirmed(node, **id)) {
            None => Ok(()),
            Some(id) => Err(Violation::Protocol(format!(
                "reported that it forgot the tensor id {id}, which it was not told to forget"
            ))),
        }
    }

    /// Ends the round of a tensor that is done without an operation.
    pub(crate) fn close(&mut self, slot: Slot) {
        self.close_round(slot);
        self.forget_if_idle(slot);
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
        tensor.requests.clear();
        tensor.duplicates.clear();
        tensor.kinds = CallKinds::default();
        self.waiting -= usize::from(was_waiting);
    }

    /// Notes that a segment of a queued tensor is sent out; `last` if it is the last one. Returns
    /// the registration of its id if the nodes do not know it.
    pub(crate) fn sent(&mut self, round: &Round, last: bool) -> Option<Registration> {
        let tensor = self.get_mut(round.slot)?;
        tensor.unfinished += 1;
        tensor.queued = !last;
        let by_id = matches!(round.tensor, TensorRef::Id(_));
        let registered = tensor.registered.as_mut().filter(|r| by_id && !r.announced)?;
        registered.announced = true;
        Some(Registration {
            id: registered.id,
            set: tensor.set,
            name: tensor.name.clone(),
            agreed: Arc::clone(&registered.plan.agreed),
            priority: registered.priority,
        })
    }

    /// Notes that all nodes have done one segment of a tensor.
    pub(crate) fn finished(&mut self, slot: Slot) {
        if let Some(tensor) = self.get_mut(slot) {
            tensor.unfinished = tensor.unfinished.saturating_sub(1);
        }
        self.forget_if_idle(slot);
    }

    fn forget_if_idle(&mut self, slot: Slot) {
        if self.get(slot).is_some_and(|t| t.registered.is_none() && t.is_idle()) {
            self.forget(slot);
        }
    }

    fn forget(&mut self, slot: Slot) -> Option<Tensor> {
        let tensor = self.tensors.get_mut(slot.0 as usize)?.take()?;
        if let Some(registered) = &tensor.registered {
            self.ids.drop(registered.id);
        }
        self.names.remove(&(tensor.set, tensor.name.clone()));
        self.free.push(slot);
        Some(tensor)
    }

    fn of_set(&self, set: ProcessSetId) -> impl Iterator<Item = (Slot, &Tensor)> {
        let tensors = (0..).zip(&self.tensors);
        tensors.filter_map(move |(slot, tensor)| {
            tensor.as_ref().filter(|tensor| tensor.set == set).map(|tensor| (Slot(slot), tensor))
        })
    }

    /// The tensors of a process set that are pending or in flight.
    pub(crate) fn in_progress(&self, set: ProcessSetId) -> impl Iterator<Item = &TensorName> {
        self.of_set(set).filter(|(_, tensor)| !tensor.is_idle()).map(|(_, tensor)| &tensor.name)
    }

    /// Forgets a process set that has nothing in progress.
    pub(crate) fn forget_set(&mut self, set: ProcessSetId) {
        let idle = self.of_set(set).filter(|(_, tensor)| tensor.is_idle());
        let slots: Vec<Slot> = idle.map(|(slot, _)| slot).collect();
        for slot in slots {
            self.forget(slot);
        }
    }
}
