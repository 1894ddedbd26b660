//! Nodes on a network that works badly, and then not at all. This needs root, `ip` and `tc`. If
//! something is missing, a test prints that and passes.

use std::{thread::sleep, time::Duration};

use gradwire_tests::launched::{Job, Launch, network::Pair, now_us};

/// Ranks that ignore SIGTERM and work until they are notified of a failure.
/// A host that is silent for longer than `heartbeat.timeout_ms` is not waited for.
const IMPATIENT: &str = "recovery.return_timeout_ms=3000";

fn busy(pair: &Pair, set: &str) -> Job {
    let job = pair.launch().set(set).words(&["--verbose"]);
    let job = job.rank(&["deaf", "attach", "loop:100000:100000"]);
    let job = job.start();
    job.until_said("looping", 4);
    job
}

#[test]
fn sums_are_exact_over_a_slow_lossy_cable() {
    let Some(pair) = Pair::new() else { return };
    let well = |elements: &str| {
        let report = pair.launch().rank(&["attach", elements, "leave"]).run();
        report.assert_code(0);
        assert_eq!(report.said("looped").len(), 4, "{}", report.all());
    };
    well("loop:10:100000");
    if pair.narrow(100).is_some() {
        well("loop:3:1000000");
    }
    // One packet in twenty.
    if pair.lose(13).is_some() {
        well("loop:10:100000");
    }
}

/// The network of the data is not that of the launcher and of the coordinator.
#[test]
fn the_data_takes_the_network_that_is_named() {
    let Some(pair) = Pair::new() else { return };
    pair.add_network("fast0");
    let job = |launch: Launch| launch.words(&["--verbose"]).rank(&["attach", "loop:3:9", "leave"]);
    let uses = |launch: Launch, network: &str| {
        let running = job(launch).start();
        running.until_said("looped", 4);
        let data = running.served("data");
        assert!(data.len() == 2 && data.iter().all(|at| at.starts_with(network)), "{data:?}");
        running.finish().assert_code(0);
    };
    uses(pair.launch(), "10.213.0.");
    for choice in ["fast0", "fa*", "10.214.0.0/16", "^lo,cable"] {
        uses(pair.launch().set(&format!("data.interface={choice}")), Pair::SECOND);
    }
    uses(pair.launch().variable("NCCL_SOCKET_IFNAME", "fast"), Pair::SECOND);
    uses(pair.launch().variable("GLOO_SOCKET_IFNAME", "none"), "10.213.0.");
    let report = job(pair.launch().set("data.interface=fast1")).run();
    assert_ne!(report.code(), 0, "{}", report.all());
    assert!(report.all().contains("none of this host's interfaces fits: lo ("), "{}", report.all());
}

/// Both carry about half of the data.
#[test]
fn interfaces_are_used_together() {
    let Some(pair) = Pair::new() else { return };
    pair.add_network("fast0");
    let networks = ["cable", "fast0"];
    let count = |host| networks.map(|network| pair.received_over(network, host));
    let before = [count(0), count(1)];
    let launch = pair.launch().set("data.interface=cable+fast0");
    let report = launch.rank(&["attach", "loop:20:1000000", "leave"]).run();
    report.assert_code(0);
    assert_eq!(report.said("looped").len(), 4, "{}", report.all());
    for (host, before) in before.into_iter().enumerate() {
        let after = count(host);
        let bytes = [0, 1].map(|network| after[network] - before[network]);
        // Twenty sums of 4 MB, in which each host sends and receives about one tensor.
        assert!(bytes.iter().sum::<u64>() > 70_000_000, "{bytes:?}");
        assert!(bytes.iter().all(|one| *one > 25_000_000), "{bytes:?}");
    }
}

