//! How `gradwire run` ends if a reader is slow or gone, if signals are ignored, or if a connection
//! is shared: no output is lost, and it ends exactly the processes that it has started.

mod common;

use std::{
    fs,
    io::Read,
    process::{Command, Stdio},
    thread::sleep,
    time::Duration,
};

use common::{GRADWIRE, Place, children, finish, kill, until, wait};

/// Reads a pipe like a user who scrolls: first not at all, then a little at a time, then all.
fn read_slowly(mut pipe: impl Read, pauses: &[u64]) -> String {
    let (mut all, mut part) = (Vec::new(), vec![0; 20_000]);
    for pause in pauses {
        sleep(Duration::from_millis(*pause));
        let length = pipe.read(&mut part).unwrap();
        all.extend_from_slice(&part[..length]);
    }
    pipe.read_to_end(&mut all).unwrap();
    String::from_utf8(all).unwrap()
}

#[test]
fn the_last_output_may_be_read_late() {
    // More than all pipes and queues can hold, at once and at the very end.
    let script = "i=0; while [ $i -lt 9000 ]; do echo line $i of rank $RANK, which is a long one; \
                  i=$((i+1)); done; echo the end of rank $RANK; exit $CODE";
    for (code, hosts) in [(0, "localhost:1,node-b:1"), (3, "localhost:2")] {
        let place = Place::new();
        let mut command = place.gradwire(&["run", "-H", hosts, "sh", "-c", script]);
        let mut child =
            command.env("CODE", code.to_string()).stderr(Stdio::null()).spawn().unwrap();
        let all = read_slowly(child.stdout.take().unwrap(), &[6000, 1000, 1000, 4000, 100]);
        assert_eq!(wait(&mut child).code(), Some(code), "{}", all.len());
        for rank in 0..2 {
            let ends = all.contains(&format!("[{rank}] the end of rank {rank}\n"));
            // If one rank failed, the other may have been stopped before its end.
            assert!(ends || code != 0, "rank {rank}: {} bytes", all.len());
            let mine = all.lines().filter(|line| line.starts_with(&format!("[{rank}] line")));
            assert!(mine.count() == 9000 || code != 0, "rank {rank}: {} bytes", all.len());
        }
        assert!(all.contains(" the end of rank "), "{} bytes", all.len());
        place.assert_clean(false);
    }
}

#[test]
fn unread_output_does_not_delay_ctrl_c() {
    let place = Place::new();
    let script = "while :; do echo y; done";
    let mut child = place.gradwire(&["run", "-np", "2", "sh", "-c", script]).spawn().unwrap();
    let pipe = child.stdout.take().unwrap();
    until("the ranks write", || Place::running(script).len() >= 3);
    sleep(Duration::from_millis(500));
    kill("INT", child.id());
    assert_eq!(wait(&mut child).code(), Some(130));
    drop(pipe);
    place.assert_clean(false);
}

/// A pager that is paused, or a terminal that has stopped: ranks wait for it, but not the end.
#[test]
fn a_failure_is_told_while_nobody_reads() {
    for signals in [0, 2] {
        let place = Place::new();
        let script = "echo $$ > pid.$RANK; while :; do echo a line that fills pipes; done";
        let words = ["run", "-np", "2", "sh", "-c", script];
        let mut child = place.gradwire(&words).stderr(Stdio::piped()).spawn().unwrap();
        let unread = child.stdout.take().unwrap();
        let pid = || fs::read_to_string(place.path().join("pid.1")).ok()?.trim().parse().ok();
        let mut rank = None;
        until("rank 1 runs", || {
            rank = pid();
            rank.is_some()
        });
        // Until every queue is full.
        sleep(Duration::from_millis(1500));
        kill("KILL", rank.unwrap());
        // Only the launcher has the script in its arguments then.
        until("all ranks have ended", || Place::running(script).len() == 1);
        for _ in 0..signals {
            kill("TERM", child.id());
            sleep(Duration::from_millis(100));
        }
        let mut told = [0; 4096];
        let length = child.stderr.as_mut().unwrap().read(&mut told).unwrap();
        let told = String::from_utf8_lossy(&told[..length]).into_owned();
        assert!(told.contains("gradwire: rank 1 on host localhost (pid"), "{told}");
        if signals > 0 {
            assert_eq!(wait(&mut child).code(), Some(137), "{told}");
            drop(unread);
        } else {
            assert!(child.try_wait().unwrap().is_none(), "the output is not lost yet");
            drop(unread);
            assert_eq!(wait(&mut child).code(), Some(137), "{told}");
        }
        place.assert_clean(false);
    }
}

#[test]
fn lost_output_makes_a_job_fail() {
    let place = Place::new();
    // More than one pipe can hold, and less than all pipes can.
    let script = "i=0; while [ $i -lt 4500 ]; do echo a line that fills pipes; i=$((i+1)); done; \
                  touch written";
    let mut child = place.gradwire(&["run", "sh", "-c", script]).spawn().unwrap();
    let pipe = child.stdout.take().unwrap();
    until("the rank has written", || place.path().join("written").exists());
    // The launcher has these words in its own arguments.
    until("it has ended", || Place::running(&format!("sh -c {script}")).len() == 1);
    kill("INT", child.id());
    assert_eq!(wait(&mut child).code(), Some(130), "some of its output has not come out");
    drop(pipe);
    place.assert_clean(false);

    let full = || fs::File::create("/dev/full").unwrap();
    let child = place.gradwire(&["run", "echo", "hello"]).stdout(full()).spawn().unwrap();
    let output = finish(child);
    assert_eq!(output.code, Some(1), "{output:?}");
    assert!(output.stderr.contains("output can't be written: No space left"), "{output:?}");
}

