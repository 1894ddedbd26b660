//! Fusing small tensors and partitioning large ones is one operation: cut what is ready, in
//! priority order, into pieces of at most `piece_bytes`.
//!
//! Tensors may share a piece when all but their shape is equal; those form a *kind*, and a piece
//! holds one kind. The most urgent tensor of all decides which kind is cut next, and what follows
//! it in its own kind fills the piece, past tensors of other kinds: gradients of two element types
//! that come in turns still fuse. A piece is cut when it is sent and not before, so an urgent
//! tensor overtakes all of a large one that has not gone out.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use gradwire_proto::{Collective, DType, Priority, ProcessSetId, Rank, ReduceOp, Request, Shape};

use super::ready_table::Slot;

/// Cuts inside a tensor keep to multiples of this many bytes, a cache line.
const ALIGNMENT: u64 = 64;

/// The most segments of one piece: 2048 names of 1 KiB still fit a control message (BOUND).
pub(crate) const MAX_SEGMENTS: usize = 2048;

/// The smallest piece that can always make progress.
pub(crate) const MIN_PIECE_BYTES: u64 = ALIGNMENT;

/// All that tensors of one piece have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Kind {
    set: ProcessSetId,
    collective: Collective,
    dtype: DType,
    reduce_op: ReduceOp,
    root: Rank,
    prescale: u64,
    postscale: u64,
}

impl Kind {
    fn of(set: ProcessSetId, request: &Request) -> Self {
        Self {
            set,
            collective: request.collective,
            dtype: request.dtype,
            reduce_op: request.reduce_op,
            root: request.root,
            prescale: request.prescale.to_bits(),
            postscale: request.postscale.to_bits(),
        }
    }

    /// The request of a piece: flat, so without a shape.
    fn flat(&self) -> Request {
        Request {
            collective: self.collective,
            dtype: self.dtype,
            shape: Shape::default(),
            reduce_op: self.reduce_op,
            root: self.root,
            prescale: f64::from_bits(self.prescale),
            postscale: f64::from_bits(self.postscale),
        }
    }
}

/// Larger priority first, then what was ready first.
type Urgency = (Reverse<Priority>, u64);

#[derive(Debug)]
struct Item {
    slot: Slot,
    elements: u64,
    /// The first element that has not gone out.
    next: u64,
    /// When the first node announced the tensor.
    since: Duration,
}

/// A range of one tensor in a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    pub(crate) slot: Slot,
    pub(crate) offset: u64,
    pub(crate) count: u64,
    /// Nothing of the tensor is left.
    pub(crate) last: bool,
    /// When the first node announced the tensor; only with its first range.
    pub(crate) first_of: Option<Duration>,
}

/// What goes out as one operation.
#[derive(Debug, PartialEq)]
pub(crate) struct Piece {
    pub(crate) set: ProcessSetId,
    pub(crate) request: Request,
    pub(crate) bytes: u64,
    pub(crate) cuts: Vec<Cut>,
}

/// The tensors on which all ranks agree and that have not gone out, in order of urgency.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    kinds: BTreeMap<Kind, BTreeMap<Urgency, Item>>,
    /// The most urgent item of each kind.
    heads: BTreeSet<(Urgency, Kind)>,
    arrivals: u64,
    len: usize,
}

impl Queue {
    /// How many tensors wait to go out.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Adds a tensor.
    pub(crate) fn push(
        &mut self,
        slot: Slot,
        set: ProcessSetId,
        request: &Request,
        priority: Priority,
        since: Duration,
    ) {
        let kind = Kind::of(set, request);
        let urgency = (Reverse(priority), self.arrivals);
        self.arrivals += 1;
        self.len += 1;
        let item = Item { slot, elements: request.shape.elements(), next: 0, since };
        let items = self.kinds.entry(kind).or_default();
        let before = items.first_key_value().map(|(urgency, _)| *urgency);
        items.insert(urgency, item);
        if before.is_none_or(|before| urgency < before) {
            before.map(|before| self.heads.remove(&(before, kind)));
            self.heads.insert((urgency, kind));
        }
    }

