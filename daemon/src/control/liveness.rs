//! When the last messages of the coordinator arrived. The heartbeat thread and the stream share it.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use gradwire_proto::beat::{LastReceived, Limits, Silence};

/// When the last messages of the coordinator arrived.
#[derive(Debug)]
pub(crate) struct Liveness {
    begin: Instant,
    stream_ns: AtomicU64,
    datagram_ns: AtomicU64,
    pub(super) echo_ns: AtomicU64,
}

impl Liveness {
    pub(crate) fn new() -> Self {
        let [stream_ns, datagram_ns, echo_ns] = [0; 3].map(AtomicU64::new);
        Self { begin: Instant::now(), stream_ns, datagram_ns, echo_ns }
    }

    pub(super) fn now_ns(&self) -> u64 {
        self.begin.elapsed().as_nanos() as u64
    }

    pub(super) fn stream_received(&self) {
        self.stream_ns.store(self.now_ns(), Ordering::Relaxed);
    }

    /// The coordinator has answered a datagram.
    pub(crate) fn datagram_received(&self) {
        self.datagram_ns.store(self.now_ns(), Ordering::Relaxed);
    }

    /// Ignores all silence up to now: this process itself was suspended.
    pub(super) fn restart(&self) {
        self.stream_received();
        self.datagram_received();
    }

    /// Whether the coordinator has been silent for too long.
    pub(crate) fn silence(&self, limits: &Limits) -> Option<Silence> {
        let when = |ns: &AtomicU64| Duration::from_nanos(ns.load(Ordering::Relaxed));
        let last =
            LastReceived { stream: when(&self.stream_ns), datagram: when(&self.datagram_ns) };
        last.silence(limits, Duration::from_nanos(self.now_ns()))
    }
}
