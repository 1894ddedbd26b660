//! The errors of this crate. Each text says what to do.

use std::{fmt, io, time::Duration};

use gradwire_proto::{Failure, TypeError, WireError, auth::SecretError};
use gradwire_shm::{arena::ArenaError, segment::SegmentError};

/// Why a call of this crate failed.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum GradwireError {
    /// The launcher's variables are not set: this process was started by hand.
    #[error(
        "this process is not a rank of a job: {missing} is not set; start it with `gradwire run \
         -np 2 -- <program>`"
    )]
    NotLaunched {
        /// The first variable that is missing.
        missing: &'static str,
    },
    /// A variable or a setting has a value that can't be used.
    #[error("{name} is {given:?}: {reason}")]
    Setting {
        /// The variable, or the builder's setting.
        name: String,
        /// Its value.
        given: String,
        /// What is wrong, and what is allowed.
        reason: String,
    },
    /// Settings contradict each other; the text names them.
    #[error("{0}")]
    Settings(String),
    /// The secret can't be used; the text does not repeat it.
    #[error("GRADWIRE_SECRET: {0}")]
    Secret(#[from] SecretError),
    /// No daemon answers at its socket.
    #[error("no daemon (gradwired) answers at {socket}: {source}; is it running on this machine?")]
    Connect {
        /// The socket, `@name` for one without a file.
        socket: String,
        /// The error of the system.
        source: io::Error,
    },
    /// The daemon refused this process as a rank.
    #[error("the daemon of this node refused this process: {0}")]
    Refused(Failure),
    /// The daemon sent a message that is not allowed here. No retry will help.
    #[error("the daemon of this node broke the protocol: {0}")]
    Protocol(String),
    /// The operation, or the whole job, failed; all ranks receive the same cause (TELL).
    #[error(transparent)]
    Failed(#[from] Failure),
    /// A deadline passed first (WAIT). The operation itself may still complete.
    #[error("{what} did not happen within {after:?}")]
    Timeout {
        /// What was waited for.
        what: String,
        /// How long.
        after: Duration,
    },
    /// The call asks for something impossible; nothing was started.
    #[error("{0}")]
    Invalid(String),
    /// A name or a shape is not usable; nothing was started.
    #[error(transparent)]
    Type(#[from] TypeError),
    /// A request contradicts itself; nothing was started.
    #[error(transparent)]
    Request(#[from] WireError),
    /// There is no shared memory for a tensor.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The shared memory of the session itself can't be made.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// The system refused something that this crate needs, such as a thread.
    #[error("the system refused {what}: {source}")]
    System {
        /// What was asked for.
        what: &'static str,
        /// The error of the system.
        source: io::Error,
    },
    /// The process was forked: threads and socket of a session stay with the parent.
    #[error(
        "this session belongs to process {made_in}, but process {used_in} uses it: a forked child \
         has no session; make it after the fork, in the process that uses it"
    )]
    Forked {
        /// The process that made the session.
        made_in: u32,
        /// The process that called.
        used_in: u32,
    },
    /// The session was shut down before.
    #[error("this session was shut down")]
    Closed,
}

impl GradwireError {
    /// The failure in this error, if it has one, with its kind, rank, host and tensor.
    pub fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Failed(failure) | Self::Refused(failure) => Some(failure),
            _ => None,
        }
    }
}

impl fmt::Debug for GradwireError {
    /// The same text as [`fmt::Display`]: this is what a `main` that returns the error prints.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// What this crate's calls return.
pub(crate) type Result<T, E = GradwireError> = std::result::Result<T, E>;
