//! The stream to the coordinator: joins the job, then carries messages in both directions until the
//! job is over.
//!
//! Only this part of the daemon decides how the job has ended: the coordinator reports the end, or
//! the coordinator is lost. A failure of this node is first sent to the coordinator, which has the
//! reports of all nodes. The node ends with its own failure only if no answer arrives in time
//! (WAIT).
//!
//! If the stream breaks, the node opens another one, on which both sides continue with the messages
//! that the other one has not received ([`gradwire_proto::numbered`]). Meanwhile its own messages
//! wait.
//!
//! - `absence`: how long there has been no working stream
//! - `returning`: continues on another stream

mod absence;
mod returning;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use gradwire_proto::{
    Ending, Failure, FailureKind, MAX_CONTROL_MESSAGE, TensorId,
    numbered::Received,
    pb::{self, coordinator_message, node_message},
};
use gradwire_services::shared::Shared;
use prost::Message;
use tokio::{
    sync::mpsc,
    task::JoinHandle,
    time::{Instant, sleep, sleep_until},
};
use tokio_stream::StreamExt;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use self::absence::Absence;
use super::{
    connect::{
        Introduction, Messages, ToCoordinator, from_status, is_broken, is_of_another_job, lost,
        open,
    },
    dispatch::Dispatcher,
    explain,
    liveness::Liveness,
    registry,
};
use crate::{
    metrics,
    model::{
        job::{Job, Outgoing},
        operation::Instruction,
        tensor::Announced,
        world::World,
    },
};

/// How long the coordinator may take to report the end of the job after this node has failed.
const ABORT_TIMEOUT: Duration = Duration::from_millis(1500);

/// The pause before a node that an earlier job has refused tries to join again.
const JOIN_PAUSE: Duration = Duration::from_millis(100);

/// A message is sent once its announcements have this many bytes; one more always fits.
const READY_BYTES: usize = MAX_CONTROL_MESSAGE / 4;

/// The limit for the announcements that a join makes ready, in bytes.
const MAX_JOINED: usize = MAX_CONTROL_MESSAGE - (64 << 10);

/// Takes part in the job until it is over, and sets the ending in `job`. `coordinator_ended` is
/// cancelled once the coordinator's process is known to have ended. Returns the task that confirms
/// the coordinator's last message, if there is one; it ends soon.
pub(crate) async fn negotiate(
    introduction: Introduction,
    job: Job,
    outgoing: mpsc::UnboundedReceiver<Outgoing>,
    liveness: Arc<Liveness>,
    coordinator_ended: CancellationToken,
    dispatcher: &mut Dispatcher,
) -> Option<JoinHandle<()>> {
    let mut farewell = None;
    let ending = async {
        let (outbox, stream) = open(&introduction).await?;
        let mut session = Session {
            introduction: &introduction,
            patient_until: Instant::now() + introduction.patience,
            job: &job,
            liveness: &liveness,
            coordinator_ended,
            outbox,
            back: Absence::default(),
            received: Received::default(),
            registry: None,
            failure: None,
            nonce: Vec::new(),
        };
        let (ending, stream) = session.run(stream, outgoing, dispatcher).await?;
        farewell = stream.and_then(|stream| session.confirm_end(stream));
        Ok(ending)
    };
    job.end(ending.await.unwrap_or_else(Ending::Failed));
    farewell
}

struct Session<'a> {
    introduction: &'a Introduction,
    /// Until then, an earlier job may still have the coordinator's address.
    patient_until: Instant,
    job: &'a Job,
    liveness: &'a Liveness,
    coordinator_ended: CancellationToken,
    outbox: ToCoordinator,
    back: Absence,
    received: Received,
    registry: Option<registry::Registry>,
    /// This node's own failure, and the deadline for the coordinator's answer.
    failure: Option<(Failure, Instant)>,
    /// The nonce with which the coordinator proves the secret.
    nonce: Vec<u8>,
}

