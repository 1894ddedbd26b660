//! The sizes of pieces and chunks, and how many pieces are in flight. They start with the settings,
//! and measured times correct them.
//!
//! Sizes are decided like algorithms ([`Decision`]), by the time per byte. It is measured in
//! allreduces of all nodes, in full pieces that use up the credit and have the same choice. The
//! candidates are twice and half of each size; after a change, also around the new sizes. None has
//! more bytes in flight than the settings allow, because they bound the memory of nodes (BOUND).
//! None has more than twice the credit of the settings, because a run to measure it could not fill
//! the credit. Sizes are not explored while algorithms are, so exploration stays rare. All nodes
//! get the sizes with each operation (ORD, SAME).

use std::time::Duration;

use gradwire_proto::pb;

use super::decision::{Decision, FILLS};
use crate::model::{
    EngineConfig,
    config::MIN_PIECE_BYTES,
    learned::{Sizes, Time},
};

/// The most candidates (BOUND).
const MAX_CANDIDATES: usize = 32;

/// The number of bytes to which times refer.
const UNIT: f64 = (1 << 20) as f64;

/// An operation whose time can be used to compare sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sample {
    /// Its candidate.
    pub(crate) candidate: usize,
    /// Its bytes.
    pub(crate) bytes: u64,
}

/// The sizes of one job.
#[derive(Debug)]
pub(crate) struct Tuner {
    decision: Decision<Sizes>,
    limits: Limits,
    /// The candidate of the next operation.
    next: (usize, Sizes),
}

/// The most that a candidate may have in flight.
#[derive(Debug, Clone, Copy)]
struct Limits {
    bytes: u64,
    credit: u32,
}

impl Limits {
    fn allow(self, sizes: Sizes) -> bool {
        let Sizes { piece, credit, .. } = sizes;
        credit <= self.credit && piece.saturating_mul(credit.into()) <= self.bytes
    }
}

/// Sizes that differ by a factor of two in one or two values, within these limits.
fn around(sizes: Sizes, limits: Limits) -> impl Iterator<Item = Sizes> {
    let Sizes { piece, credit, chunk } = sizes;
    let of = |piece, credit, chunk| Sizes { piece, credit, chunk };
    let all = [
        of(piece / 2, credit.saturating_mul(2), chunk),
        of(piece * 2, credit / 2, chunk),
        of(piece, credit, chunk / 2),
        of(piece, credit, chunk * 2),
        of(piece / 2, credit, chunk),
        of(piece, credit / 2, chunk),
        of(piece, credit.saturating_mul(2), chunk),
        of(piece * 2, credit, chunk),
    ];
    all.into_iter().filter(move |sizes| sizes.are_possible() && limits.allow(*sizes))
}

impl Tuner {
    /// Starts with the sizes of the settings.
    pub(super) fn new(config: &EngineConfig) -> Self {
        let &EngineConfig { piece_bytes, credit_pieces: credit, chunk_bytes, .. } = config;
        let sizes = Sizes { piece: piece_bytes, credit, chunk: chunk_bytes };
        let bytes = piece_bytes.saturating_mul(credit.into());
        let limits = Limits { bytes, credit: credit.saturating_mul(2) };
        let all = std::iter::once(sizes).chain(around(sizes, limits)).map(|sizes| (sizes, 1.0));
        let run = FILLS.saturating_mul(limits.credit);
        let reason = "from the settings".to_owned();
        let decision = Decision::among(all, reason, run, config.may_explore);
        Self { decision, limits, next: (0, sizes) }
    }

    /// The candidate of the next operation, and its sizes.
    pub(super) fn next(&self) -> (usize, Sizes) {
        self.next
    }

    /// The chosen sizes.
    pub(super) fn chosen(&self) -> Sizes {
        self.decision.spec()
    }

    /// Whether a candidate is the chosen one.
    pub(super) fn is_chosen(&self, candidate: usize) -> bool {
        candidate == self.decision.chosen()
    }

    /// The sample that the next operation is, if its `bytes` are about a full piece.
    pub(super) fn sample(&self, bytes: u64) -> Option<Sample> {
        let (candidate, sizes) = self.next;
        (bytes >= sizes.piece / 4 * 3 && bytes >= MIN_PIECE_BYTES)
            .then_some(Sample { candidate, bytes })
    }

    /// Notes that an operation has started. `is_settled` returns whether algorithms are settled.
    pub(super) fn started(&mut self, is_settled: impl FnOnce() -> bool) {
        self.next = self.decision.next_if(is_settled);
    }

    /// Observes the time of an operation, with `in_flight` operations of the same choice in flight
    /// all the time. Returns the reason if that changes the sizes.
    pub(super) fn observe(
        &mut self,
        sample: Sample,
        time: Duration,
        in_flight: u32,
    ) -> Option<String> {
        let Sample { candidate, bytes } = sample;
        if in_flight == 0 || self.decision.of(candidate)?.credit != in_flight {
            return None;
        }
        let seconds = time.as_secs_f64() / f64::from(in_flight) * (UNIT / bytes as f64);
        let has_changed = self.decision.observe(candidate, Duration::from_secs_f64(seconds));
        has_changed.then(|| self.changed())
    }

    fn changed(&mut self) -> String {
        let sizes = self.chosen();
        self.decision.add(around(sizes, self.limits), MAX_CANDIDATES);
        format!("sizes: {}", self.decision.reason())
    }

