//! What the ranks of a new epoch tell each other before anything else, and what follows from it.
//! Pure.
//!
//! Every rank says what it knows from earlier epochs. All ranks draw the same conclusions from all
//! of that: which process sets come back, who lacks the state of the others, and how a vote ended
//! that a loss has interrupted.
//!
//! - VOTE: a loss can't divide the ranks over a vote. The answer that one of them has heard, or has
//!   concluded here, holds for all; if nobody has heard one, it is false. A rank starts a vote only
//!   when it knows the answer of the one before. So one answer for each rank is enough.
//! - A process set comes back if every rank on which the last epoch has formed knows it, and all
//!   members are there. A set that was being created or removed during the loss is gone.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// A vote: its epoch, and its number in the epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct VoteId {
    /// The epoch in which the ranks vote.
    pub epoch: u64,
    /// Its number there, from 1.
    pub number: u64,
}

/// The answer of a vote, as a rank knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Answer {
    /// The vote.
    pub vote: VoteId,
    /// The epoch in which the rank learned it. The conclusion of a later epoch replaces the answer
    /// of a rank that was not in that epoch.
    pub since: u64,
    /// The answer.
    pub yes: bool,
}

/// A process set: the epoch and the number with which it was created, and its members.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct KnownSet {
    /// The epoch in which it was created.
    pub epoch: u64,
    /// Its number there.
    pub id: u32,
    /// The members by their numbers as workers, in the order of their ranks.
    pub workers: Vec<u32>,
}

/// What a rank tells the others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Its number in the job.
    pub worker: u32,
    /// The last earlier epoch in which it was, even if that ended before it had formed; 0 for none.
    pub last: u64,
    /// The last epoch that has formed on it; 0 for none.
    pub formed: u64,
    /// It came later than other ranks, and no vote in which it took part has ended yet.
    pub lacks_state: bool,
    /// The vote that it waited for when its epoch ended.
    pub asked: Option<VoteId>,
    /// The last answer that it knows.
    pub answer: Option<Answer>,
    /// The process sets that it knows, besides that of all ranks.
    pub sets: Vec<KnownSet>,
}

/// What follows for all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Formation {
    /// The workers, by rank.
    pub workers: Vec<u32>,
    /// Whether a rank may lack the state of the others.
    pub newcomers: bool,
    /// The process sets that come back, in the order in which they were created.
    pub sets: Vec<KnownSet>,
    /// The answers that the ranks know, in the order of the votes and of when they were learned.
    answers: Vec<Answer>,
    /// The last earlier epoch in which any of the ranks was, and the last that formed on a rank.
    last: u64,
    formed: u64,
}

impl Formation {
    /// Draws the conclusions; `hellos` are those of all ranks, by rank.
    ///
    /// # Errors
    /// What is wrong with them (TRUST).
    pub fn of(hellos: &[Hello]) -> Result<Self, String> {
        let workers: Vec<u32> = hellos.iter().map(|hello| hello.worker).collect();
        let present: BTreeSet<u32> = workers.iter().copied().collect();
        if present.len() < workers.len() {
            return Err(format!("a process is in the world twice: workers {workers:?} by rank"));
        }
        let last = hellos.iter().map(|hello| hello.last).max().unwrap_or_default();
        let formed = hellos.iter().map(|hello| hello.formed).max().unwrap_or_default();
        let mut latest = hellos.iter().filter(|hello| hello.formed == formed && formed > 0);
        let mut sets = latest.next().map(|hello| hello.sets.clone()).unwrap_or_default();
        for hello in latest {
            sets.retain(|set| hello.sets.contains(set));
        }
        sets.retain(|set| set.workers.iter().all(|worker| present.contains(worker)));
        sets.sort_unstable();
        sets.dedup_by_key(|set| (set.epoch, set.id));
        let mut answers: Vec<Answer> = hellos.iter().filter_map(|hello| hello.answer).collect();
        answers.sort_unstable();
        let mut all = Self { workers, newcomers: false, sets, answers, last, formed };
        all.newcomers = hellos.iter().any(|hello| all.lacks_state(hello));
        Ok(all)
    }

