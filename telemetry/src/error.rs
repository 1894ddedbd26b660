//! Why telemetry can't start.

/// Why telemetry can't start. The text names the setting to change, if there is one.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the texts say what the fields are")]
pub enum TelemetryError {
    /// The log filter can't be parsed.
    #[error("log.level = {given:?} is not a log filter: {reason}")]
    Filter { given: String, reason: String },
    /// Logging is already set up in this process.
    #[error("logging is already set up in this process")]
    AlreadyLogging,
    /// The endpoint can't listen on the address.
    #[error("can't serve metrics on {address} ({setting}): {reason}{hint}")]
    Listen {
        /// The address with its ports.
        address: String,
        setting: &'static str,
        reason: std::io::Error,
        /// What to do, if known.
        hint: &'static str,
    },
    /// The system refuses the thread of the endpoint, or a descriptor.
    #[error(
        "can't serve metrics: the system refuses a thread: {reason}; raise gradwired's limits on \
         processes and open files (ulimit -u -n)"
    )]
    Thread { reason: std::io::Error },
    /// This process has another recorder.
    #[error("another metrics recorder is already installed in this process")]
    Recorder,
}

impl TelemetryError {
    /// Whether another process, or one that has just ended, has the address.
    pub fn is_taken(&self) -> bool {
        let in_use = std::io::ErrorKind::AddrInUse;
        matches!(self, Self::Listen { reason, .. } if reason.kind() == in_use)
    }
}
