//! The origin of a value.

use std::{fmt, path::PathBuf};

/// Where a value was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// Nowhere: the embedded default.
    Default,
    /// In this file.
    File(PathBuf),
    /// In this environment variable.
    Variable(String),
    /// On the command line.
    Flag,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path) => write!(f, "file {}", path.display()),
            Self::Variable(name) => write!(f, "environment {name}"),
            Self::Flag => f.write_str("command line"),
        }
    }
}
