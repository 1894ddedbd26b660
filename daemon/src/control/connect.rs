//! Opens the stream to the coordinator: the first one, or another one after that broke.

use std::{
    net::SocketAddr,
    pin::Pin,
    time::{Duration, Instant},
};

use gradwire_coordinator::{Outbox, OutboxStream, SessionAcceptor};
use gradwire_proto::{
    Endpoints, Failure, FailureKind, JobId, PROTOCOL, Secret, VERSION,
    auth::{self, Claim},
    pb,
};
use gradwire_services::{broadcast::Broadcast, session_client, shared::Shared};
use tokio::time::{sleep, timeout, timeout_at};
use tokio_stream::{Stream, StreamExt};
use tonic::{Code, Status, transport::Channel};

use super::dial::{ATTEMPT, DialDeadline, connect, dial};

/// As [`ATTEMPT`], for the first attempt at another stream. It is shorter, because the line may
/// work again at any time, and the kernel waits longer before each retransmission of a lost packet.
/// The limit then doubles each time, for long lines.
const RETURN_ATTEMPT: Duration = Duration::from_secs(1);

/// How many connections may break before the coordinator's first message. More are not by chance:
/// something else listens there.
const MAX_RESETS: u32 = 10;

/// A node's description of itself when it joins.
#[derive(Debug, Clone)]
pub(crate) struct Introduction {
    pub(crate) job: JobId,
    pub(crate) secret: Secret,
    pub(crate) coordinator: SocketAddr,
    /// Accepts the session of this node, if the coordinator runs in this process.
    pub(crate) acceptor: Option<SessionAcceptor>,
    pub(crate) host: String,
    pub(crate) data_addresses: Endpoints,
    pub(crate) metrics_address: Option<SocketAddr>,
    pub(crate) slots: u32,
    pub(crate) order: u32,
    /// The epoch of an elastic job; otherwise 0.
    pub(crate) epoch: u64,
    pub(crate) rack: String,
    /// The rate of its line in Mbit/s; 0 if unknown.
    pub(crate) line_mbit: u32,
    pub(crate) start_timeout: Duration,
    /// How long an earlier job may still have the coordinator's address.
    pub(crate) patience: Duration,
    /// The longest interval between retransmissions.
    pub(crate) retransmission: Duration,
    /// How long the node may be without a stream, if that may happen at all.
    pub(crate) recovery: Option<Duration>,
}

impl Introduction {
    /// How long the node may be without a stream; `None` if it can't get another one.
    pub(super) fn may_return(&self) -> Option<Duration> {
        self.recovery.filter(|_| self.acceptor.is_none())
    }

    /// Joins on stream number `attempt`, after N messages were `received` on earlier ones. The data
    /// plane may listen on other `addresses` than at first.
    pub(super) fn join(
        &self,
        challenge: &[u8],
        (attempt, received): (u32, u64),
        addresses: Option<&Endpoints>,
    ) -> pb::Join {
        let nonce = auth::nonce();
        let data_address = addresses.unwrap_or(&self.data_addresses).to_string();
        let metrics_address = self.metrics_address.map_or_else(String::new, |at| at.to_string());
        let claim = Claim::Join {
            challenge,
            nonce: &nonce,
            job: self.job.as_str(),
            host: &self.host,
            data_address: &data_address,
            slots: self.slots,
            order: self.order,
            rack: &self.rack,
            metrics_address: &metrics_address,
            line_mbit: self.line_mbit,
            epoch: self.epoch,
            attempt,
            received,
        };
        let proof = self.secret.prove(&claim).to_vec();
        pb::Join {
            protocol: PROTOCOL,
            version: VERSION.into(),
            job: self.job.to_string(),
            host: self.host.clone(),
            data_address,
            metrics_address,
            slots: self.slots,
            order: self.order,
            rack: self.rack.clone(),
            line_mbit: self.line_mbit,
            epoch: self.epoch,
            attempt,
            received,
            nonce: nonce.to_vec(),
            proof,
        }
    }

    pub(super) fn verify(&self, nonce: &[u8], world: &pb::World) -> bool {
        let claim = Claim::World { nonce, job: self.job.as_str(), epoch: world.epoch };
        self.secret.verify(&claim, &world.proof)
    }

    /// Whether the coordinator knows the secret, which answers for this epoch.
    pub(super) fn verify_resumed(&self, nonce: &[u8], resumed: &pb::Resumed) -> bool {
        // Without a number, there is only the first epoch.
        let (job, epoch) = (self.job.as_str(), self.epoch.max(1));
        let claim = Claim::Resumed { nonce, job, epoch, received: resumed.received };
        self.secret.verify(&claim, &resumed.proof)
    }
}

pub(super) fn lost(what: impl Into<String>) -> Failure {
    Failure::new(FailureKind::CoordinatorLost, what)
        .hint("it runs in the first host's gradwired, whose log says why it ended")
}

