//! Finds out that no rank of this node can do anything until one of its operations ends, and none
//! is running here. If that is so on every node, the job is in a deadlock, which the coordinator
//! decides (docs/decisions/034-provable-deadlocks.md).
//!
//! A rank says that it is stuck together with the number of its operations in flight
//! (`gradwire_shm::control`). All of them must be in the queue: an operation that has left it is
//! about to be answered.

use std::{
    sync::atomic::Ordering::Relaxed,
    time::{Duration, Instant},
};

use gradwire_proto::pb;

use super::{dispatch::Dispatcher, node::Node};
use crate::{model::job::Outgoing, workers::worker::Worker};

/// The time between two messages that no rank can go on.
const AGAIN: Duration = Duration::from_millis(200);

/// Tells the coordinator again and again while no rank of this node can go on.
#[derive(Debug, Default)]
pub(crate) struct Reporter {
    last: Option<Instant>,
}

impl Reporter {
    /// Tells the coordinator if no rank can go on and the next message is due.
    pub(crate) fn look(&mut self, node: &Node, now: Instant) {
        if self.last.is_some_and(|last| now < last + AGAIN) {
            return;
        }
        if let Some(ranks) = all_stuck(node) {
            self.last = Some(now);
            let number = node.last_answer.load(Relaxed);
            node.job.send(Outgoing::Stuck(pb::Stuck { number, ranks }));
        }
    }
}

/// What each rank waits for; `None` if one of them can go on, or may still attach.
fn all_stuck(node: &Node) -> Option<Vec<pb::StuckRank>> {
    if node.workers.is_any_missing() || node.job.ending().is_some() {
        return None;
    }
    let workers = node.workers.all();
    let ranks: Option<Vec<_>> = workers.iter().map(|worker| stuck(node, worker)).collect();
    ranks.filter(|ranks| !ranks.is_empty())
}

fn stuck(node: &Node, worker: &Worker) -> Option<pb::StuckRank> {
    let (ticket, in_flight) = worker.activity.stuck()?;
    let (queued, awaited) = node.queue()?.submissions_of(worker.local_rank, ticket);
    let (key, call, site) = awaited.filter(|_| queued == in_flight as usize)?;
    Some(pb::StuckRank {
        rank: worker.rank.0,
        process_set: key.set.0,
        name: key.name.to_string(),
        call: call.to_string(),
        in_flight,
        site: if site.is_empty() { worker.recorded.site(ticket) } else { site }.to_string(),
    })
}

impl Dispatcher {
    /// Notes that the answer with this number was carried out.
    pub(super) fn carried_out(&self, number: u64) {
        self.node.last_answer.store(number, Relaxed);
    }
}