impl Session<'_> {
    /// Returns how the job ended, and the stream if the coordinator said so on it.
    async fn run(
        &mut self,
        mut stream: Messages,
        mut outgoing: mpsc::UnboundedReceiver<Outgoing>,
        dispatcher: &mut Dispatcher,
    ) -> Result<(Ending, Option<Messages>), Failure> {
        loop {
            let deadline = self.failure.as_ref().map(|(_, until)| *until);
            let answers_until = self.answers_until();
            let has_room = self.outbox.has_room();
            let lost = tokio::select! {
                message = stream.next() => match message {
                    Some(Ok(message)) => match self.handle(message, dispatcher) {
                        Ok(None) => continue,
                        Ok(Some(ending)) => return Ok((ending, Some(stream))),
                        Err(failure) => return Err(self.cause(failure)),
                    },
                    Some(Err(status)) if self.is_early(&status) => {
                        match self.joins_later().await? {
                            Ok(another) => stream = another,
                            Err(ending) => return Ok((ending, None)),
                        }
                        continue;
                    }
                    Some(Err(status)) => {
                        let mut failure = from_status(&status, self.introduction.coordinator);
                        if !is_broken(&status) {
                            if self.back.attempt > 0 {
                                // The coordinator that this node had joined is gone.
                                failure.kind = FailureKind::CoordinatorLost;
                            }
                            return Err(self.cause(failure));
                        }
                        Some(failure)
                    }
                    None => {
                        let at = self.introduction.coordinator;
                        Some(lost(format!("the coordinator at {at} closed the stream")))
                    }
                },
                () = self.liveness.distrusted(), if answers_until.is_none() => None,
                () = sleep_until(answers_until.unwrap_or_else(Instant::now)),
                    if answers_until.is_some() => None,
                // WAIT: a coordinator that reads nothing does not delay the end of this node.
                Some(first) = outgoing.recv(), if has_room => {
                    self.send_pending(first, &mut outgoing, dispatcher);
                    continue;
                }
                () = self.outbox.room(), if !has_room => continue,
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() =>
                {
                    let (failure, _) = self.failure.take().expect("guarded by the deadline");
                    return Ok((Ending::Failed(failure), None));
                }
                // Another part has ended the job (a signal, the heartbeat thread): its ending
                // stands.
                ending = self.job.over() => return Ok((ending, None)),
            };
            match self.opens_another(lost).await? {
                Ok(another) => stream = another,
                Err(ending) => return Ok((ending, None)),
            }
        }
    }

    /// Whether the coordinator of an earlier job has refused this node, or has just ended. The
    /// launcher of an elastic job starts no epoch before the end of the one before.
    fn is_early(&self, status: &Status) -> bool {
        self.registry.is_none()
            && self.introduction.epoch == 0
            && (is_of_another_job(status) || is_broken(status))
            && Instant::now() < self.patient_until
    }

    /// Opens another stream in a moment, because an earlier job still had the address.
    async fn joins_later(&mut self) -> Result<Result<Messages, Ending>, Failure> {
        tracing::debug!("an earlier job still has the coordinator's address");
        let opened = async {
            sleep(JOIN_PAUSE).await;
            open(self.introduction).await
        };
        let (outbox, stream) = tokio::select! {
            opened = opened => opened?,
            ending = self.job.over() => return Ok(Err(ending)),
        };
        (self.outbox, self.received) = (outbox, Received::default());
        Ok(Ok(stream))
    }

    /// This node's own failure or the loss of the stream, whichever is the cause (TELL).
    fn cause(&mut self, lost: Failure) -> Failure {
        match self.failure.take() {
            Some((own, _)) => cause(own, lost, self.coordinator_host()),
            None => lost,
        }
    }

    /// The coordinator's host: the first node runs it.
    fn coordinator_host(&self) -> Option<String> {
        Some(self.job.world()?.nodes.first()?.host.clone())
    }

    fn send(&self, message: node_message::Message) {
        self.outbox.send(Shared::new(pb::NodeMessage { message: Some(message) }));
    }

    fn send_heartbeat(&mut self, trace: bool, report: Option<pb::Report>) {
        let received = self.received.tell();
        let heartbeat = pb::Heartbeat { trace, report, received, ..self.liveness.heartbeat() };
        self.send(node_message::Message::Heartbeat(heartbeat));
    }

    /// Completions go before announcements, which may be for the same tensors.
    fn send_work(&self, done: &mut pb::Done, ready: &mut pb::Ready) {
        if !done.sequences.is_empty() {
            self.send(node_message::Message::Done(std::mem::take(done)));
        }
        if !ready.announcements.is_empty() {
            self.send(node_message::Message::Ready(std::mem::take(ready)));
        }
    }

    /// Adds an announcement, and returns its bytes; or runs the operation at once. A traced one is
    /// ordered, so that all of its phases are in the trace.
    fn announce(
        &self,
        announced: Announced,
        ready: &mut pb::Ready,
        dispatcher: &Dispatcher,
    ) -> usize {
        // Nothing is ready before the world has formed.
        let Some(registry) = &self.registry else { return 0 };
        let announcement = match registry.ready(announced, !dispatcher.is_traced()) {
            registry::Ready::Announce(announcement) => announcement,
            registry::Ready::AtOnce(operation) => {
                if let Err(failure) = dispatcher.execute(Instruction::Start(operation)) {
                    self.job.report(failure);
                }
                return 0;
            }
        };
        let bytes = announcement.encoded_len();
        ready.announcements.push(announcement);
        bytes
    }

    /// Sends all waiting messages, merged into as few as possible.
    fn send_pending(
        &mut self,
        first: Outgoing,
        outgoing: &mut mpsc::UnboundedReceiver<Outgoing>,
        dispatcher: &Dispatcher,
    ) {
        let mut ready = pb::Ready::default();
        let mut ready_bytes = 0;
        let mut done = pb::Done::default();
        let mut rest = Vec::new();
        let mut traces = Vec::new();
        let mut next = Some(first);
        while let Some(message) = next {
            match message {
                Outgoing::Ready(announced) => {
                    ready_bytes += self.announce(announced, &mut ready, dispatcher);
                }
                Outgoing::Joined(announced) => {
                    // Tensors that were ready before this rank joined go into an earlier message:
                    // within a message the coordinator handles joins first.
                    ready_bytes = 0;
                    self.send_work(&mut done, &mut ready);
                    for announced in announced {
                        ready_bytes += self.announce(announced, &mut ready, dispatcher);
                    }
                    if ready_bytes > MAX_JOINED {
                        // BOUND: this must be one message, and it is too large for one.
                        let what = format!(
                            "a rank joined, and announcing the tensors that waited for it takes \
                             {ready_bytes} bytes, more than the {MAX_JOINED} of one message"
                        );
                        let hint =
                            "keep fewer operations in flight when ranks join, or use shorter names";
                        let failure = Failure::new(FailureKind::Resource, what).hint(hint);
                        self.job.report(failure.host(self.introduction.host.clone()));
                        return;
                    }
                }
                Outgoing::Done(sequence) => done.sequences.push(sequence.0),
                Outgoing::Probed { sequence, time, retransmits } => {
                    let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
                    let probed = pb::Probed { sequence: sequence.0, nanoseconds, retransmits };
                    rest.push(node_message::Message::Probed(probed));
                }
                Outgoing::Forgotten(ids) => {
                    let ids = ids.iter().map(|id| id.0).collect();
                    rest.push(node_message::Message::Forgotten(pb::Forgotten { ids }));
                }
                Outgoing::Heartbeat(report) => {
                    self.send_heartbeat(false, report.map(|report| *report));
                }
                Outgoing::Explained(explained) => {
                    rest.push(node_message::Message::Explained(*explained));
                }
                Outgoing::Overdue => rest.push(node_message::Message::Overdue(pb::Overdue {})),
                Outgoing::Stuck(stuck) => rest.push(node_message::Message::Stuck(stuck)),
                Outgoing::Sampled => {
                    // At once: the announcements that follow belong to the step.
                    self.send_heartbeat(true, None);
                }
                Outgoing::Trace(batch, underway) => {
                    rest.push(node_message::Message::Trace(pb::Trace { batch }));
                    traces.push(underway);
                }
                Outgoing::Left { ranks, absent } => {
                    let ranks = ranks.iter().map(|r| r.0).collect();
                    rest.push(node_message::Message::Leave(pb::Leave { ranks, absent }));
                }
                Outgoing::Failed(failure, noticed) => {
                    if self.failure.is_none() {
                        // A message and its answer.
                        let trip = self.liveness.ahead().map(|measured| measured.round_trip);
                        let until = Instant::now() + ABORT_TIMEOUT + trip.unwrap_or_default();
                        self.failure = Some((failure.clone(), until));
                    }
                    let noticed_ns = self.liveness.noticed_ns(noticed);
                    let failure = Some(failure.into());
                    rest.push(node_message::Message::Failed(pb::Failed { failure, noticed_ns }));
                }
            }
            // An announcement after a Leave may be a consequence of it, and must come after it.
            if !rest.is_empty() || ready_bytes >= READY_BYTES {
                break;
            }
            next = outgoing.try_recv().ok();
        }
        self.send_work(&mut done, &mut ready);
        for message in rest {
            self.send(message);
        }
        // They are sent, so the next batches may follow.
        drop(traces);
    }

    fn handle(
        &mut self,
        message: pb::CoordinatorMessage,
        dispatcher: &mut Dispatcher,
    ) -> Result<Option<Ending>, Failure> {
        let coordinator = self.introduction.coordinator;
        self.liveness.stream_received();
        match message.message {
            Some(coordinator_message::Message::Challenge(challenge)) => {
                let counts = (self.back.attempt, self.received.tell());
                let addresses = dispatcher.data_addresses();
                let join = self.introduction.join(&challenge.nonce, counts, addresses.as_ref());
                self.nonce.clone_from(&join.nonce);
                let message = Some(node_message::Message::Join(join));
                let message = Ok(pb::NodeMessage { message });
                match &self.back.next {
                    Some((next, _)) => next.greet(message),
                    None => {
                        self.outbox.greet(message);
                        self.outbox.open();
                    }
                }
                return Ok(None);
            }
            Some(coordinator_message::Message::Resumed(resumed)) => {
                self.resumed(&resumed)?;
                return Ok(None);
            }
            _ => {
                self.back.is_of_use();
                if self.received.note() && self.introduction.may_return().is_some() {
                    self.send_heartbeat(false, None);
                }
            }
        }
        match message.message {
            Some(coordinator_message::Message::World(wire)) => {
                if !self.back.is_proven && !self.introduction.verify(&self.nonce, &wire) {
                    return Err(unproven(coordinator));
                }
                let is_traced = wire.trace;
                let world = World::try_from(wire).map_err(|e| registry::nonsense(&e))?;
                let world = Arc::new(world);
                self.registry = Some(registry::Registry::new(world.clone()));
                match dispatcher.formed(world.clone()) {
                    Ok(()) => {
                        self.job.form(world);
                        dispatcher.handle_ends();
                        dispatcher.trace(is_traced);
                    }
                    // The coordinator tells the other nodes the reason (TELL).
                    Err(failure) => self.job.report(failure),
                }
            }
            Some(coordinator_message::Message::Execute(execute)) => {
                let Some(registry) = &mut self.registry else {
                    let what = "the coordinator ordered operations before it formed the world";
                    return Err(Failure::new(FailureKind::Protocol, what));
                };
                let number = execute.number;
                let evicted: Vec<TensorId> =
                    execute.evicted.iter().copied().map(TensorId).collect();
                let instructions =
                    registry.instructions(execute).map_err(|e| registry::nonsense(&e))?;
                if !evicted.is_empty() {
                    self.job.send(Outgoing::Forgotten(evicted));
                }
                for instruction in instructions {
                    if let Err(failure) = dispatcher.execute(instruction) {
                        self.job.report(failure);
                    }
                }
                if number != 0 {
                    dispatcher.carried_out(number);
                }
            }
            Some(coordinator_message::Message::Abort(abort)) => {
                let unknown = || lost("the coordinator ended the job without saying why");
                let failure = abort.failure.map_or_else(unknown, Failure::from);
                return Ok(Some(Ending::Failed(failure)));
            }
            Some(coordinator_message::Message::Shutdown(_)) => return Ok(Some(Ending::Finished)),
            Some(coordinator_message::Message::Heartbeat(heartbeat)) => {
                self.outbox.confirm(heartbeat.received).map_err(|impossible| {
                    let what = format!("the coordinator at {coordinator} is wrong: {impossible}");
                    Failure::new(FailureKind::Protocol, what)
                })?;
                dispatcher.trace(heartbeat.trace);
                let received = self.liveness.heartbeat_received(&heartbeat);
                if let Some((round_trip, clock)) = received {
                    metrics::heartbeat(round_trip, clock);
                }
            }
            Some(coordinator_message::Message::Moved(moved)) => {
                dispatcher.moved(&moved).map_err(|e| registry::nonsense(&e))?;
            }
            Some(coordinator_message::Message::Explain(asked)) => {
                explain::answer(&dispatcher.node, asked);
            }
            Some(coordinator_message::Message::Stalled(stalled)) => {
                explain::pass_on(&dispatcher.node, &stalled);
            }
            // Handled above; or a message of a later release: the protocol version is the same, so
            // it can be ignored.
            Some(
                coordinator_message::Message::Challenge(_)
                | coordinator_message::Message::Resumed(_),
            )
            | None => {}
        }
        Ok(None)
    }
}

