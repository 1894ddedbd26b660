//! The operations in flight, and whether more may start.
//!
//! An operation is in flight until every participating node has done it. While the operations in
//! flight use up the credit, tensors that become ready are collected, ordered and fused. So batches
//! grow when the network is slow, and an idle network gets each tensor at once.

use std::{collections::BTreeMap, time::Duration};

use fixedbitset::FixedBitSet;
use gradwire_proto::{NodeId, Sequence};

use super::{algorithm::ChoiceId, sizes::Sample};
use crate::model::round::Slot;

/// An operation in flight.
#[derive(Debug)]
pub(crate) struct Flying {
    /// The nodes that have not done it.
    pub(crate) nodes: FixedBitSet,
    /// Its tensors, ascending.
    pub(crate) slots: Vec<Slot>,
    /// When it started.
    pub(crate) since: Duration,
    /// The choice of its algorithm, if there was one.
    pub(crate) choice: Option<ChoiceId>,
    /// The number of the candidate for sizes.
    pub(crate) sizes: usize,
    /// If its time can be used to compare sizes.
    pub(crate) sample: Option<Sample>,
    /// How many operations were in flight when it started, including it; `None` if they had
    /// different choices.
    in_flight: Option<usize>,
}

/// An operation that all nodes have done.
#[derive(Debug)]
pub(crate) struct Completed {
    pub(crate) operation: Flying,
    /// How many were in flight when it started, including it; `None` if a different number was in
    /// flight when it ended, or if they had different choices.
    pub(crate) in_flight: Option<u32>,
    /// If it was the last operation of a burst: that burst.
    pub(crate) burst: Option<Burst>,
}

/// Several operations with the same choice that started when none was in flight, and before any of
/// them was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Burst {
    /// When the first one started.
    pub(crate) since: Duration,
    /// The number of operations.
    pub(crate) count: u32,
}

impl Flying {
    /// Whether a node has not done it yet.
    pub(crate) fn has(&self, node: NodeId) -> bool {
        self.nodes.contains(node.index())
    }
}

/// The operations in flight (BOUND: at most `credit`).
#[derive(Debug)]
pub(crate) struct Flight {
    flying: BTreeMap<Sequence, Flying>,
    /// The number of operations in flight by choice and by candidate for sizes.
    choices: BTreeMap<(Option<ChoiceId>, usize), usize>,
    /// The operations in flight, if they are a burst.
    burst: Option<Burst>,
    credit: usize,
    /// The last assigned number.
    last: Sequence,
    started: u64,
    done: u64,
}

impl Flight {
    pub(crate) fn new(credit: usize) -> Self {
        let (flying, choices) = (BTreeMap::new(), BTreeMap::new());
        Self { flying, choices, burst: None, credit, last: Sequence(0), started: 0, done: 0 }
    }

    /// Sets how many operations may be in flight.
    pub(crate) fn set_credit(&mut self, credit: usize) {
        self.credit = credit;
    }

    /// Whether one more operation may start.
    pub(crate) fn has_credit(&self) -> bool {
        self.flying.len() < self.credit
    }

    /// The next number in the total order over all process sets (ORD), for an order that is not
    /// tracked here.
    pub(crate) fn number(&mut self) -> Sequence {
        self.last.0 += 1;
        self.last
    }

    /// Starts an operation with the next number in the total order over all process sets (ORD).
    pub(crate) fn start(
        &mut self,
        nodes: FixedBitSet,
        mut slots: Vec<Slot>,
        (choice, sizes, sample): (Option<ChoiceId>, usize, Option<Sample>),
        now: Duration,
    ) -> Sequence {
        slots.sort_unstable();
        self.started += 1;
        let sequence = self.number();
        *self.choices.entry((choice, sizes)).or_default() += 1;
        let in_flight = self.is_uniform().then(|| self.flying.len() + 1);
        let before = if self.flying.is_empty() {
            Some(Burst { since: now, count: 0 })
        } else {
            // An operation that starts after others were done does not belong to their burst.
            let is_whole = |burst: &Burst| burst.count as usize == self.flying.len();
            self.burst.filter(is_whole)
        };
        self.burst = before
            .filter(|_| in_flight.is_some())
            .map(|Burst { since, count }| Burst { since, count: count + 1 });
        let flying = Flying { nodes, slots, since: now, choice, sizes, sample, in_flight };
        self.flying.insert(sequence, flying);
        sequence
    }

    /// Whether all operations in flight have the same choice and the same sizes.
    fn is_uniform(&self) -> bool {
        self.choices.len() == 1
    }

    /// Notes that a node has done an operation. Returns the operation once all nodes have done it,
    /// and `Err` if the node was not running it.
    pub(crate) fn done(
        &mut self,
        node: NodeId,
        sequence: Sequence,
    ) -> Result<Option<Completed>, ()> {
        let flying = self.flying.get_mut(&sequence).ok_or(())?;
        if !flying.has(node) {
            return Err(());
        }
        flying.nodes.remove(node.index());
        if !flying.nodes.is_clear() {
            return Ok(None);
        }
        self.done += 1;
        let now_flying = self.is_uniform().then_some(self.flying.len());
        let operation = self.flying.remove(&sequence).ok_or(())?;
        let Flying { choice, sizes, in_flight, .. } = operation;
        if let Some(of_choice) = self.choices.get_mut(&(choice, sizes)) {
            *of_choice -= 1;
            if *of_choice == 0 {
                self.choices.remove(&(choice, sizes));
            }
        }
        let in_flight = in_flight.filter(|_| in_flight == now_flying).map(|flying| flying as u32);
        let is_last = self.flying.is_empty();
        let burst = self.burst.filter(|burst| is_last && burst.count > 1);
        Ok(Some(Completed { operation, in_flight, burst }))
    }

    /// Whether a tensor is part of an operation that a node has not done.
    pub(crate) fn holds(&self, slot: Slot, node: NodeId) -> bool {
        let mut theirs = self.flying.values().filter(|flying| flying.has(node));
        theirs.any(|flying| flying.slots.binary_search(&slot).is_ok())
    }

    /// The operations in flight, oldest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Sequence, &Flying)> {
        self.flying.iter().map(|(&sequence, flying)| (sequence, flying))
    }

    pub(crate) fn len(&self) -> usize {
        self.flying.len()
    }

    pub(crate) fn credit(&self) -> usize {
        self.credit
    }

    /// How many operations have ever started.
    pub(crate) fn started(&self) -> u64 {
        self.started
    }

    /// How many operations all nodes have done.
    pub(crate) fn completed(&self) -> u64 {
        self.done
    }
}
