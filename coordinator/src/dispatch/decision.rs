//! Chooses what the pieces of one class use, such as an algorithm: first the cheapest candidate by
//! the cost model, then the fastest by measured time.
//!
//! - Exploration: one operation in [`PERIOD`] runs with another candidate, until each has been
//!   measured [`SAMPLES`] times. In a pipeline, a whole run of operations explores, because a time
//!   is meaningful only if all operations in flight use the same candidate. A clearly slower
//!   candidate is measured only [`FEW`] times. Candidates that are expected to take more than
//!   [`MAX_RATIO`] times as long are not tried.
//! - Comparison: each time counts relative to the current time of the chosen candidate. So a
//!   temporarily slower machine or line, or a model that is wrong for all candidates, changes
//!   nothing.
//! - Correction: a candidate replaces the chosen one if its median is smaller by [`HYSTERESIS`] and
//!   most of its times are smaller; [`FEW`] times are enough if nearly all are. There are at most
//!   as many changes as candidates.
//! - Expectation: the expected time of a candidate ([`Decision::expected`]) is its measured time.
//!   Without measurements it is the prediction, corrected by the model's error for the chosen
//!   candidate. Costs that the model leaves out, such as submitting and waking up, are the same for
//!   all candidates of a class. So a candidate that looks much slower may be worth a try.
//!
//! Each change has a version and a reason. The module depends only on its arguments.

use std::{fmt::Display, time::Duration};

use gradwire_collectives::{Choice, Spec};

use super::observed::Observed;
use crate::model::learned::Time;

/// One operation (or run of operations) in this many explores. A prime, so that exploration does
/// not always hit the same tensor of a training step.
const PERIOD: u64 = 53;

/// How often a pipeline is filled to measure a candidate. The first fill starts among operations of
/// the chosen candidate, and the last one ends among them, so neither is measured.
pub(super) const FILLS: u32 = 4;

/// How often a candidate is measured.
const SAMPLES: usize = 30;

/// Times that differ by less count as equal.
const EQUAL: f64 = 0.01;

/// The fewest measurements for a decision. They are enough if at most one in [`CLEAR`] contradicts
/// the others. If times are independent, chance alone does that for one candidate in a hundred;
/// more often if several times belong to one run.
const FEW: usize = 10;
const CLEAR: usize = 8;

/// The most runs that explore a candidate whose times can't be compared.
const MAX_RUNS: u64 = 100;

/// The most times of a run that count, because they show the same moment. So [`FEW`] times show
/// four moments.
const OF_A_RUN: usize = 3;

/// How often the chosen candidate is measured before others are compared with it.
const BASELINE: u64 = 10;

/// After this many measurements, the time of a candidate is known.
const KNOWN: usize = 5;

/// The fraction by which another candidate must be faster.
const HYSTERESIS: f64 = 0.05;

/// Candidates are explored if they are expected to take at most this many times as long.
const MAX_RATIO: f64 = 3.0;

#[derive(Debug)]
struct Candidate<S> {
    spec: S,
    predicted: f64,
    /// The runs that explored it.
    runs: u64,
    observed: Observed,
    /// Its times relative to those of the chosen candidate at that moment; at most [`SAMPLES`].
    relative: Vec<f64>,
}

impl<S> Candidate<S> {
    /// Whether no more measurements are needed.
    fn is_measured(&self) -> bool {
        let is_hopeless = self.relative.len() >= KNOWN && self.median() > MAX_RATIO;
        let is_slower = self.is_clearly(|relative| relative > 1.0 + EQUAL);
        self.relative.len() >= SAMPLES || is_hopeless || is_slower
    }

    /// Whether `is_so` holds for nearly all times.
    fn is_clearly(&self, is_so: impl Fn(f64) -> bool) -> bool {
        let all = self.relative.len();
        let others = self.relative.iter().filter(|relative| !is_so(**relative)).count();
        all >= FEW && others * CLEAR <= all
    }

    fn median(&self) -> f64 {
        let mut sorted = self.relative.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(1.0)
    }

