//! The operations in flight, and the outcomes of others. Pure bookkeeping.
//!
//! An entry keeps the operation's memory (`K`) until the operation has ended, even if the handle
//! was dropped. So memory that the daemon may still write to is never given to another tensor. The
//! control page and `MAX_HELD` limit the number of tickets (BOUND). If the results have an
//! unexpected size, the operation gets other memory for them (`R`) while in flight.
//!
//! When the session ends, the table is closed: nothing is added to it, and no operation in it can
//! succeed any more, because the daemon's results no longer reach the memory.

use std::collections::{HashMap, hash_map};

use gradwire_proto::{Collective, Failure, ProcessSetId, Request, TensorName};

use crate::{call_site::CallSite, naming::MESSAGES};

/// An operation that has succeeded.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Done<R> {
    /// The number in the completion.
    pub(crate) aux: u64,
    /// The memory of its results, if it is not the memory of the submission.
    pub(crate) moved: Option<R>,
}

/// How an operation ended.
pub(crate) type Outcome<R> = Result<Done<R>, Failure>;

/// The name of an operation in its process set, which is in flight only once at a time.
pub(crate) type Key = (ProcessSetId, TensorName);

#[derive(Debug)]
struct Entry<K, R> {
    key: Key,
    request: Request,
    /// Where the program has called it.
    site: CallSite,
    /// Whether its results may go to other memory, and the daemon has not asked for it yet.
    movable: bool,
    /// `None` while in flight.
    outcome: Option<Outcome<R>>,
    /// The handle was dropped: the outcome will not be fetched.
    abandoned: bool,
    /// It waits behind a gate.
    held: bool,
    /// Dropped when the operation ends.
    memory: Option<K>,
    moved: Option<R>,
}

/// The remains of an operation, for the caller to drop outside of any lock: its memory, memory for
/// results that did not come, and an outcome that no handle will fetch.
pub(crate) type Remains<K, R> = (Option<K>, Option<R>, Option<Outcome<R>>);

/// The operations of a session that are in flight or whose outcome was not fetched yet.
#[derive(Debug)]
pub(crate) struct Tickets<K, R> {
    next: u64,
    entries: HashMap<u64, Entry<K, R>>,
    names: HashMap<Key, u64>,
    closed: bool,
}

impl<K, R> Default for Tickets<K, R> {
    fn default() -> Self {
        Self { next: 1, entries: HashMap::new(), names: HashMap::new(), closed: false }
    }
}

/// An operation in flight.
pub(crate) struct InFlight<'a, K, R> {
    pub(crate) key: &'a Key,
    pub(crate) request: &'a Request,
    pub(crate) memory: &'a K,
    /// Other memory for its results.
    pub(crate) moved: Option<&'a R>,
}

impl<K, R> Entry<K, R> {
    fn in_flight(&self) -> Option<InFlight<'_, K, R>> {
        let Self { key, request, memory, moved, .. } = self;
        let memory = memory.as_ref().filter(|_| self.outcome.is_none())?;
        Some(InFlight { key, request, memory, moved: moved.as_ref() })
    }
}

/// Why an operation gets no ticket.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NoTicket {
    /// The table is closed.
    Closed,
    /// An operation with that name is already in flight.
    InFlight {
        /// Its number in this session.
        number: u64,
        /// Its request.
        request: Request,
        /// Where the program has called it.
        site: CallSite,
    },
}

/// The text about a name that is already in flight.
pub(crate) fn twice(
    name: &TensorName,
    number: u64,
    first: &Request,
    site: CallSite,
    second: &Request,
) -> String {
    if second.collective == Collective::SendReceive {
        // The program does not choose the names of messages.
        return format!(
            "message '{name}', {MESSAGES} messages ago, is still in flight, and two ranks can't \
             have more with one tag; wait for some of them first"
        );
    }
    let place = site.text().map_or_else(String::new, |text| format!(" at {text}"));
    format!(
        "tensor '{name}' is already in flight on this rank: {} was submitted as operation \
         {number}{place} and has not ended, and now {} has the same name; wait for the first one, \
         or use different names",
        described(first),
        described(second),
    )
}

