//! What is used for the pieces of one class, such as an algorithm: first the cheapest by the cost
//! model, then the fastest by the clock.
//!
//! - Exploration: one operation in [`PERIOD`] runs with another candidate, until each has been
//!   measured [`SAMPLES`] times. In a pipeline it is a run of operations, because a time says
//!   something of a candidate only if the others in flight use it, too. One that is clearly slower
//!   is done with after [`FEW`] times. Candidates that should take more than [`MAX_RATIO`] times as
//!   long are not tried.
//! - Comparison: each time counts relative to what the chosen one takes just then. So a machine or
//!   line that is slower for a while, or a model that is wrong for all, changes nothing.
//! - Correction: a candidate replaces the chosen one if its median is smaller by [`HYSTERESIS`] and
//!   most of its times are smaller, after [`FEW`] times if nearly all are. There are at most as
//!   many changes as candidates.
//! - Expectation: what a candidate should take ([`Decision::expected`]) is what was measured of it.
//!   Of one that was not, it is the prediction, corrected by what the model was wrong about for the
//!   chosen one. What the model leaves out, such as what ranks need to submit and to wake up, is
//!   the same for all candidates of a class. So what looks much slower may be worth a try.
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

/// Times that differ by less are equal.
const EQUAL: f64 = 0.01;

/// How often at least. If one of so many times (or more) in [`CLEAR`] is on the other side at most,
/// more times are not needed: by chance alone that happens to one candidate in a hundred if they
/// say something independently of each other, and to more where several are of one run.
const FEW: usize = 10;
const CLEAR: usize = 8;

/// The most runs that explore a candidate whose times can't be compared.
const MAX_RUNS: u64 = 100;

/// The most times of one run that count: they show the same moment. So [`FEW`] show four moments.
const OF_A_RUN: usize = 3;

/// Nothing is compared with the chosen one before it has been measured so often.
const BASELINE: u64 = 10;

/// So many times of a candidate say what it takes.
const KNOWN: usize = 5;

/// The part by which another candidate has to be faster.
const HYSTERESIS: f64 = 0.05;

/// The candidates that are explored should take at most so many times as long.
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
    /// Whether no more times are needed.
    fn is_measured(&self) -> bool {
        let is_hopeless = self.relative.len() >= KNOWN && self.median() > MAX_RATIO;
        let is_slower = self.is_clearly(|relative| relative > 1.0 + EQUAL);
        self.relative.len() >= SAMPLES || is_hopeless || is_slower
    }

    /// Whether nearly all times are on one side.
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

    /// Whether it should replace the chosen one.
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
    /// How many operations follow each other to measure a candidate.
    run: u64,
    may_explore: bool,
    /// The candidate of the current run.
    exploring: Option<usize>,
    /// How many times of this run have counted.
    of_run: usize,
    /// The seconds that the chosen one took in earlier jobs.
    remembered: Option<f64>,
}

/// What is known of a candidate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Known<S> {
    pub(crate) spec: S,
    /// The seconds that the model predicts, and those that it should take by all that is known.
    pub(crate) predicted: f64,
    pub(crate) expected: f64,
    /// The operations that ran with it to measure it.
    pub(crate) tried: u64,
}

/// A prediction, corrected by what was observed of something else: what it took longer than
/// predicted is the same for all, and if it took less, the rates were wrong.
fn corrected(predicted: f64, of_other: f64, observed: f64) -> f64 {
    if observed >= of_other || of_other <= 0.0 {
        predicted + (observed - of_other)
    } else {
        predicted * (observed / of_other)
    }
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
            remembered: None,
        }
    }

    /// What earlier jobs have measured, and the seconds that a time of 1000 stands for, if they are
    /// known. It may change the choice.
    pub(crate) fn remember(&mut self, times: &[Time<S>], seconds: Option<f64>) {
        let of = |spec| times.iter().find(|time| time.spec == spec);
        let known = self.candidates.iter().enumerate();
        let known = known.filter_map(|(at, one)| Some((at, of(one.spec)?.permille)));
        let Some((best, least)) = known.clone().min_by_key(|(_, permille)| *permille) else {
            return;
        };
        let before = of(self.spec()).map(|time| time.permille);
        // What was measured counts more than what the model says of one that was not; but a single
        // one was compared with nothing.
        let Some(permille) = before.or_else(|| (known.count() > 1).then_some(least)) else {
            return;
        };
        if before.is_none() {
            self.chosen = best;
            self.version += 1;
            self.reason = format!(
                "{} was the fastest of those measured in earlier jobs (version {})",
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

    /// The seconds of the chosen one: of the last times here, or else in earlier jobs.
    pub(crate) fn seconds(&self) -> Option<f64> {
        let observed = self.observed();
        if observed.count() >= BASELINE { Some(observed.median()) } else { self.remembered }
    }

    /// The seconds that a candidate should take, by all that is known.
    fn expected_of(&self, one: &Candidate<S>) -> f64 {
        let chosen = &self.candidates[self.chosen];
        match self.seconds() {
            None => one.predicted,
            Some(now) if one.spec == chosen.spec => now,
            Some(now) if one.relative.len() >= KNOWN => one.median() * now,
            Some(now) => corrected(one.predicted, chosen.predicted, now),
        }
    }

    /// The seconds that the chosen one should take, by all that is known.
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
        let bearable = MAX_RATIO * self.expected();
        let is_open = |(index, candidate): &(usize, &Candidate<S>)| {
            *index != self.chosen
                && self.expected_of(candidate) <= bearable
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
        self.remembered = self.remembered.map(|seconds| seconds * relative);
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

    /// The other candidate that should take least, and its seconds.
    pub(crate) fn runner_up(&self) -> Option<(S, f64)> {
        let others = self.candidates.iter().enumerate().filter(|(at, _)| *at != self.chosen);
        let others = others.map(|(_, one)| (one.spec, self.expected_of(one)));
        others.min_by(|a, b| a.1.total_cmp(&b.1))
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
mod tests;
