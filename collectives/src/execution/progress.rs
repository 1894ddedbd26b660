//! The progress of an execution of a plan, and what it may do next.

use std::ops::Range;

use super::{
    plan::{Plan, PlannedStep, Work},
    ranges::Ranges,
};
use crate::layout::Follow;

/// The smallest payload of a frame that does not end its block (BOUND): each frame that is held
/// costs memory besides its bytes.
pub const MIN_PAYLOAD: u64 = 4 << 10;

/// The bytes of a chunk of whole elements, or groups, of `element` bytes each: at most `limit`,
/// unless that is less than the smallest payload.
pub fn whole(limit: u64, element: u64) -> u64 {
    let most = limit - limit % element;
    if most < limit.min(MIN_PAYLOAD) { most + element } else { most }
}

/// Bytes of a step's message that are handled at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// The step.
    pub step: u32,
    /// The first byte in its message.
    pub offset: u64,
    /// How many.
    pub bytes: u64,
}

/// Which bytes of its message each step has finished.
#[derive(Debug)]
pub struct Progress {
    done: Vec<Ranges>,
    /// The bytes of each step that connections have begun to send or receive.
    begun: Vec<Ranges>,
    /// For each step, how many of its dependencies have not ended, if ends are noted.
    awaited: Vec<u32>,
    /// Steps other than publishing that have not ended.
    unfinished: usize,
    /// Steps before this one have no local reduction left to do.
    next_local: u32,
}

impl Progress {
    /// The state before any progress. Steps with only empty blocks count as ended.
    pub fn new(plan: &Plan) -> Self {
        let unfinished =
            plan.steps.iter().filter(|s| s.bytes > 0 && s.work != Work::Publish).count();
        let none = vec![Ranges::default(); plan.steps.len()];
        let awaited = Vec::new();
        Self { done: none.clone(), begun: none, awaited, unfinished, next_local: 0 }
    }

    /// The same state for a caller that [notes](Self::note_end) ends. The dependencies of a step
    /// are then checked only until all of them have ended.
    #[must_use]
    pub fn with_noted_ends(mut self, plan: &Plan) -> Self {
        let is_open = |&earlier: &u32| self.done(earlier) < plan.steps[earlier as usize].bytes;
        let awaited = |step: &PlannedStep| step.earlier().filter(is_open).count() as u32;
        self.awaited = plan.steps.iter().map(awaited).collect();
        self
    }

    /// The bytes of a step that connections have begun.
    pub fn begun(&self, step: u32) -> &Ranges {
        &self.begun[step as usize]
    }

    /// Notes that a connection begins to send or receive these bytes.
    pub fn begin(&mut self, step: u32, bytes: Range<u64>) {
        self.begun[step as usize].add(bytes);
    }

    /// How many bytes the step has finished, from the beginning of its message.
    pub fn done(&self, step: u32) -> u64 {
        self.done[step as usize].prefix()
    }

    /// Notes that a dependency of `later` has ended: once for each of them.
    pub fn note_end(&mut self, later: u32) {
        self.awaited[later as usize] -= 1;
    }

    /// How far the step may go now, in bytes from the beginning of its message.
    pub fn allowed(&self, plan: &Plan, step: u32) -> u64 {
        let planned = &plan.steps[step as usize];
        if self.awaited.get(step as usize) == Some(&0) {
            return planned.bytes;
        }
        let ended = |&earlier: &u32| self.done(earlier) == plan.steps[earlier as usize].bytes;
        if !planned.awaits.iter().all(ended) {
            return 0;
        }
        let limit = |(earlier, follow): &(u32, Follow)| {
            let done = self.done(*earlier);
            let is_all = done == plan.steps[*earlier as usize].bytes;
            if is_all { planned.bytes } else { follow.limit(done, planned.bytes) }
        };
        planned.follows.iter().map(limit).min().unwrap_or(planned.bytes)
    }

    /// Notes that the step has finished these bytes.
    pub fn advance(&mut self, plan: &Plan, step: u32, bytes: Range<u64>) {
        let planned = &plan.steps[step as usize];
        if bytes.is_empty() {
            return;
        }
        self.done[step as usize].add(bytes);
        let done = self.done(step);
        debug_assert!(done <= planned.bytes, "step {step} went past its end");
        if done == planned.bytes && planned.work != Work::Publish {
            self.unfinished -= 1;
        }
    }

    /// Whether everything but publishing has ended.
    pub fn is_complete(&self) -> bool {
        self.unfinished == 0
    }

    /// Whether a receiving step may process these bytes now. Its own earlier bytes may be missing:
    /// no byte of the step depends on another one.
    pub fn takes(&self, plan: &Plan, step: u32, offset: u64, bytes: u64) -> bool {
        self.allowed(plan, step) >= offset + bytes
    }

    /// How many contiguous bytes of a step from `offset` on may be processed now, at most `limit`.
    /// Returns whole chunks, except at the end of a contiguous range.
    pub fn available(&self, plan: &Plan, step: u32, offset: u64, limit: u64) -> u64 {
        let planned = &plan.steps[step as usize];
        let limit = whole(limit, plan.element);
        let wanted = planned.beginning(offset..planned.bytes.min(offset + limit)).len() as u64;
        if self.takes(plan, step, offset, wanted) { wanted } else { 0 }
    }

    /// Gives a connection the next chunk of a sending step, if there is one. Call
    /// [`advance`](Self::advance) when it has been sent.
    pub fn hand_out(&mut self, plan: &Plan, step: u32, limit: u64) -> Option<Chunk> {
        let offset = self.begun(step).prefix();
        let bytes = self.available(plan, step, offset, limit);
        if bytes == 0 {
            return None;
        }
        self.begin(step, offset..offset + bytes);
        Some(Chunk { step, offset, bytes })
    }

    /// Gives a connection all of a sending step at once, when all its bytes may go. The daemon does
    /// not do that, but closed forms assume it.
    pub fn hand_out_whole(&mut self, plan: &Plan, step: u32) -> Option<Chunk> {
        let bytes = plan.steps[step as usize].bytes;
        let is_ready = bytes > 0 && self.begun(step).prefix() == 0;
        if !is_ready || !self.takes(plan, step, 0, bytes) {
            return None;
        }
        self.begin(step, 0..bytes);
        Some(Chunk { step, offset: 0, bytes })
    }

    /// Whether connections have been given all of a sending step.
    pub fn is_handed_out(&self, plan: &Plan, step: u32) -> bool {
        self.begun(step).prefix() == plan.steps[step as usize].bytes
    }

    /// The next chunk of local reduction that others wait for: in the order of the schedule, one
    /// step after the other. Call [`advance`](Self::advance) when it has been done.
    pub fn next_local(&mut self, plan: &Plan, limit: u64) -> Option<Chunk> {
        while let Some(planned) = plan.steps.get(self.next_local as usize) {
            let (step, offset) = (self.next_local, self.done(self.next_local));
            if planned.work == (Work::Reduce { lazily: false }) && offset < planned.bytes {
                let bytes = self.available(plan, step, offset, limit);
                return (bytes > 0).then_some(Chunk { step, offset, bytes });
            }
            self.next_local += 1;
        }
        None
    }
}
