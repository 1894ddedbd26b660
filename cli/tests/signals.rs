//! Signals to `gradwire run` reach the ranks, here and on other hosts.

mod common;

use std::{
    fs,
    process::{Child, Command},
    thread::sleep,
    time::Duration,
};

use common::{Place, finish, kill, until};

/// Reports signals until a file says that it is enough.
const SCRIPT: &str = "for s in USR1 USR2 CONT WINCH; do trap \"echo got $s\" $s; done; \
                      touch ready.$RANK; while [ ! -e enough ]; do sleep 0.05; done; exit 4";

#[test]
fn signals_reach_every_rank() {
    let place = Place::new();
    let words = ["run", "-H", "localhost:1,node-b:1", "sh", "-c", SCRIPT];
    let child = place.gradwire(&words).spawn().unwrap();
    until("the ranks run", || {
        (0..2).all(|rank| place.path().join(format!("ready.{rank}")).exists())
    });
    for signal in ["USR1", "USR2", "WINCH", "CONT"] {
        kill(signal, child.id());
        sleep(Duration::from_millis(300));
    }
    fs::write(place.path().join("enough"), "").unwrap();
    let output = finish(child);
    // No signal ended a rank or the launcher.
    assert_eq!(output.code, Some(4), "{output:?}");
    for rank in 0..2 {
        for signal in ["USR1", "USR2", "WINCH", "CONT"] {
            let line = format!("[{rank}] got {signal}\n");
            assert_eq!(output.stdout.matches(&line).count(), 1, "{line}{output:?}");
        }
    }
    place.assert_clean(false);
}

#[test]
fn ctrl_c_ends_a_slow_look_up_of_names() {
    let place = Place::new();
    let (source, library) = (place.path().join("slow.c"), place.path().join("slow.so"));
    // A name server that does not answer.
    let slow = "#include <stdio.h>\n#include <stdlib.h>\n#include <unistd.h>\n\
                int getaddrinfo(void *a, void *b, void *c, void *d) {\n\
                    fclose(fopen(getenv(\"LOOKING\"), \"w\"));\n\
                    sleep(600); return 0; }\n";
    fs::write(&source, slow).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source);
    assert!(compiler.status().unwrap().success());
    let mut command = place.gradwire(&["run", "-H", "somewhere:1", "true"]);
    let looking = place.path().join("looking");
    command.env("LD_PRELOAD", &library).env("LOOKING", &looking);
    let child = command.spawn().unwrap();
    until("the name is looked up", || looking.exists());
    kill("INT", child.id());
    let output = finish(child);
    assert_eq!(output.code, Some(130), "{output:?}");
    assert!(output.stderr.contains("interrupted by SIGINT"), "{output:?}");
}

#[test]
fn an_early_signal_does_not_end_the_launcher() {
    let place = Place::new();
    // The daemon of this host is never ready, so the ranks never start.
    place.script("gradwired", "#!/bin/sh\ntouch begun\nexec sleep 600\n");
    let words = ["run", "--start-timeout", "3", "true"];
    let child = place.gradwire(&words).spawn().unwrap();
    until("the daemon begins", || place.path().join("begun").exists());
    kill("USR1", child.id());
    let output = finish(child);
    assert_eq!(output.code, Some(1), "{output:?}");
    assert!(output.stderr.contains("did not start within 3.0 s"), "{output:?}");
    place.assert_clean(true);
}

/// Runs until a file says that it is enough.
const WAITING: &str = "touch ready.$RANK; while [ ! -e enough ]; do sleep 0.05; done; exit 4";

fn is_suspended(child: &Child) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", child.id()));
    stat.is_ok_and(|stat| stat.contains(") T "))
}

#[test]
fn a_job_continued_at_once_is_not_suspended() {
    for (signal, code) in [("CONT", 4), ("INT", 130)] {
        let place = Place::new();
        let child = place.gradwire(&["run", "sh", "-c", WAITING]).spawn().unwrap();
        until("the rank runs", || place.path().join("ready.0").exists());
        for gap in [0, 50] {
            kill("TSTP", child.id());
            sleep(Duration::from_millis(gap));
            kill(signal, child.id());
            sleep(Duration::from_millis(600));
            let suspended = is_suspended(&child);
            // Otherwise a suspended launcher would never end.
            kill("CONT", child.id());
            assert!(!suspended, "SIG{signal} after {gap} ms was lost");
            if signal == "INT" {
                break;
            }
        }
        fs::write(place.path().join("enough"), "").unwrap();
        let output = finish(child);
        assert_eq!(output.code, Some(code), "{output:?}");
        place.assert_clean(true);
    }
}

#[test]
fn hosts_without_ranks_are_suspended_too() {
    let place = Place::new();
    // The rank of the second host has ended, and the third host is a server.
    let script = format!("if [ $RANK = 1 ]; then touch ready.1; exit 0; fi; {WAITING}");
    let hosts = ["-H", "127.0.0.1:1,127.0.0.2:1", "--servers", "127.0.0.3"];
    let words = [&["run"], &hosts[..], &["sh", "-c", &script]].concat();
    let child = place.gradwire(&words).spawn().unwrap();
    until("the ranks run", || {
        (0..2).all(|rank| place.path().join(format!("ready.{rank}")).exists())
    });
    sleep(Duration::from_millis(500));
    kill("TSTP", child.id());
    until("the launcher is suspended", || is_suspended(&child));
    // Longer than any part may be silent.
    sleep(Duration::from_secs(7));
    kill("CONT", child.id());
    // Whoever is taken for dead ends the job.
    sleep(Duration::from_secs(2));
    fs::write(place.path().join("enough"), "").unwrap();
    let output = finish(child);
    assert_eq!(output.code, Some(4), "{output:?}");
    place.assert_clean(false);
}
