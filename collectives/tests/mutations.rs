//! Breaks schedules in many ways, and checks that the verifier finds each fault.

use std::ops::Range;

use gradwire_collectives::{
    Action, Algorithm, Block, Kind, Report, Topology, VerifyError, generate,
    schedule::{self, StepView},
};
use rand::{Rng, RngExt, SeedableRng};
use rand_xoshiro::SplitMix64;

/// A step that can be changed.
#[derive(Debug, Clone)]
struct Step {
    action: Action,
    ranges: Vec<Range<u32>>,
    after: Vec<u32>,
}

impl Step {
    fn view(&self) -> StepView<'_> {
        StepView { action: self.action, ranges: &self.ranges, after: &self.after }
    }

    fn blocks(&self) -> impl Iterator<Item = u32> {
        self.view().blocks()
    }

    fn covers(&self, block: u32) -> bool {
        self.view().covers(block)
    }
}

/// A schedule that can be changed.
#[derive(Debug, Clone)]
struct Schedule {
    participants: u32,
    me: u32,
    blocks: Vec<Block>,
    steps: Vec<Step>,
}

impl Schedule {
    fn new(from: &schedule::Schedule) -> Self {
        let step = |step: StepView<'_>| Step {
            action: step.action,
            ranges: step.ranges.to_vec(),
            after: step.after.to_vec(),
        };
        Self {
            participants: from.participants,
            me: from.me,
            blocks: from.blocks.to_vec(),
            steps: from.steps.iter().map(step).collect(),
        }
    }

    fn finished(&self) -> schedule::Schedule {
        let empty = schedule::Schedule::empty(self.participants, self.me);
        let mut finished = schedule::Schedule { blocks: self.blocks.clone().into(), ..empty };
        for Step { action, ranges, after } in self.steps.iter().cloned() {
            finished.steps.push(action, ranges, after);
        }
        finished
    }
}

fn verify(schedules: &[Schedule], kind: Kind) -> Result<Report, VerifyError> {
    let finished: Vec<_> = schedules.iter().map(Schedule::finished).collect();
    gradwire_collectives::verify(&finished, kind)
}

fn made(kind: Kind, algorithm: Algorithm, nodes: u32) -> Vec<Schedule> {
    let topology = Topology::from_racks((0..nodes).map(|node| node / 3).collect());
    (0..nodes).map(|me| Schedule::new(&generate(kind, algorithm, &topology, me, 5000))).collect()
}

fn all(algorithm: Algorithm, nodes: u32) -> Vec<Schedule> {
    made(Kind::Allreduce, algorithm, nodes)
}

fn broken(schedules: &[Schedule]) -> VerifyError {
    verify(schedules, Kind::Allreduce).expect_err("this schedule is wrong")
}

/// The steps of all participants that `wanted` picks, as (participant, step).
fn steps(schedules: &[Schedule], wanted: impl Fn(&Action) -> bool) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    for (participant, schedule) in schedules.iter().enumerate() {
        let steps = schedule.steps.iter().enumerate();
        found.extend(steps.filter(|(_, s)| wanted(&s.action)).map(|(step, _)| (participant, step)));
    }
    found
}

fn reduce(peer: u32, message: u32) -> Action {
    Action::RecvReduce { peer, message, theirs_first: false }
}

/// SAME: two participants compute the same sum, one of them with swapped operands.
#[test]
fn sums_are_added_up_in_one_order() {
    for algorithm in [Algorithm::RecursiveDoubling, Algorithm::Ring] {
        let schedules = all(algorithm, 7);
        for (p, s) in steps(&schedules, |a| matches!(a, Action::RecvReduce { .. })) {
            let mut mutant = schedules.clone();
            if let Action::RecvReduce { theirs_first, .. } = &mut mutant[p].steps[s].action {
                *theirs_first = !*theirs_first;
            }
            let answer = verify(&mutant, Kind::Allreduce);
            match algorithm {
                // One owner computes each block, so its order holds for all.
                Algorithm::Ring => assert!(answer.is_ok(), "{answer:?}"),
                // In a fold one participant computes alone what the others get.
                _ if answer.is_ok() => {
                    let steps = &schedules[p].steps;
                    let before = steps[s].after[0] as usize;
                    assert_eq!(steps[before].action, Action::ReduceLocal);
                }
                _ => {
                    let error = answer.unwrap_err();
                    assert!(matches!(error, VerifyError::Association { .. }), "{error}");
                    assert!(error.to_string().contains("in another order"), "{error}");
                }
            }
        }
    }
}

