//! Asks all daemons what their ranks do, and gathers the answers for a short time. Also remembers
//! which waits were reported, so that each is reported again only once it has lasted twice as long.
//! Pure: the runtime sends the messages.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use gradwire_proto::{NodeId, pb};
use tokio::{sync::oneshot, time::Instant};

use crate::watchdog::Standstill;

/// How long the daemons may take to answer (WAIT).
const ANSWER: Duration = Duration::from_millis(1600);

/// How much longer if they also save their recordings: a disk may be busy (WAIT).
const SAVING: Duration = Duration::from_secs(5);

/// The most viewers that wait for one explanation (BOUND).
const MAX_VIEWERS: usize = 64;

/// A question to all daemons, while it is open.
#[derive(Debug)]
struct Question {
    until: Instant,
    asked: BTreeSet<NodeId>,
    answers: BTreeMap<NodeId, pb::Explained>,
    viewers: Vec<oneshot::Sender<pb::Explanation>>,
    /// Whether a wait is to be reported.
    reports: bool,
    /// The standstill that is to be reported.
    standstill: Option<Standstill>,
}

/// The answers to a question, once it is closed.
#[derive(Debug)]
pub(crate) struct Answered {
    pub(crate) answers: BTreeMap<NodeId, pb::Explained>,
    pub(crate) viewers: Vec<oneshot::Sender<pb::Explanation>>,
    pub(crate) reports: bool,
    pub(crate) standstill: Option<Standstill>,
}

/// The question that is open, if any.
#[derive(Debug, Default)]
pub(crate) struct Explaining {
    number: u64,
    open: Option<Question>,
    reported: Reported,
}

impl Explaining {
    /// Asks for a viewer or a report. `save`: the daemons also save their recordings, unless a
    /// question is open. Returns the message for the nodes, unless a question is open.
    pub(crate) fn ask(
        &mut self,
        viewer: Option<oneshot::Sender<pb::Explanation>>,
        reports: bool,
        save: bool,
        nodes: impl Iterator<Item = NodeId>,
        now: Instant,
    ) -> Option<pb::Explain> {
        let is_new = self.open.is_none();
        let question = self.open.get_or_insert_with(|| Question {
            until: now + ANSWER + if save { SAVING } else { Duration::ZERO },
            asked: nodes.collect(),
            answers: BTreeMap::new(),
            viewers: Vec::new(),
            reports: false,
            standstill: None,
        });
        question.reports |= reports;
        if question.viewers.len() < MAX_VIEWERS {
            question.viewers.extend(viewer);
        }
        self.number += u64::from(is_new);
        is_new.then_some(pb::Explain { number: self.number, save })
    }

    /// The answers to the open question are also for the report of a standstill.
    pub(crate) fn add(&mut self, standstill: Standstill) {
        if let Some(question) = &mut self.open {
            question.standstill = Some(standstill);
        }
    }

    /// A node has answered. Late answers, and answers of others, are ignored (TRUST).
    pub(crate) fn answered(&mut self, node: NodeId, answer: pb::Explained) {
        if let Some(question) = &mut self.open
            && answer.number == self.number
            && question.asked.contains(&node)
        {
            question.answers.insert(node, answer);
        }
    }

    /// When the open question is closed at the latest.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.open.as_ref().map(|question| question.until)
    }

    /// The answers, once all nodes have answered or the time is over.
    pub(crate) fn close(&mut self, now: Instant) -> Option<Answered> {
        let is_over = |question: &mut Question| {
            now >= question.until || question.answers.len() == question.asked.len()
        };
        let Question { answers, viewers, reports, standstill, .. } = self.open.take_if(is_over)?;
        Some(Answered { answers, viewers, reports, standstill })
    }

    /// The part of an explanation that is due for a report; `None` if nothing is. `limit`: the wait
    /// that is reported first.
    pub(crate) fn due(
        &mut self,
        explanation: &pb::Explanation,
        limit: Duration,
    ) -> Option<pb::Explanation> {
        let due = self.reported.due(&explanation.waits, limit);
        let wait_count = due.len() as u64;
        (wait_count > 0).then(|| pb::Explanation { waits: due, wait_count, ..explanation.clone() })
    }
}

/// For each tensor, the wait at which it is reported next, in milliseconds.
#[derive(Debug, Default)]
struct Reported(BTreeMap<(u32, String), u64>);

impl Reported {
    /// The waits that are due; forgets tensors that wait no longer.
    fn due(&mut self, waits: &[pb::Wait], limit: Duration) -> Vec<pb::Wait> {
        let first = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX).max(1);
        let before = std::mem::take(&mut self.0);
        let mut due = Vec::new();
        for wait in waits {
            let key = (wait.process_set, wait.name.clone());
            // A shorter wait than the last reported one is a new round of the tensor.
            let next = before.get(&key).filter(|next| wait.waiting_ms >= **next / 2);
            let mut next = next.copied().unwrap_or(first);
            if wait.waiting_ms >= next {
                due.push(wait.clone());
            }
            while next <= wait.waiting_ms {
                next = next.saturating_mul(2);
            }
            self.0.insert(key, next);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(waiting_ms: u64) -> pb::Wait {
        pb::Wait { name: "w".into(), waiting_ms, missing: vec![1], ..pb::Wait::default() }
    }

    #[test]
    fn a_wait_is_reported_at_doubling_intervals() {
        let mut reported = Reported::default();
        let limit = Duration::from_secs(5);
        let mut due = |ms: u64| !reported.due(&[wait(ms)], limit).is_empty();
        let waits = [4_999, 5_000, 5_300, 9_999, 10_100, 19_000, 20_000, 81_000, 100_000];
        let expected = [false, true, false, false, true, false, true, true, false];
        for (ms, expected) in waits.into_iter().zip(expected) {
            assert_eq!(due(ms), expected, "{ms}");
        }
        assert!(!due(100) && due(5_000), "the next round");
    }

    #[test]
    fn a_question_is_closed_when_all_have_answered() {
        let (mut explaining, now) = (Explaining::default(), Instant::now());
        let nodes = || [0, 1].map(NodeId).into_iter();
        let pb::Explain { number, .. } = explaining.ask(None, false, true, nodes(), now).unwrap();
        assert_eq!(explaining.ask(None, true, false, nodes(), now), None, "one is open");
        let answer = |number| pb::Explained { number, ..pb::Explained::default() };
        explaining.answered(NodeId(0), answer(number));
        explaining.answered(NodeId(7), answer(number));
        explaining.answered(NodeId(1), answer(number + 1));
        assert!(explaining.close(now).is_none());
        explaining.answered(NodeId(1), answer(number));
        let closed = explaining.close(now).unwrap();
        assert!(closed.reports && closed.answers.len() == 2);
        assert!(explaining.close(now).is_none() && explaining.deadline().is_none());
        explaining.ask(None, false, false, nodes(), now).unwrap();
        assert!(explaining.close(now + ANSWER).unwrap().answers.is_empty(), "WAIT");
        explaining.ask(None, false, true, nodes(), now).unwrap();
        assert!(explaining.close(now + ANSWER).is_none(), "a node may still save");
        assert!(explaining.close(now + ANSWER + SAVING).unwrap().answers.is_empty(), "WAIT");
    }
}
