//! Which of several reports and ends is the cause.

use super::*;

#[test]
fn the_first_rank_to_fail_decides() {
    let mut job = running();
    // Reported first, but later: it reacts to the other one.
    assert!(step(&mut job, exited(0, Role::Rank(0), ProcessEnd::Code(1), 1405), 1406).is_empty());
    assert!(step(&mut job, exited(1, Role::Rank(2), ProcessEnd::Signal(9), 1400), 1450).is_empty());
    assert!(step(&mut job, Event::Tick, 1606).is_empty(), "a daemon may yet report the cause");
    assert_eq!(step(&mut job, Event::Tick, 2606), ["0:stop 3000", "1:stop 3000"]);
    step(&mut job, exited(0, Role::Rank(1), ProcessEnd::Signal(15), 2610), 2610);
    let report = stop_all(&mut job, 2700);
    assert_eq!(report.code, 137);
    assert_eq!(
        report.lines[0],
        "gradwire: rank 2 on host b (pid 77) was killed by SIGKILL, 0.4 s after start; \
         the other ranks were stopped"
    );
}

#[test]
fn ranks_that_had_ended_were_not_stopped() {
    let mut job = running();
    for (node, rank) in [(0, 0), (0, 1)] {
        step(&mut job, exited(node, Role::Rank(rank), ProcessEnd::Code(0), 1500), 1500);
    }
    step(&mut job, exited(1, Role::Rank(2), ProcessEnd::Code(3), 1700), 1700);
    while job.phase != Phase::Stopping {
        let at = job.deadline().expect("WAIT");
        job.step(Event::Tick, at);
    }
    let first = &stop_all(&mut job, 5000).lines[0];
    assert!(first.ends_with(" ended with exit code 3, 0.7 s after start"), "{first}");
}

fn stopped_daemon(node: usize, at: u64, rank_failed: bool) -> Event {
    Event::DaemonStopped { node, pid: 71, at: ms(at), rank_failed }
}

#[test]
fn a_stopped_daemon_is_named_before_ranks() {
    let mut job = running();
    step(&mut job, exited(0, Role::Rank(0), ProcessEnd::Code(7), 1405), 1406);
    for at in [1407, 1410] {
        step(&mut job, stopped_daemon(0, at, true), at);
    }
    step(&mut job, Event::Tick, 1606);
    step(&mut job, Event::Tick, 2606);
    let report = stop_all(&mut job, 2700);
    assert_eq!(report.code, 1);
    assert_eq!(
        report.lines,
        ["gradwire: the daemon on host a (pid 71) did not respond: a signal or a debugger has \
          stopped it; the other ranks were stopped"]
    );
}

/// No rank fails: nothing waits for it. The other daemons miss its signs of life.
#[test]
fn a_stopped_daemon_of_an_idle_job_is_named() {
    for (kind, blamed, node) in
        [(FailureKind::CoordinatorLost, "b", 0), (FailureKind::NodeLost, "b", 1)]
    {
        let mut job = running();
        for at in [1500, 2500, 3500] {
            assert!(step(&mut job, stopped_daemon(node, at, false), at).is_empty(), "it may go on");
        }
        assert_eq!(job.phase, Phase::Running);
        let failure = Failure::new(kind, "it has been silent").host(blamed);
        let line = to_line(&ServiceReport::Failed { failure });
        step(&mut job, said(1 - node, Role::Daemon, &line), 4000);
        while job.phase != Phase::Stopping {
            let at = job.deadline().expect("WAIT");
            job.step(Event::Tick, at);
        }
        let host = ["a", "b"][node];
        let first = &stop_all(&mut job, 9000).lines[0];
        let expected = format!("gradwire: the daemon on host {host} (pid 71) did not respond: ");
        assert!(first.starts_with(&expected), "{first}");
    }
}

/// On one host nobody misses it.
#[test]
fn a_daemon_that_stays_stopped_is_named() {
    let mut job = running();
    let stopped = (1500..=3500).step_by(1000).chain((9000..=18_000).step_by(1000));
    for at in stopped {
        assert!(step(&mut job, stopped_daemon(0, at, false), at).is_empty(), "it may go on");
    }
    assert_eq!(job.phase, Phase::Running, "it went on in between");
    step(&mut job, stopped_daemon(0, 19_000, false), 19_000);
    while job.phase != Phase::Stopping {
        let at = job.deadline().expect("WAIT");
        job.step(Event::Tick, at);
    }
    let first = &stop_all(&mut job, 25_000).lines[0];
    assert!(
        first.starts_with("gradwire: the daemon on host a (pid 71) did not respond"),
        "{first}"
    );
}

