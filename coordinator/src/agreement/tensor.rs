//! One name in one process set, and the requests for it in this round.

use std::{borrow::Cow, collections::BTreeMap, time::Duration};

use fixedbitset::FixedBitSet;
use gradwire_proto::{
    Agreed, Collective, NodeId, Priority, ProcessSetId, Rank, Request, TensorName,
    convert::TensorRef,
};

use super::ids::Registered;
use crate::{
    membership::members::Members,
    model::{event::Submitted, process_set::ProcessSet},
};

/// The most second submissions that a round keeps for the table of a disagreement (BOUND).
const MAX_DUPLICATES: usize = 4096;

/// The sender and the receiver of a send and receive.
pub(super) fn peers(request: &Request) -> Option<[Rank; 2]> {
    match (request.collective, &request.list[..]) {
        (Collective::SendReceive, &[to]) => Some([request.root, Rank(u32::try_from(to).ok()?)]),
        _ => None,
    }
}

/// The ranks for which an announcement by id counts, if the id means `request`: all ranks of the
/// node in the set, or its ranks among the sender and the receiver.
pub(super) fn answers_by_id<'a>(
    request: &Request,
    set: &'a ProcessSet,
    node: NodeId,
) -> Cow<'a, [Rank]> {
    let local = set.local(node);
    match peers(request) {
        None => Cow::Borrowed(local),
        Some(peers) => local.iter().copied().filter(|rank| peers.contains(rank)).collect(),
    }
}

/// The request of a rank that is announced by an id with the meaning `agreed`.
pub(super) fn asked_by_id<'a>(
    agreed: &'a Agreed,
    set: &ProcessSet,
    rank: Rank,
) -> Cow<'a, Request> {
    let request = agreed.request();
    if !request.has_free_rows() {
        return Cow::Borrowed(request);
    }
    match peers(request) {
        None => Cow::Owned(agreed.asked(set.members(), rank)),
        Some(mut pair) => {
            pair.sort_unstable();
            let members = if pair[0] == pair[1] { &pair[..1] } else { &pair[..] };
            Cow::Owned(agreed.asked(members, rank))
        }
    }
}

/// The kinds of calls in a round, as far as they decide which ranks must submit.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct CallKinds {
    /// There is a send and receive, for two ranks.
    sends: bool,
    /// There is a join, of each rank for itself.
    joins: bool,
    /// There is another call, for all ranks that have not joined.
    others: bool,
}

impl CallKinds {
    pub(super) fn add(&mut self, request: &Request) {
        match request.collective {
            Collective::SendReceive => self.sends = true,
            Collective::Join => self.joins = true,
            _ => self.others = true,
        }
    }

    pub(super) fn with(self, other: Self) -> Self {
        Self {
            sends: self.sends || other.sends,
            joins: self.joins || other.joins,
            others: self.others || other.others,
        }
    }

    pub(super) fn has_joins(self) -> bool {
        self.joins
    }

    pub(super) fn only_joins(self) -> bool {
        self.joins && !self.sends && !self.others
    }

    pub(super) fn only_sends(self) -> bool {
        self.sends && !self.joins && !self.others
    }

    /// Whether a node may announce its ranks one by one.
    pub(super) fn is_partial(self) -> bool {
        self.sends || self.joins
    }
}

/// One name in one process set.
#[derive(Debug)]
pub(crate) struct Tensor {
    pub(super) set: ProcessSetId,
    pub(super) name: TensorName,
    pub(super) registered: Option<Registered>,
    /// When the first node announced it; `None` while it is not pending.
    pub(super) since: Option<Duration>,
    /// When the first rank submitted it, as far as nodes have reported.
    pub(super) submitted: Duration,
    /// The nodes that have announced it.
    pub(super) announced: FixedBitSet,
    /// The full requests of the nodes that did not announce it by id.
    pub(super) requests: Vec<(NodeId, Submitted)>,
    /// Second submissions that were reported after the first ones.
    pub(super) duplicates: Vec<Submitted>,
    /// The kinds of calls in this round.
    pub(super) kinds: CallKinds,
    /// Whether all ranks have agreed but not all of it has been sent out.
    pub(super) queued: bool,
    /// The number of its segments that are in flight.
    pub(super) unfinished: u32,
}

