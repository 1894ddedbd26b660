//! Which sums are rounded if partial results travel in a shorter type.

use crate::schedule::{Action, Schedule};

/// Which values of a step are not rounded, because they are sums that are still added to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Unrounded {
    /// The value before a receiving step.
    pub before: bool,
    /// The value after a step.
    pub after: bool,
}

/// The marks of all blocks of all steps.
#[derive(Debug)]
pub(super) struct Marks {
    all: Vec<Unrounded>,
    /// Where the marks of each step begin, and the end.
    first: Vec<usize>,
}

impl Marks {
    /// The marks of a step, one for each of its blocks.
    pub(super) fn of(&self, step: usize) -> &[Unrounded] {
        &self.all[self.first[step]..self.first[step + 1]]
    }
}

/// Marks sums that are added to before they are sent, for each block of each step. A value that is
/// sent is rounded at both ends (SAME): two nodes that exchange their sums must both continue with
/// what the other one receives.
pub(super) fn unrounded(schedule: &Schedule) -> Marks {
    let mut first = Vec::with_capacity(schedule.steps.len() + 1);
    first.push(0);
    let mut end = 0;
    first.extend(schedule.steps.iter().map(|step| {
        end += step.ranges.iter().map(|range| range.len()).sum::<usize>();
        end
    }));
    let mut all = vec![Unrounded::default(); end];
    // For each block, the mark of the step that added to it last, if nothing of it was sent since.
    let mut unsent: Vec<Option<usize>> = vec![None; schedule.blocks.len()];
    for (step, &first) in schedule.steps.iter().zip(&first) {
        for (mark, block) in (first..).zip(step.blocks()) {
            let unsent = &mut unsent[block as usize];
            match step.action {
                Action::RecvReduce { .. } => {
                    if let Some(earlier) = unsent.replace(mark) {
                        all[earlier].after = true;
                        all[mark].before = true;
                    }
                }
                Action::ReduceLocal => *unsent = Some(mark),
                // What was received is rounded, and replaces the block.
                Action::RecvCopy { .. } | Action::Send { .. } => *unsent = None,
                Action::Publish => {}
            }
        }
    }
    Marks { all, first }
}
