//! Watches the meeting in which the ranks of a later epoch receive the state: before the function
//! of Python's `elastic.run`, or in the first step of an optimizer that skips lost steps. A new
//! rank may never come there, and then the others would wait for ever (WAIT). So a new rank for
//! which they have waited too long is lost. Only this meeting and only new ranks have such a limit:
//! otherwise, a rank may compute for long before it comes. Pure: the runtime asks the nodes.

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
    /// When to ask the nodes which ranks are missing.
    next: Option<Instant>,
}

impl Meeting {
    /// The meeting of the configured epoch. In the first one, no rank is new, and all may read data
    /// before they come.
    pub(crate) fn new(config: &EngineConfig, now: Instant) -> Self {
        let is_later = config.elastic && config.epoch > Epoch(1);
        let limit = is_later.then_some(config.elastic_timeout);
        Self { limit, begins: now, next: limit.map(|limit| now + limit) }
    }

    /// Time up to now does not count: the job was suspended, or a rank is paused.
    pub(crate) fn restart(&mut self, now: Instant) {
        self.begins = now;
    }

    /// Whether to ask the nodes now which ranks are missing. True only once for each time. Only the
    /// nodes know when the meeting begins, so they are asked again and again.
    pub(crate) fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.next.is_some_and(|at| now >= at);
        if is_due {
            self.next = self.limit.map(|limit| now + limit);
        }
        is_due
    }

    /// Looks at the answers of the nodes. Returns the failure of a new rank for which the others
    /// have waited too long.
    pub(crate) fn look(&mut self, explanation: &pb::Explanation, now: Instant) -> Option<Failure> {
        let limit = self.limit?;
        let is_it = |wait: &&pb::Wait| {
            wait.process_set == ProcessSetId::GLOBAL.0 && wait.name == FUNCTION_MEETING
        };
        let wait = explanation.waits.iter().find(is_it)?;
        let waited = Duration::from_millis(wait.waiting_ms).min(now - self.begins);
        if waited < limit || !explanation.silent_hosts.is_empty() {
            // A node that has not answered knows whether its ranks have come.
            self.next = Some(now + if waited < limit { limit - waited } else { AGAIN });
            return None;
        }
        let is_missing = |rank: &&pb::RankState| rank.is_new && wait.missing.contains(&rank.rank);
        let rank = explanation.ranks.iter().find(is_missing)?;
        let what = format!(
            "it has not called the function of elastic.run, or made its optimizer, within {} \
             (--elastic-timeout) after the others",
            text::seconds(limit)
        );
        let hint = "let a new rank read its data before init(), and make the call soon after; if \
                    it needs longer, increase elastic.timeout_ms";
        let failure = Failure::new(FailureKind::Timeout, what).rank(Rank(rank.rank)).hint(hint);
        Some(failure.host(rank.host.clone()))
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

    /// Ranks 0 and 2 wait for ranks 1 and 3.
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
            ranks: (0..4).map(rank).collect(),
            ..pb::Explanation::default()
        }
    }

    /// Ranks 0 and 1 are on one host, 2 and 3 on the other; rank 1 is new.
    fn rank(rank: u32) -> pb::RankState {
        let host = ["a", "b"][rank as usize / 2].to_owned();
        pb::RankState { rank, host, is_new: rank == 1, ..pb::RankState::default() }
    }

    #[test]
    fn a_new_rank_that_stays_away_is_lost() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut meeting = meeting(2, began);
        assert_eq!(meeting.look(&waits(FUNCTION_MEETING, 5), at(6)), None);
        assert!(!meeting.is_due(at(60)));
        assert!(meeting.is_due(at(61)) && !meeting.is_due(at(120)), "once");
        let failure = meeting.look(&waits(FUNCTION_MEETING, 60), at(61)).unwrap();
        let text = "rank 1 on host a: it has not called the function of elastic.run, or made its \
                    optimizer, within 60.0 s (--elastic-timeout) after the others; let a new rank";
        assert!(failure.to_string().starts_with(text), "{failure}");
        assert!(failure.is_recoverable(), "the others go on");
    }

    #[test]
    fn old_ranks_and_other_calls_may_be_late() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let late = at(1000);
        let mut old = waits(FUNCTION_MEETING, 900);
        old.waits[0].missing = vec![3];
        assert_eq!(meeting(2, began).look(&old, late), None);
        for (epoch, name) in [(1, FUNCTION_MEETING), (2, "loss")] {
            let mut meeting = meeting(epoch, began);
            assert_eq!(meeting.look(&waits(name, 900), late), None, "{name}");
            let is_later = epoch > 1;
            assert_eq!(
                [at(59), at(60), at(120)].map(|now| meeting.is_due(now)),
                [false, is_later, is_later]
            );
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
