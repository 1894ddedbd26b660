//! When the coordinator's last messages arrived, and the echo of its heartbeats. The heartbeat
//! thread and the stream share this.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use gradwire_proto::{
    beat::{LastReceived, Limits, Silence},
    clock::{Clock, Estimate, Exchange, Measured, nanoseconds},
    pb::Heartbeat,
};
use parking_lot::Mutex;
use tokio::sync::Notify;

#[derive(Debug)]
pub(crate) struct Liveness {
    begin: Instant,
    stream_ns: AtomicU64,
    datagram_ns: AtomicU64,
    clock: Clock,
    heartbeats: Mutex<Heartbeats>,
    /// Whether a rank of the job has attached, as far as it is known here.
    begun: AtomicBool,
    /// When a rank of the job was last paused, as far as it is known here.
    paused: Mutex<Option<Instant>>,
    /// Whether the stream has broken, and there is not another one yet.
    is_away: AtomicBool,
    /// The stream has been silent for too long: it may have broken without a sign of that.
    is_distrusted: AtomicBool,
    distrust: Notify,
}

/// The heartbeats that were received on the stream.
#[derive(Debug, Default)]
struct Heartbeats {
    /// The coordinator's clock in the last one, and when it was received.
    last: Option<(u64, Instant)>,
    estimate: Estimate,
    /// The best estimate of the offset of the clocks.
    ahead: Option<Measured>,
}

impl Liveness {
    pub(crate) fn new() -> Self {
        Self {
            begin: Instant::now(),
            stream_ns: AtomicU64::new(0),
            datagram_ns: AtomicU64::new(0),
            clock: Clock::new(),
            heartbeats: Mutex::default(),
            begun: AtomicBool::new(false),
            paused: Mutex::default(),
            is_away: AtomicBool::new(false),
            is_distrusted: AtomicBool::new(false),
            distrust: Notify::new(),
        }
    }

    fn now_ns(&self) -> u64 {
        self.begin.elapsed().as_nanos() as u64
    }

    pub(super) fn stream_received(&self) {
        self.stream_ns.store(self.now_ns(), Ordering::Relaxed);
    }

    /// How long the coordinator has been silent, on the stream and in datagrams.
    pub(super) fn silent_for(&self) -> Duration {
        let last = self.last_received().last();
        Duration::from_nanos(self.now_ns()).saturating_sub(last)
    }

    /// The stream has broken, or there is another one. Silence is not judged meanwhile.
    pub(super) fn set_away(&self, is_away: bool) {
        self.is_away.store(is_away, Ordering::Relaxed);
        self.is_distrusted.store(false, Ordering::Relaxed);
    }

    /// The stream may have broken without a sign of that: asks for another one.
    pub(super) fn distrust(&self) {
        self.is_distrusted.store(true, Ordering::Relaxed);
        self.distrust.notify_one();
    }

    /// Waits until another stream is asked for.
    pub(super) async fn distrusted(&self) {
        // An earlier notification may be left over.
        while !self.is_distrusted.load(Ordering::Relaxed) {
            self.distrust.notified().await;
        }
    }

    /// A rank of the job has attached.
    pub(crate) fn begin(&self) {
        self.begun.store(true, Ordering::Relaxed);
    }

    /// Whether a rank of the job has attached.
    pub(crate) fn has_begun(&self) -> bool {
        self.begun.load(Ordering::Relaxed)
    }

    /// The clock of heartbeats.
    pub(super) fn clock(&self) -> &Clock {
        &self.clock
    }

    /// How far this clock is ahead of the coordinator's, once that is known.
    pub(super) fn ahead(&self) -> Option<Measured> {
        self.heartbeats.lock().ahead
    }

    /// When something was noticed, on the coordinator's clock, for the report of a failure.
    /// Nanoseconds; 0 if that clock is not known yet.
    pub(super) fn noticed_ns(&self, at: Instant) -> u64 {
        let here_ns = self.clock.now_ns().saturating_sub(nanoseconds(at.elapsed()));
        let back = |ahead: Measured| ahead.offset_ns.saturating_neg();
        self.ahead().map_or(0, |ahead| here_ns.saturating_add_signed(back(ahead)))
    }

    /// The next heartbeat for the coordinator, which echoes its last one. Without the count of
    /// received messages.
    pub(super) fn heartbeat(&self) -> Heartbeat {
        let heartbeats = self.heartbeats.lock();
        let (last, ahead) = (heartbeats.last, heartbeats.ahead);
        drop(heartbeats);
        Heartbeat {
            sent_ns: self.clock.now_ns(),
            echo_ns: last.map_or(0, |(sent_ns, _)| sent_ns),
            held_ns: last.map_or(0, |(_, received)| nanoseconds(received.elapsed())),
            report: None,
            trace: false,
            begun: self.has_begun(),
            received: 0,
            paused: false,
            round_trip_ns: ahead.map_or(0, |ahead| nanoseconds(ahead.round_trip)),
        }
    }

    /// A heartbeat of the coordinator was received. If it echoes one of this node, returns the
    /// round trip and the best estimate of the offset of the clocks.
    pub(super) fn heartbeat_received(&self, heartbeat: &Heartbeat) -> Option<(Duration, Measured)> {
        let (now, arrived_ns) = (Instant::now(), self.clock.now_ns());
        let Heartbeat { sent_ns: answered_ns, echo_ns, held_ns, begun, paused, .. } = *heartbeat;
        if paused {
            self.pause(now);
        }
        if begun {
            self.begin();
        }
        let mut heartbeats = self.heartbeats.lock();
        heartbeats.last = Some((answered_ns, now));
        if echo_ns == 0 {
            return None;
        }
        let exchange = Exchange { sent_ns: echo_ns, held_ns, answered_ns, arrived_ns };
        let measured = exchange.measure()?;
        let best = heartbeats.estimate.add(measured, now);
        heartbeats.ahead = Some(best);
        Some((measured.round_trip, best))
    }

    /// Some rank of the job is paused.
    pub(crate) fn pause(&self, now: Instant) {
        *self.paused.lock() = Some(now);
    }

    /// For how long no rank of the job has been paused; `None` if none ever was.
    pub(crate) fn unpaused(&self, now: Instant) -> Option<Duration> {
        self.paused.lock().map(|last| now.saturating_duration_since(last))
    }

    /// The coordinator has answered a datagram.
    pub(crate) fn datagram_received(&self) {
        self.datagram_ns.store(self.now_ns(), Ordering::Relaxed);
    }

    /// Ignores all silence up to now: this process itself was suspended.
    pub(super) fn restart(&self) {
        // While this process was stopped, the clocks may have drifted apart.
        self.heartbeats.lock().estimate = Estimate::default();
        self.stream_received();
        self.datagram_received();
    }

    /// Whether the coordinator has been silent for too long.
    pub(crate) fn silence(&self, limits: &Limits) -> Option<Silence> {
        if self.is_away.load(Ordering::Relaxed) {
            return None;
        }
        self.last_received().silence(limits, Duration::from_nanos(self.now_ns()))
    }

    fn last_received(&self) -> LastReceived {
        let when = |ns: &AtomicU64| Duration::from_nanos(ns.load(Ordering::Relaxed));
        LastReceived { stream: when(&self.stream_ns), datagram: when(&self.datagram_ns) }
    }
}
