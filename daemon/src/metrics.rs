//! The daemon's metrics, as handles of [`gradwire_telemetry::catalog`]. The handle for a label
//! value is created once, when the value first occurs.

use std::{
    sync::{
        LazyLock, OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use gradwire_collectives::algorithms::Algorithm;
use gradwire_proto::{Collective, FailureKind, Rank, clock::Measured};
use gradwire_shm::control::{Origin, Progress};
use gradwire_telemetry::{
    Counter, Gauge, Histogram, TimeCounter,
    catalog::{DAEMON, host_label, rank_label},
};

/// Creates every metric with known labels. Call this once the recorder is installed.
pub fn start() {
    LazyLock::force(&DAEMON);
    LazyLock::force(&FAILURES);
    LazyLock::force(&REJECTED);
    LazyLock::force(&PHASES);
    LazyLock::force(&SUBMITTED);
}

/// One more than the largest number of a collective; the numbers begin at 1.
const COLLECTIVES: usize = Collective::ALL[Collective::ALL.len() - 1] as usize + 1;

/// By collective and origin. Most combinations never occur, so each is created on first use.
static SUBMISSIONS: LazyLock<Vec<OnceLock<Counter>>> =
    LazyLock::new(|| (0..COLLECTIVES * Origin::ALL.len()).map(|_| OnceLock::new()).collect());

/// By kind. Kinds that have not occurred are shown as 0, so that alerts can rely on them.
static FAILURES: LazyLock<Vec<Counter>> = LazyLock::new(|| {
    FailureKind::ALL.iter().map(|kind| DAEMON.failures.series([kind.name()])).collect()
});

/// The algorithms, and one for an operation on a single node.
const WAYS: usize = Algorithm::ALL.len() + 1;

/// By collective and algorithm, created on first use. The last algorithm is "none", for a single
/// node.
static MOVED: LazyLock<Vec<OnceLock<Counter>>> =
    LazyLock::new(|| (0..COLLECTIVES * WAYS).map(|_| OnceLock::new()).collect());

/// The counter of an operation's bytes. `algorithm` is `None` for a single node.
pub(crate) fn moved(collective: Collective, algorithm: Option<Algorithm>) -> &'static Counter {
    let way = algorithm.map_or(WAYS - 1, |algorithm| algorithm as usize);
    MOVED[collective as usize * WAYS + way].get_or_init(|| {
        let (algorithm, scope) =
            algorithm.map_or(("none", "intra_node"), |known| (known.name(), "inter_node"));
        DAEMON.moved.series([collective.name(), algorithm, scope])
    })
}

pub(crate) fn submission(collective: Collective, origin: Origin) {
    let index = collective as usize * Origin::ALL.len() + origin as usize;
    let series = || DAEMON.submissions.series([collective.name(), origin.name()]);
    SUBMISSIONS[index].get_or_init(series).increment(1);
}

/// By kind of memory: shared and ordinary.
static SUBMITTED: LazyLock<[Counter; 2]> =
    LazyLock::new(|| ["shared", "ordinary"].map(|memory| DAEMON.submitted.series([memory])));

/// A rank contributes `bytes` bytes; `copied` if it has copied them to shared memory.
pub(crate) fn contribution(bytes: u64, copied: bool) {
    SUBMITTED[usize::from(copied)].increment(bytes);
}

/// A data connection that broke was made again.
pub(crate) fn recovered_connection() {
    DAEMON.recovered_connections.increment(1);
}

/// The stream to the coordinator broke, and continues on another connection.
pub(crate) fn recovered_stream() {
    DAEMON.recovered_streams.increment(1);
}

pub(crate) fn process_sets(sets: usize) {
    DAEMON.process_sets.set(sets as f64);
}

pub(crate) fn allocation_request() {
    DAEMON.allocation_requests.increment(1);
}

/// The phases that a daemon measures.
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
    /// When its order was received.
    pub(crate) ordered: Instant,
    /// When its result was complete. `None` if it was published as it was computed.
    pub(crate) complete: Option<Instant>,
    /// When the local ranks had the result.
    pub(crate) published: Instant,
}

pub(crate) fn operation(tensors: usize, bytes: u64, times: Times) {
    let Times { ordered, complete, published } = times;
    DAEMON.operations.increment(1);
    OPERATIONS.fetch_add(1, Relaxed);
    DAEMON.operation_tensors.increment(tensors as u64);
    DAEMON.published.increment(bytes);
    DAEMON.operation.record(published.saturating_duration_since(ordered));
    let complete = complete.inspect(|complete| {
        PHASES.publish.record(published.saturating_duration_since(*complete));
    });
    PHASES.transfer.record(complete.unwrap_or(published).saturating_duration_since(ordered));
}

