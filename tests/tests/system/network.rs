//! Nodes on a network that works badly, and then not at all. This needs root, `ip` and `tc`. If
//! something is missing, a test prints that and passes.

use gradwire_tests::launched::{Job, network::Pair, now_us};

/// Ranks that ignore SIGTERM and work until they are notified of a failure.
fn busy(pair: &Pair) -> Job {
    let job = pair.launch().words(&["--verbose"]).rank(&["deaf", "attach", "loop:100000:100000"]);
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

#[test]
fn a_cut_cable_is_reported_on_both_sides() {
    let Some(pair) = Pair::new() else { return };
    let job = busy(&pair);
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
    let Some(pair) = Pair::new() else { return };
    let job = busy(&pair);
    let ports: Vec<u16> = job
        .served("data")
        .into_iter()
        .filter_map(|address| address.strip_prefix("10.213.0.2:")?.parse().ok())
        .collect();
    let fault = now_us();
    pair.swallow_ports(1, &ports);
    let report = job.finish();
    report.assert_notified(
        &[0, 1, 2, 3],
        fault,
        &["host 10.213.0.", "no data has moved for 5000 ms"],
    );
    report.assert_code(1);
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
