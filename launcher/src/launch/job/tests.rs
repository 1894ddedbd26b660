//! Events in, orders out: the whole life of a job without a process.

use gradwire_proto::{FailureKind, Rank};
use gradwire_services::launch::{Text, to_line};
use gradwire_settings::{Layers, Settings};

use super::*;
use crate::launch::hosts::parse_list;

mod causes;
mod elastic;
mod elastic_ends;

const LIMITS: Limits = Limits {
    start: Duration::from_secs(30),
    grace: Duration::from_secs(3),
    gather: Duration::from_millis(200),
    report: Duration::from_secs(1),
    silence: Duration::from_secs(10),
};

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn job(hosts: &str) -> Job {
    let nodes = Plan::nodes(&parse_list(hosts).unwrap(), None).unwrap();
    let settings = Settings::load(&Layers::default()).unwrap();
    Job::new(Plan::new(nodes, "train", Vec::<Text>::new(), &settings).unwrap(), LIMITS)
}

fn ready(node: usize) -> Event {
    Event::Ready { node, address: IpAddr::from([10, 0, 0, 1 + node as u8]), port: 4000 }
}

fn said(node: usize, role: Role, line: &str) -> Event {
    Event::Said { node, role, line: line.to_owned() }
}

fn serving(node: usize) -> Event {
    said(node, Role::Daemon, r#"{"event":"serving","metrics":"127.0.0.1:9","data":"10.0.0.1:5"}"#)
}

fn exited(node: usize, role: Role, end: ProcessEnd, at: u64) -> Event {
    Event::Exited { node, role, pid: 77, end, at: ms(at), tail: vec!["last".to_owned()] }
}

/// The failure of the job, with the rank at fault.
fn failed(rank: Option<u32>) -> String {
    let mut failure = Failure::new(FailureKind::WorkerLost, "its process has ended").host("a");
    failure.rank = rank.map(Rank);
    to_line(&ServiceReport::Failed { failure })
}

fn refused(node: usize, what: &str) -> Event {
    Event::Refused { node, what: what.to_owned(), hint: String::new() }
}

/// The orders, in short: `0:start rank 3`, `1:stop 3000`.
fn step(job: &mut Job, event: Event, at: u64) -> Vec<String> {
    let orders = job.step(event, ms(at)).into_iter().filter_map(|command| match command {
        Command::Order { node, order: Order::Start(start) } => {
            Some(format!("{node}:start {}", start.role))
        }
        Command::Order { node, order: Order::Stop { grace_ms, .. } } => {
            Some(format!("{node}:stop {grace_ms}"))
        }
        Command::Order { node, order } => Some(format!("{node}:{order:?}")),
        Command::Suspend => Some("suspend".to_owned()),
        Command::Reach { agent, host } => Some(format!("{agent}:reach {host}")),
        Command::Say(text) => Some(text),
        Command::Answer(answer) => Some(format!("{answer:?}")),
        Command::Note(_) | Command::Serving { .. } => None,
    });
    orders.collect()
}

const GRPC: &str =
    r#"{"event":"serving","metrics":"127.0.0.1:8","data":"10.0.0.1:5","grpc":"10.0.0.1:7000"}"#;

/// A job of hosts `a:2,b:1` whose ranks have all started at 1000 ms.
fn running() -> Job {
    let mut job = job("a:2,b:1");
    assert!(step(&mut job, ready(1), 10).is_empty(), "the first host is still missing");
    assert_eq!(step(&mut job, ready(0), 20), ["0:start the daemon"]);
    assert_eq!(step(&mut job, said(0, Role::Daemon, GRPC), 30), ["1:start the daemon"]);
    let ranks = step(&mut job, serving(1), 40);
    assert_eq!(ranks, ["0:start rank 0", "0:start rank 1", "1:start rank 2"]);
    for (node, rank) in [(0, 0), (0, 1), (1, 2)] {
        assert!(job.deadline().is_some(), "WAIT: until all have started");
        let event = Event::Started { node, role: Role::Rank(rank), pid: 70 + rank, at: ms(1000) };
        step(&mut job, event, 1000);
    }
    assert_eq!(job.deadline(), None, "a job may run for ever");
    job
}

fn stop_all(job: &mut Job, at: u64) -> JobReport {
    assert!(job.report().is_none(), "nothing is over before everything has ended (CLEAN)");
    for node in 0..job.hosts.len() {
        step(job, Event::Stopped { node }, at);
    }
    job.report().expect("all have stopped")
}

#[test]
fn a_job_that_succeeds_stops_all_hosts() {
    let mut job = running();
    for (node, rank) in [(0, 1), (1, 2), (0, 0)] {
        assert!(
            step(&mut job, exited(node, Role::Rank(rank), ProcessEnd::Code(0), 2000), 2000)
                .is_empty()
        );
    }
    step(&mut job, exited(1, Role::Daemon, ProcessEnd::Code(0), 2001), 2001);
    let orders = step(&mut job, exited(0, Role::Daemon, ProcessEnd::Code(0), 2002), 2002);
    assert_eq!(orders, ["0:stop 3000", "1:stop 3000"], "at once, all have ended by themselves");
    assert_eq!(stop_all(&mut job, 2010), JobReport::well());
}

#[test]
fn remaining_services_are_stopped() {
    let mut job = running();
    for (node, rank) in [(0, 1), (1, 2), (0, 0)] {
        step(&mut job, exited(node, Role::Rank(rank), ProcessEnd::Code(0), 2000), 2000);
    }
    assert!(step(&mut job, Event::Tick, 2100).is_empty(), "not yet");
    assert_eq!(step(&mut job, Event::Tick, 2300).len(), 2);
    let late = exited(0, Role::Daemon, ProcessEnd::Signal(15), 2310);
    step(&mut job, late, 2310);
    assert_eq!(stop_all(&mut job, 2400).code, 0, "how they end then does not matter");
}

#[test]
fn a_failed_job_fails_though_its_ranks_succeed() {
    for rank in [Some(1), None] {
        let mut job = running();
        step(&mut job, said(0, Role::Daemon, &failed(rank)), 1400);
        for (node, rank) in [(0, 1), (1, 2), (0, 0)] {
            step(&mut job, exited(node, Role::Rank(rank), ProcessEnd::Code(0), 1410), 1410);
        }
        assert!(step(&mut job, Event::Tick, 1900).is_empty(), "the daemon may report more");
        step(&mut job, exited(0, Role::Daemon, ProcessEnd::Code(1), 2000), 2000);
        assert_eq!(step(&mut job, Event::Tick, 2200), ["0:stop 3000", "1:stop 3000"]);
        let report = stop_all(&mut job, 2300);
        assert_eq!(report.code, 1);
        let line = &report.lines[0];
        assert!(
            line.starts_with("gradwire: the job failed: ") && line.ends_with(" ended"),
            "{line}"
        );
    }
}

#[test]
fn all_unreachable_hosts_are_reported() {
    let mut job = job("a:1,b:1,c:1");
    assert!(step(&mut job, refused(1, "host b: Permission denied"), 10).is_empty());
    assert!(step(&mut job, ready(0), 20).is_empty(), "c has not answered yet");
    let orders = step(&mut job, refused(2, "host c: timed out"), 30);
    assert_eq!(orders, ["0:stop 3000"], "only one has an agent");
    step(&mut job, Event::Stopped { node: 0 }, 40);
    let report = job.report().unwrap();
    assert_eq!(report.lines, ["error: host b: Permission denied", "error: host c: timed out"]);
    assert_eq!(report.code, 1);
}

#[test]
fn what_has_not_started_in_time_is_named() {
    let late = |job: &mut Job| {
        step(job, Event::Tick, 30_000);
        for node in 0..2 {
            step(job, Event::Stopped { node }, 30_001);
        }
        job.report().unwrap().lines[0].clone()
    };
    let mut nobody = job("a:1,b:1");
    step(&mut nobody, ready(0), 1);
    assert_eq!(late(&mut nobody), "error: the job did not start within 30.0 s: no answer from b");
    let mut mute = job("a:1,b:1");
    step(&mut mute, ready(0), 1);
    step(&mut mute, ready(1), 1);
    assert!(late(&mut mute).ends_with(": the daemon on host a does not serve"));
    let mut half = job("a:1,b:1");
    for event in [ready(0), ready(1), said(0, Role::Daemon, GRPC)] {
        step(&mut half, event, 1);
    }
    assert!(late(&mut half).ends_with(": no daemon serves on b"));
    let mut ranks = job("a:1,b:1");
    for event in [ready(0), ready(1), said(0, Role::Daemon, GRPC), serving(1)] {
        step(&mut ranks, event, 1);
    }
    assert!(late(&mut ranks).ends_with(": ranks not started: 0 (a), 1 (b)"));
}

#[test]
fn an_early_end_of_a_daemon_is_explained() {
    let mut job = job("a:1");
    step(&mut job, ready(0), 1);
    step(&mut job, exited(0, Role::Daemon, ProcessEnd::Code(1), 5), 5);
    assert_eq!(step(&mut job, Event::Tick, 205), ["0:stop 3000"]);
    let report = stop_all(&mut job, 210);
    assert_eq!(
        report.lines[0],
        "error: the daemon on host a (pid 77) ended with exit code 1 before the job began: last"
    );
}

/// The orders by which a running job is interrupted: the daemons serve the ranks for a while.
fn asked(signal: &str) -> Vec<String> {
    let why = format!("the launcher ends the job: interrupted by {signal}");
    let notice = |node: u32| format!("{node}:Notify {{ notice: Ending {{ why: {why:?} }} }}");
    let end = |node: u32, rank: u32| format!("{node}:End {{ role: Rank({rank}) }}");
    vec![notice(0), notice(1), end(0, 0), end(0, 1), end(1, 2)]
}

#[test]
fn daemons_serve_ranks_that_are_asked_to_end() {
    let interrupt = |job: &mut Job| step(job, Event::Interrupted { signal: 15 }, 2000);
    let mut job = running();
    assert_eq!(interrupt(&mut job), asked("SIGTERM"));
    for (node, rank) in [(0, 0), (1, 2)] {
        let end = exited(node, Role::Rank(rank), ProcessEnd::Code(0), 3000);
        assert!(step(&mut job, end, 3000).is_empty(), "rank 1 may still write a checkpoint");
    }
    let end = exited(0, Role::Rank(1), ProcessEnd::Signal(15), 3500);
    assert_eq!(step(&mut job, end, 3500), ["0:stop 1500", "1:stop 1500"]);
    assert_eq!(stop_all(&mut job, 3600).code, 143);
    // WAIT: one does not end.
    let mut job = running();
    interrupt(&mut job);
    assert_eq!(job.deadline(), Some(ms(5000)));
    assert_eq!(step(&mut job, Event::Tick, 5000), ["0:stop 0", "1:stop 0"]);
}

#[test]
fn a_second_ctrl_c_ends_the_grace_period() {
    let mut job = running();
    assert_eq!(step(&mut job, Event::Interrupted { signal: 2 }, 1500), asked("SIGINT"));
    step(&mut job, exited(0, Role::Rank(0), ProcessEnd::Signal(15), 1501), 1501);
    let orders = step(&mut job, Event::Interrupted { signal: 2 }, 1600);
    assert_eq!(orders, ["0:stop 0", "1:stop 0"]);
    let report = stop_all(&mut job, 1700);
    assert_eq!(report.code, 130);
    assert_eq!(report.lines, ["gradwire: interrupted by SIGINT; everything was stopped"]);
}

#[test]
fn a_lost_host_ends_the_job() {
    let mut job = running();
    let event = Event::Lost { node: 1, what: "Broken pipe".to_owned(), at: ms(1500) };
    step(&mut job, event, 1500);
    assert!(step(&mut job, Event::Tick, 1700).is_empty(), "a daemon may know more");
    assert_eq!(step(&mut job, Event::Tick, 2700), ["0:stop 3000"]);
    step(&mut job, Event::Stopped { node: 0 }, 2800);
    let report = job.report().unwrap();
    assert!(
        report.lines[0].starts_with("gradwire: the connection to host b was lost: Broken pipe")
    );
}

/// TELL: not a rank that its agent has killed, also if no daemon runs any more to say so.
#[test]
fn a_host_that_is_asked_to_end_is_named() {
    let mut job = running();
    let event = Event::Asked { node: 1, what: "its agent received SIGHUP".into(), at: ms(1500) };
    step(&mut job, event, 1500);
    step(&mut job, exited(1, Role::Rank(2), ProcessEnd::Signal(15), 1500), 1501);
    step(&mut job, exited(1, Role::Daemon, ProcessEnd::Signal(15), 1502), 1502);
    step(&mut job, Event::Stopped { node: 1 }, 1503);
    step(&mut job, Event::Tick, 1700);
    step(&mut job, Event::Tick, 2700);
    step(&mut job, Event::Stopped { node: 0 }, 2800);
    let report = job.report().unwrap();
    let line = "gradwire: host b left the job: its agent received SIGHUP; the other ranks were \
                stopped";
    assert_eq!((report.code, report.lines), (1, vec![line.to_owned()]));
    // After all ranks have ended, nothing is lost.
    let mut job = running();
    for (node, rank) in [(0, 1), (1, 2), (0, 0)] {
        step(&mut job, exited(node, Role::Rank(rank), ProcessEnd::Code(0), 2000), 2000);
    }
    step(&mut job, Event::Asked { node: 1, what: "…".into(), at: ms(2001) }, 2001);
    step(&mut job, Event::Tick, 2300);
    assert_eq!(stop_all(&mut job, 2400).code, 0);
}

#[test]
fn the_end_of_a_daemon_is_announced() {
    let mut job = running();
    let orders = step(&mut job, exited(1, Role::Daemon, ProcessEnd::Signal(9), 1500), 1500);
    let notice = r#"DaemonEnded { node: 1, why: "its process was killed by SIGKILL" }"#;
    assert_eq!(orders, [format!("0:Notify {{ notice: {notice} }}")]);
}

#[test]
fn an_agent_may_never_report_stopped() {
    let mut job = running();
    step(&mut job, Event::Interrupted { signal: 15 }, 2000);
    step(&mut job, Event::Tick, 5000);
    let deadline = job.deadline().expect("WAIT");
    assert!(job.step(Event::Tick, deadline - ms(1)).is_empty() && job.report().is_none());
    job.step(Event::Tick, deadline);
    assert_eq!(job.report().unwrap().code, 143);
}

#[test]
fn slow_readers_are_waited_for_until_ctrl_c() {
    let well = |job: &mut Job| {
        for (node, rank) in [(0, 1), (1, 2), (0, 0)] {
            step(job, exited(node, Role::Rank(rank), ProcessEnd::Code(0), 2000), 2000);
        }
        assert_eq!(step(job, Event::Unread, 2300).len(), 2, "services are stopped in any case");
    };
    let mut job = running();
    well(&mut job);
    for at in [10_300, 15_300, 20_300] {
        assert!(job.deadline().expect("WAIT") <= ms(at));
        step(&mut job, Event::Unread, at);
    }
    assert_eq!(stop_all(&mut job, 22_000), JobReport::well());

    let mut job = running();
    well(&mut job);
    let orders = step(&mut job, Event::Interrupted { signal: 2 }, 9000);
    assert_eq!(orders, ["0:stop 0", "1:stop 0"]);
    step(&mut job, Event::Unread, 14_000);
    assert_eq!(job.report().unwrap().code, 130, "lost output is not reported as success");
}

#[test]
fn a_nonsensical_report_of_a_daemon_is_refused() {
    let mut job = job("a:1");
    step(&mut job, ready(0), 1);
    for line in ["hello", r#"{"event":"serving","grpc":"zonk","metrics":"m"}"#, "{}"] {
        assert!(step(&mut job, said(0, Role::Daemon, line), 2).is_empty(), "TRUST: {line}");
    }
    let line = r#"{"event":"serving","metrics":"127.0.0.1:9"}"#;
    step(&mut job, said(0, Role::Daemon, line), 3);
    step(&mut job, Event::Tick, 203);
    let report = stop_all(&mut job, 210);
    assert!(report.lines[0].contains("the daemon on host a reported: {"), "{report:?}");
}

#[test]
fn signals_are_passed_on_while_ranks_run() {
    let pass = |signal: Signal| Event::Passed { signal: signal.as_raw() };
    let (usr1, tstp) = (Signal::USR1.as_raw(), Signal::TSTP.as_raw());
    let mut job = running();
    let to = |node: u32, signal: i32| format!("{node}:Signal {{ signal: {signal} }}");
    assert_eq!(step(&mut job, pass(Signal::USR1), 1100), [to(0, usr1), to(1, usr1)]);
    let suspends = [to(0, tstp), to(1, tstp), "suspend".to_owned()];
    assert_eq!(step(&mut job, pass(Signal::TSTP), 1200), suspends);
    step(&mut job, Event::Interrupted { signal: 2 }, 1300);
    assert!(step(&mut job, pass(Signal::TSTP), 1400).is_empty(), "the job is being stopped");
    let mut early = super::tests::job("a:1");
    assert!(step(&mut early, pass(Signal::USR1), 10).is_empty(), "nothing has been reached yet");
}