/// How long it took until all local ranks had submitted a tensor.
pub(crate) fn gathered(took: Duration) {
    PHASES.gather.record(took);
}

pub(crate) fn queued() {
    DAEMON.queued_tensors.increment(1.0);
}

/// `tensors` tensors have left the queue.
pub(crate) fn unqueued(tensors: usize) {
    DAEMON.queued_tensors.decrement(tensors as f64);
}

pub(crate) fn workers(attached: usize, shared_bytes: u64) {
    DAEMON.workers.set(attached as f64);
    DAEMON.shared_memory.set(shared_bytes as f64);
}

/// How one local rank spends its time.
#[derive(Debug)]
pub(crate) struct RankMetrics {
    steps: Counter,
    blocked: TimeCounter,
    in_flight: TimeCounter,
}

impl RankMetrics {
    pub(crate) fn new(rank: Rank) -> Self {
        let (rank, daemon) = (rank_label(rank.0), &*DAEMON);
        Self {
            steps: daemon.rank_steps.series([&rank]),
            blocked: daemon.rank_blocked.series([&rank]),
            in_flight: daemon.rank_in_flight.series([&rank]),
        }
    }

    pub(crate) fn add(&self, progress: &Progress) {
        self.steps.increment(progress.steps);
        self.blocked.add(progress.blocked);
        self.in_flight.add(progress.in_flight);
    }

    /// The time since the last step of a rank that has made one.
    pub(crate) fn since_step(rank: Rank) -> Gauge {
        DAEMON.rank_since_step.series([&rank_label(rank.0)])
    }

    /// The time per step of a rank that has made several.
    pub(crate) fn step(rank: Rank) -> Gauge {
        DAEMON.rank_step.series([&rank_label(rank.0)])
    }
}

static PIECES: AtomicU64 = AtomicU64::new(0);

static OPERATIONS: AtomicU64 = AtomicU64::new(0);

/// How many operations are complete on this node.
pub(crate) fn operations() -> u64 {
    OPERATIONS.load(Relaxed)
}

/// How many pieces all lanes are exchanging.
pub(crate) fn pieces_in_flight() -> u32 {
    u32::try_from(PIECES.load(Relaxed)).unwrap_or(u32::MAX)
}

/// One owner's share of a gauge that several owners share. Dropping it removes the share.
#[derive(Debug)]
pub(crate) struct Share {
    gauge: Gauge,
    /// The sum of all owners, for readers in this process.
    total: Option<&'static AtomicU64>,
    value: f64,
}

impl Share {
    fn new(gauge: Gauge) -> Self {
        Self { gauge, total: None, value: 0.0 }
    }

    /// A share of the pieces that lanes are exchanging.
    pub(crate) fn of_pieces() -> Self {
        let gauge = DAEMON.pieces_in_flight.clone();
        Self { gauge, total: Some(&PIECES), value: 0.0 }
    }

    /// A share of the frames that links hold.
    pub(crate) fn of_held_frames() -> Self {
        Self::new(DAEMON.held_frames.clone())
    }

    /// A share of the bytes of buffers of this kind.
    pub(crate) fn of_memory(buffer: &str) -> Self {
        Self::new(DAEMON.memory.series([buffer]))
    }

    pub(crate) fn add(&mut self, more: usize) {
        self.value += more as f64;
        if let Some(total) = self.total {
            total.fetch_add(more as u64, Relaxed);
        }
        self.gauge.increment(more as f64);
    }

    pub(crate) fn remove(&mut self, less: usize) {
        self.value -= less as f64;
        if let Some(total) = self.total {
            total.fetch_sub(less as u64, Relaxed);
        }
        self.gauge.decrement(less as f64);
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.gauge.decrement(self.value);
        if let Some(total) = self.total {
            total.fetch_sub(self.value as u64, Relaxed);
        }
    }
}

/// How a lane spends its time.
#[derive(Debug)]
pub(crate) struct LaneActivity {
    pub(crate) reduce: TimeCounter,
    pub(crate) send: TimeCounter,
    pub(crate) receive: TimeCounter,
    pub(crate) publish: TimeCounter,
    pub(crate) idle: TimeCounter,
}

