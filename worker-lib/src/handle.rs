//! An operation that runs while the program continues.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use gradwire_proto::TensorName;
use parking_lot::Mutex;

use crate::{
    error::{GradwireError, Result},
    gate::Bar,
    outcome::Outcome,
    session::Session,
    shared::Done,
    stuck::EndlessWait,
    waiters::On,
};

/// An operation in flight and its tensors. [`Handle::wait`] returns its result and the tensors. A
/// handle is also a future of the same result, for any executor: a task that awaits it is woken
/// when the operation ends.
///
/// ```no_run
/// # use gradwire_worker::{AllreduceOptions, GradwireError, Session, WaitError};
/// # async fn step(session: Session) -> Result<(), GradwireError> {
/// # use std::time::Duration;
/// let first = session.zeros::<f32>(&[1024])?;
/// let second = session.zeros::<f32>(&[1024])?;
/// let first = session.allreduce_async(first, AllreduceOptions::named("first"))?;
/// let second = session.allreduce_async(second, AllreduceOptions::named("second"))?;
/// let _average = first.await?;
/// match second.wait_timeout(Duration::from_secs(60)) {
///     Ok(average) => println!("{:?}", &average[..4]),
///     // The operation continues; its handle has the tensor.
///     Err(WaitError::Timeout { handle, .. }) => drop(handle.wait()?),
///     Err(error) => return Err(error.into()),
/// }
/// # Ok(())
/// # }
/// ```
///
/// Dropping a handle does not stop the operation, because other ranks depend on it. The memory
/// stays in use until the operation has ended.
#[must_use = "the tensor is in the handle: wait for it"]
pub struct Handle<R> {
    session: Session,
    name: TensorName,
    source: Source<R>,
}

/// Computes the result of an operation that has succeeded.
type Finish<R> = Box<dyn FnOnce(Done) -> Result<R> + Send>;

/// Where the result comes from.
enum Source<R> {
    /// One operation. `None` once the outcome was fetched; the lock is only for [`Sync`].
    Operation(u64, Mutex<Option<Finish<R>>>),
    /// Several operations, one after the other, in a separate thread.
    Task(Arc<Outcome<R>>),
}

/// Why [`Handle::wait_timeout`] has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WaitError<R> {
    /// The deadline passed. The operation continues, and this is its handle.
    #[error("{} did not complete within {after:?}", .handle.what())]
    Timeout {
        /// The handle, to wait again or to drop.
        handle: Handle<R>,
        /// How long the caller waited.
        after: Duration,
    },
    /// The operation failed.
    #[error(transparent)]
    Failed(GradwireError),
}

impl<R> From<WaitError<R>> for GradwireError {
    fn from(error: WaitError<R>) -> Self {
        match error {
            WaitError::Timeout { handle, after } => Self::Timeout { what: handle.what(), after },
            WaitError::Failed(error) => error,
        }
    }
}

/// An operation that could not be started, and its tensors.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct NotStarted<I> {
    /// The tensors, unchanged.
    pub tensor: I,
    /// Why it was not started.
    #[source]
    pub error: Box<GradwireError>,
}

/// The handle of an operation with the result `R`, or its tensors `I` if it was not started.
pub type Start<R, I> = Result<Handle<R>, NotStarted<I>>;

impl<I> fmt::Debug for NotStarted<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.error)
    }
}

impl<I> From<NotStarted<I>> for GradwireError {
    fn from(refused: NotStarted<I>) -> Self {
        *refused.error
    }
}

impl<R> Handle<R> {
    pub(crate) fn operation(
        session: Session,
        ticket: u64,
        name: TensorName,
        finish: impl FnOnce(Done) -> Result<R> + Send + 'static,
    ) -> Self {
        let source = Source::Operation(ticket, Mutex::new(Some(Box::new(finish))));
        Self { session, name, source }
    }

    pub(crate) fn task(session: Session, name: TensorName, outcome: Arc<Outcome<R>>) -> Self {
        Self { session, name, source: Source::Task(outcome) }
    }

    /// The operation's name.
    pub fn name(&self) -> &TensorName {
        &self.name
    }

    /// Whether it waits behind a [`Gate`](crate::Gate).
    pub fn is_held(&self) -> bool {
        self.session.gate().is_some_and(Bar::is_closed)
    }

