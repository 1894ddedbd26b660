//! Heartbeats as datagrams, in addition to those on the stream between a node and the coordinator.
//!
//! After an outage a stream is silent until TCP sends the lost data again, which may take a second.
//! A datagram arrives as soon as the line works again. If datagrams never arrive, because a
//! firewall lets only TCP pass, there are still the stream's own heartbeats.
//!
//! ```text
//!  0      4      5          8       12          16            24            32              64
//!  ├──────┼──────┼──────────┼────────┼───────────┼─────────────┼─────────────┼───────────────┤
//!  │"GWHB"│ side │ 0        │ node   │ 0         │ epoch       │ count       │ proof         │
//!  └──────┴──────┴──────────┴────────┴───────────┴─────────────┴─────────────┴───────────────┘
//! ```
//!
//! Numbers are little endian. A node counts its heartbeats; the coordinator answers each with the
//! same count. The proof of the job's secret covers all other fields (TRUST). Old counts are
//! ignored, so an intercepted heartbeat can't be used again.

use std::time::{Duration, Instant};

use crate::{
    Epoch, JobId, NodeId, Secret,
    auth::{Claim, PROOF_BYTES},
};

/// The length of a heartbeat in bytes.
pub const BEAT_BYTES: usize = 32 + PROOF_BYTES;

const MAGIC: [u8; 4] = *b"GWHB";

/// The number of datagrams in the time between two heartbeats on the stream.
pub const BEATS_PER_INTERVAL: u32 = 5;

/// The sender of a heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Side {
    /// A node.
    Node = 1,
    /// The coordinator, as an answer.
    Coordinator = 2,
}

/// A heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Beat {
    /// The sender.
    pub side: Side,
    /// The node that sends or receives it.
    pub node: NodeId,
    /// The world's epoch.
    pub epoch: Epoch,
    /// The number of heartbeats that the node has sent before.
    pub count: u64,
}

impl Beat {
    fn unproven(&self) -> [u8; BEAT_BYTES] {
        let mut bytes = [0; BEAT_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = self.side as u8;
        bytes[8..12].copy_from_slice(&self.node.0.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.epoch.0.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.count.to_le_bytes());
        bytes
    }

    /// The datagram, with the proof of `job`'s secret.
    pub fn encode(&self, job: &JobId, secret: &Secret) -> [u8; BEAT_BYTES] {
        let mut bytes = self.unproven();
        let (body, proof) = bytes.split_at_mut(BEAT_BYTES - PROOF_BYTES);
        proof.copy_from_slice(&secret.prove(&Claim::Beat { job: job.as_str(), body }));
        bytes
    }

    /// Reads a datagram. `None` if it is not a heartbeat of this `side`, `job` and `epoch`.
    pub fn decode(
        bytes: &[u8],
        side: Side,
        epoch: Epoch,
        job: &JobId,
        secret: &Secret,
    ) -> Option<Self> {
        let bytes: &[u8; BEAT_BYTES] = bytes.try_into().ok()?;
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[at + i]));
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let beat = Self { side, node: NodeId(word(8)), epoch, count: long(24) };
        let (body, proof) = bytes.split_at(BEAT_BYTES - PROOF_BYTES);
        let is_canonical = beat.unproven()[..body.len()] == *body;
        let claim = Claim::Beat { job: job.as_str(), body };
        (is_canonical && secret.verify(&claim, proof)).then_some(beat)
    }
}

/// How long the other side may be silent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// On the stream and in datagrams. The job must survive an outage as long as the configured
    /// timeout. So the time between two heartbeats is added: one may have been due when the outage
    /// began.
    pub all: Duration,
    /// On the stream, while datagrams arrive: longer by the time that TCP may take to send lost
    /// data again.
    pub stream: Duration,
    /// How long TCP may take for that.
    pub retransmission: Duration,
}

impl Limits {
    /// The limits for heartbeats at this `interval`, to survive an outage of `timeout`.
    pub fn new(interval: Duration, timeout: Duration) -> Self {
        // TCP takes at least a second.
        let retransmission = (timeout / 4).max(Duration::from_secs(1));
        let all = timeout + interval;
        Self { all, stream: all + retransmission, retransmission }
    }

    /// The limits for a side that may return within `time` after its last message.
    #[must_use]
    pub fn at_least(self, time: Duration) -> Self {
        let all = self.all.max(time);
        Self { all, stream: all + self.retransmission, ..self }
    }
}

/// When the other side was last heard, by the receiver's own clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LastReceived {
    /// On the stream.
    pub stream: Duration,
    /// By datagram.
    pub datagram: Duration,
}

/// The other side has been silent for too long. The value is the length of the silence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Silence {
    /// On the stream and in datagrams.
    All(Duration),
    /// On the stream, although datagrams arrive.
    Stream(Duration),
}

impl LastReceived {
    /// Both last heard `now`.
    pub fn at(now: Duration) -> Self {
        Self { stream: now, datagram: now }
    }

    /// When the other side was last heard in either way.
    pub fn last(&self) -> Duration {
        self.stream.max(self.datagram)
    }

    /// When the silence becomes too long, if nothing arrives until then.
    pub fn deadline(&self, limits: &Limits) -> Duration {
        (self.last() + limits.all).min(self.stream + limits.stream)
    }