impl Tensor {
    /// A tensor that no node has announced, in a world with `nodes` nodes.
    pub(super) fn new(set: ProcessSetId, name: TensorName, nodes: usize) -> Self {
        Self {
            set,
            name,
            registered: None,
            since: None,
            submitted: Duration::ZERO,
            announced: FixedBitSet::with_capacity(nodes),
            requests: Vec::new(),
            duplicates: Vec::new(),
            kinds: CallKinds::default(),
            queued: false,
            unfinished: 0,
        }
    }

    /// How messages refer to it: by an id only if the nodes know the id.
    pub(super) fn reference(&self) -> TensorRef {
        match &self.registered {
            Some(registered) if registered.announced => TensorRef::Id(registered.id),
            _ => TensorRef::Name(self.name.clone()),
        }
    }

    /// Whether dispatch has parts of it that are not done.
    pub(super) fn is_out(&self) -> bool {
        self.queued || self.unfinished > 0
    }

    /// Whether a node has announced it in this round.
    pub(super) fn has_announced(&self, node: NodeId) -> bool {
        self.announced.contains(node.index())
    }

    /// Whether it is neither pending nor in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.since.is_none() && !self.queued && self.unfinished == 0
    }

    /// The ranks for which a node's announcement by id counts.
    pub(super) fn ranks_by_id<'a>(&self, set: &'a ProcessSet, node: NodeId) -> Cow<'a, [Rank]> {
        match &self.registered {
            None => Cow::Borrowed(set.local(node)),
            Some(registered) => answers_by_id(registered.plan.agreed.request(), set, node),
        }
    }

    /// The nodes that have announced it by id.
    fn by_id(&self, set: &ProcessSet) -> Vec<NodeId> {
        let mut in_full: Vec<NodeId> = self.requests.iter().map(|(node, _)| *node).collect();
        in_full.sort_unstable();
        in_full.dedup();
        if in_full.len() == self.announced.count_ones(..) {
            return Vec::new();
        }
        let is_by_id =
            |node: &NodeId| self.has_announced(*node) && in_full.binary_search(node).is_err();
        set.nodes().iter().copied().filter(is_by_id).collect()
    }

    /// What was agreed before, if a node has announced it by id in this round.
    pub(super) fn again(&self, set: &ProcessSet) -> Option<&Registered> {
        self.registered.as_ref().filter(|_| !self.by_id(set).is_empty())
    }

    /// The full requests of a node in this round.
    pub(super) fn requests_of(&self, node: NodeId) -> impl Iterator<Item = &Submitted> {
        self.requests.iter().filter(move |(n, _)| *n == node).map(|(_, submitted)| submitted)
    }

    /// The ranks that must submit it or join: all of the set, or the sender and the receiver.
    pub(super) fn concerned<'a>(&self, set: &'a ProcessSet) -> Cow<'a, [Rank]> {
        if !self.kinds.only_sends() {
            return Cow::Borrowed(set.members());
        }
        let again = self.again(set).map(|registered| registered.plan.agreed.request());
        let in_full = self.requests.iter().map(|(_, s)| &s.request);
        let peers = in_full.chain(again).filter_map(peers).flatten();
        let mut all: Vec<Rank> = peers.filter(|rank| set.contains(*rank)).collect();
        all.sort_unstable();
        all.dedup();
        Cow::Owned(all)
    }

    /// The requests of the ranks that have submitted it.
    pub(super) fn answers<'a>(&'a self, set: &'a ProcessSet) -> BTreeMap<Rank, Cow<'a, Request>> {
        let mut all = BTreeMap::new();
        if let Some(registered) = self.again(set) {
            for node in self.by_id(set) {
                for &rank in &*self.ranks_by_id(set, node) {
                    all.insert(rank, asked_by_id(&registered.plan.agreed, set, rank));
                }
            }
        }
        for (_, submitted) in &self.requests {
            for &rank in &submitted.ranks {
                all.insert(rank, Cow::Borrowed(&submitted.request));
            }
        }
        all
    }

    /// The ranks that have neither submitted it nor joined.
    pub(super) fn missing(&self, set: &ProcessSet) -> Vec<Rank> {
        self.silent(set).into_iter().filter(|rank| !set.joined().contains(rank)).collect()
    }

    /// The ranks that have not submitted it, whether they have joined or not.
    pub(super) fn silent(&self, set: &ProcessSet) -> Vec<Rank> {
        let by_id =
            self.by_id(set).into_iter().flat_map(|node| self.ranks_by_id(set, node).into_owned());
        let mut answered: Vec<Rank> =
            self.requests.iter().flat_map(|(_, s)| s.ranks.iter().copied()).chain(by_id).collect();
        answered.sort_unstable();
        let concerned = self.concerned(set);
        concerned.iter().copied().filter(|rank| answered.binary_search(rank).is_err()).collect()
    }

    /// The ranks that have submitted it, ascending.
    pub(super) fn submitted(&self, set: &ProcessSet) -> Vec<Rank> {
        let silent = self.silent(set);
        let concerned = self.concerned(set);
        concerned.iter().copied().filter(|rank| silent.binary_search(rank).is_err()).collect()
    }

    /// Whether all ranks that have not joined have submitted it.
    pub(super) fn is_complete(&self, set: &ProcessSet) -> bool {
        if self.since.is_none() {
            return false;
        }
        if self.kinds.only_joins() {
            return set.all_joined();
        }
        if self.kinds.is_partial() {
            return self.missing(set).is_empty();
        }
        // A node announces at once for all of its ranks that have not joined.
        if set.joined().is_empty() {
            return self.announced.count_ones(..) == set.nodes().len();
        }
        let joined = |node| set.local(node).iter().all(|rank| set.joined().contains(rank));
        set.nodes().iter().all(|&node| self.has_announced(node) || joined(node))
    }

    /// The part of the requests that must be equal on all ranks, with the highest priority; `None`
    /// if it is not equal.
    pub(super) fn common(&self, set: &ProcessSet) -> Option<(Request, Priority)> {
        if !self.duplicates.is_empty() || self.requests.iter().any(|(_, s)| s.duplicate) {
            return None;
        }
        let again = self.again(set).map(|r| (r.plan.agreed.request(), r.priority));
        let in_full = self.requests.iter().map(|(_, s)| (&s.request, s.priority));
        let mut all = again.into_iter().chain(in_full);
        let (first, mut priority) = all.next()?;
        for (request, urgency) in all {
            if !request.agrees_with(first) {
                return None;
            }
            priority = priority.max(urgency);
        }
        Some((first.common(), priority))
    }

    /// The first rank that has left without submitting it. Others may have left for that reason.
    pub(super) fn left_behind(
        &self,
        set: &ProcessSet,
        members: &Members,
    ) -> Option<(NodeId, Rank)> {
        let missing = self.missing(set).into_iter();
        let left = missing.filter_map(|rank| {
            let node = set.node_of(rank)?;
            Some((*members.get(node)?.left.get(&rank)?, node, rank))
        });
        left.min().map(|(_, node, rank)| (node, rank))
    }

    /// Keeps new second submissions for the table of a disagreement.
    pub(super) fn add_duplicates(&mut self, submitted: Vec<Submitted>) {
        let known = |s: &Submitted| {
            let seen = self.duplicates.iter().filter(|a| a.request == s.request);
            let ranks: Vec<Rank> = seen.flat_map(|a| a.ranks.iter().copied()).collect();
            s.ranks.iter().all(|rank| ranks.contains(rank))
        };
        let new: Vec<Submitted> =
            submitted.into_iter().filter(|s| s.duplicate && !known(s)).collect();
        if self.duplicates.len() + new.len() <= MAX_DUPLICATES {
            self.duplicates.extend(new);
        }
    }

    /// Replaces a node's earlier announcement in this round.
    pub(super) fn replace(&mut self, node: NodeId, submitted: Vec<Submitted>) {
        self.requests.retain(|(n, _)| *n != node);
        self.requests.extend(submitted.into_iter().map(|s| (node, s)));
    }
}
