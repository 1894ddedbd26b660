//! Names for unnamed operations. All ranks find the same names by counting. Pure.
//!
//! - `allreduce.#3`: the third unnamed allreduce of its process set. Ranks agree if all of them
//!   make their unnamed calls of one kind in the same order. The count wraps around after
//!   [`UNNAMED`], so that the coordinator still remembers what was agreed under a name. A call
//!   whose name is still in flight waits. That causes no deadlock: all ranks call in this order.
//! - `send.2>5.tag7.#12`: message 12 from rank 2 to rank 5 with tag 7. Both ranks count. The count
//!   wraps around after [`MESSAGES`], so that a long job needs no more names than a short one.
//! - Threads have no order that all ranks share. So while an unnamed operation is in flight, one of
//!   the same kind from another thread is refused.
//! - An operation that was not started returns its number, and the next call uses it. Other ranks
//!   don't know of the operation; otherwise this rank would stay one ahead of them.
//! - Before a join the ranks make different numbers of calls, and only the senders count messages
//!   to ranks that have joined. So all counts restart after it: `allreduce.#1.3` is the third
//!   allreduce after the first join, `send.2>5.tag7.#1.0` the first message.

use std::{
    collections::{BTreeSet, HashMap},
    thread::ThreadId,
};

use gradwire_proto::ProcessSetId;

/// The most operations that may wait behind gates at a time (BOUND). The caller must ensure it: a
/// call can't wait for room, because the calling thread may have to open the gate. With more, an
/// unnamed operation may be refused because its name is in flight.
pub const MAX_HELD: u32 = 1024;

/// The number of names for the unnamed operations of a kind: more than may be behind gates, and
/// enough that calls seldom wait for a name.
pub(crate) const UNNAMED: u64 = 4096 + MAX_HELD as u64 + 1;

/// The most messages with one tag that may be in flight between two ranks.
pub(crate) const MESSAGES: u64 = 64;

/// The most pairs of a peer and a tag that are counted (BOUND).
pub(crate) const PAIRS: usize = 1 << 16;

/// The way of a message: sender, receiver, tag.
pub(crate) type Way = (u32, u32, u32);

/// The counter of a kind or a way on this rank.
#[derive(Debug, Default)]
struct Count {
    next: u64,
    /// Numbers before `next` that were returned; they are used first.
    returned: BTreeSet<u64>,
    last: Option<Last>,
}

/// The last unnamed operation of a kind.
#[derive(Debug)]
struct Last {
    /// `None` if any thread may start the next one.
    thread: Option<ThreadId>,
    name: String,
    /// Whether its call has not submitted it yet.
    starting: bool,
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
    /// A number as part of a name.
    fn number(&self, number: u64) -> String {
        match self.joins {
            0 => format!("#{number}"),
            joins => format!("#{joins}.{number}"),
        }
    }
}

