//! The clocks of the nodes: converts all times of a trace to the coordinator's clock.
//!
//! The offset of a clock is estimated repeatedly. If each event used the newest estimate, events of
//! one thread could overlap. So a node keeps an estimate until another one is twice as good or
//! contradicts it. Then its offset does not jump: from the latest event on it approaches the new
//! estimate, at most half as fast as time passes. So the order of events is kept.

use std::collections::{BTreeMap, VecDeque};

/// The most changes of an offset that are remembered (BOUND). Earlier events get the oldest offset.
const MAX_CHANGES: usize = 256;

/// One node's clock.
#[derive(Debug)]
struct Clock {
    /// The estimate in use, and its largest error.
    ahead_ns: i64,
    error_ns: u64,
    /// How far the clock is ahead at some of its times, in ascending order. Between two of them the
    /// offset is interpolated, before the first and after the last it is constant.
    offsets: VecDeque<(u64, i64)>,
    /// The latest of its times that was converted.
    latest_ns: u64,
    /// Until when the offset approaches the estimate in use, and the largest error until then.
    approaches: Option<(u64, u64)>,
}

impl Clock {
    fn ahead_at(&self, at_ns: u64) -> i64 {
        let next = self.offsets.partition_point(|(since_ns, _)| *since_ns <= at_ns);
        let before = next.checked_sub(1).and_then(|index| self.offsets.get(index));
        match (before, self.offsets.get(next)) {
            (Some((since, from)), Some((until, to))) => {
                let part = i128::from(at_ns - since) * i128::from(to - from);
                from + (part / i128::from(until - since)) as i64
            }
            (Some((_, only)), None) | (None, Some((_, only))) => *only,
            (None, None) => self.ahead_ns,
        }
    }

    /// The largest error of its latest time.
    fn error_ns(&self) -> u64 {
        match self.approaches {
            Some((until_ns, worst_ns)) if self.latest_ns < until_ns => worst_ns,
            _ => self.error_ns,
        }
    }

    /// Approaches another estimate, from the latest time on.
    fn approach(&mut self, ahead_ns: i64, error_ns: u64) {
        let (now_ns, was_ns) = (self.latest_ns, self.ahead_at(self.latest_ns));
        self.offsets.retain(|(since_ns, _)| *since_ns < now_ns);
        let takes_ns = ahead_ns.abs_diff(was_ns).saturating_mul(2).max(1);
        let worst_ns = self.error_ns().max(error_ns);
        self.approaches = Some((now_ns.saturating_add(takes_ns), worst_ns));
        self.offsets.push_back((now_ns, was_ns));
        self.offsets.push_back((now_ns.saturating_add(takes_ns), ahead_ns));
        while self.offsets.len() > MAX_CHANGES {
            self.offsets.pop_front();
        }
        (self.ahead_ns, self.error_ns) = (ahead_ns, error_ns);
    }
}

/// The time of the file begins this long before the first event that arrives. Other threads may
/// have earlier events, and Perfetto drops events before 0.
const LEAD_NS: u64 = 1_000_000_000;

/// The clocks of all nodes.
#[derive(Debug, Default)]
pub(super) struct Clocks {
    nodes: BTreeMap<u32, Clock>,
    /// The time that counts as 0 in the file, once there is an event.
    base_ns: Option<u64>,
    newest_ns: u64,
}

impl Clocks {
    /// Takes an estimate of a node. Returns it if it is used from now on.
    pub(super) fn set(&mut self, node: u32, ahead_ns: i64, error_ns: u64) -> Option<(i64, u64)> {
        // No two clocks of a system are a century apart (TRUST).
        let ahead_ns = ahead_ns.clamp(-(1 << 61), 1 << 61);
        match self.nodes.get_mut(&node) {
            None => {
                let (offsets, approaches) = (VecDeque::new(), None);
                let clock = Clock { ahead_ns, error_ns, offsets, latest_ns: 0, approaches };
                self.nodes.insert(node, clock);
            }
            Some(clock) => {
                let is_better = error_ns < clock.error_ns / 2;
                let wrong_ns = clock.error_ns.saturating_add(error_ns);
                if !is_better && clock.ahead_ns.abs_diff(ahead_ns) <= wrong_ns {
                    return None;
                }
                clock.approach(ahead_ns, error_ns);
            }
        }
        Some((ahead_ns, error_ns))
    }

