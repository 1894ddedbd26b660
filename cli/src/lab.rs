//! Commands of the laboratory. `gradwire-lab`, a program of its own, runs them where it is
//! installed.

use std::{
    env, ffi::OsString, io::ErrorKind, os::unix::process::CommandExt, path::Path, process::Command,
};

use clap::Args;
use gradwire_launcher::error::CommandError;

/// The name of the program.
const PROGRAM: &str = "gradwire-lab";

/// The words of a command of the laboratory, which checks them itself.
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub struct Words {
    /// What `gradwire-lab` gets.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    pub words: Vec<OsString>,
}

/// Becomes `gradwire-lab` with the words of this command line: the program beside this one, or
/// else the first in `PATH`.
///
/// # Errors
/// [`CommandError`] if the program is missing, with how to get it, or can't be run.
pub fn become_lab() -> CommandError {
    let own = env::current_exe().unwrap_or_default();
    let beside = own.with_file_name(PROGRAM);
    let program = if beside.is_file() { beside.as_path() } else { Path::new(PROGRAM) };
    let error = Command::new(program).args(env::args_os().skip(1)).exec();
    if program.is_absolute() || error.kind() != ErrorKind::NotFound {
        return CommandError::failed(format!("{} can't be run: {error}", program.display()));
    }
    let folder = own.parent().unwrap_or(Path::new("/")).display();
    let what = format!("this command needs {PROGRAM}, which is neither in {folder} nor in PATH");
    CommandError::failed(what).hint(
        "in a checkout of Gradwire of the same version: cargo build --release -p gradwire-lab; \
         then copy target/release/gradwire-lab beside gradwire",
    )
}
