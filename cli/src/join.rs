//! `gradwire join` and `gradwire secret`: a job from the tasks of another launcher.

use std::{
    ffi::OsString,
    fmt::Write as _,
    fs::OpenOptions,
    io::{ErrorKind, Write as _},
    os::unix::{fs::OpenOptionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use clap::Args;
use gradwire_launcher::{args::SettingsOptions, error::CommandError, join::Join};
use gradwire_proto::Secret;
use gradwire_settings::Settings;

use crate::process::{block_on, environment, load, print};

/// Make a job of the tasks of srun or mpirun.
#[derive(Debug, Args)]
pub struct Options {
    /// The task, if it is not this process: its process id.
    #[arg(long = "for", value_name = "PID", hide = true)]
    pid: Option<u32>,
    /// How many jobs the task has been in.
    #[arg(long, value_name = "N", default_value_t = 0, hide = true)]
    session: u32,
    /// The program of each rank, and its arguments.
    ///
    /// Without one, the variables of the rank are printed.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// The settings of a task: from its environment.
fn settings() -> Result<Settings, CommandError> {
    let config = std::env::var_os("GRADWIRE_CONFIG").map(PathBuf::from);
    Ok(load(&SettingsOptions { config, set: Vec::new() }, &[])?.settings)
}

/// Joins the job, and becomes the program.
///
/// # Errors
/// [`CommandError`] if no job forms, or the program can't be run.
pub fn run(options: Options) -> Result<ExitCode, CommandError> {
    let (settings, environment) = (settings()?, environment());
    let pid = options.pid.unwrap_or_else(std::process::id);
    let joined = || {
        let join = Join::new(&settings, &environment, pid, options.session)?;
        let variables = block_on(join.join())??;
        Ok((join, variables))
    };
    let (join, mut variables) = match joined() {
        // A library reads the error, and standard error is that of the task.
        Err(error) if options.pid.is_some() => {
            let CommandError { what, hint, code } = error;
            let text = [what, hint].join("; ");
            print(&format!("{}\n", text.trim_end_matches("; ")))?;
            return Ok(ExitCode::from(code));
        }
        joined => joined?,
    };
    let mut words = options.command.into_iter();
    let Some(program) = words.next() else {
        let text = variables.iter().fold(String::new(), |mut text, (name, value)| {
            let _ = writeln!(text, "{name}={value}");
            text
        });
        return print(&text);
    };
    variables.extend(join.for_programs());
    let error = Command::new(&program).args(words).envs(variables).exec();
    let mut failed = CommandError::failed(format!("can't run {}: {error}", program.display()));
    failed.code = if error.kind() == ErrorKind::NotFound { 127 } else { 126 };
    Err(failed)
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
