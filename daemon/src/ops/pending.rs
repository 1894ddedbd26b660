//! Ranks that must allocate memory for results of unexpected shapes, and the pieces that wait for
//! them.
//!
//! A piece with other nodes runs meanwhile: its result is computed in the daemon's own memory, and
//! its lane publishes it once the rank has memory for it. So no peer waits for a rank of this node.
//! A piece of this node alone is written directly to the ranks, and is held here.
//!
//! An allocation depends only on the rank's own process, so waits never form a circle. But it takes
//! time: the memory must be filled and handed over. A rank allocates for one tensor after the
//! other, so the time of each starts when the previous one is done.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use gradwire_proto::{Sequence, Shape, TensorName};
use gradwire_shm::segment;
use parking_lot::Mutex;

use crate::{
    data::{order::Order, piece::Piece},
    model::{
        agreement::OutputShapes,
        memory::Span,
        tensor::{AllocationRequest, LocalTensor, QueuedTensor, Ticket},
    },
};

/// An allocation that was requested from a rank.
#[derive(Debug, Clone)]
pub(crate) struct Allocation {
    pub(crate) tensor: Arc<QueuedTensor>,
    pub(crate) outputs: OutputShapes,
    since: Instant,
    /// How long filling the memory may take, once it is its turn.
    filling: Duration,
}

impl Allocation {
    fn new(tensor: Arc<QueuedTensor>, local: &LocalTensor, outputs: OutputShapes) -> Self {
        let bytes = |(part, (shape, _)): (usize, &(Option<Shape>, Vec<u64>))| {
            let elements = shape.as_ref().map_or(0, Shape::elements);
            elements.saturating_mul(local.request.dtype_of(part).size() as u64)
        };
        let bytes = outputs.iter().enumerate().map(bytes).fold(0, u64::saturating_add);
        let filling = segment::time_to_fill(bytes);
        Self { tensor, outputs, since: Instant::now(), filling }
    }
}

/// A rank that has not allocated in time.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct OverdueAllocation {
    pub(crate) answer: Ticket,
    pub(crate) name: TensorName,
    /// How long it has had to allocate.
    pub(crate) waited: Duration,
}

#[derive(Debug, Default)]
struct PendingState {
    /// At most one for each submission in flight (BOUND).
    asked: BTreeMap<Ticket, Allocation>,
    /// When each local rank last allocated.
    made: BTreeMap<u32, Instant>,
    /// At most as many as the coordinator's credit allows (BOUND).
    pieces: BTreeMap<Sequence, Piece>,
}

/// The requested allocations, and the pieces that wait for them.
#[derive(Debug, Default)]
pub(crate) struct PendingAllocations(Mutex<PendingState>);

impl PendingAllocations {
    /// Starts a piece, or keeps it until the `wanted` allocations are made.
    pub(super) fn admit(
        &self,
        piece: Piece,
        wanted: &[AllocationRequest],
        send: impl FnOnce(Order),
    ) {
        if wanted.is_empty() && piece.is_allocated() {
            return send(Order::Start(piece));
        }
        let mut held = self.0.lock();
        for AllocationRequest { answer, outputs, .. } in wanted {
            let found = piece.tensors.iter().find_map(|(tensor, _)| {
                let is_it = |local: &&LocalTensor| local.answer() == *answer;
                Some((tensor, tensor.locals().iter().find(is_it)?))
            });
            let Some((tensor, local)) = found else { continue };
            held.asked.insert(*answer, Allocation::new(tensor.clone(), local, outputs.clone()));
        }
        // Under the lock, so that a concurrent allocation finds the piece.
        if piece.nodes.len() > 1 || piece.is_allocated() {
            send(Order::Start(piece));
        } else {
            held.pieces.insert(piece.sequence, piece);
        }
    }

    /// The allocation that was requested from a rank and has not been made yet.
    pub(crate) fn asked(&self, answer: Ticket) -> Option<Allocation> {
        self.0.lock().asked.get(&answer).cloned()
    }

    pub(crate) fn tensor_of(&self, local_rank: u32) -> Option<TensorName> {
        let held = self.0.lock();
        let mut asked = held.asked.iter().filter(|(answer, _)| answer.local_rank == local_rank);
        asked.next().map(|(_, asked)| asked.tensor.key.name.clone())
    }

