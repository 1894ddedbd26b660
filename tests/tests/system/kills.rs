//! Each process of a job is killed, and stopped, at every relevant moment. Every remaining rank is
//! notified in time which process it was (TELL), the launcher reports it, too, and nothing remains
//! (CLEAN).
//!
//! The ranks ignore SIGTERM, so that their reports come from Gradwire. Otherwise the launcher would
//! end them first: it asks the others to end soon after the first rank has ended.

use std::{thread::sleep, time::Duration};

use gradwire_tests::launched::{Job, Launch, Report, now_us, processes::Role, send_signal};
use rustix::process::Signal;

/// The worlds of these tests: the number of ranks, and the hosts.
const ONE_NODE: (u32, &str) = (3, "127.0.0.1:3");
const TWO_NODES: (u32, &str) = (4, "127.0.0.1:2,127.0.0.2:2");

fn start((ranks, hosts): (u32, &str), steps: &[&str]) -> Job {
    let steps = [&["deaf"], steps].concat();
    // A node that is silent for longer than `heartbeat.timeout_ms` is not waited for.
    let launch = Launch::new().ranks(ranks).hosts(hosts).set("recovery.return_timeout_ms=3000");
    launch.rank(&steps).start()
}

/// All ranks except this one.
fn others(world: (u32, &str), gone: u32) -> Vec<u32> {
    (0..world.0).filter(|rank| *rank != gone).collect()
}

/// Asserts that the death of rank 1 was reported everywhere.
#[track_caller]
fn assert_rank_1_killed(report: &Report, world: (u32, &str), fault: u64, tensor: &str) {
    let place = format!("rank 1 on host 127.0.0.1{tensor}");
    let what = ") was killed by SIGKILL without leaving the job";
    report.assert_notified(&others(world, 1), fault, &[&place, "its process (pid ", what]);
    report.assert_code(128 + 9);
    report.assert_verdict(&["gradwire: rank 1 on host 127.0.0.1 (pid ", "was killed by SIGKILL"]);
}

#[test]
fn a_worker_is_killed_before_and_after_it_worked() {
    for world in [ONE_NODE, TWO_NODES] {
        for before in [&["attach"][..], &["attach", "loop:3:1000"]] {
            let steps = [before, &["say:idle", "until:go", "submit:1:1000", "leave"]].concat();
            let mut job = start(world, &steps);
            job.until_said("said", world.0 as usize);
            let fault = job.signal(Role::Rank(1), Signal::KILL);
            // The others notice it with their next call.
            job.allow("go");
            assert_rank_1_killed(&job.finish(), world, fault, "");
        }
    }
}

#[test]
fn a_worker_is_killed_while_others_wait_for_it() {
    for world in [ONE_NODE, TWO_NODES] {
        let mut job = start(world, &["attach", "!1/submit:2:1000", "1/say:idle", "1/hang"]);
        job.until_said("submitted", world.0 as usize - 1);
        job.until_said("said", 1);
        let fault = job.signal(Role::Rank(1), Signal::KILL);
        assert_rank_1_killed(&job.finish(), world, fault, "");
    }
}

/// The daemon learns at the same time how the worker ended and that all ranks must end.
#[test]
fn a_killed_worker_is_the_cause() {
    // The daemon may also stop between the end of the connection and the report of its agent.
    for is_stopped_first in [true, false] {
        let mut job = start(ONE_NODE, &["attach", "!1/submit:2:1000", "1/say:idle", "1/hang"]);
        job.until_said("submitted", 2);
        job.until_said("said", 1);
        if is_stopped_first {
            job.signal(Role::Daemon(0), Signal::STOP);
        }
        let fault = job.signal(Role::Rank(1), Signal::KILL);
        job.signal(Role::Daemon(0), Signal::STOP);
        // Longer than the launcher waits for the daemon's report.
        sleep(Duration::from_millis(1000));
        job.signal(Role::Daemon(0), Signal::CONT);
        assert_rank_1_killed(&job.finish(), ONE_NODE, fault, "");
    }
}

#[test]
fn a_worker_is_killed_while_it_waits() {
    let steps =
        ["attach", "1/submit:1:1000", "!1/until:go", "3/until:also", "submit:1:1000", "leave"];
    let mut job = start(TWO_NODES, &steps);
    job.until_said("submitted", 1);
    let fault = job.signal(Role::Rank(1), Signal::KILL);
    job.allow("go");
    // The tensor of rank 1 could be done without its process, but not before rank 3 submits it,
    // too.
    job.until_said("failed", 2);
    job.allow("also");
    assert_rank_1_killed(&job.finish(), TWO_NODES, fault, ", tensor 'layer.0'");
}

