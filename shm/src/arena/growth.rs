//! How an arena grows, and how much it keeps. Pure.
//!
//! - Segments double up to a configured size. A larger tensor gets a segment of its own, whose size
//!   is rounded up by at most an eighth, so that the next, slightly larger one fits there, too.
//! - Segments without tensors go back to the system while there are more than twice the bytes that
//!   were in use lately, plus [`SPARE`] (BOUND). Recent use counts, because a program that frees
//!   and makes the same tensors again and again must not pay for new memory each time.

use gradwire_proto::JobId;

use crate::segment::{HUGE_PAGE, HugePages, SegmentId};

/// The size of the first segment, in bytes.
const FIRST_SEGMENT: u64 = 4 << 20;

/// A new segment has at least the reserved bytes divided by this.
const MIN_GROWTH: u64 = 64;

/// A segment for one tensor is rounded up to a multiple of this part of its power of two.
const ROUNDING: u64 = 8;

/// What an arena may keep however little is in use, in bytes.
pub const SPARE: u64 = 64 << 20;

/// How an arena grows.
#[derive(Debug, Clone)]
pub struct ArenaConfig {
    /// The job, which is part of the memory's name (CLEAN).
    pub job: JobId,
    /// The size up to which segments double, in bytes. A larger tensor gets a segment of its own.
    pub segment_bytes: u64,
    /// The limit for all segments together, in bytes (BOUND). `None`: the machine's memory.
    pub max_bytes: Option<u64>,
    /// How many segments may be adopted at a time (BOUND). Segment numbers are limited, and the
    /// arena needs some to grow.
    pub max_adopted: u32,
    /// Whether the segments use huge pages.
    pub huge: HugePages,
}

impl ArenaConfig {
    /// Segments of up to 64 MiB without a limit in total, up to 512 adopted segments, and huge
    /// pages where the kernel offers them.
    pub fn new(job: JobId) -> Self {
        let (segment_bytes, huge) = (64 << 20, HugePages::default());
        Self { job, segment_bytes, max_bytes: None, max_adopted: 512, huge }
    }

    /// The size of the next segment, which is made for a block of `block` bytes when all segments
    /// together have `reserved` bytes. `None` if the limit does not allow it.
    ///
    /// Segments have 4, 4, 8, 16 … MiB, up to `segment_bytes`. Later they grow again: each has a
    /// 64th of the total. So their number grows with the logarithm of the memory (BOUND).
    pub(super) fn next_segment(&self, reserved: u64, block: u64) -> Option<u64> {
        let doubled = round_down(reserved).max(FIRST_SEGMENT).min(self.segment_bytes);
        let step = doubled.max(round_down(reserved / MIN_GROWTH));
        let wanted = if block > step { round_up(block)? } else { step };
        // The last segments may be smaller than the others, but hold the block.
        let left = self.left(reserved);
        let size = wanted.min(left).max(block);
        (size <= left).then_some(size)
    }

    /// The smallest segment that holds a block, if memory is short. `None` if the limit does not
    /// allow it.
    pub(super) fn least_segment(&self, reserved: u64, block: u64) -> Option<u64> {
        (block <= self.left(reserved)).then_some(block)
    }

    fn left(&self, reserved: u64) -> u64 {
        self.max_bytes.map_or(u64::MAX, |max| max.saturating_sub(reserved))
    }
}

/// The largest power of two that is not above `bytes`; 0 for 0.
fn round_down(bytes: u64) -> u64 {
    bytes.checked_ilog2().map_or(0, |log| 1 << log)
}

/// The size of a segment for one block. `None` if it can't be represented.
fn round_up(block: u64) -> Option<u64> {
    block.checked_next_multiple_of((round_down(block) / ROUNDING).max(HUGE_PAGE))
}

/// How many bytes were in use, now and lately.
#[derive(Debug, Default)]
pub(super) struct Usage {
    now: u64,
    /// The most since the last turn, and between the two turns before.
    most: u64,
    most_before: u64,
}

impl Usage {
    /// Bytes in use now.
    pub(super) fn now(&self) -> u64 {
        self.now
    }

    pub(super) fn add(&mut self, bytes: u64) {
        self.now += bytes;
        self.most = self.most.max(self.now);
    }

    pub(super) fn remove(&mut self, bytes: u64) {
        self.now -= bytes;
    }

    /// Some time has passed: what was in use before the last turn does not count any more.
    pub(super) fn turn(&mut self) {
        self.most_before = std::mem::replace(&mut self.most, self.now);
    }

    /// The bytes that may stay reserved while `more` bytes are about to be used.
    pub(super) fn allowed(&self, more: u64) -> u64 {
        let lately = self.most.max(self.most_before).max(self.now.saturating_add(more));
        lately.saturating_mul(2).saturating_add(SPARE)
    }
}

