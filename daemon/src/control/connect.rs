//! Connects to the coordinator. The daemon dials until the coordinator answers, or until it is
//! clear that it will not.

use std::{
    io::{self, ErrorKind},
    net::SocketAddr,
    pin::Pin,
    time::{Duration, Instant},
};

use gradwire_coordinator::SessionAcceptor;
use gradwire_proto::{
    Failure, FailureKind, JobId, MAX_CONTROL_MESSAGE, NODE_PREFACE, PROTOCOL, Secret, VERSION,
    auth::{self, Claim},
    pb,
};
use gradwire_services::{broadcast::Broadcast, coordinator_client::CoordinatorClient};
use hyper_util::rt::TokioIo;
use tokio::{
    io::AsyncWriteExt as _,
    net::TcpStream,
    sync::mpsc,
    time::{sleep, timeout, timeout_at},
};
use tokio_stream::{Stream, StreamExt, wrappers::ReceiverStream};
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint},
};
use tower::service_fn;

/// How many messages may wait for the coordinator.
const QUEUE: usize = 64;

/// How long one attempt may take: longer than the system takes to report an unknown host.
const ATTEMPT: Duration = Duration::from_secs(5);

/// How many connections may break before the coordinator's first message. More are not by chance:
/// something else listens there.
const MAX_RESETS: u32 = 10;

/// Without any answer, the daemon gives up after this part of the start timeout.
const SILENT_FRACTION: u32 = 3;

/// A node's description of itself when it joins.
#[derive(Debug, Clone)]
pub(crate) struct Introduction {
    pub(crate) job: JobId,
    pub(crate) secret: Secret,
    pub(crate) coordinator: SocketAddr,
    /// Accepts the session of this node, if the coordinator runs in this process.
    pub(crate) acceptor: Option<SessionAcceptor>,
    pub(crate) host: String,
    pub(crate) data_address: SocketAddr,
    pub(crate) metrics_address: Option<SocketAddr>,
    pub(crate) slots: u32,
    pub(crate) order: u32,
    /// The epoch of an elastic job; otherwise 0.
    pub(crate) epoch: u64,
    pub(crate) rack: String,
    /// The rate of its line in Mbit/s; 0 if unknown.
    pub(crate) line_mbit: u32,
    pub(crate) start_timeout: Duration,
    /// The longest interval between retransmissions.
    pub(crate) retransmission: Duration,
}

impl Introduction {
    pub(super) fn join(&self, challenge: &[u8]) -> pb::Join {
        let nonce = auth::nonce();
        let data_address = self.data_address.to_string();
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
            nonce: nonce.to_vec(),
            proof,
        }
    }

    pub(super) fn verify(&self, nonce: &[u8], world: &pb::World) -> bool {
        let claim = Claim::World { nonce, job: self.job.as_str(), epoch: world.epoch };
        self.secret.verify(&claim, &world.proof)
    }
}

/// When to give up. A daemon may start before the coordinator; then connections are refused, or the
/// host is reported as unknown. This node gives up before the coordinator stops waiting for it,
/// because this node knows the cause. If nothing ever answers, packets are being dropped, and
/// waiting longer does not help.
#[derive(Debug)]
struct DialDeadline {
    began: Instant,
    start_timeout: Duration,
    has_answered: bool,
}

impl DialDeadline {
    fn new(start_timeout: Duration) -> Self {
        Self { began: Instant::now(), start_timeout, has_answered: false }
    }

    fn deadline(&self) -> Instant {
        let limit = self.start_timeout;
        self.began + if self.has_answered { limit * 4 / 5 } else { limit / SILENT_FRACTION }
    }
}

pub(super) fn lost(what: impl Into<String>) -> Failure {
    Failure::new(FailureKind::CoordinatorLost, what)
        .hint("it runs in the first host's gradwired, whose log says why it ended")
}

/// Whether the connection broke, and not the coordinator refused.
fn is_broken(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Internal | Code::Cancelled)
}

