//! The state of a running job: `/metrics`, `/healthz` and `/readyz` of each service, and the
//! commands `gradwire status` and `gradwire explain`.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{Read, Write},
    net::TcpStream,
    process::Command,
    time::Duration,
};

use gradwire_telemetry::catalog::GROUPS;
use gradwire_tests::launched::{Job, Launch, processes::Role, programs};
use serde_json::Value;

/// Requests a path; returns the status code and the body.
pub(super) fn get(address: &str, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).expect(address);
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").expect("an HTTP answer");
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// Values by name and labels as written, without the job and the host.
pub(super) type Series = BTreeMap<String, f64>;

/// The series in a service's metrics. The job and the host, which every series has, are checked and
/// left out.
pub(super) fn series(address: &str) -> Series {
    let (code, text) = get(address, "/metrics");
    assert_eq!(code, 200, "{text}");
    let is_series = |line: &&str| !line.is_empty() && !line.starts_with('#');
    let lines = text.lines().filter(is_series);
    let pair = |line: &str| {
        let (series, value) = line.rsplit_once(' ').expect(line);
        let (name, labels) = series.split_once('{').expect(line);
        let is_common =
            |label: &&str| label.starts_with("gradwire_job=\"") || label.starts_with("host=\"");
        let labels = labels.trim_end_matches('}').split(',');
        let (common, own): (Vec<_>, Vec<_>) = labels.partition(is_common);
        assert_eq!(common.len(), 2, "{line}");
        let own = if own.is_empty() { String::new() } else { format!("{{{}}}", own.join(",")) };
        (format!("{name}{own}"), value.parse().expect(line))
    };
    lines.map(pair).collect()
}

/// Asserts that each family of Gradwire has a description, a type, and only labels with few values
/// (BOUND).
fn assert_well_formed(address: &str) {
    let (_, text) = get(address, "/metrics");
    let named = |kind: &str| -> BTreeSet<String> {
        let lines = text.lines().filter_map(|line| line.strip_prefix(kind));
        lines.filter_map(|line| line.split(' ').next().map(ToOwned::to_owned)).collect()
    };
    let (described, typed) = (named("# HELP "), named("# TYPE "));
    let families: BTreeSet<String> = series(address)
        .into_keys()
        .map(|key| {
            let name = key.split('{').next().unwrap_or_default();
            let of_histogram = ["_bucket", "_sum", "_count"];
            let base = of_histogram.iter().find_map(|end| name.strip_suffix(end));
            base.filter(|base| typed.contains(*base)).unwrap_or(name).to_owned()
        })
        .collect();
    assert!(families.len() >= 8, "{families:?}");
    for family in &families {
        assert!(described.contains(family) && typed.contains(family), "{family}: {text}");
    }
    let declared = GROUPS.iter().flat_map(|(_, metrics)| *metrics);
    let labels = declared.flat_map(|metric| metric.labels).map(|label| label.name);
    let allowed: BTreeSet<&str> = labels.chain(["le"]).collect();
    for key in series(address).into_keys() {
        let labels = key.split_once('{').map(|(_, labels)| labels.trim_end_matches('}'));
        for label in labels.unwrap_or_default().split(',').filter(|label| !label.is_empty()) {
            let (name, _) = label.split_once('=').expect(label);
            assert!(allowed.contains(name), "BOUND: {key}");
        }
        assert!(!key.contains("loop."), "BOUND: a tensor's name in {key}");
    }
}

