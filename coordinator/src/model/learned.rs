//! Measured times that are kept for the next job on the same cluster.

use std::fmt;

use gradwire_collectives::{Kind, Spec, Topology};

/// The times of earlier jobs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Memory {
    /// The times of algorithms.
    pub classes: Vec<Learned>,
    /// The times of sizes, per byte.
    pub sizes: Vec<Time<Sizes>>,
}

impl Memory {
    /// Whether nothing was measured.
    pub fn is_empty(&self) -> bool {
        self.classes.is_empty() && self.sizes.is_empty()
    }
}

/// The sizes of pieces and chunks, and how many pieces are in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// The most bytes of a piece.
    pub piece: u64,
    /// The most operations in flight.
    pub credit: u32,
    /// The bytes of a chunk.
    pub chunk: u64,
}

impl Sizes {
    /// Whether the settings would allow these sizes.
    pub fn are_possible(&self) -> bool {
        (64 << 10..=64 << 20).contains(&self.piece)
            && (1..=1024).contains(&self.credit)
            && (4 << 10..=4 << 20).contains(&self.chunk)
            && self.chunk <= self.piece
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { piece, credit, chunk } = self;
        let kib = |bytes: &u64| bytes / 1024;
        write!(f, "pieces of {} KiB, {credit} in flight, chunks of {} KiB", kib(piece), kib(chunk))
    }
}

/// The times of the algorithms for one class of pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Learned {
    /// The nodes that take part.
    pub topology: Topology,
    /// The kind of the pieces.
    pub kind: Kind,
    /// Whether partial results travel in eight bits.
    pub quantized: bool,
    /// The exponent of the power of two that bounds the bytes of a piece.
    pub size: u32,
    /// The number of consecutive pieces, rounded up to a power of two.
    pub pieces: u32,
    /// One for each measured algorithm.
    pub times: Vec<Time>,
    /// The microseconds of a time of 1000; 0: unknown.
    pub micros: u64,
}

/// How long pieces take with an algorithm, or with certain sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Time<S = Spec> {
    /// The algorithm or the sizes.
    pub spec: S,
    /// Its time in thousandths of the time of the final choice.
    pub permille: u32,
}
