//! What the launcher's agent and signals tell this daemon: how the processes of its ranks end, that
//! the daemon of another node has ended, that the membership of the job is to change, and that the
//! daemon itself is to end.

use std::sync::Arc;

use gradwire_proto::{Ending, Failure, FailureKind, NodeId, Rank, pb};
use gradwire_services::launch::{Notice, ProcessEnd};
use rustix::process::getppid;

use super::node::Node;
use crate::{
    metrics,
    workers::{
        start::{Missing, Overdue},
        worker::Worker,
    },
};

impl Node {
    /// This daemon has received a signal that ends it. Its parent's end sends such a signal, too.
    pub(crate) fn terminated(&self) {
        match self.config.parent.filter(|parent| getppid() != Some(*parent)) {
            Some(parent) => {
                let pid = parent.as_raw_nonzero();
                self.asked_to_end(&format!("process {pid}, which has started it, has ended"));
            }
            None => self.asked_to_end("by SIGTERM or SIGINT"),
        }
    }

    /// This node was asked to end, for the reason `why`. An elastic job goes on without it, unless
    /// all of its processes are being stopped.
    fn asked_to_end(&self, why: &str) {
        let goes_on = self.config.elastic.is_some() && self.process_ends.ends_alone();
        let kind = if goes_on { FailureKind::NodeLost } else { FailureKind::Cancelled };
        let failure = Failure::new(kind, format!("gradwired was asked to end: {why}"))
            .host(self.config.host.clone());
        match self.job.world() {
            Some(_) => self.job.report(failure),
            // No other node has joined it yet.
            None => self.job.end(Ending::Failed(failure)),
        }
    }

    /// Handles a report of the launcher's agent on the processes of this host.
    pub(crate) fn handle_notice(&self, notice: Notice) {
        match notice {
            Notice::Started { rank, pid } => self.process_ends.started(rank, pid),
            Notice::Wrote { rank, lines } => self.last_lines.set(rank, lines),
            Notice::Ended { rank, end } => {
                tracing::debug!(process = %rank, "the process of a rank {end}");
                self.process_ends.runs_no_more(rank, end);
                self.last_lines.forget(rank);
                self.handle_ends();
            }
            Notice::Changed { added, removed } => self.membership_changes(added, removed),
            // The processes still need this daemon. Their ends are not failures from now on.
            Notice::Ending { why } => self.process_ends.stop(why, false),
            Notice::DaemonEnded { node, why } => {
                tracing::debug!(node, why, "the daemon of a node has ended");
                if node == 0 {
                    self.coordinator_ended.cancel();
                }
                if let Some(acceptor) = &self.acceptor {
                    acceptor.daemon_ended(NodeId(node), why);
                }
            }
            Notice::Stopping { why, alone } => {
                self.process_ends.stop(why.clone(), alone);
                self.stopped(&why);
            }
        }
    }

    /// The launcher wants to change the membership of the job: notifies all workers.
    fn membership_changes(&self, added: bool, removed: bool) {
        let mut wanted = self.wanted.lock();
        let before = wanted.unwrap_or_default();
        let (added, removed) = (before.added || added, before.removed || removed);
        let changed = pb::MembershipChanged { added, removed };
        *wanted = Some(changed);
        drop(wanted);
        for worker in self.workers.all() {
            let message = pb::daemon_message::Message::Changed(changed);
            self.ensure_sent(&worker, worker.outbox.send(message));
        }
    }

    /// All processes of this host are being ended, for the reason `why`. If a worker has failed and
    /// its thread has not handled that yet, the worker is the cause (TELL).
    pub(crate) fn stopped(&self, why: &str) {
        if self.job.ending().is_some() {
            return;
        }
        let failed = self.workers.all().into_iter().find_map(|worker| {
            let end = self.process_ends.failure(worker.local_rank)?;
            Some((self.died(&worker, Some(end)), worker))
        });
        match failed {
            Some((failure, worker)) => self.worker_failed(&worker, failure),
            None => self.asked_to_end(why),
        }
    }

    /// Handles the ends of processes, as soon as the job has formed.
    pub(crate) fn handle_ends(&self) {
        if self.running.get().is_some() {
            for (number, end) in self.process_ends.take_new() {
                self.ended(number, end);
            }
        }
    }