    fn what(&self) -> String {
        let held = if self.is_held() { ", which is held behind a gate," } else { "" };
        format!("the operation on tensor '{}'{held}", self.name)
    }

    /// Waits until the operation has ended, and returns its result. If the job fails, returns the
    /// cause at once (TELL).
    ///
    /// # Errors
    /// [`GradwireError::Failed`] with what happened; then the tensor is lost.
    pub fn wait(self) -> Result<R> {
        let result = self.fetch(self.session.deadline());
        result.unwrap_or_else(|| {
            let membership = self.session.membership();
            Err(self.session.out_of_time(&membership, &self.what()))
        })
    }

    /// Like [`Handle::wait`], but waits for at most `within`.
    ///
    /// # Errors
    /// [`WaitError::Timeout`] with the handle, or [`WaitError::Failed`].
    pub fn wait_timeout(self, within: Duration) -> Result<R, WaitError<R>> {
        // If the deadline can't be represented, there is none.
        match self.fetch(Instant::now().checked_add(within)) {
            Some(Ok(result)) => Ok(result),
            Some(Err(error)) => Err(WaitError::Failed(error)),
            None => Err(WaitError::Timeout { handle: self, after: within }),
        }
    }

    /// Whether [`Handle::wait`] would return at once.
    pub fn is_finished(&self) -> bool {
        self.session.check_process().is_err()
            || match &self.source {
                Source::Operation(ticket, _) => self.session.shared().has_ended(*ticket),
                Source::Task(task) => task.has_ended(),
            }
    }

    /// Notes that the calling thread waits for this operation without a limit, although it calls
    /// [`Handle::wait_timeout`] again and again, until the result is dropped. So the job ends if
    /// no rank can ever go on.
    pub fn endless(&self) -> EndlessWait {
        let on = match &self.source {
            Source::Operation(ticket, _) => On::Ticket(*ticket),
            Source::Task(_) => On::Task(self.name.clone()),
        };
        EndlessWait::new(self.session.shared(), on)
    }

    /// The result; `None` if the deadline passed first.
    fn fetch(&self, deadline: Option<Instant>) -> Option<Result<R>> {
        if let Err(error) = self.session.check_process() {
            return Some(Err(error));
        }
        let shared = self.session.shared();
        let result = match &self.source {
            Source::Operation(ticket, finish) => {
                let outcome = shared.wait(*ticket, deadline)?;
                let finish = finish.lock().take();
                outcome.and_then(|done| finish.map_or(Err(GradwireError::Closed), |f| f(done)))
            }
            Source::Task(task) => {
                let _endless = deadline.is_none().then(|| self.endless());
                task.wait(deadline)?
            }
        };
        Some(shared.noted(result))
    }
}

impl<R> Future for Handle<R> {
    type Output = Result<R>;

    /// After the result was returned once, there is none any more.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let handle = self.get_mut();
        let fetch = |handle: &Self| {
            let result = handle.is_finished().then(|| handle.fetch(Some(Instant::now())));
            result.map(|result| result.unwrap_or(Err(GradwireError::Closed)))
        };
        if let Some(result) = fetch(handle) {
            return Poll::Ready(result);
        }
        let waiting = match &handle.source {
            Source::Operation(ticket, _) => {
                handle.session.shared().wake_later(*ticket, context.waker())
            }
            Source::Task(task) => {
                task.wake_later(context.waker());
                Ok(())
            }
        };
        if let Err(error) = waiting {
            return Poll::Ready(Err(error));
        }
        // It may have ended before the task was known.
        fetch(handle).map_or(Poll::Pending, Poll::Ready)
    }
}

impl<R> Drop for Handle<R> {
    fn drop(&mut self) {
        if let Source::Operation(ticket, _) = &self.source
            && self.session.check_process().is_ok()
        {
            self.session.shared().wake_no_more(*ticket);
        }
        // Also after the session has failed: the entry keeps the memory until the end.
        if let Source::Operation(ticket, finish) = &self.source
            && finish.lock().is_some()
            && self.session.check_process().is_ok()
        {
            self.session.shared().abandon(*ticket);
        }
    }
}

impl<R> fmt::Debug for Handle<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("Handle");
        text.field("name", &self.name);
        if let Source::Operation(ticket, _) = &self.source {
            text.field("ticket", ticket);
        }
        text.finish()
    }
}
