//! Connections as flows: each is a FIFO of chunks, and the first chunk is in flight.
//!
//! Times are in seconds. Progress is computed when a rate changes. Chunks that end within a
//! microsecond are one event. No bytes are lost by that: the rest of a chunk is carried over to the
//! next one.

use std::collections::VecDeque;

use crate::{
    buckets::Buckets,
    earliest::Earliest,
    fair::{Fair, FlowId, ResourceId, Use},
    report::Usage,
};

/// Ends that are closer together are one event.
const TOGETHER: f64 = 1e-6;

/// The largest part of a chunk that may be carried over.
const SMALL_PART: f64 = 1e-3;

/// A chunk in flight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Transfer {
    pub(crate) sequence: u64,
    /// The sending step.
    pub(crate) step: u32,
    pub(crate) message: u32,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    /// Whether the sender counts it as sent: the system has buffered it.
    pub(crate) is_sent: bool,
}

#[derive(Debug, Default)]
struct Connection {
    fifo: VecDeque<Transfer>,
    waiting_bytes: u64,
    /// Remaining bytes of the first chunk.
    remaining: f64,
    /// The time of that count.
    updated: f64,
    /// When the first chunk will have been sent.
    finish: f64,
    /// Whether TCP waits, so that nothing is sent.
    is_stalled: bool,
}

/// All connections.
#[derive(Debug, Default)]
pub(crate) struct Flows {
    pub(crate) fair: Fair,
    /// The lines that pass bursts.
    pub(crate) buckets: Buckets,
    all: Vec<Connection>,
    /// When the first chunk of each will have been sent.
    earliest: Earliest,
    /// Scratch: the rates that one computation changed.
    changes: Vec<(FlowId, f64, f64)>,
    pub(crate) usage: Usage,
    /// Bytes of each chunk's header.
    pub(crate) header: u64,
}

impl Flows {
    pub(crate) fn add(&mut self, uses: &[Use], cap: f64) -> FlowId {
        let id = self.fair.add_flow(uses, cap);
        self.all.push(Connection { finish: f64::INFINITY, ..Connection::default() });
        self.earliest.grow(self.all.len());
        id
    }

    fn changed(&mut self, id: FlowId, finish: f64) {
        self.all[id as usize].finish = finish;
        self.earliest.set(id as usize, finish);
    }

    /// Queued bytes, including the whole first chunk.
    pub(crate) fn waiting_bytes(&self, id: FlowId) -> u64 {
        self.all[id as usize].waiting_bytes
    }

    pub(crate) fn is_empty(&self, id: FlowId) -> bool {
        self.all[id as usize].fifo.is_empty()
    }

    /// The chunk in flight.
    pub(crate) fn first(&self, id: FlowId) -> Option<&Transfer> {
        self.all[id as usize].fifo.front()
    }

    /// Adds a chunk. Returns whether the connection was idle and starts. A connection whose only
    /// chunk has just been taken continues.
    pub(crate) fn push(&mut self, id: FlowId, transfer: Transfer, now: f64) -> bool {
        let one = &mut self.all[id as usize];
        one.waiting_bytes += transfer.bytes;
        one.fifo.push_back(transfer);
        if one.fifo.len() > 1 {
            return false;
        }
        one.remaining += (transfer.bytes + self.header) as f64;
        if one.is_stalled || self.fair.is_active(id) {
            return false;
        }
        one.updated = now;
        self.fair.start(id);
        true
    }

    /// Stalls a connection for TCP, or lets it continue.
    pub(crate) fn set_stalled(&mut self, id: FlowId, is_stalled: bool, now: f64) {
        let one = &mut self.all[id as usize];
        if std::mem::replace(&mut one.is_stalled, is_stalled) == is_stalled || one.fifo.is_empty() {
            return;
        }
        if is_stalled {
            self.settle(id, self.fair.rate(id), now);
            self.fair.stop(id);
            self.changed(id, f64::INFINITY);
        } else {
            one.updated = now;
            self.fair.start(id);
        }
    }

    /// Counts the progress until now.
    fn settle(&mut self, id: FlowId, rate: f64, now: f64) {
        let one = &mut self.all[id as usize];
        let (from, moved) = (one.updated, (rate * (now - one.updated)).min(one.remaining).max(0.0));
        one.remaining -= moved;
        one.updated = now;
        for Use { resource, weight } in self.fair.uses(id) {
            self.usage.add(resource, from, now, moved * weight);
        }
    }

    /// Recomputes the rates that may have changed.
    pub(crate) fn compute(&mut self, now: f64) {
        self.buckets.settle(&mut self.fair, now);
        if !self.fair.is_stale() {
            return;
        }
        let mut changes = std::mem::take(&mut self.changes);
        self.fair.compute(|id, before, rate| changes.push((id, before, rate)));
        for (id, before, rate) in changes.drain(..) {
            self.settle(id, before, now);
            let left = self.all[id as usize].remaining;
            let finish = if left <= 0.0 { now } else { now + left / rate };
            self.changed(id, finish);
        }
        self.changes = changes;
        self.buckets.note(&self.fair);
    }

    /// Changes the rate of a line or link.
    pub(crate) fn set_rate(&mut self, line: ResourceId, rate: f64) {
        self.buckets.set_rate(line, rate, &mut self.fair);
    }

    /// When the next chunk ends, or the next burst of a line.
    pub(crate) fn next(&self) -> f64 {
        self.earliest.first().min(self.buckets.next())
    }

    /// The connections whose chunk ends now, or practically now, in ascending order.
    pub(crate) fn ended(&self, now: f64, ended: &mut Vec<FlowId>) {
        ended.clear();
        self.earliest.until(now + TOGETHER, ended);
        ended.retain(|&id| {
            let one = &self.all[id as usize];
            let Some(first) = one.fifo.front() else { return false };
            let left = self.fair.rate(id) * (one.finish - now);
            one.finish <= now || left <= SMALL_PART * first.bytes as f64
        });
    }

    /// Takes the finished chunk of a connection, with its exact end. After adding more chunks, call
    /// [`rest`](Self::rest).
    pub(crate) fn take(&mut self, id: FlowId, now: f64) -> (Transfer, f64) {
        let rate = self.fair.rate(id);
        let gone = self.all[id as usize].finish.max(now);
        self.settle(id, rate, now);
        let one = &mut self.all[id as usize];
        let transfer = one.fifo.pop_front().expect("a chunk has ended");
        one.waiting_bytes -= transfer.bytes;
        if let Some(next) = one.fifo.front() {
            one.remaining += (next.bytes + self.header) as f64;
        }
        (transfer, gone)
    }

    /// Continues a connection with its next chunk, or stops it.
    pub(crate) fn rest(&mut self, id: FlowId, now: f64) {
        let one = &mut self.all[id as usize];
        if one.fifo.is_empty() {
            // The rest of the last chunk was already counted for its receiver.
            let left = std::mem::take(&mut one.remaining);
            for Use { resource, weight } in self.fair.uses(id) {
                self.usage.add(resource, now, now, left * weight);
            }
            self.fair.stop(id);
            self.changed(id, f64::INFINITY);
        } else {
            let finish = now + one.remaining / self.fair.rate(id);
            self.changed(id, finish);
        }
    }
}
