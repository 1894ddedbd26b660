//! Metrics of daemons about their own use of the machine, compared with the system's figures.

use std::{collections::BTreeMap, fs};

use gradwire_tests::launched::{Launch, processes::Role};

use super::metrics::{Series, series, variable};

/// The value after `name` in a file of `/proc`.
fn field(file: &str, name: &str) -> Option<f64> {
    let text = fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().find_map(|word| word.parse().ok())
}

fn entries(folder: &str) -> f64 {
    fs::read_dir(folder).expect(folder).count() as f64
}

/// Processor seconds by thread.
fn by_thread(series: &Series) -> BTreeMap<&str, f64> {
    let named = series.iter().filter_map(|(key, seconds)| {
        let name = key.strip_prefix("gradwire_thread_cpu_seconds_total{thread=\"")?;
        Some((name.strip_suffix("\"}")?, *seconds))
    });
    named.collect()
}

#[test]
fn a_daemons_usage_agrees_with_the_system() {
    let steps = ["attach", "loop:3:1000", "until:go", "loop:20:500000", "until:end", "leave"];
    let mut job = Launch::new().two_by_two().words(&["--verbose"]).rank(&steps).start();
    job.until_said("looped", 4);
    let daemon = variable(&job, 0, "GRADWIRE_DAEMON_METRICS");
    let pid = job.process(Role::Daemon(0)).pid;
    let proc = format!("/proc/{pid}");
    let before = series(&daemon);
    job.allow("go");
    job.wait_for("twice looped", || {
        let looped = job.lines().iter().filter(|line| line.text.contains(" looped 20 ")).count();
        (looped >= 4).then_some(())
    });
    let after = series(&daemon);

    // A thread may have started or ended, such as one that resolves an address.
    let threads = entries(&format!("{proc}/task"));
    assert!((after["process_threads"] - threads).abs() <= 2.0, "{threads}: {after:?}");
    let most = field(&format!("{proc}/limits"), "Max open files").unwrap();
    assert_eq!(after["process_max_fds"], most);
    // The descriptor of the scrape itself may have changed the number.
    let open = entries(&format!("{proc}/fd"));
    assert!((after["process_open_fds"] - open).abs() <= 3.0, "{open}: {after:?}");
    let resident = field(&format!("{proc}/status"), "VmRSS:").unwrap() * 1024.0;
    let shown = after["process_resident_memory_bytes"];
    assert!((resident / 2.0..resident * 2.0).contains(&shown), "{shown} of {resident} bytes");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let age = now.as_secs_f64() - after["process_start_time_seconds"];
    assert!((-2.0..300.0).contains(&age), "started {age} s ago");

    // BOUND: the catalog has a test for larger jobs.
    assert!(after.len() <= 1500, "{} series", after.len());

    // The lanes of this job have worked, and the sum of all threads is the usage of the process.
    let (was, is) = (by_thread(&before), by_thread(&after));
    for thread in ["gw-control", "gw-http", "gw-worker", "gw-lane-0", "gw-lane-1", "other"] {
        assert!(is[thread] >= was[thread], "{thread}: {was:?} {is:?}");
    }
    let lanes = |of: &BTreeMap<&str, f64>| of["gw-lane-0"] + of["gw-lane-1"];
    assert!(lanes(&is) > lanes(&was), "{was:?} {is:?}");
    let (threads, process): (f64, f64) = (is.values().sum(), after["process_cpu_seconds_total"]);
    // Each thread's time is a number of ticks of 10 ms, and some are read a moment later.
    let unsure = 0.02 * (is.len() + 4) as f64;
    assert!((threads - process).abs() < unsure, "{threads} of {process} s: {is:?}");
    job.allow("end");
    job.finish().assert_code(0);
}
