//! The error of a command, with a hint what to do about it.

use std::{
    fmt,
    io::{self, Write},
    process::ExitCode,
};

use rustix::io::Errno;

/// Writes a line to standard error and ignores errors: `eprintln` would panic without a reader. It
/// makes one system call, because others write to the same place.
pub fn print_line(line: impl fmt::Display) {
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// The hint for an error, if the system refused a process, a pipe or memory.
pub fn limits_hint(error: &io::Error) -> Option<&'static str> {
    match Errno::from_io_error(error)? {
        Errno::MFILE => Some("raise the limit of open files (ulimit -n)"),
        Errno::NFILE => Some("this machine has too many open files"),
        Errno::AGAIN | Errno::NOMEM => {
            Some("raise the limits of processes and memory (ulimit -u -v)")
        }
        _ => None,
    }
}

/// One error for the person who typed the command: `error: …`, `hint: …`, and an exit code.
#[derive(Debug, thiserror::Error)]
pub struct CommandError {
    /// What was wrong, and where.
    pub what: String,
    /// What to do; may be empty.
    pub hint: String,
    /// 2 for a command that can't be carried out as given, 1 for one that failed.
    pub code: u8,
}

impl CommandError {
    /// The command can't be carried out as it was given.
    pub fn usage(what: impl fmt::Display) -> Self {
        Self { what: what.to_string(), hint: String::new(), code: 2 }
    }

    /// The command failed.
    pub fn failed(what: impl fmt::Display) -> Self {
        Self { code: 1, ..Self::usage(what) }
    }

    /// A call of the system failed.
    pub fn system(error: &io::Error) -> Self {
        Self::failed(error).hint(limits_hint(error).unwrap_or_default())
    }

    /// Adds a hint.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = hint.into();
        self
    }

    /// Prints it to standard error and returns the exit code.
    pub fn report(&self) -> ExitCode {
        print_line(self);
        ExitCode::from(self.code)
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", self.what)?;
        if !self.hint.is_empty() {
            write!(f, "\nhint: {}", self.hint)?;
        }
        Ok(())
    }
}

impl From<gradwire_settings::SettingsError> for CommandError {
    fn from(error: gradwire_settings::SettingsError) -> Self {
        Self::usage(error)
    }
}
