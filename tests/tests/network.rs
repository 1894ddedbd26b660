//! Nodes on a network that works badly, and then not at all. Needs root, `ip` and `tc`; for lost
//! packets also `nft`. Where something is missing the test says so and passes.

use gradwire_tests::launched::{Job, Launch, network::Pair, now_us};

/// Two ranks on each of two hosts, the second reached by a stand-in for ssh.
fn launch(pair: &Pair) -> Launch {
    Launch::new().hosts(Pair::TWO_EACH).ssh(&pair.ssh()).in_network(pair.first())
}

/// Deaf ranks that work until they are told of a failure.
fn busy(pair: &Pair) -> Job {
    let job = launch(pair).words(&["--verbose"]).rank(&["deaf", "attach", "loop:100000:100000"]);
    let job = job.start();
    job.until_said("looping", 4);
    job
}

#[test]
fn sums_are_exact_over_a_slow_cable_that_loses_packets() {
    let Some(pair) = Pair::new() else { return };
    let well = |elements: &str| {
        let report = launch(&pair).rank(&["attach", elements, "leave"]).run();
        report.assert_code(0);
        assert_eq!(report.said("looped").len(), 4, "{}", report.all());
    };
    well("loop:10:100000");
    if pair.narrow(100).is_some() {
        well("loop:3:1000000");
    }
    if pair.lose_one_in(20).is_some() {
        well("loop:10:100000");
    }
}

#[test]
fn a_cable_that_is_cut_is_told_on_both_sides() {
    let Some(pair) = Pair::new() else { return };
    let job = busy(&pair);
    let fault = now_us();
    pair.cut();
    let report = job.finish();
    report.assert_told(
        &[0, 1],
        fault,
        &["host 10.213.0.2", "is lost: nothing was heard of it for "],
    );
    report.assert_told(&[2, 3], fault, &["the coordinator at 10.213.0.1:", "has been silent for "]);
    report.assert_code(1);
}

#[test]
fn data_ports_that_nothing_gets_through_to_are_told_although_the_nodes_are_heard() {
    let Some(pair) = Pair::new() else { return };
    let job = busy(&pair);
    let ports = job
        .served("data")
        .into_iter()
        .filter_map(|address| address.strip_prefix("10.213.0.2:")?.parse().ok());
    let fault = now_us();
    for port in ports {
        pair.swallow_port(port);
    }
    let report = job.finish();
    report.assert_told(&[0, 1, 2, 3], fault, &["host 10.213.0.", "no data has moved for 4000 ms"]);
    report.assert_code(1);
}