fn unproven(coordinator: SocketAddr) -> Failure {
    let what = format!("the coordinator at {coordinator} does not know the job's secret");
    Failure::new(FailureKind::Protocol, what).hint("another program answers at that address")
}

/// The cause of the end: this node's own failure, or the loss of the stream (TELL). Usually the
/// coordinator ends because of this node's failure, and then the stream ends. But if the
/// coordinator's host is gone, data connections with it fail, too: then the loss is the cause, even
/// if it was noticed later.
fn cause(own: Failure, lost: Failure, coordinator_host: Option<String>) -> Failure {
    let is_symptom = own.kind.rootness() < lost.kind.rootness();
    let is_there = coordinator_host.is_some_and(|host| own.host == host);
    if is_symptom && is_there { lost } else { own }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_coordinator_is_the_cause() {
        let own = |kind, host: &str| Failure::new(kind, "own").host(host.to_owned());
        let stream = || lost("the coordinator went away");
        for (kind, host, first, expected) in [
            (FailureKind::ConnectionLost, "a", Some("a"), FailureKind::CoordinatorLost),
            (FailureKind::Timeout, "a", Some("a"), FailureKind::CoordinatorLost),
            (FailureKind::ConnectionLost, "b", Some("a"), FailureKind::ConnectionLost),
            (FailureKind::ConnectionLost, "", None, FailureKind::ConnectionLost),
            (FailureKind::WorkerLost, "a", Some("a"), FailureKind::WorkerLost),
        ] {
            assert_eq!(
                cause(own(kind, host), stream(), first.map(str::to_owned)).kind,
                expected,
                "{kind:?}"
            );
        }
    }
}