/// The failure for a refusal by the coordinator or the end of the stream.
pub(super) fn from_status(status: &Status, coordinator: SocketAddr) -> Failure {
    match status.code() {
        Code::Unauthenticated
        | Code::FailedPrecondition
        | Code::InvalidArgument
        | Code::AlreadyExists
        | Code::ResourceExhausted
        | Code::DeadlineExceeded => {
            let what = format!("the coordinator at {coordinator} refused: {}", status.message());
            Failure::new(FailureKind::Invalid, what)
        }
        // Each node may see a different error, but the cause is the same (TELL).
        _ if is_broken(status) => {
            tracing::warn!(%status, "the stream to the coordinator broke");
            lost(format!("the coordinator at {coordinator} went away"))
        }
        _ => lost(format!("the coordinator at {coordinator} went away ({})", status.message())),
    }
}

/// The coordinator's messages, from this process or over gRPC.
pub(super) type Messages =
    Pin<Box<dyn Stream<Item = Result<pb::CoordinatorMessage, Status>> + Send>>;

/// The coordinator to which the stream is opened.
enum Coordinator {
    /// In this process.
    Here(SessionAcceptor),
    /// On another host.
    There(CoordinatorClient<Channel>),
}

impl Coordinator {
    async fn session(
        &mut self,
        messages: ReceiverStream<pb::NodeMessage>,
    ) -> Result<Messages, Status> {
        Ok(match self {
            Self::Here(acceptor) => {
                let shared = acceptor.accept(messages.map(Ok))?;
                Box::pin(shared.map(|message| message.map(Broadcast::into_message)))
            }
            Self::There(client) => Box::pin(client.session(messages).await?.into_inner()),
        })
    }
}

