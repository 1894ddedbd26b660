//! Finds out that a job stands still as a whole. If no rank submits anything, no tensor waits, and
//! no report about a wait is made. But the steps of the ranks are known: a job that has made none
//! for many times as long as one takes stands still.
//!
//! It says nothing before the ranks have made two steps, because the first one may take long: it
//! compiles. While a rank is paused ([`Seen::is_paused`]), no step is expected. Pure: the runtime
//! passes the reports of the nodes and the time.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use gradwire_proto::pb;
use gradwire_settings::Watchdog as Limits;

use crate::model::text;

/// How many times of steps are kept for the median (BOUND).
const MAX_TIMES: usize = 64;

/// What a report says about a rank.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen {
    /// The node, and the rank's number there.
    pub(crate) rank: (u32, u32),
    /// The number of its steps.
    pub(crate) steps: u32,
    /// The time per step of its last steps; zero before the second one.
    pub(crate) step: Duration,
    /// How long ago its last step was; `None` before the first one.
    pub(crate) since: Option<Duration>,
    /// Whether its program has said that it makes no steps now.
    pub(crate) is_paused: bool,
}

impl Seen {
    /// A rank of a node in the node's report, which has this age.
    pub(crate) fn of((node, rank): (u32, &pb::RankReport), age: Duration) -> Self {
        let seconds = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let since = (rank.steps > 0).then(|| seconds(rank.since_step_seconds) + age);
        let (steps, step) = (rank.steps, seconds(rank.step_seconds));
        Self { rank: (node, rank.rank), steps, step, since, is_paused: rank.paused }
    }
}

/// A job that stands still.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Standstill {
    /// For how long.
    pub(crate) idle: Duration,
    /// The median of the times of the last steps.
    pub(crate) step: Duration,
    /// Whether the job must end now.
    pub(crate) ends: bool,
}

impl Standstill {
    /// What is wrong, in one line.
    pub(crate) fn text(&self) -> String {
        format!(
            "no rank has made a step for {}; the median of the last steps is {:.3} s",
            text::seconds(self.idle),
            self.step.as_secs_f64()
        )
    }
}

/// The steps of a job.
#[derive(Debug)]
pub(crate) struct Watchdog {
    limits: Limits,
    steps: BTreeMap<(u32, u32), u32>,
    times: VecDeque<Duration>,
    /// When a rank last made a step or was paused.
    moved: Option<Duration>,
    /// How long a standstill lasts when it is reported next.
    next: Option<Duration>,
}

impl Watchdog {
    /// A watchdog with these limits.
    pub(crate) fn new(limits: Limits) -> Self {
        let (steps, times) = Default::default();
        Self { limits, steps, times, moved: None, next: None }
    }

    /// Looks at the newest reports of all ranks that have not left. Returns what is to be reported
    /// now: when the job stands still, and again whenever the time has doubled.
    pub(crate) fn look(
        &mut self,
        now: Duration,
        seen: impl IntoIterator<Item = Seen>,
    ) -> Option<Standstill> {
        let mut moved = self.moved;
        for rank in seen {
            if rank.is_paused {
                moved = Some(now);
            }
            let Some(since) = rank.since else { continue };
            moved = moved.max(Some(now.saturating_sub(since)));
            let before = self.steps.insert(rank.rank, rank.steps);
            if before != Some(rank.steps) && !rank.step.is_zero() {
                if self.times.len() >= MAX_TIMES {
                    self.times.pop_front();
                }
                self.times.push_back(rank.step);
            }
        }
        if moved > self.moved {
            (self.moved, self.next) = (moved, None);
        }
        let (idle, step) = (now.saturating_sub(self.moved?), self.median()?);
        let Limits { factor, min, abort, .. } = self.limits;
        let limit = min.max(step.saturating_mul(factor));
        let ends = !abort.is_zero() && idle >= abort.max(limit);
        let next = self.next.unwrap_or(limit);
        let reports = factor > 0 && idle >= next;
        if !reports && !ends {
            return None;
        }
        self.next = Some(2 * next.max(idle / 2));
        Some(Standstill { idle, step, ends })
    }

