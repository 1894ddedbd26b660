//! A node without data: a daemon's stream to the coordinator with all its messages. Received
//! operations are done at once.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use gradwire_launcher::error::CommandError;
use gradwire_proto::{
    Failure, MAX_CONTROL_MESSAGE, PROTOCOL, Secret, VERSION,
    auth::{self, Claim},
    pb::{self, coordinator_message::Message as Received, node_message::Message as ToCoordinator},
};
use gradwire_services::coordinator_client::CoordinatorClient;
use tokio::{
    sync::{Barrier, mpsc},
    time::{Instant, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::{
    meter::{self, Traffic, Wire},
    step::{Negotiated, Tensors},
};

/// The time limit for a message that is due (WAIT).
const PATIENCE: Duration = Duration::from_secs(60);

/// The most messages in flight to the coordinator.
const QUEUE: usize = 64;

/// The sending end of a node's messages, and how many messages the node has received.
pub type Sender = (mpsc::Sender<pb::NodeMessage>, Arc<AtomicU64>);

/// The common data of all nodes of a job.
#[derive(Debug)]
pub struct Job {
    /// Its id.
    pub id: String,
    /// The secret of the job.
    pub secret: Secret,
    /// The address of the coordinator.
    pub coordinator: SocketAddr,
    /// The tensors of a step.
    pub tensors: Arc<Tensors>,
    /// The number of messages that announce them.
    pub ready: u32,
    /// Whether each operation's end has its own message.
    pub done_each: bool,
}

/// The times of a step at a node.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    /// Just before the node's first message.
    pub begin: Instant,
    /// When the node had received the last of its operations.
    pub end: Instant,
}

/// One node, with one rank.
#[derive(Debug)]
pub struct Node {
    job: Arc<Job>,
    order: u32,
    to: mpsc::Sender<pb::NodeMessage>,
    /// How many messages it has received, which heartbeats tell the coordinator.
    count: Arc<AtomicU64>,
    from: Streaming<pb::CoordinatorMessage>,
    nonce: Vec<u8>,
    wire: Arc<Wire>,
    /// The bytes on the socket when counting began.
    carried: [u64; 2],
    sent: Traffic,
    received: Traffic,
    operations: u64,
    negotiated: Negotiated,
}

/// The traffic of nodes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counts {
    /// Sent to the coordinator.
    pub sent: Traffic,
    /// Received from the coordinator.
    pub received: Traffic,
    /// The number of operations received.
    pub operations: u64,
}

impl Node {
    /// Connects, and joins as the node with this position in the order.
    ///
    /// # Errors
    /// [`CommandError`] with the coordinator's error.
    pub async fn join(job: Arc<Job>, order: u32) -> Result<Self, CommandError> {
        let wire = Arc::new(Wire::default());
        let wrong = |what: String| CommandError::failed(format!("node {order} can't join: {what}"));
        let channel = meter::connect(job.coordinator, &wire).await;
        let channel = channel.map_err(|error| {
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            wrong(cause.unwrap_or_else(|| error.to_string()))
        })?;
        let mut client = CoordinatorClient::new(channel)
            .max_decoding_message_size(MAX_CONTROL_MESSAGE)
            .max_encoding_message_size(MAX_CONTROL_MESSAGE);
        let (to, messages) = mpsc::channel(QUEUE);
        let answer = client.session(ReceiverStream::new(messages)).await;
        let from = answer.map_err(|status| wrong(status.message().to_owned()))?.into_inner();
        let negotiated = Negotiated::new(Arc::clone(&job.tensors), order);
        let mut node = Self {
            job,
            order,
            to,
            count: Arc::default(),
            from,
            nonce: auth::nonce().to_vec(),
            wire,
            carried: [0; 2],
            sent: Traffic::default(),
            received: Traffic::default(),
            operations: 0,
            negotiated,
        };
        let Received::Challenge(challenge) = node.receive().await? else {
            return Err(wrong("the first message is not a challenge".to_owned()));
        };
        let join = node.introduction(&challenge.nonce);
        node.say(ToCoordinator::Join(join)).await;
        Ok(node)
    }

