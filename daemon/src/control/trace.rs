//! This node's part of a trace: while the coordinator asks for it, or one of the ranks is in a
//! sampled step, a thread (`gw-trace`) reads the rings of all threads and ranks, and sends new
//! events.
//!
//! One batch is in flight at a time, and all nodes together send at most [`TOTAL_RATE`]: events
//! that do not fit are overwritten in their ring, counted, and reported as lost (BOUND).

use std::{
    io,
    sync::{Arc, Weak, atomic::Ordering::SeqCst},
    thread::{self, sleep},
    time::{Duration, Instant},
};

use gradwire_proto::{
    clock::Measured,
    pb::{TraceBatch, TraceName, TraceTrack},
};
use gradwire_trace::{Event, Kind, Tracer, Track, event, time};
use prost::Message;

use super::{liveness::Liveness, node::Node, sending::Sending};
use crate::{
    model::job::{Outgoing, Underway},
    workers::worker::Worker,
};

/// A node sends a batch at least this often, with or without events, so that readers know that it
/// records.
const SIGN: Duration = Duration::from_millis(250);

/// How often the rings are read. Fewer and larger batches are better: each batch wakes up the
/// control thread, the coordinator and all readers.
const LOOK: Duration = Duration::from_millis(50);

/// How often they are read during a sampled step, which may be shorter than [`LOOK`].
const SHORT_LOOK: Duration = Duration::from_millis(10);

/// The limit of events of one thread in a batch, and of all events in bytes. Both fit into the
/// limit of a batch.
const BATCH: usize = 1_400;
const BATCH_BYTES: usize = BATCH * event::BYTES;

/// The limit of names in a batch, in bytes; one more name always fits. A batch with names has no
/// events.
const NAME_BYTES: usize = 16 << 10;

/// The limit of all nodes together, in bytes per second.
const TOTAL_RATE: f64 = 32e6;

/// How long the thread waits until a batch has been sent (WAIT).
const SENDING: Duration = Duration::from_secs(1);

/// Events of ranks that are older than this are not believed (TRUST).
const OLDEST_NS: u64 = 60_000_000_000;

/// How long a node goes on recording when nobody needs it any more: its threads may still work on a
/// sampled step.
const TRAIL: Duration = Duration::from_millis(20);

/// A longer step is not sampled to its end, because the program may have finished its training.
const LONGEST_STEP: Duration = Duration::from_secs(600);

/// Starts or stops recording and sending, as the coordinator asks.
pub(crate) fn follow(node: &Arc<Node>, is_wanted: bool) {
    if node.sending.is_asked.swap(is_wanted, SeqCst) != is_wanted {
        tracing::debug!(is_wanted, "recording for a trace was turned on or off");
        if is_wanted {
            // A new reader needs the names that were sent to an earlier one.
            node.tracer.names().restart();
        }
    }
    if is_wanted {
        begin(node);
    }
}

/// Starts recording if this worker has begun a sampled step, and asks the coordinator to start it
/// on all nodes. Called for each submission.
pub(crate) fn sample(node: &Arc<Node>, worker: &Worker) {
    if node.config.sample_steps > 0
        && worker.trace.is_sampled()
        && !node.sending.samples.swap(true, SeqCst)
    {
        begin(node);
        node.job.send(Outgoing::Sampled);
    }
}

fn begin(node: &Arc<Node>) {
    if !node.tracer.is_on() {
        node.tracer.turn(true);
    }
    // The thread that stops the recording must run.
    if !node.sending.is_running.swap(true, SeqCst)
        && let Err(error) = start(node)
    {
        node.sending.is_running.store(false, SeqCst);
        tracing::warn!(%error, "the system refused the thread that sends a trace");
    }
}

fn start(node: &Arc<Node>) -> io::Result<()> {
    let liveness = node.liveness.clone();
    let (clock_ns, monotonic_ns) = time::beside(|| liveness.clock().now_ns());
    let sender = Sender {
        node: Arc::downgrade(node),
        tracer: node.tracer.clone(),
        sending: node.sending.clone(),
        shift_ns: i128::from(clock_ns) - i128::from(monotonic_ns),
        liveness,
        sampled: None,
        wanted: None,
        stepped: Instant::now(),
        lost: 0,
        tracks: Vec::new(),
        most: 0,
        last_sent: None,
        free: Instant::now(),
    };
    thread::Builder::new().name("gw-trace".into()).spawn(move || sender.run()).map(drop)
}

