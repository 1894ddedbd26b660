use gradwire_proto::Rank;

use super::*;

fn ended(role: Role, end: ProcessEnd, at_ms: u64) -> Cause {
    Cause::Ended {
        role,
        host: "127.0.0.2".into(),
        pid: 123,
        end,
        at: Duration::from_millis(at_ms),
        ran: Duration::from_millis(400),
        received: None,
        tail: vec!["out of memory".into()],
    }
}

#[test]
fn a_report_fits_on_a_screen() {
    let table: String = (0..500).map(|rank| format!("\n  {rank}  [2]")).collect();
    let what = format!("{}{table}", "x".repeat(5_000_000));
    let failure = Failure::new(FailureKind::Disagreement, what).hint("use one shape");
    let causes = [ended(Role::Rank(0), ProcessEnd::Code(1), 1000)];
    let lines = JobReport::new(&causes, Some(&failure), true).lines;
    let rows: usize = lines.iter().map(|line| line.chars().count().div_ceil(COLUMNS)).sum();
    assert!(rows <= MAX_ROWS, "{lines:#?}");
    assert!(lines[0].ends_with("x… (5000026 characters)"), "{}", lines[0]);
    assert_eq!(lines[lines.len() - 4], "  … 486 more lines");
    assert_eq!(lines.last().unwrap(), "hint: use one shape");
    // Long lines at the end are left out, too.
    let mut long = ended(Role::Rank(0), ProcessEnd::Code(1), 1000);
    if let Cause::Ended { tail, .. } = &mut long {
        *tail = vec!["x".repeat(1000); 10];
    }
    let lines = JobReport::new(&[long], None, true).lines;
    let rows: usize = lines.iter().map(|line| line.chars().count().div_ceil(COLUMNS)).sum();
    assert!(rows <= MAX_ROWS, "{lines:#?}");
    assert!(lines.len() >= KEPT_FIRST + 2, "{lines:#?}");
}

/// The process of a rank has ended.
fn lost(rank: u32) -> Failure {
    let what = "its process ended without leaving the job";
    Failure::new(FailureKind::WorkerLost, what).rank(Rank(rank)).host("127.0.0.2")
}

#[test]
fn a_disagreement_is_reported_once() {
    let what = "the ranks disagree on shape\n  ranks  shape\n  0      [2]\n  1      *[3]";
    let failure = Failure::new(FailureKind::Disagreement, what).tensor("w").hint("do\u{7}");
    let causes = [ended(Role::Rank(0), ProcessEnd::Code(1), 1000)];
    let report = JobReport::new(&causes, Some(&failure), true).with_output(None, false);
    assert_eq!(
        report.lines,
        [
            "gradwire: the job failed: tensor 'w': the ranks disagree on shape",
            "  ranks  shape",
            "  0      [2]",
            "  1      *[3]",
            "hint: do",
            "full output: above; --output-dir DIR also writes it to files",
        ]
    );
    assert_eq!(report.code, 1);
    let text = summary(&causes, Some(&failure)).unwrap();
    assert_eq!(text, "tensor 'w': the ranks disagree on shape");
}

#[test]
fn the_end_of_the_blamed_rank_is_reported() {
    let failure = lost(1).hint("see dmesg");
    let report = |rank| {
        let causes = [ended(Role::Rank(rank), ProcessEnd::Signal(9), 1000)];
        JobReport::new(&causes, Some(&failure), true).with_output(Some(Path::new("out")), false)
    };
    let lines = report(1).lines;
    assert!(lines[0].starts_with("gradwire: rank 1 on host 127.0.0.2 (pid 123) was killed"));
    let last = ["  out of memory", "hint: see dmesg"];
    assert_eq!(lines[2..4], last);
    assert_eq!(lines[4], "full output: out, with a folder for each process");
    let lines = report(0).lines;
    let right = "gradwire: the job failed: rank 1 on host 127.0.0.2: its process ended without \
                 leaving the job";
    assert_eq!(lines[0], right);
}

#[test]
fn the_earliest_rank_decides() {
    let failures = [
        ended(Role::Rank(0), ProcessEnd::Code(1), 1003),
        ended(Role::Rank(3), ProcessEnd::Signal(9), 1000),
        ended(Role::Daemon, ProcessEnd::Code(1), 999),
    ];
    let report = JobReport::new(&failures, None, true);
    assert_eq!(report.code, 137);
    assert_eq!(
        report.lines,
        [
            "gradwire: rank 3 on host 127.0.0.2 (pid 123) was killed by SIGKILL, 0.4 s after \
             start; the other ranks were stopped",
            "gradwire: its last lines on standard error:",
            "  out of memory"
        ]
    );
}

#[test]
fn a_summary_is_one_line() {
    assert_eq!(summary(&[], None), None);
    let daemon = ended(Role::Daemon, ProcessEnd::Code(1), 999);
    let text = summary(&[daemon], None).unwrap();
    let right = "the daemon on host 127.0.0.2 (pid 123) ended with exit code 1, 0.4 s after \
                 start: out of memory";
    assert_eq!(text, right);
    let what = "two\nlines".to_owned();
    let refused = Cause::NotStarted { what, hint: String::new() };
    assert_eq!(summary(&[refused], None).as_deref(), Some("two lines"));
}

