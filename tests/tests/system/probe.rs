//! The measurement of links when a job starts.

use std::{collections::BTreeMap, fs, process::Command};

use gradwire_tests::launched::{Launch, Report, network::Pair, programs};

/// The written file, its values for all links together, by name, and the printed output.
fn measured(launch: Launch) -> (String, BTreeMap<String, f64>, Report) {
    let gradwire = programs::gradwire().display().to_string();
    let path = launch.folder().join("cluster.toml");
    let words = [gradwire.as_str(), "probe", "--started", "--out", "cluster.toml"];
    let job = launch.program(&words).start();
    let text = job.wait_for("the file", || {
        let text = fs::read_to_string(&path).ok()?;
        text.contains("[[link]]").then_some(text)
    });
    let mut explain = Command::new(programs::gradwire());
    let explained = explain.arg("explain").arg("--cluster").arg(&path).output().unwrap();
    assert!(explained.status.success(), "{explained:?}");
    fs::remove_file(&path).unwrap();
    let report = job.finish();
    report.assert_code(0);
    let network = text.split("[[host]]").next().unwrap();
    let values = network.lines().filter_map(|line| line.split_once(" = "));
    let values = values.map(|(key, value)| (key.to_owned(), value.parse().unwrap()));
    let values = values.collect();
    (text, values, report)
}

#[test]
fn links_are_measured_and_written_to_a_file() {
    let hosts = "127.0.0.1:1,127.0.0.2:1,127.0.0.3:1";
    let (_, costs, report) = measured(Launch::new().hosts(hosts));
    for name in ["latency_us", "rate_mbit", "reduce_mb_per_s", "message_ns", "operation_us"] {
        assert!(costs[name] > 0.0, "{name} in {costs:?}");
    }
    let text = report.all();
    assert!(text.contains("links between 3 hosts measured in "), "{text}");
}

/// With racks of different sizes, compressed sums, and a server.
#[test]
fn links_between_racks_are_measured() {
    let launch = Launch::new();
    let hosts = "127.0.0.1 rack=a\n127.0.0.2 rack=a\n127.0.0.3 rack=b\n127.0.0.4 role=server\n";
    fs::write(launch.folder().join("hosts"), hosts).unwrap();
    let launch = launch.words(&["--hostfile", "hosts"]).set("data.compression=bf16");
    let (text, costs, report) = measured(launch);
    assert!(costs["rack_rate_mbit"] > 0.0, "{costs:?}");
    assert_eq!(text.matches("rack = \"a\"").count(), 2, "{text}");
    // A loopback has no bursts, unless the processors make it look so.
    let rate = text.split("[[tier]]\nrate_mbit = ").nth(1);
    let rate = rate.map(|tier| tier.lines().next().unwrap().parse::<f64>().unwrap());
    let said = rate.map_or(String::new(), |rate| format!("A rack has {rate} Mbit/s to other"));
    assert!(report.all().contains(&said), "{}", report.all());
}

/// The line limits the rate: no measurement exceeds it, except for bytes in flight.
#[test]
fn a_slow_line_is_measured_correctly() {
    let Some(pair) = Pair::new() else { return };
    if pair.narrow(100).is_none() {
        return;
    }
    let launch = Launch::new().hosts("10.213.0.1:1,10.213.0.2:1").ssh(&pair.ssh());
    let (_, costs, _) = measured(launch.in_network(pair.first()));
    let rate = costs["rate_mbit"];
    assert!((30.0..110.0).contains(&rate), "{costs:?}");
}

/// With one algorithm for everything there is no reason to measure.
#[test]
fn nothing_is_measured_without_a_choice() {
    for (settings, expected) in [
        (&["negotiation.algorithm=ring"][..], false),
        (&["probe.enabled=false"], false),
        (&["negotiation.algorithm=ring", "probe.enabled=true"], true),
        (&[], true),
    ] {
        let launch = Launch::new().hosts("127.0.0.1:1,127.0.0.2:1").words(&["--verbose"]);
        let launch = settings.iter().fold(launch, |launch, setting| launch.set(setting));
        let mut job = launch.rank(&["attach", "loop:1:100", "until:end", "leave"]).start();
        job.until_said("looped", 2);
        let grpc = job.served("grpc").remove(0);
        let status = Command::new(programs::gradwire()).args(["status", &grpc]).output().unwrap();
        let text = String::from_utf8(status.stdout).unwrap();
        assert_eq!(text.contains("network: 1 link measured in "), expected, "{text}");
        job.allow("end");
        job.finish().assert_code(0);
    }
}
