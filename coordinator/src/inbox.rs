//! What sessions send to the runtime, and what the runtime needs to answer them.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use gradwire_proto::{Rank, broadcast::Broadcast};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use crate::{
    history::Entry,
    model::{
        ConnectionId, Event, Status,
        command::RankWait,
        event::Join,
        report::{Report, Reported},
    },
};

/// How many messages may wait for one node.
pub(crate) const OUTBOX: usize = 1024;

/// The text for nodes that join after the end.
pub(crate) const OVER: &str = "the job is over";

/// The queue of messages to one node.
pub(crate) type Outbox = mpsc::Sender<Result<Arc<Broadcast>, tonic::Status>>;

/// A stream that wants to join, as its session hands it over.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) outbox: Outbox,
    /// The node's nonce, over which the coordinator proves the secret.
    pub(crate) nonce: Vec<u8>,
    /// What the node has sent last.
    pub(crate) newest: Arc<Mutex<Newest>>,
}

/// What a node has sent last, of what only the last counts.
#[derive(Debug, Default)]
pub(crate) struct Newest {
    /// Its heartbeat; none before the first.
    pub(crate) echo: Option<Echo>,
    /// Its report; none before the first.
    pub(crate) report: Option<(Report, Instant)>,
}

/// What viewers see.
#[derive(Debug)]
pub(crate) struct Snapshot {
    pub(crate) status: Status,
    /// Time since the coordinator began.
    pub(crate) uptime: Duration,
    /// By the number of the node.
    pub(crate) reports: BTreeMap<u32, Reported>,
    pub(crate) lags: Vec<(Rank, RankWait)>,
    pub(crate) decisions: Vec<Entry>,
    pub(crate) events: Vec<Entry>,
}

/// A heartbeat of a node, which goes back with the next one of the coordinator.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Echo {
    /// The node's clock.
    pub(crate) sent_ns: u64,
    pub(crate) received: Instant,
}

/// What sessions send to the runtime.
#[derive(Debug)]
pub(crate) enum Inbound {
    /// The first message of a stream.
    Join { connection: ConnectionId, join: Join, peer: Peer },
    /// A later event.
    Event(Event),
    /// What is traced has changed. A node that caused it waits for an answer.
    Traced { by: Option<ConnectionId> },
    /// A request for the state.
    Inspect(oneshot::Sender<Snapshot>),
}
