//! What is used for the pieces of one class, such as an algorithm: first the cheapest by the cost
//! model, then the fastest by the clock.
//!
//! - Exploration: one operation in [`PERIOD`] runs with another candidate, until each has been
//!   measured [`SAMPLES`] times. In a pipeline it is a run of operations, because a time says
//!   something of a candidate only if the others in flight use it, too. Candidates of more than
//!   [`MAX_RATIO`] times the predicted time are not tried.
//! - Comparison: each time counts relative to what the chosen one takes just then. So a machine or
//!   line that is slower for a while, or a model that is wrong for all, changes nothing.
//! - Correction: a candidate replaces the chosen one if its median is smaller by [`HYSTERESIS`] and
//!   most of its times are smaller. There are at most as many changes as candidates.
//!
//! Each change has a version and a reason. The module depends on nothing but its arguments.

use std::{fmt::Display, time::Duration};

use gradwire_collectives::{Choice, Spec};

use super::observed::Observed;
use crate::model::learned::Time;

/// One operation (or run of them) in so many explores. It is a prime, so that it does not fall on
/// the same tensor of each training step.
const PERIOD: u64 = 53;

/// How often a pipeline is filled to measure a candidate. The first filling starts among operations
/// of the chosen one, and the last one ends among them, so neither is measured.
pub(super) const FILLS: u32 = 4;

/// How often a candidate is measured.
const SAMPLES: usize = 30;

/// The most runs that explore a candidate whose times can't be compared.
const MAX_RUNS: u64 = 100;

/// The most times of one run that count: others show the same moment.
const OF_A_RUN: usize = 5;

/// Nothing is compared with the chosen one before it has been measured so often.
const BASELINE: u64 = 10;

/// The part by which another candidate has to be faster.
const HYSTERESIS: f64 = 0.05;

/// The candidates that are explored are predicted to take at most so many times as long.
const MAX_RATIO: f64 = 3.0;

#[derive(Debug)]
struct Candidate<S> {
    spec: S,
    predicted: f64,
    /// The runs that explored it.
    runs: u64,
    observed: Observed,
    /// Its times as parts of what the chosen one took about then; at most [`SAMPLES`].
    relative: Vec<f64>,
}

impl<S> Candidate<S> {
    fn is_measured(&self) -> bool {
        self.relative.len() >= SAMPLES
    }

    fn median(&self) -> f64 {
        let mut sorted = self.relative.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(1.0)
    }

    /// Whether it should replace the chosen one.
    fn is_faster(&self) -> bool {
        let faster = self.relative.iter().filter(|relative| **relative < 1.0).count();
        self.is_measured() && 3 * faster >= 2 * SAMPLES && self.median() < 1.0 - HYSTERESIS
    }
}

/// The choice for one class of pieces, and the times of its candidates.
#[derive(Debug)]
pub(crate) struct Decision<S = Spec> {
    /// In the order of the predictions.
    candidates: Vec<Candidate<S>>,
    chosen: usize,
    version: u32,
    reason: String,
    operations: u64,
    /// How many operations follow each other to measure a candidate.
    run: u64,
    may_explore: bool,
    /// The candidate of the current run.
    exploring: Option<usize>,
    /// How many times of this run have counted.
    of_run: usize,
}

impl Decision {
    /// What the cost model chose. With `may_explore` its other candidates are measured, too, in
    /// runs of `run` operations.
    pub(crate) fn new(choice: Choice, run: u32, may_explore: bool) -> Self {
        let Choice { spec, predicted_seconds, others, reason } = choice;
        let all = std::iter::once((spec, predicted_seconds)).chain(others);
        Self::among(all, reason, run, may_explore)
    }
}

