//! `gradwire run` as a user sees it: what runs, what is refused, and with which message. However a
//! job ends, nothing remains (CLEAN is checked after every job).

use std::{
    ffi::OsStr,
    fs,
    io::{Read, Write},
    net::TcpListener,
    os::{
        linux::net::SocketAddrExt,
        unix::{
            ffi::OsStrExt,
            net::{SocketAddr, UnixStream},
        },
    },
    path::Path,
};

use gradwire_tests::launched::{Job, Launch, Line, Report, processes::Role};
use rustix::process::Signal;

/// A replacement for ssh that runs the command here. Host `node-3` is at 127.0.0.3, and so on.
const SSH_HERE: &str = "SSH_CONNECTION=\"127.0.0.1 1 127.0.0.${host#node-} 22\" exec sh -c \"$*\"";

/// Asserts that all ranks finished this many loops, and that the job ended well and silently.
#[track_caller]
fn assert_well(report: &Report, loops: usize) {
    report.assert_code(0);
    assert_eq!(report.said("looped").len(), loops, "{}", report.all());
    assert_eq!(report.verdict(), "", "{}", report.all());
}

#[test]
fn two_jobs_of_two_nodes_run_side_by_side() {
    let start = || {
        let steps = ["attach", "loop:1:7", "until:go", "loop:20:1000", "loop:3:300000", "leave"];
        Launch::new().two_by_two().rank(&steps).start()
    };
    let mut jobs = [start(), start()];
    for job in &mut jobs {
        job.until_said("looped", 4);
        job.allow("go");
    }
    for report in jobs.map(Job::finish) {
        assert_well(&report, 3 * 4);
    }
}

#[test]
fn all_traces_of_a_job_are_found() {
    let mut job = Launch::new().ranks(2).rank(&["attach", "until:go", "leave"]).start();
    job.until_said("attached", 2);
    fs::write(job.folder().join("core"), "").unwrap();
    let traces = job.traces();
    let id = job.process(Role::Rank(0)).variable("GRADWIRE_JOB").unwrap();
    for role in [Role::Launcher, Role::Agent(0), Role::Daemon(0), Role::Rank(1)] {
        let role = format!("role: Some({role:?})");
        assert!(traces.iter().any(|trace| trace.contains(&role)), "no {role}: {traces:#?}");
    }
    let socket = format!("@gradwire-{id}-0");
    assert!(traces.iter().any(|trace| trace.ends_with(&socket)), "no {socket}: {traces:#?}");
    assert!(traces.iter().any(|trace| trace.ends_with("/core")), "{traces:#?}");
    job.leaves("core");
    job.allow("go");
    job.finish().assert_code(0);
}

#[test]
fn hostfiles_are_filled_and_output_kept_by_rank() {
    let launch = Launch::new();
    let hosts =
        "# two\n\n127.0.0.1 slots=2\n127.0.0.2 slots=4 # more than needed\n127.0.0.3 slots=1\n";
    fs::write(launch.folder().join("hosts"), hosts).unwrap();
    let words = ["-np", "3", "--hostfile", "hosts", "--output-dir", "out"];
    let steps = ["env:GRADWIRE_HOST", "attach", "loop:2:100", "complain:over", "leave"];
    let mut job = launch.words(&words).rank(&steps).start();
    job.leaves("out");
    job.until_said("left", 3);
    let out = job.folder().join("out");
    let report = job.finish_and(|| {
        let read = |name: &str| fs::read_to_string(out.join(name)).unwrap();
        for rank in 0..3 {
            assert!(read(&format!("rank.{rank:02}/stdout")).contains(" looped 2 in "));
            assert_eq!(read(&format!("rank.{rank:02}/stderr")), "over\n");
        }
        assert!(!out.join("rank.03").exists());
    });
    report.assert_code(0);
    let mut hosts: Vec<_> = report.said("env").into_iter().map(|s| (s.rank, s.text)).collect();
    hosts.sort();
    let expected = [(0, "127.0.0.1"), (1, "127.0.0.1"), (2, "127.0.0.2")];
    assert_eq!(hosts, expected.map(|(rank, host)| (rank, host.to_owned())));
    assert_eq!(report.said("attached")[0].text.split(' ').next_back(), Some("3"));
}

