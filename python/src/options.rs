//! The options common to all collectives: name, process set, reduction.

use std::str::FromStr;

use pyo3::PyRef;

use crate::{error::PythonError, process_set::ProcessSet};

/// The process set of a call.
pub(crate) type Set<'py> = Option<PyRef<'py, ProcessSet>>;

/// Name and process set of an operation.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) name: Option<String>,
    pub(crate) set: Option<gradwire_worker::ProcessSet>,
}

impl Common {
    pub(crate) fn new(name: Option<String>, set: &Set<'_>) -> Self {
        Self { name, set: set.as_ref().map(|set| set.inner.clone()) }
    }

    /// The name of the operation in messages.
    pub(crate) fn called(&self, collective: &str) -> String {
        self.name.clone().unwrap_or_else(|| collective.to_owned())
    }
}

/// Applies [`Common`] to options of the worker library.
macro_rules! apply {
    ($common:expr, $options:expr) => {{
        let common: &$crate::options::Common = &$common;
        let mut options = $options;
        if let Some(name) = &common.name {
            options = options.name(name.clone());
        }
        if let Some(set) = &common.set {
            options = options.process_set(set);
        }
        options
    }};
}

pub(crate) use apply;

/// Parses the name of a `what`.
pub(crate) fn parse<T: FromStr>(what: &str, name: &str, names: &[&str]) -> Result<T, PythonError> {
    name.parse().map_err(|_| {
        let all = names.join(", ");
        PythonError::invalid(format!("unknown {what} {name:?}: use one of {all}"))
    })
}
