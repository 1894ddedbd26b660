//! The state of a running engine, for viewers.

use std::time::Duration;

use gradwire_collectives::{CostModel, Spec};
use gradwire_proto::{Epoch, Failure, NodeId, ProcessSetId, Rank, Sequence, TensorName};

use super::{command::Node, learned::Sizes, network::Network};

/// The most tensors in a status.
pub(crate) const MAX_PENDING: usize = 100;

/// The most process sets in a status.
pub(crate) const MAX_SETS: usize = 100;

/// The most choices of algorithms in a status.
pub(crate) const MAX_CHOICES: usize = 256;

/// The most candidates of a choice in a status.
pub(crate) const MAX_CANDIDATES: usize = 32;

/// The most operations in flight in a status.
pub(crate) const MAX_OPERATIONS: usize = 32;

/// The most tensors of an operation in a status.
pub(crate) const MAX_NAMES: usize = 3;

/// The phase of the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Phase {
    /// Not every node has joined.
    Forming,
    /// The world is complete.
    Running,
    /// Something failed, and reports are collected to find the cause.
    Failing,
    /// The job is over with a failure.
    Failed,
    /// Every rank has left normally.
    Finished,
}

impl Phase {
    /// The name in texts.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// One node of the world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeStatus {
    /// Its description.
    pub node: Node,
    /// Time since its last message.
    pub silent: Duration,
    /// Its ranks that have left.
    pub left: Vec<Rank>,
}

/// A tensor that waits for a rank.
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

/// The algorithm for pieces of similar size, and its measured times.
#[derive(Debug, Clone, PartialEq)]
pub struct ChoiceStatus {
    /// The kind of the pieces: an allreduce, a broadcast, a reduce or a move.
    pub collective: &'static str,
    /// The number of participating nodes.
    pub nodes: u32,
    /// The most bytes of such a piece; each has more than half of that.
    pub bytes: u64,
    /// The number of consecutive pieces, rounded up to a power of two.
    pub pieces: u32,
    /// The number of the rule that applies; 0 for none.
    pub rule: u32,
    /// The algorithm.
    pub spec: Spec,
    /// Seconds per piece that the cost model predicts for `bytes`.
    pub predicted: f64,
    /// Expected seconds per piece, by measured times if there are any.
    pub expected: f64,
    /// At most 32 candidates, in the order of the model.
    pub candidates: Vec<CandidateStatus>,
    /// The second-fastest algorithm, and its expected seconds per piece.
    pub runner_up: Option<(Spec, f64)>,
    /// Why it was chosen.
    pub reason: String,
    /// The version of the choice: starts at 1, and grows whenever measured times change the choice.
    pub version: u32,
    /// The number of operations, including other versions and exploration.
    pub operations: u64,
    /// The number of measurements with `spec`: of single pieces, of pieces in a pipeline that used
    /// up the credit, and of whole bursts.
    pub observed: u64,
    /// The mean of the measured seconds per piece.
    pub mean: f64,
    /// Their standard deviation.
    pub spread: f64,
}

/// A candidate of a choice.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CandidateStatus {
    /// The algorithm.
    pub spec: Spec,
    /// Seconds per piece that the cost model predicts.
    pub predicted: f64,
    /// Expected seconds per piece, by measured times if there are any.
    pub expected: f64,
    /// The number of operations that explored it.
    pub tried: u64,
}

/// The sizes of pieces and chunks, and their measured times.
#[derive(Debug, Clone, PartialEq)]
pub struct SizesStatus {
    /// The sizes in use.
    pub sizes: Sizes,
    /// Why they were chosen.
    pub reason: String,
    /// Starts at 1, and grows whenever measured times change the sizes.
    pub version: u32,
    /// The number of measured operations, in pipelines that used up the credit.
    pub observed: u64,
    /// The mean of the measured seconds per MiB.
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
    /// Process sets, including the global one; 0 before the world is complete.
    pub sets: usize,
    /// Tensors that wait for a rank.
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

/// The state of the engine.
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
    /// The process sets, the global one first; at most 100.
    pub sets: Vec<SetStatus>,
    /// At most 100 waiting tensors, oldest first.
    pub pending: Vec<PendingTensor>,
    /// At most 32 operations in flight, oldest first.
    pub operations: Vec<OperationStatus>,
    /// The algorithms of at most 256 kinds of pieces.
    pub choices: Vec<ChoiceStatus>,
    /// The sizes of pieces and chunks.
    pub sizes: SizesStatus,
    /// Recommended settings for the next start, each with its reason.
    pub advice: Vec<String>,
    /// The measured links between nodes, once the probe is over.
    pub network: Option<Network>,
    /// The costs by which algorithms are chosen.
    pub cost: CostModel,
    /// The counts.
    pub counts: Counts,
    /// The failure, if the job has failed.
    pub failure: Option<Failure>,
}
