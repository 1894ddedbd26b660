//! Process sets are worlds of their own: added and removed while the job runs, overlapping, in one
//! order of operations over all of them (ORD), and concurrent if they share no rank.

use std::{
    env,
    sync::{Arc, Barrier},
    thread,
    time::SystemTime,
};

use gradwire_proto::{FailureKind, ReduceOp};
use gradwire_reference::Dice;
use gradwire_tests::{
    calls::{failure, refusal},
    cluster::{Cluster, Plan, run_job},
};
use gradwire_worker::{
    AllreduceOptions, BarrierOptions, BroadcastOptions, GatherOptions, Handle, ProcessSet,
    SendOptions, Session, Tensor,
};

fn sum(set: &ProcessSet) -> AllreduceOptions {
    AllreduceOptions::default().op(ReduceOp::Sum).process_set(set)
}

/// The sum over all members, if each contributes its rank plus a number.
fn total(set: &ProcessSet, number: u64) -> u64 {
    set.ranks().iter().map(|rank| u64::from(*rank) + number).sum()
}

fn own(session: &Session, number: u64) -> Tensor<u64> {
    session.tensor(&[u64::from(session.rank()) + number], &[1]).unwrap()
}

/// The seed of a test: from `GRADWIRE_TEST_SEED`, or from the clock. It is printed for a replay.
fn seed() -> u64 {
    let clock = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    let seed = env::var("GRADWIRE_TEST_SEED").map_or(clock, |seed| seed.parse().unwrap());
    println!("GRADWIRE_TEST_SEED={seed}");
    seed
}

/// Random process sets, each with some of the ranks.
fn random_sets(dice: &mut Dice, size: u32, sets: usize) -> Vec<Vec<u32>> {
    let some = |dice: &mut Dice| {
        let one = dice.below(size.into()) as u32;
        (0..size).filter(|rank| *rank == one || dice.one_in(2)).collect()
    };
    (0..sets).map(|_| some(dice)).collect()
}

/// ORD: with one piece in flight at a time, two ranks that waited for each other would hang.
#[test]
fn no_order_of_submission_dead_locks() {
    let seed = seed();
    let plan = Plan::nodes(&[2, 1, 2]).set("negotiation.credit_pieces=1");
    run_job(&plan, move |session| {
        let mut same = Dice::of(&[seed]);
        let mut mine = Dice::of(&[seed, 1, session.rank().into()]);
        for wave in 0..4 {
            let ranks = random_sets(&mut same, session.size(), 6);
            let sets: Vec<_> = ranks.iter().map(|r| session.add_process_set(r).unwrap()).collect();
            let mut calls: Vec<(usize, u64)> = (0..sets.len())
                .filter(|set| sets[*set].includes(session.rank()))
                .flat_map(|set| (0..25).map(move |number| (set, number)))
                .collect();
            mine.shuffle(&mut calls);
            let start = |(set, number): (usize, u64)| {
                let options = sum(&sets[set]).name(format!("w.{number}"));
                let handle = session.allreduce_async(own(session, number), options).unwrap();
                (set, number, handle)
            };
            let mut handles: Vec<(usize, u64, Handle<Tensor<u64>>)> =
                calls.into_iter().map(start).collect();
            mine.shuffle(&mut handles);
            for (set, number, handle) in handles {
                let got = handle.wait().unwrap();
                assert_eq!(got.as_slice(), [total(&sets[set], number)], "wave {wave}");
            }
            // Each wave leaves more process sets than the previous one.
            for set in sets.into_iter().skip(wave) {
                session.remove_process_set(set).unwrap();
            }
        }
    });
}