    /// The silence, if it is too long.
    pub fn silence(&self, limits: &Limits, now: Duration) -> Option<Silence> {
        if now >= self.last() + limits.all {
            Some(Silence::All(now - self.last()))
        } else if now >= self.stream + limits.stream {
            Some(Silence::Stream(now - self.stream))
        } else {
            None
        }
    }
}

/// Detects that this process was suspended: stopped by a signal, or frozen together with its
/// machine. The others may have been suspended with it, so their silence during that time does not
/// count.
#[derive(Debug)]
pub struct Suspension {
    last_check: Instant,
}

impl Suspension {
    /// Begins to watch.
    pub fn new(now: Instant) -> Self {
        Self { last_check: now }
    }

    /// How long this process was suspended since the last call, if it was. `limit` is how long
    /// others may be silent; call this much more often.
    pub fn check(&mut self, now: Instant, limit: Duration) -> Option<Duration> {
        let gap = now.saturating_duration_since(self.last_check);
        self.last_check = now;
        (gap > limit / 2).then_some(gap)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_check_for_half_the_limit_is_a_suspension() {
        let (limit, begin) = (Duration::from_secs(4), Instant::now());
        let mut suspension = Suspension::new(begin);
        let mut check = |seconds| suspension.check(begin + Duration::from_secs(seconds), limit);
        assert_eq!([1, 3].map(&mut check), [None; 2]);
        assert_eq!(check(6), Some(Duration::from_secs(3)));
        assert_eq!(check(7), None);
    }

    #[test]
    fn an_outage_as_long_as_the_limit_is_survived() {
        let (interval, timeout) = (Duration::from_millis(500), Duration::from_secs(3));
        let limits = Limits::new(interval, timeout);
        let begin = Duration::from_secs(10);
        let between = interval / BEATS_PER_INTERVAL;
        // The last datagram arrived just before the outage, the next one is sent just after it.
        let last = LastReceived { stream: begin - interval, datagram: begin - between };
        let back = begin + timeout + between;
        assert_eq!(last.silence(&limits, back), None);
        let last = LastReceived { datagram: back, ..last };
        // The stream follows when TCP sends again.
        let again = begin + timeout + limits.retransmission;
        assert_eq!(last.silence(&limits, again - Duration::from_millis(1)), None);
    }

    #[test]
    fn silence_is_reported_with_what_is_silent() {
        let limits = Limits::new(Duration::from_millis(500), Duration::from_secs(3));
        let seconds = Duration::from_secs_f64;
        let last = LastReceived::at(seconds(1.0));
        assert_eq!(last.deadline(&limits), seconds(4.5));
        assert_eq!(last.silence(&limits, seconds(4.4)), None);
        assert_eq!(last.silence(&limits, seconds(4.5)), Some(Silence::All(seconds(3.5))));
        // Datagrams never get through.
        let only_stream = LastReceived { stream: seconds(9.0), datagram: Duration::ZERO };
        assert_eq!(only_stream.deadline(&limits), seconds(12.5));
        let only_datagrams = LastReceived { stream: seconds(1.0), datagram: seconds(5.4) };
        assert_eq!(only_datagrams.deadline(&limits), seconds(5.5));
        assert_eq!(only_datagrams.silence(&limits, seconds(5.4)), None);
        let silence = only_datagrams.silence(&limits, seconds(5.5));
        assert_eq!(silence, Some(Silence::Stream(seconds(4.5))));
    }

    #[test]
    fn a_side_that_may_return_has_more_time() {
        let limits = Limits::new(Duration::from_millis(500), Duration::from_secs(3));
        assert_eq!(limits.at_least(Duration::from_secs(1)), limits);
        let longer = limits.at_least(Duration::from_secs(10));
        let seconds = Duration::from_secs;
        assert_eq!((longer.all, longer.stream), (seconds(10), seconds(11)));
        assert_eq!(longer.retransmission, limits.retransmission);
    }

    fn beat() -> Beat {
        Beat { side: Side::Node, node: NodeId(3), epoch: Epoch(5 << 40), count: 6 << 33 }
    }

    #[test]
    fn a_heartbeat_survives_the_wire() {
        let (job, secret) = (JobId::new("job").unwrap(), Secret::generate());
        for side in [Side::Node, Side::Coordinator] {
            let beat = Beat { side, ..beat() };
            let bytes = beat.encode(&job, &secret);
            assert_eq!(Beat::decode(&bytes, side, beat.epoch, &job, &secret), Some(beat));
        }
    }

    #[test]
    fn other_datagrams_are_not_heartbeats() {
        let (job, secret) = (JobId::new("job").unwrap(), Secret::generate());
        let Beat { side, epoch, .. } = beat();
        let good = beat().encode(&job, &secret);
        let read = |bytes: &[u8]| Beat::decode(bytes, side, epoch, &job, &secret);
        for at in 0..BEAT_BYTES {
            let mut bytes = good;
            bytes[at] ^= 1;
            assert_eq!(read(&bytes), None, "byte {at}");
            assert_eq!(read(&good[..at]), None);
        }
        assert_eq!(read(&[&good[..], &[0]].concat()), None);
        let other = JobId::new("other").unwrap();
        assert_eq!(Beat::decode(&good, side, epoch, &other, &secret), None);
        assert_eq!(Beat::decode(&good, side, epoch, &job, &Secret::generate()), None);
        assert_eq!(Beat::decode(&good, Side::Coordinator, epoch, &job, &secret), None);
        assert_eq!(Beat::decode(&good, side, Epoch(1), &job, &secret), None);
    }
}
