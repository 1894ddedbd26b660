//! Elastic jobs: losses and changes end an epoch, and not the job.

use std::collections::BTreeMap;

use super::*;
use crate::launch::elastic::Elastic;

const TIMEOUT: Duration = Duration::from_secs(60);

/// A job of 3 ranks on hosts `a:2,b:2` that has begun to run at 1000 ms, with the rules that
/// `change` makes of these: 1 to 3 ranks, quarantines of 1 to 4 s.
pub(super) fn running(change: impl FnOnce(&mut Elastic)) -> Job {
    let mut job = job_on("a:2,b:2", 3, change);
    step(&mut job, ready(1), 10);
    assert_eq!(step(&mut job, ready(0), 20), ["0:start the daemon"]);
    step(&mut job, said(0, Role::Daemon, GRPC), 30);
    step(&mut job, serving(1), 40);
    for (node, rank) in [(0, 0), (0, 1), (1, 2)] {
        started(&mut job, node, rank, 1000);
    }
    job
}

fn job_on(hosts: &str, max: u32, change: impl FnOnce(&mut Elastic)) -> Job {
    let hosts = parse_list(hosts).unwrap();
    let nodes = Plan::nodes(&hosts, Some(max)).unwrap();
    let settings = Settings::load(&Layers::default()).unwrap();
    let mut plan = Plan::new(nodes, "train", Vec::<Text>::new(), &settings).unwrap();
    let mut elastic = Elastic {
        hosts,
        min: 1,
        max,
        spares: 0,
        timeout: TIMEOUT,
        reset_limit: None,
        restarts: 100,
        cooldown: (ms(1000), ms(4000)),
        reach: ms(30_000),
    };
    change(&mut elastic);
    plan.elastic = Some(elastic);
    Job::new(plan, LIMITS)
}

fn started(job: &mut Job, node: usize, worker: u32, at: u64) -> Vec<String> {
    step(job, Event::Started { node, role: Role::Rank(worker), pid: 70 + worker, at: ms(at) }, at)
}

pub(super) fn rank_ends(
    job: &mut Job,
    node: usize,
    worker: u32,
    end: ProcessEnd,
    at: u64,
) -> Vec<String> {
    step(job, exited(node, Role::Rank(worker), end, at), at)
}

pub(super) fn daemon_ends(job: &mut Job, node: usize, code: i32, at: u64) -> Vec<String> {
    step(job, exited(node, Role::Daemon, ProcessEnd::Code(code), at), at)
}

pub(super) const KILLED: ProcessEnd = ProcessEnd::Signal(9);

/// The environment of the daemons that a command starts, by agent.
pub(super) fn daemons(commands: &[Command]) -> BTreeMap<usize, BTreeMap<String, String>> {
    let started = commands.iter().filter_map(|command| match command {
        Command::Order { node, order: Order::Start(start) } if start.role == Role::Daemon => {
            Some((*node, start.environment.clone()))
        }
        _ => None,
    });
    started.collect()
}

/// Rank 2 is killed, and the daemons end. What the launcher does at 1500 ms.
pub(super) fn lose_rank_2(job: &mut Job) -> Vec<Command> {
    assert!(rank_ends(job, 1, 2, KILLED, 1400).is_empty());
    step(job, said(0, Role::Daemon, &failed(Some(2))), 1410);
    assert!(daemon_ends(job, 0, 1, 1420).is_empty());
    assert!(daemon_ends(job, 1, 1, 1430).is_empty(), "for a moment others may be reported");
    job.step(Event::Tick, ms(1500))
}

/// The daemons of the next epoch serve on these hosts.
pub(super) fn serve(job: &mut Job, nodes: &[usize], at: u64) -> Vec<String> {
    let (first, others) = nodes.split_first().unwrap();
    let mut orders = step(job, said(*first, Role::Daemon, GRPC), at);
    for node in others {
        orders.extend(step(job, serving(*node), at));
    }
    orders
}

