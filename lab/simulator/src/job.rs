//! Operations, and the director that orders them.

use std::{collections::BTreeSet, sync::Arc};

use gradwire_collectives::{Kind, Section, Spec};

/// The purpose of an operation.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Content {
    /// One kind for all elements.
    Kind(Kind, u64),
    /// Sections with their own roles.
    Sections(Vec<Section>),
}

/// An operation: one piece.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Operation {
    /// Its purpose, and the number of elements.
    pub content: Content,
    /// By which algorithm.
    pub spec: Spec,
    /// Bytes of an element.
    pub element: u64,
    /// The hosts that take part, ascending.
    pub hosts: Arc<[u32]>,
}

impl Operation {
    /// One kind for `bytes` in elements of 4 bytes, between hosts 0 to `hosts` - 1.
    pub fn new(kind: Kind, spec: impl Into<Spec>, bytes: u64, hosts: u32) -> Self {
        Self {
            content: Content::Kind(kind, bytes / 4),
            spec: spec.into(),
            element: 4,
            hosts: (0..hosts).collect(),
        }
    }

    /// Its bytes.
    pub fn bytes(&self) -> u64 {
        let elements = match &self.content {
            Content::Kind(_, count) => *count,
            Content::Sections(sections) => sections.iter().map(|section| section.count).sum(),
        };
        elements * self.element
    }
}

/// An order to start an operation.
#[derive(Debug, Clone)]
pub struct Order {
    /// Its sequence number; lanes take turns by it.
    pub sequence: u64,
    /// What to do.
    pub operation: Arc<Operation>,
    /// When hosts receive the order.
    pub at: f64,
}

/// Decides which operations run.
pub trait Director {
    /// The orders that can be given now. Called at the start, at [`wake`](Self::wake), and after
    /// operations have ended.
    fn orders(&mut self, now: f64) -> Vec<Order>;

    /// When it wants to be called even if nothing happens before.
    fn wake(&self) -> Option<f64>;

    /// A host has published an operation.
    fn done(&mut self, host: u32, sequence: u64, now: f64);

    /// All operations that it will order, if it knows them in advance: if all hosts do the same in
    /// each, one can represent all.
    fn operations(&self) -> Vec<Arc<Operation>> {
        Vec::new()
    }

    /// Whether it gives no more orders once the current ones are done.
    fn is_over(&self) -> bool;
}

/// Operations in a given order, limited by credit: those of one call, or of several calls, each of
/// which begins when the previous one has ended.
#[derive(Debug)]
pub struct InOrder {
    operations: Vec<Arc<Operation>>,
    /// Operations per call.
    each: usize,
    /// When the coordinator learns that the call has begun, and when earlier calls ended.
    ready: f64,
    ended: Vec<f64>,
    done: usize,
    next: usize,
    in_flight: BTreeSet<u64>,
    missing: Vec<usize>,
    /// When each credit is returned.
    returned: Vec<f64>,
    control: crate::config::Control,
}

impl InOrder {
    /// These operations, all ready at the start.
    pub fn new(operations: Vec<Arc<Operation>>, control: crate::config::Control) -> Self {
        Self::calls(operations, 1, control)
    }

    /// A number of calls of these operations.
    pub fn calls(
        operations: Vec<Arc<Operation>>,
        calls: u32,
        control: crate::config::Control,
    ) -> Self {
        let each = operations.len();
        let operations: Vec<_> = (0..calls).flat_map(|_| operations.iter().cloned()).collect();
        let missing = operations.iter().map(|operation| operation.hosts.len()).collect();
        let (in_flight, returned) = (BTreeSet::new(), Vec::new());
        let (ready, ended) = (control.call, Vec::new());
        Self {
            operations,
            each,
            ready,
            ended,
            done: 0,
            next: 0,
            in_flight,
            missing,
            returned,
            control,
        }
    }

    /// Seconds that each call has taken.
    pub fn taken(&self) -> Vec<f64> {
        let before = std::iter::once(&0.0).chain(&self.ended);
        self.ended.iter().zip(before).map(|(end, before)| end - before).collect()
    }

    /// The operations that some host has not finished.
    pub fn left(&self) -> Vec<Arc<Operation>> {
        let all = self.operations.iter().zip(&self.missing);
        all.filter(|(_, missing)| **missing > 0).map(|(one, _)| one.clone()).collect()
    }
}

impl Director for InOrder {
    fn orders(&mut self, now: f64) -> Vec<Order> {
        self.returned.retain(|&at| at > now);
        let mut orders = Vec::new();
        while let Some(operation) = self.operations.get(self.next) {
            let busy = self.in_flight.len() + self.returned.len();
            if busy >= self.control.credit.max(1) as usize
                || self.next / self.each > self.ended.len()
            {
                break;
            }
            let sequence = self.next as u64;
            self.next += 1;
            self.in_flight.insert(sequence);
            let at = now.max(self.ready) + self.control.order;
            orders.push(Order { sequence, operation: operation.clone(), at });
        }
        orders
    }

    fn wake(&self) -> Option<f64> {
        self.returned.iter().copied().reduce(f64::min)
    }

    fn done(&mut self, _: u32, sequence: u64, now: f64) {
        let missing = &mut self.missing[sequence as usize];
        *missing -= 1;
        if *missing == 0 {
            self.in_flight.remove(&sequence);
            if self.control.done > 0.0 {
                self.returned.push(now + self.control.done);
            }
            self.done += 1;
            if self.done.is_multiple_of(self.each) {
                self.ended.push(now);
                self.ready = now + self.control.call;
            }
        }
    }

    fn operations(&self) -> Vec<Arc<Operation>> {
        self.operations.clone()
    }

    fn is_over(&self) -> bool {
        self.next == self.operations.len()
    }
}