#[test]
fn a_dry_run_starts_nothing() {
    let report = Launch::new().two_by_two().words(&["--dry-run"]).program(&["touch", "made"]).run();
    report.assert_code(0);
    let text = report.all();
    for part in ["4 ranks on 2 hosts", "rank 3: touch made", "GRADWIRE_SECRET=<secret>"] {
        assert!(text.contains(part), "{text}");
    }
}

/// Asserts that the launcher prints one line with the error, and at most one with a hint.
#[track_caller]
fn assert_refused(report: &Report, code: i32, error: &str) {
    report.assert_code(code);
    let verdict = report.verdict();
    assert!(verdict.contains(&format!("error: {error}")), "no {error:?} in {}", report.all());
    let known = |line: &str| line.starts_with("error: ") || line.starts_with("hint: ");
    assert!(verdict.lines().all(known), "{}", report.all());
}

#[test]
fn invalid_jobs_are_refused_in_one_line() {
    let launch = || Launch::new().ranks(2);
    let steps = ["attach"];
    assert_refused(
        &launch().program(&["zonk"]).run(),
        1,
        "program 'zonk' not found on host localhost (PATH=",
    );
    let with_text = launch();
    fs::write(with_text.folder().join("text"), "x").unwrap();
    let text = with_text.program(&["./text"]).run();
    assert_refused(&text, 1, "program './text' on host localhost is not executable");
    for (words, error) in [
        (["-H", "127.0.0.1:1"], "-np 2 is more than the 1 slots of the given hosts (127.0.0.1:1)"),
        (["-H", "127.0.0.1:none"], "-H entry 1: 'none' is not a slot count"),
        (["-H", "127.0.0.1:1,127.0.0.1:1"], "-H entry 2: host 127.0.0.1 is given twice"),
        (
            ["--set", "data.lane=2"],
            "unknown setting 'data.lane' (command line); did you mean 'data.lanes'?",
        ),
        (
            ["--set", "data.lanes=0"],
            "setting data.lanes = \"0\" (command line): expected a whole number from 1 to 16",
        ),
    ] {
        assert_refused(&launch().words(&words).rank(&steps).run(), 2, error);
    }
    let unknown = launch().variable("GRADWIRE_DATA__LANE", "2").rank(&steps).run();
    assert_refused(&unknown, 2, "unknown setting 'data.lane' (environment GRADWIRE_DATA__LANE)");
}

#[test]
fn unreachable_hosts_are_named() {
    let fails = "echo \"ssh: connect to host $host port 22: Connection refused\" >&2; exit 255";
    let launch = Launch::new().hosts("localhost:1,node-3:1,node-4:1");
    let report = launch.ssh(fails).rank(&["attach"]).run();
    report.assert_code(1);
    for host in ["node-3", "node-4"] {
        let error =
            format!("error: host {host} can't be reached: ssh: connect to host {host} port 22");
        report.assert_verdict(&[&error, "must work without a password"]);
    }
    if !Path::new("/usr/bin/ssh").exists() {
        println!("skipped: ssh is missing");
        return;
    }
    // `.invalid` never resolves (RFC 2606).
    let report = Launch::new().hosts("host.invalid:1").rank(&["attach"]).run();
    report.assert_code(1);
    report.assert_verdict(&[
        "error: host host.invalid can't be reached: ssh: ",
        "host.invalid true` must work",
    ]);
}

/// The command lines of all processes on this machine.
fn command_lines() -> Vec<String> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let lines = entries.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " ")).collect()
}

