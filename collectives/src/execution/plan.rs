//! A schedule prepared for execution.
//!
//! A step that waits for a step of the *same* blocks may follow it byte by byte: it may use what
//! the earlier step has finished. So a block is reduced and sent on while the rest of it is still
//! arriving. A step that waits for a step of other blocks waits for its end.

use std::{ops::Range, sync::Arc};

use super::rounding::{self, Unrounded};
use crate::{
    layout::{Follow, Stretch},
    schedule::{Action, Block, Schedule, StepView},
};

/// What a step does with its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Reduces the local ranks' inputs.
    Reduce {
        /// Whether the only receiving step that needs the result does it, in its own pass.
        lazily: bool,
    },
    /// Sends to a peer.
    Send {
        /// The receiver.
        peer: u32,
        /// The number of the message.
        message: u32,
    },
    /// Receives and combines.
    Combine {
        /// Whether the peer's value is the left operand.
        theirs_first: bool,
    },
    /// Receives and replaces the block.
    Copy,
    /// Hands the result to the local ranks; done for the whole piece at once (INPUT).
    Publish,
}

/// Bytes that are contiguous in a step's message and in the piece, and are rounded alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepPart {
    /// The offset of the first byte in the message.
    pub at: u64,
    /// The offset of the first byte in the piece.
    pub start: u64,
    /// How many.
    pub bytes: u64,
    /// Which of its values are not rounded to the wire type.
    pub unrounded: Unrounded,
}

/// One step, prepared for execution. Its bytes are counted from the beginning of its message.
#[derive(Debug)]
pub struct PlannedStep {
    /// What it does.
    pub work: Work,
    /// Bytes of all its blocks.
    pub bytes: u64,
    /// Their positions, in order.
    pub(super) parts: Vec<StepPart>,
    /// Earlier steps that share bytes with this one, and how far it may follow each of them.
    pub(super) follows: Vec<(u32, Follow)>,
    /// Earlier steps of other blocks, which must have ended.
    pub(super) awaits: Vec<u32>,
    /// The local reduction that this receiving step does in its own pass.
    pub fused: Option<u32>,
    /// Whether it writes to bytes that an earlier step sends: these must have arrived by then, or
    /// be copied.
    pub overwrites_sent: bool,
    /// The local reduction whose result only this sending step uses. If it has a single input and
    /// computes nothing, the step may send the input instead.
    pub(super) only_user_of: Option<u32>,
}

impl PlannedStep {
    /// The parts of a range of bytes.
    pub fn parts(&self, bytes: Range<u64>) -> impl Iterator<Item = StepPart> + '_ {
        let first = self.parts.partition_point(|part| part.at + part.bytes <= bytes.start);
        let Range { start, end } = bytes;
        let is_inside = move |part: &&StepPart| part.at < end && start < end;
        self.parts[first..].iter().take_while(is_inside).map(move |part| {
            let (from, to) = (part.at.max(start), (part.at + part.bytes).min(end));
            StepPart { at: from, start: part.start + (from - part.at), bytes: to - from, ..*part }
        })
    }

    /// The position of a range of bytes in the piece: that of the whole range if it is contiguous
    /// there, otherwise that of its first contiguous part.
    pub fn beginning(&self, bytes: Range<u64>) -> Range<usize> {
        if let [part] = &self.parts[..] {
            let (from, to) = (bytes.start.max(part.at), bytes.end.min(part.at + part.bytes));
            let start = part.start + (from - part.at);
            let is_empty = from >= to;
            return if is_empty { 0..0 } else { start as usize..(start + (to - from)) as usize };
        }
        let mut place: Option<Range<usize>> = None;
        for part in self.parts(bytes) {
            let next = part.start as usize..(part.start + part.bytes) as usize;
            match &mut place {
                Some(place) if place.end == next.start => place.end = next.end,
                Some(_) => break,
                None => place = Some(next),
            }
        }
        place.unwrap_or_default()
    }

    /// The positions of all its bytes in the piece: the longest contiguous ranges, in the order of
    /// the message. Each chunk is within one of them.
    pub fn places(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            let place = self.beginning(at..self.bytes);
            at += place.len() as u64;
            (!place.is_empty()).then_some(place)
        })
    }

    /// The earlier steps that it waits for, in whole or byte by byte.
    pub fn earlier(&self) -> impl Iterator<Item = u32> + '_ {
        let followed = self.follows.iter().map(|&(earlier, _)| earlier);
        followed.chain(self.awaits.iter().copied())
    }
}

