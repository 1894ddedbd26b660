//! From one epoch of an elastic job to the next, for Python.

use gradwire_worker::{Change, Rejoined};
use pyo3::prelude::*;

use crate::{detached::detached, error::Raise, handle::Handle, interruptible, session::Session};

#[pymethods]
impl Session {
    /// Whether the job is elastic: it goes on after a loss, and its size may change.
    #[getter]
    fn elastic(&self) -> bool {
        self.inner.is_elastic()
    }

    /// The epoch: the number of this formation of the world, from 1.
    #[getter]
    fn epoch(&self) -> u64 {
        self.inner.epoch()
    }

    /// Where ranks can meet in this epoch: an address of rank 0's host, and a port that was free
    /// there when the epoch began. None if the job is not elastic.
    #[getter]
    fn meeting_point(&self) -> Option<(String, u16)> {
        let point = self.inner.meeting_point()?;
        Some((point.ip().to_string(), point.port()))
    }

    /// Whether SIGTERM makes this rank leave an elastic job.
    #[getter]
    fn drains_on_term(&self) -> bool {
        self.inner.drains_on_term()
    }

    /// Tells the launcher, once, that this process was asked to leave the job.
    ///
    /// Returns:
    ///     False if that can't be: the job is not elastic or has ended, or standard error is not
    ///     the pipe that the launcher made.
    fn ask_to_leave(&self) -> bool {
        self.inner.ask_to_leave()
    }

    /// Continues in the next epoch of an elastic job: after a recoverable error, or on all
    /// ranks for a change of the membership.
    ///
    /// Waits until an epoch has formed that includes this process. Memory and process sets stay
    /// valid. Meanwhile no other thread may write to memory that is shared with the daemon.
    ///
    /// Returns:
    ///     The number of the epoch; whether some rank may lack the state of the others, because it
    ///     came later; and if the end of the last epoch has interrupted a vote, its result, the
    ///     same on all ranks, otherwise None.
    ///
    /// Raises:
    ///     InvalidRequest: The job is not elastic.
    ///     WaitTimeout: No such epoch has formed within `elastic.timeout_ms`.
    ///     GradwireError: The last epoch ended with an error that is not recoverable, or the daemon
    ///         refuses this process.
    fn rejoin(&self, py: Python<'_>) -> PyResult<(u64, bool, Option<bool>)> {
        let session = self.here(py);
        let Rejoined { epoch, newcomers, vote, .. } =
            interruptible::run(py, "gw-rejoin", move |cancel| {
                // SAFETY: the caller of this method ensures it, as its documentation says: the
                // package calls it from the training loop, while its other threads wait.
                unsafe { session.rejoin_unless(&cancel) }
            })?;
        Ok((epoch, newcomers, vote))
    }

    /// Votes: true only if every rank votes true. All ranks must call it.
    ///
    /// All ranks get the same result, even if a rank is lost during the vote: if this raises a
    /// recoverable error, `rejoin` returns the result.
    ///
    /// Args:
    ///     yes: The vote of this rank.
    ///
    /// Returns:
    ///     The result.
    ///
    /// Raises:
    ///     InvalidRequest: Another vote of this rank has not ended.
    ///     GradwireError: The vote failed.
    #[pyo3(signature = (yes) -> "bool")]
    fn vote(&self, py: Python<'_>, yes: bool) -> PyResult<Py<PyAny>> {
        let session = self.here(py);
        let vote = detached(py, || session.vote_async(yes)).or_raise(py)?;
        Handle::new("vote", vote).wait(py, None, false)
    }

    /// Returns what the launcher wants to change.
    ///
    /// Returns:
    ///     Whether processes wait for the next epoch, and whether some processes or hosts should
    ///     leave. None if there is nothing to change.
    fn pending_change(&self) -> Option<(bool, bool)> {
        self.inner.pending_change().map(|Change { added, removed }| (added, removed))
    }
}
