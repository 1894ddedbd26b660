//! `gradwire run` with real processes: their environment, their end, and that none is left.

mod common;

use std::{fs, io::Read, process::Stdio};

use common::{Place, children, finish, kill, until, wait};

#[test]
fn ranks_get_their_place_and_lines_their_rank() {
    let place = Place::new();
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GRADWIRE_CROSS_RANK \
                  $GRADWIRE_HOST $MASTER_ADDR $GRADWIRE_WORKER__HUGE_PAGES; \
                  echo to stderr >&2; test $MASTER_PORT -gt 0 && test ${#GRADWIRE_SECRET} = 64";
    let set = ["--set", "worker.huge_pages=never", "-H", "127.0.0.1:2,127.0.0.2:2"];
    let output = place.run(&[&["run", "-np", "3"], &set[..], &["sh", "-c", script]].concat());
    assert_eq!(output.code, Some(0), "{output:?}");
    let mut lines: Vec<_> = output.stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!(
        lines,
        [
            "[0] 0/3 0/2 0 127.0.0.1 127.0.0.1 never",
            "[1] 1/3 1/2 0 127.0.0.1 127.0.0.1 never",
            "[2] 2/3 0/1 1 127.0.0.2 127.0.0.1 never",
        ]
    );
    let mut lines: Vec<_> = output.stderr.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[0] to stderr", "[1] to stderr", "[2] to stderr"]);
    place.assert_clean(false);
}

#[test]
fn a_killed_rank_ends_the_job() {
    let place = Place::new();
    let nap = &place.nap;
    // One rank's child leaves its process group, and one ignores the polite request.
    let script = format!(
        "if [ $RANK = 3 ]; then for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo line $i >&2; done; \
         sleep 0.2; kill -9 $$; fi; \
         if [ $RANK = 0 ]; then setsid sleep {nap} & fi; \
         if [ $RANK = 1 ]; then trap '' TERM; fi; \
         sleep {nap} & sleep {nap}; sleep {nap}"
    );
    let output = place.run(&["run", "-H", "127.0.0.1:2,127.0.0.2:2", "sh", "-c", &script]);
    assert_eq!(output.code, Some(128 + 9), "{output:?}");
    let verdict = output.verdict();
    assert!(verdict.starts_with("gradwire: rank 3 on host 127.0.0.2 (pid "), "{output:?}");
    assert!(verdict.contains(") was killed by SIGKILL, 0."), "{verdict}");
    assert!(verdict.ends_with(" s after start; the other ranks were stopped"), "{verdict}");
    let tail = "its last lines on standard error:\n\
                \x20 line 3\n  line 4\n  line 5\n  line 6\n  line 7\n  line 8\n  line 9\n\
                \x20 line 10\n  line 11\n  line 12\n\
                full output: above; --output-dir DIR also writes it to files\n";
    assert!(output.stderr.ends_with(tail), "{}", output.stderr);
    place.assert_clean(false);
}

#[test]
fn the_first_rank_to_fail_decides() {
    let place = Place::new();
    let script = format!(
        "if [ $RANK = 1 ]; then sleep 0.1; exit 7; fi; trap 'exit 9' TERM; sleep {} & wait",
        place.nap
    );
    let output = place.run(&["run", "-np", "3", "sh", "-c", &script]);
    assert_eq!(output.code, Some(7), "{output:?}");
    assert!(output.verdict().contains("rank 1 on host localhost"), "{output:?}");
    assert!(output.verdict().contains("ended with exit code 7"), "{output:?}");
    place.assert_clean(false);
}

fn napping(place: &Place, words: &[&str]) -> std::process::Child {
    let script = format!("trap '' TERM INT; setsid sleep {0} & sleep {0} & sleep {0}", place.nap);
    let words = [&["run"], words, &["sh", "-c", &script]].concat();
    let child = place.gradwire(&words).spawn().unwrap();
    until("all ranks run", || Place::running(&format!("sleep {}", place.nap)).len() >= 6 + 2);
    child
}

#[test]
fn ctrl_c_ends_everything() {
    let place = Place::new();
    let child = napping(&place, &["-np", "2"]);
    kill("INT", child.id());
    let output = finish(child);
    assert_eq!(output.code, Some(130), "{output:?}");
    assert!(
        output.stderr.ends_with("interrupted by SIGINT; everything was stopped\n"),
        "{output:?}"
    );
    place.assert_clean(false);
}

#[test]
fn a_launcher_that_is_killed_leaves_nothing() {
    let place = Place::new();
    let mut child = napping(&place, &["-H", "localhost:1,other:1"]);
    kill("KILL", child.id());
    wait(&mut child);
    place.assert_clean(true);
}

#[test]
fn a_killed_agent_leaves_nothing() {
    let place = Place::new();
    let child = napping(&place, &["-np", "2"]);
    let [agent] = children(child.id())[..] else { panic!("one agent") };
    kill("KILL", agent);
    let output = finish(child);
    assert_eq!(output.code, Some(1), "{output:?}");
    let expected =
        "gradwire: the connection to host localhost was lost: its agent was killed by SIGKILL";
    assert!(output.stderr.contains(expected), "{output:?}");
    place.assert_clean(false);
}

#[test]
fn a_missing_program_is_named_for_each_host() {
    let place = Place::new();
    let output = place.run(&["run", "-H", "127.0.0.1:1,127.0.0.2:1", "zonk", "--flag"]);
    assert_eq!(output.code, Some(1), "{output:?}");
    for host in ["127.0.0.1", "127.0.0.2"] {
        let expected = format!("error: program 'zonk' not found on host {host} (PATH=");
        assert!(output.stderr.contains(&expected), "{output:?}");
    }
    // As for the program itself, with its variables.
    let output = place.run(&["run", "-x", "A=1", "zonk.py"]);
    assert!(output.stderr.contains("hint: run a script with its interpreter: python zonk.py"));
    let path = place.path().join("text");
    fs::write(&path, "x").unwrap();
    let output = place.run(&["run", "./text"]);
    assert!(output.stderr.contains("'./text' on host localhost is not executable"), "{output:?}");
    let mut command = place.gradwire(&["run", "text"]);
    let child = command.env("PATH", format!("/bin:{}", place.path().display())).spawn().unwrap();
    let expected =
        format!("error: program 'text' is {} on host localhost, which is", path.display());
    let output = finish(child);
    assert!(output.stderr.starts_with(&expected), "{output:?}");
    place.script("dos", "#!/bin/sh\r\necho hello\r\n");
    let output = place.run(&["run", "./dos"]);
    let expected = "/dos: its first line names the interpreter \"/bin/sh\\r\", which \
                    does not exist";
    assert!(output.code == Some(126) && output.stderr.contains(expected), "{output:?}");
    let output = place.run(&["run", "./text/train"]);
    assert!(output.stderr.contains("can't be read: Not a directory"), "{output:?}");
    place.assert_clean(false);
}

#[test]
fn a_late_daemon_is_named_and_stopped() {
    let place = Place::new();
    place.script("gradwired", &format!("#!/bin/sh\nexec sleep {}\n", place.nap));
    let output =
        place.run(&["run", "--start-timeout", "0.5", "-H", "127.0.0.1:1,127.0.0.2:1", "true"]);
    assert_eq!(output.code, Some(1), "{output:?}");
    let expected =
        "error: the job did not start within 0.5 s: the daemon on host 127.0.0.1 does not serve";
    assert!(output.stderr.contains(expected), "{output:?}");
    place.assert_clean(false);
}

#[test]
fn a_failed_daemon_is_shown_with_its_output() {
    let place = Place::new();
    place.script("gradwired", "#!/bin/sh\necho 'error: port 7 is in use' >&2\nexit 1\n");
    let output = place.run(&["run", "true"]);
    assert_eq!(output.code, Some(1), "{output:?}");
    let expected = "ended with exit code 1 before the job began: error: port 7 is in use";
    assert!(output.stderr.contains(expected), "{output:?}");

    place.script(
        "gradwired",
        "#!/bin/sh\necho \
         '{\"event\":\"serving\",\"metrics\":\"127.0.0.1:1\",\"grpc\":\"127.0.0.1:3\"}'\n\
         sleep 0.3; echo 'error: out of memory' >&2; exit 1\n",
    );
    let output = place.run(&["run", "-np", "2", "sleep", &place.nap]);
    assert_eq!(output.code, Some(1), "{output:?}");
    assert!(
        output.verdict().starts_with("gradwire: the daemon on host localhost (pid "),
        "{output:?}"
    );
    let tail = "standard error:\n  error: out of memory\n\
                full output: run again with --verbose, or with --output-dir DIR\n";
    assert!(output.stderr.ends_with(tail), "{output:?}");
    place.assert_clean(false);
}

#[test]
fn no_line_is_lost_with_a_slow_reader() {
    let place = Place::new();
    let script = "i=0; while [ $i -lt 20000 ]; do echo line $i of rank $RANK; i=$((i+1)); done";
    let words = ["run", "-np", "2", "--output-dir", "out", "sh", "-c", script];
    let mut child = place.gradwire(&words).stderr(Stdio::inherit()).spawn().unwrap();
    let mut pipe = child.stdout.take().unwrap();
    let (mut all, mut part) = (Vec::new(), [0; 4096]);
    loop {
        let length = pipe.read(&mut part).unwrap();
        all.extend_from_slice(&part[..length]);
        if length == 0 {
            break;
        }
        // At first slowly, until every queue is full, then as fast as possible.
        if all.len() < 40_000 {
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }
    assert!(wait(&mut child).success());
    let all = String::from_utf8(all).unwrap();
    for rank in 0..2 {
        let prefix = format!("[{rank}] ");
        let mine: Vec<_> = all.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
        let expected: Vec<_> = (0..20000).map(|i| format!("line {i} of rank {rank}")).collect();
        assert!(mine == expected, "rank {rank}: {} lines", mine.len());
        let file =
            fs::read_to_string(place.path().join(format!("out/rank.0{rank}/stdout"))).unwrap();
        assert!(file.lines().eq(expected.iter().map(String::as_str)), "the file of rank {rank}");
    }
    place.assert_clean(false);
}

#[test]
fn binary_output_and_progress_bars_are_unchanged() {
    let place = Place::new();
    let script = r"printf '10%%\r20%%\rdone\n\377\376\n' >&2; printf 'no newline'";
    let output = place.run(&["run", "--output-dir", "out", "sh", "-c", script]);
    assert_eq!(output.code, Some(0), "{output:?}");
    let file = |name: &str| fs::read(place.path().join("out/rank.00").join(name)).unwrap();
    assert_eq!(file("stderr"), b"10%\r20%\rdone\n\xff\xfe\n");
    assert_eq!(file("stdout"), b"no newline");
    assert_eq!(output.stdout, "[0] no newline\n");
    assert!(output.stderr.starts_with("[0] 10%\r[0] 20%\r[0] done\n"), "{output:?}");
}

#[test]
fn a_rank_may_describe_its_error_in_its_folder() {
    let place = Place::new();
    let script = "echo {} > $TORCHELASTIC_ERROR_FILE";
    let output = place.run(&["run", "-np", "2", "--output-dir", "out", "sh", "-c", script]);
    assert_eq!(output.code, Some(0), "{output:?}");
    for rank in 0..2 {
        let file = place.path().join(format!("out/rank.0{rank}/error.json"));
        assert_eq!(fs::read_to_string(file).unwrap(), "{}\n");
    }
    let output = place.run(&["run", "sh", "-c", "echo ${TORCHELASTIC_ERROR_FILE-none}"]);
    assert_eq!(output.stdout, "[0] none\n");
}

#[test]
fn an_empty_standard_input_is_mentioned() {
    let output = Place::new().run(&["run", "cat", "-"]);
    assert_eq!((output.code, output.stdout.as_str()), (Some(0), ""));
    let expected = "gradwire: '-' may mean standard input, which is empty for ranks\n";
    assert!(output.stderr.starts_with(expected), "{output:?}");
}

#[test]
fn a_reader_that_goes_away_ends_the_job() {
    let place = Place::new();
    let script = format!("while :; do echo y; done & sleep {}", place.nap);
    let mut child = place.gradwire(&["run", "-np", "2", "sh", "-c", &script]).spawn().unwrap();
    let mut some = [0; 100];
    child.stdout.take().unwrap().read_exact(&mut some).unwrap();
    let output = finish(child);
    assert_eq!(output.code, Some(1), "{output:?}");
    assert!(output.stderr.contains("output can't be written: Broken pipe"), "{output:?}");
    place.assert_clean(false);
}

/// The exit code of the job matters more than the message about a trace.
#[test]
fn a_missing_reader_keeps_the_exit_code() {
    let place = Place::new();
    for code in [0, 3] {
        let script = format!("exit {code}");
        let words = ["run", "-np", "1", "--trace", "t.json", "sh", "-c", &script];
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut child = place.gradwire(&words).stderr(writer).spawn().unwrap();
        assert_eq!(wait(&mut child).code(), Some(code));
        place.assert_clean(false);
    }
}
