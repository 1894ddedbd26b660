//! The metrics of lanes and operations: how each lane spends its time, how bytes are moved, which
//! pieces and buffers exist, and which connections are rejected or kept waiting.

use std::{io::Write, net::TcpStream, time::Instant};

use gradwire_tests::launched::{Job, Launch, processes::Role};
use rustix::process::Signal;

use super::metrics::{Series, series, variable};

/// The sum of all series of a metric with these labels, in the order of the declaration.
fn sum(series: &Series, metric: &str, labels: &str) -> f64 {
    let matching = series.iter().filter(|(key, _)| {
        key.strip_prefix(metric).is_some_and(|rest| rest.starts_with('{') && rest.contains(labels))
    });
    matching.map(|(_, value)| value).sum()
}

/// The metrics of a daemon once it has done all operations that the coordinator ordered.
fn settled(job: &Job, daemon: &str, coordinator: &str) -> Series {
    job.wait_for("all operations counted", || {
        let ordered = series(coordinator)["gradwire_coordinator_operations_total"];
        let series = series(daemon);
        (series["gradwire_daemon_operations_total"] == ordered).then_some(series)
    })
}

const LANE_SECONDS: &str = "gradwire_daemon_lane_seconds_total";

#[test]
fn lanes_account_for_their_time_and_bytes() {
    let steps = ["attach", "loop:3:1000", "until:go", "loop:20:200000", "until:end", "leave"];
    let launch = Launch::new().two_by_two().words(&["--verbose"]);
    let launch = launch.set("negotiation.algorithm=recursive-doubling");
    let began = Instant::now();
    let mut job = launch.rank(&steps).start();
    job.until_said("looped", 4);
    let daemons = [0, 2].map(|rank| variable(&job, rank, "GRADWIRE_DAEMON_METRICS"));
    let before = settled(&job, &daemons[0], &daemons[0]);
    job.allow("go");
    job.wait_for("the second loop", || {
        let looped = job.lines().iter().filter(|line| line.text.contains(" looped 20 ")).count();
        (looped >= 4).then_some(())
    });
    let after = settled(&job, &daemons[0], &daemons[0]);
    let other = settled(&job, &daemons[1], &daemons[0]);
    for activity in ["reduce", "send", "receive", "publish", "idle"] {
        let labels = format!("activity=\"{activity}\"");
        let [was, is] = [&before, &after].map(|series| sum(series, LANE_SECONDS, &labels));
        assert!(is > was, "{activity}: {was} s, {is} s");
    }
    // No time counts twice.
    let elapsed = began.elapsed().as_secs_f64();
    for lane in ["0", "1"] {
        let labels = format!("lane=\"{lane}\"");
        let spent = sum(&after, LANE_SECONDS, &labels);
        assert!(spent > 0.0 && spent <= elapsed, "lane {lane}: {spent} s in {elapsed} s");
    }

    for series in [&after, &other] {
        let moved = |labels: &str| sum(series, "gradwire_daemon_moved_bytes_total", labels);
        let published = series["gradwire_daemon_published_bytes_total"];
        let of_loops = 4.0 * (3.0 * 1000.0 + 20.0 * 200_000.0);
        assert_eq!(published, of_loops);
        let labels = "{collective=\"allreduce\",algorithm=\"recursive-doubling\",\
                      scope=\"inter_node\"}";
        assert_eq!([moved(""), moved(labels)], [published; 2], "{series:?}");
        // One tensor at a time, which is in each of its pieces.
        let operations = series["gradwire_daemon_operations_total"];
        assert_eq!(series["gradwire_daemon_operation_tensors_total"], operations);
        assert_eq!(series["gradwire_daemon_pieces_in_flight"], 0.0);
        assert_eq!(series["gradwire_daemon_held_frames"], 0.0);
        let staging = series["gradwire_daemon_memory_bytes{buffer=\"staging\"}"];
        assert!(staging >= 200_000.0, "{staging} bytes");
    }
    job.allow("end");
    job.finish().assert_code(0);
}

