//! `tracing` to standard error. Standard output is for the program's results. What happens is also
//! passed on to a recorder, with more events than the log has.

use std::{
    fmt::{Debug, Write as _},
    io::{IsTerminal, stderr},
    sync::OnceLock,
};

use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    Layer,
    filter::{LevelFilter, ParseError, Targets},
    fmt,
    layer::{Context, SubscriberExt},
    util::SubscriberInitExt,
};

use crate::TelemetryError;

/// What is logged and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogConfig {
    /// A level or a `tracing` filter, from `log.level`.
    pub filter: String,
    /// One JSON object per line instead of text, from `log.format`.
    pub json: bool,
}

/// Parses a filter strictly: an invalid directive is an error, not ignored.
fn filter(given: &str) -> Result<Targets, TelemetryError> {
    let refused = |reason: String| TelemetryError::Filter { given: given.to_owned(), reason };
    // To `Targets`, an empty directive is `error`, and all else may be the name of a target.
    let parts = given.split(',').map(str::trim).filter(|part| !part.is_empty());
    let parts: Vec<&str> = parts.collect();
    let is_valid = |c: char| c.is_alphanumeric() || "_:-=".contains(c);
    let is_level = |part: &str| part.contains('=') || part.parse::<LevelFilter>().is_ok();
    let wrong = |part: &&&str| !part.chars().all(is_valid) || !is_level(part);
    if let Some(part) = parts.iter().find(wrong) {
        return Err(refused(format!("'{part}' is neither a level nor TARGET=LEVEL")));
    }
    let targets = parts.join(",").parse();
    targets.map_err(|error: ParseError| refused(error.to_string()))
}

/// Checks a value of the setting `log.level`.
///
/// # Errors
/// [`TelemetryError`] if it is not a level or a filter.
pub fn check_filter(given: &str) -> Result<(), TelemetryError> {
    filter(given).map(drop)
}

/// What gets each event: its level, 0 for an error, and its text.
type Recorder = Box<dyn Fn(u8, &str) + Send + Sync>;

static RECORDER: OnceLock<Recorder> = OnceLock::new();

/// The events that are recorded, whatever is logged. None of them is part of an operation.
fn recorded() -> Targets {
    Targets::new()
        .with_target("gradwire", LevelFilter::INFO)
        .with_target("gradwire_daemon", LevelFilter::DEBUG)
}

/// From now on, passes the events of this process on: their level, 0 for an error, and their text.
/// Only the first call has an effect, after [`init_logging`].
pub fn record_events(record: impl Fn(u8, &str) + Send + Sync + 'static) {
    let _ = RECORDER.set(Box::new(record));
}

/// Passes events on to the recorder.
struct Recording;

impl<S: Subscriber> Layer<S> for Recording {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let Some(record) = RECORDER.get() else { return };
        let mut text = EventText::default();
        event.record(&mut text);
        let level = match *event.metadata().level() {
            Level::ERROR => 0,
            Level::WARN => 1,
            Level::INFO => 2,
            _ => 3,
        };
        record(level, &format!("{}{}", text.message, text.fields));
    }
}

/// An event as text: its message, then its fields.
#[derive(Default)]
struct EventText {
    message: String,
    fields: String,
}

impl Visit for EventText {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Writing to a string can't fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}

/// Sends this process's logs to standard error. A second call is an error.
pub fn init_logging(config: &LogConfig) -> Result<(), TelemetryError> {
    let registry = tracing_subscriber::registry().with(Recording.with_filter(recorded()));
    let (lines, filter) = (fmt::layer().with_writer(stderr), filter(&config.filter)?);
    let done = if config.json {
        registry.with(lines.json().flatten_event(true).with_filter(filter)).try_init()
    } else {
        let lines = lines.with_ansi(stderr().is_terminal());
        registry.with(lines.with_filter(filter)).try_init()
    };
    done.map_err(|_| TelemetryError::AlreadyLogging)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_filter_is_named() {
        for good in ["warn", "info,gradwire_daemon=debug", "off"] {
            assert!(filter(good).is_ok(), "{good}");
        }
        for bad in ["loud", "warn,gradwire_daemon=loud", "warn,gradwire_daemon[step]=debug"] {
            let error = filter(bad).unwrap_err().to_string();
            assert!(error.starts_with(&format!("log.level = {bad:?} is not")), "{error}");
        }
    }

    #[test]
    fn spaces_and_empty_directives_are_ignored() {
        let expected = filter("info,gradwire_daemon=debug").unwrap();
        for given in ["info, gradwire_daemon=debug", "info,gradwire_daemon=debug,"] {
            assert_eq!(filter(given).unwrap(), expected, "{given}");
        }
    }

    #[test]
    fn logging_is_set_up_once() {
        let config = LogConfig { filter: "off".into(), json: true };
        assert!(init_logging(&config).is_ok());
        let error = init_logging(&config).unwrap_err();
        assert!(matches!(error, TelemetryError::AlreadyLogging), "{error}");
    }
}
