//! Metrics of where the time of operations goes: their phases.

use gradwire_tests::launched::Launch;

use super::metrics::{Series, series, variable};

/// The sum and count of a histogram; zeros if it does not exist.
fn histogram(series: &Series, name: &str, labels: &str) -> (f64, f64) {
    let of = |end| series.get(&format!("{name}_{end}{labels}")).copied().unwrap_or_default();
    (of("sum"), of("count"))
}

fn phase(series: &Series, part: &str, phase: &str) -> (f64, f64) {
    let name = format!("gradwire_{part}_phase_seconds");
    histogram(series, &name, &format!("{{phase=\"{phase}\"}}"))
}

/// Compares sums of the same durations, added in a different order.
fn is_about(one: f64, other: f64) -> bool {
    (one - other).abs() <= 1e-6 + 1e-6 * other.abs()
}

#[test]
fn the_phases_add_up_to_the_operations_time() {
    // Ten times, rank 1 on the first node is late by 100 ms. Then many tensors come at once.
    let late = ["1/sleep:100", "loop:1:1000"].repeat(10);
    let steps = [
        &["attach", "loop:3:1000"],
        &late[..],
        &["say:idle", "until:go", "submit:40:20000", "say:done", "until:end", "leave"],
    ]
    .concat();
    let launch = Launch::new().two_by_two().words(&["--verbose"]);
    let launch = launch.set("probe.enabled=false").set("negotiation.credit_pieces=1");
    let mut job = launch
        .set("data.chunk_bytes=64KiB")
        .set("negotiation.piece_bytes=64KiB")
        .rank(&steps)
        .start();
    job.until_said("said", 4);
    let daemons = [0, 2].map(|rank| variable(&job, rank, "GRADWIRE_DAEMON_METRICS"));
    let all = |operations: f64| {
        job.wait_for("all operations counted", || {
            let all = daemons.each_ref().map(|address| series(address));
            let done = |series: &Series| series["gradwire_daemon_operations_total"];
            all.iter().all(|series| done(series) >= operations).then_some(all)
        })
    };
    let before = all(13.0);
    for series in &before {
        let (took, operations) = histogram(series, "gradwire_daemon_operation_seconds", "");
        let (transfer, transferred) = phase(series, "daemon", "transfer");
        let (publish, published) = phase(series, "daemon", "publish");
        assert_eq!([operations, transferred, published], [13.0; 3], "{series:?}");
        assert!(publish > 0.0 && is_about(transfer + publish, took), "{series:?}");
    }
    // The ranks of the first node wait for each other, and the second node waits for the first.
    let gather = before.each_ref().map(|series| phase(series, "daemon", "gather"));
    assert_eq!(gather.map(|(_, count)| count), [13.0; 2], "{before:?}");
    assert!(gather[0].0 > 0.5 && gather[1].0 < gather[0].0, "{gather:?}");
    let coordinator = &before[0];
    let (negotiate, negotiated) = phase(coordinator, "coordinator", "negotiate");
    let (credit, credited) = phase(coordinator, "coordinator", "credit");
    assert_eq!([negotiated, credited], [13.0; 2], "{coordinator:?}");
    assert!(negotiate > 0.5, "{negotiate} s");
    assert!(credit < negotiate, "single tensors wait for no other: {coordinator:?}");
    let (negotiation, _) = histogram(coordinator, "gradwire_coordinator_negotiation_seconds", "");
    assert!(is_about(negotiate + credit, negotiation), "{coordinator:?}");

    job.allow("go");
    job.wait_for("many tensors at once", || {
        let (credit, credited) = phase(&series(&daemons[0]), "coordinator", "credit");
        (credited >= 53.0 && credit > 0.0).then_some(())
    });
    job.allow("end");
    job.finish().assert_code(0);
}

/// Results published while they are computed have no separate phase.
#[test]
fn an_operation_of_one_node_is_only_transfer() {
    let steps = ["attach", "loop:5:1000", "loop:2:100000", "say:done", "until:end", "leave"];
    let mut job = Launch::new().ranks(2).words(&["--verbose"]).rank(&steps).start();
    job.until_said("said", 2);
    let daemon = variable(&job, 0, "GRADWIRE_DAEMON_METRICS");
    let series = job.wait_for("all operations counted", || {
        let series = series(&daemon);
        // The large tensors are several operations, and the small ones need not be ordered.
        let done = series["gradwire_daemon_operations_total"];
        let under_way = series["gradwire_coordinator_operations_in_flight"];
        (done >= 7.0 && under_way == 0.0).then_some(series)
    });
    let (took, operations) = histogram(&series, "gradwire_daemon_operation_seconds", "");
    let (transfer, transferred) = phase(&series, "daemon", "transfer");
    assert!(operations >= 7.0 && operations == transferred, "{series:?}");
    assert!(transfer > 0.0 && is_about(transfer, took), "{series:?}");
    assert_eq!(phase(&series, "daemon", "publish"), (0.0, 0.0));
    job.allow("end");
    job.finish().assert_code(0);
}
