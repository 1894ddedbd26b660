//! Operations in flight, for Python.
//!
//! WAIT: a wait releases the GIL for slices of [`SLICE`] and checks for signals between them, so
//! that Ctrl-C interrupts it and other Python threads can run.

use std::{
    fmt,
    sync::{Mutex, PoisonError, TryLockError},
    time::{Duration, Instant},
};

use gradwire_worker::{EndlessWait, Gathered, GradwireError, ProcessSet, SharedBuffer, WaitError};
use pyo3::{IntoPyObjectExt, prelude::*, types::PyList};

use crate::{
    buffer::Buffer, detached::detached, error::PythonError, process_set, stuck::PatientThread,
};

/// The maximum time between two checks for signals.
pub(crate) const SLICE: Duration = Duration::from_millis(50);

/// How many slices of a wait without a limit pass before the first look whether the whole process
/// is stuck. After that, each slice ends with such a look.
const SLICES_BEFORE_LOOK: u32 = 5;

/// The result of an operation.
#[derive(Debug, Clone)]
pub(crate) enum Value {
    Nothing,
    Flag(bool),
    Number(u64),
    Buffers(Vec<SharedBuffer>),
    Gathered(Vec<(SharedBuffer, Vec<usize>)>),
    Set(ProcessSet),
}

impl Value {
    fn to_python(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        match self {
            Self::Nothing => Ok(py.None()),
            Self::Flag(flag) => flag.into_py_any(py),
            Self::Number(number) => number.into_py_any(py),
            Self::Buffers(all) => {
                PyList::new(py, all.iter().cloned().map(Buffer::from))?.into_py_any(py)
            }
            Self::Gathered(all) => {
                let all = all.iter().cloned().map(|(memory, rows)| (Buffer::from(memory), rows));
                PyList::new(py, all)?.into_py_any(py)
            }
            Self::Set(set) => process_set::ProcessSet::from(set.clone()).into_py_any(py),
        }
    }
}

/// Converts results of the worker library to values.
pub(crate) trait IntoValue: Send + 'static {
    fn into_value(self) -> Value;
}

impl IntoValue for () {
    fn into_value(self) -> Value {
        Value::Nothing
    }
}

impl IntoValue for bool {
    fn into_value(self) -> Value {
        Value::Flag(self)
    }
}

impl IntoValue for u32 {
    fn into_value(self) -> Value {
        Value::Number(u64::from(self))
    }
}

impl IntoValue for SharedBuffer {
    fn into_value(self) -> Value {
        Value::Buffers(vec![self.without_owner()])
    }
}

impl IntoValue for Vec<SharedBuffer> {
    fn into_value(self) -> Value {
        Value::Buffers(self.into_iter().map(SharedBuffer::without_owner).collect())
    }
}

impl IntoValue for Gathered<SharedBuffer> {
    fn into_value(self) -> Value {
        vec![self].into_value()
    }
}

impl IntoValue for Vec<Gathered<SharedBuffer>> {
    fn into_value(self) -> Value {
        Value::Gathered(self.into_iter().map(|one| (one.tensor, one.rows)).collect())
    }
}

impl IntoValue for Option<Gathered<SharedBuffer>> {
    fn into_value(self) -> Value {
        self.map_or(Value::Nothing, IntoValue::into_value)
    }
}

impl IntoValue for ProcessSet {
    fn into_value(self) -> Value {
        Value::Set(self)
    }
}

/// An input that is kept until the operation has completed, and the actual result.
impl<I: Send + 'static, R: IntoValue> IntoValue for (I, R) {
    fn into_value(self) -> Value {
        self.1.into_value()
    }
}

/// An operation that may still be running.
pub(crate) trait Running: Send {
    /// Whether it has completed.
    fn poll(&self) -> bool;
    /// Whether its tensors are still being written.
    fn is_held(&self) -> bool;
    /// Notes that the calling thread waits without a limit.
    fn endless(&self) -> EndlessWait;
    /// Its result, or itself if it has not completed within the time.
    fn wait(
        self: Box<Self>,
        within: Duration,
    ) -> Result<Result<Value, PythonError>, Box<dyn Running>>;
}

impl<P: IntoValue> Running for gradwire_worker::Handle<P> {
    fn poll(&self) -> bool {
        self.is_finished()
    }

    fn is_held(&self) -> bool {
        Self::is_held(self)
    }

    fn endless(&self) -> EndlessWait {
        Self::endless(self)
    }

    fn wait(
        self: Box<Self>,
        within: Duration,
    ) -> Result<Result<Value, PythonError>, Box<dyn Running>> {
        match (*self).wait_timeout(within) {
            Ok(payload) => Ok(Ok(payload.into_value())),
            Err(WaitError::Timeout { handle, .. }) => Err(Box::new(handle)),
            Err(error) => Ok(Err(GradwireError::from(error).into())),
        }
    }
}