#[test]
fn a_lost_rank_ends_only_its_epoch() {
    let mut job = running(|_| {});
    let started = daemons(&lose_rank_2(&mut job));
    let [(0, first)] = &started.into_iter().collect::<Vec<_>>()[..] else {
        panic!("host a goes on")
    };
    for (name, value) in [
        ("GRADWIRE_EPOCH", "2"),
        ("GRADWIRE_ELASTIC", "1"),
        ("GRADWIRE_WORKERS", "0,1"),
        ("GRADWIRE_SURVIVORS", "2"),
        ("GRADWIRE_SLOTS", "2"),
        ("GRADWIRE_NODES", "1"),
        ("GRADWIRE_RANKS", "2"),
        ("GRADWIRE_COORDINATOR", "here"),
    ] {
        assert_eq!(first.get(name).map(String::as_str), Some(value), "{name}");
    }
    // A slot is free on host b: a replacement starts at once.
    let orders = serve(&mut job, &[0], 1600);
    let line = "epoch 2: 2 ranks on 1 host, 0.2 s after rank 2 on host b was killed by SIGKILL";
    assert_eq!(orders, [line]);
    for (node, rank) in [(0, 0), (0, 1), (1, 3)] {
        rank_ends(&mut job, node, rank, ProcessEnd::Code(0), 3000);
    }
    assert_eq!(job.phase, Phase::Leaving);
}

/// The network between the hosts is cut, and the launcher reaches both.
#[test]
fn a_host_that_others_do_not_reach_is_left_out() {
    for min in [1, 3] {
        let mut job = running(|rules| rules.min = min);
        let mut said_last = Vec::new();
        for (epoch, at) in [(1, 10_000), (2, 21_000)] {
            let failure = Failure::new(FailureKind::CoordinatorLost, "no answer").host("b");
            let line = to_line(&ServiceReport::Failed { failure });
            step(&mut job, said(1, Role::Daemon, &line), at);
            daemon_ends(&mut job, 1, 1, at + 10);
            said_last = daemon_ends(&mut job, 0, 1, at + 20);
            for wait in [500, 1000, 2500] {
                said_last.extend(step(&mut job, Event::Tick, at + wait));
            }
            if epoch == 1 {
                assert!(said_last.iter().all(|line| !line.contains("left out")), "{said_last:?}");
                serve(&mut job, &[0, 1], at + 3000);
            }
        }
        let is_left_out = said_last.iter().any(|line| line.starts_with("host b is left out"));
        assert_eq!(is_left_out, min == 1, "{said_last:?}");
        let line = "epoch 3: 2 ranks on 1 host";
        let formed = serve(&mut job, if min == 1 { &[0] } else { &[0, 1] }, 25_000);
        assert_eq!(formed.iter().any(|said| said.starts_with(line)), min == 1, "{formed:?}");
    }
}

#[test]
fn a_host_without_a_working_daemon_is_left_out() {
    let mut job = running(|_| {});
    lose_rank_2(&mut job);
    let mut at = 1600;
    step(&mut job, Event::Waiting { node: 1, worker: 3 }, at);
    serve(&mut job, &[0], at + 10);
    daemon_ends(&mut job, 0, 0, at + 20);
    step(&mut job, Event::Waiting { node: 0, worker: 0 }, at + 30);
    let mut told = Vec::new();
    for attempt in 0.. {
        at += 10_000;
        told.extend(step(&mut job, Event::Tick, at));
        if told.iter().any(|line| line.starts_with("host b is left out")) {
            assert!(attempt > 2, "a port may be taken for a moment");
            break;
        }
        assert!(attempt < 10, "{told:?}");
        // The first daemon waits for the second one, which can't listen.
        step(&mut job, said(0, Role::Daemon, GRPC), at + 100);
        told.extend(daemon_ends(&mut job, 1, 1, at + 200));
        told.extend(step(&mut job, Event::Tick, at + 500));
        told.extend(step(&mut job, Event::Tick, at + 2600));
        told.extend(daemon_ends(&mut job, 0, 1, at + 2700));
    }
    let line = "host b is left out for 300 s: its daemon can't start";
    assert!(told.contains(&line.to_owned()), "{told:?}");
}

