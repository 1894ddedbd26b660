//! What every command needs of its process: runtime, environment, settings, logs, output.

use std::{
    collections::HashMap,
    io::{self, Write},
    process::ExitCode,
};

use gradwire_launcher::{
    args::SettingsOptions,
    error::{CommandError, limits_hint},
    outer,
};
use gradwire_settings::{Layers, Loaded, Settings, layers};
use gradwire_telemetry::{LogConfig, init_logging};
use rustix::{
    io::Errno,
    process::{Resource, getrlimit},
};
use tokio::runtime::{Builder, Runtime};

/// The fewest descriptors with which a command begins: if they run out later, it can still say so.
const MIN_OPEN_FILES: u64 = 24;

/// A runtime of one thread.
///
/// # Errors
/// As of [`built`].
pub fn runtime() -> Result<Runtime, CommandError> {
    built(&mut Builder::new_current_thread())
}

/// Builds a runtime. Tokio panics if it gets no descriptor, so the limit is checked first.
///
/// # Errors
/// [`CommandError`] if the process may open too few files, or the system refuses a thread.
pub fn built(builder: &mut Builder) -> Result<Runtime, CommandError> {
    let most = getrlimit(Resource::Nofile).current;
    if let Some(most) = most.filter(|most| *most < MIN_OPEN_FILES) {
        let error = io::Error::from(Errno::MFILE);
        let what =
            format!("{error}: this process may open {most}, and needs at least {MIN_OPEN_FILES}");
        return Err(CommandError::failed(what).hint(limits_hint(&error).unwrap_or_default()));
    }
    builder.enable_all().build().map_err(|error| CommandError::system(&error))
}

/// Runs work to its end on a runtime of one thread.
///
/// # Errors
/// [`CommandError`] if there can't be a runtime.
pub fn block_on<T>(work: impl Future<Output = T>) -> Result<T, CommandError> {
    let runtime = runtime()?;
    let result = runtime.block_on(work);
    runtime.shutdown_background();
    Ok(result)
}

/// The environment as text, to be read and to be sent as JSON.
pub fn environment() -> HashMap<String, String> {
    layers::text(std::env::vars_os())
}

/// Loads the settings: defaults, file, environment, flags of the user, `flags` of the command.
///
/// # Errors
/// [`CommandError`] for a wrong setting.
pub fn load(args: &SettingsOptions, flags: &[String]) -> Result<Loaded, CommandError> {
    let flags = args.set.iter().chain(flags).cloned().collect();
    let layers =
        Layers { file: args.config.clone(), environment: outer::outside(environment()), flags };
    Ok(Settings::load(&layers)?)
}

/// Starts logging as the settings say.
///
/// # Errors
/// [`CommandError`] for a filter that can't be parsed.
pub fn log(settings: &Settings) -> Result<(), CommandError> {
    let json = settings.log.format == gradwire_settings::LogFormat::Json;
    init_logging(&LogConfig { filter: settings.log.level.clone(), json })
        .map_err(CommandError::usage)
}

/// Prints to standard output. A reader that closed the pipe is not an error.
///
/// # Errors
/// [`CommandError`] if the output can't be written.
pub fn print(text: &str) -> Result<ExitCode, CommandError> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(CommandError::failed(format!("the output can't be written: {error}")))
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}