    /// Whether it should replace the chosen candidate.
    fn is_faster(&self) -> bool {
        let faster = self.relative.iter().filter(|relative| **relative < 1.0).count();
        let all = self.relative.len() >= SAMPLES && 3 * faster >= 2 * SAMPLES;
        (all || self.is_clearly(|relative| relative < 1.0)) && self.median() < 1.0 - HYSTERESIS
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
    /// How many consecutive operations measure a candidate.
    run: u64,
    may_explore: bool,
    /// The candidate of the current run.
    exploring: Option<usize>,
    /// How many times of the current run have counted.
    of_run: usize,
    /// The seconds of the chosen candidate in earlier jobs.
    remembered: Option<f64>,
}

/// What is known of a candidate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Known<S> {
    pub(crate) spec: S,
    /// The seconds that the model predicts.
    pub(crate) predicted: f64,
    /// The seconds that it is expected to take, given all measurements.
    pub(crate) expected: f64,
    /// The number of operations that explored it.
    pub(crate) tried: u64,
}

/// A prediction, corrected by the observed time of another candidate. Extra time is the same for
/// all; if the other one was faster than predicted, the rates were wrong.
fn corrected(predicted: f64, of_other: f64, observed: f64) -> f64 {
    if observed >= of_other || of_other <= 0.0 {
        predicted + (observed - of_other)
    } else {
        predicted * (observed / of_other)
    }
}

impl Decision {
    /// A decision that starts with the cost model's choice. With `may_explore`, the other
    /// candidates are measured, in runs of `run` operations.
    pub(crate) fn new(choice: Choice, run: u32, may_explore: bool) -> Self {
        let Choice { spec, predicted_seconds, others, reason } = choice;
        let all = std::iter::once((spec, predicted_seconds)).chain(others);
        Self::among(all, reason, run, may_explore)
    }
}

