//! A schedule prepared for execution, and the progress of one execution. Pure: no sockets, no
//! memory.
//!
//! The schedule says which step waits for which. A step that waits for a step of the *same* block
//! may follow it byte by byte: what the earlier one has finished of the block's beginning, the
//! later one may use. So a block that arrives is reduced and sent on while its rest is still on
//! the way. A step that waits for a step of another block waits for its end.

use std::{collections::HashMap, ops::Range};

use gradwire_collectives::schedule::{Action, Schedule, Step};

use super::ranges::Ranges;

/// What a step does with its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// Reduce the local ranks' inputs; `lazily` when only a receiving step wants it, which then
    /// does it in the same pass.
    Reduce { lazily: bool },
    /// Send to a peer.
    Send { peer: u32, message: u32 },
    /// Receive and combine; `theirs_first` when the peer's value is the left operand.
    Combine { theirs_first: bool },
    /// Receive and keep.
    Copy,
    /// Hand to the local ranks; done for the whole piece at once (INPUT).
    Publish,
}

/// Which of a step's values are sums that are still added to, and so not rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Unrounded {
    /// The value before a receiving step.
    pub(crate) before: bool,
    /// The value after a step.
    pub(crate) after: bool,
}

/// One step, prepared for execution.
#[derive(Debug)]
pub(crate) struct PlannedStep {
    pub(crate) work: Work,
    /// First byte of the block within the piece.
    pub(crate) start: u64,
    /// Bytes of the block.
    pub(crate) bytes: u64,
    /// Earlier steps of the same block, which may be followed byte by byte.
    follows: Vec<u32>,
    /// Earlier steps of other blocks, which must have ended.
    awaits: Vec<u32>,
    /// The local reduction that this receiving step does in its own pass.
    pub(crate) fused: Option<u32>,
    /// Where the wire type is rounded: which of its values are not.
    pub(crate) unrounded: Unrounded,
}

/// A schedule for one participant, prepared for execution.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) steps: Vec<PlannedStep>,
    /// Which step a message from a peer belongs to.
    receives: HashMap<(u32, u32), u32>,
    /// Participants that this one sends to or receives from, ascending.
    pub(crate) peers: Vec<u32>,
}

impl Plan {
    /// Prepares a schedule over elements of `element` bytes.
    pub(crate) fn new(schedule: &Schedule, element: u64) -> Self {
        let block_of = |action: &Action| match *action {
            Action::ReduceLocal { block }
            | Action::Publish { block }
            | Action::Send { block, .. }
            | Action::RecvReduce { block, .. }
            | Action::RecvCopy { block, .. } => block,
        };
        let mut receives = HashMap::new();
        let mut peers = Vec::new();
        let mut steps: Vec<PlannedStep> = Vec::with_capacity(schedule.steps.len());
        let unrounded = unrounded(schedule);
        for (index, step) in schedule.steps.iter().enumerate() {
            let mine = block_of(&step.action);
            let block = &schedule.blocks[mine as usize];
            let work = match step.action {
                Action::ReduceLocal { .. } => Work::Reduce { lazily: false },
                Action::Publish { .. } => Work::Publish,
                Action::Send { peer, message, .. } => {
                    peers.push(peer);
                    Work::Send { peer, message }
                }
                Action::RecvReduce { peer, message, .. } => {
                    peers.push(peer);
                    receives.insert((peer, message), index as u32);
                    Work::Combine { theirs_first: peer < schedule.me }
                }
                Action::RecvCopy { peer, message, .. } => {
                    peers.push(peer);
                    receives.insert((peer, message), index as u32);
                    Work::Copy
                }
            };
            let (follows, awaits) = step
                .after
                .iter()
                .partition(|&&earlier| block_of(&schedule.steps[earlier as usize].action) == mine);
            steps.push(PlannedStep {
                work,
                start: block.offset * element,
                bytes: block.count * element,
                follows,
                awaits,
                fused: None,
                unrounded: unrounded[index],
            });
        }
        fuse_first_hops(&mut steps);
        peers.sort_unstable();
        peers.dedup();
        Self { steps, receives, peers }
    }

    /// Whether some sums are kept unrounded, which takes memory.
    pub(crate) fn keeps_sums(&self) -> bool {
        let is_kept = |step: &PlannedStep| step.work != (Work::Reduce { lazily: true });
        self.steps.iter().any(|step| step.unrounded.after && is_kept(step))
    }

    /// Every receiving step with its peer, in no particular order.
    pub(crate) fn receivers(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.receives.iter().map(|(&(peer, _), &step)| (step, peer))
    }

    /// Every sending step with its peer, in the order of the schedule.
    pub(crate) fn senders(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.steps.iter().enumerate().filter_map(|(index, step)| match step.work {
            Work::Send { peer, .. } => Some((index as u32, peer)),
            _ => None,
        })
    }

