//! Thousands of simulated jobs keep the invariants, and every planted fault is found.

use std::{
    env,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread,
};

use gradwire_elastic_simulation::{Plant, run};

/// How many seeds are run, unless `GRADWIRE_SIMULATION_SEEDS` is set. `make soak` runs more.
const SEEDS: u64 = 1500;
/// The most that may be needed to find a planted fault.
const FOUND_IN: u64 = 5000;

fn number(variable: &str) -> Option<u64> {
    env::var(variable).ok().map(|given| given.parse().expect("a number"))
}

/// Runs seeds on all processors until one gives a result, and returns that.
fn first<R: Send>(seeds: u64, of: impl Fn(u64) -> Option<R> + Sync) -> Option<(u64, R)> {
    let (next, found) = (AtomicU64::new(0), Mutex::new(None::<(u64, R)>));
    let threads = thread::available_parallelism().map_or(2, usize::from);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while found.lock().expect("no panic").is_none() {
                    let seed = next.fetch_add(1, SeqCst);
                    if seed >= seeds {
                        break;
                    }
                    if let Some(result) = of(seed) {
                        found.lock().expect("no panic").get_or_insert((seed, result));
                    }
                }
            });
        }
    });
    found.into_inner().expect("no panic")
}

#[test]
fn elastic_jobs_keep_the_invariants() {
    let (events, epochs, well) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let seeds = number("GRADWIRE_SIMULATION_SEEDS").unwrap_or(SEEDS);
    let failed = first(seeds, |seed| {
        let run = run(seed, None, false);
        events.fetch_add(run.events, SeqCst);
        epochs.fetch_add(run.epochs, SeqCst);
        well.fetch_add(u64::from(run.end == "well"), SeqCst);
        run.found
    });
    println!("{events:?} events, {epochs:?} epochs, {well:?} jobs succeeded");
    if let Some((seed, (label, text))) = failed {
        panic!("{label}: {text}\nrun it again with GRADWIRE_SIMULATION_SEED={seed}");
    }
}

#[test]
fn every_planted_fault_is_found() {
    for (plant, labels) in Plant::ALL {
        let found = first(FOUND_IN, |seed| run(seed, Some(*plant), false).found);
        let Some((seed, (label, text))) = found else { panic!("nothing finds {plant:?}") };
        println!("{plant:?}: seed {seed}, {label}: {text}");
        assert!(labels.contains(&label), "{plant:?}, seed {seed}: {label}: {text}");
    }
}

/// Runs the seed of `GRADWIRE_SIMULATION_SEED` and shows its log; otherwise the first ones.
#[test]
fn a_seed_always_runs_alike() {
    let plant = env::var("GRADWIRE_SIMULATION_PLANT").ok();
    let plant = plant.map(|name| Plant::named(&name).expect("the name of a planted fault"));
    let given = number("GRADWIRE_SIMULATION_SEED");
    for seed in given.map_or(0..10, |seed| seed..seed + 1) {
        let [one, other] = [0; 2].map(|_| run(seed, plant, true));
        if given.is_some() {
            println!("{}\nthe job ends: {}", one.log.join("\n"), one.end);
            assert_eq!(one.found, None, "seed {seed}, {plant:?}");
        }
        assert!(one.log == other.log, "seed {seed}");
    }
}
