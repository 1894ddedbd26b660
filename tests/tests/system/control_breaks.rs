//! Connections to the coordinator that break, or on which nothing arrives. A job continues with the
//! same results, or its ranks are notified of the right cause. This needs root and `ss`; with two
//! networks also `ip` and `tc`. If something is missing, a test prints that and passes.

use std::{
    process::Command,
    thread::sleep,
    time::{Duration, Instant},
};

use gradwire_tests::launched::{
    Job, Launch, Line, Report,
    network::{Pair, reset_connections},
    now_us, programs,
};

const AGAIN: &str = "the connection was made again";

/// Two and three hosts with one rank each, on this machine.
const WORLDS: [(usize, &str); 2] =
    [(2, "127.0.0.1:1,127.0.0.2:1"), (3, "127.0.0.1:1,127.0.0.2:1,127.0.0.3:1")];

fn ports(job: &Job, kind: &str) -> Vec<u16> {
    let port = |address: &String| address.rsplit(':').next()?.parse().ok();
    job.served(kind).iter().filter_map(port).collect()
}

/// The port of the coordinator, as soon as it serves.
fn coordinator(job: &Job) -> u16 {
    job.wait_for("the coordinator", || ports(job, "grpc").first().copied())
}

/// A moment that differs each time.
fn moment(number: u64, most_ms: u64) -> Duration {
    Duration::from_millis(10 + number * 37 % most_ms)
}

#[track_caller]
fn assert_went_on(report: &Report, word: &str, times: usize) {
    report.assert_code(0);
    assert_eq!(report.said(word).len(), times, "{}", report.all());
}

/// Breaks all connections to the coordinator, from when it serves until `ends`, while ranks follow
/// these steps. Returns the report, and how many connections were broken; `None` if that is not
/// possible here.
fn broken(world: &str, set: &str, steps: &[&str], word: &str) -> Option<(Report, usize)> {
    let launch = Launch::new().hosts(world).set(set).words(&["--verbose"]);
    let mut job = launch.within(Duration::from_secs(120)).rank(steps).start();
    let port = coordinator(&job);
    let began = Instant::now();
    let mut count = 0;
    for number in 0.. {
        count += reset_connections(&[], &[port])?;
        // Long enough for a stream to continue on a busy machine.
        sleep(moment(number, 200));
        let ranks = world.split(',').count();
        let lines = job.lines();
        let said = lines.iter().filter_map(Line::said).filter(|said| said.word == word);
        if said.count() >= ranks || began.elapsed() > Duration::from_secs(60) {
            break;
        }
    }
    job.allow("go");
    Some((job.finish(), count))
}

/// While daemons join, links are probed, ranks attach, and while nothing happens.
#[test]
fn a_job_begins_while_connections_break() {
    for (hosts, world) in WORLDS {
        let steps = ["attach", "say:idle", "until:go", "loop:3:1000", "leave"];
        let Some((report, count)) = broken(world, "probe.enabled=true", &steps, "said") else {
            return;
        };
        assert_went_on(&report, "looped", hosts);
        println!("{count} ends of connections were reset");
    }
}

#[test]
fn sums_are_exact_while_connections_break() {
    for (hosts, world) in WORLDS {
        for looped in ["loop:3000:10", "loop:60:300000"] {
            let steps = ["attach", looped, "until:go", "leave"];
            let Some((report, count)) = broken(world, "data.lanes=2", &steps, "looped") else {
                return;
            };
            assert_went_on(&report, "looped", hosts);
            assert!(report.all().contains(AGAIN), "{}", report.all());
            println!("{count} ends of connections were reset");
        }
    }
}

/// The connections break while the ranks leave and the coordinator ends the job.
#[test]
fn a_job_ends_while_connections_break() {
    for (hosts, world) in WORLDS {
        for round in 0..4 {
            let launch = Launch::new().hosts(world).words(&["--verbose"]);
            let steps = ["attach", "loop:3:1000", "say:done", "until:go", "leave"];
            let mut job = launch.rank(&steps).start();
            job.until_said("said", hosts);
            let port = coordinator(&job);
            job.allow("go");
            sleep(Duration::from_millis(round * 13));
            for _ in 0..3 {
                if reset_connections(&[], &[port]).is_none() {
                    return;
                }
            }
            assert_went_on(&job.finish(), "looped", hosts);
        }
    }
}

/// A job on two networks that has used each connection.
fn begun(launch: Launch, steps: &[&str]) -> Job {
    let before = ["deaf", "attach", "loop:4:1000", "say:begun", "until:go"];
    let job = launch.words(&["--verbose"]).rank(&[&before, steps].concat()).start();
    job.until_said("said", 4);
    job
}

/// A host that can't connect for longer than `heartbeat.timeout_ms`. Its rule also stops the reset,
/// so the other end learns nothing.
#[test]
fn the_coordinator_may_be_reached_late() {
    let Some(pair) = Pair::new() else { return };
    let mut job = begun(pair.launch(), &["loop:50:1000", "leave"]);
    let port = coordinator(&job);
    pair.refuse_ports(1, &[port]);
    if pair.reset_connections(1, &[port]).is_none() {
        return;
    }
    job.allow("go");
    sleep(Duration::from_secs(5));
    pair.accept_ports(1, &[port]);
    let report = job.finish();
    assert_went_on(&report, "looped", 2 * 4);
    assert!(report.all().contains(AGAIN), "{}", report.all());
}

