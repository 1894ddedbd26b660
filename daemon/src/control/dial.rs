//! Dials the coordinator until it answers, or until it is clear that it will not.

use std::{
    io::{self, ErrorKind},
    net::SocketAddr,
    time::{Duration, Instant},
};

use gradwire_proto::{Failure, FailureKind, NODE_PREFACE};
use hyper_util::rt::TokioIo;
use tokio::{
    io::AsyncWriteExt as _,
    net::TcpStream,
    time::{sleep, timeout},
};
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

/// How long one attempt may take: longer than the system takes to report an unknown host.
pub(super) const ATTEMPT: Duration = Duration::from_secs(5);

/// Without any answer, the daemon gives up after this part of the start timeout.
const SILENT_FRACTION: u32 = 3;

/// When to give up. A daemon may start before the coordinator; then connections are refused, or the
/// host is reported as unknown. This node gives up before the coordinator stops waiting for it,
/// because this node knows the cause. If nothing ever answers, packets are being dropped, and
/// waiting longer does not help.
#[derive(Debug)]
pub(super) struct DialDeadline {
    began: Instant,
    start_timeout: Duration,
    pub(super) has_answered: bool,
}

impl DialDeadline {
    pub(super) fn new(start_timeout: Duration) -> Self {
        Self { began: Instant::now(), start_timeout, has_answered: false }
    }

    pub(super) fn deadline(&self) -> Instant {
        let limit = self.start_timeout;
        self.began + if self.has_answered { limit * 4 / 5 } else { limit / SILENT_FRACTION }
    }
}

/// Connects `host` to the coordinator.
///
/// # Errors
/// A [`Failure`] that says what was tried, after most of the start timeout, or earlier if nothing
/// has answered.
pub(super) async fn connect(
    address: SocketAddr,
    host: &str,
    retransmission: Duration,
    attempts: &mut DialDeadline,
) -> Result<Channel, Failure> {
    loop {
        let left = attempts.deadline().saturating_duration_since(Instant::now());
        let attempt = timeout(left.min(ATTEMPT), dial(address, retransmission));
        let (answer, cause) = match attempt.await {
            Ok(Ok(channel)) => return Ok(channel),
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

/// The answer to a dialled connection. Each of them may come from a firewall.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    Nothing,
    Refused,
    NoRoute,
    Other,
}

impl Answer {
    fn of(error: &io::Error) -> Self {
        match error.kind() {
            ErrorKind::ConnectionRefused => Self::Refused,
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
                 is the first daemon running, and does GRADWIRE_COORDINATOR (with another \
                 launcher: GRADWIRE_RENDEZVOUS) name its address?"
            }
            Self::NoRoute => {
                "a firewall rejects the connection, or there is no route: let TCP through between \
                 the hosts, or give -H addresses by which the hosts reach each other"
            }
            Self::Other => {
                "is it running, and does GRADWIRE_COORDINATOR (with another launcher: \
                 GRADWIRE_RENDEZVOUS) name its address?"
            }
        }
    }
}

/// Connects once. A channel that breaks is not connected again.
pub(super) async fn dial(
    address: SocketAddr,
    retransmission: Duration,
) -> Result<Channel, (Answer, String)> {
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
    endpoint
        .http2_keep_alive_interval(Duration::from_secs(5))
        .keep_alive_timeout(Duration::from_secs(5))
        .connect_with_connector(once)
        .await
        .map_err(|error| {
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            other(cause.unwrap_or_else(|| error.to_string()))
        })
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

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
