//! Maps ids to names, and messages to domain types. Pure.
//!
//! The coordinator gives a tensor an id once it has been agreed on; from then on an announcement of
//! the same request is only the id. The coordinator's messages are checked here, once (TRUST):
//! every set and id must be known, every number must be within its range, and an agreement must fit
//! the ranks that take part. The queue checks whether it also fits the requests of the local ranks.

use std::{collections::HashMap, ops::RangeInclusive, sync::Arc, time::Duration};

use gradwire_collectives::{
    Links, Topology,
    algorithms::{
        Algorithm, MAX_SPEC, Spec,
        probe::{Pattern, UnknownPattern},
    },
};
use gradwire_proto::{
    Agreed, Failure, NO_PART, NodeId, Priority, ProcessSetId, Rank, Request, Route, Sequence,
    SpecId, TensorId, TensorName, WireError, convert, convert::TensorRef, pb,
};

use super::at_once;
use crate::model::{
    agreement::Agreement,
    members::Members,
    operation::{Instruction, Operation, OperationSegment, PartRange, Probe, nodes_of},
    tensor::{Announced, TensorKey, Variant, pair},
    world::{World, invalid},
};

/// Shorter waits between local ranks are not reported.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);

/// The allowed sizes of a chunk, in bytes.
const CHUNKS: RangeInclusive<u32> = 4 << 10..=4 << 20;

/// The limit of specs with ids (BOUND). A coordinator uses a few.
const MAX_SPECS: usize = 1024;

/// The limits of agreements on tensors without an id that are kept for their next segment (BOUND),
/// and of their flows in total.
const MAX_UNREGISTERED: usize = 1024;
const MAX_UNREGISTERED_FLOWS: usize = 1 << 16;

/// What follows once the local ranks have submitted a tensor.
#[derive(Debug)]
pub(crate) enum Ready {
    Announce(pb::Announcement),
    /// The coordinator need not order it.
    AtOnce(Operation),
}

#[derive(Debug)]
struct Registered {
    id: TensorId,
    agreement: Arc<Agreement>,
    priority: Priority,
}

/// The process sets, and the tensors that have ids.
#[derive(Debug)]
pub(crate) struct Registry {
    world: Arc<World>,
    sets: HashMap<ProcessSetId, Arc<Members>>,
    by_key: HashMap<TensorKey, Registered>,
    by_id: HashMap<TensorId, TensorKey>,
    specs: HashMap<SpecId, Spec>,
    /// The number of tensors with ids for which the tables have spare room.
    room: usize,
    /// The agreements on tensors without an id, because a large tensor has many segments.
    unregistered: HashMap<TensorKey, Arc<Agreement>>,
}

type Terms = (TensorKey, Arc<Agreement>);

impl Registry {
    /// A registry with the set of all ranks.
    pub(crate) fn new(world: Arc<World>) -> Self {
        let everybody = Arc::new(Members::everybody(&world));
        Self {
            world,
            sets: HashMap::from([(ProcessSetId::GLOBAL, everybody)]),
            by_key: HashMap::new(),
            by_id: HashMap::new(),
            specs: HashMap::new(),
            room: 0,
            unregistered: HashMap::new(),
        }
    }

    /// The registration of an announced tensor, if all local members have made their registered
    /// request.
    fn unchanged(&self, announced: &Announced) -> Option<&Registered> {
        let Announced { key, variants, all_there, .. } = announced;
        let known = self.by_key.get(key).filter(|_| *all_there)?;
        let all: usize = variants.iter().map(|variant| variant.ranks.len()).sum();
        let is_registered = |variant: &Variant| {
            let fits = |rank: &Rank| known.agreement.fits(*rank, &variant.request);
            variant.priority == known.priority.0
                && !variant.duplicate
                && variant.ranks.iter().all(fits)
        };
        let unchanged =
            all == known.agreement.members.here.len() && variants.iter().all(is_registered);
        unchanged.then_some(known)
    }