#[test]
fn a_replacement_joins_when_it_is_ready() {
    let mut job = running(|_| {});
    let commands = lose_rank_2(&mut job);
    let start = commands.iter().find_map(|command| match command {
        Command::Order { node, order: Order::Start(start) } if start.role != Role::Daemon => {
            Some((*node, start.clone()))
        }
        _ => None,
    });
    let (node, start) = start.expect("the other slot of host b is free");
    assert_eq!((node, start.role), (1, Role::Rank(3)));
    assert_eq!(start.environment["GRADWIRE_WORKER"], "3");
    assert!(!start.environment.contains_key("GRADWIRE_RANK"));
    assert!(!start.environment.contains_key("LOCAL_RANK"));
    serve(&mut job, &[0], 1600);
    started(&mut job, 1, 3, 1700);
    let orders = step(&mut job, Event::Waiting { node: 1, worker: 3 }, 1800);
    assert_eq!(orders, ["0:Notify { notice: Changed { added: true, removed: false } }"]);
    // The ranks leave together.
    assert!(daemon_ends(&mut job, 0, 0, 2000).is_empty(), "the job may have ended");
    let orders = step(&mut job, Event::Waiting { node: 0, worker: 1 }, 2010);
    assert_eq!(orders, ["0:start the daemon"], "it has not");
    let commands = job.step(said(0, Role::Daemon, GRPC), ms(2020));
    assert_eq!(daemons(&commands)[&1]["GRADWIRE_WORKERS"], "3");
    assert_eq!(daemons(&commands)[&1]["GRADWIRE_SURVIVORS"], "0");
    let line = "epoch 3: 3 ranks on 2 hosts, 0.0 s after ranks came";
    assert_eq!(step(&mut job, serving(1), 2030), [line]);
}

#[test]
fn a_newcomer_that_starts_slowly_stops_nobody() {
    let mut job = running(|_| {});
    lose_rank_2(&mut job);
    serve(&mut job, &[0], 1600);
    for at in [11_000, 12_000, 60_000] {
        assert!(step(&mut job, Event::Tick, at).is_empty(), "{at}");
    }
    // It hangs.
    assert!(job.deadline().is_some_and(|at| at <= ms(61_500)), "WAIT");
    let line = "rank 3 on host b has not called init() within 60 s (--elastic-timeout), and is \
                ended";
    assert_eq!(step(&mut job, Event::Tick, 61_500), [line, "1:Kill { role: Rank(3) }"]);
    assert!(step(&mut job, Event::Tick, 62_000).is_empty(), "once");
    let line = "rank 3 on host b did not respond and was killed by the launcher before it joined \
                the job; its slot is used again in 1 s";
    assert_eq!(rank_ends(&mut job, 1, 3, KILLED, 62_100), [line, "1:start rank 4"]);
}

#[test]
fn an_epoch_that_a_rank_missed_did_not_last() {
    let mut job = running(|rules| (rules.min, rules.timeout) = (3, ms(20_000)));
    lose_rank_2(&mut job);
    for (worker, at) in (3..).zip([2000, 12_000, 22_000]) {
        let waits = step(&mut job, Event::Waiting { node: 1, worker }, at);
        if at > 21_000 {
            assert!(waits.contains(&"0:stop 3000".to_owned()), "{waits:?}");
            break;
        }
        assert!(waits.contains(&"0:start the daemon".to_owned()), "{at}: {waits:?}");
        serve(&mut job, &[0, 1], at + 100);
        // The newcomer is stopped before it joins.
        let failure = Failure::new(FailureKind::Timeout, "has not joined the job").host("b");
        let failure = failure.rank(Rank(2));
        let at = at + 8000;
        step(&mut job, said(0, Role::Daemon, &to_line(&ServiceReport::Failed { failure })), at);
        daemon_ends(&mut job, 0, 1, at + 10);
        daemon_ends(&mut job, 1, 1, at + 10);
        step(&mut job, Event::Tick, at + 300);
        rank_ends(&mut job, 1, worker, KILLED, at + 900);
        step(&mut job, Event::Tick, at + 1000);
    }
}

