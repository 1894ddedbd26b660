//! How large pieces and chunks are, and how many pieces are in flight: at first as the settings
//! say, then as measured times say.
//!
//! It is decided as algorithms are ([`Decision`]). What is compared is the time of a byte, in
//! allreduces of all nodes, in pieces of full size that use up the credit and are all of one
//! choice. Candidates are twice and half of each size, and around what has replaced the chosen one
//! again. None has more bytes in flight than the settings allow: they bound the memory of nodes
//! (BOUND). None has more than twice the credit of the settings: a run to measure it would not fill
//! that. Nothing is tried as long as algorithms are, so both together are rare. All nodes get the
//! sizes with each operation (ORD, SAME).

use std::time::Duration;

use super::decision::{Decision, FILLS};
use crate::model::{
    EngineConfig,
    config::MIN_PIECE_BYTES,
    learned::{Sizes, Time},
    status::SizesStatus,
};

/// The most candidates in all (BOUND).
const MAX_CANDIDATES: usize = 32;

/// Times are of so many bytes.
const UNIT: f64 = (1 << 20) as f64;

/// An operation by whose time sizes may be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sized {
    /// The candidate that it has.
    pub(crate) candidate: usize,
    /// Its bytes.
    pub(crate) bytes: u64,
}

/// The sizes of one job.
#[derive(Debug)]
pub(super) struct Tuner {
    decision: Decision<Sizes>,
    limits: Limits,
    /// Those of the next operation.
    next: (usize, Sizes),
}

/// What candidates may have in flight.
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

