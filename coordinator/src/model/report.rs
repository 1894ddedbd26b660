//! The report of a node's daemon, about once per second.

use std::time::Duration;

/// The report of a node.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Report {
    /// Its ranks in order, possibly only the first ones (BOUND).
    pub ranks: Vec<RankReport>,
    /// The peers with which it exchanges most (BOUND).
    pub peers: Vec<PeerReport>,
    /// Bytes per second of its line; `None` if unknown.
    pub line_rate: Option<u64>,
    /// Bytes of memory of the daemon, including shared memory.
    pub resident: u64,
    /// Bytes of shared memory that ranks have handed over.
    pub shared: u64,
    /// Pieces that it is exchanging with other nodes.
    pub pieces: u32,
    /// Submitted tensors of its ranks that are not done.
    pub queued: u32,
    /// Queued tensors that have waited too long for a rank of the node.
    pub stalled: u32,
}

/// The report on a rank.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RankReport {
    /// The number of its steps since it attached.
    pub steps: u32,
    /// Seconds per step, of its last steps; 0 before the second one.
    pub step_seconds: f32,
    /// The share of the time in which it was blocked waiting for results.
    pub exposed: f32,
    /// Seconds since its last step; 0 before the first one.
    pub since_step: f32,
}

/// The traffic of a node with another one.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PeerReport {
    /// The number of the other node.
    pub node: u32,
    /// Bytes per second that it sends to it.
    pub sent: f32,
    /// Bytes per second that it receives from it.
    pub received: f32,
}

/// A report and its age.
#[derive(Debug, Clone, PartialEq)]
pub struct Reported {
    /// The report.
    pub report: Report,
    /// How long ago it was received.
    pub age: Duration,
}
