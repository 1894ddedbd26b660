//! A node that behaves like a daemon, and checks everything that it receives.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use gradwire_coordinator::model::{
    ConnectionId, Event,
    command::Execute,
    event::{Announcement, Submitted},
};
use gradwire_proto::{
    Agreed, Collective, Flow, NO_PART, NodeId, Priority, ProcessSetId, Rank, Request, Sequence,
    TensorId, TensorName, convert::TensorRef,
};

pub(crate) type Key = (ProcessSetId, String);

/// The number of ranks on each node.
#[derive(Debug, Default)]
pub(crate) struct World {
    pub(crate) slots: Vec<u32>,
}

impl World {
    pub(crate) fn ranks(&self) -> Vec<Rank> {
        (0..self.slots.iter().sum()).map(Rank).collect()
    }

    pub(crate) fn node_of(&self, rank: Rank) -> NodeId {
        let mut before = 0;
        let at = self.slots.iter().position(|slots| {
            before += slots;
            rank.0 < before
        });
        NodeId(at.unwrap() as u32)
    }
}

/// A range of a tensor that concerns this node.
struct Segment {
    key: Key,
    part: u32,
    offset: u64,
    count: u64,
    agreed: Arc<Agreed>,
    members: Vec<Rank>,
}

/// The submissions of the local ranks under one name, and how much of each part is done.
#[derive(Default)]
struct Tensor {
    submitted: BTreeMap<Rank, (Request, i32)>,
    announced: bool,
    covered: BTreeMap<u32, u64>,
}

struct Registered {
    id: TensorId,
    agreed: Arc<Agreed>,
    priority: i32,
}

pub(crate) struct Node {
    id: NodeId,
    pub(crate) sets: BTreeMap<ProcessSetId, Vec<Rank>>,
    joined: BTreeMap<ProcessSetId, BTreeSet<Rank>>,
    tensors: BTreeMap<Key, Tensor>,
    registered: BTreeMap<Key, Registered>,
    ids: BTreeMap<TensorId, Key>,
    /// Unread answers.
    pub(crate) inbox: VecDeque<Execute>,
    todo: VecDeque<(Sequence, Vec<Segment>)>,
    /// The last operation that it has received.
    seen: u64,
    /// The completed handles of ranks.
    pub(crate) complete: Vec<(Rank, Key)>,
}