/// A request in a few words.
pub(crate) fn described(request: &Request) -> String {
    let Request { collective, dtype, shape, reduce_op, root, .. } = request;
    let how = match collective {
        Collective::Allreduce | Collective::ReduceScatter => format!(" ({reduce_op})"),
        Collective::Reduce => format!(" ({reduce_op}, root {root})"),
        Collective::Broadcast | Collective::Gather | Collective::Scatter => {
            format!(" (root {root})")
        }
        _ => String::new(),
    };
    let more = match request.more.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("{collective}{how} of {dtype} {shape}{more}")
}

impl<K, R> Tickets<K, R> {
    /// A ticket for an operation that is about to be submitted, and that the program has called at
    /// `site`. `movable`: its results may go to other memory.
    pub(crate) fn open(
        &mut self,
        key: Key,
        request: &Request,
        site: CallSite,
        movable: bool,
        memory: K,
    ) -> Result<u64, NoTicket> {
        if self.closed {
            return Err(NoTicket::Closed);
        }
        let vacant = match self.names.entry(key.clone()) {
            hash_map::Entry::Vacant(vacant) => vacant,
            hash_map::Entry::Occupied(first) => {
                let number = *first.get();
                let first = self.entries.get(&number);
                let (first, site) = first.map(|entry| (&entry.request, entry.site)).unzip();
                let request = first.unwrap_or(request).clone();
                let site = site.unwrap_or_default();
                return Err(NoTicket::InFlight { number, request, site });
            }
        };
        let ticket = self.next;
        vacant.insert(ticket);
        self.next += 1;
        let entry = Entry {
            key,
            request: request.clone(),
            site,
            movable,
            outcome: None,
            abandoned: false,
            held: false,
            memory: Some(memory),
            moved: None,
        };
        self.entries.insert(ticket, entry);
        Ok(ticket)
    }