    fn introduction(&self, challenge: &[u8]) -> pb::Join {
        let Job { id, secret, .. } = &*self.job;
        let order = self.order;
        let host = format!("node{order}");
        // No daemon connects to this address, but each node needs its own.
        let [.., high, low] = order.to_be_bytes();
        let data_address = format!("127.1.{high}.{low}:1");
        let nonce = &self.nonce[..];
        let proof = secret.prove(&Claim::Join {
            challenge,
            nonce,
            job: id,
            host: &host,
            data_address: &data_address,
            slots: 1,
            order,
            rack: "",
            line_mbit: 0,
            epoch: 0,
            attempt: 0,
            received: 0,
            metrics_address: "",
        });
        pb::Join {
            protocol: PROTOCOL,
            version: VERSION.to_owned(),
            job: id.clone(),
            host,
            data_address,
            slots: 1,
            order,
            rack: String::new(),
            line_mbit: 0,
            epoch: 0,
            attempt: 0,
            received: 0,
            metrics_address: String::new(),
            nonce: self.nonce.clone(),
            proof: proof.to_vec(),
        }
    }

    /// Waits until all nodes have joined. Returns the interval between heartbeats.
    ///
    /// # Errors
    /// [`CommandError`] if the coordinator refuses, or does not know the secret.
    pub async fn welcome(&mut self) -> Result<Duration, CommandError> {
        let Received::World(world) = self.receive().await? else {
            return Err(self.wrong("the coordinator did not describe the world"));
        };
        let claim = Claim::World { nonce: &self.nonce, job: &self.job.id, epoch: world.epoch };
        if !self.job.secret.verify(&claim, &world.proof) {
            return Err(self.wrong("the coordinator does not know the job's secret"));
        }
        Ok(Duration::from_millis(world.heartbeat_interval_ms.max(1)))
    }

    /// The sender for heartbeats.
    pub fn sender(&self) -> Sender {
        (self.to.clone(), Arc::clone(&self.count))
    }

    /// Performs some steps, together with all other nodes.
    ///
    /// # Errors
    /// [`CommandError`] with the failure.
    pub async fn steps(
        mut self,
        count: u32,
        together: Arc<Barrier>,
    ) -> Result<(Self, Vec<Span>), CommandError> {
        let mut spans = Vec::with_capacity(count as usize);
        for _ in 0..count {
            // A daemon does this while its ranks submit, so it is not timed. Here it would take
            // long, with few processors for all nodes.
            let announced = self.negotiated.begin(self.job.ready);
            together.wait().await;
            spans.push(self.step(announced).await?);
        }
        Ok((self, spans))
    }

    async fn step(&mut self, announced: Vec<pb::Ready>) -> Result<Span, CommandError> {
        let begin = Instant::now();
        for ready in announced {
            self.say(ToCoordinator::Ready(ready)).await;
        }
        let mut end = begin;
        while !self.negotiated.is_done() {
            let Received::Execute(execute) = self.receive().await? else {
                return Err(self.wrong("the coordinator sent something other than operations"));
            };
            end = Instant::now();
            let done = self.negotiated.execute(&execute).map_err(|what| self.wrong(&what))?;
            if !execute.evicted.is_empty() {
                self.say(ToCoordinator::Forgotten(pb::Forgotten { ids: execute.evicted })).await;
            }
            self.operations += done.len() as u64;
            let at_once = if self.job.done_each { 1 } else { done.len().max(1) };
            for sequences in done.chunks(at_once) {
                self.say(ToCoordinator::Done(pb::Done { sequences: sequences.to_vec() })).await;
            }
        }
        Ok(Span { begin, end })
    }

    /// Leaves the job, and waits until it is over.
    ///
    /// # Errors
    /// [`CommandError`] if the job does not end properly.
    pub async fn leave(mut self) -> Result<(), CommandError> {
        self.say(ToCoordinator::Leave(pb::Leave { ranks: vec![self.order], absent: false })).await;
        match self.receive().await? {
            Received::Shutdown(_) => Ok(()),
            _ => Err(self.wrong("the coordinator continues after all nodes have left")),
        }
    }

    /// The traffic since the last call.
    pub fn counted(&mut self) -> Counts {
        let wire = self.wire.bytes();
        let [out, into] = [0, 1].map(|i| wire[i].saturating_sub(self.carried[i]) as f64);
        self.carried = wire;
        let (sent, received) = (std::mem::take(&mut self.sent), std::mem::take(&mut self.received));
        Counts {
            sent: Traffic { wire_bytes: out, ..sent },
            received: Traffic { wire_bytes: into, ..received },
            operations: std::mem::take(&mut self.operations),
        }
    }