impl LaneActivity {
    pub(crate) fn new(lane: u32) -> Self {
        let lane = lane.to_string();
        let of = |activity| DAEMON.lane_seconds.series([&lane, activity]);
        Self {
            reduce: of("reduce"),
            send: of("send"),
            receive: of("receive"),
            publish: of("publish"),
            idle: of("idle"),
        }
    }
}

/// How many threads may work on tensor bytes at once.
pub(crate) fn reducing_threads(threads: usize) {
    DAEMON.reducing_threads.set(threads as f64);
}

/// A helper has done these shares.
pub(crate) fn helped(shares: usize) {
    DAEMON.helper_shares.increment(shares as u64);
}

/// Helpers have been woken.
pub(crate) fn woken(helpers: usize) {
    DAEMON.helper_wakes.increment(helpers as u64);
}

/// The bytes exchanged with one peer.
#[derive(Debug)]
pub(crate) struct PeerTraffic {
    sent: Counter,
    received: Counter,
    /// The bytes sent and received, for readers in this process.
    bytes: [AtomicU64; 2],
}

impl PeerTraffic {
    /// The one with this node itself, which exchanges nothing and has no series.
    pub(crate) fn own() -> Self {
        Self { sent: Counter::noop(), received: Counter::noop(), bytes: Default::default() }
    }

    pub(crate) fn new(node: usize, host: &str) -> Self {
        let host = host_label(node, host);
        Self {
            sent: DAEMON.sent.series([host]),
            received: DAEMON.received.series([host]),
            bytes: Default::default(),
        }
    }

    pub(crate) fn moved(&self, sent: u64, received: u64) {
        self.sent.increment(sent);
        self.received.increment(received);
        self.bytes[0].fetch_add(sent, Relaxed);
        self.bytes[1].fetch_add(received, Relaxed);
    }

    /// Bytes sent and received.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        (self.bytes[0].load(Relaxed), self.bytes[1].load(Relaxed))
    }
}

/// The path to one peer, or to all peers that share a label.
#[derive(Debug, Clone)]
pub(crate) struct PathMetrics {
    peer: String,
    packets: Counter,
    retransmits: Counter,
    round_trip: Gauge,
}

impl PathMetrics {
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

    /// Counts packets that were sent, and the retransmissions among them.
    pub(crate) fn sent(&self, packets: u32, retransmits: u32) {
        self.packets.increment(packets.into());
        self.retransmits.increment(retransmits.into());
    }

    pub(crate) fn takes(&self, round_trip: Duration) {
        self.round_trip.set(round_trip.as_secs_f64());
    }
}

/// The rate of this host's line, in bytes per second.
pub(crate) fn line_rate(bytes: u64) {
    DAEMON.line_rate.series([]).set(bytes as f64);
}

/// Why a connection did not pass its handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rejection {
    NotGradwire,
    WrongJob,
    Secret,
    Superseded,
    Broken,
    Silent,
    TooMany,
    WorkerRefused,
    WorkerBroken,
}

impl Rejection {
    /// All reasons in the order of their numbers, with their labels.
    const ALL: [(Self, &str); 9] = [
        (Self::NotGradwire, "not_gradwire"),
        (Self::WrongJob, "wrong_job"),
        (Self::Secret, "secret"),
        (Self::Superseded, "superseded"),
        (Self::Broken, "broken"),
        (Self::Silent, "silent"),
        (Self::TooMany, "too_many"),
        (Self::WorkerRefused, "worker_refused"),
        (Self::WorkerBroken, "worker_broken"),
    ];
}

/// By reason. All are shown from the start, so that alerts can rely on them.
static REJECTED: LazyLock<[Counter; Rejection::ALL.len()]> =
    LazyLock::new(|| Rejection::ALL.map(|(_, label)| DAEMON.rejected_connections.series([label])));

pub(crate) fn rejected_connection(why: Rejection) {
    REJECTED[why as usize].increment(1);
}

/// How many tensors have waited too long for ranks of this node.
pub(crate) fn stalled(tensors: usize) {
    DAEMON.stalled_tensors.set(tensors as f64);
}

pub(crate) fn failure(kind: FailureKind) {
    FAILURES[kind as usize].increment(1);
}

/// A heartbeat's round trip, and the best estimate of the clock's offset.
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
        assert!(Algorithm::ALL.iter().enumerate().all(|(at, it)| *it as usize == at));
        assert!(Origin::ALL.iter().enumerate().all(|(at, it)| *it as usize == at));
        assert!(Rejection::ALL.iter().enumerate().all(|(at, (it, _))| *it as usize == at));
        assert!(FailureKind::ALL.iter().enumerate().all(|(at, it)| *it as usize == at));
    }
}