/// The segments to give back, of these without tensors, so that `excess` bytes less are reserved:
/// as few as possible, and no larger ones than necessary.
pub(super) fn to_give_back(mut empty: Vec<(u64, SegmentId)>, mut excess: u64) -> Vec<SegmentId> {
    empty.sort_unstable();
    let mut chosen = Vec::new();
    while excess > 0 && !empty.is_empty() {
        let enough = empty.partition_point(|(bytes, _)| *bytes < excess);
        let (bytes, id) = empty.remove(enough.min(empty.len() - 1));
        excess = excess.saturating_sub(bytes);
        chosen.push(id);
    }
    chosen
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::arena::ALIGNMENT;

    const MIB: u64 = 1 << 20;

    fn config() -> ArenaConfig {
        ArenaConfig::new(JobId::new("test-growth").unwrap())
    }

    /// The sizes of the segments that are made for small blocks, until there are `bytes` bytes.
    fn sizes(config: &ArenaConfig, bytes: u64) -> Vec<u64> {
        let mut reserved = 0;
        let next = || {
            let size = config.next_segment(reserved, ALIGNMENT).filter(|_| reserved < bytes)?;
            reserved += size;
            Some(size)
        };
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn segments_double_up_to_the_configured_size() {
        let mib = |sizes: &[u64]| sizes.iter().map(|size| size / MIB).collect::<Vec<_>>();
        let sizes = |segment_bytes| sizes(&ArenaConfig { segment_bytes, ..config() }, 256 * MIB);
        assert_eq!(mib(&sizes(64 * MIB)), [4, 4, 8, 16, 32, 64, 64, 64]);
        assert_eq!(mib(&sizes(24 * MIB))[..6], [4, 4, 8, 16, 24, 24]);
        assert_eq!(mib(&sizes(MIB))[..128], [1; 128]);
    }

    #[test]
    fn an_arena_without_limit_has_few_segments() {
        let all = sizes(&config(), 4 << 40);
        assert!(all.len() < 1024, "{} segments are more than a worker may have", all.len());
        assert_eq!(config().next_segment(64 << 30, 1 << 40), Some(1 << 40));
        assert_eq!(config().next_segment(0, u64::MAX - 63), None, "no huge page ends there");
    }

    #[test]
    fn a_segment_for_one_tensor_is_rounded_up() {
        let next = |block| config().next_segment(0, block * MIB).map(|size| size / MIB);
        assert_eq!([66, 80, 81, 127, 128, 142].map(next), [72, 80, 88, 128, 128, 144].map(Some));
        let tight = ArenaConfig { max_bytes: Some(70 * MIB), ..config() };
        assert_eq!(tight.next_segment(0, 66 * MIB), Some(70 * MIB));
        assert_eq!(tight.least_segment(0, 66 * MIB), Some(66 * MIB));
        assert_eq!(tight.least_segment(5 * MIB, 66 * MIB), None);
    }

    #[test]
    fn what_was_in_use_counts_for_two_turns() {
        let mut usage = Usage::default();
        usage.add(100 * MIB);
        usage.remove(90 * MIB);
        assert_eq!((usage.now(), usage.allowed(0)), (10 * MIB, 264 * MIB));
        usage.turn();
        assert_eq!(usage.allowed(0), 264 * MIB);
        usage.turn();
        assert_eq!((usage.allowed(0), usage.allowed(5 * MIB)), (84 * MIB, 94 * MIB));
        assert_eq!(usage.allowed(u64::MAX), u64::MAX);
    }

    #[test]
    fn as_few_segments_as_possible_go_back() {
        let empty = || [3, 9, 5, 4].into_iter().zip((0..).map(SegmentId)).collect();
        let ids = |chosen: Vec<SegmentId>| chosen.iter().map(|id| id.0).collect::<Vec<_>>();
        let chosen = |excess| ids(to_give_back(empty(), excess));
        assert!(chosen(0).is_empty());
        assert_eq!(chosen(4), [3]);
        assert_eq!(chosen(5), [2]);
        assert_eq!(chosen(11), [1, 0], "the largest, and what is enough with it");
        assert_eq!(chosen(100), [1, 2, 3, 0]);
    }

    proptest! {
        /// Any blocks of any sizes: each fits its segment, the limit holds (BOUND), the total at
        /// most doubles at a time, and no segment is smaller than necessary.
        #[test]
        fn growth_fits_and_is_bounded(
            blocks in prop::collection::vec((0u32..34, 0u64..1 << 20), 1..400),
            segment_bytes in (16u64..1 << 18).prop_map(|pages| pages * 4096),
            max_bytes in prop::option::of((1u64..1 << 24).prop_map(|pages| pages * 4096)),
        ) {
            let config = ArenaConfig { segment_bytes, max_bytes, ..config() };
            let mut reserved = 0u64;
            for (log, more) in blocks {
                let block = ((1u64 << log) + more).next_multiple_of(ALIGNMENT);
                let left = max_bytes.map_or(u64::MAX, |max| max.saturating_sub(reserved));
                let Some(size) = config.next_segment(reserved, block) else {
                    prop_assert!(block > left, "{block} bytes are refused at {reserved}");
                    continue;
                };
                prop_assert!((block..=left).contains(&size));
                let (own, first) = (block + (block / 8).max(HUGE_PAGE), 4 << 20);
                prop_assert!(size <= reserved.max(first).max(own));
                prop_assert!(size <= segment_bytes.max(reserved / 64).max(own));
                let least = (reserved / 2).max(first).min(segment_bytes).max(reserved / 128);
                prop_assert!(size >= least.min(left));
                reserved += size;
            }
        }

        /// Enough goes back, and nothing that is not needed.
        #[test]
        fn no_segment_goes_back_without_need(
            sizes in prop::collection::vec(1u64..1000, 0..20),
            excess in 0u64..5000,
        ) {
            let empty: Vec<_> = sizes.iter().copied().zip((0..).map(SegmentId)).collect();
            let chosen = to_give_back(empty, excess);
            let bytes = |id: &SegmentId| sizes[id.0 as usize];
            let total: u64 = chosen.iter().map(bytes).sum();
            prop_assert!(total >= excess || chosen.len() == sizes.len());
            if let Some(smallest) = chosen.iter().map(bytes).min() {
                prop_assert!(total - smallest < excess);
            }
        }
    }
}
