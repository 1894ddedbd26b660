//! The state of the job, shared by all parts of the daemon.
//!
//! It is *forming* until the coordinator has sent the world, *running* until it ends, and *over*
//! with the first ending that is set: later ones change nothing, so every rank gets the same cause
//! (TELL).

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    time::Duration,
};

use gradwire_proto::{Ending, Failure, FailureKind, JobId, Rank, Secret, Sequence, TensorId, pb};
use tokio::sync::{mpsc, watch};

use super::{tensor::Announced, world::World};

/// Which job this is, and its secret.
#[derive(Debug, Clone)]
pub(crate) struct JobIdentity {
    pub(crate) job: JobId,
    pub(crate) secret: Secret,
}

/// What this node reports to the coordinator.
#[derive(Debug)]
pub(crate) enum Outgoing {
    /// A tensor is ready here.
    Ready(Announced),
    /// A rank joins, and with it these tensors are ready here: one message, because the coordinator
    /// must not see the one without the other.
    Joined(Vec<Announced>),
    /// An operation is complete here.
    Done(Sequence),
    /// A probe has taken this time here. Before it, so many packets had been sent again.
    Probed { sequence: Sequence, time: Duration, retransmits: u64 },
    /// The registry has forgotten these ids: no later message uses them.
    Forgotten(Vec<TensorId>),
    /// This node can't go on.
    Failed(Failure),
    /// Ranks have left in good order.
    Left { ranks: Vec<Rank>, absent: bool },
    /// A heartbeat is due, perhaps with a report.
    Heartbeat(Option<Box<pb::Report>>),
    /// A rank has begun a step that is sampled: all nodes are to record.
    Sampled,
    /// A batch of a trace.
    Trace(Vec<u8>, Underway),
}

/// Goes with a message, and is dropped once that has been sent.
#[derive(Debug)]
pub(crate) struct Underway(#[expect(dead_code, reason = "it counts by being there")] Sender<()>);

/// Whether a message is still on its way to the stream.
#[derive(Debug)]
pub(crate) struct Departed(Receiver<()>);

impl Underway {
    pub(crate) fn new() -> (Self, Departed) {
        let (underway, departed) = channel();
        (Self(underway), Departed(departed))
    }
}

impl Departed {
    /// Waits until the message has been sent, or dropped, at most so long (WAIT).
    pub(crate) fn wait(&self, limit: Duration) {
        // Nothing is ever received: it ends with the sender.
        let _ = self.0.recv_timeout(limit);
    }
}

/// Where the job stands.
#[derive(Debug, Clone)]
pub(crate) enum Phase {
    Forming,
    Running(Arc<World>),
    Over(Ending),
}

/// Reports a panic of the thread or task that holds it: others wait for what it does (TELL).
#[derive(Debug)]
pub(crate) struct ReportPanic {
    pub(crate) job: Job,
    /// Its name for the text.
    pub(crate) who: &'static str,
    pub(crate) host: String,
}

impl Drop for ReportPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let what = format!("{} of gradwired has panicked", self.who);
            let failure = Failure::new(FailureKind::Internal, what).host(self.host.clone());
            self.job.report(failure.hint("its log says where; please report it"));
        }
    }
}

/// Shared by all parts of the daemon; cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    phase: watch::Sender<Phase>,
    outgoing: mpsc::UnboundedSender<Outgoing>,
}

impl Job {
    /// A job that is forming, and the channel of messages to the coordinator. The channel needs no
    /// bound of its own: announcements are bounded by the ranks' rings, the rest by the
    /// coordinator's credit.
    pub(crate) fn new() -> (Self, mpsc::UnboundedReceiver<Outgoing>) {
        let (outgoing, messages) = mpsc::unbounded_channel();
        (Self { phase: watch::Sender::new(Phase::Forming), outgoing }, messages)
    }

    /// Follows the phase.
    pub(crate) fn watch(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// The world, once it has formed and while the job runs.
    pub(crate) fn world(&self) -> Option<Arc<World>> {
        match &*self.phase.borrow() {
            Phase::Running(world) => Some(world.clone()),
            _ => None,
        }
    }

    /// Waits until the job is over.
    pub(crate) async fn over(&self) -> Ending {
        let mut phase = self.watch();
        // `self` holds a sender, so the wait can't fail.
        let _ = phase.wait_for(|phase| matches!(phase, Phase::Over(_))).await;
        self.ending().unwrap_or(Ending::Finished)
    }

    /// How the job ended, if it has.
    pub(crate) fn ending(&self) -> Option<Ending> {
        match &*self.phase.borrow() {
            Phase::Over(ending) => Some(ending.clone()),
            _ => None,
        }
    }

    /// The world has formed.
    pub(crate) fn form(&self, world: Arc<World>) {
        self.phase.send_if_modified(|phase| {
            let forming = matches!(phase, Phase::Forming);
            if forming {
                *phase = Phase::Running(world);
            }
            forming
        });
    }

    /// The job is over; the first ending stays.
    pub(crate) fn end(&self, ending: Ending) {
        self.phase.send_if_modified(|phase| {
            let first = !matches!(phase, Phase::Over(_));
            if first {
                *phase = Phase::Over(ending);
            }
            first
        });
    }

    /// Sends the coordinator a message. Once the job is over it is dropped.
    pub(crate) fn send(&self, message: Outgoing) {
        let _ = self.outgoing.send(message);
    }

    /// Reports a failure of this node. The coordinator finds the first cause among the reports of
    /// all nodes and ends the job with it; the client ends it if no answer comes.
    pub(crate) fn report(&self, failure: Failure) {
        // The ranks and the launcher report the failure. The log repeats it where that is asked
        // for.
        tracing::info!(%failure, "this node can't go on");
        self.send(Outgoing::Failed(failure));
    }
}
