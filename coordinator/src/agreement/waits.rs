//! How long tensors waited for the last rank and the last node, for the metrics.
//!
//! The tensors of a step wait at the same time. So the time counted for a rank or a node is the
//! time in which *any* tensor waited for it: overlapping waits count once. While only one rank is
//! missing, a wait is counted as it lasts, and the rest at its end.

use std::{collections::BTreeMap, time::Duration};

use gradwire_proto::{NodeId, Rank};

use crate::model::command::Waits;

/// Shorter waits are normal and are not counted for a rank.
const SHORTEST: Duration = Duration::from_millis(1);

/// Until when the waits for one rank or node have been counted.
#[derive(Debug, Default)]
struct Counted(Duration);

impl Counted {
    /// Counts a wait, and returns the part that had not been counted.
    fn add(&mut self, since: Duration, now: Duration) -> Duration {
        let time = now.saturating_sub(since.max(self.0));
        self.0 = self.0.max(now);
        time
    }
}

/// The waits that have not been recorded yet, and until when waits have been counted.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    nodes: BTreeMap<NodeId, Counted>,
    ranks: BTreeMap<Rank, Counted>,
    new: Waits,
}

impl Waiting {
    /// Counts the wait of a tensor that was first announced at `since` and completed by `last`.
    pub(super) fn node(&mut self, last: NodeId, since: Duration, now: Duration) {
        let time = self.nodes.entry(last).or_default().add(since, now);
        *self.new.nodes.entry(last).or_default() += time;
    }

    /// Counts the wait of a tensor that was first submitted at `since` and completed by `last`.
    pub(super) fn rank(&mut self, last: Rank, since: Duration, now: Duration) {
        let wait = now.saturating_sub(since);
        self.new.of_tensors.push(wait);
        if wait >= SHORTEST {
            let time = self.ranks.entry(last).or_default().add(since, now);
            let new = self.new.ranks.entry(last).or_default();
            new.time += time;
            new.tensors += 1;
        }
    }

    /// Counts the wait so far of a tensor that waits only for this node.
    pub(crate) fn lasts_for_node(&mut self, node: NodeId, since: Duration, now: Duration) {
        self.node(node, since, now);
    }

    /// Counts the wait so far of a tensor that waits only for this rank.
    pub(crate) fn lasts_for_rank(&mut self, rank: Rank, since: Duration, now: Duration) {
        let time = self.ranks.entry(rank).or_default().add(since, now);
        self.new.ranks.entry(rank).or_default().time += time;
    }

    /// What has been added since the last call.
    pub(crate) fn take(&mut self) -> Waits {
        std::mem::take(&mut self.new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::command::RankWait;

    const fn ms(time: u64) -> Duration {
        Duration::from_millis(time)
    }

    #[test]
    fn overlapping_waits_count_once() {
        let (mut waiting, rank, node) = (Waiting::default(), Rank(3), NodeId(1));
        for (since, now) in [(100, 150), (110, 150), (130, 160), (200, 210)] {
            waiting.rank(rank, ms(since), ms(now));
            waiting.node(node, ms(since), ms(now));
        }
        let new = waiting.take();
        assert_eq!(new.ranks[&rank].time, ms(70));
        assert_eq!(new.ranks[&rank].tensors, 4);
        assert_eq!(new.nodes[&node], ms(70));
        assert_eq!(new.of_tensors, [50, 40, 30, 10].map(ms));
        // A tensor that has waited for a long time completes.
        waiting.rank(rank, ms(90), ms(230));
        assert_eq!(waiting.take().ranks[&rank].time, ms(20));
    }

    #[test]
    fn a_wait_that_lasts_counts_once() {
        let (mut waiting, rank) = (Waiting::default(), Rank(3));
        waiting.lasts_for_rank(rank, ms(100), ms(1200));
        assert_eq!(waiting.take().ranks[&rank], RankWait { time: ms(1100), tensors: 0 });
        waiting.lasts_for_rank(rank, ms(100), ms(2200));
        waiting.rank(rank, ms(100), ms(2500));
        assert_eq!(waiting.take().ranks[&rank], RankWait { time: ms(1300), tensors: 1 });
    }

    #[test]
    fn short_waits_are_not_counted_for_ranks() {
        let mut waiting = Waiting::default();
        waiting.rank(Rank(0), ms(10), ms(20));
        waiting.rank(Rank(1), ms(10), ms(20));
        waiting.rank(Rank(2), ms(20), ms(20) + SHORTEST / 2);
        let new = waiting.take();
        let ranks: Vec<_> = new.ranks.iter().map(|(rank, wait)| (rank.0, wait.time)).collect();
        assert_eq!(ranks, [(0, ms(10)), (1, ms(10))]);
        assert_eq!(new.of_tensors.len(), 3);
        assert_eq!(waiting.take(), Waits::default());
    }
}
