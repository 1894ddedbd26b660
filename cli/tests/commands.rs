//! The other commands, and errors before anything starts.

mod common;

use std::{fs, io::Write};

use common::{GRADWIRE, Place};

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
    fs::write(place.path().join("g.toml"), "[data]\nthreads = 3\nchunk_bytes = \"128KiB\"\n")
        .unwrap();
    let mut command =
        place.gradwire(&["config", "show", "--config", "g.toml", "--set", "worker.spin_us=7"]);
    command.env("GRADWIRE_DATA__THREADS", "4");
    let output = common::finish(command.spawn().unwrap());
    assert_eq!(output.code, Some(0), "{output:?}");
    let line = |key: &str| {
        let line = output.stdout.lines().find(|line| line.starts_with(key)).unwrap();
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(line("data.threads"), "data.threads = 4 # environment GRADWIRE_DATA__THREADS");
    assert_eq!(line("data.chunk_bytes"), "data.chunk_bytes = \"128KiB\" # file g.toml (internal)");
    assert_eq!(line("worker.spin_us"), "worker.spin_us = 7 # command line (internal)");
    assert_eq!(line("heartbeat.timeout_ms"), "heartbeat.timeout_ms = 3000 # default");
    assert!(!output.stdout.contains("heartbeat.interval_ms"), "{output:?}");
}

/// The program beside `gradwire` gets all words as they are; without it, one error says what to do.
#[test]
fn the_laboratory_runs_where_it_is_installed() {
    let place = Place::new();
    let gradwire = place.path().join("gradwire");
    fs::copy(GRADWIRE, &gradwire).unwrap();
    let lab = |words: &[&str]| {
        let mut command = place.program(&gradwire, words);
        common::finish(command.env("PATH", place.path()).spawn().unwrap())
    };
    let commands: [&[&str]; 5] = [
        &["simulate", "run", "--help"],
        &["probe", "-np", "2", "-H", "a,b"],
        &["bench", "negotiation", "--nodes", "2"],
        &["bench", "resources", "-h"],
        &["explain", "--cluster", "x.toml", "--json"],
    ];
    for words in commands {
        let output = lab(words);
        assert_eq!(output.code, Some(1), "{output:?}");
        for part in ["this command needs gradwire-lab", "cargo build --release -p gradwire-lab"] {
            assert!(output.stderr.contains(part), "{output:?}");
        }
    }
    place.script("gradwire-lab", "#!/bin/sh\necho \"$*\"; exit 3\n");
    for words in commands {
        let output = lab(words);
        assert_eq!((output.code, output.stdout), (Some(3), format!("{}\n", words.join(" "))));
    }
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