/// A host with fewer interfaces uses those that it has.
#[test]
fn a_hostfile_names_interfaces_of_a_host() {
    let Some(pair) = Pair::new() else { return };
    pair.add_network("fast0");
    let name = format!("gwtest-interfaces-{}", std::process::id());
    let folder = std::env::temp_dir().join(name);
    std::fs::create_dir(&folder).unwrap();
    let file = folder.join("hosts");
    let lines = "10.213.0.1 slots=2 interface=fast0+cable\n10.213.0.2 slots=2 interface=fast*\n";
    std::fs::write(&file, lines).unwrap();
    let launch = Launch::new().ssh(&pair.ssh()).in_network(pair.first());
    let launch = launch.words(&["--verbose", "--hostfile", file.to_str().unwrap()]);
    let before = pair.received_over("fast0", 1);
    let running = launch.rank(&["attach", "loop:20:1000000", "leave"]).start();
    running.until_said("looped", 4);
    let data = running.served("data");
    assert!(data.len() == 2 && data.iter().all(|at| at.starts_with(Pair::SECOND)), "{data:?}");
    running.finish().assert_code(0);
    assert!(pair.received_over("fast0", 1) - before > 70_000_000);
    std::fs::remove_dir_all(folder).unwrap();
}

/// Ranks notice nothing of it.
#[test]
fn an_interface_of_two_may_flap() {
    let Some(pair) = Pair::new() else { return };
    pair.add_network("fast0");
    let launch = pair.launch().set("data.interface=cable+fast0").words(&["--verbose"]);
    let job = launch.rank(&["attach", "loop:12:1000000", "leave"]).start();
    job.until_said("looping", 4);
    for _ in 0..2 {
        pair.set_interface("fast0", 1, false);
        sleep(Duration::from_secs(1));
        pair.set_interface("fast0", 1, true);
        sleep(Duration::from_millis(500));
    }
    let report = job.finish();
    report.assert_code(0);
    assert_eq!(report.said("looped").len(), 4, "{}", report.all());
}

#[test]
fn a_lost_interface_of_two_is_named() {
    let Some(pair) = Pair::new() else { return };
    pair.add_network("fast0");
    let set = "recovery.return_timeout_ms=3000";
    let launch = pair.launch().set(set).set("data.interface=cable+fast0");
    let job = launch.rank(&["deaf", "attach", "loop:100000:100000"]).start();
    job.until_said("looping", 4);
    let fault = now_us();
    pair.set_interface("fast0", 1, false);
    let report = job.finish();
    // Either host may notice the loss first.
    report.assert_notified(&[0, 1, 2, 3], fault, &["10.214.0.1", "10.214.0.2"]);
    report.assert_code(1);
}

#[test]
fn a_cut_cable_is_reported_on_both_sides() {
    let Some(pair) = Pair::new() else { return };
    let job = busy(&pair, IMPATIENT);
    let fault = now_us();
    pair.cut();
    let report = job.finish();
    report.assert_notified(
        &[0, 1],
        fault,
        &["host 10.213.0.2", "is lost: it has been silent for "],
    );
    report.assert_notified(
        &[2, 3],
        fault,
        &["the coordinator at 10.213.0.1:", "has been silent for "],
    );
    report.assert_code(1);
}

#[test]
fn blocked_data_ports_of_live_nodes_are_reported() {
    let again = ["host 10.213.0.2: its data plane at ", "can't be reached again within 3000 ms"];
    let late = ["host 10.213.0.", "no data has moved for 5000 ms"];
    for (set, what) in [(IMPATIENT, again), ("recovery.enabled=false", late)] {
        let Some(pair) = Pair::new() else { return };
        let job = busy(&pair, set);
        let ports: Vec<u16> = job
            .served("data")
            .into_iter()
            .filter_map(|address| address.strip_prefix("10.213.0.2:")?.parse().ok())
            .collect();
        let fault = now_us();
        pair.swallow_ports(1, &ports);
        let report = job.finish();
        report.assert_notified(&[0, 1, 2, 3], fault, &what);
        report.assert_code(1);
    }
}