#[test]
fn a_slot_is_quarantined_for_longer_each_time() {
    let mut job = job_on("a:2", 2, |_| {});
    step(&mut job, ready(0), 20);
    serve(&mut job, &[0], 30);
    started(&mut job, 0, 0, 1000);
    started(&mut job, 0, 1, 1000);
    rank_ends(&mut job, 0, 1, KILLED, 1400);
    daemon_ends(&mut job, 0, 1, 1420);
    assert_eq!(step(&mut job, Event::Tick, 1620), ["0:start the daemon"]);
    serve(&mut job, &[0], 1700);
    assert!(step(&mut job, Event::Tick, 2399).is_empty());
    assert_eq!(job.deadline(), Some(ms(2400)));
    assert_eq!(step(&mut job, Event::Tick, 2400), ["0:start rank 2"]);
    let line = "rank 2 on host a ended with exit code 1 before it joined the job; its slot is used \
                again in 2 s";
    assert_eq!(rank_ends(&mut job, 0, 2, ProcessEnd::Code(1), 2500), [line]);
    assert_eq!(job.phase, Phase::Running, "it was not a member");
    assert_eq!(step(&mut job, Event::Tick, 4500), ["0:start rank 3"]);
}

#[test]
fn a_frozen_rank_is_killed() {
    let mut job = running(|_| {});
    step(&mut job, said(0, Role::Daemon, &failed(Some(2))), 1410);
    daemon_ends(&mut job, 0, 1, 1420);
    daemon_ends(&mut job, 1, 1, 1430);
    step(&mut job, Event::Tick, 1500);
    assert_eq!(job.phase, Phase::Ending);
    assert_eq!(step(&mut job, Event::Tick, 2000), ["1:Kill { role: Rank(2) }"]);
    let orders = rank_ends(&mut job, 1, 2, KILLED, 2010);
    assert_eq!(orders, ["1:start rank 3", "0:start the daemon"]);
}

#[test]
fn daemons_that_do_not_end_are_killed() {
    let mut job = running(|_| {});
    daemon_ends(&mut job, 0, 1, 1400);
    step(&mut job, said(1, Role::Daemon, &failed(None)), 1410);
    step(&mut job, Event::Tick, 1600);
    assert!(step(&mut job, Event::Tick, 2100).is_empty());
    assert_eq!(step(&mut job, Event::Tick, 3600), ["1:Kill { role: Daemon }"]);
    let orders = step(&mut job, exited(1, Role::Daemon, KILLED, 3610), 3610);
    assert_eq!(orders, ["0:start the daemon"], "not before (the fence)");
}

#[test]
fn a_silent_daemon_is_killed_early() {
    for (kind, host) in [(FailureKind::CoordinatorLost, "b"), (FailureKind::NodeLost, "a")] {
        let mut job = running(|_| {});
        let failure = Failure::new(kind, "it has been silent").host(host);
        step(&mut job, said(1, Role::Daemon, &to_line(&ServiceReport::Failed { failure })), 1400);
        daemon_ends(&mut job, 1, 1, 1410);
        step(&mut job, Event::Tick, 1610);
        assert_eq!(step(&mut job, Event::Tick, 2110), ["0:Kill { role: Daemon }"]);
    }
}

/// Nobody else notices it if it hosts the coordinator.
#[test]
fn a_daemon_that_all_ranks_have_left_is_killed() {
    let mut job = running(|_| {});
    for worker in [0, 1] {
        assert!(step(&mut job, Event::Waiting { node: 0, worker }, 2000).is_empty());
    }
    assert_eq!(job.deadline(), Some(ms(7000)));
    assert!(step(&mut job, Event::Tick, 6999).is_empty());
    assert_eq!(step(&mut job, Event::Tick, 7000), ["0:Kill { role: Daemon }"]);
    assert_eq!(job.deadline(), None, "once");
    let told = step(&mut job, exited(0, Role::Daemon, KILLED, 7010), 7010);
    assert!(told[0].contains("its process did not respond and was killed by the launcher"));
    daemon_ends(&mut job, 1, 1, 7020);
    assert_eq!(step(&mut job, Event::Tick, 7100), ["0:start the daemon"]);
}

