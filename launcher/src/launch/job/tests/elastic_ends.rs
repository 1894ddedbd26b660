//! How an elastic job ends: at a limit, without enough ranks, or with ranks that leave it.

use super::{
    elastic::{KILLED, daemon_ends, daemons, lose_rank_2, rank_ends, running, serve},
    *,
};

#[test]
fn a_failure_of_the_program_ends_the_job() {
    let mut job = running(|_| {});
    let failure = Failure::new(FailureKind::Disagreement, "the ranks disagree").tensor("w");
    step(&mut job, said(0, Role::Daemon, &to_line(&ServiceReport::Failed { failure })), 1400);
    daemon_ends(&mut job, 0, 1, 1410);
    daemon_ends(&mut job, 1, 1, 1420);
    assert_eq!(step(&mut job, Event::Tick, 1620), [] as [&str; 0], "the ranks report it");
    assert_eq!(step(&mut job, Event::Tick, 2400), ["0:stop 3000", "1:stop 3000"]);
}

#[test]
fn the_reset_limit_ends_the_job() {
    let mut job = running(|rules| rules.reset_limit = Some(1));
    lose_rank_2(&mut job);
    serve(&mut job, &[0], 1600);
    rank_ends(&mut job, 0, 1, KILLED, 1700);
    daemon_ends(&mut job, 0, 1, 1710);
    let orders = step(&mut job, Event::Tick, 2000);
    let line = "the job has continued 1 time after losses and changes, and --reset-limit allows no \
                more";
    assert_eq!(orders, [line, "0:stop 3000", "1:stop 3000"]);
    let mut job = running(|rules| rules.reset_limit = Some(0));
    let said: Vec<_> = lose_rank_2(&mut job).into_iter().filter_map(said_by).collect();
    assert_eq!(said, ["the job ends at its first loss: --reset-limit is 0"]);
}

/// All ranks leave the epoch, and nobody has ordered that. What the launcher does then.
fn leave_by_themselves(job: &mut Job, at: u64) -> Vec<String> {
    let mut orders = Vec::new();
    for (node, worker) in [(0, 0), (0, 1), (1, 2)] {
        orders.extend(step(job, Event::Waiting { node, worker }, at));
    }
    for node in [0, 1] {
        orders.extend(daemon_ends(job, node, 0, at + 10));
    }
    orders
}

#[test]
fn epochs_that_nobody_has_ended_count_as_short() {
    let mut job = running(|rules| (rules.min, rules.timeout) = (2, ms(10_000)));
    let (mut at, mut pauses) = (2000, 0);
    let orders = loop {
        let mut orders = leave_by_themselves(&mut job, at);
        if orders.is_empty() {
            let pause = job.deadline().expect("WAIT").as_millis() as u64;
            assert!(pause > at + 10 && pause <= at + 5010);
            assert!(step(&mut job, Event::Tick, pause - 1).is_empty());
            (at, pauses) = (pause, pauses + 1);
            orders = step(&mut job, Event::Tick, at);
        }
        if orders != ["0:start the daemon"] {
            break orders;
        }
        serve(&mut job, &[0, 1], at + 100);
        at += 500;
        assert!(at < 13_000, "{orders:?}");
    };
    assert!(pauses >= 4, "{pauses}");
    assert_eq!(orders, ["0:stop 3000", "1:stop 3000"]);
    let report = stop_all(&mut job, at + 100);
    let line = "error: no epoch with 2 ranks (--min-np) has formed and lasted within 10 s \
                (--elastic-timeout) after all ranks left";
    assert_eq!(report.lines[0], line);
    assert!(report.lines[1].starts_with("hint: see why the epochs above"), "{report:?}");
}

#[test]
fn epochs_that_last_may_be_left_at_any_time() {
    let mut job = running(|rules| rules.timeout = ms(10_000));
    for at in [7000, 13_000, 19_000, 25_000] {
        assert_eq!(leave_by_themselves(&mut job, at), ["0:start the daemon"], "at once");
        serve(&mut job, &[0, 1], at + 100);
    }
}

