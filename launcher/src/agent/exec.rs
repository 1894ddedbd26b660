//! The last step before a program runs: make sure that it dies with the agent, then become it.
//!
//! Between `fork` and `exec` almost nothing is safe to do, so the agent starts `gradwire
//! exec-child`, an ordinary process, which sets its death signal and then replaces itself.

use std::{
    ffi::OsString,
    fs::File,
    io::{BufRead, BufReader, ErrorKind, Read},
    os::{fd::IntoRawFd, unix::process::CommandExt},
    process::Command,
};

use gradwire_services::launch::STDERR;
use rustix::{
    fs::fstat,
    io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd},
    process::{Signal, getppid, set_parent_process_death_signal},
};

use super::binding;
use crate::error::CommandError;

/// The lowest number for a copy of standard error: programs don't expect descriptors there.
const COPY: i32 = 100;

/// Becomes `program`, which gets `signal` when the process `parent` dies. Returns only on an error.
pub fn exec_child(
    signal: Signal,
    parent: u32,
    program: &OsString,
    args: &[OsString],
) -> CommandError {
    if let Err(error) = set_parent_process_death_signal(Some(signal)) {
        return CommandError::failed(format!("can't set the parent-death signal: {error}"));
    }
    // If the parent died before that call, the signal would never come.
    let now = getppid().map(|pid| pid.as_raw_nonzero().get());
    if now.and_then(|pid| u32::try_from(pid).ok()) != Some(parent) {
        return CommandError::failed("the agent ended while starting this process");
    }
    if let Err(error) = binding::bind() {
        return CommandError::failed(format!("can't bind this process to cores: {error}"));
    }
    let mut command = Command::new(program);
    if let Ok(pipe) = fstat(std::io::stderr()) {
        let number = copy_of_stderr().map(|copy| format!(":{copy}")).unwrap_or_default();
        command.env(STDERR, format!("{}:{}{number}", pipe.st_dev, pipe.st_ino));
    }
    let error = command.args(args).exec();
    let why = match interpreter(program) {
        Some(interpreter) if error.kind() == ErrorKind::NotFound => {
            format!("its first line names the interpreter {interpreter:?}, which does not exist")
        }
        _ => error.to_string(),
    };
    let mut failed = CommandError::failed(format!("can't run {}: {why}", program.display()));
    failed.code = 126;
    failed
}

/// A copy of standard error that the program inherits. Its messages to the agent arrive even if a
/// script redirects its standard error to a file.
fn copy_of_stderr() -> Option<i32> {
    let copy = fcntl_dupfd_cloexec(std::io::stderr(), COPY).ok()?;
    fcntl_setfd(&copy, FdFlags::empty()).ok()?;
    Some(copy.into_raw_fd())
}

/// The interpreter in the first line of a script, with an invisible carriage return if it has one.
fn interpreter(program: &OsString) -> Option<String> {
    /// The system reads no more bytes of the first line, either.
    const FIRST: u64 = 256;
    let line = BufReader::new(File::open(program).ok()?.take(FIRST)).split(b'\n').next()?.ok()?;
    let line = String::from_utf8_lossy(line.strip_prefix(b"#!")?).into_owned();
    line.split([' ', '\t']).find(|word| !word.is_empty()).map(ToOwned::to_owned)
}
