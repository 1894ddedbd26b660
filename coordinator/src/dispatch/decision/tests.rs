//! Decisions between candidates with known times.

use gradwire_collectives::Algorithm;
use proptest::prelude::*;

use super::*;

fn choice(predicted: &[f64]) -> Choice {
    let specs = Algorithm::ALL.iter().map(|&known| Spec::usual(known));
    let mut all: Vec<(Spec, f64)> = specs.zip(predicted.iter().copied()).collect();
    let (spec, predicted_seconds) = all.remove(0);
    Choice { spec, predicted_seconds, others: all, reason: "by the model".to_owned() }
}

fn choice_of(index: usize) -> Spec {
    Spec::usual(Algorithm::ALL[index])
}

fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

/// Runs operations with these times for each candidate; returns how many explored.
fn play(decision: &mut Decision, operations: u64, times: &[f64]) -> u64 {
    let mut explored = 0;
    for _ in 0..operations {
        let before = decision.spec();
        let (index, spec) = decision.next();
        explored += u64::from(spec != before);
        decision.observe(index, seconds(times[index]));
    }
    explored
}

#[test]
fn the_fastest_is_found_whatever_the_model_says() {
    let mut decision = Decision::new(choice(&[1.0, 1.5, 2.0]), 1, true);
    assert_eq!((decision.version(), decision.reason()), (1, "by the model"));
    play(&mut decision, 20_000, &[8e-3, 5e-3, 4e-3]);
    assert_eq!(decision.spec(), Spec::usual(Algorithm::ALL[2]));
    let (reason, version) = (decision.reason(), decision.version());
    assert!((2..=3).contains(&version), "{version}");
    assert!(reason.contains("50 % of the time") || reason.contains("80 % of"), "{reason}");
    assert!(reason.ends_with(&format!("measured here (version {version})")), "{reason}");
    let (runner_up, expected) = decision.runner_up().unwrap();
    assert_eq!(runner_up, choice_of(1), "as measured, not as predicted");
    assert!((expected - 5e-3).abs() < 1e-4, "{expected}");
    assert_eq!(decision.operations(), 20_000);
}

#[test]
fn exploration_is_rare_and_ends() {
    for run in [1, 16] {
        let mut decision = Decision::new(choice(&[1.0, 1.5, 2.0]), run, true);
        let times = [1e-3, 1e-3, 1e-3];
        let mut explored = 0;
        for operations in 1..=30_000u64 {
            explored += play(&mut decision, 1, &times);
            let most = operations / 50 + u64::from(run);
            assert!(explored <= most, "{explored} of {operations}");
        }
        // Only a few times of a long run count.
        let runs = 2 * SAMPLES / OF_A_RUN.min(run as usize);
        assert_eq!(explored, runs as u64 * u64::from(run));
        assert_eq!(decision.version(), 1, "nothing is faster");
        assert_eq!(play(&mut decision, 5_000, &times), 0);
    }
}

#[test]
fn fixed_and_hopeless_choices_are_not_explored() {
    let mut fixed = Decision::new(choice(&[1.0, 1.1]), 1, false);
    assert_eq!(play(&mut fixed, 1_000, &[2e-3, 1e-3]), 0);
    let mut only = Decision::new(choice(&[1.0]), 1, true);
    assert_eq!(play(&mut only, 1_000, &[2e-3]), 0);
    let mut hopeless = Decision::new(choice(&[1.0, 3.1]), 1, true);
    assert_eq!(play(&mut hopeless, 1_000, &[2e-3, 1e-3]), 0);
    // Without times of the chosen candidate, there is nothing to compare with.
    let mut mixed = Decision::new(choice(&[1.0, 1.1]), 1, true);
    assert!((0..10_000).all(|_| mixed.next().0 == 0));
    // Without comparable times, exploration ends.
    let mut mixed = Decision::new(choice(&[1.0, 1.1]), 1, true);
    let mut explored = 0;
    for _ in 0..100_000 {
        match mixed.next() {
            (0, _) => assert!(!mixed.observe(0, seconds(1e-3))),
            _ => explored += 1,
        }
    }
    assert_eq!(explored, MAX_RUNS);
}

