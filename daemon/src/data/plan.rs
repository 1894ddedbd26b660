//! A schedule prepared for execution, and the progress of one execution. Pure: no sockets, no
//! memory.
//!
//! The schedule says which step waits for which. A step that waits for a step of the *same* blocks
//! may follow it byte by byte: what the earlier one has finished, the later one may use. So a block
//! that arrives is reduced and sent on while its rest is still on the way. A step that waits for a
//! step of other blocks waits for its end.

use std::{collections::HashMap, ops::Range};

use gradwire_collectives::{
    layout::{self, Follow, Stretch},
    schedule::{Action, Schedule, Step},
};

use super::ranges::Ranges;

/// What a step does with its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// Reduces the local ranks' inputs. It is `lazily` done where only one receiving step needs it,
    /// which then reduces in the same pass.
    Reduce { lazily: bool },
    /// Sends to a peer.
    Send { peer: u32, message: u32 },
    /// Receives and combines; `theirs_first` when the peer's value is the left operand.
    Combine { theirs_first: bool },
    /// Receives and keeps.
    Copy,
    /// Hands the result to the local ranks; done for the whole piece at once (INPUT).
    Publish,
}

/// Which of a step's values are sums that are still added to, and are not rounded for that reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Unrounded {
    /// The value before a receiving step.
    pub(crate) before: bool,
    /// The value after a step.
    pub(crate) after: bool,
}

/// Bytes that follow each other in a step's message and in the piece, and are handled alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StepPart {
    /// The offset of the first byte in the message.
    pub(crate) at: u64,
    /// The offset of the first byte in the piece.
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    /// Where the wire type rounds: which values are not rounded.
    pub(crate) unrounded: Unrounded,
}

/// One step, prepared for execution. Its bytes are counted from the beginning of its message.
#[derive(Debug)]
pub(crate) struct PlannedStep {
    pub(crate) work: Work,
    /// Bytes of all its blocks.
    pub(crate) bytes: u64,
    /// Their positions, in order.
    parts: Vec<StepPart>,
    /// The ends of its blocks in the message, ascending.
    ends: Vec<u64>,
    /// Earlier steps that share bytes with this one, and how far it may follow each of them.
    follows: Vec<(u32, Follow)>,
    /// Earlier steps of other blocks, which must have ended.
    awaits: Vec<u32>,
    /// The local reduction that this receiving step does in its own pass.
    pub(crate) fused: Option<u32>,
}

impl PlannedStep {
    /// The parts of a range of bytes.
    pub(crate) fn parts(&self, bytes: Range<u64>) -> impl Iterator<Item = StepPart> + '_ {
        let first = self.parts.partition_point(|part| part.at + part.bytes <= bytes.start);
        let Range { start, end } = bytes;
        let is_inside = move |part: &&StepPart| part.at < end && start < end;
        self.parts[first..].iter().take_while(is_inside).map(move |part| {
            let (from, to) = (part.at.max(start), (part.at + part.bytes).min(end));
            StepPart { at: from, start: part.start + (from - part.at), bytes: to - from, ..*part }
        })
    }

    /// The position of a range of bytes in the piece. It is that of the whole range if it is in one
    /// place, otherwise that of its beginning.
    pub(crate) fn beginning(&self, bytes: Range<u64>) -> Range<usize> {
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

    /// Whether a block ends at this byte. The sender may have it and the next one in different
    /// places, so that it can't send both at once.
    pub(crate) fn breaks_at(&self, byte: u64) -> bool {
        self.ends.binary_search(&byte).is_ok()
    }
}

/// A schedule for one participant, prepared for execution.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) steps: Vec<PlannedStep>,
    /// The step that each message of a peer belongs to.
    receives: HashMap<(u32, u32), u32>,
    /// Participants that this one sends to or receives from, ascending.
    pub(crate) peers: Vec<u32>,
}