/// More threads than this machine has processors.
#[test]
fn helpers_do_shares_of_large_pieces() {
    let launch = Launch::new().ranks(4).words(&["--verbose"]).set("launch.grace_ms=500");
    let launch = launch.set("data.threads=32");
    let mut job = launch.rank(&["attach", "loop:100000:400000"]).start();
    job.until_said("looping", 4);
    let daemon = variable(&job, 0, "GRADWIRE_DAEMON_METRICS");
    assert_eq!(series(&daemon)["gradwire_daemon_reducing_threads"], 32.0);
    job.wait_for("shares of helpers", || {
        let series = series(&daemon);
        let [shares, wakes] =
            ["shares", "wakes"].map(|what| series[&format!("gradwire_daemon_helper_{what}_total")]);
        (shares > 0.0 && wakes > 0.0).then_some(())
    });
    job.signal(Role::Launcher, Signal::KILL);
    job.finish().assert_code(128 + 9);
}

/// Every node sends to every other one, so frames arrive before their step may receive them.
#[test]
fn pieces_and_early_frames_are_shown() {
    let hosts = "127.0.0.1:1,127.0.0.2:1,127.0.0.3:1,127.0.0.4:1";
    let launch = Launch::new().hosts(hosts).words(&["--verbose"]).set("launch.grace_ms=500");
    let launch = launch.set("negotiation.algorithm=circulant").set("data.chunk_bytes=4KiB");
    let mut job = launch.rank(&["attach", "loop:100000:100000"]).start();
    job.until_said("looping", 4);
    let daemons = [0, 1, 2, 3].map(|rank| variable(&job, rank, "GRADWIRE_DAEMON_METRICS"));
    for metric in ["pieces_in_flight", "held_frames", "memory_bytes{buffer=\"frames\"}"] {
        job.wait_for(metric, || {
            let shown = |address: &String| series(address)[&format!("gradwire_daemon_{metric}")];
            daemons.iter().any(|address| shown(address) > 0.0).then_some(())
        });
    }
    job.signal(Role::Launcher, Signal::KILL);
    job.finish().assert_code(128 + 9);
}

#[test]
fn fused_tensors_and_operations_are_counted() {
    let steps = ["attach", "loop:3:1000", "until:go", "submit:50:1000", "until:end", "leave"];
    let launch = Launch::new().two_by_two().words(&["--verbose"]).set("probe.enabled=false");
    let mut job = launch.set("negotiation.credit_pieces=1").rank(&steps).start();
    job.until_said("looped", 4);
    let daemons = [0, 2].map(|rank| variable(&job, rank, "GRADWIRE_DAEMON_METRICS"));
    settled(&job, &daemons[0], &daemons[0]);
    // The stopped daemon makes its ranks wait, and the other one collects what becomes ready.
    job.signal(Role::Daemon(1), Signal::STOP);
    job.allow("go");
    job.wait_for("tensors in the queue", || {
        (series(&daemons[0])["gradwire_daemon_queued_tensors"] == 50.0).then_some(())
    });
    job.signal(Role::Daemon(1), Signal::CONT);
    job.until_said("done", 4);
    let after = settled(&job, &daemons[0], &daemons[0]);
    let [tensors, operations] = ["operation_tensors", "operations"]
        .map(|what| after[&format!("gradwire_daemon_{what}_total")]);
    assert_eq!(tensors, 53.0);
    assert!(operations < tensors, "{operations} operations");
    job.allow("end");
    job.finish().assert_code(0);
}

/// Bytes within a node do not count as network traffic.
#[test]
fn bytes_within_a_node_are_not_network_traffic() {
    let steps = ["attach", "loop:3:1000", "loop:1:200000", "say:idle", "until:end", "leave"];
    let mut job = Launch::new().ranks(2).words(&["--verbose"]).rank(&steps).start();
    job.until_said("said", 2);
    let daemon = variable(&job, 0, "GRADWIRE_DAEMON_METRICS");
    let labels = "{collective=\"allreduce\",algorithm=\"none\",scope=\"intra_node\"}";
    let moved = job.wait_for("all bytes counted", || {
        let series = series(&daemon);
        let moved = ["", labels].map(|one| sum(&series, "gradwire_daemon_moved_bytes_total", one));
        (moved[0] >= 4.0 * 203_000.0).then_some(moved)
    });
    assert_eq!(moved, [4.0 * 203_000.0; 2]);
    job.allow("end");
    job.finish().assert_code(0);
}

