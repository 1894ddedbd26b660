//! How long tensors waited for the rank and the node that came last, for the metrics.
//!
//! Tensors of one step wait at the same time, and together no longer than the clock ran. So what
//! counts for a rank or a node is the time in which *some* tensor waited for it: a wait is counted
//! from where the last one ended, if that was later than it began.

use std::{collections::BTreeMap, time::Duration};

use gradwire_proto::{NodeId, Rank};

use crate::model::command::Waits;

/// Shorter waits say nothing about a rank: all of them differ by as much.
const SHORTEST: Duration = Duration::from_millis(1);

/// Until when the waits for one have been counted.
#[derive(Debug, Default)]
struct Counted(Duration);

impl Counted {
    /// The part of a wait that has not been counted.
    fn add(&mut self, since: Duration, now: Duration) -> Duration {
        let time = now.saturating_sub(since.max(self.0));
        self.0 = self.0.max(now);
        time
    }
}

/// All waits of a job that have not been recorded, and until when each was counted.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    nodes: BTreeMap<NodeId, Counted>,
    ranks: BTreeMap<Rank, Counted>,
    new: Waits,
}

impl Waiting {
    /// A tensor that some node had announced at `since` is complete, with a node's announcement.
    pub(super) fn node(&mut self, last: NodeId, since: Duration, now: Duration) {
        let time = self.nodes.entry(last).or_default().add(since, now);
        *self.new.nodes.entry(last).or_default() += time;
    }

    /// A tensor that some rank had submitted at `since` is complete, with a rank's submission.
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

    /// What has been added since the last call.
    pub(super) fn take(&mut self) -> Waits {
        std::mem::take(&mut self.new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(time: u64) -> Duration {
        Duration::from_millis(time)
    }

    #[test]
    fn waits_at_the_same_time_count_once() {
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
        // A tensor that began to wait long ago and is complete now.
        waiting.rank(rank, ms(90), ms(230));
        assert_eq!(waiting.take().ranks[&rank].time, ms(20));
    }

    #[test]
    fn each_rank_is_counted_by_itself_and_short_waits_are_not() {
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
