//! `gradwire doctor` on hosts with and without problems. Each check is made to warn or to fail by a
//! real problem where one can be made here; where not (another processor, a wrong clock, a long
//! line), by what the agent of a host answers.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    process::{Command, Stdio},
};

use gradwire_tests::launched::{Job, Launch, Report, network::Pair, processes::Role, programs};
use rustix::process::Signal;
use serde_json::Value;

const SCHEMA: &str = include_str!("../../../docs/doctor.schema.json");

const HERE: &str = "127.0.0.1,127.0.0.2";

/// A stand-in for ssh. Host `node-3` is at 127.0.0.3, and so on. What is wrong with `node-4` is in
/// `$wrong`, which is put before the command.
fn ssh_with(wrong: &str) -> String {
    format!(
        "export SSH_CONNECTION=\"127.0.0.1 1 127.0.0.${{host#node-}} 22\"\n\
         export FAKE_HOST=$host\n\
         case $host in node-4) {wrong} ;; esac\n\
         exec sh -c \"$*\""
    )
}

/// Two hosts, of which the second has a problem.
fn with_node_4(wrong: &str) -> Launch {
    Launch::new().doctor().hosts("node-3,node-4").ssh(&ssh_with(wrong)).words(&["--json"])
}

struct Checked {
    report: Report,
    findings: Vec<Value>,
}

/// Runs it, and checks what is always so.
#[track_caller]
fn checked(launch: Launch) -> Checked {
    of(launch.run())
}

#[track_caller]
fn of(report: Report) -> Checked {
    let json: Value = serde_json::from_str(&report.output())
        .unwrap_or_else(|error| panic!("{error}: {}", report.all()));
    let schema: Value = serde_json::from_str(SCHEMA).unwrap();
    let validator = jsonschema::draft202012::new(&schema).unwrap();
    let errors: Vec<_> = validator.iter_errors(&json).map(|error| error.to_string()).collect();
    assert!(errors.is_empty(), "{errors:#?} in {}", report.all());
    let findings = json["findings"].as_array().unwrap().clone();
    let fails = findings.iter().any(|finding| finding["status"] == "fail");
    assert_eq!(json["status"] == "fail", fails, "{}", report.all());
    report.assert_code(i32::from(fails));
    for finding in &findings {
        let is_good = finding["status"] == "pass";
        let remedy = finding["remedy"].as_str().unwrap();
        assert_eq!(remedy.is_empty(), is_good, "{finding}");
    }
    Checked { report, findings }
}

impl Checked {
    /// The worst status of a check at a place.
    fn status(&self, check: &str, host: &str) -> Option<&str> {
        let here = |f: &&Value| f["check"] == check && (host.is_empty() || f["host"] == host);
        let all = self.findings.iter().filter(here).filter_map(|f| f["status"].as_str());
        all.max_by_key(|status| ["pass", "warn", "fail"].iter().position(|s| s == status))
    }

    /// Asserts the worst status of a check at a host; that it says so with these words.
    #[track_caller]
    fn assert(&self, check: &str, host: &str, status: &str, words: &[&str]) {
        assert_eq!(self.status(check, host), Some(status), "{check}: {}", self.report.all());
        let says = |f: &&Value| {
            let text =
                format!("{} {}", f["found"].as_str().unwrap(), f["remedy"].as_str().unwrap());
            f["check"] == check
                && f["status"] == status
                && (host.is_empty() || f["host"] == host)
                && words.iter().all(|word| text.contains(word))
        };
        assert!(self.findings.iter().any(|f| says(&f)), "{words:?}: {}", self.report.all());
    }

    /// Asserts that a check was done at a host and did not fail. A busy machine may be slow.
    #[track_caller]
    fn assert_measured(&self, check: &str, host: &str) {
        let status = self.status(check, host);
        assert!(matches!(status, Some("pass" | "warn")), "{check}: {}", self.report.all());
    }

    /// Asserts that what is between the hosts, and on the first one, is as it should be.
    #[track_caller]
    fn assert_others_are_well(&self, host: &str) {
        for check in ["reachability", "versions", "ports", "memfd", "open_files"] {
            self.assert(check, host, "pass", &[]);
        }
    }
}