    /// A rank has allocated. Pieces that waited for it are started, in order (ORD).
    pub(super) fn resolve(&self, answer: Ticket, spans: Vec<Span>, send: impl Fn(Sequence, Order)) {
        let mut held = self.0.lock();
        let Some(asked) = held.asked.remove(&answer) else { return };
        held.made.insert(answer.local_rank, Instant::now());
        asked.tensor.set_outputs(answer.local_rank, spans);
        for (sequence, piece) in held.pieces.extract_if(.., |_, piece| piece.is_allocated()) {
            send(sequence, Order::Start(piece));
        }
    }

    /// The ranks that have not allocated within `limit` plus the time to fill their memory. Each is
    /// returned once.
    pub(crate) fn overdue(&self, now: Instant, limit: Duration) -> Vec<OverdueAllocation> {
        let mut held = self.0.lock();
        let mut first: BTreeMap<u32, (Instant, Ticket)> = BTreeMap::new();
        for (answer, asked) in &held.asked {
            let turn = first.entry(answer.local_rank).or_insert((asked.since, *answer));
            *turn = (*turn).min((asked.since, *answer));
        }
        let mut overdue = Vec::new();
        for (local_rank, (since, answer)) in first {
            let made = held.made.get(&local_rank).copied();
            let waited = now.saturating_duration_since(made.map_or(since, |made| made.max(since)));
            let late = |asked: &Allocation| waited > limit.saturating_add(asked.filling);
            if held.asked.get(&answer).is_some_and(late)
                && let Some(asked) = held.asked.remove(&answer)
            {
                overdue.push(OverdueAllocation {
                    answer,
                    name: asked.tensor.key.name.clone(),
                    waited,
                });
            }
        }
        overdue
    }

    /// Restarts the deadline of every allocation.
    pub(crate) fn restart(&self, now: Instant) {
        self.0.lock().asked.values_mut().for_each(|asked| asked.since = now);
    }

    pub(crate) fn clear(&self) {
        *self.0.lock() = PendingState::default();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use gradwire_proto::{Collective, DType, ProcessSetId, Rank, Request};

    use super::*;
    use crate::model::tensor::TensorKey;

    /// A rank with simultaneous requests for results of these sizes in bytes.
    fn asked(results: &[u64]) -> (PendingAllocations, Instant) {
        let pending = PendingAllocations::default();
        for (ticket, bytes) in (0..).zip(results) {
            let shape = Shape::new(&[0]).unwrap();
            let local = || LocalTensor {
                local_rank: 0,
                ticket,
                request: Request::plain(Collective::Allgather, DType::U8, shape.clone()),
                priority: 0,
                inputs: vec![Span::empty()],
                outputs: vec![Span::empty()],
                allocated: OnceLock::new(),
                site: Arc::default(),
            };
            let name = TensorName::new(&format!("t{ticket}")).unwrap();
            let key = TensorKey { set: ProcessSetId::GLOBAL, name };
            let tensor = Arc::new(QueuedTensor::new(key, vec![local()], Rank(0)));
            let outputs = vec![(Some(Shape::new(&[*bytes]).unwrap()), vec![*bytes])];
            let asked = Allocation::new(tensor, &local(), outputs);
            pending.0.lock().asked.insert(local().answer(), asked);
        }
        (pending, Instant::now())
    }

    /// A rank allocates for one result after the other, and more memory takes longer.
    #[test]
    fn each_allocation_has_its_own_deadline() {
        let limit = Duration::from_secs(4);
        let after = Duration::from_secs;
        let (pending, begin) = asked(&[2 << 30, 1 << 30, 0]);
        assert_eq!(pending.overdue(begin + after(30), limit), []);
        // The first takes 30 s; then the time of the second begins.
        let answer = Ticket { local_rank: 0, ticket: 0 };
        pending.resolve(answer, vec![Span::empty()], |_, _| {});
        pending.0.lock().made.insert(0, begin + after(30));
        assert_eq!(pending.overdue(begin + after(45), limit), []);
        let late = pending.overdue(begin + after(55), limit);
        assert_eq!(late.len(), 1);
        assert_eq!((late[0].answer.ticket, late[0].name.as_str()), (1, "t1"));
        assert!(late[0].waited >= after(24), "{:?}", late[0].waited);
        // An allocation whose turn has not come is not late. One without memory has little time.
        let (pending, begin) = asked(&[0]);
        assert_eq!(pending.overdue(begin + after(3), limit), []);
        assert_eq!(pending.overdue(begin + after(5), limit).len(), 1);
    }
}
