//! The time limit for ranks to join the job (WAIT). It begins when the first rank of the job has
//! attached, on any node: before that nobody waits. A rank may do what it likes before it calls
//! `init()`, but not for longer than `launch.start_timeout_ms` while others wait for it.

use std::time::{Duration, Instant};

use gradwire_proto::{Failure, FailureKind, Rank};

use super::{process_state::state_of, slots::Missing};

/// Watches the ranks of this node until all have come.
#[derive(Debug, Default)]
pub(crate) struct Start {
    since: Option<Instant>,
    is_over: bool,
}

impl Start {
    /// Forgets the time so far, because this process was suspended.
    pub(crate) fn restart(&mut self, now: Instant) {
        self.since = self.since.map(|_| now);
    }

    /// The failure of a rank that has not come in time; once. `begun`: whether any rank of the job
    /// has attached. `missing` returns the first rank of this node that has not.
    pub(crate) fn overdue(
        &mut self,
        begun: bool,
        missing: impl FnOnce() -> Option<Missing>,
        now: Instant,
        limit: Duration,
    ) -> Option<Missing> {
        if self.is_over || !begun {
            return None;
        }
        let since = *self.since.get_or_insert(now);
        if now.saturating_duration_since(since) < limit {
            return None;
        }
        self.is_over = true;
        missing()
    }
}

/// The failure of a rank that has not joined the job in time. `pid` is that of its process, if it
/// is known.
pub(crate) fn did_not_come(rank: Rank, pid: Option<u32>, limit: Duration) -> Failure {
    let seconds = limit.as_secs_f64();
    let process = pid.map_or_else(String::new, |pid| format!("its process (pid {pid}) "));
    let state = pid.map_or("", state_of);
    let what = format!(
        "{process}has not joined the job within {seconds:.1} s after the first rank did{state}"
    );
    let hint = match pid {
        Some(_) => {
            "every rank must call init(); if it needs longer before that, increase \
             launch.start_timeout_ms"
        }
        None => {
            "see whether its process was started and has not ended; if it needs longer, increase \
             launch.start_timeout_ms"
        }
    };
    Failure::new(FailureKind::Timeout, what).rank(rank).hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_begins_with_the_first_rank() {
        let (began, limit) = (Instant::now(), Duration::from_secs(30));
        let at = |seconds| began + Duration::from_secs(seconds);
        let missing = || Some(Missing { local_rank: 1, pid: None });
        let mut start = Start::default();
        assert_eq!(start.overdue(false, missing, at(100), limit), None);
        assert_eq!(start.overdue(true, missing, at(200), limit), None);
        assert_eq!(start.overdue(true, missing, at(229), limit), None);
        start.restart(at(300));
        assert_eq!(start.overdue(true, missing, at(320), limit), None);
        assert_eq!(start.overdue(true, missing, at(330), limit), missing());
        assert_eq!(start.overdue(true, missing, at(400), limit), None, "once");
        let mut whole = Start::default();
        whole.overdue(true, || None, at(0), limit);
        assert_eq!(whole.overdue(true, || None, at(30), limit), None);
    }

    #[test]
    fn the_failure_says_what_is_known() {
        let limit = Duration::from_secs(30);
        let unknown = did_not_come(Rank(3), None, limit).to_string();
        let text = "rank 3: has not joined the job within 30.0 s after the first rank did; see";
        assert!(unknown.starts_with(text), "{unknown}");
        let known = did_not_come(Rank(3), Some(std::process::id()), limit).to_string();
        assert!(known.contains("every rank must call init()"), "{known}");
    }
}
