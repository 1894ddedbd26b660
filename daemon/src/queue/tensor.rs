//! A tensor that every local rank has submitted.

use std::sync::atomic::{AtomicU64, Ordering};

use gradwire_proto::{Collective, Rank, Request};

use super::TensorKey;
use crate::memory::Span;

/// One local rank's part in a tensor.
#[derive(Debug, Clone)]
pub(crate) struct LocalTensor {
    pub(crate) local_rank: u32,
    /// What the rank calls this submission.
    pub(crate) ticket: u64,
    pub(crate) request: Request,
    pub(crate) priority: i32,
    pub(crate) input: Span,
    pub(crate) output: Span,
}

/// A tensor in flight, shared by the queue and its pieces.
#[derive(Debug)]
pub(crate) struct QueuedTensor {
    pub(crate) key: TensorKey,
    locals: Vec<LocalTensor>,
    /// For a broadcast: which of `locals` is the root, if it is on this node.
    root: Option<usize>,
    /// Bytes that are not published yet.
    remaining: AtomicU64,
}

impl QueuedTensor {
    pub(crate) fn new(key: TensorKey, locals: Vec<LocalTensor>, first_rank: Rank) -> Self {
        let request = &locals[0].request;
        let root = locals
            .iter()
            .position(|l| first_rank.0 + l.local_rank == request.root.0)
            .filter(|_| request.collective == Collective::Broadcast);
        let remaining = AtomicU64::new(request.bytes());
        Self { key, locals, root, remaining }
    }

    /// Every local rank's part, by local rank.
    pub(crate) fn locals(&self) -> &[LocalTensor] {
        &self.locals
    }

    /// What was asked for; only of use where all local ranks agree.
    pub(crate) fn request(&self) -> &Request {
        &self.locals[0].request
    }

    /// Bytes of it.
    pub(crate) fn bytes(&self) -> u64 {
        self.request().bytes()
    }

    /// The inputs that this node contributes, in rank order (SAME).
    pub(crate) fn sources(&self) -> impl Iterator<Item = &Span> {
        let broadcast = self.request().collective == Collective::Broadcast;
        let counts = move |index: usize| !broadcast || self.root == Some(index);
        self.locals.iter().enumerate().filter(move |(i, _)| counts(*i)).map(|(_, l)| &l.input)
    }

    /// Where the local ranks want the result.
    pub(crate) fn targets(&self) -> impl Iterator<Item = &Span> {
        self.locals.iter().map(|l| &l.output)
    }

    /// Bytes of it have been published; true when these were the last.
    pub(crate) fn published(&self, bytes: u64) -> bool {
        // AcqRel: whoever publishes the last bytes has to see the others' as published before it
        // tells the ranks.
        self.remaining.fetch_sub(bytes, Ordering::AcqRel) == bytes
    }
}