    /// Sends a message. If the stream has ended, the message is lost, and the next read returns the
    /// reason.
    async fn say(&mut self, message: ToCoordinator) {
        let message = pb::NodeMessage { message: Some(message) };
        self.sent.count(&message);
        let _ = self.to.send(message).await;
    }

    /// The next message that is not a heartbeat.
    async fn receive(&mut self) -> Result<Received, CommandError> {
        loop {
            let Ok(message) = timeout(PATIENCE, self.from.message()).await else {
                let waits = self.negotiated.waits_for();
                let limit = PATIENCE.as_secs();
                return Err(
                    self.wrong(&format!("no message for {limit} s while waiting for {waits}"))
                );
            };
            let message = message.map_err(|status| self.wrong(status.message()))?;
            let message = message.ok_or_else(|| self.wrong("the coordinator closed the stream"))?;
            if !matches!(message.message, Some(Received::Challenge(_))) {
                self.count.fetch_add(1, Relaxed);
            }
            match &message.message {
                // Simulated nodes have no ranks that could be asked or told.
                Some(Received::Heartbeat(_) | Received::Explain(_) | Received::Stalled(_))
                | None => {}
                Some(Received::Abort(abort)) => {
                    let failure = abort.failure.clone().map(Failure::from);
                    let why = failure.map_or_else(String::new, |failure| failure.to_string());
                    return Err(self.wrong(&format!("the coordinator ended the job: {why}")));
                }
                Some(_) => {
                    self.received.count(&message);
                    if let Some(received) = message.message {
                        return Ok(received);
                    }
                }
            }
        }
    }

    fn wrong(&self, what: &str) -> CommandError {
        CommandError::failed(format!("node {}: {what}", self.order))
    }
}

/// The interval of reports.
const REPORTS: Duration = Duration::from_secs(1);

/// The most peers in a report.
const PEERS: u32 = 24;

/// A synthetic report, as large as that of a real node with one rank. The traffic is with the next
/// nodes, and grows with the number of the node.
fn report(node: u32, nodes: u32, uptime: Duration) -> pb::Report {
    const LINE: u64 = 3_125_000_000;
    let peers: Vec<u32> = (1..nodes.min(PEERS + 1)).map(|next| (node + next) % nodes).collect();
    let full = (node + 1) as f32 / nodes as f32;
    let sent: Vec<f32> =
        (1..).zip(&peers).map(|(next, _)| full * LINE as f32 / (2 * next) as f32).collect();
    pb::Report {
        rank_steps: vec![u32::try_from(uptime.as_millis() / 250).unwrap_or(u32::MAX)],
        rank_step_seconds: vec![0.25],
        rank_exposed: vec![1.0 - full],
        rank_since_step_seconds: vec![0.1],
        received_bytes_per_second: sent.iter().map(|_| 0.0).collect(),
        sent_bytes_per_second: sent,
        peers,
        line_bytes_per_second: LINE,
        resident_bytes: 64 << 20,
        shared_bytes: 256 << 20,
        pieces_in_flight: 8,
        queued_tensors: 16,
        rank_blocked: vec![((1.0 - full) * 255.0) as u8, 0, 0, 0],
        operations_per_second: 100.0,
        ..pb::Report::default()
    }
}

/// Sends the heartbeats and reports of all nodes, until it is dropped.
pub async fn beat(nodes: Vec<Sender>, every: Duration) {
    let begin = Instant::now();
    let mut ticks = tokio::time::interval(every);
    let mut reported = None;
    let count = u32::try_from(nodes.len()).unwrap_or(u32::MAX);
    loop {
        ticks.tick().await;
        let uptime = begin.elapsed();
        let sent_ns = u64::try_from(uptime.as_nanos()).unwrap_or(u64::MAX);
        let reports = reported.is_none_or(|last| uptime >= last + REPORTS);
        if reports {
            reported = Some(uptime);
        }
        for (number, (node, received)) in (0..).zip(&nodes) {
            // The coordinator measures round trips with the echo, which is not needed here.
            let heartbeat = ToCoordinator::Heartbeat(pb::Heartbeat {
                sent_ns,
                report: reports.then(|| report(number, count, uptime)),
                received: received.load(Relaxed),
                ..pb::Heartbeat::default()
            });
            // A full queue shows that the node is alive, without a heartbeat.
            let _ = node.try_send(pb::NodeMessage { message: Some(heartbeat) });
        }
    }
}