/// Every single dependency is needed: generators add no superfluous ones.
#[test]
fn no_dependency_can_be_dropped() {
    for &algorithm in Algorithm::ALL {
        let schedules = all(algorithm, 7);
        for (participant, step) in steps(&schedules, |_| true) {
            for dependency in 0..schedules[participant].steps[step].after.len() {
                let mut mutant = schedules.clone();
                mutant[participant].steps[step].after.remove(dependency);
                let error = broken(&mutant);
                assert!(matches!(error, VerifyError::Race { .. }), "{algorithm}: {error}");
            }
        }
    }
}

/// ONE: a contribution that enters twice, or not at all.
#[test]
fn contributions_are_counted_once() {
    for &algorithm in Algorithm::ALL {
        let schedules = all(algorithm, 7);
        for (p, s) in steps(&schedules, |a| matches!(a, Action::RecvReduce { .. })) {
            let mut mutant = schedules.clone();
            if let Action::RecvReduce { peer, message, .. } = mutant[p].steps[s].action {
                mutant[p].steps[s].action = Action::RecvCopy { peer, message };
            }
            let error = broken(&mutant);
            // The old value is overwritten: a contribution is missing at the end, or arrives twice.
            assert!(
                matches!(error, VerifyError::Result { .. } | VerifyError::Twice { .. }),
                "{algorithm}: {error}"
            );
        }
        for (p, s) in steps(&schedules, |a| matches!(a, Action::RecvCopy { .. })) {
            let mut mutant = schedules.clone();
            if let Action::RecvCopy { peer, message } = mutant[p].steps[s].action {
                mutant[p].steps[s].action = reduce(peer, message);
            }
            let error = broken(&mutant);
            assert!(matches!(error, VerifyError::Twice { .. }), "{algorithm}: {error}");
        }
        for (p, s) in steps(&schedules, |a| matches!(a, Action::ReduceLocal)) {
            let mut mutant = schedules.clone();
            mutant[p].steps[s].action = Action::Publish;
            let error = broken(&mutant);
            assert!(matches!(error, VerifyError::Published { times: 2, .. }), "{error}");
        }
    }
}

/// Messages that go to the wrong place, carry the wrong block or the wrong number.
#[test]
fn messages_pair_up() {
    for &algorithm in Algorithm::ALL {
        let schedules = all(algorithm, 7);
        let blocks = schedules[0].blocks.len() as u32;
        for (p, s) in steps(&schedules, |a| a.sends_to().is_some()) {
            let Action::Send { peer, message } = schedules[p].steps[s].action else {
                unreachable!("only sends were picked")
            };
            let others = (0..7).filter(|&other| other != peer && other as usize != p);
            let mut mutants: Vec<Step> = others
                .map(|peer| Action::Send { peer, message })
                .chain([Action::Send { peer, message: message + 1 }])
                .map(|action| Step { action, ..schedules[p].steps[s].clone() })
                .collect();
            // Another block, one more, one less, another order.
            let step = &schedules[p].steps[s];
            let block = step.blocks().last().unwrap();
            let outside = (0..blocks).find(|&block| !step.covers(block));
            let all: Vec<u32> = step.blocks().collect();
            let less = all[1..].to_vec();
            let reversed: Vec<u32> = all.iter().rev().copied().collect();
            let another = outside
                .map(|outside| all.iter().map(|&b| if b == block { outside } else { b }).collect());
            let more = outside.map(|outside| [&all[..], &[outside]].concat());
            for covered in [Some(less), Some(reversed), another, more].into_iter().flatten() {
                if !covered.is_empty() && covered != all {
                    let ranges = covered.into_iter().map(|block| block..block + 1).collect();
                    mutants.push(Step { ranges, ..step.clone() });
                }
            }
            for step in mutants {
                let mut mutant = schedules.clone();
                mutant[p].steps[s] = step;
                let error = broken(&mutant);
                // A dependency may become one on a step of other blocks, or the reverse.
                assert!(
                    matches!(
                        error,
                        VerifyError::Number { .. }
                            | VerifyError::Unpaired { .. }
                            | VerifyError::Race { .. }
                    ),
                    "{algorithm}: {error}"
                );
            }
        }
    }
}

