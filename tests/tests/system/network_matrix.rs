//! All ways in which a network may be bad. A job on it continues, or all of its ranks are notified
//! in time what does not work, with the right host. This needs root, `ip`, `tc` and `ss`. If
//! something is missing, a test prints that and passes.
//!
//! The larger cases run in `make soak`.

use std::{thread::sleep, time::Duration};

use gradwire_tests::launched::{Job, Launch, Report, network::Pair, now_us};

/// The second host in failures. The first one is named as the coordinator.
const HOST: &str = "host 10.213.0.2";

/// Asserts that all ranks have done all steps and left in good order.
#[track_caller]
fn assert_went_on(report: &Report, word: &str) {
    report.assert_code(0);
    assert_eq!(report.said(word).len(), 4, "{}", report.all());
}

/// A job that has used each connection, and continues with `steps` when allowed.
fn begun(launch: Launch, steps: &[&str]) -> Job {
    let before = ["deaf", "attach", "loop:4:1000", "say:begun", "until:go"];
    let job = launch.words(&["--verbose"]).rank(&[&before, steps].concat()).start();
    job.until_said("said", 4);
    job
}

/// The ports of the hosts' data planes.
fn data_ports(job: &Job) -> Vec<u16> {
    let port = |address: &String| address.rsplit(':').next()?.parse().ok();
    job.served("data").iter().filter_map(port).collect()
}

/// Lets a job continue, and waits until its tensors are on the way to these hosts, 0 or 1.
fn until_busy(job: &mut Job, pair: &Pair, hosts: &[usize]) {
    let before = [0, 1].map(|host| pair.received(host));
    job.allow("go");
    job.wait_for("a transfer", || {
        let is_busy = |host: &usize| pair.received(*host) > before[*host] + 500_000;
        hosts.iter().all(is_busy).then_some(())
    });
}

fn survives_loss(of_256: u8, steps: &[&str]) {
    let Some(pair) = Pair::new() else { return };
    if pair.lose(of_256).is_some() {
        let steps = [&["attach"], steps, &["leave"]].concat();
        assert_went_on(&pair.launch().rank(&steps).run(), "looped");
    }
}

#[test]
fn one_packet_in_a_hundred_is_lost() {
    survives_loss(3, &["loop:10:200000"]);
}

#[test]
fn one_packet_in_twenty_is_lost() {
    survives_loss(13, &["loop:10:200000"]);
}

/// Sometimes no copy of a packet arrives within the limit. Then all ranks are notified.
fn survives_much_loss_or_says_so(steps: &[&str]) {
    let Some(pair) = Pair::new() else { return };
    if pair.lose(51).is_some() {
        let steps = [&["attach"], steps, &["leave"]].concat();
        let report = pair.launch().rank(&steps).run();
        // The fault has no exact time, so the first notification is used instead.
        match report.said("failed").iter().map(|said| said.at_us).min() {
            None => assert_went_on(&report, "looped"),
            Some(first) => {
                report.assert_notified(&[0, 1, 2, 3], first, &["10.213.0."]);
                report.assert_code(1);
            }
        }
    }
}

#[test]
fn one_packet_in_five_is_lost() {
    survives_much_loss_or_says_so(&["loop:3:50000"]);
}

#[test]
#[ignore = "takes minutes; run by make soak"]
fn one_packet_in_five_is_lost_for_long() {
    survives_much_loss_or_says_so(&["loop:100:50000"]);
}