/// A schedule for one participant, prepared for execution.
#[derive(Debug)]
pub struct Plan {
    /// Its steps, in the order of the schedule.
    pub steps: Vec<PlannedStep>,
    /// The bytes of an element, which is never split.
    pub element: u64,
    /// The peer, the number and the step of each message that it receives, sorted.
    receives: Vec<(u32, u32, u32)>,
    /// Where the messages of each peer begin, and the end.
    first_receives: Vec<usize>,
    /// The blocks in the order of the piece, shared with other participants where possible.
    blocks: Arc<[Block]>,
    /// Participants that this one sends to or receives from, ascending.
    pub peers: Vec<u32>,
}

impl Plan {
    /// Prepares a schedule over elements of `element` bytes.
    pub fn new(schedule: &Schedule, element: u64) -> Self {
        let mut receives = Vec::new();
        let mut peers = Vec::new();
        let mut steps: Vec<PlannedStep> = Vec::with_capacity(schedule.steps.len());
        // The stretches of all steps, and where those of each step end.
        let mut stretches: Vec<Stretch> = Vec::with_capacity(schedule.steps.len());
        let mut ends: Vec<usize> = Vec::with_capacity(schedule.steps.len());
        let marks = rounding::unrounded(schedule);
        let mut is_sent = vec![false; schedule.blocks.len()];
        for (index, step) in schedule.steps.iter().enumerate() {
            let work = match step.action {
                Action::ReduceLocal => Work::Reduce { lazily: false },
                Action::Publish => Work::Publish,
                Action::Send { peer, message } => {
                    peers.push(peer);
                    Work::Send { peer, message }
                }
                Action::RecvReduce { peer, message, theirs_first } => {
                    peers.push(peer);
                    receives.push((peer, message, index as u32));
                    Work::Combine { theirs_first }
                }
                Action::RecvCopy { peer, message } => {
                    peers.push(peer);
                    receives.push((peer, message, index as u32));
                    Work::Copy
                }
            };
            let parts = parts(schedule, step, element, marks.of(index));
            let first = stretches.len();
            for part in &parts {
                let StepPart { at, start: offset, bytes: count, .. } = *part;
                match stretches[first..].last_mut() {
                    Some(last) if last.offset + last.count == offset => last.count += count,
                    _ => stretches.push(Stretch { at, offset, count }),
                }
            }
            let (before, own) = stretches.split_at(first);
            let (mut follows, mut awaits) = (Vec::new(), Vec::new());
            for &earlier in step.after {
                let earlier_first = (earlier as usize).checked_sub(1).map_or(0, |one| ends[one]);
                match Follow::new(own, &before[earlier_first..ends[earlier as usize]]) {
                    Some(follow) => follows.push((earlier, follow)),
                    None => awaits.push(earlier),
                }
            }
            ends.push(stretches.len());
            let bytes = parts.iter().map(|part| part.bytes).sum();
            let overwrites_sent =
                step.action.writes() && step.blocks().any(|block| is_sent[block as usize]);
            if step.action.sends_to().is_some() {
                step.blocks().for_each(|block| is_sent[block as usize] = true);
            }
            steps.push(PlannedStep {
                work,
                bytes,
                parts,
                follows,
                awaits,
                fused: None,
                overwrites_sent,
                only_user_of: None,
            });
        }
        fuse_first_hops(&mut steps, schedule);
        for (step, reduction) in only_users(schedule) {
            steps[step as usize].only_user_of = Some(reduction);
        }
        peers.sort_unstable();
        peers.dedup();
        receives.sort_unstable();
        let mut first_receives = Vec::with_capacity(peers.len() + 1);
        first_receives
            .extend(peers.iter().map(|&peer| receives.partition_point(|&(p, ..)| p < peer)));
        first_receives.push(receives.len());
        let mut blocks = schedule.blocks.clone();
        if !blocks.is_sorted_by_key(|block| block.offset) {
            let mut sorted = blocks.to_vec();
            sorted.sort_unstable_by_key(|block| block.offset);
            blocks = sorted.into();
        }
        Self { steps, element, receives, first_receives, blocks, peers }
    }

    /// Whether a block ends at this byte of a step's message. The sender may keep the next block in
    /// another place, so it can't send both at once.
    pub fn breaks_at(&self, step: u32, byte: u64) -> bool {
        let Some(last) = byte.checked_sub(1) else { return false };
        let Some(part) = self.steps[step as usize].parts(last..byte).next() else { return false };
        let end = part.start + 1;
        let behind = self.blocks.partition_point(|block| block.offset * self.element < end);
        let ends =
            |block: &Block| block.count > 0 && (block.offset + block.count) * self.element == end;
        // Empty blocks may lie between.
        self.blocks[..behind].iter().rev().find(|block| block.count > 0).is_some_and(ends)
    }

    /// Whether some sums are kept unrounded, which takes memory.
    pub fn keeps_sums(&self) -> bool {
        let is_kept = |step: &PlannedStep| step.work != (Work::Reduce { lazily: true });
        let keeps = |step: &PlannedStep| step.parts.iter().any(|part| part.unrounded.after);
        self.steps.iter().any(|step| keeps(step) && is_kept(step))
    }

