//! The connection to the coordinator: dialled until somebody answers, or until it is clear that
//! nobody will.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use gradwire_proto::{
    Failure, FailureKind, MAX_CONTROL_MESSAGE, pb::coordinator_client::CoordinatorClient,
};
use hyper_util::rt::TokioIo;
use tokio::{
    net::TcpStream,
    time::{sleep, timeout},
};
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use super::client::Introduction;

/// How long one attempt may take: longer than the system takes to find out that there is no such
/// host.
const ATTEMPT: Duration = Duration::from_secs(5);

/// Of what part of the start timeout no answer at all is enough.
const SILENT: u32 = 3;

/// When to give up. A daemon may start before the coordinator, whose system then refuses connections,
/// or its network says that there is no such host. That ends before the coordinator itself gives up
/// waiting for this node: who can't reach it knows why. Where nothing ever answers waiting does not
/// help, because something swallows what is sent.
#[derive(Debug)]
struct Attempts {
    began: Instant,
    start_timeout: Duration,
    has_answered: bool,
}

impl Attempts {
    fn deadline(&self) -> Instant {
        let limit = self.start_timeout;
        self.began + if self.has_answered { limit * 4 / 5 } else { limit / SILENT }
    }
}

/// Connects to the coordinator.
///
/// # Errors
/// A [`Failure`] that says what it tried, when the start timeout is used up, or the part of it
/// within which somebody should have answered.
pub(super) async fn connect(
    introduction: &Introduction,
) -> Result<CoordinatorClient<Channel>, Failure> {
    let Introduction { coordinator: address, host, start_timeout, .. } = introduction;
    let mut attempts =
        Attempts { began: Instant::now(), start_timeout: *start_timeout, has_answered: false };
    loop {
        let left = attempts.deadline().saturating_duration_since(Instant::now());
        let attempt = timeout(left.min(ATTEMPT), dial(*address, introduction.retransmission));
        let cause = match attempt.await {
            Ok(Ok(client)) => return Ok(client),
            Ok(Err(cause)) => {
                attempts.has_answered = true;
                cause
            }
            Err(_) => "no answer".to_owned(),
        };
        if Instant::now() >= attempts.deadline() {
            let seconds = attempts.began.elapsed().as_secs_f64();
            let what = format!(
                "the coordinator at {address} can't be reached from {host} ({cause}, tried for \
                 {seconds:.0} s)"
            );
            let hint = if attempts.has_answered {
                "is it running, and does GRADWIRE_COORDINATOR name its address?"
            } else {
                "does a firewall let TCP through to that port, and is GRADWIRE_COORDINATOR right?"
            };
            return Err(Failure::new(FailureKind::CoordinatorLost, what).host(host).hint(hint));
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// One attempt.
async fn dial(
    address: SocketAddr,
    retransmission: Duration,
) -> Result<CoordinatorClient<Channel>, String> {
    let stream = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
    stream.set_nodelay(true).map_err(|error| error.to_string())?;
    // After an outage the stream is to be heard again while there is time.
    if let Err(error) = gradwire_net::limit_retransmission_interval(&stream, retransmission) {
        tracing::debug!(%error, "the system chooses when what was lost is sent again");
    }
    let endpoint =
        Endpoint::from_shared(format!("http://{address}")).map_err(|error| error.to_string())?;
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
            cause.unwrap_or_else(|| error.to_string())
        })?;
    Ok(CoordinatorClient::new(channel)
        .max_decoding_message_size(MAX_CONTROL_MESSAGE)
        .max_encoding_message_size(MAX_CONTROL_MESSAGE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_enough_sooner_than_a_refusal() {
        let began = Instant::now();
        let mut attempts =
            Attempts { began, start_timeout: Duration::from_secs(30), has_answered: false };
        assert_eq!(attempts.deadline(), began + Duration::from_secs(10));
        attempts.has_answered = true;
        assert_eq!(attempts.deadline(), began + Duration::from_secs(24));
    }
}