#[test]
fn the_first_host_may_be_lost() {
    let mut job = running(|_| {});
    let lost = Event::Lost { node: 0, what: "gone".to_owned(), at: ms(1400) };
    step(&mut job, lost, 1400);
    step(&mut job, exited(1, Role::Daemon, ProcessEnd::Code(1), 1450), 1450);
    let commands = job.step(Event::Tick, ms(1500));
    let first = &daemons(&commands)[&1];
    assert_eq!((&*first["GRADWIRE_WORKERS"], &*first["GRADWIRE_COORDINATOR"]), ("2", "here"));
    let orders = serve(&mut job, &[1], 1600);
    let line = "epoch 2: 1 rank on 1 host, 0.2 s after the connection to host a was lost: gone";
    assert_eq!(orders[0], line);
    // The host is reached again after its quarantine, with a new number.
    assert_eq!(step(&mut job, Event::Tick, 2400), ["2:reach a"]);
    assert_eq!(step(&mut job, ready(2), 2500), ["2:start rank 4"]);
}

#[test]
fn too_few_ranks_wait_with_one_line() {
    let mut job = running(|rules| {
        rules.min = 3;
        rules.hosts[1].slots = 1;
    });
    let said = lose_rank_2(&mut job);
    let line = "the job needs 3 ranks (--min-np) and has 2: it waits up to 60 s for a slot in \
                quarantine, which is free in 1 s";
    assert_eq!(said, [Command::Say(line.to_owned())]);
    assert_eq!(step(&mut job, Event::Tick, 2400), ["1:start rank 3"]);
    let orders = step(&mut job, Event::Waiting { node: 1, worker: 3 }, 2600);
    assert_eq!(orders, ["0:start the daemon"]);
    assert_eq!(job.plan.size(), 3);
}

#[test]
fn a_job_without_enough_ranks_ends() {
    let mut job = running(|rules| {
        rules.min = 3;
        rules.hosts[1].slots = 1;
        rules.cooldown = (TIMEOUT * 2, TIMEOUT * 2);
    });
    lose_rank_2(&mut job);
    let orders = step(&mut job, Event::Tick, 1500 + 60_000);
    let line = "the job ends: no epoch with 3 ranks (--min-np) has formed and lasted within 60 s \
                (--elastic-timeout) after rank 2 on host b was killed by SIGKILL";
    assert_eq!(orders, [line, "0:stop 3000", "1:stop 3000"]);
    assert_eq!(stop_all(&mut job, 62_000).code, 137);
}

#[test]
fn a_host_that_is_no_longer_listed_leaves() {
    let mut job = running(|_| {});
    let orders = step(&mut job, Event::Listed(Ok(parse_list("b:2,c:4").unwrap())), 1400);
    let notify = |node: usize| {
        format!("{node}:Notify {{ notice: Changed {{ added: false, removed: true }} }}")
    };
    assert_eq!(orders, ["1:start rank 3", "2:reach c", &notify(0), &notify(1)]);
    assert!(daemon_ends(&mut job, 0, 0, 1500).is_empty());
    let orders = daemon_ends(&mut job, 1, 0, 1510);
    assert_eq!(orders, ["0:stop 3000"]);
    // Its ranks are asked to end, which is not a loss.
    rank_ends(&mut job, 0, 0, ProcessEnd::Signal(15), 1600);
    assert_eq!(step(&mut job, ready(2), 1700), ["2:start rank 4"]);
    let waits = step(&mut job, Event::Waiting { node: 1, worker: 2 }, 1800);
    assert_eq!(waits, ["1:start the daemon"]);
    let line = "epoch 2: 1 rank on 1 host, 0.3 s after ranks left";
    assert_eq!(serve(&mut job, &[1], 1810), [line], "one rank has not ended, but has left");
    assert!(rank_ends(&mut job, 0, 1, ProcessEnd::Signal(15), 1820).is_empty());
    step(&mut job, Event::Stopped { node: 0 }, 1820);
    let gone = Event::Lost { node: 0, what: "ended".to_owned(), at: ms(1830) };
    assert!(step(&mut job, gone, 1830).is_empty());
    let warned = step(&mut job, Event::Listed(Err("the script failed".to_owned())), 1900);
    assert_eq!(warned, ["the script failed; the last good list of hosts stays"]);
}

