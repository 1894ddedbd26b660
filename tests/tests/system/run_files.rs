//! Commands find the jobs of their user by the files that launchers write.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Output},
};

use gradwire_tests::launched::{Job, Launch, processes::Role, programs};
use rustix::process::Signal;
use serde_json::Value;

use super::metrics::variable;

fn gradwire(words: &[&str], runtime: &Path) -> Output {
    let mut command = Command::new(programs::gradwire());
    command.args(words).env("XDG_RUNTIME_DIR", runtime).output().unwrap()
}

fn start(runtime: &Path) -> Job {
    let steps = ["attach", "loop:1:1000", "until:end", "leave"];
    let job = Launch::new()
        .two_by_two()
        .words(&["--verbose"])
        .variable("XDG_RUNTIME_DIR", runtime)
        .rank(&steps)
        .start();
    job.until_said("looped", 4);
    job
}

#[test]
fn commands_need_no_address_while_one_job_runs() {
    let runtime = tempfile::tempdir().unwrap();
    let folder = runtime.path().join("gradwire");
    let files = || fs::read_dir(&folder).map_or(0, Iterator::count);
    let mut one = start(runtime.path());
    let id = variable(&one, 0, "GRADWIRE_JOB");
    let file = folder.join(format!("{id}.json"));
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&folder), mode(&file)), (0o700, 0o600));
    let text = fs::read_to_string(&file).unwrap();
    let found: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(found["coordinator"], one.served("grpc")[0], "{text}");
    // Commands that show what ranks do prove that they know it.
    assert_eq!(found["secret"], variable(&one, 0, "GRADWIRE_SECRET"), "{text}");

    for (command, first) in
        [("status", format!("job {id} (")), ("explain", "Choices of job".into())]
    {
        let output = gradwire(&[command], runtime.path());
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.starts_with(&first), "{command}: {text}");
    }

    // A job can be named by its id, by the address of its page, and by that of its coordinator.
    let page = format!("http://{}/", one.served("metrics")[0]);
    let grpc = one.served("grpc").remove(0);
    for name in [&id, &page, &grpc] {
        let output = gradwire(&["status", name], runtime.path());
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.starts_with(&format!("job {id} (")), "{name}: {text}");
    }
    for (name, code, expected) in [
        ("zonk", 1, "you have no job 'zonk' on this host"),
        ("127.0.0.1", 1, "you have no job '127.0.0.1' on this host"),
        ("127.0.0.1:x", 2, "invalid address '127.0.0.1:x': expected IP:PORT"),
        ("127.0.0.1:99999", 2, "invalid address '127.0.0.1:99999': expected IP:PORT"),
        ("http://127.0.0.1:1/", 1, "no daemon answers at '127.0.0.1:1'"),
        ("http://", 1, "no daemon answers at ''"),
        ("", 1, "you have no job '' on this host"),
    ] {
        let output = gradwire(&["status", name], runtime.path());
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{name}: {text}");
        assert!(text.starts_with(&format!("error: {expected}\nhint: ")), "{name}: {text}");
        assert_eq!(text.lines().count(), 2, "{text}");
    }

    // With a second job, one error lists both.
    let mut other = start(runtime.path());
    let output = gradwire(&["status"], runtime.path());
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.starts_with("error: 2 of your jobs run on this host\n"), "{text}");
    for job in [&one, &other] {
        let (id, at) = (variable(job, 0, "GRADWIRE_JOB"), job.served("grpc").remove(0));
        assert!(text.contains(&format!("{at} (job {id}, 4 ranks on 2 hosts: ")), "{text}");
    }

    // The agents of a killed launcher remove its file.
    let killed = variable(&other, 0, "GRADWIRE_JOB");
    let left = folder.join(format!("{killed}.json"));
    let text = fs::read(&left).unwrap();
    other.signal(Role::Launcher, Signal::KILL);
    other.finish();
    assert_eq!(files(), 1);

    // If they can't, the next command does, and says so once.
    fs::write(&left, text).unwrap();
    fs::set_permissions(&left, fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(files(), 2);
    let said =
        format!("gradwire: the launcher of job {killed} was killed: removed the job's run file\n");
    for said in [said.as_str(), ""] {
        let output = gradwire(&["status"], runtime.path());
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.starts_with(&format!("job {id} (")), "{text}");
        assert_eq!(String::from_utf8(output.stderr).unwrap(), said);
        assert_eq!(files(), 1);
    }

    one.allow("end");
    one.finish().assert_code(0);
    assert!(!folder.exists(), "CLEAN");
}
