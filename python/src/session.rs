//! This process as a rank of a job.

use std::sync::Mutex;

use gradwire_worker::CheckGradients;
use pyo3::{
    prelude::*,
    types::{IntoPyDict, PyDict},
};

use crate::{
    adoption::{Adoption, Preparation},
    at_exit,
    buffer::{self, Buffer},
    call_site,
    detached::detached,
    error::{PythonFailure, Raise},
    gate::Gate,
    handle::Handle,
    interruptible,
    pause::Pause,
    process_set::ProcessSet,
};

/// This process as a rank of a job.
///
/// The methods that start an operation raise `InvalidRequest` if an argument is invalid, and
/// `GradwireError` if the session has ended or memory is exhausted. Nothing is started then.
#[pyclass(frozen, module = "gradwire._native")]
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) inner: gradwire_worker::Session,
}

#[pymethods]
impl Session {
    /// Attaches to this node's daemon, as the rank described by the launcher's variables.
    ///
    /// Returns once every node has joined; other ranks may still be missing.
    ///
    /// Returns:
    ///     The session.
    ///
    /// Raises:
    ///     NotLaunched: The variables are missing.
    ///     InvalidRequest: A setting is invalid.
    ///     PeerLost: The daemon or a node does not respond.
    #[staticmethod]
    fn attach(py: Python<'_>) -> PyResult<Self> {
        // Python programs order their threads: autograd's threads run while another one waits for
        // them.
        let builder = gradwire_worker::Session::builder_from_env().or_raise(py)?;
        let builder = builder.unnamed_from_any_thread().called_at(call_site::here(py));
        // If nobody waits any more, the session is dropped and leaves the job.
        let inner = interruptible::run(py, "gw-attach", |cancel| builder.cancel(cancel).attach())?;
        Ok(Self { inner })
    }

    /// Returns this session for operations that wait behind a gate. Each is checked immediately,
    /// and gets its name and handle.
    ///
    /// Args:
    ///     gate: The gate, which starts them when it opens.
    ///
    /// Returns:
    ///     A session for the same rank.
    fn behind(&self, gate: PyRef<'_, Gate>) -> Self {
        Self { inner: self.inner.behind(&gate.inner) }
    }

