//! The flight recorder: what is left of a job after ranks or daemons were killed, and of a job that
//! hangs.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use gradwire_tests::launched::{Job, Launch, processes::Role, programs};
use rustix::process::Signal;
use serde_json::Value;

/// Runs `gradwire report`; returns its exit code and all of its output.
fn report(words: &[&str], runtime: &Path) -> (Option<i32>, String) {
    let mut command = Command::new(programs::gradwire());
    let done = command.arg("report").args(words).env("XDG_RUNTIME_DIR", runtime).output().unwrap();
    let text = [done.stdout, done.stderr].concat();
    (done.status.code(), String::from_utf8_lossy(&text).into_owned())
}

/// A job in which ranks 0, 2 and 3 wait for 'loop.2000', because rank 1 has not submitted it.
struct Hanging {
    job: Job,
    at: tempfile::TempDir,
}

impl Hanging {
    fn start(directory: &str) -> Self {
        let at = tempfile::tempdir().unwrap();
        let steps = ["attach", "loop:3:1000", "1/until:end", "loop:2:2000", "leave"];
        let job = Launch::new()
            .two_by_two()
            .set(&format!(
                "recorder.directory={}",
                directory.replace("AT", at.path().to_str().unwrap())
            ))
            .variable("XDG_RUNTIME_DIR", at.path())
            .rank(&steps)
            .start();
        job.until_said("looped", 4);
        let hanging = Self { job, at };
        hanging.job.wait_for("three ranks that wait", || {
            let mut why = Command::new(programs::gradwire());
            why.arg("why").env("XDG_RUNTIME_DIR", hanging.at.path());
            let text = String::from_utf8(why.output().unwrap().stdout).unwrap();
            text.contains("'loop.2000'").then_some(()).filter(|()| text.contains("3 ranks are at"))
        });
        hanging
    }

    fn directory(&self) -> PathBuf {
        self.at.path().join("recordings")
    }

    fn files(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.directory()).into_iter().flatten();
        let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths
    }

    fn report(&self, words: &[&str]) -> (Option<i32>, String) {
        report(words, self.at.path())
    }
}

fn assert_has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is missing in:\n{text}");
    }
}

const WAITED: [&str; 3] = [
    "\nRank 1 was missing: it had not submitted 'loop.2000'; it had last submitted 'loop.1000'",
    "\nRanks 0,2-3 waited for 'loop.2000' (allreduce of f32 [2000]) at ",
    "recorded: 2 of 2 nodes, 4 of 4 ranks",
];

#[test]
fn a_killed_rank_is_in_the_recordings() {
    let Hanging { mut job, at } = Hanging::start("AT/recordings");
    job.signal(Role::Rank(1), Signal::KILL);
    job.finish().assert_code(137);
    let folder = at.path().join("recordings");
    let name = folder.display().to_string();
    let count = || fs::read_dir(&folder).unwrap().count();
    assert_eq!(count(), 2, "a file for each host, and nothing else");
    let (code, text) = report(&[&name], at.path());
    assert_eq!(code, Some(0), "{text}");
    assert!(text.starts_with("Job "), "{text}");
    let first = text.lines().next().unwrap();
    assert_has(first, &[" failed at ", "rank 1 on host 127.0.0.1", "SIGKILL"]);
    assert_has(&text, &WAITED);
    assert_has(&text, &["; its connection ended ", "\nrank 1 on host 127.0.0.1 (pid "]);

    // Damaged files are named and left out.
    let mut files: Vec<_> = fs::read_dir(&folder).unwrap().map(|it| it.unwrap().path()).collect();
    files.sort();
    let good = fs::read(&files[1]).unwrap();
    fs::write(folder.join("a.flight"), "not a recording").unwrap();
    fs::write(folder.join("b.flight"), &good[..good.len() / 2]).unwrap();
    fs::create_dir(folder.join("c.flight")).unwrap();
    let mut torn = good.clone();
    torn[4096..200_000].fill(0xa5);
    fs::write(&files[1], &torn).unwrap();
    let (code, text) = report(&[&name], at.path());
    assert_eq!(code, Some(0), "{text}");
    for (bad, why) in [
        ("a.flight", "it is not a recording"),
        ("b.flight", "it is damaged"),
        ("c.flight", "it is not a file"),
    ] {
        assert_has(&text, &[&format!("{bad} is left out: {why}")]);
    }
    assert_has(&text, &WAITED[..1]);
    // Without one host, the rest is still explained.
    fs::remove_file(&files[1]).unwrap();
    let (code, text) = report(&[&name], at.path());
    assert_eq!(code, Some(0), "{text}");
    assert_has(&text, &["no file of node 1", "1 of 2 nodes, 2 of 4 ranks", "Rank 1 was missing"]);
    fs::remove_file(&files[0]).unwrap();
    let (code, text) = report(&[&name], at.path());
    assert_eq!(code, Some(1), "{text}");
    assert_has(&text, &["error: no recording in ", "hint: "]);
}