#[test]
fn a_child_may_hold_a_ranks_output_open() {
    let place = Place::new();
    // It writes without end, in its own session.
    let script = "setsid sh -c 'while :; do echo noise; done' & printf 'last words'";
    let output = place.run(&["run", "sh", "-c", script]);
    assert_eq!(output.code, Some(0));
    assert!(output.stdout.contains("[0] last words"), "{}", output.stdout.len());
    place.assert_clean(false);
}

#[test]
fn signals_that_were_ignored_stay_ignored() {
    let place = Place::new();
    let script = format!("trap 'echo got HUP' HUP; sleep {}", place.nap);
    let mut command = Command::new("nohup");
    command.arg(GRADWIRE).args(["run", "-np", "2", "sh", "-c", &script]);
    let like = place.gradwire(&[]);
    command.envs(like.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.current_dir(place.path()).stdin(Stdio::null());
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let nap = format!("sleep {}", place.nap);
    until("all ranks run", || {
        Place::running(&nap).iter().filter(|line| line.starts_with(&nap)).count() == 2
    });
    let [agent] = children(child.id())[..] else { panic!("one agent") };
    kill("HUP", child.id());
    kill("HUP", agent);
    sleep(Duration::from_secs(1));
    assert!(!Place::running(&nap).is_empty(), "it ended");
    kill("TERM", child.id());
    let output = finish(child);
    assert_eq!(output.code, Some(143), "{output:?}");
    place.assert_clean(false);
}

#[test]
fn a_shared_connection_of_ssh_is_left_alone() {
    let place = Place::new();
    // Like ssh with ControlPersist: the first connection leaves a master in the background.
    let master = format!("setsid sleep {} </dev/null >/dev/null 2>&1 &", place.nap);
    let log = "printf '%s\\n' \"$*\" >> \"$FAKE_SSH_LOG\"";
    let rest = "while [ \"$1\" = -o ]; do shift 2; done; shift; \
                SSH_CONNECTION=\"127.0.0.1 1 127.0.0.3 22\" exec sh -c \"$*\"";
    place.script("ssh", &format!("#!/bin/sh\n{log}\n{master}\n{rest}\n"));
    let output = place.run(&["run", "-H", "node-b:1,localhost:1", "true"]);
    assert_eq!(output.code, Some(0), "{output:?}");
    let left = Place::processes(&format!("sleep {}", place.nap));
    assert_eq!(left.len(), 1, "{left:?}");
    let log = fs::read_to_string(place.path().join("ssh.log")).unwrap();
    assert!(log.contains("-o ControlMaster=no -o ControlPath=none"), "{log}");
    left.keys().for_each(|pid| kill("KILL", *pid));
    place.assert_clean(true);
}

#[test]
fn left_over_processes_are_asked_to_end() {
    let place = Place::new();
    // One stays in the rank's group, one has its own session, one has lost its parent.
    let script = format!(
        "for how in '' setsid; do $how sh -c 'trap \"echo asked; exit\" TERM; sleep {0} & wait' & \
         done; (sleep {0} &); sleep 1",
        place.nap
    );
    // If they were not asked, the test would wait until its limit.
    let mut command = place.gradwire(&["run", "sh", "-c", &script]);
    let child = command.env("GRADWIRE_LAUNCH__GRACE_MS", "3600000").spawn().unwrap();
    let output = finish(child);
    assert_eq!(output.code, Some(0), "{output:?}");
    assert_eq!(output.stdout.matches("asked").count(), 2, "{output:?}");
    place.assert_clean(false);
}

#[test]
fn lines_without_an_end_are_not_joined() {
    let place = Place::new();
    let script = "printf 'no eol'; printf oops >&2; sleep 0.3";
    let output = place.run(&["run", "-np", "3", "sh", "-c", script]);
    for (text, what) in [(&output.stdout, "no eol"), (&output.stderr, "oops")] {
        let mut lines: Vec<_> = text.lines().collect();
        lines.sort_unstable();
        assert_eq!(lines, [0, 1, 2].map(|rank| format!("[{rank}] {what}")), "{output:?}");
        assert!(text.ends_with('\n'), "{output:?}");
    }
}

#[test]
fn too_few_descriptors_are_reported() {
    let place = Place::new();
    for limit in [4, 7, 12, 23, 24, 26, 28, 32] {
        let limited = format!("ulimit -n {limit}; exec {GRADWIRE} run -np 4 true");
        let mut command = Command::new("sh");
        let like = place.gradwire(&[]);
        command.envs(like.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.args(["-c", &limited]).stdin(Stdio::null());
        let output = finish(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
        if output.code == Some(0) {
            continue;
        }
        let reported = output.stderr.contains("Too many open files");
        assert!(reported && !output.stderr.contains("panicked"), "ulimit -n {limit}: {output:?}");
        assert!(!output.stderr.contains("can't be reached"), "ulimit -n {limit}: {output:?}");
    }
    place.assert_clean(true);
}
