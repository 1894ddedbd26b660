//! Processes without enough memory or descriptors. The error names what the process needed, its
//! limit and how to change that. All other ranks are notified which rank it was.

use gradwire_tests::launched::{Launch, Line, Report, programs};

/// All four ranks of two nodes, except one.
const OTHERS: [u32; 3] = [0, 2, 3];

fn launch() -> Launch {
    Launch::new().two_by_two().set("worker.arena_segment_bytes=4MiB")
}

/// Runs with a limit on rank 1, set before it attaches or after it has begun to work.
fn with_limit(before: &str, after: &str) -> Report {
    let [before, after] = [before, after].map(|limit| format!("1/{limit}"));
    let steps = ["deaf", &before, "attach", "loop:1:1000", &after, "loop:1:2000000", "leave"];
    launch().rank(&steps).run()
}

/// Asserts that rank 1's own error has these parts. (If it had attached, others may end before it
/// does, and give the launcher's last lines.)
#[track_caller]
fn assert_own(report: &Report, parts: &[&str]) {
    let failed = report.said("failed");
    let own = failed.iter().find(|said| said.rank == 1).expect("rank 1 fails");
    for part in parts {
        assert!(own.text.contains(part), "no {part:?} in {}", report.all());
    }
    report.assert_code(1);
}

#[test]
fn a_rank_with_a_file_size_limit_says_so() {
    let report = with_limit("limit:fsize=6000000", "say:attached");
    let parts = [
        "shared memory of 8",
        "bytes exceeds this process's file size limit of 6000000 bytes",
        "raise it with ulimit -f",
    ];
    assert_own(&report, &parts);
    // TELL: the others get its reason, not only that it has ended.
    let expected = ["rank 1 on host 127.0.0.1", "gave up: shared memory of 8"];
    report.assert_notified(&OTHERS, report.began_us, &expected);
}

#[test]
fn a_rank_without_address_space_says_so() {
    let report = with_limit("say:begun", "limit:as=+2000000");
    let parts = [
        "could not map memory for shared memory of 8",
        "raise the address space limit (ulimit -v)",
    ];
    assert_own(&report, &parts);
    let expected = ["rank 1 on host 127.0.0.1", "gave up: could not map memory for shared memory"];
    report.assert_notified(&OTHERS, report.began_us, &expected);
}

/// The rank learns the size of its result only after its call, and has no memory for it.
#[test]
fn a_rank_without_memory_for_a_gather_says_so() {
    let steps =
        ["deaf", "attach", "gather:1000", "1/limit:as=+2000000", "gather:20000000", "leave"];
    let report = launch().rank(&steps).run();
    assert_own(&report, &["can't allocate a result of u8 [60000000]"]);
    let expected = ["rank 1 on host 127.0.0.1", "gave up: can't allocate a result of u8"];
    report.assert_notified(&OTHERS, report.began_us, &expected);
    assert_eq!(report.said("gathered").len(), 4, "{}", report.all());
}

#[test]
fn a_rank_without_descriptors_says_so() {
    let report = with_limit("limit:nofile=6", "say:attached");
    assert_own(&report, &["Too many open files", "raise the limit of open files (ulimit -n)"]);
    let parts =
        ["rank 1 on host 127.0.0.1: its process ended with exit code 1 before it had joined"];
    report.assert_notified(&OTHERS, report.began_us, &parts);
}

/// Runs with a limit on the second node's daemon.
fn with_limited_daemon(limit: &str) -> Report {
    let launch = launch();
    let gradwired = programs::beside("gradwired").display().to_string();
    let text = format!(
        "#!/bin/sh\n[ $GRADWIRE_ORDER = 1 ] || exec {gradwired}\nexec prlimit {limit} {gradwired}\n"
    );
    let limited = launch.script("limited-gradwired", &text);
    let launch = launch.set(&format!("launch.gradwired={}", limited.display()));
    launch.rank(&["deaf", "attach", "loop:5:1000", "leave"]).run()
}

#[test]
fn a_daemon_without_memory_is_reported() {
    // From too little for the program to start at all, to enough.
    let mut said = 0;
    for megabytes in [8, 16, 32, 48, 60, 100] {
        let report = with_limited_daemon(&format!("--as={megabytes}000000"));
        if report.code() == 0 {
            continue;
        }
        report.assert_verdict(&["the daemon on host 127.0.0.2 (pid "]);
        let expected = |line: &Line| line.text.contains("ulimit -v");
        said += usize::from(report.lines.iter().any(expected));
    }
    assert!(said > 0, "if it gets as far as checking its limits, it names them");
}

#[test]
fn a_daemon_without_descriptors_says_so_anywhere() {
    // The number of descriptors that each step needs may change. So this tries each limit from far
    // too few up to enough for the job.
    let mut finished = 0;
    for limit in 20..36 {
        let report = with_limited_daemon(&format!("--nofile={limit}"));
        if report.code() == 0 {
            finished += 1;
            continue;
        }
        report.assert_code(1);
        let expected = |line: &Line| line.text.contains("ulimit -n");
        assert!(report.lines.iter().any(expected), "--nofile={limit}: {}", report.all());
        assert!(!report.all().contains("nonsense"), "--nofile={limit}: {}", report.all());
    }
    assert_eq!(with_limited_daemon("--nofile=256").code(), 0, "a normal limit is enough");
    println!("finished with {finished} of the limits");
}
