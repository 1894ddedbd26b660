//! `gradwire join` and `gradwire secret`: a job from the tasks of another launcher.

use std::{
    ffi::OsString,
    fs::OpenOptions,
    io::{ErrorKind, Write as _},
    os::unix::{fs::OpenOptionsExt, process::CommandExt},
    path::Path,
    process::{Command, ExitCode},
};

use clap::Args;
use gradwire_launcher::{
    args::SettingsOptions,
    error::{CommandError, print_line},
    join::{self, Join},
};
use gradwire_proto::Secret;
use gradwire_settings::Loaded;

use crate::process::{block_on, environment, load, print};

/// Make a job of the tasks of srun or mpirun, or of the hosts of Kubernetes or BytePS.
#[derive(Debug, Args)]
pub struct Options {
    /// The process id of the task, for a library.
    #[arg(long = "for", value_name = "PID", hide = true)]
    pid: Option<u32>,
    /// How many jobs the task has been in.
    #[arg(long, value_name = "N", default_value_t = 0, hide = true)]
    session: u32,
    /// The program of each rank, and its arguments.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// The settings of a task: from its environment, and the file that this names.
fn settings() -> Result<Loaded, CommandError> {
    load(&SettingsOptions::default(), &[])
}

/// Joins the job, and becomes the program. For a library, it prints the variables of the rank, or
/// what went wrong: the library's standard error is that of the task.
///
/// # Errors
/// [`CommandError`] if no job forms, or the program can't be run.
pub fn run(options: Options) -> Result<ExitCode, CommandError> {
    let Options { pid, session, command } = options;
    if let Some(pid) = pid {
        let (text, code) = match joined(pid, session) {
            Ok(variables) => (lines(&variables), ExitCode::SUCCESS),
            Err(CommandError { what, hint, code }) if hint.is_empty() => (what, code.into()),
            Err(CommandError { what, hint, code }) => (format!("{what}; {hint}"), code.into()),
        };
        print(&text)?;
        return Ok(code);
    }
    let mut words = command.into_iter();
    // The variables contain the secret, which must not get into the output of a job.
    let program = words.next().ok_or_else(|| CommandError::usage("no program is given"))?;
    let (settings, environment) = (settings()?, environment());
    if let Some(why) = join::idle(&environment) {
        print_line(format!("gradwire: {why}"));
        return Ok(ExitCode::SUCCESS);
    }
    let join = Join::new(&settings, &environment, std::process::id(), session)?;
    if join.starts_ranks() {
        let arguments: Vec<_> = words.collect();
        return block_on(join.run_ranks(&program, &arguments))?;
    }
    let variables = block_on(join.join())??;
    let mut command = Command::new(&program);
    // Also the variables of other launchers, for programs that look for them.
    let error = command.args(words).envs(variables).envs(join.for_programs()).exec();
    let mut failed = CommandError::failed(format!("can't run {}: {error}", program.display()));
    failed.code = if error.kind() == ErrorKind::NotFound { 127 } else { 126 };
    Err(failed)
}

/// The variables of a rank, for its library.
fn joined(pid: u32, session: u32) -> Result<Vec<(String, String)>, CommandError> {
    let (settings, environment) = (settings()?, environment());
    let join = Join::new(&settings, &environment, pid, session)?;
    block_on(join.join())?
}

fn lines(variables: &[(String, String)]) -> String {
    variables.iter().map(|(name, value)| format!("{name}={value}\n")).collect()
}

/// Serves the tasks of this host.
///
/// # Errors
/// [`CommandError`] if they can't meet.
pub fn serve(pid: u32, session: u32) -> Result<ExitCode, CommandError> {
    let (settings, environment) = (settings()?, environment());
    let join = Join::new(&settings, &environment, pid, session)?;
    block_on(join.serve())?
}

/// Makes a secret: prints it, or writes it to a new file that only its owner can read.
///
/// # Errors
/// [`CommandError`] if the file exists or can't be written.
pub fn secret(file: Option<&Path>) -> Result<ExitCode, CommandError> {
    let text = format!("{}\n", Secret::generate().to_hex());
    let Some(file) = file else { return print(&text) };
    let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(file);
    made.and_then(|mut made| made.write_all(text.as_bytes())).map_err(|error| {
        let what = format!("{} can't be written: {error}", file.display());
        let hint = match error.kind() {
            ErrorKind::AlreadyExists => "use the secret that it has, or remove it first",
            _ => "",
        };
        CommandError::failed(what).hint(hint)
    })?;
    Ok(ExitCode::SUCCESS)
}
