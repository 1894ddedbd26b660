use std::collections::{BTreeMap, BTreeSet};

use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};

use super::*;

fn hello(worker: u32, last: u64) -> Hello {
    Hello {
        worker,
        last,
        formed: last,
        lacks_state: false,
        asked: None,
        answer: None,
        sets: Vec::new(),
    }
}

fn vote(epoch: u64, number: u64) -> VoteId {
    VoteId { epoch, number }
}

fn set(epoch: u64, id: u32, workers: &[u32]) -> KnownSet {
    KnownSet { epoch, id, workers: workers.to_vec() }
}

#[test]
fn an_answer_that_one_rank_has_heard_holds() {
    let answer = Answer { vote: vote(2, 7), since: 2, yes: true };
    let heard = Hello { answer: Some(answer), ..hello(0, 2) };
    let waits = Hello { asked: Some(vote(2, 7)), ..hello(1, 2) };
    let formed = Formation::of(&[heard.clone(), waits.clone()]).unwrap();
    assert!(formed.outcome(vote(2, 7)));
    // Nobody can have heard the next one: some rank has not even begun it.
    assert!(!formed.outcome(vote(2, 8)) && !formed.outcome(vote(1, 7)));
    let silent = Formation::of(&[hello(0, 2), waits]).unwrap();
    assert!(!silent.outcome(vote(2, 7)));
    // A conclusion replaces what a rank has heard that was not there.
    let concluded = Answer { vote: vote(2, 7), since: 3, yes: false };
    let concluded = Hello { answer: Some(concluded), ..hello(1, 3) };
    let formed = Formation::of(&[heard, concluded]).unwrap();
    assert!(!formed.outcome(vote(2, 7)));
}

#[test]
fn sets_come_back_if_all_know_them_and_are_there() {
    let knows = |worker, sets: &[KnownSet]| Hello { sets: sets.to_vec(), ..hello(worker, 4) };
    let (pair, all) = (set(1, 1, &[5, 8]), set(3, 1, &[5, 7, 8]));
    let (lost, half) = (set(2, 2, &[5, 6]), set(4, 3, &[7, 8]));
    let formed = Formation::of(&[
        knows(8, &[all.clone(), pair.clone(), lost.clone(), half.clone()]),
        knows(5, &[pair.clone(), lost.clone(), all.clone()]),
        knows(7, &[lost.clone(), all.clone(), pair.clone(), half.clone()]),
        hello(9, 0),
    ])
    .unwrap();
    assert_eq!(formed.sets, [pair.clone(), all.clone()]);
    assert_eq!((formed.ranks_of(&pair), formed.ranks_of(&all)), (vec![0, 1], vec![0, 1, 2]));
    assert_eq!((formed.missing(&lost), formed.missing(&half)), (Some(6), None));
    assert!(formed.newcomers);
}

#[test]
fn a_rank_is_new_until_a_vote_has_ended() {
    let mut past = Past::default();
    let form = |past: &mut Past, epoch, other: Hello| {
        let own = past.hello(1, Vec::new());
        past.enter(epoch);
        let formed = Formation::of(&[other, own.clone()]).unwrap();
        past.form(epoch, &formed, &own);
        formed.newcomers
    };
    assert!(form(&mut past, 2, hello(0, 1)));
    // The epoch ended before the newcomer had the state.
    assert!(form(&mut past, 3, hello(0, 2)));
    let vote = past.ask(3).unwrap();
    past.hear(vote, true);
    assert!(!form(&mut past, 4, hello(0, 3)));
    // It was not there in between.
    assert!(form(&mut past, 6, hello(0, 5)));
    // In the first epoch all begin alike.
    assert!(!form(&mut Past::default(), 1, hello(0, 0)));
}

#[test]
fn a_rank_whose_epoch_did_not_form_knows_nothing() {
    let pair = set(1, 1, &[0, 1]);
    let knows = |worker| Hello { sets: vec![pair.clone()], ..hello(worker, 3) };
    // A newcomer that was in epoch 3 when that ended before it had formed.
    let new = Hello { formed: 0, ..hello(9, 3) };
    // A survivor of epoch 2, for which it had not formed, either.
    let survivor = Hello { formed: 2, ..knows(1) };
    let formed = Formation::of(&[knows(0), survivor.clone(), new.clone()]).unwrap();
    assert_eq!(formed.sets, [pair]);
    assert!(formed.newcomers && formed.lacks_state(&new) && !formed.lacks_state(&survivor));
}