#[test]
fn a_worker_is_killed_during_a_transfer() {
    let seed = now_us();
    println!("seed {seed}: replay by using it instead of now_us()");
    for (round, world) in [ONE_NODE, TWO_NODES, TWO_NODES].into_iter().enumerate() {
        let mut job = start(world, &["attach", "loop:100000:400000"]);
        job.until_said("looping", world.0 as usize);
        sleep(Duration::from_micros((seed >> round) % 20_000));
        let fault = job.signal(Role::Rank(1), Signal::KILL);
        assert_rank_1_killed(&job.finish(), world, fault, "");
    }
}

#[test]
fn a_stopped_worker_is_reported_as_stopped() {
    for world in [ONE_NODE, TWO_NODES] {
        let mut job = start(world, &["attach", "loop:100000:1000"]);
        job.until_said("looping", world.0 as usize);
        let fault = job.signal(Role::Rank(1), Signal::STOP);
        let report = job.finish();
        let what =
            ["rank 1 on host 127.0.0.1", "no heartbeat for ", "the process is stopped (SIGSTOP"];
        report.assert_notified(&others(world, 1), fault, &what);
        // The first rank that ends because of it gives the exit code, and its last lines give the
        // reason.
        report.assert_code(1);
        report.assert_verdict(&what);
    }
}

/// It reads nothing for a while, and is sent far more than its socket holds (TELL).
#[test]
fn a_worker_stopped_for_a_while_loses_nothing() {
    let steps = ["attach", "0/lonely:350", "1/until:go", "1/leave", "0/until:gone", "0/leave"];
    let mut job = start((2, "127.0.0.1:2"), &steps);
    job.until_said("submitted", 1);
    sleep(Duration::from_millis(300));
    job.signal(Role::Rank(0), Signal::STOP);
    job.allow("go");
    job.until_said("left", 1);
    sleep(Duration::from_millis(2000));
    job.signal(Role::Rank(0), Signal::CONT);
    let reported = job.until_said("lonely", 1);
    assert_eq!(reported[0].text, "350");
    job.allow("gone");
    job.finish().assert_code(0);
}

/// A batch system, a container's freezer or the host of a virtual machine may stop everything for
/// longer than any part may be silent.
#[test]
fn a_job_suspended_as_a_whole_continues() {
    let steps = ["attach", "0/say:begun", "0/until:go", "loop:20:1000000", "leave"];
    let mut job = start(TWO_NODES, &steps);
    for (word, ranks) in [("said", 1), ("looping", 4)] {
        job.until_said(word, ranks);
        let suspended = job.processes();
        suspended.iter().for_each(|process| send_signal(process.pid, Signal::STOP));
        sleep(Duration::from_secs(6));
        suspended.iter().for_each(|process| send_signal(process.pid, Signal::CONT));
        job.allow("go");
    }
    job.finish().assert_code(0);
}

/// Ctrl-Z of a terminal: only the launcher gets it, and passes it on.
#[test]
fn a_job_suspended_by_a_terminal_continues() {
    let steps = ["attach", "0/say:begun", "0/until:go", "loop:20:1000000", "leave"];
    let mut job = start(TWO_NODES, &steps);
    for (word, ranks) in [("said", 1), ("looping", 4)] {
        job.until_said(word, ranks);
        let launcher = job.process(Role::Launcher).pid;
        send_signal(launcher, Signal::TSTP);
        // Two agents keep running, so that they can pass on that the job continues.
        let (all, agents) = (job.processes().len(), 2);
        job.wait_for("everything is suspended", || {
            let suspended = job.processes().into_iter().filter(|process| {
                let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.pid));
                stat.is_ok_and(|stat| stat.contains(") T "))
            });
            (suspended.count() == all - agents).then_some(())
        });
        sleep(Duration::from_secs(6));
        send_signal(launcher, Signal::CONT);
        job.allow("go");
    }
    job.finish().assert_code(0);
}

#[test]
fn a_daemon_is_killed() {
    for (world, order, own, host) in
        [(ONE_NODE, 0, vec![0, 1, 2], "127.0.0.1"), (TWO_NODES, 1, vec![2, 3], "127.0.0.2")]
    {
        let mut job = start(world, &["attach", "loop:100000:1000"]);
        job.until_said("looping", world.0 as usize);
        let fault = job.signal(Role::Daemon(order), Signal::KILL);
        let report = job.finish();
        let all: Vec<u32> = (0..world.0).collect();
        let (near, far): (Vec<u32>, Vec<u32>) = all.into_iter().partition(|r| own.contains(r));
        report.assert_notified(&near, fault, &["the daemon of this node (gradwired, pid "]);
        report.assert_notified(
            &far,
            fault,
            &[&format!("host {host}"), "the daemon of ", "is lost"],
        );
        report.assert_code(1);
        let verdict = format!("gradwire: the daemon on host {host} (pid ");
        report.assert_verdict(&[&verdict, ") was killed by SIGKILL"]);
    }
}