impl Node {
    pub(crate) fn new(id: NodeId, world: &World) -> Self {
        Self {
            id,
            sets: BTreeMap::from([(ProcessSetId::GLOBAL, world.ranks())]),
            joined: BTreeMap::new(),
            tensors: BTreeMap::new(),
            registered: BTreeMap::new(),
            ids: BTreeMap::new(),
            inbox: VecDeque::new(),
            todo: VecDeque::new(),
            seen: 0,
            complete: Vec::new(),
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.inbox.is_empty() && self.todo.is_empty() && self.tensors.is_empty()
    }

    pub(crate) fn ids(&self) -> usize {
        self.ids.len()
    }

    fn connection(&self) -> ConnectionId {
        ConnectionId(u64::from(self.id.0))
    }

    fn local(&self, world: &World, members: &[Rank]) -> Vec<Rank> {
        members.iter().copied().filter(|&rank| world.node_of(rank) == self.id).collect()
    }

    /// A local rank submits a request. Returns the message to send.
    pub(crate) fn submit(
        &mut self,
        world: &World,
        rank: Rank,
        key: Key,
        request: Request,
        priority: i32,
    ) -> Option<Event> {
        let mut announcements = Vec::new();
        if request.collective == Collective::Join {
            assert!(self.joined.entry(key.0).or_default().insert(rank));
            announcements.push(Announcement {
                set: key.0,
                tensor: TensorRef::Name(TensorName::new(&key.1).unwrap()),
                submitted: vec![Submitted {
                    ranks: vec![rank],
                    request,
                    priority: Priority(0),
                    duplicate: false,
                    sites: Vec::new(),
                }],
                latest: None,
            });
            // Tensors that waited only for this rank are announced with it.
            let of_set = self.tensors.keys().filter(|other| other.0 == key.0);
            for other in of_set.cloned().collect::<Vec<_>>() {
                announcements.extend(self.announce(world, &other));
            }
        } else {
            let tensor = self.tensors.entry(key.clone()).or_default();
            assert!(!tensor.announced, "{key:?} is not done for rank {rank}");
            let twice = tensor.submitted.insert(rank, (request, priority)).is_some();
            assert!(!twice, "{key:?} of rank {rank}");
            announcements.extend(self.announce(world, &key));
        }
        let connection = self.connection();
        (!announcements.is_empty()).then_some(Event::Ready { connection, announcements })
    }

    /// Announces a tensor if all local ranks have submitted it or joined.
    fn announce(&mut self, world: &World, key: &Key) -> Option<Announcement> {
        let set = &self.sets[&key.0];
        let joined = self.joined.get(&key.0).cloned().unwrap_or_default();
        let tensor = &self.tensors[key];
        let (first, _) = tensor.submitted.values().next()?;
        let members = members(set, first, &[]);
        let local = self.local(world, &members);
        let there = |rank: &Rank| tensor.submitted.contains_key(rank);
        if tensor.announced || !local.iter().all(|rank| there(rank) || joined.contains(rank)) {
            return None;
        }
        let again = self.registered.get(key).filter(|registered| {
            local.iter().all(|rank| {
                tensor.submitted.get(rank).is_some_and(|(request, priority)| {
                    *priority == registered.priority
                        && !joined.contains(rank)
                        && registered.agreed.fits(&members, *rank, request)
                })
            })
        });
        let announcement = match again {
            Some(registered) => Announcement {
                set: key.0,
                tensor: TensorRef::Id(registered.id),
                submitted: Vec::new(),
                latest: None,
            },
            None => Announcement {
                set: key.0,
                tensor: TensorRef::Name(TensorName::new(&key.1).unwrap()),
                submitted: tensor
                    .submitted
                    .iter()
                    .map(|(rank, (request, priority))| Submitted {
                        ranks: vec![*rank],
                        request: request.clone(),
                        priority: Priority(*priority),
                        duplicate: false,
                        sites: Vec::new(),
                    })
                    .collect(),
                latest: None,
            },
        };
        self.tensors.get_mut(key).unwrap().announced = true;
        Some(announcement)
    }

    fn key(&self, set: ProcessSetId, tensor: &TensorRef) -> Key {
        match tensor {
            TensorRef::Id(id) => self.ids[id].clone(),
            TensorRef::Name(name) => (set, name.to_string()),
        }
    }

    /// Completes a request that is not an operation.
    fn answered(&mut self, tensor: &TensorRef) -> Vec<u64> {
        let key = self.key(ProcessSetId::GLOBAL, tensor);
        let tensor = self.tensors.remove(&key).expect("the request was submitted");
        let (request, _) = tensor.submitted.values().next().unwrap();
        let list = request.list.clone();
        self.complete.extend(tensor.submitted.into_keys().map(|rank| (rank, key.clone())));
        list
    }

    /// Reads the next answer, or runs the next operation. `None` if there is nothing to do.
    pub(crate) fn act(&mut self, world: &World) -> Option<Option<Event>> {
        if let Some(execute) = self.inbox.pop_front() {
            return Some(self.read(world, execute));
        }
        let (sequence, segments) = self.todo.pop_front()?;
        for segment in segments {
            self.carry_out(segment);
        }
        let connection = self.connection();
        Some(Some(Event::Done { connection, sequences: vec![sequence] }))
    }

    fn read(&mut self, world: &World, execute: Execute) -> Option<Event> {
        for created in execute.sets_created {
            let list = self.answered(&created.tensor);
            let ranks: Vec<u64> = created.ranks.iter().map(|rank| u64::from(rank.0)).collect();
            assert_eq!(list, ranks);
            assert!(self.sets.insert(created.set, created.ranks).is_none(), "ids are not reused");
        }
        for new in execute.registrations {
            let key = (new.set, new.name.to_string());
            let (id, agreed, priority) = (new.id, new.agreed, new.priority.0);
            if let Some(old) =
                self.registered.insert(key.clone(), Registered { id, agreed, priority })
            {
                self.ids.remove(&old.id);
            }
            assert!(self.ids.insert(id, key).is_none(), "ids are not reused");
        }
        assert!(execute.failures.is_empty(), "nothing may fail: {:?}", execute.failures);
        for operation in execute.operations {
            // ORD: one order over all sets, the same on every node.
            assert_eq!(operation.sequence.0, self.seen + 1);
            self.seen += 1;
            let set = self.sets[&operation.set].clone();
            assert!(operation.absent.is_sorted());
            let mut ways = BTreeSet::new();
            let mut segments = Vec::new();
            let mut reported: Option<(Key, Arc<Agreed>)> = None;
            for segment in operation.segments {
                let key = self.key(operation.set, &segment.tensor);
                let agreed = match &segment.tensor {
                    TensorRef::Id(id) => {
                        assert!(segment.agreed.is_none() && operation.absent.is_empty());
                        let registered = &self.registered[&key];
                        assert_eq!(registered.id, *id);
                        Arc::clone(&registered.agreed)
                    }
                    // Only its first segment contains the agreed request.
                    TensorRef::Name(_) => match reported.filter(|(before, _)| *before == key) {
                        None => segment.agreed.expect("it has no id"),
                        Some((_, agreed)) => {
                            assert!(segment.agreed.is_none(), "{key:?} was received before");
                            agreed
                        }
                    },
                };
                reported = Some((key.clone(), Arc::clone(&agreed)));
                let members = members(&set, agreed.request(), &operation.absent);
                assert!(agreed.is_of(&members), "{agreed:?} is not of {members:?}");
                let (part, offset, count) = (segment.part, segment.offset, segment.count);
                let flows = match part {
                    NO_PART => Vec::new(),
                    part => agreed.flows_of(&members, part as usize),
                };
                if flows.is_empty() {
                    assert_eq!((part, offset, count), (NO_PART, 0, 0));
                    let flows = agreed.flows(&members);
                    assert!(flows.iter().all(|flow| flow.count == 0), "it has elements");
                }
                let at = if part == NO_PART { 0 } else { part as usize };
                assert!(operation.request.is_piece_of(agreed.request(), at));
                let way = match &flows[..] {
                    [] => None,
                    [flow] if !agreed.request().has_many_flows() => Some(way(world, flow)),
                    _ => Some((None, None)),
                };
                let nodes = match way {
                    Some((Some(from), Some(to))) => BTreeSet::from([from, to]),
                    _ => members.iter().map(|rank| world.node_of(*rank)).collect(),
                };
                ways.insert((way, nodes.clone()));
                if nodes.contains(&self.id) {
                    segments.push(Segment { key, part, offset, count, agreed, members });
                }
            }
            assert_eq!(ways.len(), 1, "a piece has one route: {ways:?}");
            if !segments.is_empty() {
                self.todo.push_back((operation.sequence, segments));
            }
        }
        for joined in execute.joined {
            let set = self.sets[&joined.set].clone();
            assert!(set.contains(&joined.last));
            let local = self.local(world, &set);
            let here = self.joined.remove(&joined.set).unwrap_or_default();
            assert!(local.iter().copied().eq(here.iter().copied()), "all local ranks have joined");
            self.complete.extend(here.into_iter().map(|rank| (rank, (joined.set, "join".into()))));
        }
        for removed in execute.sets_removed {
            let list = self.answered(&removed.tensor);
            assert_eq!(list, [u64::from(removed.set.0)]);
            assert!(self.tensors.keys().all(|key| key.0 != removed.set), "nothing is in flight");
            assert!(self.sets.remove(&removed.set).is_some());
            self.registered.retain(|key, _| key.0 != removed.set);
            self.ids.retain(|_, key| key.0 != removed.set);
        }
        for id in &execute.evicted {
            if let Some(key) = self.ids.remove(id) {
                self.registered.remove(&key);
            }
        }
        let (connection, ids) = (self.connection(), execute.evicted);
        (!ids.is_empty()).then_some(Event::Forgotten { connection, ids })
    }

    fn carry_out(&mut self, segment: Segment) {
        let Segment { key, part, offset, count, agreed, members } = segment;
        // A tensor is as long as its longest flow.
        let lengths: Vec<(u32, u64)> = (0..agreed.request().parts())
            .map(|part| {
                let flows = agreed.flows_of(&members, part);
                (part as u32, flows.iter().map(|flow| flow.count).max().unwrap_or(0))
            })
            .filter(|(_, length)| *length > 0)
            .collect();
        let tensor = self.tensors.get_mut(&key).expect("a tensor that is not done");
        assert!(tensor.announced);
        for (rank, (request, _)) in &tensor.submitted {
            assert!(agreed.fits(&members, *rank, request), "{request:?} of {rank} in {agreed:?}");
        }
        if part != NO_PART {
            // ONE: each element exactly once, in order.
            let next = tensor.covered.entry(part).or_default();
            assert_eq!(*next, offset, "ONE");
            *next += count;
            assert!(lengths.iter().any(|&(own, length)| own == part && *next <= length), "ONE");
        }
        if lengths.iter().all(|(part, length)| tensor.covered.get(part) == Some(length)) {
            let done = self.tensors.remove(&key).unwrap();
            self.complete.extend(done.submitted.into_keys().map(|rank| (rank, key.clone())));
        }
    }
}

/// The ranks that take part in a tensor.
fn members(set: &[Rank], request: &Request, absent: &[Rank]) -> Vec<Rank> {
    let mut members: Vec<Rank> = match request.collective {
        Collective::SendReceive => vec![request.root, Rank(request.list[0] as u32)],
        _ => set.iter().copied().filter(|rank| !absent.contains(rank)).collect(),
    };
    members.sort_unstable();
    members.dedup();
    members
}

fn way(world: &World, flow: &Flow) -> (Option<NodeId>, Option<NodeId>) {
    let node = |rank| world.node_of(rank);
    (flow.source.map(node), flow.target.map(node))
}