/// The system of the coordinator's host accepts a connection, also for a process that is stopped.
fn silent(coordinator: SocketAddr) -> Failure {
    let what = format!("the coordinator at {coordinator} accepts connections, but says nothing");
    Failure::new(FailureKind::CoordinatorLost, what).hint(
        "the first host's gradwired is stopped, that host is overloaded, or another program \
             uses the port",
    )
}

/// Whether the connection broke; otherwise the coordinator has refused.
pub(super) fn is_broken(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Internal | Code::Cancelled)
}

/// Whether the coordinator has refused because it serves another job.
pub(super) fn is_of_another_job(status: &Status) -> bool {
    status.code() == Code::Aborted
}

/// The failure for a refusal by the coordinator or the end of the stream.
pub(super) fn from_status(status: &Status, coordinator: SocketAddr) -> Failure {
    match status.code() {
        Code::Unauthenticated
        | Code::FailedPrecondition
        | Code::InvalidArgument
        | Code::AlreadyExists
        | Code::Aborted
        | Code::ResourceExhausted
        | Code::DeadlineExceeded => {
            let what = format!("the coordinator at {coordinator} refused: {}", status.message());
            Failure::new(FailureKind::Invalid, what)
        }
        // Each node may see a different error, but the cause is the same (TELL).
        _ if is_broken(status) => {
            // The reasons inside are those of libraries.
            tracing::warn!(code = ?status.code(), "the stream to the coordinator broke");
            tracing::debug!(%status, "the error of the stream");
            lost(format!("the coordinator at {coordinator} went away"))
        }
        _ => lost(format!("the coordinator at {coordinator} went away ({})", status.message())),
    }
}

/// The coordinator's messages, from this process or over gRPC.
pub(super) type Messages =
    Pin<Box<dyn Stream<Item = Result<pb::CoordinatorMessage, Status>> + Send>>;

/// This node's messages.
pub(super) type ToCoordinator = Outbox<pb::NodeMessage>;

/// The coordinator to which the stream is opened.
enum Coordinator {
    /// In this process.
    Here(SessionAcceptor),
    /// On another host.
    There(Channel),
}

impl Coordinator {
    async fn session(
        &mut self,
        messages: OutboxStream<pb::NodeMessage>,
    ) -> Result<Messages, Status> {
        Ok(match self {
            Self::Here(acceptor) => {
                let messages = messages.map(|message| message.map(Shared::into_message));
                let shared = acceptor.accept(messages)?;
                Box::pin(shared.map(|message| message.map(Broadcast::into_message)))
            }
            Self::There(channel) => {
                // A node never ends its stream with a status.
                let messages = messages.map_while(Result::ok);
                Box::pin(session_client::open(channel.clone(), messages).await?)
            }
        })
    }

    /// Opens a stream, and waits for its first message.
    async fn begin(&mut self, remembers: bool) -> Result<(ToCoordinator, Messages), Status> {
        let (outbox, messages) = Outbox::new(remembers);
        let mut messages = self.session(messages).await?;
        let first = messages.next().await;
        let first = first.unwrap_or_else(|| Err(Status::unavailable("it closed the stream")))?;
        Ok((outbox, Box::pin(tokio_stream::once(Ok(first)).chain(messages))))
    }
}

/// Opens the stream, and waits for its first message. A coordinator that is busy with other joining
/// nodes refuses for a moment; then this retries. It also retries if the connection is reset before
/// the coordinator has said anything: it accepts connections before it is ready, and something
/// between the hosts may reset the first one.
pub(super) async fn open(
    introduction: &Introduction,
) -> Result<(ToCoordinator, Messages), Failure> {
    let mut attempts = DialDeadline::new(introduction.start_timeout);
    let (mut coordinator, mut resets) = (None, 0);
    loop {
        let mut there = match (coordinator.take(), &introduction.acceptor) {
            (Some(there), _) => there,
            (None, Some(acceptor)) => Coordinator::Here(acceptor.clone()),
            (None, None) => {
                let Introduction { coordinator, host, retransmission, .. } = introduction;
                let dialled = connect(*coordinator, host, *retransmission, &mut attempts);
                Coordinator::There(dialled.await?)
            }
        };
        attempts.has_answered = true;
        let first = there.begin(introduction.may_return().is_some());
        let status = match timeout_at(attempts.deadline().into(), first).await {
            Ok(Ok(opened)) => return Ok(opened),
            Ok(Err(status)) => status,
            Err(_) => return Err(silent(introduction.coordinator)),
        };
        let is_busy = status.code() == Code::ResourceExhausted;
        let is_reset = is_broken(&status) && introduction.acceptor.is_none();
        resets += u32::from(is_reset);
        if !(is_busy || is_reset && resets <= MAX_RESETS) || Instant::now() >= attempts.deadline() {
            return Err(from_status(&status, introduction.coordinator));
        }
        tracing::debug!(%status, "the stream to the coordinator can't be opened yet");
        // After a reset, a new connection is needed.
        coordinator = is_busy.then_some(there);
        // Not all nodes retry at the same moment.
        let spread = u64::from(introduction.order % 16) * 10;
        sleep(Duration::from_millis(100 + spread)).await;
    }
}

