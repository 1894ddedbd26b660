//! Random jobs with random collective calls, made in a different order on every rank. The results
//! are those of the reference, with identical bits on all ranks (SAME), while process sets are
//! added and removed (ORD).
//!
//! A failing job is printed and shrunk. The printed `PROPTEST_RNG_SEED` repeats the same jobs, and
//! `PROPTEST_CASES` sets their number.

use std::{
    cell::Cell,
    collections::BTreeMap,
    sync::{
        Barrier,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use gradwire_daemon::Ending;
use gradwire_reference::Dice;
use gradwire_tests::{
    cluster::Cluster,
    launched::{Launch, network::reset_connections},
    script::Script,
};
use proptest::{
    prelude::*,
    test_runner::{RngSeed, TestRunner},
};

const CASES: u32 = 25;
const GIVEN_UP: u32 = 15;
const RESET: u32 = 8;
/// Jobs of real processes, which take longer.
const LAUNCHED: u32 = 4;
const MAX_CALLS: usize = 20;
/// The largest tensor in bytes: many of the smallest pieces.
const MAX_BYTES: u64 = 640 << 10;

/// Runs jobs with random seeds and numbers of calls.
fn jobs(cases: u32, job: impl Fn(u64, usize) -> Result<(), TestCaseError>) {
    let mut config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = cases;
    }
    // Each attempt to shrink runs a whole job.
    config.max_shrink_iters = 40;
    if config.rng_seed == RngSeed::Random {
        let clock = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
        config.rng_seed = RngSeed::Fixed(clock.as_nanos() as u64);
    }
    if let RngSeed::Fixed(seed) = config.rng_seed {
        println!("PROPTEST_RNG_SEED={seed}");
    }
    // A job with fewer calls is the beginning of a job with more calls, so jobs can be shrunk.
    let any = (any::<u64>().no_shrink(), 1..=MAX_CALLS);
    TestRunner::new(config).run(&any, |(seed, calls)| job(seed, calls)).unwrap();
}

#[test]
fn any_job_agrees_with_the_reference() {
    jobs(CASES, |seed, calls| {
        let script = Script::of(seed, calls, MAX_BYTES);
        let fail = |error: anyhow::Error| TestCaseError::fail(error.to_string());
        let cluster = Cluster::start(&script.plan).map_err(fail)?;
        let program = script.clone();
        let results = cluster.ranks(move |session| program.run(session)).map_err(fail)?;
        let results: Result<Vec<_>, String> = results.into_iter().collect();
        script.check(&results.map_err(TestCaseError::fail)?).map_err(TestCaseError::fail)?;
        let endings = cluster.finish().map_err(fail)?;
        prop_assert!(endings.iter().all(|ending| *ending == Ending::Finished), "{endings:?}");
        Ok(())
    });
}

/// Jobs agree with the reference while their connections, also those with the coordinator, are
/// reset again and again, at both ends.
#[test]
fn any_job_survives_resets() {
    let broken = AtomicUsize::new(0);
    jobs(RESET, |seed, calls| {
        let script = Script::of(seed, calls, 4 * MAX_BYTES);
        let fail = |error: anyhow::Error| TestCaseError::fail(error.to_string());
        let cluster = Cluster::start(&script.plan).map_err(fail)?;
        let data = cluster.daemons.iter().map(|daemon| daemon.data_address);
        let ports: Vec<u16> =
            data.chain([cluster.coordinator_address]).map(|at| at.port()).collect();
        let (program, is_done) = (script.clone(), AtomicBool::new(false));
        let results = thread::scope(|scope| {
            scope.spawn(|| {
                let mut dice = Dice::of(&[seed, 6]);
                while !is_done.load(Relaxed) {
                    thread::sleep(Duration::from_micros(dice.below(100_000)));
                    let count = reset_connections(&[], &[dice.pick(&ports)]);
                    broken.fetch_add(count.unwrap_or_default(), Relaxed);
                }
            });
            let results = cluster.ranks(move |session| program.run(session));
            is_done.store(true, Relaxed);
            results
        });
        let results: Result<Vec<_>, String> = results.map_err(fail)?.into_iter().collect();
        script.check(&results.map_err(TestCaseError::fail)?).map_err(TestCaseError::fail)?;
        let endings = cluster.finish().map_err(fail)?;
        prop_assert!(endings.iter().all(|ending| *ending == Ending::Finished), "{endings:?}");
        Ok(())
    });
    println!("{} connections were reset", broken.load(Relaxed));
}

/// TELL, WAIT: whatever is in flight when a rank gives up, every other rank gets the reason, and no
/// rank waits for ever. Or it already has all of its results, and they are right.
#[test]
fn a_rank_that_gives_up_ends_the_job_for_all() {
    let ended = Cell::new(0);
    jobs(GIVEN_UP, |seed, calls| {
        let script = Script::of(seed, calls, MAX_BYTES / 4);
        let fail = |error: anyhow::Error| TestCaseError::fail(error.to_string());
        let cluster = Cluster::start(&script.plan).map_err(fail)?;
        let mut dice = Dice::of(&[seed, 5]);
        let evil = dice.below(cluster.size().into()) as u32;
        let after = Duration::from_micros(dice.below(400_000));
        let program = script.clone();
        let attached = Barrier::new(cluster.size() as usize);
        let outcomes = cluster.ranks(move |session| {
            attached.wait();
            if session.rank() != evil {
                return program.run(session);
            }
            thread::scope(|scope| {
                scope.spawn(|| {
                    thread::sleep(after);
                    session.abort("had enough");
                });
                program.run(session)
            })
        });
        for (rank, outcome) in (0..).zip(outcomes.map_err(fail)?) {
            match outcome {
                Ok(results) => script.check_rank(rank, &results).map_err(TestCaseError::fail)?,
                Err(reported) => {
                    prop_assert!(rank == evil || reported.contains("had enough"), "{}", reported)
                }
            }
        }
        let endings = cluster.finish().map_err(fail)?;
        let reported = |ending: &Ending| match ending {
            Ending::Finished => true,
            Ending::Failed(cause) => cause.what.contains("had enough"),
        };
        prop_assert!(endings.iter().all(reported), "{:?}", endings);
        ended
            .set(ended.get() + u32::from(endings.iter().any(|ending| *ending != Ending::Finished)));
        Ok(())
    });
    println!("{} of the jobs were aborted", ended.get());
}

/// The same with a process for each rank and each daemon. Every rank checks its own results. The
/// results that all ranks share are compared here.
#[test]
fn real_processes_agree_with_the_reference() {
    jobs(LAUNCHED, |seed, calls| {
        let script = Script::of(seed, calls, MAX_BYTES);
        let slots = &script.plan.slots;
        let (mut hosts, mut servers) = (Vec::new(), Vec::new());
        for (host, &slots) in (1..).zip(slots) {
            match slots {
                0 => servers.push(format!("127.0.0.{host}")),
                _ => hosts.push(format!("127.0.0.{host}:{slots}")),
            }
        }
        let mut launch = Launch::new().ranks(slots.iter().sum()).hosts(&hosts.join(","));
        if !servers.is_empty() {
            launch = launch.words(&["--servers", &servers.join(",")]);
        }
        for setting in &script.plan.set {
            launch = launch.set(setting);
        }
        let random = format!("random:{seed}:{calls}:{MAX_BYTES}");
        let report = launch.rank(&["attach", &random, "leave"]).run();
        prop_assert_eq!(report.code(), 0, "{}", report.all());
        let mut digests = vec![BTreeMap::new(); slots.iter().sum::<u32>() as usize];
        for said in report.said("digest") {
            let numbers: Vec<u64> =
                said.text.split(' ').map(|number| number.parse().unwrap()).collect();
            let [index, round, digest] = numbers[..] else { panic!("{}", said.text) };
            digests[said.rank as usize].insert((index as usize, round), digest);
        }
        script.check_same(&digests).map_err(TestCaseError::fail)?;
        prop_assert_eq!(report.said("checked").len(), digests.len());
        Ok(())
    });
}
