//! Why telemetry can't start.

/// Why telemetry can't start. The text names the setting to change, if there is one.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The log filter can't be parsed.
    #[error("log.level = {given:?} is not a log filter: {reason}")]
    Filter {
        /// The filter.
        given: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Logs already go somewhere in this process.
    #[error("logging was already set up in this process")]
    AlreadyLogging,
    /// The address can't be listened on.
    #[error("can't serve metrics on {address} ({setting}): {reason}{hint}")]
    Listen {
        /// The address, or several.
        address: String,
        /// The setting it comes from.
        setting: &'static str,
        /// The error of the system.
        reason: std::io::Error,
        /// What to do, where that is known.
        hint: &'static str,
    },
    /// The system refuses the thread of the endpoint, or what it needs.
    #[error(
        "can't serve metrics: the system refuses a thread: {reason}; raise gradwired's limits of \
         processes and open files (ulimit -u -n)"
    )]
    Thread {
        /// The error of the system.
        reason: std::io::Error,
    },
    /// Another recorder is in this process.
    #[error("another metrics recorder is already installed in this process")]
    Recorder,
}
