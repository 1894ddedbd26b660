use std::ops::Range;

use super::{rounding::unrounded, *};
use crate::{
    algorithms::{self, Algorithm, Kind},
    schedule::{Action, Block, Schedule},
    topology::Topology,
};

/// A step: what it does, with which blocks, and after which steps.
type Step = (Action, Vec<Range<u32>>, Vec<u32>);

fn step(action: Action, blocks: Range<u32>, after: &[u32]) -> Step {
    (action, vec![blocks], after.to_vec())
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
    let mut schedule = Schedule { blocks, ..Schedule::empty(participants, 0) };
    for (action, ranges, after) in steps {
        schedule.steps.push(action, ranges, after);
    }
    Plan::new(&schedule, element)
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
    let wrapped = |action, after: &[u32]| (action, vec![3..4, 0..1], after.to_vec());
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
fn the_first_hop_is_fused_but_not_the_first_send() {
    let plan = ring();
    assert_eq!(plan.steps[0].work, Work::Reduce { lazily: false });
    assert_eq!(plan.steps[2].work, Work::Reduce { lazily: true });
    assert_eq!(plan.steps[3].fused, Some(2));
    assert_eq!(plan.receiving(1, 1), Some(5));
    assert_eq!(plan.receiving(1, 2), None);
    assert_eq!(plan.peers, [1]);
}

/// A step that writes what an earlier step sends is known, and one that comes before it is not one.
#[test]
fn steps_that_overwrite_sent_bytes_are_known() {
    let those = |plan: &Plan| {
        let steps = plan.steps.iter().enumerate();
        steps.filter(|(_, step)| step.overwrites_sent).map(|(at, _)| at).collect::<Vec<_>>()
    };
    assert_eq!(those(&ring()), [5]);
    assert_eq!(those(&pairs()), [4]);
    let doubling = vec![
        step(Action::ReduceLocal, 0..2, &[]),
        step(send(1, 0), 0..2, &[0]),
        step(reduce(1, 0), 0..2, &[1]),
        step(send(2, 0), 0..2, &[2]),
        step(Action::Publish, 0..2, &[2]),
    ];
    assert_eq!(those(&planned(3, 2, doubling, 4)), [2]);
}

/// Steps may go equally far whether ends are noted or searched for.
#[test]
fn noted_ends_change_nothing() {
    for plan in [ring(), pairs()] {
        let mut plain = Progress::new(&plan);
        let mut noted = Progress::new(&plan).with_noted_ends(&plan);
        let all = 0..plan.steps.len() as u32;
        for step in all.clone() {
            let bytes = plan.steps[step as usize].bytes;
            for at in (0..bytes).step_by(4) {
                plain.advance(&plan, step, at..at + 4);
                noted.advance(&plan, step, at..at + 4);
                let waits = |later: &u32| plan.steps[*later as usize].earlier().any(|e| e == step);
                if at + 4 == bytes {
                    all.clone().filter(waits).for_each(|later| noted.note_end(later));
                }
                for later in all.clone() {
                    let [a, b] = [&plain, &noted].map(|progress| progress.allowed(&plan, later));
                    assert_eq!(a, b, "step {later} after {at} bytes of {step}");
                }
            }
        }
    }
}

/// Only a sending step whose blocks no other step reads may send something other than the buffer.
#[test]
fn the_only_user_of_a_local_reduction_is_known() {
    let users = |plan: &Plan| plan.only_users().collect::<Vec<_>>();
    assert_eq!(users(&ring()), [(1, 0)]);
    assert_eq!(users(&pairs()), [], "another step adds to some of its blocks");
    let two = |second: Action, after: u32| {
        let steps = vec![
            step(Action::ReduceLocal, 0..2, &[]),
            step(send(1, 0), 0..2, &[0]),
            step(second, 1..2, &[after]),
        ];
        users(&planned(3, 2, steps, 4))
    };
    assert_eq!(two(copy(1, 0), 1), [(1, 0)]);
    for (second, after) in [(send(2, 0), 0), (reduce(2, 0), 1), (Action::Publish, 0)] {
        assert_eq!(two(second, after), [], "{second:?}");
    }
    // Messages in another order have other offsets.
    let backwards = (send(1, 0), vec![1..2, 0..1], vec![0]);
    let plan = planned(2, 2, vec![step(Action::ReduceLocal, 0..2, &[]), backwards], 4);
    assert_eq!(users(&plan), []);
    let places = |step: usize| plan.steps[step].places().collect::<Vec<_>>();
    assert_eq!((places(0), places(1)), (vec![0..32], vec![16..32, 0..16]));
}

#[test]
fn scattered_messages_are_followed_bytewise() {
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
    let plan = pairs();
    let sent = &plan.steps[1];
    assert_eq!(sent.beginning(0..32), 48..64);
    assert_eq!(sent.beginning(4..10), 52..58);
    assert_eq!(sent.beginning(16..32), 0..16);
    assert_eq!(sent.beginning(32..32), 0..0);
    let breaks: Vec<u64> = (0..=32).filter(|&byte| plan.breaks_at(1, byte)).collect();
    assert_eq!(breaks, [16, 32]);
    let parts: Vec<_> = sent.parts(12..20).map(|p| (p.at, p.start, p.bytes)).collect();
    assert_eq!(parts, [(12, 60, 4), (16, 0, 4)]);
    // Two adjacent blocks are one place.
    assert_eq!(plan.steps[2].beginning(0..32), 16..48);
}

/// The marks of each step, before and after; all its blocks must have the same ones.
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

/// A node quantizes one value of each element, so one number per element is lost there.
#[test]
fn listed_algorithms_round_once() {
    let racks = ["", "a", "a/1", "a/2", "b/1", "b/2", "b"];
    for (nodes, stride) in (1..=12).flat_map(|nodes| (0..4).map(move |stride| (nodes, stride))) {
        let labels: Vec<&str> = (0..nodes).map(|n| racks[n * stride % 7]).collect();
        let topology = Topology::from_labels(&labels);
        for algorithm in Algorithm::ROUNDS_ONCE {
            for me in 0..nodes as u32 {
                let all = algorithms::generate(Kind::Allreduce, algorithm, &topology, me, 4096);
                let mut rounded = vec![0; all.blocks.len()];
                let marks = unrounded(&all);
                for (at, step) in all.steps.iter().enumerate() {
                    let computes =
                        matches!(step.action, Action::ReduceLocal | Action::RecvReduce { .. });
                    for (block, mark) in step.blocks().zip(marks.of(at)) {
                        rounded[block as usize] += u32::from(computes && !mark.after);
                    }
                }
                let once = rounded.iter().all(|&times| times == 1);
                assert!(once, "{algorithm:?} on {labels:?}, node {me}: {rounded:?}");
            }
        }
    }
}

/// A node without input copies the first part that it receives, and the sum begins with it.
#[test]
fn received_values_are_not_unrounded_sums() {
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

/// One block of a message is sent before it is added to again, and the other one is not.
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
fn steps_of_a_block_are_followed_bytewise() {
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
fn later_steps_stop_at_the_first_gap() {
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
fn a_run_is_complete_before_it_is_published() {
    let plan = ring();
    let mut progress = Progress::new(&plan);
    for step in 0..6 {
        assert!(!progress.is_complete());
        progress.advance(&plan, step, 0..16);
    }
    assert!(progress.is_complete());
}
