//! Tensors that local ranks have submitted.

use std::{
    ops::Range,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use gradwire_proto::{Collective, ProcessSetId, Rank, Request, TensorName};

use super::{
    agreement::{Agreement, OutputShapes},
    memory::Span,
};

/// A tensor's name within its process set.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct TensorKey {
    pub(crate) set: ProcessSetId,
    pub(crate) name: TensorName,
}

/// A distinct request for a tensor, and the ranks of this node that made it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Variant {
    pub(crate) ranks: Vec<Rank>,
    pub(crate) request: Request,
    pub(crate) priority: i32,
    pub(crate) duplicate: bool,
    /// Where their programs have called it, as far as it is known: at most [`MAX_SITES`].
    pub(crate) sites: Vec<Arc<str>>,
}

/// The most call sites of a variant (BOUND): programs call the same operation in one place.
const MAX_SITES: usize = 3;

impl Variant {
    /// Notes where the program of one of its ranks has called it.
    pub(crate) fn add_site(&mut self, site: &Arc<str>) {
        if !site.is_empty() && self.sites.len() < MAX_SITES && !self.sites.contains(site) {
            self.sites.push(site.clone());
        }
    }
}

/// The announcement of a tensor to the coordinator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Announced {
    pub(crate) key: TensorKey,
    pub(crate) variants: Vec<Variant>,
    /// No local member of the process set has joined, not even one that submitted the tensor
    /// earlier.
    pub(crate) all_there: bool,
    pub(crate) latest: Option<Latest>,
}

/// The local rank that submitted a tensor last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Latest {
    pub(crate) local_rank: u32,
    /// How long the first submission waited for it.
    pub(crate) waited: Duration,
}

/// A submission that waits for its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ticket {
    pub(crate) local_rank: u32,
    pub(crate) ticket: u64,
}

/// The sender and the receiver, if the request is a send and receive.
pub(crate) fn pair(request: &Request) -> Option<(Rank, Rank)> {
    let [to] = request.list[..] else { return None };
    let sent = request.collective == Collective::SendReceive;
    sent.then(|| Some((request.root, Rank(u32::try_from(to).ok()?)))).flatten()
}

/// The name under which the coordinator handles the join of a process set.
pub(crate) fn join_of(set: ProcessSetId) -> TensorKey {
    let name = TensorName::new(Request::JOIN).expect("a valid name");
    TensorKey { set, name }
}

/// One local rank's part in a tensor.
#[derive(Debug)]
pub(crate) struct LocalTensor {
    pub(crate) local_rank: u32,
    /// The rank's number for this submission.
    pub(crate) ticket: u64,
    pub(crate) request: Request,
    pub(crate) priority: i32,
    /// One for each tensor of the request; empty if nothing is read.
    pub(crate) inputs: Vec<Span>,
    /// The memory for results of the expected shapes, one for each tensor of the request; empty if
    /// the rank expects none.
    pub(crate) outputs: Vec<Span>,
    /// The memory for results of other shapes.
    pub(crate) allocated: OnceLock<Vec<Span>>,
    /// Where the program has called it; empty if it is not known.
    pub(crate) site: Arc<str>,
}

impl LocalTensor {
    pub(crate) fn answer(&self) -> Ticket {
        Ticket { local_rank: self.local_rank, ticket: self.ticket }
    }

    pub(crate) fn input(&self, part: usize) -> &Span {
        &self.inputs[part]
    }

    pub(crate) fn output(&self, part: usize) -> &Span {
        &self.allocated.get().unwrap_or(&self.outputs)[part]
    }
}

/// A rank must first allocate memory for its results.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct AllocationRequest {
    pub(crate) answer: Ticket,
    pub(crate) outputs: OutputShapes,
    pub(crate) name: TensorName,
}

/// An agreement does not fit a tensor: a local rank has a different request, or another agreement
/// was received before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mismatch;

/// A tensor in flight, shared by the queue and its pieces.
#[derive(Debug)]
pub(crate) struct QueuedTensor {
    pub(crate) key: TensorKey,
    locals: Vec<LocalTensor>,
    first_rank: Rank,
    /// When all local ranks had submitted it.
    pub(crate) announced: Instant,
    agreement: OnceLock<Arc<Agreement>>,
    /// How many local ranks have not allocated yet.
    pending_allocations: AtomicU32,
    /// Elements of the longest flow of each tensor that have not been ordered yet.
    unordered: AtomicU64,
    /// Elements of the longest flow of each tensor that have not been published yet.
    remaining: AtomicU64,
}

