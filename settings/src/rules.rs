//! Checks of several keys together: values that are right alone and wrong together.

use gradwire_collectives::{Rules, RulesError};

use crate::table::Settings;

impl Settings {
    /// The algorithms that may run: `negotiation.algorithm`, as strict as `negotiation.strict` asks
    /// for.
    ///
    /// # Errors
    /// [`RulesError`] if nothing is left of a rule.
    pub fn algorithms(&self) -> Result<Rules, RulesError> {
        let rules = self.negotiation.algorithm.0.clone();
        if self.negotiation.strict { rules.strict() } else { Ok(rules) }
    }
}

/// The first broken rule, as a text that names the keys, their values and what to change.
///
/// # Errors
/// The text.
pub fn validate(settings: &Settings) -> Result<(), String> {
    let Settings { job, negotiation, data, heartbeat, worker, otlp, .. } = settings;
    if heartbeat.timeout <= 2 * heartbeat.interval {
        return Err(format!(
            "heartbeat.timeout_ms = {} must be more than twice heartbeat.interval_ms = {}, \
             or one late heartbeat is a lost node",
            heartbeat.timeout.as_millis(),
            heartbeat.interval.as_millis()
        ));
    }
    // The data plane notices a dead peer too, but can't tell why it is silent: heartbeats first.
    if job.timeout <= heartbeat.timeout + heartbeat.interval {
        return Err(format!(
            "job.timeout_ms = {} must be more than heartbeat.timeout_ms = {} and \
             heartbeat.interval_ms = {} together, so that a lost node is named before the \
             operations that wait for it give up",
            job.timeout.as_millis(),
            heartbeat.timeout.as_millis(),
            heartbeat.interval.as_millis()
        ));
    }
    if data.chunk_bytes > negotiation.piece_bytes {
        return Err(format!(
            "data.chunk_bytes = {} must not be more than negotiation.piece_bytes = {}",
            data.chunk_bytes, negotiation.piece_bytes
        ));
    }
    if let Err(error) = settings.algorithms() {
        return Err(format!("negotiation.algorithm = \"{}\": {error}", *negotiation.algorithm));
    }
    if negotiation.strict && data.compression != "none" {
        return Err(format!(
            "negotiation.strict = true and data.compression = {} can't be combined: what is \
             rounded between nodes depends on the algorithm; set one of them back",
            data.compression
        ));
    }
    let is_quantized = ["int8", "fp8"].contains(&data.compression.as_str());
    if is_quantized && negotiation.algorithm.excludes_quantized() {
        return Err(format!(
            "data.compression = {} is for allreduces by direct or hierarchical, and \
             negotiation.algorithm = \"{}\" allows none of them; add one of them, or set auto",
            data.compression, *negotiation.algorithm
        ));
    }
    worker.check()?;
    if otlp.sample_steps > 0 && otlp.endpoint.is_empty() {
        return Err(format!(
            "otlp.sample_steps = {} needs otlp.endpoint, the collector that gets the spans",
            otlp.sample_steps
        ));
    }
    Ok(())
}