    /// Applies the times of earlier jobs. Returns the reason if that changes the sizes.
    pub(super) fn remember(&mut self, times: &[Time<Sizes>]) -> Option<String> {
        let fits = |time: &&Time<Sizes>| self.limits.allow(time.spec);
        let times: Vec<Time<Sizes>> = times.iter().filter(fits).copied().collect();
        self.decision.add(times.iter().map(|time| time.spec), MAX_CANDIDATES);
        let before = self.decision.version();
        self.decision.remember(&times, None);
        (self.decision.version() > before).then(|| self.changed())
    }

    /// The measured times.
    pub(super) fn times(&self) -> Vec<Time<Sizes>> {
        self.decision.times()
    }

    /// The sizes and their times, for the status.
    pub(crate) fn status(&self) -> pb::Sizes {
        let (Sizes { piece, credit, chunk }, observed) = (self.chosen(), self.decision.observed());
        pb::Sizes {
            piece_bytes: piece,
            credit_pieces: credit,
            chunk_bytes: chunk,
            reason: self.decision.reason().to_owned(),
            version: self.decision.version(),
            observed: observed.count(),
            mean_seconds: observed.mean(),
            spread_seconds: observed.spread(),
        }
    }
}

#[cfg(test)]
mod tests {
    use gradwire_proto::JobId;
    use gradwire_settings::Settings;

    use super::*;

    fn tuner(is_enabled: bool) -> Tuner {
        let mut settings = Settings::default();
        settings.tuning.enabled = is_enabled;
        Tuner::new(&EngineConfig::new(JobId::new("job").unwrap(), 2, 0, &settings).unwrap())
    }

    /// Runs full pipelines with these seconds per byte; returns how many operations did not have
    /// the chosen sizes.
    fn play(tuner: &mut Tuner, operations: u64, seconds: impl Fn(Sizes) -> f64) -> u64 {
        let mut tried = 0;
        for _ in 0..operations {
            let (candidate, sizes) = tuner.next();
            tried += u64::from(!tuner.is_chosen(candidate));
            let sample = tuner.sample(sizes.piece).unwrap();
            let time = seconds(sizes) * sizes.piece as f64 * f64::from(sizes.credit);
            tuner.started(|| true);
            tuner.observe(sample, Duration::from_secs_f64(time), sizes.credit);
        }
        tried
    }

    #[test]
    fn the_fastest_sizes_are_found_step_by_step() {
        let mut tuner = tuner(true);
        let (_, before) = tuner.next();
        // Smaller chunks are faster, down to 64 KiB; other sizes make no difference.
        let seconds = |sizes: Sizes| 1e-9 * (1.0 + sizes.chunk.abs_diff(64 << 10) as f64 / 1e6);
        let operations = 1_000_000;
        let tried = play(&mut tuner, operations, seconds);
        assert!(tried > 0 && tried <= operations / 50, "{tried} of {operations}");
        assert_eq!(tuner.chosen(), Sizes { chunk: 64 << 10, ..before });
        let status = tuner.status();
        assert!(status.version > 1 && status.reason.contains("% of the time of"), "{status:?}");
        // The next job starts with them.
        let mut next = self::tuner(true);
        let reason = next.remember(&tuner.times()).unwrap();
        assert!(reason.contains("in earlier jobs"), "{reason}");
        next.started(|| true);
        assert_eq!(next.next().1, tuner.chosen());
    }

    #[test]
    fn sizes_that_make_no_difference_stay() {
        let mut tuner = tuner(true);
        let (_, before) = tuner.next();
        play(&mut tuner, 1_000_000, |_| 1e-9);
        assert_eq!((tuner.chosen(), tuner.status().version), (before, 1));
        assert_eq!(play(&mut tuner, 100_000, |_| 1e-9), 0, "all are measured");
        let mut fixed = self::tuner(false);
        assert_eq!(play(&mut fixed, 100_000, |_| 1e-9), 0, "tuning is disabled");
    }

    #[test]
    fn only_comparable_times_count() {
        let mut tuner = tuner(true);
        let (_, sizes) = tuner.next();
        assert_eq!(tuner.sample(sizes.piece / 2), None, "half a piece");
        let sample = tuner.sample(sizes.piece).unwrap();
        tuner.observe(sample, Duration::from_secs(1), sizes.credit - 1);
        tuner.observe(sample, Duration::from_secs(1), 0);
        assert_eq!(tuner.status().observed, 0);
        tuner.observe(sample, Duration::from_secs(1), sizes.credit);
        assert_eq!(tuner.status().observed, 1);
        // While algorithms are explored, sizes are not.
        for _ in 0..100_000 {
            tuner.started(|| false);
            tuner.observe(tuner.sample(sizes.piece).unwrap(), Duration::from_secs(1), sizes.credit);
            assert_eq!(tuner.next().1, sizes);
        }
    }

    /// BOUND: the settings bound the memory. And a run must be able to fill the credit.
    #[test]
    fn no_sizes_need_more_memory_or_a_longer_run() {
        let mut tuner = tuner(true);
        let limits = tuner.limits;
        for _ in 0..50 {
            play(&mut tuner, 20_000, |sizes| sizes.piece as f64);
            assert!(limits.allow(tuner.next().1), "{:?}", tuner.next());
        }
        let least = |sizes: Sizes| 1.0 / (sizes.piece as f64 * f64::from(sizes.credit));
        for _ in 0..50 {
            play(&mut tuner, 20_000, least);
            let Sizes { piece, credit, .. } = tuner.next().1;
            assert!(piece * u64::from(credit) <= limits.bytes && credit <= limits.credit);
        }
        let huge = Time { spec: Sizes { piece: 64 << 20, credit: 1024, chunk: 4096 }, permille: 1 };
        let now = Time { spec: tuner.chosen(), permille: 1000 };
        assert_eq!(tuner.remember(&[huge, now]), None);
    }
}