#[test]
fn a_drained_host_leaves_for_good() {
    let mut job = running(|_| {});
    let drain = |host: &str| Event::Requested(Request::Drain { host: host.to_owned() });
    let unknown = "the job has no host 'c'; its hosts are a, b";
    assert_eq!(step(&mut job, drain("c"), 1400), [format!("Err({unknown:?})")]);
    let orders = step(&mut job, drain("a"), 1400);
    let text = "the ranks of host a leave at their next commit";
    assert_eq!(orders[..2], [text.to_owned(), format!("Ok({text:?})")]);
    assert!(orders[2..].iter().any(|order| order.contains("removed: true")), "{orders:?}");
    let only = "host b is the only host of the job; add another one first";
    assert_eq!(step(&mut job, drain("b"), 1410), [format!("Err({only:?})")]);
    step(&mut job, Event::Listed(Ok(parse_list("a:2,b:2").unwrap())), 1420);
    daemon_ends(&mut job, 0, 0, 1500);
    assert_eq!(daemon_ends(&mut job, 1, 0, 1510), ["0:stop 3000"], "also if a script lists it");
}

#[test]
fn a_rank_that_is_asked_to_end_leaves() {
    let mut job = running(|rules| rules.hosts[1].slots = 1);
    let orders = step(&mut job, Event::Leaving { node: 1, worker: 2 }, 1400);
    let line = "rank 2 on host b was asked to end (SIGTERM), and leaves at the next commit";
    let notify = |node: usize| {
        format!("{node}:Notify {{ notice: Changed {{ added: false, removed: true }} }}")
    };
    assert_eq!(orders, [line.to_owned(), notify(0), notify(1)]);
    daemon_ends(&mut job, 0, 0, 1500);
    assert_eq!(daemon_ends(&mut job, 1, 0, 1510), ["1:End { role: Rank(2) }"]);
    step(&mut job, Event::Waiting { node: 0, worker: 0 }, 1520);
    let orders = serve(&mut job, &[0], 1530);
    assert_eq!(orders, ["epoch 2: 2 ranks on 1 host, 0.0 s after ranks left"]);
    // Its slot is not in quarantine.
    let orders = rank_ends(&mut job, 1, 2, ProcessEnd::Signal(15), 1540);
    assert_eq!(orders, ["1:start rank 3"]);
    assert_eq!(job.epochs.as_ref().unwrap().lost, 0);
}

#[test]
fn a_rank_may_be_asked_to_end_between_epochs() {
    let mut job = running(|rules| rules.min = 3);
    lose_rank_2(&mut job);
    assert_eq!(job.phase, Phase::Assembling, "its replacement starts");
    step(&mut job, Event::Waiting { node: 1, worker: 3 }, 1600);
    assert_eq!(job.phase, Phase::First);
    let mut job = running(|rules| {
        rules.min = 3;
        rules.hosts[1].slots = 1;
    });
    lose_rank_2(&mut job);
    assert_eq!(job.phase, Phase::Assembling);
    let orders = step(&mut job, Event::Leaving { node: 0, worker: 1 }, 1600);
    assert!(orders.contains(&"0:End { role: Rank(1) }".to_owned()), "{orders:?}");
    rank_ends(&mut job, 0, 1, ProcessEnd::Signal(15), 1610);
    let orders = step(&mut job, Event::Tick, 2400);
    assert!(orders.contains(&"1:start rank 4".to_owned()), "{orders:?}");
    for (node, worker) in [(0, 3), (1, 4)] {
        assert_eq!(job.phase, Phase::Assembling);
        step(&mut job, Event::Waiting { node, worker }, 2600);
    }
    assert_eq!((job.phase, job.plan.size()), (Phase::First, 3));
}

#[test]
fn spares_replace_a_lost_rank_at_once() {
    let mut job = running(|rules| rules.spares = 1);
    let spare = started(&mut job, 1, 2, 1010);
    assert!(spare.is_empty(), "it has been started: {:?}", job.processes.keys());
    assert!(job.processes.contains_key(&(1, Role::Rank(3))));
    assert!(step(&mut job, Event::Waiting { node: 1, worker: 3 }, 1300).is_empty());
    lose_rank_2(&mut job);
    assert_eq!(job.plan.size(), 3);
}

