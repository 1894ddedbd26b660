//! The secrets of running jobs, for commands that show what ranks do.
//!
//! A secret comes from the job's run file, from the environment of this command, or from that of a
//! process of the job on this host: its daemon and its ranks have it. The system shows the
//! environment of a process only to its user.

use gradwire_proto::Secret;
use procfs::process::{Process, all_processes};

use crate::{error::CommandError, run_file};

/// The variables of every process of a job.
const JOB: &str = "GRADWIRE_JOB";
const SECRET: &str = "GRADWIRE_SECRET";

/// The secret of a job.
///
/// # Errors
/// [`CommandError`] if nothing on this host that this user may read has it.
pub fn of(job: &str) -> Result<Secret, CommandError> {
    let files = run_file::running().map(|jobs| jobs.running).unwrap_or_default();
    let from_file = files.into_iter().find(|running| running.job == job);
    if let Some(running) = from_file {
        return Ok(running.secret);
    }
    if let Ok(given) = std::env::var(SECRET) {
        return Secret::from_hex(&given)
            .map_err(|error| CommandError::usage(format!("{SECRET}: {error}")));
    }
    let mut processes = all_processes().into_iter().flatten().flatten();
    processes.find_map(|process| of_process(&process, job)).ok_or_else(|| unknown(job))
}

/// The secret that a process of a job has, if this is one and its environment can be read.
fn of_process(process: &Process, job: &str) -> Option<Secret> {
    let variables = process.environ().ok()?;
    let get = |name: &str| variables.get(std::ffi::OsStr::new(name))?.to_str();
    let is_it = get(JOB)? == job;
    is_it.then(|| Secret::from_hex(get(SECRET)?).ok())?
}

fn unknown(job: &str) -> CommandError {
    CommandError::failed(format!(
        "only the user who has started job {job:?} may see what its ranks do"
    ))
    .hint(format!("run the command as that user on one of the job's hosts, or set {SECRET}"))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_of_the_job_has_the_secret() {
        let secret = Secret::generate();
        let mut child = Command::new("cat")
            .env(JOB, "secrets-test")
            .env(SECRET, secret.to_hex())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // The kernel shows an empty environment until the new program is loaded, which may be
        // after `spawn` has returned. A program that answers is loaded.
        child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let process = Process::new(child.id().cast_signed()).unwrap();
        let found = ["secrets-test", "another"].map(|job| of_process(&process, job));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found, [Some(secret), None]);
    }

    #[test]
    fn an_unknown_job_says_what_to_do() {
        let error = of("no-such-job").unwrap_err();
        let text = format!("{error:?}");
        assert!(text.contains("one of the job's hosts") && text.contains(SECRET), "{text}");
    }
}
