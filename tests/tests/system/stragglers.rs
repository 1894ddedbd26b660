//! Metrics name the rank that others wait for.

use gradwire_tests::launched::Launch;

use super::metrics::{series, variable};

/// Every rank submits ten tensors, and before each of them this rank sleeps for 100 ms.
fn waits_for(launch: Launch, late: u32) {
    let each = [format!("{late}/sleep:100"), "loop:1:1000".to_owned()];
    let steps: Vec<String> = ["attach", "loop:3:1000"]
        .into_iter()
        .map(ToOwned::to_owned)
        .chain(std::iter::repeat_n(each, 10).flatten())
        .chain(["say:done", "until:end", "leave"].map(ToOwned::to_owned))
        .collect();
    let steps: Vec<&str> = steps.iter().map(String::as_str).collect();
    let mut job = launch.words(&["--verbose"]).rank(&steps).start();
    job.until_said("said", 4);
    let shown = series(&variable(&job, 0, "GRADWIRE_COORDINATOR_METRICS"));
    let of = |name: &str, rank: u32| {
        let key = format!("gradwire_coordinator_rank_{name}_total{{rank=\"{rank}\"}}");
        shown.get(&key).copied().unwrap_or_default()
    };
    let (count, time) = (of("last", late), of("lag_seconds", late));
    assert!((6.0..=13.0).contains(&count), "{count} tensors waited: {shown:?}");
    assert!(time > 0.3, "for {time} s: {shown:?}");
    for other in (0..4).filter(|rank| *rank != late) {
        assert!(of("lag_seconds", other) < time, "rank {other}: {shown:?}");
    }
    let waits = "gradwire_coordinator_rank_wait_seconds";
    assert!(shown[&format!("{waits}_sum")] > 0.3, "{shown:?}");
    // Waits of less than a millisecond need not be reported.
    assert!(shown[&format!("{waits}_count")] >= 10.0, "{shown:?}");
    job.allow("end");
    job.finish().assert_code(0);
}

#[test]
fn the_last_rank_of_the_last_node_is_named() {
    waits_for(Launch::new().two_by_two(), 3);
    waits_for(Launch::new().two_by_two(), 0);
}

/// The coordinator sees one announcement, once all ranks have submitted.
#[test]
fn the_last_rank_of_the_only_node_is_named() {
    waits_for(Launch::new().ranks(4), 2);
}

#[test]
fn the_only_rank_of_a_node_is_named() {
    let hosts = "127.0.0.1:1,127.0.0.2:1,127.0.0.3:1,127.0.0.4:1";
    waits_for(Launch::new().hosts(hosts), 1);
}
