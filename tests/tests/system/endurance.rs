//! Elastic jobs that lose processes at random: ranks, daemons and agents are killed or frozen, one
//! after another or together, in every phase. Meanwhile the ranks make all collectives, also in
//! bf16, and check them.
//!
//! In each round one process is spared, because it keeps the state of the job. Then all survivors
//! must go on with the same weights, those of a replay of the memberships, until the job is whole
//! again. At the end, nothing is left behind (CLEAN).
//!
//! A failing test prints its seed, and `SEED=… cargo nextest run …` makes the same choices again.
//! `make endure` runs `GRADWIRE_ENDURE_ROUNDS` rounds of each job, 150 by default.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    thread::sleep,
    time::{Duration, SystemTime},
};

use gradwire_reference::Dice;
use gradwire_tests::launched::{
    Job, Launch, Line,
    processes::{Process, Role},
    programs,
};
use rustix::process::{Pid, Signal, kill_process};

const RANKS: usize = 4;

/// Every fifth epoch is left alone for this long, which makes it a success. The launcher ends a job
/// if no epoch succeeds within the elastic time-out.
const QUIET: (u64, Duration) = (5, Duration::from_secs(6));

/// A step that a rank has kept.
#[derive(Debug, Clone)]
struct Step {
    worker: u32,
    number: u64,
    epoch: u64,
    members: Vec<u32>,
    weight: f32,
}

/// What the ranks have said, read line by line.
#[derive(Debug, Default)]
struct Heard {
    lines: usize,
    steps: Vec<Step>,
}

impl Heard {
    fn read(&mut self, job: &Job) {
        self.take(&job.lines_after(self.lines));
    }

    fn take(&mut self, lines: &[Line]) {
        self.lines += lines.len();
        for said in lines.iter().filter_map(|line| line.said()) {
            assert_ne!(said.word, "failed", "rank {}: {}", said.rank, said.text);
            if said.word == "step" {
                let words: Vec<&str> = said.text.split(' ').collect();
                let members = words[2].split(',').map(|worker| worker.parse().unwrap());
                self.steps.push(Step {
                    worker: said.rank,
                    number: words[0].parse().unwrap(),
                    epoch: words[1].parse().unwrap(),
                    members: members.collect(),
                    weight: words[3].parse().unwrap(),
                });
            }
        }
    }

    /// The last epoch and its workers, if all of them have kept a step in it.
    fn whole(&self) -> Option<(u64, BTreeSet<u32>)> {
        let last = self.steps.iter().map(|step| step.epoch).max()?;
        let own = self.steps.iter().rev().take_while(|step| step.epoch + 1 >= last);
        let own: Vec<_> = own.filter(|step| step.epoch == last).collect();
        let members: BTreeSet<u32> = own[0].members.iter().copied().collect();
        let kept: BTreeSet<u32> = own.iter().map(|step| step.worker).collect();
        (kept == members && members.len() == RANKS).then_some((last, members))
    }

    /// Compares all steps that count with each other and with a replay. A worker that was lost may
    /// have kept a step that the others never heard of, and make again.
    fn check(&self, survivors: &BTreeSet<u32>) {
        let mut by_number: BTreeMap<u64, Vec<&Step>> = BTreeMap::new();
        for step in &self.steps {
            by_number.entry(step.number).or_default().push(step);
        }
        let mut weight = 0.0;
        for (expected, (number, all)) in by_number.iter().enumerate() {
            assert_eq!(expected as u64, *number, "no step is left out");
            let last = all.iter().map(|step| step.epoch).max().unwrap();
            let (own, lost): (Vec<_>, Vec<_>) =
                all.iter().copied().partition(|step| step.epoch == last);
            let members = &own[0].members;
            weight += members.iter().map(|worker| gradient(*worker, *number)).sum::<f32>();
            for step in &own {
                assert_eq!((&step.members, step.weight), (members, weight), "{step:?}");
            }
            let alive = lost.iter().find(|step| survivors.contains(&step.worker));
            assert!(alive.is_none(), "step {number} was made twice: {alive:?}");
            let kept: BTreeSet<u32> = own.iter().map(|step| step.worker).collect();
            let missing = members.iter().find(|it| survivors.contains(it) && !kept.contains(it));
            assert!(missing.is_none(), "worker {missing:?} did not keep step {number}");
        }
    }
}

/// The part of a worker in a step, as in `gradwire-enduring-rank`.
fn gradient(worker: u32, step: u64) -> f32 {
    (u64::from(worker % 7 + 1) * (step % 5 + 1)) as f32
}

