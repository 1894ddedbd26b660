//! Fusing small tensors and dividing large ones is the same step: ready tensors are cut, in
//! priority order, into pieces of at most `piece_bytes`.
//!
//! Tensors of one [`Kind`] may share a piece: they have the same route, and everything but their
//! flows is equal. The most urgent tensor decides which kind is cut next. The next tensors of the
//! same kind fill the piece, so gradients with alternating element types still fuse. A piece is cut
//! only when it is sent, so an urgent tensor overtakes the rest of a large one.
//!
//! A tensor with several flows, such as that of an alltoall, is cut across: a piece has the same
//! range of every flow. So all nodes take part in each piece.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use gradwire_proto::{NodeId, Priority};

use crate::model::{
    config::MIN_PIECE_BYTES,
    lengths::Lengths,
    plan::{Kind, Load, MAX_FLOWS, MAX_SEGMENTS},
    process_set::ProcessSet,
    round::{Round, Slot},
};

/// Cuts inside a flow are at multiples of this many bytes, a cache line. So a piece of this size
/// always makes progress.
const ALIGNMENT: u64 = MIN_PIECE_BYTES;

/// The most bytes of a piece's segments in a message, even if tensors are sent by name with the
/// agreed request: they fit in a control message (BOUND).
const MAX_TEXT: usize = 3 << 20;

/// The smallest share that is worth its own lane, in bytes: reducing this much for a few ranks
/// takes longer than waking a thread.
const MIN_SHARE: u64 = 256 << 10;

/// Shares are multiples of this, in bytes, so that equal tensors are cut alike.
const SHARE_GRAIN: u64 = 64 << 10;

/// Larger priority first, then in order of arrival.
type Urgency = (Reverse<Priority>, u64);

#[derive(Debug)]
struct Item {
    round: Arc<Round>,
    /// The place of its flows in the plan of the round.
    load: usize,
    /// The first element of each flow that has not been sent out.
    next: u64,
}

impl Item {
    fn load(&self) -> &Load {
        &self.round.plan.loads[self.load]
    }
}

/// A range of all flows of a tensor, in a piece.
#[derive(Debug, Clone)]
pub(crate) struct Cut {
    pub(crate) round: Arc<Round>,
    pub(crate) part: u32,
    pub(crate) offset: u64,
    pub(crate) count: u64,
    /// Whether nothing of the tensor is left.
    pub(crate) last: bool,
    /// Whether nothing of the tensor was sent out before.
    pub(crate) first: bool,
    /// Whether it is the tensor's first cut in this piece.
    pub(crate) opens: bool,
}

/// The content of one operation.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) kind: Arc<Kind>,
    /// The bytes of all flows.
    pub(crate) bytes: u64,
    pub(crate) cuts: Vec<Cut>,
}

/// The rest of a tensor that has not been sent out.
#[derive(Debug, Default)]
struct Left {
    items: usize,
    begun: bool,
}

/// The flows of agreed tensors that have not been sent out, in order of urgency.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    kinds: BTreeMap<Arc<Kind>, BTreeMap<Urgency, Item>>,
    /// The most urgent item of each kind.
    heads: BTreeSet<(Urgency, Arc<Kind>)>,
    slots: BTreeMap<Slot, Left>,
    arrivals: u64,
    /// The unsent bytes of all items, each counted at its busiest node.
    bytes: u64,
}

impl Queue {
    /// How many tensors wait to be sent out.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// The size of the next pieces, at most `piece_bytes`. A piece runs on one of `lanes`, so the
    /// waiting bytes are divided between them, unless the shares would be too small.
    pub(crate) fn fair_piece(&self, lanes: u32, piece_bytes: u64) -> u64 {
        let share = self.bytes.div_ceil(lanes.max(1).into()).next_multiple_of(SHARE_GRAIN);
        share.clamp(MIN_SHARE.min(piece_bytes), piece_bytes)
    }

    /// How many pieces of this size are waiting.
    pub(crate) fn pieces(&self, piece_bytes: u64) -> u64 {
        self.bytes.div_ceil(piece_bytes)
    }

    /// Whether parts of the tensor in a slot that concern a node are still waiting.
    pub(crate) fn holds(&self, slot: Slot, node: NodeId, set: &ProcessSet) -> bool {
        let mut concerned = self.kinds.iter().filter(|(kind, _)| kind.concerns(node, set));
        self.slots.contains_key(&slot)
            && concerned.any(|(_, items)| items.values().any(|item| item.round.slot == slot))
    }