impl<S: Copy + PartialEq + Display> Decision<S> {
    /// The first of these candidates, with the time that is predicted for each; as
    /// [`Decision::new`] otherwise.
    pub(crate) fn among(
        candidates: impl IntoIterator<Item = (S, f64)>,
        reason: String,
        run: u32,
        may_explore: bool,
    ) -> Self {
        let candidate = |(spec, predicted)| Candidate {
            spec,
            predicted,
            runs: 0,
            observed: Observed::default(),
            relative: Vec::new(),
        };
        let candidates: Vec<Candidate<S>> = candidates.into_iter().map(candidate).collect();
        let may_explore = may_explore && candidates.len() > 1;
        Self {
            candidates,
            chosen: 0,
            version: 1,
            reason,
            operations: 0,
            run: u64::from(run.max(1)),
            may_explore,
            exploring: None,
            of_run: 0,
        }
    }

    /// What earlier jobs have measured. It may change the choice.
    pub(crate) fn remember(&mut self, times: &[Time<S>]) {
        let of = |spec| times.iter().find(|time| time.spec == spec);
        let Some(chosen) = of(self.spec()) else { return };
        for candidate in &mut self.candidates {
            let Some(time) = of(candidate.spec).filter(|_| candidate.relative.is_empty()) else {
                continue;
            };
            let relative = f64::from(time.permille) / f64::from(chosen.permille);
            candidate.relative = vec![relative; SAMPLES];
        }
        let measured = (0..self.candidates.len()).filter(|&at| self.candidates[at].is_faster());
        let median = |at: &usize| self.candidates[*at].median();
        if let Some(best) = measured.min_by(|a, b| median(a).total_cmp(&median(b))) {
            self.change_to(best, "in earlier jobs");
        }
    }

    /// What was measured: the chosen one, and the others that were measured often enough.
    pub(crate) fn times(&self) -> Vec<Time<S>> {
        let is_chosen = |index| index == self.chosen;
        let measured = self.candidates.iter().enumerate();
        let measured = measured.filter(|(index, one)| is_chosen(*index) || one.is_measured());
        let times = measured.map(|(index, one)| {
            // One that did not replace the chosen one here does not do so in the next job.
            let relative = if is_chosen(index) { 1.0 } else { one.median().max(1.0) };
            Time { spec: one.spec, permille: (relative * 1e3).round() as u32 }
        });
        let times: Vec<Time<S>> = times.collect();
        if times.len() > 1 { times } else { Vec::new() }
    }

    /// The candidate of the next operation, and its spec.
    pub(crate) fn next(&mut self) -> (usize, S) {
        self.next_if(|| true)
    }

    /// The same, but a run to measure a candidate begins only if that is possible just now.
    pub(crate) fn next_if(&mut self, is_possible: impl FnOnce() -> bool) -> (usize, S) {
        let (turn, at) = (self.operations / self.run, self.operations % self.run);
        self.operations += 1;
        if at == 0 {
            self.exploring = None;
            self.of_run = 0;
            if self.may_explore && turn % PERIOD == PERIOD - 1 && is_possible() {
                self.exploring = self.to_explore();
            }
        }
        let index = self.exploring.unwrap_or(self.chosen);
        let candidate = &mut self.candidates[index];
        candidate.runs += u64::from(at == 0 && self.exploring.is_some());
        (index, candidate.spec)
    }

    /// Whether nothing is left to measure.
    pub(crate) fn is_settled(&self) -> bool {
        !self.may_explore || self.to_explore().is_none()
    }

    /// A candidate.
    pub(crate) fn of(&self, candidate: usize) -> Option<S> {
        self.candidates.get(candidate).map(|one| one.spec)
    }

    /// The index of the chosen one.
    pub(crate) fn chosen(&self) -> usize {
        self.chosen
    }

    /// Adds candidates that are not there yet, at most up to as many in all; the same is predicted
    /// for each as for the chosen one.
    pub(crate) fn add(&mut self, specs: impl IntoIterator<Item = S>, most: usize) {
        for spec in specs {
            let is_new = self.candidates.iter().all(|known| known.spec != spec);
            if is_new && self.candidates.len() < most {
                let (predicted, runs) = (self.predicted(), 0);
                let (observed, relative) = (Observed::default(), Vec::new());
                self.candidates.push(Candidate { spec, predicted, runs, observed, relative });
            }
        }
    }