    /// What follows once the local ranks have submitted a tensor. With `may_run`, an operation may
    /// run at once.
    pub(crate) fn ready(&self, announced: Announced, may_run: bool) -> Ready {
        let registered = self.unchanged(&announced);
        // A wait of a local rank is reported to the coordinator, with the announcement.
        let waited = announced.latest.is_some_and(|latest| latest.waited >= SHORTEST_WAIT);
        let at_once = registered
            .filter(|_| may_run && !waited)
            .and_then(|known| at_once::operation(&announced, &known.agreement));
        at_once.map_or_else(
            || Ready::Announce(self.announcement(announced, registered.is_some())),
            Ready::AtOnce,
        )
    }

    /// The message that announces a tensor: as short as its id allows.
    fn announcement(&self, announced: Announced, unchanged: bool) -> pb::Announcement {
        let Announced { key, variants, latest, .. } = announced;
        let known = self.by_key.get(&key);
        let tensor = known
            .map_or_else(|| TensorRef::Name(key.name.clone()), |known| TensorRef::Id(known.id));
        let submitted = variants.into_iter().filter(|_| !unchanged).map(|v| pb::Submitted {
            ranks: v.ranks.iter().map(|r| r.0).collect(),
            request: Some((&v.request).into()),
            priority: v.priority,
            duplicate: v.duplicate,
            sites: v
                .sites
                .iter()
                .map(ToString::to_string)
                .filter(|site| !site.is_empty())
                .collect(),
        });
        pb::Announcement {
            process_set: key.set.0,
            tensor: Some(tensor.into()),
            submitted: submitted.collect(),
            latest: latest.filter(|_| self.world.me().slots > 1).map(|latest| {
                // Short times say nothing, and are the usual case: they take no bytes.
                let waited = Some(latest.waited).filter(|waited| *waited >= SHORTEST_WAIT);
                let waited_us = waited.map_or(0, |waited| waited.as_micros());
                let waited_us = u64::try_from(waited_us).unwrap_or(u64::MAX);
                pb::Latest { local_rank: latest.local_rank, waited_us }
            }),
        }
    }

    fn set(&self, set: ProcessSetId) -> Result<&Arc<Members>, WireError> {
        let unknown = || invalid("process_set", format!("process set {set} does not exist"));
        self.sets.get(&set).ok_or_else(unknown)
    }

    fn create_set(&mut self, wire: pb::SetCreated) -> Result<Instruction, WireError> {
        let set = ProcessSetId(wire.process_set);
        let ranks = wire.ranks.iter().copied().map(Rank).collect();
        let members = Members::of(&self.world, ranks).ok_or_else(|| {
            invalid("ranks", format!("{:?} are not ascending ranks of the job", wire.ranks))
        })?;
        if self.sets.contains_key(&set) {
            return Err(invalid("process_set", format!("process set {set} already exists")));
        }
        let members = Arc::new(members);
        self.sets.insert(set, members.clone());
        let tensor = self.resolve(ProcessSetId::GLOBAL, wire.tensor)?;
        Ok(Instruction::CreateSet { set, members, tensor })
    }

    fn remove_set(&mut self, wire: pb::SetRemoved) -> Result<Instruction, WireError> {
        let set = ProcessSetId(wire.process_set);
        self.set(set)?;
        if set == ProcessSetId::GLOBAL {
            return Err(invalid("process_set", "the set of all ranks can't be removed"));
        }
        let tensor = self.resolve(ProcessSetId::GLOBAL, wire.tensor)?;
        self.sets.remove(&set);
        self.by_key.retain(|key, _| key.set != set);
        self.by_id.retain(|_, key| key.set != set);
        self.unregistered.retain(|key, _| key.set != set);
        Ok(Instruction::RemoveSet { set, tensor })
    }

