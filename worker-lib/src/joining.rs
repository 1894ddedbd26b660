//! A task of another launcher, such as `srun` or `mpirun`, becomes a rank: the program `gradwire
//! join` finds out which one, and starts the daemon of its host.

use std::{
    collections::HashMap,
    process::{Command, Stdio},
    sync::atomic::{AtomicU32, Ordering::Relaxed},
};

use crate::error::{GradwireError, Result};

/// Its exit code if the variables don't say which rank the task is (`launcher/src/join/known.rs`).
const UNKNOWN_LAUNCHER: i32 = 3;

/// The program, in PATH.
pub(crate) const PROGRAM: &str = "gradwire";

/// Adds the variables of the job that this process joins. Without a known launcher, or without the
/// program, nothing is added.
pub(crate) fn join(program: &str, variables: &mut HashMap<String, String>) -> Result<()> {
    /// The jobs that this process has joined.
    static SESSIONS: AtomicU32 = AtomicU32::new(0);
    let session = SESSIONS.load(Relaxed).to_string();
    let mut command = Command::new(program);
    command.args(["join", "--for", &std::process::id().to_string(), "--session", &session]);
    // Standard error is that of the daemon, which outlives the command.
    let Ok(done) = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output() else {
        return Ok(());
    };
    let text = String::from_utf8_lossy(&done.stdout);
    match done.status.code() {
        Some(0) => {}
        Some(UNKNOWN_LAUNCHER) => return Ok(()),
        _ => return Err(GradwireError::Settings(text.trim().to_owned())),
    }
    // The number must be the same on all ranks, also if one of them has tried in vain before.
    SESSIONS.fetch_add(1, Relaxed);
    let pairs = text.lines().filter_map(|line| line.split_once('='));
    variables.extend(pairs.map(|(name, value)| (name.to_owned(), value.to_owned())));
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    /// The variables after a program has answered, or the error.
    fn joined(script: &str) -> Result<Vec<(String, String)>> {
        let path = std::env::temp_dir().join(format!("gradwire-joining-{}", std::process::id()));
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        let mut variables = HashMap::from([("A".to_owned(), "1".to_owned())]);
        let done = join(path.to_str().unwrap(), &mut variables);
        fs::remove_file(&path).unwrap();
        let mut all: Vec<_> = variables.into_iter().collect();
        all.sort();
        done.map(|()| all)
    }

    #[test]
    fn the_program_says_which_rank_this_is() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let own = std::process::id();
        let all = joined("echo GRADWIRE_JOB=j; echo PID=$3").unwrap();
        let pid = own.to_string();
        assert_eq!(all, [pair("A", "1"), pair("GRADWIRE_JOB", "j"), pair("PID", &pid)]);
        assert_eq!(joined("echo no; exit 3").unwrap(), [pair("A", "1")]);
        let error = joined("echo it needs a secret; exit 2").unwrap_err().to_string();
        assert_eq!(error, "it needs a secret");
        let mut none = HashMap::new();
        join("/no/such/program", &mut none).unwrap();
        assert!(none.is_empty());
    }
}
