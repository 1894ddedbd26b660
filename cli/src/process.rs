//! What every command needs of its process: runtime, environment, settings, logs, output.

use std::{
    collections::HashMap,
    ffi::OsString,
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
    sync::{Arc, Mutex, OnceLock},
    thread,
};

use gradwire_launcher::{
    args::SettingsOptions,
    error::{CommandError, limits_hint},
    outer,
};
use gradwire_net::interfaces;
use gradwire_settings::{KEYS, Layers, Loaded, Settings, horovod, layers};
use gradwire_telemetry::{LogConfig, check_filter, init_logging};
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
        let what = format!(
            "{error}: this process may open {most} files, but needs {MIN_OPEN_FILES} or more"
        );
        return Err(CommandError::failed(what).hint(limits_hint(&error).unwrap_or_default()));
    }
    builder.enable_all().build().map_err(|error| CommandError::system(&error))
}

/// Checks that standard input and output can have a thread each. Tokio panics if they can't.
///
/// # Errors
/// [`CommandError`] if the system refuses a thread.
pub fn check_threads() -> Result<(), CommandError> {
    let gate = Arc::new(Mutex::new(()));
    // The first thread lasts until the second one has started.
    let closed = gate.lock();
    let start = || {
        let gate = gate.clone();
        thread::Builder::new().spawn(move || drop(gate.lock()))
    };
    let started: Vec<_> = [start(), start()].into_iter().collect();
    drop(closed);
    for thread in started {
        let _ = thread.map_err(|error| CommandError::system(&error))?.join();
    }
    Ok(())
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

/// The variable with the path of a file with settings.
const CONFIG: &str = "GRADWIRE_CONFIG";

/// Variables of `-x` that Gradwire reads itself.
static EXPORTED: OnceLock<Vec<(String, String)>> = OnceLock::new();

/// Adds the variables of `-x` to the environment of this process, if Gradwire reads them: settings,
/// also by Horovod's names, and the interfaces of other libraries. Called once, at the start.
pub fn export(variables: &[(String, Option<String>)]) {
    let is_read = |name: &str, value: &str| {
        let one = HashMap::from([(name.to_owned(), value.to_owned())]);
        (name.starts_with("GRADWIRE_") && name.contains("__"))
            || name == CONFIG
            || interfaces::OTHERS.contains(&name)
            || horovod::settings(KEYS, &one).is_ok_and(|found| !found.is_empty())
    };
    let pairs = variables.iter().filter_map(|(name, value)| Some((name, value.as_ref()?)));
    let read = pairs.filter(|(name, value)| is_read(name, value));
    let _ = EXPORTED.set(read.map(|(name, value)| (name.clone(), value.clone())).collect());
}

/// The environment as text, to be read and to be sent as JSON.
pub fn environment() -> HashMap<String, String> {
    let mut all = layers::text(std::env::vars_os());
    all.extend(EXPORTED.get().into_iter().flatten().cloned());
    all
}

/// Loads the settings: defaults, file, environment, flags of the user, `flags` of the command.
///
/// # Errors
/// [`CommandError`] for a wrong setting.
pub fn load(args: &SettingsOptions, flags: &[String]) -> Result<Loaded, CommandError> {
    let flags = args.set.iter().chain(flags).cloned().collect();
    let environment = environment();
    let named = environment.get(CONFIG).map(OsString::from).or_else(|| std::env::var_os(CONFIG));
    let named = named.filter(|path| !path.is_empty()).map(PathBuf::from);
    let file = args.config.clone().or(named);
    let loaded = Settings::load(&Layers { file, environment: outer::outside(environment), flags })?;
    let Settings { data, log, .. } = &loaded.settings;
    interfaces::check(&data.interface).map_err(|error| {
        CommandError::usage(format!("data.interface = \"{}\": {error}", data.interface))
    })?;
    check_filter(&log.level).map_err(CommandError::usage)?;
    Ok(loaded)
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