impl<S: Copy + PartialEq + Display> Decision<S> {
    /// A decision that starts with the first of these candidates, each with its predicted time;
    /// otherwise like [`Decision::new`].
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
            remembered: None,
        }
    }

    /// Applies the times of earlier jobs, which may change the choice. `seconds` is the duration of
    /// a time of 1000, if it is known.
    pub(crate) fn remember(&mut self, times: &[Time<S>], seconds: Option<f64>) {
        let of = |spec| times.iter().find(|time| time.spec == spec);
        let known = self.candidates.iter().enumerate();
        let known = known.filter_map(|(at, one)| Some((at, of(one.spec)?.permille)));
        let Some((best, least)) = known.clone().min_by_key(|(_, permille)| *permille) else {
            return;
        };
        let before = of(self.spec()).map(|time| time.permille);
        // Measured candidates take precedence over predictions, but a single one was not compared.
        let Some(permille) = before.or_else(|| (known.count() > 1).then_some(least)) else {
            return;
        };
        if before.is_none() {
            self.chosen = best;
            self.version += 1;
            self.reason = format!(
                "{} was the fastest in earlier jobs (version {})",
                self.candidates[best].spec, self.version
            );
        }
        for candidate in &mut self.candidates {
            let Some(time) = of(candidate.spec).filter(|_| candidate.relative.is_empty()) else {
                continue;
            };
            let relative = f64::from(time.permille) / f64::from(permille);
            candidate.relative = vec![relative; SAMPLES];
        }
        self.remembered = seconds.map(|seconds| seconds * f64::from(permille) / 1e3);
        let measured = (0..self.candidates.len()).filter(|&at| self.candidates[at].is_faster());
        let median = |at: &usize| self.candidates[*at].median();
        if let Some(best) = measured.min_by(|a, b| median(a).total_cmp(&median(b))) {
            self.change_to(best, "in earlier jobs");
        }
    }

    /// The seconds of the chosen candidate: recently in this job, or else in earlier jobs.
    pub(crate) fn seconds(&self) -> Option<f64> {
        let observed = self.observed();
        if observed.count() >= BASELINE { Some(observed.median()) } else { self.remembered }
    }

    /// The seconds that a candidate is expected to take, given all measurements.
    fn expected_of(&self, one: &Candidate<S>) -> f64 {
        let chosen = &self.candidates[self.chosen];
        match self.seconds() {
            None => one.predicted,
            Some(now) if one.spec == chosen.spec => now,
            Some(now) if one.relative.len() >= KNOWN => one.median() * now,
            Some(now) => corrected(one.predicted, chosen.predicted, now),
        }
    }

    /// The seconds that the chosen candidate is expected to take, given all measurements.
    pub(crate) fn expected(&self) -> f64 {
        self.expected_of(&self.candidates[self.chosen])
    }

    /// All candidates.
    pub(crate) fn candidates(&self) -> impl Iterator<Item = Known<S>> {
        self.candidates.iter().map(|one| Known {
            spec: one.spec,
            predicted: one.predicted,
            expected: self.expected_of(one),
            tried: one.runs * self.run,
        })
    }

    /// The times of the chosen candidate and of those that were measured often enough.
    pub(crate) fn times(&self) -> Vec<Time<S>> {
        let is_chosen = |index| index == self.chosen;
        let measured = self.candidates.iter().enumerate();
        let measured = measured.filter(|(index, one)| is_chosen(*index) || one.is_measured());
        let times = measured.map(|(index, one)| {
            // A candidate that did not replace the chosen one does not do so in the next job.
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

    /// Like [`Decision::next`], but exploration begins only if that is possible now.
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

    /// The spec of a candidate.
    pub(crate) fn of(&self, candidate: usize) -> Option<S> {
        self.candidates.get(candidate).map(|one| one.spec)
    }

    /// The index of the chosen candidate.
    pub(crate) fn chosen(&self) -> usize {
        self.chosen
    }

    /// Adds new candidates, up to `most` in total, with the prediction of the chosen one.
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

    /// The candidate to measure next, one after the other. `None` if all are measured, or while the
    /// chosen candidate has not been measured enough.
    fn to_explore(&self) -> Option<usize> {
        if self.candidates[self.chosen].observed.count() < BASELINE {
            return None;
        }
        let bearable = MAX_RATIO * self.expected();
        let is_open = |(index, candidate): &(usize, &Candidate<S>)| {
            *index != self.chosen
                && self.expected_of(candidate) <= bearable
                && !candidate.is_measured()
                && candidate.runs < MAX_RUNS
        };
        self.candidates.iter().enumerate().find(is_open).map(|(index, _)| index)
    }

    /// Observes the time of an operation that ran among others with the same candidate. Returns
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
        // A baseline of zero can't be compared with.
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

    /// Replaces the chosen candidate, and makes all times relative to the new one.
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
        self.remembered = self.remembered.map(|seconds| seconds * relative);
        self.candidates[old].relative = vec![1.0; SAMPLES];
        for candidate in &mut self.candidates {
            candidate.relative.iter_mut().for_each(|part| *part /= relative);
        }
    }

    pub(crate) fn spec(&self) -> S {
        self.candidates[self.chosen].spec
    }

    /// The seconds that the model predicts for the chosen candidate.
    pub(crate) fn predicted(&self) -> f64 {
        self.candidates[self.chosen].predicted
    }

    /// The fastest other candidate, and its expected seconds.
    pub(crate) fn runner_up(&self) -> Option<(S, f64)> {
        let others = self.candidates.iter().enumerate().filter(|(at, _)| *at != self.chosen);
        let others = others.map(|(_, one)| (one.spec, self.expected_of(one)));
        others.min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// The times of the chosen candidate.
    pub(crate) fn observed(&self) -> &Observed {
        &self.candidates[self.chosen].observed
    }

    pub(crate) fn reason(&self) -> &str {
        &self.reason
    }

    /// The version of the choice, from 1.
    pub(crate) fn version(&self) -> u32 {
        self.version
    }

    /// The number of operations, with all candidates.
    pub(crate) fn operations(&self) -> u64 {
        self.operations
    }
}

#[cfg(test)]
mod tests;
