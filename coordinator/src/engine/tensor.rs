//! One name in one process set, and what has been answered to it in this round.

use std::time::Duration;

use gradwire_proto::{
    Collective, Failure, FailureKind, NodeId, Priority, ProcessSetId, Rank, Request, TensorName,
    convert::TensorRef,
};

use super::{
    agreement::Answer,
    event::Submitted,
    ids::Registered,
    node_set::NodeSet,
    ready_table::Violation,
    world::{Members, ProcessSet},
};

/// The most late second submissions that one round keeps, for its table (BOUND).
const MOST_AMENDMENTS: usize = 4096;

/// One name in one process set.
#[derive(Debug)]
pub(super) struct Tensor {
    pub(super) set: ProcessSetId,
    pub(super) name: TensorName,
    pub(super) registered: Option<Registered>,
    /// When the first node announced it; none while nobody waits for it.
    pub(super) since: Option<Duration>,
    /// The nodes that have.
    pub(super) announced: NodeSet,
    /// The answers of those nodes that did not answer by the id alone.
    pub(super) spelled: Vec<(NodeId, Submitted)>,
    /// Second submissions that were told of later.
    pub(super) amended: Vec<Submitted>,
    /// All ranks have agreed and not all of it has gone out.
    pub(super) queued: bool,
    /// Its operations that are not done by everybody.
    pub(super) unfinished: u32,
}

impl Tensor {
    /// A tensor that nobody has announced, in a world of `nodes`.
    pub(super) fn new(set: ProcessSetId, name: TensorName, nodes: usize) -> Self {
        Self {
            set,
            name,
            registered: None,
            since: None,
            announced: NodeSet::new(nodes),
            spelled: Vec::new(),
            amended: Vec::new(),
            queued: false,
            unfinished: 0,
        }
    }

    /// How messages call it.
    pub(super) fn reference(&self) -> TensorRef {
        match &self.registered {
            Some(registered) => TensorRef::Id(registered.id),
            None => TensorRef::Name(self.name.clone()),
        }
    }

    /// The nodes that have announced it and answered by the id alone.
    fn by_id<'a>(&'a self, set: &'a ProcessSet) -> impl Iterator<Item = NodeId> + 'a {
        set.participants.iter().copied().filter(|&node| {
            self.announced.contains(node) && !self.spelled.iter().any(|(n, _)| *n == node)
        })
    }

    /// What all ranks ask for, if it is the same. The most urgent of the priorities counts.
    pub(super) fn agreed(&self) -> Option<(Request, Priority)> {
        if !self.amended.is_empty() {
            return None;
        }
        let Some((_, first)) = self.spelled.first() else {
            return self.registered.as_ref().map(|r| (r.request.clone(), r.priority));
        };
        let same = self.spelled.iter().all(|(_, s)| !s.duplicate && s.request == first.request);
        let mut priority = self.spelled.iter().map(|(_, s)| s.priority).max()?;
        // A node's answers lie side by side, so that this counts the nodes that spelled theirs.
        let changes = self.spelled.windows(2).filter(|pair| pair[0].0 != pair[1].0).count();
        if 1 + changes < self.announced.len() {
            let registered = self.registered.as_ref()?;
            if registered.request != first.request {
                return None;
            }
            priority = priority.max(registered.priority);
        }
        same.then(|| (first.request.clone(), priority))
    }

    /// Every rank's answer, with how many times it submitted it.
    pub(super) fn answers(&self, set: &ProcessSet) -> Vec<Answer> {
        let mut rows: Vec<(Rank, &Request, u32)> = Vec::new();
        if let Some(registered) = &self.registered {
            let ranks = self.by_id(set).flat_map(|node| &set.ranks[node.0 as usize]);
            rows.extend(ranks.map(|&rank| (rank, &registered.request, 1)));
        }
        for (_, s) in &self.spelled {
            let times = if s.duplicate { 2 } else { 1 };
            rows.extend(s.ranks.iter().map(|&rank| (rank, &s.request, times)));
        }
        for (rank, request) in
            self.amended.iter().flat_map(|s| s.ranks.iter().map(move |rank| (*rank, &s.request)))
        {
            match rows.iter_mut().find(|row| row.0 == rank && row.1 == request) {
                Some(row) => row.2 = 2,
                None => rows.push((rank, request, 2)),
            }
        }
        rows.into_iter()
            .map(|(rank, request, times)| Answer {
                ranks: vec![rank],
                request: request.clone(),
                times,
            })
            .collect()
    }

    /// The ranks of the nodes that have not announced it.
    pub(super) fn missing(&self, set: &ProcessSet) -> Vec<Rank> {
        let missing = set.participants.iter().filter(|&&node| !self.announced.contains(node));
        missing.flat_map(|node| set.ranks[node.0 as usize].iter().copied()).collect()
    }

    /// A rank that has left and whose node has not announced the tensor: it never will. Of several
    /// the one that left first, because others may have left for that.
    pub(super) fn left_behind(
        &self,
        set: &ProcessSet,
        members: &Members,
    ) -> Option<(NodeId, Rank)> {
        let missing = set.participants.iter().filter(|&&node| !self.announced.contains(node));
        let left = missing.flat_map(|&node| {
            let left = members.get(node).map(|member| &member.left);
            let ranks = set.ranks[node.0 as usize].iter();
            ranks.filter_map(move |rank| Some((left?.get(rank)?, node, *rank)))
        });
        left.min().map(|(_, node, rank)| (node, rank))
    }

    /// A further announcement of a node that has announced the tensor already.
    pub(super) fn amend(
        &mut self,
        node: NodeId,
        submitted: Vec<Submitted>,
    ) -> Result<(), Violation> {
        if submitted.iter().any(|s| s.duplicate) {
            // What is known already adds nothing.
            let known = |s: &Submitted| {
                let seen = self.amended.iter().filter(|a| a.request == s.request);
                let ranks: Vec<Rank> = seen.flat_map(|a| a.ranks.iter().copied()).collect();
                s.ranks.iter().all(|rank| ranks.contains(rank))
            };
            let new: Vec<Submitted> =
                submitted.into_iter().filter(|s| s.duplicate && !known(s)).collect();
            if self.amended.len() + new.len() <= MOST_AMENDMENTS {
                self.amended.extend(new);
            }
            return Ok(());
        }
        // A node with one rank can have told of a second submission when the tensor had just failed:
        // that looked like a first announcement, and this is the real one.
        let mut earlier = self.spelled.iter().filter(|(n, _)| *n == node).peekable();
        if earlier.peek().is_none() || !earlier.all(|(_, s)| s.duplicate) {
            return Err(Violation::Protocol(format!(
                "announced tensor '{}' again before it was done",
                self.name
            )));
        }
        self.spelled.retain(|(n, _)| *n != node);
        self.spelled.extend(submitted.into_iter().map(|s| (node, s)));
        Ok(())
    }
}

/// Why a request that all ranks agree on can't be done.
pub(super) fn impossible(request: &Request, set: &ProcessSet) -> Option<Failure> {
    let invalid =
        |what: String, hint: &str| Some(Failure::new(FailureKind::Invalid, what).hint(hint));
    match request.collective {
        Collective::Broadcast if set.participant_of(request.root).is_none() => invalid(
            format!(
                "a broadcast from root {} is not possible: no such rank takes part",
                request.root
            ),
            "use the rank of a process that takes part as the root",
        ),
        Collective::Barrier if request.shape.elements() != 0 => invalid(
            format!("a barrier has no elements, {} were given", request.shape.elements()),
            "submit a barrier with the shape [0]",
        ),
        _ => None,
    }
}