#[test]
fn votes_are_counted_only_if_they_begin() {
    let mut past = Past::default();
    let first = past.ask(3).unwrap();
    assert_eq!((first, past.ask(3)), (vote(3, 1), None));
    past.withdraw(first);
    let again = past.ask(3).unwrap();
    assert_eq!(again, first);
    past.hear(again, false);
    let second = past.ask(3).unwrap();
    assert_eq!(second, vote(3, 2));
    past.hear(again, true); // too late
    assert_eq!(past.hello(0, Vec::new()).asked, Some(second));
}

#[test]
fn a_worker_that_is_there_twice_is_refused() {
    let error = Formation::of(&[hello(3, 1), hello(4, 1), hello(3, 0)]).unwrap_err();
    assert!(error.contains("twice") && error.contains("[3, 4, 3]"), "{error}");
}

/// A process of the random job.
#[derive(Default)]
struct Process {
    past: Past,
    /// The results that its program has received.
    results: BTreeMap<VoteId, bool>,
    /// The last epoch in which it was.
    last: u64,
    /// The epoch in which it came, or came back.
    back: u64,
}

fn below(random: &mut Xoshiro256PlusPlus, n: u64) -> u64 {
    random.next_u64() % n
}

/// Epochs with votes that a loss interrupts at any moment, also while an epoch forms. Processes are
/// lost for good, or are not part of an epoch; then they take the state of the others afterwards.
fn run(seed: u64) {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let random = &mut random;
    let mut processes: BTreeMap<u32, Process> = (0..4).map(|id| (id, Process::default())).collect();
    let mut next = 4;
    let mut unanimous = BTreeSet::new();
    for epoch in 1..40 {
        // Losses and newcomers.
        let lost: Vec<u32> = processes.keys().copied().filter(|_| below(random, 6) == 0).collect();
        if lost.len() < processes.len() {
            lost.iter().for_each(|id| drop(processes.remove(id)));
        }
        if processes.len() < 6 && below(random, 3) == 0 {
            processes.insert(next, Process::default());
            next += 1;
        }
        // Some epochs form only on some ranks.
        let here: Vec<bool> =
            processes.keys().enumerate().map(|(at, _)| at == 0 || below(random, 10) > 0).collect();
        let mut here: BTreeMap<u32, &mut Process> = processes
            .iter_mut()
            .zip(here)
            .filter_map(|((id, process), is_here)| is_here.then_some((*id, process)))
            .collect();
        let hellos: Vec<Hello> = here.iter().map(|(id, p)| p.past.hello(*id, vec![])).collect();
        let formation = Formation::of(&hellos).unwrap();
        let all_form = below(random, 3) > 0;
        for (process, hello) in here.values_mut().zip(&hellos) {
            if process.last + 1 < epoch {
                process.results.clear();
                process.back = epoch;
            }
            process.past.enter(epoch);
            process.last = epoch;
            if all_form || below(random, 2) == 0 {
                let result = process.past.form(epoch, &formation, hello);
                if let (Some(vote), Some(yes)) = (hello.asked, result)
                    && vote.epoch >= process.back
                {
                    process.results.insert(vote, yes);
                }
            }
        }
        // Votes, the last of which only some hear, or even begin.
        for _ in 0..below(random, 4) {
            if !all_form {
                break;
            }
            let is_last = below(random, 2) == 0;
            let mut all = true;
            let mut yes = true;
            let mut asked = Vec::new();
            for (id, process) in &mut here {
                if is_last && below(random, 5) == 0 {
                    all = false;
                    continue;
                }
                yes &= below(random, 8) > 0;
                asked.push((*id, process.past.ask(epoch).unwrap()));
            }
            let Some(&(_, vote)) = asked.first() else { break };
            assert!(asked.iter().all(|(_, other)| *other == vote), "seed {seed}");
            if all && yes {
                unanimous.insert(vote);
            }
            for (id, vote) in asked {
                if all && !(is_last && below(random, 2) == 0) {
                    let process = here.get_mut(&id).unwrap();
                    process.past.hear(vote, yes);
                    process.results.insert(vote, yes);
                }
            }
            if is_last {
                break;
            }
        }
        // VOTE
        let mut known: BTreeMap<VoteId, bool> = BTreeMap::new();
        for process in here.values() {
            for (vote, yes) in &process.results {
                assert_eq!(known.entry(*vote).or_insert(*yes), yes, "seed {seed}: {vote:?}");
                assert!(!yes || unanimous.contains(vote), "seed {seed}: {vote:?}");
            }
        }
    }
}

#[test]
fn random_losses_never_divide_a_vote() {
    for seed in 0..2000 {
        run(seed);
    }
}