struct Sender {
    node: Weak<Node>,
    tracer: Arc<Tracer>,
    liveness: Arc<Liveness>,
    sending: Arc<Sending>,
    /// The offset from the monotonic clock to the clock of heartbeats.
    shift_ns: i128,
    lost: u64,
    /// The events of this round, and the number of events in the largest track.
    tracks: Vec<TraceTrack>,
    most: usize,
    /// When this node last sent a batch, and when it may send the next one.
    last_sent: Option<Instant>,
    free: Instant,
    /// When a rank was last seen in a sampled step, when events were last needed, and when a rank
    /// last ended a step.
    sampled: Option<Instant>,
    wanted: Option<Instant>,
    stepped: Instant,
}

impl Sender {
    fn run(mut self) {
        loop {
            let Some(node) = self.node.upgrade().filter(|node| node.job.ending().is_none()) else {
                break;
            };
            let number = self.sending.looks.fetch_add(1, SeqCst) + 1;
            let is_on = self.goes_on(&node);
            self.look(&node, is_on);
            let is_full = self.most >= BATCH;
            // Before the clock's offset is known, events are of no use to others. They stay in
            // their rings.
            if let Some(measured) = self.liveness.ahead() {
                self.send(&node, measured);
            }
            if !is_full {
                self.sending.complete.store(number, SeqCst);
            }
            if !is_on && !is_full && !self.begins_again() {
                return;
            }
            drop(node);
            if !is_full {
                let is_sampled = self.sampled.is_some_and(is_recent);
                self.sending.pause(if is_sampled { SHORT_LOOK } else { LOOK });
            }
        }
        self.sending.is_running.store(false, SeqCst);
    }

    /// Stops the recording once nobody needs it any more. Returns whether it goes on.
    fn goes_on(&mut self, node: &Arc<Node>) -> bool {
        let workers = node.workers.all();
        let is_sampled = || workers.iter().any(|worker| worker.trace.is_sampled());
        if self.stepped.elapsed() > LONGEST_STEP {
            workers.iter().for_each(|worker| worker.trace.end_sample());
        }
        let now = Some(Instant::now());
        if is_sampled() {
            (self.sampled, self.wanted) = (now, now);
        }
        if self.sending.is_asked.load(SeqCst) {
            self.wanted = now;
        }
        if !self.sampled.is_some_and(is_recent) {
            self.sending.samples.store(false, SeqCst);
        }
        if self.wanted.is_some_and(is_recent) {
            return true;
        }
        self.tracer.turn(false);
        // Another thread may have seen that it was on, and relied on that.
        workers.iter().for_each(|worker| sample(node, worker));
        if self.sending.is_asked.load(SeqCst) {
            self.tracer.turn(true);
        }
        self.tracer.is_on()
    }

    /// Ends the thread, unless the recording has been started again.
    fn begins_again(&self) -> bool {
        self.sending.is_running.store(false, SeqCst);
        self.tracer.is_on() && !self.sending.is_running.swap(true, SeqCst)
    }

    fn look(&mut self, node: &Node, is_on: bool) {
        self.most = 0;
        if self.liveness.ahead().is_none() {
            node.workers.all().iter().for_each(|worker| turn(worker, is_on));
            return;
        }
        let Self { tracks, most, shift_ns, lost, stepped, .. } = self;
        let shifted =
            |at_ns: u64| u64::try_from((i128::from(at_ns) + *shift_ns).max(0)).unwrap_or(u64::MAX);
        // The events of a track follow each other.
        let mut take = |track: Track, event: Event| {
            let track = match track {
                Track::Control => 0,
                Track::Lane(lane) => 2 * lane + 1,
                Track::Rank(local) => 2 * local + 2,
            };
            if tracks.last().is_none_or(|last| last.track != track) {
                tracks.push(TraceTrack { track, events: Vec::new() });
            }
            if let Some(last) = tracks.last_mut() {
                Event { at_ns: shifted(event.at_ns), ..event }.write(&mut last.events);
                *most = (*most).max(last.events.len() / event::BYTES);
            }
        };
        // Ranks first: the daemon's events for a submission come after it.
        for worker in node.workers.all() {
            turn(&worker, is_on);
            let mut now_ns = time::now_ns();
            *lost += worker.trace.read(BATCH, |event| {
                if event.kind == Kind::Step {
                    *stepped = Instant::now();
                }
                if is_plausible(&event, &mut now_ns, time::now_ns) {
                    take(Track::Rank(worker.local_rank), event);
                }
            });
        }
        *lost += self.tracer.read(BATCH, &mut take);
    }