fn shown(words: &[&str]) -> String {
    let output = Command::new(programs::gradwire()).args(words).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

pub(super) fn variable(job: &Job, rank: u32, name: &str) -> String {
    job.process(Role::Rank(rank)).variable(name).expect(name)
}

#[test]
fn metrics_count_and_status_names_missing_ranks() {
    let steps = [
        "attach",
        "loop:1:1000",
        "until:go",
        "loop:10:1000",
        "say:idle",
        "0,1/submit:1:10",
        "until:end",
        "2,3/submit:1:10",
        "leave",
    ];
    let mut job = Launch::new().two_by_two().words(&["--verbose"]).rank(&steps).start();
    job.until_said("looped", 4);
    let daemons = [0, 2].map(|rank| variable(&job, rank, "GRADWIRE_DAEMON_METRICS"));
    let coordinator = variable(&job, 0, "GRADWIRE_COORDINATOR_METRICS");
    assert_ne!(daemons[0], daemons[1]);
    for address in daemons.iter().chain([&coordinator]) {
        assert_eq!(get(address, "/healthz").0, 200);
        assert_eq!(get(address, "/readyz").0, 200);
        assert_eq!(get(address, "/nothing").0, 404);
        assert_well_formed(address);
    }

    let before = daemons.each_ref().map(|address| series(address));
    let operations = series(&coordinator)["gradwire_coordinator_operations_total"];
    job.allow("go");
    job.until_said("said", 4);
    // Each of two ranks submits a tensor of 4000 bytes ten times: 20 submissions, ten sums.
    for (node, peer) in [(0, "127.0.0.2"), (1, "127.0.0.1")] {
        let moved = |after: &BTreeMap<String, f64>, key: &str| {
            after.get(key).copied().unwrap_or_default()
                - before[node].get(key).copied().unwrap_or_default()
        };
        let published = "gradwire_daemon_published_bytes_total";
        let network = ["sent", "received"].map(|way| {
            format!("gradwire_daemon_network_{way}_bytes_total{{peer_host=\"{peer}\"}}")
        });
        // A rank may have the result of a sum before the sum is counted.
        let after = job.wait_for("all sums counted", || {
            let after = series(&daemons[node]);
            let all = network.iter().map(String::as_str).chain([published]);
            all.into_iter().all(|key| moved(&after, key) >= 40_000.0).then_some(after)
        });
        assert_eq!(moved(&after, published), 40_000.0, "{after:?}");
        assert_eq!(moved(&after, "gradwire_daemon_operations_total"), 10.0, "{after:?}");
        // Each of two nodes sends the other as many bytes as the tensor has, and frame headers.
        for key in &network {
            assert!(moved(&after, key) < 60_000.0, "{key} moved too much: {after:?}");
        }
        // Two ranks submit one more tensor each, which may or may not have arrived.
        let submissions =
            "gradwire_daemon_submissions_total{collective=\"allreduce\",origin=\"plain\"}";
        assert!((20.0..=22.0).contains(&moved(&after, submissions)), "{after:?}");
        assert_eq!(after["gradwire_daemon_workers"], 2.0, "{after:?}");
        assert!(after["gradwire_daemon_shared_memory_bytes"] >= 2.0 * 1_048_576.0, "{after:?}");
        // Node 0 waits for the other one, and no piece ends meanwhile. Both know.
        if node == 0 {
            job.wait_for("a tensor that waits for another node", || {
                (series(&daemons[0])["gradwire_daemon_queued_tensors"] == 1.0).then_some(())
            });
        }
        let clock = job.wait_for("the clocks compared", || {
            let now = series(&daemons[node]);
            let round_trips = now["gradwire_daemon_heartbeat_round_trip_seconds_count"];
            (round_trips >= 3.0).then_some(now)
        });
        // All nodes are on one machine, whose clock may have been adjusted meanwhile.
        let [offset, error] = ["offset", "offset_error"]
            .map(|what| clock[&format!("gradwire_daemon_clock_{what}_seconds")]);
        assert!(error > 0.0 && offset.abs() <= error + 1.0, "{offset} s, at most {error} s off");
    }
    let after = series(&coordinator);
    assert_eq!(after["gradwire_coordinator_operations_total"] - operations, 10.0, "{after:?}");
    assert_eq!(after["gradwire_coordinator_nodes"], 2.0);
    assert_eq!(after["gradwire_coordinator_ranks"], 4.0);
    for host in ["127.0.0.1", "127.0.0.2"] {
        let lag = format!("gradwire_coordinator_node_lag_seconds_total{{node_host=\"{host}\"}}");
        assert!(after[&lag] >= 0.0, "{after:?}");
    }

    let grpc = job.served("grpc").remove(0);
    let text = job.wait_for("a tensor that waits", || {
        let text = shown(&["status", &grpc]);
        (text.contains("tensor 'layer.0'") && text.contains(" 11 done")).then_some(text)
    });
    // Without an address, and without the file of the job, the daemons of this host are asked.
    // Other tests may run some, too.
    let mut status = Command::new(programs::gradwire());
    let nowhere = tempfile::tempdir().unwrap();
    let output = status.arg("status").env("XDG_RUNTIME_DIR", nowhere.path()).output().unwrap();
    let [found, others] =
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    let id = variable(&job, 0, "GRADWIRE_JOB");
    let is_named = found.starts_with(&format!("job {id} ")) || others.contains(&grpc);
    assert!(is_named, "{found}{others}");
    assert!(
        text.starts_with(&format!("job {id} ({}), epoch 1, running: ", env!("CARGO_PKG_VERSION"))),
        "{text}"
    );
    for part in [
        "host 127.0.0.1: ranks 0-1, silent for ",
        "host 127.0.0.2: ranks 2-3, silent for ",
        "operations: 11 started, 11 done",
        " s for ranks 2, 3",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    // Each rank waits for an operation before it submits the next, so each piece was alone.
    let explained: Value = serde_json::from_str(&shown(&["explain", "--json", &grpc])).unwrap();
    let choices = explained["choices"].as_array().unwrap();
    let [choice] = &choices[..] else { panic!("{explained:#}") };
    for (key, value) in [("nodes", 2), ("pieces", 1), ("operations", 11), ("observed", 11)] {
        assert_eq!(choice[key], value, "{key} of {choice:#}");
    }
    assert_eq!(choice["collective"], "allreduce");
    assert!(choice["mean_seconds"].as_f64() > Some(0.0), "{choice:#}");
    job.allow("end");
    job.finish().assert_code(0);
}

#[test]
fn sparse_sums_are_counted_by_their_form() {
    let steps = ["attach", "sparse:10000:5", "sparse:4:4", "say:done", "until:end", "leave"];
    let mut job = Launch::new().ranks(2).words(&["--verbose"]).rank(&steps).start();
    job.until_said("said", 2);
    let all = job.served("metrics");
    let daemon = all
        .iter()
        .map(|address| series(address))
        .find(|series| series.get("gradwire_daemon_process_sets").is_some_and(|sets| *sets == 1.0));
    let daemon = daemon.expect("a daemon's metrics");
    let submitted = |collective: &str, origin: &str| {
        let labels = format!("{{collective=\"{collective}\",origin=\"{origin}\"}}");
        daemon.get(&format!("gradwire_daemon_submissions_total{labels}")).copied()
    };
    // Each rank's number of rows, twice; each rank's rows, once; each rank's dense tensor, once.
    assert_eq!(submitted("allgather", "count"), Some(4.0), "{daemon:?}");
    assert_eq!(submitted("allgather", "sparse-rows"), Some(2.0), "{daemon:?}");
    assert_eq!(submitted("allreduce", "sparse-dense"), Some(2.0), "{daemon:?}");
    job.allow("end");
    let report = job.finish();
    report.assert_code(0);
    let ways = report.said("sparse").into_iter().map(|said| said.text);
    let mut ways: Vec<String> = ways.collect();
    ways.sort();
    assert_eq!(ways, ["dense", "dense", "rows", "rows"]);
}

#[test]
fn a_service_is_ready_when_all_nodes_joined() {
    let launch = Launch::new().two_by_two().words(&["--verbose"]);
    let gradwired = programs::beside("gradwired");
    let text = format!(
        "#!/bin/sh\nwhile [ $GRADWIRE_ORDER = 1 ] && [ ! -e go ]; do sleep 0.01; done\nexec {}\n",
        gradwired.display()
    );
    let late = launch.script("late-gradwired", &text);
    let launch = launch.set(&format!("launch.gradwired={}", late.display()));
    let mut job = launch.rank(&["attach", "say:idle", "until:end", "leave"]).start();
    let early = job.wait_for("the first daemon", || {
        Some(job.served("metrics")).filter(|addresses| !addresses.is_empty())
    });
    for address in &early {
        assert_eq!(get(address, "/healthz").0, 200);
        let (code, body) = get(address, "/readyz");
        assert_eq!(code, 503, "{body}");
        assert!(body.starts_with("not ready: "), "{body}");
    }
    let (_, body) = job.wait_for("the first node, which hosts the coordinator", || {
        Some(get(&early[0], "/readyz")).filter(|(_, body)| body.contains("1 of 2 nodes"))
    });
    assert!(body.starts_with("not ready: forming: "), "{body}");
    job.allow("go");
    job.until_said("said", 4);
    for address in &job.served("metrics") {
        assert_eq!(get(address, "/readyz").0, 200);
    }
    job.allow("end");
    job.finish().assert_code(0);
}
