//! The free ranges of segments, found by size and joined with their neighbours.

use std::collections::{BTreeMap, BTreeSet};

/// The free ranges of all segments. Neighbours are always joined, so two free ranges never touch.
#[derive(Debug, Default)]
pub(super) struct FreeList {
    /// (segment, offset) to size.
    by_place: BTreeMap<(u32, u64), u64>,
    /// (size, segment, offset): the first that is large enough is the best fit.
    by_size: BTreeSet<(u64, u32, u64)>,
}

impl FreeList {
    /// Adds a new segment, all free.
    pub(super) fn add(&mut self, segment: u32, bytes: u64) {
        self.give(segment, 0, bytes);
    }

    /// Takes `bytes` out of the smallest range that has them. Returns (segment, offset).
    pub(super) fn take(&mut self, bytes: u64) -> Option<(u32, u64)> {
        let &(size, segment, offset) = self.by_size.range((bytes, 0, 0)..).next()?;
        self.remove(segment, offset, size);
        if size > bytes {
            self.insert(segment, offset + bytes, size - bytes);
        }
        Some((segment, offset))
    }

    /// Returns a range that was taken (or is new), and joins it with its neighbours.
    pub(super) fn give(&mut self, segment: u32, offset: u64, bytes: u64) {
        let (mut start, mut end) = (offset, offset + bytes);
        let before = self.by_place.range(..(segment, offset)).next_back();
        if let Some((&(of, left), &size)) = before
            && of == segment
            && left + size == start
        {
            self.remove(segment, left, size);
            start = left;
        }
        if let Some(&size) = self.by_place.get(&(segment, end)) {
            self.remove(segment, end, size);
            end += size;
        }
        self.insert(segment, start, end - start);
    }

    /// Whether all of a segment of `bytes` bytes is free.
    pub(super) fn is_whole(&self, segment: u32, bytes: u64) -> bool {
        self.by_place.get(&(segment, 0)) == Some(&bytes)
    }

    /// Removes a segment. Returns its free ranges: (offset, size).
    pub(super) fn remove_segment(&mut self, segment: u32) -> Vec<(u64, u64)> {
        let of_it = self.by_place.range((segment, 0)..=(segment, u64::MAX));
        let ranges: Vec<_> = of_it.map(|(&(_, offset), &size)| (offset, size)).collect();
        for (offset, size) in &ranges {
            self.remove(segment, *offset, *size);
        }
        ranges
    }

    /// Adds the free ranges of other segments.
    pub(super) fn append(&mut self, mut other: Self) {
        self.by_place.append(&mut other.by_place);
        self.by_size.append(&mut other.by_size);
    }

    fn insert(&mut self, segment: u32, offset: u64, size: u64) {
        self.by_place.insert((segment, offset), size);
        self.by_size.insert((size, segment, offset));
    }

    fn remove(&mut self, segment: u32, offset: u64, size: u64) {
        self.by_place.remove(&(segment, offset));
        self.by_size.remove(&(size, segment, offset));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_smallest_range_that_fits_is_taken() {
        let mut free = FreeList::default();
        free.add(0, 1024);
        free.add(1, 256);
        assert_eq!(free.take(200), Some((1, 0)));
        assert_eq!(free.take(56), Some((1, 200)));
        assert_eq!(free.take(1024), Some((0, 0)));
        assert_eq!(free.take(1), None);
    }

    #[test]
    fn segments_are_never_joined() {
        let mut free = FreeList::default();
        free.add(0, 64);
        free.add(1, 64);
        assert_eq!(free.take(128), None);
    }

    #[test]
    fn a_segment_without_blocks_can_be_removed() {
        let mut free = FreeList::default();
        free.add(0, 64);
        free.add(1, 128);
        assert_eq!(free.take(64), Some((0, 0)));
        assert!(!free.is_whole(0, 64) && free.is_whole(1, 128));
        assert_eq!(free.remove_segment(1), [(0, 128)]);
        assert_eq!(free.take(64), None);
        free.give(0, 0, 64);
        assert!(free.is_whole(0, 64));
    }

    #[test]
    fn the_ranges_of_a_segment_can_move() {
        let (mut free, mut other) = (FreeList::default(), FreeList::default());
        (0..3).for_each(|segment| free.add(segment, 256));
        other.add(7, 64);
        free.give(1, 1024, 64);
        assert_eq!(free.remove_segment(1), [(0, 256), (1024, 64)]);
        assert_eq!(free.remove_segment(1), []);
        free.append(other);
        assert!([0, 2].iter().all(|&segment| free.is_whole(segment, 256)) && free.is_whole(7, 64));
    }

    proptest! {
        /// Ranges are taken and given back in any order: no two live ranges overlap, all stay
        /// within their segment, and in the end everything is one free range again.
        #[test]
        fn ranges_never_overlap_and_join_again(
            steps in prop::collection::vec(
                (any::<bool>(), 1u64..300, any::<prop::sample::Index>()),
                1..200,
            ),
        ) {
            let mut free = FreeList::default();
            free.add(0, 2048);
            free.add(1, 1024);
            let mut live: Vec<(u32, u64, u64)> = Vec::new();
            for (take, bytes, which) in steps {
                if take || live.is_empty() {
                    let Some((segment, offset)) = free.take(bytes) else { continue };
                    prop_assert!(offset + bytes <= [2048, 1024][segment as usize]);
                    for &(of, start, size) in &live {
                        let apart = offset + bytes <= start || start + size <= offset;
                        prop_assert!(of != segment || apart);
                    }
                    live.push((segment, offset, bytes));
                } else {
                    let (segment, offset, bytes) = live.swap_remove(which.index(live.len()));
                    free.give(segment, offset, bytes);
                }
            }
            for (segment, offset, bytes) in live {
                free.give(segment, offset, bytes);
            }
            let whole: Vec<_> = free.by_place.into_iter().collect();
            prop_assert_eq!(whole, vec![((0, 0), 2048), ((1, 0), 1024)]);
        }
    }
}
