//! The last step before a program runs: tie its life to the agent's, then become it.
//!
//! Between `fork` and `exec` almost nothing is safe to do, so the agent starts `gradwire
//! exec-child`, an ordinary process, which asks for the tie and then replaces itself.

use std::{ffi::OsString, os::unix::process::CommandExt, process::Command};

use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use crate::error::CliError;

/// Becomes `program`, to be killed when the process `parent` dies. Comes back only with an error.
pub fn exec_child(parent: u32, program: &OsString, args: &[OsString]) -> CliError {
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        return CliError::failed(format!("can't be tied to the agent's life: {error}"));
    }
    // The parent may have died before the tie was there; then nobody would ever send the signal.
    let now = getppid().map(|pid| pid.as_raw_nonzero().get());
    if now.and_then(|pid| u32::try_from(pid).ok()) != Some(parent) {
        return CliError::failed("the agent ended while it started this process");
    }
    let error = Command::new(program).args(args).exec();
    let mut failed = CliError::failed(format!("can't run {}: {error}", program.display()));
    failed.code = 126;
    failed
}
