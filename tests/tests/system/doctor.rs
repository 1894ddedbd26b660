//! `gradwire doctor` on hosts with and without problems. Each check warns or fails because of a
//! real problem of a host (`hosts`) or of the network between two hosts (`between`).

mod between;
mod hosts;

use std::{
    collections::BTreeSet,
    fs::{self, File},
    process::{Command, Stdio},
};

use gradwire_tests::launched::{Job, Launch, Report, processes::Role, programs};
use rustix::process::Signal;
use serde_json::Value;

const SCHEMA: &str = include_str!("../../../docs/doctor.schema.json");

const HERE: &str = "127.0.0.1,127.0.0.2";

/// A replacement for ssh. Host `node-3` is at 127.0.0.3, and so on. `$wrong` contains the problem
/// of `node-4`, and is put before the command.
fn ssh_with(wrong: &str) -> String {
    format!(
        "export SSH_CONNECTION=\"127.0.0.1 1 127.0.0.${{host#node-}} 22\"\n\
         export FAKE_HOST=$host\n\
         case $host in node-4) {wrong} ;; esac\n\
         exec sh -c \"$*\""
    )
}

/// Two hosts; the second has a problem.
fn with_node_4(wrong: &str) -> Launch {
    Launch::new().doctor().hosts("node-3,node-4").ssh(&ssh_with(wrong)).words(&["--json"])
}

struct Checked {
    report: Report,
    findings: Vec<Value>,
}

/// Runs it, and checks the general properties of its output.
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

    /// Asserts the worst status of a check at a host, and a finding with these words.
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

    /// Asserts that a check was made at a host and did not fail. A busy machine may be slow.
    #[track_caller]
    fn assert_measured(&self, check: &str, host: &str) {
        let status = self.status(check, host);
        assert!(matches!(status, Some("pass" | "warn")), "{check}: {}", self.report.all());
    }

    /// Asserts that the checks between the hosts, and on the first one, pass.
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
fn the_table_has_remedies_for_failures() {
    let launch = Launch::new().doctor().hosts(HERE).set("data.congestion_control=zonk");
    let report = launch.run();
    report.assert_code(1);
    let text = report.output();
    for part in [
        "fail    congestion_control  127.0.0.1, 127.0.0.2",
        "'zonk' is not available: No such file or directory",
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
fn unreachable_hosts_do_not_stop_other_checks() {
    let refused = "echo 'ssh: connect to host node-4 port 22: Connection refused' >&2; exit 255";
    let found = checked(with_node_4(refused));
    found.assert("reachability", "node-4", "fail", &["port 22: Connection refused", "password"]);
    found.assert_others_are_well("node-3");
    let found = checked(with_node_4("exit 127"));
    found.assert("reachability", "node-4", "fail", &["launch.remote_gradwire"]);
    // It ends with its input, like ssh.
    let silent = with_node_4("exec cat").words(&["--start-timeout", "1"]);
    let found = checked(silent);
    found.assert("reachability", "node-4", "fail", &["did not answer within 1 s", "ssh"]);
    found.assert_others_are_well("node-3");
    let foreign = "exec sed -u 's/.*/Welcome to node-4!/'";
    let found = checked(with_node_4(foreign).words(&["--start-timeout", "1"]));
    found.assert("reachability", "node-4", "fail", &["did not answer within 1 s"]);
}

/// A login may print a greeting in any encoding, without ending its line.
#[test]
fn a_greeting_is_not_mistaken_for_an_answer() {
    let found = checked(with_node_4("printf 'Welcome: \\374'"));
    found.assert("reachability", "node-4", "pass", &[]);
}

#[test]
fn an_agent_that_stops_answering_is_a_failure() {
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

/// It is stopped after its last dial: of three others, and of the first host for the coordinator
/// and for heartbeats. It costs the time of one round, not of all.
#[test]
fn an_agent_that_freezes_is_lost_once() {
    let freeze = "exec 3<&0; export RUN=\"$*\"; \
                  sh -c 'echo $$; exec $RUN' <&3 | { read -r pid; while IFS= read -r line; do \
                  echo \"$line\"; case $line in *dialled*) n=$((n + 1)); \
                  [ $n = 5 ] && kill -STOP $pid ;; esac; done; }; \
                  exit";
    let launch = Launch::new().doctor().hosts("node-3,node-4,node-5,node-6");
    let found = checked(launch.ssh(&ssh_with(freeze)).words(&["--json"]));
    found.assert("reachability", "node-4", "fail", &["was lost: its agent gave no answer"]);
    for host in ["node-3", "node-5", "node-6"] {
        found.assert("reachability", host, "pass", &[]);
    }
    let is_its = |f: &&Value| f["host"] == "node-4" || f["peer"] == "node-4";
    let with_it = found.findings.iter().filter(|f| f["check"] == "latency").filter(is_its);
    assert_eq!(with_it.count(), 1, "{}", found.report.all());
    found.assert_measured("latency", "node-5");
}

/// It is stopped when it begins, and killed together with the connection to it.
#[test]
fn a_stopped_agent_is_a_failure_and_is_removed() {
    let wrong = "sh -c \"$*\" <&0 & kill -STOP $!; wait; exit";
    let found = checked(with_node_4(wrong).words(&["--start-timeout", "1"]));
    assert_eq!(found.status("reachability", "node-4"), Some("fail"), "{}", found.report.all());
    found.assert_others_are_well("node-3");
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
    run(&["-H", "a:5000"], "5000 ranks are more than the maximum of 4096");
    run(&["-H", "a", "-np", "2"], "-np 2 is more than the 1 slots");
    run(&["-H", "a", "--hostfile", "b"], "cannot be used with");
    run(&["--set", "data.zonk=1"], "data.zonk");
    let launch = Launch::new().doctor();
    fs::write(launch.folder().join("hosts"), "n1 slots=1\nn2 zonk=1\n").unwrap();
    let report = launch.words(&["--hostfile", "hosts"]).run();
    report.assert_code(2);
    report.assert_verdict(&["hostfile hosts line 2: unknown word 'zonk=1'"]);
}

#[test]
fn an_unknown_name_is_a_failure_of_that_host() {
    if Command::new("ssh").arg("-V").stderr(Stdio::null()).status().is_err() {
        println!("skipped: ssh is missing");
        return;
    }
    let found = checked(Launch::new().doctor().hosts("host.invalid").words(&["--json"]));
    found.assert("reachability", "host.invalid", "fail", &["host.invalid can't be reached"]);
}

/// The check does not pass settings that a job would refuse.
#[test]
fn settings_that_do_not_fit_are_refused() {
    let refused = Launch::new().doctor().hosts(HERE).words(&["--servers", "127.0.0.3,127.0.0.4"]);
    let report = refused.set("negotiation.algorithm=torus(dims=2x2)").run();
    report.assert_code(2);
    report.assert_verdict(&["torus(dims=2x2) is for 4 nodes, and there are 2"]);
}

#[test]
fn an_output_that_can_not_be_written_is_an_error() {
    let Ok(full) = File::options().write(true).open("/dev/full") else {
        println!("skipped: /dev/full is missing");
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
