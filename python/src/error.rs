//! Errors for Python: the exceptions of `gradwire._errors`.

use gradwire_worker::{Failure, FailureKind, GradwireError, NotStarted};
use pyo3::{prelude::*, sync::PyOnceLock, types::PyDict};

/// An error with the attributes of its exception; cloned when it is raised again.
#[derive(Debug, Clone)]
pub(crate) struct PythonError {
    class: &'static str,
    text: String,
    kind: &'static str,
    failure: Option<Box<Failure>>,
    recoverable: bool,
}

/// The failure that an exception reports, for `Session.abort`.
#[pyclass(frozen, name = "Failure", module = "gradwire._native")]
pub(crate) struct PythonFailure(pub(crate) Failure);

#[pymethods]
impl PythonFailure {
    /// The rank at fault, if there is one.
    #[getter]
    fn rank(&self) -> Option<u32> {
        self.0.rank.map(|rank| rank.0)
    }

    /// What is known about it, with the names of the messages between Gradwire's programs.
    fn fields<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let Failure { kind, what, host, tensor, details, .. } = &self.0;
        let more = PyDict::new(py);
        more.set_item("hint", &details.hint)?;
        more.set_item("lines", &details.lines)?;
        more.set_item("site", &details.site)?;
        let all = PyDict::new(py);
        all.set_item("kind", kind.name())?;
        all.set_item("what", what)?;
        all.set_item("rank", self.rank())?;
        all.set_item("host", host)?;
        all.set_item("tensor", tensor)?;
        all.set_item("details", more)?;
        Ok(all)
    }
}

impl PythonError {
    /// A call with an invalid argument; nothing was started.
    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self::plain("InvalidRequest", "invalid", text.into())
    }

    fn plain(class: &'static str, kind: &'static str, text: String) -> Self {
        Self { class, text, kind, failure: None, recoverable: false }
    }

    fn failed(failure: &Failure) -> Self {
        let (class, kind) = match failure.kind {
            FailureKind::Disagreement => ("Disagreement", "disagreement"),
            FailureKind::Invalid => ("InvalidRequest", "invalid"),
            FailureKind::WorkerLost => ("PeerLost", "worker-lost"),
            FailureKind::NodeLost => ("PeerLost", "node-lost"),
            FailureKind::ConnectionLost => ("PeerLost", "connection-lost"),
            FailureKind::CoordinatorLost => ("PeerLost", "coordinator-lost"),
            FailureKind::RankLeft => ("PeerLost", "rank-left"),
            FailureKind::Protocol => ("GradwireError", "protocol"),
            FailureKind::Resource => ("OutOfResources", "resource"),
            FailureKind::Timeout => ("WaitTimeout", "timeout"),
            FailureKind::Cancelled => ("Cancelled", "cancelled"),
            _ => ("GradwireError", "internal"),
        };
        let text = failure.to_string();
        Self { class, text, kind, failure: Some(Box::new(failure.clone())), recoverable: false }
    }

    /// Its text.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// The exception to raise.
    pub(crate) fn raise(&self, py: Python<'_>) -> PyErr {
        match self.exception(py) {
            Ok(exception) => PyErr::from_value(exception),
            Err(error) => error,
        }
    }

    fn exception<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        static CLASSES: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
        let classes =
            CLASSES.get_or_try_init(py, || py.import("gradwire._errors").map(Bound::unbind))?;
        let facts = PyDict::new(py);
        facts.set_item("kind", self.kind)?;
        facts.set_item("recoverable", self.recoverable)?;
        if let Some(failure) = &self.failure {
            facts.set_item("rank", failure.rank.map(|rank| rank.0))?;
            facts.set_item("host", &failure.host)?;
            facts.set_item("tensor", &failure.tensor)?;
        }
        let exception = classes.bind(py).getattr(self.class)?.call((&self.text,), Some(&facts))?;
        if let Some(failure) = &self.failure {
            exception.setattr("_failure", PythonFailure(Failure::clone(failure)))?;
        }
        Ok(exception)
    }
}

impl From<GradwireError> for PythonError {
    fn from(error: GradwireError) -> Self {
        use GradwireError as E;
        let text = || error.to_string();
        match &error {
            E::Failed(failure) => Self::failed(failure),
            E::Recoverable(failure) => Self { recoverable: true, ..Self::failed(failure) },
            E::Refused(failure) => Self { text: text(), ..Self::failed(failure) },
            E::NotLaunched { .. } => Self::plain("NotLaunched", "not-launched", text()),
            E::Setting { .. }
            | E::Settings(_)
            | E::Secret(_)
            | E::Invalid(_)
            | E::Type(_)
            | E::Request(_) => Self::invalid(text()),
            E::Timeout { .. } => Self::plain("WaitTimeout", "timeout", text()),
            E::Forked { .. } => Self::plain("Forked", "forked", text()),
            E::Closed => Self::plain("NotInitialized", "closed", text()),
            E::Arena(_) | E::Segment(_) | E::System { .. } => {
                Self::plain("OutOfResources", "resource", text())
            }
            E::Connect { .. } => Self::plain("PeerLost", "node-lost", text()),
            _ => Self::plain("GradwireError", "internal", text()),
        }
    }
}

impl<I> From<NotStarted<I>> for PythonError {
    fn from(refused: NotStarted<I>) -> Self {
        GradwireError::from(refused).into()
    }
}

/// Converts results of the worker library.
pub(crate) trait Raise<T> {
    /// Returns the value, or raises the exception.
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T, E: Into<PythonError>> Raise<T> for Result<T, E> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| error.into().raise(py))
    }
}