/// Outages of up to 2.9 seconds, below the limit of three seconds, that begin while nothing is in
/// flight.
#[test]
fn an_idle_job_survives_outages_below_the_limit() {
    let Some(pair) = Pair::new() else { return };
    let steps = ["until:1", "loop:1:1000", "until:2", "loop:2:2000", "until:3", "loop:3:3000"];
    let mut job = begun(pair.launch(), &[&steps[..], &["leave"]].concat());
    job.allow("go");
    for (name, milliseconds) in [("1", 1000), ("2", 2000), ("3", 2900)] {
        pair.cut();
        // The calls begin in the middle of the outage.
        sleep(Duration::from_millis(milliseconds / 2));
        job.allow(name);
        sleep(Duration::from_millis(milliseconds - milliseconds / 2));
        pair.mend();
        // Time to send lost packets again.
        sleep(Duration::from_millis(1500));
    }
    let report = job.finish();
    report.assert_code(0);
    assert_eq!(report.said("looped").len(), 4 * 4, "{}", report.all());
}

/// The same in the middle of a transfer.
#[test]
fn a_busy_job_survives_outages_below_the_limit() {
    let Some(pair) = Pair::new() else { return };
    if pair.narrow(100).is_none() {
        return;
    }
    let launch = pair.launch().set("worker.arena_segment_bytes=64MiB");
    let mut job = begun(launch, &["submit:6:1000000", "leave"]);
    until_busy(&mut job, &pair, &[0, 1]);
    pair.cut();
    sleep(Duration::from_millis(2900));
    pair.mend();
    let report = job.finish();
    report.assert_code(0);
    assert_eq!(report.said("done").len(), 4, "{}", report.all());
}

/// An outage that the timeouts allow, while one of the hosts only receives. Its system must not end
/// the connection meanwhile.
#[test]
fn a_one_way_transfer_survives_outages() {
    let Some(pair) = Pair::new() else { return };
    if pair.narrow(100).is_none() {
        return;
    }
    let launch = pair.launch().set("heartbeat.timeout_ms=8000").set("job.timeout_ms=12000");
    let mut job = begun(launch, &["0/gather:16000000", "!0/gather:0", "leave"]);
    until_busy(&mut job, &pair, &[1]);
    pair.cut();
    sleep(Duration::from_millis(7000));
    pair.mend();
    let report = job.finish();
    report.assert_code(0);
    assert_eq!(report.said("gathered").len(), 4, "{}", report.all());
}

/// Connections that break while nothing is in flight are made again.
#[test]
fn idle_connections_are_made_again_after_a_reset() {
    let Some(pair) = Pair::new() else { return };
    let mut job =
        begun(pair.launch(), &["until:1", "loop:4:10000", "until:2", "loop:4:1000", "leave"]);
    job.allow("go");
    for (host, name) in [(0, "1"), (1, "2")] {
        sleep(Duration::from_millis(100));
        let Some(count) = pair.reset_connections(host, &data_ports(&job)) else { return };
        assert_eq!(count, 2, "one for each lane");
        job.allow(name);
        sleep(Duration::from_millis(500));
    }
    let report = job.finish();
    report.assert_code(0);
    assert_eq!(report.said("looped").len(), 3 * 4, "{}", report.all());
}

/// Without recovery, connections that break while data is in flight are reported at once, long
/// before the limit.
#[test]
fn resets_of_busy_connections_are_reported() {
    for host in [0, 1] {
        let Some(pair) = Pair::new() else { return };
        if pair.narrow(100).is_none() {
            return;
        }
        let launch = pair.launch().set("job.timeout_ms=60000").set("recovery.enabled=false");
        // Five seconds without a pause, because connections that are reset in a pause are made
        // again.
        let mut job = begun(launch, &["submit:8:2000000"]);
        until_busy(&mut job, &pair, &[0, 1]);
        let fault = now_us();
        let Some(count) = pair.reset_connections(host, &data_ports(&job)) else { return };
        assert_eq!(count, 2, "one for each lane");
        let report = job.finish();
        let what = ["host 10.213.0.", "the data connection with this host failed"];
        report.assert_notified(&[0, 1, 2, 3], fault, &what);
        report.assert_code(1);
    }
}

