//! The trainer of `make demo-rust` computes the same alone and with four ranks.
//!
//! This needs libtorch, which `make test` provides (LIBTORCH). Without it the test prints that and
//! passes.

use std::{env, fs, path::Path, process::Command, time::Duration};

use gradwire_tests::launched::{Launch, programs};
use serde_json::Value;

fn read(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).expect("the trainer's figures")).unwrap()
}

fn losses(figures: &Value) -> Vec<f64> {
    figures["losses"].as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap()).collect()
}

#[test]
fn four_ranks_train_like_one_process() {
    if env::var_os("LIBTORCH").is_none() && env::var_os("LIBTORCH_USE_PYTORCH").is_none() {
        println!(
            "skipped: neither LIBTORCH nor LIBTORCH_USE_PYTORCH is set; see scripts/libtorch.sh"
        );
        return;
    }
    let digits = programs::digits();
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("one.json");
    let mut alone = Command::new(&digits);
    alone.args(["--json".as_ref(), json.as_os_str()]).env_remove("GRADWIRE_JOB");
    let output = alone.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let one = read(&json);

    let launch = Launch::new().two_by_two().within(Duration::from_secs(200));
    let program = digits.display().to_string();
    let mut job = launch.program(&[&program, "--json", "four.json"]).start();
    job.leaves("four.json");
    let path = job.folder().join("four.json");
    let mut four = Value::Null;
    let report = job.finish_and(|| four = read(&path));
    report.assert_code(0);

    let (one_losses, four_losses) = (losses(&one), losses(&four));
    assert!(one_losses.len() > 100, "{one}");
    assert_eq!(one_losses.len(), four_losses.len());
    for (step, (one, four)) in one_losses.iter().zip(&four_losses).enumerate() {
        assert!(
            (one - four).abs() <= 1e-4,
            "step {step}: a loss of {one} alone, {four} with 4 ranks"
        );
    }
    assert!(one_losses[0] > 10.0 * one_losses[one_losses.len() - 1], "it learns: {one}");
    for figures in [&one, &four] {
        assert!(figures["accuracy"].as_f64().unwrap() >= 0.97, "{figures}");
    }
    // SAME
    let hashes: Vec<&str> =
        four["hashes"].as_array().unwrap().iter().map(|hash| hash.as_str().unwrap()).collect();
    assert_eq!(hashes.len(), 4);
    assert!(hashes.iter().all(|hash| *hash == hashes[0]), "SAME: {hashes:?}");
    let expected = format!("[0] all 4 ranks hold bit-identical parameters: {}", hashes.join(" "));
    assert!(
        report.lines.iter().any(|line| line.text == expected),
        "no {expected:?} in {}",
        report.all()
    );
}