#[test]
fn two_healthy_hosts_pass_every_check() {
    let found = checked(Launch::new().doctor().hosts(HERE).words(&["--json"]));
    found.report.assert_code(0);
    let checks: BTreeSet<_> = found.findings.iter().map(|f| f["check"].as_str().unwrap()).collect();
    let schema: Value = serde_json::from_str(SCHEMA).unwrap();
    let all = &schema["$defs"]["finding"]["properties"]["check"]["enum"];
    let all: BTreeSet<_> = all.as_array().unwrap().iter().map(|c| c.as_str().unwrap()).collect();
    assert_eq!(checks, all);
    for check in ["reachability", "versions", "ports", "memfd", "path_mtu", "clock", "gpus"] {
        assert_ne!(found.status(check, ""), Some("fail"), "{}", found.report.all());
    }
    let rate = found.findings.iter().find(|f| f["check"] == "bandwidth").unwrap();
    assert!(rate["value"].as_f64().unwrap() > 1.0, "{rate}");
}

#[test]
fn the_table_has_the_remedy_of_what_fails() {
    let launch = Launch::new().doctor().hosts(HERE).set("data.congestion_control=zonk");
    let report = launch.run();
    report.assert_code(1);
    let text = report.output();
    for part in [
        "fail    congestion_control  127.0.0.1, 127.0.0.2",
        "'zonk' can't be had: No such file or directory",
        "What to do:\n  fail congestion_control, 127.0.0.1, 127.0.0.2:\n      load it (modprobe",
        " 2 failed; 2 hosts in ",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    assert!(text.contains("pass    reachability"), "{text}");
}

#[test]
fn one_host_has_no_pairs() {
    let found = checked(Launch::new().doctor().words(&["--json"]));
    assert_eq!(found.status("latency", ""), None);
    found.assert_others_are_well("localhost");
}

#[test]
fn settings_that_a_host_does_not_fulfil_are_named() {
    let set = |settings: &[&str]| {
        let launch = Launch::new().doctor().hosts(HERE).words(&["--json"]);
        checked(settings.iter().fold(launch, |launch, setting| launch.set(setting)))
    };
    let found = set(&["data.congestion_control=zonk", "data.socket_buffer_bytes=1GiB"]);
    found.assert("congestion_control", "127.0.0.2", "fail", &["zonk", "modprobe tcp_zonk"]);
    found.assert("socket_buffers", "127.0.0.1", "warn", &["net.core.rmem_max"]);
    let found = set(&["data.listen=192.0.2.7:0", "coordinator.listen=127.0.0.1:1"]);
    found.assert("ports", "127.0.0.1", "fail", &["192.0.2.7:0", "Cannot assign", "data.listen"]);
    let found = set(&["launch.gradwired=/zonk/gradwired"]);
    found.assert("versions", "127.0.0.1", "fail", &["/zonk/gradwired", "launch.gradwired"]);
    let free = fs::read_to_string("/proc/sys/vm/nr_hugepages").unwrap_or_default();
    if free.trim() == "0" {
        let found = set(&["worker.huge_pages=require"]);
        found.assert("huge_pages", "127.0.0.1", "fail", &["vm.nr_hugepages"]);
    } else {
        println!("skipped: this machine has huge pages");
    }
}

#[test]
fn a_port_that_another_program_has_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let launch = Launch::new().doctor().words(&["--json"]);
    let launch = launch.set(&format!("data.listen=127.0.0.1:{port}"));
    let found = checked(launch.set(&format!("metrics.listen=127.0.0.1:{port}")));
    found.assert("ports", "localhost", "fail", &["Address already in use", "data.listen"]);
    let launch = Launch::new().doctor().words(&["--json"]);
    let found = checked(launch.set(&format!("metrics.listen=127.0.0.1:{port}")));
    found.assert("ports", "localhost", "fail", &["metrics.listen"]);
}

/// More ranks than any machine has cores and memory for.
#[test]
fn too_many_ranks_on_a_host_are_too_many_for_its_cores_memory_and_descriptors() {
    let launch = Launch::new().doctor().hosts("127.0.0.1:500000").words(&["--json"]);
    let found = checked(launch.set("worker.arena_segment_bytes=1GiB"));
    found.assert("cores", "127.0.0.1", "warn", &["for 500000 ranks", "fewer ranks"]);
    found.assert("memory", "127.0.0.1", "fail", &["worker.arena_segment_bytes"]);
    found.assert("memfd", "127.0.0.1", "pass", &[]);
}