/// Many attempts to connect fail, because each fails at once.
#[test]
fn data_ports_that_refuse_are_reported_in_time() {
    let Some(pair) = Pair::new() else { return };
    let launch = pair.launch().set("data.connect_timeout_ms=5000").set("job.timeout_ms=20000");
    // A probe would have made the connections before.
    let launch = launch.set("probe.enabled=false");
    let steps = ["deaf", "attach", "say:begun", "until:go", "loop:10:1000"];
    let mut job = launch.words(&["--verbose"]).rank(&steps).start();
    job.until_said("said", 4);
    let address = |address: String| address.strip_prefix("10.213.0.2:")?.parse().ok();
    let ports: Vec<u16> = job.served("data").into_iter().filter_map(address).collect();
    pair.refuse_ports(0, &ports);
    let began = now_us();
    job.allow("go");
    let report = job.finish();
    let what = ["host 10.213.0.2", "can't be reached from 10.213.0.1: Permission denied"];
    report.assert_notified(&[0, 1, 2, 3], began + 5_000_000, &what);
    report.assert_code(1);
}

/// Twice as long as the way to a satellite and back. The limits for connecting follow the measured
/// round trip.
#[test]
fn half_a_second_each_way_is_not_too_far() {
    let Some(pair) = Pair::new() else { return };
    if pair.lengthen(Duration::from_millis(500)).is_none() {
        return;
    }
    let report = pair.launch().rank(&["attach", "loop:2:1000", "leave"]).run();
    report.assert_code(0);
    assert_eq!(report.said("looped").len(), 4, "{}", report.all());
}

/// TELL: the ranks of both hosts learn that the line was cut in a phase of the job: that the other
/// side is silent. `begun` ranks have reached the phase when they have said something; then the
/// line is cut `after` a file has let them go on.
fn cut_in_phase(pair: &Pair, set: &str, steps: &[&str], begun: usize, after: Option<Duration>) {
    let steps = [&["deaf"], steps].concat();
    let launch = pair.launch().set(IMPATIENT).set(set).words(&["--verbose"]);
    let mut job = launch.rank(&steps).start();
    job.until_said("said", begun);
    if let Some(after) = after {
        job.allow("go");
        sleep(after);
    }
    let fault = now_us();
    pair.cut();
    let report = job.finish();
    let notified = |ranks: &[u32], what: &[&str]| {
        let said = report.said("failed");
        let failed = ranks.iter().filter(|rank| said.iter().any(|said| said.rank == **rank));
        report.assert_notified(&failed.copied().collect::<Vec<_>>(), fault, what);
        assert!(said.iter().any(|said| ranks.contains(&said.rank)), "{}", report.all());
    };
    notified(&[0, 1], &["host 10.213.0.2", "is lost: it has been silent for "]);
    notified(&[2, 3], &["the coordinator at 10.213.0.1:", "has been silent for "]);
    report.assert_code(1);
}

#[test]
fn a_cut_while_ranks_join_is_reported() {
    let Some(pair) = Pair::new() else { return };
    let steps = ["3/until:never", "attach", "say:joined", "loop:100000:1000"];
    cut_in_phase(&pair, "probe.enabled=true", &steps, 3, None);
}

#[test]
fn a_cut_before_connecting_is_reported() {
    let Some(pair) = Pair::new() else { return };
    let steps = ["attach", "say:joined", "until:go", "loop:100000:1000"];
    // The data connections are made for the first operation. The long line makes that slow.
    if pair.lengthen(Duration::from_millis(300)).is_some() {
        cut_in_phase(&pair, "probe.enabled=false", &steps, 4, Some(Duration::from_millis(100)));
    }
}

#[test]
fn a_cut_while_links_are_measured_is_reported() {
    let Some(pair) = Pair::new() else { return };
    let steps = ["attach", "say:joined", "until:go", "loop:100000:1000"];
    // The measurement takes its whole second.
    if pair.lengthen(Duration::from_millis(50)).is_some() {
        cut_in_phase(&pair, "probe.enabled=true", &steps, 4, Some(Duration::from_millis(500)));
    }
}

/// The ranks that remain wait for nothing, so only the launcher says what happened.
#[test]
fn a_cut_after_some_have_left_is_reported() {
    let Some(pair) = Pair::new() else { return };
    let steps = ["attach", "loop:3:1000", "0/leave", "2/leave", "say:left", "until:never"];
    let job = pair.launch().words(&["--verbose"]).rank(&steps).start();
    job.until_said("said", 4);
    pair.cut();
    let report = job.finish();
    report.assert_code(1);
    report.assert_verdict(&["been silent for "]);
}
