//! What a running engine shows of itself.

use std::time::Duration;

use gradwire_proto::{Epoch, Failure, ProcessSetId, Rank, TensorName};

use super::{Engine, command::Node};

/// The most tensors that one status lists.
pub(crate) const MOST_PENDING: usize = 100;

/// The most process sets that one status lists.
const MOST_SETS: usize = 100;

/// Where the job is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Not every node has joined.
    Forming,
    /// The world is complete.
    Running,
    /// Something broke; reports of the cause are gathered.
    Failing,
    /// The job is over with a failure.
    Failed,
    /// Every rank has left in good order.
    Finished,
}

impl Phase {
    /// The name that people read.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forming => "forming",
            Self::Running => "running",
            Self::Failing => "failing",
            Self::Failed => "failed",
            Self::Finished => "finished",
        }
    }
}

/// One node of the world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeStatus {
    /// What all know of it.
    pub node: Node,
    /// Time since its last message.
    pub silent: Duration,
    /// Its ranks that have left.
    pub left: Vec<Rank>,
}

/// One tensor that waits for somebody.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PendingTensor {
    /// Its process set.
    pub set: ProcessSetId,
    /// Its name.
    pub name: TensorName,
    /// Time since its first announcement.
    pub waiting: Duration,
    /// The ranks that have neither answered nor joined.
    pub missing: Vec<Rank>,
}

/// A process set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetStatus {
    /// Its number.
    pub set: ProcessSetId,
    /// Its ranks, ascending.
    pub ranks: Vec<Rank>,
    /// Those of them that have joined and wait for the others.
    pub joined: Vec<Rank>,
}

/// Counts for the metrics; cheap to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Nodes that have joined.
    pub nodes: usize,
    /// Ranks of the complete world; 0 before.
    pub ranks: u32,
    /// Process sets, that of all ranks among them; 0 before the world is complete.
    pub sets: usize,
    /// Tensors that wait for somebody.
    pub pending: usize,
    /// Agreed tensors that wait for credit.
    pub queued: usize,
    /// Tensors that were stalled when it was last looked.
    pub stalled: usize,
    /// Operations in flight.
    pub in_flight: usize,
    /// Operations that ever started.
    pub started: u64,
    /// Operations that everybody has done.
    pub done: u64,
}

/// A view of everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// Where the job is in its life.
    pub phase: Phase,
    /// Why.
    pub reason: String,
    /// The formation.
    pub epoch: Epoch,
    /// The nodes of the complete world.
    pub nodes: Vec<NodeStatus>,
    /// The process sets, the one of all ranks first; at most 100.
    pub sets: Vec<SetStatus>,
    /// At most 100 tensors that wait, oldest first.
    pub pending: Vec<PendingTensor>,
    /// Counts.
    pub counts: Counts,
    /// How it failed, if it did.
    pub failure: Option<Failure>,
}

impl Engine {
    /// Counts for the metrics.
    pub fn counts(&self) -> Counts {
        Counts {
            nodes: self.members.len().max(self.forming.len()),
            ranks: self.members.ranks(),
            sets: self.sets.len(),
            pending: self.table.waiting(),
            queued: self.queue.len(),
            stalled: self.stall.stalled,
            in_flight: self.flight.len(),
            started: self.flight.started(),
            done: self.flight.completed(),
        }
    }

    /// A view of everything, for people.
    pub fn status(&self, now: Duration) -> Status {
        let nodes = self.members.iter().map(|(_, member)| NodeStatus {
            node: member.node.clone(),
            silent: now.saturating_sub(member.heard.last()),
            left: member.left.keys().copied().collect(),
        });
        let mut pending: Vec<_> = self.table.pending().collect();
        pending.sort_unstable_by_key(|(slot, since, _)| (*since, *slot));
        pending.truncate(MOST_PENDING);
        let pending = pending.into_iter().map(|(_, since, tensor)| PendingTensor {
            set: tensor.set,
            name: tensor.name.clone(),
            waiting: now.saturating_sub(since),
            missing: self.sets.get(&tensor.set).map_or_else(Vec::new, |set| tensor.missing(set)),
        });
        let sets = self.sets.iter().take(MOST_SETS).map(|(&set, there)| SetStatus {
            set,
            ranks: there.members().to_vec(),
            joined: there.joined().iter().copied().collect(),
        });
        Status {
            phase: self.phase(),
            reason: self.why(),
            epoch: self.config.epoch,
            nodes: nodes.collect(),
            sets: sets.collect(),
            pending: pending.collect(),
            counts: self.counts(),
            failure: self.failure().cloned(),
        }
    }
}
