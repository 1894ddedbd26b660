//! One attached worker, and the messages to it.

use std::{
    os::unix::net::UnixStream,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use gradwire_proto::{Failure, FailureKind, Rank, SEE_OUTPUT, pb};
use gradwire_services::launch::ProcessEnd;
use gradwire_shm::{
    control::{Completion, CompletionWriter, RankTrace, RingError},
    handover,
};
use gradwire_trace::flight::Outcome;
use prost::Message;
use rustix::process::Signal;

use super::{
    activity::RankActivity,
    call_sites::CallSites,
    outbox::{Outbox, OutboxError},
    pause::Pause,
    process_state::has_program,
    recorded::Recorded,
};
use crate::model::{agreement::OutputShapes, memory::WorkerMemory};

#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) local_rank: u32,
    pub(crate) rank: Rank,
    /// The process id, from the kernel.
    pub(crate) pid: u32,
    pub(crate) memory: WorkerMemory,
    pub(crate) completions: CompletionWriter,
    pub(crate) activity: RankActivity,
    pub(crate) recorded: Recorded,
    pub(crate) sites: CallSites,
    pub(crate) pause: Pause,
    pub(crate) trace: RankTrace,
    pub(crate) outbox: Outbox,
    /// Whether this daemon can see the process, which may be in a namespace of its own.
    pub(crate) is_visible: bool,
    /// It has detached, and its process may end.
    pub(crate) has_left: AtomicBool,
}

/// The limit of each text of a failure in a message to a worker, in bytes (BOUND).
const MAX_TEXT: usize = 256 << 10;

/// A failure with a limited text (BOUND).
pub(crate) fn brief(mut failure: Failure) -> Failure {
    failure.limit(MAX_TEXT);
    failure
}

impl Worker {
    /// Asks the worker to allocate memory for results of unexpected shapes.
    ///
    /// # Errors
    /// If the request can't reach the worker, so that it can't answer.
    pub(crate) fn allocate(&self, ticket: u64, outputs: &OutputShapes) -> Result<(), OutboxError> {
        let outputs = outputs.iter().map(|(shape, rows)| pb::Output {
            // If this rank gets no result, the shape is one empty dimension.
            shape: shape.as_ref().map_or_else(|| vec![0], |shape| shape.dims().to_vec()),
            rows: rows.clone(),
        });
        let allocate = pb::Allocate { ticket, outputs: outputs.collect() };
        self.outbox.send(pb::daemon_message::Message::Allocate(allocate))
    }

    /// Notifies the worker that an operation has succeeded: through the completion ring, or over
    /// the socket if the worker has not read its answers for long.
    ///
    /// # Errors
    /// A text, if the worker has damaged the ring or does not read its messages.
    pub(crate) fn complete(&self, completion: Completion) -> Result<(), String> {
        self.recorded.ended(&[completion.ticket], Outcome::Done);
        match self.completions.push(completion) {
            Err(RingError::CompletionsFull) => {
                let Completion { ticket, aux } = completion;
                let completed = pb::Completed { ticket, aux };
                self.outbox.send(pb::daemon_message::Message::Completed(completed)).map_err(text)
            }
            pushed => pushed.map_err(text),
        }
    }

    /// Notifies the worker that operations have failed. If the failure names no tensor, the worker
    /// adds the tensor of each operation.
    ///
    /// # Errors
    /// If the message can't reach the worker (TELL): then the caller must end the job.
    pub(crate) fn fail(&self, tickets: Vec<u64>, failure: &Failure) -> Result<(), OutboxError> {
        self.recorded.ended(&tickets, Outcome::Failed);
        tickets.iter().for_each(|_| self.completions.answered());
        let failed = pb::TensorFailed { tickets, failure: Some(brief(failure.clone()).into()) };
        self.outbox.send(pb::daemon_message::Message::TensorFailed(failed))
    }

    pub(crate) fn abort(&self, failure: &Failure) {
        let failure = brief(failure.clone());
        let sent = self.outbox.send(pb::daemon_message::Message::Aborted(failure.into()));
        if let Err(error) = sent {
            let rank = self.rank;
            tracing::warn!(%rank, %error, "a worker can't be notified that the job is over");
        }
    }
}

