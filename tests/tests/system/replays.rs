//! A recorded rank of a Rust program runs alone. The program checks every element of each result.

use std::process::Command;

use gradwire_tests::launched::{Launch, programs};

#[test]
fn a_recorded_rank_runs_alone() {
    let at = tempfile::tempdir().expect("a folder");
    let record = at.path().join("record").display().to_string();
    let steps = ["attach", "loop:20:1000", "submit:30:70000", "loop:2:900000", "leave"];
    Launch::new()
        .two_by_two()
        .words(&["--record", &record, "--record-ranks", "0,3"])
        .rank(&steps)
        .run()
        .assert_code(0);
    let replay = |rank: &str, steps: &[&str]| {
        let mut command = Command::new(programs::gradwire());
        command.args(["replay", &record, "--rank", rank, "--"]);
        command.arg(programs::beside("gradwire-test-rank")).args(steps).current_dir(at.path());
        let done = command.output().expect("gradwire");
        let text = [done.stdout, done.stderr].concat();
        (done.status.code(), String::from_utf8_lossy(&text).into_owned())
    };
    for rank in ["0", "3", "3"] {
        let (code, text) = replay(rank, &steps);
        assert_eq!(code, Some(0), "{text}");
        assert!(text.contains(&format!("attached {rank} of 4")), "{text}");
        assert!(text.contains("made all 52 recorded calls"), "{text}");
    }
    let (code, text) = replay("1", &steps);
    assert!(code == Some(2) && text.contains("those of ranks 0,3"), "{text}");
    let (code, text) = replay("0", &["attach", "loop:20:1001"]);
    assert_ne!(code, Some(0), "{text}");
    let both = ["call 1 differs", "[1000] 'loop.1000'", "[1001] 'loop.1001'"];
    assert!(both.iter().all(|part| text.contains(part)), "{text}");
}
