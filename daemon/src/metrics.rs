//! What the daemon records, with the handles of [`gradwire_telemetry::catalog`]. Handles with
//! labels are created once, for each value when it first occurs.

use std::{
    sync::{LazyLock, OnceLock},
    time::{Duration, Instant},
};

use gradwire_proto::{Collective, FailureKind, clock::Measured};
use gradwire_shm::control::Origin;
use gradwire_telemetry::{Counter, Gauge, Histogram, catalog::DAEMON};

/// Shows every metric whose labels are known. Call this once the recorder is installed.
pub fn start() {
    LazyLock::force(&DAEMON);
    LazyLock::force(&FAILURES);
    LazyLock::force(&PHASES);
}

/// One more than the largest number of a collective; they begin at 1.
const COLLECTIVES: usize = Collective::ALL[Collective::ALL.len() - 1] as usize + 1;

/// By collective and origin. Most combinations never occur, so they are created when they do.
static SUBMISSIONS: LazyLock<Vec<OnceLock<Counter>>> =
    LazyLock::new(|| (0..COLLECTIVES * Origin::ALL.len()).map(|_| OnceLock::new()).collect());

/// By kind. Those of which there are none are shown as 0: an alert can count on them.
static FAILURES: LazyLock<Vec<Counter>> = LazyLock::new(|| {
    FailureKind::ALL.iter().map(|kind| DAEMON.failures.series([kind.name()])).collect()
});

pub(crate) fn submission(collective: Collective, origin: Origin) {
    let index = collective as usize * Origin::ALL.len() + origin as usize;
    let series = || DAEMON.submissions.series([collective.name(), origin.name()]);
    SUBMISSIONS[index].get_or_init(series).increment(1);
}

pub(crate) fn process_sets(sets: usize) {
    DAEMON.process_sets.set(sets as f64);
}

pub(crate) fn allocation_request() {
    DAEMON.allocation_requests.increment(1);
}

/// The phases that a daemon knows.
struct Phases {
    gather: Histogram,
    transfer: Histogram,
    publish: Histogram,
}

static PHASES: LazyLock<Phases> = LazyLock::new(|| {
    let phase = |name| DAEMON.phase.series([name]);
    Phases { gather: phase("gather"), transfer: phase("transfer"), publish: phase("publish") }
});

/// When an operation reached its phases on this node.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    /// Its order was received.
    pub(crate) ordered: Instant,
    /// Its result was complete. `None` if it was published as it was computed.
    pub(crate) complete: Option<Instant>,
    /// The local ranks had the result.
    pub(crate) published: Instant,
}

pub(crate) fn operation(bytes: u64, times: Times) {
    let Times { ordered, complete, published } = times;
    DAEMON.operations.increment(1);
    DAEMON.published.increment(bytes);
    DAEMON.operation.record(published.saturating_duration_since(ordered));
    let complete = complete.inspect(|complete| {
        PHASES.publish.record(published.saturating_duration_since(*complete));
    });
    PHASES.transfer.record(complete.unwrap_or(published).saturating_duration_since(ordered));
}

/// All local ranks have submitted a tensor, which took this long.
pub(crate) fn gathered(took: Duration) {
    PHASES.gather.record(took);
}

/// A tensor has come into the queue.
pub(crate) fn queued() {
    DAEMON.queued_tensors.increment(1.0);
}

/// So many tensors have left the queue.
pub(crate) fn unqueued(tensors: usize) {
    DAEMON.queued_tensors.decrement(tensors as f64);
}

pub(crate) fn workers(attached: usize, shared_bytes: u64) {
    DAEMON.workers.set(attached as f64);
    DAEMON.shared_memory.set(shared_bytes as f64);
}

/// From this node on, peers share one series (BOUND).
const MANY_PEERS: usize = 64;

/// The value of a label that stands for all others.
const OTHER: &str = "other";

/// The label of the node with this number.
pub(crate) fn peer_label(node: usize, host: &str) -> &str {
    if node < MANY_PEERS { host } else { OTHER }
}

/// The bytes exchanged with one peer.
#[derive(Debug)]
pub(crate) struct PeerTraffic {
    sent: Counter,
    received: Counter,
}

impl PeerTraffic {
    /// For the node with this number.
    pub(crate) fn new(node: usize, host: &str) -> Self {
        let host = peer_label(node, host);
        Self { sent: DAEMON.sent.series([host]), received: DAEMON.received.series([host]) }
    }

    pub(crate) fn moved(&self, sent: u64, received: u64) {
        self.sent.increment(sent);
        self.received.increment(received);
    }
}

/// The path to one peer, or to all that share a label.
#[derive(Debug, Clone)]
pub(crate) struct PathMetrics {
    peer: String,
    packets: Counter,
    retransmits: Counter,
    round_trip: Gauge,
}

impl PathMetrics {
    /// For the peers with this label.
    pub(crate) fn new(peer: &str) -> Self {
        Self {
            peer: peer.to_owned(),
            packets: DAEMON.packets.series([peer]),
            retransmits: DAEMON.retransmits.series([peer]),
            round_trip: DAEMON.peer_round_trip.series([peer]),
        }
    }

    pub(crate) fn peer(&self) -> &str {
        &self.peer
    }

    /// So many packets were sent, and so many of them again.
    pub(crate) fn sent(&self, packets: u32, retransmits: u32) {
        self.packets.increment(packets.into());
        self.retransmits.increment(retransmits.into());
    }

    pub(crate) fn takes(&self, round_trip: Duration) {
        self.round_trip.set(round_trip.as_secs_f64());
    }
}

/// Bytes per second of this host's line.
pub(crate) fn line_rate(bytes: u64) {
    DAEMON.line_rate.series([]).set(bytes as f64);
}

pub(crate) fn rejected_connection() {
    DAEMON.rejected_connections.increment(1);
}

pub(crate) fn failure(kind: FailureKind) {
    FAILURES[kind as usize].increment(1);
}

/// A round trip, and the best estimate of the clock's offset.
pub(crate) fn heartbeat(round_trip: Duration, clock: Measured) {
    DAEMON.round_trip.record(round_trip);
    DAEMON.clock_offset.set(clock.offset_ns as f64 / 1e9);
    DAEMON.clock_offset_error.set(clock.error.as_secs_f64());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tables are indexed by these numbers.
    #[test]
    fn the_tables_have_room_for_every_number() {
        assert!(Collective::ALL.iter().all(|it| (*it as usize) < COLLECTIVES));
        assert!(Origin::ALL.iter().enumerate().all(|(at, it)| *it as usize == at));
        assert!(FailureKind::ALL.iter().enumerate().all(|(at, it)| *it as usize == at));
    }
}