#[test]
fn a_daemon_that_goes_on_is_not_blamed() {
    let mut job = running();
    step(&mut job, stopped_daemon(1, 1500, false), 1500);
    let failure = Failure::new(FailureKind::NodeLost, "its stream broke").host("b");
    let line = to_line(&ServiceReport::Failed { failure });
    step(&mut job, said(0, Role::Daemon, &line), 9000);
    while job.phase != Phase::Stopping {
        let at = job.deadline().expect("WAIT");
        job.step(Event::Tick, at);
    }
    assert!(stop_all(&mut job, 15_000).lines[0].contains("its stream broke"));
}

#[test]
fn a_daemon_that_repeats_our_order_is_no_cause() {
    let mut job = running();
    // It has left the job, so the daemons don't mind.
    step(&mut job, exited(1, Role::Rank(2), ProcessEnd::Code(3), 2000), 2000);
    while job.phase != Phase::Stopping {
        let at = job.deadline().expect("WAIT");
        job.step(Event::Tick, at);
    }
    let what = "gradwired was asked to end: the launcher ends the job";
    let failure = Failure::new(FailureKind::Cancelled, what).host("a");
    let line = to_line(&ServiceReport::Failed { failure });
    step(&mut job, said(0, Role::Daemon, &line), 4000);
    let report = stop_all(&mut job, 5000);
    assert_eq!(report.code, 3);
    let first = &report.lines[0];
    assert!(first.starts_with("gradwire: rank 2 on host b (pid 77) ended with exit code 3"));
}

#[test]
fn a_rank_that_blames_another_is_no_cause() {
    let failure = || {
        let what = "its process is lost: no heartbeat for 3.0 s";
        Failure::new(FailureKind::WorkerLost, what).rank(Rank(0)).host("a")
    };
    let noticed = |job: &mut Job| {
        step(job, Event::Consequence { node: 1, worker: 2, failure: failure() }, 1990);
        step(job, exited(1, Role::Rank(2), ProcessEnd::Code(1), 2000), 2000);
    };
    let mut job = running();
    noticed(&mut job);
    step(&mut job, exited(0, Role::Rank(0), ProcessEnd::Code(5), 2010), 2010);
    while job.phase != Phase::Stopping {
        let at = job.deadline().expect("WAIT");
        job.step(Event::Tick, at);
    }
    let report = stop_all(&mut job, 5000);
    assert_eq!(report.code, 5);
    assert!(report.lines[0].starts_with("gradwire: rank 0 on host a"), "{:?}", report.lines);
    // The other one does not end, because it is stopped.
    let mut job = running();
    noticed(&mut job);
    while job.phase != Phase::Stopping {
        let at = job.deadline().expect("WAIT");
        job.step(Event::Tick, at);
    }
    let report = stop_all(&mut job, 9000);
    let right = "gradwire: the job failed: rank 0 on host a: its process is lost: no heartbeat for \
                 3.0 s";
    assert_eq!((report.code, report.lines[0].as_str()), (1, right));
}

/// The daemons of a further job report nothing to the launcher, but the other ranks know.
#[test]
fn a_rank_at_fault_in_a_later_job_gets_time() {
    let noticed = || {
        let mut job = running();
        let mut failure = Failure::new(FailureKind::WorkerLost, "it ends").host("a").rank(Rank(0));
        failure.details.gave_up = true;
        step(&mut job, Event::Consequence { node: 1, worker: 2, failure }, 1990);
        step(&mut job, exited(1, Role::Rank(2), ProcessEnd::Code(1), 2000), 2000);
        let limit = |job: &Job| job.deadline().expect("WAIT").as_millis() as u64;
        while !job.awaited {
            let at = limit(&job);
            assert!(step(&mut job, Event::Tick, at).is_empty(), "rank 0 is still ending");
        }
        let at = limit(&job);
        (job, at)
    };
    let (mut job, limit) = noticed();
    let orders = step(&mut job, exited(0, Role::Rank(0), ProcessEnd::Code(5), limit - 1), limit);
    assert_eq!(orders, ["0:stop 3000", "1:stop 3000"], "nobody else is waited for");
    let report = stop_all(&mut job, limit);
    assert_eq!(report.code, 5);
    assert!(report.lines[0].starts_with("gradwire: rank 0 on host a"), "{:?}", report.lines);
    let (mut job, limit) = noticed();
    assert_eq!(step(&mut job, Event::Tick, limit).len(), 2, "WAIT: the wait is limited");
}

