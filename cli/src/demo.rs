//! `gradwire demo`: runs the training of the Python package `gradwire.demo` on four ranks.

use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use clap::Args;
use gradwire_launcher::error::CommandError;

/// The rank that dies with `--kill`.
const KILLED: u32 = 2;

/// Exits with 0 if the package is there.
const HAS_PACKAGE: &str =
    "import importlib.util, sys; sys.exit(importlib.util.find_spec('gradwire') is None)";

/// How the demo runs.
#[derive(Debug, Args)]
pub struct Options {
    /// Number of ranks, all on this host.
    #[arg(short = 'n', long, default_value_t = 4, value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=64))]
    pub np: u32,
    /// Kill rank 2 on the way, to see how that is reported.
    ///
    /// Ends with exit code 137, as any job whose rank was killed by SIGKILL.
    #[arg(long)]
    pub kill: bool,
}

impl Options {
    /// The words of the command that runs the demo.
    ///
    /// # Errors
    /// [`CommandError`] if no Python has the package, or the rank to kill does not exist.
    pub fn words(&self) -> Result<Vec<OsString>, CommandError> {
        if self.kill && self.np <= KILLED {
            let what = format!("--kill kills rank {KILLED}, but there are only {} ranks", self.np);
            return Err(CommandError::usage(what).hint("use three ranks or more"));
        }
        let python = python().ok_or_else(|| {
            CommandError::failed("no Python here has the package gradwire")
                .hint("install its wheel in this environment: make wheel && pip install FILE")
        })?;
        let np = self.np.to_string();
        let mut words: Vec<OsString> =
            ["gradwire", "run", "--np", &np, "--"].map(OsString::from).to_vec();
        words.push(python.into_os_string());
        words.extend(["-m", "gradwire.demo"].map(OsString::from));
        if self.kill {
            words.extend(["--kill".to_owned(), KILLED.to_string()].map(OsString::from));
        }
        Ok(words)
    }
}

/// The Python beside this program, or else the first one in PATH, if it has the package.
fn python() -> Option<PathBuf> {
    let own = env::current_exe().ok();
    let beside = own.as_deref().and_then(Path::parent).map(Path::to_owned);
    let path = env::var_os("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> = beside.into_iter().chain(env::split_paths(&path)).collect();
    let all = folders.iter().flat_map(|folder| ["python3", "python"].map(|it| folder.join(it)));
    all.filter(|python| python.is_file()).find(|python| has_package(python))
}

fn has_package(python: &Path) -> bool {
    let mut command = Command::new(python);
    command.args(["-c", HAS_PACKAGE]).stdin(Stdio::null()).stdout(Stdio::null());
    command.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_is_not_there_can_not_be_killed() {
        let error = Options { np: 2, kill: true }.words().unwrap_err();
        assert_eq!((error.code, error.what.contains("only 2 ranks")), (2, true), "{}", error.what);
    }
}
