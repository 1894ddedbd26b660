//! The recent history for viewers: decisions, events, and how long tensors waited for each rank.
//! Pure: the time is an argument.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use gradwire_proto::{Rank, pb};

use crate::model::{command::RankWait, status::milliseconds};

/// The most decisions that are kept (BOUND).
const MAX_DECISIONS: usize = 256;

/// The most events that are kept (BOUND).
const MAX_EVENTS: usize = 64;

/// The longest text of an entry, in characters (BOUND).
const MAX_TEXT: usize = 512;

/// The number of ranks, from 0, whose lag is kept (BOUND).
const MAX_RANKS: u32 = 1024;

/// The newest entries, the oldest first.
#[derive(Debug)]
struct Ring {
    entries: VecDeque<pb::Entry>,
    most: usize,
}

impl Ring {
    fn new(most: usize) -> Self {
        Self { entries: VecDeque::with_capacity(most), most }
    }

    fn push(&mut self, at: Duration, mut text: String) {
        if text.len() > MAX_TEXT
            && let Some((end, _)) = text.char_indices().nth(MAX_TEXT)
        {
            text.truncate(end);
        }
        if self.entries.len() == self.most {
            self.entries.pop_front();
        }
        self.entries.push_back(pb::Entry { at_ms: milliseconds(at), text });
    }
}

/// The recent history of a job.
#[derive(Debug)]
pub(crate) struct History {
    decisions: Ring,
    events: Ring,
    lags: BTreeMap<Rank, RankWait>,
}

impl Default for History {
    fn default() -> Self {
        let (decisions, events) = (Ring::new(MAX_DECISIONS), Ring::new(MAX_EVENTS));
        Self { decisions, events, lags: BTreeMap::new() }
    }
}

impl History {
    /// Adds a decision of the engine, with its reason.
    pub(crate) fn decided(&mut self, at: Duration, reason: String) {
        self.decisions.push(at, reason);
    }

    /// Adds an event.
    pub(crate) fn happened(&mut self, at: Duration, what: String) {
        self.events.push(at, what);
    }

    /// Adds the waits for these ranks.
    pub(crate) fn waited(&mut self, waits: &BTreeMap<Rank, RankWait>) {
        for (rank, wait) in waits.iter().filter(|(rank, _)| rank.0 < MAX_RANKS) {
            let lag = self.lags.entry(*rank).or_default();
            lag.time += wait.time;
            lag.tensors += wait.tensors;
        }
    }

    /// The decisions, the oldest first.
    pub(crate) fn decisions(&self) -> Vec<pb::Entry> {
        self.decisions.entries.iter().cloned().collect()
    }

    /// The events, the oldest first.
    pub(crate) fn events(&self) -> Vec<pb::Entry> {
        self.events.entries.iter().cloned().collect()
    }

    /// How long tensors have waited for each rank.
    pub(crate) fn waited_for(&self) -> BTreeMap<u32, Duration> {
        self.lags.iter().map(|(rank, wait)| (rank.0, wait.time)).collect()
    }

    /// How long tensors have waited for each rank, in order. Ranks without waits are left out.
    pub(crate) fn lags(&self) -> Vec<pb::RankLag> {
        let lag = |(rank, wait): (&Rank, &RankWait)| pb::RankLag {
            rank: rank.0,
            seconds: wait.time.as_secs_f64(),
            tensors: wait.tensors,
        };
        self.lags.iter().map(lag).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_history_is_bounded() {
        let mut history = History::default();
        for number in 0..1000 {
            history.decided(Duration::from_secs(number), format!("{number}"));
            history.happened(Duration::ZERO, "ü".repeat(1000));
        }
        let decisions = history.decisions();
        let ends = [decisions.first(), decisions.last()].map(|entry| entry.unwrap().text.clone());
        assert_eq!((decisions.len(), ends), (MAX_DECISIONS, ["744".into(), "999".into()]), "BOUND");
        let events = history.events();
        let longest = events.iter().map(|entry| entry.text.chars().count()).max();
        assert_eq!((events.len(), longest), (MAX_EVENTS, Some(MAX_TEXT)), "BOUND");
    }

    #[test]
    fn waits_add_up() {
        let mut history = History::default();
        let wait = RankWait { time: Duration::from_millis(50), tensors: 2 };
        for _ in 0..3 {
            history.waited(&[(Rank(3), wait), (Rank(MAX_RANKS), wait)].into());
        }
        assert_eq!(history.lags(), [pb::RankLag { rank: 3, seconds: 0.15, tensors: 6 }]);
    }
}
