//! What a node does, as its daemon reports it about once per second.

use std::time::Duration;

/// What a node does.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Report {
    /// Its first ranks, in order: not always all of them (BOUND).
    pub ranks: Vec<RankReport>,
    /// The peers with which it exchanges most (BOUND).
    pub peers: Vec<PeerReport>,
    /// Bytes per second of its line; `None` if that is not known.
    pub line_rate: Option<u64>,
    /// Bytes of memory of the daemon, shared memory included.
    pub resident: u64,
    /// Bytes of shared memory that ranks have handed over.
    pub shared: u64,
    /// Pieces that it exchanges with other nodes now.
    pub pieces: u32,
    /// Tensors that its ranks have submitted and that are not done.
    pub queued: u32,
    /// Those of them that have waited for a rank of the node for too long.
    pub stalled: u32,
}

/// What a rank does.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RankReport {
    /// Its steps since it attached.
    pub steps: u32,
    /// Seconds of its last steps; 0 before the second one.
    pub step_seconds: f32,
    /// The share of the time in which it was blocked in waits for results.
    pub exposed: f32,
    /// Seconds since its last step; 0 before the first one.
    pub since_step: f32,
}

/// What a node exchanges with another one.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PeerReport {
    /// The number of the other one.
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