/// A job that a rank forms after `shutdown()` needs all ranks.
#[test]
fn a_rank_is_absent_from_a_further_job() {
    let forms = |node, worker| Event::Forming { node, worker };
    let leaves = |at| exited(1, Role::Rank(2), ProcessEnd::Code(0), at);
    let absent = |mut job: Job| {
        assert_eq!(job.phase, Phase::Gathering);
        while job.phase != Phase::Stopping {
            let at = job.deadline().expect("WAIT");
            job.step(Event::Tick, at);
        }
        stop_all(&mut job, 5000)
    };
    for leaves_first in [true, false] {
        let mut job = running();
        let mut events = [leaves(2000), forms(0, 0)];
        if !leaves_first {
            events.reverse();
        }
        for event in events {
            assert_eq!(job.phase, Phase::Running);
            step(&mut job, event, 2000);
        }
        let report = absent(job);
        assert_eq!(report.code, 1);
        let right = "gradwire: rank 2 on host b has ended, but rank 0, which has called init() \
                     again, waits for it; the other ranks were stopped";
        assert_eq!(report.lines[0], right);
    }
    // All ranks have formed a second job, and the first has ended after it.
    let mut job = running();
    for (node, worker) in [(0, 0), (0, 1), (1, 2)] {
        step(&mut job, forms(node, worker), 2000);
    }
    step(&mut job, leaves(3000), 3000);
    assert_eq!(job.phase, Phase::Running);
    // It is not there for a third.
    step(&mut job, forms(0, 1), 3100);
    let report = absent(job);
    assert!(report.lines[0].contains("but rank 1, which has called init()"), "{report:?}");
}

/// The reason that the daemon of host `b` has reported goes before its end.
#[track_caller]
fn assert_why_and_daemon(report: &JobReport, why: &str) {
    let [first, second, ..] = &report.lines[..] else { panic!("{report:?}") };
    assert_eq!(*first, format!("gradwire: the job failed: host b: {why}"));
    let daemon = "gradwire: the daemon on host b (pid 77) ended with exit code 2";
    assert!(second.starts_with(daemon), "{second}");
}

#[test]
fn the_cause_may_be_reported_late() {
    // The ranks of b end because its daemon, which is slow to report, refused them.
    let begun = || {
        let mut job = running();
        step(&mut job, exited(1, Role::Rank(2), ProcessEnd::Code(1), 1400), 1400);
        assert!(step(&mut job, Event::Tick, 1600).is_empty());
        job
    };
    let mut job = begun();
    let failure = Failure::new(FailureKind::Resource, "no thread").host("b");
    let blame = to_line(&ServiceReport::Failed { failure });
    step(&mut job, said(1, Role::Daemon, &blame), 2000);
    assert!(step(&mut job, Event::Tick, 2200).is_empty(), "it is ending");
    assert!(step(&mut job, exited(1, Role::Daemon, ProcessEnd::Code(2), 2300), 2300).is_empty());
    let orders = step(&mut job, Event::Tick, 3000);
    assert_eq!(orders, ["0:stop 3000", "1:stop 3000"]);
    assert_why_and_daemon(&stop_all(&mut job, 2400), "no thread");

    let mut job = begun();
    for node in 0..2 {
        step(&mut job, exited(node, Role::Daemon, ProcessEnd::Signal(9), 1700), 1700);
    }
    assert_eq!(step(&mut job, Event::Tick, 1900).len(), 2, "no daemon is left to report");
}

#[test]
fn an_exit_code_may_come_after_a_rank_gave_up() {
    for (gave_up, code) in [(true, 3), (false, 1)] {
        let mut job = running();
        let mut failure = Failure::new(FailureKind::WorkerLost, "it ends").host("a").rank(Rank(1));
        failure.details.gave_up = gave_up;
        step(&mut job, said(0, Role::Daemon, &to_line(&ServiceReport::Failed { failure })), 1400);
        for at in [1600, 5000] {
            step(&mut job, Event::Tick, at);
        }
        assert_eq!(step(&mut job, Event::Tick, 9000), ["0:stop 3000", "1:stop 3000"]);
        step(&mut job, exited(0, Role::Rank(1), ProcessEnd::Code(3), 9500), 9500);
        assert_eq!(stop_all(&mut job, 9600).code, code, "the others end because they are asked to");
    }
}