    /// Cuts the next piece, none if nothing waits. `piece_bytes` is at least
    /// [`MIN_PIECE_BYTES`].
    pub(crate) fn cut(&mut self, piece_bytes: u64) -> Option<Piece> {
        let (_, kind) = self.heads.pop_first()?;
        let size = kind.dtype.size() as u64;
        let mut room = piece_bytes;
        let mut piece = Piece { set: kind.set, request: kind.flat(), bytes: 0, cuts: Vec::new() };
        let mut items = self.kinds.remove(&kind)?;
        while piece.cuts.len() < MAX_SEGMENTS
            && let Some(mut entry) = items.first_entry()
        {
            let item = entry.get_mut();
            let left = item.elements - item.next;
            let count =
                if left * size <= room { left } else { room / ALIGNMENT * ALIGNMENT / size };
            if count == 0 && left > 0 {
                break;
            }
            let last = count == left;
            piece.cuts.push(Cut {
                slot: item.slot,
                offset: item.next,
                count,
                last,
                first_of: (item.next == 0).then_some(item.since),
            });
            room -= count * size;
            item.next += count;
            if !last {
                break;
            }
            entry.remove();
            self.len -= 1;
        }
        piece.bytes = piece_bytes - room;
        if let Some((urgency, _)) = items.first_key_value() {
            self.heads.insert((*urgency, kind));
            self.kinds.insert(kind, items);
        }
        Some(piece)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SET: ProcessSetId = ProcessSetId::GLOBAL;

    fn request(dtype: DType, elements: u64) -> Request {
        Request::allreduce(dtype, Shape::new(&[elements]).unwrap(), ReduceOp::Sum)
    }

    fn queue(tensors: &[(DType, u64, i32)]) -> Queue {
        let mut queue = Queue::default();
        for (slot, &(dtype, elements, priority)) in tensors.iter().enumerate() {
            let request = request(dtype, elements);
            queue.push(Slot(slot as u32), SET, &request, Priority(priority), Duration::ZERO);
        }
        queue
    }

    fn shape(piece: &Piece) -> Vec<(u32, u64, u64)> {
        piece.cuts.iter().map(|cut| (cut.slot.0, cut.offset, cut.count)).collect()
    }

    #[test]
    fn element_types_that_come_in_turns_still_fuse() {
        let (a, b) = (DType::F32, DType::F16);
        let mut queue = queue(&[(a, 4, 0), (b, 4, 0), (a, 4, 0), (b, 4, 0)]);
        assert_eq!(shape(&queue.cut(4096).unwrap()), [(0, 0, 4), (2, 0, 4)]);
        assert_eq!(shape(&queue.cut(4096).unwrap()), [(1, 0, 4), (3, 0, 4)]);
        assert_eq!(queue.cut(4096), None);
    }

    #[test]
    fn an_urgent_tensor_overtakes_what_has_not_gone_out() {
        let mut queue = queue(&[(DType::F32, 64, 0)]);
        assert_eq!(shape(&queue.cut(128).unwrap()), [(0, 0, 32)]);
        queue.push(Slot(9), SET, &request(DType::F32, 16), Priority(5), Duration::ZERO);
        assert_eq!(shape(&queue.cut(128).unwrap()), [(9, 0, 16), (0, 32, 16)]);
        assert_eq!(shape(&queue.cut(128).unwrap()), [(0, 48, 16)]);
    }

    #[test]
    fn a_scaled_tensor_and_another_root_have_pieces_of_their_own() {
        let mut queue = queue(&[(DType::F32, 4, 0)]);
        let scaled = Request { prescale: 0.5, ..request(DType::F32, 4) };
        let rooted = Request::broadcast(DType::F32, Shape::new(&[4]).unwrap(), Rank(1));
        queue.push(Slot(1), SET, &scaled, Priority(0), Duration::ZERO);
        queue.push(Slot(2), SET, &rooted, Priority(0), Duration::ZERO);
        for slot in 0..3 {
            assert_eq!(shape(&queue.cut(4096).unwrap()), [(slot, 0, 4)]);
        }
    }

    fn tensors() -> impl Strategy<Value = Vec<(DType, u64, i32)>> {
        let dtypes = prop::sample::select(DType::ALL.to_vec());
        let elements = prop_oneof![Just(0), 1..40u64, 0..5000u64];
        prop::collection::vec((dtypes, elements, -2..3i32), 0..60)
    }

    proptest! {
        #[test]
        fn every_element_goes_out_once_in_order_and_in_bounds(
            tensors in tensors(), piece_bytes in 64..9000u64
        ) {
            let mut queue = queue(&tensors);
            let mut next = vec![0; tensors.len()];
            let mut ended = vec![false; tensors.len()];
            let mut previous_head: Option<(Reverse<i32>, u32)> = None;
            while let Some(piece) = queue.cut(piece_bytes) {
                let size = piece.request.dtype.size() as u64;
                let elements: u64 = piece.cuts.iter().map(|cut| cut.count).sum();
                prop_assert_eq!(piece.bytes, elements * size);
                prop_assert!(piece.bytes <= piece_bytes && piece.cuts.len() <= MAX_SEGMENTS);
                prop_assert!(!piece.cuts.is_empty());
                for cut in &piece.cuts {
                    let slot = cut.slot.0 as usize;
                    let (dtype, elements, _) = tensors[slot];
                    prop_assert_eq!(piece.request.dtype, dtype);
                    prop_assert_eq!(cut.offset, next[slot], "ONE: no gap and no overlap");
                    prop_assert!(!ended[slot]);
                    next[slot] += cut.count;
                    ended[slot] = cut.last;
                    prop_assert_eq!(cut.last, next[slot] == elements);
                    prop_assert!(cut.last || (cut.count * size).is_multiple_of(ALIGNMENT));
                    prop_assert_eq!(cut.first_of.is_some(), cut.offset == 0);
                }
                // The head of each piece is the most urgent of all that waits.
                let first = piece.cuts[0].slot.0;
                let head = (Reverse(tensors[first as usize].2), first);
                prop_assert!(previous_head.is_none_or(|previous| previous <= head));
                previous_head = Some(head);
                // Within a piece, too.
                let order: Vec<_> =
                    piece.cuts.iter().map(|c| (Reverse(tensors[c.slot.0 as usize].2), c.slot)).collect();
                prop_assert!(order.is_sorted());
            }
            prop_assert!(ended.iter().all(|&ended| ended));
            prop_assert_eq!(queue.len(), 0);
            prop_assert!(queue.kinds.is_empty() && queue.heads.is_empty());
        }
    }
}