/// Opens the stream, and waits for its first message. A coordinator that is busy with other joining
/// nodes refuses for a moment; then this retries. It also retries if the connection is reset before
/// the coordinator has said anything: it accepts connections before it is ready, and something
/// between the hosts may reset the first one.
pub(super) async fn open(
    introduction: &Introduction,
) -> Result<(mpsc::Sender<pb::NodeMessage>, Messages), Failure> {
    let mut attempts = DialDeadline::new(introduction.start_timeout);
    let (mut coordinator, mut resets) = (None, 0);
    loop {
        let mut there = match (coordinator.take(), &introduction.acceptor) {
            (Some(there), _) => there,
            (None, Some(acceptor)) => Coordinator::Here(acceptor.clone()),
            (None, None) => Coordinator::There(connect(introduction, &mut attempts).await?),
        };
        let (sender, receiver) = mpsc::channel(QUEUE);
        attempts.has_answered = true;
        let first = async {
            let mut messages = there.session(ReceiverStream::new(receiver)).await?;
            let first = messages.next().await;
            let first =
                first.unwrap_or_else(|| Err(Status::unavailable("it closed the stream")))?;
            Ok::<_, Status>((first, messages))
        };
        let silent = |_| Err(Status::deadline_exceeded("it accepts connections, but says nothing"));
        let status =
            match timeout_at(attempts.deadline().into(), first).await.unwrap_or_else(silent) {
                Ok((first, messages)) => {
                    let first = tokio_stream::once(Ok(first));
                    return Ok((sender, Box::pin(first.chain(messages))));
                }
                Err(status) => status,
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

/// Connects to the coordinator.
///
/// # Errors
/// A [`Failure`] that says what was tried, after most of the start timeout, or earlier if nothing
/// has answered.
async fn connect(
    introduction: &Introduction,
    attempts: &mut DialDeadline,
) -> Result<CoordinatorClient<Channel>, Failure> {
    let Introduction { coordinator: address, host, .. } = introduction;
    loop {
        let left = attempts.deadline().saturating_duration_since(Instant::now());
        let attempt = timeout(left.min(ATTEMPT), dial(*address, introduction.retransmission));
        let (answer, cause) = match attempt.await {
            Ok(Ok(client)) => return Ok(client),
            Ok(Err(last)) => {
                attempts.has_answered = true;
                last
            }
            Err(_) => (Answer::Nothing, "no answer".to_owned()),
        };
        if Instant::now() >= attempts.deadline() {
            let seconds = attempts.began.elapsed().as_secs_f64();
            let what = format!(
                "the coordinator at {address} can't be reached from {host} ({cause}, tried for \
                 {seconds:.0} s)"
            );
            let failure = Failure::new(FailureKind::CoordinatorLost, what);
            return Err(failure.host(host).hint(answer.hint()));
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// The answer to a dialled connection. Firewalls give all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Nothing,
    Refused,
    NoRoute,
    Other,
}

impl Answer {
    fn of(error: &io::Error) -> Self {
        match error.kind() {
            ErrorKind::ConnectionRefused => Self::Refused,
            // Firewalls answer with all of them.
            ErrorKind::HostUnreachable
            | ErrorKind::NetworkUnreachable
            | ErrorKind::PermissionDenied => Self::NoRoute,
            ErrorKind::TimedOut => Self::Nothing,
            _ => Self::Other,
        }
    }

    fn hint(self) -> &'static str {
        match self {
            Self::Nothing => {
                "a firewall drops packets to that port, or GRADWIRE_COORDINATOR has a wrong \
                 address: let TCP through between the hosts, or set coordinator.listen to a port \
                 that is open"
            }
            Self::Refused => {
                "that host is there, but nothing listens on that port, or a firewall refuses it: \
                 is the first daemon running, and does GRADWIRE_COORDINATOR name its address?"
            }
            Self::NoRoute => {
                "a firewall rejects the connection, or there is no route: let TCP through between \
                 the hosts, or give -H addresses by which the hosts reach each other"
            }
            Self::Other => "is it running, and does GRADWIRE_COORDINATOR name its address?",
        }
    }
}

async fn dial(
    address: SocketAddr,
    retransmission: Duration,
) -> Result<CoordinatorClient<Channel>, (Answer, String)> {
    let failed = |error: io::Error| (Answer::of(&error), error.to_string());
    let mut stream = TcpStream::connect(address).await.map_err(failed)?;
    stream.set_nodelay(true).map_err(failed)?;
    stream.write_all(NODE_PREFACE).await.map_err(failed)?;
    // After an outage the stream must continue before the timeout.
    if let Err(error) = gradwire_net::limit_retransmission_interval(&stream, retransmission) {
        tracing::debug!(%error, "the system chooses the retransmission interval");
    }
    let other = |cause: String| (Answer::Other, cause);
    let endpoint =
        Endpoint::from_shared(format!("http://{address}")).map_err(|e| other(e.to_string()))?;
    let mut stream = Some(TokioIo::new(stream));
    let once = service_fn(move |_| {
        let stream = stream.take().ok_or(std::io::ErrorKind::NotConnected);
        async { stream.map_err(std::io::Error::from) }
    });
    let channel = endpoint
        .http2_keep_alive_interval(Duration::from_secs(5))
        .keep_alive_timeout(Duration::from_secs(5))
        .connect_with_connector(once)
        .await
        .map_err(|error| {
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            other(cause.unwrap_or_else(|| error.to_string()))
        })?;
    Ok(CoordinatorClient::new(channel)
        .max_decoding_message_size(MAX_CONTROL_MESSAGE)
        .max_encoding_message_size(MAX_CONTROL_MESSAGE))
}

#[cfg(test)]
mod tests {
    use gradwire_coordinator::{Coordinator as Served, CoordinatorConfig};
    use gradwire_settings::Settings;
    use rustix::io::Errno;
    use tokio::net::TcpListener;
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
            data_address: coordinator,
            metrics_address: None,
            slots: 1,
            order: 0,
            epoch: 0,
            rack: String::new(),
            line_mbit: 0,
            start_timeout: Duration::from_secs(60),
            retransmission: Duration::from_secs(1),
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

    #[test]
    fn each_answer_of_a_firewall_has_its_hint() {
        let hint = |errno: Errno| Answer::of(&errno.into()).hint();
        assert!(hint(Errno::CONNREFUSED).contains("nothing listens"));
        for errno in [Errno::HOSTUNREACH, Errno::NETUNREACH, Errno::ACCESS] {
            assert!(hint(errno).contains("rejects the connection"), "{errno}");
        }
        assert!(hint(Errno::TIMEDOUT).contains("drops packets"));
        assert!(hint(Errno::CONNRESET).contains("is it running"));
    }

    #[test]
    fn a_silent_coordinator_is_given_up_sooner() {
        let began = Instant::now();
        let mut attempts =
            DialDeadline { began, start_timeout: Duration::from_secs(30), has_answered: false };
        assert_eq!(attempts.deadline(), began + Duration::from_secs(10));
        attempts.has_answered = true;
        assert_eq!(attempts.deadline(), began + Duration::from_secs(24));
    }
}