#[test]
fn the_reset_limit_counts_epochs_ranks_leave() {
    let mut job = running(|rules| rules.reset_limit = Some(1));
    assert_eq!(leave_by_themselves(&mut job, 2000), ["0:start the daemon"]);
    serve(&mut job, &[0, 1], 2100);
    assert_eq!(leave_by_themselves(&mut job, 2500), ["0:stop 3000", "1:stop 3000"]);
    let report = stop_all(&mut job, 2600);
    let line = "error: the job has continued 1 time after losses and changes, and --reset-limit \
                allows no more";
    assert_eq!((report.code, &*report.lines[0]), (1, line));
}

/// It has joined, and does not call its function.
fn stay_away(job: &mut Job, rank: u32, at: u64) {
    let failure = Failure::new(FailureKind::Timeout, "it has not come to the function");
    let failure = failure.host("b").rank(Rank(rank));
    step(job, said(0, Role::Daemon, &to_line(&ServiceReport::Failed { failure })), at);
    daemon_ends(job, 0, 1, at + 10);
    daemon_ends(job, 1, 1, at + 10);
    step(job, Event::Tick, at + 300);
}

#[test]
fn others_go_on_without_a_rank_that_stays_away() {
    let mut job = running(|rules| rules.min = 2);
    lose_rank_2(&mut job);
    serve(&mut job, &[0], 1600);
    step(&mut job, Event::Waiting { node: 1, worker: 3 }, 1800);
    daemon_ends(&mut job, 0, 0, 2000);
    step(&mut job, Event::Waiting { node: 0, worker: 1 }, 2010);
    serve(&mut job, &[0, 1], 2100);
    let late = 2100 + 60_000;
    stay_away(&mut job, 2, late);
    assert_eq!(step(&mut job, Event::Tick, late + 900), ["1:Kill { role: Rank(3) }"]);
    let orders = rank_ends(&mut job, 1, 3, KILLED, late + 910);
    assert!(orders.contains(&"0:start the daemon".to_owned()), "{orders:?}");
    let line = "epoch 4: 2 ranks on 1 host, 1.0 s after rank 3 on host b: it has not come to the \
                function";
    assert_eq!(serve(&mut job, &[0], late + 1000), [line]);
}

fn said_by(command: Command) -> Option<String> {
    if let Command::Say(text) = command { Some(text) } else { None }
}

#[test]
fn too_many_lost_daemons_end_the_job() {
    let lose_daemon = |job: &mut Job, at: u64| {
        step(job, exited(1, Role::Daemon, KILLED, at), at);
        daemon_ends(job, 0, 1, at + 10);
        step(job, Event::Tick, at + 100)
    };
    let mut job = running(|rules| rules.restarts = 1);
    assert_eq!(lose_daemon(&mut job, 1400), ["0:start the daemon"]);
    serve(&mut job, &[0, 1], 1600);
    let orders = lose_daemon(&mut job, 9000);
    let line = "the job has continued 1 time after losses of daemons, and recovery.restarts allows \
                no more; the same job may succeed if it is started again";
    assert_eq!(orders, [line, "0:stop 3000", "1:stop 3000"]);
    assert_eq!(stop_all(&mut job, 9200).code, 75);
    // With a rank, something else was lost.
    let mut job = running(|rules| rules.restarts = 0);
    assert!(!lose_rank_2(&mut job).is_empty());
    assert_ne!(job.phase, Phase::Stopping);
}

#[test]
fn losses_while_an_epoch_forms_are_survived() {
    let mut job = running(|_| {});
    lose_rank_2(&mut job);
    // The daemon has not served yet.
    rank_ends(&mut job, 0, 1, KILLED, 1550);
    daemon_ends(&mut job, 0, 1, 1560);
    let orders = step(&mut job, Event::Tick, 1600);
    assert!(orders.is_empty(), "{orders:?}");
    let orders = job.step(Event::Tick, ms(1800));
    assert_eq!(daemons(&orders)[&0]["GRADWIRE_EPOCH"], "3");
    assert_eq!(daemons(&orders)[&0]["GRADWIRE_WORKERS"], "0");
}

#[test]
fn the_last_survivor_ends_the_job() {
    let mut job = running(|_| {});
    for (node, worker) in [(0, 0), (0, 1), (1, 2)] {
        rank_ends(&mut job, node, worker, ProcessEnd::Code(3), 1400 + u64::from(worker));
    }
    daemon_ends(&mut job, 0, 1, 1420);
    daemon_ends(&mut job, 1, 1, 1420);
    step(&mut job, Event::Tick, 1620);
    step(&mut job, Event::Tick, 2620);
    assert_eq!(stop_all(&mut job, 2700).code, 3);
}

