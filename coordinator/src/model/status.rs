//! What people can see of a running engine.

use std::time::Duration;

use gradwire_collectives::{CostModel, Spec};
use gradwire_proto::{Epoch, Failure, NodeId, ProcessSetId, Rank, Sequence, TensorName};

use super::{command::Node, learned::Sizes, network::Network};

/// The most tensors that one status lists.
pub(crate) const MAX_PENDING: usize = 100;

/// The most process sets that one status lists.
pub(crate) const MAX_SETS: usize = 100;

/// The most choices of algorithms that one status lists.
pub(crate) const MAX_CHOICES: usize = 256;

/// The most candidates of a choice that one status lists.
pub(crate) const MAX_CANDIDATES: usize = 32;

/// The most operations in flight that one status lists.
pub(crate) const MAX_OPERATIONS: usize = 32;

/// The most tensors of each of them.
pub(crate) const MAX_NAMES: usize = 3;

/// The phase of the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Phase {
    /// Not every node has joined.
    Forming,
    /// The world is complete.
    Running,
    /// Something failed, and reports of the cause are collected.
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
    /// What all nodes know of it.
    pub node: Node,
    /// Time since its last message.
    pub silent: Duration,
    /// Its ranks that have left.
    pub left: Vec<Rank>,
}

/// One tensor that waits for some rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PendingTensor {
    /// Its process set.
    pub set: ProcessSetId,
    /// Its name.
    pub name: TensorName,
    /// Time since its first announcement.
    pub waiting: Duration,
    /// The ranks that have neither submitted it nor joined.
    pub missing: Vec<Rank>,
}

/// An operation in flight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OperationStatus {
    /// Its number.
    pub sequence: Sequence,
    /// Time since it started.
    pub running: Duration,
    /// The names of at most 3 of its tensors.
    pub tensors: Vec<String>,
    /// The number of its tensors.
    pub count: usize,
    /// The nodes that have not done it.
    pub missing: Vec<NodeId>,
}

/// A process set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetStatus {
    /// Its id.
    pub set: ProcessSetId,
    /// Its ranks, ascending.
    pub ranks: Vec<Rank>,
    /// Its ranks that have joined and wait for the others.
    pub joined: Vec<Rank>,
}

/// Which algorithm pieces of about one size get, and how long they have taken.
#[derive(Debug, Clone, PartialEq)]
pub struct ChoiceStatus {
    /// What the pieces do: an allreduce, a broadcast, a reduce or a move.
    pub collective: &'static str,
    /// The number of nodes that take part.
    pub nodes: u32,
    /// The most bytes of such a piece; more than half of it.
    pub bytes: u64,
    /// The number of pieces that follow each other, rounded up to a power of two.
    pub pieces: u32,
    /// The number of the rule that applies; 0 for none.
    pub rule: u32,
    /// The algorithm.
    pub spec: Spec,
    /// Seconds per piece that the cost model predicts for `bytes`.
    pub predicted: f64,
    /// Seconds per piece that it should take, by measured times where there are any.
    pub expected: f64,
    /// At most 32 algorithms among which it was chosen, in the order of the model.
    pub candidates: Vec<CandidateStatus>,
    /// The next best algorithm by what it should take, and that.
    pub runner_up: Option<(Spec, f64)>,
    /// Why it was chosen.
    pub reason: String,
    /// The number of the choice: from 1, and one more whenever measured times have changed it.
    pub version: u32,
    /// The number of operations, of all versions and of exploration.
    pub operations: u64,
    /// The number of those with `spec` that were alone, or in a pipeline of it that used all of
    /// the credit, and of whole bursts of it.
    pub observed: u64,
    /// The mean seconds per piece of these.
    pub mean: f64,
    /// Their standard deviation.
    pub spread: f64,
}

/// An algorithm that may be chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CandidateStatus {
    /// The algorithm.
    pub spec: Spec,
    /// Seconds per piece that the cost model predicts.
    pub predicted: f64,
    /// Seconds per piece that it should take, by measured times where there are any.
    pub expected: f64,
    /// The number of operations that ran with it to measure it.
    pub tried: u64,
}

/// How large pieces and chunks are, and how long they have taken.
#[derive(Debug, Clone, PartialEq)]
pub struct SizesStatus {
    /// What is used.
    pub sizes: Sizes,
    /// Why.
    pub reason: String,
    /// From 1, and one more whenever measured times have changed it.
    pub version: u32,
    /// The number of operations in pipelines that used all of the credit.
    pub observed: u64,
    /// The mean seconds per MiB of these.
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
    /// Process sets, including that of all ranks; 0 before the world is complete.
    pub sets: usize,
    /// Tensors that wait for some rank.
    pub pending: usize,
    /// Agreed tensors that wait for credit.
    pub queued: usize,
    /// Tensors that were stalled at the last check.
    pub stalled: usize,
    /// Operations in flight.
    pub in_flight: usize,
    /// Operations that ever started.
    pub started: u64,
    /// Operations that all nodes have done.
    pub done: u64,
}

/// The state of the engine, for people.
#[derive(Debug, Clone, PartialEq)]
pub struct Status {
    /// The phase of the job.
    pub phase: Phase,
    /// The reason for the phase.
    pub reason: String,
    /// The number of this formation of the world.
    pub epoch: Epoch,
    /// The nodes of the complete world.
    pub nodes: Vec<NodeStatus>,
    /// The process sets, the one of all ranks first; at most 100.
    pub sets: Vec<SetStatus>,
    /// At most 100 tensors that wait, oldest first.
    pub pending: Vec<PendingTensor>,
    /// At most 32 operations in flight, oldest first.
    pub operations: Vec<OperationStatus>,
    /// The algorithms of at most 256 kinds of pieces.
    pub choices: Vec<ChoiceStatus>,
    /// How large pieces and chunks are.
    pub sizes: SizesStatus,
    /// Settings that should be faster at the next start, each with its reason.
    pub advice: Vec<String>,
    /// What was measured of the links between nodes, once it is.
    pub network: Option<Network>,
    /// The costs with which algorithms are chosen.
    pub cost: CostModel,
    /// The counts.
    pub counts: Counts,
    /// The failure, if the job has failed.
    pub failure: Option<Failure>,
}