    /// An operation, if it is in flight.
    pub(crate) fn in_flight_one(&self, ticket: u64) -> Option<InFlight<'_, K, R>> {
        self.entries.get(&ticket)?.in_flight()
    }

    /// All operations in flight, in no order.
    pub(crate) fn all_in_flight(&self) -> impl Iterator<Item = (u64, InFlight<'_, K, R>)> {
        self.entries.iter().filter_map(|(ticket, entry)| Some((*ticket, entry.in_flight()?)))
    }

    /// How many tickets there were.
    pub(crate) fn opened(&self) -> u64 {
        self.next - 1
    }

    /// Notes whether an operation waits behind a gate.
    pub(crate) fn set_held(&mut self, ticket: u64, held: bool) {
        if let Some(entry) = self.entries.get_mut(&ticket) {
            entry.held = held;
        }
    }

    /// Whether a name is in flight.
    pub(crate) fn is_in_flight(&self, key: &Key) -> bool {
        !self.closed && self.names.contains_key(key)
    }

    /// Whether a name is in flight and becomes free without this rank doing anything more.
    pub(crate) fn will_be_free(&self, key: &Key) -> bool {
        let entry = self.names.get(key).and_then(|ticket| self.entries.get(ticket));
        !self.closed && entry.is_some_and(|entry| !entry.held)
    }

    /// Takes back a ticket that was not submitted.
    pub(crate) fn withdraw(&mut self, ticket: u64) {
        if let Some(entry) = self.entries.remove(&ticket) {
            self.names.remove(&entry.key);
        }
    }

    /// The request, if the operation is in flight and its results may go to other memory. Returns
    /// it once.
    pub(crate) fn ask_movable(&mut self, ticket: u64) -> Option<&Request> {
        let entry = self.entries.get_mut(&ticket)?;
        let movable = std::mem::take(&mut entry.movable) && entry.outcome.is_none();
        movable.then_some(&entry.request)
    }

    /// Assigns other memory to the results of an operation in flight. Returns memory that is not
    /// needed, for the caller to drop outside of any lock.
    pub(crate) fn move_results(&mut self, ticket: u64, results: R) -> Option<R> {
        match self.entries.get_mut(&ticket).filter(|entry| entry.outcome.is_none()) {
            Some(entry) => entry.moved.replace(results),
            None => Some(results),
        }
    }

    /// Ends an operation. A ticket that is not in flight is ignored, so the daemon can't free
    /// memory that it does not use.
    pub(crate) fn end(
        &mut self,
        ticket: u64,
        outcome: Result<u64, Failure>,
    ) -> Option<Remains<K, R>> {
        let entry = self.entries.get_mut(&ticket).filter(|entry| entry.outcome.is_none())?;
        let mut moved = entry.moved.take();
        entry.outcome = Some(outcome.map(|aux| Done { aux, moved: moved.take() }));
        self.names.remove(&entry.key);
        let memory = entry.memory.take();
        let left = if entry.abandoned {
            self.entries.remove(&ticket).and_then(|entry| entry.outcome)
        } else {
            None
        };
        Some((memory, moved, left))
    }

    /// Closes the table. Returns the memory of all operations in flight, which their entries keep,
    /// too.
    pub(crate) fn close(&mut self) -> Vec<K>
    where
        K: Clone,
    {
        self.closed = true;
        self.entries.values().filter_map(|entry| entry.memory.clone()).collect()
    }

    /// Whether it is closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Closes and empties the table. Returns its contents, for the caller to drop outside of any
    /// lock.
    pub(crate) fn clear(&mut self) -> impl Sized + use<K, R> {
        self.closed = true;
        (std::mem::take(&mut self.entries), std::mem::take(&mut self.names))
    }

    /// Fetches an operation's outcome, if it has ended.
    pub(crate) fn take(&mut self, ticket: u64) -> Option<Outcome<R>> {
        self.entries.get(&ticket)?.outcome.as_ref()?;
        self.entries.remove(&ticket)?.outcome
    }

    /// The name of an operation, and where the program has called it.
    pub(crate) fn facts(&self, ticket: u64) -> Option<(&TensorName, CallSite)> {
        self.entries.get(&ticket).map(|entry| (&entry.key.1, entry.site))
    }

    /// Whether an operation has ended; also true for an unknown ticket.
    pub(crate) fn has_ended(&self, ticket: u64) -> bool {
        self.entries.get(&ticket).is_none_or(|entry| entry.outcome.is_some())
    }

    /// Notes that the outcome will not be fetched. The entry is removed once the operation has
    /// ended.
    pub(crate) fn abandon(&mut self, ticket: u64) -> Option<Outcome<R>> {
        let entry = self.entries.get_mut(&ticket)?;
        entry.abandoned = true;
        entry.outcome.as_ref()?;
        self.entries.remove(&ticket)?.outcome
    }

    /// The number of operations in flight.
    pub(crate) fn in_flight(&self) -> usize {
        // Closing the table failed all operations that were in flight.
        if self.closed { 0 } else { self.names.len() }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use gradwire_proto::{DType, FailureKind, ReduceOp, Shape};

    use super::*;

    const NOWHERE: CallSite = CallSite::UNKNOWN;

    fn request() -> Request {
        Request::allreduce(DType::F32, Shape::default(), ReduceOp::Sum)
    }

    fn key(text: &str) -> Key {
        (ProcessSetId::GLOBAL, TensorName::new(text).unwrap())
    }

    #[test]
    fn memory_is_kept_to_the_end_without_a_handle() {
        let (memory, results) = (Arc::new(()), Arc::new(()));
        let mut tickets = Tickets::default();
        let ticket = tickets.open(key("a"), &request(), NOWHERE, true, memory.clone()).unwrap();
        tickets.move_results(ticket, results.clone());
        assert!(tickets.abandon(ticket).is_none());
        assert_eq!((Arc::strong_count(&memory), tickets.in_flight()), (2, 1));
        let remains = tickets.end(ticket, Ok(0));
        assert!(tickets.entries.is_empty());
        assert_eq!((Arc::strong_count(&memory), Arc::strong_count(&results)), (2, 2));
        drop(remains);
        assert_eq!((Arc::strong_count(&memory), Arc::strong_count(&results)), (1, 1));
        assert_eq!(tickets.in_flight(), 0);
    }

    #[test]
    fn memory_of_missing_results_is_returned() {
        let results = Arc::new(());
        let mut tickets = Tickets::default();
        let ticket = tickets.open(key("a"), &request(), NOWHERE, true, ()).unwrap();
        assert_eq!(tickets.move_results(ticket, results.clone()), None);
        let remains = tickets.end(ticket, Err(Failure::new(FailureKind::Invalid, "it failed")));
        assert_eq!(Arc::strong_count(&results), 2, "not dropped under a lock");
        drop(remains);
        assert_eq!(Arc::strong_count(&results), 1);
        assert!(tickets.move_results(ticket, results).is_some(), "too late");
    }

    #[test]
    fn the_first_outcome_counts_and_is_fetched_once() {
        let mut tickets = Tickets::<(), ()>::default();
        let ticket = tickets.open(key("a"), &request(), NOWHERE, false, ()).unwrap();
        assert!(!tickets.has_ended(ticket));
        assert_eq!(tickets.take(ticket), None);
        let failure = Failure::new(FailureKind::Disagreement, "shapes differ");
        assert!(tickets.end(ticket, Err(failure.clone())).is_some());
        assert!(tickets.end(ticket, Ok(0)).is_none());
        assert!(tickets.has_ended(ticket));
        assert_eq!(tickets.take(ticket), Some(Err(failure)));
        assert_eq!(tickets.take(ticket), None);
    }

    #[test]
    fn a_name_is_in_flight_once_in_each_process_set() {
        let mut tickets = Tickets::<(), ()>::default();
        let site = CallSite::new("train.py:3 in step");
        let first = tickets.open(key("a"), &request(), site, false, ()).unwrap();
        let again = tickets.open(key("a"), &Request::barrier(), NOWHERE, false, ());
        assert_eq!(again, Err(NoTicket::InFlight { number: first, request: request(), site }));
        let elsewhere = (ProcessSetId(3), TensorName::new("a").unwrap());
        assert!(tickets.open(elsewhere, &request(), NOWHERE, false, ()).is_ok());
        tickets.withdraw(first);
        let second = tickets.open(key("a"), &request(), NOWHERE, false, ()).unwrap();
        assert_ne!(first, second);
        tickets.end(second, Ok(0));
        assert!(tickets.open(key("a"), &request(), NOWHERE, false, ()).is_ok());
        tickets.abandon(second);
        assert_eq!(tickets.entries.len(), 2);
    }

    #[test]
    fn a_closed_table_keeps_its_memory_and_adds_none() {
        let memory = Arc::new(());
        let mut tickets = Tickets::<_, ()>::default();
        let ended = tickets.open(key("ended"), &request(), NOWHERE, false, Arc::new(())).unwrap();
        tickets.end(ended, Ok(0));
        let dropped =
            tickets.open(key("dropped"), &request(), NOWHERE, false, memory.clone()).unwrap();
        tickets.abandon(dropped);
        let in_flight = tickets.close();
        assert!(tickets.is_closed() && tickets.in_flight() == 0);
        assert!(in_flight.len() == 1 && Arc::ptr_eq(&in_flight[0], &memory));
        drop(in_flight);
        assert_eq!(Arc::strong_count(&memory), 2);
        let late = tickets.open(key("late"), &request(), NOWHERE, false, Arc::new(()));
        assert_eq!(late, Err(NoTicket::Closed));
        assert!(tickets.take(ended).is_some(), "it had succeeded before");
        drop(tickets.clear());
        assert_eq!(Arc::strong_count(&memory), 1);
    }

    #[test]
    fn results_move_once_and_only_if_allowed() {
        let mut tickets = Tickets::<(), u8>::default();
        let fixed = tickets.open(key("a"), &request(), NOWHERE, false, ()).unwrap();
        assert_eq!(tickets.ask_movable(fixed), None);
        let free = tickets.open(key("b"), &request(), NOWHERE, true, ()).unwrap();
        assert_eq!(tickets.ask_movable(free), Some(&request()));
        assert_eq!(tickets.ask_movable(free), None, "BOUND");
        tickets.move_results(free, 7);
        tickets.end(free, Ok(5));
        tickets.move_results(free, 8);
        assert_eq!(tickets.take(free), Some(Ok(Done { aux: 5, moved: Some(7) })));
    }

    #[test]
    fn a_held_name_is_not_worth_waiting_for() {
        let mut tickets = Tickets::<(), ()>::default();
        assert!(!tickets.will_be_free(&key("a")), "it is free");
        let ticket = tickets.open(key("a"), &request(), NOWHERE, false, ()).unwrap();
        assert!(tickets.will_be_free(&key("a")));
        tickets.set_held(ticket, true);
        assert!(!tickets.will_be_free(&key("a")));
        tickets.set_held(ticket, false);
        tickets.close();
        assert!(!tickets.will_be_free(&key("a")));
    }

    #[test]
    fn unknown_tickets_are_ignored() {
        let mut tickets = Tickets::<(), ()>::default();
        assert!(tickets.end(7, Ok(0)).is_none());
        assert!(tickets.ask_movable(7).is_none());
        assert!(tickets.move_results(7, ()).is_some());
        tickets.abandon(7);
        tickets.withdraw(7);
        assert_eq!(tickets.take(7), None);
    }
}