    /// The process with this number has ended. The end of an attached process is reported when its
    /// connection ends; this closes the connection, in case another process holds the other end.
    fn ended(&self, number: Rank, end: ProcessEnd) {
        let Some(running) = self.running.get() else { return };
        let local = match &self.config.elastic {
            Some(elastic) => elastic.local_rank(number.0),
            None => number.0.checked_sub(running.world.me().first_rank.0),
        };
        let Some(local) = local else { return };
        self.process_ends.ended(local, end);
        if let Some(worker) = self.workers.get(local) {
            worker.outbox.hang_up();
        }
        self.ended_without_attaching(self.rank(local), local, end);
    }

    /// The slot of a process that did not attach is free again. The process may have ended while it
    /// still had the slot.
    pub(crate) fn freed(&self, local_rank: u32) {
        if self.running.get().is_none() {
            return;
        }
        if let Some(end) = self.process_ends.end(local_rank) {
            self.ended_without_attaching(self.rank(local_rank), local_rank, end);
        }
    }

    /// If the process of a rank never attached, it can't take part any more, and nobody waits for
    /// it. If it also failed, it is the cause of the job's failure (TELL). A process that still has
    /// its slot is handled when the slot is free again.
    fn ended_without_attaching(&self, rank: Rank, local_rank: u32, end: ProcessEnd) {
        if !self.workers.ended(local_rank) || self.job.ending().is_some() {
            return;
        }
        if end.is_well() {
            tracing::info!(%rank, "a rank ended without ever attaching");
            self.leaves(rank, true);
        } else {
            let what = format!("its process {end} before it had joined the job");
            let failure = Failure::new(FailureKind::WorkerLost, what)
                .rank(rank)
                .host(self.config.host.clone())
                .hint(end.hint());
            metrics::failure(failure.kind);
            self.job.report(failure);
        }
    }

    /// The failure of a worker whose connection has ended without a message. `end` is how the
    /// process of its rank ended, if it has.
    pub(crate) fn died(&self, worker: &Worker, end: Option<ProcessEnd>) -> Failure {
        worker.died(end, self.pid_of(worker.local_rank))
    }

    /// Reports a rank of this node that ended before `worker`, but whose child holds its connection
    /// open. A launcher ends the other ranks at once, and they are not the cause (TELL).
    pub(crate) fn unnoticed_end(&self, worker: &Worker) {
        let others = self.workers.all();
        let is_it =
            |other: &&Arc<Worker>| other.local_rank != worker.local_rank && other.has_ended();
        if let Some(other) = others.iter().find(is_it) {
            self.worker_failed(other, self.died(other, None));
        }
    }

    /// The ranks of this node that may come and are not attached yet.
    pub(crate) fn missing(&self) -> Vec<Missing> {
        let elastic = self.config.elastic.as_ref();
        let missing = self.workers.missing().map(|(local_rank, pid)| {
            let is_survivor = elastic.is_some_and(|elastic| elastic.is_survivor(local_rank));
            Missing { local_rank, pid: pid.or_else(|| self.pid_of(local_rank)), is_survivor }
        });
        missing.collect()
    }

    /// A rank of this node has not attached in time. The job can't go on without it.
    pub(crate) fn missed(&self, missing: &Missing, overdue: Overdue) {
        let others = self
            .missing()
            .into_iter()
            .filter(|other| !other.is_survivor && other.local_rank != missing.local_rank);
        let others: Vec<_> = others.map(|other| self.rank(other.local_rank)).collect();
        let failure = overdue.failure(self.rank(missing.local_rank), missing.pid, &others);
        metrics::failure(failure.kind);
        self.job.report(failure.host(self.config.host.clone()));
    }

    /// The process that the agent has started as this rank, if it has.
    pub(crate) fn pid_of(&self, local_rank: u32) -> Option<u32> {
        self.process_ends.pid(self.number_of(local_rank))
    }

    /// The launcher's number of the process of this rank.
    pub(crate) fn number_of(&self, local_rank: u32) -> Rank {
        let elastic = self.config.elastic.as_ref();
        let number = elastic.and_then(|elastic| elastic.worker(local_rank)).map(Rank);
        number.unwrap_or(self.rank(local_rank))
    }
}
