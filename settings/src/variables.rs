//! The launcher's variables: which part of which job a process is, read and checked (TRUST).
//!
//! They are not settings: no user chooses them, and they have no default.

use std::{collections::HashMap, fmt::Display, str::FromStr};

/// Why a part of the job can't be started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VariableError {
    /// A variable that must be set is not.
    #[error("{0} is not set; `gradwire run` sets it, and a part that is started by hand needs it")]
    Missing(&'static str),
    /// A variable's value is not what it should be.
    #[error("{variable}={value:?} is not usable: {reason}")]
    Invalid {
        /// The variable.
        variable: &'static str,
        /// Its value; never a secret.
        value: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// The variables of a process.
#[derive(Debug, Clone, Copy)]
pub struct Variables<'a>(pub &'a HashMap<String, String>);

impl Variables<'_> {
    /// The text of a variable.
    ///
    /// # Errors
    /// [`VariableError::Missing`].
    pub fn text(&self, variable: &'static str) -> Result<&str, VariableError> {
        self.0.get(variable).map(String::as_str).ok_or(VariableError::Missing(variable))
    }

    /// The value of a variable, parsed; `reason` describes what it has to be.
    ///
    /// # Errors
    /// [`VariableError`] with the variable.
    pub fn parse<T: FromStr>(
        &self,
        variable: &'static str,
        reason: &'static str,
    ) -> Result<T, VariableError> {
        self.read(variable, |value| value.parse().map_err(|_| reason))
    }

    /// The value of a variable, as `read` reads it.
    ///
    /// # Errors
    /// [`VariableError`] with the variable and what `read` says.
    pub fn read<T, E: Display>(
        &self,
        variable: &'static str,
        read: impl FnOnce(&str) -> Result<T, E>,
    ) -> Result<T, VariableError> {
        let value = self.text(variable)?;
        read(value).map_err(|reason| VariableError::Invalid {
            variable,
            value: value.to_owned(),
            reason: reason.to_string(),
        })
    }

    /// Like [`Variables::read`], but errors don't show the value.
    ///
    /// # Errors
    /// [`VariableError`] with the variable and what `read` says.
    pub fn secret<T, E: Display>(
        &self,
        variable: &'static str,
        read: impl FnOnce(&str) -> Result<T, E>,
    ) -> Result<T, VariableError> {
        self.read(variable, read).map_err(|error| match error {
            VariableError::Invalid { variable, reason, .. } => {
                VariableError::Invalid { variable, value: "…".to_owned(), reason }
            }
            missing @ VariableError::Missing(_) => missing,
        })
    }
}