/// The parent of a process: of a rank or a daemon, its agent.
fn parent(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

/// Sends a signal to a process that may have ended.
fn try_signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

/// Whether all workers run: one that was lost just now may still be in its epoch.
fn all_run(job: &Job, workers: &BTreeSet<u32>) -> bool {
    let runs = |process: &Process| {
        let stat = fs::read_to_string(format!("/proc/{}/stat", process.pid)).unwrap_or_default();
        let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
        state.is_some_and(|state| !"TZX".contains(state))
    };
    let processes = job.processes();
    let ranks = processes.iter().filter(|process| runs(process));
    let found: BTreeSet<u32> = ranks
        .filter_map(|process| match process.role {
            Some(Role::Rank(worker)) => Some(worker),
            _ => None,
        })
        .collect();
    workers.is_subset(&found)
}

/// Loses something, but not the spared worker or its agent. Says what; nothing if there is nothing
/// of the kind that was chosen.
fn lose(job: &Job, spared: u32, dice: &mut Dice) -> Option<String> {
    let processes = job.processes();
    let ranks: Vec<&Process> =
        processes.iter().filter(|it| matches!(it.role, Some(Role::Rank(_)))).collect();
    let daemons: Vec<&Process> =
        processes.iter().filter(|it| matches!(it.role, Some(Role::Daemon(_)))).collect();
    let spared_pid = ranks.iter().find(|it| it.role == Some(Role::Rank(spared))).map(|it| it.pid);
    let spared_agent = spared_pid.and_then(parent);
    let agents: Vec<&Process> = processes
        .iter()
        .filter(|it| matches!(it.role, Some(Role::Agent(_))) && Some(it.pid) != spared_agent)
        .collect();
    let others: Vec<&Process> =
        ranks.into_iter().filter(|it| it.role != Some(Role::Rank(spared))).collect();
    let one = |all: &[&Process], dice: &mut Dice| -> Vec<u32> {
        match all.len() as u64 {
            0 => Vec::new(),
            count => vec![all[dice.below(count) as usize].pid],
        }
    };
    // A frozen process is found after a time-out only.
    let (what, chosen, signal) = match dice.below(16) {
        0..5 => ("kill a rank", one(&others, dice), Signal::KILL),
        5 => ("kill all other ranks", others.iter().map(|it| it.pid).collect(), Signal::KILL),
        6..9 => ("kill a daemon", one(&daemons, dice), Signal::KILL),
        9 => ("kill all daemons", daemons.iter().map(|it| it.pid).collect(), Signal::KILL),
        10..12 => ("kill an agent", one(&agents, dice), Signal::KILL),
        12 => ("freeze a rank", one(&others, dice), Signal::STOP),
        13 => ("freeze a daemon", one(&daemons, dice), Signal::STOP),
        _ => ("ask a rank to end", one(&others, dice), Signal::TERM),
    };
    for pid in &chosen {
        try_signal(*pid, signal);
    }
    (!chosen.is_empty()).then(|| format!("{what} {chosen:?}"))
}

fn seed() -> u64 {
    env::var("SEED").ok().map_or_else(
        || SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64,
        |seed| seed.parse().unwrap(),
    )
}

/// Runs a job through `rounds` of losses.
fn endure(hosts: &str, rounds: u64) {
    let seed = seed();
    println!("SEED={seed}");
    let mut dice = Dice::of(&[seed]);
    let program = programs::beside("gradwire-enduring-rank").display().to_string();
    let mut job = Launch::new()
        .words(&["-np", "4", "-H", hosts, "--min-np", "1", "--elastic-timeout", "120"])
        .words(&["--blacklist-cooldown-range", "0.2", "0.5"])
        .set("heartbeat.timeout_ms=4000")
        .set("worker.daemon_timeout_ms=4000")
        .set("negotiation.piece_bytes=64KiB")
        .set("data.chunk_bytes=64KiB")
        .set("recovery.restarts=1000000")
        .within(Duration::from_secs(120 + 40 * rounds))
        .program(&[&program])
        .start();
    let (mut heard, mut after) = (Heard::default(), 0);
    let whole = |job: &Job, heard: &mut Heard, after: u64| {
        job.wait_for(&format!("seed {seed}: a whole epoch after {after}"), || {
            heard.read(job);
            assert!(!job.has_ended(), "seed {seed}: the job has ended: {:#?}", job.lines());
            heard.whole().filter(|(epoch, workers)| *epoch > after && all_run(job, workers))
        })
    };
    for round in 0..rounds {
        let (epoch, workers) = whole(&job, &mut heard, after);
        after = epoch;
        // Also at once after the epoch has begun, and in the middle of any operation.
        sleep(Duration::from_millis(dice.below(400)));
        if round % QUIET.0 == QUIET.0 - 1 {
            sleep(QUIET.1);
        }
        let spared = *workers.iter().nth(dice.below(RANKS as u64) as usize).unwrap();
        let mut losses = 1 + dice.below(3);
        while losses > 0 {
            let Some(what) = lose(&job, spared, &mut dice) else {
                assert!(!job.has_ended(), "seed {seed}: the job has ended: {:#?}", job.lines());
                sleep(Duration::from_millis(10));
                continue;
            };
            println!("{round}: epoch {epoch}, spare worker {spared}: {what}");
            sleep(Duration::from_millis(dice.below(700)));
            losses -= 1;
        }
    }
    let (_, survivors) = whole(&job, &mut heard, after);
    job.allow("stop");
    let report = job.finish();
    assert_eq!(report.code(), 0, "seed {seed}: {:#?}", report.lines);
    // The last lines.
    let lines = report.lines.get(heard.lines..).unwrap_or_default();
    heard.take(lines);
    heard.check(&survivors);
    println!("seed {seed}: {} steps in {after} epochs", heard.steps.len());
}

#[test]
fn a_job_on_one_host_survives_random_losses() {
    endure("127.0.0.1:4", 3);
}

#[test]
fn a_job_on_two_hosts_survives_random_losses() {
    endure("127.0.0.1:2,127.0.0.2:2", 3);
}

fn rounds() -> u64 {
    env::var("GRADWIRE_ENDURE_ROUNDS").map_or(150, |rounds| rounds.parse().unwrap())
}

#[test]
#[ignore = "takes long; run by make endure"]
fn a_job_on_one_host_survives_many_losses() {
    endure("127.0.0.1:4", rounds());
}

#[test]
#[ignore = "takes long; run by make endure"]
fn a_job_on_two_hosts_survives_many_losses() {
    endure("127.0.0.1:2,127.0.0.2:2", rounds());
}