    /// Every receiving step with its peer, in no particular order.
    pub fn receivers(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.receives.iter().map(|&(peer, _, step)| (step, peer))
    }

    /// Every sending step with its peer, in the order of the schedule.
    pub fn senders(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.steps.iter().enumerate().filter_map(|(index, step)| match step.work {
            Work::Send { peer, .. } => Some((index as u32, peer)),
            _ => None,
        })
    }

    /// Each sending step that is the only user of a local reduction, with that reduction.
    pub fn only_users(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        let steps = (0..).zip(&self.steps);
        steps.filter_map(|(step, planned)| planned.only_user_of.map(|earlier| (step, earlier)))
    }

    /// The step that receives this message of this peer, if the schedule has one.
    pub fn receiving(&self, peer: u32, message: u32) -> Option<u32> {
        let place = self.peers.binary_search(&peer).ok()?;
        let of_peer = &self.receives[self.first_receives[place]..self.first_receives[place + 1]];
        // They are numbered from 0 on.
        let &(_, number, step) = of_peer.get(message as usize)?;
        (number == message).then_some(step)
    }
}

/// The parts of a step, with the marks of its values.
fn parts(
    schedule: &Schedule,
    step: StepView<'_>,
    element: u64,
    marks: &[Unrounded],
) -> Vec<StepPart> {
    let mut parts: Vec<StepPart> = Vec::new();
    let mut at = 0;
    for (block, &unrounded) in step.blocks().zip(marks) {
        let Block { offset, count } = schedule.blocks[block as usize];
        let (start, bytes) = (offset * element, count * element);
        match parts.last_mut() {
            _ if count == 0 => {}
            Some(last) if last.start + last.bytes == start && last.unrounded == unrounded => {
                last.bytes += bytes;
            }
            _ => parts.push(StepPart { at, start, bytes, unrounded }),
        }
        at += bytes;
    }
    parts
}

/// If only one receiving step waits for a local reduction of the same blocks, that step does it, in
/// one pass over the inputs and the received bytes. The sum is not written to memory in between.
fn fuse_first_hops(steps: &mut [PlannedStep], schedule: &Schedule) {
    // How many steps depend on each step, and the last of them.
    let mut wanted_by = vec![(0u32, 0u32); steps.len()];
    for (index, step) in (0..).zip(schedule.steps.iter()) {
        for &earlier in step.after {
            let (count, last) = &mut wanted_by[earlier as usize];
            (*count, *last) = (*count + 1, index);
        }
    }
    for index in 0..steps.len() {
        let Work::Reduce { .. } = steps[index].work else { continue };
        let (1, only) = wanted_by[index] else { continue };
        let is_same = schedule.steps.at(index).ranges == schedule.steps.at(only as usize).ranges;
        let follower = &mut steps[only as usize];
        let fits = matches!(follower.work, Work::Combine { .. }) && follower.fused.is_none();
        if is_same && fits {
            follower.follows.retain(|&(earlier, _)| earlier != index as u32);
            follower.fused = Some(index as u32);
            steps[index].work = Work::Reduce { lazily: true };
        }
    }
}

/// The sending steps that are the only users of a local reduction of the same blocks in the same
/// order, with that reduction. Other steps that follow replace the blocks before they are read.
fn only_users(schedule: &Schedule) -> Vec<(u32, u32)> {
    /// Which steps use a local reduction.
    #[derive(Clone, Copy, PartialEq)]
    enum Use {
        None,
        SentBy(u32),
        Other,
    }
    let mut uses = vec![Use::None; schedule.steps.len()];
    // The local reduction whose result each block holds.
    let mut reduced: Vec<Option<u32>> = vec![None; schedule.blocks.len()];
    for (index, step) in (0..).zip(schedule.steps.iter()) {
        for block in step.blocks() {
            let holds = &mut reduced[block as usize];
            if step.action == Action::ReduceLocal {
                *holds = Some(index);
                continue;
            }
            let Some(reduction) = *holds else { continue };
            let found = &mut uses[reduction as usize];
            match step.action {
                Action::Send { .. } if matches!(*found, Use::None) => *found = Use::SentBy(index),
                Action::Send { .. } if *found == Use::SentBy(index) => {}
                Action::RecvCopy { .. } => *holds = None,
                _ => *found = Use::Other,
            }
        }
    }
    let same = |a: u32, b: u32| {
        schedule.steps.at(a as usize).ranges == schedule.steps.at(b as usize).ranges
    };
    let found = (0..).zip(uses).filter_map(|(reduction, found)| match found {
        Use::SentBy(step) if same(reduction, step) => Some((step, reduction)),
        _ => None,
    });
    found.collect()
}
