//! `tracing` to standard error. Standard output is for the program's results.

use std::io::{IsTerminal, stderr};

use tracing_subscriber::{
    filter::{ParseError, Targets},
    fmt,
    layer::SubscriberExt,
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
    if let Some(part) = parts.iter().find(|part| !part.chars().all(is_valid)) {
        return Err(refused(format!("'{part}' is neither a level nor TARGET=LEVEL")));
    }
    let targets = parts.join(",").parse();
    targets.map_err(|error: ParseError| refused(error.to_string()))
}

/// Sends this process's logs to standard error. A second call is an error.
pub fn init_logging(config: &LogConfig) -> Result<(), TelemetryError> {
    let registry = tracing_subscriber::registry().with(filter(&config.filter)?);
    let lines = fmt::layer().with_writer(stderr);
    let done = if config.json {
        registry.with(lines.json().flatten_event(true)).try_init()
    } else {
        registry.with(lines.with_ansi(stderr().is_terminal())).try_init()
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
        for bad in ["warn,gradwire_daemon=loud", "warn,gradwire_daemon[step]=debug"] {
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