#[test]
fn a_job_that_all_old_ranks_leave_has_a_hint() {
    let mut job = running(|_| {});
    for (node, worker) in [(0, 0), (0, 1), (1, 2)] {
        step(&mut job, Event::Leaving { node, worker }, 2000);
    }
    daemon_ends(&mut job, 0, 0, 2010);
    let orders = daemon_ends(&mut job, 1, 0, 2020);
    assert!(orders.contains(&"0:stop 3000".to_owned()), "{orders:?}");
    let report = stop_all(&mut job, 2100);
    assert_eq!(report.lines[0], "error: all processes that were in the job have ended");
    assert!(report.lines[1].starts_with("hint: start the job again; a state"), "{report:?}");
}

#[test]
fn no_epoch_forms_after_a_rank_has_succeeded() {
    let mut job = running(|_| {});
    rank_ends(&mut job, 0, 0, ProcessEnd::Code(0), 1300);
    assert_eq!(lose_rank_2(&mut job).len(), 0, "rank 1 reports it");
    assert_eq!(step(&mut job, Event::Tick, 2410), ["0:stop 3000", "1:stop 3000"]);
    assert_eq!(stop_all(&mut job, 2700).code, 137);
}

#[test]
fn a_rank_that_leaves_alone_ends_the_job() {
    let mut job = running(|_| {});
    step(&mut job, Event::Waiting { node: 0, worker: 0 }, 1200);
    rank_ends(&mut job, 0, 1, ProcessEnd::Code(0), 1300);
    step(&mut job, Event::Waiting { node: 1, worker: 2 }, 1310);
    daemon_ends(&mut job, 1, 0, 1320);
    let orders = daemon_ends(&mut job, 0, 0, 1330);
    assert_eq!(orders, ["0:stop 3000", "1:stop 3000"], "they wait in vain");
    let report = stop_all(&mut job, 1400);
    let first = "error: rank 1 on host a has ended without an error, and the other ranks need it";
    assert_eq!((report.code, report.lines[0].as_str()), (1, first));
    assert!(report.lines[1].starts_with("hint: every rank must make the same calls"));
}

#[test]
fn the_call_of_waiting_ranks_is_reported() {
    let mut job = running(|_| {});
    let what = "it has left the job and can't take part any more";
    let failure = Failure::new(FailureKind::RankLeft, what).rank(Rank(1)).tensor("loss");
    step(&mut job, Event::Consequence { node: 0, worker: 0, failure }, 1190);
    step(&mut job, Event::Waiting { node: 0, worker: 0 }, 1200);
    step(&mut job, Event::Waiting { node: 1, worker: 2 }, 1210);
    daemon_ends(&mut job, 1, 0, 1220);
    daemon_ends(&mut job, 0, 0, 1230);
    let orders = rank_ends(&mut job, 0, 1, ProcessEnd::Code(0), 1330);
    assert!(orders.contains(&"0:stop 3000".to_owned()), "{orders:?}");
    let report = stop_all(&mut job, 1400);
    assert_eq!(report.code, 1);
    assert!(report.lines[0].contains("rank 1"), "{:?}", report.lines);
    assert!(report.lines[0].contains("'loss'"), "{:?}", report.lines);
}

#[test]
fn a_rank_that_is_about_to_end_is_awaited() {
    let left = || {
        let mut job = running(|_| {});
        let failure = Failure::new(FailureKind::RankLeft, "it has left the job").rank(Rank(1));
        step(&mut job, Event::Consequence { node: 0, worker: 0, failure }, 1190);
        step(&mut job, Event::Waiting { node: 0, worker: 0 }, 1200);
        step(&mut job, Event::Waiting { node: 1, worker: 2 }, 1210);
        daemon_ends(&mut job, 1, 0, 1220);
        assert!(daemon_ends(&mut job, 0, 0, 1230).is_empty());
        assert!(step(&mut job, Event::Tick, 2000).is_empty(), "rank 1 may end or join again");
        job
    };
    let orders = rank_ends(&mut left(), 0, 1, ProcessEnd::Code(0), 2100);
    assert!(orders.contains(&"0:stop 3000".to_owned()), "{orders:?}");
    let orders = step(&mut left(), Event::Waiting { node: 0, worker: 1 }, 2100);
    assert!(orders.contains(&"0:start the daemon".to_owned()), "{orders:?}");
    let orders = rank_ends(&mut left(), 0, 1, ProcessEnd::Code(3), 2100);
    assert!(orders.contains(&"0:start the daemon".to_owned()), "{orders:?}");
}

