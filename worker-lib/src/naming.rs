//! Names for operations that have none. All ranks find the same names by counting. Pure.
//!
//! - `allreduce.#3`: the third unnamed allreduce of its process set. Ranks agree if all of them
//!   make their unnamed calls of one kind in the same order. The count begins again after
//!   [`UNNAMED`]. So the coordinator still remembers what was agreed under a name.
//! - `send.2>5.tag7.#12`: message 12 from rank 2 to rank 5 with tag 7. Both ranks count. The count
//!   wraps around after [`MESSAGES`], so that a long job needs no more names than a short one.
//! - An operation that was not started gives its number back, and the next call uses it. Other
//!   ranks know nothing of the operation, and this rank would stay one ahead of them for ever.
//! - After a join the ranks have made different numbers of calls, and messages to ranks that had
//!   joined were counted by their senders only. So all counts begin again then: `allreduce.#1.3` is
//!   the third one after the first join, `send.2>5.tag7.#1.0` the first message.

use std::collections::{BTreeSet, HashMap};

use gradwire_proto::ProcessSetId;
use gradwire_shm::control::MAX_IN_FLIGHT;

/// How many operations may wait behind gates at a time (BOUND). Whoever makes the gates sees to it:
/// a call can't wait for room, because its caller may be the one who opens the gate. With more of
/// them, one without a name may be refused because its name is in flight.
pub const MAX_HELD: u32 = 1024;

/// How many names there are for the unnamed operations of a kind: one more than can be in flight
/// and behind gates.
pub(crate) const UNNAMED: u64 = MAX_IN_FLIGHT as u64 + MAX_HELD as u64 + 1;

/// How many messages with one tag may be on their way between two ranks.
pub(crate) const MESSAGES: u64 = 64;

/// How many pairs of a peer and a tag are counted (BOUND).
pub(crate) const PAIRS: usize = 1 << 16;

/// A way of messages: sender, receiver, tag.
pub(crate) type Way = (u32, u32, u32);

/// The counter of a kind or a way on this rank.
#[derive(Debug, Default)]
struct Count {
    next: u64,
    /// Numbers before `next` that were given back, and are used first.
    returned: BTreeSet<u64>,
}

impl Count {
    fn take(&mut self) -> u64 {
        self.returned.pop_first().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        })
    }
}

#[derive(Debug, Default)]
struct InSet {
    joins: u64,
    unnamed: HashMap<&'static str, Count>,
    messages: HashMap<Way, Count>,
}

impl InSet {
    /// A number as it stands in a name.
    fn number(&self, number: u64) -> String {
        match self.joins {
            0 => format!("#{number}"),
            joins => format!("#{joins}.{number}"),
        }
    }
}

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Counted {
    Unnamed(&'static str),
    Message(Way),
}

/// A name with its number.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Numbered {
    pub(crate) name: String,
    counted: Counted,
    joins: u64,
    number: u64,
}

/// The counters of one rank.
#[derive(Debug, Default)]
pub(crate) struct Names(HashMap<ProcessSetId, InSet>);

impl Names {
    /// A name for the next operation of a kind.
    pub(crate) fn unnamed(&mut self, set: ProcessSetId, kind: &'static str) -> Numbered {
        let set = self.0.entry(set).or_default();
        let number = set.unnamed.entry(kind).or_default().take();
        let name = format!("{kind}.{}", set.number(number % UNNAMED + 1));
        Numbered { name, counted: Counted::Unnamed(kind), joins: set.joins, number }
    }

    /// A name for the next message; none if there are too many ways.
    pub(crate) fn message(&mut self, set: ProcessSetId, way: Way) -> Option<Numbered> {
        let set = self.0.entry(set).or_default();
        if set.messages.len() >= PAIRS && !set.messages.contains_key(&way) {
            return None;
        }
        let number = set.messages.entry(way).or_default().take();
        let (from, to, tag) = way;
        let name = format!("send.{from}>{to}.tag{tag}.{}", set.number(number % MESSAGES));
        Some(Numbered { name, counted: Counted::Message(way), joins: set.joins, number })
    }

    /// Gives back the number of an operation that was not started. The next one uses it.
    pub(crate) fn take_back(&mut self, set: ProcessSetId, numbered: &Numbered) {
        let set = self.0.get_mut(&set).filter(|set| set.joins == numbered.joins);
        let count = set.and_then(|set| match &numbered.counted {
            Counted::Unnamed(kind) => set.unnamed.get_mut(kind),
            Counted::Message(way) => set.messages.get_mut(way),
        });
        if let Some(count) = count {
            count.returned.insert(numbered.number);
        }
    }

    /// All members of a set have joined: all counts begin again.
    pub(crate) fn joined(&mut self, set: ProcessSetId) {
        let set = self.0.entry(set).or_default();
        set.joins += 1;
        set.unnamed.clear();
        set.messages.clear();
    }

    /// A set is gone; its number is never used again.
    pub(crate) fn removed(&mut self, set: ProcessSetId) {
        self.0.remove(&set);
    }
}

#[cfg(test)]
mod tests {
    use gradwire_proto::TensorName;

    use super::*;

    const ALL: ProcessSetId = ProcessSetId::GLOBAL;
    const SOME: ProcessSetId = ProcessSetId(2);

