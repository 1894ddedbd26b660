//! Which bytes of a block have been handled, in any order: all bytes up to some point, and islands
//! behind it. Pure.
//!
//! Several connections carry one block, so bytes may arrive out of order. Usually there are few
//! gaps, and nothing is allocated.

use std::ops::Range;

/// The most islands (BOUND): a correct peer has far fewer frames in flight.
const MAX_ISLANDS: usize = 4096;

/// Some bytes of a block.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ranges {
    /// All bytes before this one are in.
    prefix: u64,
    /// Further bytes that are in, ascending, with a gap before each island.
    islands: Vec<Range<u64>>,
}

impl Ranges {
    /// The number of bytes that are in, from the beginning of the block to the first gap.
    pub fn prefix(&self) -> u64 {
        self.prefix
    }

    /// Whether these bytes may be added: none of them is in (ONE), and there is room for one more
    /// island (BOUND).
    pub fn accepts(&self, bytes: Range<u64>) -> bool {
        let behind = self.islands.partition_point(|island| island.end <= bytes.start);
        let apart = self.islands.get(behind).is_none_or(|island| bytes.end <= island.start);
        apart && bytes.start >= self.prefix && self.islands.len() < MAX_ISLANDS
    }

    /// Adds bytes of which none is in.
    pub fn add(&mut self, bytes: Range<u64>) {
        debug_assert!(self.accepts(bytes.clone()), "{bytes:?} are in {self:?}");
        if bytes.is_empty() {
            return;
        }
        if bytes.start == self.prefix {
            self.prefix = bytes.end;
            if self.islands.first().is_some_and(|island| island.start == bytes.end) {
                self.prefix = self.islands.remove(0).end;
            }
            return;
        }
        let at = self.islands.partition_point(|island| island.end < bytes.start);
        let joins_next = |next: &Range<u64>| next.start == bytes.end;
        match self.islands.get(at).cloned() {
            Some(island) if island.end == bytes.start => {
                let joined = self.islands.get(at + 1).cloned().filter(joins_next);
                self.islands[at].end = joined.as_ref().map_or(bytes.end, |next| next.end);
                if joined.is_some() {
                    self.islands.remove(at + 1);
                }
            }
            Some(island) if joins_next(&island) => self.islands[at].start = bytes.start,
            _ => self.islands.insert(at, bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Compares with a bit for each byte.
        #[test]
        fn ranges_are_a_set_of_bytes(adds in prop::collection::vec((0u64..64, 0u64..9), 0..60)) {
            let (mut ranges, mut bits) = (Ranges::default(), [false; 80]);
            for (start, length) in adds {
                let bytes = start..start + length;
                let own = start as usize..(start + length) as usize;
                let free = bits[own.clone()].iter().all(|bit| !bit);
                if length > 0 {
                    prop_assert_eq!(ranges.accepts(bytes.clone()), free);
                }
                if length > 0 && free {
                    ranges.add(bytes);
                    bits[own].fill(true);
                }
                let prefix = bits.iter().position(|bit| !bit).unwrap();
                prop_assert_eq!(ranges.prefix(), prefix as u64);
                let ends = |i: &usize| bits[*i] && !bits[i + 1];
                let islands = (prefix..79).filter(ends).count();
                prop_assert_eq!(ranges.islands.len(), islands);
            }
        }
    }

    #[test]
    fn a_peer_can_not_make_it_grow_without_end() {
        let mut ranges = Ranges::default();
        for i in 1..=MAX_ISLANDS as u64 {
            assert!(ranges.accepts(2 * i..2 * i + 1));
            ranges.add(2 * i..2 * i + 1);
        }
        assert!(!ranges.accepts(1 << 40..(1 << 40) + 1));
    }
}
