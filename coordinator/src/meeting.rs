//! Watches the meeting of the ranks of a later epoch before they call the function of Python's
//! `elastic.run`. A new rank may never come there, and then the others would wait for ever (WAIT).
//! So a rank for which they have waited too long is lost. This meeting alone has such a limit: in
//! other calls, a rank may compute for long before it comes. Pure: the runtime asks the nodes.

use std::time::Duration;

use gradwire_proto::{Epoch, FUNCTION_MEETING, Failure, FailureKind, ProcessSetId, Rank, pb};
use tokio::time::Instant;

use crate::model::{EngineConfig, text};

/// How long after a node has not answered the nodes are asked again.
const AGAIN: Duration = Duration::from_secs(2);

/// The meeting, if the ranks of this epoch have one.
#[derive(Debug)]
pub(crate) struct Meeting {
    /// How long the ranks may wait there; `None`: for ever.
    limit: Option<Duration>,
    /// Time before this does not count.
    begins: Instant,
    /// When to ask the nodes again which ranks are missing.
    next: Option<Instant>,
}

impl Meeting {
    /// The meeting of the configured epoch. In the first one, no rank is new, and all may read data
    /// before they come.
    pub(crate) fn new(config: &EngineConfig, now: Instant) -> Self {
        let is_later = config.elastic && config.epoch > Epoch(1);
        let limit = is_later.then_some(config.elastic_timeout);
        Self { limit, begins: now, next: None }
    }

    /// Time up to now does not count: the job was suspended, or a rank is paused.
    pub(crate) fn restart(&mut self, now: Instant) {
        self.begins = now;
    }

    /// Whether to ask the nodes now which ranks are missing. True only once for each time.
    pub(crate) fn is_due(&mut self, now: Instant) -> bool {
        self.next.take_if(|at| now >= *at).is_some()
    }

    /// Looks at the answers of the nodes. Returns the failure of a rank for which the others have
    /// waited too long.
    pub(crate) fn look(&mut self, explanation: &pb::Explanation, now: Instant) -> Option<Failure> {
        let limit = self.limit?;
        let is_it = |wait: &&pb::Wait| {
            wait.process_set == ProcessSetId::GLOBAL.0 && wait.name == FUNCTION_MEETING
        };
        self.next = None;
        let wait = explanation.waits.iter().find(is_it)?;
        let waited = Duration::from_millis(wait.waiting_ms).min(now - self.begins);
        if waited < limit || !explanation.silent_hosts.is_empty() {
            // A node that has not answered knows whether its ranks have come.
            self.next = Some(now + if waited < limit { limit - waited } else { AGAIN });
            return None;
        }
        // New ranks have the highest numbers.
        let rank = *wait.missing.iter().max()?;
        let before = explanation.first_ranks.partition_point(|first| *first <= rank);
        let host = before.checked_sub(1).and_then(|at| explanation.hosts.get(at));
        let what = format!(
            "it has not come to the function of elastic.run within {} (--elastic-timeout) after \
             the others",
            text::seconds(limit)
        );
        let hint = "let a new rank read its data before init(), and call the function soon after; \
                    if it needs longer, increase elastic.timeout_ms";
        let failure = Failure::new(FailureKind::Timeout, what).rank(Rank(rank)).hint(hint);
        Some(failure.host(host.cloned().unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use gradwire_proto::JobId;
    use gradwire_settings::Settings;

    use super::*;

    fn meeting(epoch: u64, now: Instant) -> Meeting {
        let job = JobId::new("job").unwrap();
        let mut config = EngineConfig::new(job, 2, 0, &Settings::default()).unwrap();
        (config.epoch, config.elastic) = (Epoch(epoch), true);
        config.elastic_timeout = Duration::from_secs(60);
        Meeting::new(&config, now)
    }

    /// Ranks 0 and 2 wait for ranks 1 and 3, which is on the second host.
    fn waits(name: &str, seconds: u64) -> pb::Explanation {
        let wait = pb::Wait {
            process_set: 0,
            name: name.to_owned(),
            waiting_ms: 1000 * seconds,
            waiting: vec![0, 2],
            missing: vec![1, 3],
        };
        pb::Explanation {
            waits: vec![wait],
            hosts: vec!["a".to_owned(), "b".to_owned()],
            first_ranks: vec![0, 2],
            ..pb::Explanation::default()
        }
    }

    #[test]
    fn a_rank_that_stays_away_is_lost() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut meeting = meeting(2, began);
        assert_eq!(meeting.look(&waits(FUNCTION_MEETING, 5), at(6)), None);
        assert!(!meeting.is_due(at(60)));
        assert!(meeting.is_due(at(61)) && !meeting.is_due(at(61)), "once");
        let failure = meeting.look(&waits(FUNCTION_MEETING, 60), at(61)).unwrap();
        let text = "rank 3 on host b: it has not come to the function of elastic.run within 60.0 s \
                    (--elastic-timeout) after the others; let a new rank";
        assert!(failure.to_string().starts_with(text), "{failure}");
        assert!(failure.is_recoverable(), "the others go on");
    }

    #[test]
    fn ranks_may_come_late_to_other_calls() {
        let began = Instant::now();
        let late = began + Duration::from_secs(1000);
        for (epoch, name) in [(1, FUNCTION_MEETING), (2, "loss")] {
            let mut meeting = meeting(epoch, began);
            assert_eq!(meeting.look(&waits(name, 900), late), None, "{name}");
            assert!(!meeting.is_due(late + Duration::from_secs(1000)));
        }
    }

    #[test]
    fn pauses_and_silent_nodes_are_waited_for() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut meeting = meeting(2, began);
        meeting.restart(at(50));
        assert_eq!(meeting.look(&waits(FUNCTION_MEETING, 80), at(81)), None);
        assert!(meeting.is_due(at(110)));
        let mut silent = waits(FUNCTION_MEETING, 109);
        silent.silent_hosts.push("b".to_owned());
        assert_eq!(meeting.look(&silent, at(110)), None);
        assert!(meeting.is_due(at(112)));
        assert!(meeting.look(&waits(FUNCTION_MEETING, 111), at(112)).is_some());
    }
}