/// Each process set has its own thread on each of its ranks, with blocking calls.
#[test]
fn sets_in_different_threads_do_not_wait() {
    let seed = seed();
    run_job(&Plan::nodes(&[2, 2]).set("negotiation.credit_pieces=1"), move |session| {
        let ranks = random_sets(&mut Dice::of(&[seed]), session.size(), 5);
        let sets: Vec<_> = ranks.iter().map(|r| session.add_process_set(r).unwrap()).collect();
        thread::scope(|scope| {
            for set in sets.iter().filter(|set| set.includes(session.rank())) {
                scope.spawn(move || {
                    for number in 0..40 {
                        // Unnamed: each process set counts its own calls.
                        let mut tensor = own(session, number);
                        session.allreduce(&mut tensor, sum(set)).unwrap();
                        assert_eq!(tensor.as_slice(), [total(set, number)]);
                    }
                });
            }
        });
    });
}

/// Rank 3 is late in its process set. The other set, on the same two nodes, is not delayed.
#[test]
fn a_waiting_set_does_not_delay_another() {
    let late = Arc::new(Barrier::new(4));
    let plan = Plan::nodes(&[2, 2]).set("negotiation.credit_pieces=1");
    run_job(&plan, move |session| {
        let even = session.add_process_set(&[0, 2]).unwrap();
        let odd = session.add_process_set(&[1, 3]).unwrap();
        match session.rank() {
            1 => {
                let waits = session.allreduce_async(own(session, 0), sum(&odd)).unwrap();
                late.wait();
                assert_eq!(waits.wait().unwrap().as_slice(), [4]);
            }
            3 => {
                late.wait();
                let mut tensor = own(session, 0);
                session.allreduce(&mut tensor, sum(&odd)).unwrap();
            }
            _ => {
                for number in 0..30 {
                    let mut tensor = own(session, number);
                    session.allreduce(&mut tensor, sum(&even)).unwrap();
                    assert_eq!(tensor.as_slice(), [2 + 2 * number]);
                }
                late.wait();
            }
        }
    });
}

#[test]
fn each_set_has_its_own_names_and_averages() {
    run_job(&Plan::nodes(&[2, 1]), |session| {
        let all = session.global_process_set();
        assert_eq!((all.id(), all.len(), all.position()), (0, 3, Some(session.rank() as usize)));
        let pair = session.add_process_set(&[2, 0]).unwrap();
        assert_eq!((pair.id(), pair.ranks()), (1, vec![0, 2]));
        let alone = session.add_process_set(&[1]).unwrap();
        assert_eq!(alone.id(), 2);
        let mean = |set: &ProcessSet| {
            let tensor = session.tensor(&[f64::from(session.rank())], &[]).unwrap();
            let options = AllreduceOptions::named("w").process_set(set).op(ReduceOp::Average);
            session.allreduce_async(tensor, options).unwrap()
        };
        // The same name in two process sets at once.
        let (here, there) = match session.rank() {
            1 => (mean(&alone), mean(&all)),
            _ => (mean(&pair), mean(&all)),
        };
        assert_eq!(there.wait().unwrap().as_slice(), [1.0]);
        assert_eq!(here.wait().unwrap().as_slice(), [1.0]);
        if pair.includes(session.rank()) {
            // A root is given as its rank in the job.
            let mut value = [session.rank() as u8];
            let root = BroadcastOptions::from_rank(2).process_set(&pair);
            session.broadcast_slice(&mut value, root).unwrap();
            assert_eq!(value, [2]);
            session.barrier_with(BarrierOptions::default().process_set(&pair)).unwrap();
        }
    });
}

#[test]
fn invalid_sets_are_refused_at_the_call() {
    run_job(&Plan::nodes(&[1, 1]), |session| {
        for (ranks, expected) in [
            (&[][..], "a process set needs at least one rank"),
            (&[0, 2], "process set contains rank 2, but the job has only ranks 0 to 1"),
            (&[1, 0, 1], "process set contains rank 1 twice"),
        ] {
            let text = refusal(session.add_process_set(ranks));
            assert!(text.contains(expected), "{text}");
        }
        let text = refusal(session.remove_process_set(session.global_process_set()));
        assert!(text.contains("all ranks"), "{text}");
        // Refused process sets use up no ids.
        assert_eq!(session.add_process_set(&[0, 1]).unwrap().id(), 1);
    });
}