    #[test]
    fn each_kind_counts_by_itself_in_each_set() {
        let mut names = Names::default();
        assert_eq!(names.unnamed(ALL, "allreduce").name, "allreduce.#1");
        assert_eq!(names.unnamed(ALL, "allreduce").name, "allreduce.#2");
        assert!(TensorName::new("allreduce.#2").unwrap().is_counted());
        assert_eq!(names.unnamed(ALL, "barrier").name, "barrier.#1");
        assert_eq!(names.unnamed(SOME, "allreduce").name, "allreduce.#1");
        names.removed(SOME);
        assert_eq!(names.unnamed(SOME, "allreduce").name, "allreduce.#1");
        for _ in 2..UNNAMED {
            names.unnamed(ALL, "barrier");
        }
        assert_eq!(names.unnamed(ALL, "barrier").name, format!("barrier.#{UNNAMED}"));
        assert_eq!(names.unnamed(ALL, "barrier").name, "barrier.#1", "BOUND");
    }

    #[test]
    fn ranks_that_made_different_numbers_of_calls_agree_after_a_join() {
        let (mut busy, mut idle) = (Names::default(), Names::default());
        for _ in 0..5 {
            busy.unnamed(ALL, "allreduce");
        }
        for names in [&mut busy, &mut idle] {
            names.joined(ALL);
            assert_eq!(names.unnamed(ALL, "allreduce").name, "allreduce.#1.1");
        }
        assert_eq!(busy.unnamed(SOME, "allreduce").name, "allreduce.#1", "other sets go on");
    }

    #[test]
    fn a_call_that_was_refused_is_not_counted() {
        let (mut one, mut other) = (Names::default(), Names::default());
        // The first is in flight on one rank when the count begins again: refused there, done
        // elsewhere.
        for _ in 0..UNNAMED {
            assert_eq!(one.unnamed(ALL, "allreduce"), other.unnamed(ALL, "allreduce"));
        }
        let refused = one.unnamed(ALL, "allreduce");
        assert_eq!(refused.name, "allreduce.#1");
        one.take_back(ALL, &refused);
        assert_eq!(one.unnamed(ALL, "allreduce"), refused);
        assert_eq!(other.unnamed(ALL, "allreduce"), refused);
        assert_eq!(one.unnamed(ALL, "allreduce"), other.unnamed(ALL, "allreduce"));
        // A call that was refused before a join no longer matters.
        for names in [&mut one, &mut other] {
            names.joined(ALL);
        }
        one.take_back(ALL, &refused);
        assert_eq!(one.unnamed(ALL, "allreduce"), other.unnamed(ALL, "allreduce"));
    }

    fn next(names: &mut Names, from: u32, to: u32, tag: u32) -> Numbered {
        names.message(ALL, (from, to, tag)).unwrap()
    }

    #[test]
    fn messages_have_the_same_names_at_both_ends_and_names_come_back() {
        let (mut sender, mut receiver) = (Names::default(), Names::default());
        let first = next(&mut sender, 2, 5, 7);
        assert_eq!(first.name, "send.2>5.tag7.#0");
        assert_ne!(next(&mut sender, 2, 5, 8), next(&mut sender, 5, 2, 8));
        assert_eq!(next(&mut receiver, 2, 5, 7), first);
        let all: Vec<_> = (1..MESSAGES).map(|_| next(&mut sender, 2, 5, 7).name).collect();
        assert!(!all.contains(&first.name));
        assert_eq!(next(&mut sender, 2, 5, 7).name, first.name);
    }

    #[test]
    fn messages_that_were_not_started_are_not_counted() {
        let mut names = Names::default();
        let all: Vec<Numbered> = (0..70).map(|_| next(&mut names, 0, 1, 0)).collect();
        // In any order, as threads may come.
        for at in [69, 3, 68] {
            names.take_back(ALL, &all[at]);
        }
        for at in [3, 68, 69] {
            assert_eq!(next(&mut names, 0, 1, 0), all[at]);
        }
        assert_eq!(next(&mut names, 0, 1, 0).name, "send.0>1.tag0.#6");
    }

    #[test]
    fn messages_that_one_end_counted_alone_are_forgotten_after_a_join() {
        let (mut sender, mut receiver) = (Names::default(), Names::default());
        let early = next(&mut sender, 0, 1, 0);
        next(&mut sender, 0, 1, 0);
        for names in [&mut sender, &mut receiver] {
            names.joined(ALL);
            names.take_back(ALL, &early); // from before the join
            assert_eq!(next(names, 0, 1, 0).name, "send.0>1.tag0.#1.0");
            assert_eq!(next(names, 0, 1, 0).name, "send.0>1.tag0.#1.1");
        }
    }

    #[test]
    fn the_ways_that_are_counted_are_bounded() {
        // BOUND
        let mut names = Names::default();
        for tag in 0..PAIRS as u32 {
            assert!(names.message(ALL, (0, 1, tag)).is_some());
        }
        assert_eq!(names.message(ALL, (0, 1, PAIRS as u32)), None);
        assert!(names.message(ALL, (0, 1, 0)).is_some(), "known ways go on");
    }
}
