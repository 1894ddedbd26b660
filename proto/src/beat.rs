//! Heartbeats as datagrams, beside those on the stream between a node and the coordinator.
//!
//! After an outage a stream is silent until its system sends the lost data again, which may take a
//! second. A datagram arrives as soon as the line works again. If no datagram ever arrives, because
//! a firewall lets only TCP pass, there are still the stream's own heartbeats.
//!
//! ```text
//!  0      4      5          8       12          16            24            32              64
//!  ├──────┼──────┼──────────┼────────┼───────────┼─────────────┼─────────────┼───────────────┤
//!  │"GWHB"│ side │ 0        │ node   │ 0         │ epoch       │ count       │ proof         │
//!  └──────┴──────┴──────────┴────────┴───────────┴─────────────┴─────────────┴───────────────┘
//! ```
//!
//! Numbers are little endian. A node counts its heartbeats; the coordinator answers each with the
//! same count. Both prove the job's secret over all of it (TRUST). An overheard heartbeat is of no
//! use a second time, because counts that are not new are ignored.

use std::time::{Duration, Instant};

use crate::{
    Epoch, JobId, NodeId, Secret,
    auth::{Claim, PROOF_BYTES},
};

/// Bytes of a heartbeat.
pub const BEAT_BYTES: usize = 32 + PROOF_BYTES;

const MAGIC: [u8; 4] = *b"GWHB";

/// How many heartbeats are sent as datagrams in the time between two on the stream.
pub const BEATS_PER_INTERVAL: u32 = 5;

/// Who sends a heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Side {
    /// A node.
    Node = 1,
    /// The coordinator, in answer.
    Coordinator = 2,
}

/// A heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Beat {
    /// Who sends it.
    pub side: Side,
    /// The node, which sends or receives it.
    pub node: NodeId,
    /// The world's epoch.
    pub epoch: Epoch,
    /// How many the node has sent before.
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

    /// Reads a datagram; none, if it is no heartbeat of this `side`, `job` and `epoch`.
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
    /// In every way. An outage as long as the configured timeout is survived, so the time between
    /// two heartbeats is added to it: one may have been due when the outage began.
    pub all: Duration,
    /// On the stream, while datagrams come: longer by the time that its system may take to send
    /// lost data again.
    pub stream: Duration,
    /// How long the system may take for that, if it is known.
    pub retransmission: Duration,
}

impl Limits {
    /// The limits where heartbeats are sent at this `interval`, and an outage of `timeout` is
    /// survived.
    pub fn new(interval: Duration, timeout: Duration) -> Self {
        // Systems take no less than a second.
        let retransmission = (timeout / 4).max(Duration::from_secs(1));
        let all = timeout + interval;
        Self { all, stream: all + retransmission, retransmission }
    }
}

/// When something last came from the other side, by the receiver's own clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LastReceived {
    /// On the stream.
    pub stream: Duration,
    /// By datagram.
    pub datagram: Duration,
}

/// The other side has been silent for too long. The value is for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Silence {
    /// In every way.
    All(Duration),
    /// On the stream, although datagrams come.
    Stream(Duration),
}

impl LastReceived {
    /// As if something had just come in every way.
    pub fn at(now: Duration) -> Self {
        Self { stream: now, datagram: now }
    }

    /// When something last came in any way.
    pub fn last(&self) -> Duration {
        self.stream.max(self.datagram)
    }

    /// When the silence is longer than allowed, if nothing comes until then.
    pub fn deadline(&self, limits: &Limits) -> Duration {
        (self.last() + limits.all).min(self.stream + limits.stream)
    }

    /// Whether it has been silent for too long.
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

/// Notices that this process was suspended: stopped by a signal, or frozen together with its
/// machine. The others may have been suspended with it, so their silence meanwhile means nothing.
#[derive(Debug)]
pub struct Suspension {
    last_check: Instant,
}

impl Suspension {
    /// Begins to watch.
    pub fn new(now: Instant) -> Self {
        Self { last_check: now }
    }

    /// For how long this process has been suspended since the last call, if it was. `limit` is how
    /// long others may be silent; calls must come much more often.
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
    fn a_process_that_does_not_check_for_half_the_limit_was_suspended() {
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
        // The last datagram came just before the outage, the next one is sent just after it.
        let last = LastReceived { stream: begin - interval, datagram: begin - between };
        let back = begin + timeout + between;
        assert_eq!(last.silence(&limits, back), None);
        let last = LastReceived { datagram: back, ..last };
        // The stream follows when its system sends again.
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
        // No datagram gets through, ever.
        let only_stream = LastReceived { stream: seconds(9.0), datagram: Duration::ZERO };
        assert_eq!(only_stream.deadline(&limits), seconds(12.5));
        let only_datagrams = LastReceived { stream: seconds(1.0), datagram: seconds(5.4) };
        assert_eq!(only_datagrams.deadline(&limits), seconds(5.5));
        assert_eq!(only_datagrams.silence(&limits, seconds(5.4)), None);
        let silence = only_datagrams.silence(&limits, seconds(5.5));
        assert_eq!(silence, Some(Silence::Stream(seconds(4.5))));
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
    fn what_is_changed_cut_or_of_another_job_is_no_heartbeat() {
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