    /// Leaves the job cleanly.
    ///
    /// Raises:
    ///     GradwireError: The job had already failed.
    fn shutdown(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || self.inner.shutdown()).or_raise(py)
    }

    /// Leaves the job when the process ends, cleanly if its exit code is 0.
    ///
    /// Then it waits for its child processes that serve the job. If that can't be registered, it
    /// leaves the job now.
    ///
    /// Args:
    ///     services: The ids of the child processes.
    ///     last: Operations for which it waits a while before it leaves cleanly. Their handles
    ///         can't be used any more.
    ///
    /// Raises:
    ///     GradwireError: The job had already failed.
    fn leave_at_exit(
        &self,
        py: Python<'_>,
        services: Vec<i32>,
        last: Vec<PyRef<'_, Handle>>,
    ) -> PyResult<()> {
        let last = last.iter().filter_map(|handle| handle.take()).collect();
        if at_exit::leave(self.inner.clone(), services, last) { Ok(()) } else { self.shutdown(py) }
    }

    /// Records a training step in the metrics.
    fn mark_step(&self) {
        self.inner.mark_step();
    }

    /// Begins a time in which the program makes no training steps. A job that stands still
    /// meanwhile is not reported.
    ///
    /// Args:
    ///     what: What the program does, such as `evaluation`.
    ///
    /// Returns:
    ///     The pause, which lasts until its `end` is called.
    fn paused(&self, py: Python<'_>, what: &str) -> Pause {
        Pause(Mutex::new(Some(detached(py, || self.inner.paused(what)))))
    }

    /// Aborts the job: all other ranks receive the reason.
    ///
    /// Args:
    ///     reason: The message that they receive.
    ///     cause: The failure because of which this rank ends, or None. If another rank is at
    ///         fault, or the ranks disagree, they receive this failure instead.
    #[pyo3(signature = (reason, cause = None))]
    fn abort(&self, py: Python<'_>, reason: &str, cause: Option<&PythonFailure>) {
        detached(py, || self.inner.abort_after(reason, cause.map(|cause| &cause.0)));
    }

    /// This rank's number in the job.
    #[getter]
    fn rank(&self) -> u32 {
        self.inner.rank()
    }

    /// The number of ranks of the job.
    #[getter]
    fn size(&self) -> u32 {
        self.inner.size()
    }

    /// This rank's number on its node.
    #[getter]
    fn local_rank(&self) -> u32 {
        self.inner.local_rank()
    }

    /// The number of ranks on this node.
    #[getter]
    fn local_size(&self) -> u32 {
        self.inner.local_size()
    }

    /// This node's number among the nodes that have a rank with this local rank.
    #[getter]
    fn cross_rank(&self) -> u32 {
        self.inner.cross_rank()
    }

    /// The number of nodes that have a rank with this local rank.
    #[getter]
    fn cross_size(&self) -> u32 {
        self.inner.cross_size()
    }

    /// The name of this rank's node.
    #[getter]
    fn host(&self) -> String {
        self.inner.host()
    }

    /// The id of the job.
    #[getter]
    fn job(&self) -> &str {
        self.inner.job().as_str()
    }

    /// The coordinator's address, `ip:port`.
    #[getter]
    fn coordinator(&self) -> String {
        self.inner.coordinator().to_string()
    }

    /// The nodes in the order of their ranks: host, first rank, number of ranks.
    #[getter]
    fn nodes(&self) -> Vec<(String, u32, u32)> {
        let nodes = self.inner.nodes().into_iter();
        nodes.map(|node| (node.host, node.first_rank, node.slots)).collect()
    }

    /// Returns counters of this rank's operations.
    ///
    /// Returns:
    ///     `operations` and `bytes`: submitted; `copied_bytes`: copied from ordinary memory;
    ///     `in_flight`: operations that have not completed; `adopted_bytes`: memory of the program
    ///     that is now shared.
    #[pyo3(signature = () -> "dict[str, int]")]
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.inner.stats();
        [
            ("operations", stats.operations),
            ("in_flight", stats.in_flight as u64),
            ("bytes", stats.bytes),
            ("copied_bytes", stats.copied_bytes),
            ("adopted_bytes", stats.arena.adopted_bytes as u64),
        ]
        .into_py_dict(py)
    }

    /// Allocates uninitialized memory that is shared with the daemon.
    ///
    /// Args:
    ///     dtype: The name of the element type.
    ///     shape: The dimensions, outermost first.
    ///
    /// Returns:
    ///     The memory.
    ///
    /// Raises:
    ///     InvalidRequest: The element type is unknown, or the shape is too large.
    ///     OutOfResources: Not enough shared memory is available.
    fn buffer(&self, py: Python<'_>, dtype: &str, shape: Vec<usize>) -> PyResult<Buffer> {
        let dtype = buffer::dtype(dtype).or_raise(py)?;
        let made = detached(py, || self.inner.buffer_unfilled(dtype, &shape));
        Ok(made.or_raise(py)?.into_shared().into())
    }

    /// Makes shared memory to which memory of the program can move.
    ///
    /// Waits until the daemon has it.
    ///
    /// Args:
    ///     nbytes: The size in bytes.
    ///
    /// Returns:
    ///     The shared memory. It is given back if nothing moves there.
    ///
    /// Raises:
    ///     OutOfResources: Not enough memory is available, here or to the daemon.
    fn adoption(&self, py: Python<'_>, nbytes: usize) -> PyResult<Adoption> {
        Ok(detached(py, || self.inner.adoption(nbytes)).or_raise(py)?.into())
    }

    /// Makes shared memory to which memory of the program can move, in the background.
    ///
    /// Args:
    ///     nbytes: The size in bytes.
    ///
    /// Returns:
    ///     What waits for the shared memory.
    ///
    /// Raises:
    ///     OutOfResources: Too much memory of the program has moved already.
    fn prepare_adoption(&self, py: Python<'_>, nbytes: usize) -> PyResult<Preparation> {
        Ok(self.inner.prepare_adoption(nbytes).or_raise(py)?.into())
    }

    /// Returns whether memory belongs to this session.
    ///
    /// Args:
    ///     buffer: The memory.
    ///
    /// Returns:
    ///     Whether operations of this session accept it.
    fn owns(&self, buffer: PyRef<'_, Buffer>) -> bool {
        self.inner.owns(&buffer.memory)
    }

    /// The maximum size of a tensor whose memory may be adopted, in bytes; 0 if none may.
    #[getter]
    fn adopt_max_bytes(&self) -> usize {
        self.inner.adopt_max_bytes().unwrap_or(0)
    }

    /// The maximum size of an object that this rank sends, pickled, in bytes.
    #[getter]
    fn max_object_bytes(&self) -> usize {
        self.inner.max_object_bytes()
    }

    /// When an optimizer compares its gradients by value: 'start', 'always' or 'never'.
    #[getter]
    fn check_gradients(&self) -> &'static str {
        match self.inner.check_gradients() {
            CheckGradients::Start => "start",
            CheckGradients::Always => "always",
            CheckGradients::Never => "never",
        }
    }

    /// The name of the signal that asks all ranks to stop, besides SIGTERM.
    #[getter]
    fn stop_signal(&self) -> &'static str {
        self.inner.stop_signal().name()
    }

    /// Whether the memory of another tensor may be adopted now.
    #[getter]
    fn may_adopt(&self) -> bool {
        self.inner.may_adopt()
    }

    /// Returns the process set of all ranks.
    ///
    /// Returns:
    ///     The process set with id 0.
    fn global_process_set(&self) -> ProcessSet {
        self.inner.global_process_set().into()
    }

    /// Starts the registration of a process set. All ranks of the job call it with the same ranks.
    ///
    /// Args:
    ///     ranks: The ranks of the members.
    ///
    /// Returns:
    ///     A handle whose result is the process set.
    fn add_process_set(&self, py: Python<'_>, ranks: Vec<u32>) -> PyResult<Handle> {
        let session = self.here(py);
        let handle = detached(py, || session.add_process_set_async(&ranks)).or_raise(py)?;
        Ok(Handle::new("add_process_set", handle))
    }

    /// Starts the removal of a process set. All ranks of the job call it.
    ///
    /// Args:
    ///     set: The process set.
    ///     give_up: Whether operations that only some members have submitted fail. Otherwise, the
    ///         set is not removed while there are any.
    ///
    /// Returns:
    ///     A handle without a result.
    #[pyo3(signature = (set, give_up = false))]
    fn remove_process_set(
        &self,
        py: Python<'_>,
        set: &ProcessSet,
        give_up: bool,
    ) -> PyResult<Handle> {
        let (set, session) = (set.inner.clone(), self.here(py));
        let removed = detached(py, || {
            if give_up {
                session.give_up_process_set_async(set)
            } else {
                session.remove_process_set_async(set)
            }
        });
        Ok(Handle::new("remove_process_set", removed.or_raise(py)?))
    }
}