#[test]
fn limits_of_a_host_are_found() {
    let limits = "set -- prlimit --nofile=64:64 --memlock=65536:65536 --fsize=1000:1000 \"$@\"";
    let found = checked(with_node_4(limits));
    found.assert("open_files", "node-4", "fail", &["64 (up to 64)", "ulimit -Hn"]);
    found.assert("memlock", "node-4", "warn", &["64 KiB", "ulimit -l"]);
    found.assert("memfd", "node-4", "fail", &["file size limit", "ulimit -f"]);
    found.assert_others_are_well("node-3");
}

/// Replaces a part of what an agent answers.
fn answers(replace: &str) -> String {
    format!("sh -c \"$*\" | sed -u '{replace}'; exit")
}

#[test]
fn another_release_on_a_host_is_a_failure() {
    let wrong = answers("s/\"version\":\"[^\"]*\"/\"version\":\"9.9.9\"/");
    let found = checked(with_node_4(&wrong));
    found.assert("versions", "node-4", "fail", &["has gradwire 9.9.9", "the same release"]);
    found.assert_others_are_well("node-3");
    // A release that has no doctor.
    let wrong = "echo \"error: unrecognized subcommand 'doctor-agent'\" >&2; exit 2";
    let found = checked(with_node_4(wrong));
    found.assert("versions", "node-4", "fail", &["unrecognized subcommand", "the same release"]);
}

#[test]
fn hosts_that_differ_are_named() {
    let wrong = answers(
        "s/\"level\":\"[^\"]*\"/\"level\":\"baseline\"/; s/\"unix_us\":1/\"unix_us\":2/; \
         s/\"models\":\\[\\]/\"models\":[\"H100\"]/",
    );
    let launch = with_node_4(&wrong);
    let python = "#!/bin/sh\nif [ \"$FAKE_HOST\" = node-4 ]; then echo 2.1.0; else echo 2.2.0; fi\n\
                  echo 0.0.1\n";
    launch.script("python3", python);
    let path = format!("{}:{}", launch.folder().display(), std::env::var("PATH").unwrap());
    let found = checked(launch.variable("PATH", path));
    found.report.assert_code(0);
    found.assert("cpu_level", "", "warn", &["hosts differ", "baseline on node-4"]);
    found.assert("clock", "node-4", "warn", &["NTP"]);
    found.assert("gpus", "", "warn", &["1 × H100 on node-4", "none on node-3"]);
    found.assert("torch", "", "warn", &["2.1.0 on node-4; 2.2.0 on node-3"]);
    found.assert("versions", "node-3", "warn", &["Python package gradwire 0.0.1"]);
}

#[test]
fn hosts_that_are_far_from_each_other_are_named() {
    let launch = Launch::new().doctor().hosts("node-4,node-5").words(&["--json"]);
    let wrong = answers("s/\"round_trip_us\":/&99999/");
    let found = checked(launch.ssh(&ssh_with(&wrong)));
    found.assert("latency", "node-4", "warn", &["far from each other"]);
    found.assert_measured("bandwidth", "node-4");
}

/// A folder of PCI devices with a graphics processor, but no driver for it.
#[test]
fn a_graphics_processor_without_a_driver_is_named() {
    let trial = Command::new("unshare").args(["-m", "true"]).stderr(Stdio::null()).status();
    if !trial.is_ok_and(|status| status.success()) {
        println!("skipped: no mount namespaces here");
        return;
    }
    let devices = tempfile::tempdir().unwrap();
    let device = devices.path().join("0000:00:01.0");
    fs::create_dir(&device).unwrap();
    fs::write(device.join("vendor"), "0x10de\n").unwrap();
    fs::write(device.join("class"), "0x030200\n").unwrap();
    let folder = devices.path().display();
    let mount = format!(
        "export RUN=\"$*\"; exec unshare -m sh -c \
         'mount --bind {folder} /sys/bus/pci/devices && exec sh -c \"$RUN\"'"
    );
    let found = checked(with_node_4(&mount));
    found.assert("gpus", "node-4", "warn", &["1 in the machine, without a driver"]);
    found.assert("gpus", "node-3", "pass", &["none"]);
}