#[test]
fn the_secret_is_on_no_command_line() {
    let launch = Launch::new().hosts("node-3:2,node-4:2").ssh(SSH_HERE);
    let steps = ["attach", "loop:1:7", "until:go", "loop:5:70000", "leave"];
    let mut job = launch.rank(&steps).start();
    job.until_said("looped", 4);
    let secret = job.process(Role::Rank(3)).variable("GRADWIRE_SECRET").unwrap();
    assert_eq!(secret.len(), 64);
    let lines = command_lines();
    assert!(
        lines.iter().any(|line| line.contains("fake-ssh") || line.contains(" agent")),
        "{lines:?}"
    );
    assert!(!lines.iter().any(|line| line.contains(&secret)), "TRUST: {lines:?}");
    job.allow("go");
    assert_well(&job.finish(), 2 * 4);
}

#[test]
fn a_port_in_use_is_named_with_its_setting() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    for key in ["coordinator.listen", "coordinator.metrics_listen", "data.listen", "metrics.listen"]
    {
        let launch = Launch::new().ranks(1).set(&format!("{key}={address}"));
        let report = launch.rank(&["attach"]).run();
        report.assert_code(1);
        report.assert_verdict(&["error: the ", " on host localhost", &address.to_string(), key]);
        report.assert_verdict(&["Address already in use"]);
        let hint = if key == "coordinator.listen" { "choose another address" } else { "hint: " };
        report.assert_verdict(&[hint]);
    }
}

#[test]
fn the_output_of_a_failing_daemon_is_reported() {
    let launch = Launch::new().ranks(2);
    let text = "#!/bin/sh\necho '{\"event\":\"serving\",\"metrics\":\"127.0.0.1:1\",\
                \"data\":\"127.0.0.1:2\",\"grpc\":\"127.0.0.1:3\"}'\n\
                sleep 0.3; echo 'gradwired: this is release 9.9.9, the coordinator is 0.1.0' >&2; \
                exit 1\n";
    let other = launch.script("other-gradwired", text);
    let report = launch.set(&format!("launch.gradwired={}", other.display())).rank(&["hang"]).run();
    report.assert_code(1);
    report.assert_verdict(&[
        "gradwire: the daemon on host localhost (pid ",
        ") ended with exit code 1",
    ]);
    report.assert_verdict(&["  gradwired: this is release 9.9.9, the coordinator is 0.1.0"]);
}

/// A job whose ranks have begun to work. Rank 1 ignores SIGTERM.
fn busy() -> Job {
    let launch = Launch::new().two_by_two().set("launch.grace_ms=500");
    let job = launch.rank(&["1/deaf", "attach", "loop:1000000:1000"]).start();
    job.until_said("looping", 4);
    job
}

#[test]
fn ctrl_c_and_a_request_to_end_stop_everything() {
    for (signal, name, code) in [(Signal::INT, "SIGINT", 130), (Signal::TERM, "SIGTERM", 143)] {
        let mut job = busy();
        job.signal(Role::Launcher, signal);
        let report = job.finish();
        report.assert_code(code);
        report
            .assert_verdict(&[&format!("gradwire: interrupted by {name}; everything was stopped")]);
    }
}

#[test]
fn a_killed_launcher_leaves_nothing() {
    let mut job = busy();
    job.signal(Role::Launcher, Signal::KILL);
    job.finish().assert_code(128 + 9);
}

#[test]
fn a_killed_launcher_leaves_nothing_on_ssh_hosts() {
    let launch = Launch::new().hosts("node-3:1,node-4:1").ssh(SSH_HERE).set("launch.grace_ms=500");
    let mut job = launch.rank(&["deaf", "attach", "loop:1000000:1000"]).start();
    job.until_said("looping", 2);
    job.signal(Role::Launcher, Signal::KILL);
    job.finish().assert_code(128 + 9);
}

#[test]
fn the_first_failing_rank_gives_the_exit_code() {
    let launch = Launch::new().two_by_two().set("launch.grace_ms=500");
    let steps =
        ["attach", "loop:2:10", "2/complain:out of luck", "2/exit:3", "1/deaf", "1/hang", "hang"];
    let report = launch.rank(&steps).run();
    report.assert_code(3);
    let verdict = report.verdict();
    assert!(verdict.starts_with("gradwire: rank 2 on host 127.0.0.2 (pid "), "{}", report.all());
    report.assert_verdict(&[") ended with exit code 3, ", "; the other ranks were stopped"]);
    assert!(verdict.contains("\n  out of luck\nfull output: "), "{}", report.all());
    // Rank 1 ignores SIGTERM: the launcher gives it only the grace period.
    assert!(report.took.as_millis() >= 500, "{}", report.all());
}