/// Connections that break while data is in flight continue where they ended.
fn survives_resets(resets: u32, set: &[&str], steps: &[&str], word: &str) {
    let Some(pair) = Pair::new() else { return };
    let launch = set.iter().fold(pair.launch(), |launch, setting| launch.set(setting));
    let launch = launch.within(Duration::from_secs(500));
    let mut job = begun(launch, &[steps, &["until:enough", "loop:3:1000", "leave"]].concat());
    let ports = data_ports(&job);
    job.allow("go");
    let mut broken = 0;
    for reset in 0..resets {
        let Some(count) = pair.reset_connections((reset % 2) as usize, &ports) else { return };
        broken += count;
        // Another moment each time.
        sleep(Duration::from_millis(u64::from(reset * 37 % 100)));
    }
    job.allow("enough");
    let report = job.finish();
    report.assert_code(0);
    assert_eq!(report.said(word).len() % 4, 0, "{}", report.all());
    assert!(report.all().contains("a data connection was made again"), "{}", report.all());
    println!("{broken} connections were reset");
}

#[test]
fn sums_survive_resets() {
    survives_resets(30, &[], &["submit:24:1000000"], "done");
}

#[test]
fn sums_by_recursive_doubling_survive_resets() {
    let set = ["negotiation.algorithm=recursive-doubling", "data.streams=3"];
    survives_resets(30, &set, &["loop:150:30000"], "looped");
}

#[test]
fn small_sums_survive_resets() {
    survives_resets(30, &["data.lanes=1"], &["loop:6000:10"], "looped");
}

/// These sums are exact in bf16.
#[test]
fn sums_in_short_form_survive_resets() {
    let set = ["data.compression=bf16", "negotiation.algorithm=recursive-doubling"];
    survives_resets(10, &set, &["loop:80:60000"], "looped");
}

#[test]
#[ignore = "takes minutes; run by make soak"]
fn sums_survive_many_resets() {
    survives_resets(500, &[], &["submit:100:2000000", "loop:40000:10"], "looped");
}

/// A host that refuses connections for a while, longer than the limit for progress.
#[test]
fn a_connection_may_return_late() {
    let Some(pair) = Pair::new() else { return };
    let launch = pair.launch().set("job.timeout_ms=4000");
    let mut job = begun(launch, &["submit:24:1000000", "leave"]);
    let ports = data_ports(&job);
    until_busy(&mut job, &pair, &[0, 1]);
    pair.refuse_ports(0, &ports);
    if [0, 1].iter().any(|host| pair.reset_connections(*host, &ports).is_none()) {
        return;
    }
    sleep(Duration::from_millis(7000));
    pair.accept_ports(0, &ports);
    assert_went_on(&job.finish(), "done");
}

#[test]
fn a_connection_that_does_not_return_is_reported() {
    let Some(pair) = Pair::new() else { return };
    let launch = pair.launch().set("recovery.return_timeout_ms=3000");
    let mut job = begun(launch, &["submit:24:1000000", "leave"]);
    let ports = data_ports(&job);
    until_busy(&mut job, &pair, &[0, 1]);
    let fault = now_us();
    pair.refuse_ports(0, &ports);
    if pair.reset_connections(0, &ports).is_none() {
        return;
    }
    let report = job.finish();
    let what = ["host 10.213.0.2", "can't be reached again within 3000 ms from 10.213.0.1"];
    report.assert_notified(&[0, 1, 2, 3], fault + 3_000_000, &what);
    report.assert_code(1);
}

fn survives_rate(mbit: u32, set: &[&str], tensors: &str) {
    let Some(pair) = Pair::new() else { return };
    if pair.narrow(mbit).is_some() {
        let launch = pair.launch().set("worker.arena_segment_bytes=64MiB");
        let launch = set.iter().fold(launch, |launch, setting| launch.set(setting));
        let launch = launch.within(Duration::from_secs(220));
        assert_went_on(&launch.rank(&["attach", tensors, "leave"]).run(), "done");
    }
}