/// What a number counts.
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
    /// A name for the next operation of a kind, which this thread starts.
    ///
    /// # Errors
    /// The name of an operation of the same kind that another thread has started, if it is in
    /// flight.
    pub(crate) fn unnamed(
        &mut self,
        set: ProcessSetId,
        kind: &'static str,
        thread: Option<ThreadId>,
        in_flight: impl FnOnce(&str) -> bool,
    ) -> Result<Numbered, String> {
        let set = self.0.entry(set).or_default();
        let count = set.unnamed.entry(kind).or_default();
        if let Some(last) = count.last.as_ref().filter(|last| last.thread != thread)
            && (last.starting || in_flight(&last.name))
        {
            return Err(last.name.clone());
        }
        let number = count.take();
        let joins = set.joins;
        let name = format!("{kind}.{}", set.number(number % UNNAMED + 1));
        let last = Last { thread, name: name.clone(), starting: true };
        set.unnamed.entry(kind).or_default().last = Some(last);
        Ok(Numbered { name, counted: Counted::Unnamed(kind), joins, number })
    }

    /// The call of an operation has submitted it, or failed.
    pub(crate) fn started(&mut self, set: ProcessSetId, numbered: &Numbered) {
        if let Counted::Unnamed(kind) = numbered.counted
            && let Some(count) = self.0.get_mut(&set).and_then(|set| set.unnamed.get_mut(kind))
            && let Some(last) = count.last.as_mut().filter(|last| last.name == numbered.name)
        {
            last.starting = false;
        }
    }

    /// A name for the next message; `None` if there are too many ways.
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

    /// Returns the number of an operation that was not started. The next one uses it.
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

    /// All members of a set have joined: all counts restart.
    pub(crate) fn joined(&mut self, set: ProcessSetId) {
        let set = self.0.entry(set).or_default();
        set.joins += 1;
        set.unnamed.clear();
        set.messages.clear();
    }

    /// Forgets a removed set; its number is never used again.
    pub(crate) fn removed(&mut self, set: ProcessSetId) {
        self.0.remove(&set);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use gradwire_proto::TensorName;

    use super::*;

    const ALL: ProcessSetId = ProcessSetId::GLOBAL;
    const SOME: ProcessSetId = ProcessSetId(2);

    fn unnamed(names: &mut Names, set: ProcessSetId, kind: &'static str) -> Numbered {
        names.unnamed(set, kind, None, |_| false).unwrap()
    }

    #[test]
    fn unnamed_operations_of_two_threads_are_refused() {
        let mut names = Names::default();
        let other = thread::spawn(|| {}).thread().id();
        let (own, other) = (Some(thread::current().id()), Some(other));
        let first = names.unnamed(ALL, "allreduce", own, |_| false).unwrap();
        // Its call has not ended yet.
        let refused = names.unnamed(ALL, "allreduce", other, |_| false);
        assert_eq!(refused.unwrap_err(), "allreduce.#1");
        assert!(names.unnamed(ALL, "barrier", other, |_| false).is_ok(), "another kind");
        assert!(names.unnamed(SOME, "allreduce", other, |_| false).is_ok(), "another set");
        names.started(ALL, &first);
        let in_flight = |name: &str| name == first.name;
        assert!(names.unnamed(ALL, "allreduce", other, in_flight).is_err());
        let second = names.unnamed(ALL, "allreduce", own, in_flight).unwrap();
        assert_eq!(second.name, "allreduce.#2", "a refused call is not counted");
        names.started(ALL, &second);
        assert!(names.unnamed(ALL, "allreduce", other, |_| false).is_ok(), "they have ended");
    }

    #[test]
    fn each_kind_counts_by_itself_in_each_set() {
        let mut names = Names::default();
        assert_eq!(unnamed(&mut names, ALL, "allreduce").name, "allreduce.#1");
        assert_eq!(unnamed(&mut names, ALL, "allreduce").name, "allreduce.#2");
        assert!(TensorName::new("allreduce.#2").unwrap().is_counted());
        assert_eq!(unnamed(&mut names, ALL, "barrier").name, "barrier.#1");
        assert_eq!(unnamed(&mut names, SOME, "allreduce").name, "allreduce.#1");
        names.removed(SOME);
        assert_eq!(unnamed(&mut names, SOME, "allreduce").name, "allreduce.#1");
        for _ in 2..UNNAMED {
            unnamed(&mut names, ALL, "barrier");
        }
        assert_eq!(unnamed(&mut names, ALL, "barrier").name, format!("barrier.#{UNNAMED}"));
        assert_eq!(unnamed(&mut names, ALL, "barrier").name, "barrier.#1", "BOUND");
    }

    #[test]
    fn counts_agree_after_a_join() {
        let (mut busy, mut idle) = (Names::default(), Names::default());
        for _ in 0..5 {
            unnamed(&mut busy, ALL, "allreduce");
        }
        for names in [&mut busy, &mut idle] {
            names.joined(ALL);
            assert_eq!(unnamed(names, ALL, "allreduce").name, "allreduce.#1.1");
        }
        assert_eq!(
            unnamed(&mut busy, SOME, "allreduce").name,
            "allreduce.#1",
            "other sets continue"
        );
    }

    #[test]
    fn a_call_that_was_refused_is_not_counted() {
        let (mut one, mut other) = (Names::default(), Names::default());
        // The first one is in flight on one rank when the count wraps around: refused there, done
        // elsewhere.
        for _ in 0..UNNAMED {
            assert_eq!(unnamed(&mut one, ALL, "allreduce"), unnamed(&mut other, ALL, "allreduce"));
        }
        let refused = unnamed(&mut one, ALL, "allreduce");
        assert_eq!(refused.name, "allreduce.#1");
        one.take_back(ALL, &refused);
        assert_eq!(unnamed(&mut one, ALL, "allreduce"), refused);
        assert_eq!(unnamed(&mut other, ALL, "allreduce"), refused);
        assert_eq!(unnamed(&mut one, ALL, "allreduce"), unnamed(&mut other, ALL, "allreduce"));
        // A call that was refused before a join no longer matters.
        for names in [&mut one, &mut other] {
            names.joined(ALL);
        }
        one.take_back(ALL, &refused);
        assert_eq!(unnamed(&mut one, ALL, "allreduce"), unnamed(&mut other, ALL, "allreduce"));
    }

    fn next(names: &mut Names, from: u32, to: u32, tag: u32) -> Numbered {
        names.message(ALL, (from, to, tag)).unwrap()
    }

    #[test]
    fn both_ends_give_a_message_the_same_name() {
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
    fn a_message_that_was_not_started_is_not_counted() {
        let mut names = Names::default();
        let all: Vec<Numbered> = (0..70).map(|_| next(&mut names, 0, 1, 0)).collect();
        // In any order, as with several threads.
        for at in [69, 3, 68] {
            names.take_back(ALL, &all[at]);
        }
        for at in [3, 68, 69] {
            assert_eq!(next(&mut names, 0, 1, 0), all[at]);
        }
        assert_eq!(next(&mut names, 0, 1, 0).name, "send.0>1.tag0.#6");
    }

    #[test]
    fn a_join_resets_the_counts_of_messages() {
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
    fn the_number_of_counted_ways_is_bounded() {
        // BOUND
        let mut names = Names::default();
        for tag in 0..PAIRS as u32 {
            assert!(names.message(ALL, (0, 1, tag)).is_some());
        }
        assert_eq!(names.message(ALL, (0, 1, PAIRS as u32)), None);
        assert!(names.message(ALL, (0, 1, 0)).is_some(), "known ways continue");
    }
}
