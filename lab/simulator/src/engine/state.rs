//! The engine's state of events, connections, hosts and operations.

use std::{cmp::Ordering, sync::Arc};

use gradwire_collectives::execution::Chunk;

use crate::{
    fair::FlowId,
    job::Operation,
    lane::{Frame, Plans},
};

#[derive(Debug, Clone, Copy)]
pub(super) enum Event {
    Start(u64),
    /// A frame arrives at a lane.
    Arrive(u32, Frame),
    Reduced {
        lane: usize,
        sequence: u64,
        chunk: Chunk,
    },
    Published {
        host: u32,
        lane: usize,
        sequence: u64,
    },
    Begin(usize),
    End(usize),
    Redraw(usize),
    /// A retransmission timer of TCP expires.
    Again(FlowId),
    /// TCP's window has grown.
    Grow(FlowId),
    Wake,
}

#[derive(Debug)]
pub(super) struct At(pub(super) f64, pub(super) u64, pub(super) Event);

impl PartialEq for At {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for At {}

impl PartialOrd for At {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for At {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0).then(self.1.cmp(&other.1))
    }
}

/// Work that may be able to proceed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Todo {
    Link(usize, u32),
    /// Frames held back for a step.
    Held(usize, u64, u32),
    Reduce(usize),
}

/// The state of a connection besides its chunks.
#[derive(Debug)]
pub(super) struct About {
    pub(super) from: u32,
    pub(super) to: u32,
    pub(super) lane: u32,
    pub(super) latency: f64,
    /// Its limit without faults and TCP.
    pub(super) cap: f64,
    /// TCP's window as a rate.
    pub(super) window: f64,
    /// When it last sent.
    pub(super) used: f64,
    pub(super) retries: u32,
    /// The index of the pair of hosts.
    pub(super) pair: usize,
    /// The message that it sent from last.
    pub(super) last: Option<Receiver>,
}

/// The step that receives a message.
#[derive(Debug, Clone, Copy)]
pub(super) struct Receiver {
    pub(super) sequence: u64,
    pub(super) message: u32,
    pub(super) step: u32,
}

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct HostState {
    pub(super) is_paused: bool,
    pub(super) has_left: bool,
    pub(super) line: f64,
    pub(super) slowness: f64,
}

/// An operation that has been ordered.
#[derive(Debug)]
pub(super) struct Ordered {
    pub(super) operation: Arc<Operation>,
    pub(super) plans: Arc<Plans>,
    pub(super) at: f64,
    pub(super) done: Vec<(u32, f64)>,
}