/// All daemons have ended, because all ranks had left.
fn left(job: &mut Job) {
    daemon_ends(job, 1, 0, 1320);
    daemon_ends(job, 0, 0, 1330);
}

#[test]
fn a_loss_after_all_have_left_ends_nobody() {
    let mut job = running(|_| {});
    left(&mut job);
    assert!(rank_ends(&mut job, 1, 2, KILLED, 1400).is_empty());
    let orders = step(&mut job, Event::Tick, 1700);
    let said = "all ranks had left the job before, so the others end by themselves";
    assert!(orders.len() == 1 && orders[0].ends_with(said), "{orders:?}");
    // A second loss, and much later the last work of the others is done.
    assert!(rank_ends(&mut job, 0, 1, KILLED, 60_000).is_empty());
    assert!(step(&mut job, Event::Tick, 600_000).is_empty());
    rank_ends(&mut job, 0, 0, ProcessEnd::Code(0), 900_000);
    step(&mut job, Event::Tick, 900_400);
    let report = stop_all(&mut job, 900_500);
    assert_eq!(report.code, 137);
    assert!(report.lines[0].starts_with("gradwire: rank 2 on host b"), "{:?}", report.lines);
}

#[test]
fn a_rank_that_joins_again_gets_an_epoch() {
    let mut job = running(|_| {});
    left(&mut job);
    rank_ends(&mut job, 1, 2, KILLED, 1400);
    step(&mut job, Event::Tick, 1700);
    let orders = step(&mut job, Event::Waiting { node: 0, worker: 0 }, 1800);
    assert!(orders.contains(&"0:start the daemon".to_owned()), "{orders:?}");
}

#[test]
fn ranks_may_end_between_epochs() {
    let mut job = running(|_| {});
    lose_rank_2(&mut job);
    assert_eq!(rank_ends(&mut job, 0, 0, ProcessEnd::Code(0), 1550), ["0:Kill { role: Daemon }"]);
    let orders = rank_ends(&mut job, 0, 1, ProcessEnd::Code(0), 1560);
    assert_eq!(orders, ["the job has succeeded; 1 rank was lost"]);
    step(&mut job, Event::Tick, 1900);
    assert_eq!(stop_all(&mut job, 2000).code, 0);
}

#[test]
fn a_daemon_that_was_not_needed_is_no_cause() {
    let mut job = running(|_| {});
    lose_rank_2(&mut job);
    assert_eq!(rank_ends(&mut job, 0, 0, ProcessEnd::Code(0), 1550), ["0:Kill { role: Daemon }"]);
    rank_ends(&mut job, 0, 1, ProcessEnd::Code(0), 1560);
    // It was killed for the job's end, which is seen first.
    step(&mut job, exited(0, Role::Daemon, ProcessEnd::Signal(9), 1570), 1570);
    step(&mut job, Event::Tick, 1900);
    let report = stop_all(&mut job, 2000);
    assert_eq!((report.code, report.lines), (0, Vec::<String>::new()));
}

#[test]
fn a_rank_that_gave_up_gets_time_to_end() {
    let mut job = running(|_| {});
    let failure = Failure::new(FailureKind::WorkerLost, "gave up: it ended with exit code 3");
    let failure = failure.host("b").rank(Rank(2)).gave_up();
    step(&mut job, said(0, Role::Daemon, &to_line(&ServiceReport::Failed { failure })), 1400);
    daemon_ends(&mut job, 0, 1, 1410);
    daemon_ends(&mut job, 1, 1, 1420);
    step(&mut job, Event::Tick, 1620);
    assert!(step(&mut job, Event::Tick, 6000).is_empty(), "it is still cleaning up");
    let orders = rank_ends(&mut job, 1, 2, ProcessEnd::Code(3), 6100);
    assert!(orders.contains(&"0:start the daemon".to_owned()), "{orders:?}");
}