enum HandleState {
    Running(Box<dyn Running>),
    Ended(Result<Value, PythonError>),
    /// While a thread that holds the lock waits.
    Taken,
}

/// An operation in flight.
#[pyclass(frozen, module = "gradwire._native")]
pub(crate) struct Handle {
    name: String,
    state: Mutex<HandleState>,
}

impl Handle {
    pub(crate) fn new(name: impl Into<String>, running: impl Running + 'static) -> Self {
        Self { name: name.into(), state: Mutex::new(HandleState::Running(Box::new(running))) }
    }

    /// Takes the operation out, if it is in flight.
    pub(crate) fn take(&self) -> Option<Box<dyn Running>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *state, HandleState::Taken) {
            HandleState::Running(running) => Some(running),
            ended => {
                *state = ended;
                None
            }
        }
    }

    /// Waits for at most this long; returns `None` if the operation has not completed.
    fn wait_slice(&self, within: Duration) -> Option<Result<Value, PythonError>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = match std::mem::replace(&mut *state, HandleState::Taken) {
            HandleState::Running(running) => match running.wait(within) {
                Ok(outcome) => outcome,
                Err(running) => {
                    *state = HandleState::Running(running);
                    return None;
                }
            },
            HandleState::Ended(outcome) => outcome,
            HandleState::Taken => Err(GradwireError::Closed.into()),
        };
        *state = HandleState::Ended(outcome.clone());
        Some(outcome)
    }

    /// Notes that the calling thread waits without a limit; `None` if the operation has ended.
    fn endless(&self) -> Option<EndlessWait> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match &*state {
            HandleState::Running(running) => Some(running.endless()),
            HandleState::Ended(_) | HandleState::Taken => None,
        }
    }

    /// Describes the operation for a timeout error.
    fn what(&self) -> String {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let held = matches!(&*state, HandleState::Running(running) if running.is_held());
        let why = if held { ", whose tensors are still being computed or copied," } else { "" };
        format!("the operation on tensor '{}'{why}", self.name)
    }
}

#[pymethods]
impl Handle {
    /// The operation's name.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether `wait` would return or raise immediately.
    ///
    /// Returns:
    ///     True if the operation has completed.
    fn poll(&self, py: Python<'_>) -> bool {
        detached(py, || match self.state.try_lock() {
            Ok(state) => match &*state {
                HandleState::Running(running) => running.poll(),
                HandleState::Ended(_) | HandleState::Taken => true,
            },
            // Another thread is waiting for it.
            Err(TryLockError::WouldBlock) => false,
            Err(TryLockError::Poisoned(_)) => true,
        })
    }

    /// Waits for the operation to complete. Ctrl-C interrupts the wait.
    ///
    /// Args:
    ///     timeout: The maximum time to wait, in seconds. None waits forever.
    ///     patient: The wait counts as one without a limit, because the program can't go on after
    ///         `timeout`, or waits again. So the job ends at once if no rank can ever go on.
    ///
    /// Returns:
    ///     A list of buffers, a list of pairs of a buffer and the number of rows from each member,
    ///     a number, a process set, or None, depending on the operation. Further calls return the
    ///     same result.
    ///
    /// Raises:
    ///     WaitTimeout: The operation did not complete within `timeout`. It continues.
    ///     GradwireError: The operation failed.
    #[pyo3(signature = (timeout=None, *, patient=false))]
    pub(crate) fn wait(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        patient: bool,
    ) -> PyResult<Py<PyAny>> {
        let limit = match timeout {
            None => None,
            Some(seconds) => Some(Duration::try_from_secs_f64(seconds).map_err(|error| {
                PythonError::invalid(format!("invalid timeout={seconds}: {error}")).raise(py)
            })?),
        };
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let is_patient = patient || limit.is_none();
        let (mut slices, mut patient) = (0u32, None);
        loop {
            let left = deadline.map(|end| end.saturating_duration_since(Instant::now()));
            let within = left.map_or(SLICE, |left| left.min(SLICE));
            if let Some(outcome) = detached(py, || self.wait_slice(within)) {
                return match outcome {
                    Ok(value) => value.to_python(py),
                    Err(reported) => Err(reported.raise(py)),
                };
            }
            // A signal handler may do anything, so this thread does not wait meanwhile.
            drop(patient.take());
            py.check_signals()?;
            slices = slices.saturating_add(1);
            if is_patient {
                let endless = detached(py, || self.endless());
                patient = endless.map(|wait| PatientThread::new(py, wait)).transpose()?;
            }
            if slices >= SLICES_BEFORE_LOOK {
                patient.as_ref().map_or(Ok(()), |thread| thread.look(py))?;
            }
            if let (Some(after), true) = (limit, left.is_some_and(|left| left <= SLICE)) {
                let what = detached(py, || self.what());
                return Err(PythonError::from(GradwireError::Timeout { what, after }).raise(py));
            }
        }
    }

    fn __repr__(&self) -> String {
        format!("Handle({})", self.name)
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.__repr__())
    }
}
