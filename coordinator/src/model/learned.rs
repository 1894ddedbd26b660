//! Times that jobs have measured, as the next job on the same cluster gets them.

use gradwire_collectives::{Kind, Spec, Topology};

/// The times of the algorithms for one class of pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Learned {
    /// The nodes that take part.
    pub topology: Topology,
    /// What the pieces do.
    pub kind: Kind,
    /// The power of two that the bytes of such a piece do not exceed.
    pub size: u32,
    /// The number of pieces that follow each other, rounded up to a power of two.
    pub pieces: u32,
    /// One for each algorithm that was measured.
    pub times: Vec<Time>,
}

/// How long pieces take with one algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Time {
    /// The algorithm.
    pub spec: Spec,
    /// Its time in thousandths of that of the algorithm that was chosen in the end.
    pub permille: u32,
}
