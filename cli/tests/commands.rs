//! The other commands, and errors before anything starts.

mod common;

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
};

use common::{GRADWIRE, Place, kill, wait};

#[test]
fn wrong_commands_are_refused_in_one_line() {
    let place = Place::new();
    fs::write(place.path().join("hosts"), "# cluster\n\nlocalhost slots=2\nb slots=none\n")
        .unwrap();
    fs::write(place.path().join("bad.toml"), "[data]\nlane = 3\n").unwrap();
    let cases: [(&[&str], &str); 9] = [
        (
            &["run", "-np", "5", "-H", "a:2,b:2", "x"],
            "-np 5 is more than the 4 slots of the given hosts (a:2,b:2)",
        ),
        (&["run", "-H", "a:0", "x"], "-H entry 1: '0' is not a slot count"),
        (&["run", "-H", "a:1,a:2", "x"], "-H entry 2: host a is given twice"),
        (&["run", "--hostfile", "none", "x"], "hostfile none: No such file or directory"),
        (&["run", "--hostfile", "hosts", "x"], "hostfile hosts line 4: 'none' is not a slot count"),
        (
            &["run", "--set", "data.lane=3", "x"],
            "unknown setting 'data.lane' (command line); did you mean 'data.lanes'?",
        ),
        (
            &["run", "--config", "bad.toml", "x"],
            "unknown setting 'data.lane' (file bad.toml); did you mean 'data.lanes'?",
        ),
        (
            &["run", "--set", "log.level=warn,x=loud", "x"],
            "log.level = \"warn,x=loud\" is not a log filter",
        ),
        (
            &["config", "show", "--set", "data.lanes=99"],
            "setting data.lanes = \"99\" (command line): expected a whole number from 1 to 16",
        ),
    ];
    for (words, expected) in cases {
        let output = place.run(words);
        assert_eq!(output.code, Some(2), "{output:?}");
        assert!(output.stderr.starts_with(&format!("error: {expected}")), "{output:?}");
        assert!(
            output.stderr.lines().all(|l| l.starts_with("error: ") || l.starts_with("hint: ")),
            "{output:?}"
        );
        assert_eq!(output.stdout, "");
    }
}

/// The launcher or the rank that writes refuses it before anything is measured.
#[test]
fn an_unwritable_result_of_probe_is_refused() {
    let place = Place::new();
    let expected = "error: --out none/x can't be written: No such file or directory";
    let out = ["--out", "none/x"];
    let output = place.run(&[&["probe", "-H", "127.0.0.1,127.0.0.2"][..], &out].concat());
    assert!(output.stderr.starts_with(expected) && output.code == Some(1), "{output:?}");
    let mut command = place.gradwire(&[&["probe", "--started"][..], &out].concat());
    let output = common::finish(command.env("GRADWIRE_RANK", "0").spawn().unwrap());
    assert!(output.stderr.starts_with(expected) && output.code == Some(1), "{output:?}");
    // A writable file is left unchanged.
    let old = place.path().join("old.toml");
    fs::write(&old, "old").unwrap();
    for name in ["old.toml", "new.toml"] {
        let mut command = place.gradwire(&["probe", "--started", "--out", name]);
        let output = common::finish(command.env("GRADWIRE_RANK", "0").spawn().unwrap());
        assert!(!output.stderr.contains("--out") && output.code == Some(1), "{output:?}");
    }
    assert_eq!(fs::read_to_string(old).unwrap(), "old");
    assert!(!place.path().join("new.toml").exists());
}

#[test]
fn a_dry_run_starts_nothing() {
    let place = Place::new();
    fs::write(place.path().join("hosts"), "# two\n127.0.0.1 slots=2\n\nnode-b slots=4 # big\n")
        .unwrap();
    let output =
        place.run(&["run", "--dry-run", "--hostfile", "hosts", "-np", "3", "touch", "made"]);
    assert_eq!(output.code, Some(0), "{output:?}");
    for expected in [
        "3 ranks on 2 hosts",
        "host 127.0.0.1 (gradwire agent)",
        "/ssh -o BatchMode=yes",
        "rank 2: touch made",
        "GRADWIRE_SECRET=<secret>",
        "WORLD_SIZE=3",
    ] {
        assert!(output.stdout.contains(expected), "no {expected}: {output:?}");
    }
    assert!(!place.path().join("made").exists() && !place.path().join("ssh.log").exists());
}