/// Opens another stream after one that broke, and waits for its first message. Tries `until` then,
/// whatever the error is.
///
/// # Errors
/// The last error.
pub(super) async fn reopen(
    introduction: &Introduction,
    until: Instant,
) -> Result<(ToCoordinator, Messages), String> {
    let mut limit = RETURN_ATTEMPT;
    loop {
        let attempt = async {
            let dialled = dial(introduction.coordinator, introduction.retransmission).await;
            let mut there = Coordinator::There(dialled.map_err(|(_, cause)| cause)?);
            there.begin(true).await.map_err(|status| status.message().to_owned())
        };
        let left = until.saturating_duration_since(Instant::now());
        let cause = match timeout(left.min(limit), attempt).await {
            Ok(Ok(opened)) => return Ok(opened),
            Ok(Err(cause)) => cause,
            Err(_) => {
                limit = (2 * limit).min(ATTEMPT);
                "no answer".to_owned()
            }
        };
        if Instant::now() >= until {
            return Err(cause);
        }
        tracing::debug!(cause, "the stream to the coordinator can't be opened again yet");
        sleep(Duration::from_millis(50)).await;
    }
}

#[cfg(test)]
mod tests {
    use gradwire_coordinator::{Coordinator as Served, CoordinatorConfig};
    use gradwire_settings::Settings;
    use tokio::{
        net::{TcpListener, TcpStream},
        sync::mpsc,
    };
    use tokio_stream::wrappers::ReceiverStream;
    use tokio_util::sync::CancellationToken;

    use super::*;

    fn introduction(
        job: JobId,
        secret: Secret,
        coordinator: SocketAddr,
        acceptor: Option<SessionAcceptor>,
    ) -> Introduction {
        Introduction {
            job,
            secret,
            coordinator,
            acceptor,
            host: "a".to_owned(),
            data_addresses: coordinator.into(),
            metrics_address: None,
            slots: 1,
            order: 0,
            epoch: 0,
            rack: String::new(),
            line_mbit: 0,
            start_timeout: Duration::from_secs(60),
            patience: Duration::ZERO,
            retransmission: Duration::from_secs(1),
            recovery: None,
        }
    }

    /// Connections of strangers can briefly keep out any daemon, even that of the coordinator's
    /// host.
    #[tokio::test]
    async fn a_daemon_beside_the_coordinator_retries() {
        let (job, secret) = (JobId::new("job").unwrap(), Secret::generate());
        let config =
            CoordinatorConfig::new(job.clone(), secret.clone(), (1, 0), &Settings::default());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let coordinator = listener.local_addr().unwrap();
        let served = Served::new(config.unwrap(), listener).unwrap();
        let acceptor = served.acceptor();
        let mut strangers = Vec::new();
        let mut come = || {
            let (sender, messages) = mpsc::channel(1);
            strangers.push(sender);
            acceptor.accept(ReceiverStream::new(messages)).is_ok()
        };
        while come() {}
        let introduction = introduction(job, secret, coordinator, Some(acceptor.clone()));
        let (opened, ()) = tokio::join!(open(&introduction), async {
            sleep(Duration::from_millis(50)).await;
            drop(strangers);
        });
        assert!(opened.is_ok(), "{:?}", opened.err());
    }

    /// A firewall or a proxy may accept a connection and reset it at once.
    #[tokio::test]
    async fn a_reset_connection_is_made_again() {
        let (job, secret) = (JobId::new("job").unwrap(), Secret::generate());
        let config =
            CoordinatorConfig::new(job.clone(), secret.clone(), (1, 0), &Settings::default());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let behind = listener.local_addr().unwrap();
        let served = Served::new(config.unwrap(), listener).unwrap();
        let served = tokio::spawn(served.run(CancellationToken::new()));
        let proxy = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let coordinator = proxy.local_addr().unwrap();
        let introduction = introduction(job, secret, coordinator, None);
        let forward = async {
            for number in 0.. {
                let (mut from, _) = proxy.accept().await.unwrap();
                if number < 3 {
                    // With unread bytes, this is a reset and not a normal end.
                    from.readable().await.unwrap();
                    continue;
                }
                tokio::spawn(async move {
                    let mut to = TcpStream::connect(behind).await.unwrap();
                    let _ = tokio::io::copy_bidirectional(&mut from, &mut to).await;
                });
            }
        };
        tokio::select! {
            opened = open(&introduction) => assert!(opened.is_ok(), "{:?}", opened.err()),
            () = forward => {}
        }
        // A listener that always resets is not a coordinator.
        let always = async {
            loop {
                let (from, _) = proxy.accept().await.unwrap();
                from.readable().await.unwrap();
            }
        };
        let failure = tokio::select! {
            opened = open(&introduction) => opened.err().unwrap(),
            () = always => unreachable!(),
        };
        assert!(failure.what.contains("went away"), "{failure}");
        served.abort();
    }
}