    /// The candidate to measure next: one after the other, so that each has [`PERIOD`]. `None` if
    /// all are measured, or as long as there is nothing to compare with.
    fn to_explore(&self) -> Option<usize> {
        if self.candidates[self.chosen].observed.count() < BASELINE {
            return None;
        }
        let bearable = MAX_RATIO * self.candidates[self.chosen].predicted;
        let is_open = |(index, candidate): &(usize, &Candidate<S>)| {
            *index != self.chosen
                && candidate.predicted <= bearable
                && !candidate.is_measured()
                && candidate.runs < MAX_RUNS
        };
        self.candidates.iter().enumerate().find(is_open).map(|(index, _)| index)
    }

    /// An operation with a candidate has taken this time, among others with the same one. Returns
    /// whether that has changed the choice.
    pub(crate) fn observe(&mut self, candidate: usize, time: Duration) -> bool {
        let chosen = &self.candidates[self.chosen].observed;
        let counts = candidate != self.chosen
            && chosen.count() >= BASELINE
            && self.of_run < OF_A_RUN
            && self.candidates.get(candidate).is_some_and(|one| !one.is_measured());
        let baseline = if counts { chosen.median() } else { 0.0 };
        let Some(one) = self.candidates.get_mut(candidate) else { return false };
        one.observed.add(time);
        // A clock that stands still says nothing.
        if !counts || baseline <= 0.0 {
            return false;
        }
        self.of_run += 1;
        one.relative.push((time.as_secs_f64() / baseline).clamp(1e-3, 1e6));
        let is_faster = one.is_faster();
        if is_faster {
            self.change_to(candidate, "here");
        }
        is_faster
    }

    /// Replaces the chosen one. What was measured is relative to the new one from here on.
    fn change_to(&mut self, new: usize, place: &str) {
        let relative = self.candidates[new].median();
        let old = std::mem::replace(&mut self.chosen, new);
        self.version += 1;
        self.reason = format!(
            "{} took {:.0} % of the time of {}, measured {place} (version {})",
            self.candidates[new].spec,
            relative * 1e2,
            self.candidates[old].spec,
            self.version,
        );
        self.candidates[old].relative = vec![1.0; SAMPLES];
        for candidate in &mut self.candidates {
            candidate.relative.iter_mut().for_each(|part| *part /= relative);
        }
    }

    pub(crate) fn spec(&self) -> S {
        self.candidates[self.chosen].spec
    }

    /// The seconds that the model predicts for the chosen one.
    pub(crate) fn predicted(&self) -> f64 {
        self.candidates[self.chosen].predicted
    }

    /// The cheapest other candidate by the model, and its seconds.
    pub(crate) fn runner_up(&self) -> Option<(S, f64)> {
        let mut all = self.candidates.iter().enumerate();
        let (_, other) = all.find(|(index, _)| *index != self.chosen)?;
        Some((other.spec, other.predicted))
    }

    /// The times of the chosen one.
    pub(crate) fn observed(&self) -> &Observed {
        &self.candidates[self.chosen].observed
    }

    pub(crate) fn reason(&self) -> &str {
        &self.reason
    }

    /// The number of the choice, from 1.
    pub(crate) fn version(&self) -> u32 {
        self.version
    }

    /// The operations of all candidates.
    pub(crate) fn operations(&self) -> u64 {
        self.operations
    }
}

#[cfg(test)]
mod tests {
    use gradwire_collectives::Algorithm;
    use proptest::prelude::*;

    use super::*;