fn text(error: impl std::error::Error) -> String {
    error.to_string()
}

pub(crate) fn send(
    socket: &UnixStream,
    message: pb::daemon_message::Message,
) -> std::io::Result<()> {
    let message = pb::DaemonMessage { message: Some(message) };
    handover::send(socket, &message.encode_to_vec(), &[])
}

/// The failures with which a worker ends the job. The caller adds the host and the tensors.
impl Worker {
    fn failure(&self, kind: FailureKind, what: &str, hint: &str) -> Failure {
        let what = format!("its process (pid {}) {what}", self.pid);
        Failure::new(kind, what).rank(self.rank).hint(hint)
    }

    /// Whether its process has ended without leaving. A child may still hold its connection open.
    pub(crate) fn has_ended(&self) -> bool {
        self.is_visible && !self.has_left.load(Relaxed) && !has_program(self.pid)
    }

    /// The worker's connection ended without a message. `end` is how the process `launched` ended
    /// that was started as this rank: the worker, or a process that has started the worker.
    pub(crate) fn died(&self, end: Option<ProcessEnd>, launched: Option<u32>) -> Failure {
        let memory = "see its output, and the kernel's log for the out-of-memory killer";
        // Nobody has said how it ended: no `gradwire run` has started it.
        let unknown =
            &format!("{memory}; launchers also end a process because another one has failed");
        if let Some(parent) = launched.filter(|launched| *launched != self.pid) {
            let state = end.map_or_else(|| "still runs".to_owned(), |end| end.to_string());
            let what = format!(
                "ended without leaving the job: it exited early, was killed or crashed; process \
                 {parent}, which was started as this rank, {state}"
            );
            return self.failure(FailureKind::WorkerLost, &what, memory);
        }
        let (what, hint) = match end {
            None if has_program(self.pid) => (
                "has closed its connection without leaving the job, and still runs".to_owned(),
                "shut down before a process replaces itself (exec) or closes descriptors that are \
                 not its own",
            ),
            None => (
                "ended without leaving the job: it exited early, was killed or crashed".to_owned(),
                unknown.as_str(),
            ),
            Some(end) if end.is_well() => (
                "ended with exit code 0 without leaving the job".to_owned(),
                "shut down before the process ends: functions that end it at once, or replace it, \
                 don't do that",
            ),
            Some(end) => {
                let killed = ProcessEnd::Signal(Signal::KILL.as_raw());
                let hint = if end == killed { memory } else { end.hint() };
                (format!("{end} without leaving the job"), hint)
            }
        };
        let failure = self.failure(FailureKind::WorkerLost, &what, hint);
        if end.is_some_and(is_own_death) { failure.killed() } else { failure }
    }

    /// The worker is attached but does not respond.
    pub(crate) fn silent(&self, why: &str) -> Failure {
        let hint = "see what that process does";
        self.failure(FailureKind::WorkerLost, &format!("is lost: {why}"), hint)
    }

    pub(crate) fn gave_up(&self, reason: &str) -> Failure {
        self.failure(FailureKind::WorkerLost, &format!("gave up: {reason}"), SEE_OUTPUT).gave_up()
    }

    /// The worker wanted to leave while others needed it.
    pub(crate) fn left_early(&self, why: &str) -> Failure {
        let hint = "make sure that every rank waits for its operations before it leaves";
        let what = format!("left the job while it was {why}");
        self.failure(FailureKind::RankLeft, &what, hint)
    }

    pub(crate) fn sent_nonsense(&self, why: &str) -> Failure {
        let hint = "look for writes past the end of a tensor, or another release of Gradwire";
        let what = format!("sent nonsense to gradwired: {why}");
        self.failure(FailureKind::Protocol, &what, hint)
    }
}
/// Whether a process has died for a reason of its own. A process that aborts, or that gets SIGPIPE,
/// may do so because another one is gone.
fn is_own_death(end: ProcessEnd) -> bool {
    let own = [Signal::KILL, Signal::SEGV, Signal::BUS, Signal::ILL, Signal::FPE];
    match end {
        ProcessEnd::Signal(signal) => own.map(Signal::as_raw).contains(&signal),
        ProcessEnd::OutOfMemory => true,
        _ => false,
    }
}
