//! The time limits for ranks to attach (WAIT).
//!
//! For a new process the limit begins when the first rank of the job has attached, on any node:
//! before that nobody waits. It may do what it likes before it calls `init()`, but not for longer
//! than `launch.start_timeout_ms` while others wait for it.
//!
//! A survivor of an earlier epoch attaches when it next makes a call. Until then it may compute,
//! for `elastic.timeout_ms` from the beginning of the epoch. If its process is stopped, it is lost
//! as soon as one that has attached: after `heartbeat.timeout_ms`. Both limits also hold if no rank
//! has attached, because all may be stopped.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use gradwire_proto::{Failure, FailureKind, Rank};

use super::process_state::{is_stopped, state_of};

/// A rank that has not attached yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Missing {
    pub(crate) local_rank: u32,
    /// Its process, if that is known.
    pub(crate) pid: Option<u32>,
    /// It was in an earlier epoch.
    pub(crate) is_survivor: bool,
}

/// How long ranks may take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// A new process, after the first rank.
    pub(crate) new: Duration,
    /// A survivor.
    pub(crate) survivor: Duration,
    /// A survivor whose process is stopped.
    pub(crate) stopped: Duration,
}

/// The limit that a rank has exceeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Overdue {
    New(Duration),
    Survivor(Duration),
    Stopped(Duration),
}

/// Watches the ranks of this node until all have come.
#[derive(Debug, Default)]
pub(crate) struct Start {
    /// The first look.
    born: Option<Instant>,
    /// Since when it is known that a rank of the job has attached.
    begun: Option<Instant>,
    /// Since when the processes of survivors have been seen stopped, by local rank.
    stopped: BTreeMap<u32, Instant>,
    is_over: bool,
}

impl Start {
    /// Forgets the time so far, because this process was suspended.
    pub(crate) fn restart(&mut self, now: Instant) {
        self.born = self.born.map(|_| now);
        self.begun = self.begun.map(|_| now);
        self.stopped.clear();
    }

    /// Returns a rank that has not come in time, only once. `begun`: whether any rank of the job
    /// has attached. `missing` returns the ranks of this node that have not.
    pub(crate) fn overdue(
        &mut self,
        begun: bool,
        missing: impl FnOnce() -> Vec<Missing>,
        now: Instant,
        limits: Limits,
    ) -> Option<(Missing, Overdue)> {
        if self.is_over {
            return None;
        }
        let missing = missing();
        let born = *self.born.get_or_insert(now);
        if begun {
            self.begun.get_or_insert(now);
        }
        let late = missing.iter().find_map(|rank| Some((*rank, self.is_late(rank, now, limits)?)));
        self.stopped.retain(|local, _| missing.iter().any(|rank| rank.local_rank == *local));
        // A rank that is not missing has attached or ended.
        self.is_over = late.is_some() || missing.is_empty() && now > born;
        late
    }

    fn is_late(&mut self, rank: &Missing, now: Instant, limits: Limits) -> Option<Overdue> {
        let has_passed = |since: Option<Instant>, limit: Duration| {
            since.is_some_and(|since| now.saturating_duration_since(since) >= limit)
        };
        if !rank.is_survivor {
            return has_passed(self.begun, limits.new).then_some(Overdue::New(limits.new));
        }
        if rank.pid.is_some_and(is_stopped) {
            let since = *self.stopped.entry(rank.local_rank).or_insert(now);
            if has_passed(Some(since), limits.stopped) {
                return Some(Overdue::Stopped(limits.stopped));
            }
        } else {
            self.stopped.remove(&rank.local_rank);
        }
        has_passed(self.born, limits.survivor).then_some(Overdue::Survivor(limits.survivor))
    }
}

