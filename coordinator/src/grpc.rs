//! The services on the wire: `gradwire.v1.Coordinator` for nodes, `gradwire.v1.Inspect` for
//! people, health and reflection for tools.
//!
//! A stream gets a challenge, must join within a deadline, and is a stranger until the engine has
//! seen its proof; there is room for few strangers (BOUND).

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use gradwire_proto::{
    FILE_DESCRIPTOR_SET, JobId, MAX_CONTROL_MESSAGE, PROTOCOL, Secret, VERSION,
    auth::{self, Claim},
    pb::{
        self,
        coordinator_message::Message,
        coordinator_server::{Coordinator, CoordinatorServer},
        inspect_server::{Inspect, InspectServer},
    },
};
use tokio::{
    net::TcpListener,
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot},
    time::timeout,
};
use tokio_stream::{Stream, StreamExt, wrappers::ReceiverStream};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{
    Request, Response, Status, Streaming,
    transport::{Server, server::TcpIncoming},
};

use crate::{
    convert::{self, Incoming},
    engine::{ConnectionId, Event},
    runtime::{Inbound, OUTBOX, Outbox, Peer},
};

/// The most streams that have not proven the job's secret.
const MAX_STRANGERS: usize = 64;

/// The most streams of one connection: a session, and people that look.
const MAX_STREAMS: u32 = 16;

/// How often a silent connection is probed, and how long it may take to answer. Nodes of the
/// world have heartbeats, which are faster.
const KEEPALIVE: Duration = Duration::from_secs(10);

/// Bytes that may be under way on one connection.
const WINDOW: u32 = 2 << 20;

/// What is said to whoever comes too late.
pub(crate) const OVER: &str = "the job is over";

/// What the services need of the runtime.
#[derive(Debug, Clone)]
pub(crate) struct Gate {
    pub(crate) inbox: mpsc::Sender<Inbound>,
    pub(crate) job: JobId,
    pub(crate) secret: Secret,
    pub(crate) join_timeout: Duration,
    /// One task for each stream.
    pub(crate) sessions: TaskTracker,
    /// Ends those tasks.
    pub(crate) stop: CancellationToken,
}

/// Serves until `stop`.
pub(crate) async fn serve(
    door: Door,
    listener: TcpListener,
    stop: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error> {
    let inspect = InspectServer::new(Window { gate: door.gate.clone() });
    let coordinator = CoordinatorServer::new(door)
        .max_decoding_message_size(MAX_CONTROL_MESSAGE)
        .max_encoding_message_size(MAX_CONTROL_MESSAGE);
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_serving::<CoordinatorServer<Door>>().await;
    let mut server = Server::builder()
        .max_concurrent_streams(MAX_STREAMS)
        .concurrency_limit_per_connection(MAX_STREAMS as usize)
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE));
    let mut router = server.add_service(coordinator).add_service(inspect).add_service(health);
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1();
    match reflection {
        Ok(reflection) => router = router.add_service(reflection),
        Err(error) => tracing::warn!(%error, "no reflection: the descriptors are unreadable"),
    }
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    router.serve_with_incoming_shutdown(incoming, stop).await
}

#[derive(Debug)]
struct Window {
    gate: Gate,
}

#[tonic::async_trait]
impl Inspect for Window {
    async fn status(
        &self,
        _: Request<pb::StatusRequest>,
    ) -> Result<Response<pb::StatusResponse>, Status> {
        let (reply, status) = oneshot::channel();
        let over = || Status::unavailable(OVER);
        self.gate.inbox.send(Inbound::Inspect(reply)).await.map_err(|_| over())?;
        let status = status.await.map_err(|_| over())?;
        Ok(Response::new(convert::status(self.gate.job.as_str(), status)))
    }
}

/// The way in for nodes: over gRPC, or for the one whose daemon runs in the same process, which
/// needs neither a socket nor another thread's waking up.
#[derive(Debug, Clone)]
pub struct Door {
    gate: Gate,
    connections: Arc<AtomicU64>,
    strangers: Arc<Semaphore>,
}

/// What the coordinator says to one node.
pub type Said = ReceiverStream<Result<pb::CoordinatorMessage, Status>>;

impl Door {
    pub(crate) fn new(gate: Gate) -> Self {
        let strangers = Arc::new(Semaphore::new(MAX_STRANGERS));
        Self { gate, connections: Arc::default(), strangers }
    }

    /// Where events of nodes go.
    pub(crate) fn inbox(&self) -> mpsc::Sender<Inbound> {
        self.gate.inbox.clone()
    }