/// Two megabytes, which take 16 seconds, in pieces. The last piece waits for nearly all others.
#[test]
fn one_mbit_per_second_is_slow_but_works() {
    survives_rate(1, &["negotiation.piece_bytes=256KiB"], "submit:8:62500");
}

#[test]
fn ten_mbit_per_second_are_slow_but_work() {
    survives_rate(10, &[], "submit:2:1250000");
}

#[test]
fn thirty_mbit_per_second_are_slow_but_work() {
    survives_rate(30, &[], "submit:3:2000000");
}

#[test]
fn hundred_mbit_per_second_are_slow_but_work() {
    survives_rate(100, &["negotiation.piece_bytes=16MiB"], "submit:3:2000000");
}

#[test]
#[ignore = "takes minutes; run by make soak"]
fn large_tensors_pass_a_slow_line() {
    survives_rate(30, &[], "submit:1:16000000");
    survives_rate(100, &["negotiation.piece_bytes=16MiB"], "submit:8:4000000");
    survives_rate(
        1000,
        &["negotiation.piece_bytes=64MiB", "negotiation.credit_pieces=16"],
        "submit:16:16000000",
    );
}

#[test]
fn small_packets_are_enough() {
    let Some(pair) = Pair::new() else { return };
    pair.set_mtu(576);
    let report = pair.launch().rank(&["attach", "loop:10:100000", "leave"]).run();
    assert_went_on(&report, "looped");
}

/// Nothing arrives at one of the hosts, but what it sends arrives.
#[test]
fn a_line_cut_in_one_direction_is_reported() {
    for towards in [0, 1] {
        let Some(pair) = Pair::new() else { return };
        let launch = pair.launch().set("recovery.return_timeout_ms=3000");
        let mut job = begun(launch, &["loop:100000:100000"]);
        until_busy(&mut job, &pair, &[0, 1]);
        let fault = now_us();
        pair.cut_towards(towards);
        let report = job.finish();
        // The host that receives nothing reports it. The launcher may pass that on to the others.
        report.assert_notified(&[0, 1], fault, &[HOST]);
        report.assert_notified(&[2, 3], fault, &["10.213.0."]);
        report.assert_code(1);
    }
}

/// TCP does not reach the coordinator, but everything else does.
#[test]
fn a_blocked_coordinator_is_reported() {
    let Some(pair) = Pair::new() else { return };
    pair.swallow_ports(0, &[29_999]);
    let listen = "coordinator.listen=10.213.0.1:29999";
    let launch = pair.launch().set(listen).set("launch.start_timeout_ms=9000");
    let report = launch.rank(&["attach", "leave"]).run();
    report.assert_code(1);
    let cause = "can't be reached from 10.213.0.2 (no answer";
    let what = format!("host 10.213.0.2: the coordinator at 10.213.0.1:29999 {cause}");
    report.assert_verdict(&["the job failed: ", &what]);
    // The failure was reported before the time limit.
    assert!(!report.all().contains("not all nodes joined within"), "{}", report.all());
}

#[test]
fn a_coordinator_blocked_later_is_reported() {
    let Some(pair) = Pair::new() else { return };
    let launch = pair.launch().set("coordinator.listen=10.213.0.1:29999");
    // A stream may be silent for longer than a node: its system may need the time to retransmit.
    let launch = launch.set("heartbeat.timeout_ms=2000").set("recovery.return_timeout_ms=3000");
    let mut job = begun(launch, &["loop:100000:100000"]);
    until_busy(&mut job, &pair, &[0, 1]);
    let fault = now_us();
    pair.swallow_ports(0, &[29_999]);
    let report = job.finish();
    report.assert_notified(&[0, 1], fault, &[HOST, "its stream has been silent for"]);
    report.assert_notified(&[2, 3], fault, &["the coordinator at 10.213.0.1:29999"]);
    report.assert_code(1);
}