    /// Sends the events, one batch after the other.
    fn send(&mut self, node: &Node, measured: Measured) {
        let Some(world) = node.job.world() else { return };
        let mut tracks = std::mem::take(&mut self.tracks).into_iter().peekable();
        loop {
            // The names in these events are known by now, and are sent first.
            let names = self.tracer.names().take(NAME_BYTES);
            let mut left = if names.is_empty() { BATCH_BYTES } else { 0 };
            let fitting = std::iter::from_fn(|| {
                let track = tracks.next_if(|track| track.events.len() <= left)?;
                left -= track.events.len();
                Some(track)
            });
            let batch = TraceBatch {
                node: world.node.0,
                ahead_ns: measured.offset_ns,
                ahead_error_ns: u64::try_from(measured.error.as_nanos()).unwrap_or(u64::MAX),
                lost: std::mem::take(&mut self.lost),
                tracks: fitting.collect(),
                names: names.into_iter().map(|(number, name)| TraceName { number, name }).collect(),
            };
            let is_empty = batch.tracks.is_empty() && batch.names.is_empty() && batch.lost == 0;
            if is_empty && self.last_sent.is_some_and(|sent| sent.elapsed() < SIGN) {
                return;
            }
            sleep(self.free.saturating_duration_since(Instant::now()).min(SENDING));
            let now = Instant::now();
            self.last_sent = Some(now);
            let bytes = batch.encode_to_vec();
            let pause = bytes.len() as f64 * world.nodes.len() as f64 / TOTAL_RATE;
            self.free = now + Duration::from_secs_f64(pause);
            let (underway, departed) = Underway::new();
            node.job.send(Outgoing::Trace(bytes, underway));
            departed.wait(SENDING);
        }
    }
}

/// Whether a rank's event can have happened by now (TRUST). The rank goes on recording while its
/// events are read, so the clock is read again for an event after `now_ns`.
fn is_plausible(event: &Event, now_ns: &mut u64, read_clock: impl FnOnce() -> u64) -> bool {
    let end_ns = event.at_ns.saturating_add(event.duration_ns);
    if end_ns > *now_ns {
        *now_ns = read_clock();
    }
    end_ns <= *now_ns && event.at_ns >= now_ns.saturating_sub(OLDEST_NS)
}

fn turn(worker: &Worker, is_on: bool) {
    if let Err(error) = worker.trace.turn(is_on) {
        tracing::warn!(rank = %worker.rank, %error, "this rank's events are missing in the trace");
    }
}

/// Whether this was so recent that threads may still work on it.
fn is_recent(at: Instant) -> bool {
    at.elapsed() < TRAIL
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(at_ns: u64, duration_ns: u64) -> Event {
        Event { kind: Kind::Submit, at_ns, duration_ns, subject: 1, other: 0, name: 0, bytes: 0 }
    }

    #[test]
    fn events_recorded_while_reading_are_kept() {
        let mut now_ns = OLDEST_NS + 1_000;
        let before = event(now_ns - 50, 50);
        assert!(is_plausible(&before, &mut now_ns, || unreachable!("the clock is not needed")));
        let meanwhile = event(now_ns - 50, 60);
        assert!(is_plausible(&meanwhile, &mut now_ns, || OLDEST_NS + 1_010));
        assert_eq!(now_ns, OLDEST_NS + 1_010);
        let future = event(now_ns, 20);
        assert!(!is_plausible(&future, &mut now_ns, || OLDEST_NS + 1_019));
        assert!(!is_plausible(&event(u64::MAX, 1), &mut now_ns, || OLDEST_NS + 1_019));
        assert!(!is_plausible(&event(1_018, 0), &mut now_ns, || unreachable!("it is too old")));
        assert!(is_plausible(&event(1_019, 0), &mut now_ns, || unreachable!("it has ended")));
    }
}