/// What is twice or half as large in one size, within these limits.
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
    /// Those of the settings.
    pub(super) fn new(config: &EngineConfig) -> Self {
        let &EngineConfig { piece_bytes, credit_pieces: credit, chunk_bytes, .. } = config;
        let sizes = Sizes { piece: piece_bytes, credit, chunk: chunk_bytes };
        let bytes = piece_bytes.saturating_mul(credit.into());
        let limits = Limits { bytes, credit: credit.saturating_mul(2) };
        let all = std::iter::once(sizes).chain(around(sizes, limits)).map(|sizes| (sizes, 1.0));
        let run = FILLS.saturating_mul(limits.credit);
        let reason = "as the settings say".to_owned();
        let decision = Decision::among(all, reason, run, config.may_explore);
        Self { decision, limits, next: (0, sizes) }
    }

    /// Those of the next operation.
    pub(super) fn next(&self) -> Sizes {
        self.next.1
    }

    /// Those that are not tried only.
    pub(super) fn chosen(&self) -> Sizes {
        self.decision.spec()
    }

    /// Whether these are not tried only.
    pub(super) fn is_chosen(&self, candidate: usize) -> bool {
        candidate == self.decision.chosen()
    }

    /// The number of those of the next operation.
    pub(super) fn candidate(&self) -> usize {
        self.next.0
    }

    /// What the next operation says of sizes if it has so many bytes: nothing if it is not of full
    /// size.
    pub(super) fn sized(&self, bytes: u64) -> Option<Sized> {
        let (candidate, sizes) = self.next;
        (bytes >= sizes.piece / 4 * 3 && bytes >= MIN_PIECE_BYTES)
            .then_some(Sized { candidate, bytes })
    }

    /// An operation has started. `is_settled`: whether no algorithm is being tried.
    pub(super) fn started(&mut self, is_settled: impl FnOnce() -> bool) {
        self.next = self.decision.next_if(is_settled);
    }

    /// An operation has taken this time, with so many of the same choice in flight all the time.
    /// Returns the reason if that changes the sizes.
    pub(super) fn observe(
        &mut self,
        sized: Sized,
        time: Duration,
        in_flight: u32,
    ) -> Option<String> {
        let Sized { candidate, bytes } = sized;
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

    /// What earlier jobs have measured. Returns the reason if that changes the sizes.
    pub(super) fn remember(&mut self, times: &[Time<Sizes>]) -> Option<String> {
        let fits = |time: &&Time<Sizes>| self.limits.allow(time.spec);
        let times: Vec<Time<Sizes>> = times.iter().filter(fits).copied().collect();
        self.decision.add(times.iter().map(|time| time.spec), MAX_CANDIDATES);
        let before = self.decision.version();
        self.decision.remember(&times, None);
        (self.decision.version() > before).then(|| self.changed())
    }

    /// What was measured.
    pub(super) fn times(&self) -> Vec<Time<Sizes>> {
        self.decision.times()
    }

    /// For people.
    pub(super) fn status(&self) -> SizesStatus {
        let observed = self.decision.observed();
        SizesStatus {
            sizes: self.chosen(),
            reason: self.decision.reason().to_owned(),
            version: self.decision.version(),
            observed: observed.count(),
            mean: observed.mean(),
            spread: observed.spread(),
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

    /// Runs full pipelines in which a byte takes so long; returns how many operations had other
    /// sizes than the chosen ones.
    fn play(tuner: &mut Tuner, operations: u64, seconds: impl Fn(Sizes) -> f64) -> u64 {
        let mut tried = 0;
        for _ in 0..operations {
            let sizes = tuner.next();
            tried += u64::from(!tuner.is_chosen(tuner.candidate()));
            let sized = tuner.sized(sizes.piece).unwrap();
            let time = seconds(sizes) * sizes.piece as f64 * f64::from(sizes.credit);
            tuner.started(|| true);
            tuner.observe(sized, Duration::from_secs_f64(time), sizes.credit);
        }
        tried
    }

    #[test]
    fn the_fastest_sizes_are_found_step_by_step() {
        let mut tuner = tuner(true);
        let before = tuner.next();
        // The smaller a chunk is the better, down to 64 KiB; other sizes make no difference.
        let seconds = |sizes: Sizes| 1e-9 * (1.0 + sizes.chunk.abs_diff(64 << 10) as f64 / 1e6);
        let operations = 1_000_000;
        let tried = play(&mut tuner, operations, seconds);
        assert!(tried > 0 && tried <= operations / 50, "{tried} of {operations}");
        assert_eq!(tuner.chosen(), Sizes { chunk: 64 << 10, ..before });
        let status = tuner.status();
        assert!(status.version > 1 && status.reason.contains("% of the time of"), "{status:?}");
        // The next job begins with them.
        let mut next = self::tuner(true);
        let reason = next.remember(&tuner.times()).unwrap();
        assert!(reason.contains("in earlier jobs"), "{reason}");
        next.started(|| true);
        assert_eq!(next.next(), tuner.chosen());
    }

    #[test]
    fn sizes_that_make_no_difference_stay() {
        let mut tuner = tuner(true);
        let before = tuner.next();
        play(&mut tuner, 1_000_000, |_| 1e-9);
        assert_eq!((tuner.chosen(), tuner.status().version), (before, 1));
        assert_eq!(play(&mut tuner, 100_000, |_| 1e-9), 0, "all are measured");
        let mut fixed = self::tuner(false);
        assert_eq!(play(&mut fixed, 100_000, |_| 1e-9), 0, "nothing is tried unasked");
    }

    #[test]
    fn only_what_can_be_compared_counts() {
        let mut tuner = tuner(true);
        let sizes = tuner.next();
        assert_eq!(tuner.sized(sizes.piece / 2), None, "a part of a piece");
        let sized = tuner.sized(sizes.piece).unwrap();
        tuner.observe(sized, Duration::from_secs(1), sizes.credit - 1);
        tuner.observe(sized, Duration::from_secs(1), 0);
        assert_eq!(tuner.status().observed, 0);
        tuner.observe(sized, Duration::from_secs(1), sizes.credit);
        assert_eq!(tuner.status().observed, 1);
        // As long as algorithms are tried, sizes are not.
        for _ in 0..100_000 {
            tuner.started(|| false);
            tuner.observe(tuner.sized(sizes.piece).unwrap(), Duration::from_secs(1), sizes.credit);
            assert_eq!(tuner.next(), sizes);
        }
    }

    /// BOUND: memory is that of the settings. And a run has to fill the credit, however small
    /// pieces are.
    #[test]
    fn no_sizes_need_more_memory_or_a_longer_run() {
        let mut tuner = tuner(true);
        let limits = tuner.limits;
        for _ in 0..50 {
            play(&mut tuner, 20_000, |sizes| sizes.piece as f64);
            assert!(limits.allow(tuner.next()), "{:?}", tuner.next());
        }
        let least = |sizes: Sizes| 1.0 / (sizes.piece as f64 * f64::from(sizes.credit));
        for _ in 0..50 {
            play(&mut tuner, 20_000, least);
            let Sizes { piece, credit, .. } = tuner.next();
            assert!(piece * u64::from(credit) <= limits.bytes && credit <= limits.credit);
        }
        let huge = Time { spec: Sizes { piece: 64 << 20, credit: 1024, chunk: 4096 }, permille: 1 };
        let now = Time { spec: tuner.chosen(), permille: 1000 };
        assert_eq!(tuner.remember(&[huge, now]), None);
    }
}
