//! The launcher's variables, read and checked (TRUST). They tell a process its role in its job.
//!
//! They are not settings: users do not choose them, and they have no defaults.

use std::{collections::HashMap, fmt::Display, str::FromStr};

use gradwire_proto::Epoch;

/// Why a process of a job can't start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VariableError {
    /// A required variable is not set.
    #[error("{0} is not set; start this process with `gradwire run`, or set the variable yourself")]
    Missing(&'static str),
    /// A variable has an invalid value.
    #[error("invalid {variable}={value:?}: {reason}")]
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

    /// The parsed value of a variable; `reason` says what is expected.
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

    /// The epoch for which a daemon of an elastic job was started; `None` in a fixed job.
    ///
    /// # Errors
    /// [`VariableError`] with the variable.
    pub fn epoch(&self) -> Result<Option<Epoch>, VariableError> {
        if !self.0.contains_key("GRADWIRE_ELASTIC") {
            return Ok(None);
        }
        self.read(
            "GRADWIRE_ELASTIC",
            |value| if value == "1" { Ok(()) } else { Err("expected 1") },
        )?;
        let epoch = |value: &str| value.parse().ok().filter(|epoch| *epoch > 0).map(Epoch);
        self.read("GRADWIRE_EPOCH", |value| epoch(value).ok_or("expected a number from 1 on"))
            .map(Some)
    }

    /// The value of a variable, parsed by `read`.
    ///
    /// # Errors
    /// [`VariableError`] with the variable and the error of `read`.
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
    /// [`VariableError`] with the variable and the error of `read`.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_elastic_job_has_an_epoch() {
        let epoch = |pairs: &[(&str, &str)]| {
            let pair = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
            let all = pairs.iter().map(pair).collect();
            Variables(&all).epoch().map_err(|error| error.to_string())
        };
        let (elastic, three) = (("GRADWIRE_ELASTIC", "1"), ("GRADWIRE_EPOCH", "3"));
        assert_eq!(epoch(&[]), Ok(None));
        assert_eq!(epoch(&[three]), Ok(None));
        assert_eq!(epoch(&[elastic, three]), Ok(Some(Epoch(3))));
        for (pairs, part) in [
            (&[elastic][..], "GRADWIRE_EPOCH is not set"),
            (
                &[elastic, ("GRADWIRE_EPOCH", "0")],
                "invalid GRADWIRE_EPOCH=\"0\": expected a number",
            ),
            (&[elastic, ("GRADWIRE_EPOCH", "x")], "invalid GRADWIRE_EPOCH"),
            (&[("GRADWIRE_ELASTIC", "yes"), three], "invalid GRADWIRE_ELASTIC=\"yes\": expected 1"),
        ] {
            let error = epoch(pairs).unwrap_err();
            assert!(error.starts_with(part), "{error}");
        }
    }
}