#[test]
fn the_rank_at_fault_gets_time_to_end() {
    let mut job = running();
    let blame = said(0, Role::Daemon, &failed(Some(1)));
    assert!(step(&mut job, blame, 1400).is_empty());
    assert!(step(&mut job, exited(0, Role::Daemon, ProcessEnd::Code(1), 1405), 1406).is_empty());
    assert!(step(&mut job, Event::Tick, 1606).is_empty(), "rank 1 is still ending");
    let orders = step(&mut job, exited(0, Role::Rank(1), ProcessEnd::Code(3), 2500), 2501);
    assert_eq!(orders, ["0:stop 3000", "1:stop 3000"], "nobody else is waited for");
    let report = stop_all(&mut job, 2600);
    assert_eq!(report.code, 3);
    assert!(report.lines[0].starts_with("gradwire: rank 1 on host a (pid 77) ended with exit"));

    let mut job = running();
    step(&mut job, said(0, Role::Daemon, &failed(Some(1))), 1400);
    step(&mut job, exited(0, Role::Daemon, ProcessEnd::Code(1), 1405), 1406);
    step(&mut job, Event::Tick, 1606);
    let orders = step(&mut job, Event::Tick, 4606);
    assert_eq!(orders.len(), 2, "WAIT: the wait for a rank that does not end is limited");
}

#[test]
fn notified_ranks_get_time_to_report() {
    let notified = || {
        let mut job = running();
        step(&mut job, exited(0, Role::Rank(1), ProcessEnd::Code(5), 1400), 1400);
        step(&mut job, said(0, Role::Daemon, &failed(Some(1))), 1450);
        assert!(step(&mut job, Event::Tick, 1600).is_empty(), "ranks 0 and 2 may report it");
        assert!(
            step(&mut job, exited(0, Role::Rank(0), ProcessEnd::Code(8), 1700), 1700).is_empty()
        );
        job
    };
    let mut job = notified();
    let orders = step(&mut job, exited(1, Role::Rank(2), ProcessEnd::Code(8), 1800), 1800);
    assert_eq!(orders, ["0:stop 3000", "1:stop 3000"], "all have reported");
    assert_eq!(stop_all(&mut job, 1900).code, 5);
    let mut job = notified();
    assert_eq!(job.deadline(), Some(ms(2450)), "WAIT");
    assert_eq!(step(&mut job, Event::Tick, 2450), ["0:stop 3000", "1:stop 3000"]);
    assert_eq!(stop_all(&mut job, 2500).code, 5);
}

#[test]
fn a_failed_job_whose_processes_run_on_is_ended() {
    // The daemon waits for rank 2, which has not attached yet.
    let mut job = running();
    step(&mut job, said(0, Role::Daemon, &failed(None)), 1400);
    assert!(step(&mut job, Event::Tick, 4500).is_empty(), "they may still end by themselves");
    assert_eq!(job.deadline(), Some(ms(4600)), "WAIT");
    assert_eq!(step(&mut job, Event::Tick, 4600), ["0:stop 3000", "1:stop 3000"]);
    let report = stop_all(&mut job, 4700);
    assert_eq!(report.code, 1);
    assert_eq!(report.lines, ["gradwire: the job failed: host a: its process has ended"]);
}

#[test]
fn a_daemon_at_fault_gets_time_to_end() {
    let what = "the data plane can't be started";
    let failure = Failure::new(FailureKind::Resource, what).host("b");
    let mut job = running();
    step(&mut job, said(0, Role::Daemon, &to_line(&ServiceReport::Failed { failure })), 1400);
    step(&mut job, exited(0, Role::Rank(0), ProcessEnd::Code(1), 1405), 1406);
    step(&mut job, exited(0, Role::Daemon, ProcessEnd::Code(1), 1410), 1411);
    assert!(step(&mut job, Event::Tick, 1606).is_empty(), "the daemon of b is still ending");
    let orders = step(&mut job, exited(1, Role::Daemon, ProcessEnd::Code(2), 3900), 3901);
    assert_eq!(orders, ["0:stop 3000", "1:stop 3000"], "nobody else is waited for");
    let report = stop_all(&mut job, 4000);
    assert_eq!(report.code, 1);
    assert_why_and_daemon(&report, what);
}

#[test]
fn a_stopped_daemon_does_not_report_the_cause() {
    let report = |what: &str, host: &str| {
        let failure = Failure::new(FailureKind::CoordinatorLost, what).host(host);
        to_line(&ServiceReport::Failed { failure })
    };
    let mut job = running();
    step(&mut job, said(1, Role::Daemon, &report("no answer from the coordinator", "b")), 1400);
    step(&mut job, exited(1, Role::Daemon, ProcessEnd::Code(1), 1405), 1406);
    assert!(step(&mut job, Event::Tick, 1606).is_empty());
    assert_eq!(step(&mut job, Event::Tick, 2400), ["0:stop 3000", "1:stop 3000"]);
    step(&mut job, said(0, Role::Daemon, &report("gradwired was asked to end", "a")), 2410);
    let lines = stop_all(&mut job, 1700).lines;
    assert!(lines[0].ends_with("host b: no answer from the coordinator"), "{lines:?}");
}
