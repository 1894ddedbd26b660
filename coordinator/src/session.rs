//! The sessions of nodes: challenge, proof, and then messages until the stream ends.
//!
//! A stream gets a challenge, must join before a deadline, and is a stranger until the engine has
//! seen its proof. The number of strangers is limited (BOUND).

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use gradwire_proto::{
    NodeId, PROTOCOL, Secret, VERSION,
    auth::{self, Claim},
    pb::{self, coordinator_message::Message},
};
use parking_lot::Mutex;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::timeout,
};
use tokio_stream::{Stream, StreamExt};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Code, Status};

use crate::{
    convert::{self, Incoming},
    inbox::{Echo, Inbound, Newest, OVER, Peer},
    model::{ConnectionId, Event},
    outbox::{Outbox, OutboxStream},
    traces::Traces,
};

/// The most streams that have not proven the job's secret.
const MAX_STRANGERS: usize = 64;

/// What sessions need from the runtime.
#[derive(Debug, Clone)]
pub(crate) struct SessionContext {
    pub(crate) inbox: mpsc::Sender<Inbound>,
    pub(crate) secret: Secret,
    pub(crate) join_timeout: Duration,
    /// The epoch, for challenges.
    pub(crate) epoch: u64,
    /// Whether a node whose stream breaks may open another one.
    pub(crate) recovers: bool,
    pub(crate) traces: Arc<Traces>,
    /// Runs one task for each stream.
    pub(crate) sessions: TaskTracker,
    /// Ends those tasks.
    pub(crate) stop: CancellationToken,
}

/// Accepts the sessions of nodes, over gRPC or from the daemon in the same process, which needs
/// neither a socket nor another thread.
#[derive(Debug, Clone)]
pub struct SessionAcceptor {
    context: SessionContext,
    connections: Arc<AtomicU64>,
    strangers: Arc<Semaphore>,
}

type ToNode = Outbox<pb::CoordinatorMessage>;

/// The coordinator's messages to one node.
pub type SessionStream = OutboxStream<pb::CoordinatorMessage>;

impl SessionAcceptor {
    pub(crate) fn new(context: SessionContext) -> Self {
        let strangers = Arc::new(Semaphore::new(MAX_STRANGERS));
        Self { context, connections: Arc::default(), strangers }
    }

    /// The context of its sessions.
    pub(crate) fn context(&self) -> &SessionContext {
        &self.context
    }

    /// Begins a session with the `messages` of the node in this process; the first one must be
    /// `Join`. Returns the coordinator's messages. Checks and proofs are the same wherever the node
    /// is (TRUST). Call this within tokio.
    ///
    /// # Errors
    /// `ResourceExhausted` while too many other streams have not joined (BOUND).
    pub fn accept<S>(&self, messages: S) -> Result<SessionStream, Status>
    where
        S: Stream<Item = Result<pb::NodeMessage, Status>> + Send + Unpin + 'static,
    {
        self.begin(messages, false)
    }

    /// As [`SessionAcceptor::accept`], for a node that is reached over a connection, which may
    /// break.
    pub(crate) fn accept_remote<S>(&self, messages: S) -> Result<SessionStream, Status>
    where
        S: Stream<Item = Result<pb::NodeMessage, Status>> + Send + Unpin + 'static,
    {
        self.begin(messages, self.context.recovers)
    }

    /// The launcher has seen that the daemon of a node has ended, so its node will not return.
    pub fn daemon_ended(&self, node: NodeId, why: String) {
        let inbox = self.context.inbox.clone();
        self.context.sessions.spawn(async move {
            // The job may be over.
            let _ = inbox.send(Inbound::Ended { node, why }).await;
        });
    }

    fn begin<S>(&self, messages: S, may_return: bool) -> Result<SessionStream, Status>
    where
        S: Stream<Item = Result<pb::NodeMessage, Status>> + Send + Unpin + 'static,
    {
        let stranger = Arc::clone(&self.strangers).try_acquire_owned().map_err(|_| {
            Status::resource_exhausted(format!(
                "{MAX_STRANGERS} open streams have not joined yet: try again later"
            ))
        })?;
        let (outbox, messages_out) = Outbox::new(may_return);
        outbox.open();
        let session = Session {
            context: self.context.clone(),
            connection: ConnectionId(self.connections.fetch_add(1, Ordering::Relaxed)),
            messages,
            newest: Arc::default(),
            replaced: CancellationToken::new(),
            may_return,
        };
        let stop = self.context.stop.clone();
        self.context.sessions.spawn(stop.run_until_cancelled_owned(session.run(outbox, stranger)));
        Ok(messages_out)
    }
}

/// One node's messages, read to their end.
struct Session<S> {
    context: SessionContext,
    connection: ConnectionId,
    messages: S,
    newest: Arc<Mutex<Newest>>,
    /// Another stream has replaced this one, which may never end by itself.
    replaced: CancellationToken,
    /// Whether the node may open another stream if this one breaks.
    may_return: bool,
}