#[test]
fn a_newcomer_that_can_not_start_is_not_a_loss() {
    let mut job = running(|_| {});
    lose_rank_2(&mut job);
    serve(&mut job, &[0], 1600);
    let what = "rank 3 can't be started on host b: no memory".to_owned();
    let failed = Event::Failed { node: 1, role: Role::Rank(3), what };
    let line = "rank 3 can't be started on host b: no memory; its slot is used again in 1 s";
    assert_eq!(step(&mut job, failed, 1700), [line]);
    assert_eq!(job.phase, Phase::Running);
}

#[test]
fn a_newcomer_is_not_waited_for_at_the_end() {
    let mut job = running(|_| {});
    lose_rank_2(&mut job);
    serve(&mut job, &[0], 1600);
    started(&mut job, 1, 3, 1700);
    step(&mut job, Event::Waiting { node: 1, worker: 3 }, 1800);
    // The ranks end without having looked for changes.
    daemon_ends(&mut job, 0, 0, 2000);
    rank_ends(&mut job, 0, 0, ProcessEnd::Code(0), 2010);
    rank_ends(&mut job, 0, 1, ProcessEnd::Code(0), 2020);
    assert_eq!(job.phase, Phase::Leaving);
    let deadline = job.deadline().expect("WAIT");
    let orders = step(&mut job, Event::Tick, u64::try_from(deadline.as_millis()).unwrap());
    assert_eq!(orders, ["0:stop 3000", "1:stop 3000"]);
}

/// Its first SIGTERM means that it leaves alone.
#[test]
fn interrupted_ranks_need_not_leave_alone() {
    let mut job = running(|_| {});
    step(&mut job, Event::Interrupted { signal: 2 }, 1500);
    let orders = step(&mut job, Event::Leaving { node: 1, worker: 2 }, 1510);
    assert_eq!(orders, ["1:End { role: Rank(2) }"]);
}

/// Its processes are asked to end, too, and take a while.
#[test]
fn a_host_that_shuts_down_leaves_an_elastic_job() {
    let mut job = running(|_| {});
    let asked = Event::Asked { node: 1, what: "its agent received SIGTERM".into(), at: ms(1500) };
    step(&mut job, asked, 1500);
    step(&mut job, Event::Leaving { node: 1, worker: 2 }, 1501);
    daemon_ends(&mut job, 1, 1, 1510);
    daemon_ends(&mut job, 0, 1, 1520);
    assert_eq!(step(&mut job, Event::Tick, 1800), ["0:start the daemon"]);
    rank_ends(&mut job, 1, 2, ProcessEnd::Signal(15), 1810);
    step(&mut job, Event::Stopped { node: 1 }, 1820);
    let line = "epoch 2: 2 ranks on 1 host, 0.3 s after host b left the job: its agent received \
                SIGTERM";
    assert_eq!(serve(&mut job, &[0], 1830), [line]);
    assert!(step(&mut job, Event::Tick, 2400).is_empty(), "the host is in quarantine");
    let again = step(&mut job, Event::Tick, 2600);
    assert_eq!(again, ["2:reach b"]);
}

/// TELL: the others wait for it in vain, and the failure says in which call.
#[test]
fn a_rank_that_ends_too_early_is_named() {
    let mut job = running(|_| {});
    let left = Failure::left(Rank(2)).host("b").tensor("loss");
    let failed = to_line(&ServiceReport::Failed { failure: left });
    step(&mut job, said(0, Role::Daemon, failed.trim()), 1500);
    daemon_ends(&mut job, 1, 1, 1510);
    daemon_ends(&mut job, 0, 1, 1520);
    step(&mut job, Event::Tick, 1800);
    let orders = rank_ends(&mut job, 1, 2, ProcessEnd::Code(0), 1801);
    assert!(orders.contains(&"0:stop 3000".to_owned()), "{orders:?}");
    let report = stop_all(&mut job, 1900);
    let first = "gradwire: the job failed: rank 2 on host b, tensor 'loss': it has left the job";
    assert!(report.lines[0].starts_with(first) && report.code == 1, "{report:?}");
}