    /// Converts a time of a node's clock to the coordinator's. The order of a node's times is kept.
    pub(super) fn common(&mut self, node: u32, at_ns: u64) -> u64 {
        let ahead_ns = self.nodes.get_mut(&node).map_or(0, |clock| {
            clock.latest_ns = clock.latest_ns.max(at_ns);
            clock.ahead_at(at_ns)
        });
        let at_ns = at_ns.saturating_add_signed(ahead_ns.saturating_neg());
        self.base_ns.get_or_insert(at_ns.saturating_sub(LEAD_NS));
        self.newest_ns = self.newest_ns.max(at_ns);
        at_ns
    }

    /// The time that counts as 0.
    pub(super) fn base(&self) -> u64 {
        self.base_ns.unwrap_or_default()
    }

    /// The latest time of an event.
    pub(super) fn newest(&self) -> u64 {
        self.newest_ns
    }

    /// The largest error between the latest times of two nodes.
    pub(super) fn error_ns(&self) -> u64 {
        let mut errors: Vec<u64> = self.nodes.values().map(Clock::error_ns).collect();
        errors.sort_unstable();
        errors.iter().rev().take(2).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    #[test]
    fn an_estimate_stays_until_a_better_one_comes() {
        let mut clocks = Clocks::default();
        assert!(clocks.set(0, 1000, 100).is_some());
        assert_eq!(clocks.common(0, 5000), 4000);
        for same in [(1050, 60), (900, 100), (1199, 100)] {
            assert_eq!(clocks.set(0, same.0, same.1), None, "{same:?}");
        }
        assert!(clocks.set(0, 1040, 49).is_some());
        assert_eq!(clocks.error_ns(), 100, "its offset does not jump");
        for (at_ns, expected) in [(4000, 3000), (5000, 4000), (5040, 4020), (5080, 4040)] {
            assert_eq!(clocks.common(0, at_ns), expected, "{at_ns}");
        }
        assert_eq!(clocks.common(0, 9000), 7960);
        // It contradicts the estimate before: the clocks drift apart.
        assert!(clocks.set(0, 1500, 400).is_some());
        assert!(clocks.set(1, -7, 300).is_some());
        assert!(clocks.set(2, 0, 10).is_some());
        assert_eq!((clocks.common(1, 100), clocks.error_ns(), clocks.base()), (107, 700, 0));
        assert_eq!(clocks.newest(), 7960);
    }

    proptest! {
        /// The events of a node stay in order, whatever its estimates are.
        #[test]
        fn the_order_of_a_nodes_times_stays(
            batches in vec(
                (
                    -10_000_000..10_000_000_i64,
                    0..10_000_000_u64,
                    // For each event: the time since the one before, and its duration.
                    vec((3..1_000_000_u64, 0..5_000_000_u64), 0..20),
                ),
                1..100,
            )
        ) {
            let mut clocks = Clocks::default();
            let mut all = BTreeMap::new();
            let mut now_ns = 1 << 40;
            for (ahead_ns, error_ns, events) in batches {
                clocks.set(3, ahead_ns, error_ns);
                for (after_ns, took_ns) in events {
                    now_ns += after_ns;
                    for at_ns in [now_ns - took_ns, now_ns] {
                        let common_ns = clocks.common(3, at_ns);
                        let before_ns = *all.entry(at_ns).or_insert(common_ns);
                        // Interpolation may lose a nanosecond.
                        prop_assert!(before_ns.abs_diff(common_ns) <= 1);
                    }
                }
            }
            let common: Vec<u64> = all.into_values().collect();
            prop_assert!(common.windows(2).all(|pair| pair[0] <= pair[1] + 1));
        }
    }
}
