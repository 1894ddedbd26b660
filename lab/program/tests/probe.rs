//! `gradwire probe`, which `gradwire-lab` runs.

use std::fs;

use gradwire_tests::place::{Place, finish};

/// The launcher or the rank that writes refuses it before anything is measured.
#[test]
fn an_unwritable_result_of_probe_is_refused() {
    let place = Place::new();
    let expected = "error: --out none/x can't be written: No such file or directory";
    let out = ["--out", "none/x"];
    let output = place.run(&[&["probe", "-H", "127.0.0.1,127.0.0.2"][..], &out].concat());
    assert!(output.stderr.starts_with(expected) && output.code == Some(1), "{output:?}");
    let mut command = place.gradwire(&[&["probe", "--started"][..], &out].concat());
    let output = finish(command.env("GRADWIRE_RANK", "0").spawn().unwrap());
    assert!(output.stderr.starts_with(expected) && output.code == Some(1), "{output:?}");
    // A writable file is left unchanged.
    let old = place.path().join("old.toml");
    fs::write(&old, "old").unwrap();
    for name in ["old.toml", "new.toml"] {
        let mut command = place.gradwire(&["probe", "--started", "--out", name]);
        let output = finish(command.env("GRADWIRE_RANK", "0").spawn().unwrap());
        assert!(!output.stderr.contains("--out") && output.code == Some(1), "{output:?}");
    }
    assert_eq!(fs::read_to_string(old).unwrap(), "old");
    assert!(!place.path().join("new.toml").exists());
}
