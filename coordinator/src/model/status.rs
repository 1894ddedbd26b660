//! What viewers see of a running engine: limits of the status, and conversions to messages.

use std::time::Duration;

use gradwire_collectives::CostModel;
use gradwire_proto::{Rank, pb};

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

pub(crate) fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

pub(crate) fn numbers<'a>(ranks: impl IntoIterator<Item = &'a Rank>) -> Vec<u32> {
    ranks.into_iter().map(|rank| rank.0).collect()
}

pub(crate) fn costs(cost: &CostModel) -> pb::Costs {
    pb::Costs {
        latency: cost.in_rack.latency,
        per_byte: cost.in_rack.per_byte,
        rack_latency: cost.cross_rack.latency,
        rack_per_byte: cost.cross_rack.per_byte,
        reduce_per_byte: cost.reduce_per_byte,
        per_message: cost.per_message,
        lane_per_byte: cost.lane_per_byte,
        publish_per_byte: cost.publish_per_byte,
        operation: cost.operation,
        chunk: cost.chunk,
        burst_loss: cost.burst_loss,
        free_fan_in: cost.free_fan_in,
        incast_loss: cost.incast_loss,
        queue: cost.queue,
        overflow: cost.overflow,
        paths: cost.paths,
        connections: cost.connections,
    }
}
