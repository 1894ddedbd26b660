//! What a running engine shows of itself.

use std::time::Duration;

use gradwire_collectives::Spec;
use gradwire_proto::{Epoch, Failure, ProcessSetId, Rank, TensorName};

use super::command::Node;

/// The most tensors that one status lists.
pub(crate) const MAX_PENDING: usize = 100;

/// The most process sets that one status lists.
pub(crate) const MAX_SETS: usize = 100;

/// The most choices of algorithms that one status lists.
pub(crate) const MAX_CHOICES: usize = 256;

/// Where the job is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
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
        self.into()
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

/// Which algorithm pieces of about one size get, and how long they have taken.
#[derive(Debug, Clone, PartialEq)]
pub struct ChoiceStatus {
    /// What they are for: an allreduce, a broadcast, a reduce or a move.
    pub collective: &'static str,
    /// How many nodes take part.
    pub nodes: u32,
    /// The most bytes of such a piece; more than half of it.
    pub bytes: u64,
    /// How many pieces follow each other, rounded up to a power of two.
    pub pieces: u32,
    /// The number of the rule that holds; 0 for none.
    pub rule: u32,
    /// The algorithm.
    pub spec: Spec,
    /// Seconds per piece that the cost model predicts for `bytes`.
    pub predicted: f64,
    /// The next best and its seconds.
    pub runner_up: Option<(Spec, f64)>,
    /// Why.
    pub reason: String,
    /// How many operations have had it.
    pub operations: u64,
    /// How many of them were alone, or in a pipeline that used all of the credit.
    pub observed: u64,
    /// Seconds per piece of these.
    pub mean: f64,
    /// Their standard deviation.
    pub spread: f64,
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
#[derive(Debug, Clone, PartialEq)]
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
    /// The algorithms of at most 256 kinds of pieces.
    pub choices: Vec<ChoiceStatus>,
    /// Counts.
    pub counts: Counts,
    /// How it failed, if it did.
    pub failure: Option<Failure>,
}