#[test]
fn lost_receives_are_noticed() {
    for &algorithm in Algorithm::ALL {
        let schedules = all(algorithm, 4);
        for (p, s) in steps(&schedules, |a| a.receives_from().is_some()) {
            let mut mutant = schedules.clone();
            mutant[p].steps[s].action = Action::ReduceLocal;
            let error = broken(&mutant);
            assert!(
                matches!(error, VerifyError::Number { .. } | VerifyError::Unpaired { .. }),
                "{algorithm}: {error}"
            );
        }
    }
}

/// WAIT: two participants that each receive before they send wait forever.
#[test]
fn cycles_are_found() {
    let mut schedules = all(Algorithm::RecursiveDoubling, 2);
    for schedule in &mut schedules {
        let at = schedule.steps.iter().position(|s| s.action.sends_to().is_some()).unwrap();
        schedule.steps.swap(at, at + 1);
        schedule.steps[at].after = vec![at as u32 - 1];
        schedule.steps[at + 1].after = vec![at as u32];
    }
    let error = broken(&schedules);
    assert!(matches!(error, VerifyError::Cycle { .. }), "{error}");
    assert!(error.to_string().contains("waits for itself"), "{error}");
}

#[test]
fn writes_after_publication_are_late() {
    let mut schedules = all(Algorithm::Ring, 3);
    let steps = &mut schedules[1].steps;
    let publish = steps.iter().position(|s| matches!(s.action, Action::Publish)).unwrap();
    let ranges = steps[publish].ranges.clone();
    let after = (0..steps.len() as u32).filter(|&s| steps[s as usize].ranges == ranges).collect();
    steps.push(Step { action: Action::ReduceLocal, ranges, after });
    let error = broken(&schedules);
    assert!(matches!(error, VerifyError::Late { participant: 1, .. }), "{error}");
}

#[test]
fn form_is_checked() {
    let schedules = all(Algorithm::Ring, 4);
    let error = broken(&schedules[..3]);
    assert!(matches!(error, VerifyError::Participants { .. }), "{error}");

    let mut swapped = schedules.clone();
    swapped.swap(0, 1);
    assert!(matches!(broken(&swapped), VerifyError::Participants { .. }));

    for wrong in [Block { offset: 1, count: 9 }, Block { offset: 0, count: u64::MAX }] {
        let mut mutant = schedules.clone();
        mutant[2].blocks[0] = wrong;
        assert!(matches!(broken(&mutant), VerifyError::Blocks { participant: 2, block: 0 }));
    }
    let mut mutant = schedules.clone();
    mutant[2].blocks.pop();
    assert!(matches!(broken(&mutant), VerifyError::Names { .. } | VerifyError::Blocks { .. }));

    let mut mutant = schedules.clone();
    mutant[3].steps[0].action = Action::Send { peer: 3, message: 0 };
    assert!(matches!(broken(&mutant), VerifyError::Names { participant: 3, step: 0, .. }));
    let mut mutant = schedules.clone();
    for ranges in [vec![99..100], vec![0..99], vec![], vec![1..1], vec![Range { start: 3, end: 2 }]]
    {
        mutant[3].steps[0].ranges = ranges;
        assert!(matches!(broken(&mutant), VerifyError::Names { participant: 3, step: 0, .. }));
    }
    mutant[3].steps[0].ranges = vec![0..2, 1..2];
    assert!(matches!(broken(&mutant), VerifyError::Repeated { participant: 3, block: 1, .. }));
    let mut mutant = schedules.clone();
    mutant[3].steps[1].after = vec![1];
    assert!(matches!(broken(&mutant), VerifyError::After { after: 1, .. }));

    let mut mutant = schedules;
    for schedule in &mut mutant {
        schedule.steps.retain(|s| s.action != Action::Publish || !s.covers(0));
        // Nothing depends on a publication, but indices after it move.
    }
    let error = verify(&mutant, Kind::Allreduce).unwrap_err();
    assert!(!error.to_string().is_empty());
}

