//! Facts from other programs on this host. Each program has little time, and dies with the agent:
//! it is started by `gradwire exec-child`, like the ranks of a job.

use std::{
    ffi::{OsStr, OsString},
    path::Path,
    process::Stdio,
};

use gradwire_launcher::agent::host::find_gradwired;
use tokio::{process::Command, time::timeout};

use crate::{
    facts::{Torch, Wanted},
    limits::PROGRAM,
};

/// The longest answer, in characters (BOUND).
const MAX_ANSWER: usize = 200;

/// Prints the versions of these packages, one a line, with an empty line for a missing one. It does
/// not import them, which would take seconds.
const PACKAGES: &str = "\
from importlib.metadata import PackageNotFoundError, version
for name in ('torch', 'gradwire'):
    try:
        print(version(name))
    except PackageNotFoundError:
        print()
";

/// The `PATH` for the programs of a job.
pub fn path(wanted: &Wanted) -> OsString {
    match &wanted.path {
        Some(path) => path.into(),
        None => std::env::var_os("PATH").unwrap_or_default(),
    }
}

/// The standard output of a program.
async fn ask(program: &Path, args: &[&str], path: &OsStr) -> Result<String, String> {
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = Command::new(own);
    command
        .arg("exec-child")
        .arg(std::process::id().to_string())
        .arg("--")
        .arg(program)
        .args(args)
        .env("PATH", path)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let shown = program.display();
    let output = match timeout(PROGRAM, command.output()).await {
        Ok(output) => output.map_err(|error| format!("{shown} can't be run: {error}"))?,
        Err(_) => return Err(format!("{shown} did not answer within {} s", PROGRAM.as_secs())),
    };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).chars().take(MAX_ANSWER).collect();
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    let printed: String = text(&output.stderr);
    let last = printed.lines().last().unwrap_or_default();
    Err(format!("{shown} failed ({}): {last}", output.status))
}

/// The release of the program `gradwired`.
///
/// # Errors
/// Why it is unknown.
pub async fn gradwired(wanted: &Wanted) -> Result<String, String> {
    let path = path(wanted);
    let found = find_gradwired(&wanted.gradwired, &path, Path::new("/"));
    let program = found.ok_or_else(|| match wanted.gradwired.as_str() {
        "" => "gradwired is neither beside gradwire nor in PATH".to_owned(),
        program => format!("program {program} (launch.gradwired) not found"),
    })?;
    let answer = ask(&program, &["--version"], &path).await?;
    // "gradwired 0.1.0"
    let version = answer.split_whitespace().nth(1);
    version.map(ToOwned::to_owned).ok_or_else(|| format!("{} has no version", program.display()))
}

/// PyTorch, and the release of the Python package `gradwire`.
pub async fn packages(wanted: &Wanted) -> (Torch, Option<String>) {
    let path = path(wanted);
    let find = |name| which::which_in(name, Some(&path), "/").ok();
    let Some(python) = find("python3").or_else(|| find("python")) else {
        return (Torch::NoPython, None);
    };
    match ask(&python, &["-c", PACKAGES], &path).await {
        Ok(answer) => {
            let mut versions = answer.lines().map(|line| Some(line.trim().to_owned()));
            let mut next = || versions.next().flatten().filter(|version| !version.is_empty());
            (next().map_or(Torch::NotInstalled, Torch::Version), next())
        }
        Err(why) => (Torch::Unknown(why), None),
    }
}