    /// The ranks of a process set that take part in a request, without `absent`.
    fn members(
        &self,
        set: &Arc<Members>,
        absent: &[Rank],
        request: &Request,
    ) -> Result<Arc<Members>, WireError> {
        let members = if let Some((from, to)) = pair(request) {
            // Only the two ends take part, whether other ranks have joined or not.
            let mut ends = vec![from, to];
            ends.sort_unstable();
            ends.dedup();
            let known = ends.iter().all(|end| set.position(*end).is_some());
            let here = known && ends.iter().all(|end| !absent.contains(end));
            here.then(|| Members::of(&self.world, ends)).flatten()
        } else if absent.is_empty() {
            return Ok(set.clone());
        } else {
            set.without(&self.world, absent)
        };
        let members = members.ok_or_else(|| {
            invalid(
                "absent",
                format!("{absent:?} does not leave the ranks that the operation needs"),
            )
        })?;
        Ok(Arc::new(members))
    }

    /// Checks an agreement; returns `known` itself if it is the same.
    fn agreement(
        &self,
        set: ProcessSetId,
        absent: &[Rank],
        wire: Option<pb::Agreed>,
        known: Option<&Arc<Agreement>>,
    ) -> Result<Arc<Agreement>, WireError> {
        let agreed: Agreed = wire.ok_or(WireError::Missing("agreed"))?.try_into()?;
        let set = self.set(set)?;
        let members = self.members(set, absent, agreed.request())?;
        if let Some(known) = known.filter(|known| known.is(&agreed, &members)) {
            return Ok(known.clone());
        }
        let size = members.ranks.len();
        Agreement::new(&self.world, set, members, agreed)
            .map(Arc::new)
            .ok_or_else(|| invalid("agreed", format!("its rows do not match {size} ranks")))
    }

    fn register(&mut self, wire: pb::Registration) -> Result<(), WireError> {
        let set = ProcessSetId(wire.process_set);
        let agreement = self.agreement(set, &[], wire.agreed, None)?;
        let key = TensorKey { set, name: TensorName::new(&wire.name)? };
        let id = TensorId(wire.id);
        if let Some(other) = self.by_id.get(&id).filter(|other| **other != key) {
            return Err(invalid(
                "registration",
                format!("id {id} is already used for {}", other.name),
            ));
        }
        self.unregistered.remove(&key);
        let registered = Registered { id, agreement, priority: Priority(wire.priority) };
        if let Some(old) = self.by_key.insert(key.clone(), registered) {
            self.by_id.remove(&old.id);
        }
        self.by_id.insert(id, key);
        Ok(())
    }

    /// Gives the tables twice the room that the present tensors need. From the first eviction on,
    /// tensors replace each other and leave gaps. In a hash table that is more than half full, the
    /// gaps would make it grow at some time, long after the job has settled. In a table that is at
    /// most half full, they are cleared in place (BOUND).
    fn make_room(&mut self) {
        let tensors = self.by_key.len();
        if tensors > self.room {
            self.by_key.reserve(tensors);
            self.by_id.reserve(tensors);
            self.room = tensors;
        }
    }

    fn register_spec(&mut self, wire: &pb::Spec) -> Result<(), WireError> {
        let refused = |reason: String| invalid("spec", reason);
        if wire.text.len() > MAX_SPEC {
            return Err(refused(format!("it is longer than {MAX_SPEC} bytes")));
        }
        if self.specs.len() >= MAX_SPECS {
            return Err(refused(format!("there are more than {MAX_SPECS}")));
        }
        let spec = Spec::parse(&wire.text).map_err(|error| refused(error.to_string()))?;
        match self.specs.insert(SpecId(wire.id), spec) {
            None => Ok(()),
            Some(old) => Err(refused(format!("id {} is already used for {old}", wire.id))),
        }
    }

    /// The spec with this id, which must fit `nodes` nodes.
    fn spec(&self, id: SpecId, nodes: usize) -> Result<Spec, WireError> {
        let unknown = || invalid("spec", format!("id {id} was never registered"));
        let spec = *self.specs.get(&id).ok_or_else(unknown)?;
        spec.fits(nodes as u32).map_err(|error| invalid("spec", error.to_string()))?;
        Ok(spec)
    }

