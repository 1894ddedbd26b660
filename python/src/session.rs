//! Being a rank of a job.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc,
    },
    thread,
};

use gradwire_worker::GradwireError;
use pyo3::{prelude::*, types::PyDict};

use crate::{
    at_exit,
    buffer::{self, Buffer},
    error::{Raise, Told},
    handle::{Handle, SLICE},
};

/// A group of ranks, as the job knows it.
#[pyclass(frozen, eq, module = "gradwire._native")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProcessSet {
    pub(crate) inner: gradwire_worker::ProcessSet,
}

impl From<gradwire_worker::ProcessSet> for ProcessSet {
    fn from(inner: gradwire_worker::ProcessSet) -> Self {
        Self { inner }
    }
}

#[pymethods]
impl ProcessSet {
    /// Its number; 0 for all ranks.
    #[getter]
    fn id(&self) -> u32 {
        self.inner.id()
    }

    /// Its members, ascending.
    #[getter]
    fn ranks(&self) -> Vec<u32> {
        self.inner.ranks().to_vec()
    }

    /// This rank's place among the members; None if it is not one.
    #[getter]
    fn position(&self) -> Option<usize> {
        self.inner.position()
    }

    fn __repr__(&self) -> String {
        self.inner.to_string()
    }
}

/// This process as a rank of a job.
#[pyclass(frozen, module = "gradwire._native")]
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) inner: gradwire_worker::Session,
}

type Attached = Result<gradwire_worker::Session, GradwireError>;

/// Attaches on a thread of its own, so that signals are heard meanwhile.
fn start_attach(cancel: Arc<AtomicBool>) -> Result<mpsc::Receiver<Attached>, Told> {
    let builder = gradwire_worker::Session::builder_from_env()?;
    let (sender, receiver) = mpsc::sync_channel(1);
    let work = move || {
        // Dropped unheard, a session that came too late leaves the job and says so.
        let _ = sender.send(builder.cancel(cancel).attach());
    };
    let thread = thread::Builder::new().name("gw-attach".to_owned()).spawn(work);
    thread.map_err(|source| GradwireError::System { what: "a thread", source })?;
    Ok(receiver)
}

#[pymethods]
impl Session {
    /// Attaches to this node's daemon as the rank that the launcher's variables say, and returns
    /// once every node is there; other ranks may still be on their way.
    #[staticmethod]
    fn attach(py: Python<'_>) -> PyResult<Self> {
        let cancel = Arc::new(AtomicBool::new(false));
        let attached = start_attach(cancel.clone()).or_raise(py)?;
        let attached = std::sync::Mutex::new(attached);
        let slice = || {
            let attached = attached.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            attached.recv_timeout(SLICE)
        };
        loop {
            match py.detach(slice) {
                Ok(session) => return Ok(Self { inner: session.or_raise(py)? }),
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    py.check_signals().inspect_err(|_| cancel.store(true, Relaxed))?;
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(Told::from(GradwireError::Closed).raise(py));
                }
            }
        }
    }

    /// Leaves the job in good order.
    fn shutdown(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.inner.shutdown()).or_raise(py)
    }

    /// Leaves the job when the process ends, in good order if its exit code is 0, and then waits
    /// for those of its children that serve the job. Leaves now where that can't be arranged.
    fn leave_at_exit(&self, py: Python<'_>, services: Vec<i32>) -> PyResult<()> {
        if at_exit::leave(self.inner.clone(), services) { Ok(()) } else { self.shutdown(py) }
    }

    /// Gives up: all other ranks are told the reason.
    fn abort(&self, py: Python<'_>, reason: &str) {
        py.detach(|| self.inner.abort(reason));
    }

    #[getter]
    fn rank(&self) -> u32 {
        self.inner.rank()
    }

    #[getter]
    fn size(&self) -> u32 {
        self.inner.size()
    }

    #[getter]
    fn local_rank(&self) -> u32 {
        self.inner.local_rank()
    }

    #[getter]
    fn local_size(&self) -> u32 {
        self.inner.local_size()
    }

    #[getter]
    fn cross_rank(&self) -> u32 {
        self.inner.cross_rank()
    }

    #[getter]
    fn cross_size(&self) -> u32 {
        self.inner.cross_size()
    }

    /// The name of this rank's node.
    #[getter]
    fn host(&self) -> &str {
        self.inner.host()
    }

    /// The job's id.
    #[getter]
    fn job(&self) -> &str {
        self.inner.job().as_str()
    }

    /// The nodes in the order of their ranks: `(host, first rank, number of ranks)`.
    #[getter]
    fn nodes(&self) -> Vec<(String, u32, u32)> {
        let nodes = self.inner.nodes().iter();
        nodes.map(|node| (node.host.clone(), node.first_rank, node.slots)).collect()
    }

    /// What was done so far: counts of operations and bytes, and the shared memory in use.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.inner.stats();
        let all = PyDict::new(py);
        all.set_item("operations", stats.operations)?;
        all.set_item("in_flight", stats.in_flight)?;
        all.set_item("bytes", stats.bytes)?;
        Ok(all)
    }

    /// Memory that the daemon sees, too. Its contents are whatever they are.
    fn buffer(&self, py: Python<'_>, dtype: &str, shape: Vec<u64>) -> PyResult<Buffer> {
        let dtype = buffer::dtype(dtype).or_raise(py)?;
        let shape = buffer::shape(&shape).or_raise(py)?;
        let made = py.detach(|| self.inner.buffer_unfilled(dtype, shape));
        Ok(made.or_raise(py)?.into_shared().into())
    }

    /// The set of all ranks.
    fn global_process_set(&self) -> ProcessSet {
        self.inner.global_process_set().into()
    }

    /// Makes a process set; all ranks of the job call it with the same ranks.
    fn add_process_set(&self, py: Python<'_>, ranks: Vec<u32>) -> PyResult<Handle> {
        let handle = py.detach(|| self.inner.add_process_set_async(&ranks)).or_raise(py)?;
        Ok(Handle::new("add_process_set", handle))
    }

    /// Removes a process set; all ranks of the job call it. With `give_up` what only some of its ranks have submitted
    /// fails there; without it the set is not removed then.
    #[pyo3(signature = (set, give_up = false))]
    fn remove_process_set(
        &self,
        py: Python<'_>,
        set: &ProcessSet,
        give_up: bool,
    ) -> PyResult<Handle> {
        let set = set.inner.clone();
        let removed = py.detach(|| {
            if give_up {
                self.inner.give_up_process_set_async(set)
            } else {
                self.inner.remove_process_set_async(set)
            }
        });
        Ok(Handle::new("remove_process_set", removed.or_raise(py)?))
    }
}
