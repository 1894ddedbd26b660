//! Which operations are in flight, and how those that are not ended: pure bookkeeping.
//!
//! An entry holds on to the operation's memory (`K`) until the operation has ended, whatever became
//! of the handle: memory that the daemon may still write to is never given to another tensor. How
//! many entries there can be is bounded by the submission ring (BOUND).

use std::collections::{HashMap, HashSet};

use gradwire_proto::{Failure, TensorName};

/// How an operation ended.
pub(crate) type Outcome = Result<(), Failure>;

#[derive(Debug)]
struct Entry<K> {
    name: TensorName,
    /// `None` while in flight.
    outcome: Option<Outcome>,
    /// Nobody will ask for the outcome.
    abandoned: bool,
    /// Dropped when the operation ends.
    memory: Option<K>,
}

/// The operations of one session that are in flight or whose outcome was not fetched yet.
#[derive(Debug)]
pub(crate) struct Tickets<K> {
    next: u64,
    entries: HashMap<u64, Entry<K>>,
    names: HashSet<TensorName>,
}

impl<K> Default for Tickets<K> {
    fn default() -> Self {
        Self { next: 1, entries: HashMap::new(), names: HashSet::new() }
    }
}

impl<K> Tickets<K> {
    /// A ticket for an operation that is about to be submitted; `None` if one of that name is in
    /// flight.
    pub(crate) fn open(&mut self, name: TensorName, memory: K) -> Option<u64> {
        if !self.names.insert(name.clone()) {
            return None;
        }
        let ticket = self.next;
        self.next += 1;
        let entry = Entry { name, outcome: None, abandoned: false, memory: Some(memory) };
        self.entries.insert(ticket, entry);
        Some(ticket)
    }

    /// Takes a ticket back whose submission did not take place.
    pub(crate) fn withdraw(&mut self, ticket: u64) {
        if let Some(entry) = self.entries.remove(&ticket) {
            self.names.remove(&entry.name);
        }
    }

    /// Notes an operation's end. Returns its memory, for the caller to drop outside of any lock.
    /// A ticket that is not in flight is ignored: the daemon can't free what it does not use.
    pub(crate) fn end(&mut self, ticket: u64, outcome: Outcome) -> Option<K> {
        let entry = self.entries.get_mut(&ticket).filter(|entry| entry.outcome.is_none())?;
        entry.outcome = Some(outcome);
        self.names.remove(&entry.name);
        let memory = entry.memory.take();
        if entry.abandoned {
            self.entries.remove(&ticket);
        }
        memory
    }

    /// Fetches an operation's outcome, once it has one.
    pub(crate) fn take(&mut self, ticket: u64) -> Option<Outcome> {
        self.entries.get(&ticket)?.outcome.as_ref()?;
        self.entries.remove(&ticket)?.outcome
    }

    /// Whether [`Tickets::take`] has something to give.
    pub(crate) fn has_ended(&self, ticket: u64) -> bool {
        self.entries.get(&ticket).is_none_or(|entry| entry.outcome.is_some())
    }

    /// Nobody will fetch the outcome: an entry that has ended goes now, another when it ends.
    pub(crate) fn abandon(&mut self, ticket: u64) {
        let Some(entry) = self.entries.get_mut(&ticket) else { return };
        entry.abandoned = true;
        if entry.outcome.is_some() {
            self.entries.remove(&ticket);
        }
    }

    /// How many operations are in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.names.len()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use gradwire_proto::FailureKind;

    use super::*;

    fn name(text: &str) -> TensorName {
        TensorName::new(text).unwrap()
    }

    #[test]
    fn memory_is_kept_until_the_end_even_without_a_handle() {
        let memory = Arc::new(());
        let mut tickets = Tickets::default();
        let ticket = tickets.open(name("a"), memory.clone()).unwrap();
        tickets.abandon(ticket);
        assert_eq!((Arc::strong_count(&memory), tickets.in_flight()), (2, 1));
        drop(tickets.end(ticket, Ok(())));
        assert_eq!((Arc::strong_count(&memory), tickets.in_flight()), (1, 0));
        assert!(tickets.entries.is_empty());
    }

    #[test]
    fn an_outcome_is_fetched_once_and_only_the_first_counts() {
        let mut tickets = Tickets::default();
        let ticket = tickets.open(name("a"), ()).unwrap();
        assert!(!tickets.has_ended(ticket));
        assert_eq!(tickets.take(ticket), None);
        let failure = Failure::new(FailureKind::Disagreement, "shapes differ");
        assert!(tickets.end(ticket, Err(failure.clone())).is_some());
        assert!(tickets.end(ticket, Ok(())).is_none());
        assert!(tickets.has_ended(ticket));
        assert_eq!(tickets.take(ticket), Some(Err(failure)));
        assert_eq!(tickets.take(ticket), None);
    }

    #[test]
    fn a_name_is_in_flight_once() {
        let mut tickets = Tickets::default();
        let first = tickets.open(name("a"), ()).unwrap();
        assert_eq!(tickets.open(name("a"), ()), None);
        tickets.withdraw(first);
        let second = tickets.open(name("a"), ()).unwrap();
        assert_ne!(first, second);
        tickets.end(second, Ok(()));
        assert!(tickets.open(name("a"), ()).is_some());
        tickets.abandon(second);
        assert_eq!(tickets.entries.len(), 1);
    }

    #[test]
    fn unknown_tickets_are_ignored() {
        let mut tickets = Tickets::<()>::default();
        assert!(tickets.end(7, Ok(())).is_none());
        tickets.abandon(7);
        tickets.withdraw(7);
        assert_eq!(tickets.take(7), None);
    }
}