#[test]
fn outliers_and_small_differences_change_nothing() {
    let mut decision = Decision::new(choice(&[1.0, 1.1]), 1, true);
    for operation in 0..10_000u64 {
        let (index, _) = decision.next();
        let hiccup = if index == 0 && operation % 9 == 0 { 0.2 } else { 0.0 };
        decision.observe(index, seconds([1e-3, 0.96e-3][index] + hiccup));
    }
    assert_eq!(decision.version(), 1, "{}", decision.reason());
}

/// A clearly slower or faster candidate needs few tries.
#[test]
fn clear_differences_are_decided_soon() {
    for (times, version) in [([1e-3, 1.3e-3], 1), ([1e-3, 0.8e-3], 2)] {
        let mut decision = Decision::new(choice(&[1.0, 1.1]), 1, true);
        let explored = play(&mut decision, 20_000, &times);
        assert_eq!((explored, decision.version()), (FEW as u64, version));
        assert!(decision.is_settled());
    }
    // A hopeless candidate needs fewer, and the next job knows it.
    let mut decision = Decision::new(choice(&[1.0, 1.1]), 1, true);
    assert_eq!(play(&mut decision, 20_000, &[1e-3, 4e-3]), KNOWN as u64);
    assert!(decision.is_settled() && decision.times().len() == 2);
    // A single outlier makes no difference.
    let mut decision = Decision::new(choice(&[1.0, 1.1]), 1, true);
    let mut explored = 0;
    for _ in 0..20_000 {
        let (index, _) = decision.next();
        explored += index;
        let hiccup = if explored == 3 { 0.1 } else { 1.0 };
        decision.observe(index, seconds([1e-3, 1.3e-3 * hiccup][index]));
    }
    assert_eq!((explored, decision.version()), (FEW, 1));
}

/// Costs that the model leaves out are the same for all candidates.
#[test]
fn observing_one_candidate_corrects_the_others() {
    // Each takes a millisecond more than predicted, except the last one, which is the fastest. The
    // model alone makes it look hopeless.
    let predicted = [1e-4, 2e-4, 3.1e-4, 4e-4];
    let mut decision = Decision::new(choice(&predicted), 1, true);
    let all = |decision: &Decision| -> Vec<f64> {
        decision.candidates().map(|one| one.expected).collect()
    };
    assert_eq!(all(&decision), predicted, "nothing is known");
    let times = [1.1e-3, 1.2e-3, 1.31e-3, 0.9e-3];
    play(&mut decision, 40, &times);
    let is = |decision: &Decision, right: [f64; 4]| {
        all(decision).iter().zip(right).all(|(one, right)| (one / right - 1.0).abs() < 1e-3)
    };
    assert!(is(&decision, [1.1e-3, 1.2e-3, 1.31e-3, 1.4e-3]), "{:?}", all(&decision));
    play(&mut decision, 10_000, &times);
    assert_eq!(decision.spec(), choice_of(3), "{}", decision.reason());
    assert!(is(&decision, times), "{:?}", all(&decision));
    // The next job knows the times before its first operation, whatever the model prefers.
    let learned = decision.times();
    for predicted in [predicted, [1e-4, 2e-4, 3e-4, 0.5e-4]] {
        let mut next = Decision::new(choice(&predicted), 1, true);
        next.remember(&learned, decision.seconds());
        assert!(is(&next, times), "{:?}", all(&next));
    }
    // A model whose rates are too slow.
    let mut decision = Decision::new(choice(&[2e-3, 4e-3]), 1, true);
    play(&mut decision, 20, &[1e-3, 2e-3]);
    assert!((decision.runner_up().unwrap().1 - 2e-3).abs() < 1e-6);
}

/// On a shared machine, the times of all candidates rise and fall together.
#[test]
fn times_of_the_same_moment_are_compared() {
    for (times, versions) in [([1e-3, 1e-3, 1e-3], 1..=1), ([2e-3, 1e-3, 2e-3], 2..=2)] {
        let mut decision = Decision::new(choice(&[1.0, 1.1, 1.2]), 1, true);
        for operation in 0..50_000u32 {
            let load = 2.0 + (f64::from(operation) / 700.0).sin();
            let (index, _) = decision.next();
            decision.observe(index, seconds(times[index] * load));
        }
        assert!(versions.contains(&decision.version()), "{}", decision.reason());
    }
}

