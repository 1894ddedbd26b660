//! An operation that runs while the program goes on.

use std::{
    fmt,
    time::{Duration, Instant},
};

use gradwire_proto::TensorName;

use crate::{
    error::{GradwireError, Result},
    session::Session,
};

/// An operation in flight, and its tensor. `wait` gives the tensor back.
///
/// A handle that is dropped does not stop the operation: other ranks count on it. Its memory stays
/// taken until it has ended.
#[must_use = "the tensor is in the handle: wait for it"]
pub struct Handle<P> {
    session: Session,
    ticket: u64,
    name: TensorName,
    /// `None` once the outcome was fetched.
    payload: Option<P>,
}

/// Why [`Handle::wait_deadline`] has no tensor to give.
#[derive(Debug, thiserror::Error)]
pub enum WaitError<P> {
    /// The deadline came first; the operation goes on, and here is its handle.
    #[error("{} did not complete within {after:?}", .handle.what())]
    Timeout {
        /// To wait again, or to drop.
        handle: Handle<P>,
        /// How long was waited.
        after: Duration,
    },
    /// The operation failed.
    #[error(transparent)]
    Failed(GradwireError),
}

impl<P> From<WaitError<P>> for GradwireError {
    fn from(error: WaitError<P>) -> Self {
        match error {
            WaitError::Timeout { handle, after } => Self::Timeout { what: handle.what(), after },
            WaitError::Failed(error) => error,
        }
    }
}

impl<P> Handle<P> {
    pub(crate) fn new(session: Session, ticket: u64, name: TensorName, payload: P) -> Self {
        Self { session, ticket, name, payload: Some(payload) }
    }

    /// The operation's name.
    pub fn name(&self) -> &TensorName {
        &self.name
    }

    fn what(&self) -> String {
        format!("the operation on tensor '{}'", self.name)
    }

    /// Waits until the operation has ended, and gives the tensor back. Returns at once with the
    /// cause when the job fails (TELL).
    ///
    /// # Errors
    /// [`GradwireError::Failed`] with what happened; the tensor is gone then.
    pub fn wait(mut self) -> Result<P> {
        self.fetch(None).unwrap_or(Err(GradwireError::Closed))
    }

    /// As [`Handle::wait`], but not longer than `within`.
    ///
    /// # Errors
    /// [`WaitError::Timeout`] with the handle, or [`WaitError::Failed`].
    pub fn wait_deadline(mut self, within: Duration) -> Result<P, WaitError<P>> {
        // A deadline past the end of time is none.
        match self.fetch(Instant::now().checked_add(within)) {
            Some(Ok(payload)) => Ok(payload),
            Some(Err(error)) => Err(WaitError::Failed(error)),
            None => Err(WaitError::Timeout { handle: self, after: within }),
        }
    }

    /// Whether [`Handle::wait`] would return at once.
    pub fn poll(&self) -> bool {
        self.session.check_process().is_err() || self.session.shared().has_ended(self.ticket)
    }

    /// `None` when the deadline came first.
    fn fetch(&mut self, deadline: Option<Instant>) -> Option<Result<P>> {
        if let Err(error) = self.session.check_process() {
            return Some(Err(error));
        }
        let shared = self.session.shared();
        let outcome = shared.noted(shared.wait(self.ticket, deadline)?);
        Some(outcome.and_then(|()| self.payload.take().ok_or(GradwireError::Closed)))
    }
}

impl<P> Drop for Handle<P> {
    fn drop(&mut self) {
        // Also after a failure of the whole session: the entry keeps the memory until the end.
        if self.payload.is_some() && self.session.check_process().is_ok() {
            self.session.shared().abandon(self.ticket);
        }
    }
}

impl<P> fmt::Debug for Handle<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("name", &self.name).field("ticket", &self.ticket).finish()
    }
}
