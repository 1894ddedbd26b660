//! Continues on another stream if one breaks, or if nothing arrives on it. Both ends tell how many
//! messages they have received, and go on with the next ones.

use std::time::Duration;

use gradwire_coordinator::host::LAST_MESSAGES;
use gradwire_proto::{Ending, Failure, FailureKind, pb};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_stream::StreamExt;

use super::{Session, unproven};
use crate::{
    control::{
        connect::{Messages, lost, reopen},
        dial::ATTEMPT,
        heartbeat::silent,
    },
    metrics,
};

/// The pause after a stream that broke before the coordinator continued on it.
const PAUSE: Duration = Duration::from_millis(50);

/// What to do if the coordinator's host is up and only TCP does not pass.
const BLOCKED: &str = "something between this host and the first one blocks TCP, such as a \
                       firewall: let TCP through to that port; coordinator.listen chooses it";

impl Session<'_> {
    /// Until when this node must have another stream, after one broke.
    fn returns_until(&self) -> Option<Instant> {
        Some(self.back.broke? + self.introduction.may_return()?)
    }

    /// Until when the coordinator must continue on the stream that was opened last.
    pub(super) fn answers_until(&self) -> Option<Instant> {
        let (_, until) = self.back.next.as_ref()?;
        Some(self.returns_until().map_or(*until, |end| end.min(*until)))
    }

    fn not_returned(&self, cause: &str) -> Failure {
        let coordinator = self.introduction.coordinator;
        let limit = self.introduction.may_return().unwrap_or_default();
        let silence = self.liveness.silent_for();
        if self.back.was_silent && silence >= limit {
            // If this failure reaches the coordinator, it names the host that does not hear it.
            return silent(coordinator, silence).host(self.introduction.host.clone());
        }
        if silence < limit / 2 {
            let seconds = limit.as_secs_f64();
            let what = format!(
                "the coordinator at {coordinator} can't be reached by TCP for {seconds:.1} s, \
                 although its datagrams arrive: {cause}"
            );
            return Failure::new(FailureKind::CoordinatorLost, what)
                .host(self.introduction.host.clone())
                .hint(BLOCKED);
        }
        // Each node may see a different error, but the cause is the same (TELL).
        tracing::warn!(cause, "the connection to the coordinator was not made again");
        let ms = limit.as_millis();
        lost(format!(
            "the coordinator at {coordinator} went away, and the connection was not made again \
             within {ms} ms"
        ))
    }

    /// Opens another stream, because one is `lost`. Without a failure, that one is only silent. The
    /// first message is a challenge. Returns the ending if the job is over meanwhile.
    pub(super) async fn opens_another(
        &mut self,
        lost: Option<Failure>,
    ) -> Result<Result<Messages, Ending>, Failure> {
        let was_silent = lost.is_none();
        let lost = lost.unwrap_or_else(|| {
            super::lost(format!("the coordinator at {} went away", self.introduction.coordinator))
        });
        if self.introduction.may_return().is_none() {
            return Err(self.cause(lost));
        }
        self.liveness.set_away(true);
        let pause = if self.back.next.is_some() { PAUSE } else { Duration::ZERO };
        let now = Instant::now();
        let silence = if was_silent { self.liveness.silent_for() } else { Duration::ZERO };
        self.back.begin(now.checked_sub(silence).unwrap_or(now), was_silent);
        let until = self.returns_until().unwrap_or(now);
        let deadline = self.failure.as_ref().map_or(until, |(_, until)| *until);
        let opened = async {
            sleep(pause).await;
            reopen(self.introduction, until.into_std()).await
        };
        tokio::select! {
            biased;
            ending = self.job.over() => Ok(Err(ending)),
            () = self.coordinator_ended.cancelled() => Err(self.cause(lost)),
            opened = opened => match opened {
                Ok((outbox, messages)) => {
                    self.back.next = Some((outbox, Instant::now() + ATTEMPT));
                    Ok(Ok(messages))
                }
                Err(cause) => Err(self.cause(self.not_returned(&cause))),
            },
            () = sleep_until(deadline), if deadline < until => Err(self.cause(lost)),
        }
    }

    /// The coordinator has answered the join on another stream than the first.
    pub(super) fn resumed(&mut self, resumed: &pb::Resumed) -> Result<(), Failure> {
        let coordinator = self.introduction.coordinator;
        let Some((next, _)) = self.back.next.take() else {
            let what = "the coordinator continued on a stream on which it was not asked to";
            return Err(Failure::new(FailureKind::Protocol, what));
        };
        if !self.introduction.verify_resumed(&self.nonce, resumed) {
            return Err(unproven(coordinator));
        }
        let again = next.take_over(&self.outbox, resumed.received).map_err(|impossible| {
            let what = format!("the coordinator at {coordinator} can't continue: {impossible}");
            Failure::new(FailureKind::Protocol, what)
        })?;
        (self.outbox, self.back.is_proven) = (next, true);
        self.back.returned = Some(Instant::now());
        self.liveness.set_away(false);
        metrics::recovered_stream();
        let away = self.back.broke.map_or(0.0, |broke| broke.elapsed().as_secs_f64());
        let away = format!("{away:.1} s");
        tracing::info!(%coordinator, away, again, "the connection was made again");
        Ok(())
    }

    /// Confirms the coordinator's last message, and waits until the coordinator closes the stream.
    pub(super) fn confirm_end(&mut self, mut stream: Messages) -> Option<JoinHandle<()>> {
        self.introduction.may_return()?;
        self.send_heartbeat(false, None);
        let outbox = self.outbox.clone();
        Some(tokio::spawn(async move {
            let closed = async { while let Some(Ok(_)) = stream.next().await {} };
            let _ = timeout(LAST_MESSAGES, closed).await;
            drop(outbox);
        }))
    }
}