#[test]
fn the_blamed_rank_decides_over_the_clocks() {
    let failures = [
        ended(Role::Rank(3), ProcessEnd::Code(1), 990),
        ended(Role::Rank(1), ProcessEnd::Code(4), 1000),
    ];
    assert_eq!(JobReport::new(&failures, Some(&lost(1)), true).code, 4);
    assert_eq!(
        JobReport::new(&failures, Some(&lost(2)), true).code,
        1,
        "it has not ended by itself"
    );
}

/// Ranks that end because of a loss are not its cause.
#[test]
fn a_loss_has_an_exit_code_of_its_own() {
    let failures = [ended(Role::Rank(3), ProcessEnd::Code(42), 990)];
    let code = |kind, rank: Option<u32>| {
        let mut failure = Failure::new(kind, "so it is");
        failure.rank = rank.map(Rank);
        JobReport::new(&failures, Some(&failure), true).code
    };
    assert_eq!(code(FailureKind::NodeLost, None), 1);
    assert_eq!(code(FailureKind::WorkerLost, Some(2)), 1);
    assert_eq!(code(FailureKind::Cancelled, None), 1);
    assert_eq!(code(FailureKind::WorkerLost, Some(3)), 42);
    assert_eq!(code(FailureKind::Cancelled, Some(2)), 42);
    assert_eq!(code(FailureKind::Disagreement, None), 42);
}

#[test]
fn a_killed_daemon_goes_before_its_ranks() {
    let failures = [
        // Its ranks reacted before the system reported its end.
        ended(Role::Rank(0), ProcessEnd::Code(1), 1000),
        ended(Role::Daemon, ProcessEnd::Signal(9), 1603),
    ];
    let report = JobReport::new(&failures, None, true);
    assert!(
        report.lines[0].starts_with("gradwire: the daemon on host 127.0.0.2 (pid 123) was killed")
    );
    assert_eq!(report.code, 1);
}

/// TELL: the other daemons say that the host was a server, and which tensors were in progress.
#[test]
fn others_say_more_about_a_killed_daemon() {
    let killed = ended(Role::Daemon, ProcessEnd::Signal(9), 1000);
    let what = "the daemon of node 2 (a server) is lost: its stream broke; in progress: 'w'";
    let of = |host: &str| Failure::new(FailureKind::NodeLost, what).host(host).tensor("w");
    let lines = |failure: &Failure| {
        JobReport::new(std::slice::from_ref(&killed), Some(failure), true).lines
    };
    let shown = lines(&of("127.0.0.2"));
    assert!(shown[0].contains("the daemon on host 127.0.0.2 (pid 123) was killed"));
    let last = "gradwire: it was the daemon of node 2 (a server); in progress: 'w'";
    assert_eq!(shown.last().unwrap(), last);
    let idle = Failure::new(FailureKind::NodeLost, what).host("127.0.0.2").hint("look");
    assert_eq!(lines(&idle).len(), shown.len() - 1, "the same, said twice");
    // A failure that names another host does not describe this daemon, nor does its hint.
    assert_eq!(lines(&of("127.0.0.3").hint("see its log")).len(), shown.len() - 1);
    assert_eq!(lines(&of("127.0.0.2").hint("look at its log")), shown, "it was killed");
}

#[test]
fn a_daemon_with_its_own_cause_goes_first() {
    let over = |code, blamed: Option<Failure>| {
        let failures = [
            ended(Role::Rank(0), ProcessEnd::Code(3), 1000),
            ended(Role::Daemon, ProcessEnd::Code(code), 1400),
        ];
        JobReport::new(&failures, blamed.as_ref(), true).lines[0].clone()
    };
    let why = Failure::new(FailureKind::Resource, "no descriptors").host("127.0.0.2");
    assert_eq!(over(2, Some(why)), "gradwire: the job failed: host 127.0.0.2: no descriptors");
    assert!(over(2, None).starts_with("gradwire: the daemon on host 127.0.0.2"));
    assert!(over(101, None).starts_with("gradwire: the daemon on host 127.0.0.2"));
    assert!(over(1, None).starts_with("gradwire: rank 0 on host"), "the job has failed");
    assert!(over(2, Some(lost(0))).starts_with("gradwire: rank 0 on host"), "it knows better");
}

#[test]
fn all_reasons_not_to_start_are_listed() {
    let missing = |what: &str| Cause::NotStarted { what: what.into(), hint: "do".into() };
    let report = JobReport::new(&[missing("a"), missing("b")], None, true);
    assert_eq!(report.lines, ["error: a", "hint: do", "error: b", "hint: do"]);
    assert_eq!(JobReport::new(&[], None, true), JobReport::well());
    let report = JobReport::new(&[missing("a"), Cause::Interrupted(2)], None, false);
    assert_eq!(report.code, 130);
}