/// ONE: every kind is proven to be that kind and no other.
#[test]
fn each_kind_is_proven_only_as_itself() {
    let topology = Topology::flat(5);
    let kinds = [
        Kind::Allreduce,
        Kind::Broadcast { root: 2 },
        Kind::Broadcast { root: 1 },
        Kind::Reduce { root: 2 },
        Kind::Reduce { root: 1 },
        Kind::Move { from: 1, to: 2 },
        Kind::Move { from: 2, to: 1 },
        Kind::Move { from: 1, to: 3 },
        Kind::Move { from: 1, to: 1 },
        Kind::Move { from: 2, to: 2 },
        Kind::Allgather,
        Kind::Gather { root: 1 },
        Kind::Gather { root: 2 },
        Kind::Scatter { root: 2 },
        Kind::ReduceScatter,
        Kind::Alltoall,
        // These participants don't exist.
        Kind::Gather { root: 77 },
        Kind::Broadcast { root: 77 },
        Kind::Reduce { root: 77 },
        Kind::Move { from: 1, to: 77 },
        Kind::Move { from: 77, to: 2 },
    ];
    for &algorithm in Algorithm::ALL {
        for made in kinds.into_iter().filter(|kind| kind.fits(5)) {
            let schedules: Vec<_> = (0..5)
                .map(|me| Schedule::new(&generate(made, algorithm, &topology, me, 1000)))
                .collect();
            for claimed in kinds {
                let answer = verify(&schedules, claimed);
                assert_eq!(answer.is_ok(), made == claimed, "{algorithm}: {made:?} as {claimed:?}");
                let Err(error) = answer else { continue };
                let reported = matches!(
                    error,
                    VerifyError::Result { .. }
                        | VerifyError::Published { .. }
                        | VerifyError::Uncalled { .. }
                        | VerifyError::Section { .. }
                );
                assert!(reported, "{algorithm}: {made:?} as {claimed:?}: {error}");
            }
        }
    }
}

/// In exchanges, too, every dependency is needed, and every step has to be what it is (ONE, SAME).
#[test]
fn no_step_of_an_exchange_can_be_another() {
    let kinds = [
        Kind::Allgather,
        Kind::Gather { root: 3 },
        Kind::Scatter { root: 3 },
        Kind::ReduceScatter,
        Kind::Alltoall,
    ];
    let algorithms = [
        Algorithm::Ring,
        Algorithm::Direct,
        Algorithm::Circulant,
        Algorithm::Hierarchical,
        Algorithm::RecursiveDoubling,
    ];
    for (kind, algorithm) in kinds.into_iter().flat_map(|k| algorithms.map(|a| (k, a))) {
        let schedules = made(kind, algorithm, 7);
        let wrong = |mutant: &[Schedule]| {
            verify(mutant, kind).expect_err(&format!("{algorithm} {kind:?} is wrong"))
        };
        for (p, s) in steps(&schedules, |_| true) {
            for dependency in 0..schedules[p].steps[s].after.len() {
                let mut mutant = schedules.clone();
                mutant[p].steps[s].after.remove(dependency);
                let error = wrong(&mutant);
                assert!(matches!(error, VerifyError::Race { .. }), "{algorithm}: {error}");
            }
            let mut mutant = schedules.clone();
            let action = &mut mutant[p].steps[s].action;
            *action = match *action {
                Action::ReduceLocal => Action::Publish,
                Action::Publish => Action::ReduceLocal,
                Action::RecvReduce { peer, message, .. } => Action::RecvCopy { peer, message },
                Action::RecvCopy { peer, message } => reduce(peer, message),
                Action::Send { .. } => Action::Publish,
            };
            wrong(&mutant);
        }
    }
}

