//! Who has to make room for results that it could not expect, and the pieces that wait for it.
//!
//! A piece with other nodes runs meanwhile: its result takes shape in the daemon's own memory, and
//! its lane hands it out once there is room. So no peer waits for a rank of this node. A piece of
//! this node alone goes straight to the ranks, and is held here.
//!
//! Making room depends on nothing but the rank's own process, so no wait goes in a circle. It takes
//! time, though: the memory has to be filled and handed over. A rank makes it for one tensor after
//! the other, so each has its time from the moment when the one before it had its room.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use gradwire_proto::{Sequence, Shape, TensorName};
use gradwire_shm::segment;

use crate::{
    data::{lane::Order, piece::Piece},
    model::{
        agreement::Outcome,
        memory::Span,
        tensor::{LocalTensor, QueuedTensor, RoomWanted, Ticket},
    },
};

/// What a rank was asked to make room for.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) tensor: Arc<QueuedTensor>,
    pub(crate) outcome: Outcome,
    since: Instant,
    /// How long the memory may take, once it is its turn.
    filling: Duration,
}

impl Asked {
    fn new(tensor: Arc<QueuedTensor>, local: &LocalTensor, outcome: Outcome) -> Self {
        let bytes = |(part, (shape, _)): (usize, &(Option<Shape>, Vec<u64>))| {
            let elements = shape.as_ref().map_or(0, Shape::elements);
            elements.saturating_mul(local.request.dtype_of(part).size() as u64)
        };
        let bytes = outcome.iter().enumerate().map(bytes).fold(0, u64::saturating_add);
        let filling = segment::time_to_fill(bytes);
        Self { tensor, outcome, since: Instant::now(), filling }
    }
}

/// A rank that has let others wait for room for too long.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Overdue {
    pub(crate) answer: Ticket,
    pub(crate) name: TensorName,
    /// How long it has had.
    pub(crate) waited: Duration,
}

#[derive(Debug, Default)]
struct Held {
    /// At most one for each submission in flight (BOUND).
    asked: BTreeMap<Ticket, Asked>,
    /// When each local rank made room last.
    made: BTreeMap<u32, Instant>,
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
            let found = piece.segments.iter().find_map(|segment| {
                let is_it = |local: &&LocalTensor| local.answer() == *answer;
                Some((&segment.tensor, segment.tensor.locals().iter().find(is_it)?))
            });
            let Some((tensor, local)) = found else { continue };
            held.asked.insert(*answer, Asked::new(tensor.clone(), local, outcome.clone()));
        }
        // Under the lock: whoever makes room now finds the piece.
        if piece.nodes.len() > 1 || piece.has_room() {
            tell(Order::Start(piece));
        } else {
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

    /// A rank has made room. What was held for it is started, in order (ORD).
    pub(super) fn make(&self, answer: Ticket, spans: Vec<Span>, tell: impl Fn(Sequence, Order)) {
        let mut held = self.lock();
        let Some(asked) = held.asked.remove(&answer) else { return };
        held.made.insert(answer.local_rank, Instant::now());
        asked.tensor.make_room(answer.local_rank, spans);
        for (sequence, piece) in held.pieces.extract_if(.., |_, piece| piece.has_room()) {
            tell(sequence, Order::Start(piece));
        }
    }

    /// Who has had `limit` and the time that its memory may take, and has made no room; each is told
    /// once.
    pub(super) fn overdue(&self, now: Instant, limit: Duration) -> Vec<Overdue> {
        let mut held = self.lock();
        let mut first: BTreeMap<u32, (Instant, Ticket)> = BTreeMap::new();
        for (answer, asked) in &held.asked {
            let turn = first.entry(answer.local_rank).or_insert((asked.since, *answer));
            *turn = (*turn).min((asked.since, *answer));
        }
        let mut overdue = Vec::new();
        for (local_rank, (since, answer)) in first {
            let made = held.made.get(&local_rank).copied();
            let waited = now.saturating_duration_since(made.map_or(since, |made| made.max(since)));
            let late = |asked: &Asked| waited > limit.saturating_add(asked.filling);
            if held.asked.get(&answer).is_some_and(late)
                && let Some(asked) = held.asked.remove(&answer)
            {
                overdue.push(Overdue { answer, name: asked.tensor.key.name.clone(), waited });
            }
        }
        overdue
    }

    pub(super) fn clear(&self) {
        *self.lock() = Held::default();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use gradwire_proto::{Collective, DType, ProcessSetId, Rank, Request};

    use super::*;
    use crate::model::tensor::TensorKey;

    /// A rank that was asked for results of so many bytes, all at once.
    fn asked(results: &[u64]) -> (Room, Instant) {
        let room = Room::default();
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
            };
            let name = TensorName::new(&format!("t{ticket}")).unwrap();
            let key = TensorKey { set: ProcessSetId::GLOBAL, name };
            let tensor = Arc::new(QueuedTensor::new(key, vec![local()], Rank(0)));
            let outcome = vec![(Some(Shape::new(&[*bytes]).unwrap()), vec![*bytes])];
            let asked = Asked::new(tensor, &local(), outcome);
            room.lock().asked.insert(local().answer(), asked);
        }
        (room, Instant::now())
    }

    /// A rank makes room for one result after the other, and more of it takes longer.
    #[test]
    fn each_result_has_its_own_time() {
        let limit = Duration::from_secs(4);
        let after = Duration::from_secs;
        let (room, begin) = asked(&[2 << 30, 1 << 30, 0]);
        assert_eq!(room.overdue(begin + after(30), limit), []);
        // The first takes 30 s; the second has its time from then on.
        let answer = Ticket { local_rank: 0, ticket: 0 };
        room.make(answer, vec![Span::empty()], |_, _| {});
        room.lock().made.insert(0, begin + after(30));
        assert_eq!(room.overdue(begin + after(45), limit), []);
        let late = room.overdue(begin + after(55), limit);
        assert_eq!(late.len(), 1);
        assert_eq!((late[0].answer.ticket, late[0].name.as_str()), (1, "t1"));
        assert!(late[0].waited >= after(24), "{:?}", late[0].waited);
        // What has not had its turn is not late, and what takes no memory has little time.
        let (room, begin) = asked(&[0]);
        assert_eq!(room.overdue(begin + after(3), limit), []);
        assert_eq!(room.overdue(begin + after(5), limit).len(), 1);
    }
}