/// In a step with four tensors, one of them small, each candidate runs all of them.
#[test]
fn tensors_of_different_size_do_not_mislead() {
    let mut decision = Decision::new(choice(&[1.0, 1.1, 1.2, 1.3, 1.4]), 1, true);
    for operation in 0..100_000 {
        let (index, _) = decision.next();
        let size = if operation % 4 == 3 { 0.5 } else { 1.0 };
        decision.observe(index, seconds(1e-3 * size * [1.0, 1.2, 1.2, 1.2, 1.2][index]));
    }
    assert_eq!(decision.version(), 1, "{}", decision.reason());
}

#[test]
fn the_next_job_starts_where_this_one_ended() {
    let times = [3e-3, 1e-3, 2e-3];
    let mut first = Decision::new(choice(&[1.0, 1.5, 2.0]), 1, true);
    play(&mut first, 10_000, &times);
    let learned = first.times();
    let known = |index: usize, permille| Time { spec: choice_of(index), permille };
    assert_eq!(learned, [known(0, 3000), known(1, 1000), known(2, 2000)]);
    let mut next = Decision::new(choice(&[1.0, 1.5, 2.0]), 1, true);
    next.remember(&learned, Some(2e-3));
    assert_eq!((next.version(), next.spec()), (2, first.spec()));
    assert!(next.reason().contains("33 % of the time of"), "{}", next.reason());
    assert!(next.reason().contains("in earlier jobs"), "{}", next.reason());
    assert_eq!(play(&mut next, 1_000, &times), 0, "everything is known");
    assert_eq!(next.times(), learned);
    // An unmeasured candidate does not precede measured ones.
    let others = vec![(choice_of(0), 1.0), (choice_of(1), 1.5), (choice_of(2), 2.0)];
    let (spec, reason) = (choice_of(3), String::new());
    let unknown = Choice { spec, predicted_seconds: 0.9, others, reason };
    let mut next = Decision::new(unknown, 1, true);
    next.remember(&learned, Some(2e-3));
    assert_eq!((next.version(), next.spec()), (2, choice_of(1)));
    assert!(next.reason().contains("fastest in earlier jobs"));
    // The candidates in the order of the model.
    let explored = play(&mut next, 5_000, &[2.5e-3, 3e-3, 1e-3, 2e-3]);
    assert_eq!((explored, next.spec()), (FEW as u64, choice_of(1)), "unknown ones are tried");
    // A single one was not compared.
    let mut next = Decision::new(choice(&[1.0, 1.5]), 1, true);
    next.remember(&learned[1..2], Some(2e-3));
    assert_eq!((next.version(), next.spec()), (1, choice_of(0)));
    // Too few times are not kept, and unknown candidates change nothing.
    let mut short = Decision::new(choice(&[1.0, 1.5]), 1, true);
    play(&mut short, 9, &times);
    assert_eq!(short.times(), []);
    let mut other = Decision::new(choice(&[1.0]), 1, true);
    other.remember(&learned, Some(2e-3));
    assert_eq!((other.version(), other.spec()), (1, choice_of(0)));
}

proptest! {
    #[test]
    fn the_choice_is_about_the_fastest(
        times in prop::collection::vec(1e-5..1e-2f64, 2..6),
        predicted in prop::collection::vec(1.0..2.9f64, 6),
        run in 1u32..20,
    ) {
        let mut predicted: Vec<f64> = predicted[..times.len()].to_vec();
        predicted.sort_by(f64::total_cmp);
        let mut decision = Decision::new(choice(&predicted), run, true);
        play(&mut decision, 40_000, &times);
        let least = times.iter().copied().fold(f64::MAX, f64::min);
        let index = (0..times.len()).find(|&index| choice_of(index) == decision.spec());
        let chosen = times[index.unwrap()];
        prop_assert!(chosen * 0.94 <= least, "{} of {:?}", chosen, times);
        prop_assert!(decision.version() <= times.len() as u32);
    }
}