#[test]
fn ranks_that_never_attach_are_not_waited_for() {
    let steps = ["1/exit:0", "deaf", "attach", "loop:1:10", "leave"];
    let report = Launch::new().two_by_two().rank(&steps).run();
    let parts = ["rank 1 on host 127.0.0.1, tensor 'loop.10': its process ended with exit code 0 \
         before it had joined the job"];
    report.assert_notified(&[0, 2, 3], report.began_us, &parts);
    report.assert_code(1);
    // A rank that failed is itself the cause.
    let steps = ["1/exit:4", "deaf", "attach", "loop:1:10", "leave"];
    let report = Launch::new().two_by_two().rank(&steps).run();
    let parts =
        ["rank 1 on host 127.0.0.1: its process ended with exit code 4 before it had joined"];
    report.assert_notified(&[0, 2, 3], report.began_us, &parts);
    report.assert_code(4);
}

#[test]
fn long_waits_for_a_rank_are_reported() {
    for (hosts, ranks) in [("127.0.0.1:2", 2), ("127.0.0.1:2,127.0.0.2:2", 4)] {
        let launch = Launch::new().hosts(hosts).set("negotiation.stall_warning_ms=300");
        let mut job = launch.rank(&["attach", "1/until:go", "loop:1:10", "leave"]).start();
        // WAIT: only the missing rank is named, repeatedly, by the coordinator and by all others.
        let reports = |who: &str| {
            let is_one = |line: &&Line| {
                line.text.starts_with(who)
                    && line.text.contains("tensor 'loop.10' has waited ")
                    && line.text.contains(" s for rank 1 on host 127.0.0.1; rank")
            };
            job.lines().iter().filter(is_one).count()
        };
        job.wait_for("two warnings", || (reports("[daemon 127.0.0.1] ") >= 2).then_some(()));
        for rank in (0..ranks).filter(|rank| *rank != 1) {
            let who = format!("[{rank}] gradwire: ");
            job.wait_for("a report", || (reports(&who) >= 1).then_some(()));
        }
        assert_eq!(reports("[1] "), 0);
        // The system knows the threads of a program in any language.
        assert!(job.lines().iter().any(|line| line.text.contains("thread gradwire-test-r:")));
        job.allow("go");
        let report = job.finish();
        report.assert_code(0);
        assert_eq!(report.said("left").len(), ranks, "{}", report.all());
    }
}

#[test]
fn strangers_do_not_fill_the_log() {
    let steps = ["attach", "say:here", "until:go", "leave"];
    let mut job = Launch::new().ranks(1).rank(&steps).start();
    job.until_said("said", 1);
    let name = job.process(Role::Rank(0)).variable("GRADWIRE_SOCKET").unwrap();
    let address = SocketAddr::from_abstract_name(name.trim_start_matches('@')).unwrap();
    for _ in 0..150 {
        let mut stranger = UnixStream::connect_addr(&address).unwrap();
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        // The daemon refuses it or sends nothing, and closes the connection.
        let _ = stranger.read_to_end(&mut Vec::new());
    }
    job.allow("go");
    let report = job.finish();
    report.assert_code(0);
    let reported =
        report.all().matches("a worker's connection ended before it was attached").count();
    assert!((1..=10).contains(&reported), "{}", report.all());
}

#[test]
fn variables_that_are_not_utf_8_are_unchanged() {
    let launch = Launch::new().ranks(2).variable("LATIN", OsStr::from_bytes(b"gr\xfc\xdfe"));
    assert_well(&launch.rank(&["attach", "loop:2:10", "leave"]).run(), 2);
}