#[test]
fn a_killed_daemon_leaves_its_recording() {
    let Hanging { mut job, at } = Hanging::start("AT/recordings");
    job.signal(Role::Daemon(1), Signal::KILL);
    let done = job.finish();
    assert_ne!(done.code(), 0);
    let (code, text) = report(&[at.path().join("recordings").to_str().unwrap()], at.path());
    assert_eq!(code, Some(0), "{text}");
    assert_has(&text, &WAITED);
    assert_has(text.lines().next().unwrap(), &[" failed at ", "127.0.0.2"]);
}

#[test]
fn a_job_that_hangs_is_reported_on_demand() {
    let hanging = Hanging::start("AT/recordings");
    assert!(hanging.files().is_empty());
    let trace = hanging.at.path().join("trace.json").display().to_string();
    let torch = hanging.at.path().join("torch");
    let words = ["--perfetto", &trace, "--torch", torch.to_str().unwrap()];
    let (code, text) = hanging.report(&words);
    assert_eq!(code, Some(0), "{text}");
    assert_has(&text, &WAITED);
    assert_has(&text, &["had not failed when this was recorded", "host 127.0.0.2 has written "]);
    assert_eq!(hanging.files().len(), 2);
    let lines: Vec<Value> = serde_json::from_slice(&fs::read(&trace).unwrap()).unwrap();
    let named = |name: &str| lines.iter().filter(|line| line["name"] == name).count();
    assert!(named("gather loop.2000") > 0 && named("submit loop.1000") == 12, "{lines:#?}");
    assert_eq!(fs::read_dir(&torch).unwrap().count(), 4);
    let (code, text) = hanging.report(&words);
    assert_eq!(code, Some(1), "{text}");
    assert_has(&text, &["torch is not empty"]);

    let Hanging { mut job, at } = hanging;
    let id = super::metrics::variable(&job, 0, "GRADWIRE_JOB");
    job.allow("end");
    job.finish().assert_code(0);
    // The files of an earlier job do not hide those of the latest one.
    let folder = at.path().join("recordings").display().to_string();
    for (words, code, part) in [
        (vec![folder.as_str(), "--job", id.as_str()], 0, "had not failed"),
        (vec![folder.as_str(), "--job", "zonk"], 1, "has no recording of job zonk"),
        (vec![at.path().to_str().unwrap()], 1, "has no flight recordings"),
        (vec!["/zonk/zonk"], 1, "/zonk/zonk is not a folder"),
        (vec!["zonk"], 1, "you have no job 'zonk' on this host"),
    ] {
        let (found, text) = report(&words, at.path());
        assert_eq!(found, Some(code), "{words:?}: {text}");
        assert_has(&text, &[part]);
    }
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let Hanging { mut job, at } = Hanging::start("/proc/zonk/recordings");
    let (code, text) = report(&[], at.path());
    assert_eq!(code, Some(1), "{text}");
    assert_has(&text, &["can't be written to /proc/zonk/recordings: "]);
    job.signal(Role::Rank(1), Signal::KILL);
    let done = job.finish();
    done.assert_code(137);
    assert_has(&done.all(), &["can't be written to /proc/zonk/recordings: ", "recorder.directory"]);
    let Hanging { mut job, at } = Hanging::start("");
    let (code, text) = report(&[], at.path());
    assert_eq!(code, Some(1), "{text}");
    assert_has(&text, &["recorder.directory is not set", "hint: start jobs with"]);
    job.allow("end");
    job.finish().assert_code(0);
}
