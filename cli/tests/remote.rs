//! Hosts behind ssh: the secret is on no command line, the environment is forwarded, and all hosts
//! that can't be reached are named.

mod common;

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    process::Stdio,
    thread::sleep,
    time::Duration,
};

use common::{Place, kill};

#[test]
fn the_secret_is_sent_on_standard_input() {
    let place = Place::new();
    // While the job runs, no process of this machine shows the secret in its command line.
    let script = "for f in /proc/[0-9]*/cmdline; do case $(tr '\\0' ' ' < $f 2>/dev/null) in \
                  *$GRADWIRE_SECRET*) echo LEAK $f;; esac; done; \
                  echo $GRADWIRE_SECRET; echo $WANDB_API_KEY at $MASTER_ADDR in $PWD; \
                  echo lanes ${GRADWIRE_DATA__LANES:-unset}";
    let mut command = place.gradwire(&[
        "run",
        "-H",
        "user@node-b:1,node-c:1",
        "--set",
        "data.lanes=3",
        "sh",
        "-c",
        script,
    ]);
    command.env("WANDB_API_KEY", "private");
    let output = common::finish(command.spawn().unwrap());
    assert_eq!(output.code, Some(0), "{output:?}");
    assert!(!output.stdout.contains("LEAK"), "TRUST: {output:?}");
    let place_line = format!("private at 127.0.0.3 in {}", place.path().display());
    assert!(output.stdout.lines().any(|l| l == format!("[0] {place_line}")), "{output:?}");
    assert!(output.stdout.contains("[1] lanes unset"), "a rank needs none: {output:?}");

    let secret = output.stdout.lines().find(|line| line.len() == 4 + 64).expect("a secret");
    let log = fs::read_to_string(place.path().join("ssh.log")).unwrap();
    let mut calls: Vec<_> = log.lines().collect();
    calls.sort_unstable();
    assert_eq!(calls.len(), 2, "{log}");
    for (call, host) in calls.iter().zip(["node-c", "user@node-b"]) {
        assert!(call.ends_with(&format!("{host} {} agent", common::GRADWIRE)), "{call}");
        assert!(!call.contains(&secret[4..]) && !call.contains("private"), "TRUST: {call}");
    }
    place.assert_clean(false);
}

#[test]
fn all_unreachable_hosts_are_listed() {
    let place = Place::new();
    let output = place.run(&["run", "-H", "localhost:1,bad-1:1,bad-2:1,bare-3:1", "true"]);
    assert_eq!(output.code, Some(1), "{output:?}");
    for host in ["bad-1", "bad-2"] {
        let expected = format!(
            "error: host {host} can't be reached: ssh: connect to host {host} port 22: \
             Connection refused"
        );
        assert!(output.stderr.contains(&expected), "{output:?}");
    }
    assert!(
        output.stderr.contains(
            "error: host bare-3 can't be reached: sh: 1: gradwire: not \
                                    found\nhint: install gradwire there"
        ),
        "{output:?}"
    );
    assert!(output.stderr.contains(&format!("(tried: {})", common::GRADWIRE)), "{output:?}");
    assert!(output.stderr.contains(" true` must work without a password"), "{output:?}");
    place.assert_clean(false);

    let output =
        place.run(&["run", "--start-timeout", "0.5", "-H", "mute-1:1,localhost:1", "true"]);
    assert!(output.stderr.contains("within 0.5 s: no answer from mute-1\n"), "{output:?}");
    place.assert_clean(true);
}

#[test]
fn the_launchers_own_path_is_tried_first() {
    let place = Place::new();
    let mut command = place.gradwire(&["run", "-H", "node-b:1", "echo", "hello"]);
    // It is not in the PATH of a login.
    command.env_remove("GRADWIRE_LAUNCH__REMOTE_GRADWIRE");
    let output = common::finish(command.spawn().unwrap());
    assert_eq!(output.code, Some(0), "{output:?}");
    assert_eq!(output.stdout, "[0] hello\n");
    let mut command = place.gradwire(&["run", "-H", "bare-3:1", "true"]);
    command.env_remove("GRADWIRE_LAUNCH__REMOTE_GRADWIRE");
    let output = common::finish(command.spawn().unwrap());
    let tried = format!("(tried: {} and the PATH of a login)", common::GRADWIRE);
    assert!(output.stderr.contains(&tried), "{output:?}");
}

#[test]
fn a_missing_ssh_is_named() {
    let place = Place::new();
    let output = place.run(&["run", "--set", "launch.ssh=zonk-ssh", "-H", "node-b:1", "true"]);
    assert_eq!(output.code, Some(1), "{output:?}");
    let expected = "error: host node-b can't be reached: zonk-ssh can't be run: No such file";
    assert!(output.stderr.contains(expected), "{output:?}");
}

#[test]
fn another_release_on_a_host_is_refused() {
    let place = Place::new();
    // An agent of another release refuses with a message that never changes.
    let other = place.script(
        "other-gradwire",
        "#!/bin/sh\nread begin\necho '{\"report\":\"refused\",\"what\":\"host node-b has gradwire \
         9.0.0, but the launcher has 0.1.0\",\"hint\":\"install the same \
         release on every host\"}'\n",
    );
    let setting = format!("launch.remote_gradwire={}", other.display());
    let output = place.run(&["run", "--set", &setting, "-H", "node-b:1", "true"]);
    assert_eq!(output.code, Some(1), "{output:?}");
    assert_eq!(
        output.stderr,
        "error: host node-b has gradwire 9.0.0, but the launcher has 0.1.0\n\
         hint: install the same release on every host\n"
    );
    let silent = place.script("silent-gradwire", "#!/bin/sh\nexit 3\n");
    let setting = format!("launch.remote_gradwire={}", silent.display());
    let output = place.run(&["run", "--set", &setting, "-H", "node-b:1", "true"]);
    assert!(output.stderr.starts_with("error: host node-b can't be reached: "), "{output:?}");
    assert!(output.stderr.contains("ended with exit code 3"), "{output:?}");
}

/// An agent ends when the launcher is silent, because a broken network sends no goodbye. The time
/// while the agent is suspended does not count: the launcher may have been suspended with it.
#[test]
fn a_suspended_agent_does_not_blame_the_launcher() {
    let place = Place::new();
    let mut child = place.gradwire(&["agent"]).stdin(Stdio::piped()).spawn().unwrap();
    let mut orders = child.stdin.take().unwrap();
    let mut reports = BufReader::new(child.stdout.take().unwrap()).lines();
    let begin = serde_json::json!({
        "order": "begin",
        "version": env!("CARGO_PKG_VERSION"),
        "host": "here",
        "grace_ms": 0,
        "silence_ms": 2000,
        "recorder": "",
        "directory": "",
        "environment": {},
        "program": "true",
        "gradwired": place.path().join("gradwired"),
    });
    writeln!(orders, "{begin}").unwrap();
    let mut report = || reports.next().unwrap().unwrap();
    assert!(report().starts_with(r#"{"report":"ready""#));
    kill("STOP", child.id());
    sleep(Duration::from_secs(3));
    kill("CONT", child.id());
    sleep(Duration::from_millis(500));
    writeln!(orders, r#"{{"order":"clock"}}"#).unwrap();
    assert!(report().starts_with(r#"{"report":"clock""#));
    // It ends by itself, although its standard input stays open.
    let output = common::finish(child);
    assert!(output.stderr.contains("the launcher is silent"), "{output:?}");
    drop(orders);
}
