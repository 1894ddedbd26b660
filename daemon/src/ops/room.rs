//! Pieces that are held until ranks have made room for results that they could not expect.
//!
//! A held piece has its place in the order already (ORD): its lane knows of it, and lets its peers'
//! bytes wait in their connections instead of refusing them, and with them what comes behind on the
//! same connection. Pieces that need nothing of those go on. Making room depends on nothing but the
//! rank's own process, so no wait goes in a circle.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use gradwire_proto::{Sequence, TensorName};

use crate::{
    executor::{lane::Order, piece::Piece},
    memory::Span,
    queue::{QueuedTensor, RoomWanted, Ticket, agreement::Outcome},
};

/// What a rank was asked to make room for.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) tensor: Arc<QueuedTensor>,
    pub(crate) outcome: Outcome,
    since: Instant,
}

#[derive(Debug, Default)]
struct Held {
    /// At most one for each submission in flight (BOUND).
    asked: BTreeMap<Ticket, Asked>,
    /// At most as many as the coordinator's credit allows (BOUND).
    pieces: BTreeMap<Sequence, Piece>,
}

/// Who was asked for room, and what waits for it.
#[derive(Debug, Default)]
pub(super) struct Room(Mutex<Held>);

impl Room {
    fn lock(&self) -> MutexGuard<'_, Held> {
        self.0.lock().expect("no panic while it is held")
    }

    /// Starts a piece, or holds it. `wanted` are the ranks that have to be asked because of it.
    pub(super) fn admit(&self, piece: Piece, wanted: &[RoomWanted], tell: impl FnOnce(Order)) {
        if wanted.is_empty() && piece.has_room() {
            return tell(Order::Start(piece));
        }
        let mut held = self.lock();
        for RoomWanted { answer, outcome, .. } in wanted {
            let is_it = |tensor: &QueuedTensor| {
                tensor.locals().iter().any(|local| local.answer() == *answer)
            };
            let Some(segment) = piece.segments.iter().find(|s| is_it(&s.tensor)) else { continue };
            let asked = Asked {
                tensor: segment.tensor.clone(),
                outcome: outcome.clone(),
                since: Instant::now(),
            };
            held.asked.insert(*answer, asked);
        }
        // Under the lock: whoever makes room now finds the piece.
        if piece.has_room() {
            tell(Order::Start(piece));
        } else {
            tell(Order::Hold(piece.sequence));
            held.pieces.insert(piece.sequence, piece);
        }
    }

    /// What a rank was asked for and has not made yet.
    pub(super) fn asked(&self, answer: Ticket) -> Option<Asked> {
        self.lock().asked.get(&answer).cloned()
    }

    /// A tensor that waits for a rank.
    pub(super) fn wanted_of(&self, local_rank: u32) -> Option<TensorName> {
        let held = self.lock();
        let mut asked = held.asked.iter().filter(|(answer, _)| answer.local_rank == local_rank);
        asked.next().map(|(_, asked)| asked.tensor.key.name.clone())
    }

    /// A rank has made room. What fits now is started, in order (ORD).
    pub(super) fn make(&self, answer: Ticket, spans: Vec<Span>, tell: impl Fn(Sequence, Order)) {
        let mut held = self.lock();
        let Some(asked) = held.asked.remove(&answer) else { return };
        asked.tensor.make_room(answer.local_rank, spans);
        for (sequence, piece) in held.pieces.extract_if(.., |_, piece| piece.has_room()) {
            tell(sequence, Order::Start(piece));
        }
    }

    /// Who was asked as long ago as `limit`, and for which tensor; each is told once.
    pub(super) fn overdue(&self, now: Instant, limit: Duration) -> Vec<(Ticket, TensorName)> {
        let mut held = self.lock();
        let is_late = |asked: &Asked| now.saturating_duration_since(asked.since) > limit;
        let late = held.asked.extract_if(.., |_, asked| is_late(asked));
        late.map(|(answer, asked)| (answer, asked.tensor.key.name.clone())).collect()
    }

    pub(super) fn clear(&self) {
        *self.lock() = Held::default();
    }
}