impl Overdue {
    /// The failure of this rank. `pid` is that of its process, if it is known, and `others` are
    /// further new ranks of this node that have not come.
    pub(crate) fn failure(self, rank: Rank, pid: Option<u32>, others: &[Rank]) -> Failure {
        let process = pid.map_or_else(String::new, |pid| format!("its process (pid {pid}) "));
        let state = pid.map_or("", state_of);
        let (kind, what, hint) = match self {
            Self::New(limit) => {
                let seconds = limit.as_secs_f64();
                let what = format!(
                    "has not joined the job within {seconds:.1} s after the first rank did{}",
                    match others {
                        [] => String::new(),
                        [other] => format!(", and neither has rank {other}"),
                        _ => format!(", and neither have ranks {}", Rank::list(others.to_vec())),
                    }
                );
                let hint = match pid {
                    Some(_) => {
                        "every rank must call init(); if it needs longer before that, increase \
                         launch.start_timeout_ms"
                    }
                    None => {
                        "see whether its process was started and has not ended; if it needs \
                         longer, increase launch.start_timeout_ms"
                    }
                };
                (FailureKind::Timeout, what, hint)
            }
            Self::Survivor(limit) => {
                let seconds = limit.as_secs_f64();
                let what = format!("has not joined the new epoch within {seconds:.1} s");
                let hint = "a rank joins when it next makes a call; if it computes for longer \
                            between two calls, increase elastic.timeout_ms";
                (FailureKind::Timeout, what, hint)
            }
            Self::Stopped(limit) => {
                let seconds = limit.as_secs_f64();
                let what =
                    format!("is lost: it has not joined the new epoch within {seconds:.1} s");
                (FailureKind::WorkerLost, what, "see what that process does")
            }
        };
        Failure::new(kind, format!("{process}{what}{state}")).rank(rank).hint(hint)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const LIMITS: Limits = Limits {
        new: Duration::from_secs(30),
        survivor: Duration::from_secs(600),
        stopped: Duration::from_secs(3),
    };

    fn missing(is_survivor: bool, pid: Option<u32>) -> impl Fn() -> Vec<Missing> {
        move || vec![Missing { local_rank: 1, pid, is_survivor }]
    }

    #[test]
    fn the_limit_begins_with_the_first_rank() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let new = missing(false, None);
        let mut start = Start::default();
        assert_eq!(start.overdue(false, &new, at(100), LIMITS), None);
        assert_eq!(start.overdue(true, &new, at(200), LIMITS), None);
        assert_eq!(start.overdue(true, &new, at(229), LIMITS), None);
        start.restart(at(300));
        assert_eq!(start.overdue(true, &new, at(320), LIMITS), None);
        let late = start.overdue(true, &new, at(330), LIMITS);
        assert_eq!(late, Some((new()[0], Overdue::New(LIMITS.new))));
        assert_eq!(start.overdue(true, &new, at(400), LIMITS), None, "once");
        let mut whole = Start::default();
        whole.overdue(true, Vec::new, at(0), LIMITS);
        assert_eq!(whole.overdue(true, Vec::new, at(30), LIMITS), None);
    }

    #[test]
    fn a_survivor_may_compute_for_longer() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let survivor = missing(true, Some(std::process::id()));
        for begun in [false, true] {
            let mut start = Start::default();
            assert_eq!(start.overdue(begun, &survivor, at(0), LIMITS), None);
            assert_eq!(start.overdue(begun, &survivor, at(599), LIMITS), None);
            let (_, late) = start.overdue(begun, &survivor, at(600), LIMITS).unwrap();
            assert_eq!(late, Overdue::Survivor(LIMITS.survivor));
        }
    }

    /// Also if all survivors are, so that no rank attaches.
    #[test]
    fn a_stopped_survivor_is_lost_soon() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut process = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = process.id();
        let survivor = missing(true, Some(pid));
        let signal = |signal| {
            let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
            rustix::process::kill_process(pid, signal).unwrap();
            let stops = signal == rustix::process::Signal::STOP;
            while is_stopped(pid.as_raw_nonzero().get() as u32) != stops {
                std::thread::yield_now();
            }
        };
        let mut start = Start::default();
        signal(rustix::process::Signal::STOP);
        assert_eq!(start.overdue(false, &survivor, at(0), LIMITS), None);
        signal(rustix::process::Signal::CONT);
        assert_eq!(start.overdue(false, &survivor, at(2), LIMITS), None);
        signal(rustix::process::Signal::STOP);
        assert_eq!(start.overdue(false, &survivor, at(4), LIMITS), None, "it ran meanwhile");
        let late = start.overdue(false, &survivor, at(7), LIMITS);
        process.kill().unwrap();
        process.wait().unwrap();
        assert_eq!(late, Some((survivor()[0], Overdue::Stopped(LIMITS.stopped))));
    }

    #[test]
    fn the_failure_says_what_is_known() {
        let new = Overdue::New(LIMITS.new);
        let unknown = new.failure(Rank(3), None, &[Rank(4), Rank(5)]).to_string();
        let text = "rank 3: has not joined the job within 30.0 s after the first rank did, and \
                    neither have ranks 4-5; see";
        assert!(unknown.starts_with(text), "{unknown}");
        let known = new.failure(Rank(3), Some(std::process::id()), &[Rank(4)]).to_string();
        assert!(known.contains("neither has rank 4"), "{known}");
        assert!(known.contains("every rank must call init()"), "{known}");
        for late in [Overdue::Survivor(LIMITS.survivor), Overdue::Stopped(LIMITS.stopped)] {
            assert!(late.failure(Rank(3), None, &[]).is_recoverable(), "{late:?}");
        }
    }
}