    fn resolve(
        &self,
        set: ProcessSetId,
        wire: Option<pb::TensorRef>,
    ) -> Result<TensorKey, WireError> {
        match TensorRef::try_from(wire)? {
            TensorRef::Name(name) => Ok(TensorKey { set, name }),
            TensorRef::Id(id) => self
                .by_id
                .get(&id)
                .filter(|key| key.set == set)
                .cloned()
                .ok_or_else(|| invalid("tensor", format!("id {id} was never registered"))),
        }
    }

    /// The agreement on a segment's tensor. A tensor with an id has its registration. A tensor with
    /// a name has the agreement in the segment, or that of the segment `before` it in the
    /// operation, if that is of the same tensor.
    fn terms(
        &mut self,
        set: ProcessSetId,
        absent: &[Rank],
        tensor: Option<pb::TensorRef>,
        agreed: Option<pb::Agreed>,
        before: Option<Terms>,
    ) -> Result<Terms, WireError> {
        let by_id =
            matches!(tensor, Some(pb::TensorRef { tensor: Some(pb::tensor_ref::Tensor::Id(_)) }));
        let key = self.resolve(set, tensor)?;
        if by_id {
            let registered = self.by_key.get(&key).map(|known| known.agreement.clone());
            let agreement = registered.ok_or(WireError::Missing("agreed"))?;
            let whole = absent.is_empty() || pair(agreement.request()).is_some();
            if !whole {
                let reason = format!("'{}' was registered for all ranks of the set", key.name);
                return Err(invalid("absent", reason));
            }
            return Ok((key, agreement));
        }
        if agreed.is_none()
            && let Some(before) = before.filter(|(tensor, _)| *tensor == key)
        {
            return Ok(before);
        }
        let known = self.unregistered.get(&key);
        let agreement = self.agreement(set, absent, agreed, known)?;
        if known.is_none_or(|known| !Arc::ptr_eq(known, &agreement)) {
            let flows: usize =
                self.unregistered.values().map(|unregistered| unregistered.flows()).sum();
            if self.unregistered.len() >= MAX_UNREGISTERED || flows >= MAX_UNREGISTERED_FLOWS {
                self.unregistered.clear();
            }
            self.unregistered.insert(key.clone(), agreement.clone());
        }
        Ok((key, agreement))
    }

    /// The operation; `None` if this node takes no part in it.
    fn operation(&mut self, wire: pb::Operation) -> Result<Option<Operation>, WireError> {
        let request = convert::piece(wire.request.ok_or(WireError::Missing("request"))?)?;
        let set = ProcessSetId(wire.process_set);
        let absent: Vec<Rank> = wire.absent.into_iter().map(Rank).collect();
        let (mut way, mut members) = (None, None);
        let mut segments = Vec::with_capacity(wire.segments.len());
        let mut takes_part = false;
        let mut before = None;
        for wire in wire.segments {
            let (part, offset, count) = (wire.part, wire.offset, wire.count);
            let terms = self.terms(set, &absent, wire.tensor, wire.agreed, before.take())?;
            let (tensor, agreement) = before.insert(terms).clone();
            let (route, range) = Place { part, offset, count }.check(&request, &agreement)?;
            if *way.get_or_insert(route) != route {
                let reason = "they do not all have the same route";
                return Err(invalid("segments", reason));
            }
            members.get_or_insert_with(|| agreement.members.clone());
            // Each of several empty sends and receives has its own ranks. A node takes part if any
            // of these ranks is on it.
            takes_part |= !agreement.members.here.is_empty();
            if self.world.is_server() || !agreement.members.here.is_empty() {
                segments.push(OperationSegment { tensor, agreement, range });
            }
        }
        let (Some(route), Some(members)) = (way, members) else {
            return Err(WireError::Missing("segments"));
        };
        if let Some(ends) = route.ends() {
            takes_part &= ends.contains(&self.world.node);
        }
        let sequence = Sequence(wire.sequence);
        let spec = match route {
            // Only one algorithm applies.
            Route::Nothing | Route::Move(..) => Algorithm::Ring.into(),
            _ if members.nodes.len() == 1 => Algorithm::Ring.into(),
            _ => self.spec(SpecId(wire.spec), members.nodes.len())?,
        };
        takes_part |= self.world.is_server()
            && nodes_of(route, &spec, &members).binary_search(&self.world.node).is_ok();
        let quantized = wire.quantized;
        if quantized && !self.is_quantized(route, &request, &spec, &members) {
            return Err(invalid("quantized", "it is not an allreduce that this job may quantize"));
        }
        let chunk = match wire.chunk_bytes {
            0 => None,
            bytes if CHUNKS.contains(&bytes) => Some(u64::from(bytes)),
            bytes => return Err(invalid("chunk_bytes", format!("{bytes} bytes are not possible"))),
        };
        let operation =
            Operation { sequence, request, spec, route, members, segments, quantized, chunk };
        Ok(takes_part.then_some(operation))
    }

