//! The network between two hosts: namespaces at a switch that drops, limits or delays.

use std::time::Duration;

use gradwire_tests::launched::{Launch, network::Pair};

use super::checked;

fn pair() -> Option<(Pair, Launch)> {
    let pair = Pair::new()?;
    let launch = between(&pair);
    Some((pair, launch))
}

fn between(pair: &Pair) -> Launch {
    let launch = Launch::new().doctor().words(&["--json"]).ssh(&pair.ssh());
    launch.hosts("10.213.0.1,10.213.0.2").in_network(pair.first())
}

#[test]
fn a_port_dropped_in_one_direction_is_named() {
    let Some((pair, launch)) = pair() else { return };
    pair.swallow_ports(1, &[7777]);
    let found = checked(launch.set("data.listen=0.0.0.0:7777"));
    let expected = ["data at 10.213.0.2:7777 can't be reached: no answer within", "data.listen"];
    found.assert("ports", "10.213.0.1", "fail", &expected);
    // It is measured from the other side.
    found.assert("ports", "10.213.0.2", "pass", &["data can be reached"]);
    found.assert_measured("latency", "10.213.0.2");
    found.assert_measured("bandwidth", "10.213.0.2");
}

/// What a job would use for its data is measured, and not the network that reaches the hosts.
#[test]
fn the_network_of_the_data_is_checked() {
    let Some(pair) = Pair::new() else { return };
    pair.add_network("fast0");
    let found = checked(between(&pair).set("data.interface=fast*"));
    found.assert("address", "10.213.0.2", "pass", &[Pair::SECOND, " on fast0"]);
    found.assert("ports", "10.213.0.2", "pass", &["data can be reached"]);
    let found = checked(between(&pair).variable("NCCL_SOCKET_IFNAME", "fast"));
    found.assert("address", "10.213.0.1", "pass", &[Pair::SECOND, " on fast0"]);
    let found = checked(between(&pair).set("data.interface=fast1"));
    let expected = ["data.interface=fast1: none of this host's", "an interface or network of"];
    found.assert("ports", "10.213.0.1", "fail", &expected);
}