    fn median(&self) -> Option<Duration> {
        let mut times: Vec<Duration> = self.times.iter().copied().collect();
        let middle = times.len() / 2;
        (!times.is_empty()).then(|| *times.select_nth_unstable(middle).1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn watchdog(abort: u64) -> Watchdog {
        Watchdog::new(Limits { factor: 20, min: s(60), abort: s(abort) })
    }

    /// Rank 0 has made this many steps of `step` seconds each, the last one `since` seconds ago.
    fn seen(steps: u32, step: u64, since: u64) -> Seen {
        let since = (steps > 0).then_some(s(since));
        Seen { rank: (0, 0), steps, step: s(step), since, is_paused: false }
    }

    #[test]
    fn a_standstill_is_reported_at_doubling_times() {
        let mut dog = watchdog(0);
        assert_eq!(dog.look(s(10), [seen(5, 1, 0)]), None);
        let reported: Vec<u64> =
            (11..400).filter(|now| dog.look(s(*now), [seen(5, 1, now - 10)]).is_some()).collect();
        assert_eq!(reported, [70, 130, 250]);
        assert_eq!(dog.look(s(400), [seen(6, 1, 0)]), None, "it goes on");
        let again = dog.look(s(460), [seen(6, 1, 60)]).unwrap();
        let text = "no rank has made a step for 60.0 s; the median of the last steps is 1.000 s";
        assert_eq!((again.text().as_str(), again.ends), (text, false));
    }

    #[test]
    fn one_rank_that_goes_on_is_enough() {
        let mut dog = watchdog(0);
        for now in 1..300 {
            let other = Seen { rank: (0, 1), ..seen(5 + now as u32, 1, 0) };
            assert_eq!(dog.look(s(now), [seen(5, 1, now), other]), None);
        }
    }

    #[test]
    fn long_steps_have_more_time() {
        let mut dog = watchdog(0);
        dog.look(s(100), [seen(2, 30, 0)]);
        assert_eq!(dog.look(s(699), [seen(2, 30, 599)]), None);
        assert!(dog.look(s(700), [seen(2, 30, 600)]).is_some());
    }

    #[test]
    fn a_first_step_may_take_any_time() {
        let mut dog = watchdog(10);
        for now in 1..5000 {
            assert_eq!(dog.look(s(now), [seen(0, 0, 0)]), None, "no step");
            assert_eq!(dog.look(s(now), [seen(1, 0, now)]), None, "no median");
        }
    }

    #[test]
    fn a_pause_does_not_count() {
        let mut dog = watchdog(0);
        dog.look(s(1), [seen(5, 1, 0)]);
        let paused = Seen { rank: (0, 1), is_paused: true, ..seen(5, 1, 0) };
        for now in 2..1000 {
            let other = Seen { since: Some(s(now - 1)), ..paused };
            assert_eq!(dog.look(s(now), [seen(5, 1, now - 1), other]), None);
        }
        assert_eq!(dog.look(s(1058), [seen(5, 1, 1057)]), None);
        assert!(dog.look(s(1059), [seen(5, 1, 1058)]).is_some(), "from the end of the pause");
    }

    #[test]
    fn it_ends_the_job_if_wanted() {
        let ends = |abort, at: u64| {
            let mut dog = watchdog(abort);
            dog.look(s(1), [seen(5, 1, 0)]);
            (2..at).find_map(|now| dog.look(s(now), [seen(5, 1, now - 1)]).filter(|it| it.ends))
        };
        assert_eq!(ends(0, 2000), None);
        assert_eq!(ends(100, 2000).map(|it| it.idle), Some(s(100)));
        assert_eq!(ends(10, 2000).map(|it| it.idle), Some(s(60)), "not before it is reported");
    }

    #[test]
    fn it_can_be_off() {
        let mut dog = Watchdog::new(Limits { factor: 0, min: s(1), abort: s(0) });
        dog.look(s(1), [seen(5, 1, 0)]);
        assert_eq!(dog.look(s(999), [seen(5, 1, 998)]), None);
    }

    #[test]
    fn it_can_end_without_reports() {
        let mut dog = Watchdog::new(Limits { factor: 0, min: s(1), abort: s(10) });
        dog.look(s(1), [seen(5, 1, 0)]);
        assert_eq!(dog.look(s(10), [seen(5, 1, 9)]), None);
        assert!(dog.look(s(11), [seen(5, 1, 10)]).is_some_and(|it| it.ends));
    }
}