    /// Adds a tensor.
    pub(crate) fn push(&mut self, round: &Arc<Round>) {
        self.slots.entry(round.slot).or_default().items += round.plan.loads.len();
        for (at, load) in round.plan.loads.iter().enumerate() {
            let urgency = (Reverse(round.priority), self.arrivals);
            self.arrivals += 1;
            let elements = load.busiest().within(0..u64::MAX);
            let bytes = elements.saturating_mul(load.kind.dtype.size() as u64);
            self.bytes = self.bytes.saturating_add(bytes);
            let item = Item { round: Arc::clone(round), load: at, next: 0 };
            let items = self.kinds.entry(Arc::clone(&load.kind)).or_default();
            let before = items.first_key_value().map(|(urgency, _)| *urgency);
            items.insert(urgency, item);
            if before.is_none_or(|before| urgency < before) {
                before.map(|before| self.heads.remove(&(before, Arc::clone(&load.kind))));
                self.heads.insert((urgency, Arc::clone(&load.kind)));
            }
        }
    }

    /// Notes that a range of an item is sent out, and whether the item ends with it. Returns
    /// whether it is the first range of the tensor, and whether it is the last.
    fn note_cut(&mut self, slot: Slot, ends: bool) -> (bool, bool) {
        let Some(left) = self.slots.get_mut(&slot) else { return (false, false) };
        let first = !std::mem::replace(&mut left.begun, true);
        left.items -= usize::from(ends);
        let last = left.items == 0;
        if last {
            self.slots.remove(&slot);
        }
        (first, last)
    }

    /// Cuts the next piece; `None` if nothing waits. No node sends and receives more of it than
    /// `piece_bytes`, which is at least [`MIN_PIECE_BYTES`], or a cache line of each flow if that
    /// is more (BOUND).
    pub(crate) fn cut(&mut self, piece_bytes: u64) -> Option<Piece> {
        let (_, kind) = self.heads.pop_first()?;
        let size = kind.dtype.size() as u64;
        let (mut room, mut bytes, mut flows, mut text) = (piece_bytes, 0u64, 0, 0);
        let mut cuts: Vec<Cut> = Vec::new();
        let mut items = self.kinds.remove(&kind)?;
        while cuts.len() < MAX_SEGMENTS
            && let Some(mut entry) = items.first_entry()
        {
            let item = entry.get_mut();
            // The tensors of a group are adjacent in a piece.
            let opens = cuts.last().is_none_or(|cut| !Arc::ptr_eq(&cut.round, &item.round));
            text += item.round.text.each + if opens { item.round.text.first } else { 0 };
            flows += item.load().all.flows();
            if (text > MAX_TEXT || flows > MAX_FLOWS as u64) && !cuts.is_empty() {
                break;
            }
            let load = item.load();
            let left = load.all.longest() - item.next;
            let bytes_of = |lengths: &Lengths, count: u64| {
                lengths.within(item.next..item.next + count).saturating_mul(size)
            };
            let busiest = |count: u64| bytes_of(load.busiest(), count);
            let count = if busiest(left) <= room {
                left
            } else {
                let line = ALIGNMENT / size;
                let reach = load.busiest().reach(item.next, room / size) - item.next;
                let least = if cuts.is_empty() { line } else { 0 };
                (reach / line * line).max(least).min(left)
            };
            if count == 0 && left > 0 {
                break;
            }
            let taken = busiest(count);
            bytes = bytes.saturating_add(bytes_of(&load.all, count));
            let (offset, part, ends) = (item.next, load.part, count == left);
            item.next += count;
            let round = Arc::clone(&item.round);
            let (first, last) = self.note_cut(round.slot, ends);
            cuts.push(Cut { round, part, offset, count, last, first, opens });
            room = room.saturating_sub(taken);
            self.bytes = self.bytes.saturating_sub(taken);
            if !ends {
                break;
            }
            entry.remove();
        }
        if let Some((urgency, _)) = items.first_key_value() {
            self.heads.insert((*urgency, Arc::clone(&kind)));
            self.kinds.insert(Arc::clone(&kind), items);
        }
        Some(Piece { kind, bytes, cuts })
    }
}

#[cfg(test)]
mod tests;
