//! Measured times correct the choice of algorithms, and the next job on the same cluster begins
//! with them.

use std::{fs, path::Path, process::Command};

use gradwire_tests::launched::{Job, Launch, programs};
use serde_json::Value;

/// The choices of a running job.
fn choices(job: &Job) -> Vec<Value> {
    let grpc = job.served("grpc").remove(0);
    let explain = Command::new(programs::gradwire()).args(["explain", "--json", &grpc]).output();
    let output = explain.unwrap();
    assert!(output.status.success(), "{output:?}");
    let mut all: Value = serde_json::from_slice(&output.stdout).unwrap();
    all["choices"].as_array_mut().map(std::mem::take).unwrap()
}

/// A job on two nodes whose ranks make `steps` sums, with two algorithms to choose from. Returns
/// the choice, and the job's warnings.
fn job(directory: &Path, steps: u32) -> (Value, Vec<String>) {
    let loop_ = format!("loop:{steps}:1000");
    // The file is read while the world is complete and the ranks begin.
    let steps = ["attach", "sleep:500", &loop_, "until:end", "leave"];
    let setting = format!("tuning.directory={}", directory.display());
    let launch = Launch::new().hosts("127.0.0.1:1,127.0.0.2:1").words(&["--verbose"]);
    let launch = launch
        .set("tuning.enabled=true")
        .set("negotiation.algorithm=ring,recursive-doubling")
        .set(&setting);
    let mut job = launch.rank(&steps).start();
    job.until_said("looped", 2);
    let mut choices = choices(&job);
    assert_eq!(choices.len(), 1, "{choices:#?}");
    job.allow("end");
    let report = job.finish();
    report.assert_code(0);
    let all = report.all();
    let warnings = all.lines().filter(|line| line.contains("measured times"));
    (choices.remove(0), warnings.map(ToOwned::to_owned).collect())
}

fn files(directory: &Path) -> Vec<std::path::PathBuf> {
    fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn the_next_job_begins_with_measured_times() {
    let directory = tempfile::tempdir().unwrap();
    // One in 53 explores, 30 in total.
    let (first, warnings) = job(directory.path(), 2_000);
    assert_eq!(warnings, [""; 0]);
    assert_eq!(first["operations"], 2_000);
    let observed = first["observed"].as_u64().unwrap();
    assert!(observed < 2_000, "some were explored: {first:#}");
    let [file] = &files(directory.path())[..] else { panic!("expected only one file") };

    // The next job knows both algorithms, so it does not explore.
    let (next, warnings) = job(directory.path(), 200);
    assert_eq!(warnings, [""; 0]);
    assert_eq!(next["algorithm"], first["algorithm"]);
    assert!(next["algorithm"].is_string(), "{next:#}");
    assert_eq!((&next["operations"], &next["observed"]), (&200.into(), &200.into()), "{next:#}");

    fs::write(file, "{\"format\":1,").unwrap();
    let (fresh, warnings) = job(directory.path(), 200);
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("ignoring the measured times of earlier jobs"), "{warnings:?}");
    assert!(warnings[0].contains(&file.display().to_string()), "{warnings:?}");
    assert!(fresh["observed"].as_u64() < Some(200), "it explores again: {fresh:#}");
}