#[test]
fn a_stopped_daemon_is_reported_as_silent() {
    let mut job = start(TWO_NODES, &["attach", "loop:100000:1000"]);
    job.until_said("looping", 4);
    let fault = job.signal(Role::Daemon(1), Signal::STOP);
    let report = job.finish();
    let near = ["the daemon of this node (gradwired) has given no sign of life for "];
    report.assert_notified(&[2, 3], fault, &near);
    let far = ["host 127.0.0.2", "the daemon of ", "is lost: it has been silent for "];
    report.assert_notified(&[0, 1], fault, &far);
    report.assert_code(1);
    report.assert_verdict(&["gradwire: the daemon on host 127.0.0.2 (pid ", "has stopped it"]);
}

/// It was stopped in the middle of an operation, and continues after every rank has given up.
#[test]
fn a_continued_daemon_writes_to_no_tensor() {
    let seed = now_us();
    println!("seed {seed}: replay by using it instead of now_us()");
    for round in 0..3 {
        let steps = ["deaf", "attach", "lend:16000000", "until:gone", "exit:1"];
        // When the daemon continues, it finds the ranks silent, and the job ends.
        let launch = Launch::new().ranks(2).set("launch.grace_ms=60000");
        let mut job = launch.rank(&steps).start();
        job.until_said("looping", 2);
        sleep(Duration::from_micros((seed >> round) % 300_000));
        job.signal(Role::Daemon(0), Signal::STOP);
        let reported = job.until_said("notified", 2);
        for said in reported {
            assert!(said.text.contains("has given no sign of life for"), "{said:?}");
        }
        job.signal(Role::Daemon(0), Signal::CONT);
        sleep(Duration::from_secs(1));
        job.allow("go");
        let changed = job.until_said("changed", 2);
        assert!(changed.iter().all(|said| said.text == "[0, 0]"), "{changed:?}");
        job.allow("gone");
        job.finish();
    }
}

#[test]
fn the_coordinators_daemon_is_killed_or_stopped() {
    for signal in [Signal::KILL, Signal::STOP] {
        let mut job = start(TWO_NODES, &["attach", "loop:100000:1000"]);
        job.until_said("looping", 4);
        let fault = job.signal(Role::Daemon(0), signal);
        let report = job.finish();
        report.assert_notified(&[2, 3], fault, &["the coordinator at 127.0.0.1:"]);
        report.assert_code(1);
        if signal == Signal::KILL {
            report.assert_notified(&[0, 1], fault, &["the daemon of this node (gradwired, pid "]);
            report.assert_verdict(&["gradwire: the daemon on host 127.0.0.1 (pid "]);
            report.assert_verdict(&[") was killed by SIGKILL"]);
        } else {
            let silent = "the daemon of this node (gradwired) has given no sign of life for ";
            report.assert_notified(&[0, 1], fault, &[silent]);
        }
    }
}

#[test]
fn an_agent_is_killed() {
    for (world, agent, host, left) in
        [(ONE_NODE, 0, "127.0.0.1", vec![]), (TWO_NODES, 1, "127.0.0.2", vec![0, 1])]
    {
        let mut job = start(world, &["attach", "loop:100000:1000"]);
        job.until_said("looping", world.0 as usize);
        // Its child processes end with it, in any order.
        let fault = job.signal(Role::Agent(agent), Signal::KILL);
        let report = job.finish();
        report.assert_notified(&left, fault, &[&format!("host {host}")]);
        report.assert_code(1);
        let verdict = format!(
            "gradwire: the connection to host {host} was lost: its agent was killed by SIGKILL"
        );
        report.assert_verdict(&[&verdict]);
    }
}

#[test]
fn an_agent_asked_to_end_is_the_cause() {
    let mut job = start(TWO_NODES, &["attach", "loop:100000:1000"]);
    job.until_said("looping", 4);
    let fault = job.signal(Role::Agent(1), Signal::TERM);
    let report = job.finish();
    let what = "host 127.0.0.2: gradwired was asked to end: \
                the agent of this host received SIGTERM";
    report.assert_notified(&[0, 1], fault, &[what]);
}