impl Plan {
    /// Prepares a schedule over elements of `element` bytes.
    pub(crate) fn new(schedule: &Schedule, element: u64) -> Self {
        let mut receives = HashMap::new();
        let mut peers = Vec::new();
        let mut steps: Vec<PlannedStep> = Vec::with_capacity(schedule.steps.len());
        let mut stretches: Vec<Vec<Stretch>> = Vec::with_capacity(schedule.steps.len());
        let unrounded = unrounded(schedule);
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
                    receives.insert((peer, message), index as u32);
                    Work::Combine { theirs_first }
                }
                Action::RecvCopy { peer, message } => {
                    peers.push(peer);
                    receives.insert((peer, message), index as u32);
                    Work::Copy
                }
            };
            let own: Vec<Stretch> = layout::stretches(schedule, step)
                .into_iter()
                .map(|s| Stretch {
                    at: s.at * element,
                    offset: s.offset * element,
                    count: s.count * element,
                })
                .collect();
            let parts = parts(schedule, step, &own, &unrounded[index]);
            let ends = own.iter().map(|stretch| stretch.at + stretch.count).collect();
            let own = layout::joined(&own);
            let (mut follows, mut awaits) = (Vec::new(), Vec::new());
            for &earlier in &step.after {
                match Follow::new(&own, &stretches[earlier as usize]) {
                    Some(follow) => follows.push((earlier, follow)),
                    None => awaits.push(earlier),
                }
            }
            let bytes = own.iter().map(|stretch| stretch.count).sum();
            steps.push(PlannedStep { work, bytes, parts, ends, follows, awaits, fused: None });
            stretches.push(own);
        }
        fuse_first_hops(&mut steps, schedule);
        peers.sort_unstable();
        peers.dedup();
        Self { steps, receives, peers }
    }

    /// Whether some sums are kept unrounded, which takes memory.
    pub(crate) fn keeps_sums(&self) -> bool {
        let is_kept = |step: &PlannedStep| step.work != (Work::Reduce { lazily: true });
        let keeps = |step: &PlannedStep| step.parts.iter().any(|part| part.unrounded.after);
        self.steps.iter().any(|step| keeps(step) && is_kept(step))
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

/// The parts of a step whose blocks, but for empty ones, are `stretches`, and their values marked.
fn parts(
    schedule: &Schedule,
    step: &Step,
    stretches: &[Stretch],
    unrounded: &[Unrounded],
) -> Vec<StepPart> {
    let is_empty = |block: u32| schedule.blocks[block as usize].count == 0;
    let marks = step.blocks().zip(unrounded).filter(|(block, _)| !is_empty(*block));
    let mut parts: Vec<StepPart> = Vec::new();
    for (stretch, (_, &unrounded)) in stretches.iter().zip(marks) {
        match parts.last_mut() {
            Some(last)
                if last.start + last.bytes == stretch.offset && last.unrounded == unrounded =>
            {
                last.bytes += stretch.count;
            }
            _ => parts.push(StepPart {
                at: stretch.at,
                start: stretch.offset,
                bytes: stretch.count,
                unrounded,
            }),
        }
    }
    parts
}

/// Marks sums that are only added to, for each block of each step. What is sent is rounded before,
/// on both ends (SAME). Two nodes that exchange their sums must both continue with what the other
/// one receives.
fn unrounded(schedule: &Schedule) -> Vec<Vec<Unrounded>> {
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

/// If only one receiving step waits for a local reduction of the same blocks, that step does it, in
/// one pass over the inputs and the received bytes. The sum is not written to memory in between.
fn fuse_first_hops(steps: &mut [PlannedStep], schedule: &Schedule) {
    let mut wanted_by: Vec<Vec<u32>> = vec![Vec::new(); steps.len()];
    for (index, step) in (0..).zip(&schedule.steps) {
        for &earlier in &step.after {
            wanted_by[earlier as usize].push(index);
        }
    }
    for index in 0..steps.len() {
        let Work::Reduce { .. } = steps[index].work else { continue };
        let [only] = wanted_by[index][..] else { continue };
        let is_same = schedule.steps[index].ranges == schedule.steps[only as usize].ranges;
        let follower = &mut steps[only as usize];
        let fits = matches!(follower.work, Work::Combine { .. }) && follower.fused.is_none();
        if is_same && fits {
            follower.follows.retain(|&(earlier, _)| earlier != index as u32);
            follower.fused = Some(index as u32);
            steps[index].work = Work::Reduce { lazily: true };
        }
    }
}

/// Which bytes of its message each step has finished.
#[derive(Debug)]
pub(crate) struct Progress {
    done: Vec<Ranges>,
    /// The bytes of steps that connections are sending or receiving, or have sent or received.
    begun: Vec<Ranges>,
    /// Steps other than publishing that have not ended.
    unfinished: usize,
}

impl Progress {
    /// The state before any progress. Steps with only empty blocks count as ended.
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

    /// A connection begins to send or receive these bytes.
    pub(crate) fn begin(&mut self, step: u32, bytes: Range<u64>) {
        self.begun[step as usize].add(bytes);
    }

    /// How many bytes the step has finished, from the beginning of its message.
    pub(crate) fn done(&self, step: u32) -> u64 {
        self.done[step as usize].prefix()
    }

    /// How far the step may go now, in bytes from the beginning of its message.
    pub(crate) fn allowed(&self, plan: &Plan, step: u32) -> u64 {
        let planned = &plan.steps[step as usize];
        let ended = |&earlier: &u32| self.done(earlier) == plan.steps[earlier as usize].bytes;
        if !planned.awaits.iter().all(ended) {
            return 0;
        }
        let limit =
            |(earlier, follow): &(u32, Follow)| follow.limit(self.done(*earlier), planned.bytes);
        planned.follows.iter().map(limit).min().unwrap_or(planned.bytes)
    }

    /// The step has finished these bytes.
    pub(crate) fn advance(&mut self, plan: &Plan, step: u32, bytes: Range<u64>) {
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
    pub(crate) fn is_complete(&self) -> bool {
        self.unfinished == 0
    }
}

#[cfg(test)]
mod tests {
    use gradwire_collectives::{
        algorithms::{self, Algorithm, Kind},
        schedule::Block,
        topology::Topology,
    };

    use super::*;

    fn step(action: Action, blocks: Range<u32>, after: &[u32]) -> Step {
        Step { action, ranges: vec![blocks], after: after.to_vec() }
    }

    fn send(peer: u32, message: u32) -> Action {
        Action::Send { peer, message }
    }

    fn reduce(peer: u32, message: u32) -> Action {
        Action::RecvReduce { peer, message, theirs_first: false }
    }

    fn copy(peer: u32, message: u32) -> Action {
        Action::RecvCopy { peer, message }
    }

    /// The plan of participant 0, in blocks of four elements of `element` bytes.
    fn planned(participants: u32, blocks: u64, steps: Vec<Step>, element: u64) -> Plan {
        let blocks = (0..blocks).map(|at| Block { offset: 4 * at, count: 4 }).collect();
        Plan::new(&Schedule { participants, servers: 0, me: 0, blocks, steps }, element)
    }

    /// Participant 0 of a ring of two: it sends block 0 and receives block 1, and then the reverse.
    fn ring() -> Plan {
        let steps = vec![
            step(Action::ReduceLocal, 0..1, &[]),
            step(send(1, 0), 0..1, &[0]),
            step(Action::ReduceLocal, 1..2, &[]),
            step(reduce(1, 0), 1..2, &[2]),
            step(send(1, 1), 1..2, &[3]),
            step(copy(1, 1), 0..1, &[1]),
            step(Action::Publish, 0..1, &[5]),
            step(Action::Publish, 1..2, &[3]),
        ];
        planned(2, 2, steps, 4)
    }

    /// The same in two messages of two blocks each, the last block first.
    fn pairs() -> Plan {
        let wrapped = |action, after: &[u32]| Step {
            action,
            ranges: vec![3..4, 0..1],
            after: after.to_vec(),
        };
        let steps = vec![
            step(Action::ReduceLocal, 0..4, &[]),
            wrapped(send(1, 0), &[0]),
            step(reduce(1, 0), 1..3, &[0]),
            step(send(1, 1), 1..3, &[2]),
            wrapped(copy(1, 1), &[1]),
            step(Action::Publish, 0..4, &[2, 4]),
        ];
        planned(2, 4, steps, 4)
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

    #[test]
    fn a_message_of_several_places_is_followed_byte_by_byte() {
        let plan = pairs();
        let mut progress = Progress::new(&plan);
        // The local sum is computed from the beginning; the message begins with its last block.
        progress.advance(&plan, 0, 0..24);
        assert_eq!((progress.allowed(&plan, 1), progress.allowed(&plan, 2)), (0, 8));
        progress.advance(&plan, 0, 24..56);
        assert_eq!((progress.allowed(&plan, 1), progress.allowed(&plan, 2)), (8, 32));
        progress.advance(&plan, 0, 56..64);
        assert_eq!(progress.allowed(&plan, 1), 32);
        progress.advance(&plan, 1, 0..16);
        assert_eq!(progress.allowed(&plan, 4), 16, "what has not been sent is not overwritten");
        // Both blocks that it publishes have to be complete.
        assert_eq!(progress.allowed(&plan, 5), 0);
        progress.advance(&plan, 4, 16..32);
        assert_eq!(progress.allowed(&plan, 5), 0, "the last block comes first, and is missing");
    }

    #[test]
    fn a_chunk_ends_where_its_place_does() {
        let sent = &pairs().steps[1];
        assert_eq!(sent.beginning(0..32), 48..64);
        assert_eq!(sent.beginning(4..10), 52..58);
        assert_eq!(sent.beginning(16..32), 0..16);
        assert_eq!(sent.beginning(32..32), 0..0);
        let breaks: Vec<u64> = (0..=32).filter(|&byte| sent.breaks_at(byte)).collect();
        assert_eq!(breaks, [16, 32]);
        let parts: Vec<_> = sent.parts(12..20).map(|p| (p.at, p.start, p.bytes)).collect();
        assert_eq!(parts, [(12, 60, 4), (16, 0, 4)]);
        // Two adjacent blocks are one place.
        assert_eq!(pairs().steps[2].beginning(0..32), 16..48);
    }

    /// The marks of each step, before and after. All blocks of a step have the same marks.
    fn marks(plan: &Plan) -> Vec<(bool, bool)> {
        let mark = |step: &PlannedStep| match step.parts[..] {
            [StepPart { unrounded, .. }] => (unrounded.before, unrounded.after),
            _ => panic!("{:?}", step.parts),
        };
        plan.steps.iter().map(mark).collect()
    }

    #[test]
    fn only_what_is_sent_is_rounded() {
        // The local part of block 1 and the received part are summed in one pass, and then sent.
        let plan = ring();
        let yes = [false, false, true, false, false, false, false, false];
        assert_eq!(marks(&plan).iter().map(|mark| mark.1).collect::<Vec<_>>(), yes);
        assert!(!plan.keeps_sums());
        // Two parts are received before anything is sent: the first sum is kept unrounded.
        let star = |from: Option<u32>| {
            let mut steps = vec![step(Action::ReduceLocal, 0..1, &[])];
            for peer in [1, 2] {
                let before = steps.len() as u32 - 1;
                if from == Some(peer) {
                    steps.push(step(send(peer, 0), 0..1, &[before]));
                }
                let before = steps.len() as u32 - 1;
                steps.push(step(reduce(peer, 0), 0..1, &[before]));
            }
            planned(3, 1, steps, 2)
        };
        let plan = star(None);
        assert_eq!(marks(&plan), [(false, true), (true, true), (true, false)]);
        assert!(plan.keeps_sums());
        // SAME: as in recursive doubling, both nodes continue with what they send.
        let plan = star(Some(2));
        let marks = marks(&plan);
        assert_eq!(marks, [(false, true), (true, false), (false, false), (false, false)]);
        assert!(!plan.keeps_sums());
    }

    /// What a node quantizes of an element is one value, so what is lost there is one number.
    #[test]
    fn algorithms_that_round_once_do() {
        let racks = ["", "a", "a/1", "a/2", "b/1", "b/2", "b"];
        for (nodes, stride) in (1..=12).flat_map(|nodes| (0..4).map(move |stride| (nodes, stride)))
        {
            let labels: Vec<&str> = (0..nodes).map(|n| racks[n * stride % 7]).collect();
            let topology = Topology::from_labels(&labels);
            for algorithm in Algorithm::ROUNDS_ONCE {
                for me in 0..nodes as u32 {
                    let all = algorithms::generate(Kind::Allreduce, algorithm, &topology, me, 4096);
                    let mut rounded = vec![0; all.blocks.len()];
                    for (step, marks) in all.steps.iter().zip(unrounded(&all)) {
                        let computes =
                            matches!(step.action, Action::ReduceLocal | Action::RecvReduce { .. });
                        for (block, mark) in step.blocks().zip(marks) {
                            rounded[block as usize] += u32::from(computes && !mark.after);
                        }
                    }
                    let once = rounded.iter().all(|&times| times == 1);
                    assert!(once, "{algorithm:?} on {labels:?}, node {me}: {rounded:?}");
                }
            }
        }
    }

    /// A node without an input of its own copies the first part, and the sum begins with it.
    #[test]
    fn what_was_received_is_no_unrounded_sum() {
        let steps = vec![
            step(copy(1, 0), 0..1, &[]),
            step(reduce(2, 0), 0..1, &[0]),
            step(reduce(3, 0), 0..1, &[1]),
            step(send(1, 0), 0..1, &[2]),
        ];
        let plan = planned(4, 1, steps, 2);
        let expected = [(false, false), (false, true), (true, false), (false, false)];
        assert_eq!(marks(&plan), expected);
        assert!(plan.keeps_sums());
    }

    /// One block of a message is sent before more is added to it, and the other one is not.
    #[test]
    fn blocks_of_a_message_are_marked_one_by_one() {
        let steps = vec![
            step(Action::ReduceLocal, 0..2, &[]),
            step(reduce(1, 0), 0..2, &[0]),
            step(send(3, 0), 0..1, &[1]),
            step(reduce(2, 0), 0..2, &[1, 2]),
            step(Action::Publish, 0..2, &[3]),
        ];
        let plan = planned(4, 2, steps, 2);
        let marks: Vec<_> =
            plan.steps[1].parts.iter().map(|p| (p.at, p.bytes, p.unrounded.after)).collect();
        assert_eq!(marks, [(0, 8, false), (8, 8, true)]);
        let marks: Vec<_> = plan.steps[3].parts.iter().map(|p| p.unrounded.before).collect();
        assert_eq!(marks, [false, true]);
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