/// Tensors in shared memory are not copied, but all others are.
#[test]
fn copied_tensors_are_counted_separately() {
    let steps = ["attach", "loop:5:1000", "slice:3:2000", "say:idle", "until:end", "leave"];
    let mut job = Launch::new().two_by_two().words(&["--verbose"]).rank(&steps).start();
    job.until_said("said", 4);
    for rank in [0, 2] {
        let daemon = variable(&job, rank, "GRADWIRE_DAEMON_METRICS");
        let series = series(&daemon);
        let of = |memory: &str| {
            series[&format!("gradwire_daemon_submitted_bytes_total{{memory=\"{memory}\"}}")]
        };
        // Two ranks, with four bytes per element.
        assert_eq!([of("shared"), of("ordinary")], [40_000.0, 48_000.0], "{series:?}");
    }
    job.allow("end");
    job.finish().assert_code(0);
}

/// Rejected connections are counted by reason.
#[test]
fn rejected_connections_are_counted_by_reason() {
    let steps = ["attach", "loop:3:1000", "until:end", "leave"];
    let launch = Launch::new().two_by_two().words(&["--verbose"]);
    let mut job = launch.set("data.connect_timeout_ms=500").rank(&steps).start();
    job.until_said("looped", 4);
    let daemons = [0, 2].map(|rank| variable(&job, rank, "GRADWIRE_DAEMON_METRICS"));
    let data = job.served("data");
    let rejected = |reason: &str| -> f64 {
        let labels = format!("reason=\"{reason}");
        let of = |address: &String| {
            sum(&series(address), "gradwire_daemon_rejected_connections_total", &labels)
        };
        daemons.iter().map(of).sum()
    };
    assert_eq!(rejected(""), 0.0);
    let connect = || TcpStream::connect(&data[0]).expect("a daemon that listens");
    let mut stranger = connect();
    stranger.write_all(&[b'x'; 4096]).unwrap();
    job.wait_for("a foreign connection", || (rejected("not_gradwire") == 1.0).then_some(()));
    drop(stranger);
    drop(connect());
    job.wait_for("a connection that ends early", || (rejected("broken") == 1.0).then_some(()));
    let silent = connect();
    job.wait_for("a silent connection", || (rejected("silent") == 1.0).then_some(()));
    drop(silent);
    assert_eq!(rejected(""), 3.0);
    job.allow("end");
    job.finish().assert_code(0);
}

/// The coordinator does not know of a tensor that waits for a rank of the same node.
#[test]
fn a_wait_within_a_node_is_a_stall_of_its_daemon() {
    let steps = ["attach", "loop:3:1000", "1/until:go", "loop:1:1000", "until:end", "leave"];
    let launch = Launch::new().two_by_two().words(&["--verbose"]);
    let mut job = launch.set("negotiation.stall_warning_ms=500").rank(&steps).start();
    job.until_said("looped", 4);
    let daemons = [0, 2].map(|rank| variable(&job, rank, "GRADWIRE_DAEMON_METRICS"));
    let stalled = "gradwire_daemon_stalled_tensors";
    job.wait_for("a stall", || (series(&daemons[0])[stalled] == 1.0).then_some(()));
    // The other node has announced it, and the coordinator waits for the first one.
    job.wait_for("no stall there", || (series(&daemons[1])[stalled] == 0.0).then_some(()));
    job.allow("go");
    job.wait_for("its end", || (series(&daemons[0])[stalled] == 0.0).then_some(()));
    job.allow("end");
    job.finish().assert_code(0);
}

#[test]
fn small_operations_of_a_node_need_no_order() {
    let steps = ["attach", "loop:1000:10", "until:end", "leave"];
    let mut job = Launch::new().ranks(2).words(&["--verbose"]).rank(&steps).start();
    job.until_said("looped", 2);
    let daemon = variable(&job, 0, "GRADWIRE_DAEMON_METRICS");
    let series = job.wait_for("all operations counted", || {
        let series = series(&daemon);
        (series["gradwire_daemon_operations_total"] >= 1000.0).then_some(series)
    });
    // The first ones are ordered, and those for which a rank waited, as on a busy machine.
    let ordered = series["gradwire_coordinator_operations_total"];
    assert!(ordered < series["gradwire_daemon_operations_total"], "{ordered} were ordered");
    job.allow("end");
    job.finish().assert_code(0);
}
