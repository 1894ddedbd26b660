//! What can go wrong with the coordinator itself, as opposed to the job.

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
    #[error("the coordinator can't serve: {0}")]
    Serve(#[from] tonic::transport::Error),
    /// The socket has no address.
    #[error("the coordinator's socket is unusable: {0}")]
    Socket(#[from] std::io::Error),
    /// A task of the coordinator ended by a panic; this is a bug.
    #[error("the coordinator's {task} ended unexpectedly: {why}; please report this")]
    Task {
        /// The name of the task.
        task: &'static str,
        /// The text of the panic.
        why: String,
    },
}
