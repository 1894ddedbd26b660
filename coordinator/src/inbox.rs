//! The messages from sessions to the runtime, and what the runtime needs to answer them.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use gradwire_proto::{Failure, NodeId, pb};
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::{
    model::{ConnectionId, Event},
    outbox::Outbox,
};

/// The error for requests after the end of the job.
pub(crate) const OVER: &str = "the job is over";

/// A joining stream, as its session hands it over.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) outbox: Outbox<pb::CoordinatorMessage>,
    /// The node's nonce, over which the coordinator proves the secret.
    pub(crate) nonce: Vec<u8>,
    /// The node's latest heartbeat and report.
    pub(crate) newest: Arc<Mutex<Newest>>,
    /// To be cancelled once another stream has replaced this one.
    pub(crate) replaced: CancellationToken,
}

/// The latest heartbeat and report of a node; older ones do not matter.
#[derive(Debug, Default)]
pub(crate) struct Newest {
    pub(crate) echo: Option<Echo>,
    pub(crate) report: Option<(pb::NodeReport, Instant)>,
    /// Whether one of its ranks has attached.
    pub(crate) begun: bool,
    /// Its shortest round trip; zero if it is not known.
    pub(crate) round_trip: Duration,
}

/// A heartbeat of a node, which is echoed with the coordinator's next heartbeat.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Echo {
    /// The node's clock.
    pub(crate) sent_ns: u64,
    pub(crate) received: Instant,
}

/// A message from a session to the runtime.
#[derive(Debug)]
pub(crate) enum Inbound {
    /// The first message of a stream.
    Join { connection: ConnectionId, join: pb::Join, proven: bool, peer: Peer },
    /// A later event. Each later message is one event, heartbeat, trace or answer, because they are
    /// counted.
    Event(Event),
    /// A failure, and when the node noticed it on the coordinator's clock; 0 if it does not know.
    Failed { connection: ConnectionId, failure: Failure, noticed_ns: u64 },
    /// A heartbeat, with how many messages the node has received.
    Heartbeat { connection: ConnectionId, received: u64 },
    /// A batch of the node's trace.
    Trace { connection: ConnectionId, batch: Vec<u8> },
    /// The launcher has seen that the daemon of a node has ended.
    Ended { node: NodeId, why: String },
    /// Tracing has started or stopped. If a node caused this, it waits for an answer.
    Traced { by: Option<ConnectionId> },
    /// A node says what its ranks do.
    Explained { connection: ConnectionId, explained: pb::Explained },
    /// A tensor has waited too long for ranks of one node.
    Overdue { connection: ConnectionId },
    /// A request for an explanation of waits.
    /// `save`: the daemons also save their flight recordings.
    Explain { reply: oneshot::Sender<pb::Explanation>, save: bool },
    /// A request for the state.
    Inspect(oneshot::Sender<pb::StatusResponse>),
}