    /// The step that receives this message of this peer, if the schedule has one.
    pub(crate) fn receiving(&self, peer: u32, message: u32) -> Option<u32> {
        self.receives.get(&(peer, message)).copied()
    }
}

/// Marks sums that are only added to. What is sent is rounded before, on both ends (SAME): two
/// nodes that exchange their sums must both continue with what the other one receives.
fn unrounded(schedule: &Schedule) -> Vec<Unrounded> {
    let mut marks = vec![Unrounded::default(); schedule.steps.len()];
    // Of each block, the step that wrote it last, if nothing of it was sent since.
    let mut unsent: Vec<Option<usize>> = vec![None; schedule.blocks.len()];
    for (index, Step { action, .. }) in schedule.steps.iter().enumerate() {
        let unsent = &mut unsent[action.block() as usize];
        match action {
            Action::RecvReduce { .. } => {
                if let Some(earlier) = unsent.replace(index) {
                    marks[earlier].after = true;
                    marks[index].before = true;
                }
            }
            Action::ReduceLocal { .. } | Action::RecvCopy { .. } => *unsent = Some(index),
            Action::Send { .. } => *unsent = None,
            Action::Publish { .. } => {}
        }
    }
    marks
}

/// If only one receiving step waits for a local reduction, that step does it, in one pass over the
/// inputs and the received bytes. The sum is not written to memory in between.
fn fuse_first_hops(steps: &mut [PlannedStep]) {
    let mut wanted_by: Vec<Vec<u32>> = vec![Vec::new(); steps.len()];
    for (index, step) in steps.iter().enumerate() {
        for &earlier in step.follows.iter().chain(&step.awaits) {
            wanted_by[earlier as usize].push(index as u32);
        }
    }
    for index in 0..steps.len() {
        let Work::Reduce { .. } = steps[index].work else { continue };
        let [only] = wanted_by[index][..] else { continue };
        let follower = &mut steps[only as usize];
        let fits = matches!(follower.work, Work::Combine { .. })
            && follower.follows.contains(&(index as u32))
            && follower.fused.is_none();
        if fits {
            follower.follows.retain(|&earlier| earlier != index as u32);
            follower.fused = Some(index as u32);
            steps[index].work = Work::Reduce { lazily: true };
        }
    }
}

/// Which bytes of its block each step has finished.
#[derive(Debug)]
pub(crate) struct Progress {
    done: Vec<Ranges>,
    /// The bytes of steps that connections are sending or receiving, or have sent or received.
    begun: Vec<Ranges>,
    /// Steps other than publishing that have not ended.
    unfinished: usize,
}

impl Progress {
    /// Nothing done; steps of empty blocks count as ended.
    pub(crate) fn new(plan: &Plan) -> Self {
        let unfinished =
            plan.steps.iter().filter(|s| s.bytes > 0 && s.work != Work::Publish).count();
        let none = vec![Ranges::default(); plan.steps.len()];
        Self { done: none.clone(), begun: none, unfinished }
    }

    /// The bytes of a step that connections have begun.
    pub(crate) fn begun(&self, step: u32) -> &Ranges {
        &self.begun[step as usize]
    }

    /// A connection begins these bytes.
    pub(crate) fn begin(&mut self, step: u32, bytes: Range<u64>) {
        self.begun[step as usize].add(bytes);
    }

    /// How many bytes from the beginning of its block on the step has finished.
    pub(crate) fn done(&self, step: u32) -> u64 {
        self.done[step as usize].prefix()
    }

    /// How far the step may go now, in bytes from the beginning of its block.
    pub(crate) fn allowed(&self, plan: &Plan, step: u32) -> u64 {
        let planned = &plan.steps[step as usize];
        let ended = |&earlier: &u32| self.done(earlier) == plan.steps[earlier as usize].bytes;
        if !planned.awaits.iter().all(ended) {
            return 0;
        }
        let followed = planned.follows.iter().map(|&earlier| self.done(earlier));
        followed.min().unwrap_or(planned.bytes)
    }

    /// The step has finished these bytes, too.
    pub(crate) fn advance(&mut self, plan: &Plan, step: u32, bytes: Range<u64>) {
        let planned = &plan.steps[step as usize];
        if bytes.is_empty() {
            return;
        }
        self.done[step as usize].add(bytes);
        let done = self.done(step);
        debug_assert!(done <= planned.bytes, "step {step} went past its block");
        if done == planned.bytes && planned.work != Work::Publish {
            self.unfinished -= 1;
        }
    }

    /// Whether everything but publishing has ended.
    pub(crate) fn is_complete(&self) -> bool {
        self.unfinished == 0
    }
}

#[cfg(test)]
mod tests {
    use gradwire_collectives::schedule::Block;

    use super::*;

