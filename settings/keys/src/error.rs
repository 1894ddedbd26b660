//! Why settings are refused.

use std::path::PathBuf;

use crate::origin::Origin;

/// Each variant names the value, the place it was written in, and what would be accepted.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The file can't be read.
    #[error("settings file {path}: {reason}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        reason: std::io::Error,
    },
    /// The file is not valid TOML.
    #[error("settings file {path} is not valid TOML: {reason}", path = path.display())]
    Toml {
        /// The file.
        path: PathBuf,
        /// Line, column and reason.
        reason: String,
    },
    /// An undeclared key.
    #[error(
        "unknown setting '{key}' ({origin}){suggestion}; `gradwire config show --all` lists them"
    )]
    Unknown {
        /// The key as it was written.
        key: String,
        /// Where it was written.
        origin: Origin,
        /// `; did you mean '…'?` or empty.
        suggestion: String,
    },
    /// A value that is invalid for its key.
    #[error("setting {key} = {given:?} ({origin}): {expected}")]
    Value {
        /// The key.
        key: &'static str,
        /// The value as it was written.
        given: String,
        /// Where it was written.
        origin: Origin,
        /// What the key accepts.
        expected: String,
    },
    /// A `--set` that is not `section.key=value`.
    #[error("invalid --set {given:?}: expected section.key=value")]
    Flag {
        /// The flag's text.
        given: String,
    },
    /// Values that are valid alone, but not together.
    #[error("{0}")]
    Rule(String),
}