#[test]
fn a_host_that_can_not_be_reached_is_named_and_the_others_are_checked() {
    let refused = "echo 'ssh: connect to host node-4 port 22: Connection refused' >&2; exit 255";
    let found = checked(with_node_4(refused));
    found.assert("reachability", "node-4", "fail", &["port 22: Connection refused", "password"]);
    found.assert_others_are_well("node-3");
    let found = checked(with_node_4("exit 127"));
    found.assert("reachability", "node-4", "fail", &["launch.remote_gradwire"]);
    // It ends with its input, as ssh does.
    let silent = with_node_4("exec cat").words(&["--start-timeout", "1"]);
    let found = checked(silent);
    found.assert("reachability", "node-4", "fail", &["did not answer within 1 s", "ssh"]);
    found.assert_others_are_well("node-3");
    let foreign = "exec sed -u 's/.*/Welcome to node-4!/'";
    let found = checked(with_node_4(foreign).words(&["--start-timeout", "1"]));
    found.assert("reachability", "node-4", "fail", &["did not answer within 1 s"]);
}

/// An address at which the host is not: what ssh reached is translated on the way.
#[test]
fn an_address_that_the_host_does_not_have_is_named() {
    let wrong = "export SSH_CONNECTION='127.0.0.1 1 192.0.2.9 22'";
    let found = checked(with_node_4(wrong));
    found.assert("address", "node-4", "warn", &["192.0.2.9 is not an address of this host"]);
    found.assert("ports", "node-4", "fail", &["can't listen on 192.0.2.9:0"]);
}

#[test]
fn an_agent_that_answers_no_more_is_a_failure() {
    // The order to dial is lost; then everything after it.
    for (wrong, expected) in [
        ("sed -u '/\"dial\"/d' | sh -c \"$*\"; exit", "gave no answer within"),
        ("sed -u '/\"dial\"/q' | sh -c \"$*\"; exit", "its agent ended"),
    ] {
        let found = checked(with_node_4(wrong));
        found.assert("reachability", "node-4", "fail", &[expected]);
        found.assert("memfd", "node-4", "pass", &[]);
        found.assert("reachability", "node-3", "pass", &[]);
        found.assert("memfd", "node-3", "pass", &[]);
    }
}

/// It is stopped when it begins, and killed with the way to it.
#[test]
fn a_stopped_agent_is_a_failure_and_does_not_stay() {
    let wrong = "sh -c \"$*\" <&0 & kill -STOP $!; wait; exit";
    let found = checked(with_node_4(wrong).words(&["--start-timeout", "1"]));
    assert_eq!(found.status("reachability", "node-4"), Some("fail"), "{}", found.report.all());
    found.assert_others_are_well("node-3");
}

fn pair() -> Option<(Pair, Launch)> {
    let pair = Pair::new()?;
    let launch = Launch::new().doctor().words(&["--json"]).ssh(&pair.ssh());
    let launch = launch.hosts("10.213.0.1,10.213.0.2").in_network(pair.first());
    Some((pair, launch))
}

#[test]
fn a_port_that_is_dropped_in_one_direction_is_named_with_that_direction() {
    let Some((pair, launch)) = pair() else { return };
    pair.swallow_ports(1, &[7777]);
    let found = checked(launch.set("data.listen=0.0.0.0:7777"));
    let expected = ["data at 10.213.0.2:7777 is not reached: no answer within", "data.listen"];
    found.assert("ports", "10.213.0.1", "fail", &expected);
    // It is measured from the other side.
    found.assert("ports", "10.213.0.2", "pass", &["data is reached"]);
    found.assert_measured("latency", "10.213.0.2");
    found.assert_measured("bandwidth", "10.213.0.2");
}