    fn choice(predicted: &[f64]) -> Choice {
        let specs = Algorithm::ALL.iter().map(|&known| Spec::usual(known));
        let mut all: Vec<(Spec, f64)> = specs.zip(predicted.iter().copied()).collect();
        let (spec, predicted_seconds) = all.remove(0);
        Choice { spec, predicted_seconds, others: all, reason: "by the model".to_owned() }
    }

    fn choice_of(index: usize) -> Spec {
        Spec::usual(Algorithm::ALL[index])
    }

    fn seconds(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    /// Runs operations whose candidates take these times; returns how many explored.
    fn play(decision: &mut Decision, operations: u64, times: &[f64]) -> u64 {
        let mut explored = 0;
        for _ in 0..operations {
            let before = decision.spec();
            let (index, spec) = decision.next();
            explored += u64::from(spec != before);
            decision.observe(index, seconds(times[index]));
        }
        explored
    }

    #[test]
    fn the_fastest_is_found_whatever_the_model_says() {
        let mut decision = Decision::new(choice(&[1.0, 1.5, 2.0]), 1, true);
        assert_eq!((decision.version(), decision.reason()), (1, "by the model"));
        play(&mut decision, 20_000, &[8e-3, 5e-3, 4e-3]);
        assert_eq!(decision.spec(), Spec::usual(Algorithm::ALL[2]));
        let (reason, version) = (decision.reason(), decision.version());
        assert!((2..=3).contains(&version), "{version}");
        assert!(reason.contains("50 % of the time") || reason.contains("80 % of"), "{reason}");
        assert!(reason.ends_with(&format!("measured here (version {version})")), "{reason}");
        assert_eq!(decision.runner_up(), Some((Spec::usual(Algorithm::ALL[0]), 1.0)));
        assert_eq!(decision.operations(), 20_000);
    }

    #[test]
    fn exploration_is_rare_and_ends() {
        for run in [1, 16] {
            let mut decision = Decision::new(choice(&[1.0, 1.5, 2.0]), run, true);
            let times = [1e-3, 1e-3, 1e-3];
            let mut explored = 0;
            for operations in 1..=30_000u64 {
                explored += play(&mut decision, 1, &times);
                let most = operations / 50 + u64::from(run);
                assert!(explored <= most, "{explored} of {operations}");
            }
            // Of a long run only a few times count.
            let runs = 2 * SAMPLES / OF_A_RUN.min(run as usize);
            assert_eq!(explored, runs as u64 * u64::from(run));
            assert_eq!(decision.version(), 1, "nothing is faster");
            assert_eq!(play(&mut decision, 5_000, &times), 0);
        }
    }

    #[test]
    fn what_is_fixed_or_hopeless_is_not_explored() {
        let mut fixed = Decision::new(choice(&[1.0, 1.1]), 1, false);
        assert_eq!(play(&mut fixed, 1_000, &[2e-3, 1e-3]), 0);
        let mut only = Decision::new(choice(&[1.0]), 1, true);
        assert_eq!(play(&mut only, 1_000, &[2e-3]), 0);
        let mut hopeless = Decision::new(choice(&[1.0, 3.1]), 1, true);
        assert_eq!(play(&mut hopeless, 1_000, &[2e-3, 1e-3]), 0);
        // Without times of the chosen one there is nothing to compare with.
        let mut mixed = Decision::new(choice(&[1.0, 1.1]), 1, true);
        assert!((0..10_000).all(|_| mixed.next().0 == 0));
        // Times that can't be compared are not observed, and do not keep it exploring.
        let mut mixed = Decision::new(choice(&[1.0, 1.1]), 1, true);
        let mut explored = 0;
        for _ in 0..100_000 {
            match mixed.next() {
                (0, _) => assert!(!mixed.observe(0, seconds(1e-3))),
                _ => explored += 1,
            }
        }
        assert_eq!(explored, MAX_RUNS);
    }

    #[test]
    fn outliers_and_small_differences_change_nothing() {
        let mut decision = Decision::new(choice(&[1.0, 1.1]), 1, true);
        for operation in 0..10_000u64 {
            let (index, _) = decision.next();
            let hiccup = if index == 0 && operation % 9 == 0 { 0.2 } else { 0.0 };
            decision.observe(index, seconds([1e-3, 0.96e-3][index] + hiccup));
        }
        assert_eq!(decision.version(), 1, "{}", decision.reason());
    }

    /// A machine that others use, too: times rise and fall for all alike.
    #[test]
    fn times_are_compared_with_those_of_the_same_moment() {
        for (times, versions) in [([1e-3, 1e-3, 1e-3], 1..=1), ([2e-3, 1e-3, 2e-3], 2..=2)] {
            let mut decision = Decision::new(choice(&[1.0, 1.1, 1.2]), 1, true);
            for operation in 0..50_000u32 {
                let load = 2.0 + (f64::from(operation) / 700.0).sin();
                let (index, _) = decision.next();
                decision.observe(index, seconds(times[index] * load));
            }
            assert!(versions.contains(&decision.version()), "{}", decision.reason());
        }
    }

    /// A step of four tensors, of which one is small: each candidate meets all of them.
    #[test]
    fn tensors_of_different_size_do_not_mislead() {
        let mut decision = Decision::new(choice(&[1.0, 1.1, 1.2, 1.3, 1.4]), 1, true);
        for operation in 0..100_000 {
            let (index, _) = decision.next();
            let size = if operation % 4 == 3 { 0.5 } else { 1.0 };
            decision.observe(index, seconds(1e-3 * size * [1.0, 1.2, 1.2, 1.2, 1.2][index]));
        }
        assert_eq!(decision.version(), 1, "{}", decision.reason());
    }

    #[test]
    fn the_next_job_begins_where_this_one_ended() {
        let times = [3e-3, 1e-3, 2e-3];
        let mut first = Decision::new(choice(&[1.0, 1.5, 2.0]), 1, true);
        play(&mut first, 10_000, &times);
        let learned = first.times();
        let known = |index: usize, permille| Time { spec: choice_of(index), permille };
        assert_eq!(learned, [known(0, 3000), known(1, 1000), known(2, 2000)]);
        let mut next = Decision::new(choice(&[1.0, 1.5, 2.0]), 1, true);
        next.remember(&learned);
        assert_eq!((next.version(), next.spec()), (2, first.spec()));
        assert!(next.reason().contains("33 % of the time of"), "{}", next.reason());
        assert!(next.reason().contains("in earlier jobs"), "{}", next.reason());
        assert_eq!(play(&mut next, 1_000, &times), 0, "everything is known");
        assert_eq!(next.times(), learned);
        // Too few to compare are not kept, and what is unknown here changes nothing.
        let mut short = Decision::new(choice(&[1.0, 1.5]), 1, true);
        play(&mut short, 9, &times);
        assert_eq!(short.times(), []);
        let mut other = Decision::new(choice(&[1.0]), 1, true);
        other.remember(&learned);
        assert_eq!((other.version(), other.spec()), (1, choice_of(0)));
    }

    proptest! {
        #[test]
        fn no_choice_is_slower_than_what_was_measured(
            times in prop::collection::vec(1e-5..1e-2f64, 2..6),
            predicted in prop::collection::vec(1.0..2.9f64, 6),
            run in 1u32..20,
        ) {
            let mut predicted: Vec<f64> = predicted[..times.len()].to_vec();
            predicted.sort_by(f64::total_cmp);
            let mut decision = Decision::new(choice(&predicted), run, true);
            play(&mut decision, 40_000, &times);
            let least = times.iter().copied().fold(f64::MAX, f64::min);
            let index = (0..times.len()).find(|&index| choice_of(index) == decision.spec());
            let chosen = times[index.unwrap()];
            prop_assert!(chosen * 0.94 <= least, "{} of {:?}", chosen, times);
            prop_assert!(decision.version() <= times.len() as u32);
        }
    }
}
