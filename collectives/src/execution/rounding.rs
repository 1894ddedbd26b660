//! Which sums are rounded, where partial results travel in a type that rounds.

use crate::schedule::{Action, Schedule, Step};

/// Which of a step's values are sums that are still added to, and are not rounded for that reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Unrounded {
    /// The value before a receiving step.
    pub before: bool,
    /// The value after a step.
    pub after: bool,
}

/// Marks sums that are only added to, for each block of each step. What is sent is rounded before,
/// on both ends (SAME). Two nodes that exchange their sums must both continue with what the other
/// one receives.
pub(super) fn unrounded(schedule: &Schedule) -> Vec<Vec<Unrounded>> {
    let none = |step: &Step| vec![Unrounded::default(); step.blocks().count()];
    let mut marks: Vec<Vec<Unrounded>> = schedule.steps.iter().map(none).collect();
    // For each block, the step that added to it last and its position there, if nothing of it was
    // sent since.
    let mut unsent: Vec<Option<(usize, usize)>> = vec![None; schedule.blocks.len()];
    for (index, step) in schedule.steps.iter().enumerate() {
        for (place, block) in step.blocks().enumerate() {
            let unsent = &mut unsent[block as usize];
            match step.action {
                Action::RecvReduce { .. } => {
                    if let Some((earlier, at)) = unsent.replace((index, place)) {
                        marks[earlier][at].after = true;
                        marks[index][place].before = true;
                    }
                }
                Action::ReduceLocal => *unsent = Some((index, place)),
                // What was received is rounded, and replaces the block.
                Action::RecvCopy { .. } | Action::Send { .. } => *unsent = None,
                Action::Publish => {}
            }
        }
    }
    marks
}