/// In reductions to one participant and in moves too, every dependency is needed and every step
/// has to be what it is (ONE, SAME).
#[test]
fn no_step_of_a_rooted_collective_can_be_another() {
    for kind in
        [Kind::Reduce { root: 3 }, Kind::Broadcast { root: 3 }, Kind::Move { from: 5, to: 3 }]
    {
        for &algorithm in Algorithm::ALL {
            let schedules = made(kind, algorithm, 7);
            verify(&schedules, kind).unwrap();
            let wrong = |mutant: &[Schedule]| verify(mutant, kind).expect_err("this is wrong");
            for (p, s) in steps(&schedules, |_| true) {
                let step = &schedules[p].steps[s];
                for dependency in 0..step.after.len() {
                    let mut mutant = schedules.clone();
                    mutant[p].steps[s].after.remove(dependency);
                    let error = wrong(&mutant);
                    assert!(matches!(error, VerifyError::Race { .. }), "{algorithm}: {error}");
                }
                let mut mutant = schedules.clone();
                let action = &mut mutant[p].steps[s].action;
                *action = match *action {
                    Action::ReduceLocal => Action::Publish,
                    Action::Publish => Action::ReduceLocal,
                    Action::RecvReduce { peer, message, .. } => Action::RecvCopy { peer, message },
                    Action::RecvCopy { peer, message } => reduce(peer, message),
                    Action::Send { .. } => Action::Publish,
                };
                wrong(&mutant);
            }
            // Another participant publishes what it has.
            for me in (0..7).filter(|&me| !kind.roles().unwrap().publishes(me)) {
                let Some(last) = schedules[me as usize].steps.len().checked_sub(1) else {
                    continue;
                };
                let mut mutant = schedules.clone();
                let steps = &mut mutant[me as usize].steps;
                let ranges = steps[last].ranges.clone();
                steps.push(Step { action: Action::Publish, ranges, after: vec![last as u32] });
                let error = wrong(&mutant);
                let reported =
                    matches!(error, VerifyError::Published { times: 1, expected: 0, .. });
                assert!(reported, "{algorithm}: {error}");
            }
            // A participant reduces a contribution that isn't wanted.
            for me in (0..7).filter(|&me| !kind.roles().unwrap().contributes(me)) {
                let mut mutant = schedules.clone();
                let steps = &mut mutant[me as usize].steps;
                let first = Step { action: Action::ReduceLocal, ranges: vec![0..1], after: vec![] };
                steps.insert(0, first);
                for step in &mut steps[1..] {
                    step.after.iter_mut().for_each(|after| *after += 1);
                    step.after.push(0);
                }
                let error = wrong(&mutant);
                assert!(
                    matches!(error, VerifyError::Uncalled { step: 0, .. }),
                    "{algorithm}: {error}"
                );
            }
        }
    }
}

/// Whatever is done to a schedule, the verifier answers and never panics.
#[test]
fn garbage_gets_an_answer() {
    for seed in 0..3000u64 {
        let mut random = SplitMix64::seed_from_u64(seed);
        let algorithm = Algorithm::ALL[random.random_range(0..Algorithm::ALL.len())];
        let nodes = 2 + random.random_range(0..5);
        let (root, from, to) =
            (random.random_range(0..nodes) as u32, 0, random.random_range(0..nodes) as u32);
        let kind = [
            Kind::Allreduce,
            Kind::Broadcast { root },
            Kind::Reduce { root },
            Kind::Move { from, to },
        ][random.random_range(0..4)];
        let mut schedules = made(kind, algorithm, nodes as u32);
        for _ in 0..1 + random.random_range(0..4) {
            let schedule = &mut schedules[random.random_range(0..nodes)];
            let steps = schedule.steps.len();
            if steps == 0 {
                continue; // it takes no part
            }
            let step = &mut schedule.steps[random.random_range(0..steps)];
            let (peer, block, message) = (
                random.random_range(0..8) as u32,
                random.random_range(0..12) as u32,
                random.random_range(0..6) as u32,
            );
            match random.random_range(0..8) {
                0 => step.action = Action::Send { peer, message },
                1 => step.action = Action::RecvCopy { peer, message },
                2 => step.action = reduce(peer, message),
                3 => step.action = Action::ReduceLocal,
                4 => step.action = Action::Publish,
                5 => step.ranges.push(block..random.random_range(0..12) as u32),
                6 => step.after = vec![random.random_range(0..steps) as u32],
                _ => schedule.blocks[0].count = random.next_u64(),
            }
        }
        // Some mutations change nothing that matters, so any answer is right.
        let answer = verify(&schedules, kind);
        assert!(answer.is_ok() || !answer.unwrap_err().to_string().is_empty(), "seed {seed}");
    }
}
