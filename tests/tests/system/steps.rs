//! Metrics of the steps of each rank, and of the time that communication adds to them.

use gradwire_tests::launched::Launch;

use super::metrics::{series, variable};

#[test]
fn only_waiting_ranks_are_blocked() {
    let steps = ["attach", "loop:3:1000", "1/sleep:400", "submit:1:1000", "mark:3", "0/mark:2"];
    let end = ["say:done", "until:go", "1/until:late", "submit:1:999", "until:end", "leave"];
    let launch = Launch::new().hosts("127.0.0.1:1,127.0.0.2:1").words(&["--verbose"]);
    let mut job = launch.rank(&[&steps[..], &end].concat()).start();
    job.until_said("said", 2);
    let metrics = [0, 1].map(|rank| variable(&job, rank, "GRADWIRE_DAEMON_METRICS"));
    let of = |rank: usize, name: &str| {
        let key = format!("gradwire_daemon_rank_{name}{{rank=\"{rank}\"}}");
        series(&metrics[rank]).get(&key).copied()
    };
    assert_eq!([0, 1].map(|rank| of(rank, "steps_total")), [Some(5.0), Some(3.0)]);
    let [waited, late] = [0, 1].map(|rank| of(rank, "blocked_seconds_total").unwrap());
    assert!(waited > 0.3, "rank 0 waited for {waited} s");
    assert!(late < waited - 0.2, "rank 1 waited for {late} s, rank 0 for {waited} s");
    let in_flight = of(0, "in_flight_seconds_total").unwrap();
    assert!(in_flight >= waited - 0.05, "{in_flight} s in flight, {waited} s blocked");
    let since = of(0, "since_step_seconds").unwrap();

    // A wait that has not ended counts.
    job.allow("go");
    let began = std::time::Instant::now();
    while of(0, "blocked_seconds_total").unwrap() < waited + 0.1 {
        assert!(began.elapsed().as_secs() < 20, "rank 0 does not seem to wait");
    }
    assert!(of(0, "since_step_seconds").unwrap() > since);
    let idle = of(1, "in_flight_seconds_total");
    assert_eq!(of(1, "in_flight_seconds_total"), idle);
    job.allow("late");
    job.allow("end");
    job.finish().assert_code(0);
}