#[test]
fn a_coordinators_port_that_is_refused_is_named() {
    let Some((pair, launch)) = pair() else { return };
    pair.refuse_ports(1, &[7778]);
    let found = checked(launch.set("coordinator.listen=10.213.0.1:7778"));
    let expected = ["coordinator at 10.213.0.1:7778 is not reached", "coordinator.listen"];
    found.assert("ports", "10.213.0.2", "fail", &expected);
    found.assert_measured("latency", "10.213.0.1");
}

#[test]
fn large_packets_that_are_lost_are_found() {
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
fn a_line_that_is_slower_than_the_settings_say_is_found() {
    let Some((pair, launch)) = pair() else { return };
    if pair.narrow(100).is_none() {
        return;
    }
    let found = checked(launch.set("network.rate_mbit=1000"));
    let expected = ["network.rate_mbit says 1000"];
    found.assert("bandwidth", "10.213.0.1", "warn", &expected);
    let rate = found.findings.iter().find(|f| f["check"] == "bandwidth").unwrap();
    let mbit = rate["value"].as_f64().unwrap();
    assert!((20.0..120.0).contains(&mbit), "{rate}");
}

#[test]
fn wrong_input_is_one_error() {
    let run = |words: &[&str], expected: &str| {
        let report = Launch::new().doctor().words(words).run();
        report.assert_code(2);
        report.assert_verdict(&[expected]);
        assert_eq!(report.output(), "", "{}", report.all());
    };
    run(&["-H", "a:0"], "'0' is not a slot count");
    run(&["--hostfile", "/zonk"], "hostfile /zonk: No such file");
    run(&["-H", "a", "-np", "2"], "-np 2 is more than the 1 slots");
    run(&["-H", "a", "--hostfile", "b"], "cannot be used with");
    run(&["--set", "data.zonk=1"], "data.zonk");
    let launch = Launch::new().doctor();
    fs::write(launch.folder().join("hosts"), "n1 slots=1\nn2 zonk=1\n").unwrap();
    let report = launch.words(&["--hostfile", "hosts"]).run();
    report.assert_code(2);
    report.assert_verdict(&["hostfile hosts line 2: 'zonk=1' is not understood"]);
}

#[test]
fn a_name_that_nobody_knows_is_a_failure_of_that_host() {
    if Command::new("ssh").arg("-V").stderr(Stdio::null()).status().is_err() {
        println!("skipped: there is no ssh here");
        return;
    }
    let found = checked(Launch::new().doctor().hosts("host.invalid").words(&["--json"]));
    found.assert("reachability", "host.invalid", "fail", &["host.invalid can't be reached"]);
}

/// What a job would refuse, the check does not pass.
#[test]
fn settings_that_are_not_for_these_hosts_are_refused() {
    let refused = Launch::new().doctor().hosts(HERE).words(&["--servers", "127.0.0.3,127.0.0.4"]);
    let report = refused.set("negotiation.algorithm=torus(dims=2x2)").run();
    report.assert_code(2);
    report.assert_verdict(&["torus(dims=2x2) is for 4 nodes, and there are 2"]);
}

#[test]
fn an_output_that_can_not_be_written_is_an_error() {
    let Ok(full) = File::options().write(true).open("/dev/full") else {
        println!("skipped: there is no /dev/full");
        return;
    };
    let mut doctor = Command::new(programs::gradwire());
    let output = doctor.args(["doctor", "--json"]).stdout(full).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("error: the output can't be written: No space left on device"), "{said}");
}

/// A check that lasts until it is ended from outside: one host never answers.
fn endless() -> Job {
    let launch = Launch::new().doctor().hosts("127.0.0.1,node-3,node-4");
    let job = launch.ssh(&ssh_with("exec cat")).start();
    job.wait_for("two agents", || {
        let agents = job.processes();
        let count = agents.iter().filter(|p| matches!(p.role, Some(Role::Agent(_)))).count();
        (count >= 2).then_some(())
    });
    job
}

#[test]
fn an_interrupted_check_leaves_nothing() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let mut job = endless();
        job.signal(Role::Launcher, signal);
        let report = job.finish();
        report.assert_code(code);
        report.assert_verdict(&["error: the check was interrupted"]);
    }
}

#[test]
fn a_killed_check_leaves_nothing() {
    let mut job = endless();
    job.signal(Role::Launcher, Signal::KILL);
    job.finish().assert_code(137);
}