#[test]
fn disagreements_on_a_set_are_reported() {
    run_job(&Plan::nodes(&[2, 1]), |session| {
        let mine: &[u32] = if session.rank() == 2 { &[0, 2] } else { &[0, 1] };
        let failure = failure(session.add_process_set(mine));
        assert_eq!(failure.kind, FailureKind::Disagreement);
        assert!(failure.text().starts_with("the ranks disagree on list\n"), "{failure}");
        let line = |rank: &str| {
            let mut lines = failure.details.lines.iter();
            let line = lines.find(|line| line.trim_start().starts_with(rank));
            line.unwrap_or_else(|| panic!("no {rank} in {failure}")).to_owned()
        };
        assert!(line("0-1 ").contains("  0-1 "), "{failure}");
        assert!(line("2 ").contains("*0,2"), "{failure}");
        assert_eq!(session.add_process_set(&[0]).unwrap().ranks(), [0]);
    });
}

#[test]
fn only_members_use_a_set_and_only_in_its_life() {
    run_job(&Plan::nodes(&[2, 1]), |session| {
        let set = session.add_process_set(&[0, 2]).unwrap();
        let tensor = || own(session, 0);
        if session.rank() == 1 {
            let text = refusal(session.allreduce(&mut tensor(), sum(&set)));
            let expected = "this rank is not a member of process set 1 (ranks 0, 2)";
            assert!(text.contains(expected), "{text}");
        } else {
            // Rank 1 is in the job, but not in the process set.
            let root = BroadcastOptions::from_rank(1).process_set(&set);
            let text = refusal(session.broadcast(&mut tensor(), root));
            assert!(text.contains("rank 1, is not a member of process set 1"), "{text}");
            let root = GatherOptions::to_rank(1).process_set(&set);
            let text = refusal(session.gather(&tensor(), root));
            assert!(text.contains("rank 1, is not a member of process set 1"), "{text}");
            let to = SendOptions::to_rank(1).process_set(&set);
            let text = refusal(session.send(&tensor(), to));
            assert!(text.contains("rank 1, is not a member of process set 1"), "{text}");
            session.allreduce(&mut tensor(), sum(&set)).unwrap();
        }
        let gone = set.clone();
        session.remove_process_set(set).unwrap();
        let text = refusal(session.allreduce(&mut tensor(), sum(&gone)));
        assert!(text.contains("does not exist in this session: it was removed"), "{text}");
        let text = refusal(session.remove_process_set(gone));
        assert!(text.contains("does not exist in this session"), "{text}");
        // Its id is not used again.
        assert_eq!(session.add_process_set(&[0, 1]).unwrap().id(), 2);
    });
}

#[test]
fn a_set_in_use_is_not_removed() {
    let cluster = Cluster::start(&Plan::nodes(&[1, 1])).unwrap();
    let late = Arc::new(Barrier::new(2));
    let failures = cluster
        .ranks(move |session| {
            let set = session.add_process_set(&[0, 1]).unwrap();
            let options = || sum(&set).name("half");
            let half = (session.rank() == 0)
                .then(|| session.allreduce_async(own(session, 0), options()).unwrap());
            // The messages of a node arrive in order, so the coordinator knows the submission by
            // now.
            let failure = failure(session.remove_process_set(set.clone()));
            late.wait();
            let got = match half {
                Some(half) => half.wait(),
                None => session.allreduce_async(own(session, 0), options()).unwrap().wait(),
            };
            assert_eq!(got.unwrap().as_slice(), [1]);
            session.remove_process_set(set).unwrap();
            failure
        })
        .unwrap();
    cluster.finish().unwrap();
    for failure in failures {
        assert_eq!(failure.kind, FailureKind::Invalid);
        assert!(failure.text().contains("process set 1 have submitted 'half'"), "{failure}");
    }
}