#[test]
fn each_setting_is_shown_with_its_origin() {
    let place = Place::new();
    fs::write(place.path().join("g.toml"), "[data]\nlanes = 3\nchunk_bytes = \"128KiB\"\n")
        .unwrap();
    let mut command =
        place.gradwire(&["config", "show", "--config", "g.toml", "--set", "worker.spin_us=7"]);
    command.env("GRADWIRE_DATA__LANES", "4");
    let output = common::finish(command.spawn().unwrap());
    assert_eq!(output.code, Some(0), "{output:?}");
    let line = |key: &str| {
        let line = output.stdout.lines().find(|line| line.starts_with(key)).unwrap();
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(line("data.lanes"), "data.lanes = 4 # environment GRADWIRE_DATA__LANES");
    assert_eq!(line("data.chunk_bytes"), "data.chunk_bytes = \"128KiB\" # file g.toml");
    assert_eq!(line("worker.spin_us"), "worker.spin_us = 7 # command line");
    assert_eq!(line("heartbeat.interval_ms"), "heartbeat.interval_ms = 500 # default");
}

#[test]
fn a_coordinator_serves_status_and_readiness() {
    let place = Place::new();
    let mut command = place.gradwire(&["coordinator"]);
    command.env("GRADWIRE_JOB", "j1").env("GRADWIRE_SECRET", "ab".repeat(32));
    command.env("GRADWIRE_NODES", "2").env("GRADWIRE_RANKS", "4").env("GRADWIRE_BIND", "127.0.0.1");
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let serving: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!(serving["event"], "serving");

    let output = place.run(&["status", serving["grpc"].as_str().unwrap()]);
    assert_eq!(output.code, Some(0), "{output:?}");
    assert!(output.stdout.starts_with("job j1 (0.1.0), epoch 1, forming: "), "{output:?}");
    let output = place.run(&["explain", serving["grpc"].as_str().unwrap()]);
    assert!(output.stdout.starts_with("Choices of job j1:"), "{output:?}");
    let metrics = serving["metrics"].as_str().unwrap();
    let output = place.run(&["explain", metrics]);
    let said = format!("error: the service at {metrics} is not a coordinator: ");
    assert!(output.stderr.starts_with(&said) && output.code == Some(1), "{output:?}");
    let get = |path: &str| {
        let mut stream = TcpStream::connect(serving["metrics"].as_str().unwrap()).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    assert!(get("/healthz").starts_with("HTTP/1.1 200"));
    let ready = get("/readyz");
    assert!(ready.starts_with("HTTP/1.1 503") && ready.contains("not ready: forming: "), "{ready}");
    let metrics = get("/metrics");
    for label in ["gradwire_job=\"j1\"", "host=\"127.0.0.1\"", "service=\"coordinator\""] {
        let is_it = |line: &str| line.starts_with("gradwire_build_info{") && line.contains(label);
        assert!(metrics.lines().any(is_it), "no {label} in {metrics}");
    }
    let address = serving["grpc"].as_str().unwrap();
    assert!(get("/coordinator").ends_with(&format!("\r\n\r\ncoordinator {address}\n")));

    kill("TERM", child.id());
    assert!(wait(&mut child).success());
    let output = place.run(&["coordinator"]);
    assert_eq!(
        (output.code, output.stderr.split(';').next()),
        (Some(2), Some("error: GRADWIRE_JOB is not set"))
    );
}

#[test]
fn agents_and_exec_child_refuse_misuse() {
    let place = Place::new();
    let mut command = place.gradwire(&["agent"]);
    let mut child = command.stdin(std::process::Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"GET / HTTP/1.1\n").unwrap();
    let output = common::finish(child);
    assert_eq!(output.code, Some(1));
    assert!(
        output
            .stdout
            .starts_with("{\"report\":\"refused\",\"what\":\"gradwire 0.1.0 can't understand"),
        "{output:?}"
    );
    let output = place.run(&["exec-child", "1", "touch", "made"]);
    assert_eq!(output.code, Some(1), "{output:?} by {GRADWIRE}");
    assert!(!place.path().join("made").exists());
}