    /// Whether an operation may be quantized (TRUST).
    fn is_quantized(
        &self,
        route: Route,
        request: &Request,
        spec: &Spec,
        members: &Members,
    ) -> bool {
        let Request { collective, dtype, reduce_op: op, .. } = *request;
        let rounds_once = Algorithm::ROUNDS_ONCE.contains(&spec.algorithm());
        // The coordinator has checked the size of the whole tensor.
        self.world.compression.quantizes(collective, dtype, op, u64::MAX)
            && route == Route::All
            && (rounds_once || members.nodes.len() == 1)
    }

    /// The rates of all nodes (TRUST).
    fn links(&self, wire: pb::Links) -> Result<Links, WireError> {
        let links = Links::new(wire.line_mbit, wire.uplink_mbit, wire.pair_mbit);
        let nodes = self.world.nodes.len();
        let refused = || invalid("links", format!("they do not match {nodes} nodes"));
        links.filter(|links| links.participants() as usize == nodes).ok_or_else(refused)
    }

    /// The topology with all nodes in other racks, or in another order (TRUST).
    fn arranged(&self, wire: &pb::Arrangement) -> Result<Topology, WireError> {
        let nodes = self.world.nodes.len();
        self.world.topology().arranged(&wire.racks, &wire.order).ok_or_else(|| {
            let (racks, order) = (wire.racks.len(), wire.order.len());
            let reason = format!(
                "racks of {racks} nodes and an order of {order} do not match {nodes} nodes: each \
                 must have all nodes or be empty, and an order has each number from 0 to {} once",
                nodes - 1
            );
            invalid("arrangement", reason)
        })
    }

    /// The probe; `None` if this node takes no part in it.
    fn probe(&self, wire: pb::Probe) -> Result<Option<Probe>, WireError> {
        let pattern: Pattern = wire
            .pattern
            .parse()
            .map_err(|error: UnknownPattern| invalid("pattern", error.to_string()))?;
        let me = self.world.node.0;
        let Some(group) = wire.groups.into_iter().find(|group| group.nodes.contains(&me)) else {
            return Ok(None);
        };
        let mut different = group.nodes.clone();
        different.sort_unstable();
        different.dedup();
        let nodes = self.world.nodes.len() as u32;
        let are_nodes = different.len() == group.nodes.len()
            && different.last().is_some_and(|last| *last < nodes);
        if !are_nodes || !pattern.fits(group.nodes.len() as u32) {
            let reason = format!("{pattern} cannot run on nodes {:?}", group.nodes);
            return Err(invalid("probe", reason));
        }
        let nodes = group.nodes.into_iter().map(NodeId).collect();
        Ok(Some(Probe { sequence: Sequence(wire.sequence), pattern, nodes }))
    }

