//! What sessions send to the runtime, and what the runtime needs to answer them.

use std::{sync::Arc, time::Instant};

use gradwire_proto::pb;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tonic::Status;

use crate::model::{ConnectionId, Event, event::Join, status};

/// How many messages may wait for one node.
pub(crate) const OUTBOX: usize = 1024;

/// The text for nodes that join after the end.
pub(crate) const OVER: &str = "the job is over";

/// The queue of messages to one node.
pub(crate) type Outbox = mpsc::Sender<Result<pb::CoordinatorMessage, Status>>;

/// A stream that wants to join, as its session hands it over.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) outbox: Outbox,
    /// The node's nonce, over which the coordinator proves the secret.
    pub(crate) nonce: Vec<u8>,
    /// The last heartbeat of the node; none before the first.
    pub(crate) echo: Arc<Mutex<Option<Echo>>>,
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
    /// A request for the state.
    Inspect(oneshot::Sender<status::Status>),
}
