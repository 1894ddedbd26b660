//! Whole negotiations as text: `tests/testdata/*.txt` contain events, and the commands and reasons
//! that the engine returns.
//!
//! A file is a list of blocks. A block is one or more events, a line `----`, and the expected
//! answer; an empty line ends it. The events of a block happen together: the engine is drained
//! after the last one. `UPDATE=1 cargo test` rewrites the answers, for review in the diff.

#[path = "scenarios/language.rs"]
mod language;
#[path = "scenarios/show.rs"]
mod show;

use std::{fs, path::Path};

use language::Scenario;

/// Runs one file; returns it with the actual answers of the engine.
fn play(text: &str) -> String {
    let mut scenario = Scenario::default();
    let mut played = String::new();
    let mut lines = text.lines().enumerate().peekable();
    while let Some((number, line)) = lines.next() {
        if line.trim().is_empty() || line.starts_with("# ") {
            played.push_str(line);
            played.push('\n');
            continue;
        }
        let mut answer = String::new();
        let mut event = Some((number, line));
        while let Some((number, line)) = event.filter(|(_, line)| *line != "----") {
            played.push_str(line);
            played.push('\n');
            let done = scenario.run(line);
            answer.push_str(&done.unwrap_or_else(|e| panic!("line {}: {line}: {e}", number + 1)));
            event = lines.next();
        }
        assert!(event.is_some(), "line {}: a block without ----", number + 1);
        answer.push_str(&scenario.drained());
        played.push_str("----\n");
        played.push_str(if answer.is_empty() { "(nothing)\n" } else { &answer });
        while lines.next_if(|(_, line)| !line.trim().is_empty()).is_some() {}
    }
    played
}

fn check(name: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/testdata").join(name);
    let expected = fs::read_to_string(&path).expect("the scenario is readable");
    let played = play(&expected);
    if std::env::var_os("UPDATE").is_some() {
        fs::write(&path, played).expect("the scenario is writable");
        return;
    }
    for (number, (expected, played)) in expected.lines().zip(played.lines()).enumerate() {
        assert_eq!(expected, played, "{name} line {}", number + 1);
    }
    assert_eq!(expected.lines().count(), played.lines().count(), "{name}");
}

macro_rules! scenarios {
    ($($name:ident),+ $(,)?) => {
        $(#[test]
        fn $name() {
            check(concat!(stringify!($name), ".txt"));
        })+

        /// A scenario that is not listed would never fail.
        #[test]
        fn every_file_is_played() {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/testdata");
            let played = [$(concat!(stringify!($name), ".txt")),+];
            for file in fs::read_dir(folder).expect("there are scenarios") {
                let name = file.expect("readable").file_name();
                assert!(played.iter().any(|played| name == *played), "{name:?} is not played");
            }
        }
    };
}

scenarios! {
    forming,
    refusals,
    start_timeout,
    ids,
    eviction,
    disagreements,
    announcements,
    duplicates,
    priority,
    packing,
    credit,
    deadlock,
    chunks,
    probe,
    leaving,
    failures,
    violations,
    stall,
    racks,
    rows,
    process_sets,
    join,
    gather,
    alltoall,
    groups,
    send_receive,
    servers,
    rooted,
    elastic,
    returning,
}
