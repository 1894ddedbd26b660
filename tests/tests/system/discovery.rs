//! Prometheus finds the daemons of a job: by `/sd` of the coordinator, and by the file of
//! `--metrics-sd`.

use std::{collections::BTreeSet, fs};

use gradwire_tests::launched::{Launch, processes::Role};
use rustix::process::Signal;
use serde_json::Value;

use super::metrics::{get, variable};

/// The hosts and addresses of a list.
fn listed(text: &str, job: &str) -> BTreeSet<(String, String)> {
    let groups: Vec<Value> = serde_json::from_str(text).expect(text);
    let group = |(at, group): (usize, &Value)| {
        let labels = &group["labels"];
        assert_eq!(labels["gradwire_job"], job, "{text}");
        assert_eq!(labels["node"], at.to_string(), "{text}");
        let targets = group["targets"].as_array().unwrap();
        assert_eq!(targets.len(), 1, "{text}");
        let word = |value: &Value| value.as_str().expect(text).to_owned();
        (word(&labels["host"]), word(&targets[0]))
    };
    groups.iter().enumerate().map(group).collect()
}

#[test]
fn a_running_job_lists_where_its_metrics_are() {
    let launch = Launch::new().two_by_two();
    let folder = launch.folder().join("found");
    let words = ["--verbose", "--metrics-sd", folder.to_str().unwrap()];
    let mut job =
        launch.words(&words).rank(&["attach", "loop:1:1000", "until:end", "leave"]).start();
    job.leaves("found");
    job.until_said("looped", 4);
    let id = variable(&job, 0, "GRADWIRE_JOB");
    let daemons = [0, 2].map(|rank| variable(&job, rank, "GRADWIRE_DAEMON_METRICS"));
    let hosts = ["127.0.0.1", "127.0.0.2"].map(ToOwned::to_owned);
    let expected: BTreeSet<_> = hosts.into_iter().zip(daemons.clone()).collect();

    let (code, text) = get(&daemons[0], "/sd");
    assert_eq!((code, listed(&text, &id)), (200, expected.clone()));
    let (code, text) = get(&daemons[1], "/sd");
    assert_eq!(code, 404);
    assert!(text.contains("the daemon of the first node"), "{text}");

    let file = folder.join(format!("gradwire-{id}.json"));
    assert_eq!(listed(&fs::read_to_string(&file).unwrap(), &id), expected);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
    job.allow("end");
    let left = || assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    job.finish_and(left).assert_code(0);
}

/// A job that fails removes its file, too; a folder that can't be created is reported at once.
#[test]
fn the_file_does_not_outlive_the_job() {
    let launch = Launch::new().ranks(2);
    let folder = launch.folder().join("found");
    let words = ["--metrics-sd", folder.to_str().unwrap()];
    let mut job = launch.words(&words).rank(&["attach", "1/exit:3", "loop:1:10"]).start();
    job.leaves("found");
    let left = || assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    job.finish_and(left).assert_code(3);

    // An agent removes it if the launcher is killed.
    let launch = Launch::new().ranks(2);
    let folder = launch.folder().join("killed");
    let words = ["--metrics-sd", folder.to_str().unwrap()];
    let mut job = launch.words(&words).rank(&["attach", "loop:100000:10"]).start();
    job.leaves("killed");
    job.until_said("looping", 2);
    job.signal(Role::Launcher, Signal::KILL);
    let left = || assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    let _ = job.finish_and(left);

    let launch = Launch::new().ranks(2);
    let file = launch.folder().join("file");
    fs::write(&file, "").unwrap();
    let words = ["--metrics-sd", file.to_str().unwrap()];
    let report = launch.words(&words).rank(&["attach"]).start().finish();
    report.assert_code(1);
    let text = report.all();
    assert!(text.contains("--metrics-sd: ") && text.contains("can't be written"), "{text}");
}
