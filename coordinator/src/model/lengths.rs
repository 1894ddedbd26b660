//! Counts the elements in the same range of several flows of different lengths.

use std::{collections::BTreeMap, ops::Range};

/// The most distinct lengths (BOUND), because every piece searches them.
const MAX_STEPS: usize = 64;

/// The lengths of some flows, in elements. If there are too many distinct lengths, some flows count
/// as longer than they are.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Lengths {
    /// The distinct lengths, ascending, each with the number of flows that are at least as long.
    steps: Vec<(u64, u64)>,
}

impl Lengths {
    /// The lengths of flows; empty flows don't count.
    pub(crate) fn new(lengths: impl IntoIterator<Item = u64>) -> Self {
        Self::exact(lengths).coarse()
    }

    fn exact(lengths: impl IntoIterator<Item = u64>) -> Self {
        let mut equal: BTreeMap<u64, u64> = BTreeMap::new();
        for length in lengths.into_iter().filter(|&length| length > 0) {
            *equal.entry(length).or_default() += 1;
        }
        let mut steps: Vec<(u64, u64)> = equal.into_iter().collect();
        let mut longer = 0;
        for (_, flows) in steps.iter_mut().rev() {
            longer += *flows;
            *flows = longer;
        }
        Self { steps }
    }

    /// Reduces the steps: flows of neighbouring lengths count as the longest of them.
    fn coarse(mut self) -> Self {
        let stride = self.steps.len().div_ceil(MAX_STEPS).max(1);
        // Each kept step represents those before it, of which the first has the most flows.
        let last = |steps: &[(u64, u64)]| Some((steps.last()?.0, steps.first()?.1));
        self.steps = self.steps.rchunks(stride).rev().filter_map(last).collect();
        self
    }

    /// Lengths with at least as many elements in every range as any of these.
    pub(crate) fn most(of: impl IntoIterator<Item = Vec<u64>>) -> Self {
        let of: Vec<Self> = of.into_iter().map(Self::new).collect();
        let mut lengths: Vec<u64> =
            of.iter().flat_map(|one| one.steps.iter().map(|&(length, _)| length)).collect();
        lengths.sort_unstable();
        lengths.dedup();
        let most = |length: u64| of.iter().map(|one| one.as_long_as(length)).max().unwrap_or(0);
        let steps = lengths.into_iter().map(|length| (length, most(length))).collect();
        Self { steps }.coarse()
    }

    /// How many flows have at least this length.
    fn as_long_as(&self, length: u64) -> u64 {
        let at = self.steps.partition_point(|&(own, _)| own < length);
        self.steps.get(at).map_or(0, |&(_, flows)| flows)
    }

    /// How many flows there are.
    pub(crate) fn flows(&self) -> u64 {
        self.steps.first().map_or(0, |&(_, flows)| flows)
    }

    /// The length of the longest flow.
    pub(crate) fn longest(&self) -> u64 {
        self.steps.last().map_or(0, |&(length, _)| length)
    }

    /// The ranges between two lengths, each with the number of flows that reach it.
    fn stretches(&self) -> impl Iterator<Item = (Range<u64>, u64)> {
        let starts = [0].into_iter().chain(self.steps.iter().map(|&(length, _)| length));
        starts.zip(&self.steps).map(|(start, &(end, flows))| (start..end, flows))
    }

    /// The total number of elements that all flows have in a range.
    pub(crate) fn within(&self, range: Range<u64>) -> u64 {
        let elements = self.stretches().map(|(stretch, flows)| {
            let (from, to) = (stretch.start.max(range.start), stretch.end.min(range.end));
            to.saturating_sub(from).saturating_mul(flows)
        });
        elements.fold(0, u64::saturating_add)
    }

    /// The end of the longest range from `start` on with at most `elements` elements of all flows.
    pub(crate) fn reach(&self, start: u64, mut elements: u64) -> u64 {
        let mut end = start;
        for (stretch, flows) in self.stretches().filter(|(stretch, _)| stretch.end > start) {
            let there = stretch.end - end;
            if elements / flows < there {
                return end + elements / flows;
            }
            elements -= there * flows;
            end = stretch.end;
        }
        end
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Compared with a sum over all flows.
        #[test]
        fn ranges_of_all_flows_are_counted(
            lengths in prop::collection::vec(0..40u64, 0..12),
            start in 0..50u64,
            more in 0..50u64,
            room in 0..300u64,
        ) {
            let all = Lengths::new(lengths.iter().copied());
            let within = |from: u64, to: u64| -> u64 {
                lengths.iter().map(|&length| length.min(to) - length.min(from)).sum()
            };
            prop_assert_eq!(all.within(start..start + more), within(start, start + more));
            prop_assert_eq!(all.longest(), lengths.iter().copied().max().unwrap_or(0));
            let flows = lengths.iter().filter(|&&length| length > 0).count();
            prop_assert_eq!(all.flows(), flows as u64);
            let end = all.reach(start, room);
            prop_assert!(end >= start && within(start, end) <= room);
            let is_all = end >= all.longest();
            prop_assert!(is_all || within(start, end + 1) > room, "{} could go on", end);
        }

        /// BOUND: no node has more of any range, even if there are too many distinct lengths.
        #[test]
        fn no_node_has_more_than_the_most(
            of in prop::collection::vec(prop::collection::vec(0..5000u64, 0..200), 1..6),
            start in 0..5500u64,
            more in 0..5500u64,
        ) {
            let most = Lengths::most(of.clone());
            let longest = of.iter().flatten().copied().max().unwrap_or(0);
            prop_assert!(most.longest() == longest && most.steps.len() <= MAX_STEPS);
            let own = of.iter().map(|lengths| -> u64 {
                let own = lengths.iter();
                own.map(|&length| length.min(start + more) - length.min(start)).sum()
            });
            prop_assert!(own.max().unwrap_or(0) <= most.within(start..start + more));
        }
    }
}