    /// The instructions in an `Execute`, in the order in which they must be executed.
    ///
    /// # Errors
    /// [`WireError`] if any of it is invalid; then none of it must be executed.
    pub(crate) fn instructions(
        &mut self,
        wire: pb::Execute,
    ) -> Result<Vec<Instruction>, WireError> {
        let mut instructions = Vec::with_capacity(wire.operations.len() + wire.failures.len());
        if let Some(arrangement) = wire.arrangement {
            instructions.push(Instruction::Arrange(self.arranged(&arrangement)?));
        }
        for created in wire.sets_created {
            instructions.push(self.create_set(created)?);
        }
        for registration in wire.registrations {
            self.register(registration)?;
        }
        for spec in &wire.specs {
            self.register_spec(spec)?;
        }
        if let Some(links) = wire.links {
            instructions.push(Instruction::Links(self.links(links)?));
        }
        let probes = wire.probes.into_iter().filter_map(|probe| self.probe(probe).transpose());
        let probes: Vec<Probe> = probes.collect::<Result<_, _>>()?;
        if !probes.is_empty() {
            instructions.push(Instruction::Probe(probes));
        }
        for operation in wire.operations {
            instructions.extend(self.operation(operation)?.map(Instruction::Start));
        }
        for wire in wire.failures {
            let failure: Failure = wire.failure.ok_or(WireError::Missing("failure"))?.into();
            let set = ProcessSetId(wire.process_set);
            // The tensors of a removed set have failed with it.
            if self.sets.contains_key(&set) {
                let tensor = self.resolve(set, wire.tensor)?;
                instructions.push(Instruction::Fail { tensor, failure });
            }
        }
        for joined in wire.joined {
            let (set, last) = (ProcessSetId(joined.process_set), Rank(joined.last_rank));
            if self.set(set)?.position(last).is_none() {
                let reason = format!("rank {last} is not a member of process set {set}");
                return Err(invalid("last_rank", reason));
            }
            instructions.push(Instruction::Resume { set, last });
        }
        for removed in wire.sets_removed {
            instructions.push(self.remove_set(removed)?);
        }
        if !wire.evicted.is_empty() {
            self.make_room();
        }
        for id in wire.evicted {
            // An unknown id was removed with its process set, or its tensor has another id now.
            if let Some(key) = self.by_id.remove(&TensorId(id)) {
                self.by_key.remove(&key);
            }
        }
        Ok(instructions)
    }
}

/// The position of a segment in its tensor.
struct Place {
    part: u32,
    offset: u64,
    count: u64,
}

impl Place {
    /// The route of the segment, and its range, if it has any.
    fn check(
        &self,
        request: &Request,
        agreement: &Agreement,
    ) -> Result<(Route, Option<PartRange>), WireError> {
        let &Self { part, offset, count } = self;
        let whole = agreement.request();
        if part == NO_PART {
            let fits = offset == 0
                && count == 0
                && request.collective == whole.collective
                && agreement.route() == Route::Nothing;
            let reason = "a segment without a tensor must have no range, no elements and its \
                          request's collective";
            let nothing = (Route::Nothing, None);
            return if fits { Ok(nothing) } else { Err(invalid("segment", reason)) };
        }
        let Some(flows) = agreement.part(part as usize).filter(|_| count > 0) else {
            let parts = whole.parts();
            let reason = format!("{count} elements of tensor {part}, but there are {parts}");
            return Err(invalid("segment", reason));
        };
        if offset.checked_add(count).is_none_or(|end| end > flows.longest) {
            let longest = flows.longest;
            let reason = format!("{count} elements from {offset} on, but the flows have {longest}");
            return Err(invalid("segment", reason));
        }
        let part = part as usize;
        if !request.is_piece_of(whole, part) {
            return Err(invalid("request", "it is not what was agreed on for the tensor"));
        }
        Ok((agreement.route(), Some(PartRange { part, offset, count })))
    }
}

/// The failure for a message of the coordinator that is not valid.
pub(super) fn nonsense(error: &WireError) -> Failure {
    let what = format!("the coordinator sent an invalid message: {error}");
    Failure::new(gradwire_proto::FailureKind::Protocol, what)
        .hint("coordinator and gradwired must be of the same release")
}

#[cfg(test)]
mod tests;