impl<S> Session<S>
where
    S: Stream<Item = Result<pb::NodeMessage, Status>> + Send + Unpin,
{
    async fn run(mut self, outbox: ToNode, stranger: OwnedSemaphorePermit) {
        match self.join(&outbox).await {
            // The engine will refuse the node, so its stream is not read any more.
            Ok(false) => return,
            Ok(true) => drop((outbox, stranger)),
            Err(status) => {
                outbox.greet(Err(status));
                return;
            }
        }
        let replaced = self.replaced.clone();
        let Some(why) = replaced.run_until_cancelled(self.forward()).await else { return };
        let _ = self.context.inbox.send(Inbound::Event(self.event(why))).await;
    }

    fn event(&self, why: String) -> Event {
        Event::Lost { connection: self.connection, why, may_return: self.may_return }
    }

    /// Challenges the node and passes its answer to the engine. Returns whether it knows the
    /// secret.
    async fn join(&mut self, outbox: &ToNode) -> Result<bool, Status> {
        let nonce = auth::nonce();
        let challenge = pb::Challenge {
            nonce: nonce.to_vec(),
            protocol: PROTOCOL,
            version: VERSION.to_owned(),
            epoch: self.context.epoch,
        };
        let message = Some(Message::Challenge(challenge));
        outbox.greet(Ok(pb::CoordinatorMessage { message }));
        let limit = self.context.join_timeout;
        let first = tokio::select! {
            first = timeout(limit, self.messages.next()) => first,
            () = self.context.inbox.closed() => return Err(Status::unavailable(OVER)),
        };
        let late = |_| Status::deadline_exceeded(format!("no Join message within {limit:?}"));
        let first = first.map_err(late)?.transpose()?;
        let Some(pb::NodeMessage { message: Some(pb::node_message::Message::Join(join)) }) = first
        else {
            return Err(Status::invalid_argument("the first message of a node must be Join"));
        };
        let claim = Claim::Join {
            challenge: &nonce,
            nonce: &join.nonce,
            job: &join.job,
            host: &join.host,
            data_address: &join.data_address,
            slots: join.slots,
            order: join.order,
            rack: &join.rack,
            metrics_address: &join.metrics_address,
            line_mbit: join.line_mbit,
            epoch: join.epoch,
            attempt: join.attempt,
            received: join.received,
        };
        let proven = join.nonce.len() == auth::NONCE_BYTES
            && self.context.secret.verify(&claim, &join.proof);
        let peer = Peer {
            outbox: outbox.clone(),
            nonce: join.nonce.clone(),
            newest: Arc::clone(&self.newest),
            replaced: self.replaced.clone(),
        };
        let inbound = Inbound::Join { connection: self.connection, join, proven, peer };
        self.context.inbox.send(inbound).await.map_err(|_| Status::unavailable(OVER))?;
        Ok(proven)
    }

    /// Notes a heartbeat. Only the latest one counts.
    fn note(
        &self,
        (sent_ns, round_trip): (u64, Duration),
        begun: bool,
        report: Option<pb::NodeReport>,
    ) {
        let received = Instant::now();
        let mut newest = self.newest.lock();
        newest.begun |= begun;
        newest.round_trip = round_trip;
        newest.echo = Some(Echo { sent_ns, received });
        if let Some(report) = report {
            newest.report = Some((report, received));
        }
    }

    /// Passes messages to the engine until the stream ends. Returns why it ended. Once the job is
    /// over, messages are read and dropped until the node closes the stream.
    async fn forward(&mut self) -> String {
        loop {
            let wire = match self.messages.next().await {
                Some(Ok(wire)) => wire,
                // It has ended by itself.
                None => {
                    self.may_return = false;
                    return "it closed its stream".to_owned();
                }
                Some(Err(status)) => {
                    // A node does not come back after a message that can't be read.
                    let is_wrong = matches!(status.code(), Code::OutOfRange | Code::Unimplemented);
                    self.may_return &= !is_wrong;
                    return format!("its stream broke: {}", status.message());
                }
            };
            let connection = self.connection;
            let inbound = match convert::incoming(connection, wire) {
                Ok(Incoming::Event(event)) => Inbound::Event(event),
                Ok(Incoming::Failed { failure, noticed_ns }) => {
                    Inbound::Failed { connection, failure, noticed_ns }
                }
                Ok(Incoming::Heartbeat {
                    sent_ns,
                    report,
                    samples,
                    begun,
                    received,
                    round_trip,
                }) => {
                    self.note((sent_ns, round_trip), begun, report);
                    if samples {
                        // All nodes must know of the step before its operations are ordered.
                        let by = (!self.context.traces.goes_on(true)).then_some(connection);
                        let _ = self.context.inbox.send(Inbound::Traced { by }).await;
                    }
                    Inbound::Heartbeat { connection, received }
                }
                Ok(Incoming::Trace(batch)) => Inbound::Trace { connection, batch },
                Ok(Incoming::Explained(explained)) => Inbound::Explained { connection, explained },
                Ok(Incoming::Overdue) => Inbound::Overdue { connection },
                Err(error) => {
                    Inbound::Event(Event::Nonsense { connection, what: error.to_string() })
                }
            };
            let _ = self.context.inbox.send(inbound).await;
        }
    }
}