/// TELL: the ranks of both hosts learn which node did not come back.
#[test]
fn a_node_that_does_not_come_back_is_reported() {
    let Some(pair) = Pair::new() else { return };
    let launch = pair.launch().set("recovery.return_timeout_ms=2000");
    let mut job = begun(launch, &["loop:100000:1000"]);
    let port = coordinator(&job);
    job.allow("go");
    let fault = now_us();
    pair.refuse_ports(1, &[port]);
    if [0, 1].iter().any(|host| pair.reset_connections(*host, &[port]).is_none()) {
        return;
    }
    let report = job.finish();
    let near = ["host 10.213.0.2", "the daemon of node 1", "is lost: its stream broke"];
    report.assert_notified(&[0, 1], fault + 2_000_000, &near);
    let far = ["the coordinator at 10.213.0.1:", "can't be reached by TCP for 2.0 s, although its"];
    report.assert_notified(&[2, 3], fault + 2_000_000, &far);
    report.assert_code(1);
}

#[test]
fn without_recovery_a_break_is_reported_at_once() {
    let Some(pair) = Pair::new() else { return };
    let mut job = begun(pair.launch().set("recovery.enabled=false"), &["loop:100000:1000"]);
    let port = coordinator(&job);
    job.allow("go");
    let fault = now_us();
    if pair.reset_connections(1, &[port]).is_none() {
        return;
    }
    let report = job.finish();
    report.assert_notified(&[0, 1], fault, &["host 10.213.0.2", "is lost: its stream broke"]);
    report.assert_notified(&[2, 3], fault, &["the coordinator at 10.213.0.1:", "went away"]);
    report.assert_code(1);
}

/// The interface of a host goes away for 2.5 s, again and again, and its connections break, too.
/// Ranks notice nothing, and check that all sums are exact.
#[test]
fn ranks_notice_nothing_of_a_link_that_flaps() {
    let Some(pair) = Pair::new() else { return };
    let launch = pair.launch().within(Duration::from_secs(120));
    let mut job = begun(launch, &["loop:100:100000", "leave"]);
    let ends = [vec![coordinator(&job)], ports(&job, "data")].concat();
    job.allow("go");
    let mut count = 0;
    for round in 0..4 {
        pair.set_link(1, false);
        count += pair.reset_connections(round % 2, &ends).unwrap_or(0);
        sleep(Duration::from_millis(2500));
        pair.set_link(1, true);
        sleep(Duration::from_millis(2500));
    }
    let report = job.finish();
    assert_went_on(&report, "looped", 2 * 4);
    assert!(count == 0 || report.all().contains(AGAIN), "{}", report.all());
}

/// Nothing passes for longer than `heartbeat.timeout_ms`, and no connection is reset.
#[test]
fn a_long_outage_is_survived() {
    let Some(pair) = Pair::new() else { return };
    let mut job = begun(pair.launch(), &["loop:50:1000", "leave"]);
    pair.cut();
    job.allow("go");
    sleep(Duration::from_millis(7500));
    pair.mend();
    let report = job.finish();
    assert_went_on(&report, "looped", 2 * 4);
    assert!(report.all().contains(AGAIN), "{}", report.all());
}

/// A firewall drops the packets of all connections that it does not know any more, without a sign,
/// and passes new ones.
#[test]
fn a_firewall_may_forget_all_connections() {
    let Some(pair) = Pair::new() else { return };
    let mut job = begun(pair.launch(), &["loop:50:100000", "until:seen", "leave"]);
    let known = [vec![coordinator(&job)], ports(&job, "data")].concat();
    let Some(count) = pair.forget_connections(&known) else { return };
    assert!(count >= 2, "{count}");
    job.allow("go");
    job.wait_for("the end of all sums", || {
        let lines = job.lines();
        let looped = lines.iter().filter_map(Line::said).filter(|said| said.word == "looped");
        (looped.count() == 2 * 4).then_some(())
    });
    let address = job.served("grpc").first().cloned().unwrap();
    let status = pair.within(0, || {
        Command::new(programs::gradwire()).args(["status", &address]).output().unwrap()
    });
    let status = String::from_utf8_lossy(&status.stdout);
    assert!(status.contains("connected again once"), "{status}");
    job.allow("seen");
    let report = job.finish();
    report.assert_code(0);
    assert_eq!(report.all().matches(AGAIN).count(), 1, "{}", report.all());
    assert!(report.all().contains("a data connection was made again"), "{}", report.all());
}

/// A line that does not work for 2.5 s, again and again. Its hosts forget all their connections.
#[test]
fn a_line_that_flaps_is_survived() {
    let Some(pair) = Pair::new() else { return };
    // Commands take their time while the line does not work.
    let launch = pair.launch().set("heartbeat.timeout_ms=9000").set("job.timeout_ms=20000");
    let launch = launch.within(Duration::from_secs(120));
    let mut job = begun(launch, &["submit:8:300000", "until:enough", "loop:4:1000", "leave"]);
    let (control, data) = ([coordinator(&job)], ports(&job, "data"));
    job.allow("go");
    for round in 0..3 {
        pair.cut();
        // One end learns of it when the line works again.
        let ends = [(0, &data[..]), (1, &data), (round % 2, &control)];
        if ends.iter().any(|(host, ports)| pair.reset_connections(*host, ports).is_none()) {
            return;
        }
        sleep(Duration::from_millis(2500));
        pair.mend();
        sleep(Duration::from_millis(2500));
    }
    job.allow("enough");
    let report = job.finish();
    assert_went_on(&report, "looped", 2 * 4);
    assert!(report.all().contains(AGAIN), "{}", report.all());
}
