//! The errors of this crate. Each text says what to do.

use std::{fmt, io, time::Duration};

use gradwire_proto::{Failure, TypeError, WireError, auth::SecretError};
use gradwire_shm::{arena::ArenaError, segment::SegmentError};

/// Why a call of this crate failed.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum GradwireError {
    /// The launcher's variables are not set: no launcher started this process.
    #[error(
        "this process is not a rank of a job: {missing} is not set; start it with `gradwire run \
         -np 2 -- <program>`"
    )]
    NotLaunched {
        /// The first missing variable.
        missing: &'static str,
    },
    /// A variable or a setting has an invalid value.
    #[error("{}: {reason}", shown(name, given))]
    Setting {
        /// The variable, or the builder's setting.
        name: String,
        /// Its value.
        given: String,
        /// Why it is invalid, and what is allowed.
        reason: String,
    },
    /// Settings contradict each other; the text names them.
    #[error("{0}")]
    Settings(String),
    /// The secret is invalid; the text does not contain it.
    #[error("GRADWIRE_SECRET: {0}")]
    Secret(#[from] SecretError),
    /// No daemon answers at its socket.
    #[error("no daemon (gradwired) answers at {socket}: {source}; {}", remedy(source))]
    Connect {
        /// The socket: a path, or `@name` in the abstract namespace.
        socket: String,
        /// The error of the system.
        source: io::Error,
    },
    /// The daemon refused this process as a rank.
    #[error("the daemon of this node refused this process: {0}")]
    Refused(Failure),
    /// The daemon sent an invalid message. Retrying does not help.
    #[error("the daemon of this node violated the protocol: {0}")]
    Protocol(String),
    /// The operation, or the whole job, failed; all ranks receive the same cause (TELL).
    #[error(transparent)]
    Failed(#[from] Failure),
    /// A process, a host or a connection of an elastic job is lost, and the job can go on without
    /// it: [`Session::rejoin`](crate::Session::rejoin) continues in the next epoch. All ranks
    /// receive the same cause (TELL).
    #[error("{0}")]
    Recoverable(Failure),
    /// A deadline passed (WAIT). The operation itself may still complete.
    #[error("{what} did not happen within {after:?}")]
    Timeout {
        /// What the caller waited for.
        what: String,
        /// How long.
        after: Duration,
    },
    /// The call is invalid; nothing was started.
    #[error("{0}")]
    Invalid(String),
    /// A name or a shape is invalid; nothing was started.
    #[error(transparent)]
    Type(#[from] TypeError),
    /// A request is invalid; nothing was started.
    #[error(transparent)]
    Request(#[from] WireError),
    /// Shared memory for a tensor can't be allocated.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The session's own shared memory can't be created.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// The system refused something that this crate needs, such as a thread.
    #[error("the system refused {what}: {source}")]
    System {
        /// What was refused.
        what: &'static str,
        /// The error of the system.
        source: io::Error,
    },
    /// The process was forked: the threads and the socket of a session stay with the parent.
    #[error(
        "this session belongs to process {made_in}, but process {used_in} uses it: a forked child \
         has no session; create it after the fork, in the process that uses it"
    )]
    Forked {
        /// The process that created the session.
        made_in: u32,
        /// The process that made the call.
        used_in: u32,
    },
    /// The session was shut down.
    #[error("this session was shut down")]
    Closed,
}

/// What to do if no connection to the daemon can be made.
fn remedy(error: &io::Error) -> &'static str {
    match rustix::io::Errno::from_io_error(error) {
        Some(rustix::io::Errno::MFILE) => "raise the limit of open files (ulimit -n)",
        _ => "is it running on this machine?",
    }
}

impl GradwireError {
    /// The failure in this error, if any.
    pub fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Failed(failure) | Self::Refused(failure) | Self::Recoverable(failure) => {
                Some(failure)
            }
            _ => None,
        }
    }

    /// Whether the job is elastic and goes on with the ranks that are left: the program may call
    /// [`Session::rejoin`](crate::Session::rejoin).
    pub fn is_recoverable(&self) -> bool {
        matches!(self, Self::Recoverable(_))
    }
}

impl fmt::Debug for GradwireError {
    /// The same text as [`fmt::Display`], because it is printed if `main` returns the error.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// The result of this crate's calls.
pub(crate) type Result<T, E = GradwireError> = std::result::Result<T, E>;
/// A variable with its value, which may be empty or not set at all.
fn shown(name: &str, given: &str) -> String {
    if given.is_empty() { name.to_owned() } else { format!("{name} is {given:?}") }
}
