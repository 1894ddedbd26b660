//! Errors of the coordinator itself, as opposed to failures of the job.

/// Why the coordinator can't serve.
#[derive(Debug, thiserror::Error)]
pub enum CoordinatorError {
    /// A value of the configuration is out of range.
    #[error("the coordinator's {name} is {given}: {allowed}")]
    Config {
        /// The field.
        name: &'static str,
        /// Its value.
        given: String,
        /// What is allowed.
        allowed: &'static str,
    },
    /// The gRPC server ended by itself.
    #[error("the coordinator's server failed: {0}")]
    Serve(#[from] tonic::transport::Error),
    /// The socket has no address.
    #[error("the coordinator's socket failed: {0}")]
    Socket(#[from] std::io::Error),
    /// A task of the coordinator panicked; this is a bug.
    #[error("the coordinator's {task} ended unexpectedly: {why}; please report this")]
    Task {
        /// The name of the task.
        task: &'static str,
        /// The text of the panic.
        why: String,
    },
}
