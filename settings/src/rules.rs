//! Checks across keys: values that are valid alone, but not together.

use gradwire_collectives::{Rules, RulesError};

use crate::table::Settings;

impl Settings {
    /// The algorithms that may run: `negotiation.algorithm`, restricted by `negotiation.strict`.
    ///
    /// # Errors
    /// [`RulesError`] if a rule allows no algorithm.
    pub fn algorithms(&self) -> Result<Rules, RulesError> {
        let rules = self.negotiation.algorithm.0.clone();
        if self.negotiation.strict { rules.strict() } else { Ok(rules) }
    }
}

/// Checks all rules.
///
/// # Errors
/// The first broken rule, with the keys, their values and what to change.
pub fn validate(settings: &Settings) -> Result<(), String> {
    let Settings { job, negotiation, data, heartbeat, worker, otlp, .. } = settings;
    let Settings { recorder, tuning, metrics, .. } = settings;
    if heartbeat.timeout <= 2 * heartbeat.interval {
        return Err(format!(
            "heartbeat.timeout_ms = {} must be more than twice heartbeat.interval_ms = {}, \
             so that one late heartbeat does not count as a lost node",
            heartbeat.timeout.as_millis(),
            heartbeat.interval.as_millis()
        ));
    }
    // The data plane also notices a dead peer, but can't say why. So heartbeats must come first.
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
            "negotiation.strict = true and data.compression = {} can't be combined, because the \
             rounding depends on the algorithm; unset one of them",
            data.compression
        ));
    }
    let is_quantized = ["int8", "fp8"].contains(&data.compression.as_str());
    if is_quantized && negotiation.algorithm.excludes_quantized() {
        return Err(format!(
            "data.compression = {} needs the direct or hierarchical algorithm for allreduces, but \
             negotiation.algorithm = \"{}\" allows neither; add one of them, or set it to auto",
            data.compression, *negotiation.algorithm
        ));
    }
    worker.check()?;
    let paths = [
        ("recorder.directory", &recorder.directory),
        ("tuning.directory", &tuning.directory),
        ("metrics.token_file", &metrics.token_file),
    ];
    for (key, path) in paths {
        if !path.is_empty() && !path.starts_with('/') {
            return Err(format!(
                "{key} = {path} must be an absolute path, because each daemon has a working \
                 directory of its own"
            ));
        }
    }
    if otlp.sample_steps > 0 && otlp.endpoint.is_empty() {
        return Err(format!(
            "otlp.sample_steps = {} requires otlp.endpoint, the collector that receives the spans",
            otlp.sample_steps
        ));
    }
    Ok(())
}
