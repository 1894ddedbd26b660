//! The state of the job, shared by all parts of the daemon.
//!
//! It is *forming* until the coordinator has sent the world, *running* until it ends, and *over*
//! once an ending is set. Later endings change nothing, so every rank gets the same cause (TELL).

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    time::{Duration, Instant},
};

use gradwire_proto::{Ending, Failure, FailureKind, JobId, Rank, Secret, Sequence, TensorId, pb};
use tokio::sync::{mpsc, watch};

use super::{tensor::Announced, world::World};

/// The job's id and its secret.
#[derive(Debug, Clone)]
pub(crate) struct JobIdentity {
    pub(crate) job: JobId,
    pub(crate) secret: Secret,
}

/// A message of this node to the coordinator.
#[derive(Debug)]
pub(crate) enum Outgoing {
    Ready(Announced),
    /// A rank joins, which makes these tensors ready here. This is one message, because the
    /// coordinator must not see one without the other.
    Joined(Vec<Announced>),
    Done(Sequence),
    /// The time that a probe has taken here, and the count of retransmitted packets before it.
    Probed {
        sequence: Sequence,
        time: Duration,
        retransmits: u64,
    },
    /// The registry has forgotten these ids: no later message uses them.
    Forgotten(Vec<TensorId>),
    /// A failure, and when it was noticed.
    Failed(Failure, Instant),
    /// Ranks have left the job; `absent` if they never took part.
    Left {
        ranks: Vec<Rank>,
        absent: bool,
    },
    /// No rank of this node can go on by itself.
    Stuck(pb::Stuck),
    /// What the ranks of this node do.
    Explained(Box<pb::Explained>),
    /// A tensor has waited too long for ranks of this node.
    Overdue,
    /// A heartbeat is due, perhaps with a report.
    Heartbeat(Option<Box<pb::Report>>),
    /// A rank has begun a sampled step: all nodes must record.
    Sampled,
    Trace(Vec<u8>, Underway),
}

/// Accompanies a message, and is dropped once the message has been sent.
#[derive(Debug)]
pub(crate) struct Underway(#[expect(dead_code, reason = "its drop is the signal")] Sender<()>);

/// Waits for the drop of the matching [`Underway`].
#[derive(Debug)]
pub(crate) struct Departed(Receiver<()>);

impl Underway {
    pub(crate) fn new() -> (Self, Departed) {
        let (underway, departed) = channel();
        (Self(underway), Departed(departed))
    }
}

impl Departed {
    /// Waits until the message has been sent or dropped, at most for `limit` (WAIT).
    pub(crate) fn wait(&self, limit: Duration) {
        // Nothing is ever received: the call ends when the sender is dropped.
        let _ = self.0.recv_timeout(limit);
    }
}

#[derive(Debug, Clone)]
pub(crate) enum Phase {
    Forming,
    Running(Arc<World>),
    Over(Ending),
}

/// Belongs to a thread or task that others wait for, and reports its panic (TELL).
#[derive(Debug)]
pub(crate) struct ReportPanic {
    pub(crate) job: Job,
    /// The name of the thread or task, for the text.
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
    /// bound: announcements are bounded by the ranks' rings, the rest by the coordinator's credit.
    pub(crate) fn new() -> (Self, mpsc::UnboundedReceiver<Outgoing>) {
        let (outgoing, messages) = mpsc::unbounded_channel();
        (Self { phase: watch::Sender::new(Phase::Forming), outgoing }, messages)
    }

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

    pub(crate) async fn over(&self) -> Ending {
        let mut phase = self.watch();
        // `self` holds a sender, so the wait can't fail.
        let _ = phase.wait_for(|phase| matches!(phase, Phase::Over(_))).await;
        self.ending().unwrap_or(Ending::Finished)
    }

    pub(crate) fn ending(&self) -> Option<Ending> {
        match &*self.phase.borrow() {
            Phase::Over(ending) => Some(ending.clone()),
            _ => None,
        }
    }

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

    /// Sends the coordinator a message. Once the job is over, messages are dropped.
    pub(crate) fn send(&self, message: Outgoing) {
        let _ = self.outgoing.send(message);
    }

    /// Reports a failure of this node. The coordinator finds the first cause among the reports of
    /// all nodes and ends the job with it; if it does not answer, the client ends the job.
    pub(crate) fn report(&self, failure: Failure) {
        self.report_noticed(failure, Instant::now());
    }

    /// As [`Job::report`], for a failure that was `noticed` earlier.
    pub(crate) fn report_noticed(&self, failure: Failure, noticed: Instant) {
        // The ranks and the launcher report the failure, so the log needs it only at a verbose
        // level.
        tracing::info!(%failure, "this node has failed");
        self.send(Outgoing::Failed(failure, noticed));
    }
}