/// The interface that all reach is found, whatever the launcher's network is.
#[test]
fn a_hostfile_has_interfaces_that_all_reach() {
    let Some(pair) = Pair::new() else { return };
    pair.add_network("fast0");
    let name = format!("gwtest-hostfiles-{}", std::process::id());
    let folder = std::env::temp_dir().join(name);
    std::fs::create_dir(&folder).unwrap();
    let write = |name: &str| {
        let path = folder.join(name);
        let report = between(&pair).words(&["--write-hostfile", path.to_str().unwrap()]).run();
        (report, std::fs::read_to_string(&path).unwrap_or_default())
    };
    let lines = |text: &str| text.lines().skip(1).map(ToOwned::to_owned).collect::<Vec<_>>();
    let (report, text) = write("both");
    report.assert_code(0);
    let expected = [
        "10.213.0.1 slots=1 interface=cable  # 10.213.0.1",
        "10.213.0.2 slots=1 interface=cable  # 10.213.0.2",
    ];
    assert_eq!(lines(&text), expected, "{}", report.all());
    let (report, again) = write("both");
    report.assert_code(2);
    assert!(report.all().contains("give the name of a new file"), "{}", report.all());
    assert_eq!(again, text);

    // The network of the launcher carries nothing now, and the check says so.
    pair.cut();
    let (report, text) = write("one");
    report.assert_code(1);
    let expected = [
        "10.213.0.1 slots=1 interface=fast0  # 10.214.0.1",
        "10.213.0.2 slots=1 interface=fast0  # 10.214.0.2",
    ];
    assert_eq!(lines(&text), expected, "{}", report.all());
    pair.set_interface("fast0", 0, false);
    let (report, text) = write("none");
    report.assert_code(1);
    let what = "no interface reaches every host: 10.213.0.1 from 10.213.0.2; 10.213.0.2 from 10";
    assert!(report.all().contains(what), "{}", report.all());
    assert_eq!(text, "");

    pair.mend();
    let file = folder.join("one");
    pair.set_interface("fast0", 0, true);
    let launch = Launch::new().ssh(&pair.ssh()).in_network(pair.first());
    let launch = launch.words(&["--verbose", "--hostfile", file.to_str().unwrap()]);
    let running = launch.rank(&["attach", "loop:3:9", "leave"]).start();
    running.until_said("looped", 2);
    let data = running.served("data");
    assert!(data.len() == 2 && data.iter().all(|at| at.starts_with(Pair::SECOND)), "{data:?}");
    running.finish().assert_code(0);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn hosts_that_do_not_reach_each_other_are_shown() {
    let Some(pair) = Pair::new() else { return };
    pair.swallow_ports(1, &[7777]);
    let launch = Launch::new().doctor().ssh(&pair.ssh()).hosts("10.213.0.1,10.213.0.2");
    let report = launch.in_network(pair.first()).set("data.listen=0.0.0.0:7777").run();
    report.assert_code(1);
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let text = report.output().lines().map(words).collect::<Vec<_>>().join("\n");
    let expected = "Which hosts reach each other:\n\
                    from \\ to 10.213.0.1 10.213.0.2\n\
                    10.213.0.1 10.213.0.2\n\
                    10.213.0.1 - failed (1)\n\
                    10.213.0.2 reached -\n\
                    (1) no answer within";
    assert!(text.contains(expected), "{text}");
}

#[test]
fn a_refused_coordinator_port_is_named() {
    let Some((pair, launch)) = pair() else { return };
    pair.refuse_ports(1, &[7778]);
    let found = checked(launch.set("coordinator.listen=10.213.0.1:7778"));
    let expected = ["coordinator at 10.213.0.1:7778 can't be reached", "coordinator.listen"];
    found.assert("ports", "10.213.0.2", "fail", &expected);
    found.assert_measured("latency", "10.213.0.1");
}

#[test]
fn hosts_that_are_far_from_each_other_are_named() {
    let Some((pair, launch)) = pair() else { return };
    if pair.lengthen(Duration::from_millis(20)).is_none() {
        return;
    }
    let found = checked(launch);
    found.assert("latency", "10.213.0.1", "warn", &["far apart"]);
    let trip = found.findings.iter().find(|f| f["check"] == "latency").unwrap();
    assert!(trip["value"].as_f64().unwrap() >= 40_000.0, "{trip}");
    found.assert_measured("bandwidth", "10.213.0.1");
}

#[test]
fn a_port_that_passes_only_tcp_is_named() {
    let Some((pair, launch)) = pair() else { return };
    pair.swallow_datagrams(0, &[7779]);
    let found = checked(launch.set("coordinator.listen=10.213.0.1:7779"));
    let expected = ["coordinator by UDP at 10.213.0.1:7779", "no answer", "allow UDP from"];
    found.assert("ports", "10.213.0.2", "warn", &expected);
    found.report.assert_code(0);
}

#[test]
fn different_congestion_controls_are_named() {
    let Some((pair, launch)) = pair() else { return };
    if pair.set_congestion_control(0, "cubic").is_none()
        || pair.set_congestion_control(1, "reno").is_none()
    {
        return;
    }
    let found = checked(launch);
    let expected = ["cubic on 10.213.0.1; reno on 10.213.0.2", "data.congestion_control"];
    found.assert("congestion_control", "", "warn", &expected);
}

#[test]
fn lost_large_packets_are_found() {
    let Some((pair, launch)) = pair() else { return };
    pair.lose_larger(1000);
    let found = checked(launch);
    let expected = ["a large one does not", "MTU", "ICMP"];
    found.assert("path_mtu", "10.213.0.1", "fail", &expected);
    found.assert_measured("latency", "10.213.0.1");
}

#[test]
fn a_path_for_smaller_packets_is_found() {
    let Some((pair, launch)) = pair() else { return };
    pair.set_path_mtu(1200);
    let found = checked(launch);
    found.assert("path_mtu", "10.213.0.1", "warn", &["1200, interfaces 1500 and 1500"]);
    found.report.assert_code(0);
}

#[test]
fn a_line_below_its_configured_rate_is_found() {
    let Some((pair, launch)) = pair() else { return };
    if pair.narrow(100).is_none() {
        return;
    }
    let found = checked(launch.set("network.rate_mbit=1000"));
    let expected = ["network.rate_mbit is 1000"];
    found.assert("bandwidth", "10.213.0.1", "warn", &expected);
    let rate = found.findings.iter().find(|f| f["check"] == "bandwidth").unwrap();
    let mbit = rate["value"].as_f64().unwrap();
    assert!((20.0..120.0).contains(&mbit), "{rate}");
}