    /// Begins a node's session: `messages` is what the node says, first of all its `Join`. The same
    /// checks and proofs apply wherever it comes from (TRUST). Must be called within tokio.
    ///
    /// # Errors
    /// `ResourceExhausted` while too many others have begun and not joined (BOUND).
    pub fn enter<S>(&self, messages: S) -> Result<Said, Status>
    where
        S: Stream<Item = Result<pb::NodeMessage, Status>> + Send + Unpin + 'static,
    {
        let stranger = Arc::clone(&self.strangers).try_acquire_owned().map_err(|_| {
            Status::resource_exhausted(format!(
                "{MAX_STRANGERS} streams that have not joined are open already: try again"
            ))
        })?;
        let (outbox, said) = mpsc::channel(OUTBOX);
        let session = Session {
            gate: self.gate.clone(),
            connection: ConnectionId(self.connections.fetch_add(1, Ordering::Relaxed)),
            messages,
            echo: Arc::default(),
        };
        let stop = self.gate.stop.clone();
        self.gate.sessions.spawn(stop.run_until_cancelled_owned(session.run(outbox, stranger)));
        Ok(ReceiverStream::new(said))
    }
}

#[tonic::async_trait]
impl Coordinator for Door {
    type SessionStream = Said;

    async fn session(
        &self,
        request: Request<Streaming<pb::NodeMessage>>,
    ) -> Result<Response<Said>, Status> {
        self.enter(request.into_inner()).map(Response::new)
    }
}

/// One node's messages, read to their end.
struct Session<S> {
    gate: Gate,
    connection: ConnectionId,
    messages: S,
    echo: Arc<AtomicU64>,
}

impl<S> Session<S>
where
    S: Stream<Item = Result<pb::NodeMessage, Status>> + Send + Unpin,
{
    async fn run(mut self, outbox: Outbox, stranger: OwnedSemaphorePermit) {
        match self.join(&outbox).await {
            // The engine will refuse it; nothing more of it is read.
            Ok(false) => return,
            Ok(true) => drop((outbox, stranger)),
            Err(status) => {
                // Whoever has gone does not read why it was refused.
                let _ = outbox.try_send(Err(status));
                return;
            }
        }
        let why = self.forward().await;
        let _ = self.gate.inbox.send(Inbound::Event(self.event(why))).await;
    }

    fn event(&self, why: String) -> Event {
        Event::Lost { connection: self.connection, why }
    }

    /// Challenges the node and hands its answer to the engine. Gives whether it knows the secret.
    async fn join(&mut self, outbox: &Outbox) -> Result<bool, Status> {
        let nonce = auth::nonce();
        let challenge = pb::Challenge {
            nonce: nonce.to_vec(),
            protocol: PROTOCOL,
            version: VERSION.to_owned(),
        };
        let _ = outbox.try_send(Ok(convert::message(Message::Challenge(challenge))));
        let limit = self.gate.join_timeout;
        let first = tokio::select! {
            first = timeout(limit, self.messages.next()) => first,
            () = self.gate.inbox.closed() => return Err(Status::unavailable(OVER)),
        };
        let late = |_| Status::deadline_exceeded(format!("no Join came within {limit:?}"));
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
        };
        let proven =
            join.nonce.len() == auth::NONCE_BYTES && self.gate.secret.verify(&claim, &join.proof);
        let peer = Peer {
            outbox: outbox.clone(),
            nonce: join.nonce.clone(),
            echo: Arc::clone(&self.echo),
        };
        let join = convert::join(join, proven);
        let inbound = Inbound::Join { connection: self.connection, join, peer };
        self.gate.inbox.send(inbound).await.map_err(|_| Status::unavailable(OVER))?;
        Ok(proven)
    }

    /// Hands messages to the engine until there are no more; says why. Once the job is over they
    /// are read and dropped, until the node has read that it is.
    async fn forward(&mut self) -> String {
        loop {
            let wire = match self.messages.next().await {
                Some(Ok(wire)) => wire,
                None => return "it closed its stream".to_owned(),
                Some(Err(status)) => return format!("its stream broke: {}", status.message()),
            };
            let connection = self.connection;
            let event = match convert::incoming(connection, wire) {
                Ok(Incoming::Event(event)) => event,
                Ok(Incoming::Heartbeat { sent_ns }) => {
                    self.echo.store(sent_ns, Ordering::Relaxed);
                    Event::Heard { connection }
                }
                Err(error) => Event::Nonsense { connection, what: error.to_string() },
            };
            let _ = self.gate.inbox.send(Inbound::Event(event)).await;
        }
    }
}
