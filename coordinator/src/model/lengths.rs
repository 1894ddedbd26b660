//! How many elements the same range of several flows has: as far as each of them has it.

use std::{collections::BTreeMap, ops::Range};

/// The lengths of some flows, in elements.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Lengths {
    /// The different lengths, ascending, each with the number of flows that are at least as long.
    steps: Vec<(u64, u64)>,
}

impl Lengths {
    /// Empty flows don't count.
    pub(crate) fn new(lengths: impl IntoIterator<Item = u64>) -> Self {
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

    /// How many flows there are.
    pub(crate) fn flows(&self) -> u64 {
        self.steps.first().map_or(0, |&(_, flows)| flows)
    }

    /// The longest flow.
    pub(crate) fn longest(&self) -> u64 {
        self.steps.last().map_or(0, |&(length, _)| length)
    }

    /// The ranges between two lengths, each with the flows that have it.
    fn stretches(&self) -> impl Iterator<Item = (Range<u64>, u64)> {
        let starts = [0].into_iter().chain(self.steps.iter().map(|&(length, _)| length));
        starts.zip(&self.steps).map(|(start, &(end, flows))| (start..end, flows))
    }

    /// How many elements all flows together have in a range of each.
    pub(crate) fn within(&self, range: Range<u64>) -> u64 {
        let elements = self.stretches().map(|(stretch, flows)| {
            let (from, to) = (stretch.start.max(range.start), stretch.end.min(range.end));
            to.saturating_sub(from) * flows
        });
        elements.sum()
    }

    /// How far a range from `start` on may go if it may have so many elements of all flows.
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
        /// Against a sum over all flows.
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
    }
}