impl QueuedTensor {
    pub(crate) fn new(key: TensorKey, locals: Vec<LocalTensor>, first_rank: Rank) -> Self {
        Self {
            key,
            locals,
            first_rank,
            announced: Instant::now(),
            agreement: OnceLock::new(),
            pending_allocations: AtomicU32::new(0),
            unordered: AtomicU64::new(0),
            remaining: AtomicU64::new(0),
        }
    }

    /// Every local rank's part, by local rank: the order in which they are reduced (SAME).
    pub(crate) fn locals(&self) -> &[LocalTensor] {
        &self.locals
    }

    /// The local ranks that have submitted it, with their tickets.
    pub(crate) fn submissions(&self) -> impl Iterator<Item = (Rank, u64)> {
        let first = self.first_rank.0;
        self.locals.iter().map(move |local| (Rank(first + local.local_rank), local.ticket))
    }

    /// The local parts at one end of a flow: all of them, that of one rank, or none.
    pub(crate) fn at(&self, end: Option<Rank>) -> Range<usize> {
        let Some(rank) = end else { return 0..self.locals.len() };
        let is_it = |local: &LocalTensor| self.first_rank.0 + local.local_rank == rank.0;
        let found = self.locals.iter().position(is_it);
        found.map_or(0..0, |at| at..at + 1)
    }

    /// Sets the agreement before the first of its operations is started. Later calls check that it
    /// is the same. Returns the allocations that local ranks must make.
    ///
    /// # Errors
    /// [`Mismatch`] if it does not fit every local rank's request (TRUST). After this check, every
    /// offset of its flows is within the spans.
    pub(crate) fn agree(
        &self,
        agreement: &Arc<Agreement>,
    ) -> Result<Vec<AllocationRequest>, Mismatch> {
        if let Some(before) = self.agreement.get() {
            let same = Arc::ptr_eq(before, agreement) || before.is_same(agreement);
            return same.then(Vec::new).ok_or(Mismatch);
        }
        let takes_part = &agreement.members.here;
        let mut wanted = Vec::new();
        if takes_part.len() != self.locals.len() {
            return Err(Mismatch);
        }
        for (local, local_rank) in self.locals.iter().zip(takes_part) {
            let rank = Rank(self.first_rank.0 + local_rank);
            if local.local_rank != *local_rank || !agreement.fits(rank, &local.request) {
                return Err(Mismatch);
            }
            let unexpected_shapes = agreement.unexpected_shapes(rank, &local.request);
            wanted.extend(unexpected_shapes.map(|outputs| AllocationRequest {
                answer: local.answer(),
                outputs,
                name: self.key.name.clone(),
            }));
        }
        // Relaxed: the pieces that read these reach other threads through a channel.
        self.pending_allocations.store(wanted.len() as u32, Ordering::Relaxed);
        // A tensor without elements is also ordered once.
        self.unordered.store(agreement.length().max(1), Ordering::Relaxed);
        self.remaining.store(agreement.length(), Ordering::Relaxed);
        let _ = self.agreement.set(agreement.clone());
        Ok(wanted)
    }

    /// Counts elements of the longest flow as ordered, 1 if there are none. Returns false if there
    /// are not that many (ONE).
    pub(crate) fn order(&self, elements: u64) -> bool {
        let less = |left: u64| left.checked_sub(elements);
        self.unordered.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }

    /// Whether all of its elements have been ordered.
    pub(crate) fn is_ordered(&self) -> bool {
        self.agreement.get().is_some() && self.unordered.load(Ordering::Relaxed) == 0
    }

    /// Sets how many local ranks have not allocated yet.
    #[cfg(test)]
    pub(crate) fn expect_allocations(&self, ranks: u32) {
        self.pending_allocations.store(ranks, Ordering::Relaxed);
    }

    pub(crate) fn set_outputs(&self, local_rank: u32, spans: Vec<Span>) {
        let local = self.locals.iter().find(|local| local.local_rank == local_rank);
        if local.is_some_and(|local| local.allocated.set(spans).is_ok()) {
            self.pending_allocations.fetch_sub(1, Ordering::AcqRel);
        }
    }

    pub(crate) fn is_allocated(&self) -> bool {
        self.pending_allocations.load(Ordering::Acquire) == 0
    }

    /// The bytes of the tensor that concern this node; 0 before the agreement.
    pub(crate) fn bytes(&self) -> u64 {
        self.agreement.get().map_or(0, |agreement| agreement.bytes())
    }

    /// Counts elements of the longest flow as published. Returns true if they were the last, or if
    /// the tensor has none.
    pub(crate) fn published(&self, elements: u64) -> bool {
        // AcqRel: the thread that publishes the last ones must see all others as published before
        // it notifies the ranks.
        self.remaining.fetch_sub(elements, Ordering::AcqRel) == elements
    }
}
