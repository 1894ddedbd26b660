//! The part of a job that is traced: everything, or some steps.

use std::{
    collections::{BTreeMap, VecDeque},
    str::FromStr,
};

use gradwire_launcher::error::CommandError;
use gradwire_proto::pb::{StatusResponse, TraceBatch};
use gradwire_trace::{Event, Kind};
use gradwire_viewer::view;

/// How many batches are kept until the first step is reached (BOUND). They may have events of that
/// step, because a node may send them before another node reports the step.
const KEPT: usize = 256;

/// Steps by their numbers, counted from 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Steps {
    first: u64,
    last: u64,
}

impl FromStr for Steps {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("invalid steps '{text}': expected a range such as 100..110");
        let (first, last) = text.split_once("..").ok_or_else(expected)?;
        let number = |text: &str| text.parse::<u64>().map_err(|_| expected());
        let steps = Self { first: number(first)?, last: number(last)? };
        if steps.first == 0 {
            return Err("steps are counted from 1".to_owned());
        }
        if steps.last < steps.first {
            return Err(format!("the last step, {last}, is before the first one, {first}"));
        }
        Ok(steps)
    }
}

/// The part of a job that is traced.
#[derive(Debug, Default)]
pub(super) struct Window {
    /// `None`: everything.
    steps: Option<Steps>,
    /// The beginning, once it is known.
    begin_ns: Option<u64>,
    end_ns: Option<u64>,
    /// The last step of each rank and its end, by node and track.
    ranks: BTreeMap<(u32, u32), (u64, u64)>,
    /// How many ranks are known to make steps.
    expected: usize,
    kept: VecDeque<TraceBatch>,
}

impl Window {
    /// These steps of a job with this status.
    ///
    /// # Errors
    /// [`CommandError`] if a rank has already done the first one.
    pub(super) fn of(steps: Steps, status: &StatusResponse) -> Result<Self, CommandError> {
        let made = view::ranks(status).map(|rank| u64::from(rank.steps));
        let made: Vec<u64> = made.filter(|steps| *steps > 0).collect();
        let newest = made.iter().copied().max().unwrap_or_default();
        if newest >= steps.first {
            let Steps { first, last } = steps;
            let what = format!("steps {first}..{last} have begun: the job has done {newest}");
            return Err(CommandError::failed(what).hint("use later steps, or --seconds"));
        }
        // A step begins with the end of the previous step, which step 1 does not have.
        let begin_ns = (steps.first == 1).then_some(0);
        Ok(Self { steps: Some(steps), begin_ns, expected: made.len(), ..Self::default() })
    }

    /// Takes a batch, and returns the batches that may have wanted events.
    pub(super) fn admit(&mut self, batch: TraceBatch) -> Vec<TraceBatch> {
        let Some(Steps { first, last }) = self.steps.clone() else { return vec![batch] };
        for track in &batch.tracks {
            let events = Event::read(&track.events);
            for event in events.filter(|event| event.kind == Kind::Step) {
                let at_ns = event.at_ns.saturating_add_signed(batch.ahead_ns.saturating_neg());
                self.ranks.insert((batch.node, track.track), (event.subject, at_ns));
                if event.subject.saturating_add(1) >= first {
                    let begin_ns = self.begin_ns.get_or_insert(at_ns);
                    *begin_ns = (*begin_ns).min(at_ns);
                }
            }
        }
        let done = self.ranks.values().filter(|(step, _)| *step >= last);
        if self.end_ns.is_none() && done.count() >= self.ranks.len().max(self.expected).max(1) {
            self.end_ns = self.ranks.values().map(|(_, at_ns)| *at_ns).max();
        }
        self.kept.push_back(batch);
        if self.begin_ns.is_none() {
            if self.kept.len() > KEPT {
                self.kept.pop_front();
            }
            return Vec::new();
        }
        std::mem::take(&mut self.kept).into()
    }

    /// Whether an event with this begin and end is wanted.
    pub(super) fn contains(&self, begin_ns: u64, end_ns: u64) -> bool {
        self.steps.is_none()
            || self.begin_ns.is_some_and(|since_ns| end_ns >= since_ns)
                && self.end_ns.is_none_or(|until_ns| begin_ns <= until_ns)
    }

    /// Whether the first step has been reached.
    pub(super) fn has_begun(&self) -> bool {
        self.steps.is_none() || self.begin_ns.is_some()
    }

    /// Whether all ranks have done the last step.
    pub(super) fn is_over(&self) -> bool {
        self.end_ns.is_some()
    }
}

#[cfg(test)]
mod tests {
    use gradwire_proto::pb::TraceTrack;
    use gradwire_tests::sample;

    use super::*;

    fn batch(node: u32, track: u32, step: u64, at_ns: u64) -> TraceBatch {
        let mut events = Vec::new();
        Event::new(Kind::Step, at_ns, step).write(&mut events);
        let tracks = vec![TraceTrack { track, events }];
        // Its clock is 1000 ns ahead.
        TraceBatch { node, ahead_ns: 1000, tracks, ..TraceBatch::default() }
    }

    #[test]
    fn steps_are_from_the_first_rank_to_the_last() {
        let mut window =
            Window { steps: Some("5..6".parse().unwrap()), expected: 2, ..Window::default() };
        assert!(window.admit(batch(0, 2, 3, 11_000)).is_empty());
        assert!(!window.contains(0, u64::MAX) && !window.has_begun());
        // The trace begins with the end of step 4 on the first rank. Earlier batches are returned.
        assert_eq!(window.admit(batch(1, 2, 4, 21_000)).len(), 2);
        assert!(window.contains(15_000, 20_000) && !window.contains(15_000, 19_999));
        window.admit(batch(0, 2, 4, 22_000));
        window.admit(batch(1, 2, 6, 41_000));
        assert!(!window.is_over());
        window.admit(batch(0, 2, 6, 45_000));
        assert!(window.is_over());
        assert!(window.contains(44_000, 50_000) && !window.contains(44_001, 50_000));
    }

    #[test]
    fn the_first_step_begins_with_the_trace() {
        let mut status = sample::status(0);
        for rank in
            status.nodes.iter_mut().flat_map(|node| &mut node.report.as_mut().unwrap().ranks)
        {
            rank.steps = 0;
        }
        let mut window = Window::of("1..1".parse().unwrap(), &status).unwrap();
        assert!(window.has_begun() && window.contains(0, 1));
        assert_eq!(window.admit(batch(0, 2, 1, 11_000)).len(), 1);
        assert!(window.is_over());
    }

    #[test]
    fn impossible_steps_are_refused() {
        let error = Window::of("100..110".parse().unwrap(), &sample::status(0)).unwrap_err();
        assert_eq!(error.what, "steps 100..110 have begun: the job has done 103");
        assert!(Window::of("104..110".parse().unwrap(), &sample::status(0)).is_ok());
        for (text, expected) in [
            ("5", "such as 100..110"),
            ("..7", "such as 100..110"),
            ("1..x", "such as 100..110"),
            ("-1..4", "such as 100..110"),
            ("0..4", "counted from 1"),
            ("9..4", "the last step, 4, is before the first one, 9"),
        ] {
            let error = text.parse::<Steps>().unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