    /// Participant 0 of a ring of two: block 0 goes out, block 1 comes in, and back.
    fn ring() -> Plan {
        let step = |action, after: &[u32]| Step { action, after: after.to_vec() };
        let schedule = Schedule {
            participants: 2,
            me: 0,
            blocks: vec![Block { offset: 0, count: 4 }, Block { offset: 4, count: 4 }],
            steps: vec![
                step(Action::ReduceLocal { block: 0 }, &[]),
                step(Action::Send { peer: 1, block: 0, message: 0 }, &[0]),
                step(Action::ReduceLocal { block: 1 }, &[]),
                step(Action::RecvReduce { peer: 1, block: 1, message: 0 }, &[2]),
                step(Action::Send { peer: 1, block: 1, message: 1 }, &[3]),
                step(Action::RecvCopy { peer: 1, block: 0, message: 1 }, &[1]),
                step(Action::Publish { block: 0 }, &[5]),
                step(Action::Publish { block: 1 }, &[3]),
            ],
        };
        Plan::new(&schedule, 4)
    }

    #[test]
    fn the_first_hop_is_fused_and_the_first_send_is_not() {
        let plan = ring();
        assert_eq!(plan.steps[0].work, Work::Reduce { lazily: false });
        assert_eq!(plan.steps[2].work, Work::Reduce { lazily: true });
        assert_eq!(plan.steps[3].fused, Some(2));
        assert_eq!(plan.receiving(1, 1), Some(5));
        assert_eq!(plan.receiving(1, 2), None);
        assert_eq!(plan.peers, [1]);
    }

    fn marks(plan: &Plan) -> Vec<(bool, bool)> {
        plan.steps.iter().map(|s| (s.unrounded.before, s.unrounded.after)).collect()
    }

    #[test]
    fn only_what_is_sent_is_rounded() {
        // The local part of block 1 and what comes for it are summed in one pass, and then sent.
        let plan = ring();
        let yes = [false, false, true, false, false, false, false, false];
        assert_eq!(marks(&plan).iter().map(|mark| mark.1).collect::<Vec<_>>(), yes);
        assert!(!plan.keeps_sums());
        // Two parts come before anything goes out: the first sum waits as it is.
        let step = |action, after: &[u32]| Step { action, after: after.to_vec() };
        let star = |send: Option<u32>| {
            let mut steps = vec![step(Action::ReduceLocal { block: 0 }, &[])];
            for peer in [1, 2] {
                let before = steps.len() as u32 - 1;
                if send == Some(peer) {
                    steps.push(step(Action::Send { peer, block: 0, message: 0 }, &[before]));
                }
                let before = steps.len() as u32 - 1;
                steps.push(step(Action::RecvReduce { peer, block: 0, message: 0 }, &[before]));
            }
            let blocks = vec![Block { offset: 0, count: 4 }];
            Plan::new(&Schedule { participants: 3, me: 0, blocks, steps }, 2)
        };
        let plan = star(None);
        assert_eq!(marks(&plan), [(false, true), (true, true), (true, false)]);
        assert!(plan.keeps_sums());
        // SAME: as in recursive doubling, both go on with what they send.
        let plan = star(Some(2));
        let marks = marks(&plan);
        assert_eq!(marks, [(false, true), (true, false), (false, false), (false, false)]);
        assert!(!plan.keeps_sums());
    }

    #[test]
    fn steps_of_one_block_follow_each_other_byte_by_byte() {
        let plan = ring();
        let mut progress = Progress::new(&plan);
        assert_eq!(progress.allowed(&plan, 1), 0);
        progress.advance(&plan, 0, 0..8);
        assert_eq!(progress.allowed(&plan, 1), 8);
        assert_eq!(progress.allowed(&plan, 5), 0, "not sent yet: must not be overwritten");
        progress.advance(&plan, 1, 0..4);
        assert_eq!(progress.allowed(&plan, 5), 4);
        assert_eq!(progress.allowed(&plan, 3), 16, "its local part is done in the same pass");
    }

    #[test]
    fn what_follows_goes_no_further_than_the_first_gap() {
        let plan = ring();
        let mut progress = Progress::new(&plan);
        progress.advance(&plan, 3, 8..16);
        assert_eq!((progress.done(3), progress.allowed(&plan, 4)), (0, 0));
        progress.advance(&plan, 3, 0..4);
        assert_eq!(progress.allowed(&plan, 4), 4);
        progress.advance(&plan, 3, 4..8);
        assert_eq!(progress.allowed(&plan, 4), 16);
    }

    #[test]
    fn a_run_is_complete_when_all_but_publishing_ended() {
        let plan = ring();
        let mut progress = Progress::new(&plan);
        for step in 0..6 {
            assert!(!progress.is_complete());
            progress.advance(&plan, step, 0..16);
        }
        assert!(progress.is_complete());
    }
}