    /// The result of a vote for which some rank waits (VOTE).
    pub fn outcome(&self, vote: VoteId) -> bool {
        // The answer that was learned last counts.
        self.answers.iter().rfind(|answer| answer.vote == vote).is_some_and(|answer| answer.yes)
    }

    /// The last answer that a rank knows from now on. `asked` is the vote that it waited for.
    pub fn answer(&self, asked: Option<VoteId>, epoch: u64) -> Option<Answer> {
        let own = asked.map(|vote| Answer { vote, since: epoch, yes: self.outcome(vote) });
        own.max(self.answers.last().copied())
    }

    /// Whether a rank that said this may lack the state of the others.
    pub fn lacks_state(&self, hello: &Hello) -> bool {
        let came_later = hello.formed == 0 && self.formed > 0;
        hello.lacks_state || hello.last < self.last || came_later
    }

    /// A member of this set that is not in the world any more.
    pub fn missing(&self, set: &KnownSet) -> Option<u32> {
        set.workers.iter().copied().find(|worker| !self.workers.contains(worker))
    }

    /// The ranks of a set's members, ascending; all of them are there.
    pub fn ranks_of(&self, set: &KnownSet) -> Vec<u32> {
        let ranks = (0..).zip(&self.workers).filter(|(_, worker)| set.workers.contains(worker));
        ranks.map(|(rank, _)| rank).collect()
    }
}

/// What a rank remembers from epoch to epoch.
#[derive(Debug, Default)]
pub struct Past {
    /// The last epoch in which it was, and the last that has formed.
    last: u64,
    formed: u64,
    lacks_state: bool,
    /// The vote that has no answer yet.
    asked: Option<VoteId>,
    /// The last answer.
    answer: Option<Answer>,
    /// The number of votes in this epoch.
    votes: u64,
}

impl Past {
    /// Begins a vote; `None` if another one has no answer yet.
    pub fn ask(&mut self, epoch: u64) -> Option<VoteId> {
        if self.asked.is_some() {
            return None;
        }
        self.votes += 1;
        self.asked = Some(VoteId { epoch, number: self.votes });
        self.asked
    }

    /// The vote was not started; no other rank knows of it.
    pub fn withdraw(&mut self, vote: VoteId) {
        if self.asked == Some(vote) {
            self.asked = None;
            self.votes -= 1;
        }
    }

    /// The vote has this answer. All ranks have taken part in it.
    pub fn hear(&mut self, vote: VoteId, yes: bool) {
        if self.asked == Some(vote) {
            self.asked = None;
            self.answer = Some(Answer { vote, since: vote.epoch, yes });
            self.lacks_state = false;
        }
    }

    /// What it tells the other ranks of a new epoch.
    pub fn hello(&self, worker: u32, sets: Vec<KnownSet>) -> Hello {
        let Self { last, formed, lacks_state, asked, answer, .. } = *self;
        Hello { worker, last, formed, lacks_state, asked, answer, sets }
    }

    /// It is part of an epoch, which may end before it has formed.
    pub fn enter(&mut self, epoch: u64) {
        self.last = epoch;
    }

    /// An epoch has formed, to which this rank said `hello`. Returns the result of the vote for
    /// which it waited.
    pub fn form(&mut self, epoch: u64, formation: &Formation, hello: &Hello) -> Option<bool> {
        let outcome = hello.asked.map(|vote| formation.outcome(vote));
        self.answer = formation.answer(hello.asked, epoch);
        self.lacks_state = formation.lacks_state(hello);
        self.asked = None;
        self.votes = 0;
        self.formed = epoch;
        outcome
    }
}

#[cfg(test)]
mod tests;
